"""The SGLang engine against a stand-in server: what is sent, what is believed, and what happens on each fault."""

import math
import threading
import time
from functools import partial

import pytest
import torch

from tests.sglang_stand_in import (
    CONTEXT, KEYS, StandIn, build_engine, changed, drop, edit, hang, reply, roll, slow,
)  # fmt: skip
from tests.tiny_models import prompts, tiny
from trainer.rollout_engine import SGLangRolloutEngine, compute_per_token_logps, create_rollout_engine
from trainer.sglang_client import Sampling, read_answer

EOS, PAD = 2, 0


@pytest.fixture
def engine_for(tokenizer, tmp_path):
    """Function of stand-ins and engine settings giving an engine, quick to try again."""
    return partial(build_engine, tokenizer, tmp_path / "shared")


@pytest.fixture
def server():
    with StandIn(tiny) as stand_in:
        yield stand_in


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
    answer = read_answer({"meta_info": meta}, 4, 40, Sampling(4, 1.0, 1.0, 0, (2,)))
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
