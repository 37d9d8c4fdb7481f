"""scripts/convert_model.py: a .pth as a transformers folder and back, with nothing lost and nothing half written."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from model.export import (
    checked_state, config_from_state, expected_shapes, minimind_config, read_folder, transformers_config, write_folder,
)  # fmt: skip
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from scripts.convert_model import main
from tests.tiny_models import tiny
from trainer.arguments import REPO_ROOT
from trainer.checkpoints import save_weights

DATA = Path(__file__).parent / "data"


def golden_folder(kind: str, folder: Path) -> tuple[dict, Path]:
    """(tensors that MiniMind's own model gave, its weights as a transformers folder)."""
    tensors = load_file(DATA / f"model_{kind}.safetensors")
    state = {name.removeprefix("weights."): tensor for name, tensor in tensors.items() if name.startswith("weights.")}
    config = config_from_state(state, kind, inference_rope_scaling=kind == "yarn")
    state = checked_state(state, expected_shapes(config), "float32", kind)
    return tensors, write_folder(folder, state, config, "float32")


@pytest.fixture(params=[False, True], ids=["dense", "moe"])
def weights(request, tiny_config, tmp_path):
    """(a .pth as MiniMind saves one, the model whose weights it holds)."""
    torch.manual_seed(3)
    config = MiniMindConfig(32, 2, use_moe=request.param, vocab_size=tiny_config.vocab_size, num_attention_heads=4,
                            num_key_value_heads=2, initializer_range=0.2)
    model = MiniMindForCausalLM(config).half().float().eval()
    return save_weights(model, tmp_path / f"start_32{'_moe' if request.param else ''}.pth"), model


def convert(*words) -> int:
    return main([str(word) for word in words])


# ---------------------------------------------------------------------------------------------- what comes out
@pytest.mark.parametrize("kind", ["dense", "moe", "yarn"])
def test_transformers_gives_minimind_s_own_logits(kind, tmp_path):
    want, folder = golden_folder(kind, tmp_path / kind)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    assert type(model).__name__ == ("Qwen3MoeForCausalLM" if kind == "moe" else "Qwen3ForCausalLM")
    assert next(model.parameters()).dtype == torch.float32
    with torch.no_grad():
        logits = model(want["input_ids"], attention_mask=want["attention_mask"]).logits
    real = want["attention_mask"].bool()
    assert (logits - want["logits"])[real].abs().max() < 1e-4


def test_the_script_gives_the_same_logits_in_our_model_and_in_transformers(weights, tmp_path, capsys):
    path, ours = weights
    assert convert(path, tmp_path / "folder") == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "folder").eval()
    ids = torch.randint(3, 1000, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert (ours(ids).logits - theirs(ids).logits).abs().max() < 1e-4
    assert "python -m sglang.launch_server --model-path" in capsys.readouterr().out
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "folder")
    mine = transformers.AutoTokenizer.from_pretrained(REPO_ROOT / "model")
    assert tokenizer("1+1=?").input_ids == mine("1+1=?").input_ids and tokenizer.chat_template == mine.chat_template
    generation = transformers.GenerationConfig.from_pretrained(tmp_path / "folder")
    assert generation.eos_token_id == tokenizer.eos_token_id == 2


def test_there_and_back_is_the_same_file(weights, tmp_path):
    path, model = weights
    back = tmp_path / "back" / path.name
    back.parent.mkdir()
    convert(path, tmp_path / "folder")
    convert(tmp_path / "folder", back)
    before, after = torch.load(path), torch.load(back)
    assert set(before) == set(after) == set(model.state_dict())
    assert all(after[name].dtype == torch.float16 and torch.equal(after[name], before[name]) for name in before)


def test_yarn_changes_the_logits_of_long_texts(tmp_path):
    """Or the rotary settings in the config would not be read at all."""
    want, folder = golden_folder("yarn", tmp_path / "yarn")
    content = json.loads((folder / "config.json").read_text())
    plain = {**content, "rope_scaling": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    (folder / "config.json").write_text(json.dumps(plain))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        logits = model(want["input_ids"], attention_mask=want["attention_mask"]).logits
    assert (logits - want["logits"])[want["attention_mask"].bool()].abs().max() > 1e-3


@pytest.mark.parametrize("use_moe", [False, True])
def test_config_has_the_keys_of_transformers_4_and_5(use_moe):
    config = MiniMindConfig(768, 8, use_moe)
    content = transformers_config(config, "bfloat16")
    assert content["rope_theta"] == 1e6 and content["rope_scaling"] is None  # 4.x, SGLang, vLLM, llama.cpp
    assert content["rope_parameters"] == {"rope_type": "default", "rope_theta": 1e6}  # 5.x
    assert content["torch_dtype"] == content["dtype"] == "bfloat16"
    assert content["tie_word_embeddings"] is True and content["head_dim"] == 96
    assert content["architectures"] == ["Qwen3MoeForCausalLM" if use_moe else "Qwen3ForCausalLM"]
    if use_moe:
        assert content["decoder_sparse_step"] == 1 and content["mlp_only_layers"] == []
        assert content["num_experts_per_tok"] == 1 and content["norm_topk_prob"] is True
    again = minimind_config(json.loads(json.dumps(content)), "config.json")
    assert again.to_dict() == config.to_dict()


def test_yarn_config_makes_every_reader_use_a_factor_of_one():
    """transformers takes attention_factor as it is; SGLang and vLLM multiply 0.1·ln(16) + 1 = 1.2773 by attn_factor."""
    config = MiniMindConfig(64, 2, inference_rope_scaling=True)
    content = transformers_config(config, "float32")
    for rope in (content["rope_scaling"], content["rope_parameters"]):
        assert rope["rope_type"] == "yarn" and rope["factor"] == 16.0 and rope["attention_factor"] == 1.0
        assert rope["original_max_position_embeddings"] == 2048
        assert rope["attn_factor"] * 1.2772588722 == pytest.approx(1.0, abs=1e-9)
    assert minimind_config(content, "config.json").inference_rope_scaling


def test_lm_head_is_written_out_and_there_is_one_file(weights, tmp_path):
    """SGLang's Qwen3-MoE ignores tied embeddings: without the name it answers uniform noise."""
    path, _ = weights
    convert(path, tmp_path / "folder")
    written = load_file(tmp_path / "folder" / "model.safetensors")
    assert torch.equal(written["lm_head.weight"], written["model.embed_tokens.weight"])
    assert {tensor.dtype for tensor in written.values()} == {torch.float32}
    names = {file.name for file in (tmp_path / "folder").iterdir()}
    assert names == {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
                     "tokenizer_config.json"}
    assert not list(tmp_path.glob("*.tmp"))


def test_dtype_is_that_of_the_weights_and_of_the_config(weights, tmp_path):
    path, _ = weights
    convert(path, tmp_path / "folder", "--dtype", "bfloat16")
    written = load_file(tmp_path / "folder" / "model.safetensors")
    assert {tensor.dtype for tensor in written.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "folder" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("sharded", [False, True])
def test_a_folder_that_transformers_saved_comes_back(weights, tmp_path, sharded):
    """It has stripped the tied lm_head; experts may have been fused in memory; large ones come in shards."""
    path, model = weights
    convert(path, tmp_path / "folder")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "folder")
    theirs.save_pretrained(tmp_path / "saved", **({"max_shard_size": "100KB"} if sharded else {}))
    assert (tmp_path / "saved" / "model.safetensors.index.json").exists() == sharded
    convert(tmp_path / "saved", tmp_path / "back.pth")
    after = torch.load(tmp_path / "back.pth")
    assert all(torch.equal(after[name].float(), tensor) for name, tensor in model.state_dict().items())


# ---------------------------------------------------------------------------------------------- what is refused
def test_what_exists_is_only_replaced_when_asked_and_only_a_model_folder(weights, tmp_path):
    path, _ = weights
    folder = tmp_path / "folder"
    convert(path, folder)
    with pytest.raises(ValueError, match="exists already; choose another name, or pass --overwrite 1"):
        convert(path, folder)
    with pytest.raises(ValueError, match="exists already"):
        convert(folder, path)
    state, config = read_folder(folder)
    with pytest.raises(ValueError, match="exists already; choose another folder"):
        write_folder(folder, state, config, "float32")
    (folder / "stale.bin").write_text("")
    convert(path, folder, "--overwrite", "1")
    assert not (folder / "stale.bin").exists()
    other = tmp_path / "holidays"
    other.mkdir()
    with pytest.raises(ValueError, match="holds no config.json"):
        convert(path, other, "--overwrite", "1")


def test_a_failed_write_leaves_what_was_there_and_nothing_else(weights, tmp_path, monkeypatch):
    path, _ = weights
    folder = tmp_path / "folder"
    convert(path, folder)
    before = sorted(tmp_path.rglob("*"))

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("model.export.save_file", full)
    with pytest.raises(RuntimeError, match="cannot write .*folder: .*No space left.*choose another folder"):
        convert(path, folder, "--overwrite", "1")
    assert sorted(tmp_path.rglob("*")) == before


BAD_WEIGHTS = {
    "no state dict": (lambda state: {"model": state, "step": 3}, "expected a state dict .*resume file"),
    "not MiniMind": (lambda state: {"weight": torch.ones(2)}, "model.embed_tokens.weight is missing"),
    "a hole": (lambda state: {name: tensor for name, tensor in state.items() if "1.mlp.up_proj" not in name},
               "layers.1.mlp.up_proj.weight is missing"),
    "a stranger": (lambda state: state | {"value_head.weight": torch.ones(1)}, "value_head.weight is not a weight"),
    "another shape": (lambda state: state | {"model.norm.weight": torch.ones(31)}, r"\(31,\); expected \(32,\)"),
    "a NaN": (lambda state: state | {"model.norm.weight": torch.full((32,), math.nan)}, "norm.weight holds a NaN"),
    "an own head": (lambda state: state | {"lm_head.weight": torch.ones(2000, 32)}, "lm_head.weight differs from"),
}


@pytest.mark.parametrize("name", BAD_WEIGHTS)
def test_weights_that_do_not_fit_are_named_and_nothing_is_written(name, tmp_path):
    change, words = BAD_WEIGHTS[name]
    torch.save(change(tiny(vocab_size=2000).state_dict()), tmp_path / "changed.pth")
    with pytest.raises(ValueError, match=words):
        convert(tmp_path / "changed.pth", tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path):
    torch.save(tiny(vocab_size=40).state_dict(), tmp_path / "small.pth")
    with pytest.raises(ValueError, match="the tokenizer has .* tokens, the weights only 40"):
        convert(tmp_path / "small.pth", tmp_path / "folder")


BAD_CONFIGS = {
    "model_type": ({"model_type": "llama"}, "model_type is 'llama'"),
    "attention_bias": ({"attention_bias": True}, "attention_bias is True"),
    "rope_theta": ({"rope_theta": 1e4}, "rope_theta is 10000.0; a .pth cannot say so"),
    "scaling": ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rotary scaling .* is not one MiniMind has"),
    "sizes": ({"num_hidden_layers": 3}, "model.layers.2.* is missing"),
}


@pytest.mark.parametrize("name", BAD_CONFIGS)
def test_a_folder_that_is_no_minimind_is_named(name, tmp_path):
    _, folder = golden_folder("dense", tmp_path / "folder")
    change, words = BAD_CONFIGS[name]
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | change))
    with pytest.raises(ValueError, match=words):
        convert(folder, tmp_path / "out.pth")
    assert not (tmp_path / "out.pth").exists()


def test_an_untied_head_and_damaged_files_are_named(tmp_path):
    _, folder = golden_folder("dense", tmp_path / "folder")
    state, config = read_folder(folder)
    state["lm_head.weight"] = state["lm_head.weight"] + 1
    content = transformers_config(config, "float32") | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(content))
    save_file(state, folder / "model.safetensors")
    with pytest.raises(ValueError, match="it has an lm_head of its own"):
        convert(folder, tmp_path / "out.pth")
    (folder / "model.safetensors").write_bytes(b"half a file")
    with pytest.raises(ValueError, match="model.safetensors: damaged"):
        convert(folder, tmp_path / "out.pth")
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="no model.safetensors there"):
        convert(folder, tmp_path / "out.pth")
    (folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match="config.json not found"):
        convert(folder, tmp_path / "out.pth")
    with pytest.raises(ValueError, match="expected a name that ends in .pth"):
        convert(folder, tmp_path / "out")


def test_the_command_line_works_from_anywhere_and_errs_in_one_line(tmp_path):
    script = str(REPO_ROOT / "scripts" / "convert_model.py")

    def run(*words):
        return subprocess.run([sys.executable, script, *words], cwd=tmp_path, capture_output=True, text=True)

    shown = run("--help")
    assert shown.returncode == 0 and "--max_position_embeddings" in shown.stdout
    missing = run("nothing.pth", "folder")
    assert missing.returncode == 2 and missing.stderr.count("\n") == 1 and "nothing.pth not found" in missing.stderr
