"""Held-out evaluation, and what a run shows at its end: accuracy and reward before and after, samples, the curve.

Every prompt draws from its own fixed randomness, so before and after, and one rank or several, face the same dice.
Letters: P held-out prompts, S sampled answers a prompt, n rows of a call.
"""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from model.decoding import evaluation_mode
from model.export import checked_state, config_from_state, expected_shapes
from model.model_minimind import MiniMindForCausalLM
from trainer.checkpoints import read_torch_file, save_weights, weights_path
from trainer.distributed import Logger, all_reduce_sum, is_main_process, rank_and_world
from trainer.hf_model import open_hf_folder
from trainer.loading import fit_vocabulary
from trainer.reward_plugins import REWARD_PARTS
from trainer.rewards import answer_matches
from trainer.rl_math import token_kl_penalty
from trainer.rollout_engine import score_answers
from trainer.samples import Answerer, one_line
from trainer.trainer_utils import autocast_context

EVAL_SAMPLES = 4  # sampled answers a held-out prompt, besides the greedy one
# What is noted of every answer, before the parts of its reward: whether it is right (NaN: the row has no answer), its
# reward, its tokens, whether it was cut, and over its tokens the sums of k3 and of logp - ref logp (NaN: no reference).
MEASURES = ("right", "reward", "length", "clipped", "k3", "log_ratio")


class Evaluator:
    """Answers the first --eval_prompts held-out prompts greedily, and `samples` times at the training temperature.

    Weights, modes and random states are afterwards what they were. policy: the bare model that the engine samples from,
    needed for --keep_best, and without it the KL takes the engine's own log-probs; reference: None = no KL.
    """

    def __init__(self, engine, tokenizer, dataset, reward_model, args, device: str, *, policy: nn.Module | None = None,
                 reference: nn.Module | None = None, samples: int = EVAL_SAMPLES, pass_k: tuple[int, ...] = (2, 4)):
        self.answerer = Answerer(engine, tokenizer, reward_model, args, device)
        self.dataset, self.args, self.device = dataset, args, device
        self.policy, self.reference, self.samples, self.pass_k = policy, reference, samples, pass_k
        self.count = 0 if dataset is None else min(args.eval_prompts, len(dataset))
        functions = self.answerer.rewards["reward_functions"]
        self.parts = REWARD_PARTS + tuple(function.name for function in functions)

    def measure(self, run_log, step: int) -> dict | None:
        """Evaluate, log, and with --keep_best 1 keep the weights if they are the best so far; None without data.

        Returns: {"metrics": numbers for the log, "per_prompt": float64 [P, 6] of accuracy, reward and length, greedy
        then sampled (what paired differences need), "samples": up to three greedy answers}. Accuracies are nan where
        rows carry no answer. Standard errors are over prompts.
        """
        result = self.evaluate()
        if result is None:
            return None
        metrics = result["metrics"]
        run_log.write({"step": step, **metrics}, f"held out at step {step}: accuracy {metrics['eval/accuracy']:.3f}, "
                      f"reward {metrics['eval/reward']:.3f} (sampled, {self.count} prompts)")
        if vars(self.args).get("keep_best") and is_main_process():
            path = weights_path(self.args.save_dir, f"{self.args.save_weight}_best", self.policy.config)
            keep_best(run_log, metrics, step, self.policy, path)
        del result["table"]  # not for the resume file
        return result

    def evaluate(self, on_answered: Callable[[int], None] = lambda prompts: None) -> dict | None:
        """What `measure` gives, without logging, and "table" float64 [P, 1 + S, columns]: the greedy answer, then the
        sampled ones, each with MEASURES and the parts of its reward. All ranks take part, each with its share.

        Args: on_answered is told how many more prompts this rank has answered.
        """
        if self.count == 0:
            return None
        rank, world = rank_and_world()
        mine = list(range(rank, self.count, world))
        # Ranks meet in an engine of servers, so each must ask equally often: one without a prompt left asks the first.
        asked = mine + [0] * (math.ceil(self.count / world) - len(mine))
        rows_at_once = self.args.batch_size * vars(self.args).get("num_generations", 1)
        chunk = max(1, rows_at_once // self.samples)
        table = torch.zeros(self.count, 1 + self.samples, len(MEASURES) + len(self.parts), dtype=torch.float64)
        samples, shown = [], set(mine[:: max(1, math.ceil(len(mine) / 3))])  # spread over the file, not picked
        with torch.no_grad():
            for start in range(0, len(asked), chunk):
                rows = [self.dataset[index] for index in asked[start : start + chunk]]
                greedy, texts = self._answer(rows, samples=1, temperature=0.0)
                sampled, _ = self._answer(rows, samples=self.samples, temperature=self.args.temperature)
                real = mine[start : start + chunk]
                table[real] = torch.cat([greedy, sampled], dim=1)[: len(real)]
                samples += [{"prompt": row["messages"][-1]["content"], "answer": row["answer"], "response": text}
                            for row, text in zip(rows[: len(real)], texts) if row["index"] in shown]
                on_answered(len(real))
        table = all_reduce_sum(table.to(self.device)).cpu()
        per_prompt = torch.cat([table[:, 0, :3], table[:, 1:, :3].nanmean(dim=1)], dim=1)
        return {"metrics": self._summary(table, per_prompt), "per_prompt": per_prompt, "samples": samples,
                "table": table}

    def _answer(self, rows: list[dict], *, samples: int, temperature: float) -> tuple[Tensor, list[str]]:
        """`samples` answers to each row: float64 [rows, samples, columns], and the texts."""
        rollout, rewards, parts = self.answerer.answer(rows, samples=samples, temperature=temperature)
        right = [_is_right(text, rows[i // samples]) for i, text in enumerate(rollout.completions)]
        divergence = self._divergence(rollout, samples) if temperature > 0 else torch.full((2, len(right)), math.nan)
        columns = [torch.tensor(right), rewards, rollout.completion_mask.sum(1), ~rollout.finished, *divergence,
                   *(parts[name] for name in self.parts)]
        table = torch.stack([column.cpu().double() for column in columns], dim=1)
        return table.view(len(rows), samples, -1), rollout.completions

    def _divergence(self, rollout, samples: int) -> Tensor:
        """[2, n]: for each answer the sums over its tokens of k3 and of logp - ref logp; NaN without a reference."""
        mask = rollout.completion_mask
        if self.reference is None:
            return torch.full((2, len(mask)), math.nan)
        found = []
        for model in (self.policy, self.reference):
            if model is None:
                found.append(rollout.per_token_logps)
                continue
            with evaluation_mode(model), autocast_context(self.device, self.args.dtype):
                found.append(score_answers(model, rollout, samples, self.args.logp_temperature)[0])
        logps, ref_logps = (values.masked_fill(~mask, 0.0) for values in found)
        return torch.stack([token_kl_penalty(logps, ref_logps).sum(dim=1), (logps - ref_logps).sum(dim=1)])

    def _summary(self, table: Tensor, per_prompt: Tensor) -> dict[str, float]:
        """The numbers for the log, from all ranks' answers."""
        metrics = {"eval/prompts": len(table)}
        names = ("accuracy_greedy", "reward_greedy", "length_greedy", "accuracy", "reward", "length")
        for name, column in zip(names, per_prompt.T, strict=True):
            metrics[f"eval/{name}"], metrics[f"eval/{name}_se"] = mean_and_error(column)
        sampled, parts = by_name(table[:, 1:], self.parts)
        for k in self.pass_k:
            metrics[f"eval/pass@{k}"] = mean_and_error(pass_at_k(sampled["right"].sum(dim=1), self.samples, k))[0]
        for name, values in parts.items():
            metrics[f"eval/rewards/{name}"] = mean_and_error(values.nanmean(dim=1))[0]
        metrics["eval/clipped_ratio"] = sampled["clipped"].mean().item()
        if self.reference is not None:
            metrics["eval/kl"] = (sampled["k3"].sum() / sampled["length"].sum()).item()
            metrics["eval/kl_sequence"] = sampled["log_ratio"].mean().item()
        return metrics


def by_name(table: Tensor, parts: tuple[str, ...]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(MEASURES, parts of the reward) by name, each [P, S], of a table [P, S, columns] of answers."""
    columns = table.unbind(dim=2)
    measures = dict(zip(MEASURES, columns[: len(MEASURES)], strict=True))
    return measures, dict(zip(parts, columns[len(MEASURES) :], strict=True))


def _is_right(response: str, row: dict) -> float:
    if not row["answer"]:
        return math.nan
    return float(answer_matches(response, row["answer"], thinking_open=row["prompt"].rstrip().endswith("<think>")))


def keep_best(run_log, metrics: dict, step: int, model: nn.Module, path: Path) -> bool:
    """Write `model` to `path` if its evaluation, the last line of the log, is better than all before it; says so.

    Better by eval/accuracy, or by eval/reward where the rows have no answers. The log remembers a run's best across
    resumes, and forgets what a killed run did after its last save. Main process only.
    Raises: RuntimeError if the file cannot be written; what was kept before is then untouched.
    """
    name = "eval/reward" if math.isnan(metrics["eval/accuracy"]) else "eval/accuracy"
    value, earlier = metrics[name], run_log.series(name)[:-1]
    if not value > max(earlier, default=-math.inf):
        return False
    save_weights(model, path)
    was = f", was {max(earlier):.4f}" if earlier else ""
    Logger(f"best so far at step {step}: {name} {value:.4f}{was}; kept in {path}")
    return True


def load_for_inference(path, tokenizer, device: str, trust_remote_code: bool = False) -> nn.Module:
    """The model in a .pth, its sizes read off the weights, or in a folder of transformers (what --hf_model trains);
    float32, in evaluation mode, no grad.

    Raises: FileNotFoundError, or ValueError naming what does not fit: a folder without a model, a resume file, another
    kind of file, missing weights, a tokenizer that is larger than the model.
    """
    path = Path(path)
    if path.is_dir():
        return open_hf_folder(str(path), tokenizer, device, trust_remote_code)
    if not path.is_file():
        raise FileNotFoundError(f"weights {path} not found; the trainers write theirs to --save_dir (out/grpo_128.pth)")
    state = read_torch_file(path)
    if isinstance(state, dict) and isinstance(state.get("model"), dict):
        raise ValueError(f"{path} is a resume file; expected the weights, which the trainers write to --save_dir")
    if not isinstance(state, dict) or not all(isinstance(tensor, Tensor) for tensor in state.values()):
        raise ValueError(f"{path} holds no weights; expected a MiniMind state dict")
    config = config_from_state(state, path)
    state = checked_state(state, expected_shapes(config), "float32", path)
    fit_vocabulary(config, tokenizer, state)
    model = MiniMindForCausalLM(config)
    model.load_state_dict(state, strict=True)
    return model.to(device).eval().requires_grad_(False)


# ---------------------------------------------------------------------------------------------- statistics
def pass_at_k(right: Tensor, samples: int, k: int) -> Tensor:
    """Chance float64 [P] that one of k answers is right, from `right` [P] right ones of `samples`: unbiased.

    1 - C(n - c, k) / C(n, k), the share of the k-subsets with a right answer (Chen et al. 2021, arXiv 2107.03374,
    section 2.1). NaN stays NaN. Raises: ValueError if k is not in 1 .. samples.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} of {samples} answers: k must be from 1 to their number")
    wrong = [math.nan if math.isnan(count) else samples - round(count) for count in right.tolist()]
    every = math.comb(samples, k)
    chances = [count if math.isnan(count) else 1 - math.comb(count, k) / every for count in wrong]
    return torch.tensor(chances, dtype=torch.float64)


def bootstrap_interval(values: Tensor, *, resamples: int = 2000, seed: int = 0) -> tuple[float, float]:
    """95% percentile interval of the mean of `values` [P], drawing prompts with replacement; nan for fewer than two.

    Source: Efron and Tibshirani 1993, chapter 13. Entries that are not finite are left out.
    """
    finite = values[torch.isfinite(values)].numpy()
    if len(finite) < 2:
        return math.nan, math.nan
    draw = np.random.default_rng(seed)
    means = [finite[draw.integers(len(finite), size=len(finite))].mean() for _ in range(resamples)]
    low, high = np.quantile(means, [0.025, 0.975]).tolist()
    return low, high


def win_rate(ours: Tensor, theirs: Tensor) -> dict:
    """How often rewards [P, S] are above others [P, S] of the same prompts and seeds, ties counted as half a win.

    Returns: wins, ties (equal to 1e-6), losses, win_rate (mean over prompts) and its 95% "interval" by
    `bootstrap_interval`. Pairs with a reward that is not finite are left out.
    """
    gap = (ours - theirs).double()
    finite = torch.isfinite(gap)
    won, lost = (gap > 1e-6) & finite, (gap < -1e-6) & finite
    score = (0.5 + 0.5 * won.double() - 0.5 * lost.double()).masked_fill(~finite, math.nan).nanmean(dim=1)
    counts = {"wins": int(won.sum()), "ties": int((finite & ~won & ~lost).sum()), "losses": int(lost.sum())}
    return {**counts, "win_rate": mean_and_error(score)[0], "interval": bootstrap_interval(score)}


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
        lines.append(f"prompt: {one_line(last['prompt'])}{expected}")
        lines += [f"  {when}: {one_line(entry['response'])}" for when, entry in (("before", first), ("after ", last))]
    return lines


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
