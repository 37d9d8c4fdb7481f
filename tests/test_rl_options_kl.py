"""Estimates of KL(policy || reference) in loss and reward: by hand, by differences, and by summing over every outcome.

The last is what decides which KL a term descends: over a small vocabulary the expectation is a finite sum.
"""

import math

import pytest
import torch
from handwork import INF, NAN, assert_close, gradient, mask_of, tensor

from trainer.rl_math import (
    adapt_kl_coef, compute_gae, kl_estimate, kl_k3_unbiased, masked_mean, sequence_rewards_with_kl,
    token_rewards_with_kl,
)  # fmt: skip

ESTIMATORS = ["k1", "k2", "k3", "k3_unbiased"]


def doubles(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def reference_kl(estimator: str, logp: float, old_logp: float, ref_logp: float) -> float:
    """The estimate of one token, from the definitions in ratios of probabilities."""
    policy, old, ref = math.exp(logp), math.exp(old_logp), math.exp(ref_logp)
    k3 = ref / policy - math.log(ref / policy) - 1
    return {"k1": math.log(policy / ref), "k2": math.log(policy / ref) ** 2 / 2, "k3": k3,
            "k3_unbiased": policy / old * k3}[estimator]  # fmt: skip


# ---- numbers ----


def test_one_token_by_hand():
    # policy 1/2, old 1/4, reference 1: d = log 2, k3 = 2 - log 2 - 1, ratio 2
    logps, old_logps, ref_logps = tensor([math.log(0.5)]), tensor([math.log(0.25)]), tensor([0.0])
    expected = {"k1": -math.log(2), "k2": math.log(2) ** 2 / 2, "k3": 1 - math.log(2),
                "k3_unbiased": 2 * (1 - math.log(2))}  # fmt: skip
    slopes = {"k1": 1.0, "k2": -math.log(2), "k3": 1 - 2.0, "k3_unbiased": -2 * math.log(2)}
    for estimator in ESTIMATORS:
        def estimate(x, estimator=estimator):
            return kl_estimate(x, old_logps, ref_logps, mask_of([1]), estimator=estimator)

        assert_close(estimate(logps), [[expected[estimator]]])
        assert_close(gradient(lambda x: estimate(x).sum(), logps), [[slopes[estimator]]])


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_against_the_definitions_and_finite_differences(estimator):
    logps, old_logps, ref_logps = (doubles(3, 4, seed=seed) for seed in (1, 2, 3))
    mask = mask_of([1, 1, 1, 1], [1, 1, 0, 1], [0, 0, 0, 0])
    actual = kl_estimate(logps, old_logps, ref_logps, mask, estimator=estimator)
    for i in range(3):
        for j in range(4):
            numbers = (logps[i, j].item(), old_logps[i, j].item(), ref_logps[i, j].item())
            expected = reference_kl(estimator, *numbers) if mask[i, j] else 0
            assert actual[i, j].item() == pytest.approx(expected, abs=1e-12)
    assert torch.autograd.gradcheck(
        lambda x: kl_estimate(x, old_logps, ref_logps, mask, estimator=estimator), logps.requires_grad_()
    )


def test_an_unknown_estimator_and_a_wrong_shape_are_refused():
    row, mask = tensor([0, 0]), mask_of([1, 1])
    with pytest.raises(ValueError, match="'k4'.*k1, k2, k3, k3_unbiased"):
        kl_estimate(row, row, row, mask, estimator="k4")
    for place in range(3):
        inputs = [row, row, row]
        inputs[place] = tensor([0])
        with pytest.raises(ValueError, match=r"\(1, 2\).*\(1, 1\)|\(1, 1\).*\(1, 2\)"):
            kl_estimate(*inputs, mask, estimator="k1")
        with pytest.raises(ValueError, match=r"\(1, 2\).*\(1, 1\)|\(1, 1\).*\(1, 2\)"):
            kl_k3_unbiased(*inputs)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("garbage", [NAN, INF, -INF, 1e4, None])
def test_padding_changes_neither_value_nor_gradient(estimator, garbage):
    mask = mask_of([1, 0, 1], [0, 0, 0])
    clean = [doubles(2, 3, seed=seed).float() for seed in (4, 5, 6)]
    fills = [garbage] * 3 if garbage is not None else [200.0, NAN, -1e4]
    dirty = [values.masked_fill(~mask, fill) for values, fill in zip(clean, fills)]

    def loss(logps, others):
        return masked_mean(kl_estimate(logps, *others, mask, estimator=estimator), mask)

    assert loss(dirty[0], dirty[1:]) == loss(clean[0], clean[1:])
    wanted, found = gradient(lambda x: loss(x, clean[1:]), clean[0]), gradient(lambda x: loss(x, dirty[1:]), dirty[0])
    assert torch.equal(found, wanted) and (found[~mask] == 0).all() and (found[mask] != 0).all()


def test_extremes_stay_finite_and_are_pulled_the_right_way():
    # The reference 200 nats above (make it likelier), 200 below (make it rarer), and a ratio past the cap (let it be)
    logps, old_logps, ref_logps = tensor([-200, 0, 0, -200]), tensor([-200, 0, -200, 0]), tensor([0, -200, -1, -1])
    estimate = kl_k3_unbiased(logps, old_logps, ref_logps)
    cap = math.exp(20)
    torch.testing.assert_close(estimate[0, :3], torch.tensor([cap - 21, 199, cap * math.exp(-1)]))
    assert estimate.isfinite().all()
    grad = gradient(lambda x: kl_k3_unbiased(x, old_logps, ref_logps).sum(), logps)
    assert grad.tolist() == [[-200, 200, 0, 0]]


# ---- what a loss term descends: sums over a vocabulary of four ----

THETA, OLD, REF = (doubles(4, seed=seed) for seed in (7, 8, 9))


def slope(function):
    """d function(log-probs of the policy) / d logits."""
    return gradient(lambda theta: function(theta.log_softmax(0)), THETA)


def reverse_kl(logps):
    return (logps.exp() * (logps - REF.log_softmax(0))).sum()


def forward_kl(logps):
    return (REF.softmax(0) * (REF.log_softmax(0) - logps)).sum()


def expected_estimate(estimator, sampled_from):
    """The estimate's mean over tokens drawn with the given probabilities, which carry no gradient."""

    def mean(logps):
        rows = [values.detach()[None] for values in (sampled_from.log(), REF.log_softmax(0))]
        estimate = kl_estimate(logps[None], *rows, torch.ones(1, 4, dtype=torch.bool), estimator=estimator)
        return (sampled_from * estimate[0]).sum()

    return mean


def test_what_each_estimator_descends_on_policy():
    policy = THETA.softmax(0)
    reverse, forward = slope(reverse_kl), slope(forward_kl)
    # the gradient of reverse KL in closed form: p·(log(p / q) - KL)
    logps = THETA.log_softmax(0)
    assert_close(reverse, policy * (logps - REF.log_softmax(0) - reverse_kl(logps)), atol=1e-12)
    assert (reverse - forward).abs().max() > 0.1
    found = {estimator: slope(expected_estimate(estimator, policy)) for estimator in ESTIMATORS}
    assert_close(found["k1"], torch.zeros(4), atol=1e-12)
    assert_close(found["k2"], reverse, atol=1e-12)
    assert_close(found["k3"], forward, atol=1e-12)
    assert_close(found["k3_unbiased"], reverse, atol=1e-12)


def test_only_the_weighted_form_descends_the_reverse_kl_off_policy():
    old, reverse = OLD.softmax(0), slope(reverse_kl)
    assert_close(slope(expected_estimate("k3_unbiased", old)), reverse, atol=1e-12)
    for estimator in ("k1", "k2", "k3"):
        found = slope(expected_estimate(estimator, old))
        assert (found - reverse).abs().max() > 0.1
        assert (found - slope(forward_kl)).abs().max() > 0.1


def test_values_are_unbiased_for_k1_and_k3_on_policy_and_for_the_weighted_form_anywhere():
    logps = THETA.log_softmax(0)
    policy, old, kl = THETA.softmax(0), OLD.softmax(0), reverse_kl(logps)
    for estimator in ("k1", "k3", "k3_unbiased"):
        assert_close(expected_estimate(estimator, policy)(logps), kl, atol=1e-12)
    assert_close(expected_estimate("k3_unbiased", old)(logps), kl, atol=1e-12)
    assert (expected_estimate("k2", policy)(logps) - kl).abs() > 0.05
    assert (expected_estimate("k3", old)(logps) - kl).abs() > 0.01


# ---- what a penalty in the reward descends: sums over every answer of up to two tokens of three ----

ANSWERS = torch.tensor([[0, 0], [1, 0], [1, 1], [1, 2], [2, 0], [2, 1], [2, 2]])  # token 0 first = over
LIVE = mask_of([1, 0], [1, 1], [1, 1], [1, 1], [1, 1], [1, 1], [1, 1])
SCORES = torch.tensor([1.0, -2, 0.5, 3, 0, 1, -1], dtype=torch.float64)
POLICY, REFERENCE = doubles(4, 3, seed=10), doubles(4, 3, seed=11)  # row 0: first token; row 1 + v: after token v


def answer_logps(table):
    """Log-probs [7, 2] of the tokens of every answer."""
    logps = table.log_softmax(1)
    return torch.stack([logps[0, ANSWERS[:, 0]], logps[1 + ANSWERS[:, 0], ANSWERS[:, 1]]], dim=1)


def objective(table, kl_coef):
    """E[score] - kl_coef · KL(policy || reference) over whole answers."""
    logps = (answer_logps(table) * LIVE).sum(1)
    return (logps.exp() * (SCORES - kl_coef * (logps - (answer_logps(REFERENCE) * LIVE).sum(1)))).sum()


def policy_gradient(advantages):
    """Expected gradient of sum over tokens of A·logp, the answers being drawn from the policy."""
    chance = (answer_logps(POLICY) * LIVE).sum(1).exp()
    return gradient(lambda table: (chance[:, None] * advantages * answer_logps(table) * LIVE).sum(), POLICY)


def test_k1_in_the_reward_descends_the_kl_of_whole_answers():
    wanted = gradient(lambda table: objective(table, 0.3), POLICY)
    logps, ref_logps = answer_logps(POLICY), answer_logps(REFERENCE)
    rewards = token_rewards_with_kl(SCORES, logps, ref_logps, LIVE, kl_coef=0.3, estimator="k1")
    values = doubles(7, 1, seed=12)[ANSWERS[:, 0]] * torch.tensor([0.0, 1.0])  # any critic of the state will do
    advantages, _ = compute_gae(rewards, values, LIVE, gamma=1.0, lam=1.0)
    assert_close(policy_gradient(advantages), wanted, atol=1e-12)

    summed = sequence_rewards_with_kl(SCORES, logps, ref_logps, LIVE, kl_coef=0.3, estimator="k1")
    assert_close(policy_gradient(summed[:, None].expand(7, 2)), wanted, atol=1e-12)

    summed = sequence_rewards_with_kl(SCORES, logps, ref_logps, LIVE, kl_coef=0.3, estimator="k3")
    assert (policy_gradient(summed[:, None].expand(7, 2)) - wanted).abs().max() > 0.01


def test_a_loss_term_does_not_see_what_a_token_does_to_the_kl_of_later_ones():
    chance = (answer_logps(POLICY) * LIVE).sum(1).exp()
    wanted = gradient(lambda table: objective(table, 0.0) - objective(table, 1.0), POLICY)

    def loss(table):
        estimate = kl_estimate(answer_logps(table), answer_logps(POLICY), answer_logps(REFERENCE), LIVE,
                               estimator="k3_unbiased")  # fmt: skip
        return (chance[:, None] * estimate).sum()

    found = gradient(loss, POLICY)
    assert_close(found[1:], wanted[1:], atol=1e-12)  # last tokens: nothing comes later
    assert (found[0] - wanted[0]).abs().max() > 0.05


# ---- rewards and controller ----


def test_rewards_with_kl_by_hand():
    logps = tensor([-1, -2, 9], [-1, -1, -1], [NAN, NAN, NAN])
    ref_logps = tensor([-1.5, -1.75, NAN], [-2, -1, 0], [0, 0, 0])
    mask, scores = mask_of([1, 1, 0], [1, 1, 1], [0, 0, 0]), torch.tensor([2.0, NAN, 5.0])
    rewards = token_rewards_with_kl(scores, logps, ref_logps, mask, kl_coef=0.1, estimator="k1")
    # k1: 0.5, -0.25; 1, 0, -1
    expected = [[-0.05, 2 + 0.025, 0], [-0.1, 0, NAN], [0, 0, 0]]
    torch.testing.assert_close(rewards, torch.tensor(expected), equal_nan=True)
    summed = sequence_rewards_with_kl(scores, logps, ref_logps, mask, kl_coef=0.1, estimator="k1")
    torch.testing.assert_close(summed, torch.tensor([2 - 0.025, NAN, 5.0]), equal_nan=True)
    summed = sequence_rewards_with_kl(scores, logps, ref_logps, mask, kl_coef=1.0, estimator="k2")
    assert summed[0].item() == pytest.approx(2 - (0.125 + 0.03125))
    # at the moment of sampling the ratio is 1: the two k3 are one
    pairs = [token_rewards_with_kl(scores, logps, ref_logps, mask, kl_coef=1.0, estimator=name)
             for name in ("k3", "k3_unbiased")]  # fmt: skip
    torch.testing.assert_close(*pairs, equal_nan=True)


def test_rewards_with_kl_carry_no_gradient_and_check_shapes():
    logps = torch.zeros(2, 2, requires_grad=True)
    mask = torch.ones(2, 2, dtype=torch.bool)
    for function in (token_rewards_with_kl, sequence_rewards_with_kl):
        assert not function(torch.zeros(2), logps, logps, mask, kl_coef=1.0, estimator="k2").requires_grad
        for wrong in (torch.zeros(2, 2), torch.zeros(2, 1), torch.zeros(3)):
            with pytest.raises(ValueError, match="expected"):
                function(wrong, logps, logps, mask, kl_coef=1.0, estimator="k2")


@pytest.mark.parametrize("kl, expected", [
    (6.0, 0.2),  # at the target
    (6.3, 0.2 * (1 + 0.05 * 0.0256)),  # 6.3 / 6 - 1 = 0.05; n / horizon = 256 / 10000
    (5.4, 0.2 * (1 - 0.1 * 0.0256)),
    (12.0, 0.2 * (1 + 0.2 * 0.0256)), (7.2, 0.2 * (1 + 0.2 * 0.0256)), (1e9, 0.2 * (1 + 0.2 * 0.0256)),
    (0.0, 0.2 * (1 - 0.2 * 0.0256)), (-3.0, 0.2 * (1 - 0.2 * 0.0256)),
    (NAN, 0.2), (INF, 0.2), (-INF, 0.2),
])  # fmt: skip
def test_the_controller(kl, expected):
    assert adapt_kl_coef(0.2, kl, target=6.0, horizon=10_000, n=256) == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("target, horizon, n", [(0, 100, 1), (-1, 100, 1), (1, 0, 0), (1, 100, 500), (1, 100, -1),
                                               (NAN, 100, 1)])  # fmt: skip
def test_a_controller_that_could_turn_the_penalty_round_is_refused(target, horizon, n):
    with pytest.raises(ValueError, match="horizon"):
        adapt_kl_coef(0.2, 1.0, target=target, horizon=horizon, n=n)
    assert adapt_kl_coef(0.2, 0.0, target=1.0, horizon=100, n=499) > 0
