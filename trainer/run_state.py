"""What a run knows about itself: how far it is, what is left, how it was started, and its folder on disk."""

import hashlib
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import nn

from model.model_minimind import MiniMindConfig
from trainer.arguments import REPO_ROOT
from trainer.checkpoints import finite_or_none, weights_path
from trainer.distributed import Logger, check_same_weights, is_main_process, rank_and_world
from trainer.evaluation import Evaluator, report
from trainer.rollout_engine import RolloutEngine, create_rollout_engine
from trainer.self_check import peak_memory, self_check
from trainer.trainer_utils import Interrupted, Interrupts, SkipGuard, autocast_context

@dataclass
class Progress:
    """Counters at the last moment when all gradients had been applied; what a resume file holds and resume starts from.

    epoch: finished epochs; consumed: prompts used of the current one (on all ranks); step: rollout steps done since the
    run began; optimizer_steps: optimizer steps taken; planned_steps: those planned for the rollout steps done, of which
    early stops and skipped steps take fewer. The learning rate's schedule ends after all that are planned, so that a
    resumed run, which plans the rest, ends where it would have.
    """

    epoch: int = 0
    consumed: int = 0
    step: int = 0
    optimizer_steps: int = 0
    planned_steps: int = 0

    def next_step(self, rows: int) -> "Progress":
        """After one more rollout step that used `rows` prompts."""
        return replace(self, consumed=self.consumed + rows, step=self.step + 1)

    def next_epoch(self) -> "Progress":
        return replace(self, epoch=self.epoch + 1, consumed=0)


def planned_rows(progress: Progress, size: int, args) -> list[list[int]]:
    """For each epoch that is left, how many of the `size` prompts each of its steps will use on all ranks together.

    The first entry is the rest of the current epoch. --max_steps (0 = no limit) counts all steps of the run.
    """
    global_batch = args.batch_size * rank_and_world()[1]
    left = args.max_steps - progress.step if args.max_steps > 0 else math.inf
    plan, consumed = [], progress.consumed
    for _ in range(progress.epoch, args.epochs):
        rows = [min(global_batch, size - start) for start in range(consumed, size, global_batch)]
        rows = rows[: int(max(0, min(left, len(rows))))]
        left -= len(rows)
        plan.append(rows)
        consumed = 0
    return plan


def windows(micro_steps: int, accumulation_steps: int) -> list[int]:
    """Sizes of the accumulation windows that `micro_steps` gradients fall into; the last may be smaller."""
    full, rest = divmod(micro_steps, accumulation_steps)
    return [accumulation_steps] * full + ([rest] if rest else [])


def resume_entries(run: "RunState", args) -> dict:
    """The plain values a resume file holds beside tensors."""
    return {"progress": asdict(run.progress), "args": {k: v for k, v in vars(args).items() if _is_plain(v)},
            "run_dir": str(run.log.folder), "data_digest": file_digest(args.data_path), "before": run.before}


def file_digest(path: str) -> str:
    """SHA-256 of a file's bytes."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def _is_plain(value) -> bool:
    return value is None or isinstance(value, (str, int, float, bool, list))


def resumed_progress(resumed: dict | None, args) -> Progress:
    """The counters in a resume file, or those of a fresh start. Raises ValueError if the data is not what it was."""
    if resumed is None:
        return Progress()
    if resumed["data_digest"] != file_digest(args.data_path):
        raise ValueError(f"--data_path {args.data_path} has other content than the run being resumed had, so which "
                         "prompts are left cannot be told; restore it, or start afresh with --from_resume 0")
    return Progress(**resumed["progress"])


class Tracker:
    """A tracker that is off."""

    id = None

    def log(self, metrics: dict, step: int) -> None:
        pass

    def finish(self) -> None:
        pass


def start_tracker(args, run_name: str) -> Tracker:
    """swanlab or wandb, whichever is installed, with --use_wandb 1; else one that does nothing.

    Raises: RuntimeError if neither is installed.
    """
    if not args.use_wandb or not is_main_process():
        return Tracker()
    for module in ("swanlab", "wandb"):
        try:
            library = __import__(module)
        except ImportError:
            continue
        return library.init(project=args.wandb_project, name=run_name, config=vars(args))
    raise RuntimeError("--use_wandb needs swanlab or wandb: pip install swanlab (or wandb), or leave the flag out")


def require_writable(folder: Path) -> None:
    """Make the folder and prove that files can be made in it. Raises OSError if not, before any step is spent."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


class RunLog:
    """The run's folder: config.json and metrics.jsonl, and the same numbers on the console and the tracker.

    Only the main process writes. A resumed run goes on in its own folder, behind the lines up to the resumed step.
    """

    def __init__(self, args, defaults: dict, resumed: dict | None, device: str, total: int):
        self.total, self._bar = total, None
        stamp = time.strftime("%Y%m%d-%H%M%S")
        fresh = Path(args.save_dir) / "runs" / f"{args.save_weight}-{stamp}"
        self.folder = Path(args.run_dir or (resumed or {}).get("run_dir") or fresh).resolve()
        self.path = self.folder / "metrics.jsonl"
        self.tracker = start_tracker(args, self.folder.name)
        if not is_main_process():
            return
        if resumed is None and not args.from_resume and read_metrics_lines(self.path):
            raise ValueError(f"--run_dir {self.folder} already holds the metrics of a run; choose another folder, or "
                             "go on with that run with --from_resume 1")
        try:
            for folder in (self.folder, Path(args.save_dir), Path(args.checkpoint_dir)):
                require_writable(folder)
            self._keep_lines((resumed or {}).get("progress", {}).get("step", -1))
            self._write_config(args, defaults, device)
        except OSError as error:
            raise RuntimeError(f"cannot write this run's files: {error}; choose another folder with --run_dir, "
                               "--save_dir or --checkpoint_dir") from error

        from tqdm import tqdm

        self._bar = tqdm(total=total, initial=(resumed or {}).get("progress", {}).get("step", 0), unit="step",
                         disable=not sys.stderr.isatty(), dynamic_ncols=True)

    def advance(self, **shown: float) -> None:
        """Move the progress bar on by one step and show these numbers behind it; there is none outside a terminal."""
        if self._bar is not None:
            self._bar.set_postfix({name: f"{value:.3f}" for name, value in shown.items()}, refresh=False)
            self._bar.update()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        self.tracker.finish()

    def _keep_lines(self, last_step: int) -> None:
        """Drop the lines after `last_step`, those of steps that a killed run did but had not saved."""
        kept = [line for line, step in read_metrics_lines(self.path) if step <= last_step]
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        os.replace(temporary, self.path)

    def _write_config(self, args, defaults: dict, device: str) -> None:
        changed = {name: value for name, value in vars(args).items() if name in defaults and defaults[name] != value}
        versions = {"python": platform.python_version(), "torch": torch.__version__, "commit": git_commit()}
        content = {"args": vars(args), "changed": sorted(changed), "device": device, "versions": versions,
                   "command": sys.argv}
        (self.folder / "config.json").write_text(json.dumps(content, indent=1, default=str) + "\n", encoding="utf-8")
        shown = ", ".join(f"{name}={value}" for name, value in changed.items() if name != "starter") or "none"
        where = f"{device}, {torch.get_num_threads()} threads" if device == "cpu" else device
        Logger(f"run folder {self.folder}; device {where}; flags that differ from the defaults: {shown}")

    def write(self, metrics: dict, line: str | None = None) -> None:
        """Append one line to metrics.jsonl and send the same numbers to the tracker; print `line` if there is one."""
        if not is_main_process():
            return
        plain = {name: finite_or_none(value) if isinstance(value, float) else value for name, value in metrics.items()}
        try:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(plain) + "\n")
        except OSError as error:
            raise RuntimeError(f"cannot append to {self.path}: {error}") from error
        self.tracker.log(plain, step=metrics["step"])
        if line:
            Logger(line)

    def series(self, name: str) -> list[float]:
        """Every value of one metric so far, in order."""
        rows = [json.loads(line) for line, _ in read_metrics_lines(self.path)]
        return [row[name] for row in rows if row.get(name) is not None]


class DryLog:
    """The log of a dry run: console only."""

    total, tracker, folder = 1, Tracker(), None

    def write(self, metrics: dict, line: str | None = None) -> None:
        seconds = [f"{name[9:]} {value:.2f} s" for name, value in metrics.items() if name.startswith("timing_s/")]
        Logger(f"dry run: {line}")
        Logger(f"dry run: {', '.join(seconds)}")

    def advance(self, **shown: float) -> None:
        pass

    def close(self) -> None:
        pass


def read_metrics_lines(path: Path) -> list[tuple[str, int]]:
    """(line, its step) for every whole line of a metrics file; [] if there is none. A half-written line is left out."""
    if not path.is_file():
        return []
    pairs = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            pairs.append((line, int(json.loads(line)["step"])))
        except (ValueError, KeyError, TypeError):
            continue
    return pairs


def git_commit() -> str | None:
    """The commit this code is at, for config.json; None where git or its folder is missing."""
    try:
        command = ["git", "-C", str(REPO_ROOT), "rev-parse", "HEAD"]
        run = subprocess.run(command, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.SubprocessError):
        return None
    return run.stdout.strip() if run.returncode == 0 else None


@dataclass(kw_only=True)
class RunState:
    """What every run works with, whatever the algorithm, and how far it is."""

    config: MiniMindConfig
    device: str
    tokenizer: object
    dataset: object
    reference: nn.Module | None  # frozen; None when its weight in the loss is 0
    reward_model: object | None
    engine: RolloutEngine
    evaluator: Evaluator
    scaler: torch.amp.GradScaler
    skips: SkipGuard
    progress: Progress
    plan: list[list[int]]  # prompts of each step that is left, epoch by epoch
    models: dict[str, nn.Module]  # what is trained, by name, the policy first
    log: RunLog | None  # None, as `interrupts`, where nothing is left to do
    interrupts: Interrupts | None
    before: dict | None  # held-out evaluation before the first step


def open_engine(args, policy: nn.Module, tokenizer, device: str) -> RolloutEngine:
    """The engine that the flags describe, ready to sample from `policy`; all ranks take part."""
    return create_rollout_engine(
        args.rollout_engine, policy, tokenizer, device, autocast_context(device, args.dtype),
        sglang_base_url=args.sglang_base_url, sglang_model_path=args.sglang_model_path,
        sglang_shared_path=args.sglang_shared_path, dtype="bfloat16" if args.dtype == "bfloat16" else "float32",
        concurrency=args.sglang_concurrency, wait=args.sglang_wait, sync_interval=args.sync_interval,
    )  # fmt: skip


def run_parts(roles, engine, args, device: str, defaults: dict, progress: Progress, plan: list[list[int]]) -> dict:
    """The fields of RunState that follow from what was loaded; opens the run's folder and takes over Ctrl-C."""
    log = interrupts = None
    if any(plan):
        total = progress.step + sum(map(len, plan))
        log = DryLog() if args.dry_run else RunLog(args, defaults, roles.resumed, device, total)
        interrupts = Interrupts()
    return {"config": roles.config, "device": device, "tokenizer": roles.tokenizer, "dataset": roles.dataset,
            "reference": roles.reference, "reward_model": roles.reward_model, "log": log, "interrupts": interrupts,
            "evaluator": Evaluator(engine, roles.tokenizer, roles.heldout, roles.reward_model, args, device),
            "skips": SkipGuard(args.max_skipped_steps), "before": roles.resumed and roles.resumed["before"],
            "engine": engine, "progress": progress, "plan": plan}


def passes(every: int, before: int, after: int) -> bool:
    """Whether a multiple of `every` lies in (before, after]; never for 0."""
    return every > 0 and before // every < after // every


def finish_step(run: RunState, args, done: Progress, save) -> None:
    """Count a step as done, and evaluate, compare ranks and save where that is due. No gradient may be pending."""
    before, run.progress = run.progress.step, done
    if passes(args.eval_interval, before, done.step):
        run.evaluator.measure(run.log, done.step)
    if passes(args.check_sync, before, done.step):
        check_same_weights(run.models, f"after step {done.step}")
    if passes(args.save_interval, before, done.step):
        save(run, args)


def end_epoch(run: RunState) -> None:
    """Go on to the next epoch if this one's prompts are used up; --max_steps may have ended it early."""
    if run.progress.consumed >= len(run.dataset):
        run.progress = run.progress.next_epoch()


def train_until_done(run: RunState, args, train_epoch, save, *, curves: list[str]) -> int:
    """Self-check, evaluate, every epoch that is left, save, evaluate, report; gives the process's exit status.

    A signal is answered with a checkpoint. `train_epoch(run, args, rows_per_step)` and `save(run, args)` are the
    script's own; `curves` are the metrics drawn at the end.
    """
    if not any(run.plan):
        Logger(f"nothing to do: {run.progress.step} steps and {run.progress.epoch} epochs are done; raise --epochs or "
               "--max_steps to go on")
        return 0
    try:
        if args.self_check or args.dry_run:
            self_check(run, args)
        if args.dry_run:
            return dry_run(run, args, train_epoch)
        if run.progress.step == 0 and run.before is None:
            run.before = run.evaluator.measure(run.log, step=0)
        for rows_per_step in run.plan:
            train_epoch(run, args, rows_per_step)
        with run.interrupts.deferred():
            save(run, args)
        after = run.evaluator.measure(run.log, run.progress.step)
        limit = f" --max_steps {2 * run.progress.step}" if args.max_steps else ""
        report(run.log, run.before, after, weights_path(args.save_dir, args.save_weight, run.config), curves,
               f"to train on: the same command with --epochs {2 * args.epochs}{limit} --from_resume 1")
    except Interrupted:
        if args.dry_run:
            return run.interrupts.exit_status
        save(run, args)
        Logger(f"stopped by a signal after step {run.progress.step}; saved, --from_resume 1 goes on from there")
        return run.interrupts.exit_status
    finally:
        run.log.close()
    return 0


def dry_run(run: RunState, args, train_epoch) -> int:
    """One rollout, reward and update with answers of at most 16 tokens; shows time and memory, writes nothing."""
    vars(args).update(max_gen_len=min(args.max_gen_len, 16), log_interval=1, eval_interval=0, save_interval=2**62)
    rows = next(rows_per_step[0] for rows_per_step in run.plan if rows_per_step)
    train_epoch(run, args, [rows])
    Logger(f"dry run: peak memory {peak_memory(run.device)}; nothing was written")
    return 0
