"""One step of decoding: from one token a row to the logits of the next one, in few and large operations.

It computes what the model's forward computes (tests compare the two), arranged for a handful of rows and no gradient:
weights are stacked, cast and packed once a rollout instead of once a token. What earlier tokens left behind, and the
attention to it, is in decode_cache.py.

Letters: n rows still running, H hidden size, D head size, V vocabulary.
"""

from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.configuration import rotary_tables
from model.decode_cache import GroupCache, RowCache, RunningCache, fill_holes
from model.kv_cache import KVCache
from model.norm import inverse_rms
from model.products import PAIR, gated, multiplies_pairs, pack, plus, times

FEWEST_ROWS = 4  # a product of packed weights with one or two rows takes a third longer than with four
FEW_TOKENS = 1024  # of prompts not held again: up to here a GroupCache's additional operations cost more than they save
STATIC_SLOTS = 128  # a compiled step has a multiple of so many slots: rollouts of nearly the same length share it


def effective_weight(linear: nn.Linear) -> Tensor:
    """The matrix a linear layer multiplies with, [out, in]; a LoRA layer's contains its adapter while that is on."""
    return linear.merged_weight() if getattr(linear, "adapter_on", False) else linear.weight


class LayerWeights(NamedTuple):
    """Weights of one layer; those of norms are float32, the others in the dtype that products are computed in."""

    attention_norm: Tensor  # [H]
    qkv: Tensor  # queries', keys' and values' weights under one another
    qk_norm: Tensor  # [heads + kv heads, D]
    out: Tensor
    mlp_norm: Tensor  # [H]
    gate: Tensor | None  # these three are None where there are experts
    up: Tensor | None
    down: Tensor | None
    experts: nn.Module | None


class DecodeStep:
    """Callable on token ids [n]: reads them and gives the logits [n, V] of the next ones; no grad.

    Made from the keys and values of B prompts; row i continues prompt i // copies, for at most max_new tokens.
    """

    static = False  # True: no shape, and nothing but tensors, changes from step to step

    def __init__(self, model: nn.Module, prompts: KVCache, copies: int, max_new: int):
        config, device = model.config, prompts.lengths.device
        self.heads, self.kv_heads, self.head_dim = (
            config.num_attention_heads, config.num_key_value_heads, config.head_dim
        )  # fmt: skip
        self.eps = torch.full((), config.rms_norm_eps, device=device)
        self.embedding = model.model.embed_tokens.weight.detach()
        autocast = torch.is_autocast_enabled(device.type)
        self.dtype = torch.get_autocast_dtype(device.type) if autocast else self.embedding.dtype
        self.positions = prompts.lengths.repeat_interleave(copies)
        self.in_pairs = not self.static and len(self.positions) <= PAIR and multiplies_pairs(device, self.dtype)
        # adapters are merged in the precision of the weights, and the sum is cast
        with torch.autocast(device.type, enabled=False):
            self.layers = [self._layer_weights(layer) for layer in model.model.layers]
            self.norm = model.model.norm.weight.detach().float()
            self.head, self.head_bias = self._product_weight(model.lm_head.weight), model.lm_head.bias
            if self.head_bias is not None:
                self.head_bias = self.head_bias.detach().to(self.dtype)
        self.fewest = PAIR if self.in_pairs else FEWEST_ROWS if self.layers[0].qkv.is_mkldnn else 1
        spare = max(self.fewest - len(self.positions), 0)
        self.positions = F.pad(self.positions, (0, spare))
        self.cache = self._new_cache(prompts, copies, max_new, spare)
        self.cos, self.sin = rotary_tables(config, prompts.filled + max_new, device)

    def _new_cache(self, prompts: KVCache, copies: int, max_new: int, spare: int) -> RunningCache:
        few = spare > 0 or len(prompts.lengths) * (copies - 1) * prompts.filled <= FEW_TOKENS
        if few or self.dtype != torch.float32 or self.positions.is_cuda:
            return RowCache(prompts, copies, max_new, spare)
        return GroupCache(prompts, copies)

    def _product_weight(self, *weights: Tensor) -> Tensor:
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        weight = weight.detach().to(self.dtype)
        # a compiler sees nothing in a packed one
        return weight if self.static or self.in_pairs else pack(weight)

    def _layer_weights(self, layer: nn.Module) -> LayerWeights:
        attention, mlp = layer.self_attn, layer.mlp
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        # what divides the scores is divided into the queries here
        norms = [(attention.q_norm.weight * self.head_dim**-0.5).expand(self.heads, -1),
                 attention.k_norm.weight.expand(self.kv_heads, -1)]  # fmt: skip
        dense = hasattr(mlp, "gate_proj")
        return LayerWeights(
            attention_norm=layer.input_layernorm.weight.detach().float(),
            qkv=self._product_weight(*[effective_weight(x) for x in projections]),
            qk_norm=torch.cat(norms).float(),
            out=self._product_weight(effective_weight(attention.o_proj)),
            mlp_norm=layer.post_attention_layernorm.weight.detach().float(),
            gate=self._product_weight(effective_weight(mlp.gate_proj)) if dense else None,
            up=self._product_weight(effective_weight(mlp.up_proj)) if dense else None,
            down=self._product_weight(effective_weight(mlp.down_proj)) if dense else None,
            experts=None if dense else mlp,
        )

    def __call__(self, token: Tensor) -> Tensor:
        self.cache.next_slot()
        spare = len(self.positions) - len(token)
        logits = self.read(F.pad(token, (0, spare)) if spare else token)[: len(token)]
        self.positions.add_(1)
        return logits

    def read(self, token: Tensor) -> Tensor:
        """Logits [n, V] from token ids [n] at `positions`."""
        rotary = self.cos[self.positions, None], self.sin[self.positions, None]
        hidden = self.embedding[token]
        for number, layer in enumerate(self.layers):
            q, kv = self._queries_keys_values(self._normed(hidden, layer.attention_norm), layer, *rotary)
            hidden = plus(hidden, self.cache.attend(number, q, kv), layer.out)
            normed = self._normed(hidden, layer.mlp_norm)
            if layer.experts is None:
                hidden = plus(hidden, gated(normed, layer.gate, layer.up), layer.down)
            else:
                hidden = hidden + layer.experts(normed, None)[0]
        return times(self._normed(hidden, self.norm), self.head, self.head_bias)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        x = x.float()
        return (x * inverse_rms(x, self.eps)).mul_(weight).to(self.dtype)

    def _queries_keys_values(self, x: Tensor, layer: LayerWeights, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Normed, scaled and rotated queries [n, heads, D]; normed and rotated keys, and values [2, n, kv heads, D]."""
        qkv = times(x, layer.qkv).view(len(x), -1, self.head_dim)
        qk = qkv[:, : self.heads + self.kv_heads]
        normed = self._normed(qk, layer.qk_norm)
        qk.copy_((normed * cos).addcmul_(normed.roll(self.head_dim // 2, dims=-1), sin))
        return qkv[:, : self.heads], qkv[:, self.heads :].unflatten(1, (2, -1)).transpose(0, 1)

    def keep_rows(self, holes: Tensor, fillers: Tensor, left: int) -> None:
        """Go on with `left` rows; see fill_holes. Where they are too few, what stands behind them stays and is read
        too, in vain."""
        left = max(left, self.fewest)
        self.positions = fill_holes(self.positions, holes, fillers, left)
        self.cache.keep_rows(holes, fillers, left)


class CompiledStep(DecodeStep):
    """A DecodeStep through torch.compile, on CUDA replayed as a CUDA graph. Rows that ended stay in it.

    A graph holds addresses of memory: `take_over` gives a step new weights and prompts and leaves every tensor in its
    place, so that a rollout need not compile or record again what an earlier one of the same sizes did.
    """

    static = True

    def __init__(self, model: nn.Module, prompts: KVCache, copies: int, max_new: int):
        max_new += -(prompts.filled + max_new) % STATIC_SLOTS
        super().__init__(model, prompts, copies, max_new)
        self.memory = self._memory(model)
        if self.positions.is_cuda:
            for tensor, _ in self.memory:
                torch._dynamo.mark_static_address(tensor, guard=False)
        self.compiled = torch.compile(self.read, mode="reduce-overhead" if self.positions.is_cuda else "default")

    def _new_cache(self, prompts: KVCache, copies: int, max_new: int, spare: int) -> RunningCache:
        return RowCache(prompts, copies, max_new, static=True)

    def __call__(self, token: Tensor) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        self.cache.next_slot()
        logits = self.compiled(token)
        self.positions.add_(1)
        return logits

    def _memory(self, model: nn.Module) -> list[tuple[Tensor, bool]]:
        """Every tensor a step reads or writes (experts' weights left out), and whether it is not the model's own."""
        weights = [x for layer in self.layers for x in layer if isinstance(x, Tensor)]
        rest = [self.eps, self.embedding, self.norm, self.head, self.head_bias, self.cos, self.sin, self.positions]
        cache = [*self.cache.store, self.cache.slot, self.cache.bias]
        parameters = {parameter.data_ptr() for parameter in model.parameters()}
        return [(x, x.data_ptr() not in parameters) for x in weights + rest + cache if x is not None]

    def take_over(self, other: "CompiledStep") -> bool:
        """Become `other`, in this one's memory; False, and nothing is done, if they are of different shape."""
        if self._shape() != other._shape():
            return False
        for (mine, own), (new, _) in zip(self.memory, other.memory):
            if own:
                mine.copy_(new)
        self.cache.filled = other.cache.filled
        return True

    def _shape(self) -> list[tuple]:
        tensors = [(x.shape, x.dtype, x.device, own or x.data_ptr()) for x, own in self.memory]
        return tensors + [(id(layer.experts),) for layer in self.layers]


_KEPT: WeakKeyDictionary = WeakKeyDictionary()  # the last compiled step of a model


def compiled_step(model: nn.Module, prompts: KVCache, copies: int, max_new: int) -> CompiledStep:
    """A CompiledStep: the model's last one, if it was of the same shape."""
    fresh = CompiledStep(model, prompts, copies, max_new)
    kept = _KEPT.get(model)
    if kept is not None and kept.take_over(fresh):
        return kept
    _KEPT[model] = fresh
    return fresh
