"""The SGLang engine against a stand-in server: what is sent, what is believed, and what happens on each fault."""

import json
import math
import os
import socket
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from model.export import transformers_config
from tests.sglang_stand_in import CONTEXT, StandIn, drop, edit, hang, reply, slow
from tests.tiny_models import prompts, tiny
from trainer.arguments import REPO_ROOT
from trainer.loading import load_tokenizer
from trainer.rollout_engine import SGLangRolloutEngine, compute_per_token_logps, create_rollout_engine
from trainer.sglang_client import Sampling, read_answer

EOS, PAD = 2, 0
KEYS = [(1, 42, 0, 3), (1, 42, 0, 4), (1, 42, 0, 5)]


@pytest.fixture
def engine_for(tokenizer, tmp_path):
    """Function of stand-ins and engine settings giving an engine, quick to try again."""

    def build(*servers, **settings):
        settings = {"timeout": 5.0, "backoff": 0.01, "wait": 5.0, **settings}
        return SGLangRolloutEngine(",".join(s.url for s in servers), None, str(tmp_path / "shared"),
                                   tokenizer=tokenizer, **settings)

    return build


@pytest.fixture
def server():
    with StandIn(tiny) as stand_in:
        yield stand_in


def roll(engine, *, generations=2, tokens=6, temperature=0.8, **settings):
    ids, mask = prompts()
    return engine.rollout(ids, mask, generations, tokens, temperature, prompt_keys=KEYS, **settings)


def changed(seed: int = 5):
    """The tiny model with other weights."""
    model = tiny()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def canned(ids, logps=None, finish=None, **meta):
    """Fault: an answer of these ids, changed as `meta` says."""
    logps = [-1.0 - j for j in range(len(ids))] if logps is None else logps
    finish = finish or ({"type": "stop", "matched": EOS} if ids[-1:] == [EOS] else {"type": "length"})
    entries = [[logp, token, None] for logp, token in zip(logps, ids)]
    return edit(lambda results: [{"output_ids": list(ids), "meta_info": {
        **results[0]["meta_info"], "completion_tokens": len(ids), "finish_reason": finish,
        "output_token_logprobs": entries, **meta}}])  # fmt: skip


# ---------------------------------------------------------------------------------------------- what is sent
@pytest.mark.parametrize("temperature", [1.0, 0.8, 0.5])
def test_log_probs_are_the_trainers(server, engine_for, temperature):
    result = roll(engine_for(server), temperature=temperature)
    width = result.completion_ids.size(1)
    ours = compute_per_token_logps(tiny(), result.output_ids, width, result.attention_mask.long(), temperature)
    ours = ours.masked_fill(~result.completion_mask, 0.0)
    torch.testing.assert_close(result.per_token_logps, ours, atol=1e-4, rtol=0)


def test_rows_shapes_and_padding(server, engine_for):
    ids, mask = prompts()
    result = roll(engine_for(server), generations=2, tokens=6)
    assert result.output_ids[:, :5].tolist() == ids.repeat_interleave(2, 0).tolist()
    assert result.attention_mask[:, :5].tolist() == mask.bool().repeat_interleave(2, 0).tolist()
    assert torch.equal(result.attention_mask[:, 5:], result.completion_mask)
    assert result.prompt_lens.tolist() == [5] * 6 and len(result.completions) == 6
    assert result.completion_ids.masked_select(~result.completion_mask).eq(PAD).all()
    assert result.per_token_logps.masked_select(~result.completion_mask).eq(0).all()
    # the server saw the prompts without their padding, each as often as it has answers
    sent = [tuple(body["input_ids"][0]) for body in server.bodies("/generate")]
    expected = [tuple(row[keep].tolist()) for row, keep in zip(ids, mask.bool())]
    assert sorted(sent) == sorted(expected * 2)


def test_every_sampling_parameter_is_sent(server, engine_for):
    roll(engine_for(server), generations=3, top_p=0.9, top_k=7)
    bodies = server.bodies("/generate")
    seeds = [body["sampling_params"].pop("sampling_seed") for body in bodies]
    assert len(set(seeds)) == 9 and all(0 <= seed < 2**31 for seed in seeds)
    assert all(body["return_logprob"] is True for body in bodies)
    for body in bodies:
        assert body["sampling_params"] == {
            "max_new_tokens": 6, "temperature": 0.8, "top_p": 0.9, "top_k": 7, "min_p": 0.0, "repetition_penalty": 1.0,
            "frequency_penalty": 0.0, "presence_penalty": 0.0, "min_new_tokens": 0, "stop_token_ids": [EOS], "n": 1,
            "ignore_eos": False, "skip_special_tokens": False, "spaces_between_special_tokens": False,
            "no_stop_trim": True,
        }  # fmt: skip


def test_no_top_k_is_minus_one_for_the_server(server, engine_for):
    roll(engine_for(server))
    assert {body["sampling_params"]["top_k"] for body in server.bodies("/generate")} == {-1}


def test_same_keys_same_answers_and_other_keys_others(server, engine_for):
    engine = engine_for(server)
    first, again = roll(engine), roll(engine)
    assert torch.equal(first.completion_ids, again.completion_ids)
    ids, mask = prompts()
    other = engine.rollout(ids, mask, 2, 6, 0.8, prompt_keys=[(9, *key) for key in KEYS])
    assert first.completion_ids.tolist() != other.completion_ids.tolist()
    # with a key, a row's answer does not depend on the others
    alone = engine.rollout(ids[1:2], mask[1:2], 2, 6, 0.8, prompt_keys=KEYS[1:2])
    assert alone.completions == first.completions[2:4]


def test_old_servers_get_no_seed_and_are_asked_by_their_old_names(tokenizer, tmp_path):
    """sampling_seed came with 0.5.3; an unknown sampling parameter is an HTTP 500 there."""
    with StandIn(tiny, version="0.5.2") as server:
        create_rollout_engine("sglang", tiny(), tokenizer, sglang_base_url=server.url, timeout=5.0,
                              sglang_shared_path=str(tmp_path))
        assert all("sampling_seed" not in body["sampling_params"] for body in server.bodies("/generate"))
    with StandIn(tiny, version="0.4.9") as server:  # no weight versions: told by the model path
        engine = create_rollout_engine("sglang", tiny(), tokenizer, sglang_base_url=server.url, timeout=5.0,
                                       sglang_shared_path=str(tmp_path))
        server.path = "/launch/folder"
        roll(engine)
        assert len(server.bodies("/update_weights_from_disk")) == 2


def test_max_new_tokens_is_clamped_to_the_context(server, engine_for):
    engine = engine_for(server)
    roll(engine, tokens=500, generations=1)
    sent = {len(body["input_ids"][0]): body["sampling_params"]["max_new_tokens"] for body in server.bodies("/generate")}
    assert sent == {5: CONTEXT - 5, 2: CONTEXT - 2, 4: CONTEXT - 4}
    full = torch.full((1, CONTEXT), 5)
    with pytest.raises(ValueError, match="prompt 0, answer 0: 64 prompt tokens leave no room"):
        engine.rollout(full, torch.ones_like(full), 1, 4)


@pytest.mark.parametrize("token", [40, 6400, -1])
def test_an_id_outside_the_vocabulary_is_never_sent(server, engine_for, token):
    """A real server dies of it as a whole."""
    engine = engine_for(server)
    engine.vocab_size = 40
    ids, mask = prompts()
    ids[1, 4] = token
    with pytest.raises(ValueError, match=rf"prompt 1, answer 0: id {token} .* from 0 to 39"):
        engine.rollout(ids, mask, 1, 4)
    assert server.bodies("/generate") == []


def test_keys_are_sent_as_bearer_and_loopback_ignores_proxies(engine_for, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with StandIn(tiny, key="normal", admin_key="admin") as server:
        with pytest.raises(RuntimeError, match="HTTP 401: Unauthorized; set SGLANG_API_KEY"):
            roll(engine_for(server))
        monkeypatch.setenv("SGLANG_API_KEY", "normal")
        monkeypatch.setenv("SGLANG_ADMIN_API_KEY", "admin")
        engine = engine_for(server)
        engine.update_policy(tiny())
        assert len(roll(engine).completions) == 6


def test_prompts_are_spread_over_servers_and_all_get_the_weights(engine_for):
    with StandIn(tiny) as first, StandIn(tiny) as second:
        engine = engine_for(first, second)
        engine.update_policy(changed())
        result = roll(engine)
        assert first.weight_version == second.weight_version == engine.versions.version
        assert [len(s.bodies("/generate")) for s in (first, second)] == [4, 2]  # prompts 0 and 2, prompt 1
        alone = engine_for(first)
        alone.update_policy(changed())
        assert torch.equal(roll(alone).completion_ids, result.completion_ids)
    with pytest.raises(ValueError, match="expected http://host:port, or several different ones"):
        SGLangRolloutEngine("http://a:1,http://a:1", None, "x")


# ---------------------------------------------------------------------------------------------- what is believed
def test_only_what_stands_before_the_first_end_counts(server, engine_for):
    server.faults["/generate"] += [canned([20, 0, 21, 2, 2], finish={"type": "length"}), canned([20, 21, 22])]
    ids, mask = prompts()
    result = engine_for(server, concurrency=1).rollout(ids[:2], mask[:2], 1, 5)
    assert result.completion_mask.tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 0, 0]]
    assert result.completion_ids.tolist() == [[20, 0, 21, 2, 0], [20, 21, 22, 0, 0]]
    assert result.per_token_logps.tolist() == [[-1, -2, -3, -4, 0], [-1, -2, -3, 0, 0]]
    assert result.finished.tolist() == [True, False]


NO_LOGPROBS = edit(lambda results: [{"text": "hello", "output_ids": [5], "meta_info": {
    "finish_reason": {"type": "length"}, "completion_tokens": 1}}])  # fmt: skip
BAD_ANSWERS = {
    "one log-prob too few": (canned([20, 21, 22, 2], [-1.0, -2.0, -3.0]), "3 log-probs .* completion_tokens says 4"),
    "the same, not said": (canned([20, 21, 22, 2], [-1.0, -2.0, -3.0], completion_tokens=None), "output_ids says 4"),
    "null": (canned([20, 21], [-1.0, None]), "log-prob 1 of 2 is None"),
    "nan": (canned([20, 21], [math.nan, -1.0]), "log-prob 0 of 2 is nan"),
    "infinite": (canned([20], [-math.inf]), "log-prob 0 of 1 is -inf"),
    "above 0": (canned([20], [0.5]), "log-prob 0 of 1 is 0.5"),
    "text only": (NO_LOGPROBS, "no output_token_logprobs"),
    "empty": (canned([]), "the answer is empty"),
    "aborted": (canned([20], finish={"type": "abort", "message": "Aborted"}), "not whole: .*abort"),
    "no reason": (edit(lambda r: [{"meta_info": {**r[0]["meta_info"], "finish_reason": None}}]), "finish_reason None"),
    "other ids": (edit(lambda r: [{**r[0], "output_ids": [9] * len(r[0]["output_ids"])}]), "output_ids .* differ"),
    "unknown id": (canned([20, 999]), "token 1 is 999: expected an id from 0 to"),
    "too many": (canned([20] * 9), "9 tokens came back, at most 6"),
    "another end": (canned([20, 7], finish={"type": "stop", "matched": 7}), "stopped at 7, but .* is 2"),
    "no result": (edit(lambda results: []), "0 results came back, 1 was asked for"),
    "two results": (edit(lambda results: results * 2), "2 results came back"),
    "no object": (edit(lambda results: ["hello"]), "no meta_info"),
    "not JSON": (reply(200, "<html>"), "HTTP 200, but not JSON: '<html>'"),
    "400": (reply(400, {"error": {"message": "bad top_p"}}), "HTTP 400: bad top_p"),
    "400 of the schema": (reply(400, {"error": "unknown field `foo`"}), "HTTP 400: unknown field `foo`"),
    "400 of pydantic": (reply(400, {"object": "error", "message": "no input", "code": 400}), "HTTP 400: no input"),
    "404": (reply(404, {"detail": "Not Found"}), "HTTP 404: Not Found"),
}


@pytest.mark.parametrize("name", BAD_ANSWERS)
def test_an_answer_that_is_not_whole_is_an_error_that_names_it(server, engine_for, name):
    """Nothing is padded or shifted ([0, -1, -2, -3] for three log-probs of four tokens), and nothing is asked twice."""
    fault, words = BAD_ANSWERS[name]
    server.faults["/generate"] = [fault]
    ids, mask = prompts()
    engine = engine_for(server)
    engine.vocab_size = 40
    with pytest.raises(RuntimeError, match=f"{server.url}: prompt 0, answer 0: .*{words}"):
        engine.rollout(ids[:1], mask[:1], 1, 6, prompt_keys=KEYS[:1])
    assert len(server.bodies("/generate")) == 1


def test_read_answer_takes_ids_from_the_log_probs():
    """Before 0.4.9 there is no output_ids; the empty completions that gives a naive reader would train on nothing."""
    entries = [[-0.5, 7, None], [-0.25, 2, "x"]]
    meta = {"finish_reason": {"type": "stop", "matched": 2}, "output_token_logprobs": entries}
    answer = read_answer({"meta_info": meta}, 4, 40, Sampling(4, 1.0, 1.0, 0, 2))
    assert answer.ids == [7, 2] and answer.logps == [-0.5, -0.25]


# ---------------------------------------------------------------------------------------------- what goes wrong
@pytest.mark.parametrize("fault", [drop, reply(500, "Internal Server Error", "text/plain"), reply(502, "")])
def test_a_passing_fault_is_tried_again(server, engine_for, fault):
    expected = roll(engine_for(server))
    server.faults["/generate"] = [fault, fault]
    assert torch.equal(roll(engine_for(server)).completion_ids, expected.completion_ids)


def test_a_server_that_keeps_failing_is_one_clear_error(server, engine_for):
    server.faults["/generate"] = [reply(500, "Internal Server Error", "text/plain")] * 100
    with pytest.raises(RuntimeError, match=f"{server.url}/generate: HTTP 500: Internal Server Error"):
        roll(engine_for(server, concurrency=1))
    assert len(server.bodies("/generate")) == 4


def test_a_connection_that_the_server_closed_meanwhile_is_no_error(engine_for):
    with StandIn(tiny, idle_seconds=0.05) as server:
        engine = engine_for(server)
        roll(engine)
        time.sleep(0.3)
        assert len(roll(engine).completions) == 6


def test_a_server_that_hangs_is_an_error_in_bounded_time(server, engine_for):
    server.faults["/generate"] = [hang(30)] * 20
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="no answer in 1 s, 2 times: the server hangs"):
        roll(engine_for(server, timeout=0.2), tokens=2)
    assert time.monotonic() - began < 5


def test_a_slow_server_has_time_for_every_token(server, engine_for):
    """0.1 s a request, and 0.25 s for each of 4 tokens."""
    server.faults["/generate"] = [slow(0.5)]
    assert len(roll(engine_for(server, timeout=0.1), tokens=4).completions) == 6


def test_a_missing_server_is_waited_for_then_named_with_its_launch_command(tokenizer, tmp_path, capsys):
    stand_in = StandIn(tiny).start()
    stand_in.kill()
    settings = {"sglang_base_url": stand_in.url, "sglang_shared_path": str(tmp_path), "timeout": 5.0, "wait": 0.3,
                "backoff": 0.01}  # fmt: skip
    launch = f"python -m sglang.launch_server --model-path MODEL_FOLDER --port {stand_in.port} --dtype float32"
    with pytest.raises(RuntimeError, match=f"no SGLang server answers at {stand_in.url} .*{launch}"):
        create_rollout_engine("sglang", tiny(), tokenizer, **settings)
    assert f"waiting for the SGLang server at {stand_in.url}: 0 of 0 s" in capsys.readouterr().out
    threading.Timer(0.3, stand_in.start).start()
    assert create_rollout_engine("sglang", tiny(), tokenizer, **{**settings, "wait": 10.0}).health()
    stand_in.kill()


def test_health_and_flush_cache(server, engine_for):
    engine = engine_for(server)
    assert engine.health() and engine.flush_cache()
    server.faults["/flush_cache"] = [reply(400, "running requests", "text/plain")]
    assert engine.flush_cache()
    server.kill()
    assert not engine.health()


def test_a_server_killed_in_the_middle_of_a_step_changes_nothing(engine_for, capsys):
    """It comes back with its launch weights: those of the trainer are sent again and the step is repeated."""
    with StandIn(tiny) as server:
        engine = engine_for(server, concurrency=2)
        engine.update_policy(changed())
        expected = roll(engine)

        def die(handler, body):
            server.kill()
            threading.Timer(1.0, server.start).start()  # longer than all attempts together
            return True

        server.faults["/generate"] = [lambda *_: None, lambda *_: None, die]
        result = roll(engine)
        assert torch.equal(result.completion_ids, expected.completion_ids)
        assert torch.equal(result.per_token_logps, expected.per_token_logps)
        pushed = server.bodies("/update_weights_from_disk")
        assert len(pushed) == 2 and pushed[0] == pushed[1]
        assert "the step is repeated" in capsys.readouterr().out


def test_a_server_restarted_between_steps_gets_the_weights_before_it_samples(server, engine_for):
    engine = engine_for(server)
    engine.update_policy(changed())
    expected = roll(engine)
    server.kill()
    server.start()
    assert torch.equal(roll(engine).completion_ids, expected.completion_ids)
    assert len(server.bodies("/update_weights_from_disk")) == 2


def test_answers_of_other_weights_are_not_used(server, engine_for):
    """A server that restarted so fast that no request failed: its answers carry the weight version of its launch."""
    engine = engine_for(server, concurrency=1)
    engine.update_policy(changed())
    expected = roll(engine)

    def forget(handler, body):
        server.model, server.weight_version = tiny(), "default"

    server.faults["/generate"] = [forget]
    assert torch.equal(roll(engine).completion_ids, expected.completion_ids)


def test_a_server_that_dies_every_time_is_an_error(server, engine_for):
    server.faults["/generate"] = [drop] * 1000
    with pytest.raises(RuntimeError, match="it was lost 4 times in this step: see its log"):
        roll(engine_for(server))


def test_a_starting_server_that_says_503_is_waited_for(server, engine_for):
    server.faults["/generate"] = [reply(503, "")] * 5
    server.faults["/health"] = [reply(503, "")] * 2
    assert len(roll(engine_for(server, concurrency=1)).completions) == 6


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
