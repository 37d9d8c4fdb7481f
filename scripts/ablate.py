"""Which setting is better? Trains the starter with each of several settings ("arms") over several seeds and compares.

    python scripts/ablate.py --grid "loss_type=grpo,cispo kl_estimator=k2,k3" --seeds 3 --max_steps 60
    python scripts/ablate.py --arm "matched:" --arm "as MiniMind: --logp_temperature 1.0" --max_steps 60
    python scripts/ablate.py --arms scripts/ablations.txt --max_steps 20 -- --eval_prompts 128

What follows `--` goes to every run. The same command again goes on where the last one stopped: finished runs are kept,
one that was interrupted continues from its last save. In {out}: results.md (mean ± standard error over seeds, and
differences to the first arm of each group, paired by seed), results.json, a picture a group, and the runs.
"""

import argparse
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import zlib
from dataclasses import dataclass
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.plotting.ablation import as_markdown, evaluated_at_the_end, picture_of, results_of, run_numbers
from scripts.plotting.page import page_text
from trainer.arguments import REPO_ROOT, FlagParser, positive_int, seed_number
from trainer.run_files import read_metrics_lines, require_writable, write_whole

ALGORITHMS = ("grpo", "ppo")
OWN = ("seed", "max_steps", "run_dir", "save_dir", "checkpoint_dir", "save_weight", "from_resume", "dry_run", "starter")


# ---------------------------------------------------------------------------------------------- what is compared
@dataclass(frozen=True)
class Arm:
    """One setting: its name, its algorithm and its flags."""

    name: str
    algo: str
    flags: tuple[str, ...] = ()

    @property
    def folder(self) -> str:
        """A folder's name for these flags: arms of two groups that have the same flags share their runs."""
        words = "_".join((self.algo, *self.flags))
        plain = re.sub(r"[^\w.-]+", "-", words.replace("--", ""))
        return plain if len(plain) < 80 and plain == words.replace("--", "") else (
            f"{plain[:70]}-{zlib.crc32(words.encode()):08x}")


@dataclass(frozen=True)
class Job:
    """One run: an arm with a seed, its folder and all flags that decide its numbers."""

    arm: Arm
    seed: int
    folder: Path
    flags: tuple[str, ...]

    @property
    def title(self) -> str:
        return f"{self.arm.name}, seed {self.seed}"


def read_arm(text: str, algo: str) -> Arm:
    """`name: [grpo|ppo] --flag value …` as an Arm. Raises ValueError if it is not written so."""
    name, colon, rest = text.partition(":")
    try:
        words = shlex.split(rest)
    except ValueError as error:
        raise ValueError(f"arm {text!r}: {error}") from error
    if words and words[0] in ALGORITHMS:
        algo = words.pop(0)
    if not colon or not name.strip() or (words and not words[0].startswith("--")):
        raise ValueError(f"arm {text!r}: expected \"name: --flag value …\", grpo or ppo before the flags if need be")
    refuse_own(words, f"arm {name.strip()!r}")
    return Arm(name.strip(), algo, tuple(words))


def refuse_own(words, where: str) -> None:
    """Raises ValueError for flags that this script gives to the runs itself."""
    for word in words:
        if word.startswith("--") and word[2:].partition("=")[0] in OWN:
            raise ValueError(f"{where}: {word} is given by ablate.py itself; use its own --max_steps, --seeds, --out")


def read_arms_file(path: Path, algo: str) -> list[tuple[str, list[Arm]]]:
    """Groups of an arms file: an arm a line, `[title]` begins a group, `#` a comment. Raises ValueError, OSError."""
    groups: list[tuple[str, list[Arm]]] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        if line.startswith("[") and line.endswith("]"):
            groups.append((line[1:-1].strip(), []))
            continue
        if not groups:
            groups.append(("Arms", []))
        try:
            groups[-1][1].append(read_arm(line, algo))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
    return groups


def grid_arms(text: str, algo: str) -> list[Arm]:
    """Every combination of `flag=value,value …`. Raises ValueError if it is not written so."""
    axes = []
    for word in text.split():
        name, _, values = word.removeprefix("--").partition("=")
        if not name or not all(values.split(",")):
            raise ValueError(f"--grid: expected flag=value,value, got {word!r}")
        axes.append([(f"--{name}", value) for value in values.split(",")])
    arms = [Arm(" ".join(f"{flag[2:]}={value}" for flag, value in pairs), algo, sum(pairs, ()))
            for pairs in itertools.product(*axes)] if axes else []  # fmt: skip
    for arm in arms:
        refuse_own(arm.flags, "--grid")
    return arms


def gather_groups(args) -> list[tuple[str, list[Arm]]]:
    """All groups that the command line names. Raises ValueError if one has fewer than two arms or a name twice."""
    groups = read_arms_file(Path(args.arms), args.algo) if args.arms else []
    for title, arms in (("Grid", grid_arms(args.grid or "", args.algo)),
                        ("Arms", [read_arm(text, args.algo) for text in args.arm or []])):  # fmt: skip
        if arms:
            groups.append((title, arms))
    if not groups:
        raise ValueError("nothing to compare: give --grid, --arm (twice or more) or --arms FILE")
    for title, arms in groups:
        names = [arm.name for arm in arms]
        if len(arms) < 2 or len(set(names)) < len(names):
            raise ValueError(f"group {title!r} holds the arms {names}; expected two or more, with different names")
    return groups


def jobs_of(groups, args, extra: list[str]) -> list[Job]:
    """Every run once, all arms of a seed before the next seed. Raises ValueError if one lies there with other flags."""
    refuse_own(extra, "after --")
    jobs = {}
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        for arm in (arm for _, arms in groups for arm in arms):
            folder = Path(args.out).resolve() / "runs" / arm.folder / f"seed{seed}"
            flags = ("--starter", "--max_steps", str(args.max_steps), "--seed", str(seed), "--threads", "1",
                     "--save_interval", "10", "--sample_interval", "0", *extra, *arm.flags)  # fmt: skip
            jobs.setdefault(folder, Job(arm, seed, folder, flags))
    for job in jobs.values():
        found = read_state(job)
        if found and found["flags"] != list(job.flags):
            raise ValueError(f"{job.folder} was run with {shlex.join(found['flags'])}, not with "
                             f"{shlex.join(job.flags)}; choose another --out, or remove that folder")
    return list(jobs.values())


# ---------------------------------------------------------------------------------------------- running
def rows_of(job: Job) -> list[dict]:
    """The lines of a run's metrics.jsonl; [] if there are none."""
    return [json.loads(line) for line, _ in read_metrics_lines(job.folder / "metrics.jsonl")]


def read_state(job: Job) -> dict | None:
    """What is known of a run that was begun: its "flags", and whether it is "finished"; None if it was not."""
    try:
        return json.loads((job.folder / "ablation.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def write_state(job: Job, finished: bool) -> None:
    content = json.dumps({"flags": list(job.flags), "finished": finished}, ensure_ascii=False)
    write_whole(job.folder / "ablation.json", content + "\n")


def is_finished(job: Job) -> bool:
    return bool((read_state(job) or {}).get("finished"))


def start(job: Job, command: list[str]) -> subprocess.Popen:
    """Start a run, or go on with it. It stays in this process's group, so that the terminal's Ctrl-C reaches it too."""
    resumed = read_state(job) is not None
    job.folder.mkdir(parents=True, exist_ok=True)
    write_state(job, finished=False)
    folders = [word for name in ("run_dir", "save_dir", "checkpoint_dir") for word in (f"--{name}", str(job.folder))]
    words = [*command, *job.flags, *folders, *(["--from_resume", "1"] if resumed else [])]
    with open(job.folder / "log.txt", "a" if resumed else "w", encoding="utf-8") as log:
        return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                                env={**os.environ, "OMP_NUM_THREADS": "1"})  # fmt: skip


def run_all(jobs: list[Job], commands: dict[str, list[str]], at_once: int, grace: float) -> list[tuple[Job, str]]:
    """Run what is not finished, `at_once` at a time; gives the runs that failed, with the reason.

    Raises KeyboardInterrupt once every run that was going has ended.
    """
    waiting = [job for job in jobs if not is_finished(job)]
    total, done, failed, going = len(waiting), 0, [], {}
    print(f"{len(jobs)} runs, {len(jobs) - total} of them finished before", flush=True)
    try:
        while waiting or going:
            while waiting and len(going) < at_once:
                job = waiting.pop(0)
                fresh = read_state(job) is None
                going[job] = (start(job, commands[job.arm.algo]), time.monotonic(), fresh)
            for job in [job for job, (process, _, _) in going.items() if process.poll() is not None]:
                process, began, fresh = going.pop(job)
                if process.returncode == 0 and not fresh and not evaluated_at_the_end(rows_of(job)):
                    shutil.rmtree(job.folder)  # stopped in its last evaluation, which no resumed run makes up for
                    waiting.insert(0, job)
                    continue
                done += 1
                print(f"[{done}/{total}] {job.title}: {ending(job, process.returncode)}, "
                      f"{time.monotonic() - began:.0f} s", flush=True)  # fmt: skip
                if process.returncode:
                    failed.append((job, failure(job, process.returncode)))
            time.sleep(0.05)
    except BaseException:
        stop([process for process, _, _ in going.values()], grace)
        raise
    return failed


def ending(job: Job, status: int) -> str:
    """One run's end in words; a run that ended well is marked as finished."""
    if status:
        return f"failed with status {status}"
    write_state(job, finished=True)
    accuracy = run_numbers(rows_of(job))["accuracy"]
    return "done" if accuracy is None else f"accuracy {100 * accuracy:.1f} %"


def failure(job: Job, status: int) -> str:
    """Why a run failed: its status and the last lines of its log."""
    text = (job.folder / "log.txt").read_text(encoding="utf-8", errors="replace").replace("\r", "\n")
    lines = [line for line in text.splitlines() if line.strip()]
    return "\n".join([f"{job.title} failed with status {status}; {job.folder / 'log.txt'} ends with",
                      *(f"    {line}" for line in lines[-5:])])


def stop(processes: list[subprocess.Popen], grace: float) -> None:
    """Wait until these have saved and ended. Those that no signal reached within `grace` seconds get one.

    Not at once: a trainer that the terminal's Ctrl-C has reached takes a second signal as "do not even save".
    """
    if processes:
        print("stopping: the runs save first", flush=True)
    deadline = time.monotonic() + grace
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        time.sleep(0.05)
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
    for process in processes:
        process.wait()


# ---------------------------------------------------------------------------------------------- the command
def report(groups, jobs: list[Job], args, extra: list[str], failed: list) -> None:
    """Print the tables of what is finished; write them with results.json and the pictures into args.out."""
    out = Path(args.out)
    rows = {(job.arm.algo, job.arm.flags, job.seed): rows_of(job) for job in jobs if is_finished(job)}
    if not rows:
        print("no run is finished: nothing to compare yet")
        return
    seeds = list(range(args.first_seed, args.first_seed + args.seeds))
    results = results_of(groups, rows, {"max_steps": args.max_steps, "seeds": seeds, "flags": extra,
                                        "failed": [job.title for job, _ in failed]})  # fmt: skip
    text = as_markdown(results)
    print(f"\n{text}")
    write_whole(out / "results.json", json.dumps(results, ensure_ascii=False, indent=1) + "\n")
    write_whole(out / "results.md", text)
    written = ["results.md", "results.json"]
    for number, (_, arms) in enumerate(groups, 1):
        picture = picture_of(arms, rows, seeds)
        if picture is not None:
            written.append(draw(picture, out, "results" if len(groups) == 1 else f"results-{number}"))
    print(f"wrote {', '.join(written)} in {out}")


def draw(picture, out: Path, name: str) -> str:
    """Write a picture, as a page where matplotlib is not installed; gives the file's name."""
    try:
        from scripts.plotting.png import png_bytes
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        write_whole(out / f"{name}.html", page_text(picture))
        return f"{name}.html"
    write_whole(out / f"{name}.png", png_bytes(picture))
    return f"{name}.png"


def parse_args(argv: list[str]) -> argparse.Namespace:
    """The flags; exits with status 2 on a wrong one."""
    parser = FlagParser(__doc__.splitlines()[0])
    add = parser.group("what is compared; flags after -- go to every run")
    add("--grid", str, None, 'every combination of "flag=value,value flag=value,value"')
    parser.add_argument("--arm", action="append", help='one setting, "name: --flag value …"; several times')
    add("--arms", str, None, "file of settings, one a line, in groups under [titles]; as scripts/ablations.txt")
    add("--algo", list(ALGORITHMS), "grpo", "script that trains, where a setting does not name one")
    add("--max_steps", positive_int, 60, "rollout steps of each run")
    add("--seeds", positive_int, 3, "runs of each setting")
    add("--first_seed", seed_number, 42, "their seeds count from here")
    add("--jobs", positive_int, 1, "runs at once, a thread each; s a step is comparable only where each has a core")
    add("--out", str, str(REPO_ROOT / "out" / "ablation"), "folder of the runs and the results")
    return parser.parse_args(argv)


def main(argv=None, commands: dict[str, list[str]] | None = None, grace: float = 10.0) -> int:
    """Run and compare; gives the process's exit status.

    commands: what runs each algorithm; grace: seconds that runs are given to notice a Ctrl-C themselves.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    cut = argv.index("--") if "--" in argv else len(argv)
    args, extra = parse_args(argv[:cut]), argv[cut + 1 :]
    commands = commands or {algo: [sys.executable, str(REPO_ROOT / "trainer" / f"train_{algo}.py")]
                            for algo in ALGORITHMS}  # fmt: skip
    for number in (signal.SIGINT, signal.SIGTERM):  # the first is ignored where a shell started this with `&`
        signal.signal(number, signal.default_int_handler)
    try:
        groups = gather_groups(args)
        jobs = jobs_of(groups, args, extra)
        require_writable(Path(args.out))
        failed, status = [], 0
        try:
            failed = run_all(jobs, commands, args.jobs, grace)
        except KeyboardInterrupt:
            print("stopped; the same command goes on from here", flush=True)
            status = 130
        report(groups, jobs, args, extra, failed)
    except (ValueError, RuntimeError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    for _, reason in failed:
        print(reason, file=sys.stderr)
    return status or int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
