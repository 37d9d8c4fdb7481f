"""Two ranks with half the batch each train as one process with all of it; both scripts, under torchrun on gloo.

Tolerance: gradients summed in another order differ by some 1e-7 of their size, and AdamW passes that on to a weight as
learning rate × that, times up to 1e2 where a gradient nearly cancels: with rate 1e-4, where each step moves a weight
by up to 1e-4, the 1e-6 allowed is one hundredth of one step. A wrong divisor or a local mean moves 1e-5 and more.
"""

import os
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
    driver.make_inputs(folder, len(tokenizer))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
               str(ROOT / "tests" / "ranks_driver.py"), str(folder)]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = {name: [torch.load(folder / name / f"rank{r}.pt") for r in range(2)]
             for name in driver.CONFIGS | driver.ONLY_RANKS}
    return folder, found


@pytest.mark.parametrize("name", [*driver.CONFIGS, "grpo, one prompt", "ppo, one prompt"])
def test_two_ranks_train_as_one_process(two_ranks, tmp_path, name):
    folder, found = two_ranks
    alone = driver.run_config(name, folder, tmp_path)
    first, second = found[name]
    for model, state in alone["models"].items():
        assert small.furthest(state, first["models"][model]) < 1e-6, model
    assert first["rates"] == alone["rates"]
    assert first["optimizer_steps"] == alone["optimizer_steps"] > 0
    # answers are dealt out one prompt after the other, and the order of prompts is the same
    group = len(alone["answers"]) // len({tuple(map(tuple, [a])) for a in alone["answers"]} or [1])
    assert group >= 1
    lines = [small.metrics_lines(path) for path in (tmp_path, folder / name)]
    assert len(lines[0]) == len(lines[1])
    for one, two in zip(*lines, strict=True):
        assert one == pytest.approx(two, abs=1e-5, rel=1e-4, nan_ok=True)
    if "early stop" in name:
        stops = [line["early_stop"] for line in lines[0]]
        assert 0 < sum(stops) <= len(stops)
        assert alone["optimizer_steps"] > 0


@pytest.mark.parametrize("name", driver.CONFIGS | driver.ONLY_RANKS)
def test_ranks_hold_the_same_bits_after_every_optimizer_step(two_ranks, name):
    first, second = two_ranks[1][name]
    assert first["equal"] == second["equal"] == [True] * len(first["rates"])
    assert first["rates"], "there were steps"
    for model in first["models"]:
        assert small.same_state(first["models"][model], second["models"][model])


@pytest.mark.parametrize("name", ["grpo, same prompts", "ppo, same prompts"])
def test_ranks_answer_the_same_prompt_differently(two_ranks, name):
    """Randomness belongs to the row of the data, not to the rank or the text."""
    answers = [tuple(answer) for rank in two_ranks[1][name] for answer in rank["answers"]]
    assert len(answers) == 4 * (3 if name.startswith("grpo") else 1)
    assert len(set(answers)) >= len(answers) - 2, "a short answer may come twice"
