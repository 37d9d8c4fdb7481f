"""A run that was stopped, anyhow and anywhere, and resumed, is the run that was not: weights, moments, metrics."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ranks_driver
import small_runs as small
import torch
from option_sets import OPTIONS, with_scorer, write_scorer
from small_runs import Killed, argv, dies_at, metrics_lines, resume_content, run_script, same_state

from trainer import checkpoints, train_grpo, train_ppo
from trainer.checkpoints import read_torch_file

ROOT = Path(__file__).resolve().parent.parent
NAMES = {train_grpo: "grpo", train_ppo: "ppo_actor"}
GRPO, PPO = {"num_generations": 3}, {"mini_batch_size": 1, "critic_learning_rate": 1e-4, "early_stop_kl": 1e9}


@pytest.fixture(scope="module")
def weights(tokenizer, tmp_path_factory):
    folder = small.write_weights(tmp_path_factory.mktemp("lively"), len(tokenizer))
    write_scorer(folder / f"{small.WEIGHTS}_{small.WIDTH}.pth")
    return folder


@pytest.fixture
def flags(weights, tmp_path):
    """Function of (folder name, script, changes) giving the command line of a run in that folder of tmp_path.

    10 prompts in steps of 2 make 5 steps an epoch.
    """
    data = small.write_prompts(tmp_path / "prompts.jsonl", 10)

    def build(folder, script, **changes):
        out = tmp_path / folder
        return argv(**{"weight_dir": weights, "data_path": data, "save_dir": out / "out", "batch_size": 2,
                       "checkpoint_dir": out / "checkpoints", "run_dir": out / "run",
                       **(GRPO if script is train_grpo else PPO), **changes})  # fmt: skip

    return build


def killed(script, flags, rewards=small.text_rewards, **replaced):
    """Run until one of the replaced functions raises Killed."""
    with pytest.raises(Killed):
        run_script(script, flags, rewards, **replaced)


def assert_same_run(script, one: Path, other: Path) -> None:
    """Both folders hold the same resume file, weights file and metrics lines, bit for bit."""
    contents = [resume_content(folder / "checkpoints", NAMES[script]) for folder in (one, other)]
    for name in ("run_dir", "args"):
        assert all(content.pop(name) is not None for content in contents)
    assert contents[0]["progress"] == contents[1]["progress"]
    assert contents[0].keys() == contents[1].keys()
    for name in contents[0]:
        digests = [checkpoints.state_digest(content[name]) for content in contents]
        assert digests[0] == digests[1], name
    halves = [read_torch_file(folder / "out" / f"{NAMES[script]}_64.pth") for folder in (one, other)]
    assert same_state(*halves)
    if not any(name.endswith("lora_a") for name in contents[0]["model"]):  # the weights file has adapters merged in
        assert same_state(halves[0], {name: tensor.half() for name, tensor in contents[0]["model"].items()})
    assert metrics_lines(one / "run") == metrics_lines(other / "run")


# ---------------------------------------------------------------------------------------------- killed
@pytest.mark.parametrize(
    ("script", "changes", "where", "calls"),
    [
        (train_grpo, {}, "debug_print", [3]),
        (train_grpo, {"save_interval": 1}, "sample_answers", [2, 1, 3]),
        (train_grpo, {"accumulation_steps": 3}, "debug_print", [2]),
        (train_grpo, {"accumulation_steps": 3, "epochs": 2, "save_interval": 1}, "sample_answers", [5, 4]),
        (train_grpo, {"num_workers": 2, "epochs": 2}, "optimizer_step", [4, 5]),
        (train_ppo, {}, "debug_print", [3]),
        (train_ppo, {"accumulation_steps": 3, "save_interval": 3}, "optimizer_step", [8]),
        (train_ppo, {"early_stop_kl": 0.01, "accumulation_steps": 2}, "sample_answers", [4]),
        (train_ppo, {"epochs": 2, "save_interval": 5}, "debug_print", [5]),
    ],
)
def test_killed_and_resumed(flags, tmp_path, script, changes, where, calls):
    """Killed once for each entry of `calls`, before that call of a function of the script; then run to the end."""
    changes = {"save_interval": 2, **changes}
    assert run_script(script, flags("straight", script, **changes))[0] == 0
    for call in calls:
        again = flags("resumed", script, **changes, from_resume=1)
        killed(script, again, **{where: dies_at(getattr(script, where), call)})
    assert run_script(script, again)[0] == 0
    assert_same_run(script, tmp_path / "straight", tmp_path / "resumed")
    steps = [line["step"] for line in metrics_lines(tmp_path / "resumed" / "run")]
    assert steps == list(range(1, 5 * changes.get("epochs", 1) + 1))
    if "early_stop_kl" in changes:
        assert {line["early_stop"] for line in metrics_lines(tmp_path / "straight" / "run")} == {0.0, 1.0}


@pytest.mark.parametrize("name", OPTIONS)
def test_killed_and_resumed_with_options(flags, weights, tmp_path, name):
    """The covering sets of options that ranks are compared over; killed between two saves."""
    script, changes = OPTIONS[name]
    changes = {**with_scorer(changes, weights), "save_interval": 2}
    if "mini_batch_size" in changes:
        changes["mini_batch_size"] = 3  # of the 6 answers of a step here
    assert run_script(script, flags("straight", script, **changes), ranks_driver.sign_rewards)[0] == 0
    again = flags("resumed", script, **changes, from_resume=1)
    killed(script, again, ranks_driver.sign_rewards, debug_print=dies_at(script.debug_print, 3))
    assert run_script(script, again, ranks_driver.sign_rewards)[0] == 0
    assert_same_run(script, tmp_path / "straight", tmp_path / "resumed")
    if "kl_target" in changes:
        weights = [line["kl_coef"] for line in metrics_lines(tmp_path / "resumed" / "run")]
        assert len(set(weights)) > 1


@pytest.mark.parametrize("script", [train_grpo, train_ppo])
def test_killed_at_the_end_of_an_epoch(flags, tmp_path, script):
    """After the last step of an epoch was saved and before the next epoch began: nothing of either is done twice."""
    changes = {"epochs": 2, "save_interval": 1}
    assert run_script(script, flags("straight", script, **changes))[0] == 0
    killed(script, flags("resumed", script, **changes), open_loader=dies_at(script.open_loader, 2))
    assert resume_content(tmp_path / "resumed" / "checkpoints", NAMES[script])["progress"]["consumed"] == 10
    assert run_script(script, flags("resumed", script, **changes, from_resume=1))[0] == 0
    assert_same_run(script, tmp_path / "straight", tmp_path / "resumed")


@pytest.mark.parametrize("call", range(1, 5))
def test_killed_while_a_checkpoint_is_written(flags, tmp_path, monkeypatch, call):
    """Before each rename of the last of three saves: the weights file's, and three of the resume files."""
    script, changes = train_grpo, {"save_interval": 2}
    assert run_script(script, flags("straight", script, **changes))[0] == 0
    replaces = []

    def replace(source, target):
        # the first save has one rename less, since there is no older file to keep
        if str(target).endswith(".pth"):
            replaces.append(target)
            if len(replaces) == 7 + call:
                raise Killed
        os_replace(source, target)

    os_replace = os.replace
    monkeypatch.setattr(checkpoints.os, "replace", replace)
    killed(script, flags("resumed", script, **changes))
    monkeypatch.undo()
    assert run_script(script, flags("resumed", script, **changes, from_resume=1))[0] == 0
    assert_same_run(script, tmp_path / "straight", tmp_path / "resumed")
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_skipped_step_does_not_bend_the_schedule(flags, tmp_path):
    """Steps without a finite reward take no optimizer step; the rate afterwards does not depend on a resume."""
    script, changes = train_grpo, {"save_interval": 1}
    rewards = small.nan_rewards_for("(0)", "(1)", "(2)", "(3)", "(4)", "(5)", "(6)")
    status, _ = run_script(script, flags("straight", script, **changes), rewards)
    assert status == 0
    killed(script, flags("resumed", script, **changes), rewards, sample_answers=dies_at(script.sample_answers, 5))
    assert run_script(script, flags("resumed", script, **changes, from_resume=1), rewards)[0] == 0
    assert_same_run(script, tmp_path / "straight", tmp_path / "resumed")
    taken = resume_content(tmp_path / "resumed" / "checkpoints", "grpo")["progress"]["optimizer_steps"]
    assert 0 < taken < 5


# ---------------------------------------------------------------------------------------------- signals
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("where", ["sample_answers", "optimizer_step"])
def test_a_signal_saves_and_resumes(flags, tmp_path, number, status, where):
    """While answers are sampled it stops at once; while weights change, after the step. Both resume exactly."""
    script, changes = train_ppo, {"accumulation_steps": 3}
    assert run_script(script, flags("straight", script, **changes))[0] == 0
    function, calls = getattr(script, where), []

    def interrupted(*args, **kwargs):
        calls.append(None)
        if len(calls) == 3:
            signal.raise_signal(number)
        return function(*args, **kwargs)

    assert run_script(script, flags("resumed", script, **changes), **{where: interrupted})[0] == status
    assert resume_content(tmp_path / "resumed" / "checkpoints", "ppo_actor")["progress"]["step"] == 2
    assert run_script(script, flags("resumed", script, **changes, from_resume=1))[0] == 0
    assert_same_run(script, tmp_path / "straight", tmp_path / "resumed")


def test_a_signal_before_the_first_step(flags, tmp_path):
    """Also with a held-out evaluation before it, which is not done or logged twice."""
    script, changes = train_grpo, {"eval_data_path": tmp_path / "prompts.jsonl", "eval_prompts": 2, "max_steps": 2}
    assert run_script(script, flags("straight", script, **changes))[0] == 0

    def interrupted(*args, **kwargs):
        signal.raise_signal(signal.SIGTERM)

    assert run_script(script, flags("resumed", script, **changes), sample_answers=interrupted)[0] == 143
    assert run_script(script, flags("resumed", script, **changes, from_resume=1))[0] == 0
    lines = [metrics_lines(tmp_path / folder / "run") for folder in ("straight", "resumed")]
    assert [line["step"] for line in lines[1]] == [0, 1, 2, 2]
    assert lines[0] == lines[1]


def start(script, flags) -> subprocess.Popen:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, f"trainer/{script}", *flags], cwd=ROOT, env=environment,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for_lines(run_dir: Path, count: int, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 300
    while not (run_dir / "metrics.jsonl").is_file() or len(metrics_lines(run_dir)) < count:
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline, "no metrics lines"
        time.sleep(0.02)


@pytest.mark.parametrize(("script", "number", "status"), [(train_grpo, signal.SIGTERM, 143),
                                                          (train_ppo, signal.SIGKILL, -9)])
def test_a_real_process_stopped_by_a_signal(flags, tmp_path, script, number, status):
    """The script as users start it, stopped at a random moment between the second step and the 13th, then resumed."""
    changes = {"epochs": 20, "save_interval": 4, "num_workers": 2, "max_steps": 24}
    process = start(Path(script.__file__).name, flags("resumed", script, **changes))
    lines, moment = random.randint(2, 12), random.uniform(0, 0.05)
    wait_for_lines(tmp_path / "resumed" / "run", lines, process)
    time.sleep(moment)
    process.send_signal(number)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == status, f"{moment:.3f} s after step {lines}: {output}"
    assert run_script(script, flags("straight", script, **changes), rewards=None)[0] == 0
    assert run_script(script, flags("resumed", script, **changes, from_resume=1), rewards=None)[0] == 0
    assert_same_run(script, tmp_path / "straight", tmp_path / "resumed")


# ---------------------------------------------------------------------------------------------- changed on resume
def prompts_seen(script, flags, steps=None):
    """Indices of the prompts that a run answers, in order; it is killed before step `steps` + 1."""
    function, seen = script.sample_answers, []

    def sample(engine, tokenizer, prompt_ids, keys, *args, **kwargs):
        if len(seen) == steps:
            raise Killed
        seen.append([key[-1] for key in keys])
        return function(engine, tokenizer, prompt_ids, keys, *args, **kwargs)

    if steps is None:
        assert run_script(script, flags, sample_answers=sample)[0] == 0
    else:
        killed(script, flags, sample_answers=sample)
    return [index for indices in seen for index in indices]


@pytest.mark.parametrize(("script", "before", "after"), [(train_grpo, 2, 3), (train_ppo, 3, 2)])
def test_another_batch_size_on_resume_leaves_no_prompt_out(flags, tmp_path, script, before, after):
    first = prompts_seen(script, flags("run", script, batch_size=before, save_interval=1), steps=2)
    second = prompts_seen(script, flags("run", script, batch_size=after, from_resume=1))
    assert sorted(first + second) == list(range(10))
    lines = metrics_lines(tmp_path / "run" / "run")
    assert [line["consumed"] for line in lines][:2] == [before, 2 * before]
    assert lines[-1]["consumed"] == 10


def test_max_steps_may_be_raised_on_resume(flags, tmp_path):
    """The command that a finished run suggests: it goes on with the prompts that are left of the epoch."""
    first = prompts_seen(train_grpo, flags("run", train_grpo, max_steps=2))
    second = prompts_seen(train_grpo, flags("run", train_grpo, max_steps=4, from_resume=1))
    third = prompts_seen(train_grpo, flags("run", train_grpo, from_resume=1))
    assert [len(first), len(second), len(third)] == [4, 4, 2]
    assert sorted(first + second + third) == list(range(10))


@pytest.mark.parametrize("script", [train_grpo, train_ppo])
def test_a_changed_learning_rate_is_honoured_and_announced(flags, tmp_path, script, capsys):
    run_script(script, flags("run", script, max_steps=2))
    capsys.readouterr()
    run_script(script, flags("run", script, max_steps=4, from_resume=1, learning_rate=1e-6))
    assert "learning_rate 0.0001 -> 1e-06" in capsys.readouterr().out
    assert metrics_lines(tmp_path / "run" / "run")[2]["lr"] <= 1e-6
    with pytest.raises(ValueError, match="--seed is 43"):
        run_script(script, flags("run", script, max_steps=6, from_resume=1, seed=43))


def test_the_resume_file_keeps_float32(flags, tmp_path):
    """A weight of 1 + 3e-6, which float16 and bfloat16 round to 1, and what an optimizer step of 3e-7 adds to it."""
    run_script(train_grpo, flags("run", train_grpo, max_steps=1, learning_rate=3e-7))
    saved = resume_content(tmp_path / "run" / "checkpoints", "grpo")
    name = "model.norm.weight"
    assert saved["model"][name].dtype == torch.float32
    assert (saved["model"][name] != saved["model"][name].half().float()).any()
    assert (saved["model"][name] - 1).abs().max() < 1e-6
