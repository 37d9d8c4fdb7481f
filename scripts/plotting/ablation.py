"""Numbers, tables and pictures of `scripts/ablate.py`: mean ± standard error over seeds of each arm. No torch."""

import shlex
from pathlib import Path
from statistics import fmean, median, stdev

from scripts.plotting.data import COLORS, Curve, Picture, Plot, Run, thinned, value_axis
from trainer.health_checks import finite

# (name in results.json, title, factor, digits shown)
NUMBERS = (
    ("accuracy", "accuracy, sampled (%)", 100, 1), ("accuracy_greedy", "accuracy, greedy (%)", 100, 1),
    ("reward", "reward", 1, 2), ("kl", "KL (nats a token)", 1, 4), ("seconds_per_step", "s a step", 1, 2),
)  # fmt: skip
PLOTS = (
    ("eval/accuracy", "Held-out accuracy: sampled", "% of prompts"),
    ("eval/accuracy_greedy", "Held-out accuracy: greedy", "% of prompts"),
    ("eval/reward", "Held-out reward", "mean over answers"),
    ("reward", "Training reward", "mean over answers"),
    ("kl", "KL to the reference, in training", "nats a token, k3 estimate"),
    ("timing_s/step", "Time of a step", "seconds"),
)
T95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}  # Student's t, by seeds


# ---------------------------------------------------------------------------------------------- numbers
def evaluated_at_the_end(rows: list[dict]) -> bool:
    """Whether the last step was evaluated, or nothing was to be."""
    evaluated = [row["step"] for row in rows if "eval/prompts" in row]
    return not evaluated or evaluated[-1] == rows[-1]["step"] > 0


def run_numbers(rows: list[dict], before: bool = False) -> dict[str, float | None]:
    """NUMBERS of one run: held out after training (or before it), else of its last step; None where there is none."""
    evaluated = [row for row in rows if "eval/prompts" in row and (row["step"] == 0) == before]
    trained = [] if before else [row for row in rows if "reward" in row]
    last = trained[-1] if trained else {}
    final = evaluated[-1] if evaluated else {}
    seconds = [row["timing_s/step"] for row in trained if finite(row.get("timing_s/step")) is not None]
    found = {
        "accuracy": final.get("eval/accuracy"),
        "accuracy_greedy": final.get("eval/accuracy_greedy"),
        "reward": final.get("eval/reward", last.get("reward")),
        "kl": final.get("eval/kl", last.get("kl")),
        "seconds_per_step": median(seconds) if seconds else None,
    }
    return {name: finite(value) for name, value in found.items()}


def mean_and_error(values: list[float]) -> tuple[float, float | None] | None:
    """(mean, its standard error over seeds: deviation with n - 1, over sqrt(n); None for one value); None for none."""
    if not values:
        return None
    return fmean(values), stdev(values) / len(values) ** 0.5 if len(values) > 1 else None


def summary(runs: dict[int, dict], base: dict[int, dict] | None = None) -> dict:
    """{name: {mean, se, n}} of NUMBERS over seeds; with `base`, of the differences to it on the same seeds."""
    found = {}
    for name, *_ in NUMBERS:
        values = [run[name] - (base[seed][name] if base else 0.0) for seed, run in runs.items()
                  if run[name] is not None and (base is None or base.get(seed, {}).get(name) is not None)]  # fmt: skip
        mean, error = mean_and_error(values) or (None, None)
        found[name] = {"mean": mean, "se": error, "n": len(values)}
    return found


def results_of(groups, rows: dict, settings: dict) -> dict:
    """Everything that was found, as results.json holds it.

    groups: (title, arms); rows: metrics lines of the finished runs by (algorithm, flags, seed); settings: max_steps,
    seeds, flags and failed runs.
    """
    content = {**settings, "groups": []}
    for title, arms in groups:
        entries = []
        for arm in arms:
            mine = {seed: rows[key] for seed in content["seeds"] if (key := (arm.algo, arm.flags, seed)) in rows}
            runs = {seed: run_numbers(lines) for seed, lines in mine.items()}
            entry = {"name": arm.name, "algo": arm.algo, "flags": list(arm.flags), "runs": runs,
                     "before": summary({seed: run_numbers(lines, before=True) for seed, lines in mine.items()}),
                     "after": summary(runs)}  # fmt: skip
            if entries:
                entry["difference_to_first"] = summary(runs, entries[0]["runs"])
            entries.append(entry)
        content["groups"].append({"title": title, "arms": entries})
    return content


# ---------------------------------------------------------------------------------------------- shown
def cell(found: dict, factor: float, digits: int, sign: str = "") -> str:
    """mean ± standard error; a difference gets a star where a t-test at 5% tells it from 0."""
    if found["mean"] is None:
        return "–"
    mean, error = found["mean"] * factor, found["se"]
    if error is None:
        return f"{mean:{sign}.{digits}f}"
    beyond = sign and abs(found["mean"]) > T95.get(found["n"], 2.26) * error
    return f"{mean:{sign}.{digits}f} ± {error * factor:.{digits}f}{' *' if beyond else ''}"


def table(head: str, lines: list[tuple[str, dict, str]]) -> str:
    """A Markdown table that reads well as plain text too. lines: (arm, what `summary` gave, sign of its numbers)."""
    rows = [[head, "seeds", *(title for _, title, _, _ in NUMBERS)]]
    for name, found, sign in lines:
        rows.append([name.replace("|", "\\|"), str(max(part["n"] for part in found.values())),
                     *(cell(found[key], factor, digits, sign) for key, _, factor, digits in NUMBERS)])  # fmt: skip
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    rows.insert(1, ["-" * width for width in widths])
    return "\n".join("| " + " | ".join(text.ljust(width) for text, width in zip(row, widths)) + " |" for row in rows)


def as_markdown(results: dict) -> str:
    """The tables of all groups."""
    flags = f"; every run with `{shlex.join(results['flags'])}`" if results["flags"] else ""
    seeds = ", ".join(map(str, results["seeds"]))
    parts = [f"Mean ± standard error over seeds ({seeds}), {results['max_steps']} steps{flags}. Accuracy, reward and "
             "KL are held out where a run was evaluated. Differences are paired by seed; "
             "a star marks one that a t-test tells from 0 at 5%: of 20 that are chance, one gets it."]  # fmt: skip
    for group in results["groups"]:
        first, *others = group["arms"]
        lines = [("before training", first["before"], ""), *((arm["name"], arm["after"], "") for arm in group["arms"])]
        gaps = [(arm["name"], arm["difference_to_first"], "+") for arm in others]
        parts += [f"## {group['title']}", table("arm", lines), table(f"less \"{first['name']}\"", gaps)]
        parts.append("\n".join(f"- {arm['name']}: `{shlex.join(['train_' + arm['algo'] + '.py', *arm['flags']])}`"
                               for arm in group["arms"]))  # fmt: skip
    if results["failed"]:
        parts.append("Failed: " + "; ".join(results["failed"]))
    return "\n\n".join(parts) + "\n"


def mean_curve(metric: str, runs: list[Run], color: str, factor: float) -> Curve | None:
    """The metric's mean over runs of one arm with its standard error, at 8 places or fewer; None if it is nowhere."""
    values: dict[int, list[float]] = {}
    for run in runs:
        for step, value in thinned(run.points(metric), 8):
            values.setdefault(step, []).append(value * factor)
    steps = [step for step in sorted(values) if len(values[step]) == len(runs)]
    if not steps:
        return None
    pairs = [mean_and_error(values[step]) for step in steps]
    means = [mean for mean, _ in pairs]
    return Curve("", color, steps, means, means, [error or 0.0 for _, error in pairs])


def picture_of(arms: list, rows: dict, seeds: list[int]) -> Picture | None:
    """One group's curves, an arm a colour; None if there is nothing to draw. rows: as `results_of` takes them."""
    runs = {}
    for arm in arms:
        lines = [rows[key] for seed in seeds if (key := (arm.algo, arm.flags, seed)) in rows]
        runs[arm] = [Run(arm.name, Path(arm.name), part) for part in lines]
    plots = []
    for metric, title, unit in PLOTS:
        factor = 100.0 if unit.startswith("%") else 1.0
        drawn = [mean_curve(metric, runs[arm], COLORS[i % len(COLORS)], factor) for i, arm in enumerate(arms)]
        curves = [curve for curve in drawn if curve is not None]
        if curves:
            plots.append(Plot(title, unit, curves, [], *value_axis(curves, "linear")))
    if not plots:
        return None
    heads = [(COLORS[i % len(COLORS)], f"{arm.name}  {shlex.join([arm.algo, *arm.flags])}") for i, arm in
             enumerate(arms)]  # fmt: skip
    steps = [step for plot in plots for curve in plot.curves for step in curve.steps]
    return Picture(heads, plots, [], max(steps), min(steps))
