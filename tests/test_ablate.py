"""The ablation script with a stand-in for training that takes milliseconds: what runs, what goes on, what is told."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from scripts import ablate
from scripts.ablate import gather_groups, grid_arms, main, parse_args, read_arm
from scripts.plotting.ablation import (
    cell, evaluated_at_the_end, mean_and_error, mean_curve, run_numbers, summary,
)  # fmt: skip
from scripts.plotting.data import Run
from trainer.arguments import REPO_ROOT

# Accuracy is 0.5 + seed/1000, for arm b (--beta 0.2) 0.02 · (seed - 41) more. With --epsilon it fails; with --lam it
# waits in the middle until it is signalled, the first time; with --gamma it ends without a last evaluation, likewise.
FAKE = '''
import json, pathlib, signal, sys, time
flags = dict(zip(sys.argv[1:], sys.argv[2:]))
folder = pathlib.Path(flags["--run_dir"])
with open(folder / "calls.txt", "a") as calls:
    calls.write(" ".join(sys.argv[1:]) + "\\n")
if "--epsilon" in flags:
    sys.exit("error: no such luck")
seed, steps, more = int(flags["--seed"]), int(flags["--max_steps"]), flags.get("--beta") == "0.2"
resumed = flags.get("--from_resume") == "1"
again = (folder.parent / "again").exists()
rows = [{"step": 0, "eval/prompts": 9, "eval/accuracy": 0.25}]
rows += [{"step": i, "reward": i, "kl": 0.01 * i, "timing_s/step": 1.0 + i} for i in range(1, steps + 1)]
rows += [{"step": steps, "eval/prompts": 9, "eval/accuracy": 0.5 + seed / 1000 + more * 0.02 * (seed - 41)}]
def write(rows):
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
def leave(*_):
    (folder / "saved").touch()
    sys.exit(130)
if "--lam" in flags and not resumed:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, leave)
    write(rows[:2])
    time.sleep(20)
if "--gamma" in flags and not again:
    write(rows[:-1])
    (folder.parent / "again").touch()
    sys.exit(1)
write(rows if "--gamma" not in flags or not resumed else rows[:-1])
'''


@pytest.fixture(autouse=True)
def without_matplotlib(monkeypatch):
    """Pages are drawn instead of pictures: importing matplotlib costs a second."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "scripts.plotting.png", raising=False)


@pytest.fixture
def commands(tmp_path):
    """The stand-in for both algorithms."""
    path = tmp_path / "fake.py"
    path.write_text(FAKE)
    return {"grpo": [sys.executable, "-S", str(path)], "ppo": [sys.executable, "-S", str(path), "--ppo"]}


@pytest.fixture
def ablation(tmp_path, commands):
    """Function of flags that runs the script; gives (exit status, results.json)."""

    def run(*words: str, extra=()):
        status = main([*words, "--max_steps", "3", "--out", str(tmp_path / "out"), "--", *extra], commands)
        path = tmp_path / "out" / "results.json"
        return status, json.loads(path.read_text()) if path.exists() else None

    return run


def calls(tmp_path) -> list[str]:
    return [line for path in sorted(tmp_path.glob("out/runs/*/*/calls.txt")) for line in path.read_text().splitlines()]


# ---------------------------------------------------------------------------------------------- numbers by hand
def test_the_mean_and_its_standard_error():
    # 1, 2, 6: mean 3, squares (4 + 1 + 9) / 2 = 7, so sqrt(7/3)
    assert mean_and_error([1.0, 2.0, 6.0]) == (3.0, pytest.approx((7 / 3) ** 0.5))
    assert mean_and_error([5.0]) == (5.0, None) and mean_and_error([]) is None


def numbers(accuracy, kl=None):
    return {"accuracy": accuracy, "accuracy_greedy": None, "reward": None, "kl": kl, "seconds_per_step": 1.0}


def test_differences_are_paired_by_seed():
    base = {1: numbers(0.1), 2: numbers(0.5), 3: numbers(0.9), 4: numbers(None)}
    other = {2: numbers(0.6), 3: numbers(1.2), 4: numbers(0.7), 5: numbers(9.0)}
    found = summary(other, base)["accuracy"]  # 0.1 and 0.3; seeds 1, 4, 5 have no partner
    assert found == {"mean": pytest.approx(0.2), "se": pytest.approx(0.1), "n": 2}
    assert summary(other)["accuracy"]["n"] == 4 and summary(other, base)["kl"] == {"mean": None, "se": None, "n": 0}


def test_cells_and_the_star_of_a_t_test():
    # three seeds: 4.30 standard errors
    assert cell({"mean": 0.0431, "se": 0.01, "n": 3}, 100, 1, "+") == "+4.3 ± 1.0 *"
    assert cell({"mean": -0.0429, "se": 0.01, "n": 3}, 100, 1, "+") == "-4.3 ± 1.0"
    assert cell({"mean": 0.5, "se": 0.01, "n": 3}, 100, 1) == "50.0 ± 1.0"
    assert cell({"mean": 0.5, "se": None, "n": 1}, 1, 2) == "0.50" and cell({"mean": None}, 1, 2) == "–"


def test_numbers_of_a_run_are_held_out_where_there_are_some():
    rows = [{"step": 0, "eval/prompts": 9, "eval/accuracy": 0.25, "eval/reward": 1.0},
            *({"step": i, "reward": 7.0 + i, "kl": 0.1 * i, "timing_s/step": second}
              for i, second in ((1, 9.0), (2, 1.0), (3, 2.0)))]  # fmt: skip
    assert run_numbers(rows) == {"accuracy": None, "accuracy_greedy": None, "reward": 10.0,
                                 "kl": pytest.approx(0.3), "seconds_per_step": 2.0}  # fmt: skip
    assert run_numbers(rows, before=True)["reward"] == 1.0
    assert not evaluated_at_the_end(rows) and evaluated_at_the_end(rows[1:])
    rows.append({"step": 3, "eval/prompts": 9, "eval/accuracy": 0.5, "eval/kl": 0.7, "eval/reward": float("nan")})
    found = run_numbers(rows)
    assert (found["accuracy"], found["kl"], found["reward"]) == (0.5, 0.7, None) and evaluated_at_the_end(rows)


def test_a_curve_is_the_mean_over_runs(tmp_path):
    runs = [Run("r", tmp_path, [{"step": i, "kl": base * i} for i in (1, 2)]) for base in (1.0, 3.0)]
    curve = mean_curve("kl", runs, "#000000", 100.0)
    # at step 1: 100 and 300, mean 200, error sqrt(20000 / 2) = 100
    assert curve.steps == [1, 2] and curve.values == [200.0, 400.0] and curve.error == pytest.approx([100.0, 200.0])
    assert mean_curve("reward", runs, "#000000", 1.0) is None


# ---------------------------------------------------------------------------------------------- what is compared
def test_a_grid_is_every_combination():
    arms = grid_arms("loss_type=grpo,cispo kl_estimator=k2,k3", "grpo")
    assert [arm.name for arm in arms] == [f"loss_type={a} kl_estimator={b}" for a in ("grpo", "cispo")
                                          for b in ("k2", "k3")]  # fmt: skip
    assert arms[1].flags == ("--loss_type", "grpo", "--kl_estimator", "k3")


def test_an_arm_names_its_algorithm_or_has_the_default_one():
    arm = read_arm("a b: ppo --kl_in reward", "grpo")
    assert (arm.name, arm.algo, arm.flags) == ("a b", "ppo", ("--kl_in", "reward"))
    assert read_arm("plain:", "ppo").algo == "ppo" and read_arm("p:", "grpo").flags == ()


def test_the_committed_arms_can_be_read_and_are_what_the_issue_asks_for():
    groups = gather_groups(parse_args(["--arms", str(REPO_ROOT / "scripts" / "ablations.txt")]))
    words = " ".join(word for _, arms in groups for arm in arms for word in (arm.algo, *arm.flags))
    assert len(groups) == 6
    for flag in ("--logp_temperature 1.0", "cispo --num_iterations 4", "token", "k2", "ppo", "reward", "--shuffle"):
        assert flag in words


@pytest.mark.parametrize("words, told", [
    ([], "nothing to compare"),
    (["--arm", "a: --beta 1"], "two or more"),
    (["--arm", "a:", "--arm", "a: --beta 1"], "different names"),
    (["--arm", "a", "--arm", "b:"], "expected \"name: --flag value"),
    (["--arm", "a: --seed 1", "--arm", "b:"], "--seed is given by ablate.py"),
    (["--grid", "beta="], "--grid: expected"),
    (["--grid", "max_steps=1,2"], "--max_steps is given"),
    (["--arms", "nowhere.txt"], "nowhere.txt"),
    (["--grid", "beta=1,2", "--", "--run_dir", "x"], "--run_dir is given"),
])  # fmt: skip
def test_a_slip_is_one_line(words, told, tmp_path, capsys, commands):
    assert main(["--out", str(tmp_path / "out"), *words], commands) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith("error: ") and told in error
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------------------------------------- running
AB = ("--arm", "a:", "--arm", "b: --beta 0.2")


def test_results_are_written_and_a_second_call_runs_nothing(ablation, tmp_path, capsys):
    status, results = ablation(*AB, "--seeds", "3", "--jobs", "3", extra=["--answer_reward", "5"])
    assert status == 0 and len(calls(tmp_path)) == 6
    assert all("--answer_reward 5" in line and "--from_resume" not in line for line in calls(tmp_path))
    first, second = results["groups"][0]["arms"]
    # a: 0.542, 0.543, 0.544; b is 0.02, 0.04, 0.06 above: error 0.02 / sqrt(3)
    assert first["after"]["accuracy"] == {"mean": pytest.approx(0.543), "se": pytest.approx(0.001 / 3**0.5), "n": 3}
    assert first["before"]["accuracy"]["mean"] == 0.25
    gap = second["difference_to_first"]["accuracy"]
    assert gap == {"mean": pytest.approx(0.04), "se": pytest.approx(0.02 / 3**0.5), "n": 3}
    text = (tmp_path / "out" / "results.md").read_text()
    assert re.search(r"\| b +\| 3 +\| \+4\.0 ± 1\.2 ", text) and re.search(r"\| a +\| 3 +\| 54\.3 ± 0\.1 ", text)
    assert "accuracy 54.2 %" in capsys.readouterr().out and "<svg" in (tmp_path / "out" / "results.html").read_text()
    assert ablation(*AB, "--seeds", "3", extra=["--answer_reward", "5"]) == (0, results) and len(calls(tmp_path)) == 6


def test_arms_with_the_same_flags_share_runs_and_algorithms_do_not(ablation, tmp_path):
    file = tmp_path / "arms.txt"
    file.write_text("# words\n[One]\na:\nb: --beta 0.2\n\n[Two]\nsame as a:\nc: ppo\n")
    _, results = ablation("--arms", str(file), "--seeds", "1")
    assert len(calls(tmp_path)) == 3 and sum("--ppo" in line for line in calls(tmp_path)) == 1
    assert [group["title"] for group in results["groups"]] == ["One", "Two"]


def test_a_failing_run_is_told_and_does_not_stop_the_others(ablation, tmp_path, capsys):
    status, results = ablation("--arm", "bad: --epsilon 1", *AB, "--seeds", "2")
    told = capsys.readouterr().err
    assert status == 1 and "bad, seed 42 failed with status 1" in told and "    error: no such luck" in told
    assert results["failed"] == ["bad, seed 42", "bad, seed 43"]
    assert [arm["after"]["accuracy"]["n"] for arm in results["groups"][0]["arms"]] == [0, 2, 2]


def test_other_flags_in_the_same_folder_are_refused(ablation, capsys):
    ablation(*AB, "--seeds", "1")
    assert ablation(*AB, "--seeds", "1", extra=["--lr", "1"])[0] == 1
    assert "was run with" in capsys.readouterr().err


def test_a_run_that_lost_its_last_evaluation_starts_again(ablation, tmp_path):
    """Stopped while it was evaluated, a resumed run finds all steps done and ends without the number asked for."""
    words = ("--arm", "a:", "--arm", "g: --gamma 1", "--seeds", "1")
    assert ablation(*words)[0] == 1
    status, results = ablation(*words)
    assert status == 0 and results["groups"][0]["arms"][1]["after"]["accuracy"]["mean"] == pytest.approx(0.542)


@pytest.mark.parametrize("group", [True, False])
def test_ctrl_c_lets_runs_save_and_the_next_call_goes_on(group, tmp_path, commands):
    """From the terminal, where the runs get the signal too, and sent to the script alone."""
    words = ["--arm", "a:", "--arm", "l: --lam 1", "--seeds", "1", "--max_steps", "3", "--out", str(tmp_path / "out")]
    code = f"import sys; from scripts.ablate import main; sys.exit(main({words!r}, {commands!r}, grace=0.2))"
    process = subprocess.Popen([sys.executable, "-c", code], cwd=REPO_ROOT, stdout=subprocess.PIPE, text=True,
                               start_new_session=True)  # fmt: skip
    folder = tmp_path / "out" / "runs" / "grpo_lam_1" / "seed42"
    deadline = time.monotonic() + 20
    while not (folder / "metrics.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    (os.killpg if group else os.kill)(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=20)
    assert process.returncode == 130 and "goes on from here" in out and (folder / "saved").exists()
    assert main(words, commands) == 0
    assert [("--from_resume 1" in line) for line in calls(tmp_path)] == [False, False, True]
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["groups"][0]["arms"][1]["after"]["accuracy"]["n"] == 1


def test_the_script_does_not_import_torch():
    code = "import sys; from scripts import ablate; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPO_ROOT).returncode == 0


def test_one_real_step(tmp_path):
    words = ["--arm", "a:", "--arm", "b: --shuffle_rewards 1", "--seeds", "1", "--max_steps", "1", "--jobs", "2"]
    small = ["--eval_prompts", "2", "--batch_size", "2", "--num_generations", "2", "--max_gen_len", "8"]
    assert ablate.main([*words, "--out", str(tmp_path), "--", *small]) == 0
    arms = json.loads((tmp_path / "results.json").read_text())["groups"][0]["arms"]
    assert all(arm["after"][name]["n"] == 1 for arm in arms for name in ("accuracy_greedy", "reward", "kl"))
