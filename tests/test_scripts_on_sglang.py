"""Both scripts with --rollout_engine sglang, against a stand-in server that holds a model of its own."""

import json

import pytest
import torch

from model.model_minimind import MiniMindForCausalLM
from tests.sglang_stand_in import StandIn
from trainer import train_grpo, train_ppo

LINES = {train_grpo: "reward_std", train_ppo: "critic/vf_loss"}


@pytest.fixture
def server(tiny_config):
    def launch_weights():
        torch.manual_seed(99)  # not the trainer's: what it samples with must have been sent to it
        return MiniMindForCausalLM(tiny_config)

    with StandIn(launch_weights) as stand_in:
        yield stand_in


def flags_of(tiny_flags, tmp_path, server, **changes):
    return tiny_flags(rollout_engine="sglang", sglang_base_url=server.url, sglang_shared_path=tmp_path / "shared",
                      max_seq_len=32, max_steps=3, **changes)  # fmt: skip


def run_lines(tmp_path, module) -> list[dict]:
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if LINES[module] in line]


@pytest.mark.parametrize("module", [train_grpo, train_ppo])
def test_every_update_reaches_the_server_before_the_next_rollout(module, server, tiny_flags, tmp_path):
    assert module.main(flags_of(tiny_flags, tmp_path, server, learning_rate=1e-3)) == 0
    lines = run_lines(tmp_path, module)
    assert [line["step"] for line in lines] == [1, 2, 3]
    # answers come from the trainer's present weights: stale ones would differ by whole nats at this learning rate
    assert max(line["sampling/logp_difference/mean"] for line in lines) < 1e-4
    versions = [body["weight_version"] for body in server.bodies("/update_weights_from_disk")]
    assert len(versions) >= 4 and len(set(versions)) == len(versions)


@pytest.mark.parametrize("module", [train_grpo, train_ppo])
def test_log_probs_at_another_temperature_are_scored_anew(module, server, tiny_flags, tmp_path):
    """The server's are at the sampling temperature; with --logp_temperature 1.0 the trainer computes its own."""
    assert module.main(flags_of(tiny_flags, tmp_path, server, logp_temperature=1.0)) == 0
    first = run_lines(tmp_path, module)[0]
    assert first["kl"] < 1e-2
    if module is train_ppo:
        assert first["sampling/logp_difference/mean"] < 1e-5


def test_a_server_that_is_not_there_is_one_line_with_its_launch_command(tiny_flags, tmp_path):
    with pytest.raises((RuntimeError, ValueError), match="sglang.launch_server"):
        train_grpo.main(tiny_flags(rollout_engine="sglang", sglang_base_url="http://127.0.0.1:9", sglang_wait=0.5,
                                   sglang_shared_path=tmp_path / "shared"))
