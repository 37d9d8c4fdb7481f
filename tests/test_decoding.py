"""Decoding: equal to a loop that reads everything again, one row never depends on another."""

import math

import pytest
import torch
from tiny_models import answers, prompts, tiny, uniforms

from model import decode_step, decoding
from model.decode_step import DecodeStep
from model.kv_cache import KVCache

LIST = torch.tensor


@pytest.fixture(autouse=True)
def groups_pay_off(monkeypatch):
    """Several answers to a prompt share a cache in these tests, however short the prompt is."""
    monkeypatch.setattr(decode_step, "FEW_TOKENS", 0)


@torch.no_grad()
def read_everything_again(model, prompt, row_uniforms, steps, *, temperature=1.0, eos=(2,), penalty=1.0):
    """One answer the slow way, as a list, with plain Python arithmetic for the draw: (tokens, logps at temperature)."""
    tokens, answer, logps = list(prompt), [], []
    for step in range(steps):
        logits = model(LIST([tokens])).logits[0, -1]
        scores = logits.tolist()
        for token in set(tokens):
            scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
        if temperature == 0:
            token = max(range(len(scores)), key=scores.__getitem__)
        else:
            weights = [math.exp(score / temperature) for score in scores]
            left = float(row_uniforms[step]) * sum(weights)
            token = 0
            while left >= weights[token]:
                left -= weights[token]
                token += 1
        logps.append((logits / (temperature or 1.0)).log_softmax(-1)[token].item())
        tokens.append(token)
        answer.append(token)
        if token in eos:
            break
    return answer, logps


# ---- the loop ----


def test_a_loss_may_be_made_of_what_was_decoded():
    """Decoding runs in inference mode, whose tensors autograd refuses."""
    decoded = tiny().decode(*prompts(), max_new_tokens=5)
    weight = torch.ones((), requires_grad=True)
    (decoded.logps * weight * decoded.mask).sum().backward()
    assert weight.grad == decoded.logps.sum() and not any(x.is_inference() for x in decoded)


@pytest.mark.parametrize("use_moe", [False, True])
@pytest.mark.parametrize(("temperature", "penalty"), [(1.0, 1.0), (0.7, 1.0), (0.0, 1.0), (1.3, 1.4), (0.0, 1.5)])
def test_equals_a_loop_that_reads_everything_again(use_moe, temperature, penalty):
    """Padded prompts, several answers each, endings at different steps (three ids end an answer)."""
    model = tiny(use_moe=use_moe)
    ids, mask = prompts()
    u = uniforms(9)
    eos = [2, 20, 30]
    decoded = model.decode(
        ids,
        mask,
        num_generations=3,
        max_new_tokens=20,
        temperature=temperature,
        repetition_penalty=penalty,
        eos_token_id=eos,
        uniforms=u,
    )
    for i, answer in enumerate(answers(decoded)):
        prompt = ids[i // 3][mask[i // 3].bool()].tolist()
        want, logps = read_everything_again(model, prompt, u[i], 20, temperature=temperature, eos=eos, penalty=penalty)
        assert answer == want, i
        torch.testing.assert_close(decoded.logps[i, : len(want)], LIST(logps), atol=1e-4, rtol=0)
        assert bool(decoded.finished[i]) == (want[-1] in eos)
    if temperature == 1.0:
        lengths = decoded.mask.sum(dim=1)
        assert len(set(lengths.tolist())) >= 4, "the case must end rows at different steps"
        assert decoded.finished.any() and not decoded.finished.all()


@pytest.mark.parametrize("logp_temperature", [None, 1.0, 2.0])
def test_logps_equal_a_full_forward_over_the_padded_batch(logp_temperature):
    model = tiny()
    ids, mask = prompts()
    decoded = model.decode(
        ids,
        mask,
        num_generations=2,
        max_new_tokens=12,
        temperature=0.8,
        top_k=7,
        top_p=0.9,
        repetition_penalty=1.2,
        uniforms=uniforms(6),
        logp_temperature=logp_temperature,
    )
    width = decoded.completion_ids.shape[1]
    whole = torch.cat([ids.repeat_interleave(2, 0), decoded.completion_ids], dim=1)
    whole_mask = torch.cat([mask.repeat_interleave(2, 0).bool(), decoded.mask], dim=1)
    logits = model(whole, attention_mask=whole_mask, logits_to_keep=width + 1).logits[:, :-1]
    logps = (logits / (logp_temperature or 0.8)).log_softmax(-1).gather(-1, decoded.completion_ids[..., None])
    want = logps.squeeze(-1).masked_fill(~decoded.mask, 0.0)
    torch.testing.assert_close(decoded.logps, want, atol=1e-4, rtol=0)
    assert decoded.logps.dtype == torch.float32


@pytest.mark.parametrize(("share", "unit"), [(1e-9, 8), (1e-9, 2), (1e-9, 5), (0.3, 8), (1.0, 8)])
def test_a_row_depends_on_its_own_uniforms_only(share, unit, monkeypatch):
    """Alone, together, in another order, dropped from the batch early or late: always the same answer."""
    model = tiny()
    ids, mask = prompts()
    u = uniforms(12)
    settings = {"max_new_tokens": 24, "eos_token_id": [2, 20, 30]}
    monkeypatch.setattr(decoding, "COMPACT_SHARE", share)
    monkeypatch.setattr(decoding, "ROW_UNIT", unit)
    together = model.decode(ids, mask, num_generations=4, uniforms=u, **settings)
    assert len({len(answer) for answer in answers(together)}) >= 4
    for i in range(12):
        one = slice(i // 4, i // 4 + 1)
        alone = model.decode(ids[one], mask[one], uniforms=u[i : i + 1], **settings)
        assert answers(alone)[0] == answers(together)[i]
        assert bool(alone.finished[0]) == bool(together.finished[i])
    backwards = LIST([2, 1, 0])
    turned = model.decode(ids[backwards], mask[backwards], num_generations=4, uniforms=u.flip(0), **settings)
    assert answers(turned)[::-1] == answers(together)
    wide = torch.nn.functional.pad(ids, (6, 3), value=1)
    wide_mask = torch.nn.functional.pad(mask, (6, 3), value=0)
    padded = model.decode(wide, wide_mask, num_generations=4, uniforms=u, **settings)
    assert padded.completion_ids.equal(together.completion_ids)


def test_large_batches_come_in_few_sizes():
    assert [decoding.rows_kept(n) for n in (1, 5, 15, 16, 17, 24, 25, 127)] == [1, 5, 15, 16, 24, 24, 32, 128]


def test_prompts_are_read_once_and_ended_rows_leave(monkeypatch):
    model = tiny()
    ids, mask = prompts()
    read, running = [], []
    handle = model.model.register_forward_pre_hook(lambda module, args: read.append(tuple(args[0].shape)))
    step = DecodeStep.__call__
    monkeypatch.setattr(DecodeStep, "__call__", lambda self, token: running.append(len(token)) or step(self, token))
    decoded = model.decode(
        ids, mask, num_generations=4, max_new_tokens=24, uniforms=uniforms(12), eos_token_id=list(range(2, 12))
    )
    handle.remove()
    steps = decoded.completion_ids.shape[1]
    assert read == [(3, 5)] and len(running) == steps - 1  # the last token is never read
    assert running == sorted(running, reverse=True) and running[0] <= 12 and running[-1] <= 3


def test_nothing_follows_the_end():
    model = tiny()
    ids, mask = prompts()
    steps = []
    decoded = model.decode(
        ids,
        mask,
        num_generations=4,
        max_new_tokens=30,
        pad_token_id=33,
        uniforms=uniforms(12, 30),
        eos_token_id=[2, 20],
        on_token=steps.append,
    )
    assert torch.stack(steps, dim=1).equal(decoded.completion_ids)
    for row, logps, keep, finished in zip(*decoded[:3], decoded.finished, strict=True):
        length = int(keep.sum())
        assert keep[:length].all() and not keep[length:].any()
        assert row[length:].eq(33).all() and logps[length:].eq(0).all() and logps[:length].lt(0).all()
        assert not torch.isin(row[: length - 1], LIST([2, 20])).any()
        assert bool(finished) == (row[length - 1].item() in (2, 20))
        assert finished or length == decoded.completion_ids.shape[1] == 30


def test_ends_at_the_first_token_and_stops_when_all_rows_ended():
    model = tiny()
    ids, mask = prompts()
    first = model.decode(ids, mask, max_new_tokens=9, uniforms=uniforms(3), eos_token_id=list(range(40)))
    assert first.completion_ids.shape == (3, 1) and first.finished.all() and first.mask.all()
    cut = model.decode(ids, mask, max_new_tokens=4, uniforms=uniforms(3), eos_token_id=[])
    assert cut.completion_ids.shape == (3, 4) and not cut.finished.any() and cut.mask.all()
    one = model.decode(ids, mask, max_new_tokens=1, uniforms=uniforms(3))
    assert one.completion_ids.shape == (3, 1)
    assert first.completion_ids.equal(one.completion_ids)


def test_answers_fill_the_context_exactly():
    model = tiny(max_position_embeddings=10)
    ids, mask = prompts()
    decoded = model.decode(ids, mask, max_new_tokens=5, eos_token_id=[])
    assert decoded.completion_ids.shape == (3, 5)
    with pytest.raises(ValueError, match="max_position_embeddings 10"):
        model.decode(ids, mask, max_new_tokens=6)


def test_mode_and_gradients_are_left_alone():
    model = tiny(dropout=0.5, use_moe=True)
    ids, mask = prompts()
    evaluated = model.decode(ids, mask, max_new_tokens=8, uniforms=uniforms(3))
    model.train()
    model.model.layers[0].eval()
    trained = model.decode(ids, mask, max_new_tokens=8, uniforms=uniforms(3))
    assert trained.completion_ids.equal(evaluated.completion_ids) and trained.logps.equal(evaluated.logps)
    assert model.training and model.model.layers[1].mlp.training and not model.model.layers[0].mlp.training
    assert not trained.logps.requires_grad


def test_the_update_keeps_its_gradient_after_decoding_in_one_autocast():
    """Autocast keeps half-precision copies of the weights; those made without gradient must not serve the update."""
    model = tiny()
    ids, mask = prompts()
    with torch.autocast("cpu", torch.bfloat16):
        model.decode(ids, mask, max_new_tokens=3)
        model(ids, attention_mask=mask).logits.float().square().mean().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


@pytest.mark.parametrize("use_moe", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_autocast(dtype, use_moe):
    model = tiny(use_moe=use_moe)
    ids, mask = prompts()
    with torch.autocast("cpu", dtype):
        decoded = model.decode(ids, mask, num_generations=2, max_new_tokens=10, uniforms=uniforms(6))
        whole = torch.cat([ids.repeat_interleave(2, 0), decoded.completion_ids], dim=1)
        whole_mask = torch.cat([mask.repeat_interleave(2, 0).bool(), decoded.mask], dim=1)
        logits = model(whole, attention_mask=whole_mask).logits[:, ids.shape[1] - 1 : -1]
    assert decoded.logps.dtype == torch.float32 and torch.isfinite(decoded.logps).all()
    logps = logits.float().log_softmax(-1).gather(-1, decoded.completion_ids[..., None]).squeeze(-1)
    difference = (decoded.logps - logps)[decoded.mask].abs()
    # rounding may send a token to another expert, which changes its logits at will: there most must agree, not all
    agreed = difference < (0.15 if dtype == torch.bfloat16 else 0.02)
    assert agreed.float().mean() > 0.9 if use_moe else agreed.all()


def test_without_uniforms_torch_s_seed_decides():
    model = tiny()
    ids, mask = prompts()
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(model.decode(ids, mask, num_generations=2, max_new_tokens=10).completion_ids)
    assert runs[0].equal(runs[1]) and not runs[0].equal(runs[2])
    assert not runs[0][0].equal(runs[0][1]), "two answers to one prompt must differ"


def test_weights_that_are_not_numbers_are_reported():
    model = tiny()
    model.model.norm.weight.data[3] = torch.nan
    with pytest.raises(RuntimeError, match="3 of 3 answers"):
        model.decode(*prompts(), max_new_tokens=3)


# ---- the cache ----


def test_hidden_cache_slots_are_numbers():
    """Attention gives a slot it may not see the weight 0, and 0 · NaN is NaN: fresh slots must not hold garbage."""
    cache = KVCache(1, capacity=4)
    keys, values = cache.write(0, torch.ones(2, 1, 2, 4), torch.ones(2, 1, 2, 4))
    assert keys.shape == values.shape == (2, 1, 2, 4)
    assert cache.keys[0][:, :, 2:].eq(0).all() and cache.values[0][:, :, 2:].eq(0).all()
    cache.advance(2)
    assert cache.spread(3, 7).values[0][:, :, 2:].eq(0).all()
