"""LoRA: small trainable adapters beside frozen linear layers (Hu et al. 2021, arXiv 2106.09685).

W·x becomes W·x + (alpha / rank) · B·(A·x) with A [rank, in] random and B [out, rank] zero, so nothing changes at the
start. Only A and B learn. With the adapters off the model is the one it started from: a reference without a second
copy. Works on any model whose projections are nn.Linear and named as Llama, Qwen3 and MiniMind name them.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.products import Linear
from trainer.distributed import unwrap_model

# Of attention and feed-forward, experts' included; the experts' router (`gate`), embedding and head stay as they are.
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ADAPTER = ("lora_a", "lora_b")


class LoRALinear(Linear):
    """A linear layer and its adapter. It takes over the layer's own weight and bias, under the names they had."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float, generator: torch.Generator):
        super().__init__(base.in_features, base.out_features, bias=base.bias is not None, device="meta")
        self.weight, self.bias = base.weight, base.bias
        bound = base.in_features**-0.5  # as in the authors' loralib
        start = torch.empty(rank, base.in_features).uniform_(-bound, bound, generator=generator)
        self.lora_a = nn.Parameter(start.to(base.weight))
        self.lora_b = nn.Parameter(base.weight.new_zeros(base.out_features, rank))
        self.alpha, self.scale, self.adapter_on = alpha, alpha / rank, True

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if not self.adapter_on:
            return out
        return out + self.scale * F.linear(F.linear(x, self.lora_a), self.lora_b)

    def merged_weight(self) -> Tensor:
        """weight + (alpha / rank) · B·A, [out, in]; grad flows to A and B."""
        return self.weight + self.scale * (self.lora_b @ self.lora_a)


def lora_layers(model: nn.Module) -> dict[str, LoRALinear]:
    """The layers with an adapter by name, whatever DDP and torch.compile wrapped around the model.

    Raises: ValueError if there is none.
    """
    layers = {name: layer for name, layer in unwrap_model(model).named_modules() if isinstance(layer, LoRALinear)}
    if not layers:
        raise ValueError(f"{type(unwrap_model(model)).__name__} has no LoRA adapters: call add_lora on it first")
    return layers


def add_lora(model: nn.Module, *, rank: int, alpha: float, seed: int) -> None:
    """Freeze every parameter of the model and give each projection an adapter; before DDP, compile and the optimizer.

    The adapters start from `seed` alone, equal on every rank and device. A head of its own (a critic's) is frozen too:
    set its requires_grad again.
    Raises: ValueError for a rank below 1, for a model that has adapters, or one without a projection to adapt.
    """
    if rank < 1:
        raise ValueError(f"rank is {rank}, expected at least 1")
    found = [(parent, name, layer) for parent in model.modules() for name, layer in parent.named_children()
             if name in TARGETS and isinstance(layer, nn.Linear)]  # fmt: skip
    if not found or any(isinstance(layer, LoRALinear) for _, _, layer in found):
        state = "has adapters already" if found else f"has no linear layer named {', '.join(TARGETS)}"
        raise ValueError(f"cannot add LoRA: {type(model).__name__} {state}")
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for parent, name, layer in found:
        setattr(parent, name, LoRALinear(layer, rank, alpha, generator).train(layer.training))


@contextmanager
def adapter_off(model: nn.Module) -> Iterator[None]:
    """Inside, the model is what it was before it learnt anything: the frozen reference. Gradients: the caller's say."""
    layers = [layer for layer in lora_layers(model).values() if layer.adapter_on]
    for layer in layers:
        layer.adapter_on = False
    try:
        yield
    finally:
        for layer in layers:
            layer.adapter_on = True


class AdapterOff(nn.Module):
    """A model as it was before it learnt anything, callable like it: the frozen reference, without a second copy."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.__dict__["_orig_mod"] = model  # where unwrap_model looks; not a submodule, its weights are the policy's

    def forward(self, *args, **kwargs):
        with adapter_off(self._orig_mod):
            return self._orig_mod(*args, **kwargs)


# ---------------------------------------------------------------------------------------------- to and from files
def lora_state(model: nn.Module) -> dict:
    """The adapters alone, on the CPU: {"rank", "alpha", "adapters": {"layer name.lora_a": tensor, …}}."""
    layers = lora_layers(model)
    first = next(iter(layers.values()))
    adapters = {f"{name}.{part}": getattr(layer, part).detach().cpu().clone()
                for name, layer in layers.items() for part in ADAPTER}  # fmt: skip
    return {"rank": first.lora_a.shape[0], "alpha": first.alpha, "adapters": adapters}


@torch.no_grad()
def load_lora(model: nn.Module, state: dict) -> None:
    """Put saved adapters into a model; one without adapters is given them, frozen as by `add_lora`.

    Raises: RuntimeError naming the first thing that does not fit, before any adapter is overwritten.
    """
    if not any(isinstance(layer, LoRALinear) for layer in model.modules()):
        add_lora(model, rank=state["rank"], alpha=state["alpha"], seed=0)
    layers = lora_layers(model)
    own = {f"{name}.{part}": getattr(layer, part) for name, layer in layers.items() for part in ADAPTER}
    alpha = next(iter(layers.values())).alpha
    if alpha != state["alpha"]:
        raise RuntimeError(f"these adapters were trained with alpha {state['alpha']}, the model's have alpha {alpha}")
    for name in sorted(own.keys() | state["adapters"].keys()):
        shapes = [tuple(tensors[name].shape) if name in tensors else "nothing" for tensors in (state["adapters"], own)]
        if shapes[0] != shapes[1]:
            raise RuntimeError(f"these adapters do not fit the model: {name} is {shapes[0]}, expected {shapes[1]}")
    for name, tensor in own.items():
        tensor.copy_(state["adapters"][name])


def merge_lora(model: nn.Module) -> dict[str, Tensor]:
    """A plain state dict with the adapters merged in, under the names the model had without them; for export.

    The model stays as it is: what has no adapter is shared with it, merged weights are new. No gradient.
    """
    layers, merged = lora_layers(model), {}
    for name, tensor in unwrap_model(model).state_dict().items():
        layer, _, part = name.rpartition(".")
        if layer in layers and part in ADAPTER:
            continue
        merged[name] = layers[layer].merged_weight().detach() if layer in layers and part == "weight" else tensor
    return merged


def plain_state(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of a model under the names it has without adapters, which are merged in if it has any."""
    return merge_lora(model) if has_adapters(model) else unwrap_model(model).state_dict()


def has_adapters(model: nn.Module) -> bool:
    return any(isinstance(layer, LoRALinear) for layer in unwrap_model(model).modules())
