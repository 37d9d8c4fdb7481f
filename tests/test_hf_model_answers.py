"""Where answers of `--hf_model` end, on both engines, and who else answers with its weights."""

import json
import shutil

import pytest
import small_runs as small
import torch
from hf_folders import opened, run, weights_of
from sglang_stand_in import StandIn
from transformers import AutoConfig, AutoModelForCausalLM

from scripts import chat, eval_rlhf
from trainer.hf_model import end_ids
from trainer.rollout_engine import TorchRolloutEngine, answer_ends

END, PAD, OTHER = 2, 0, 300  # of this project's tokenizer: <|im_end|>, <|endoftext|>, a word


def with_ends(folder, copy, **ends):
    """A copy of the folder whose configs name these end tokens: file=..., by the files' first words."""
    shutil.copytree(folder, copy)
    for name in ("generation_config", "config"):
        content = json.loads((copy / f"{name}.json").read_text()) | {"eos_token_id": ends.get(name)}
        (copy / f"{name}.json").write_text(json.dumps(content))
    return copy


@pytest.mark.parametrize(
    ("generation_config", "config", "expected"),
    [(None, None, [END]), ([END, PAD], END, [END, PAD]), ([PAD, OTHER], END, [END, PAD, OTHER]),
     (PAD, None, [END, PAD]), (END, [OTHER, 10**6], [END, OTHER]), ([], [-1], [END])],
)  # fmt: skip
def test_answers_end_at_every_id_that_the_folder_names(folders, tmp_path, generation_config, config, expected):
    folder = with_ends(folders["qwen"], tmp_path / "m", generation_config=generation_config, config=config)
    model, tokenizer = opened(folder)
    assert answer_ends(model, tokenizer) == model.generation_config.eos_token_id
    assert sorted(answer_ends(model, tokenizer)) == sorted(expected) and answer_ends(model, tokenizer)[0] == END
    (folder / "generation_config.json").unlink()
    assert PAD not in end_ids(str(folder), tokenizer, model.config) or config == PAD


@pytest.mark.parametrize("named", [[END, PAD], [END, OTHER], END])
def test_an_answer_goes_up_to_the_first_end_token_and_no_further(folders, tmp_path, named):
    """Both tokens are as likely as the end token, pad too: where it ends nothing it is a word like any other."""
    model, tokenizer = opened(with_ends(folders["qwen"], tmp_path / "m", generation_config=named))
    head, ends = model.get_output_embeddings().weight, {END, *(named if named is not END else ())}
    with torch.no_grad():
        head[[PAD, OTHER]] = 0.98 * head[END]
    ids = torch.tensor([[40, 41, 42, 43], [PAD, PAD, 44, 45]])
    rollout = TorchRolloutEngine(model, tokenizer).rollout(ids, (ids != PAD).long(), 32, 8, 1.0,
                                                           prompt_keys=[(1,), (2,)])  # fmt: skip
    last, inside = set(), set()
    rows = (rollout.completion_ids, rollout.completion_mask, rollout.finished)
    for answer, mask, finished in zip(*(tensor.tolist() for tensor in rows), strict=True):
        length = sum(mask)
        assert mask == [True] * length + [False] * (len(mask) - length) and length > 0
        assert finished == (answer[length - 1] in ends) and (finished or length == 8)
        assert not ends & set(answer[: length - 1]) and set(answer[length:]) <= {PAD}
        last.add(answer[length - 1])
        inside |= set(answer[: length - 1])
    assert ends <= last and {PAD, OTHER} - ends <= inside
    for row, (real, length) in list(enumerate(small.plain_rows(rollout)))[::7]:
        plain = small.plain_logps(model, real, length, 1.0).detach().float()
        torch.testing.assert_close(rollout.per_token_logps[row, :length], plain, atol=1e-5, rtol=0)
        assert not rollout.per_token_logps[row, length:].any()


def test_an_end_token_of_the_template_that_ends_no_answer_is_warned_of(folders, flags_of, tmp_path, capsys):
    folder = with_ends(folders["llama"], tmp_path / "m", generation_config=[5])
    content = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(content | {"eos_token": "~"}))
    run(flags_of(folder, max_steps=1))
    assert "does not end a turn with ~ or &, but only that ends an answer here" in capsys.readouterr().out


def test_servers_are_sent_its_weights_and_where_its_answers_end(folders, flags_of, tmp_path):
    folder = with_ends(folders["llama"], tmp_path / "m", generation_config=[256, 5])

    def launched():
        torch.manual_seed(99)  # not the trainer's weights: what it samples with must have been sent to it
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)

    with StandIn(launched, model_path=str(folder)) as server:
        run(flags_of(folder, rollout_engine="sglang", sglang_base_url=server.url,
                     sglang_shared_path=tmp_path / "shared", max_seq_len=40))  # fmt: skip
        lines = [line for line in small.metrics_lines(tmp_path / "run") if "kl" in line]
        assert [line["step"] for line in lines] == [1, 2]
        assert max(line["sampling/logp_difference/mean"] for line in lines) < 1e-4
        assert {tuple(body["sampling_params"]["stop_token_ids"]) for body in server.bodies("/generate")} == {(256, 5)}
        served, written = server.model.state_dict(), weights_of(tmp_path / "out" / "grpo-hf")
        assert all((served[name] - written[name]).abs().max() < 0.02 for name in written)  # written in bfloat16
        assert any((served[name] - tensor).abs().max() > 1e-4 for name, tensor in weights_of(folder).items())


# ---------------------------------------------------------------------------------------------- scripts
@pytest.mark.parametrize("name", ["qwen", "llama"])
@pytest.mark.parametrize("temperature", [0, 4])
def test_chat_opens_the_folder_with_its_own_tokenizer(name, temperature, folders, capsys):
    model, tokenizer = opened(folders[name])
    how = {"do_sample": False} if temperature == 0 else {"do_sample": True, "temperature": 4.0, "top_k": 0}
    answers = set()
    for words in ("Hi", "1+1=?", "So?", "Count."):
        assert chat.main(["--weights", str(folders[name]), "--prompt", words, "--device", "cpu",
                          "--max_new_tokens", "6", "--temperature", str(temperature)]) == 0  # fmt: skip
        shown = capsys.readouterr().out
        text = tokenizer.apply_chat_template([{"role": "user", "content": words}], tokenize=False, open_thinking=False,
                                             add_generation_prompt=True)  # fmt: skip
        ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
        torch.manual_seed(42)
        said = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, **how)[0, ids.size(1) :]
        answers.add(tokenizer.decode(said[said != tokenizer.eos_token_id], clean_up_tokenization_spaces=False) + "\n")
        assert shown in answers
    assert temperature == 0 or max(map(len, answers)) > 1


def test_chat_shows_an_open_block_only_where_the_prompt_opens_one(folders, capsys):
    for name, opens in {"qwen": True, "llama": False}.items():
        chat.main(["--weights", str(folders[name]), "--prompt", "Hi", "--device", "cpu", "--max_new_tokens", "2",
                   "--open_thinking", "1"])  # fmt: skip
        assert ("<think>" in capsys.readouterr().out) == opens


def test_the_evaluation_opens_the_folder_and_compares_it(folders, flags_of, tmp_path, capsys):
    run(flags_of("qwen"))
    trained, target = tmp_path / "out" / "grpo-hf", tmp_path / "eval.json"
    flags = ["--baseline", str(folders["qwen"]), "--data", str(tmp_path / "prompts.jsonl"), "--max_prompts", "3",
             "--samples", "2", "--max_seq_len", "96", "--max_gen_len", "8", "--json", str(target), "--device", "cpu"]
    numbers = {}
    for weights in (trained, folders["qwen"]):
        assert eval_rlhf.main(["--weights", str(weights), *flags]) == 0
        numbers[weights] = json.loads(target.read_text())
    assert numbers[trained]["settings"]["tokenizer_path"] == str(trained)
    assert numbers[trained]["a"]["metrics"]["kl"] > 1e-4 > abs(numbers[folders["qwen"]]["a"]["metrics"]["kl"])
    assert numbers[folders["qwen"]]["a_against_b"]["ties"] == 6
    assert capsys.readouterr().out.count("A against B by reward") == 2


def test_a_folder_that_holds_no_such_model_is_named(folders, tmp_path):
    for change, words in (({"model_type": "minimind"}, "convert_model.py"), ({"vocab_size": 9}, "the model only 9")):
        folder = shutil.copytree(folders["llama"], tmp_path / words[-1])
        content = json.loads((folder / "config.json").read_text()) | change
        (folder / "config.json").write_text(json.dumps(content))
        with pytest.raises(ValueError, match=f"model {folder}.*{words}"):
            chat.main(["--weights", str(folder), "--prompt", "Hi", "--device", "cpu"])
