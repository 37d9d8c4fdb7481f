"""The SGLang engine against a stand-in server: weights that are pushed, checks at the start, several ranks."""

import json
import math
import os
import socket
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from model.export import transformers_config
from tests.sglang_stand_in import KEYS, StandIn, build_engine, changed, reply, roll
from tests.tiny_models import prompts, tiny
from trainer.arguments import REPO_ROOT
from trainer.loading import load_tokenizer
from trainer.rollout_engine import SGLangRolloutEngine, compute_per_token_logps, create_rollout_engine


@pytest.fixture
def engine_for(tokenizer, tmp_path):
    """Function of stand-ins and engine settings giving an engine, quick to try again."""
    return partial(build_engine, tokenizer, tmp_path / "shared")


@pytest.fixture
def server():
    with StandIn(tiny) as stand_in:
        yield stand_in


# ---------------------------------------------------------------------------------------------- weights
def test_every_update_is_pushed_checked_and_followed_by_the_log_probs(server, engine_for, tmp_path):
    engine, versions = engine_for(server), []
    for seed in (3, 4, 5, 6):
        model = changed(seed)
        engine.update_policy(model)
        versions.append(server.weight_version)
        result = roll(engine)
        ours = compute_per_token_logps(model, result.output_ids, result.completion_ids.size(1),
                                       result.attention_mask.long(), 0.8).masked_fill(~result.completion_mask, 0.0)
        torch.testing.assert_close(result.per_token_logps, ours.detach(), atol=1e-4, rtol=0)
    assert len(set(versions)) == 4 and versions[-1] == engine.versions.version
    for body in server.bodies("/update_weights_from_disk"):
        assert body["flush_cache"] is True and body["abort_all_requests"] is True and body["load_format"] == "auto"
        assert isinstance(body["weight_version"], str)
    paths = [path for path, _ in server.requests if path in ("/generate", "/update_weights_from_disk")]
    assert paths == (["/update_weights_from_disk"] + ["/generate"] * 6) * 4
    # the last two versions are kept, and nothing half written
    kept = sorted(path.name for path in (tmp_path / "shared").rglob("v*"))
    assert kept == ["v000003", "v000004"]
    assert {path.name for path in engine.versions.folder.iterdir()} == {"model.safetensors", "config.json",
                                                                      "generation_config.json"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_travel_in_the_training_dtype(server, engine_for, dtype):
    engine, model = engine_for(server, dtype=dtype), changed()
    with torch.no_grad():
        model.model.norm.weight[0] = 1.0 + 3e-6  # float16 would make it 1
    engine.update_policy(SimpleNamespace(_orig_mod=model))  # as torch.compile wraps it
    written = load_file(engine.versions.folder / "model.safetensors")
    assert set(written) == set(model.state_dict())
    for name, tensor in model.state_dict().items():
        assert torch.equal(written[name], tensor.to(getattr(torch, dtype)))


def test_only_every_nth_update_is_pushed_and_sync_pushes_the_rest(server, engine_for):
    engine, pushed = engine_for(server, sync_interval=3), []
    for seed in range(5):
        engine.update_policy(changed(seed))
        pushed.append(len(server.bodies("/update_weights_from_disk")))
    assert pushed == [1, 1, 1, 2, 2]
    engine.sync()
    engine.sync()
    assert len(server.bodies("/update_weights_from_disk")) == 3
    assert torch.equal(server.model.lm_head.weight, changed(4).lm_head.weight)


REFUSALS = {
    "400": (reply(400, {"success": False, "message": "Repo id must be in the form"}), "Repo id must be .*shared_path"),
    "success false": (reply(200, {"success": False, "message": "no"}), "HTTP 200, but success is not true"),
    "no success": (reply(200, {"message": "ok"}), "success is not true"),
    "another version": (reply(200, {"success": True}), "reported success, but does not have version"),
    "500": (reply(500, "Internal Server Error", "text/plain"), "HTTP 500: Internal Server Error"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refused_update_is_an_error(server, engine_for, name):
    fault, words = REFUSALS[name]
    server.faults["/update_weights_from_disk"] = [fault] * 4
    with pytest.raises(RuntimeError, match=f"{server.url}.*{words}"):
        engine_for(server).update_policy(changed())


def test_a_cache_that_was_not_flushed_is_flushed(server, engine_for):
    """The new weights are live, and the old cache would answer for the weights of before."""

    def loaded_but_not_flushed(handler, body):
        server.update(handler, body)
        message = "Weights were updated, but the cache was not flushed."
        return handler.send_body(400, {"success": False, "message": message})

    server.faults["/update_weights_from_disk"] = [loaded_but_not_flushed]
    engine_for(server).update_policy(changed())
    assert len(server.bodies("/flush_cache")) == 1


def test_weights_that_would_kill_a_server_are_never_sent(server, engine_for):
    engine = engine_for(server)
    engine.update_policy(changed())
    broken = changed()
    with torch.no_grad():
        broken.model.norm.weight[3] = math.nan
    with pytest.raises(ValueError, match="model.norm.weight holds a NaN"):
        engine.update_policy(broken)
    with pytest.raises(ValueError, match="mlp.gate.weight is missing|mlp.gate_proj.weight is missing"):
        engine.update_policy(tiny(use_moe=True))
    with pytest.raises(ValueError, match=r"model.embed_tokens.weight is \(50, 32\); expected \(40, 32\)"):
        engine.update_policy(tiny(vocab_size=50))
    with pytest.raises(ValueError, match="the policy is a Linear"):
        engine.update_policy(torch.nn.Linear(2, 2))
    assert len(server.bodies("/update_weights_from_disk")) == 1


def test_folders_of_dead_runs_are_removed_and_those_of_others_stay(server, engine_for, tmp_path):
    living = engine_for(server)
    living.update_policy(changed())
    dead = tmp_path / "shared" / "run-dead"
    dead.mkdir()
    (dead / ".lock").write_text("")
    (tmp_path / "shared" / "notes").mkdir()
    engine_for(server).update_policy(changed())
    assert living.versions.folder.is_dir() and not dead.exists() and (tmp_path / "shared" / "notes").is_dir()


def test_a_folder_that_cannot_be_used_is_named(server, engine_for, tmp_path):
    (tmp_path / "shared").write_text("a file")
    with pytest.raises(RuntimeError, match="cannot use .*shared for weights.*--sglang_shared_path"):
        engine_for(server).update_policy(changed())
    assert server.bodies("/update_weights_from_disk") == []


# ---------------------------------------------------------------------------------------------- the start
def start(tokenizer, tmp_path, server, model=None, **settings):
    return create_rollout_engine("sglang", model or changed(), tokenizer, sglang_base_url=server.url, timeout=5.0,
                                 sglang_shared_path=str(tmp_path / "shared"), backoff=0.01, **settings)


@pytest.mark.parametrize(("original", "convention", "at"), [(False, "sampling", 0.8), (True, "one", 1.0)])
def test_the_temperature_of_log_probs_is_measured(tokenizer, tmp_path, original, convention, at):
    with StandIn(tiny, original_logprob=original) as server:
        engine = start(tokenizer, tmp_path, server)
        assert engine.logp_convention == convention and engine.logps_temperature(0.8) == at
        assert engine.logps_temperature(0.0) == 1.0
        assert len(server.bodies("/generate")) == 2
        assert [engine.must_recompute(0.8, t) for t in (0.8, 1.0)] == [at != 0.8, at != 1.0]
        other = 1.8 - at
        engine.recompute_logps = "1"
        assert engine.must_recompute(0.8, at)
        engine.recompute_logps = "0"
        assert not engine.must_recompute(0.8, at)
        with pytest.raises(ValueError, match=f"log-probs are at temperature {at:g}, the trainer's at {other:g}"):
            engine.must_recompute(0.8, other)


def test_where_it_cannot_be_told_the_trainer_recomputes(tokenizer, tmp_path):
    def flat():
        return tiny(initializer_range=1e-4)  # all tokens equally likely, at any temperature

    with StandIn(flat) as server:
        engine = start(tokenizer, tmp_path, server, flat())
        assert engine.logp_convention == "unknown" and engine.logps_temperature(0.8) is None
        assert engine.must_recompute(0.8, 0.8)


def test_a_server_that_computes_another_model_is_found_out(tokenizer, tmp_path):
    with StandIn(tiny, updates=False) as server:  # success, but other weights: as MoE without lm_head.weight
        with pytest.raises(RuntimeError, match="nats from the trainer's on average: it computes another model"):
            start(tokenizer, tmp_path, server)


@pytest.mark.parametrize(("change", "words"), [({"hidden_size": 64}, "hidden_size is 64, .* has 32"),
                                               ({"vocab_size": 6400}, "vocab_size is 6400, .* has 40")])
def test_another_launch_folder_is_refused_before_weights_are_sent(tokenizer, tmp_path, change, words):
    """Weights of other sizes kill a real server."""
    folder = tmp_path / "launch"
    folder.mkdir()
    content = transformers_config(tiny().config, "float32") | change
    (folder / "config.json").write_text(json.dumps(content))
    with StandIn(tiny, model_path=str(folder)) as server:
        with pytest.raises(ValueError, match=f"{server.url} serves {folder}: its {words}"):
            start(tokenizer, tmp_path, server)
        with pytest.raises(ValueError, match=f"--sglang_model_path {folder}: its {words}"):
            start(tokenizer, tmp_path, server, sglang_model_path=str(folder))
        assert server.bodies("/update_weights_from_disk") == []
    with StandIn(tiny) as server:
        server.info = {"model_type": "llama"}
        with pytest.raises(ValueError, match="serves a llama, the model being trained is a qwen3"):
            start(tokenizer, tmp_path, server)


def test_settings_out_of_range_are_named(engine_for, server):
    with pytest.raises(ValueError, match="float32 or bfloat16"):
        engine_for(server, dtype="float16")
    with pytest.raises(ValueError, match="--recompute_logps 'yes'"):
        engine_for(server, recompute_logps="yes")
    for url in ("localhost:8998", "http://", "http://host:port", "ftp://host:1"):
        with pytest.raises(ValueError, match="expected http://host:port"):
            SGLangRolloutEngine(url, None, "x", tokenizer=object())
    with pytest.raises(ValueError, match="needs a tokenizer"):
        SGLangRolloutEngine("http://localhost:8998", None, "x")


# ---------------------------------------------------------------------------------------------- several ranks
def rank_main(rank: int, port: int, url: str, shared: str, results) -> None:
    """One of two ranks: start, roll out its own prompt, then meet an error."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    tokenizer = load_tokenizer(str(REPO_ROOT / "model"))
    engine = create_rollout_engine("sglang", changed(), tokenizer, sglang_base_url=url, sglang_shared_path=shared,
                                   timeout=5.0, backoff=0.01)  # fmt: skip
    ids, mask = prompts()
    mine = slice(rank, rank + 1)
    first = engine.rollout(ids[mine], mask[mine], 2, 6, 0.8, prompt_keys=KEYS[mine])
    errors = []
    ids[1, 4] = 5000  # a prompt of rank 1
    for batch in (ids[mine], ids[:1]):
        try:
            engine.rollout(batch, mask[:1], 1, 6, 0.8)  # the second time the server fails
        except (ValueError, RuntimeError) as error:
            errors.append((type(error).__name__, str(error)))
    results.put((rank, first.completion_ids.tolist(), first.per_token_logps.tolist(), engine.logp_convention, errors))
    torch.distributed.destroy_process_group()


def test_two_ranks_get_their_own_answers_and_the_same_errors(server, engine_for, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    sent = []
    # two probes, four answers, then errors for good
    server.faults["/generate"] = [lambda *_: sent.append(1)] * 6 + [reply(500, "broken", "text/plain")] * 99
    context = torch.multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    ranks = [context.Process(target=rank_main, args=(rank, port, server.url, str(tmp_path / "ranks"), results))
             for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
        assert process.exitcode == 0
    answers = sorted(results.get() for _ in ranks)
    server.faults["/generate"] = []
    alone = engine_for(server)
    alone.update_policy(changed())
    expected = roll(alone)
    for rank, ids, logps, convention, errors in answers:
        rows = slice(2 * rank, 2 * rank + 2)
        width = len(ids[0])
        assert ids == expected.completion_ids[rows, :width].tolist() and convention == "sampling"
        assert expected.completion_mask[rows, width:].sum() == 0
        torch.testing.assert_close(torch.tensor(logps), expected.per_token_logps[rows, :width], atol=1e-5, rtol=0)
        assert [kind for kind, _ in errors] == ["ValueError", "ServerError" if rank == 0 else "RuntimeError"]
        assert "prompt 0 of rank 1, answer 0: id 5000" in errors[0][1] and "HTTP 500: broken" in errors[1][1]
    assert answers[0][4][0] == answers[1][4][0] and answers[0][4][1][1] == answers[1][4][1][1]
    assert len(server.bodies("/update_weights_from_disk")) == 2  # rank 0's, and `alone`'s
