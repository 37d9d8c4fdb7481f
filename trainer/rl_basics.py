"""What all the arithmetic here is built of: shape checks, masked sums, ratios, group baselines, estimates of KL.

`rl_math.py` has the formulas of PPO and GRPO, `rl_options.py` those that are off by default; import from `rl_math`,
which has every name. Letters: B prompts, G answers a prompt, N = B·G rows (PPO: G = 1), P padded prompt width,
R response width, W = P+R, V vocabulary. `logps` are natural logs; `old_` = when sampled, `ref_` = frozen reference.
Masks are bool, True = counts (0/1 masks of another dtype are understood).

Three rules hold in every function of the three files:
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
ReduceSum = Callable[[Tensor], Tensor] | None


# ---------------------------------------------------------------------------------------------- shapes and masks
def check_same_shape(**tensors: Tensor) -> None:
    """Raises ValueError, naming every tensor with its shape, unless all shapes are equal."""
    check_fit("one shape for all", len({tensor.shape for tensor in tensors.values()}) == 1, **tensors)


def check_fit(expected: str, fits: bool, **tensors: Tensor) -> None:
    """Raises ValueError, naming every tensor with its shape and what was expected, unless `fits`."""
    if not fits:
        found = " and ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())
        raise ValueError(f"the shapes do not fit: found {found}, expected {expected}")


def widened(values: Tensor) -> Tensor:
    """`values` as float32, or float64 where they are that already: what sums and exponentials are worked out in."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def select(values: Tensor, mask: Tensor) -> Tensor:
    """`values` where the mask is True and 0 elsewhere, gradient 0 there too; at least float32, for sums."""
    return widened(values).masked_fill(~mask.bool(), 0)


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """The mean of `values` over all counted tokens of the batch: PPO's reduction. 0 (gradient 0) if nothing counts.

    Args: values and mask of one shape, grad flows to counted entries only.  Returns: [] in float32 or float64.
    """
    check_same_shape(values=values, mask=mask)
    return select(values, mask).sum() / mask.bool().sum().clamp(min=1)


def row_means(values: Tensor, mask: Tensor) -> Tensor:
    """Each row's mean over its counted tokens [N], 0 for a row without any. Arguments as of `sequence_mean`."""
    check_same_shape(values=values, mask=mask)
    check_fit("[N, R]", values.ndim == 2, values=values)
    return select(values, mask).sum(dim=1) / mask.bool().sum(dim=1).clamp(min=1)


def sequence_mean(values: Tensor, mask: Tensor) -> Tensor:
    """The mean over rows of each row's masked mean: GRPO's reduction. A short row weighs as much as a long one.

    A row without a counted token adds 0 and still counts as a row, as in MiniMind; no rows at all give 0.
    Args: values [N, R], grad flows to counted entries only; mask [N, R].  Returns: [] in float32 or float64.
    """
    means = row_means(values, mask)
    return means.sum() / max(means.numel(), 1)


def per_token(advantages: Tensor, mask: Tensor) -> Tensor:
    """Sequence advantages [N] as [N, R], 0 outside the mask."""
    fits = mask.ndim == 2 and advantages.shape == mask.shape[:1]
    check_fit("[N] against [N, R]", fits, advantages=advantages, mask=mask)
    return select(advantages[:, None].expand(mask.shape), mask)


@torch.no_grad()
def terminal_rewards(scores: Tensor, mask: Tensor) -> Tensor:
    """Token rewards from sequence scores: the score on the row's last counted token, 0 elsewhere.

    A row without a counted token stays 0. A NaN score arrives on that one token: excluding the row is the caller's.
    Args: scores [N]; mask [N, R]; no grad.  Returns: [N, R].
    """
    fits = mask.ndim == 2 and scores.shape == mask.shape[:1]
    check_fit("[N] against [N, R]", fits, scores=scores, mask=mask)
    is_last = mask.bool() & (mask.long().flip(1).cumsum(dim=1).flip(1) == 1)
    return torch.where(is_last, scores[:, None], torch.zeros_like(scores[:, None]))


# ---------------------------------------------------------------------------------------------- moments and baselines
def moments(values: Tensor, mask: Tensor, reduce_sum: ReduceSum) -> tuple[Tensor, Tensor, Tensor]:
    """(values minus their mean, 0 outside the mask; the mean; the variance), over the counted entries of all ranks.

    In float64, divisor n. `reduce_sum` turns a float64 tensor of this process' sums into the sums over all processes
    (called twice); None = this process is all there is.
    """
    reduce_sum = reduce_sum or torch.clone
    kept = select(values, mask).double()
    total, count = reduce_sum(torch.stack([kept.sum(), mask.bool().sum().double()])).unbind()
    count = count.clamp(min=1)
    mean = total / count
    centred = select(kept - mean, mask)
    return centred, mean, reduce_sum(centred.square().sum()) / count


def centred_groups(rewards: Tensor, num_generations: int) -> tuple[Tensor, Tensor]:
    """(each reward minus the mean of its group's finite ones float64 [B, G], how many those are [B, 1]).

    Rows i·G ... i·G + G - 1 are one group. A non-finite reward is left out and gives 0; equal rewards give exactly 0.
    Raises: ValueError if G < 2 or N is no multiple of G.
    """
    check_fit("[N]", rewards.ndim == 1, rewards=rewards)
    if num_generations < 2:
        raise ValueError(f"num_generations is {num_generations}, expected at least 2: a group is its own baseline")
    check_fit(f"[a multiple of {num_generations}]", rewards.numel() % num_generations == 0, rewards=rewards)
    groups = rewards.double().view(-1, num_generations)
    finite = groups.isfinite()
    # Measured from the group's smallest reward: the mean of equal floats may miss them by a rounding error, 0 cannot.
    smallest = groups.masked_fill(~finite, float("inf")).amin(dim=1, keepdim=True)
    offsets = (groups - smallest).masked_fill(~finite, 0)
    count = finite.sum(dim=1, keepdim=True).clamp(min=1)
    return (offsets - offsets.sum(dim=1, keepdim=True) / count).masked_fill(~finite, 0), count


# ---------------------------------------------------------------------------------------------- ratios
def token_ratios(logps: Tensor, old_logps: Tensor, mask: Tensor) -> Tensor:
    """policy / old policy of each token, 1 outside the mask; the log ratio is held within ±MAX_LOG_RATIO.

    Args: logps [N, R], grad flows (0 beyond the cap); old_logps, mask [N, R].  Returns: [N, R].
    """
    check_same_shape(logps=logps, old_logps=old_logps, mask=mask)
    return select(logps - old_logps, mask).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def clipped_surrogate(ratios: Tensor, advantages: Tensor, epsilon: float, epsilon_high: float) -> Tensor:
    """min(ratio·A, clamp(ratio, 1 - epsilon, 1 + epsilon_high)·A): what PPO's step makes larger, token by token."""
    return torch.min(ratios * advantages, ratios.clamp(1 - epsilon, 1 + epsilon_high) * advantages)


# ---------------------------------------------------------------------------------------------- KL(policy || reference)
def kl_k1(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """Per-token k1 estimate of KL(policy || reference): logps - ref_logps, in nats; unbiased, of either sign.

    As a loss term it is useless: its expected gradient is E[grad logp] = 0. Arguments and source as below.
    """
    check_same_shape(logps=logps, ref_logps=ref_logps)
    return logps - ref_logps


def kl_k2(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """Per-token k2 estimate of KL(policy || reference): 0.5 · (logps - ref_logps)², in nats; biased, at least 0.

    As a loss term its expected gradient is that of KL(policy || reference). Arguments and source as below.
    """
    check_same_shape(logps=logps, ref_logps=ref_logps)
    return 0.5 * (logps - ref_logps).square()


def token_kl_penalty(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """Per-token estimate of KL(policy || reference), in nats; at least 0 up to float32 rounding.

    With d = ref_logps - logps the estimate is exp(d) - d - 1 (k3, joschu.net/blog/kl-approx.html). d is capped at
    MAX_LOG_RATIO in both terms; downwards nothing overflows, so there the pull back to the reference stays.
    The cap also keeps NaN and ±1e4 of the padding out of the gradient, once a masked mean has dropped the values.
    As a loss term its expected gradient is that of the forward KL(reference || policy) (arXiv 2512.21852).
    Args: logps [N, R], grad flows; ref_logps [N, R], no grad. Padding is NOT masked here.  Returns: [N, R].
    """
    check_same_shape(logps=logps, ref_logps=ref_logps)
    d = (ref_logps - logps).clamp(max=MAX_LOG_RATIO)
    return d.expm1() - d  # exp(d) - 1 - d, without the rounding that would make a small divergence negative
