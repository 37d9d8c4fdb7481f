"""Advantages of groups, shaped rewards and masks of trainer/rl_options.py: by hand and against plain floats."""

import math

import pytest
import torch
from handwork import INF, NAN, assert_close, mask_of, tensor
from test_rl_math import on_two_ranks

from trainer import rl_math, rl_options
from trainer.rl_math import (
    batch_std_advantages, flat_groups, group_centred_advantages, group_relative_advantages, mask_truncated,
    overlong_penalty, penalize_missing_eos, rloo_advantages, whiten_rewards,
)  # fmt: skip

ADVANTAGES = [group_centred_advantages, batch_std_advantages, rloo_advantages, group_relative_advantages]


def random_rewards(count, seed=0):
    return 2 * torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_every_public_name_can_be_imported_from_rl_math():
    for name, value in vars(rl_options).items():
        if getattr(value, "__module__", "") == rl_options.__name__ and not name.startswith("_"):
            assert getattr(rl_math, name) is value and name in rl_math.__all__
    for name in rl_math.__all__:
        assert hasattr(rl_math, name)


# ---- advantages ----


def test_group_centred_by_hand():
    # means 3 and 1; nothing is divided
    rewards = torch.tensor([1.0, 2, 3, 6, 0, 0, 0, 4])
    assert group_centred_advantages(rewards, 4).tolist() == [-2, -1, 0, 3, -1, -1, -1, 3]
    assert group_centred_advantages(torch.tensor([1, NAN, 3, 2]), 4).tolist() == [-1, 0, 1, 0]


def test_rloo_by_hand():
    # 1 - (2 + 3 + 6) / 3, 2 - (1 + 3 + 6) / 3, ...
    found = rloo_advantages(torch.tensor([1.0, 2, 3, 6]), 4)
    assert_close(found, [1 - 11 / 3, 2 - 10 / 3, 0, 6 - 6 / 3])
    # {1, 3, 2}: 1 - 5/2, 3 - 3/2, 2 - 4/2; a single finite reward has no others to be measured on
    assert_close(rloo_advantages(torch.tensor([1, NAN, 3, 2, NAN, 7, INF, -INF]), 4), [-1.5, 0, 1.5, 0, 0, 0, 0, 0])


def test_batch_std_by_hand():
    # Groups (0, 2), (5, 5): centred -1, 1, 0, 0; all rewards: mean 3, variance (9 + 1 + 4 + 4) / 4 = 4.5
    one = 1 / (math.sqrt(4.5) + 1e-4)
    assert_close(batch_std_advantages(torch.tensor([0.0, 2, 5, 5]), 2), [-one, one, 0, 0])
    # without the NaN: {0, 2, 5}: mean 7/3, variance (49 + 1 + 64) / 27
    one = 1 / (math.sqrt(114 / 27) + 0.5)
    assert_close(batch_std_advantages(torch.tensor([0.0, 2, 5, NAN]), 2, 0.5), [-one, one, 0, 0])


def test_against_plain_floats():
    rewards = random_rewards(24)
    rewards[5], rewards[18] = NAN, INF
    finite = [r for r in rewards.tolist() if math.isfinite(r)]
    mean = sum(finite) / len(finite)
    std = math.sqrt(sum((r - mean) ** 2 for r in finite) / len(finite))
    expected = {function: [] for function in (group_centred_advantages, batch_std_advantages, rloo_advantages)}
    for start in range(0, 24, 6):
        group = rewards[start : start + 6].tolist()
        for i, r in enumerate(group):
            alive = [x for x in group if math.isfinite(x)]
            others = [x for k, x in enumerate(group) if math.isfinite(x) and k != i]
            centred = r - sum(alive) / len(alive) if math.isfinite(r) else 0
            expected[group_centred_advantages].append(centred)
            expected[batch_std_advantages].append(centred / (std + 1e-4))
            expected[rloo_advantages].append(r - sum(others) / len(others) if math.isfinite(r) else 0)
    for function, wanted in expected.items():
        assert_close(function(rewards, 6), wanted, atol=1e-12)


@pytest.mark.parametrize("function", ADVANTAGES)
def test_what_all_advantages_have_in_common(function):
    for dtype in (torch.float32, torch.float16):
        for reward in (0.1, 1 / 3, -1e4):
            assert (function(torch.full((14,), reward, dtype=dtype), 7) == 0).all()
    assert function(torch.full((4,), NAN), 2).tolist() == [0, 0, 0, 0]
    rewards = random_rewards(12, seed=2).float().requires_grad_()
    found = function(rewards, 4)
    assert found.dtype == torch.float32 and not found.requires_grad
    assert_close(found.view(3, 4).sum(1), torch.zeros(3), atol=1e-5)
    assert_close(function(rewards + 100, 4), found.tolist(), atol=1e-4)  # a baseline takes constants away
    for wrong, generations in [(torch.zeros(2, 2), 2), (torch.zeros(4), 3), (torch.zeros(4), 1)]:
        with pytest.raises(ValueError, match=r"\(2, 2\)|multiple of 3|num_generations"):
            function(wrong, generations)


def test_flat_groups():
    rewards = torch.tensor([1.0, 1, 1, 0, NAN, 3, NAN, NAN, 0.1, 0.1 + 1e-7, 2, INF, 2, 2 + 1e-4])
    assert flat_groups(rewards, 2).tolist() == [True, False, True, True, True, True, False]
    assert flat_groups(torch.tensor([0.1] * 7 + [0.1] * 6 + [0.2]), 7).tolist() == [True, False]
    with pytest.raises(ValueError, match="multiple of 3"):
        flat_groups(torch.zeros(4), 3)


# ---- rewards ----


def test_whitened_rewards_keep_their_mean():
    # 1, 2, 3, 6: mean 3, variance 3.5
    scale = 1 / math.sqrt(3.5)
    found = whiten_rewards(tensor([1, 2, 3], [6, NAN, 1e4]), mask_of([1, 1, 1], [1, 0, 0]))
    assert_close(found, [[3 - 2 * scale, 3 - scale, 3], [3 + 3 * scale, 0, 0]])
    # equal rewards have no variance to be brought to 1 and stay as they are; nothing counted gives nothing
    assert_close(whiten_rewards(tensor([0.1] * 7), mask_of([1] * 7)), [[0.1] * 7])
    assert whiten_rewards(tensor([NAN, 1]), mask_of([0, 0])).tolist() == [[0, 0]]
    assert whiten_rewards(tensor([0, 4]), mask_of([1, 1]), eps=12.0).tolist() == [[1.5, 2.5]]  # 2 ± 2 / sqrt(4 + 12)


def test_two_ranks_use_the_moments_of_the_whole_batch():
    rewards = random_rewards(12, seed=3).view(4, 3).float()
    mask = mask_of([1, 1, 0], [1, 1, 1], [0, 0, 1], [0, 0, 0])
    shards = [(rewards[part], mask[part]) for part in (slice(0, 2), slice(2, 4))]
    parts = on_two_ranks(lambda shard, add: whiten_rewards(*shard, reduce_sum=add), shards)
    assert_close(torch.cat(parts), whiten_rewards(rewards, mask))

    flat = torch.cat([rewards[0], 10 * rewards[1], rewards[2], torch.tensor([NAN, 1.0, NAN])])
    shards = [flat[:6], flat[6:]]
    parts = on_two_ranks(lambda shard, add: batch_std_advantages(shard, 3, reduce_sum=add), shards)
    assert_close(torch.cat(parts), batch_std_advantages(flat, 3))


def test_a_missing_end_costs_the_penalty():
    scores, finished = torch.tensor([1.0, 2.0, NAN, NAN]), torch.tensor([True, False, True, False])
    found = penalize_missing_eos(scores, finished, missing_eos_penalty=0.5)
    torch.testing.assert_close(found, torch.tensor([1.0, 1.5, NAN, NAN]), equal_nan=True)
    assert penalize_missing_eos(scores[:2], finished[:2].long(), missing_eos_penalty=0.5).tolist() == [1, 1.5]
    with pytest.raises(ValueError, match=r"\(4,\).*\(3,\)"):
        penalize_missing_eos(scores, finished[:3], missing_eos_penalty=0.5)


def test_the_soft_length_penalty_is_eq_13_of_dapo():
    # max_len 20, buffer 5: 0 up to 15, (15 - length) / 5 up to 20, -1 beyond
    lengths = torch.tensor([0, 1, 15, 16, 18, 20, 21, 1000])
    assert_close(overlong_penalty(lengths, max_len=20, buffer=5), [0, 0, 0, -0.2, -0.6, -1, -1, -1])
    assert overlong_penalty(torch.tensor([0, 10, 20]), max_len=20, buffer=20).tolist() == [0, -0.5, -1]
    for buffer in (0, -1, 21):
        with pytest.raises(ValueError, match="buffer"):
            overlong_penalty(lengths, max_len=20, buffer=buffer)


def test_truncated_answers_leave_the_mask():
    mask, finished = mask_of([1, 1, 0], [1, 1, 1], [1, 1, 1]), torch.tensor([True, False, True])
    assert torch.equal(mask_truncated(mask, finished), mask_of([1, 1, 0], [0, 0, 0], [1, 1, 1]))
    assert torch.equal(mask_truncated(mask.long(), finished.long()), mask_of([1, 1, 0], [0, 0, 0], [1, 1, 1]))
    for wrong in (torch.ones(2), torch.ones(1), torch.ones(3, 3)):
        with pytest.raises(ValueError, match="expected"):
            mask_truncated(mask, wrong)
    with pytest.raises(ValueError, match=r"\(2, 2\).*\(2, 3\)"):
        whiten_rewards(torch.zeros(2, 2), torch.ones(2, 3))


def test_nothing_here_carries_a_gradient():
    rewards, mask = torch.randn(2, 3, requires_grad=True), torch.ones(2, 3, dtype=torch.bool)
    outputs = [whiten_rewards(rewards, mask), overlong_penalty(rewards[0], max_len=4, buffer=2),
               penalize_missing_eos(rewards[0], torch.zeros(3), missing_eos_penalty=1.0)]  # fmt: skip
    assert not any(output.requires_grad for output in outputs)
