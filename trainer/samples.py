"""Held-out prompts answered and scored; a few of them greedily as training goes on, for a person to read.

Letters: n rows of the held-out data, S answers to each.
"""

import contextlib
import json
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from trainer.checkpoints import finite_or_none
from trainer.distributed import Logger, is_main_process
from trainer.reward_plugins import reward_settings
from trainer.rewards import calculate_rewards
from trainer.rollout_engine import RolloutResult, sample_answers
from trainer.run_files import read_metrics_lines, write_whole

SAMPLE_PROMPTS = 4
SHOWN_PROMPTS = 2  # of them, on the console
EVAL_STREAM = 2  # first word of the random keys of held-out prompts; training uses 1


@contextlib.contextmanager
def undisturbed_randomness(device: str) -> Iterator[None]:
    """Whatever is drawn inside, also by reward functions, the generators of python, numpy and torch do not notice."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[device] if device.startswith("cuda") else []):
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


class Answerer:
    """Answers held-out rows and scores the answers, as the run's flags say. All ranks must call it equally often."""

    def __init__(self, engine, tokenizer, reward_model, args, device: str):
        self.engine, self.tokenizer, self.reward_model = engine, tokenizer, reward_model
        self.args, self.device, self.rewards = args, device, reward_settings(args)

    def answer(self, rows: list[dict], *, samples: int,
               temperature: float) -> tuple[RolloutResult, Tensor, dict[str, Tensor]]:
        """(rollout, rewards [n·S], their parts by name); answer i belongs to row i // S, and temperature 0 is greedy.

        A row's answers depend on it, --seed and the weights: not on other rows, ranks, or the state of any generator.
        """
        keys = [(EVAL_STREAM, self.args.seed, 0, row["index"]) for row in rows]
        with undisturbed_randomness(self.device):
            rollout = sample_answers(self.engine, self.tokenizer, [row["prompt_ids"] for row in rows], keys, self.args,
                                     self.device, num_generations=samples, temperature=temperature)
            rewards, parts = calculate_rewards(
                [row["prompt"] for row in rows], rollout.completions, self.reward_model,
                messages=[row["messages"] for row in rows], answers=[row["answer"] for row in rows],
                metadata=[row.get("metadata") for row in rows], finished=rollout.finished, return_parts=True,
                **self.rewards,
            )  # fmt: skip
        return rollout, rewards, parts


class SampleWriter:
    """`take(step)` answers the same SAMPLE_PROMPTS rows of `dataset`, spread over it, and appends to samples.jsonl.

    A line is {"step", "prompt", "answer", "response", "reward", "parts", "finished"}; the first SHOWN_PROMPTS also
    go to the console. Lines of steps after `resumed_step`, which a killed run did but had not saved, are dropped at
    the start. All ranks take part, the main process writes.
    """

    def __init__(self, engine, tokenizer, dataset, reward_model, args, device: str, folder, resumed_step: int = -1):
        count = min(SAMPLE_PROMPTS, len(dataset))
        self.rows = [dataset[i * len(dataset) // count] for i in range(count)]
        self.answerer = Answerer(engine, tokenizer, reward_model, args, device)
        self.path = Path(folder) / "samples.jsonl"
        if is_main_process() and self.path.exists():
            kept = [line for line, step in read_metrics_lines(self.path) if step <= resumed_step]
            write_whole(self.path, "".join(line + "\n" for line in kept))

    def take(self, step: int) -> None:
        """Answer, score, write, show. Raises: RuntimeError if the file cannot be written."""
        rollout, rewards, parts = self.answerer.answer(self.rows, samples=1, temperature=0.0)
        if not is_main_process():
            return
        lines = [{"step": step, "prompt": row["messages"][-1]["content"], "answer": row["answer"], "response": text,
                  "reward": finite_or_none(rewards[i].item()),
                  "parts": {name: finite_or_none(values[i].item()) for name, values in parts.items()},
                  "finished": bool(rollout.finished[i])}
                 for i, (row, text) in enumerate(zip(self.rows, rollout.completions, strict=True))]  # fmt: skip
        try:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write("".join(json_line(line) for line in lines))
        except OSError as error:
            raise RuntimeError(f"cannot append to {self.path}: {error}") from error
        for line in lines[:SHOWN_PROMPTS]:
            show(line)


def json_line(content: dict) -> str:
    """The content as one line of JSON that a person can read, whatever line ends it holds."""
    text = json.dumps(content, ensure_ascii=False)
    for line_end in "\x85\u2028\u2029":  # str.splitlines, which reads the file, would cut there
        text = text.replace(line_end, f"\\u{ord(line_end):04x}")
    return text + "\n"


def show(line: dict) -> None:
    """One sample on the console: the prompt, the answer, and what it earned by part (parts of 0 are left out)."""
    expected = f"   (expected {line['answer']})" if line["answer"] else ""
    parts = ", ".join(f"{name} {value:+.2f}" for name, value in line["parts"].items() if value)
    reward = "not finite" if line["reward"] is None else f"{line['reward']:+.2f}"
    cut = "" if line["finished"] else " (cut at the limit)"
    Logger(f"[sample] step {line['step']}: {one_line(line['prompt'])}{expected}")
    Logger(f"[sample]   {one_line(line['response'])}{cut}")
    Logger(f"[sample]   reward {reward}{f': {parts}' if parts else ''}")


def one_line(text: str, limit: int = 200) -> str:
    """The text with its line ends shown as ⏎, cut to `limit` characters."""
    text = text.replace("\n", " ⏎ ")
    return text if len(text) <= limit else text[: limit - 1] + "…"
