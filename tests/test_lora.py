"""LoRA adapters: nothing changes at the start, only they learn, and the merged model is the model without them."""

import math

import pytest
import torch
from tiny_models import tiny
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import Qwen3Config, Qwen3ForCausalLM

from model.decode_step import effective_weight
from trainer.lora import (
    TARGETS, LoRALinear, adapter_off, add_lora, load_lora, lora_layers, lora_state, merge_lora,
)  # fmt: skip

IDS = torch.tensor([[5, 6, 7, 8, 9], [10, 11, 12, 13, 14]])
KINDS = {"dense": {}, "moe": {"use_moe": True}}


def adapted(kind="dense", **changes):
    """A tiny model with adapters of rank 3, scale 2."""
    model = tiny(**KINDS[kind], **changes)
    add_lora(model, rank=3, alpha=6.0, seed=1)
    return model


def trained(kind="dense", **changes):
    """The same after its adapters have moved."""
    model = adapted(kind, **changes)
    generator = torch.Generator().manual_seed(2)
    for layer in lora_layers(model).values():
        layer.lora_b.data.normal_(0, 0.1, generator=generator)
    return model


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


def test_one_layer_by_hand():
    base = nn.Linear(2, 1)
    base.weight.data, base.bias.data = torch.tensor([[1.0, 2.0]]), torch.tensor([0.5])
    layer = LoRALinear(base, 1, 4.0, torch.Generator())
    layer.lora_a.data, layer.lora_b.data = torch.tensor([[3.0, -1.0]]), torch.tensor([[0.25]])
    # [1, 1]: 1 + 2 + 0.5 = 3.5; A·x = 2, B·2 = 0.5, alpha / rank = 4: + 2
    x = torch.tensor([[1.0, 1.0]])
    assert layer(x).tolist() == [[5.5]]
    assert layer.merged_weight().tolist() == [[1 + 3, 2 - 1]]  # 4 · 0.25 · [3, -1]
    assert layer.weight is base.weight and layer.bias is base.bias
    layer(x).sum().backward()
    assert layer.lora_a.grad.tolist() == [[1, 1]] and layer.lora_b.grad.tolist() == [[8]]  # 4·B·x, 4·A·x


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_change_nothing_at_the_start(kind):
    plain, model = logits(tiny(**KINDS[kind])), adapted(kind)
    assert torch.equal(logits(model), plain)
    moved = trained(kind)
    assert not torch.equal(logits(moved), plain)
    with adapter_off(moved):
        assert torch.equal(logits(moved), plain)
    assert torch.equal(logits(moved), logits(trained(kind)))


def test_what_is_adapted():
    layers = lora_layers(adapted("moe"))
    assert len(layers) == 2 * (4 + 4 * 3)  # layers · (attention + experts · feed-forward)
    assert {name.rpartition(".")[2] for name in layers} == set(TARGETS)
    assert "model.layers.0.mlp.experts.3.down_proj" in layers and "model.layers.0.mlp.gate" not in layers
    layer = layers["model.layers.1.self_attn.k_proj"]
    assert layer.lora_a.shape == (3, 32) and layer.lora_b.shape == (16, 3) and (layer.lora_b == 0).all()
    assert layer.scale == 6.0 / 3
    assert layer.lora_a.abs().max() <= 1 / math.sqrt(32) and layer.lora_a.std() > 0.05


def test_starting_values_follow_from_the_seed_alone():
    torch.manual_seed(5)
    first = lora_state(adapted())["adapters"]
    torch.manual_seed(6)
    second = tiny()
    before = torch.random.get_rng_state()
    add_lora(second, rank=3, alpha=6.0, seed=1)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(tensor, lora_state(second)["adapters"][name]) for name, tensor in first.items())
    other = tiny()
    add_lora(other, rank=3, alpha=6.0, seed=2)
    a_names = [name for name in first if name.endswith("lora_a")]
    assert not any(torch.equal(first[name], lora_state(other)["adapters"][name]) for name in a_names)
    assert len({first[name].sum().item() for name in a_names}) == len(a_names)


@pytest.mark.parametrize("kind", KINDS)
def test_only_adapters_learn(kind):
    model = trained(kind).train()
    learns = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert learns == set(lora_state(model)["adapters"])
    out = model(IDS)
    (out.logits.square().mean() + out.aux_loss).backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == (name in learns), name
    # an expert that no token chose has a gradient of zero, which DDP needs; all others have one that is not
    assert all(parameter.grad.abs().sum() > 0 or ".experts." in name
               for name, parameter in model.named_parameters() if name in learns)  # fmt: skip

    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1).step()
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed and changed <= learns


def test_adapters_come_back_on_after_an_error_and_nest():
    model = trained()
    on = logits(model)
    with pytest.raises(KeyError), adapter_off(model):
        raise KeyError
    assert torch.equal(logits(model), on)
    with adapter_off(model):
        off = logits(model)
        with adapter_off(model):
            assert torch.equal(logits(model), off)
        assert torch.equal(logits(model), off)
    assert torch.equal(logits(model), on)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tie", [True, False])
def test_merged_is_the_plain_model_with_the_same_answers(kind, tie):
    model, plain = trained(kind, tie_word_embeddings=tie), tiny(**KINDS[kind], tie_word_embeddings=tie)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    merged = merge_lora(model)
    assert list(merged) == list(plain.state_dict())
    plain.load_state_dict(merged, strict=True)
    torch.testing.assert_close(logits(plain), logits(model), atol=1e-5, rtol=0)
    assert not any(tensor.requires_grad for tensor in merged.values())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    with adapter_off(model):  # the adapters are merged all the same
        name = next(iter(lora_layers(model))) + ".weight"
        assert torch.equal(merge_lora(model)[name], merged[name])


def test_the_base_keeps_its_names():
    plain, model = tiny().state_dict(), adapted()
    assert {name for name in model.state_dict() if "lora" not in name} == set(plain)
    missing, unexpected = model.load_state_dict(plain, strict=False)
    assert not unexpected and all("lora" in name for name in missing)
    for name, parameter in model.named_parameters():
        assert "lora" in name or torch.equal(parameter, plain[name])


def test_effective_weight_is_what_a_layer_multiplies_with():
    model = trained()
    attention = model.model.layers[0].self_attn
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(x @ effective_weight(attention.q_proj).T, attention.q_proj(x), atol=1e-5, rtol=0)
    with adapter_off(model):
        assert effective_weight(attention.q_proj) is attention.q_proj.weight
    assert effective_weight(model.lm_head) is model.lm_head.weight
    effective_weight(attention.q_proj).sum().backward()
    assert attention.q_proj.lora_a.grad is not None and attention.q_proj.weight.grad is None


def test_adapters_are_saved_alone_and_come_back(tmp_path):
    model = trained()
    torch.save(lora_state(model), tmp_path / "adapters.pth")
    state = torch.load(tmp_path / "adapters.pth", weights_only=True)
    assert sum(tensor.numel() for tensor in state["adapters"].values()) == sum(
        parameter.numel() for parameter in model.parameters() if parameter.requires_grad
    )
    for other in (tiny(), adapted()):  # with and without adapters to begin with
        load_lora(other, state)
        assert torch.equal(logits(other), logits(model))
        assert {name for name, p in other.named_parameters() if p.requires_grad} == set(state["adapters"])
    state["adapters"]["model.layers.0.self_attn.q_proj.lora_b"] += 1  # a saved state is a copy
    assert torch.equal(logits(other), logits(model))


def test_adapters_that_do_not_fit_are_refused_before_anything_changes():
    good = lora_state(trained())
    name = "model.layers.1.mlp.up_proj.lora_a"
    without = {key: tensor for key, tensor in good["adapters"].items() if key != name}
    cases = [
        ({**good, "alpha": 12.0}, "alpha 12.0.*alpha 6.0"),
        ({**good, "adapters": without}, f"{name} is nothing, expected"),
        ({**good, "adapters": {**good["adapters"], "model.x.lora_a": torch.zeros(1)}}, "model.x.lora_a.*nothing"),
        ({**good, "adapters": {**good["adapters"], name: torch.zeros(2, 32)}}, r"\(2, 32\), expected \(3, 32\)"),
    ]
    for state, message in cases:
        model = adapted()
        with pytest.raises(RuntimeError, match=message):
            load_lora(model, state)
        assert all((layer.lora_b == 0).all() for layer in lora_layers(model).values())


def test_models_that_cannot_take_or_have_no_adapters_are_refused():
    with pytest.raises(ValueError, match="rank is 0"):
        add_lora(tiny(), rank=0, alpha=1.0, seed=0)
    with pytest.raises(ValueError, match="has adapters already"):
        add_lora(adapted(), rank=3, alpha=1.0, seed=0)
    with pytest.raises(ValueError, match="no linear layer named q_proj"):
        add_lora(nn.Sequential(nn.Linear(2, 2)), rank=1, alpha=1.0, seed=0)
    for function in (lora_state, merge_lora, lambda model: adapter_off(model).__enter__()):
        with pytest.raises(ValueError, match="no LoRA adapters"):
            function(tiny())


def test_under_ddp_and_autocast(tmp_path):
    """One process is a group too: DDP takes the frozen parameters, and names are seen through its wrapper."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = DistributedDataParallel(trained("moe").train())
        with adapter_off(model), torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            reference = model.module(IDS).logits
            torch.testing.assert_close(reference, tiny(use_moe=True)(IDS).logits, atol=0, rtol=0)
        with torch.autocast("cpu", torch.bfloat16):
            out = model(IDS)
            assert out.logits.dtype == torch.bfloat16 and not torch.equal(out.logits, reference)
            (out.logits.float().square().mean() + out.aux_loss).backward()
        grads = [p.grad for p in model.parameters() if p.requires_grad]
        assert all(grad is not None and grad.dtype == torch.float32 and grad.isfinite().all() for grad in grads)
        assert set(lora_state(model)["adapters"]) == set(lora_state(model.module)["adapters"])
        assert list(merge_lora(model)) == list(tiny(use_moe=True).state_dict())
    finally:
        torch.distributed.destroy_process_group()


def test_a_model_of_transformers_takes_adapters_too():
    torch.manual_seed(0)
    config = Qwen3Config(vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, head_dim=8)  # fmt: skip
    model = Qwen3ForCausalLM(config).eval()
    plain = logits(model)
    add_lora(model, rank=2, alpha=2.0, seed=0)
    assert len(lora_layers(model)) == 14 and torch.equal(logits(model), plain)
    for layer in lora_layers(model).values():
        layer.lora_b.data.fill_(0.05)
    copy = Qwen3ForCausalLM(config).eval()
    copy.load_state_dict(merge_lora(model), strict=True)
    torch.testing.assert_close(logits(copy), logits(model), atol=1e-5, rtol=0)
    assert not torch.equal(logits(model), plain)
