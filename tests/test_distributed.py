"""The proof that ranks hold the same weights: any changed bit is seen, and a run whose ranks differ stops."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from trainer import distributed
from trainer.arguments import REPO_ROOT
from trainer.distributed import check_same_weights


def pretend_two_ranks(monkeypatch, other: nn.Module) -> None:
    """This process is rank 0 of two; rank 1 holds `other`. What it would send is recorded by running its side first."""
    sent = []

    def record(gathered, mine):
        sent.append(mine.clone())
        for place in gathered:
            place.copy_(mine)

    monkeypatch.setattr(distributed, "rank_and_world", lambda: (1, 2))
    monkeypatch.setattr(distributed.dist, "all_gather", record)
    check_same_weights({"policy": other}, "while recording")

    def answer(gathered, mine):
        gathered[0].copy_(mine)
        gathered[1].copy_(sent[0])

    monkeypatch.setattr(distributed, "rank_and_world", lambda: (0, 2))
    monkeypatch.setattr(distributed.dist, "all_gather", answer)


def layer(change=lambda weight: None) -> nn.Module:
    torch.manual_seed(0)
    module = nn.Linear(6, 5)
    with torch.no_grad():
        change(module.weight)
    return module


def test_equal_weights_pass(monkeypatch):
    pretend_two_ranks(monkeypatch, layer())
    check_same_weights({"policy": layer()}, "after step 3")


def flip_last_bit(weight):
    weight.view(torch.int32)[2, 3] ^= 1


def swap_two(weight):
    """Leaves every plain sum as it is."""
    weight[0, 0], weight[4, 5] = weight[4, 5].clone(), weight[0, 0].clone()


@pytest.mark.parametrize("change", [flip_last_bit, swap_two, lambda weight: weight[1].fill_(float("nan"))])
def test_any_difference_is_found(monkeypatch, change):
    pretend_two_ranks(monkeypatch, layer(change))
    with pytest.raises(RuntimeError, match=r"after step 3: the weights of policy on rank \[1\] differ from rank 0's"):
        check_same_weights({"policy": layer()}, "after step 3")


PROGRAM = """
import pathlib
import sys
import torch
from trainer.distributed import check_same_weights, init_distributed_mode, rank_and_world
folder = pathlib.Path(sys.argv[1])
init_distributed_mode("cpu")
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
check_same_weights({"policy": model}, "at the start")
with torch.no_grad():
    model.weight[0, 0] += 1e-7 * rank_and_world()[0]
try:
    check_same_weights({"policy": model}, "after step 1")
except RuntimeError as error:
    (folder / f"rank{rank_and_world()[0]}.txt").write_text(str(error))
torch.distributed.barrier()
torch.distributed.destroy_process_group()  # gloo may abort the rank that is last to leave otherwise
"""


def test_real_ranks_that_differ_stop_together(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
               str(tmp_path / "program.py"), str(tmp_path)]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(REPO_ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    for rank in range(2):
        message = (tmp_path / f"rank{rank}.txt").read_text()  # one file a rank: lines of two processes may interleave
        assert message.startswith("after step 1: the weights of policy on rank [1] differ from rank 0's")
