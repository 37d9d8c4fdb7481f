"""The model against MiniMind's own numbers, padding of every kind, half precision, memory."""

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tiny_models import tiny

from model.model_minimind import MiniMindConfig, MiniMindForCausalLM

DATA = Path(__file__).parent / "data"
KINDS = ["dense", "moe", "yarn"]


def golden(kind: str):
    """(model with the golden weights in eval mode, the golden tensors, the names of its state dict)."""
    tensors = load_file(DATA / f"model_{kind}.safetensors")
    config = json.loads((DATA / f"model_{kind}.json").read_text(encoding="utf-8"))["config"]
    weights = {name.removeprefix("weights."): t for name, t in tensors.items() if name.startswith("weights.")}
    weights["model.embed_tokens.weight"] = weights["lm_head.weight"]
    model = MiniMindForCausalLM(MiniMindConfig(**config))
    model.load_state_dict(weights, strict=True)
    return model.eval(), tensors, set(weights)


# ---- MiniMind's numbers ----


@pytest.mark.parametrize("kind", KINDS)
def test_reproduces_minimind(kind):
    model, want, names = golden(kind)
    ids, mask = want["input_ids"], want["attention_mask"]
    real = mask.bool()
    with torch.no_grad():
        out = model(ids, attention_mask=mask)
        twice_normed = model.model.norm(model.model(input_ids=ids, attention_mask=mask)[0])
    values = F.linear(twice_normed, want["value_head.weight"], want["value_head.bias"]).squeeze(-1)
    logps = out.logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)[:, -8:]
    torch.testing.assert_close(out.logits[real], want["logits"][real], atol=1e-5, rtol=0)
    torch.testing.assert_close(logps, want["last8_logps"], atol=1e-5, rtol=0)
    torch.testing.assert_close(values[real], want["critic_values"][real], atol=1e-5, rtol=0)
    greedy = model.decode(ids, mask, max_new_tokens=want["greedy_completion"].shape[1], temperature=0, eos_token_id=[])
    assert greedy.completion_ids.tolist() == want["greedy_completion"].tolist()
    assert set(model.state_dict()) == names


def test_reproduces_minimind_balance_loss():
    model, want, _ = golden("moe")
    row = want["input_ids"][:1]  # the file's value is that of its one unpadded row
    aux_loss = model.train()(row).aux_loss
    assert aux_loss.item() == pytest.approx(want["train_aux_loss_no_padding"].item(), abs=1e-7)
    assert model.eval()(row).aux_loss.item() == 0.0


# ---- names and loading ----


def test_state_dict_names_and_tied_weights():
    model = tiny()
    layer = "model.layers.1."
    names = set(model.state_dict())
    parts = ["q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"]
    assert {f"{layer}self_attn.{part}.weight" for part in parts} <= names
    assert {f"{layer}mlp.{part}_proj.weight" for part in ("gate", "up", "down")} <= names
    assert {f"{layer}input_layernorm.weight", f"{layer}post_attention_layernorm.weight"} <= names
    assert {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"} <= names
    assert len(names) == 2 * 11 + 3
    assert model.lm_head.weight is model.model.embed_tokens.weight
    expert_names = set(tiny(use_moe=True).state_dict())
    assert f"{layer}mlp.gate.weight" in expert_names
    assert f"{layer}mlp.experts.3.down_proj.weight" in expert_names


def test_loading_names_a_missing_layer_and_completes_the_tied_matrix():
    model = tiny()
    state = {name: torch.full_like(t, 0.5) for name, t in model.state_dict().items()}
    del state["lm_head.weight"]
    model.load_state_dict(state, strict=True)
    assert model.lm_head.weight.eq(0.5).all()
    del state["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(RuntimeError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        model.load_state_dict(state, strict=True)


def test_loading_refuses_two_different_tied_matrices():
    state = {name: t.clone() for name, t in tiny().state_dict().items()}
    state["lm_head.weight"] += 1.0
    with pytest.raises(RuntimeError, match="differ, but this model ties them"):
        tiny().load_state_dict(state)
    untied = tiny(tie_word_embeddings=False)
    untied.load_state_dict(state, strict=True)
    assert not untied.lm_head.weight.equal(untied.model.embed_tokens.weight)


def test_saved_folder_loads_again(tmp_path):
    model = tiny(use_moe=True, inference_rope_scaling=True)
    model.save_pretrained(tmp_path)
    again = MiniMindForCausalLM.from_pretrained(tmp_path).eval()
    assert again.config.inference_rope_scaling is True
    assert again.lm_head.weight is again.model.embed_tokens.weight
    ids = torch.arange(3, 9)[None]
    assert model(ids).logits.equal(again(ids).logits)


def test_fresh_weights_are_normal_with_std_0_02_and_seeded():
    torch.manual_seed(5)
    first = MiniMindForCausalLM(MiniMindConfig(64, 2, vocab_size=500))
    torch.manual_seed(5)
    second = MiniMindForCausalLM(MiniMindConfig(64, 2, vocab_size=500))
    for name, weight in first.state_dict().items():
        assert weight.equal(second.state_dict()[name])
        if weight.dim() == 2:
            assert weight.std().item() == pytest.approx(0.02, rel=0.05), name
        else:
            assert weight.eq(1.0).all()


# ---- configuration ----


def test_default_sizes_are_minimind_s():
    config = MiniMindConfig()
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (768, 8, 6400)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (8, 4, 96)
    assert config.intermediate_size == 2432  # 768·π = 2412.7, up to the next multiple of 64
    assert config.moe_intermediate_size == 2432
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, 0)
    assert (config.max_position_embeddings, config.rope_theta, config.rms_norm_eps) == (32768, 1e6, 1e-6)
    assert (config.num_experts, config.num_experts_per_tok, config.router_aux_loss_coef) == (4, 1, 5e-4)
    assert (config.use_moe, config.inference_rope_scaling, config.dropout, config.tie_word_embeddings) == (
        False,
        False,
        0.0,
        True,
    )


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": 100}, "hidden_size"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"num_hidden_layers": -1}, "num_hidden_layers"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"hidden_size": 24}, "head_dim"),
        ({"head_dim": 0}, "head_dim"),
        ({"intermediate_size": 0}, "intermediate_size"),
        ({"max_position_embeddings": 0}, "max_position_embeddings"),
        ({"dropout": 1.0}, "dropout"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"use_moe": True, "num_experts": 0}, "num_experts"),
        ({"use_moe": True, "num_experts_per_tok": 5}, "num_experts_per_tok"),
    ],
)
def test_impossible_sizes_are_refused_by_name(changes, field):
    with pytest.raises(ValueError, match=field):
        MiniMindConfig(**changes)


# ---- padding ----


def padded_batch(rows: list[list[int]], left: list[int], width: int, junk: int):
    """ids and mask [N, W] with each row's tokens after `left[i]` pads and junk everywhere else."""
    ids = torch.full((len(rows), width), junk)
    mask = torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, left[i] : left[i] + len(row)] = torch.tensor(row)
        mask[i, left[i] : left[i] + len(row)] = 1
    return ids, mask


ROWS = [[5, 6, 7, 8, 9, 10], [11, 12], [13, 14, 15]]


@pytest.mark.parametrize("use_moe", [False, True])
@pytest.mark.parametrize("left", [[0, 4, 3], [0, 0, 0], [1, 2, 3]])
@pytest.mark.parametrize("junk", [0, 39, -100, 10**6])
def test_padding_changes_no_real_row(use_moe, left, junk):
    """Left, right and both-sided padding, with ids inside and outside of the vocabulary in it."""
    model = tiny(use_moe=use_moe)
    ids, mask = padded_batch(ROWS, left, 7, junk)
    out = model(ids, attention_mask=mask)
    for i, row in enumerate(ROWS):
        alone = model(torch.tensor([row])).logits[0]
        torch.testing.assert_close(out.logits[i, mask[i].bool()], alone, atol=1e-5, rtol=0)
    assert torch.isfinite(out.logits).all()


def test_padding_changes_no_gradient():
    model = tiny()
    ids, mask = padded_batch(ROWS, [0, 4, 3], 7, 39)
    model(ids, attention_mask=mask).logits[mask.bool()].square().sum().backward()
    padded = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    sum(model(torch.tensor([row])).logits.square().sum() for row in ROWS).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(padded[name], p.grad, atol=2e-4, rtol=1e-4)


def test_a_hole_in_the_mask_is_skipped():
    model = tiny()
    holed = model(torch.tensor([[5, 39, 6, 7]]), attention_mask=torch.tensor([[1, 0, 1, 1]])).logits[0, [0, 2, 3]]
    torch.testing.assert_close(holed, model(torch.tensor([[5, 6, 7]])).logits[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_padded_rows_are_finite_in_every_precision(dtype):
    """A row of 1 token beside one of 12 under float16 autocast was NaN everywhere: a query that sees nothing."""
    model = tiny()
    rows = [[5], list(range(6, 18)), [7]]
    ids, mask = padded_batch(rows, [11, 0, 3], 12, 0)
    mask[2] = 0  # a row of padding only
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        logits = model(ids, attention_mask=mask).logits
        alone = [model(torch.tensor([row])).logits[0] for row in rows[:2]]
    assert torch.isfinite(logits).all()
    for i in range(2):
        torch.testing.assert_close(logits[i, mask[i].bool()].float(), alone[i].float(), atol=1e-2, rtol=1e-2)
    logits.float().square().mean().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


def test_padding_costs_no_activation_memory_and_no_score_matrix():
    """One pad token made MiniMind leave fused attention: 717 against 526 MiB of saved activations."""
    model = tiny()
    ids, mask = torch.randint(3, 40, (2, 256)), torch.ones(2, 256)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def saved_bytes(mask):
        sizes, score_sized = {}, []

        def pack(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                sizes[storage.data_ptr()] = storage.nbytes()
            if tensor.shape[-2:] == (256, 256):
                score_sized.append(tensor.shape)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(ids, attention_mask=mask).logits.sum()
        assert score_sized == []
        loss.backward()
        return sum(sizes.values())

    full = saved_bytes(mask)
    mask[0, 0] = 0
    assert saved_bytes(mask) < 1.1 * full


# ---- forward ----


def test_a_later_token_changes_nothing_before_it():
    model = tiny()
    first, second = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[5, 6, 7, 30]])
    difference = (model(first).logits - model(second).logits).abs().amax(dim=(0, 2))
    assert difference[:3].max() == 0 and difference[3] > 1e-3


def test_order_of_earlier_tokens_matters():
    model = tiny()
    swapped = model(torch.tensor([[6, 5, 7]])).logits[0, -1]
    assert (model(torch.tensor([[5, 6, 7]])).logits[0, -1] - swapped).abs().max() > 1e-3


def test_logits_to_keep_and_loss():
    model = tiny()
    ids = torch.randint(3, 40, (2, 6))
    full = model(ids)
    torch.testing.assert_close(model(ids, logits_to_keep=2).logits, full.logits[:, -2:])
    torch.testing.assert_close(model(ids, logits_to_keep=torch.tensor([0, 3])).logits, full.logits[:, [0, 3]])
    assert full.hidden_states.shape == (2, 6, 32) and full.aux_loss.shape == ()
    labels = ids.clone()
    labels[0] = -100
    want = -full.logits[1, :-1].log_softmax(-1).gather(-1, ids[1, 1:, None]).mean()
    torch.testing.assert_close(model(ids, labels=labels).loss, want)
    with pytest.raises(ValueError, match="logits_to_keep"):
        model(ids, labels=labels, logits_to_keep=2)
    with pytest.raises(ValueError, match="logits_to_keep"):
        model(ids, logits_to_keep=-1)


def test_chunks_through_the_cache_equal_one_forward():
    model = tiny()
    ids, mask = padded_batch(ROWS, [0, 4, 3], 7, 39)
    whole = model(ids, attention_mask=mask).logits
    cache, chunks = None, []
    for a, b in [(0, 3), (3, 4), (4, 7)]:
        hidden, cache, _ = model.model(ids[:, a:b], mask[:, :b], past_key_values=cache, use_cache=True)
        chunks.append(model.lm_head(hidden))
    torch.testing.assert_close(torch.cat(chunks, dim=1)[mask.bool()], whole[mask.bool()], atol=1e-5, rtol=0)
    row = torch.tensor([ROWS[0]])
    out = model(row[:, :3], use_cache=True)
    later = model(row[:, 3:], past_key_values=out.past_key_values).logits
    torch.testing.assert_close(later, model(row).logits[:, 3:], atol=1e-5, rtol=0)


def test_wrong_inputs_are_refused():
    model = tiny(max_position_embeddings=8)
    ids = torch.zeros(2, 4, dtype=torch.long)
    with pytest.raises(ValueError, match="max_position_embeddings 8"):
        model(torch.zeros(1, 9, dtype=torch.long))
    with pytest.raises(ValueError, match=r"attention_mask \(2, 5\)"):
        model(ids, attention_mask=torch.ones(2, 5))
    with pytest.raises(ValueError, match="input_ids"):
        model(ids[0])
    with pytest.raises(TypeError, match="position_idz"):
        model(ids, position_idz=None)
    cache = model(ids, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="max_position_embeddings 8"):
        model(torch.zeros(2, 5, dtype=torch.long), past_key_values=cache)
    with pytest.raises(ValueError, match="2 rows"):
        model(ids[:1], past_key_values=cache)


def test_dropout_only_in_training():
    model = tiny(dropout=0.5)
    ids = torch.randint(3, 40, (2, 6))
    assert model(ids).logits.equal(model(ids).logits)
    model.train()
    assert not model(ids).logits.equal(model(ids).logits)


# ---- norm ----


def test_norms_have_minimind_s_epsilon():
    norm = tiny().model.norm
    assert norm.eps == 1e-6
    x = torch.full((1, 32), 1e-3)
    # mean square 1e-6, plus 1e-6: 1e-3 / sqrt(2e-6)
    torch.testing.assert_close(norm(x), torch.full((1, 32), 1e-3 / math.sqrt(2e-6)))
