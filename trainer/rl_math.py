"""The arithmetic of the two trainers as pure functions on tensors. Imports torch only; nothing here reads flags.

Letters: B prompts, G answers a prompt, N = B·G rows (PPO: G = 1), P padded prompt width, R response width, W = P+R,
V vocabulary. `logps` are natural logs; `old_` = when sampled, `ref_` = frozen reference. Masks are bool, True = counts
(0/1 masks of another dtype are understood).

Three rules hold in every function:
- Masks select (`masked_fill`) before anything is computed. Multiplying by the mask afterwards leaves 0·inf in the
  backward pass: one padding entry of 200 nats gives the right loss and a NaN gradient.
- Log ratios are capped at `MAX_LOG_RATIO` before `exp`, so a value of any size gives a finite loss and gradient.
  Past the cap (a probability changed 5e8-fold) the gradient is 0: that is a mismatch of engines, not something learnt.
- Shapes are checked (ValueError naming both), because an [N] advantage against an [N, R] ratio broadcasts along the
  wrong axis when N == R. Unless a docstring says more, this is the only error raised.
"""

from collections.abc import Callable

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0  # nats; exp(20) = 4.9e8 still has room for advantages and sums in float32
BLOCK_ELEMENTS = 1 << 24  # float32 numbers in one block of logits (64 MiB)
ReduceSum = Callable[[Tensor], Tensor] | None


def _check_same_shape(**tensors: Tensor) -> None:
    """Raises ValueError, naming every tensor with its shape, unless all shapes are equal."""
    _check_fit("one shape for all", len({tensor.shape for tensor in tensors.values()}) == 1, **tensors)


def _check_fit(expected: str, fits: bool, **tensors: Tensor) -> None:
    """Raises ValueError, naming every tensor with its shape and what was expected, unless `fits`."""
    if not fits:
        found = " and ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())
        raise ValueError(f"the shapes do not fit: found {found}, expected {expected}")


def _select(values: Tensor, mask: Tensor) -> Tensor:
    """`values` where the mask is True and 0 elsewhere, gradient 0 there too; at least float32, for sums."""
    return values.to(torch.promote_types(values.dtype, torch.float32)).masked_fill(~mask.bool(), 0)


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """The mean of `values` over all counted tokens of the batch: PPO's reduction. 0 (gradient 0) if nothing counts.

    Args: values and mask of one shape, grad flows to counted entries only.  Returns: [] in float32 or float64.
    """
    _check_same_shape(values=values, mask=mask)
    return _select(values, mask).sum() / mask.bool().sum().clamp(min=1)


def sequence_mean(values: Tensor, mask: Tensor) -> Tensor:
    """The mean over rows of each row's masked mean: GRPO's reduction. A short row weighs as much as a long one.

    A row without a counted token adds 0 and still counts as a row, as in MiniMind; no rows at all give 0.
    Args: values [N, R], grad flows to counted entries only; mask [N, R].  Returns: [] in float32 or float64.
    """
    _check_same_shape(values=values, mask=mask)
    _check_fit("[N, R]", values.ndim == 2, values=values)
    row_means = _select(values, mask).sum(dim=1) / mask.bool().sum(dim=1).clamp(min=1)
    return row_means.sum() / max(row_means.numel(), 1)


def mask_until_eos(completion_ids: Tensor, completion_mask: Tensor, eos_token_id: int) -> Tensor:
    """Which response tokens count: those the engine produced, up to and including the first EOS of the row.

    A pad id sampled in the middle of an answer counts; an EOS id standing in the padding ends nothing.
    Args: completion_ids [N, R] token ids; completion_mask [N, R], True = produced by the engine.  Returns: bool [N, R].
    """
    _check_same_shape(completion_ids=completion_ids, completion_mask=completion_mask)
    _check_fit("[N, R]", completion_ids.ndim == 2, completion_ids=completion_ids)
    produced = completion_mask.bool()
    is_eos = (completion_ids == eos_token_id) & produced
    return produced & (is_eos.long().cumsum(dim=1) - is_eos.long() == 0)


def response_logp_positions(prompt_lens: Tensor, response_width: int) -> Tensor:
    """Where the response tokens' predictions stand: logits at position p predict token p + 1, so prompt_len - 1 + j.

    Args: prompt_lens [N], the column at which each row's response begins; response_width R.  Returns: long [N, R].
    """
    _check_fit("[N]", prompt_lens.ndim == 1, prompt_lens=prompt_lens)
    return prompt_lens.long()[:, None] - 1 + torch.arange(response_width, device=prompt_lens.device)


def _logit_blocks(rows: int, width: int, vocabulary: int) -> list[tuple[int, slice]]:
    """Indices that cover [rows, width] in pieces of one row and at most BLOCK_ELEMENTS logits (or one token)."""
    columns = max(1, BLOCK_ELEMENTS // max(vocabulary, 1))
    return [(row, slice(start, start + columns)) for row in range(rows) for start in range(0, width, columns)]


class _SelectiveLogps(torch.autograd.Function):
    """log_softmax(logits / temperature)[target] block by block, forward and backward.

    autograd would keep a float32 copy of all logits for `logsumexp` and make two more on the way back. Here the logits
    (in their own dtype) and one log normaliser a token are kept, and the softmax is made again per block.
    """

    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
        logps = torch.empty(targets.shape, dtype=torch.float32, device=logits.device)
        log_normalisers = torch.empty_like(logps)
        for block in _logit_blocks(*logits.shape):
            scaled = logits[block].float() / temperature
            log_normalisers[block] = scaled.logsumexp(dim=-1)
            logps[block] = scaled.gather(-1, targets[block][..., None])[..., 0] - log_normalisers[block]
        ctx.save_for_backward(logits, targets, log_normalisers)
        ctx.temperature = temperature
        return logps

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_logps: Tensor) -> tuple[Tensor, None, None]:
        logits, targets, log_normalisers = ctx.saved_tensors
        grad_logits = torch.empty_like(logits)
        for block in _logit_blocks(*logits.shape):
            incoming = grad_logps[block][..., None] / ctx.temperature
            probabilities = (logits[block].float() / ctx.temperature - log_normalisers[block][..., None]).exp()
            gradient = -probabilities * incoming
            gradient.scatter_add_(-1, targets[block][..., None], incoming)
            # A padding position may hold NaN logits: its incoming gradient is 0, and 0·NaN must not become NaN.
            grad_logits[block] = gradient.masked_fill_(incoming == 0, 0)
        return grad_logits, None, None


def selective_logps(logits: Tensor, targets: Tensor, *, temperature: float) -> Tensor:
    """The log-probability of each target token: log_softmax(logits / temperature)[target], in nats.

    Worked out in float32 whatever the logits' dtype, as target minus logsumexp and in blocks, so that neither the
    forward nor the backward pass holds an [N, R, V] float32 tensor.
    Args: logits [N, R, V], grad flows; targets [N, R] token ids; temperature > 0, the one the tokens were sampled at.
    Returns: float32 [N, R].  Raises: ValueError if the temperature is not finite and above 0.
    """
    if not 0 < temperature < float("inf"):
        raise ValueError(f"temperature is {temperature}, expected a number above 0")
    fits = logits.ndim == 3 and logits.shape[:2] == targets.shape
    _check_fit("[N, R, V] against [N, R]", fits, logits=logits, targets=targets)
    return _SelectiveLogps.apply(logits, targets, temperature)


def gather_response_logps(logits: Tensor, output_ids: Tensor, positions: Tensor) -> Tensor:
    """Log-probs of the response tokens (temperature 1) out of the logits of whole sequences.

    The logits at position p predict output_ids[:, p + 1]. Only the response positions are normalised.
    Args: logits [N, W, V], grad flows; output_ids [N, W]; positions long [N, R] from `response_logp_positions`.
    Returns: float32 [N, R].  Raises: ValueError if a position has no next token (outside 0 ... W - 2).
    """
    fits = logits.ndim == 3 and logits.shape[:2] == output_ids.shape
    _check_fit("[N, W, V] against [N, W]", fits, logits=logits, output_ids=output_ids)
    fits = positions.ndim == 2 and positions.shape[0] == output_ids.shape[0]
    _check_fit("[N, R] against [N, W]", fits, positions=positions, output_ids=output_ids)
    if bool(((positions < 0) | (positions > output_ids.shape[1] - 2)).any()):
        raise ValueError(f"positions {positions.tolist()} must lie in 0 ... {output_ids.shape[1] - 2} (W - 2)")
    rows = torch.arange(positions.shape[0], device=positions.device)[:, None]
    return selective_logps(logits[rows, positions], output_ids.gather(1, positions + 1), temperature=1.0)


def kl_k1(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """Per-token k1 estimate of KL(policy || reference): logps - ref_logps, in nats; unbiased, of either sign.

    As a loss term it is useless: its expected gradient is E[grad logp] = 0. Arguments and source as below.
    """
    _check_same_shape(logps=logps, ref_logps=ref_logps)
    return logps - ref_logps


def kl_k2(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """Per-token k2 estimate of KL(policy || reference): 0.5 · (logps - ref_logps)², in nats; biased, at least 0.

    As a loss term its expected gradient is that of KL(policy || reference). Arguments and source as below.
    """
    _check_same_shape(logps=logps, ref_logps=ref_logps)
    return 0.5 * (logps - ref_logps).square()


def token_kl_penalty(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """Per-token estimate of KL(policy || reference), in nats; at least 0 up to float32 rounding.

    With d = ref_logps - logps the estimate is exp(d) - d - 1 (k3, joschu.net/blog/kl-approx.html). d is capped at
    MAX_LOG_RATIO in both terms; downwards nothing overflows, so there the pull back to the reference stays.
    The cap also keeps NaN and ±1e4 of the padding out of the gradient, once a masked mean has dropped the values.
    As a loss term its expected gradient is that of the forward KL(reference || policy) (arXiv 2512.21852).
    Args: logps [N, R], grad flows; ref_logps [N, R], no grad. Padding is NOT masked here.  Returns: [N, R].
    """
    _check_same_shape(logps=logps, ref_logps=ref_logps)
    d = (ref_logps - logps).clamp(max=MAX_LOG_RATIO)
    return d.expm1() - d  # exp(d) - 1 - d, without the rounding that would make a small divergence negative


def reference_kl_penalty(logps: Tensor, ref_logps: Tensor, mask: Tensor) -> Tensor:
    """The k3 estimate of KL(policy || reference), in nats a token, over all counted tokens: PPO's penalty.

    Args: logps [N, R], grad flows; ref_logps, mask [N, R], no grad.  Returns: [].
    """
    _check_same_shape(logps=logps, ref_logps=ref_logps, mask=mask)
    return masked_mean(token_kl_penalty(_select(logps, mask), _select(ref_logps, mask)), mask)


@torch.no_grad()
def approx_policy_kl(logps: Tensor, old_logps: Tensor, mask: Tensor) -> Tensor:
    """How far the policy has moved since sampling, in nats a token: 0.5 · mean(log ratio²). For the early stop only.

    Args: logps, old_logps, mask [N, R]; no grad.  Returns: [].
    """
    _check_same_shape(logps=logps, old_logps=old_logps, mask=mask)
    return masked_mean(0.5 * _select(logps - old_logps, mask).square(), mask)


@torch.no_grad()
def terminal_rewards(scores: Tensor, mask: Tensor) -> Tensor:
    """Token rewards from sequence scores: the score on the row's last counted token, 0 elsewhere.

    A row without a counted token stays 0. A NaN score arrives on that one token: excluding the row is the caller's.
    Args: scores [N]; mask [N, R]; no grad.  Returns: [N, R].
    """
    fits = mask.ndim == 2 and scores.shape == mask.shape[:1]
    _check_fit("[N] against [N, R]", fits, scores=scores, mask=mask)
    is_last = mask.bool() & (mask.long().flip(1).cumsum(dim=1).flip(1) == 1)
    return torch.where(is_last, scores[:, None], torch.zeros_like(scores[:, None]))


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
    _check_same_shape(token_rewards=token_rewards, values=values, mask=mask)
    _check_fit("[N, R]", token_rewards.ndim == 2, token_rewards=token_rewards)
    rewards, values, counted = _select(token_rewards, mask), _select(values, mask), mask.bool()
    advantages = torch.zeros_like(values)
    next_value = next_advantage = values.new_zeros(values.shape[0])
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        # Zero outside the mask, so that the column before it finds nothing to bootstrap from.
        next_advantage = (delta + gamma * lam * next_advantage).masked_fill(~counted[:, t], 0)
        next_value = values[:, t]
        advantages[:, t] = next_advantage
    return advantages, advantages + values


def _centre(values: Tensor, mask: Tensor, reduce_sum: ReduceSum) -> tuple[Tensor, Tensor]:
    """Values minus their mean (0 outside the mask) and their variance, both over the counted entries of all ranks."""
    reduce_sum = reduce_sum or torch.clone
    kept = _select(values, mask).double()
    total, count = reduce_sum(torch.stack([kept.sum(), mask.bool().sum().double()])).unbind()
    count = count.clamp(min=1)
    centred = _select(kept - total / count, mask)
    return centred, reduce_sum(centred.square().sum()) / count


@torch.no_grad()
def normalize_advantages(
    advantages: Tensor, mask: Tensor, eps: float = 1e-8, *, reduce_sum: ReduceSum = None
) -> Tensor:
    """Advantages with mean 0 and variance 1 (divisor n) over the counted tokens, 0 elsewhere.

    (A - mean) / sqrt(variance + eps), summed in float64. One counted token, or equal ones, give 0.
    Args: advantages, mask [N, R]; no grad; `reduce_sum` turns a float64 tensor of this process' sums into the sums
        over all processes (called twice), so that ranks whiten with the moments of the whole batch.  Returns: [N, R].
    """
    _check_same_shape(advantages=advantages, mask=mask)
    centred, variance = _centre(advantages, mask, reduce_sum)
    return (centred * torch.rsqrt(variance + eps)).to(advantages.dtype)


@torch.no_grad()
def group_relative_advantages(rewards: Tensor, num_generations: int, eps: float = 1e-4) -> Tensor:
    """Each answer's reward against the other answers to its prompt: (r - mean) / (std + eps), population std.

    Rows i·G ... i·G + G - 1 are one group. A non-finite reward is left out of mean and std and gets advantage 0, so
    [1, NaN, 3, 2] is measured on {1, 3, 2}; none left: all 0; equal rewards: exactly 0.  Source: arXiv 2402.03300.
    Args: rewards [N], no grad; num_generations G.  Returns: [N].  Raises: ValueError if G < 2 or N is no multiple of G.
    """
    _check_fit("[N]", rewards.ndim == 1, rewards=rewards)
    if num_generations < 2:
        raise ValueError(f"num_generations is {num_generations}, expected at least 2: a group is its own baseline")
    _check_fit(f"[a multiple of {num_generations}]", rewards.numel() % num_generations == 0, rewards=rewards)
    groups = rewards.double().view(-1, num_generations)
    finite = groups.isfinite()
    # Measured from the group's smallest reward: the mean of equal floats may miss them by a rounding error, 0 cannot.
    smallest = groups.masked_fill(~finite, float("inf")).amin(dim=1, keepdim=True)
    offsets = (groups - smallest).masked_fill(~finite, 0)
    count = finite.sum(dim=1, keepdim=True).clamp(min=1)
    centred = (offsets - offsets.sum(dim=1, keepdim=True) / count).masked_fill(~finite, 0)
    std = (centred.square().sum(dim=1, keepdim=True) / count).sqrt()
    return (centred / (std + eps)).view(-1).to(torch.promote_types(rewards.dtype, torch.float32))


@torch.no_grad()
def explained_variance(values: Tensor, returns: Tensor, mask: Tensor, *, reduce_sum: ReduceSum = None) -> Tensor:
    """How much of the returns the critic foresees: 1 - Var(returns - values) / Var(returns) over counted tokens.

    1 = all of it, 0 = no better than a constant, below 0 = worse. Returns that do not vary (variance <= 1e-12) give 0.
    Args: values, returns, mask [N, R], no grad; `reduce_sum` as above (called four times).  Returns: [] float32.
    """
    _check_same_shape(values=values, returns=returns, mask=mask)
    _, target = _centre(returns, mask, reduce_sum)
    _, error = _centre(returns - values, mask, reduce_sum)
    return torch.where(target > 1e-12, 1 - error / target, torch.zeros_like(target)).float()


def _ratio(logps: Tensor, old_logps: Tensor, mask: Tensor) -> Tensor:
    """policy / old policy, 1 outside the mask; the log ratio is held within ±MAX_LOG_RATIO (gradient 0 beyond)."""
    return _select(logps - old_logps, mask).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _clipped_surrogate(ratio: Tensor, advantages: Tensor, epsilon: float) -> Tensor:
    """-min(ratio·A, clamp(ratio, 1 - epsilon, 1 + epsilon)·A) per token."""
    return -torch.min(ratio * advantages, ratio.clamp(1 - epsilon, 1 + epsilon) * advantages)


def _per_token(advantages: Tensor, mask: Tensor) -> Tensor:
    """Sequence advantages [N] as [N, R], 0 outside the mask."""
    fits = mask.ndim == 2 and advantages.shape == mask.shape[:1]
    _check_fit("[N] against [N, R]", fits, advantages=advantages, mask=mask)
    return _select(advantages[:, None].expand(mask.shape), mask)


def ppo_policy_loss(
    logps: Tensor, old_logps: Tensor, advantages: Tensor, mask: Tensor, *, clip_epsilon: float
) -> Tensor:
    """PPO's clipped policy loss: mean over counted tokens of -min(ratio·A, clamp(ratio, 1 ± clip_epsilon)·A).

    The minimum is pessimistic: with A > 0 a ratio of 0.3 stays 0.3 (nothing is lifted to 0.8) and keeps its gradient;
    only a ratio that left the range in the direction A asks for loses it.  Source: arXiv 1707.06347, eq. 7.
    Args: logps [N, R], grad flows; old_logps, advantages, mask [N, R], no grad.  Returns: [].
    """
    _check_same_shape(logps=logps, old_logps=old_logps, advantages=advantages, mask=mask)
    surrogate = _clipped_surrogate(_ratio(logps, old_logps, mask), _select(advantages, mask), clip_epsilon)
    return masked_mean(surrogate, mask)


def ppo_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, cliprange_value: float
) -> Tensor:
    """The critic's loss: mean over counted tokens of 0.5 · max((V - R)², (V_clipped - R)²).

    V_clipped = old_values + clamp(V - old_values, ±cliprange_value): moved further, a value learns no more this batch.
    Args: values [N, R], grad flows; old_values, returns, mask [N, R], no grad.  Returns: [].
    """
    _check_same_shape(values=values, old_values=old_values, returns=returns, mask=mask)
    values, old_values, returns = (_select(tensor, mask) for tensor in (values, old_values, returns))
    clipped = old_values + (values - old_values).clamp(-cliprange_value, cliprange_value)
    return masked_mean(0.5 * torch.max((values - returns).square(), (clipped - returns).square()), mask)


@torch.no_grad()
def clip_fraction(logps: Tensor, old_logps: Tensor, mask: Tensor, *, clip_epsilon: float) -> Tensor:
    """The share of counted tokens whose ratio is outside 1 ± clip_epsilon, on either side and whatever A is.

    Args: logps, old_logps, mask [N, R]; no grad.  Returns: [] in [0, 1].
    """
    _check_same_shape(logps=logps, old_logps=old_logps, mask=mask)
    return masked_mean((_ratio(logps, old_logps, mask) - 1).abs() > clip_epsilon, mask)


def grpo_policy_loss(logps: Tensor, old_logps: Tensor, advantages: Tensor, mask: Tensor, *, epsilon: float) -> Tensor:
    """GRPO's policy loss: the clipped surrogate of PPO with one advantage a row, reduced by `sequence_mean`.

    Without the KL: the script adds beta · sequence_mean(token_kl).  Source: DeepSeekMath, arXiv 2402.03300, eq. 3.
    Args: logps [N, R], grad flows; old_logps [N, R], advantages [N], mask [N, R], no grad.  Returns: [].
    """
    _check_same_shape(logps=logps, old_logps=old_logps, mask=mask)
    per_token = _clipped_surrogate(_ratio(logps, old_logps, mask), _per_token(advantages, mask), epsilon)
    return sequence_mean(per_token, mask)


def cispo_policy_loss(
    logps: Tensor, old_logps: Tensor, advantages: Tensor, mask: Tensor, *, epsilon_high: float
) -> Tensor:
    """CISPO's policy loss: sequence_mean of -min(ratio, epsilon_high)·A·logp, the capped ratio being a constant.

    Every token keeps a gradient, its weight is what is capped: d loss / d logp = -min(ratio, epsilon_high)·A.
    epsilon_high is the largest ratio itself (5.0), not an offset from 1.  Source: MiniMax-M1, arXiv 2506.13585.
    Args: logps [N, R], grad flows; old_logps [N, R], advantages [N], mask [N, R], no grad.  Returns: [].
    """
    _check_same_shape(logps=logps, old_logps=old_logps, mask=mask)
    weights = _ratio(logps, old_logps, mask).clamp(max=epsilon_high).detach()
    return sequence_mean(-weights * _per_token(advantages, mask) * _select(logps, mask), mask)


def dpo_logratio_loss(
    policy_chosen: Tensor, policy_rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, *, beta: float
) -> Tensor:
    """DPO's loss: mean of -log sigmoid(beta · ((pc - pr) - (rc - rr))). For the contrast walk-through.

    The reference is a baseline on the preference here, not a KL over tokens.  Source: arXiv 2305.18290, eq. 7.
    Args: four [N] sequence log-probs (sums over counted tokens), grad flows to the policy's two.  Returns: [].
    """
    _check_same_shape(policy_chosen=policy_chosen, policy_rejected=policy_rejected)
    _check_same_shape(policy_chosen=policy_chosen, ref_chosen=ref_chosen, ref_rejected=ref_rejected)
    margin = (policy_chosen - policy_rejected) - (ref_chosen - ref_rejected)
    return -torch.nn.functional.logsigmoid(beta * margin).mean()
