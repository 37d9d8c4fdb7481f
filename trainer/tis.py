"""What to make of the log-probs that a rollout engine reports, and truncated importance sampling, which makes up for an
engine that does not compute quite what the trainer does."""

import math
from collections.abc import Callable

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


def old_logps_known(engine, args) -> bool:
    """Whether the rollout engine's log-probs can stand for the trainer's own, so that no second forward is needed.

    With --recompute_logps auto: where the engine's are at the trainer's temperature and nothing is rounded to half
    precision, which training and decoding round differently.
    Raises: ValueError if --recompute_logps 0 asks for log-probs of another temperature.
    """
    other_temperature = engine.must_recompute(args.temperature, args.logp_temperature)
    if args.recompute_logps == "auto":
        return args.dtype == "float32" and not other_temperature
    return args.recompute_logps == "0"


def against_engine(engine, args, logps: Tensor, engine_logps: Tensor, mask: Tensor,
                   rescore: Callable[[float], Tensor]) -> tuple[Tensor, Tensor]:
    """(|trainer's - engine's log-prob| of each sampled token, NaN where it cannot be told; importance weights).

    Both at the temperature of the engine's; the weights are 1 where --tis_cap is 0, and for an engine that samples with
    the trainer's own modules.
    Args: logps, engine_logps, mask [n, R], no grad, logps at --logp_temperature; rescore gives the trainer's log-probs
        [n, R] at another temperature.
    """
    temperature = engine.logps_temperature(args.temperature, args.logp_temperature)
    if temperature is None:
        return torch.full_like(logps, math.nan), torch.ones_like(logps)
    if temperature != args.logp_temperature:
        logps = rescore(temperature)
    cap = 0.0 if engine.runs_trainers_modules else args.tis_cap
    return (logps - engine_logps).abs(), truncated_importance_weights(logps, engine_logps, mask, cap=cap)
