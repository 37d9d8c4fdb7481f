"""The two worked examples of own rewards, on small stand-ins of the packages they use, and on those where installed."""

import importlib.util
import json
import sys
import types
from fractions import Fraction

import pytest

from dataset.lm_dataset import RLAIFDataset, read_rows
from trainer.arguments import REPO_ROOT
from trainer.reward_plugins import load_reward_functions
from trainer.rewards import calculate_rewards

EXAMPLES = REPO_ROOT / "scripts" / "examples"
THINK = "<|im_start|>assistant\n<think>\n"


@pytest.fixture(autouse=True)
def files_are_loaded_anew():
    """A file is run once a process; here each test has its own stand-ins."""
    yield
    for name in [name for name in sys.modules if name.startswith("_reward_file_")]:
        del sys.modules[name]


def installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def math_verify_stand_in():
    """Reads the last word as a fraction; no more."""
    module = types.ModuleType("math_verify")

    def parse(text):
        try:
            return [Fraction(text.split()[-1].rstrip("."))]
        except (ValueError, IndexError):
            return []

    module.parse, module.verify = parse, lambda gold, given: bool(gold) and gold == given
    return module


def reasoning_gym_stand_in():
    """Two tasks: "sum" of the numbers i + seed and 1, and "odd", which JSON does not carry whole."""
    module = types.ModuleType("reasoning_gym")

    class Tasks(list):
        @staticmethod
        def score_answer(answer, task):
            if isinstance(task["metadata"].get("pair"), list):
                return 0.0
            return 1.0 if answer == task["answer"] else 0.25 if task["answer"] in answer else 0.0

    def create_dataset(name, size, seed, step=1):
        if name not in ("sum", "odd"):
            raise ValueError(f"Dataset '{name}' not registered")
        extra = {"pair": (1, 2)} if name == "odd" else {}
        return Tasks({"question": f"{i * step + seed}+1?\n", "answer": str(i * step + seed + 1),
                      "metadata": {"source_dataset": name, "source_index": i, **extra}}
                     for i in range(size))  # fmt: skip

    module.create_dataset, module.get_score_answer_fn = create_dataset, lambda name: Tasks.score_answer
    return module


# ---------------------------------------------------------------------------------------------- math_reward.py
MATH = f"{EXAMPLES / 'math_reward.py'}:exact_number"


@pytest.mark.parametrize("real", [False, True])
def test_numbers_are_compared_however_they_are_written(real, monkeypatch):
    if real and not installed("math_verify"):
        pytest.skip("math-verify is not installed")
    if not real:
        monkeypatch.setitem(sys.modules, "math_verify", math_verify_stand_in())
    functions = load_reward_functions([f"{MATH}:2"])
    prompts = ["?"] * 5 + [THINK] * 2
    responses = ["It is 1/2.", "0.5", "答案是134。", "It is 41.", "Paris", "so it is 42", "so</think>\n\nIt is 42."]
    answers = ["0.5", "1/2", "134", "42", "Paris", "42", "42"]
    _, parts = calculate_rewards(prompts, responses, None, answers=answers, reward_functions=functions,
                                 return_parts=True)  # fmt: skip
    # a row whose answer is no number does not count; unfinished thinking is no answer
    assert parts["exact_number"].nan_to_num(-1).tolist() == [1, 1, 1, 0, -1, 0, 1]
    _, parts = calculate_rewards(["?"], ["4"], None, reward_functions=functions, return_parts=True)
    assert parts["exact_number"].isnan().all()  # no answer in the row


def test_math_latex_where_the_package_is_installed():
    pytest.importorskip("math_verify")
    (function,) = load_reward_functions([MATH])
    responses = [r"\boxed{\frac{3}{4}}", "75%", r"$\frac{4}{3}$"]
    rows = {"prompts": ["?"] * 3, "responses": responses, "answers": ["0.75"] * 3}
    assert function.scores(rows) == [1.0, 1.0, 0.0]


@pytest.mark.parametrize(("file", "function", "package", "pip"),
                         [("math_reward.py", "exact_number", "math_verify", "math-verify"),
                          ("reasoning_gym_tasks.py", "task_score", "reasoning_gym", "reasoning-gym")])  # fmt: skip
def test_a_missing_package_is_named_before_a_model_loads(monkeypatch, file, function, package, pip):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(RuntimeError, match=f"{file}: cannot be loaded: .*pip install {pip}"):
        load_reward_functions([f"{EXAMPLES / file}:{function}"])


# ---------------------------------------------------------------------------------------------- reasoning_gym_tasks.py
GYM = f"{EXAMPLES / 'reasoning_gym_tasks.py'}:task_score"


@pytest.fixture
def gym(monkeypatch):
    """The script, with the stand-in for its package."""
    monkeypatch.setitem(sys.modules, "reasoning_gym", reasoning_gym_stand_in())
    from scripts.examples import reasoning_gym_tasks

    return reasoning_gym_tasks


def write(gym, path, *words) -> list[dict]:
    assert gym.main([str(path), "--tasks", "sum", *words]) == 0
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_are_rows_of_our_format(gym, tokenizer, tmp_path, capsys):
    path = tmp_path / "tasks.jsonl"
    rows = write(gym, path, "--size", "3", "--seed", "5")
    assert rows[1] == {"conversations": [{"role": "user", "content": "6+1?"}], "answer": "7",
                       "metadata": {"question": "6+1?\n", "answer": "7",
                                    "metadata": {"source_dataset": "sum", "source_index": 1}}}  # fmt: skip
    assert [row.answer for row in read_rows(path)[0]] == ["6", "7", "8"]
    assert RLAIFDataset(path, tokenizer)[1]["metadata"] == rows[1]["metadata"]
    assert capsys.readouterr().out == f"wrote 3 rows of sum to {path}\n"
    first = path.read_bytes()
    assert write(gym, path, "--size", "3", "--seed", "5", "--overwrite", "1") and path.read_bytes() == first
    assert write(gym, tmp_path / "steps.jsonl", "--size", "3", "--set", "sum.step=2")[2]["answer"] == "47"


def test_held_out_tasks_come_behind_and_none_is_trained_on(gym, tmp_path):
    path = tmp_path / "tasks.jsonl"
    training = write(gym, path, "--size", "3", "--heldout", "2")
    heldout = [json.loads(line) for line in (tmp_path / "tasks_heldout.jsonl").read_text().splitlines()]
    assert [row["metadata"]["metadata"]["source_index"] for row in training + heldout] == [0, 1, 2, 3, 4]
    # step 0 makes every question the same: nothing is left to hold out
    with pytest.raises(ValueError, match="every held-out question occurs in training"):
        write(gym, tmp_path / "same.jsonl", "--size", "2", "--heldout", "2", "--set", "sum.step=0")


@pytest.mark.parametrize(
    ("words", "message"),
    [(["--tasks", "none"], "cannot make none with its defaults: Dataset 'none' not registered"),
     (["--tasks", "odd"], "tasks of odd score otherwise once they were written as JSON"),
     (["--set", "sum.steps=2"], "cannot make sum with {'steps': 2}"), (["--set", "odd.step=2"], "a task of --tasks"),
     (["--set", "sum.step"], "expected TASK.SETTING=VALUE"), (["--set", "sum.step=two"], "'two' is not JSON")],
)  # fmt: skip
def test_what_cannot_be_written_is_said_and_nothing_is_left(gym, tmp_path, words, message):
    with pytest.raises(ValueError, match=message):
        gym.main([str(tmp_path / "tasks.jsonl"), "--tasks", "sum", *words])
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "tasks.jsonl").write_text("mine")
    with pytest.raises(ValueError, match="exists already"):
        gym.main([str(tmp_path / "tasks.jsonl"), "--tasks", "sum"])
    assert (tmp_path / "tasks.jsonl").read_text() == "mine"


def test_the_packages_own_score_is_the_reward(gym):
    functions = load_reward_functions([f"{GYM}:3"])
    task = {"question": "1+1?", "answer": "2", "metadata": {"source_dataset": "sum"}}
    prompts, metadata = ["?", "?", THINK, THINK], [task, None, task, {"metadata": {}}]
    responses = ["It is 2.", "2 or 3", "2", "2", "2", "x</think>\n\n2", "2", "2"]
    total, parts = calculate_rewards(
        prompts, responses, None, reward_functions=functions, metadata=metadata, return_parts=True,
        reward_weights=dict.fromkeys(("length", "thinking", "tag"), 0.0),
    )  # fmt: skip
    # "It is 2." ends in the answer; "2 or 3" only holds it; rows that are no task do not count; unfinished thinking
    assert parts["task_score"].nan_to_num(-1).tolist() == [1.0, 0.25, -1, -1, 0.0, 1.0, -1, -1]
    assert total.tolist() == [3.0, 0.75, 0.0, 0.0, 0.0, 3.0, 0.0, 0.0]


def test_real_tasks_where_the_package_is_installed(tmp_path):
    pytest.importorskip("reasoning_gym")
    from scripts.examples import reasoning_gym_tasks

    path = tmp_path / "tasks.jsonl"
    assert reasoning_gym_tasks.main([str(path), "--size", "4", "--heldout", "2"]) == 0
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["metadata"]["metadata"]["source_dataset"] for row in rows] == ["chain_sum", "leg_counting"] * 4
    responses = [text for row in rows for text in (f"The answer is {row['answer']}.", "none")]
    _, parts = calculate_rewards(
        ["?"] * 8, responses, None, metadata=[row["metadata"] for row in rows], return_parts=True,
        reward_functions=load_reward_functions([GYM]),
    )  # fmt: skip
    assert parts["task_score"].tolist() == [1.0, 0.0] * 8
