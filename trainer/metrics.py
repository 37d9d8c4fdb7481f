"""Numbers for the log: sums that every rank adds to, seconds, and what the answers and the update of a step were like.

Letters: G answers a prompt, N rows.
"""

import math
import time

import torch
from torch import Tensor

from trainer.distributed import Logger, all_reduce_max, all_reduce_sum
from trainer.rl_math import clip_ratios, kl_k1, masked_mean, token_kl_penalty

RM_LIMIT = 3.0  # the reward model's scores are clipped to this on either side


class MetricSums:
    """Sums and weights of named numbers, collected on the device and reduced over ranks in one exchange.

    `add(name, value, weight)` takes a mean and what it is a mean of; the result is the weighted mean over everything
    added on every rank. `add_total`, `add_max` and `add_min` keep the sum and the extremes instead. Every rank must add
    the same names. What is not finite is left out.
    """

    def __init__(self, device: str):
        self.device, self.sums, self.totals, self.largest = device, {}, {}, {}

    def add(self, name: str, value, weight=1.0) -> None:
        value = torch.as_tensor(value, dtype=torch.float64, device=self.device).detach()
        weight = torch.as_tensor(weight, dtype=torch.float64, device=self.device).detach()
        keep = torch.isfinite(value)
        pair = torch.stack([(torch.where(keep, value, 0.0) * weight).sum(),
                            torch.where(keep, weight, 0.0).sum()])
        self.sums[name] = self.sums.get(name, 0.0) + pair

    def add_each(self, name: str, values: Tensor, keep: Tensor) -> None:
        """Every entry of `values` where `keep` is true counts once."""
        self.add(name, torch.where(keep, values, torch.nan), keep.to(torch.float64))

    def add_total(self, name: str, values: Tensor, keep: Tensor) -> None:
        """The sum of the entries of `values` where `keep` is true, instead of their mean."""
        total = torch.where(keep, values.double(), 0.0).sum()
        self.totals[name] = self.totals.get(name, 0.0) + total

    def add_max(self, name: str, values: Tensor, keep: Tensor) -> None:
        """The largest entry of `values` where `keep` is true."""
        values = values.detach().double()
        largest = torch.where(keep & torch.isfinite(values), values, -math.inf).flatten()
        before = self.largest.get(name, largest.new_full((1,), -math.inf))
        self.largest[name] = torch.cat([before, largest]).max().view(1)

    def add_min(self, name: str, values: Tensor, keep: Tensor) -> None:
        """The smallest entry of `values` where `keep` is true."""
        self.add_max(f"-{name}", -values.detach().double(), keep)

    def merge(self, other: "MetricSums") -> None:
        """Add everything that was added to `other`."""
        for name, pair in other.sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + pair
        for name, total in other.totals.items():
            self.totals[name] = self.totals.get(name, 0.0) + total
        for name, value in other.largest.items():
            self.largest[name] = torch.maximum(self.largest.get(name, value), value)

    def reduce(self) -> dict[str, float]:
        """{name: weighted mean, largest or smallest over all ranks}; nan where nothing counted."""
        names = sorted(self.sums)
        totals = all_reduce_sum(torch.stack([self.sums[name] for name in names])).tolist()
        found = {name: total / weight if weight > 0 else math.nan
                 for name, (total, weight) in zip(names, totals, strict=True)}
        names = sorted(self.totals)
        totals = all_reduce_sum(torch.stack([self.totals[name] for name in names])).tolist() if names else []
        found.update(zip(names, totals, strict=True))
        names = sorted(self.largest)
        largest = all_reduce_max(torch.cat([self.largest[name] for name in names])).tolist() if names else []
        for name, value in zip(names, largest, strict=True):
            value = value if math.isfinite(value) else math.nan
            found[name.lstrip("-")] = -value if name.startswith("-") else value
        return found


class StepClock:
    """Where the seconds of a rollout step go, part by part."""

    def __init__(self, device: str = "cpu"):
        self.device, self.began, self.seconds = device, time.perf_counter(), {}
        self._last = self.began

    def mark(self, part: str) -> None:
        """What happened since the last mark belongs to this part."""
        if self.device.startswith("cuda"):
            torch.cuda.synchronize(self.device)  # kernels run behind the program: wait, or the next part pays for them
        now = time.perf_counter()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._last
        self._last = now

    def metrics(self, tokens: float) -> dict[str, float]:
        """timing_s/{part} and /step in seconds on this rank, and how many of `tokens` were done a second."""
        step = time.perf_counter() - self.began
        parts = {f"timing_s/{part}": seconds for part, seconds in self.seconds.items()}
        return {**parts, "timing_s/step": step, "perf/tokens_per_s": tokens / step}


def token_metrics(sums: MetricSums, mask: Tensor, *, logps: Tensor, entropy: Tensor, ref_logps: Tensor | None,
                  gap: Tensor | None) -> None:
    """Add what the update saw at the tokens that count, [n, R] each: entropy, distance to the reference (0 without
    one), and |trainer's - engine's log-prob| where it is known."""
    tokens, logps = mask.sum(), logps.detach()
    ref_logps = logps if ref_logps is None else ref_logps
    sums.add("entropy", masked_mean(entropy.detach(), mask), tokens)
    sums.add("kl", masked_mean(token_kl_penalty(logps, ref_logps), mask), tokens)
    sums.add("kl_k1", masked_mean(kl_k1(logps, ref_logps), mask), tokens)
    if gap is not None:
        sums.add("sampling/logp_difference/mean", masked_mean(gap, mask), tokens)
        sums.add_max("sampling/logp_difference/max", gap, mask)


def clip_metrics(sums: MetricSums, mask: Tensor, ratios: Tensor, advantages: Tensor, *, epsilon: float,
                 epsilon_high: float) -> None:
    """Add the shares of tokens that lost their gradient to the clip: below, above, and either."""
    shares = clip_ratios(ratios, advantages, mask, epsilon=epsilon, epsilon_high=epsilon_high)
    for name, share in shares._asdict().items():
        sums.add(f"clip_ratio/{name}_mean", share, mask.sum())


def answer_metrics(sums: MetricSums, rollout, rewards: Tensor, parts: dict[str, Tensor], real: Tensor) -> None:
    """Add what the answers earned, part by part, and how long they were; `real` bool [N] says which rows count."""
    sums.add_each("reward", rewards, real & torch.isfinite(rewards))
    for name, values in parts.items():
        sums.add_each(f"rewards/{name}/mean", values, real)
    sums.add_each("rewards/nonfinite", (~torch.isfinite(rewards)).double(), real)
    lengths = rollout.completion_mask.sum(1).double()
    sums.add_total("num_tokens", rollout.attention_mask.sum(1).double(), real)
    sums.add_each("completions/mean_length", lengths, real)
    sums.add_min("completions/min_length", lengths, real)
    sums.add_max("completions/max_length", lengths, real)
    sums.add("rewards/length_correlation", _correlation(lengths, rewards, real))
    if "rm" in parts:
        sums.add_each("rewards/rm/saturated", (parts["rm"].abs() >= RM_LIMIT).double(), real)
    sums.add_each("completions/clipped_ratio", (~rollout.finished).double(), real)


def _correlation(lengths: Tensor, rewards: Tensor, real: Tensor) -> Tensor:
    """Pearson's correlation of length and reward over all ranks' rows that count; NaN where either is constant."""
    keep = real & torch.isfinite(rewards)
    x, y = lengths.double()[keep], rewards.double()[keep]
    sums = [torch.ones_like(x).sum(), x.sum(), y.sum(), (x * x).sum(), (y * y).sum(), (x * y).sum()]
    n, x, y, xx, yy, xy = all_reduce_sum(torch.stack(sums)).unbind()
    spread = (n * xx - x * x).clamp(min=0) * (n * yy - y * y).clamp(min=0)
    return (n * xy - x * y) / torch.where(spread > 1e-9, spread, torch.nan).sqrt()


def group_metrics(sums: MetricSums, rewards: Tensor, real: Tensor, num_generations: int) -> None:
    """Add how much the answers to one prompt differ: mean standard deviation, and the share of groups without any."""
    groups = rewards.masked_fill(~(real & torch.isfinite(rewards)), math.nan).view(-1, num_generations).double()
    std = (groups - groups.nanmean(dim=1, keepdim=True)).square().nanmean(dim=1).sqrt()
    sums.add_each("reward_std", std, torch.isfinite(std))
    sums.add_each("frac_reward_zero_std", (std < 1e-6).double(), torch.isfinite(std))


def step_line(args, at, total: int, shown: dict[str, float]) -> str:
    """A step as MiniMind prints it: epoch and step, then each number under its name."""
    digits = {name: 8 if name.endswith("LR") or name.endswith("Rate") else 2 if name.endswith("Len") else 4
              for name in shown}  # fmt: skip
    numbers = ", ".join(f"{name}: {value:.{digits[name]}f}" for name, value in shown.items())
    return f"Epoch:[{at.epoch + 1}/{args.epochs}]({at.step}/{total}), {numbers}"


def debug_print(args, step: int, batch: dict, rollout, rewards: Tensor) -> None:
    """With --debug_mode, the answers to the batch's first prompt every --debug_interval steps."""
    if not args.debug_mode or step % args.debug_interval:
        return
    group = len(rollout.completions) // len(batch["prompt"])
    Logger(f"[debug] step {step}, prompt: {batch['prompt'][0]!r}")
    for text, reward in zip(rollout.completions[:group], rewards[:group].tolist(), strict=True):
        Logger(f"[debug]   {reward:+.3f} {text!r}")
