"""Two ranks with half the batch each train as one process with all of it; both scripts, under torchrun on gloo.

Tolerance: weights are to agree to 1e-6, one in ten thousand excepted. Sums in another order differ by some 1e-7 of
their terms, and AdamW divides a gradient by its own size: where the terms cancel, what is left of them is rounding, and
the weight moves by part of a learning rate this way or that. Measured, 5 steps of GRPO at rate 1e-4 and 20 of PPO at
1e-5: at most one weight of 237920 beyond 1e-6 (1.4e-6), 99.9% within 2e-8. A wrong divisor or a mean over one rank
moves thousands of weights by whole steps.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import ranks_driver as driver
import small_runs as small
import torch

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def two_ranks(tokenizer, tmp_path_factory):
    """(folder of the inputs, {configuration: what each rank found}) after one torchrun for all configurations."""
    folder = tmp_path_factory.mktemp("ranks")
    driver.make_inputs(folder, tokenizer)
    name = "ppo, begun by one"
    begun = driver.run_config(name, folder, folder / name, max_steps=2, from_resume=0)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
               str(ROOT / "tests" / "ranks_driver.py"), str(folder)]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = {"begun": begun}
    found |= {name: [torch.load(folder / name / f"rank{r}.pt") for r in range(2)]
             for name in driver.CONFIGS | driver.ONLY_RANKS}
    return folder, found


def assert_same_weights(one: dict, two: dict) -> None:
    for model, state in one.items():
        difference = torch.cat([(state[name] - two[model][name]).abs().flatten() for name in state])
        assert (difference > 1e-6).double().mean() < 1e-4, model
        assert difference.max() < 1e-5, model


@pytest.mark.parametrize("name", [*driver.CONFIGS, "grpo, one prompt", "ppo, one prompt"])
def test_two_ranks_train_as_one_process(two_ranks, tmp_path, name):
    folder, found = two_ranks
    alone = driver.run_config(name, folder, tmp_path)
    first, second = found[name]
    assert_same_weights(alone["models"], first["models"])
    assert first["rates"] == alone["rates"]
    assert first["optimizer_steps"] == alone["optimizer_steps"] > 0
    lines = [small.metrics_lines(path) for path in (tmp_path, folder / name)]
    assert len(lines[0]) == len(lines[1])
    for one, two in zip(*lines, strict=True):
        assert one.pop("health/messages", None) == two.pop("health/messages", None)
        assert {name for name in one if one[name] is None} == {name for name in two if two[name] is None}
        one, two = ({name: value for name, value in line.items() if value is not None} for line in (one, two))
        assert one == pytest.approx(two, abs=1e-5, rel=1e-4, nan_ok=True)
    if "early stop" in name:
        assert {line["early_stop"] for line in lines[0]} == {0.0, 1.0}, "the threshold is to be met in some steps"


@pytest.mark.parametrize("name", driver.CONFIGS | driver.ONLY_RANKS)
def test_ranks_hold_the_same_bits_after_every_optimizer_step(two_ranks, name):
    first, second = two_ranks[1][name]
    assert first["equal"] == second["equal"] == [True] * len(first["rates"])
    assert first["rates"], "there were steps"
    for model in first["models"]:
        assert small.same_state(first["models"][model], second["models"][model])


@pytest.mark.parametrize("name", ["grpo, one loss is NaN", "ppo, one loss is NaN"])
def test_a_nan_on_one_rank_skips_the_step_on_both(two_ranks, tmp_path, name):
    folder, found = two_ranks
    alone = driver.run_config(name, folder, tmp_path)
    for run in (alone, *found[name]):
        assert run["optimizer_steps"] == len(run["rates"]) - 1, "all but one of the steps were taken"
    assert_same_weights(alone["models"], found[name][0]["models"])
    skipped = [[line["skipped_steps"] for line in small.metrics_lines(path)] for path in (tmp_path, folder / name)]
    assert skipped[0] == skipped[1]
    assert sum(map(bool, skipped[0])) == 1


def test_a_run_of_one_process_goes_on_with_two(two_ranks):
    """19 prompts, 8 done by one process: the other 11 are done by two, the last step's odd one filled up."""
    folder, found = two_ranks
    name = "ppo, begun by one"
    before, after = found["begun"]["prompts"], [index for rank in found[name] for index in rank["prompts"]]
    assert [len(before), len(after)] == [8, 12]
    assert sorted(set(before + after)) == list(range(19))
    assert [line["consumed"] for line in small.metrics_lines(folder / name)] == [4, 8, 12, 16, 19]


def test_a_run_of_two_processes_goes_on_with_one(two_ranks, tmp_path):
    folder, found = two_ranks
    name = "grpo, to be ended by one"
    shutil.copytree(folder / name, tmp_path / name)
    alone = driver.run_config(name, folder, tmp_path / name, max_steps=0, from_resume=1, batch_size=3)
    before = [index for rank in found[name] for index in rank["prompts"]]
    assert sorted(before + alone["prompts"]) == list(range(19))
    consumed = [line["consumed"] for line in small.metrics_lines(tmp_path / name)]
    assert consumed == [4, 8, 11, 14, 17, 19]


@pytest.mark.parametrize("name", ["grpo, same prompts", "ppo, same prompts"])
def test_ranks_answer_the_same_prompt_differently(two_ranks, name):
    """Randomness belongs to the row of the data, not to the rank or the text."""
    answers = [tuple(answer) for rank in two_ranks[1][name] for answer in rank["answers"]]
    assert len(answers) == 4 * (3 if name.startswith("grpo") else 1)
    assert len(set(answers)) >= len(answers) - 2, "a short answer may come twice"
