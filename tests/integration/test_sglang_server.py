"""The SGLang engine against a real server. Skipped unless SGLANG_TEST_URL names one; `scripts/sglang_smoke.sh` runs it.

SGLANG_TEST_URL        http://host:port of a server launched from a folder that scripts/convert_model.py wrote
SGLANG_TEST_MODEL      that folder, as this machine sees it
SGLANG_TEST_RESTART    optional: a command that kills the server with -9 and launches it again in the background
SGLANG_TEST_TOLERANCE  largest difference of log-probs; 1e-4 for a server in float32, which is the default
"""

import os
import subprocess
import threading
from pathlib import Path

import pytest
import torch

from model.export import read_folder
from model.model_minimind import MiniMindForCausalLM
from trainer.rollout_engine import compute_per_token_logps, create_rollout_engine

URL, FOLDER = os.environ.get("SGLANG_TEST_URL"), os.environ.get("SGLANG_TEST_MODEL", "")
RESTART, TOLERANCE = os.environ.get("SGLANG_TEST_RESTART"), float(os.environ.get("SGLANG_TEST_TOLERANCE", "1e-4"))
pytestmark = pytest.mark.skipif(not URL, reason="SGLANG_TEST_URL names no server")
PROMPTS = torch.tensor([[0, 0, 0, 1, 40, 41, 42], [1, 43, 44, 45, 46, 47, 48], [0, 1, 49, 50, 51, 52, 53]])
MASK = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 1]])


def policy(noise: float = 0.0, seed: int = 0) -> MiniMindForCausalLM:
    """The model of the launch folder, its weights moved by `noise` times their own spread."""
    state, config = read_folder(Path(FOLDER))
    model = MiniMindForCausalLM(config)
    model.load_state_dict({name: tensor.float() for name, tensor in state.items()})
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(noise * parameter.std() * torch.randn(parameter.shape, generator=generator))
    return model.eval()


@pytest.fixture
def engine(tokenizer, tmp_path):
    """An engine whose server has the launch folder's weights."""
    return create_rollout_engine("sglang", policy(), tokenizer, sglang_base_url=URL, sglang_model_path=FOLDER,
                                 sglang_shared_path=str(tmp_path / "shared"), wait=300.0)


@torch.no_grad()
def largest_difference(model, result, temperature: float) -> float:
    """Between the log-probs in a rollout and the trainer's own, in nats, over counted tokens."""
    ours = compute_per_token_logps(model, result.output_ids, result.completion_ids.size(1),
                                   result.attention_mask.long(), temperature)
    return (ours - result.per_token_logps)[result.completion_mask].abs().max().item()


@pytest.mark.parametrize("temperature", [1.0, 0.8, 0.5])
def test_log_probs_are_the_trainers(engine, temperature):
    result = engine.rollout(PROMPTS, MASK, 4, 24, temperature)
    gap = largest_difference(policy(), result, engine.logps_temperature(temperature))
    print(f"temperature {temperature}: {int(result.completion_mask.sum())} tokens, log-probs within {gap:.2g}")
    assert gap <= TOLERANCE


def test_greedy_answers_are_the_trainers(engine):
    result = engine.rollout(PROMPTS, MASK, 2, 12, 0.0)
    assert torch.equal(result.completion_ids[0::2], result.completion_ids[1::2])
    assert largest_difference(policy(), result, 1.0) <= TOLERANCE


def test_weights_and_their_version_follow_every_update(engine):
    versions = set()
    for seed in range(4):
        model = policy(noise=0.1, seed=seed)
        engine.update_policy(model)
        versions.add(engine.servers[0].learn()["weight_version"])
        result = engine.rollout(PROMPTS, MASK, 2, 16, 0.8)
        gap, stale = (largest_difference(m, result, engine.logps_temperature(0.8)) for m in (model, policy()))
        print(f"update {seed}: log-probs within {gap:.2g} of the new weights, {stale:.2g} of the old")
        assert gap <= TOLERANCE < stale
    assert len(versions) == 4 and engine.versions.version in versions


def test_errors_of_the_server_name_the_request(engine):
    with pytest.raises(RuntimeError, match="prompt 0, answer 0: HTTP 400"):
        engine.rollout(PROMPTS, MASK, 1, 4, -1.0)
    with pytest.raises(ValueError, match="id -44 in the prompt"):
        engine.rollout(PROMPTS - 45, MASK, 1, 4, 1.0)
    assert engine.health() and engine.flush_cache()


def test_an_answer_stops_at_the_end_token_or_at_the_limit(engine, tokenizer):
    result = engine.rollout(PROMPTS, MASK, 8, 64, 1.0)
    last = result.completion_mask.sum(1) - 1
    ended = result.completion_ids.gather(1, last[:, None])[:, 0] == tokenizer.eos_token_id
    assert torch.equal(ended, result.finished) and (last[~ended] == 63).all()


@pytest.mark.skipif(not RESTART, reason="SGLANG_TEST_RESTART gives no command that kills and relaunches the server")
def test_kill_minus_nine_in_the_middle_of_a_step(engine, capfd):
    model = policy(noise=0.1, seed=9)
    engine.update_policy(model)
    timer = threading.Timer(1.0, lambda: subprocess.run(RESTART, shell=True, check=True))
    timer.start()
    result = engine.rollout(PROMPTS, MASK, 64, 400, 1.0)
    timer.join()
    again = engine.rollout(PROMPTS, MASK, 2, 16, 1.0)
    for answers in (result, again):
        assert largest_difference(model, answers, engine.logps_temperature(1.0)) <= TOLERANCE
    assert "the step is repeated" in capfd.readouterr().out
