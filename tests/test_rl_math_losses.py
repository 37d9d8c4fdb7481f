"""The losses of trainer/rl_math.py: numbers and gradients worked by hand, garbage in the padding, wrong shapes."""

import inspect
import math

import pytest
import torch
from handwork import INF, NAN, assert_close, gradient, mask_of, tensor

from trainer import rl_math
from trainer.rl_math import (
    approx_policy_kl,
    cispo_policy_loss,
    clip_fraction,
    dpo_logratio_loss,
    explained_variance,
    grpo_policy_loss,
    masked_mean,
    normalize_advantages,
    ppo_policy_loss,
    ppo_value_loss,
    reference_kl_penalty,
    sequence_mean,
    token_kl_penalty,
)


def test_ppo_clip_stops_the_gradient_on_the_far_side_only():
    # Ratios 1.5, 1.5, 0.5, 0.5 with A = 1, -1, 1, -1: min(1.5, 1.2), min(-1.5, -1.2), min(.5, .8), min(-.5, -.8)
    logps = tensor([1.5, 1.5, 0.5, 0.5, 9.9]).log()
    advantages, mask = tensor([1, -1, 1, -1, 1e6]), mask_of([1, 1, 1, 1, 0])

    def loss(x):
        return ppo_policy_loss(x, torch.zeros(1, 5), advantages, mask, clip_epsilon=0.2)

    assert_close(loss(logps), (-1.2 + 1.5 - 0.5 + 0.8) / 4)
    assert_close(gradient(loss, logps) * 4, [[0, 1.5, -0.5, 0, 0]])


def test_ppo_averages_over_tokens_and_grpo_over_rows():
    logps, old_logps = torch.zeros(2, 3), torch.zeros(2, 3)
    mask = mask_of([1, 1, 1], [1, 0, 0])
    ppo = ppo_policy_loss(logps, old_logps, tensor([1, 1, 1], [5, 5, 5]), mask, clip_epsilon=0.2)
    grpo = grpo_policy_loss(logps, old_logps, torch.tensor([1.0, 5.0]), mask, epsilon=0.2)
    cispo = cispo_policy_loss(tensor([-1] * 3, [-1] * 3), tensor([-1] * 3, [-1] * 3), torch.tensor([1.0, 5.0]), mask,
                              epsilon_high=5.0)
    assert ppo == -2  # -(1 + 1 + 1 + 5) / 4
    assert grpo == -3  # -(1 + 5) / 2
    assert cispo == 3  # ratio 1: -(1·-1 + 5·-1) / 2


def test_grpo_gradient_by_hand():
    # Row 0 (A = 1): ratios 1.5 (clipped: 0), 0.5; row 1 (A = -2): ratio 1.1. Each row weighs 1/2, its tokens 1/2 and 1.
    logps = tensor([1.5, 0.5], [1.1, 7]).log()
    advantages, mask = torch.tensor([1.0, -2.0]), mask_of([1, 1], [1, 0])

    def loss(x):
        return grpo_policy_loss(x, torch.zeros(2, 2), advantages, mask, epsilon=0.2)

    assert_close(loss(logps), (-(1.2 + 0.5) / 2 + 2.2) / 2)
    assert_close(gradient(loss, logps), [[0, -0.125], [1.1, 0]])


def test_cispo_caps_the_weight_and_keeps_the_gradient():
    # Ratios .3, 3, 9 under cap 5: d loss / d logp = -min(ratio, 5)·A / 3, and the ratio itself carries no gradient
    logps = tensor([-0.5, -1.0, -2.0])
    old_logps = logps - tensor([0.3, 3, 9]).log()
    advantages, mask = torch.tensor([-2.0]), mask_of([1, 1, 1])

    def loss(x):
        return cispo_policy_loss(x, old_logps, advantages, mask, epsilon_high=5.0)

    assert_close(loss(logps), 2 * (0.3 * -0.5 + 3 * -1 + 5 * -2) / 3, atol=1e-5)
    assert_close(gradient(loss, logps), [[0.2, 2, 10 / 3]])


def test_cispo_looks_at_the_new_policy_over_the_old_one():
    grad = gradient(
        lambda x: cispo_policy_loss(x, tensor([-3]), torch.tensor([1.0]), mask_of([1]), epsilon_high=1e6), tensor([-1])
    )
    assert_close(grad, [[-math.exp(2)]])


@pytest.mark.parametrize("log_ratio", [200.0, -200.0, 1e4, -1e4])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_extreme_log_ratios_of_counted_tokens_give_finite_losses_and_gradients(log_ratio, advantage):
    logps, old_logps = tensor([log_ratio, 0.1]), torch.zeros(1, 2)
    mask, row = mask_of([1, 1]), torch.tensor([advantage])
    losses = [
        lambda x: ppo_policy_loss(x, old_logps, row.expand(1, 2), mask, clip_epsilon=0.2),
        lambda x: grpo_policy_loss(x, old_logps, row, mask, epsilon=0.2),
        lambda x: cispo_policy_loss(x, old_logps, row, mask, epsilon_high=5.0),
        lambda x: reference_kl_penalty(x, old_logps, mask),
    ]
    for loss in losses:
        assert loss(logps).isfinite()
        assert gradient(loss, logps).isfinite().all()
    assert_close(gradient(losses[0], logps)[0, 1], -advantage * math.exp(0.1) / 2)  # the sane token still learns


def test_value_loss_takes_the_larger_error_and_stops_past_the_range():
    # V, old, R = (1, 0, 2): clipped .2, max(1, 3.24): no gradient. (.1, 0, 1): inside: .81, slope -.9.
    # (1, 0, 0): clipped .2, max(1, .04) = 1, slope 1.
    values, old_values, returns = tensor([1, 0.1, 1, NAN]), tensor([0, 0, 0, 1e4]), tensor([2, 1, 0, INF])
    mask = mask_of([1, 1, 1, 0])

    def loss(x):
        return ppo_value_loss(x, old_values, returns, mask, cliprange_value=0.2)

    assert_close(loss(values), 0.5 * (3.24 + 0.81 + 1) / 3)
    assert_close(gradient(loss, values) * 3, [[0, -0.9, 1, 0]])


def test_clip_fraction_counts_both_sides():
    logps = tensor([1.5, 1.1, 0.9, 0.5, 9]).log()
    mask = mask_of([1, 1, 1, 1, 0])
    assert clip_fraction(logps, torch.zeros(1, 5), mask, clip_epsilon=0.2) == 0.5
    assert clip_fraction(logps, torch.zeros(1, 5), mask, clip_epsilon=0.6) == 0


def test_dpo_margin_by_hand():
    # margins ((-1 + 3) - (-2 + 2.5)) = 1.5 and ((-4 + 1) - 0) = -3; beta .1: log(1 + e^-.15), log(1 + e^.3)
    inputs = [torch.tensor(pair) for pair in ([-1.0, -4.0], [-3.0, -1.0], [-2.0, 0.0], [-2.5, 0.0])]
    expected = (math.log1p(math.exp(-0.15)) + math.log1p(math.exp(0.3))) / 2
    assert_close(dpo_logratio_loss(*inputs, beta=0.1), expected)
    grad = gradient(lambda chosen: dpo_logratio_loss(chosen, *inputs[1:], beta=0.1), inputs[0])
    assert_close(grad, [-0.05 / (1 + math.exp(0.15)), -0.05 / (1 + math.exp(-0.3))])


# ---- garbage in the padding ----

NAMES = ("logps", "old_logps", "ref_logps", "advantages", "values", "old_values", "returns")
FUNCTIONS = {
    "masked_mean": lambda x, row, mask: masked_mean(x["logps"], mask),
    "sequence_mean": lambda x, row, mask: sequence_mean(x["logps"], mask),
    "ppo": lambda x, row, mask: ppo_policy_loss(
        x["logps"], x["old_logps"], x["advantages"], mask, clip_epsilon=0.2
    ),
    "value": lambda x, row, mask: ppo_value_loss(
        x["values"], x["old_values"], x["returns"], mask, cliprange_value=0.2
    ),
    "grpo": lambda x, row, mask: grpo_policy_loss(x["logps"], x["old_logps"], row, mask, epsilon=0.2),
    "cispo": lambda x, row, mask: cispo_policy_loss(x["logps"], x["old_logps"], row, mask, epsilon_high=5.0),
    "reference_kl": lambda x, row, mask: reference_kl_penalty(x["logps"], x["ref_logps"], mask),
    "grpo_kl": lambda x, row, mask: sequence_mean(token_kl_penalty(x["logps"], x["ref_logps"]), mask),
    "approx_kl": lambda x, row, mask: approx_policy_kl(x["logps"], x["old_logps"], mask),
    "clip_fraction": lambda x, row, mask: clip_fraction(x["logps"], x["old_logps"], mask, clip_epsilon=0.2),
    "explained": lambda x, row, mask: explained_variance(x["values"], x["returns"], mask),
    "whitened": lambda x, row, mask: normalize_advantages(x["advantages"], mask).square()[mask].sum(),
}


def value_and_gradients(function, inputs, row, mask):
    leaves = {name: values.clone().requires_grad_(name in ("logps", "values")) for name, values in inputs.items()}
    result = function(leaves, row, mask)
    if result.requires_grad:
        result.backward()
    return result.detach(), [leaves[name].grad for name in ("logps", "values")]


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("garbage", [NAN, INF, -INF, 1e4, -1e4, 200.0, -200.0, None])
def test_padding_changes_neither_value_nor_gradient(name, garbage):
    """`None` puts a different extreme into each tensor: differences of 200 nats, inf - inf, NaN against numbers."""
    generator = torch.Generator().manual_seed(7)
    inputs = {key: torch.randn(3, 4, generator=generator) for key in NAMES}
    row = torch.tensor([1.0, -0.5, NAN])
    mask = mask_of([1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0])
    clean = value_and_gradients(FUNCTIONS[name], inputs, row.nan_to_num(), mask)

    mixed = (200.0, INF, -INF, NAN, -1e4, INF, 1e4)
    filled = {}
    for number, (key, values) in enumerate(inputs.items()):
        fill = mixed[number] if garbage is None else garbage
        alternating = fill if number % 2 else -fill
        filled[key] = values.masked_fill(~mask, alternating)
    dirty = value_and_gradients(FUNCTIONS[name], filled, row, mask)

    assert clean[0].isfinite()
    assert dirty[0] == clean[0]
    for actual, expected in zip(dirty[1], clean[1]):
        assert (actual is None) == (expected is None)
        if actual is not None:
            assert torch.equal(actual, expected)
            assert (actual[~mask] == 0).all()


# ---- wrong shapes ----

TWO, THREE = torch.zeros(2, 3), torch.zeros(3, 3)
HYPER = {"clip_epsilon", "cliprange_value", "epsilon", "epsilon_high", "gamma", "lam", "beta", "temperature"}
PER_ROW = {
    "grpo_policy_loss": "advantages", "cispo_policy_loss": "advantages", "terminal_rewards": "scores",
}
SAME_SHAPE = [
    "masked_mean", "sequence_mean", "compute_gae", "normalize_advantages", "token_kl_penalty", "kl_k1", "kl_k2",
    "reference_kl_penalty", "ppo_policy_loss", "ppo_value_loss", "approx_policy_kl", "clip_fraction",
    "explained_variance", "dpo_logratio_loss", "grpo_policy_loss", "cispo_policy_loss", "terminal_rewards",
]


@pytest.mark.parametrize("name", SAME_SHAPE)
def test_each_argument_of_another_shape_is_refused_with_both_shapes(name):
    function = getattr(rl_math, name)
    parameters = inspect.signature(function).parameters
    keywords = {key: 0.5 for key in parameters if key in HYPER}
    tensors = [key for key in parameters if key not in HYPER | {"eps", "reduce_sum"}]
    for wrong in tensors:
        arguments = {key: torch.zeros(2) if key == PER_ROW.get(name) else TWO for key in tensors}
        arguments[wrong] = THREE
        with pytest.raises(ValueError) as error:
            function(**arguments, **keywords)
        assert "(3, 3)" in str(error.value)
        assert "(2, 3)" in str(error.value) or "(2,)" in str(error.value)


@pytest.mark.parametrize("loss, keyword", [(grpo_policy_loss, "epsilon"), (cispo_policy_loss, "epsilon_high")])
def test_a_square_batch_does_not_hide_advantages_of_the_wrong_shape(loss, keyword):
    square, mask = torch.zeros(3, 3), torch.ones(3, 3, dtype=torch.bool)
    for advantages in (torch.zeros(3, 3), torch.zeros(1, 3), torch.zeros(3, 1)):
        with pytest.raises(ValueError, match="advantages"):
            loss(square, square, advantages, mask, **{keyword: 0.2})
    with pytest.raises(ValueError, match="advantages"):
        ppo_policy_loss(square, square, torch.zeros(3), mask, clip_epsilon=0.2)


def test_log_prob_functions_refuse_shapes_that_do_not_fit():
    ids, positions = torch.zeros(2, 4, dtype=torch.long), torch.zeros(2, 2, dtype=torch.long)
    with pytest.raises(ValueError, match=r"\(2, 4, 5\).*\(2, 3\)"):
        rl_math.selective_logps(torch.zeros(2, 4, 5), torch.zeros(2, 3, dtype=torch.long), temperature=1.0)
    with pytest.raises(ValueError, match=r"\(2, 3, 5\).*\(2, 4\)"):
        rl_math.gather_response_logps(torch.zeros(2, 3, 5), ids, positions)
    with pytest.raises(ValueError, match=r"\(1, 2\).*\(2, 4\)"):
        rl_math.gather_response_logps(torch.zeros(2, 4, 5), ids, positions[:1])
    with pytest.raises(ValueError, match=r"\(2, 4\).*\(2, 3\)"):
        rl_math.mask_until_eos(ids, torch.ones(2, 3, dtype=torch.bool), 2)
    with pytest.raises(ValueError, match=r"\(2, 3\)"):
        rl_math.group_relative_advantages(TWO, 2)
    with pytest.raises(ValueError, match=r"\(2, 3\)"):
        rl_math.response_logp_positions(TWO, 2)


def test_hyperparameters_are_keyword_only_and_have_no_default():
    for name in SAME_SHAPE + ["selective_logps"]:
        for key, parameter in inspect.signature(getattr(rl_math, name)).parameters.items():
            if key in HYPER:
                assert parameter.kind is parameter.KEYWORD_ONLY and parameter.default is parameter.empty


def test_advantages_and_rewards_carry_no_gradient():
    values, mask = torch.randn(2, 3, requires_grad=True), torch.ones(2, 3, dtype=torch.bool)
    advantages, returns = rl_math.compute_gae(values, values, mask, gamma=1.0, lam=0.95)
    outputs = [advantages, returns, normalize_advantages(values, mask), explained_variance(values, values, mask),
               rl_math.terminal_rewards(values[:, 0], mask), rl_math.group_relative_advantages(values[0, :2], 2)]
    assert not any(output.requires_grad for output in outputs)
