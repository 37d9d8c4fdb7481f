"""Runs as they lie on disk, and what is drawn of them: panels of curves and the health alarms' marks. No torch."""

import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, median

from trainer.health_checks import finite
from trainer.run_files import read_metrics_lines

# Colours that people who cannot tell red from green can tell apart (Okabe and Ito, jfly.uni-koeln.de/color).
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#8C564B")
ALARM_COLORS = {1.0: "#B8860B", 2.0: "#C00000"}  # by what health/{name} says: warning, severe
# Flags that say where things lie and how much is shown: two runs that differ in them alone are the same experiment.
UNTOLD = {
    "save_dir", "run_dir", "checkpoint_dir", "weight_dir", "data_path", "eval_data_path", "reward_model_path",
    "tokenizer_path", "save_weight", "wandb_project", "use_wandb", "use_tensorboard", "quiet", "threads", "device",
    "num_workers", "from_resume", "save_interval", "sglang_shared_path", "debug_mode", "starter",
}  # fmt: skip


@dataclass(frozen=True)
class Panel:
    """One small picture: metrics with their labels.

    scale: "log" for numbers with rare peaks, on a logarithmic axis where they span decades, their median as the strong
    curve (a mean would carry one peak through its whole window); "cut" the same on a plain axis that leaves the highest
    peaks out; "%" for shares of 1; "exact" for what needs no smoothing.
    """

    title: str
    unit: str
    metrics: dict[str, str]
    scale: str = "linear"
    least: float = 0.0  # shown only where a value is larger than this in size
    alarms: tuple[str, ...] = ()  # health alarms that are about these metrics
    compared: int = 2  # how many of the metrics are shown, a panel each, where several runs are compared


PARTS = "rewards/*/mean"  # stands for whatever parts a run has
PANELS = (
    Panel("Reward", "mean over answers", {"reward": "training", "eval/reward": "held out"},
          alarms=("reward_hacking", "nonfinite")),
    Panel("Parts of the reward", "mean over answers, before weights", {PARTS: ""}, least=1e-9,
          alarms=("reward_saturated", "reward_hacking", "repetition"), compared=99),
    Panel("Held-out accuracy", "% of prompts", {
        "eval/accuracy": "sampled", "eval/accuracy_greedy": "greedy", "eval/pass@4": "one of 4 sampled"}, "%"),
    Panel("KL to the reference", "nats a token", {"kl": "k3 estimate", "kl_k1": "k1 estimate"}, "log", 1e-9,
          ("kl_runaway", "kl_stuck")),
    Panel("Answer length", "tokens", {"completions/mean_length": "mean", "completions/min_length": "shortest",
                                      "completions/max_length": "longest"}, alarms=("length_bias",),
          compared=1),
    Panel("Answers cut at the limit", "% of answers", {"completions/clipped_ratio": "cut"}, "%", 1e-9,
          ("length_limit",)),
    Panel("Entropy", "nats a token", {"entropy": "entropy"}, alarms=("entropy_collapse",)),
    Panel("Clipped tokens", "% of tokens", {
        "clip_ratio/region_mean": "outside the range", "clip_ratio/low_mean": "below it",
        "clip_ratio/high_mean": "above it", "cispo_clip_ratio": "at the cap"}, "%", 1e-9, ("clip_fraction",), 1),
    Panel("Groups that teach nothing", "% of groups, all rewards equal", {"frac_reward_zero_std": "flat"}, "%", 1e-9,
          ("flat_groups",)),
    Panel("Spread of rewards in a group", "standard deviation", {"reward_std": "spread"}, least=1e-9),
    Panel("How far one update goes", "approximate KL, nats a token", {"approx_kl": "approx_kl"}, "log", 1e-12),
    Panel("Updates ended early", "% of steps", {"early_stop": "early stop"}, "%", 1e-9, ("early_stop",)),
    Panel("Critic: explained variance", "1 = perfect, 0 = a constant", {"critic/explained_var": "explained"},
          alarms=("critic_useless",)),
    Panel("Critic: loss", "rewards squared", {"critic/vf_loss": "loss"}, "log"),
    Panel("Gradient norm", "before clipping", {"grad_norm": "policy", "critic/grad_norm": "critic"}, "log", 1e-12,
          ("grad_spike",)),
    Panel("Do longer answers earn more?", "correlation within a step", {"rewards/length_correlation": "correlation"},
          alarms=("length_bias",)),
    Panel("Reward model at its limit", "% of scores at -3 or 3", {"rewards/rm/saturated": "at the limit"}, "%", 1e-9,
          ("reward_saturated",)),
    Panel("Sampler and trainer differ", "nats a token", {
        "sampling/logp_difference/mean": "mean", "sampling/logp_difference/max": "largest"}, "log", 1e-4,
        ("logp_mismatch",), 1),
    Panel("Time of a step", "seconds", {"timing_s/step": "whole step", "timing_s/gen": "sampling",
                                        "timing_s/reward": "rewards", "timing_s/ref": "reference",
                                        "timing_s/update": "update"}, "cut", compared=1),
    Panel("Speed", "tokens a second", {"perf/tokens_per_s": "speed"}, "cut"),
    Panel("Learning rate", "", {"lr": "policy", "critic/lr": "critic"}, "exact", alarms=("kl_stuck",)),
)  # fmt: skip


# ---------------------------------------------------------------------------------------------- reading
@dataclass
class Run:
    """One run: its name, its lines, its flags and the names of those given on the command line."""

    name: str
    path: Path
    rows: list[dict]
    flags: dict = field(default_factory=dict)
    given: list[str] = field(default_factory=list)

    def points(self, metric: str) -> list[tuple[int, float]]:
        """(step, value) wherever the metric has a finite value."""
        pairs = [(row["step"], finite(row.get(metric))) for row in self.rows]
        return [(step, value) for step, value in pairs if value is not None]

    def alarms(self) -> list[tuple[int, str, float, str]]:
        """(step, name, 1 or 2 for severe, message) of every alarm, in order."""
        found = []
        for row in self.rows:
            names = [name for name in row if name.startswith("health/") and name != "health/messages"]
            for name, message in zip(names, row.get("health/messages") or []):
                found.append((row["step"], name.removeprefix("health/"), 2.0 if row[name] == 2 else 1.0, str(message)))
        return found


def metrics_path(text: str) -> Path:
    """The metrics file that a run's folder or the file itself stands for. Raises ValueError if there is none."""
    path = Path(text)
    if not path.exists():
        raise ValueError(f"{text} does not exist; expected a run's folder, as out/runs/…, or its metrics.jsonl")
    if path.is_dir():
        path = path / "metrics.jsonl"
        if not path.is_file():
            raise ValueError(f"{text} holds no metrics.jsonl, so it is no run's folder; runs lie in out/runs/")
    return path


def read_run(path: Path) -> Run:
    """One run from its metrics file and the config.json beside it, if there is one.

    A last line that is half written is left out. Raises: ValueError if there is no whole line; OSError.
    """
    rows = [json.loads(line) for line, _ in read_metrics_lines(path)]
    if not rows:
        raise ValueError(f"{path} holds no whole line of metrics yet")
    for row in rows:
        row["step"] = int(row["step"])
    config = {}
    try:
        config = json.loads((path.parent / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # moved away from its folder, or just being written: the curves do not need it
        pass
    words = [word for word in config.get("command") or [] if word.startswith("--")]
    given = [word[2:].partition("=")[0] for word in words]
    return Run(path.resolve().parent.name, path, rows, config.get("args") or {}, given)


def tell_apart(runs: list[Run]) -> list[str]:
    """A line for each run: its name, and the flags in which it differs from the others (alone: those it was given)."""
    if len({run.name for run in runs}) < len(runs):
        for run in runs:
            run.name = str(run.path.parent)
    shared = set.intersection(*(set(run.flags) for run in runs)) - UNTOLD
    differ = [name for name in runs[0].flags if name in shared and any(run.flags[name] != runs[0].flags[name]
                                                                       for run in runs)]  # fmt: skip
    lines = []
    for run in runs:
        told = differ if len(runs) > 1 else [name for name in run.given if name in run.flags and name not in UNTOLD]
        words = ["--starter"] if len(runs) == 1 and "starter" in run.given else []
        lines.append("  ".join([f"{run.name} ", *words, *(f"--{name} {run.flags[name]}" for name in told)]).rstrip())
    return lines


# ---------------------------------------------------------------------------------------------- what is drawn
@dataclass
class Curve:
    """Points to draw; `smooth` is drawn strongly over faint `values`. error: standard errors of sparse points."""

    label: str
    color: str
    steps: list[int]
    values: list[float]
    smooth: list[float]
    error: list[float] | None = None


@dataclass
class Mark:
    """A health alarm at a step; `number` is its place in the list of texts."""

    step: int
    number: int
    color: str  # how bad it is
    line: str  # that too, or which run it is where there are several
    level: int = 0  # how many marks it stands under, since they are close by


@dataclass
class Plot:
    """A panel with its data. low, high: the value axis, in decades if log."""

    title: str
    unit: str
    curves: list[Curve]
    marks: list[Mark]
    log: bool
    low: float
    high: float


@dataclass
class Picture:
    """Everything there is to draw. heads: (colour, text) of each run; alarms: (colour, number, text)."""

    heads: list[tuple[str, str]]
    plots: list[Plot]
    alarms: list[tuple[str, int, str]]
    last_step: int
    first_step: int


def smoothed(values: list[float], window: int, middle=fmean) -> list[float]:
    """The mean (or another middle) of each value and up to window - 1 before it."""
    return [middle(values[max(0, i - window + 1) : i + 1]) for i in range(len(values))]


def thinned(points: list[tuple[int, float]], most: int = 2000) -> list[tuple[int, float]]:
    """At most `most` points: neighbours are replaced by their mean, at the last one's step."""
    size = math.ceil(len(points) / most)
    groups = [points[i : i + size] for i in range(0, len(points), size)] if size > 1 else []
    return [(group[-1][0], fmean(value for _, value in group)) for group in groups] or points


def expanded(panel: Panel, runs: list[Run]) -> list[Panel]:
    """The panel with its parts named, and one panel a metric where several runs are compared."""
    metrics = dict(panel.metrics)
    if PARTS in metrics:
        words = {"rm": "reward model", "answer": "right answer"}
        names = dict.fromkeys(name for run in runs for row in run.rows for name in row)
        parts = [name[len("rewards/") : -len("/mean")] for name in names
                 if name.startswith("rewards/") and name.endswith("/mean")]  # fmt: skip
        metrics = {f"rewards/{part}/mean": words.get(part, part) for part in parts}
    metrics = {name: label for name, label in metrics.items()
               if any(abs(value) > panel.least or panel.least == 0 for run in runs for _, value in run.points(name))}
    if len(runs) > 1:  # what is the same in all of them is not worth a panel
        metrics = {name: label for name, label in metrics.items()
                   if len({value for run in runs for _, value in run.points(name)}) > 1}
    if len(runs) == 1 and len(metrics) > 1:
        return [replace(panel, metrics=metrics)]
    several = len(panel.metrics) > 1 or PARTS in panel.metrics
    return [replace(panel, title=f"{panel.title}: {label}" if several else panel.title, metrics={name: label},
                    alarms=panel.alarms if i == 0 else ())
            for i, (name, label) in enumerate(list(metrics.items())[: panel.compared])]  # fmt: skip


def curves_of(panel: Panel, runs: list[Run], window: int) -> list[Curve]:
    """The panel's curves: coloured by run where there are several, by metric where there is one."""
    curves, factor = [], 100.0 if panel.scale == "%" else 1.0
    for place, (metric, label) in enumerate(panel.metrics.items()):
        for number, run in enumerate(runs):
            points = thinned(run.points(metric))
            if not points:
                continue
            values = [value * factor for _, value in points]
            errors = None
            if metric.startswith("eval/"):
                known = dict(run.points(f"{metric}_se"))
                errors = [known.get(step, 0.0) * factor for step, _ in points]
            k = 1 if errors or panel.scale == "exact" else window or 2 * round(len(points) / 30) + 1
            smooth = smoothed(values, k, median if panel.scale in ("log", "cut") else fmean)
            color = COLORS[(number if len(runs) > 1 else place) % len(COLORS)]
            curves.append(Curve(label, color, [step for step, _ in points], values, smooth, errors))
    return curves


def value_axis(curves: list[Curve], scale: str) -> tuple[bool, float, float]:
    """(whether the axis is logarithmic, its lower and upper end, in decades then).

    It is for scale "log" where the values span more than a factor 10; "cut" ends it at twice the value that 95% stay
    under.
    """
    values = [value for curve in curves for value in curve.values]
    values += [value + error for curve in curves for value, error in zip(curve.values, curve.error or [])]
    values += [value - error for curve in curves for value, error in zip(curve.values, curve.error or [])]
    positive = sorted(value for value in values if value > 0)
    if scale == "log" and len(positive) > 0.8 * len(values) and positive[-1] > 10 * positive[len(positive) // 20]:
        low, high = math.log10(positive[len(positive) // 100]), math.log10(positive[-1])
        return True, low - 0.05 * (high - low), high + 0.05 * (high - low)
    low, high = min(values), max(values)
    if scale == "cut":
        high = min(high, 2 * sorted(values)[math.ceil(0.95 * (len(values) - 1))])
    room = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    return False, low - room, high + room


def alarm_list(runs: list[Run]) -> list[tuple[int, int, str, float, str]]:
    """(run, step, name, 1 or 2, text) of the first alarm of each name and of the first severe one, by step."""
    found, seen = [], set()
    for number, run in enumerate(runs):
        for step, name, grade, message in run.alarms():
            if (number, name, grade) in seen or (number, name, 2.0) in seen:
                continue
            seen.add((number, name, grade))
            where = f"{run.name}, step {step}" if len(runs) > 1 else f"step {step}"
            words = f"{where}: {name.replace('_', ' ')}{' (severe)' if grade == 2.0 else ''}: {message}"
            found.append((number, step, name, grade, words))
    return sorted(found, key=lambda alarm: (alarm[1], alarm[0]))


def stagger(marks: list[Mark], near: float) -> None:
    """Put each mark under the ones before it (by step) that are at most `near` steps away."""
    for i, mark in enumerate(marks):
        taken = {other.level for other in marks[:i] if mark.step - other.step <= near}
        mark.level = next(level for level in range(len(marks)) if level not in taken)


def build_picture(runs: list[Run], smooth: int) -> Picture:
    """What is drawn of the runs. smooth: logged steps that are averaged; 0 = a fifteenth of the run's."""
    listed = alarm_list(runs)
    plots = []
    for panel in (part for template in PANELS for part in expanded(template, runs)):
        curves = curves_of(panel, runs, smooth)
        log, low, high = value_axis(curves, panel.scale)
        marks = [Mark(step, number, ALARM_COLORS[grade], COLORS[run % len(COLORS)] if len(runs) > 1 else
                      ALARM_COLORS[grade])
                 for number, (run, step, name, grade, _) in enumerate(listed, 1) if name in panel.alarms]  # fmt: skip
        plots.append(Plot(panel.title, panel.unit, curves, marks, log, low, high))
    if not plots:
        raise ValueError(f"{', '.join(str(run.path) for run in runs)}: no line holds a number that could be drawn")
    steps = [step for plot in plots for curve in plot.curves for step in curve.steps]
    for plot in plots:
        stagger(plot.marks, near=0.04 * (max(steps) - min(steps)))
    heads = [(COLORS[number % len(COLORS)], line) for number, line in enumerate(tell_apart(runs))]
    texts = [(ALARM_COLORS[grade], number, words) for number, (_, _, _, grade, words) in enumerate(listed, 1)]
    return Picture(heads, plots, texts, max(steps), min(steps))
