"""`--hf_model`: another causal language model in MiniMind's place, from its folder through training to a folder."""

import json
import shutil

import pytest
import small_runs as small
import torch
from hf_folders import byte_tokenizer, opened, run, weights_of
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM, AutoTokenizer, BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel,
)  # fmt: skip
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from dataset.lm_dataset import RLAIFDataset
from trainer import hf_model, train_grpo
from trainer.distributed import unwrap_model
from trainer.rl_math import group_relative_advantages
from trainer.rollout_engine import RolloutResult, TorchRolloutEngine, compute_per_token_logps, score_answers
from trainer.sglang_checks import check_launch_folder
from trainer.sglang_weights import WeightVersions

BOTH = pytest.mark.parametrize("name", ["qwen", "llama"])


# ---------------------------------------------------------------------------------------------- a whole run
@BOTH
def test_two_steps_train_it_and_the_folder_loads_with_the_trained_weights(name, flags_of, folders, tmp_path):
    state = run(flags_of(name, eval_data_path=tmp_path / "prompts.jsonl", eval_prompts=4, sample_interval=1,
                         keep_best=1, micro_batch_tokens=0))  # fmt: skip
    lines = [line for line in small.metrics_lines(tmp_path / "run") if "kl" in line]
    # nothing but rounding at first: with and without gradient a model may take other kernels
    assert lines[0]["kl"] < 1e-9 < lines[1]["kl"]
    assert any("eval/kl" in line for line in small.metrics_lines(tmp_path / "run"))
    saved, before = tmp_path / "out" / "grpo-hf", weights_of(folders[name])
    assert (tmp_path / "run" / "samples.jsonl").is_file() and (tmp_path / "out" / "grpo_best-hf").is_dir()
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["grpo-hf", "grpo_best-hf"]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["grpo_32_resume.pth"]
    loaded, found = AutoModelForCausalLM.from_pretrained(saved, output_loading_info=True)
    assert not found["missing_keys"] and not found["unexpected_keys"]
    dtype = {"qwen": torch.float32, "llama": torch.bfloat16}[name]
    after = load_file(saved / "model.safetensors")
    assert all(tensor.dtype == dtype for tensor in after.values()) and after.keys() == before.keys()
    trained = unwrap_model(state.policy).state_dict()
    assert all(tensor.dtype == torch.float32 for tensor in trained.values())
    assert all(torch.equal(tensor.to(dtype), loaded.state_dict()[key].to(dtype)) for key, tensor in trained.items())
    moved = [key for key in before if not torch.equal(after[key].float(), before[key])]
    assert len(moved) == len(before) or (dtype == torch.bfloat16 and len(moved) > len(before) // 2)  # it rounds
    small_files = [path.name for path in folders[name].iterdir() if path.suffix != ".safetensors"]
    assert all((saved / file).read_bytes() == (folders[name] / file).read_bytes() for file in small_files)
    chat = [{"role": "user", "content": "1+1=?"}]
    texts = [AutoTokenizer.from_pretrained(path).apply_chat_template(chat, tokenize=False) for path in
             (saved, folders[name])]  # fmt: skip
    assert texts[0] == texts[1]


@BOTH
def test_the_gradient_is_that_of_a_plain_recomputation(name, flags_of):
    """Row by row without padding, from all logits: CISPO on the policy, ratio 1, and the KL's gradient, which is 0."""
    step = small.StepSpy(train_grpo.optimizer_step)
    learn = small.CallSpy(train_grpo.learn)
    state = run(flags_of(name, max_steps=1, micro_batch_tokens=100, grad_clip=0), optimizer_step=step, learn=learn)
    experience = learn.calls[0][0][2]
    model = type(unwrap_model(state.policy))(state.config)
    model.load_state_dict(step.calls[0]["weights"][0])
    model = model.double().eval()
    rewards = torch.tensor([small.text_score(text) for text in experience.rollout.completions])
    loss = torch.zeros((), dtype=torch.float64)
    advantages = group_relative_advantages(rewards, 3).double()
    assert advantages.abs().max() > 0.5 and len({row[1] for row in small.plain_rows(experience.rollout)}) > 1
    for (ids, length), advantage in zip(small.plain_rows(experience.rollout), advantages, strict=True):
        loss = loss - advantage * small.plain_logps(model, ids, length, 0.8).mean() / len(rewards)
    assert small.relative_error(step.calls[0]["gradients"][0], small.gradients_of(loss, model)) < 1e-5


@BOTH
def test_pieces_and_checkpoints_change_nothing(name, flags_of, monkeypatch):
    whole, parts = (small.StepSpy(train_grpo.optimizer_step) for _ in range(2))
    run(flags_of(name, max_steps=1), optimizer_step=whole)
    calls, part = [], {"qwen": Qwen3Attention, "llama": LlamaAttention}[name]
    forward = part.forward
    monkeypatch.setattr(part, "forward", lambda *a, **k: calls.append(torch.is_grad_enabled()) or forward(*a, **k))
    learn = small.CallSpy(train_grpo.micro_batches)
    run(flags_of(name, max_steps=1, micro_batch_tokens=60, gradient_checkpointing=1, run_dir=None),
        optimizer_step=parts, micro_batches=learn)  # fmt: skip
    assert small.relative_error(*(spy.calls[0]["gradients"][0] for spy in (parts, whole))) < 1e-5
    pieces = len(learn.calls[-1][1])
    assert pieces > 2 and sum(calls) == 2 * 2 * pieces  # both layers, forward and again on the way back


@BOTH
def test_resume_is_exact_and_a_moved_folder_is_no_obstacle(name, flags_of, tmp_path):
    straight = run(flags_of(name, max_steps=3, gradient_checkpointing=1))
    parts = {"save_dir": tmp_path / "b", "checkpoint_dir": tmp_path / "c", "run_dir": None, "gradient_checkpointing": 1}
    with pytest.raises(small.Killed):
        run(flags_of(name, max_steps=3, save_interval=1, **parts),
            sample_and_score=small.dies_at(train_grpo.sample_and_score, 3))  # fmt: skip
    resumed = run(flags_of(name, max_steps=3, from_resume=1, **parts))
    assert resumed.progress.step == 3
    assert small.same_state(*(unwrap_model(state.policy).state_dict() for state in (straight, resumed)))
    files = [(tmp_path / folder / "grpo-hf" / "model.safetensors").read_bytes() for folder in ("out", "b")]
    assert files[0] == files[1]


@BOTH
def test_lora_trains_adapters_alone_and_saves_them_merged(name, flags_of, folders, tmp_path):
    state = run(flags_of(name, lora_rank=2, gradient_checkpointing=1))
    lines = [line for line in small.metrics_lines(tmp_path / "run") if "kl" in line]
    # nothing but rounding at first: with and without gradient a model may take other kernels
    assert lines[0]["kl"] < 1e-9 < lines[1]["kl"]
    assert all(p.requires_grad == ("lora_" in key) for key, p in unwrap_model(state.policy).named_parameters())
    before, after = weights_of(folders[name]), weights_of(tmp_path / "out" / "grpo-hf")
    assert before.keys() == after.keys()
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert changed == {key for key in before if key.endswith("_proj.weight")}
    merged = hf_model.plain_state(state.policy)
    assert all((merged[key] - after[key]).abs().max() < 0.02 for key in after)
    assert (tmp_path / "out" / "grpo-hf_adapters.pth").is_file()


def test_half_precision_keeps_float32_weights(flags_of):
    state = run(flags_of("llama", dtype="bfloat16", self_check=1))
    assert {p.dtype for p in state.policy.parameters()} == {torch.float32}


def test_starter_keeps_its_prompts_and_takes_the_model_from_the_folder(folders, tokenizer):
    args = train_grpo.parse_args(["--starter", "--hf_model", str(folders["qwen"])])
    assert args.tokenizer_path == str(folders["qwen"]) and args.from_weight == "none"
    assert args.data_path == train_grpo.STARTER["data_path"] and args.answer_reward == 4.0
    args = train_grpo.parse_args(["--hf_model", "m", "--tokenizer_path", "t"])
    assert args.tokenizer_path == "t"


# ---------------------------------------------------------------------------------------------- its parts
def test_answers_are_sampled_as_told_and_not_as_the_folder_would(folders):
    """The Llama's folder asks for the likeliest token and a repetition penalty."""
    model, tokenizer = opened(folders["llama"])
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == model.config.pad_token_id
    engine = TorchRolloutEngine(model, tokenizer)
    ids = torch.tensor([[40, 41, 42, 43]])
    found = engine.rollout(ids, torch.ones_like(ids), 64, 1, 1.0, prompt_keys=[(1,)])
    with torch.no_grad():
        likely = model(ids).logits[0, -1].softmax(-1)
    top = likely.topk(5).indices
    seen = (found.completion_ids == top).float().mean(0)
    assert len(found.completion_ids.unique()) > 8
    torch.testing.assert_close(seen, likely[top], atol=0.15, rtol=0)
    assert model.training is False and model.config.use_cache is False


def test_padding_moves_no_position(tmp_path):
    """GPT-2 learns an embedding for each position; the answers to a short prompt beside a long one must see theirs."""
    torch.manual_seed(1)
    size = len(byte_tokenizer(tmp_path))
    GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=128, vocab_size=size,
                               initializer_range=0.3)).save_pretrained(tmp_path)  # fmt: skip
    model, tokenizer = opened(tmp_path)
    ids = torch.tensor([[1, 2, 3, 4, 5, 6], [9, 9, 9, 9, 7, 8]])
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1]])
    rollout = TorchRolloutEngine(model, tokenizer).rollout(ids, mask, 2, 5, 1.0, prompt_keys=[(1,), (2,)])
    scored = score_answers(model, rollout, 1, 1.0, torch.tensor([2, 3])).logps.detach()
    for row, (real, length) in enumerate(small.plain_rows(rollout)):
        plain = small.plain_logps(model, real, length, 1.0).detach().float()
        torch.testing.assert_close(rollout.per_token_logps[row, :length], plain, atol=1e-5, rtol=0)
        if row >= 2:
            torch.testing.assert_close(scored[row - 2, :length], plain, atol=1e-5, rtol=0)


def test_a_short_piece_is_read_without_its_padding(folders):
    model, tokenizer = opened(folders["llama"])
    ids = torch.arange(40, 60)[None].repeat(2, 1)
    mask = torch.ones_like(ids)
    mask[1, :15] = 0
    answers, width = torch.arange(60, 76).view(2, 8), 8
    counted = torch.ones(2, 8, dtype=torch.bool)
    everything, full_mask = torch.cat([ids, answers], dim=1), torch.cat([mask.bool(), counted], dim=1)
    rollout = RolloutResult(everything, answers, torch.zeros(2, 8), ["", ""], torch.full((2,), 20), counted, full_mask,
                            torch.tensor([False, True]))
    rollout.completion_mask[1, 3:] = rollout.attention_mask[1, 23:] = False
    read = []
    forward = model.forward
    model.forward = lambda input_ids, **k: read.append(input_ids.shape) or forward(input_ids, **k)
    scores = score_answers(model, rollout, 1, 1.0, torch.tensor([1]))
    assert read == [(1, 5 + 3)] and scores.logps.shape == scores.entropy.shape == (1, width) == (1, 8)
    assert not scores.logps[0, 3:].any()
    plain = compute_per_token_logps(model, rollout.output_ids[1:, 15:23], 3, temperature=1.0)
    torch.testing.assert_close(scores.logps[:, :3], plain, atol=1e-5, rtol=0)


def test_thinking_matters_where_the_template_knows_it(folders):
    data = small.write_prompts(folders["qwen"].parent / "think.jsonl", 6)
    texts = {}
    for name, folder in folders.items():
        _, tokenizer = opened(folder)
        dataset = [RLAIFDataset(data, tokenizer, 96, thinking_ratio=ratio, system_ratio=0.0) for ratio in (0.0, 1.0)]
        texts[name] = [rows[1]["prompt"] for rows in dataset]
    assert texts["qwen"][0] != texts["qwen"][1]
    assert texts["llama"][0] == texts["llama"][1] and texts["llama"][0].endswith("(1)[assistant]")


def test_servers_get_its_folder(folders, tmp_path):
    model, _ = opened(folders["llama"])
    versions = WeightVersions(tmp_path, "float32")
    for number in (1, 2, 3):
        model.model.norm.weight.data.fill_(number)
        versions.add(model)
    assert [path.name for path in sorted(versions.folder.parent.glob("v*"))] == ["v000002", "v000003"]
    assert weights_of(versions.folder)["model.norm.weight"].unique().tolist() == [3.0]
    assert {t.dtype for t in load_file(versions.folder / "model.safetensors").values()} == {torch.float32}
    written = json.loads((versions.folder / "config.json").read_text())
    assert written.get("dtype", written.get("torch_dtype")) == "float32"
    model.model.norm.weight.data.fill_(float("nan"))
    with pytest.raises(RuntimeError, match="model.norm.weight is not finite"):
        versions.add(model)
    assert versions.number == 3 and not list(tmp_path.rglob("*.tmp"))
    check_launch_folder(str(folders["llama"]), model.config, "folder")
    with pytest.raises(ValueError, match="model_type is qwen3.*has llama; launch it with the folder of --hf_model"):
        check_launch_folder(str(folders["qwen"]), model.config, "folder")


# ---------------------------------------------------------------------------------------------- errors
@pytest.mark.parametrize("given", ["from_weight", "hidden_size", "num_hidden_layers", "use_moe"])
def test_what_the_folder_brings_cannot_be_given_too(given, folders, capsys):
    with pytest.raises(SystemExit):
        train_grpo.parse_args(["--hf_model", "m", f"--{given}", {"hidden_size": "64"}.get(given, "1")])
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and f"--{given}" in err and "--hf_model m" in err


def edit(folder, name, **changes):
    content = json.loads((folder / name).read_text())
    for key, value in changes.items():
        content.pop(key, None) if value is None else content.update({key: value})
    (folder / name).write_text(json.dumps(content))


def without_template(folder):
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    edit(folder, "tokenizer_config.json", chat_template=None)


def template(text):
    def change(folder):
        without_template(folder)
        edit(folder, "tokenizer_config.json", chat_template=text)

    return change


def encoder(folder):
    BertForMaskedLM(BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=300,
                               intermediate_size=32)).save_pretrained(folder)  # fmt: skip


def lose(*names):
    """Leave these weights out of the folder."""

    def change(folder):
        state = load_file(folder / "model.safetensors")
        save_file({k: v for k, v in state.items() if k not in names}, folder / "model.safetensors", {"format": "pt"})

    return change


SLIPS = {
    "no folder": (shutil.rmtree, "no such folder"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "no config.json there"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "no weights there"),
    "config is no JSON": (lambda folder: (folder / "config.json").write_text("{"), "not JSON"),
    "unknown model": (lambda folder: edit(folder, "config.json", model_type="nonesuch"), "config.json cannot be used"),
    "an encoder": (encoder, "architectures .'BertForMaskedLM'.; expected a causal language model"),
    "quantised": (lambda folder: edit(folder, "config.json", quantization_config={"bits": 4}), "are quantised"),
    "MiniMind's": (lambda folder: edit(folder, "config.json", model_type="minimind"), "scripts/convert_model.py"),
    "no tokenizer": (lambda folder: (folder / "tokenizer_config.json").unlink(), "no tokenizer_config.json there"),
    "no template": (without_template, "no chat_template"),
    "no system turn": (template("{{ raise_exception('no system') if messages[0].role == 'system' else 'u[end]' }}"),
                       "refuses a system turn: no system; with --system_ratio 0"),
    "few positions": (lambda folder: edit(folder, "config.json", max_position_embeddings=90), "more than the 90"),
    "small vocabulary": (lambda folder: edit(folder, "config.json", vocab_size=99), "the model only 99"),
    "a weight is missing": (lose("model.norm.weight"), "1 weights are missing .* model.norm.weight"),
    "weights are damaged": (lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 99), "cannot be loaded"),
}


@pytest.mark.parametrize("slip", SLIPS)
def test_a_wrong_folder_is_named_with_what_it_lacks(slip, folders, flags_of, tmp_path, monkeypatch):
    change, words = SLIPS[slip]
    shutil.copytree(folders["llama"], tmp_path / "model")
    change(tmp_path / "model")
    if "weight is" not in slip and "weights are" not in slip:
        monkeypatch.setattr("trainer.loading.load_hf_model", lambda *_: pytest.fail("a model was loaded"))
    with pytest.raises((ValueError, FileNotFoundError), match=words) as error:
        run(flags_of(tmp_path / "model"))
    assert str(tmp_path / "model") in str(error.value)
    assert not (tmp_path / "out").exists()


def test_a_weight_that_does_not_fit_the_dtype_keeps_the_folder(folders, tmp_path):
    model, _ = opened(folders["llama"])
    hf_model.write_hf_folder(model, tmp_path / "m")
    before = (tmp_path / "m" / "model.safetensors").read_bytes()
    model.model.norm.weight.data.fill_(1e30)
    with pytest.raises(RuntimeError, match="not finite as float16"):
        hf_model.write_hf_folder(model, tmp_path / "m", "float16")
    assert (tmp_path / "m" / "model.safetensors").read_bytes() == before


def test_a_resume_file_of_another_model_is_refused(flags_of):
    run(flags_of("qwen"))
    with pytest.raises(ValueError, match="another model"):
        run(flags_of("llama", from_resume=1, run_dir=None))
