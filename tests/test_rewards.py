"""Rewards: MiniMind's values, the repetition penalty in languages without blanks, parts by name, answers, plug-ins."""

import json
import math
from pathlib import Path

import pytest
import torch

from trainer.rewards import (
    REWARD_PARTS,
    answer_matches,
    answer_part,
    calculate_rewards,
    parse_chat_prompt,
    rep_penalty,
    rule_parts,
    rule_reward,
)

GOLDEN = json.loads((Path(__file__).parent / "data" / "rewards.json").read_text(encoding="utf-8"))
THOUGHT = "Let me add two and two step by step."  # 36 characters
GOOD = f"{THOUGHT}</think>\n\nThe answer is 4."


class Recorder:
    """A reward model that notes what it is asked and answers from a list."""

    def __init__(self, scores):
        self.scores, self.calls = list(scores), []

    def get_score(self, messages, response):
        self.calls.append((messages, response))
        return self.scores[len(self.calls) - 1]


class BatchRecorder(Recorder):
    def get_scores(self, messages, responses):
        self.calls.append((messages, responses))
        return self.scores


@pytest.mark.parametrize("row", GOLDEN, ids=lambda row: f"{len(row['response'])}-{row['response'][:8]}")
def test_rules_give_minimind_values(row):
    if row["response"].startswith("我爱你"):
        # The one difference: MiniMind reads 我爱你我爱你… as a single word and penalises nothing. 0.5 - 0.5 = 0.
        assert (row["rule_reward"], row["rep_penalty"]) == (0.5, 0.0)
        assert (rule_reward(row["response"]), rep_penalty(row["response"])) == (0.0, 0.5)
        return
    assert rule_reward(row["response"]) == pytest.approx(row["rule_reward"], abs=1e-9)
    assert rep_penalty(row["response"]) == pytest.approx(row["rep_penalty"], abs=1e-9)


@pytest.mark.parametrize(
    "loop",
    ["我爱你" * 100, "好" * 500, "the cat sat " * 60, "ありがとう" * 50, "ﾊﾊ" * 60, "사랑해요" * 50, "𠮷野家" * 40,
     "哈，" * 90, "Ha ha. " * 40, "😀" * 90, "好 " * 90, "The cat SAT. tHE CAT sat. " * 20],
)  # fmt: skip
def test_a_loop_is_penalised_near_the_cap_in_any_script(loop):
    assert rep_penalty(loop) == 0.5


@pytest.mark.parametrize(
    "sentence",
    ["a normal sentence about one thing and another.", "今天天气很好，我们一起去公园散步吧。", "東京は日本の首都です。",
     "", "好", "hi there", "안녕하세요, 만나서 반갑습니다."],
)  # fmt: skip
def test_a_normal_sentence_costs_nothing(sentence):
    assert rep_penalty(sentence) == 0.0


def test_rep_penalty_by_hand():
    # a b c a b c: 3-grams abc bca cab abc, one of four seen before: 2 * 0.5 * 1/4
    assert rep_penalty("a b c a b c") == pytest.approx(0.25)
    # 我爱你我爱你 has the same four: one token a character
    assert rep_penalty("我爱你我爱你") == pytest.approx(0.25)
    # mixed text: tokens gpt 很 好 gpt 很 好 -> the same
    assert rep_penalty("GPT很好gpt很好") == pytest.approx(0.25)
    # 2-grams ab bc ca ab bc: two of five
    assert rep_penalty("a b c a b c", n=2, cap=0.4) == pytest.approx(0.8 * 2 / 5)
    assert rep_penalty("a b c a b c", cap=0.1) == pytest.approx(0.05)
    with pytest.raises(ValueError, match="n is 0"):
        rep_penalty("a", n=0)


@pytest.mark.parametrize(("length", "reward"), [(19, -0.5), (20, 0.5), (800, 0.5), (801, -0.5)])
def test_length_bounds_are_inclusive_and_ignore_outer_blanks(length, reward):
    assert rule_parts("  \n" + "x" * length + "\n  ")["length"] == reward


@pytest.mark.parametrize(("length", "reward"), [(0, -0.5), (19, -0.5), (20, 1.0), (300, 1.0), (301, -0.5)])
def test_thinking_bounds_are_inclusive_and_ignore_outer_blanks(length, reward):
    assert rule_parts(" \n" + "x" * length + "\n</think>\n\nanswer")["thinking"] == reward


def test_parts_have_signs_and_sum_to_the_rule_reward():
    response = "one two three four five six</think>mid</think>end of the answer"
    # answer "mid</think>end of the answer": tokens mid < / think > end of the answer, no 3-gram twice
    assert rule_parts(response) == {"length": 0.5, "thinking": 1.0, "tag": -0.25, "repetition": 0.0}
    # the working ends at the first tag: 10 characters are too few, whatever comes between the tags
    assert rule_parts("x" * 10 + "</think>" + "y" * 30 + "</think>z")["thinking"] == -0.5
    assert rule_parts("好" * 30) == {"length": 0.5, "thinking": 0.0, "tag": 0.0, "repetition": -0.5}
    assert rule_parts(GOOD) == {"length": 0.5, "thinking": 1.0, "tag": 0.25, "repetition": 0.0}
    for row in GOLDEN:
        assert sum(rule_parts(row["response"]).values()) == rule_reward(row["response"])


def test_repetition_counts_in_the_answer_only():
    # "ha ha ha … " in the working costs nothing, in the answer 0.5
    assert rule_parts("ha " * 60 + "</think>fine")["repetition"] == 0.0
    assert rule_parts("fine</think>" + "ha " * 60)["repetition"] == -0.5


def test_answer_part():
    assert answer_part("a</think>\n\n b </think> c\n") == "b </think> c"
    assert answer_part(" no tag ") == " no tag "


# ---------------------------------------------------------------------------------------------- prompts as text
def test_parse_chat_prompt():
    prompt = (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n你好\n再见<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\nhi<|im_end|>\n"
        "<|im_start|>tool\n42<|im_end|>\n<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n<think>\n"
    )
    assert parse_chat_prompt(prompt) == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "你好\n再见"},
        {"role": "assistant", "content": "<think>\n\n</think>\n\nhi"},
        {"role": "tool", "content": "42"},
        {"role": "user", "content": "x"},
    ]


def test_parse_chat_prompt_keeps_a_typed_end_token():
    prompt = "<|im_start|>user\n解释 <|im_end|> 的作用<|im_end|>\n<|im_start|>assistant\n"
    assert parse_chat_prompt(prompt) == [{"role": "user", "content": "解释 <|im_end|> 的作用"}]


def test_parse_chat_prompt_without_headers_is_one_user_message():
    assert parse_chat_prompt(" 2 + 2? \n") == [{"role": "user", "content": "2 + 2?"}]
    assert parse_chat_prompt("<|im_start|>assistant\n") == []


# ---------------------------------------------------------------------------------------------- answers
@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("The answer is 42.", "42"), ("42", "42.0"), ("42.0", "42"), ("x = 7, so 42", "42"), ("答案是42。", "42"),
        ("= -3", "-3"), ("结果是-3。", "-3"), ("it is −3", "-3"), ("-3", "−3"), ("5 - 8 = -3!", "-3"), ("5-3", "3"),
        ("about 1,234 people", "1234"), ("1234", "1,234"), ("１２", "12"), ("－１２．５", "-12.5"), ("1e3", "1000"),
        ("0.50", ".5"), ("\\boxed{6}", "6"), ("$6", "6"), ("50%", "50"), ("7.", "7"), ("007", "7"), ("-0", "0"),
        ("Paris", "paris"), (" Paris. ", "Paris"), ("larger!", "Larger"), ("大于。", "大于"), ("是！", "是"),
        ("1/2", "1/2"), ("working 5</think>\n\n42", "42"), (f"{THOUGHT} 9</think>\n\nParis.", "PARIS"),
    ],
)  # fmt: skip
def test_answers_that_match(response, answer):
    assert answer_matches(response, answer)


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("42 or 43", "42"), ("4", "42"), ("142", "42"), ("3", "-3"), ("-3", "3"), ("42.5", "42"),
        ("1,234", "234"), ("1,2,3", "123"), ("1e3", "3"), ("4 2", "42"), ("", "42"), ("none", "42"), ("Pari", "Paris"),
        ("I think Paris", "Paris"),
        ("42</think>\n\n43", "42"), ("42</think>", "42"), ("42</think>nothing", "42"),
        ("Paris</think>\n\nRome", "Paris"), ("<think>\nso it is 42", "42"), ("  <think> 42", "42"),
    ],
)  # fmt: skip
def test_answers_that_do_not_match(response, answer):
    assert not answer_matches(response, answer)


@pytest.mark.parametrize("answer", [None, "", "  "])
def test_a_row_without_answer_never_matches(answer):
    assert not answer_matches("", answer)
    assert not answer_matches("anything 1", answer)


def test_a_number_in_unfinished_thinking_is_not_an_answer():
    assert answer_matches("so it is 42", "42")
    assert not answer_matches("so it is 42", "42", thinking_open=True)
    assert answer_matches("so it is 9</think>\n\n42", "42", thinking_open=True)


def test_long_or_odd_numbers_do_not_crash():
    digits = "9" * 6000
    assert answer_matches(digits, digits)
    assert not answer_matches(digits, "1")
    for text in ("-", ".", "+-.", "1e999999999999", "1.2.3", ",,,", "1,", "٣"):
        assert answer_matches(text, "1") is (text == "1,")


# ---------------------------------------------------------------------------------------------- calculate_rewards
def test_totals_and_parts():
    model = Recorder([1.5, -2.0])
    total, parts = calculate_rewards(
        ["<|im_start|>user\n2+2<|im_end|>\n<|im_start|>assistant\n<think>\n"], [GOOD, "4"], model,
        answers=["4"], answer_reward=2.0, return_parts=True,
    )  # fmt: skip
    # GOOD: 0.5 + 1 + 0.25 + 1.5 + 2 = 5.25; "4": too short -0.5, unfinished thinking so no answer, -2.0
    torch.testing.assert_close(total, torch.tensor([5.25, -2.5]))
    assert tuple(parts) == REWARD_PARTS == ("length", "thinking", "tag", "repetition", "rm", "answer")
    assert {name: part.tolist() for name, part in parts.items()} == {
        "length": [0.5, -0.5], "thinking": [1.0, 0.0], "tag": [0.25, 0.0], "repetition": [0.0, 0.0], "rm": [1.5, -2.0],
        "answer": [2.0, 0.0],
    }  # fmt: skip
    assert all(part.dtype == torch.float32 and part.shape == (2,) for part in [total, *parts.values()])
    torch.testing.assert_close(sum(parts.values()), total)


def test_without_a_reward_model_the_total_is_the_rules():
    responses = [row["response"] for row in GOLDEN]
    total = calculate_rewards(["p"], responses, None)
    torch.testing.assert_close(total, torch.tensor([rule_reward(text) for text in responses]))
    assert total.device.type == "cpu" and not total.requires_grad


def test_response_i_belongs_to_prompt_i_over_g():
    prompts = [f"<|im_start|>user\nquestion {k}<|im_end|>\n<|im_start|>assistant\n" for k in range(2)]
    model = Recorder(range(6))
    total, parts = calculate_rewards(
        prompts, ["the answer is 0"] * 6, model, answers=["0", "1"], answer_reward=1.0, return_parts=True
    )
    asked = [messages[0]["content"] for messages, _ in model.calls]
    assert asked == ["question 0"] * 3 + ["question 1"] * 3
    assert parts["answer"].tolist() == [1.0] * 3 + [0.0] * 3
    assert parts["rm"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert total.shape == (6,)


def test_each_prompt_says_whether_its_own_think_block_is_open():
    prompts = ["<|im_start|>assistant\n<think>\n", "<|im_start|>assistant\n<think>\n\n</think>\n\n"]
    _, parts = calculate_rewards(prompts, ["7"] * 4, None, answers=["7", "7"], answer_reward=1.0, return_parts=True)
    assert parts["answer"].tolist() == [0.0, 0.0, 1.0, 1.0]


def test_the_model_gets_the_structured_messages_and_the_answer_part():
    messages = [[{"role": "user", "content": "解释 <|im_end|> 的作用"}], [{"role": "user", "content": "b"}]]
    for kind in (Recorder, BatchRecorder):
        model = kind([0.0, 0.0])
        calculate_rewards(["wrong", "wrong"], [GOOD, " no tag "], model, messages=messages)
        if kind is Recorder:
            assert model.calls == [(messages[0], "The answer is 4."), (messages[1], " no tag ")]
        else:
            assert model.calls == [(messages, ["The answer is 4.", " no tag "])]


def test_structured_and_parsed_messages_agree():
    prompt = "<|im_start|>user\n解释 <|im_end|> 的作用<|im_end|>\n<|im_start|>assistant\n<think>\n"
    parsed, structured = Recorder([0.0]), Recorder([0.0])
    calculate_rewards([prompt], ["x"], parsed)
    calculate_rewards([prompt], ["x"], structured, messages=[[{"role": "user", "content": "解释 <|im_end|> 的作用"}]])
    assert parsed.calls == structured.calls


@pytest.mark.parametrize("score", [math.nan, math.inf, -math.inf, torch.tensor(float("nan"))])
@pytest.mark.parametrize("kind", [Recorder, BatchRecorder])
def test_a_score_that_is_not_finite_is_nan_and_only_there(score, kind):
    total, parts = calculate_rewards(["p"], ["a", "b", "c"], kind([1.0, score, 2.0]), return_parts=True)
    assert torch.isnan(parts["rm"]).tolist() == torch.isnan(total).tolist() == [False, True, False]
    assert parts["length"].tolist() == [-0.5] * 3
    assert total[2].item() == 1.5


@pytest.mark.parametrize(("batch", "rows"), [(2, 3), (0, 0), (2, 0), (3, 2), (0, 2)])
def test_counts_that_do_not_fit_are_refused(batch, rows):
    with pytest.raises(ValueError, match=f"{batch} prompts and {rows} responses"):
        calculate_rewards(["p"] * batch, ["r"] * rows, None)


def test_lists_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="3 messages for 2 prompts"):
        calculate_rewards(["p"] * 2, ["r"] * 2, None, messages=[[]] * 3)
    with pytest.raises(ValueError, match="4 answers for 2 prompts"):
        calculate_rewards(["p"] * 2, ["r"] * 4, None, answers=["1"] * 4)
    with pytest.raises(RuntimeError, match="gave 1 scores for 2 responses"):
        calculate_rewards(["p"] * 2, ["r"] * 2, BatchRecorder([1.0]))
    with pytest.raises(RuntimeError, match="not a number"):
        calculate_rewards(["p"], ["r"], Recorder([None]))


def test_answer_reward_off_by_default():
    _, parts = calculate_rewards(["p"], ["4"], None, answers=["4"], return_parts=True)
    assert parts["answer"].tolist() == [0.0]
