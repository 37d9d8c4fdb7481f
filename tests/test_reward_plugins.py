"""Reward functions of the user's own, from flag to number: what the flags refuse, how files load, what errors name."""

import argparse
import math
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from trainer import rewards
from trainer.arguments import REPO_ROOT
from trainer.reward_plugins import (
    COLUMNS, REWARD_PARTS, load_reward_functions, needs_reward_model, parse_reward_fn, parse_reward_weights,
    reward_fn_spec, reward_settings, reward_weights_spec,
)  # fmt: skip
from trainer.rewards import calculate_rewards

NAN = math.nan
LONG = "x" * 30  # a response that earns 0.5 for its length and nothing else


@pytest.fixture
def load(tmp_path):
    """Function of a file's text and of function names (and weights) giving the loaded functions."""

    def write(text: str, *functions: str, name: str = "rewards_of_mine.py"):
        path = tmp_path / name
        path.write_text(text)
        return load_reward_functions([f"{path}:{function}" for function in functions])

    return write


def columns(n: int, **changed) -> dict:
    """Lists of length n under every name that a function may ask for."""
    return {name: [f"{name} {i}" for i in range(n)] for name in COLUMNS} | changed


# ---------------------------------------------------------------------------------------------- flags
def test_a_spec_is_file_function_and_weight(tmp_path):
    path = tmp_path / "a:b.py"
    path.write_text("")
    assert parse_reward_fn(f"{path}:score") == (path, "score", 1.0)
    assert parse_reward_fn(f"{path}:score:-0.5") == (path, "score", -0.5)
    assert reward_fn_spec(f"{path}:score:2") == f"{path}:score:2"


@pytest.mark.parametrize(
    ("tail", "words"),
    [("", "expected path/to/file.py:function"), (":", "expected path"), (":a.b", "expected path"),
     (":f:1:2", "expected path"), (":f:", "the weight of"), (":f:nan", "'nan', expected a finite"),
     (":f:inf", "expected a finite"), (":f:x", "'x', expected a finite")],
)  # fmt: skip
def test_a_wrong_spec_is_refused_in_one_line(tmp_path, tail, words):
    path = tmp_path / "mine.py"
    path.write_text("")
    with pytest.raises(argparse.ArgumentTypeError, match=words) as caught:
        reward_fn_spec(f"{path}{tail}")
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(argparse.ArgumentTypeError, match="gone.py is not a file"):
        reward_fn_spec(f"{tmp_path / 'gone.py'}:f")
    with pytest.raises(argparse.ArgumentTypeError, match="expected path/to/file.py:function"):
        reward_fn_spec("mine.txt:f")


def test_weights_of_the_built_in_parts():
    assert parse_reward_weights(None) == parse_reward_weights("") == dict.fromkeys(REWARD_PARTS, 1.0)
    weights = parse_reward_weights("length=0.5, rm=2,repetition=-1")
    assert weights == {"length": 0.5, "thinking": 1.0, "tag": 1.0, "repetition": -1.0, "rm": 2.0, "answer": 1.0}
    assert reward_weights_spec("rm=0") == "rm=0"


@pytest.mark.parametrize(
    ("text", "words"),
    [("lenght=1", "no part 'lenght' .* the parts are length, thinking, tag, repetition, rm, answer"),
     ("rm=1,rm=2", "twice the part 'rm'"), ("rm", "'rm' in 'rm': expected rm=NUMBER"), ("rm=nan", "finite number"),
     ("rm=", "finite number"), ("rm=1,", "no part ''")],
)  # fmt: skip
def test_wrong_weights_are_refused(text, words):
    with pytest.raises(argparse.ArgumentTypeError, match=words):
        reward_weights_spec(text)


def test_flags_need_neither_torch_nor_transformers():
    code = "import sys, trainer.reward_plugins; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO_ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_settings_are_arguments_of_calculate_rewards(load, tmp_path):
    load("def f(responses): return [1.0] * len(responses)")
    args = SimpleNamespace(answer_reward=3.0, reward_fn=[f"{tmp_path / 'rewards_of_mine.py'}:f:2"],
                           reward_weights="length=0")  # fmt: skip
    total = calculate_rewards(["p"], [LONG, "4"], None, answers=["4"], **reward_settings(args))
    assert total.tolist() == [2.0, 5.0]
    assert needs_reward_model(args) and not needs_reward_model(SimpleNamespace(reward_weights="rm=0"))
    plain = reward_settings(SimpleNamespace(answer_reward=0.0))  # flags that are not there change nothing
    assert plain == {"answer_reward": 0.0, "reward_functions": [], "reward_weights": dict.fromkeys(REWARD_PARTS, 1.0)}


# ---------------------------------------------------------------------------------------------- loading
def test_a_file_is_run_once_and_finds_its_helpers(load, tmp_path):
    (tmp_path / "helper_of_mine.py").write_text("BONUS, RUNS = 4.0, []")
    functions = load(
        "from helper_of_mine import BONUS, RUNS\nRUNS.append(1)\n"
        "def first(responses): return [BONUS + len(RUNS) for _ in responses]\n"
        "def second(responses): return [float(len(RUNS)) for _ in responses]\n",
        "first", "second:0.5",
    )  # fmt: skip
    assert [(f.name, f.weight) for f in functions] == [("first", 1.0), ("second", 0.5)]
    assert functions[0].scores(columns(2)) == [5.0, 5.0] and functions[1].scores(columns(1)) == [1.0]
    assert not any(name.endswith("rewards_of_mine") for name in sys.modules)  # a private name


def test_names_are_unique_also_among_the_built_in_parts(load):
    text = "def score(responses): return [0.0] * len(responses)\ndef length(responses): return [0.0] * len(responses)"
    assert [f.name for f in load(text, "score", "score:2", "length", "score")] == ["score", "score_2", "length_2",
                                                                                  "score_3"]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "function", "words"),
    [("import no_such_thing", "f", r"broken.py: cannot be loaded: ModuleNotFoundError: .*\(line 1 of broken.py\)"),
     ("def f(:", "f", "cannot be loaded: SyntaxError"),
     ("def g(responses): pass\ndef _h(): pass", "f", "no function 'f' in it; it has g$"),
     ("f = 3", "f", "no function 'f' in it; it has none"),
     ("def f(responses, scores): pass", "f", "asks for scores; it is given, by name, any of prompts, messages"),
     ("def f(responses, /): pass", "f", "asks for responses"), ("def f(x, **rest): pass", "f", "asks for x")],
)  # fmt: skip
def test_what_cannot_be_used_is_named(load, text, function, words):
    with pytest.raises(RuntimeError, match=words):
        load(text, function, name="broken.py")


def test_a_file_that_failed_can_be_loaded_once_mended(load):
    with pytest.raises(RuntimeError):
        load("1 / 0", "f")
    assert load("def f(responses): return [2.0]", "f")[0].scores(columns(1)) == [2.0]


# ---------------------------------------------------------------------------------------------- what it is given
def test_functions_take_what_they_ask_for(load):
    text = ("def some(responses, answers, missing=7): return [float(a == r) for a, r in zip(answers, responses)]\n"
            "def everything(**rows): return [float(sorted(rows) == %r)]\n"
            "def mixed(responses, **rows): return [float(len(rows))]\n") % sorted(COLUMNS)  # fmt: skip
    some, everything, mixed = load(text, "some", "everything", "mixed")
    assert some.columns == ("responses", "answers")
    assert some.scores(columns(2, responses=["1", "2"], answers=["1", "1"])) == [1.0, 0.0]
    assert everything.scores(columns(1)) == [1.0] and mixed.scores(columns(1)) == [float(len(COLUMNS) - 1)]


def test_lists_of_length_n_from_calculate_rewards(load):
    seen = []
    (note,) = load("def note(**rows):\n    SEEN.append(rows)\n    return [0.0] * len(rows['responses'])", "note")
    note.function.__globals__["SEEN"] = seen
    prompts = ["<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n", "b"]
    answers, responses = ["1", None], ["r0", "r1", "r2", "r3"]
    calculate_rewards(prompts, responses, None, answers=answers, reward_functions=[note],
                      finished=torch.tensor([True, False, True, True]), metadata=[{"k": 1}, None])  # fmt: skip
    first, second = [{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]
    assert seen[0] == {
        "prompts": [prompts[0]] * 2 + ["b"] * 2, "messages": [first, first, second, second], "responses": responses,
        "answers": ["1", "1", "", ""], "finished": [True, False, True, True],
        "metadata": [{"k": 1}, {"k": 1}, None, None],
    }  # fmt: skip
    calculate_rewards(["b"], ["r"], None, reward_functions=[note], messages=[first])
    assert seen[1] == {"prompts": ["b"], "messages": [first], "responses": ["r"], "answers": [""], "finished": [None],
                       "metadata": [None]}  # fmt: skip


def test_a_function_cannot_change_the_lists_of_the_next(load):
    text = "def eats(responses):\n    n = len(responses)\n    responses.clear()\n    return [0.0] * n\n"
    rows = columns(3)
    load(text, "eats")[0].scores(rows)
    assert rows == columns(3)
    with pytest.raises(ValueError, match="3 values of finished for 2 responses"):
        calculate_rewards(["p"], ["a", "b"], None, finished=[True] * 3)
    with pytest.raises(ValueError, match="2 metadata for 1 prompts"):
        calculate_rewards(["p"], ["a", "b"], None, metadata=[None] * 2)


# ---------------------------------------------------------------------------------------------- what it gives
def test_weights_none_and_nan_by_hand(load):
    text = "def f(responses): return [1.0, None, float('nan'), float('-inf'), True]"
    functions = load(text, "f:2")
    total, parts = calculate_rewards(["p"], [LONG] * 5, None, reward_functions=functions, return_parts=True,
                                     reward_weights={"length": 3.0})  # fmt: skip
    # length 0.5 · 3 = 1.5; the function adds 2 · 1, nothing, NaN, NaN, 2 · 1
    assert total[:2].tolist() == [3.5, 1.5] and torch.isnan(total[2:4]).all() and total[4] == 3.5
    assert parts["f"][0] == 1.0 and parts["f"][4] == 1.0 and torch.isnan(parts["f"][1:4]).all()  # before the weight
    assert parts["length"].tolist() == [0.5] * 5 and tuple(parts) == REWARD_PARTS + ("f",)
    assert total.dtype == parts["f"].dtype == torch.float32


def test_weight_zero_watches_without_paying(load):
    functions = load("def f(responses): return [float('nan'), 5.0]", "f:0")
    total, parts = calculate_rewards(["p"], [LONG] * 2, None, reward_functions=functions, return_parts=True)
    assert total.tolist() == [0.5, 0.5] and parts["f"][1] == 5.0


def test_a_reward_model_of_weight_zero_is_not_asked():
    def get_score(*_):
        raise AssertionError("asked")

    total, parts = calculate_rewards(["p"], [LONG], SimpleNamespace(get_score=get_score), return_parts=True,
                                     reward_weights={"rm": 0.0})  # fmt: skip
    assert total.tolist() == [0.5] and parts["rm"].tolist() == [0.0]
    paid = calculate_rewards(["p"], [LONG], SimpleNamespace(get_score=lambda *_: -1.5), reward_weights={"rm": 2.0})
    assert paid.tolist() == [0.5 - 3.0]


def test_with_all_weights_at_one_no_bit_changes():
    draw = torch.Generator().manual_seed(1)
    scores = (torch.rand(64, generator=draw, dtype=torch.float64) * 6 - 3).tolist()
    texts = [("word %d " % i) * (i % 9) + "</think>" * (i % 3) + "好" * (i % 7) for i in range(64)]
    rules = [rewards.rule_parts(text) for text in texts]
    # as it was before there were weights: parts stacked in double precision, summed over the first dimension
    stacked = [[row[name] for row in rules] for name in rewards.RULE_PARTS] + [scores, [0.0] * 64]
    before = torch.tensor(stacked, dtype=torch.float64).sum(dim=0).float()
    model = SimpleNamespace(get_scores=lambda messages, answers: scores)
    ones = dict.fromkeys(REWARD_PARTS, 1.0)
    assert torch.equal(calculate_rewards(["p"], texts, model), before)
    assert torch.equal(calculate_rewards(["p"], texts, model, reward_weights=ones, reward_functions=[]), before)


@pytest.mark.parametrize("given", ["[1.0, 2.0]", "(1, 2)", "np.array([1, 2])", "torch.tensor([1.0, 2.0])",
                                   "[np.float32(1), torch.tensor(2.0)]"])  # fmt: skip
def test_numbers_in_any_usual_wrapping(load, given):
    (function,) = load("def f(responses): return eval(GIVEN, {'np': np, 'torch': torch})", "f")
    function.function.__globals__.update(GIVEN=given, np=np, torch=torch)
    assert function.scores(columns(2)) == [1.0, 2.0]


@pytest.mark.parametrize(
    ("body", "words"),
    [("return [1.0]", r"reward function f of .*rewards_of_mine.py gave 1 values for 3 responses"),
     ("return 1.0", "gave float, expected a list of 3 numbers"), ("return None", "gave NoneType"),
     ("return {'a': 1}", "gave dict"), ("yield 1.0", "gave generator"), ("return '123'", "gave str"),
     ("return [1.0, '2.0', 3.0]", r"row 2 of 3 \(response 'responses 1'\) gave '2.0', expected a number or None"),
     ("return [1.0, [2.0], 3.0]", r"row 2 of 3 .* gave \[2.0\]"), ("return [1, 2, 10**400]", "row 3 of 3"),
     ("return [1 / (r != 'responses 2') for r in responses]",
      r"row 3 of 3 \(response 'responses 2'\): ZeroDivisionError: division by zero \(line 2 of rewards_of_mine.py\)"),
     ("raise KeyError('k') if len(responses) > 1 else ValueError()", r"row 1 of 3 .*KeyError: 'k'"),
     ("return [1 / (len(responses) - 3)]", "rewards_of_mine.py: ZeroDivisionError")],
)  # fmt: skip
def test_errors_name_function_and_row(load, body, words):
    (function,) = load(f"def f(responses):\n    {body}", "f")
    with pytest.raises(RuntimeError, match=words) as caught:
        function.scores(columns(3))
    assert "\n" not in str(caught.value)


def test_a_long_response_is_cut_in_the_error(load):
    (function,) = load("def f(responses): return ['?']", "f")
    with pytest.raises(RuntimeError) as caught:
        function.scores(columns(1, responses=["y" * 500]))
    assert f"'{'y' * 79}…'" in str(caught.value)
