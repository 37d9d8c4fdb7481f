"""The ways of starting the scripts that the README shows, each as a real process: torchrun on one node and on two; and
what a process sets up for itself."""

import json
import os
import platform
import socket
import subprocess
import sys

import pytest
import torch

from trainer.arguments import REPO_ROOT


def environment() -> dict:
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def starter_flags(folder, **changes) -> list[str]:
    flags = {"max_steps": 2, "batch_size": 2, "eval_prompts": 4, "save_dir": folder, "checkpoint_dir": folder,
             "run_dir": folder / "run", "check_sync": 1, **changes}  # fmt: skip
    return ["--starter"] + [word for name, value in flags.items() for word in (f"--{name}", str(value))]


def steps(folder) -> list[int]:
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines if "reward_std" in line or "vf_loss" in line]


@pytest.mark.parametrize("script, weights", [("train_grpo.py", "grpo_128.pth"), ("train_ppo.py", "ppo_actor_128.pth")])
def test_torchrun_trains_the_starter_on_two_ranks(tmp_path, script, weights):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
               f"trainer/{script}", *starter_flags(tmp_path)]  # fmt: skip
    done = subprocess.run(command, cwd=REPO_ROOT, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert steps(tmp_path) == [1, 2]
    assert (tmp_path / weights).is_file()


@pytest.mark.parametrize("words, folder", [(["train_grpo.py"], "trainer"), (["-m", "trainer.train_grpo"], ".")])
def test_other_folders_and_module_start(tmp_path, words, folder):
    command = [sys.executable, *words, *starter_flags(tmp_path, max_steps=1)]
    done = subprocess.run(
        command, cwd=REPO_ROOT / folder, env=environment(), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert steps(tmp_path) == [1]


def test_two_nodes_train_as_one_process(tmp_path):
    """Two torchruns that meet at one port of this machine, one process each, against one process with both batches."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    nodes = []
    for rank in range(2):
        flags = starter_flags(tmp_path / "nodes", batch_size=2, eval_prompts=0)
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node_rank", str(rank),
                   "--master_addr", "127.0.0.1", "--master_port", str(port), "--nproc_per_node", "1",
                   "trainer/train_grpo.py", *flags]  # fmt: skip
        nodes.append(subprocess.Popen(command, cwd=REPO_ROOT, env=environment(), stdout=subprocess.PIPE,
                                      stderr=subprocess.STDOUT, text=True))  # fmt: skip
    outputs = [node.communicate(timeout=300)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(outputs)[-3000:]

    from trainer.train_grpo import main

    assert main(starter_flags(tmp_path / "one", batch_size=4, eval_prompts=0)) == 0
    nodes, one = (torch.load(tmp_path / name / "grpo_128_resume.pth", weights_only=True) for name in ("nodes", "one"))
    for name, tensor in nodes["model"].items():
        torch.testing.assert_close(tensor, one["model"][name], atol=1e-5, rtol=0)


FAULTS = """
import resource, torch
from trainer.trainer_utils import keep_freed_memory
keep_freed_memory()
for round in range(12):
    if round == 2:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [torch.ones(1 << 22) for _ in range(4)]
    del blocks
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_freed_memory_is_kept_unless_the_environment_says_how():
    """10 rounds of 4 x 16 MiB are 163840 pages: given back to the system and mapped anew, or not."""
    plain = {name: value for name, value in environment().items() if not name.startswith(("MALLOC_", "GLIBC_TUN"))}
    faults = {}
    for name, added in (("kept", {}), ("own", {"MALLOC_TRIM_THRESHOLD_": "0"})):
        done = subprocess.run([sys.executable, "-c", FAULTS], cwd=REPO_ROOT, env={**plain, **added}, timeout=120,
                              capture_output=True, text=True)  # fmt: skip
        faults[name] = int(done.stdout)
    assert faults["kept"] < 10000 < 100000 < faults["own"], faults
