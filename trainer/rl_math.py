"""The arithmetic of the two trainers as pure functions on tensors. Imports torch only; nothing here reads flags.

Here are the formulas of PPO and GRPO as MiniMind has them. `rl_basics.py` has what they are built of and explains the
letters and the three rules (masks select, log ratios are capped, shapes are checked); `rl_options.py` has what is off
by default. Every name can be imported from here.
"""

import torch
from torch import Tensor

from trainer.rl_basics import (
    MAX_LOG_RATIO, ReduceSum, centred_groups, check_fit, check_same_shape, kl_k1, kl_k2, masked_mean, moments, select,
    sequence_mean, terminal_rewards, token_kl_penalty, token_ratios, widened,
)  # fmt: skip
from trainer.rl_options import (
    ClipRatios, adapt_kl_coef, aggregate, aggregation_count, batch_std_advantages, cispo_clip_ratio, cispo_token_loss,
    clip_ratios, flat_groups, group_advantages,
    group_centred_advantages, grpo_token_loss, gspo_token_loss, kl_estimate, kl_k3_unbiased,
    mask_truncated, overlong_penalty, penalize_missing_eos, ppo_token_loss, rloo_advantages, sequence_ratios,
    sequence_rewards_with_kl, token_rewards_with_kl, whiten_rewards,
)  # fmt: skip

__all__ = [
    "BLOCK_ELEMENTS", "MAX_LOG_RATIO", "ClipRatios", "ReduceSum", "adapt_kl_coef", "aggregate", "aggregation_count",
    "approx_policy_kl", "batch_std_advantages", "cispo_clip_ratio", "cispo_policy_loss", "cispo_token_loss",
    "clip_fraction", "clip_ratios", "compute_gae", "dpo_logratio_loss", "explained_variance", "flat_groups",
    "gather_response_logps", "group_advantages",
    "group_centred_advantages", "group_relative_advantages", "grpo_policy_loss",
    "grpo_token_loss", "gspo_token_loss", "kl_estimate", "kl_k1", "kl_k2", "kl_k3_unbiased", "logps_and_entropy",
    "mask_truncated", "mask_until_eos", "masked_mean", "normalize_advantages", "overlong_penalty",
    "penalize_missing_eos", "ppo_policy_loss", "ppo_token_loss", "ppo_value_loss", "reference_kl_penalty",
    "response_logp_positions", "rloo_advantages", "selective_logps", "sequence_mean", "sequence_ratios",
    "sequence_rewards_with_kl", "terminal_rewards", "token_entropy", "token_kl_penalty", "token_ratios",
    "token_rewards_with_kl", "whiten_rewards",
]  # fmt: skip

BLOCK_ELEMENTS = 1 << 20  # float32 numbers in one block of logits (4 MiB), of which several are worked on at once
LOWEST_LOG_PROB = -1e4  # nats; exp of it is 0, and 0·-inf of a token ruled out must not make an entropy NaN


def mask_until_eos(completion_ids: Tensor, completion_mask: Tensor, eos_token_id: int | list[int]) -> Tensor:
    """Which response tokens count: those the engine produced, up to and including the first EOS of the row.

    A pad id sampled in the middle of an answer counts; an EOS id standing in the padding ends nothing.
    Args: completion_ids [N, R] token ids; completion_mask [N, R], True = produced by the engine; eos_token_id: the id
        that ends an answer, or all that do.  Returns: bool [N, R].
    """
    check_same_shape(completion_ids=completion_ids, completion_mask=completion_mask)
    check_fit("[N, R]", completion_ids.ndim == 2, completion_ids=completion_ids)
    produced = completion_mask.bool()
    is_eos = torch.isin(completion_ids, torch.as_tensor(eos_token_id, device=completion_ids.device)) & produced
    return produced & (is_eos.long().cumsum(dim=1) - is_eos.long() == 0)


def response_logp_positions(prompt_lens: Tensor, response_width: int) -> Tensor:
    """Where the response tokens' predictions stand: logits at position p predict token p + 1, so prompt_len - 1 + j.

    Args: prompt_lens [N], the column at which each row's response begins; response_width R.  Returns: long [N, R].
    """
    check_fit("[N]", prompt_lens.ndim == 1, prompt_lens=prompt_lens)
    return prompt_lens.long()[:, None] - 1 + torch.arange(response_width, device=prompt_lens.device)


def _logit_blocks(rows: int, width: int, vocabulary: int) -> list[tuple[int, slice]]:
    """Indices that cover [rows, width] in pieces of one row and at most BLOCK_ELEMENTS logits (or one token)."""
    columns = max(1, BLOCK_ELEMENTS // max(vocabulary, 1))
    return [(row, slice(start, start + columns)) for row in range(rows) for start in range(0, width, columns)]


class _LogpsAndEntropy(torch.autograd.Function):
    """log_softmax(logits / temperature)[target] and, if asked for, that softmax's entropy; block by block, both ways.

    autograd would keep a float32 copy of all logits for `logsumexp` and make two more on the way back. Here the logits
    (in their own dtype) and one or two numbers a token are kept, and the softmax is made again per block.
    """

    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor, temperature: float, with_entropy: bool):
        logps = widened(logits.new_empty(targets.shape))
        log_normalisers = torch.empty_like(logps)
        entropy = torch.empty_like(logps) if with_entropy else None
        for block in _logit_blocks(*logits.shape):
            scaled = widened(logits[block]) / temperature
            log_normalisers[block] = scaled.logsumexp(dim=-1)
            logps[block] = scaled.gather(-1, targets[block][..., None])[..., 0] - log_normalisers[block]
            if with_entropy:
                log_probs = scaled - log_normalisers[block][..., None]
                entropy[block] = -(log_probs.exp() * log_probs.clamp(min=LOWEST_LOG_PROB)).sum(dim=-1)
        ctx.save_for_backward(logits, targets, log_normalisers, entropy)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return logps, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_logps: Tensor | None, grad_entropy: Tensor | None):
        logits, targets, log_normalisers, entropy = ctx.saved_tensors
        grad_logits = torch.zeros_like(logits)
        for block in _logit_blocks(*logits.shape):
            log_probs = widened(logits[block]) / ctx.temperature - log_normalisers[block][..., None]
            probabilities = log_probs.exp()
            # A padding position may hold NaN logits: its incoming gradient is 0, and 0·NaN must not become NaN.
            if grad_logps is not None:
                incoming = grad_logps[block][..., None] / ctx.temperature
                gradient = -probabilities * incoming
                gradient.scatter_add_(-1, targets[block][..., None], incoming)
                grad_logits[block] = gradient.masked_fill_(incoming == 0, 0)
            if grad_entropy is not None:
                incoming = grad_entropy[block][..., None] / ctx.temperature
                gradient = log_probs.clamp_(min=LOWEST_LOG_PROB).add_(entropy[block][..., None]).mul_(probabilities)
                grad_logits[block] -= gradient.mul_(incoming).masked_fill_(incoming == 0, 0)
        return grad_logits, None, None, None


def _check_logits(logits: Tensor, targets: Tensor, temperature: float) -> None:
    if not 0 < temperature < float("inf"):
        raise ValueError(f"temperature is {temperature}, expected a number above 0")
    fits = logits.ndim == 3 and logits.shape[:2] == targets.shape
    check_fit("[N, R, V] against [N, R]", fits, logits=logits, targets=targets)


def selective_logps(logits: Tensor, targets: Tensor, *, temperature: float) -> Tensor:
    """The log-probability of each target token: log_softmax(logits / temperature)[target], in nats.

    Worked out in float32 (float64 for float64 logits), as target minus logsumexp and in blocks, so that neither the
    forward nor the backward pass holds an [N, R, V] float32 tensor.
    Args: logits [N, R, V], grad flows; targets [N, R] token ids; temperature > 0, the one the tokens were sampled at.
    Returns: float32 [N, R].  Raises: ValueError if the temperature is not finite and above 0.
    """
    _check_logits(logits, targets, temperature)
    return _LogpsAndEntropy.apply(logits, targets, temperature, False)[0]


def logps_and_entropy(logits: Tensor, targets: Tensor, *, temperature: float) -> tuple[Tensor, Tensor]:
    """(`selective_logps`, `token_entropy`) of the same logits in one pass; grad flows through both.

    Arguments, memory and errors as of `selective_logps`.  Returns: two float32 [N, R]; the first is bit-identical.
    """
    _check_logits(logits, targets, temperature)
    return _LogpsAndEntropy.apply(logits, targets, temperature, True)


def token_entropy(logits: Tensor, *, temperature: float) -> Tensor:
    """The exact entropy of each next-token distribution: -sum over v of p_v·log p_v, p = softmax(logits / temperature).

    In nats, from 0 (sure of one token; up to float32 rounding) to log V. Its gradient with respect to logit v is
    -p_v·(log p_v + entropy) / temperature.
    Args: logits [N, R, V], grad flows (none is kept under no_grad); memory and errors as of `selective_logps`.
    Returns: float32 [N, R].
    """
    targets = torch.zeros(logits.shape[:2], dtype=torch.long, device=logits.device)
    return logps_and_entropy(logits, targets, temperature=temperature)[1]


def gather_response_logps(logits: Tensor, output_ids: Tensor, positions: Tensor) -> Tensor:
    """Log-probs of the response tokens (temperature 1) out of the logits of whole sequences.

    The logits at position p predict output_ids[:, p + 1]. Only the response positions are normalised.
    Args: logits [N, W, V], grad flows; output_ids [N, W]; positions long [N, R] from `response_logp_positions`.
    Returns: float32 [N, R].  Raises: ValueError if a position has no next token (outside 0 ... W - 2).
    """
    fits = logits.ndim == 3 and logits.shape[:2] == output_ids.shape
    check_fit("[N, W, V] against [N, W]", fits, logits=logits, output_ids=output_ids)
    fits = positions.ndim == 2 and positions.shape[0] == output_ids.shape[0]
    check_fit("[N, R] against [N, W]", fits, positions=positions, output_ids=output_ids)
    if bool(((positions < 0) | (positions > output_ids.shape[1] - 2)).any()):
        raise ValueError(f"positions {positions.tolist()} must lie in 0 ... {output_ids.shape[1] - 2} (W - 2)")
    rows = torch.arange(positions.shape[0], device=positions.device)[:, None]
    return selective_logps(logits[rows, positions], output_ids.gather(1, positions + 1), temperature=1.0)


def reference_kl_penalty(logps: Tensor, ref_logps: Tensor, mask: Tensor) -> Tensor:
    """The k3 estimate of KL(policy || reference), in nats a token, over all counted tokens: PPO's penalty.

    Args: logps [N, R], grad flows; ref_logps, mask [N, R], no grad.  Returns: [].
    """
    check_same_shape(logps=logps, ref_logps=ref_logps, mask=mask)
    return masked_mean(token_kl_penalty(select(logps, mask), select(ref_logps, mask)), mask)


@torch.no_grad()
def approx_policy_kl(logps: Tensor, old_logps: Tensor, mask: Tensor) -> Tensor:
    """How far the policy has moved since sampling, in nats a token: 0.5 · mean(log ratio²). For the early stop only.

    Args: logps, old_logps, mask [N, R]; no grad.  Returns: [].
    """
    check_same_shape(logps=logps, old_logps=old_logps, mask=mask)
    return masked_mean(0.5 * select(logps - old_logps, mask).square(), mask)


@torch.no_grad()
def compute_gae(
    token_rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimates and the returns the critic learns.

    delta_t = r_t + gamma·V_{t+1} - V_t and A_t = delta_t + gamma·lam·A_{t+1}, backwards; returns = A + V.
    After the last counted token V and A are 0: the answer is over. An uncounted token in the middle ends the
    sequence there, so each counted run is an episode of its own; padding changes nothing and may hold anything.
    Args: token_rewards, values (of the old critic), mask [N, R]; gamma, lam in [0, 1]; no grad.
    Returns: advantages, returns, each [N, R] and 0 outside the mask.  Source: arXiv 1506.02438, eq. 16.
    """
    check_same_shape(token_rewards=token_rewards, values=values, mask=mask)
    check_fit("[N, R]", token_rewards.ndim == 2, token_rewards=token_rewards)
    rewards, values, counted = select(token_rewards, mask), select(values, mask), mask.bool()
    advantages = torch.zeros_like(values)
    next_value = next_advantage = values.new_zeros(values.shape[0])
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        # Zero outside the mask, so that the column before it finds nothing to bootstrap from.
        next_advantage = (delta + gamma * lam * next_advantage).masked_fill(~counted[:, t], 0)
        next_value = values[:, t]
        advantages[:, t] = next_advantage
    return advantages, advantages + values


@torch.no_grad()
def normalize_advantages(
    advantages: Tensor, mask: Tensor, eps: float = 1e-8, *, reduce_sum: ReduceSum = None
) -> Tensor:
    """Advantages with mean 0 and variance 1 (divisor n) over the counted tokens, 0 elsewhere.

    (A - mean) / sqrt(variance + eps), summed in float64. One counted token, or equal ones, give 0.
    Args: advantages, mask [N, R]; no grad; `reduce_sum` turns a float64 tensor of this process' sums into the sums
        over all processes (called twice), so that ranks whiten with the moments of the whole batch.  Returns: [N, R].
    """
    check_same_shape(advantages=advantages, mask=mask)
    centred, _, variance = moments(advantages, mask, reduce_sum)
    return (centred * torch.rsqrt(variance + eps)).to(advantages.dtype)


@torch.no_grad()
def group_relative_advantages(rewards: Tensor, num_generations: int, eps: float = 1e-4) -> Tensor:
    """Each answer's reward against the other answers to its prompt: (r - mean) / (std + eps), population std.

    Rows i·G ... i·G + G - 1 are one group. A non-finite reward is left out of mean and std and gets advantage 0, so
    [1, NaN, 3, 2] is measured on {1, 3, 2}; none left: all 0; equal rewards: exactly 0.  Source: arXiv 2402.03300.
    Args: rewards [N], no grad; num_generations G.  Returns: [N].  Raises: ValueError if G < 2 or N is no multiple of G.
    """
    centred, count = centred_groups(rewards, num_generations)
    std = (centred.square().sum(dim=1, keepdim=True) / count).sqrt()
    return (centred / (std + eps)).view(-1).to(torch.promote_types(rewards.dtype, torch.float32))


@torch.no_grad()
def explained_variance(values: Tensor, returns: Tensor, mask: Tensor, *, reduce_sum: ReduceSum = None) -> Tensor:
    """How much of the returns the critic foresees: 1 - Var(returns - values) / Var(returns) over counted tokens.

    1 = all of it, 0 = no better than a constant, below 0 = worse. Returns that do not vary (variance <= 1e-12) give 0.
    Args: values, returns, mask [N, R], no grad; `reduce_sum` as above (called four times).  Returns: [] float32.
    """
    check_same_shape(values=values, returns=returns, mask=mask)
    _, _, target = moments(returns, mask, reduce_sum)
    _, _, error = moments(returns - values, mask, reduce_sum)
    return torch.where(target > 1e-12, 1 - error / target, torch.zeros_like(target)).float()


def ppo_policy_loss(
    logps: Tensor, old_logps: Tensor, advantages: Tensor, mask: Tensor, *, clip_epsilon: float
) -> Tensor:
    """PPO's clipped policy loss: mean over counted tokens of -min(ratio·A, clamp(ratio, 1 ± clip_epsilon)·A).

    The minimum is pessimistic: with A > 0 a ratio of 0.3 stays 0.3 (nothing is lifted to 0.8) and keeps its gradient;
    only a ratio that left the range in the direction A asks for loses it.  Source: arXiv 1707.06347, eq. 7.
    Args: logps [N, R], grad flows; old_logps, advantages, mask [N, R], no grad.  Returns: [].
    """
    losses = ppo_token_loss(
        logps, old_logps, advantages, mask, clip_epsilon=clip_epsilon, clip_epsilon_high=clip_epsilon, dual_clip=0
    )
    return masked_mean(losses, mask)


def ppo_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, cliprange_value: float
) -> Tensor:
    """The critic's loss: mean over counted tokens of 0.5 · max((V - R)², (V_clipped - R)²).

    V_clipped = old_values + clamp(V - old_values, ±cliprange_value): moved further, a value learns no more this batch.
    Args: values [N, R], grad flows; old_values, returns, mask [N, R], no grad.  Returns: [].
    """
    check_same_shape(values=values, old_values=old_values, returns=returns, mask=mask)
    values, old_values, returns = (select(tensor, mask) for tensor in (values, old_values, returns))
    clipped = old_values + (values - old_values).clamp(-cliprange_value, cliprange_value)
    return masked_mean(0.5 * torch.max((values - returns).square(), (clipped - returns).square()), mask)


@torch.no_grad()
def clip_fraction(logps: Tensor, old_logps: Tensor, mask: Tensor, *, clip_epsilon: float) -> Tensor:
    """The share of counted tokens whose ratio is outside 1 ± clip_epsilon, on either side and whatever A is.

    Args: logps, old_logps, mask [N, R]; no grad.  Returns: [] in [0, 1].
    """
    return masked_mean((token_ratios(logps, old_logps, mask) - 1).abs() > clip_epsilon, mask)


def grpo_policy_loss(logps: Tensor, old_logps: Tensor, advantages: Tensor, mask: Tensor, *, epsilon: float) -> Tensor:
    """GRPO's policy loss: the clipped surrogate of PPO with one advantage a row, reduced by `sequence_mean`.

    Without the KL: the script adds beta · sequence_mean(token_kl).  Source: DeepSeekMath, arXiv 2402.03300, eq. 3.
    Args: logps [N, R], grad flows; old_logps [N, R], advantages [N], mask [N, R], no grad.  Returns: [].
    """
    losses = grpo_token_loss(logps, old_logps, advantages, mask, epsilon=epsilon, epsilon_high=epsilon)
    return sequence_mean(losses, mask)


def cispo_policy_loss(
    logps: Tensor, old_logps: Tensor, advantages: Tensor, mask: Tensor, *, epsilon_high: float
) -> Tensor:
    """CISPO's policy loss: sequence_mean of -min(ratio, epsilon_high)·A·logp, the capped ratio being a constant.

    Every token keeps a gradient, its weight is what is capped: d loss / d logp = -min(ratio, epsilon_high)·A.
    epsilon_high is the largest ratio itself (5.0), not an offset from 1.  Source: MiniMax-M1, arXiv 2506.13585.
    Args: logps [N, R], grad flows; old_logps [N, R], advantages [N], mask [N, R], no grad.  Returns: [].
    """
    return sequence_mean(cispo_token_loss(logps, old_logps, advantages, mask, epsilon_high=epsilon_high), mask)


def dpo_logratio_loss(
    policy_chosen: Tensor, policy_rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, *, beta: float
) -> Tensor:
    """DPO's loss: mean of -log sigmoid(beta · ((pc - pr) - (rc - rr))). For the contrast walk-through.

    The reference is a baseline on the preference here, not a KL over tokens.  Source: arXiv 2305.18290, eq. 7.
    Args: four [N] sequence log-probs (sums over counted tokens), grad flows to the policy's two.  Returns: [].
    """
    check_same_shape(policy_chosen=policy_chosen, policy_rejected=policy_rejected)
    check_same_shape(policy_chosen=policy_chosen, ref_chosen=ref_chosen, ref_rejected=ref_rejected)
    margin = (policy_chosen - policy_rejected) - (ref_chosen - ref_rejected)
    return -torch.nn.functional.logsigmoid(beta * margin).mean()
