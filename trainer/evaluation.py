"""Held-out evaluation, and what a run shows at its end: accuracy and reward before and after, samples, the curve.

Every prompt draws from its own fixed randomness, so before and after, and one rank or several, face the same dice.
"""

import math
from pathlib import Path

import torch
from torch import Tensor

from trainer.distributed import Logger, all_reduce_sum, is_main_process, rank_and_world
from trainer.rewards import answer_matches, calculate_rewards
from trainer.rollout_engine import sample_answers

EVAL_SAMPLES = 4  # sampled answers a held-out prompt, besides the greedy one
EVAL_STREAM = 2  # first word of the random keys; training uses 1


class Evaluator:
    """Answers the first --eval_prompts held-out prompts greedily and EVAL_SAMPLES times at the training temperature."""

    def __init__(self, engine, tokenizer, dataset, reward_model, args, device: str):
        self.engine, self.tokenizer, self.dataset, self.reward_model = engine, tokenizer, dataset, reward_model
        self.args, self.device = args, device
        self.count = 0 if dataset is None else min(args.eval_prompts, len(dataset))

    def measure(self, run_log, step: int) -> dict | None:
        """Evaluate and log; None without held-out data. All ranks take part, each with its share of the prompts.

        Returns: {"metrics": numbers for the log, "per_prompt": float64 [prompts, 6] of accuracy, reward and length,
        greedy then sampled (what paired differences need), "samples": up to three greedy answers}. Accuracies are nan
        where rows carry no answer. Standard errors are over prompts.
        """
        if self.count == 0:
            return None
        rank, world = rank_and_world()
        mine = list(range(rank, self.count, world))
        rows_at_once = self.args.batch_size * getattr(self.args, "num_generations", 1)
        chunk = max(1, rows_at_once // EVAL_SAMPLES)
        table = torch.zeros(self.count, 6, dtype=torch.float64)
        samples, shown = [], set(mine[:: max(1, math.ceil(len(mine) / 3))])  # spread over the file, not picked
        for start in range(0, len(mine), chunk):
            rows = [self.dataset[index] for index in mine[start : start + chunk]]
            greedy, texts = self._answer(rows, samples=1, temperature=0.0)
            sampled, _ = self._answer(rows, samples=EVAL_SAMPLES, temperature=self.args.temperature)
            table[mine[start : start + chunk]] = torch.cat([greedy, sampled], dim=1)
            samples += [{"prompt": row["messages"][-1]["content"], "answer": row["answer"], "response": text}
                        for row, text in zip(rows, texts, strict=True) if row["index"] in shown]
        per_prompt = all_reduce_sum(table.to(self.device)).cpu()
        result = {"metrics": _summary(per_prompt), "per_prompt": per_prompt, "samples": samples}
        metrics = result["metrics"]
        run_log.write({"step": step, **metrics}, f"held out at step {step}: accuracy {metrics['eval/accuracy']:.3f}, "
                      f"reward {metrics['eval/reward']:.3f} (sampled, {self.count} prompts)")
        return result

    def _answer(self, rows: list[dict], *, samples: int, temperature: float) -> tuple[Tensor, list[str]]:
        """Means over `samples` answers of each row, float64 [rows, 3] of right, reward, length in tokens; the texts."""
        keys = [(EVAL_STREAM, self.args.seed, 0, row["index"]) for row in rows]
        rollout = sample_answers(self.engine, self.tokenizer, [row["prompt_ids"] for row in rows], keys, self.args,
                                 self.device, num_generations=samples, temperature=temperature)
        rewards = calculate_rewards(
            [row["prompt"] for row in rows], rollout.completions, self.reward_model,
            messages=[row["messages"] for row in rows], answers=[row["answer"] for row in rows],
            answer_reward=self.args.answer_reward,
        )  # fmt: skip
        right = [_is_right(text, rows[i // samples]) for i, text in enumerate(rollout.completions)]
        columns = torch.stack([torch.tensor(right, dtype=torch.float64), rewards.double().cpu(),
                               rollout.completion_mask.sum(1).double().cpu()], dim=1)
        return columns.view(len(rows), samples, 3).nanmean(dim=1), rollout.completions


def _is_right(response: str, row: dict) -> float:
    if not row["answer"]:
        return math.nan
    return float(answer_matches(response, row["answer"], thinking_open=row["prompt"].rstrip().endswith("<think>")))


def _summary(per_prompt: Tensor) -> dict[str, float]:
    names = ("accuracy_greedy", "reward_greedy", "length_greedy", "accuracy", "reward", "length")
    metrics = {"eval/prompts": len(per_prompt)}
    for name, column in zip(names, per_prompt.T, strict=True):
        metrics[f"eval/{name}"], metrics[f"eval/{name}_se"] = mean_and_error(column)
    return metrics


def mean_and_error(values: Tensor) -> tuple[float, float]:
    """(mean, standard error of it) over the finite entries; nan where there are too few."""
    values = values[torch.isfinite(values)]
    if len(values) < 2:
        return (values.mean().item() if len(values) else math.nan), math.nan
    return values.mean().item(), (values.std() / len(values) ** 0.5).item()


# ---------------------------------------------------------------------------------------------- the end of a run
def sparkline(values: list[float], width: int = 60) -> str:
    """`values`, averaged into at most `width` bins, as a line of bars."""
    if not values:
        return ""
    size = max(1, math.ceil(len(values) / width))
    bins = [sum(values[i : i + size]) / len(values[i : i + size]) for i in range(0, len(values), size)]
    low, high = min(bins), max(bins)
    return "".join("▁▂▃▄▅▆▇█"[int(7.999 * (value - low) / (high - low)) if high > low else 3] for value in bins)


def draw_curve(series: dict[str, list[float]], path: Path) -> Path | None:
    """A PNG of the series over steps, raw and smoothed; None where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = {name: values for name, values in series.items() if len(values) > 1}
    if not shown:
        return None
    figure, axes = pyplot.subplots(len(shown), 1, figsize=(8, 2.4 * len(shown)), sharex=True, squeeze=False)
    for axis, (name, values) in zip(axes[:, 0], shown.items(), strict=True):
        window = max(1, len(values) // 15)
        smooth = [sum(values[max(0, i - window + 1) : i + 1]) / min(window, i + 1) for i in range(len(values))]
        axis.plot(range(1, len(values) + 1), values, alpha=0.35, linewidth=1)
        axis.plot(range(1, len(values) + 1), smooth, linewidth=2)
        axis.set_title(name, fontsize=10, loc="left")
        axis.grid(alpha=0.3)
    axes[-1, 0].set_xlabel("rollout step")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path


def comparison_table(before: dict, after: dict) -> list[str]:
    """Lines that set held-out numbers before and after side by side, with standard errors and the paired difference."""
    title = f"held out, {len(after['per_prompt'])} prompts"
    lines = [f"{title:<28}{'before':>18}{'after':>18}{'change':>20}"]
    rows = (("accuracy, greedy", 0, 100, "%"), (f"accuracy, sampled x{EVAL_SAMPLES}", 3, 100, "%"),
            ("reward, greedy", 1, 1, ""), (f"reward, sampled x{EVAL_SAMPLES}", 4, 1, ""),
            ("length, sampled (tokens)", 5, 1, ""))
    for name, column, scale, unit in rows:
        first, last = before["per_prompt"][:, column] * scale, after["per_prompt"][:, column] * scale
        numbers = [mean_and_error(values) for values in (first, last, last - first)]
        if math.isnan(numbers[1][0]):
            continue
        digits = 1 if scale == 100 else 2
        cells = [f"{mean:.{digits}f}{unit} ± {error:.{digits}f}" for mean, error in numbers[:2]]
        cells.append(f"{numbers[2][0]:+.{digits}f}{unit} ± {numbers[2][1]:.{digits}f}")
        lines.append(f"{name:<28}{cells[0]:>18}{cells[1]:>18}{cells[2]:>20}")
    return lines


def sample_lines(before: dict, after: dict) -> list[str]:
    """Up to three held-out prompts with their greedy answers before and after."""
    lines, answered = [], {entry["prompt"]: entry for entry in after["samples"]}
    # A run resumed on another number of ranks kept answers to other prompts: show those it has from both times.
    for first in (entry for entry in before["samples"] if entry["prompt"] in answered):
        last = answered[first["prompt"]]
        expected = f"   (expected {last['answer']})" if last["answer"] else ""
        lines.append(f"prompt: {last['prompt']}{expected}")
        lines += [f"  {when}: {_one_line(entry['response'])}" for when, entry in (("before", first), ("after ", last))]
    return lines


def _one_line(text: str, limit: int = 200) -> str:
    text = text.replace("\n", " ⏎ ")
    return text if len(text) <= limit else text[: limit - 1] + "…"


def report(run_log, before: dict | None, after: dict | None, weights: Path, curves: list[str], next_command: str):
    """Print what the run achieved and where everything is."""
    if not is_main_process():
        return
    lines = ["", "=" * 84]
    # Resumed with another --eval_prompts, there are no pairs to compare.
    if before is not None and after is not None and len(before["per_prompt"]) == len(after["per_prompt"]):
        lines += comparison_table(before, after) + [""] + sample_lines(before, after) + [""]
    series = {name: run_log.series(name) for name in curves}
    picture = draw_curve(series, run_log.folder / "curve.png")
    for name, values in series.items():
        if values:
            lines.append(f"{name:<12} {sparkline(values)}  {values[0]:.3f} -> {values[-1]:.3f}")
    lines += ["", f"weights  {weights}", f"metrics  {run_log.path}",
              f"curve    {picture or 'not drawn as PNG: pip install matplotlib'}", f"next     {next_command}"]
    for line in lines:
        Logger(line)
