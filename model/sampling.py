"""The rules that pick a token from logits, and its log-probability.

Letters: n rows still running, V vocabulary.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 64  # a draw finds the block of so many tokens first, then the token: no running sum over the vocabulary


class SamplingRules(NamedTuple):
    """How a token is picked; temperature 0 = the likeliest token."""

    temperature: float
    top_p: float
    top_k: int
    repetition_penalty: float
    logp_temperature: float


def check_rules(rules: SamplingRules) -> None:
    """Raise ValueError naming the first setting that describes no distribution."""
    if not 0.0 <= rules.temperature < math.inf:
        raise ValueError(f"temperature is {rules.temperature}: it must be at least 0 (0 = the likeliest token)")
    if not 0.0 < rules.top_p <= 1.0:
        raise ValueError(f"top_p is {rules.top_p}: it must be in (0, 1] (1 = every token)")
    if rules.top_k < 0:
        raise ValueError(f"top_k is {rules.top_k}: it must be at least 0 (0 = every token)")
    if not 0.0 < rules.repetition_penalty < math.inf:
        raise ValueError(f"repetition_penalty is {rules.repetition_penalty}: it must be above 0 (1 = none)")
    if not 0.0 < rules.logp_temperature < math.inf:
        raise ValueError(f"logp_temperature is {rules.logp_temperature}: it must be above 0")


def penalize_repeats(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """logits [n, V] with those of seen tokens (bool [n, V]) divided by the penalty if positive, else multiplied
    (Keskar et al. 2019, arxiv.org/abs/1909.05858, as transformers does it)."""
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def keep_likeliest(logits: Tensor, *, top_k: int, top_p: float) -> Tensor:
    """logits [n, V] with -inf outside the top_k largest (0 = all; equals of the last one stay) and then outside the
    smallest set of likeliest tokens whose probabilities reach top_p (at least one; arxiv.org/abs/1904.09751)."""
    if 0 < top_k < logits.shape[-1]:
        smallest = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, -math.inf)
    if top_p < 1.0:
        ranked, ids = logits.sort(dim=-1, descending=True, stable=True)
        probs = ranked.softmax(dim=-1, dtype=torch.float64)
        reached_before = probs.cumsum(dim=-1) - probs >= top_p
        logits = logits.masked_fill(reached_before.scatter(1, ids, reached_before), -math.inf)
    return logits


def first_above(weights: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """(index long [n, 1] of the first weight with which the running sum is above target, the sum before it [n, 1]).

    Args: weights float64 [n, k], not negative; target float64 [n, 1]. One that the whole sum does not exceed finds the
        last weight above 0: a weight of 0 is never found.
    """
    running = weights.cumsum(dim=1)
    total = running[:, -1:]
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    # the second condition is for parallel sums, where a weight of 0 may raise the sum over its left neighbour's
    index = ((running > target) & (weights > 0)).to(torch.uint8).argmax(dim=1, keepdim=True)
    return index, (running - weights).gather(1, index)


def draw(probs: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """(token ids long [n], their shares of a row's sum float64 [n]) by inverse CDF: the first token, in id order, whose
    cumulative probability is above uniform.

    Args: probs [n, V], not negative; uniforms float64 [n] in [0, 1]. What a row draws depends on that row alone, and a
        token of probability 0 is never drawn, also at uniform 1.
    """
    short = -probs.shape[1] % BLOCK
    blocks = (F.pad(probs, (0, short)) if short else probs).unflatten(1, (-1, BLOCK))
    mass = blocks.sum(dim=2, dtype=torch.float64)
    total = mass.sum(dim=1, keepdim=True)
    target = uniforms[:, None] * total
    block, before = first_above(mass, target)
    inside = blocks.gather(1, block[:, :, None].expand(-1, -1, BLOCK)).squeeze(1).double()
    place, _ = first_above(inside, target - before)
    return (block * BLOCK + place).squeeze(1), (inside.gather(1, place) / total).squeeze(1)


def pick_tokens(logits: Tensor, uniforms: Tensor | None, seen: Tensor | None, rules: SamplingRules):
    """(token long [n], its log-probability float32 [n]) from logits [n, V].

    The log-probability is log_softmax(logits / logp_temperature), before penalty, top-k and top-p. Uniforms [n] are
    unused at temperature 0; seen bool [n, V] is None without a repetition penalty.
    """
    logits = logits.float()
    scaled = logits / rules.logp_temperature
    plain = seen is None and rules.top_p == 1.0 and not 0 < rules.top_k < logits.shape[1]
    if plain and rules.temperature == rules.logp_temperature:
        # what is drawn from is what is reported: one softmax does for both
        token, share = draw(scaled.softmax(dim=-1), uniforms)
        return token, share.log().float()
    scores = logits if seen is None else penalize_repeats(logits, seen, rules.repetition_penalty)
    if rules.temperature == 0:
        token = scores.argmax(dim=-1)
    else:
        scores = keep_likeliest(scores / rules.temperature, top_k=rules.top_k, top_p=rules.top_p)
        token, _ = draw(scores.softmax(dim=-1), uniforms)
    return token, scaled.gather(1, token[:, None]).squeeze(1) - scaled.logsumexp(dim=-1)
