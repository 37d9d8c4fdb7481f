"""Entropy of next-token distributions, alone and together with log-probs: numbers by hand, gradients by differences."""

import math

import pytest
import torch
from handwork import INF, NAN, assert_close, gradient, mask_of, tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trainer import rl_math
from trainer.rl_math import logps_and_entropy, masked_mean, selective_logps, token_entropy


def random_logits(*shape, seed=0, scale=3.0, dtype=torch.float64):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def reference_entropy(row: list[float], temperature: float) -> float:
    """-sum p log p of one row of logits, with plain floats."""
    largest = max(row)
    weights = [math.exp((logit - largest) / temperature) for logit in row]
    return -sum(w / sum(weights) * math.log(w / sum(weights)) for w in weights if w > 0)


def test_entropies_by_hand():
    # uniform over 4: log 4; p = (1/2, 1/4, 1/4): 1/2·log 2 + 1/2·log 4 = 1.5·log 2; one sure token: 0
    logits = torch.tensor([[[0.0, 0, 0, 0], [math.log(2), 0, 0, -INF], [0, -INF, -INF, -INF], [7e4, 0, 0, 0]]])
    assert_close(token_entropy(logits, temperature=1.0), [[math.log(4), 1.5 * math.log(2), 0, 0]])
    # logits (2·log 2, 0) at temperature 2 are p = (2/3, 1/3); at temperature 1 they are (4/5, 1/5)
    logits = torch.tensor([[[2 * math.log(2), 0.0]]])
    assert_close(token_entropy(logits, temperature=2.0), [[math.log(3) - 2 / 3 * math.log(2)]])
    assert_close(token_entropy(logits, temperature=1.0), [[math.log(5) - 4 / 5 * math.log(4)]])


def test_the_gradient_by_hand():
    # p = (2/3, 1/3), H = log 3 - 2/3·log 2: -p·(log p + H) = (-2/9·log 2, 2/9·log 2); temperature 2 halves it
    grad = gradient(lambda x: token_entropy(x, temperature=2.0).sum(), torch.tensor([[[2 * math.log(2), 0.0]]]))
    assert_close(grad, [[[-math.log(2) / 9, math.log(2) / 9]]])
    # ruled out tokens have no gradient, and leave the others theirs
    grad = gradient(lambda x: token_entropy(x, temperature=1.0).sum(), torch.tensor([[[math.log(2), 0.0, -INF]]]))
    assert_close(grad, [[[-2 / 9 * math.log(2), 2 / 9 * math.log(2), 0]]])


@pytest.mark.parametrize("block_elements", [1, 12, 1 << 24])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_against_plain_floats_and_against_autograd(monkeypatch, block_elements, temperature):
    monkeypatch.setattr(rl_math, "BLOCK_ELEMENTS", block_elements)
    logits = random_logits(3, 4, 5)
    expected = [[reference_entropy(row, temperature) for row in rows] for rows in logits.tolist()]
    assert_close(token_entropy(logits, temperature=temperature), expected, atol=1e-12)
    assert_close(token_entropy(logits.float(), temperature=temperature), expected)

    def plain(x):
        logps = (x / temperature).log_softmax(-1)
        return -(logps.exp() * logps).sum(-1)

    weights = random_logits(3, 4, seed=1)
    actual = gradient(lambda x: (token_entropy(x, temperature=temperature) * weights).sum(), logits)
    assert_close(actual, gradient(lambda x: (plain(x) * weights).sum(), logits), atol=1e-12)


def test_gradients_by_finite_differences(monkeypatch):
    monkeypatch.setattr(rl_math, "BLOCK_ELEMENTS", 10)
    logits, targets = random_logits(2, 3, 5).requires_grad_(), torch.tensor([[0, 4, 2], [1, 1, 3]])
    assert torch.autograd.gradcheck(lambda x: selective_logps(x, targets, temperature=0.7), logits)
    assert torch.autograd.gradcheck(lambda x: token_entropy(x, temperature=0.7), logits)
    assert torch.autograd.gradcheck(lambda x: logps_and_entropy(x, targets, temperature=0.7), logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_together_they_are_what_they_are_alone(dtype):
    logits, targets = random_logits(3, 4, 9, dtype=torch.float32).to(dtype), torch.arange(12).view(3, 4) % 9
    logps, entropy = logps_and_entropy(logits, targets, temperature=0.8)
    assert logps.dtype == entropy.dtype == torch.float32
    assert torch.equal(logps, selective_logps(logits, targets, temperature=0.8))
    assert torch.equal(entropy, token_entropy(logits, temperature=0.8))

    # unused, the entropy leaves the gradient of the log-probs as it was, to the bit
    weights = torch.linspace(-1, 1, 12).view(3, 4)
    alone = gradient(lambda x: (selective_logps(x, targets, temperature=0.8) * weights).sum(), logits)
    unused = gradient(lambda x: (logps_and_entropy(x, targets, temperature=0.8)[0] * weights).sum(), logits)
    assert torch.equal(alone, unused)
    entropies = gradient(lambda x: token_entropy(x, temperature=0.8).sum(), logits)

    def both(x):
        logps, entropy = logps_and_entropy(x, targets, temperature=0.8)
        return (logps * weights).sum() + entropy.sum()

    tolerance = 1e-6 if dtype == torch.float32 else 1e-2  # each part is rounded to the logits' dtype
    assert_close(gradient(both, logits).float(), (alone + entropies).float(), atol=tolerance)


@pytest.mark.parametrize("garbage", [NAN, INF, -INF])
def test_logits_of_padding_may_hold_anything(garbage):
    logits = torch.tensor([[[1.0, 2.0], [garbage, garbage]]])
    mask = mask_of([1, 0])

    def loss(x):
        logps, entropy = logps_and_entropy(x, torch.tensor([[1, 1]]), temperature=1.0)
        return masked_mean(logps, mask) + masked_mean(entropy, mask)

    p = 1 / (1 + math.e)  # softmax([1, 2])[0]; d entropy / d logit 0 = -p·(log p + H) = -p·(1 - p)·(log p - log(1 - p))
    slope = p * (1 - p)
    assert loss(logits).isfinite()
    assert_close(gradient(loss, logits), [[[-p + slope, p - slope], [0, 0]]])


class _LargestFloat32(TorchDispatchMode):
    """Remembers the size of the largest float32 tensor made while it is active."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dtype == torch.float32:
            self.largest = max(self.largest, out.numel())
        return out


def test_neither_way_holds_all_logits_in_float32(monkeypatch):
    monkeypatch.setattr(rl_math, "BLOCK_ELEMENTS", 64)
    logits = torch.randn(4, 8, 32).bfloat16().requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda stored: stored), _LargestFloat32() as seen:
        logps, entropy = logps_and_entropy(logits, torch.zeros(4, 8, dtype=torch.long), temperature=0.8)
    assert 0 < seen.largest <= 64
    assert all(kept.numel() <= 4 * 8 for kept in saved if kept.dtype == torch.float32)

    logits.grad = None
    logps, entropy = logps_and_entropy(logits, torch.zeros(4, 8, dtype=torch.long), temperature=0.8)
    with _LargestFloat32() as seen:
        (logps.sum() + entropy.sum()).backward()
    assert 0 < seen.largest <= 64
    assert logits.grad.dtype == torch.bfloat16

    with torch.no_grad():
        assert token_entropy(logits, temperature=0.8).grad_fn is None


@pytest.mark.parametrize("temperature", [0, -1.0, NAN, INF])
def test_temperature_must_be_positive(temperature):
    for function in (token_entropy, lambda x, **k: logps_and_entropy(x, torch.zeros(1, 1, dtype=torch.long), **k)):
        with pytest.raises(ValueError, match="temperature"):
            function(torch.zeros(1, 1, 2), temperature=temperature)


def test_shapes_must_fit():
    with pytest.raises(ValueError, match=r"\(2, 4, 5\).*\(2, 3\)"):
        logps_and_entropy(torch.zeros(2, 4, 5), torch.zeros(2, 3, dtype=torch.long), temperature=1.0)
    with pytest.raises(ValueError, match=r"\(2, 3\)"):
        token_entropy(tensor([1, 2, 3], [4, 5, 6]), temperature=1.0)
    for shape in [(0, 3, 4), (2, 0, 4)]:
        assert token_entropy(torch.zeros(shape), temperature=1.0).shape == shape[:2]
