"""Kill runs at random moments, resume them until they are done, and compare with runs that nobody killed.

    python -m tests.soak_resume [--kills 40] [--seed 0] [--folder DIR]

A script, not a test: it takes minutes. Every run is a process of its own (forked, so that importing torch is paid for
once) and dies of SIGKILL: half of them at a random moment, half while a checkpoint is being written, which is seen by
its temporary files. Exits with 1 if a resumed run ends in other weights, moments, counters or metrics lines, or if a
file that a kill left behind cannot be read.
"""

import argparse
import contextlib
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch

from tests import small_runs as small
from trainer import checkpoints, train_grpo, train_ppo
from trainer.arguments import REPO_ROOT
from trainer.loading import load_tokenizer

NAMES = {train_grpo: "grpo", train_ppo: "ppo_actor"}
GRPO = {"num_generations": 3, "batch_size": 2, "epochs": 2}
PPO = {"mini_batch_size": 1, "batch_size": 2, "epochs": 2, "critic_learning_rate": 1e-4}
CONFIGS = {
    "grpo": (train_grpo, {**GRPO, "save_interval": 1}),
    "grpo, accumulation 3, 2 workers": (train_grpo, {**GRPO, "accumulation_steps": 3, "save_interval": 2,
                                                     "num_workers": 2}),
    "ppo, early stop": (train_ppo, {**PPO, "early_stop_kl": 0.01, "save_interval": 1}),
    "ppo, accumulation 3": (train_ppo, {**PPO, "accumulation_steps": 3, "save_interval": 3}),
}  # fmt: skip
PROMPTS = 10
FORK = multiprocessing.get_context("fork")


def child(script, flags: list[str]) -> None:
    """One run, its output thrown away; the process ends with the run's status."""
    os.setsid()
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        status, _ = small.run_script(script, flags)
    os._exit(status)


def begin(script, flags):
    process = FORK.Process(target=child, args=(script, flags))
    process.start()
    return process


def kill(process) -> None:
    """SIGKILL for the run and the workers in its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join()


def writing(folder: Path) -> bool:
    """Whether a checkpoint is being written: its files have other names until they are whole."""
    names = [name for part in ("checkpoints", "out") if (folder / part).is_dir() for name in os.listdir(folder / part)]
    return any(name.endswith((".tmp", "_new.pth")) for name in names)


def wait_for_moment(process, folder: Path, draw: random.Random, seconds: float) -> str:
    """Wait for a moment to kill: gives its kind, or "over" if the run ended before."""
    if draw.random() < 0.5:
        process.join(draw.uniform(0, seconds))
        return "over" if process.exitcode is not None else "any moment"
    writes, was_writing = draw.randint(1, 6), False
    while process.exitcode is None:
        now = writing(folder)
        writes -= now and not was_writing
        was_writing = now
        if writes == 0 and now:
            time.sleep(draw.uniform(0, 0.02))
            return "while writing"
        time.sleep(0.0002)
    return "over"


def files_are_whole(script, folder: Path) -> list[str]:
    """What is wrong with the files that a killed run left; reading them as a resumed run does."""
    problems = []
    try:
        small.resume_content(folder / "checkpoints", NAMES[script])
    except RuntimeError as error:
        problems.append(str(error))
    weights = folder / "out" / f"{NAMES[script]}_64.pth"
    if weights.exists():
        try:
            checkpoints.read_torch_file(weights)
        except ValueError as error:
            problems.append(str(error))
    return problems


def differences(script, straight: Path, resumed: Path) -> list[str]:
    """Names of what a resumed run ended with that is not bitwise what the run nobody killed ended with."""
    one, other = (small.resume_content(folder / "checkpoints", NAMES[script]) for folder in (straight, resumed))
    for content in (one, other):
        # Killed between the last step's save and the end, all of the last epoch is used, and nothing is left to do.
        if content["progress"]["consumed"] == PROMPTS:
            content["progress"].update(epoch=content["progress"]["epoch"] + 1, consumed=0)
        content["epoch"] = content["progress"]["epoch"]
    names = [name for name in one if name not in ("args", "run_dir")
             and checkpoints.state_digest(one[name]) != checkpoints.state_digest(other[name])]
    files = [checkpoints.read_torch_file(folder / "out" / f"{NAMES[script]}_64.pth") for folder in (straight, resumed)]
    if not small.same_state(*files):
        names.append("weights file")
    if small.metrics_lines(straight / "run") != small.metrics_lines(resumed / "run"):
        names.append("metrics lines")
    # Killed in the last save of all, a run leaves what only a later save would have cleared away.
    last_save = max(path.stat().st_mtime for path in (resumed / "checkpoints").glob("*_resume*.pth"))
    names += [f"{path.name} left over" for path in resumed.rglob("*")
              if path.name.endswith((".tmp", "_new.pth")) and path.stat().st_mtime < last_save]
    return names


def flags_of(folder: Path, inputs: Path, changes: dict) -> list[str]:
    return small.argv(weight_dir=inputs, data_path=inputs / "prompts.jsonl", save_dir=folder / "out",
                      checkpoint_dir=folder / "checkpoints", run_dir=folder / "run", from_resume=1, **changes)


def one_round(name: str, folder: Path, inputs: Path, straight: Path, seconds: float, draw, kills: dict) -> list[str]:
    """Kill and resume one run until it is done; counts kills by kind in `kills` and gives what went wrong."""
    script, changes = CONFIGS[name]
    problems = []
    while True:
        process = begin(script, flags_of(folder, inputs, changes))
        moment = wait_for_moment(process, folder, draw, seconds)
        if moment == "over":
            process.join()
            if process.exitcode != 0:
                return [*problems, f"the resumed run ended with status {process.exitcode}"]
            return problems + differences(script, straight, folder)
        kill(process)
        kills[moment] += 1
        problems += files_are_whole(script, folder)


def main() -> int:
    parser = argparse.ArgumentParser(description="kill-and-resume sweep over both scripts")
    parser.add_argument("--kills", type=int, default=40, help="kills at least")
    parser.add_argument("--seed", type=int, default=0, help="fixes which moments are tried, up to timing")
    parser.add_argument("--folder", type=Path, default=None, help="where runs lie; default: a temporary folder")
    args = parser.parse_args()
    torch.set_num_threads(1)
    draw, base = random.Random(args.seed), args.folder or Path(tempfile.mkdtemp(prefix="soak_"))
    inputs = base / "inputs"
    inputs.mkdir(parents=True)
    small.write_weights(inputs, len(load_tokenizer(str(REPO_ROOT / "model"))))
    small.write_prompts(inputs / "prompts.jsonl", PROMPTS)
    seconds, totals = {}, {name: {"runs": 0, "any moment": 0, "while writing": 0} for name in CONFIGS}
    for name, (script, changes) in CONFIGS.items():
        began = time.monotonic()
        process = begin(script, flags_of(base / f"straight {name}", inputs, changes))
        process.join()
        seconds[name] = time.monotonic() - began
        if process.exitcode != 0:
            print(f"{name}: the run that is not killed ended with status {process.exitcode}")
            return 1
    failures, number = 0, 0
    while sum(sum(total.values()) - total["runs"] for total in totals.values()) < args.kills:
        name = list(CONFIGS)[number % len(CONFIGS)]
        number += 1
        problems = one_round(name, base / f"{number} {name}", inputs, base / f"straight {name}", seconds[name], draw,
                             totals[name])
        totals[name]["runs"] += 1
        failures += bool(problems)
        for problem in problems:
            print(f"{name}, run {number}: {problem}", flush=True)
    print(f"{'configuration':<34}{'runs':>6}{'kills':>8}{'of them while writing':>24}")
    for name, total in totals.items():
        print(f"{name:<34}{total['runs']:>6}{total['any moment'] + total['while writing']:>8}"
              f"{total['while writing']:>24}")
    print("all resumed runs ended bitwise as the ones nobody killed" if not failures else f"{failures} runs differ")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
