"""Truncated importance sampling: makes up for a rollout engine that does not compute quite what the trainer does."""

import math

import torch
from torch import Tensor


@torch.no_grad()
def truncated_importance_weights(old_logps: Tensor, rollout_logps: Tensor, mask: Tensor, *, cap: float) -> Tensor:
    """Per-token weights min(exp(old_logps - rollout_logps), cap), a constant; 1 where the mask is False.

    Tokens were drawn from the engine's distribution, the gradient wants the trainer's: a policy-gradient term of a
    token times this weight is unbiased up to the cap, which bounds its variance. It multiplies the whole term and stays
    outside the clipped ratio. Sources: Espeholt et al. 2018 (IMPALA, arXiv 1802.01561, the truncated rho of section
    4.1); Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training".
    Args: old_logps [N, R], the trainer's before the update; rollout_logps [N, R], the engine's, at one and the same
        temperature; mask [N, R]; cap: the largest weight, 0 = off (every weight 1).
    Returns: [N, R], no grad. Padding may hold anything, NaN included.
    Raises: ValueError for shapes that differ or a negative cap.
    """
    if not old_logps.shape == rollout_logps.shape == mask.shape:
        raise ValueError(f"old_logps {tuple(old_logps.shape)}, rollout_logps {tuple(rollout_logps.shape)} and mask "
                         f"{tuple(mask.shape)} must have one shape")
    if cap < 0:
        raise ValueError(f"cap is {cap}: expected a number above 0, or 0 for no correction")
    if cap == 0:
        return torch.ones_like(old_logps)
    # capped before exp: a difference of 200 nats would overflow
    weights = (old_logps - rollout_logps).clamp(max=math.log(cap)).exp()
    return weights.masked_fill(~mask, 1.0)
