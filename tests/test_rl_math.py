"""Masks, log-probs, KL and advantages of trainer/rl_math.py against numbers worked by hand (sums in comments).

The losses have their own file, test_rl_math_losses.py.
"""

import math
import threading

import pytest
import torch
from handwork import INF, NAN, assert_close, gradient, mask_of, tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trainer import rl_math
from trainer.rl_math import (
    approx_policy_kl,
    compute_gae,
    explained_variance,
    gather_response_logps,
    group_relative_advantages,
    kl_k1,
    kl_k2,
    mask_until_eos,
    masked_mean,
    normalize_advantages,
    ppo_policy_loss,
    reference_kl_penalty,
    response_logp_positions,
    selective_logps,
    sequence_mean,
    terminal_rewards,
    token_kl_penalty,
)


# ---- reductions and masks ----


def test_token_mean_and_row_mean_weigh_rows_differently():
    values, mask = tensor([1, 2, 3], [10, 9, 9]), mask_of([1, 1, 1], [1, 0, 0])
    assert masked_mean(values, mask) == 4.0  # (1 + 2 + 3 + 10) / 4
    assert sequence_mean(values, mask) == 6.0  # (2 + 10) / 2
    assert_close(gradient(lambda v: masked_mean(v, mask), values), [[0.25] * 3, [0.25, 0, 0]])
    assert_close(gradient(lambda v: sequence_mean(v, mask), values), [[1 / 6] * 3, [0.5, 0, 0]])


def test_an_empty_row_counts_as_a_row_of_zero():
    values, mask = tensor([2, 4], [NAN, INF]), mask_of([1, 1], [0, 0])
    assert sequence_mean(values, mask) == 1.5  # (3 + 0) / 2
    assert masked_mean(values, mask) == 3.0


@pytest.mark.parametrize("reduce", [masked_mean, sequence_mean])
@pytest.mark.parametrize("shape", [(2, 3), (0, 3), (2, 0)])
def test_nothing_counted_is_zero_with_zero_gradient(reduce, shape):
    values, mask = torch.full(shape, NAN), torch.zeros(shape, dtype=torch.bool)
    assert reduce(values, mask) == 0
    assert (gradient(lambda v: reduce(v, mask), values) == 0).all()


def test_half_precision_is_summed_in_float32():
    ones = torch.ones(1, 70_000, dtype=torch.float16)  # their sum is beyond float16's 65504
    for reduce in (masked_mean, sequence_mean):
        assert reduce(ones, ones.bool()).dtype == torch.float32
        assert reduce(ones, ones.bool()) == 1


def test_first_eos_counts_and_later_tokens_do_not():
    ids = torch.tensor([[100, 0, 101, 2, 2], [2, 5, 2, 5, 5], [7, 7, 7, 7, 7], [7, 2, 2, 2, 2], [2, 7, 7, 2, 7]])
    produced = mask_of([1, 1, 1, 1, 0], [1, 1, 1, 1, 1], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0], [0, 1, 1, 1, 1])
    expected = mask_of([1, 1, 1, 1, 0], [1, 0, 0, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0], [0, 1, 1, 1, 0])
    assert torch.equal(mask_until_eos(ids, produced, 2), expected)
    assert torch.equal(mask_until_eos(ids, produced.long(), 2), expected)  # 0/1 masks are understood
    either = mask_of([1, 1, 1, 1, 0], [1, 0, 0, 0, 0], [1, 0, 0, 0, 0], [1, 0, 0, 0, 0], [0, 1, 0, 0, 0])
    assert torch.equal(mask_until_eos(ids, produced, [2, 7]), either)  # whichever comes first


# ---- log-probabilities ----


def test_scores_at_the_sampling_temperature():
    # [2, 1, 0] / 0.5 = [4, 2, 0]; log(e^4 + e^2 + 1) = 4.1429
    logits = tensor([2, 1, 0]).expand(1, 3, 3)
    logps = selective_logps(logits, torch.tensor([[0, 1, 2]]), temperature=0.5)
    assert_close(logps, [[-0.1429, -2.1429, -4.1429]], atol=5e-5)


@pytest.mark.parametrize("block_elements", [1, 12, 1 << 24])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_selective_logps_is_log_softmax_in_value_and_gradient(monkeypatch, block_elements, temperature):
    monkeypatch.setattr(rl_math, "BLOCK_ELEMENTS", block_elements)
    generator = torch.Generator().manual_seed(0)
    logits = 5 * torch.randn(3, 4, 5, generator=generator)
    targets, weights = torch.randint(5, (3, 4), generator=generator), torch.randn(3, 4, generator=generator)

    def plain(x):
        return (x / temperature).log_softmax(-1).gather(-1, targets[..., None])[..., 0]

    def ours(x):
        return selective_logps(x, targets, temperature=temperature)

    assert_close(ours(logits), plain(logits))
    assert_close(
        gradient(lambda x: (ours(x) * weights).sum(), logits), gradient(lambda x: (plain(x) * weights).sum(), logits)
    )


class _LargestFloat32(TorchDispatchMode):
    """Remembers the size of the largest float32 tensor made while it is active."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dtype == torch.float32:
            self.largest = max(self.largest, out.numel())
        return out


def test_half_precision_logits_are_never_copied_whole_to_float32(monkeypatch):
    monkeypatch.setattr(rl_math, "BLOCK_ELEMENTS", 64)
    logits = torch.randn(4, 8, 32).bfloat16().requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda stored: stored), _LargestFloat32() as seen:
        logps = selective_logps(logits, torch.zeros(4, 8, dtype=torch.long), temperature=0.8)
    assert logps.dtype == torch.float32
    assert seen.largest <= 64
    assert all(kept.numel() <= 4 * 8 for kept in saved if kept.dtype == torch.float32)


def test_nan_logits_of_padding_leave_the_gradient_alone():
    logits = tensor([1, 2], [NAN, NAN]).reshape(1, 2, 2)
    mask = mask_of([1, 0])
    grad = gradient(lambda x: masked_mean(selective_logps(x, torch.tensor([[1, 1]]), temperature=1.0), mask), logits)
    p = 1 / (1 + math.e)  # softmax([1, 2])[0]
    assert_close(grad, [[[-p, p], [0, 0]]])


@pytest.mark.parametrize("temperature", [0, -1.0, NAN, INF])
def test_temperature_must_be_positive(temperature):
    with pytest.raises(ValueError, match="temperature"):
        selective_logps(torch.zeros(1, 1, 2), torch.zeros(1, 1, dtype=torch.long), temperature=temperature)


def test_the_logits_before_a_token_predict_it():
    # Two rows, W = 4. Row 0: prompt of 2, row 1: prompt of 1. Each position has logits of its own.
    assert response_logp_positions(torch.tensor([2, 1]), 2).tolist() == [[1, 2], [0, 1]]
    logits = torch.arange(24, dtype=torch.float32).view(2, 4, 3).sin()
    output_ids = torch.tensor([[0, 1, 2, 0], [1, 2, 1, 0]])
    logps = gather_response_logps(logits, output_ids, response_logp_positions(torch.tensor([2, 1]), 2))
    table = logits.log_softmax(-1)
    # Row 0: tokens 2, 0 (columns 2, 3) from positions 1, 2. Row 1: tokens 2, 1 (columns 1, 2) from positions 0, 1.
    expected = [[table[0, 1, 2], table[0, 2, 0]], [table[1, 0, 2], table[1, 1, 1]]]
    assert_close(logps, torch.tensor(expected))


@pytest.mark.parametrize("position", [-1, 3])
def test_a_position_without_a_next_token_is_refused(position):
    with pytest.raises(ValueError, match="0 ... 2"):
        gather_response_logps(torch.zeros(1, 4, 5), torch.zeros(1, 4, dtype=torch.long), torch.tensor([[position]]))


# ---- KL ----


def test_kl_estimates_where_the_policy_is_one_nat_above_the_reference():
    logps, ref_logps = tensor([-1.0]), tensor([-2.0])
    assert_close(kl_k1(logps, ref_logps), [[1.0]])
    assert_close(kl_k2(logps, ref_logps), [[0.5]])
    assert_close(token_kl_penalty(logps, ref_logps), [[0.367879]])  # e^-1 + 1 - 1
    assert_close(token_kl_penalty(ref_logps, logps), [[0.718282]])  # e^1 - 1 - 1
    # Gradients with respect to logps: 1; logps - ref = 1; 1 - e^d = 1 - e^-1
    assert_close(gradient(lambda x: kl_k1(x, ref_logps).sum(), logps), [[1.0]])
    assert_close(gradient(lambda x: kl_k2(x, ref_logps).sum(), logps), [[1.0]])
    assert_close(gradient(lambda x: token_kl_penalty(x, ref_logps).sum(), logps), [[0.632121]])


def test_k3_is_never_negative_and_zero_for_equal_policies():
    d = torch.linspace(-1e-3, 1e-3, 4001)[None]
    penalty = token_kl_penalty(-d, torch.zeros_like(d))
    assert (penalty >= 0).all()
    assert_close(penalty, (0.5 * d.double() ** 2 + d.double() ** 3 / 6).float(), atol=1e-10)
    assert (token_kl_penalty(d, d) == 0).all()


def test_extreme_log_ratios_give_finite_kl_and_keep_the_pull_to_the_reference():
    logps, ref_logps = tensor([0, -200, -1e4]), tensor([-200, 0, 0])
    penalty = token_kl_penalty(logps, ref_logps)
    capped = math.exp(20) - 21
    torch.testing.assert_close(penalty, tensor([199, capped, capped]))  # e^-200 + 200 - 1
    grad = gradient(lambda x: token_kl_penalty(x, ref_logps).sum(), logps)
    assert grad.tolist() == [[1, 0, 0]]


def test_reference_kl_penalty_is_the_token_mean_of_k3():
    logps, ref_logps, mask = tensor([-1, -1], [-2, 0]), tensor([-2, -1], [-1, NAN]), mask_of([1, 1], [1, 0])
    expected = (math.exp(-1) + 0 + math.e - 2) / 3
    assert_close(reference_kl_penalty(logps, ref_logps, mask), expected)


def test_masked_extremes_of_the_reported_kind():
    loss = reference_kl_penalty(tensor([0, 0]), tensor([100, 0.5]), mask_of([0, 1]))
    assert_close(loss, math.exp(0.5) - 1.5)
    logps, old_logps, mask = tensor([0.1, 0]), tensor([0, NAN]), mask_of([1, 0])
    grad = gradient(lambda x: ppo_policy_loss(x, old_logps, tensor([1, 1]), mask, clip_epsilon=0.2), logps)
    assert_close(grad, [[-math.exp(0.1), 0]])


def test_approx_policy_kl_is_half_the_mean_square():
    kl = approx_policy_kl(tensor([0.3, -0.1, 200]), tensor([0, 0, 0]), mask_of([1, 1, 0]))
    assert_close(kl, 0.025)  # 0.5 · (0.09 + 0.01) / 2


# ---- rewards and advantages ----


def test_the_score_lands_on_the_last_counted_token():
    mask = mask_of([1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0], [1, 0, 1, 0])
    rewards = terminal_rewards(torch.tensor([1.5, -2.0, 9.0, 0.5]), mask)
    assert rewards.tolist() == [[0, 1.5, 0, 0], [0, 0, 0, -2], [0, 0, 0, 0], [0, 0, 0.5, 0]]


def test_a_nan_score_touches_its_own_token_only():
    rewards = terminal_rewards(torch.tensor([NAN, 1.0, NAN]), mask_of([1, 1, 0], [1, 0, 0], [0, 0, 0]))
    assert rewards.isnan().tolist() == [[False, True, False], [False] * 3, [False] * 3]


def test_gae_of_the_reported_kind():
    # delta = [.4 - .5, .3 - .4, 1 - .3] = [-.1, -.1, .7]; A_2 = .7, A_1 = -.1 + .95·.7, A_0 = -.1 + .95·.565
    expected = [[0.43675, 0.565, 0.7]], [[0.93675, 0.965, 1.0]]
    rewards, values, mask = tensor([0, 0, 1]), tensor([0.5, 0.4, 0.3]), mask_of([1, 1, 1])
    for actual, wanted in zip(compute_gae(rewards, values, mask, gamma=1.0, lam=0.95), expected):
        assert_close(actual, wanted)


@pytest.mark.parametrize("garbage", [NAN, INF, -1e4])
def test_gae_padding_changes_nothing(garbage):
    filler = tensor([garbage] * 3)
    padded = compute_gae(
        torch.cat([tensor([0, 0, 1]), filler], 1), torch.cat([tensor([0.5, 0.4, 0.3]), filler], 1),
        mask_of([1, 1, 1, 0, 0, 0]), gamma=1.0, lam=0.95,
    )
    assert_close(padded[0], [[0.43675, 0.565, 0.7, 0, 0, 0]])
    assert_close(padded[1], [[0.93675, 0.965, 1.0, 0, 0, 0]])


def test_gae_discounts_with_gamma_and_lambda_apart():
    # gamma .5, lambda .1: delta = [1 + .5·4 - 2, 0 - 4] = [1, -4]; A_0 = 1 + .05·(-4)
    advantages, returns = compute_gae(tensor([1, 0]), tensor([2, 4]), mask_of([1, 1]), gamma=0.5, lam=0.1)
    assert_close(advantages, [[0.8, -4]])
    assert_close(returns, [[2.8, 0]])


def test_gae_runs_apart_do_not_see_each_other_and_empty_rows_are_zero():
    values = tensor([1, 9, 2], [NAN, NAN, NAN])
    advantages, returns = compute_gae(
        torch.zeros(2, 3), values, mask_of([1, 0, 1], [0, 0, 0]), gamma=1.0, lam=0.5
    )
    assert advantages.tolist() == [[-1, 0, -2], [0, 0, 0]]
    assert returns.tolist() == [[0, 0, 0], [0, 0, 0]]


def test_normalize_uses_counted_tokens_and_divisor_n():
    # mean of 1, 2, 3, 6 = 3; variance (4 + 1 + 0 + 9) / 4 = 3.5
    normalized = normalize_advantages(tensor([1, 2, 3], [6, NAN, 1e4]), mask_of([1, 1, 1], [1, 0, 0]))
    scale = 1 / math.sqrt(3.5)
    assert_close(normalized, [[-2 * scale, -scale, 0], [3 * scale, 0, 0]])


@pytest.mark.parametrize("row, mask", [([0.1] * 7, [1] * 7), ([5.0, NAN], [1, 0]), ([NAN, INF], [0, 0])])
def test_normalize_without_variance_gives_zeros(row, mask):
    assert_close(normalize_advantages(tensor(row), mask_of(mask)), torch.zeros(1, len(row)), atol=1e-9)


def on_two_ranks(function, shards):
    """function(shard, reduce_sum) for two shards at once, with a reduce_sum that adds over both, as all_reduce does."""
    barrier, posted, results = threading.Barrier(2, timeout=10), {}, {}

    def run(rank):
        def reduce_sum(local_sums):
            posted[rank] = local_sums
            barrier.wait()
            total = posted[0] + posted[1]
            barrier.wait()
            return total

        results[rank] = function(shards[rank], reduce_sum)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results[0], results[1]


def test_two_ranks_whiten_and_explain_with_the_moments_of_the_whole_batch():
    generator = torch.Generator().manual_seed(1)
    values, returns = torch.randn(4, 5, generator=generator), 3 + torch.randn(4, 5, generator=generator)
    mask = torch.rand(4, 5, generator=generator) < 0.6
    mask[2:] = False
    mask[3, 0] = True  # rank 1 holds one counted token: alone it would whiten it to 0
    shards = [(values[part], returns[part], mask[part]) for part in (slice(0, 2), slice(2, 4))]

    parts = on_two_ranks(lambda shard, add: normalize_advantages(shard[1], shard[2], reduce_sum=add), shards)
    assert_close(torch.cat(parts), normalize_advantages(returns, mask))
    assert parts[1][1, 0] != 0

    explained = on_two_ranks(lambda shard, add: explained_variance(*shard, reduce_sum=add), shards)
    assert explained[0] == explained[1]
    assert_close(explained[0], explained_variance(values, returns, mask))


def test_group_advantages_by_hand():
    # [1, 2, 3, 6]: mean 3, population std sqrt(3.5); [0, 0, 0, 4]: mean 1, std sqrt(3)
    advantages = group_relative_advantages(torch.tensor([1.0, 2, 3, 6, 0, 0, 0, 4]), 4)
    first, second = 1 / (math.sqrt(3.5) + 1e-4), 1 / (math.sqrt(3) + 1e-4)
    expected = [-2 * first, -first, 0, 3 * first, -second, -second, -second, 3 * second]
    assert_close(advantages, expected)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_non_finite_reward_is_left_out(bad):
    # {1, 3, 2}: mean 2, std sqrt(2/3)
    one = 1 / (math.sqrt(2 / 3) + 1e-4)
    assert_close(group_relative_advantages(torch.tensor([1, bad, 3, 2]), 4), [-one, 0, one, 0])
    assert group_relative_advantages(torch.tensor([bad, bad, bad, 5.0]), 2).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_equal_rewards_give_exactly_zero(dtype):
    for reward in (0.1, 1 / 3, -1e4):
        assert (group_relative_advantages(torch.full((14,), reward, dtype=dtype), 7) == 0).all()


@pytest.mark.parametrize("generations", [1, 0, -2, 3])
def test_groups_must_fit(generations):
    with pytest.raises(ValueError, match="num_generations|multiple of 3"):
        group_relative_advantages(torch.zeros(4), generations)


def test_explained_variance_by_hand():
    # Var(returns 0, 2, 4) = 8/3; errors 1, 0, 2 around 1: 2/3; 1 - 2/8
    values, returns, mask = tensor([-1, 2, 2, NAN]), tensor([0, 2, 4, 1e4]), mask_of([1, 1, 1, 0])
    assert_close(explained_variance(values, returns, mask), 0.75)
    assert explained_variance(returns, returns, mask) == 1
    assert explained_variance(values, torch.full((1, 4), 0.1, dtype=torch.float64), mask) == 0
    assert explained_variance(values, returns, mask_of([0, 0, 0, 0])) == 0
