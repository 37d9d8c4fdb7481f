"""Samples written while training, and the best weights kept: what is in the files, also after a resume."""

import json
import math
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dataset.lm_dataset import RLAIFDataset
from model.model_minimind import MiniMindForCausalLM
from trainer import evaluation, samples
from trainer.checkpoints import read_torch_file, save_weights
from trainer.evaluation import Evaluator, keep_best, load_for_inference
from trainer.rollout_engine import TorchRolloutEngine
from trainer.run_files import read_metrics_lines
from trainer.samples import SAMPLE_PROMPTS, SampleWriter, json_line, show

NAN = math.nan


@pytest.fixture
def parts(tokenizer, tiny_config, tmp_path):
    """(dropout model in training mode, held-out data of 9 rows, flags) of a run."""
    torch.manual_seed(3)
    model = MiniMindForCausalLM(tiny_config).train()
    rows = [{"conversations": [{"role": "user", "content": f"{i}+{i}=?"}], "answer": str(2 * i), "metadata": {"i": i}}
            for i in range(9)]
    path = tmp_path / "heldout.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = tmp_path / "mine_of_samples.py"
    own.write_text("import random\ndef noisy(metadata):\n    random.random()\n"
                   "    return [1.0 + 0 * row['i'] for row in metadata]")
    args = SimpleNamespace(max_seq_len=64, max_gen_len=6, top_p=1.0, top_k=0, logp_temperature=0.8, seed=42,
                           batch_size=8, temperature=0.8, answer_reward=1.0, reward_fn=[f"{own}:noisy:2"],
                           reward_weights=None, eval_prompts=3, dtype="float32", save_dir=str(tmp_path),
                           save_weight="grpo", keep_best=1)  # fmt: skip
    return model, RLAIFDataset(path, tokenizer, thinking_ratio=1.0, system_ratio=0.0), args


def writer(parts, tokenizer, folder, **changes) -> SampleWriter:
    model, dataset, args = parts
    return SampleWriter(TorchRolloutEngine(model, tokenizer), tokenizer, dataset, None, args, "cpu", folder, **changes)


def generator_states() -> tuple:
    """The state of every generator of the process, in a form that can be compared."""
    return random.getstate(), str(np.random.get_state(legacy=False)), torch.get_rng_state().tolist()


def lines_of(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text(encoding="utf-8").splitlines()]


def test_samples_are_the_same_prompts_each_time(parts, tokenizer, tmp_path, capsys):
    chronicle = writer(parts, tokenizer, tmp_path)
    chronicle.take(0)
    chronicle.take(5)
    lines = lines_of(tmp_path)
    assert [line["step"] for line in lines] == [0] * SAMPLE_PROMPTS + [5] * SAMPLE_PROMPTS
    assert [line["prompt"] for line in lines[:4]] == ["0+0=?", "2+2=?", "4+4=?", "6+6=?"]  # spread over the 9 rows
    assert lines[1]["answer"] == "4" and set(lines[0]) == {"step", "prompt", "answer", "response", "reward", "parts",
                                                         "finished"}  # fmt: skip
    assert [dict(line, step=0) for line in lines[4:]] == lines[:4]  # greedy, and the weights did not change
    row = chronicle.rows[3]
    greedy = parts[0].decode(torch.tensor([row["prompt_ids"]]), max_new_tokens=6, temperature=0.0)
    assert lines[3]["response"] == tokenizer.decode(greedy.completion_ids[0][greedy.mask[0]], skip_special_tokens=True)
    for line in lines:
        weighted = {name: value * (2 if name == "noisy" else 1) for name, value in line["parts"].items()}
        assert line["reward"] == pytest.approx(sum(weighted.values())) and line["parts"]["noisy"] == 1.0
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 2 * 2 * 3  # two prompts each time: prompt, answer, reward
    assert shown[0] == "[sample] step 0: 0+0=?   (expected 0)" and shown[3] == "[sample] step 0: 2+2=?   (expected 4)"


def test_taking_samples_leaves_no_trace_in_the_run(parts, tokenizer, tmp_path):
    model = parts[0]
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    states = generator_states()
    writer(parts, tokenizer, tmp_path).take(1)
    assert states == generator_states()
    assert model.training and all(module.training for module in model.modules())
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())


def test_a_resumed_run_goes_on_behind_the_step_it_resumed_from(parts, tokenizer, tmp_path):
    first = writer(parts, tokenizer, tmp_path)
    for step in (0, 5, 10):
        first.take(step)
    with open(tmp_path / "samples.jsonl", "a", encoding="utf-8") as file:
        file.write('{"step": 15, "prom')  # the kill came in the middle of a line
    second = writer(parts, tokenizer, tmp_path, resumed_step=5)
    second.take(10)
    assert [line["step"] for line in lines_of(tmp_path)[:: SAMPLE_PROMPTS]] == [0, 5, 10]
    writer(parts, tokenizer, tmp_path)  # a fresh run in an old folder starts with none
    assert lines_of(tmp_path) == []


def test_line_ends_of_any_kind_survive(tmp_path):
    content = {"step": 1, "response": "a\u2028b\x85c\u2029d\ne 好"}
    path = tmp_path / "samples.jsonl"
    path.write_text(json_line(content), encoding="utf-8")
    ((line, step),) = read_metrics_lines(path)
    assert step == 1 and json.loads(line) == content and "好" in line


def test_all_ranks_answer_and_the_main_one_writes(parts, tokenizer, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(samples, "is_main_process", lambda: False)
    chronicle, asked = writer(parts, tokenizer, tmp_path), []
    monkeypatch.setattr(chronicle.answerer, "answer", lambda rows, **_: asked.append(len(rows)) or (None, None, None))
    chronicle.take(1)
    assert asked == [SAMPLE_PROMPTS] and not (tmp_path / "samples.jsonl").exists() and capsys.readouterr().out == ""


def test_what_a_sample_looks_like(capsys):
    parts = {"length": 0.5, "rm": -1.25, "tag": 0.0, "mine": None}
    show({"step": 7, "prompt": "Hi\nyou", "answer": "", "response": "x" * 300, "reward": -0.75, "parts": parts,
          "finished": False})  # fmt: skip
    show({"step": 8, "prompt": "?", "answer": "4", "response": "4", "reward": None, "parts": {}, "finished": True})
    assert capsys.readouterr().out.splitlines() == [
        "[sample] step 7: Hi ⏎ you", f"[sample]   {'x' * 199}… (cut at the limit)",
        "[sample]   reward -0.75: length +0.50, rm -1.25",
        "[sample] step 8: ?   (expected 4)", "[sample]   4", "[sample]   reward not finite",
    ]  # fmt: skip


# ---------------------------------------------------------------------------------------------- keep the best
class Log:
    """The log of a run, kept in memory; a resumed run has what was written up to its step."""

    def __init__(self, values=()):
        self.lines = [{"eval/accuracy": value, "eval/reward": -value} for value in values]

    def series(self, name):
        return [line[name] for line in self.lines if not math.isnan(line[name])]

    def write(self, metrics, line):
        self.lines.append(metrics)


def offer(log, model, path, step, accuracy, reward=0.0) -> bool:
    log.write({"eval/accuracy": accuracy, "eval/reward": reward}, "")
    return keep_best(log, log.lines[-1], step, model, path)


def test_the_best_is_kept_and_said(parts, tmp_path, capsys):
    model, log, path = parts[0], Log(), tmp_path / "grpo_best_64.pth"
    assert offer(log, model, path, 0, 0.25)
    assert capsys.readouterr().out == f"best so far at step 0: eval/accuracy 0.2500; kept in {path}\n"
    first = path.read_bytes()
    with torch.no_grad():
        model.lm_head.weight.add_(1.0)
    assert not offer(log, model, path, 5, 0.25) and not offer(log, model, path, 10, 0.125)
    assert path.read_bytes() == first
    assert capsys.readouterr().out == ""
    assert offer(log, model, path, 15, 0.5)
    assert "step 15: eval/accuracy 0.5000, was 0.2500; kept" in capsys.readouterr().out
    assert torch.equal(read_torch_file(path)["lm_head.weight"], model.lm_head.weight.half())


def test_the_best_is_remembered_across_a_resume(parts, tmp_path):
    path = tmp_path / "best.pth"
    assert not offer(Log([0.25, 0.75]), parts[0], path, 20, 0.5) and not path.exists()
    assert offer(Log([0.25, 0.75]), parts[0], path, 20, 0.8125)


def test_reward_decides_where_there_are_no_answers(parts, tmp_path):
    log, path = Log(), tmp_path / "best.pth"
    assert offer(log, parts[0], path, 0, NAN, reward=-1.0) and not offer(log, parts[0], path, 1, NAN, reward=-2.0)
    assert not offer(log, parts[0], path, 2, NAN, reward=NAN) and offer(log, parts[0], path, 3, NAN, reward=-0.5)


def test_weights_that_are_not_finite_are_not_kept(parts, tmp_path):
    log, path = Log(), tmp_path / "best.pth"
    offer(log, parts[0], path, 0, 0.25)
    before = path.read_bytes()
    with torch.no_grad():
        parts[0].lm_head.weight[0, 0] = NAN
    with pytest.raises(RuntimeError, match="not finite"):
        offer(log, parts[0], path, 1, 0.5)
    assert path.read_bytes() == before


@pytest.mark.parametrize("main", [True, False])
def test_the_evaluator_keeps_the_best(parts, tokenizer, tmp_path, monkeypatch, main):
    model, dataset, args = parts
    monkeypatch.setattr(evaluation, "is_main_process", lambda: main)
    judge = Evaluator(TorchRolloutEngine(model, tokenizer), tokenizer, dataset, None, args, "cpu", policy=model,
                      reference=model)  # fmt: skip
    metrics = judge.measure(Log(), step=0)["metrics"]
    assert (tmp_path / "grpo_best_64.pth").is_file() is main
    # actor = reference: the KL is exactly 0; the own function's mean is there before its weight of 2
    assert metrics["eval/kl"] == metrics["eval/kl_sequence"] == 0.0 and metrics["eval/rewards/noisy"] == 1.0
    args.keep_best = 0
    (tmp_path / "grpo_best_64.pth").unlink(missing_ok=True)
    judge.measure(Log(), step=0)
    assert not (tmp_path / "grpo_best_64.pth").exists()


# ---------------------------------------------------------------------------------------------- loading a .pth
@pytest.mark.parametrize("use_moe", [False, True])
def test_sizes_are_read_off_the_file(tokenizer, tmp_path, use_moe):
    from model.model_minimind import MiniMindConfig

    torch.manual_seed(5)
    config = MiniMindConfig(32, 3, use_moe, vocab_size=len(tokenizer), num_attention_heads=4, num_key_value_heads=2)
    model = MiniMindForCausalLM(config).eval()
    save_weights(model, tmp_path / "any name.pth")
    loaded = load_for_inference(tmp_path / "any name.pth", tokenizer, "cpu")
    assert not loaded.training and not any(p.requires_grad for p in loaded.parameters())
    assert loaded.config.eos_token_id == tokenizer.eos_token_id and loaded.lm_head.weight.dtype == torch.float32
    ids = torch.tensor([[1, 30, 31, 32, 33]])
    torch.testing.assert_close(loaded(ids).logits, model.half().float()(ids).logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("content", "words"),
    [({"model": {}, "optimizer": {}}, "is a resume file"), ([1, 2], "holds no weights"), ({"a": 1}, "holds no weights"),
     ({"a": torch.ones(1)}, "model.embed_tokens.weight is missing"), (b"junk", "cannot be read as a torch file")],
)  # fmt: skip
def test_other_files_are_refused(tokenizer, tmp_path, content, words):
    path = tmp_path / "some.pth"
    path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
    with pytest.raises(ValueError, match=words):
        load_for_inference(path, tokenizer, "cpu")
    with pytest.raises(FileNotFoundError, match="no config.json there"):  # a folder is taken for one of transformers
        load_for_inference(tmp_path, tokenizer, "cpu")
    with pytest.raises(FileNotFoundError, match="gone.pth not found"):
        load_for_inference(tmp_path / "gone.pth", tokenizer, "cpu")


def test_a_layer_that_is_missing_is_named(tokenizer, tiny_weights, tmp_path):
    state = read_torch_file(tiny_weights / "tiny_64.pth")
    del state["model.layers.1.mlp.up_proj.weight"]
    torch.save(state, tmp_path / "cut.pth")
    with pytest.raises(ValueError, match="model.layers.1.mlp.up_proj.weight is missing"):
        load_for_inference(tmp_path / "cut.pth", tokenizer, "cpu")
    with pytest.raises(ValueError, match="tokenizer has"):
        small = {name: t[:100] if t.shape[0] == len(tokenizer) else t for name, t in
                 read_torch_file(tiny_weights / "tiny_64.pth").items()}  # fmt: skip
        torch.save(small, tmp_path / "small.pth")
        load_for_inference(tmp_path / "small.pth", tokenizer, "cpu")
