"""Truncated importance sampling, against arithmetic done by hand."""

import math

import pytest
import torch

from trainer.tis import truncated_importance_weights


def test_weights_by_hand():
    # differences 0, ln 1.5, ln 0.5, ln 8: ratios 1, 1.5, 0.5, 8, the last capped at 2
    rollout = torch.tensor([[-1.0, -2.0, -0.5, -3.0]])
    old = rollout + torch.tensor([[0.0, math.log(1.5), math.log(0.5), math.log(8.0)]])
    weights = truncated_importance_weights(old, rollout, torch.ones(1, 4, dtype=torch.bool), cap=2.0)
    torch.testing.assert_close(weights, torch.tensor([[1.0, 1.5, 0.5, 2.0]]), atol=1e-6, rtol=0)


def test_the_trainers_probability_is_above_the_line():
    """weight = trainer / engine: a token the engine drew too often counts less."""
    mask = torch.ones(1, 1, dtype=torch.bool)
    engine, trainer = torch.tensor([[math.log(0.5)]]), torch.tensor([[math.log(0.25)]])
    assert truncated_importance_weights(trainer, engine, mask, cap=2.0).item() == pytest.approx(0.5, abs=1e-6)


def test_padding_weighs_one_whatever_it_holds():
    old = torch.tensor([[0.0, 1e4, float("nan"), -1e4, float("inf")]])
    rollout = torch.tensor([[0.0, -1e4, 0.0, float("nan"), 0.0]])
    mask = torch.tensor([[True, False, False, False, False]])
    assert truncated_importance_weights(old, rollout, mask, cap=2.0).tolist() == [[1.0] * 5]


def test_a_huge_difference_is_capped_not_infinite():
    mask = torch.ones(1, 2, dtype=torch.bool)
    weights = truncated_importance_weights(torch.tensor([[200.0, -200.0]]), torch.zeros(1, 2), mask, cap=2.0)
    assert weights.tolist() == [[pytest.approx(2.0), pytest.approx(0.0)]]


def test_cap_zero_is_off_and_no_gradient_flows():
    old = torch.tensor([[1.0, 2.0]], requires_grad=True)
    mask = torch.ones(1, 2, dtype=torch.bool)
    assert truncated_importance_weights(old, torch.zeros(1, 2), mask, cap=0.0).tolist() == [[1.0, 1.0]]
    assert not truncated_importance_weights(old, torch.zeros(1, 2), mask, cap=2.0).requires_grad


def test_wrong_shapes_and_caps_are_named():
    mask = torch.ones(2, 2, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"\(2, 2\), rollout_logps \(2,\)"):
        truncated_importance_weights(torch.zeros(2, 2), torch.zeros(2), mask, cap=2.0)
    with pytest.raises(ValueError, match="cap is -1"):
        truncated_importance_weights(torch.zeros(2, 2), torch.zeros(2, 2), mask, cap=-1.0)
