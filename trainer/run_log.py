"""What a run tells the outside: its folder with config.json and metrics.jsonl, the console, progress bars, trackers."""

import json
import math
import platform
import subprocess
import sys
import textwrap
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from trainer.arguments import REPO_ROOT
from trainer.checkpoints import finite_or_none
from trainer.distributed import Logger, is_main_process, rank_and_world
from trainer.health import Alarm, HealthMonitor, alarm_entries
from trainer.run_files import read_metrics_lines, require_writable, write_whole


# ---------------------------------------------------------------------------------------------- trackers
class Tracker:
    """Sends a run's numbers on to every target it holds; with none it is the tracker that is off."""

    def __init__(self, *targets):
        self.targets = targets

    @property
    def id(self) -> str | None:
        """The id by which the first target that has one knows this run; kept in the resume file."""
        return next((target.id for target in self.targets if getattr(target, "id", None)), None)

    def log(self, metrics: dict, step: int) -> None:
        """Finite numbers only: texts and None mean nothing to a chart."""
        numbers = {name: value for name, value in metrics.items()
                   if isinstance(value, (int, float)) and math.isfinite(value)}  # fmt: skip
        for target in self.targets:
            target.log(numbers, step=step)

    def finish(self) -> None:
        for target in self.targets:
            target.finish()


class TensorBoard:
    """torch's writer of TensorBoard files, called as the other trackers are."""

    def __init__(self, folder: Path, resumed_step: int | None):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise RuntimeError("--use_tensorboard needs the tensorboard package: pip install tensorboard, or leave the "
                               "flag out") from error
        # A resumed run draws over the steps that the killed one did after its last save.
        purge = None if resumed_step is None else resumed_step + 1
        self.writer = SummaryWriter(log_dir=str(folder), purge_step=purge)

    def log(self, metrics: dict, step: int) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)

    def finish(self) -> None:
        self.writer.close()


def start_tracker(args, folder: Path, resumed: dict | None = None) -> Tracker:
    """What --use_wandb (swanlab or wandb, whichever is installed) and --use_tensorboard ask for; on rank 0 only.

    A resumed run goes on under the id it had. Raises: RuntimeError if a package is missing.
    """
    targets = []
    if not is_main_process():
        return Tracker()
    if args.use_wandb:
        known = {"id": resumed["wandb_id"], "resume": "allow"} if (resumed or {}).get("wandb_id") else {}
        targets.append(_installed("swanlab", "wandb").init(
            project=args.wandb_project, name=folder.name, config=vars(args), **known
        ))  # fmt: skip
    if getattr(args, "use_tensorboard", False):
        targets.append(TensorBoard(folder / "tensorboard", resumed and resumed["progress"]["step"]))
    return Tracker(*targets)


def _installed(*names: str):
    """The first of these modules that can be imported."""
    for name in names:
        try:
            return __import__(name)
        except ImportError:
            continue
    raise RuntimeError(f"--use_wandb needs {' or '.join(names)}: pip install {names[0]} (or {names[1]}), or leave the "
                       "flag out")


# ---------------------------------------------------------------------------------------------- progress bars
class RolloutBar:
    """A progress bar for one rollout, under the run's own, that appears only once the rollout took `after` seconds.

    Use it as a context, and call `advance` for every decoded token, or for every answer that a server has finished:
    `with log.rollout_bar(max_gen_len) as bar: model.decode(..., on_token=bar.advance)`.
    """

    def __init__(self, total: int, unit: str, *, visible: bool, after: float = 5.0, clock=time.monotonic):
        self.total, self.unit, self.visible, self.after, self.clock = total, unit, visible, after, clock
        self.done, self.bar, self.began = 0, None, clock()

    def advance(self, _ids=None) -> None:
        """One more token or answer is done; what a decoder's callback is given is not looked at."""
        self.done += 1
        if self.bar is not None:
            self.bar.update()
        elif self.visible and self.clock() - self.began >= self.after:
            from tqdm import tqdm

            self.bar = tqdm(total=self.total, initial=self.done, unit=self.unit, desc="rollout", leave=False,
                            dynamic_ncols=True)

    def __enter__(self) -> "RolloutBar":
        return self

    def __exit__(self, *error) -> None:
        if self.bar is not None:
            self.bar.close()


# ---------------------------------------------------------------------------------------------- the run's folder
class RunLog:
    """The run's folder: config.json and metrics.jsonl, and the same numbers on the console and the trackers.

    Only the main process writes. A resumed run goes on in its own folder, behind the lines up to the resumed step.
    `severe` is the last severe health alarm, None while there was none; known on the main process only.
    """

    def __init__(self, args, defaults: dict, resumed: dict | None, device: str, total: int):
        self.total, self.severe, self._bar = total, None, None
        self.quiet = getattr(args, "quiet", False)
        step = (resumed or {}).get("progress", {}).get("step")
        stamp = time.strftime("%Y%m%d-%H%M%S")
        fresh = Path(args.save_dir) / "runs" / f"{args.save_weight}-{stamp}"
        self.folder = Path(args.run_dir or (resumed or {}).get("run_dir") or fresh).resolve()
        self.path = self.folder / "metrics.jsonl"
        self.health = HealthMonitor.for_run(args)
        self.tracker = Tracker()
        if not is_main_process():
            return
        if resumed is None and not args.from_resume and read_metrics_lines(self.path):
            raise ValueError(f"--run_dir {self.folder} already holds the metrics of a run; choose another folder, or "
                             "go on with that run with --from_resume 1")
        config = run_config(args, defaults, device, step)
        try:
            for folder in (self.folder, Path(args.save_dir), Path(args.checkpoint_dir)):
                require_writable(folder)
            self._keep_lines(-1 if step is None else step)
            write_whole(self.folder / "config.json", json.dumps(config, indent=1, default=str) + "\n")
        except OSError as error:
            raise RuntimeError(f"cannot write this run's files: {error}; choose another folder with --run_dir, "
                               "--save_dir or --checkpoint_dir") from error
        self.tracker = start_tracker(args, self.folder, resumed)
        for line in config_lines(config, self.folder, self.quiet):
            Logger(line)

        from tqdm import tqdm

        self._bar = tqdm(total=total, initial=step or 0, unit="step", dynamic_ncols=True,
                         disable=self.quiet or not sys.stderr.isatty())

    def advance(self, **shown: float) -> None:
        """Move the progress bar on by one step and show these numbers behind it; there is none outside a terminal."""
        if self._bar is not None:
            self._bar.set_postfix({name: f"{value:.4g}" for name, value in shown.items()}, refresh=False)
            self._bar.update()
            if self._bar.n >= self.total:  # what follows is printed below it
                self._bar.close()

    def rollout_bar(self, total: int, unit: str = "token") -> RolloutBar:
        """A bar for one rollout of at most `total` tokens (or answers); never seen where the run's own bar is not."""
        return RolloutBar(total, unit, visible=self._bar is not None and not self._bar.disable)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        self.tracker.finish()

    def _keep_lines(self, last_step: int) -> None:
        """Drop the lines after `last_step`, those of steps that a killed run did but had not saved."""
        kept = [line for line, step in read_metrics_lines(self.path) if step <= last_step]
        write_whole(self.path, "".join(line + "\n" for line in kept))
        self.health.restore(json.loads(line) for line in kept)

    def write(self, metrics: dict, line: str | None = None) -> None:
        """Append one line to metrics.jsonl and send the same numbers to the trackers; print `line` if there is one.

        A training step, which has a reward, is looked at by the health monitor; its alarms join the same line and are
        printed under it. --quiet leaves out the printed lines of training steps, nothing else.
        """
        if not is_main_process():
            return
        plain = {name: finite_or_none(value) if isinstance(value, float) else value for name, value in metrics.items()}
        alarms = self.health.observe(plain)
        plain |= alarm_entries(alarms)
        try:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(plain) + "\n")
        except OSError as error:
            raise RuntimeError(f"cannot append to {self.path}: {error}") from error
        self.tracker.log(plain, step=metrics["step"])
        if line and not (self.quiet and "reward" in metrics):
            Logger(line)
        for alarm in alarms:
            Logger(alarm.line())
            if alarm.severity == "severe":
                self.severe = alarm

    def series(self, name: str) -> list[float]:
        """Every value of one metric so far, in order."""
        rows = [json.loads(line) for line, _ in read_metrics_lines(self.path)]
        return [row[name] for row in rows if row.get(name) is not None]


class DryLog:
    """The log of a dry run: console only."""

    total, tracker, folder, severe = 1, Tracker(), None, None

    def write(self, metrics: dict, line: str | None = None) -> None:
        seconds = [f"{name[9:]} {value:.2f} s" for name, value in metrics.items() if name.startswith("timing_s/")]
        Logger(f"dry run: {line}")
        Logger(f"dry run: {', '.join(seconds)}")

    def advance(self, **shown: float) -> None:
        pass

    def rollout_bar(self, total: int, unit: str = "token") -> RolloutBar:
        return RolloutBar(total, unit, visible=False)

    def close(self) -> None:
        pass


class HealthStop(RuntimeError):
    """--health_stop 1 and a severe alarm: the run is over, after a save."""

    def __init__(self, alarm: Alarm | None):
        what = f"{alarm.name} at step {alarm.step}: {alarm.message}" if alarm else "rank 0 raised a severe health alarm"
        super().__init__(f"stopped by --health_stop 1 on {what} (saved; --from_resume 1 goes on from there)")


# ---------------------------------------------------------------------------------------------- config.json
def run_config(args, defaults: dict, device: str, resumed_step: int | None) -> dict:
    """Everything that says what this run is: flags, versions, commit, device."""
    changed = sorted(name for name, value in vars(args).items() if name in defaults and defaults[name] != value)
    commit = git_output("rev-parse", "HEAD")
    status = git_output("status", "--porcelain", "--untracked-files=no")
    return {
        "command": sys.argv,
        "args": vars(args),
        "changed": changed,
        "resumed_after_step": resumed_step,
        "device": device,
        "device_name": device_name(device),
        "world_size": rank_and_world()[1],
        "threads": torch.get_num_threads(),
        "versions": {"python": platform.python_version(), **{
            name: installed_version(name) for name in ("torch", "transformers", "numpy")
        }},
        "git": {"commit": commit, "dirty": None if status is None else bool(status)},
    }  # fmt: skip


def config_lines(config: dict, folder: Path, quiet: bool) -> list[str]:
    """What of `run_config` is shown at the start; with `quiet` only the flags that differ from the default."""
    versions = ", ".join(f"{name} {value}" for name, value in config["versions"].items())
    commit, dirty = config["git"]["commit"], config["git"]["dirty"]
    code = "not in a git repository" if commit is None else commit[:10] + (" with changed files" if dirty else "")
    short = {name: str(value).replace(f"{REPO_ROOT}/", "") for name, value in config["args"].items()}
    marked = [f"*{name}={short[name]}" for name in short if name in config["changed"]]
    others = [f"{name}={short[name]}" for name in short if name not in config["changed"]]
    lines = [
        f"run folder {folder}",
        f"device {config['device']} ({config['device_name']}), processes {config['world_size']}, CPU threads each "
        f"{config['threads']}; {versions}; code {code}",
        "flags; those marked * differ from the default:",
    ]
    for words in [marked or ["(none differs)"], [] if quiet else others]:
        lines += textwrap.wrap("  ".join(words), width=116, initial_indent="  ", subsequent_indent="  ",
                               break_long_words=False, break_on_hyphens=False)  # fmt: skip
    return lines


def device_name(device: str) -> str:
    """What the device calls itself."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # not Linux
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def installed_version(package: str) -> str | None:
    """The installed version of a package, without importing it; None if there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def git_output(*words: str) -> str | None:
    """What `git words…` prints about this code; None where git or its folder is missing."""
    try:
        command = ["git", "-C", str(REPO_ROOT), *words]
        run = subprocess.run(command, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.SubprocessError):
        return None
    return run.stdout.strip() if run.returncode == 0 else None
