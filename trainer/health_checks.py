"""What goes wrong in RLHF, one check each: what was seen, in words with its numbers, and what to try.

A check is given what a run has logged so far and what its flags are, and gives a Finding or None. Windows count logged
steps. Imports neither torch nor numpy. trainer/health.py runs all of them and decides what is worth saying.
"""

import math
from collections import deque
from dataclasses import dataclass
from statistics import fmean, median, stdev
from typing import NamedTuple

KEPT = 60  # logged steps that checks can look back on
BLOCK = 20  # logged steps whose mean is kept for good


class Finding(NamedTuple):
    """What a check saw: its words, how bad it is (twice the number is worth saying again), and whether it is severe."""

    message: str
    badness: float
    severe: bool = False


@dataclass(frozen=True)
class Settings:
    """What of a run's flags the checks must know."""

    kl_weight: float = 0.1
    kl_flag: str = "--beta"
    exact: bool = True  # float32 and this process's own sampling: log-probs must agree to rounding
    scaled: bool = False  # float16: the loss scaler finds its scale by skipping steps


def finite(value) -> float | None:
    """A metric's value as a float; None where it is missing, NaN or infinite (None in JSON) or no number."""
    if isinstance(value, (int, float)) and math.isfinite(value):
        return float(value)
    return None


# ---------------------------------------------------------------------------------------------- what has been seen
class Past:
    """The last KEPT logged steps, the means of every BLOCK of them since the start, and a few totals."""

    def __init__(self):
        self.rows, self.count, self.blocks = deque(maxlen=KEPT), 0, []
        self.largest_kl, self.travel = 0.0, 0.0

    def add(self, row: dict) -> None:
        """Take in one logged step. Parts of the reward other than the reward model's are summed under `rules`."""
        parts = [finite(value) for name, value in row.items() if name.startswith("rewards/") and name.endswith("/mean")
                 and name != "rewards/rm/mean"]  # fmt: skip
        if self.rows and finite(self.now.get("grad_norm")):
            # AdamW moves a weight by about the learning rate; a step shows in the numbers of the next one.
            self.travel += self.rate
        self.rows.append({**row, "rules": sum(part for part in parts if part is not None)})
        self.count += 1
        self.largest_kl = max(self.largest_kl, finite(row.get("kl")) or 0.0)
        if self.count % BLOCK == 0:
            names = ("rules", "rewards/rm/mean", "rewards/repetition/mean", "completions/mean_length", "entropy")
            block = {name: mean_and_error(self.last(name, BLOCK)) for name in names}
            self.blocks.append({**block, "step": row["step"]})

    @property
    def now(self) -> dict:
        return self.rows[-1]

    @property
    def rate(self) -> float:
        """The learning rate of the last logged step."""
        return finite(self.now.get("lr")) or 0.0

    def last(self, name: str, count: int) -> list[float]:
        """The finite values of a metric in the last `count` logged steps."""
        values = [finite(row.get(name)) for row in list(self.rows)[-count:]]
        return [value for value in values if value is not None]

    def mean(self, name: str, count: int, least: int) -> float | None:
        """The mean over the last `count` logged steps; None with fewer than `least` values."""
        values = self.last(name, count)
        return fmean(values) if len(values) >= least else None

    def start(self, name: str) -> float | None:
        """The mean over the run's first BLOCK logged steps; None before they are over, or where it was not measured."""
        return self.blocks[0][name][0] if self.blocks else None


def mean_and_error(values: list[float]) -> tuple[float | None, float]:
    """(mean, its standard error); (None, infinity) for fewer than two values."""
    if len(values) < 2:
        return None, math.inf
    return fmean(values), stdev(values) / len(values) ** 0.5


# ---------------------------------------------------------------------------------------------- numbers that must agree
def nonfinite(past: Past, settings: Settings) -> Finding | None:
    """Rewards, losses or gradients that are NaN or infinite."""
    row = past.now
    absent = [name for name in ("reward", "kl", "policy_loss", "critic/vf_loss") if name in row
              and finite(row[name]) is None]  # fmt: skip
    share = finite(row.get("rewards/nonfinite")) or 0.0
    skipped = sum(past.last("skipped_steps", 10))
    if settings.scaled and (skipped < 5 or past.count <= BLOCK):
        skipped = 0.0
    if not absent and share == 0 and (skipped == 0 or not finite(row.get("skipped_steps"))):
        return None
    said = [f"{name} is not a finite number" for name in absent]
    if share > 0:
        said.append(f"{share:.0%} of the answers have no finite reward")
    if skipped > 0:
        said.append(f"{skipped:g} of the last 10 optimizer steps were skipped for a non-finite gradient")
    return Finding(
        f"{', '.join(said)}. Try --dtype float32 or a lower --learning_rate, and look at what the reward gives for "
        "empty or very long answers",
        1.0 + share + skipped, severe=bool(absent) or skipped >= 5,
    )  # fmt: skip


def logp_mismatch(past: Past, settings: Settings) -> Finding | None:
    """Trainer and sampler do not agree on the log-probs of the tokens sampled, before any update."""
    mean = finite(past.now.get("sampling/logp_difference/mean")) or 0.0
    largest = finite(past.now.get("sampling/logp_difference/max")) or 0.0
    mean_limit, largest_limit = (1e-3, 0.05) if settings.exact else (0.05, 3.0)
    if mean <= mean_limit and largest <= largest_limit:
        return None
    worst = f", {largest:.3g} at most" if largest else ""
    return Finding(
        f"trainer and sampler differ by {mean:.3g} nats on average{worst} in the log-probs of the sampled tokens "
        f"(expected up to {mean_limit:g}): the ratios start wrong. The sampler has older weights, another temperature "
        "or precision: try --sync_interval 1 and the same dtype on the server",
        max(mean / mean_limit, largest / largest_limit), severe=mean > 10 * mean_limit and mean > 0.2,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------- how far the policy went
def kl_runaway(past: Past, settings: Settings) -> Finding | None:
    """The policy is far from the reference."""
    values = past.last("kl", 5)
    kl = median(values) if len(values) >= 3 else 0.0
    if kl <= 0.5:
        return None
    return Finding(
        f"KL to the reference is {kl:.3g} nats a token (median of the last {len(values)} logged steps; above 0.5): "
        f"the policy has left the model it started from. Try a lower --learning_rate (now {past.rate:.2g}) or a higher "
        f"{settings.kl_flag} (now {settings.kl_weight:g})",
        kl, severe=kl > 2.0,
    )  # fmt: skip


def kl_stuck(past: Past, settings: Settings) -> Finding | None:
    """The optimizer steps, yet the policy is still the reference. At 3e-7 that takes 3300 steps to tell."""
    if settings.kl_weight == 0 or past.count < 5 or past.travel < 1e-3 or past.largest_kl > 1e-7:
        return None
    if "kl" not in past.now:
        return None
    return Finding(
        f"KL to the reference is still 0 after {past.count} logged steps whose learning rates add up to "
        f"{past.travel:.2g}: the policy does not move. Try looking for a reference that shares the policy's weights, "
        f"for updates that all end early, or a higher --learning_rate (now {past.rate:.2g})",
        1.0,
    )  # fmt: skip


def entropy_collapse(past: Past, settings: Settings) -> Finding | None:
    """The policy has become certain of every token: it no longer explores."""
    entropy, start = past.mean("entropy", 10, least=10), past.start("entropy")
    if entropy is None:
        return None
    if entropy < 1e-3:
        return Finding(
            f"entropy is {entropy:.2g} nats a token (mean of the last 10 logged steps): the policy is certain of every "
            "token, so all answers to a prompt are the same. Try a higher --temperature, or go back to an earlier "
            "checkpoint with a lower --learning_rate",
            1.0, severe=True,
        )  # fmt: skip
    if start is None or entropy > 0.1 * start:
        return None
    return Finding(
        f"entropy fell from {start:.3g} (first {BLOCK} logged steps) to {entropy:.3g} nats a token (last 10): the "
        f"policy explores less and less. Try a lower --learning_rate, a higher {settings.kl_flag} or --temperature",
        start / entropy, severe=entropy < 0.02 * start,
    )  # fmt: skip


def clip_fraction(past: Past, settings: Settings) -> Finding | None:
    """So many tokens are clipped that most of the gradient is thrown away."""
    for name, words in (("clip_ratio/region_mean", "outside the clip range"), ("cispo_clip_ratio", "at the ratio cap")):
        share = past.mean(name, 5, least=3)
        if share is not None and share > 0.4:
            return Finding(
                f"{share:.0%} of the tokens are {words} (mean of the last 5 logged steps; above 40%): the policy moves "
                "further in one rollout than its data allow. Try a lower --learning_rate or fewer updates a rollout",
                share,
            )  # fmt: skip
    return None


def early_stop(past: Past, settings: Settings) -> Finding | None:
    """PPO's early stop ends every update."""
    stops = past.last("early_stop", 10)
    if len(stops) < 10 or min(stops) < 1.0:
        return None
    return Finding(
        "--early_stop_kl ended the update of each of the last 10 logged steps: most of every rollout is not learnt "
        "from. Try a lower --learning_rate or fewer --ppo_update_iters",
        1.0,
    )  # fmt: skip


def grad_spike(past: Past, settings: Settings) -> Finding | None:
    """A gradient far above any of the last 50. A tail of the k3 estimate alone makes it four times as large."""
    *before, now = past.last("grad_norm", 51) or [0.0]
    if finite(past.now.get("grad_norm")) is None or len(before) < 20 or now <= 5 * max(before):
        return None
    return Finding(
        f"the gradient norm is {now:.3g}, {now / max(max(before), 1e-12):.0f} times the largest of the {len(before)} "
        f"logged steps before (median {median(before):.3g}). Once is bearable with --grad_clip; if it comes back, "
        "try a lower --learning_rate and look at the answers with --debug_mode",
        now,
    )  # fmt: skip


def critic_useless(past: Past, settings: Settings) -> Finding | None:
    """The critic has been worse than a constant for 50 steps."""
    values = past.last("critic/explained_var", 50)
    if len(values) < 50 or max(values) >= 0:
        return None
    return Finding(
        f"the critic's explained variance has been below 0 for 50 logged steps (now {values[-1]:.3g}): it predicts "
        "worse than a constant and adds noise to the advantages. Try a higher --critic_learning_rate or --vf_coef",
        1.0,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------- what is rewarded
def flat_groups(past: Past, settings: Settings) -> Finding | None:
    """Groups whose answers all earn the same teach nothing."""
    share, longer = (past.mean("frac_reward_zero_std", n, least) for n, least in ((10, 5), (BLOCK, BLOCK)))
    if share is None or share <= 0.8:
        return None
    return Finding(
        f"in {share:.0%} of the groups all answers earned the same reward (mean of the last 10 logged steps; above "
        "80%), so they teach nothing. Try a higher --temperature, more --num_generations, prompts that are neither too "
        "easy nor too hard, or a reward with more steps between wrong and right",
        share, severe=longer is not None and longer >= 0.99,
    )  # fmt: skip


def reward_saturated(past: Past, settings: Settings) -> Finding | None:
    """The reward model's scores are cut off at its limits, so it no longer tells answers apart."""
    share = past.mean("rewards/rm/saturated", 10, least=5) or 0.0
    score = past.mean("rewards/rm/mean", 10, least=5) or 0.0
    if share <= 0.8 and abs(score) <= 2.9:
        return None
    longer = past.mean("rewards/rm/saturated", BLOCK, least=BLOCK) or 0.0
    said = f"{share:.0%} of the scores are" if share > 0.8 else "the mean score is"
    return Finding(
        f"the reward model is saturated: {said} at the limit of -3 or 3 (last 10 logged steps, mean {score:.2f}), so "
        "it cannot tell a good answer from a better one. Try another reward model, or rewards that still differ",
        max(share, abs(score) / 3), severe=longer >= 0.99,
    )  # fmt: skip


def length_bias(past: Past, settings: Settings) -> Finding | None:
    """Longer (or shorter) answers earn more: the reward is little else, or the answers follow it already."""
    correlation = past.mean("rewards/length_correlation", BLOCK, least=10)
    start, length = past.start("completions/mean_length"), past.mean("completions/mean_length", 5, least=3)
    if correlation is None or not start or length is None:
        return None
    change = length / start - 1
    follows = abs(correlation) > 0.5 and change * math.copysign(1, correlation) > 0.15
    if abs(correlation) <= 0.9 and not follows:
        return None
    which = "longer" if correlation > 0 else "shorter"
    return Finding(
        f"{which} answers earn more: reward and length correlate by {correlation:+.2f} (mean of the last {BLOCK} "
        f"logged steps), answers went from {start:.1f} tokens (first {BLOCK}) to {length:.1f} (last 5; {change:+.0%}). "
        "Try reading some; a reward that does not count length, or a penalty on it, takes the bias away",
        abs(correlation) + abs(change),
    )  # fmt: skip


def length_limit(past: Past, settings: Settings) -> Finding | None:
    """Most answers do not end, but are cut."""
    share, longer = (past.mean("completions/clipped_ratio", n, least) for n, least in ((10, 5), (BLOCK, BLOCK)))
    if share is None or share <= 0.5:
        return None
    length = finite(past.now.get("completions/mean_length")) or 0.0
    return Finding(
        f"{share:.0%} of the answers are cut at the limit of --max_gen_len (mean of the last 10 logged steps; now "
        f"{length:.0f} tokens long), so they earn by how they begin. Try a higher --max_gen_len, a reward for ending, "
        "or a model that was tuned to end its answers",
        share, severe=longer is not None and longer >= 0.95,
    )  # fmt: skip


def repetition(past: Past, settings: Settings) -> Finding | None:
    """The answers repeat themselves more than at the start."""
    start, now = past.start("rewards/repetition/mean"), past.mean("rewards/repetition/mean", 10, least=5)
    if start is None or now is None or start - now <= 0.1:
        return None
    return Finding(
        f"answers repeat themselves: the repetition penalty went from {-start:.2f} to {-now:.2f} an answer (0.5 is the "
        f"most). Try a higher weight of the penalty, a higher {settings.kl_flag}, or a lower --learning_rate",
        -now, severe=now < -0.4,
    )  # fmt: skip


def reward_hacking(past: Past, settings: Settings) -> Finding | None:
    """One judge's score rises while another's falls from its best: the policy serves one and not the task.

    The fall is from the best BLOCK of logged steps so far to the last one; both changes must be more than 0.2 and more
    than four standard errors.
    """
    both = {"rules": "the rules' part of the reward", "rewards/rm/mean": "the reward model's score"}
    earlier = [block for block in past.blocks if block["step"] < past.rows[-min(BLOCK, len(past.rows))]["step"]]
    now = {name: mean_and_error(past.last(name, BLOCK)) for name in both}
    for falls, rises in (tuple(both), tuple(both)[::-1]):
        known = [block for block in earlier if block[falls][0] is not None and block[rises][0] is not None]
        if not known or now[falls][0] is None or now[rises][0] is None:
            continue
        best = max(known, key=lambda block: block[falls][0])
        drop, gain = best[falls][0] - now[falls][0], now[rises][0] - best[rises][0]
        errors = [math.hypot(best[name][1], now[name][1]) for name in (falls, rises)]
        if drop > max(0.2, 4 * errors[0]) and gain > max(0.2, 4 * errors[1]):
            return Finding(
                f"{both[rises]} rose by {gain:.2f} since step {best['step']} while {both[falls]} fell by {drop:.2f}: "
                "the policy may serve the one and not the task (reward hacking). Try reading some answers, a higher "
                f"{settings.kl_flag}, or other weights of the reward's parts",
                drop, severe=drop > 1.0,
            )  # fmt: skip
    return None


CHECKS = (nonfinite, logp_mismatch, kl_runaway, kl_stuck, entropy_collapse, clip_fraction, early_stop, grad_spike,
          critic_useless, flat_groups, reward_saturated, length_bias, length_limit, repetition, reward_hacking)
