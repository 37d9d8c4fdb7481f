"""Numbers for the log: sums that every rank adds to, and what the answers of a step were like.

Letters: G answers a prompt, N rows.
"""

import math

import torch
from torch import Tensor

from trainer.distributed import Logger, all_reduce_sum


class MetricSums:
    """Sums and weights of named numbers, collected on the device and reduced over ranks in one exchange.

    `add(name, value, weight)` takes a mean and what it is a mean of; the result is the weighted mean over everything
    added on every rank. Every rank must add the same names. A non-finite value is left out.
    """

    def __init__(self, device: str):
        self.device, self.sums = device, {}

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

    def merge(self, other: "MetricSums") -> None:
        """Take over the names of `other`, which this one must not have."""
        self.sums.update(other.sums)

    def reduce(self) -> dict[str, float]:
        """{name: weighted mean over all ranks}; nan where nothing counted."""
        names = sorted(self.sums)
        totals = all_reduce_sum(torch.stack([self.sums[name] for name in names])).tolist()
        return {name: total / weight if weight > 0 else math.nan
                for name, (total, weight) in zip(names, totals, strict=True)}


def answer_metrics(sums: MetricSums, rollout, rewards: Tensor, parts: dict[str, Tensor], real: Tensor) -> None:
    """Add what the answers earned, part by part, and how long they were; `real` bool [N] says which rows count."""
    sums.add_each("reward", rewards, real & torch.isfinite(rewards))
    for name, values in parts.items():
        sums.add_each(f"rewards/{name}/mean", values, real)
    sums.add_each("rewards/nonfinite", (~torch.isfinite(rewards)).double(), real)
    sums.add_each("completions/mean_length", rollout.completion_mask.sum(1).double(), real)
    sums.add_each("completions/clipped_ratio", (~rollout.finished).double(), real)


def group_metrics(sums: MetricSums, rewards: Tensor, real: Tensor, num_generations: int) -> None:
    """Add how much the answers to one prompt differ: mean standard deviation, and the share of groups without any."""
    groups = rewards.masked_fill(~(real & torch.isfinite(rewards)), math.nan).view(-1, num_generations).double()
    std = (groups - groups.nanmean(dim=1, keepdim=True)).square().nanmean(dim=1).sqrt()
    sums.add_each("reward_std", std, torch.isfinite(std))
    sums.add_each("frac_reward_zero_std", (std < 1e-6).double(), torch.isfinite(std))


def debug_print(args, step: int, batch: dict, rollout, rewards: Tensor) -> None:
    """With --debug_mode, the answers to the batch's first prompt every --debug_interval steps."""
    if not args.debug_mode or step % args.debug_interval:
        return
    group = len(rollout.completions) // len(batch["prompt"])
    Logger(f"[debug] step {step}, prompt: {batch['prompt'][0]!r}")
    for text, reward in zip(rollout.completions[:group], rewards[:group].tolist(), strict=True):
        Logger(f"[debug]   {reward:+.3f} {text!r}")
