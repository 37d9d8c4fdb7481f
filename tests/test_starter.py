"""The starter's assets: what is committed is what the scripts make, its answers are right, its split leaks nothing."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoTokenizer

from dataset.starter_tasks import KINDS, LANGUAGES, PROMPT_KINDS, is_held_out, make_stream, make_task, make_tasks
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from scripts import make_starter, train_tokenizer
from scripts.starter import pairs, reward, reward_check, sft
from trainer.reward_model import LMForRewardModel

ROOT = Path(__file__).resolve().parents[1]
TAGS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
FILES = [ROOT / make_starter.PROMPTS, ROOT / make_starter.HELD_OUT, ROOT / "model" / "tokenizer.json",
         ROOT / "model" / "tokenizer_config.json", ROOT / make_starter.SFT_WEIGHTS,
         *(ROOT / make_starter.REWARD_MODEL / name
           for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"))]  # fmt: skip


def read_rows(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def numbers(text):
    return [int(number) for number in re.findall(r"\d+", text)]


def solve(row):
    """The answer worked out from the question's text alone, by other code than the one that made it."""
    question = row["conversations"][0]["content"]
    values = numbers(question)
    if any(word in question for word in ("digit", "数字")):
        return sum(map(int, str(values[0])))
    if any(word in question for word in ("larg", "great", "big", "更大", "较大", "最大", "哪个数最大")):
        return max(values)
    if any(word in question for word in ("small", "less", "least", "更小", "较小", "最小")):
        return min(values)
    if any(word in question for word in (" - ", "Subtract", "minus", "give away", "减", "多多少", "送出")):
        return abs(values[0] - values[1])
    assert any(word in question for word in (" + ", "Add ", "plus", "get", "加", "和", "又得到")), question
    return sum(values)


@pytest.fixture(scope="module")
def train_rows():
    return read_rows(ROOT / make_starter.PROMPTS)


@pytest.fixture(scope="module")
def held_rows():
    return read_rows(ROOT / make_starter.HELD_OUT)


# ------------------------------------------------------------------------------------------------ files
def test_assets_exist_and_stay_below_15_megabytes():
    missing = [str(path.relative_to(ROOT)) for path in FILES if not path.is_file()]
    assert not missing
    assert sum(path.stat().st_size for path in FILES) < 15e6


@pytest.mark.parametrize("stage, names", [
    ("data", [make_starter.PROMPTS, make_starter.HELD_OUT]),
    ("tokenizer", ["model/tokenizer.json", "model/tokenizer_config.json"]),
])  # fmt: skip
def test_make_starter_reproduces_committed_files_byte_for_byte(stage, names, tmp_path, capsys):
    make_starter.main(["--stage", stage, "--out", str(tmp_path)])
    for name in names:
        assert (tmp_path / name).read_bytes() == (ROOT / name).read_bytes(), name
    assert "together" in capsys.readouterr().out


def test_reward_model_has_the_same_tokenizer():
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (ROOT / make_starter.REWARD_MODEL / name).read_bytes() == (ROOT / "model" / name).read_bytes()


# ------------------------------------------------------------------------------------------------ tasks
def test_rows_are_balanced_and_distinct(train_rows, held_rows):
    assert (len(train_rows), len(held_rows)) == (1440, 360)
    for rows in (train_rows, held_rows):
        assert len({row["conversations"][0]["content"] for row in rows}) == len(rows)
        for language in LANGUAGES:
            for kind in KINDS:
                share = sum(row["lang"] == language and row["kind"].startswith(kind) for row in rows) / len(rows)
                assert share == pytest.approx(PROMPT_KINDS.count(kind) / len(PROMPT_KINDS) / 2)


def test_answers_are_right_when_worked_out_again(train_rows, held_rows):
    for row in train_rows + held_rows:
        final = row["conversations"][1]["content"].split("</think>")[1]
        assert str(solve(row)) == row["answer"], row
        assert numbers(final) == [solve(row)], row


def test_every_equation_in_the_working_holds(train_rows, held_rows):
    checked = 0
    for row in train_rows + held_rows:
        working = row["conversations"][1]["content"].split("</think>")[0]
        for left, sign, right in re.findall(r"([\d+\-]+)([=<>])(\d+)", working):
            value = sum(map(int, re.findall(r"[+-]?\d+", left)))
            assert {"=": value == int(right), "<": value < int(right), ">": value > int(right)}[sign], working
            checked += 1
    assert checked >= 2 * 1800


def test_responses_satisfy_the_format_rules(train_rows, held_rows):
    """MiniMind's rule: thinking of 20-300 characters, one closing tag, a response of 20-800 characters."""
    for row in train_rows + held_rows:
        content = row["conversations"][1]["content"]
        assert content.startswith("<think>\n")
        assert content.count("</think>\n\n") == content.count("</think>") == 1
        response = content.removeprefix("<think>\n")
        assert 20 <= len(response.split("</think>")[0].strip()) <= 300
        assert 20 <= len(response.strip()) <= 800


def test_split_shares_no_question_and_no_operand_set(train_rows, held_rows):
    train, held = ({tuple(sorted(numbers(row["conversations"][0]["content"]))) for row in rows}
                   for rows in (train_rows, held_rows))
    assert len(held) > 300
    assert not train & held


def test_training_stream_never_meets_held_out_operands(held_rows):
    held = {tuple(sorted(numbers(row["conversations"][0]["content"]))) for row in held_rows}
    stream = {tuple(sorted(numbers(task.question))) for task in make_stream(3000, sft.SEED + 1)}
    assert len(stream) > 1500
    assert not stream & held
    for task, *_ in pairs.make_groups(300, 5, False):
        assert tuple(sorted(numbers(task.question))) not in held


def test_split_ignores_order():
    assert is_held_out((47, 35)) == is_held_out((35, 47))
    share = sum(is_held_out((a, b)) for a in range(10, 100) for b in range(a, 100)) / 4095
    assert 0.17 < share < 0.23


def test_tasks_depend_on_the_seed_alone():
    assert make_tasks(24, 3, True) == make_tasks(24, 3, True)
    assert make_tasks(24, 3, True) != make_tasks(24, 4, True)


def test_unknown_kind_is_refused():
    from random import Random

    with pytest.raises(ValueError, match="unknown task 'root'"):
        make_task(Random(0), "root", "en", False)


# ------------------------------------------------------------------------------------------------ tokenizer
def test_fixed_ids(tokenizer):
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == [0, 1, 2]
    assert tokenizer.convert_tokens_to_ids(TAGS) == [21, 22, 23, 24, 25, 26]
    assert (tokenizer.pad_token_id, tokenizer.unk_token_id) == (0, 0)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert 1600 <= len(tokenizer) <= 2000
    assert tokenizer("hi").input_ids == tokenizer("hi", add_special_tokens=False).input_ids  # no bos, no eos


@pytest.mark.parametrize("text", [
    "What is 47 + 35?", "四十七加三十五等于多少？", " leading and  double  spaces \n\n\ttabs\r\n",
    "😀 é ü ß — “quotes”", "def f(x):\n    return x ** 2", "混合 mixed 文本 123,456.78", "",
])  # fmt: skip
def test_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_digits_stand_alone(tokenizer):
    ids = tokenizer("12345 and 2026年 x1y22").input_ids
    pieces = [tokenizer.decode([index]) for index in ids]
    assert [piece for piece in pieces if any(mark.isdigit() for mark in piece)] == list("123452026122")
    assert len([token for token in tokenizer.get_vocab() if re.search(r"\d", token) and len(token) > 1
                and not token.startswith("<|reserved_")]) == 0


def test_tags_survive_decoding_and_chatml_does_not(tokenizer):
    text = "<|im_start|>assistant\n" + "x".join(TAGS) + "<|im_end|><|endoftext|>"
    assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == "assistant\n" + "x".join(TAGS)


@pytest.mark.parametrize("thinking, ending", [(True, "<think>\n"), (False, "<think>\n\n</think>\n\n")])
def test_chat_template(tokenizer, thinking, ending):
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "1+1?"},
                {"role": "assistant", "content": "2"}, {"role": "user", "content": "好"}]  # fmt: skip
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, open_thinking=thinking)
    assert text == ("<|im_start|>system\nS<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n"
                    "<|im_start|>assistant\n2<|im_end|>\n<|im_start|>user\n好<|im_end|>\n"
                    "<|im_start|>assistant\n" + ending)
    without = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=False)
    assert text == without + "<|im_start|>assistant\n" + ending


def test_chat_template_renders_tools(tokenizer):
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "hi"},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "content": "5"}]  # fmt: skip
    text = tokenizer.apply_chat_template(messages, tokenize=False, tools=[{"name": "add"}])
    assert text.count("<|im_start|>system") == 1
    assert text.index("S\n") < text.index('{"name": "add"}\n')
    assert '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><|im_end|>' in text
    assert "<tool_response>\n5\n</tool_response>" in text and "None" not in text


def test_training_prompt_is_the_chat_prompt(tokenizer):
    """What the model is trained on joins up to the rendered conversation, in text and in ids."""
    for task in make_stream(20, 1):
        whole = tokenizer.apply_chat_template(task.row()["conversations"], tokenize=False)
        assert sft.prompt_text(tokenizer, task) + task.response + "<|im_end|>\n" == whole
        ids = tokenizer(sft.prompt_text(tokenizer, task)).input_ids + tokenizer(task.response).input_ids + [2]
        assert ids == tokenizer(whole).input_ids[:-1]
        assert len(ids) <= 96


def test_train_tokenizer_from_own_rows_and_its_errors(tmp_path, capsys):
    data = tmp_path / "my.jsonl"
    rows = '{"conversations": [{"role": "user", "content": "hello hello hello"}]}\n\n{"text": "你好 42"}\n'
    data.write_text(rows, encoding="utf-8")
    train_tokenizer.main(["--data", str(data), "--vocab_size", "300", "--out", str(tmp_path)])
    own = AutoTokenizer.from_pretrained(tmp_path)
    assert len(own) <= 300 and own.decode(own("hello 你好 42").input_ids) == "hello 你好 42"
    data.write_text('{"text": "fine"}\n{"words": 1}\n', encoding="utf-8")
    for argv, message in ((["--data", str(data)], "my.jsonl, line 2"), (["--vocab_size", "100"], "too small"),
                          (["--data", str(tmp_path / "none.jsonl")], "none.jsonl")):
        with pytest.raises(SystemExit, match=message):
            train_tokenizer.main([*argv, "--out", str(tmp_path / "new")])
    assert not (tmp_path / "new").exists()
    assert capsys.readouterr().err == ""


# ------------------------------------------------------------------------------------------------ models
@pytest.fixture(scope="module")
def sft_state():
    return torch.load(ROOT / make_starter.SFT_WEIGHTS, map_location="cpu", weights_only=True)


def test_weights_fit_model_and_tokenizer(sft_state, tokenizer):
    model = MiniMindForCausalLM(MiniMindConfig(hidden_size=128, num_hidden_layers=4, vocab_size=len(tokenizer)))
    model.load_state_dict(sft_state, strict=True)
    assert all(value.dtype == torch.float16 and torch.isfinite(value).all() for value in sft_state.values())
    assert torch.equal(sft_state["lm_head.weight"], sft_state["model.embed_tokens.weight"])
    assert 1e6 <= sum(parameter.numel() for parameter in model.parameters()) <= 4e6


def test_model_is_right_sometimes_and_ends_its_answers(sft_state, tokenizer):
    """Between 35% and 55% are meant; 120 questions, two samples each, have a standard error of 4 points, so 25-65%."""
    model = sft.from_half_state(sft_state)
    found = sft.accuracy(model, tokenizer, make_starter.held_out_tasks()[:120], 0.8, samples=2)
    assert 0.25 <= found["accuracy"] <= 0.65
    assert found["max_tokens"] <= 64 and found["mean_tokens"] <= 40


def test_right_answer_needs_closed_thinking_and_the_last_number():
    task = make_tasks(1, 3, True)[0]
    assert sft.is_right(task, task.response)
    assert not sft.is_right(task, task.answer_text)
    assert not sft.is_right(task, f"x</think>{task.answer}7")
    assert not sft.is_right(task, f"x</think>{task.answer}, no, 3{task.answer}")


def test_labels_cover_the_response_and_its_end_only():
    ids, labels = sft.collate([([5, 6, 7], [8, 2]), ([5], [9, 9, 2])], pad=0)
    assert ids.tolist() == [[5, 6, 7, 8, 2], [5, 9, 9, 2, 0]]
    assert labels.tolist() == [[-100, -100, -100, 8, 2], [-100, 9, 9, 2, -100]]


def test_training_rows_end_their_responses_and_mix_modes(tokenizer):
    rows = sft.training_rows(tokenizer, 400, seed=1)
    assert all(response[-1] == 2 and response.count(2) == 1 for _, response in rows)
    assert all(prompt[-1] != 2 and prompt[0] == 1 for prompt, _ in rows)
    thinking = sum(26 in response for _, response in rows) / len(rows)  # </think> is written, not given
    assert thinking == pytest.approx(1 - sft.SHARE_DIRECT, abs=0.06)  # four standard errors
    assert all((26 in response) != (26 in prompt) for prompt, response in rows)
    systems = sum("<|im_start|>system" in tokenizer.decode(prompt) for prompt, _ in rows) / len(rows)
    assert systems == pytest.approx(sft.SHARE_SYSTEM, abs=0.06)


def test_training_starts_from_the_seed_and_learns(tokenizer):
    losses = []
    for _ in range(2):
        lines = []
        model = sft.train(tokenizer, log=lines.append, steps=2, seed=3)
        losses.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    assert torch.equal(*losses)
    start = torch.cat([parameter.detach().flatten() for parameter in sft.new_model(len(tokenizer), 3).parameters()])
    assert not torch.equal(start, losses[0])


def test_reward_folder_is_a_plain_qwen3_classifier():
    folder = ROOT / make_starter.REWARD_MODEL
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["Qwen3ForSequenceClassification"] and config["pad_token_id"] == 0
    assert list(config["id2label"]) == ["0"] and "auto_map" not in config
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert file.metadata()["format"] == "pt"
        assert list(file.get_tensor("score.weight").shape) == [1, 128]


def test_reward_model_prefers_right_well_formed_and_short():
    """On 120 held-out questions. The bounds lie several standard errors below what make_starter measured."""
    scorer = LMForRewardModel(str(ROOT / make_starter.REWARD_MODEL), device="cpu", dtype=torch.float32)
    shares, scores = reward_check.pair_report(scorer, make_starter.held_out_tasks()[:120])
    assert shares["wrong"] > 0.60 and shares["malformed"] > 0.85 and shares["rambling"] > 0.85
    assert sum(abs(score) < 3.0 for score in scores) / len(scores) > 0.9
    assert max(scores) - min(scores) > 0.5


def test_reward_trains_on_what_the_loader_scores(tokenizer):
    scorer = LMForRewardModel(str(ROOT / make_starter.REWARD_MODEL), device="cpu", dtype=torch.float32)
    messages, answer = [{"role": "user", "content": "What is 47 + 35?"}], "The answer is 82."
    ids = reward.conversation_ids(tokenizer, messages[0]["content"], answer)
    assert ids == scorer._encode([*messages, {"role": "assistant", "content": answer}])
    with torch.no_grad():
        score = scorer.model.score(reward.body_states(scorer.model, torch.tensor([ids])))[0, -1, 0].item()
    assert score == pytest.approx(scorer.get_score(messages, answer), abs=1e-5)


def test_group_loss_is_log_2_plus_the_answers_own_loss_at_the_start(tokenizer, sft_state):
    """All scores are 0 at first: -log sigmoid(0) = ln 2, no pull to the middle, and the answer's next-token loss."""
    model = reward.new_model(sft_state)
    task, right, worse = pairs.make_groups(1, 5, False)[0]
    loss, _, answer_loss = reward.group_loss(model, tokenizer, [(task, right, worse)])
    ids = torch.tensor([reward.conversation_ids(tokenizer, task.question, right)])
    start = ids[0].tolist().index(1, 1)  # the assistant's <|im_start|>
    language = sft.from_half_state(sft_state)
    with torch.no_grad():
        logps = language(ids).logits[0].log_softmax(-1)
    expected = -sum(logps[place - 1, ids[0, place]] for place in range(start, ids.shape[1])) / (ids.shape[1] - start)
    assert answer_loss == pytest.approx(expected.item(), rel=1e-4)
    assert loss.item() == pytest.approx(0.693147 + reward.ANSWER_LOSS * answer_loss, rel=1e-4)


def test_group_loss_lifts_right_answers_at_the_position_the_loader_reads(tokenizer, sft_state):
    model = reward.new_model(sft_state)
    group = pairs.make_groups(1, 5, False)[0]
    texts = [group[1], *group[2]]
    reward.group_loss(model, tokenizer, [group])[0].backward()
    with torch.no_grad():
        model.score.weight -= 1e-3 * model.score.weight.grad / model.score.weight.grad.norm()
        rows = [torch.tensor([reward.conversation_ids(tokenizer, group[0].question, text)]) for text in texts]
        scores = [model(input_ids=row).logits[0, 0].item() for row in rows]
        states = [reward.body_states(model, row)[0, -1] for row in rows]
    assert scores[0] > sum(scores[1:]) / 3
    # At zero scores the head's gradient is minus half the mean difference of the states, right minus worse.
    mean_difference = sum(states[0] - state for state in states[1:]) / 3
    torch.testing.assert_close(model.score.weight.grad[0], -0.5 * mean_difference, atol=1e-4, rtol=1e-3)


def test_worse_answers_are_worse():
    for task, right, worse in pairs.make_groups(300, 9, False):
        assert right == task.answer_text
        assert all(text != right for text in worse)
        assert all(numbers(text) != [int(task.answer)] for text in worse[:2])


def test_pair_statistics():
    assert reward_check.share_before([2.0, 1.0, 0.0, 1.0], [1.0, 1.0, 1.0, 0.0]) == pytest.approx(2.5 / 4)
    # positives 3, 1 against negatives 2, 1: 3>2, 3>1, 1<2, 1=1 -> (1 + 1 + 0 + 0.5) / 4
    assert reward_check.area_under_curve([3.0, 1.0], [2.0, 1.0]) == pytest.approx(0.625)


def test_command_line_says_what_is_missing(tmp_path):
    with pytest.raises(SystemExit, match="--stage tokenizer"):
        make_starter.main(["--stage", "sft", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="2"):
        make_starter.main(["--threads", "0"])
