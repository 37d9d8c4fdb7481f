"""The formulas behind the options: each off by default, each a pure function on tensors, in the style of `rl_math.py`.

`rl_basics.py` explains the letters and the three rules (masks select, log ratios are capped, shapes are checked).
Import from `rl_math`, which has every name. Hyperparameters are keyword-only; defaults live in the scripts' flags.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from trainer.rl_basics import (
    MAX_LOG_RATIO, ReduceSum, centred_groups, check_fit, check_same_shape, clipped_surrogate, kl_k1, kl_k2,
    masked_mean, moments, per_token, row_means, select, terminal_rewards, token_kl_penalty, token_ratios,
)  # fmt: skip


# ---------------------------------------------------------------------------------------------- KL(policy || reference)
def kl_k3_unbiased(logps: Tensor, old_logps: Tensor, ref_logps: Tensor) -> Tensor:
    """Per-token k3 estimate weighted by the ratio policy / old policy: both its value and its gradient are right.

    value = ratio · (exp(d) - d - 1), d = ref_logps - logps. Its mean over tokens drawn from the OLD policy is
    KL(policy || reference) exactly, as a function of the policy, so the mean gradient is that of the KL as well; for
    one token it is ratio · (logps - ref_logps). At ratio 1 that is the gradient of k2; plain k3 has another one.
    "Right" is meant token by token, in the states that were visited: what a token does to the KL of later tokens is
    seen by a penalty in the reward only (`token_rewards_with_kl`).
    Args: logps [N, R], grad flows; old_logps, ref_logps [N, R], no grad. Padding is NOT masked here.
    Returns: [N, R].  Sources: DeepSeek-V3.2, arXiv 2512.02556, "unbiased KL estimate"; arXiv 2512.21852.
    """
    check_same_shape(logps=logps, old_logps=old_logps, ref_logps=ref_logps)
    log_ratio = (logps - old_logps).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.detach().exp()
    value = ratio * token_kl_penalty(logps.detach(), ref_logps)
    # The gradient is written out. Left to autograd, the cap on d would turn it round: where the reference holds a token
    # e^20 times likelier, the capped estimate could only fall through the ratio, by making the token rarer still.
    slope = ratio * (logps.detach() - ref_logps)
    return value + slope * (log_ratio - log_ratio.detach())


def kl_estimate(logps: Tensor, old_logps: Tensor, ref_logps: Tensor, mask: Tensor, *, estimator: str) -> Tensor:
    """Per-token estimate of KL(policy || reference) in nats, 0 outside the mask.

    What its mean does as a loss term, over tokens drawn from the policy itself (ratio 1):
        k1            nothing: its expected gradient is 0, what is left is noise
        k2            descends KL(policy || reference)
        k3            descends KL(reference || policy), though its value estimates KL(policy || reference)
        k3_unbiased   descends KL(policy || reference), and goes on doing so when the policy has moved since sampling
    As a penalty in the reward, k1 is the one that descends KL(policy || reference) (the penalty has no gradient then).
    Args: logps [N, R], grad flows; old_logps (only k3_unbiased looks at them), ref_logps, mask [N, R], no grad.
    Returns: [N, R].  Raises: ValueError for another estimator.
    Sources: joschu.net/blog/kl-approx.html; what each one optimises: arXiv 2512.21852.
    """
    check_same_shape(logps=logps, old_logps=old_logps, ref_logps=ref_logps, mask=mask)
    logps, old_logps, ref_logps = (select(tensor, mask) for tensor in (logps, old_logps, ref_logps))
    if estimator == "k3_unbiased":
        return kl_k3_unbiased(logps, old_logps, ref_logps)
    estimates = {"k1": kl_k1, "k2": kl_k2, "k3": token_kl_penalty}
    if estimator not in estimates:
        raise ValueError(f"estimator is {estimator!r}, expected one of k1, k2, k3, k3_unbiased")
    return estimates[estimator](logps, ref_logps)


@torch.no_grad()
def token_rewards_with_kl(
    scores: Tensor, logps: Tensor, ref_logps: Tensor, mask: Tensor, *, kl_coef: float, estimator: str
) -> Tensor:
    """Token rewards that hold the KL penalty: -kl_coef · KL_t on every counted token, and the score on the last one.

    With k1, GAE with gamma = lam = 1 and any baseline, the expected policy gradient is that of
    score - kl_coef · KL(policy || reference) of whole answers, later tokens included.
    Args: scores [N]; logps of the policy that sampled, ref_logps, mask [N, R]; no grad.  Returns: [N, R], 0 outside
        the mask; a NaN score arrives on its row's last token.  Source: InstructGPT, arXiv 2203.02155, eq. 2.
    """
    penalty = kl_estimate(logps, logps, ref_logps, mask, estimator=estimator)
    return terminal_rewards(scores, mask) - kl_coef * penalty


@torch.no_grad()
def sequence_rewards_with_kl(
    rewards: Tensor, logps: Tensor, ref_logps: Tensor, mask: Tensor, *, kl_coef: float, estimator: str
) -> Tensor:
    """Rewards of whole answers less kl_coef · the sum of KL_t over the answer: GRPO's penalty in the reward.

    It belongs before the group advantages, whose baseline then knows of it.
    Args: as of `token_rewards_with_kl`, rewards [N].  Returns: [N]; a NaN reward stays NaN.
    """
    fits = mask.ndim == 2 and rewards.shape == mask.shape[:1]
    check_fit("[N] against [N, R]", fits, rewards=rewards, mask=mask)
    return rewards - kl_coef * kl_estimate(logps, logps, ref_logps, mask, estimator=estimator).sum(dim=1)


def adapt_kl_coef(coef: float, kl: float, *, target: float, horizon: float, n: float) -> float:
    """The weight of the KL after a step: coef · (1 + clip(kl / target - 1, ±0.2) · n / horizon).

    Above the target the weight grows, below it shrinks, by 0.2 · n / horizon at most.
    Args: kl measured this step and target, both in nats a token or both in nats an answer; n answers of this step on
        all ranks; horizon in answers. A kl that is not finite (nothing could be measured) leaves the weight as it is.
    Raises: ValueError unless target, horizon > 0 and n < 5 · horizon (beyond, the weight would become negative).
    Source: Ziegler et al. 2019, arXiv 1909.08593 (their K_beta is n / horizon).
    """
    if not (target > 0 and horizon > 0 and 0 <= n < 5 * horizon):
        raise ValueError(f"target {target}, horizon {horizon}, n {n}: expected numbers above 0, and n < 5 · horizon")
    if not abs(kl) < float("inf"):
        return coef
    return coef * (1 + max(-0.2, min(kl / target - 1, 0.2)) * n / horizon)


# ---------------------------------------------------------------------------------------------- rewards
@torch.no_grad()
def whiten_rewards(token_rewards: Tensor, mask: Tensor, eps: float = 1e-8, *, reduce_sum: ReduceSum = None) -> Tensor:
    """Token rewards with variance 1 (divisor n) around the mean they had: (r - mean) / sqrt(variance + eps) + mean.

    Over the counted tokens of all ranks; 0 elsewhere. The mean is kept (`shift_mean=False` in the code of InstructGPT's
    ancestors and in TRL): taken away, it would pay or charge an answer for each token it has.
    Args: token_rewards, mask [N, R]; no grad; `reduce_sum` as of `normalize_advantages`.  Returns: [N, R].
    Source: github.com/openai/lm-human-preferences, train_policy.py.
    """
    check_same_shape(token_rewards=token_rewards, mask=mask)
    centred, mean, variance = moments(token_rewards, mask, reduce_sum)
    return select(centred * torch.rsqrt(variance + eps) + mean, mask).to(token_rewards.dtype)


@torch.no_grad()
def penalize_missing_eos(scores: Tensor, finished: Tensor, *, missing_eos_penalty: float) -> Tensor:
    """Scores less the penalty where an answer was cut before its EOS.

    Args: scores [N]; finished bool [N], True = ended with EOS; no grad.  Returns: [N].  Source: TRL's PPO.
    """
    check_same_shape(scores=scores, finished=finished)
    return torch.where(finished.bool(), scores, scores - missing_eos_penalty)


@torch.no_grad()
def overlong_penalty(lengths: Tensor, *, max_len: int, buffer: int) -> Tensor:
    """What an answer loses for its length: 0 up to max_len - buffer tokens, then linearly down to -1 at max_len.

    Args: lengths [N] in tokens, EOS included.  Returns: float32 [N] in [-1, 0], to be added to the reward.
    Raises: ValueError unless 0 < buffer <= max_len.  Source: DAPO, arXiv 2503.14476, eq. 13.
    """
    if not 0 < buffer <= max_len:
        raise ValueError(f"buffer is {buffer} tokens, expected 1 ... {max_len} (max_len)")
    return ((max_len - buffer - lengths.float()) / buffer).clamp(-1, 0)


@torch.no_grad()
def mask_truncated(mask: Tensor, finished: Tensor) -> Tensor:
    """The mask without the answers that were cut before their EOS: nothing is learnt from them.

    Args: mask [N, R]; finished bool [N].  Returns: bool [N, R].  Source: DAPO (overlong filtering), arXiv 2503.14476.
    """
    fits = mask.ndim == 2 and finished.shape == mask.shape[:1]
    check_fit("[N] against [N, R]", fits, finished=finished, mask=mask)
    return mask.bool() & finished.bool()[:, None]


# ---------------------------------------------------------------------------------------------- advantages of a group
# Each takes rewards [N] and leaves non-finite ones out, as `group_relative_advantages` does: rows that must not count
# come in as NaN and get 0. No gradient; gives [N] and raises as that function does.


def _as_rows(groups: Tensor, rewards: Tensor) -> Tensor:
    return groups.view(-1).to(torch.promote_types(rewards.dtype, torch.float32))


@torch.no_grad()
def group_centred_advantages(rewards: Tensor, num_generations: int) -> Tensor:
    """r - mean of the group, not divided: a question nearly always or never solved weighs no more than another.

    Source: Dr. GRPO, arXiv 2503.20783.
    """
    return _as_rows(centred_groups(rewards, num_generations)[0], rewards)


@torch.no_grad()
def batch_std_advantages(
    rewards: Tensor, num_generations: int, eps: float = 1e-4, *, reduce_sum: ReduceSum = None
) -> Tensor:
    """(r - mean of the group) / (std + eps), the population std being that of all finite rewards on all ranks.

    The std is the rewards' own, around their common mean, as in TRL's scale_rewards="batch".
    Args: `reduce_sum` as of `normalize_advantages`.  Source: Lite PPO, arXiv 2508.08221.
    """
    centred, _ = centred_groups(rewards, num_generations)
    _, _, variance = moments(rewards, rewards.isfinite(), reduce_sum)
    return _as_rows(centred / (variance.sqrt() + eps), rewards)


@torch.no_grad()
def rloo_advantages(rewards: Tensor, num_generations: int) -> Tensor:
    """r - mean of the OTHER answers to the prompt (leave-one-out), an unbiased baseline.

    It equals (r - mean of all) · n / (n - 1) with n finite rewards in the group; with n = 1 there is none, and it is 0.
    Source: Ahmadian et al. 2024, arXiv 2402.14740.
    """
    centred, count = centred_groups(rewards, num_generations)
    return _as_rows(centred * count / (count - 1).clamp(min=1), rewards)


@torch.no_grad()
def flat_groups(rewards: Tensor, num_generations: int) -> Tensor:
    """Which groups teach nothing, because their finite rewards are all equal (std below 1e-6) or fewer than two.

    Args: rewards [N].  Returns: bool [B].  Source: DAPO's dynamic sampling, arXiv 2503.14476.
    """
    centred, count = centred_groups(rewards, num_generations)
    return (centred.square().sum(dim=1) / count.squeeze(1)).sqrt() < 1e-6


def group_advantages(rewards: Tensor, num_generations: int, *, how: str, reduce_sum: ReduceSum = None) -> Tensor:
    """The advantages [N] that --advantage names: group_nostd, batch_std or rloo (`group` is rl_math's own)."""
    if how == "batch_std":
        return batch_std_advantages(rewards, num_generations, reduce_sum=reduce_sum)
    return {"group_nostd": group_centred_advantages, "rloo": rloo_advantages}[how](rewards, num_generations)


# ---------------------------------------------------------------------------------------------- losses token by token
# Each gives [N, R], 0 outside the mask, to be reduced by `masked_mean`, `sequence_mean` or `aggregate`, with or without
# the weights of trainer/tis.py. Grad flows to logps [N, R]; old_logps, mask [N, R] and the advantages have none.


def ppo_token_loss(
    logps: Tensor, old_logps: Tensor, advantages: Tensor, mask: Tensor, *,
    clip_epsilon: float, clip_epsilon_high: float, dual_clip: float,
) -> Tensor:  # fmt: skip
    """PPO's clipped loss of each token: -min(ratio·A, clamp(ratio, 1 - clip_epsilon, 1 + clip_epsilon_high)·A).

    dual_clip c > 1 bounds it from above where A < 0: the objective is max(that minimum, c·A), so that a token the
    policy has made c times likelier against its advantage loses its gradient instead of an ever larger one. 0 = off.
    Args: advantages [N, R].  Returns: [N, R].  Raises: ValueError for a dual_clip that is neither 0 nor above 1.
    Sources: arXiv 1707.06347, eq. 7; dual clip: Ye et al. 2019, arXiv 1912.09729; clip-higher: arXiv 2503.14476.
    """
    check_same_shape(logps=logps, old_logps=old_logps, advantages=advantages, mask=mask)
    if dual_clip != 0 and not dual_clip > 1:
        raise ValueError(f"dual_clip is {dual_clip}, expected a ratio above 1, or 0 for none")
    advantages = select(advantages, mask)
    objective = clipped_surrogate(token_ratios(logps, old_logps, mask), advantages, clip_epsilon, clip_epsilon_high)
    if dual_clip:
        objective = torch.where(advantages < 0, torch.max(objective, dual_clip * advantages), objective)
    return -objective


def grpo_token_loss(
    logps: Tensor, old_logps: Tensor, advantages: Tensor, mask: Tensor, *, epsilon: float, epsilon_high: float
) -> Tensor:
    """GRPO's loss of each token: -min(ratio·A, clamp(ratio, 1 - epsilon, 1 + epsilon_high)·A), one advantage a row.

    epsilon_high = epsilon is GRPO; larger ("clip-higher", 0.28 against 0.2), with token aggregation, it is DAPO.
    Args: advantages [N].  Sources: arXiv 2402.03300, eq. 3; DAPO, arXiv 2503.14476.
    """
    ratios = token_ratios(logps, old_logps, mask)
    return -clipped_surrogate(ratios, per_token(advantages, mask), epsilon, epsilon_high)


def cispo_token_loss(
    logps: Tensor, old_logps: Tensor, advantages: Tensor, mask: Tensor, *, epsilon_high: float
) -> Tensor:
    """CISPO's loss of each token: -min(ratio, epsilon_high)·A·logp, the capped ratio being a constant.

    epsilon_high is the largest ratio itself (5.0), not an offset from 1.
    Args: advantages [N].  Source: MiniMax-M1, arXiv 2506.13585.
    """
    weights = token_ratios(logps, old_logps, mask).clamp(max=epsilon_high).detach()
    return -weights * per_token(advantages, mask) * select(logps, mask)


def sequence_ratios(logps: Tensor, old_logps: Tensor, mask: Tensor) -> Tensor:
    """GSPO's ratio of each row, exp(mean over its counted tokens of logps - old_logps), in all its columns; 1 outside.

    The geometric mean of the row's token ratios, its log held within ±MAX_LOG_RATIO. Grad flows as of `token_ratios`.
    """
    check_same_shape(logps=logps, old_logps=old_logps, mask=mask)
    means = row_means(logps - old_logps, mask).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return select(means[:, None].expand(mask.shape), mask).exp()


def gspo_token_loss(
    logps: Tensor, old_logps: Tensor, advantages: Tensor, mask: Tensor, *, epsilon: float, epsilon_high: float
) -> Tensor:
    """GSPO's loss: the clipped surrogate with the row's ratio s, a whole answer being clipped or not. [N, R], each
    counted column holding its row's -min(s·A, clamp(s, 1 - epsilon, 1 + epsilon_high)·A).

    `sequence_mean` of it is GSPO's loss; its gradient of one answer of n tokens is -s·A / n at each of them. Both
    epsilons are of a mean log ratio and hence small: 3e-4 and 4e-4 in the paper.
    Args: advantages [N].  Source: arXiv 2507.18071.
    """
    ratios = sequence_ratios(logps, old_logps, mask)
    return -clipped_surrogate(ratios, per_token(advantages, mask), epsilon, epsilon_high)


# ---------------------------------------------------------------------------------------------- aggregation
def _check_how(how: str) -> None:
    if how not in ("sequence", "token", "constant"):
        raise ValueError(f"how is {how!r}, expected one of sequence, token, constant")


@torch.no_grad()
def aggregation_count(mask: Tensor, *, how: str, max_gen_len: int) -> Tensor:
    """How much these rows add to the denominator of `aggregate`: add it up over micro-batches, window and ranks.

    sequence: rows with a counted token; token: counted tokens; constant: max_gen_len for each row with a counted token.
    Args: mask [N, R].  Returns: [] float32.  Raises: ValueError for another `how`.
    """
    _check_how(how)
    check_fit("[N, R]", mask.ndim == 2, mask=mask)
    if how == "token":
        return mask.bool().sum().float()
    return mask.bool().any(dim=1).sum().float() * (max_gen_len if how == "constant" else 1)


def aggregate(token_losses: Tensor, mask: Tensor, *, how: str, denominator: Tensor | float) -> Tensor:
    """A loss out of token losses: their sum (sequence: the sum of the rows' means) divided by `denominator`.

    Parts of a batch add up exactly when all are divided by the whole batch's count, the sum of `aggregation_count`
    over micro-batches, accumulation window and ranks (divided by the world size under DDP, which averages over ranks):
        sequence   every answer weighs the same (GRPO): a token of a long answer weighs less
        token      every token weighs the same (DAPO, arXiv 2503.14476)
        constant   as token, but divided by rows · max_gen_len (Dr. GRPO, arXiv 2503.20783): what a token weighs does
                   not depend on how long the answers of this batch happen to be
    Args: token_losses [N, R], grad flows to counted entries; mask [N, R]; denominator [], 0 (nothing counted) gives 0.
    Returns: [].  Raises: ValueError for another `how`.
    """
    _check_how(how)
    check_same_shape(token_losses=token_losses, mask=mask)
    total = row_means(token_losses, mask).sum() if how == "sequence" else select(token_losses, mask).sum()
    denominator = torch.as_tensor(denominator, dtype=total.dtype, device=total.device)
    return total * (denominator > 0) / denominator.masked_fill(denominator <= 0, 1)


# ---------------------------------------------------------------------------------------------- what was clipped
class ClipRatios(NamedTuple):
    """Shares of counted tokens, [] each: `low` = ratio < 1 - epsilon and A < 0, `high` = ratio > 1 + epsilon_high and
    A > 0, `region` = either. These, and only these, lose their gradient to the clip."""

    low: Tensor
    high: Tensor
    region: Tensor


def _token_advantages(advantages: Tensor, mask: Tensor) -> Tensor:
    """Advantages [N] or [N, R] as [N, R], 0 outside the mask."""
    if advantages.ndim == 1:
        return per_token(advantages, mask)
    check_same_shape(advantages=advantages, mask=mask)
    return select(advantages, mask)


@torch.no_grad()
def clip_ratios(
    ratios: Tensor, advantages: Tensor, mask: Tensor, *, epsilon: float, epsilon_high: float
) -> ClipRatios:
    """The shares of tokens at which the clip acts, as TRL's clip_ratio/{low,high,region}_mean define them.

    Args: ratios [N, R] from `token_ratios` or `sequence_ratios`; advantages [N] or [N, R]; mask [N, R]; no grad.
    """
    check_same_shape(ratios=ratios, mask=mask)
    advantages = _token_advantages(advantages, mask)
    low = (ratios < 1 - epsilon) & (advantages < 0)
    high = (ratios > 1 + epsilon_high) & (advantages > 0)
    return ClipRatios(*(masked_mean(clipped, mask) for clipped in (low, high, low | high)))


@torch.no_grad()
def cispo_clip_ratio(ratios: Tensor, advantages: Tensor, mask: Tensor, *, epsilon_high: float) -> Tensor:
    """The share of counted tokens whose ratio is above CISPO's cap while A > 0, as TRL's cispo_clip_ratio.

    Args: as of `clip_ratios`; epsilon_high is the cap itself.  Returns: [] in [0, 1].
    """
    check_same_shape(ratios=ratios, mask=mask)
    return masked_mean((ratios > epsilon_high) & (_token_advantages(advantages, mask) > 0), mask)
