"""Token losses, their aggregation and what was clipped: numbers by hand, plain-float references, finite differences."""

import inspect
import math

import pytest
import torch
from handwork import INF, NAN, assert_close, gradient, mask_of, tensor

from trainer import rl_math
from trainer.rl_math import (
    aggregate, aggregation_count, cispo_clip_ratio, cispo_policy_loss, cispo_token_loss, clip_ratios, grpo_policy_loss,
    grpo_token_loss, gspo_token_loss, masked_mean, ppo_policy_loss, ppo_token_loss, sequence_mean, sequence_ratios,
    token_ratios,
)  # fmt: skip

PPO = {"clip_epsilon": 0.2, "clip_epsilon_high": 0.4, "dual_clip": 3.0}
GRPO = {"epsilon": 0.2, "epsilon_high": 0.4}


def doubles(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ---- numbers by hand ----


def test_clip_higher_moves_the_upper_end_only():
    # Ratios 1.5, 1.3, 0.7, 0.5 in [0.8, 1.4]; A = 1, 1, -1, -1: 1.4 (no slope), 1.3, -0.8, -0.8 (no slope)
    logps = tensor([1.5, 1.3, 0.7, 0.5]).log()
    advantages, mask, old_logps = tensor([1, 1, -1, -1]), mask_of([1, 1, 1, 1]), torch.zeros(1, 4)

    def loss(x):
        return ppo_token_loss(x, old_logps, advantages, mask, clip_epsilon=0.2, clip_epsilon_high=0.4, dual_clip=0)

    assert_close(loss(logps), [[-1.4, -1.3, 0.8, 0.8]])
    assert_close(gradient(lambda x: loss(x).sum(), logps), [[0, -1.3, 0, 0]])
    row = torch.tensor([1.0])
    assert_close(grpo_token_loss(logps, old_logps, row, mask, **GRPO), [[-1.4, -1.3, -0.7, -0.5]])
    assert_close(grpo_token_loss(logps, old_logps, -row, mask, **GRPO), [[1.5, 1.3, 0.8, 0.8]])


def test_dual_clip_bounds_the_loss_where_the_advantage_is_negative():
    # Ratios 2, 5, 5, 0.5 with A = -2, -2, 2, -2 and c = 3: 4, 6 (bounded, no slope), -2.4 (clip), 1.6 (clip)
    logps = tensor([2, 5, 5, 0.5]).log()
    advantages, mask = tensor([-2, -2, 2, -2]), mask_of([1, 1, 1, 1])

    def loss(x, dual_clip=3.0):
        return ppo_token_loss(
            x, torch.zeros(1, 4), advantages, mask, clip_epsilon=0.2, clip_epsilon_high=0.2, dual_clip=dual_clip
        )

    assert_close(loss(logps), [[4, 6, -2.4, 1.6]])
    assert_close(gradient(lambda x: loss(x).sum(), logps), [[4, 0, 0, 0]])
    assert_close(loss(logps, dual_clip=0), [[4, 10, -2.4, 1.6]], atol=1e-5)
    assert_close(loss(tensor([9, 9, 9, 9])), [[6, 6, -2.4, 6]])  # ratio e^9


@pytest.mark.parametrize("dual_clip", [1.0, 0.5, -3.0, NAN])
def test_a_dual_clip_within_the_range_is_refused(dual_clip):
    row = tensor([0.0])
    with pytest.raises(ValueError, match="dual_clip"):
        ppo_token_loss(row, row, row, mask_of([1]), clip_epsilon=0.2, clip_epsilon_high=0.2, dual_clip=dual_clip)


def test_cispo_token_by_token():
    # ratios .5 and 4 under a cap of 2, A = -3: weights .5 and 2; loss 3·w·logp, slope 3·w
    logps = tensor([-0.5, -1.0])
    old_logps = logps - tensor([0.5, 4]).log()

    def loss(x):
        return cispo_token_loss(x, old_logps, torch.tensor([-3.0]), mask_of([1, 1]), epsilon_high=2.0)

    assert_close(loss(logps), [[-0.75, -6]])
    assert_close(gradient(lambda x: loss(x).sum(), logps), [[1.5, 6]])


def test_gspo_weighs_a_row_by_the_geometric_mean_of_its_ratios():
    # Row 0: ratios 2, 8 -> s = 4, A = -1, not clipped: loss 4; row 1: ratios 1.1 -> s = 1.1, A = 2, inside: -2.2.
    # Row 2: ratios 2, 1/2 -> s = 1, A = 1. Row 3: 3, 3 -> s = 3, A = 1, clipped at 1.4.
    logps = tensor([2, 8], [1.1, 50], [2, 0.5], [3, 3]).log()
    old_logps, mask = torch.zeros(4, 2), mask_of([1, 1], [1, 0], [1, 1], [1, 1])
    advantages = torch.tensor([-1.0, 2, 1, 1])
    assert_close(sequence_ratios(logps, old_logps, mask), [[4, 4], [1.1, 1], [1, 1], [3, 3]], atol=1e-5)

    def loss(x):
        return gspo_token_loss(x, old_logps, advantages, mask, **GRPO)

    assert_close(loss(logps), [[4, 4], [-2.2, 0], [-1, -1], [-1.4, -1.4]], atol=1e-5)
    assert_close(sequence_mean(loss(logps), mask), (4 - 2.2 - 1 - 1.4) / 4, atol=1e-5)
    # -s·A / n at each of the n tokens of a row, a quarter of it in the mean over rows
    grad = gradient(lambda x: sequence_mean(loss(x), mask), logps)
    assert_close(grad * 4, [[2, 2], [-2.2, 0], [-0.5, -0.5], [0, 0]], atol=1e-5)


# ---- plain-float references and finite differences ----


def reference_clipped(ratio, advantage, low, high, dual_clip=0.0):
    """The textbook definition of one token, as case distinctions instead of minima."""
    if advantage >= 0:
        return -advantage * min(ratio, 1 + high)
    loss = -advantage * max(ratio, 1 - low)
    return min(loss, -advantage * dual_clip) if dual_clip else loss


def reference_losses(logps, old_logps, advantages, mask):
    """{name: token losses as nested lists} of rows of numbers, advantages one a row."""
    found = {"ppo": [], "grpo": [], "gspo": [], "cispo": []}
    for row, old_row, advantage, live in zip(logps, old_logps, advantages, mask):
        ratios = [math.exp(a - b) for a, b in zip(row, old_row)]
        counted = [ratio for ratio, counts in zip(ratios, live) if counts]
        mean = math.prod(counted) ** (1 / max(len(counted), 1))
        found["ppo"].append([reference_clipped(r, advantage, 0.2, 0.4, 3.0) * c for r, c in zip(ratios, live)])
        found["grpo"].append([reference_clipped(r, advantage, 0.2, 0.4) * c for r, c in zip(ratios, live)])
        found["gspo"].append([reference_clipped(mean, advantage, 0.2, 0.4) * c for c in live])
        found["cispo"].append([-min(r, 2.0) * advantage * x * c for r, x, c in zip(ratios, row, live)])
    return found


LOSSES = {
    "ppo": lambda x, old, a, m: ppo_token_loss(x, old, a[:, None].expand(m.shape), m, **PPO),
    "grpo": lambda x, old, a, m: grpo_token_loss(x, old, a, m, **GRPO),
    "gspo": lambda x, old, a, m: gspo_token_loss(x, old, a, m, **GRPO),
    "cispo": lambda x, old, a, m: cispo_token_loss(x, old, a, m, epsilon_high=2.0),
}


@pytest.mark.parametrize("name", LOSSES)
def test_against_the_definitions_and_finite_differences(name):
    logps, old_logps, advantages = doubles(20, 6, seed=1), doubles(20, 6, seed=2), doubles(20, seed=3)
    mask = torch.rand(20, 6, generator=torch.Generator().manual_seed(4)) < 0.7
    mask[5] = False
    inputs = [values.tolist() for values in (logps, old_logps, advantages, mask)]
    assert_close(LOSSES[name](logps, old_logps, advantages, mask), reference_losses(*inputs)[name], atol=1e-12)
    logps.requires_grad_()
    if name == "cispo":  # its weight is a constant, so differences are taken with the weights held
        weights = token_ratios(logps, old_logps, mask).clamp(max=2.0).detach() * advantages[:, None]
        actual = gradient(lambda x: LOSSES[name](x, old_logps, advantages, mask).sum(), logps.detach())
        assert_close(actual, (-weights).masked_fill(~mask, 0), atol=1e-12)
    else:
        assert torch.autograd.gradcheck(lambda x: LOSSES[name](x, old_logps, advantages, mask), logps)


def test_the_losses_minimind_has_are_means_of_these():
    logps, old_logps, advantages = (doubles(6, 5, seed=seed).float() for seed in (5, 6, 7))
    mask, row = torch.rand(6, 5, generator=torch.Generator().manual_seed(8)) < 0.7, advantages[:, 0]
    symmetric = {"epsilon": 0.2, "epsilon_high": 0.2}
    pairs = [
        (lambda x: masked_mean(ppo_token_loss(
            x, old_logps, advantages, mask, clip_epsilon=0.2, clip_epsilon_high=0.2, dual_clip=0), mask),
         lambda x: ppo_policy_loss(x, old_logps, advantages, mask, clip_epsilon=0.2)),
        (lambda x: sequence_mean(grpo_token_loss(x, old_logps, row, mask, **symmetric), mask),
         lambda x: grpo_policy_loss(x, old_logps, row, mask, epsilon=0.2)),
        (lambda x: sequence_mean(cispo_token_loss(x, old_logps, row, mask, epsilon_high=5.0), mask),
         lambda x: cispo_policy_loss(x, old_logps, row, mask, epsilon_high=5.0)),
    ]  # fmt: skip
    for composed, whole in pairs:
        assert composed(logps) == whole(logps)
        assert torch.equal(gradient(composed, logps), gradient(whole, logps))


# ---- aggregation ----


def test_aggregations_by_hand():
    # Sums of the rows 6, 10, 0; their means 2, 10, 0
    losses, mask = tensor([1, 2, 3], [10, NAN, INF], [7, 7, 7]), mask_of([1, 1, 1], [1, 0, 0], [0, 0, 0])
    counts = {how: aggregation_count(mask, how=how, max_gen_len=8) for how in ("sequence", "token", "constant")}
    assert counts == {"sequence": 2, "token": 4, "constant": 16}
    found = {how: aggregate(losses, mask, how=how, denominator=counts[how]) for how in counts}
    assert found == {"sequence": 6, "token": 4, "constant": 1}  # 12 / 2, 16 / 4, 16 / 16
    slopes = {"sequence": [1 / 6, 1 / 2], "token": [1 / 4, 1 / 4], "constant": [1 / 16, 1 / 16]}
    for how, (long, short) in slopes.items():
        grad = gradient(lambda x, how=how: aggregate(x, mask, how=how, denominator=counts[how]), losses)
        assert_close(grad, [[long] * 3, [short, 0, 0], [0, 0, 0]])
    assert aggregate(losses, mask, how="token", denominator=2) == 8
    assert aggregate(losses, mask, how="token", denominator=0.5) == 32  # a share of a rank: below 1 is allowed


@pytest.mark.parametrize("how", ["sequence", "token", "constant"])
def test_parts_of_a_batch_add_up_to_the_whole(how):
    losses, mask = doubles(7, 5, seed=9), torch.rand(7, 5, generator=torch.Generator().manual_seed(10)) < 0.6
    mask[2] = False
    total = aggregation_count(mask, how=how, max_gen_len=9)
    parts = [slice(0, 1), slice(1, 3), slice(3, 7)]
    assert sum(aggregation_count(mask[part], how=how, max_gen_len=9) for part in parts) == total
    whole = aggregate(losses, mask, how=how, denominator=total)
    assert_close(sum(aggregate(losses[part], mask[part], how=how, denominator=total) for part in parts), whole,
                 atol=1e-12)  # fmt: skip
    grads = [gradient(lambda x, part=part: aggregate(x, mask[part], how=how, denominator=total), losses[part])
             for part in parts]  # fmt: skip
    assert_close(torch.cat(grads), gradient(lambda x: aggregate(x, mask, how=how, denominator=total), losses),
                 atol=1e-12)  # fmt: skip
    # under DDP: two ranks' gradients are averaged, each divides by half the count
    first, second = (aggregate(losses[part], mask[part], how=how, denominator=total / 2)
                     for part in (slice(0, 3), slice(3, 7)))  # fmt: skip
    assert_close((first + second) / 2, whole, atol=1e-12)


def test_nothing_counted_is_zero_and_an_unknown_way_is_refused():
    losses, nothing = torch.full((2, 3), NAN), torch.zeros(2, 3, dtype=torch.bool)
    for how in ("sequence", "token", "constant"):
        count = aggregation_count(nothing, how=how, max_gen_len=8)
        assert count == 0 and aggregate(losses, nothing, how=how, denominator=count) == 0
        assert (gradient(lambda x, how=how: aggregate(x, nothing, how=how, denominator=0.0), losses) == 0).all()
    with pytest.raises(ValueError, match="'mean'.*sequence, token, constant"):
        aggregate(losses, nothing, how="mean", denominator=1)
    with pytest.raises(ValueError, match="'mean'.*sequence, token, constant"):
        aggregation_count(nothing, how="mean", max_gen_len=8)


# ---- what was clipped ----


def test_clip_ratios_are_the_tokens_that_lose_their_gradient():
    # Ratios 1.5, 1.3, 0.7, 0.5 and a sixth outside the mask, in [0.8, 1.4]
    logps = tensor([1.5, 1.3, 0.7, 0.5, 1.0, 9.0]).log()
    mask, old_logps = mask_of([1, 1, 1, 1, 1, 0]), torch.zeros(1, 6)
    ratios = token_ratios(logps, old_logps, mask)
    for advantages, low, high in [([1.0], 0, 0.2), ([-1.0], 0.4, 0), ([0.0], 0, 0)]:
        found = clip_ratios(ratios, torch.tensor(advantages), mask, **GRPO)
        assert_close(torch.stack(found), [low, high, low + high])
    mixed = tensor([1, 1, -1, 1, 1, 1])
    assert_close(torch.stack(clip_ratios(ratios, mixed, mask, **GRPO)), [0.2, 0.2, 0.4])
    grad = gradient(lambda x: ppo_token_loss(x, old_logps, mixed, mask, clip_epsilon=0.2, clip_epsilon_high=0.4,
                                             dual_clip=0).sum(), logps)  # fmt: skip
    assert ((grad == 0) & mask).sum() == 0.4 * 5


def test_cispo_clip_ratio_counts_capped_weights_of_tokens_to_be_made_likelier():
    ratios, mask = tensor([6, 4, 6, 5, 6]), mask_of([1, 1, 1, 1, 0])
    assert cispo_clip_ratio(ratios, torch.tensor([1.0]), mask, epsilon_high=5.0) == 0.5
    assert cispo_clip_ratio(ratios, torch.tensor([-1.0]), mask, epsilon_high=5.0) == 0
    assert cispo_clip_ratio(ratios, tensor([1, 1, -1, 1, 1]), mask, epsilon_high=3.0) == 0.75
    assert cispo_clip_ratio(ratios, torch.tensor([1.0]), mask_of([0] * 5), epsilon_high=5.0) == 0


# ---- garbage in the padding, extremes, shapes ----


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("garbage", [NAN, INF, -INF, 1e4, -200.0, None])
def test_padding_changes_neither_value_nor_gradient(name, garbage):
    mask = mask_of([1, 1, 1], [1, 0, 0], [0, 0, 0])
    clean = [doubles(3, 3, seed=seed).float() for seed in (11, 12)]
    fills = [garbage, -garbage] if garbage is not None else [200.0, NAN]
    dirty = [values.masked_fill(~mask, fill) for values, fill in zip(clean, fills)]
    advantages, dirty_advantages = torch.tensor([1.0, -0.5, 0.3]), torch.tensor([1.0, -0.5, NAN])

    def loss(x, old_logps, row):
        return aggregate(LOSSES[name](x, old_logps, row, mask), mask, how="sequence", denominator=2)

    assert loss(*dirty, dirty_advantages) == loss(*clean, advantages)
    assert (LOSSES[name](*dirty, dirty_advantages, mask)[~mask] == 0).all()
    wanted = gradient(lambda x: loss(x, clean[1], advantages), clean[0])
    assert torch.equal(gradient(lambda x: loss(x, dirty[1], dirty_advantages), dirty[0]), wanted)
    ratios = token_ratios(*dirty, mask)
    assert clip_ratios(ratios, dirty_advantages, mask, **GRPO) == clip_ratios(
        token_ratios(*clean, mask), advantages, mask, **GRPO
    )


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("log_ratio", [200.0, -200.0, 1e4, -1e4])
def test_extreme_log_ratios_of_counted_tokens_stay_finite(name, log_ratio):
    logps, mask = tensor([log_ratio, log_ratio], [0.1, 0.1]), mask_of([1, 1], [1, 1])
    for row in (torch.tensor([1.0, 1.0]), torch.tensor([-1.0, -1.0])):
        assert LOSSES[name](logps, torch.zeros(2, 2), row, mask).isfinite().all()
        grad = gradient(lambda x, row=row: LOSSES[name](x, torch.zeros(2, 2), row, mask).sum(), logps)
        assert grad.isfinite().all() and (grad[1] != 0).all()


NUMBERS = {"epsilon": 0.2, "epsilon_high": 0.4, "clip_epsilon": 0.2, "clip_epsilon_high": 0.4, "dual_clip": 0.0,
           "how": "token", "denominator": 1.0, "max_gen_len": 4}  # fmt: skip
ONE_A_ROW = {"grpo_token_loss", "cispo_token_loss", "gspo_token_loss"}


@pytest.mark.parametrize("name", ["token_ratios", "sequence_ratios", "ppo_token_loss", "grpo_token_loss",
                                  "cispo_token_loss", "gspo_token_loss", "aggregate", "clip_ratios",
                                  "cispo_clip_ratio"])  # fmt: skip
def test_wrong_shapes_are_refused_and_hyperparameters_have_no_defaults(name):
    function = getattr(rl_math, name)
    parameters = inspect.signature(function).parameters
    keywords = {key: NUMBERS[key] for key in parameters if key in NUMBERS}
    assert all(parameters[key].kind is parameters[key].KEYWORD_ONLY for key in keywords)
    assert all(parameter.default is parameter.empty for parameter in parameters.values())
    tensors = [key for key in parameters if key not in NUMBERS]
    right = {key: torch.zeros(2) if key == "advantages" and name in ONE_A_ROW else torch.zeros(2, 2)
             for key in tensors}  # fmt: skip
    function(**right, **keywords)
    for wrong in tensors:
        for shape in [(3, 3), (2, 1), (1, 2)]:
            with pytest.raises(ValueError, match="the shapes do not fit"):
                function(**{**right, wrong: torch.zeros(shape)}, **keywords)
