"""Products through oneDNN: what F.linear and its gradients are, and F.linear itself wherever they do not apply."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from model import products
from model.model_minimind import FeedForward, MiniMindConfig
from model.products import (
    FEWEST_INPUTS, FEWEST_TOKENS, LargeGatedProduct, LargeProduct, Linear, gated, pack, plus, times,
)  # fmt: skip
from trainer.arguments import REPO_ROOT
from trainer.lora import add_lora

HAS_ONEDNN = products.can_pack(torch.float32)


def layer(inputs=FEWEST_INPUTS, outputs=24, **settings):
    torch.manual_seed(1)
    return Linear(inputs, outputs, **{"bias": False, **settings})


def called(monkeypatch) -> list:
    """What goes through oneDNN is noted here."""
    seen, apply = [], LargeProduct.apply
    monkeypatch.setattr(LargeProduct, "apply", lambda x, weight: seen.append(x.shape) or apply(x, weight))
    return seen


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_packed_weights_multiply_as_plain_ones(rows):
    torch.manual_seed(1)
    x, weight, other, bias = torch.randn(rows, 24), torch.randn(40, 24), torch.randn(40, 24), torch.randn(40)
    base = torch.randn(rows, 40)
    for first, second in ((weight, other), (pack(weight), pack(other))):
        torch.testing.assert_close(times(x, first), x @ weight.T, atol=1e-5, rtol=0)
        torch.testing.assert_close(times(x, first, bias), x @ weight.T + bias, atol=1e-5, rtol=0)
        torch.testing.assert_close(plus(base, x, first), base + x @ weight.T, atol=1e-5, rtol=0)
        torch.testing.assert_close(gated(x, first, second), F.silu(x @ weight.T) * (x @ other.T), atol=1e-4, rtol=1e-5)
    kept = base.clone()
    assert plus(base.double(), x, pack(weight)).dtype == torch.float64, "the sum is as precise as its base"
    assert base.equal(kept), "nothing is added in place"


@pytest.mark.skipif(not HAS_ONEDNN, reason="this torch has no oneDNN products")
def test_large_products_are_those_of_linear_in_value_and_gradient(monkeypatch):
    seen = called(monkeypatch)
    own, x = layer(), torch.randn(2, 40, FEWEST_INPUTS, requires_grad=True)
    weights = torch.randn(2, 40, 24)
    found = torch.autograd.grad((own(x) * weights).sum(), [x, own.weight])
    assert seen == [(80, FEWEST_INPUTS)]
    wanted = torch.autograd.grad((F.linear(x, own.weight) * weights).sum(), [x, own.weight])
    torch.testing.assert_close(own(x), F.linear(x, own.weight), atol=1e-5, rtol=0)
    for one, other in zip(found, wanted):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-5)


@pytest.mark.skipif(not HAS_ONEDNN, reason="this torch has no oneDNN products")
def test_gradients_are_worked_out_only_for_what_learns():
    x, weight = torch.randn(40, FEWEST_INPUTS), torch.randn(24, FEWEST_INPUTS)
    for x_learns, weight_learns in ((True, False), (False, True)):
        given = x.clone().requires_grad_(x_learns), weight.clone().requires_grad_(weight_learns)
        LargeProduct.apply(*given).sum().backward()
        assert (given[0].grad is not None, given[1].grad is not None) == (x_learns, weight_learns)


@pytest.mark.skipif(not HAS_ONEDNN, reason="this torch has no oneDNN products")
@pytest.mark.parametrize("learns", [True, False])
def test_a_gated_product_is_what_its_parts_are_in_value_and_gradient(learns):
    torch.manual_seed(3)
    gate, up = (torch.randn(40, FEWEST_INPUTS, requires_grad=True) for _ in range(2))
    weight, weights = torch.randn(24, FEWEST_INPUTS, requires_grad=learns), torch.randn(40, 24)
    given = [gate, up, weight] if learns else [gate, up]
    out, wanted_out = LargeGatedProduct.apply(gate, up, weight), F.linear(F.silu(gate) * up, weight)
    torch.testing.assert_close(out, wanted_out, atol=1e-4, rtol=1e-5)
    found, wanted = (torch.autograd.grad((x * weights).sum(), given) for x in (out, wanted_out))
    for one, other in zip(found, wanted):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-5)


def test_a_feed_forward_with_an_adapter_goes_through_it():
    torch.manual_seed(4)
    part = FeedForward(MiniMindConfig(hidden_size=FEWEST_INPUTS, num_hidden_layers=1, vocab_size=40), FEWEST_INPUTS)
    x = torch.randn(FEWEST_TOKENS, FEWEST_INPUTS)
    before = part(x)
    torch.testing.assert_close(before, part.down_proj(F.silu(part.gate_proj(x)) * part.up_proj(x)), atol=1e-5, rtol=0)
    add_lora(part, rank=2, alpha=4.0, seed=0)
    part.down_proj.lora_b.data.fill_(0.5)
    assert (part(x) - before).abs().max() > 0.01


@pytest.mark.parametrize("case", ["few tokens", "small weight", "bias", "double", "autocast", "no operator"])
def test_everything_else_is_plain(case, monkeypatch):
    seen = called(monkeypatch)
    own = layer(64 if case == "small weight" else FEWEST_INPUTS, bias=case == "bias")
    x = torch.randn(FEWEST_TOKENS - 1 if case == "few tokens" else 100, own.in_features)
    if case == "double":
        own, x = own.double(), x.double()
    if case == "no operator":
        monkeypatch.setattr(products, "can_pack", lambda dtype: False)
    with torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast"):
        assert own(x).equal(F.linear(x, own.weight, own.bias))
    assert not seen


def test_a_layer_is_saved_and_loaded_as_nn_linear():
    own, plain = layer(), torch.nn.Linear(FEWEST_INPUTS, 24, bias=False)
    plain.load_state_dict(own.state_dict())
    assert isinstance(own, torch.nn.Linear) and plain.weight.equal(own.weight)


GROWTH = """
import torch
from model.products import LargeProduct, can_pack
def resident():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmRSS")).split()[1]) // 1024
can_pack(torch.float32)
x, weight = torch.randn(640, 256), torch.randn(256, 256)
for tokens in range(64, 640):
    LargeProduct.apply(x[:tokens], weight)
    if tokens == 200:
        before = resident()
print(resident() - before)
"""


@pytest.mark.skipif(not HAS_ONEDNN or not Path("/proc/self/status").exists(), reason="needs oneDNN and Linux's /proc")
def test_memory_does_not_grow_with_every_new_number_of_tokens():
    """After 136 sizes, 440 more: half a megabyte each, unless what is kept for sizes is bounded."""
    plain = {name: value for name, value in os.environ.items() if name not in products.CACHES}
    grown = {}
    for name, more in (("bounded", {}), ("the user's", dict.fromkeys(products.CACHES, "1024"))):
        done = subprocess.run([sys.executable, "-c", GROWTH], cwd=REPO_ROOT, env={**plain, **more}, timeout=120,
                              capture_output=True, text=True)  # fmt: skip
        grown[name] = int(done.stdout)
    assert grown["bounded"] < 130 < 200 < grown["the user's"], grown
