"""One step of decoding and the caches behind it: equal to the model's forward, and to attention row by row."""

import os
import shutil

import pytest
import torch
from tiny_models import prompts, tiny, uniforms

from model import decode_cache, decode_step, products
from model.decode_cache import GroupCache, RowCache, fill_holes
from model.decode_step import CompiledStep, DecodeStep, compiled_step, effective_weight
from model.kv_cache import KVCache
from trainer.lora import adapter_off, add_lora, lora_layers

LIST = torch.tensor


def decoded_and_rescored(model, copies=3, steps=20, **settings):
    """(log-probs of decoding, those of a forward over prompt and answer), of the answers' tokens alone."""
    ids, mask = prompts()
    u = uniforms(3 * copies, steps)
    decoded = model.decode(ids, mask, num_generations=copies, max_new_tokens=steps, uniforms=u, **settings)
    whole = torch.cat([ids.repeat_interleave(copies, 0), decoded.completion_ids], dim=1)
    whole_mask = torch.cat([mask.repeat_interleave(copies, 0).bool(), decoded.mask], dim=1)
    with torch.no_grad():
        logits = model(whole, attention_mask=whole_mask).logits[:, ids.shape[1] - 1 : -1]
    logps = logits.log_softmax(-1).gather(-1, decoded.completion_ids[..., None]).squeeze(-1)
    return decoded.logps[decoded.mask], logps[decoded.mask]


@pytest.fixture(autouse=True)
def groups_pay_off(monkeypatch):
    """Several answers to a prompt share a cache in these tests, however short the prompt is."""
    monkeypatch.setattr(decode_step, "FEW_TOKENS", 0)


# ---- weights ----


@pytest.mark.parametrize("copies", [1, 3])
def test_a_torch_without_packed_weights_decodes_the_same(copies, monkeypatch):
    model = tiny()
    before = decoded_and_rescored(model, copies)[0]
    monkeypatch.setattr(products, "can_pack", lambda dtype: False)
    torch.testing.assert_close(decoded_and_rescored(model, copies)[0], before, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "changes",
    [{"inference_rope_scaling": True}, {"num_key_value_heads": 4}, {"num_key_value_heads": 1}, {"head_dim": 24},
     {"use_moe": True, "num_experts_per_tok": 2}],
)  # fmt: skip
@pytest.mark.parametrize("copies", [1, 3])
def test_logps_equal_a_forward_for_every_kind_of_model(changes, copies):
    """copies 1 = the rows' own cache, 3 = the groups'."""
    decoded, rescored = decoded_and_rescored(tiny(**changes), copies)
    torch.testing.assert_close(decoded, rescored, atol=1e-4, rtol=0)


def test_norms_count():
    """Random norm weights: at 1, which they start from, a forgotten or swapped one would not show."""
    model = tiny()
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.uniform_(0.5, 1.5, generator=generator)
    torch.testing.assert_close(*decoded_and_rescored(model), atol=1e-4, rtol=0)


def test_adapters_count_while_they_are_on():
    model = tiny()
    add_lora(model, rank=2, alpha=4.0, seed=0)
    for layer in lora_layers(model).values():
        layer.lora_b.data.normal_(0, 0.3, generator=torch.Generator().manual_seed(1))
    adapted = decoded_and_rescored(model)
    torch.testing.assert_close(*adapted, atol=1e-4, rtol=0)
    with adapter_off(model):
        plain = decoded_and_rescored(model)
    torch.testing.assert_close(*plain, atol=1e-4, rtol=0)
    assert plain[0].shape != adapted[0].shape or not torch.allclose(plain[0], adapted[0], atol=1e-2)
    assert effective_weight(model.lm_head) is model.lm_head.weight


def test_too_few_rows_are_read_with_others_whose_numbers_reach_nobody():
    """Eight rows of two prompts end until one is left; the step goes on with four, in either cache."""
    model = tiny()
    step = DecodeStep(model, three_prompts_of(model), 2, 9)
    assert len(step.positions) == 6
    step.keep_rows(LIST([0, 1]), LIST([4, 5]), 4)
    step.keep_rows(LIST([0]), LIST([2]), 2)
    assert len(step.positions) == 4 and step.cache.store[0].shape[1] == 4
    assert sorted(step.cache.places[:, 0].tolist()) == sorted(set(step.cache.places[:, 0].tolist()))
    assert step(LIST([5, 6])).shape == (2, 40)
    alone = DecodeStep(model, three_prompts_of(model), 1, 9)
    assert len(alone.positions) == 4 and alone(LIST([5, 6, 7])).shape == (3, 40)
    assert torch.isfinite(alone(LIST([5, 6, 7]))).all()


# ---- caches ----


def test_fill_holes_by_hand():
    # of five rows, 1 and 2 ended: the last two take their places
    x = LIST([10, 11, 12, 13, 14])
    assert fill_holes(x, LIST([1, 2]), LIST([3, 4]), 3).tolist() == [10, 13, 14]
    assert fill_holes(LIST([[1, 2], [3, 4]]), LIST([0]), LIST([1]), 1).tolist() == [[3, 4]]
    nothing = LIST([], dtype=torch.long)
    assert fill_holes(LIST([7, 8, 9]), nothing, nothing, 2).tolist() == [7, 8], "only the last row ended"


def three_prompts(lengths=(5, 2, 4)) -> KVCache:
    """Keys and values of three prompts in two layers, 2 heads of 8; large numbers in the padding."""
    torch.manual_seed(2)
    cache = KVCache(2, max(lengths))
    cache.keys, cache.values = ([torch.randn(3, 2, max(lengths), 8) for _ in range(2)] for _ in range(2))
    cache.filled, cache.lengths = max(lengths), LIST(lengths)
    cache.aligned = len(set(lengths)) == 1
    for store in (cache.keys, cache.values):
        for old in store:
            for row, length in enumerate(lengths):
                old[row, :, length:] = 1e4
    return cache


KINDS = {
    "rows": lambda prompt: RowCache(prompt, 2, 9),
    "static rows": lambda prompt: RowCache(prompt, 2, 9, static=True),
    "groups": lambda prompt: GroupCache(prompt, 2),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", [(5, 2, 4), (4, 4, 4)])
def test_attention_equals_one_worked_out_row_by_row(kind, lengths, monkeypatch):
    """Six rows of three prompts for nine tokens; after the fourth, rows 1 and 4 leave; slots are added on the way."""
    monkeypatch.setattr(decode_cache, "GROWTH", 2)
    prompt = three_prompts(lengths)
    seen = [
        [[(prompt.keys[layer][row // 2, :, i], prompt.values[layer][row // 2, :, i]) for i in range(lengths[row // 2])]
         for row in range(6)]
        for layer in range(2)
    ]  # fmt: skip
    cache, rows = KINDS[kind](prompt), list(range(6))
    for token in range(9):
        if token == 4:
            cache.keep_rows(LIST([1]), LIST([5]), 4)  # row 4 is behind the last one that stays, row 5 in place of 1
            rows = [0, 5, 2, 3]
        cache.next_slot()
        for layer in range(2):
            q, k, v = (torch.randn(len(rows), heads, 8) for heads in (6, 2, 2))
            out = cache.attend(layer, q / 8**0.5, torch.stack([k, v])).unflatten(1, (6, 8))
            for i, row in enumerate(rows):
                seen[layer][row].append((k[i], v[i]))
                for head in range(6):  # query heads 0..2 share key/value head 0, 3..5 head 1
                    keys, values = (torch.stack([x[head // 3] for x in store]) for store in zip(*seen[layer][row]))
                    want = (keys @ q[i, head] / 8**0.5).softmax(0) @ values
                    torch.testing.assert_close(out[i, head], want, atol=1e-5, rtol=0)


@torch.no_grad()
def test_which_cache_serves_whom(monkeypatch):
    """Groups pay off for many rows in float32 on the CPU; a fused kernel keeps half precision's scores in float32."""
    model = tiny()
    prompt = three_prompts_of(model)
    assert isinstance(DecodeStep(model, prompt, 2, 9).cache, GroupCache)
    assert isinstance(DecodeStep(model, prompt, 1, 9).cache, RowCache)
    with torch.autocast("cpu", torch.bfloat16):
        half = DecodeStep(model, prompt, 2, 9)
    assert isinstance(half.cache, RowCache) and half.dtype == torch.bfloat16
    assert half.norm.dtype == half.layers[0].qk_norm.dtype == torch.float32
    monkeypatch.setattr(decode_step, "FEW_TOKENS", 15)
    assert isinstance(DecodeStep(model, prompt, 2, 9).cache, RowCache), "three prompts of five tokens, one copy more"
    assert isinstance(DecodeStep(model, prompt, 3, 9).cache, GroupCache)


def test_groups_hold_a_prompt_once_and_few_empty_slots():
    cache = GroupCache(three_prompts(), copies=4)
    assert cache.prompt_keys[0].shape == (3 * 2, 5, 8)
    for token in range(1, 400):
        cache.next_slot()
        slots = cache.store[1].shape[3]
        assert cache.store[0].shape == (2, 12, 2, slots, 8)
        assert token <= slots < token + max(decode_cache.GROWTH, token // 8 + 1)


@pytest.mark.parametrize("copies", [1, 3])
def test_answers_longer_than_the_first_slots(copies, monkeypatch):
    """With slots added every few tokens, and rows leaving between, nothing changes."""
    model = tiny()
    ids, mask = prompts()
    settings = {"max_new_tokens": 40, "num_generations": copies, "uniforms": uniforms(3 * copies, 40)}
    before = model.decode(ids, mask, eos_token_id=[2, 20], **settings)
    monkeypatch.setattr(decode_cache, "GROWTH", 3)
    monkeypatch.setattr(decode_step, "FEW_TOKENS", -1)
    monkeypatch.setattr(decode_step, "FEWEST_ROWS", 1)
    after = model.decode(ids, mask, eos_token_id=[2, 20], **settings)
    assert after.completion_ids.equal(before.completion_ids) and before.completion_ids.shape[1] > 33
    torch.testing.assert_close(after.logps, before.logps, atol=1e-5, rtol=0)


# ---- compiled ----


def test_a_compiled_step_takes_over_what_fits_its_memory():
    """Constructed, not called: nothing is compiled. The model's own weights are shared, never written to."""
    model = tiny(inference_rope_scaling=True)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    step = compiled_step(model, three_prompts_of(model), 2, 7)
    addresses = [tensor.data_ptr() for tensor, _ in step.memory]
    assert compiled_step(model, three_prompts_of(model), 2, 20) is step, "both have 256 slots"
    assert [tensor.data_ptr() for tensor, _ in step.memory] == addresses
    assert step.embedding.data_ptr() == model.lm_head.weight.data_ptr()
    model.model.layers[1].self_attn.q_proj.weight.data += 1
    assert compiled_step(model, three_prompts_of(model), 2, 20) is step
    torch.testing.assert_close(step.layers[1].qkv[:32], state["model.layers.1.self_attn.q_proj.weight"] + 1)
    model.model.layers[1].self_attn.q_proj.weight.data -= 1
    for changes in ({"copies": 3}, {"max_new": 300}):
        sizes = {"copies": 2, "max_new": 20} | changes
        other = compiled_step(model, three_prompts_of(model), **sizes)
        assert other is not step and compiled_step(model, three_prompts_of(model), **sizes) is other
    # a weight that moved in memory is not written over: the new step reads it where it is now
    layer = model.model.layers[0].self_attn.o_proj
    layer.weight = torch.nn.Parameter(layer.weight.detach().clone())
    moved = compiled_step(model, three_prompts_of(model), **sizes)
    assert moved is not other and moved.layers[0].out.data_ptr() == layer.weight.data_ptr()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, state[name], atol=1e-6, rtol=0)


@torch.no_grad()
def three_prompts_of(model) -> KVCache:
    ids = torch.randint(3, 40, (3, 5), generator=torch.Generator().manual_seed(4))
    return model.model(ids, use_cache=True)[1]


COMPILER = os.environ.get("CXX") or next((name for name in ("c++", "g++", "clang++", "cl") if shutil.which(name)), None)


@pytest.mark.skipif(COMPILER is None, reason="torch.compile needs a C++ compiler on the CPU, and none was found")
def test_compiled_decoding_gives_the_same_answers():
    """Three rollouts with weights that changed between them, of which only the first compiles anything."""
    model = tiny()
    ids, mask = prompts()
    settings = {"max_new_tokens": 12, "num_generations": 2, "uniforms": uniforms(6), "eos_token_id": [2, 20]}
    compiled = []
    for _ in range(3):
        plain = model.decode(ids, mask, **settings)
        fast = model.decode(ids, mask, compile=True, **settings)
        assert fast.completion_ids.equal(plain.completion_ids) and fast.mask.equal(plain.mask)
        torch.testing.assert_close(fast.logps, plain.logps, atol=1e-5, rtol=0)
        compiled.append(decode_step._KEPT[model])
        model.model.layers[0].mlp.up_proj.weight.data *= 1.5
        model.model.layers[1].self_attn.v_proj.weight.data *= 1.5
    assert isinstance(compiled[0], CompiledStep) and compiled[0] is compiled[1] is compiled[2]


@pytest.mark.parametrize(("rows", "copies", "read"), [(1, 1, 2), (2, 1, 2), (1, 2, 2), (3, 1, 4), (1, 3, 4), (3, 2, 6)])
def test_one_or_two_rows_are_read_as_a_pair_and_more_as_four_at_least(rows, copies, read):
    """Each answer is what it is among others, also after rows have ended and left."""
    model = tiny()
    ids, mask = prompts()
    u = uniforms(3 * copies, 20)
    settings = {"max_new_tokens": 20, "num_generations": copies, "eos_token_id": [2, 20, 30]}
    with torch.no_grad():
        step = DecodeStep(model, model.model(ids[:rows], use_cache=True)[1], copies, 9)
    assert len(step.positions) == read
    assert step.layers[0].out.is_mkldnn == (read > 2 and products.can_pack(torch.float32))
    several = model.decode(ids, mask, uniforms=u, **settings)
    few = model.decode(ids[:rows], mask[:rows], uniforms=u[: rows * copies], **settings)
    n, width = few.completion_ids.shape
    assert few.completion_ids.equal(several.completion_ids[:n, :width])
    torch.testing.assert_close(few.logps, several.logps[:n, :width], atol=1e-5, rtol=0)
