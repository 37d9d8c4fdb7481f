"""Norms, padding, rotary positions and experts, worked by hand."""

import math

import pytest
import torch
from tiny_models import tiny

from model.configuration import rotary_frequencies, rotary_tables
from model.layout import Collect, Spread
from model.model_minimind import MiniMindConfig, MOEFeedForward
from model.norm import Norm, RMSNorm


# ---- norms ----


def numbers(*shape) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.manual_seed(1)).requires_grad_()


@pytest.mark.parametrize("shape", [(3, 8), (2, 3, 8), (0, 8)])
def test_norm_and_its_gradients(shape):
    x, weight = numbers(*shape), numbers(8)
    # an eps that counts beside the mean square, and one that does not
    for eps in (0.5, 1e-6):
        expected = x / (x.square().mean(dim=-1, keepdim=True) + eps).sqrt() * weight
        torch.testing.assert_close(Norm.apply(x, weight, eps), expected)
        assert torch.autograd.gradcheck(lambda *given, eps=eps: Norm.apply(*given, eps), (x, weight))
    assert torch.autograd.gradcheck(lambda given: Norm.apply(given, weight.detach(), eps), x)
    assert torch.autograd.gradcheck(lambda given: Norm.apply(x.detach(), given, eps), weight)


def test_norm_is_torch_s_in_every_precision():
    norm = RMSNorm(64, 1e-6)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 1.5, generator=torch.manual_seed(2))
    x = 3 * torch.randn(5, 64)
    for dtype, bound in ((torch.float32, 1e-6), (torch.bfloat16, 2**-7)):
        given = x.to(dtype)
        expected = torch.nn.functional.rms_norm(given.float(), (64,), norm.weight, 1e-6)
        found = norm(given)
        assert found.dtype == dtype
        torch.testing.assert_close(found.float(), expected, atol=bound, rtol=bound)
    assert torch.isnan(norm(torch.full((1, 64), math.inf))).all()


# ---- padding ----


def test_spread_and_collect_undo_each_other_with_their_gradients():
    places = torch.tensor([4, 0, 3])
    x, wide = numbers(3, 2), numbers(6, 2)
    spread = Spread.apply(x, places, 6)
    assert spread[[1, 2, 5]].eq(0).all() and Collect.apply(spread, places).equal(x)
    for checked in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert checked(lambda given: Spread.apply(given, places, 6), x)
        assert checked(lambda given: Collect.apply(given, places), wide)


# ---- rotary positions ----


def test_yarn_slows_the_long_waves_by_hand():
    # pairs turning 32 and 1 times in 2048 positions: 8·ln(2048/(32·2π))/(2·ln 1e6) = 0.67 and 8·ln(2048/2π)/(2·ln 1e6)
    # = 1.68, so the ramp runs from pair 0 to pair 2: 0, 1/2, 1, 1, and factors 1, 1/2 + 1/32, 1/16, 1/16
    plain = rotary_frequencies(MiniMindConfig(64, 2))
    slowed = rotary_frequencies(MiniMindConfig(64, 2, inference_rope_scaling=True))
    torch.testing.assert_close(plain, torch.tensor([1.0, 10**-1.5, 1e-3, 10**-4.5]))
    torch.testing.assert_close(slowed / plain, torch.tensor([1.0, 0.53125, 0.0625, 0.0625]))
    short = MiniMindConfig(64, 2, inference_rope_scaling=True, max_position_embeddings=2048)
    assert rotary_frequencies(short).equal(plain)


def test_rotary_tables_by_hand():
    cos, sin = rotary_tables(MiniMindConfig(32, 2), 3, torch.device("cpu"))  # head_dim 4: frequencies 1 and 0.001
    want = [math.cos(2), math.cos(0.002)]
    torch.testing.assert_close(cos[2], torch.tensor(want + want))
    want = [math.sin(2), math.sin(0.002)]
    torch.testing.assert_close(sin[2], torch.tensor([-want[0], -want[1], *want]))


def test_rotary_tables_grow_without_changing_and_are_never_rounded():
    model = tiny()
    ids = torch.randint(3, 40, (1, 300))
    with torch.inference_mode():
        short = model(ids[:, :200]).logits.clone()
    model(ids[:, :200]).logits.sum().backward()  # a table made under inference_mode must serve in training
    table = model.model._cos
    assert len(table) == 256
    grown = model(ids).logits
    grown.sum().backward()
    torch.testing.assert_close(grown[:, :200], short, atol=1e-5, rtol=0)
    assert len(model.model._cos) == 512 and model.model._cos[:256].equal(table)
    model.half()(ids[:, :8])
    assert model.model._cos.dtype == torch.float32
    assert "_cos" not in " ".join(model.state_dict()) and list(model.buffers()) == []


# ---- experts ----


def expert_layer(**changes) -> MOEFeedForward:
    torch.manual_seed(1)
    layer = MOEFeedForward(MiniMindConfig(16, 1, use_moe=True, **changes))
    layer.gate.weight.data.zero_()
    layer.gate.weight.data[torch.arange(4), torch.arange(4)] = 1.0  # the gate reads the first four features
    return layer


def test_balance_loss_by_hand_and_without_padding():
    layer = expert_layer(router_aux_loss_coef=0.1).train()
    x = torch.zeros(1, 4, 16)
    x[0, 0, 0] = x[0, 1, 0] = math.log(3.0)  # probabilities 1/2, 1/6, 1/6, 1/6: expert 0
    x[0, 2, 1] = math.log(3.0)  # expert 1
    x[0, 3, 2] = 1e4  # padding
    real = torch.tensor([[True, True, True, False]])
    # shares 2/3, 1/3; means (1/2 + 1/2 + 1/6)/3 = 7/18 and (1/6 + 1/6 + 1/2)/3 = 5/18: 0.1·4·(14/54 + 5/54)
    assert layer(x, real)[1].item() == pytest.approx(0.4 * 19 / 54, abs=1e-6)
    assert layer(x[:, :3], None)[1].item() == pytest.approx(0.4 * 19 / 54, abs=1e-6)
    assert layer.eval()(x, real)[1].item() == 0.0


def test_balance_loss_moves_the_gate_through_the_mean_probability():
    layer = expert_layer().train()
    x = torch.zeros(1, 3, 16)
    x[0, :, 0] = 1.0  # all three tokens to expert 0: the loss is coefficient · E · p0
    p0 = math.e / (math.e + 3)
    layer(x, None)[1].backward()
    # d p0 / d logit0 = p0·(1 - p0), and feature 0 is 1
    assert layer.gate.weight.grad[0, 0].item() == pytest.approx(5e-4 * 4 * p0 * (1 - p0), rel=1e-5)


def test_each_token_goes_through_its_expert_and_an_idle_one_gets_zero_gradient():
    layer = expert_layer()
    x = torch.zeros(1, 3, 16)
    x[0, 0, 2] = x[0, 1, 0] = x[0, 2, 2] = 3.0
    out = layer(x, None)[0]
    want = torch.stack([layer.experts[2](x[0, 0]), layer.experts[0](x[0, 1]), layer.experts[2](x[0, 2])])
    torch.testing.assert_close(out[0], want)
    out.square().sum().backward()
    for expert, busy in zip(layer.experts, [True, False, True, False], strict=True):
        gradient = expert.up_proj.weight.grad
        assert gradient is not None and bool(gradient.abs().sum() > 0) is busy


@pytest.mark.parametrize("normed", [True, False])
def test_two_experts_a_token_are_weighted_by_their_probabilities(normed):
    layer = expert_layer(num_experts_per_tok=2, norm_topk_prob=normed)
    x = torch.zeros(1, 1, 16)
    x[0, 0, 3], x[0, 0, 1] = math.log(5.0), math.log(2.0)  # probabilities 5/9, 2/9, 1/9, 1/9
    a, b = (5 / 7, 2 / 7) if normed else (5 / 9, 2 / 9)
    want = a * layer.experts[3](x) + b * layer.experts[1](x)
    torch.testing.assert_close(layer(x, None)[0], want)
    scores = layer.gate(x[0]).softmax(dim=-1)
    weights, picks = scores.topk(2, dim=-1)
    torch.testing.assert_close(layer._through_all(x[0], weights, picks), layer._through_picked(x[0], weights, picks))
