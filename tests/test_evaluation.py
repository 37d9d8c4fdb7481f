"""The held-out evaluation and the report at a run's end, in numbers worked by hand."""

import json
import math
import random
import sys
import types
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dataset.lm_dataset import RLAIFDataset
from trainer import evaluation, samples
from trainer.evaluation import (
    EVAL_SAMPLES, Evaluator, comparison_table, draw_curve, mean_and_error, report, sample_lines, sparkline,
)  # fmt: skip
from trainer.reward_plugins import REWARD_PARTS
from trainer.rollout_engine import RolloutResult

NAN = math.nan


# ---------------------------------------------------------------------------------------------- small parts
def test_mean_and_error_by_hand():
    # mean 3; variance ((-2)² + 0² + 2²) / 2 = 4 of 3 values: error sqrt(4 / 3)
    mean, error = mean_and_error(torch.tensor([1.0, NAN, 3.0, math.inf, 5.0], dtype=torch.float64))
    assert mean == 3.0 and error == pytest.approx(math.sqrt(4 / 3), abs=1e-12)
    mean, error = mean_and_error(torch.tensor([NAN, 7.0]))
    assert mean == 7.0 and math.isnan(error)
    assert all(math.isnan(value) for value in mean_and_error(torch.tensor([NAN])))


def test_sparkline():
    assert sparkline([]) == ""
    assert sparkline([0.0, 7.0]) == "▁█"
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([2.0, 2.0, 2.0]) == "▄▄▄"
    assert sparkline([0.0, 2.0, 7.0, 9.0, 4.0], width=3) == "▁█▄"  # means of two: 1, 8, 4
    assert len(sparkline([float(i) for i in range(1000)])) <= 60


class Axis:
    """Remembers what was drawn."""

    def __init__(self):
        self.lines = []

    def plot(self, steps, values, **style):
        self.lines.append((list(steps), values))

    def set_title(self, text, **style):
        self.title = text

    def set_xlabel(self, text):
        self.label = text

    def grid(self, **style):
        pass


def fake_matplotlib(monkeypatch):
    """A matplotlib that writes its file and gives the axes it was asked for."""
    made, closed = [], []

    def subplots(rows, columns, **settings):
        axes = np.empty((rows, columns), dtype=object)
        axes[:] = [[Axis()] for _ in range(rows)]
        made.append(axes)
        return SimpleNamespace(tight_layout=lambda: None, savefig=lambda path, **s: path.write_bytes(b"png")), axes

    library, pyplot = types.ModuleType("matplotlib"), types.ModuleType("matplotlib.pyplot")
    library.use, library.pyplot = lambda backend: None, pyplot
    pyplot.subplots, pyplot.close = subplots, closed.append
    monkeypatch.setitem(sys.modules, "matplotlib", library)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", pyplot)
    return made, closed


def test_draw_curve(tmp_path, monkeypatch):
    made, closed = fake_matplotlib(monkeypatch)
    series = {"reward": [float(i) for i in range(30)], "kl": [0.5, 1.5], "short": [1.0], "none": []}
    assert draw_curve(series, tmp_path / "curve.png") == tmp_path / "curve.png"
    assert (tmp_path / "curve.png").is_file() and len(closed) == 1
    assert made[0].shape == (2, 1)  # what has a single value is no curve
    steps, smooth = made[0][0, 0].lines[1]
    assert steps == list(range(1, 31)) and smooth == [0.0, *[i - 0.5 for i in range(1, 30)]]  # mean of the last two
    assert draw_curve({"short": [1.0]}, tmp_path / "none.png") is None


def test_without_matplotlib_there_is_no_picture(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert draw_curve({"reward": [1.0, 2.0]}, tmp_path / "curve.png") is None
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------------------------------- before and after
def result(rows, samples=()):
    return {"per_prompt": torch.tensor(rows, dtype=torch.float64), "metrics": {}, "samples": list(samples)}


def test_comparison_table_by_hand():
    # columns: accuracy, reward, length, greedy and then sampled
    before = result([[0, 1.0, 5, 0.25, 0.5, 6], [1, 2.0, 5, 0.75, 1.5, 8]])
    after = result([[1, 2.0, 5, 0.75, 2.5, 7], [1, 3.0, 5, 0.75, 2.5, 7]])
    lines = comparison_table(before, after)
    assert lines[0].split() == ["held", "out,", "2", "prompts", "before", "after", "change"]
    cells = {line[:28].strip(): line[28:].split() for line in lines[1:]}
    # accuracy greedy: 50 ± 70.71 / sqrt 2 = 50 -> 100; differences 100 and 0: +50 ± 50
    assert cells["accuracy, greedy"] == "50.0% ± 50.0 100.0% ± 0.0 +50.0% ± 50.0".split()
    assert cells["accuracy, sampled x4"] == "50.0% ± 25.0 75.0% ± 0.0 +25.0% ± 25.0".split()
    assert cells["reward, greedy"] == "1.50 ± 0.50 2.50 ± 0.50 +1.00 ± 0.00".split()  # paired: both rose by 1
    assert cells["reward, sampled x4"] == "1.00 ± 0.50 2.50 ± 0.00 +1.50 ± 0.50".split()
    assert cells["length, sampled (tokens)"] == "7.00 ± 1.00 7.00 ± 0.00 +0.00 ± 1.00".split()
    assert len({len(line) for line in lines}) == 1


def test_comparison_leaves_out_accuracy_where_rows_have_no_answer():
    rows = [[NAN, 1.0, 5, NAN, 1.0, 6]] * 2
    names = [line[:28].strip() for line in comparison_table(result(rows), result(rows))]
    assert names == ["held out, 2 prompts", "reward, greedy", "reward, sampled x4", "length, sampled (tokens)"]


def sample(prompt, response, answer=""):
    return {"prompt": prompt, "answer": answer, "response": response}


def test_sample_lines_pair_answers_by_prompt():
    """A run resumed on another number of ranks has samples of other prompts."""
    before = result([], [sample("1+1", "one", "2"), sample("Hi", "a\nb"), sample("gone", "x")])
    after = result([], [sample("Hi", "z" * 300), sample("1+1", "two", "2"), sample("new", "y")])
    lines = sample_lines(before, after)
    assert lines[:3] == ["prompt: 1+1   (expected 2)", "  before: one", "  after : two"]
    assert lines[3:5] == ["prompt: Hi", "  before: a ⏎ b"]
    assert lines[5] == "  after : " + "z" * 199 + "…" and len(lines) == 6


class Log:
    """A run's log without a file."""

    def __init__(self, folder, **series):
        self.folder, self.path, self.kept, self.written = folder, folder / "metrics.jsonl", series, []

    def series(self, name):
        return self.kept.get(name, [])

    def write(self, metrics, line):
        self.written.append((metrics, line))


def test_report_says_what_was_reached_and_where_everything_is(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(evaluation, "draw_curve", lambda series, path: None)
    rows = [[0, 1.0, 5, 0.25, 0.5, 6], [1, 2.0, 5, 0.75, 1.5, 8]]
    before, after = result(rows, [sample("1+1", "one", "2")]), result(rows, [sample("1+1", "two", "2")])
    report(Log(tmp_path, reward=[0.0, 1.0]), before, after, tmp_path / "grpo.pth", ["reward", "kl"], "python again")
    shown = capsys.readouterr().out
    for words in ("accuracy, greedy", "after : two", "▁█  0.000 -> 1.000", f"weights  {tmp_path / 'grpo.pth'}",
                  f"metrics  {tmp_path / 'metrics.jsonl'}", "pip install matplotlib", "next     python again"):
        assert words in shown
    assert "\nkl" not in shown  # nothing was logged under that name


@pytest.mark.parametrize("before", [None, result([[0, 1.0, 5, 0.25, 0.5, 6]])])
def test_report_does_not_compare_different_prompts(tmp_path, monkeypatch, capsys, before):
    """Resumed with another --eval_prompts, or before none were given: there is nothing to pair."""
    monkeypatch.setattr(evaluation, "draw_curve", lambda series, path: None)
    after = result([[1, 2.0, 5, 0.75, 1.5, 8]] * 2)
    report(Log(tmp_path, reward=[0.0, 1.0]), before, after, tmp_path / "w.pth", ["reward"], "again")
    shown = capsys.readouterr().out
    assert "accuracy" not in shown and "weights  " in shown


def test_other_ranks_report_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(evaluation, "is_main_process", lambda: False)
    report(Log(tmp_path), None, None, tmp_path / "w.pth", [], "again")
    assert capsys.readouterr().out == ""


# ---------------------------------------------------------------------------------------------- the evaluator
QUESTIONS = (("1+1=?", "2"), ("1+2=?", "3"), ("1+3=?", "4"), ("1+4=?", "5"), ("Say hi.", None))


class Engine:
    """Answers right greedily where the prompt's index is even; sampled, its j-th answer is right where j <= index.

    Prompt i's answers have i + 1 tokens of log-prob -1, and are cut where i is 4. It draws from every generator.
    """

    def __init__(self, tokenizer):
        self.tokenizer, self.asked = tokenizer, []

    def rollout(self, ids, mask, num_generations, max_new_tokens, temperature, *, prompt_keys, **settings):
        random.random(), np.random.random(), torch.rand(1)
        self.asked.append({"keys": prompt_keys, "temperature": temperature, "count": num_generations,
                           "max_new_tokens": max_new_tokens, **settings})
        texts = []
        for *_, index in prompt_keys:
            right = [index % 2 == 0] if temperature == 0 else [j <= index for j in range(num_generations)]
            texts += [f"It is {QUESTIONS[index][1] if flag else '99'}" for flag in right]
        indices = torch.tensor([index for *_, index in prompt_keys]).repeat_interleave(num_generations)
        n, answer = len(texts), torch.zeros(len(texts), 8)
        return RolloutResult(output_ids=answer, completion_ids=answer, per_token_logps=answer - 1, completions=texts,
                             prompt_lens=answer[:, 0], completion_mask=torch.arange(8) < indices[:, None] + 1,
                             attention_mask=torch.ones(n, 8, dtype=torch.bool), finished=indices != 4)


@pytest.fixture
def heldout(tokenizer, tmp_path):
    rows = [{"conversations": [{"role": "user", "content": text}], "answer": answer} for text, answer in QUESTIONS]
    path = tmp_path / "heldout.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return RLAIFDataset(path, tokenizer, thinking_ratio=0.0, system_ratio=0.0)


@pytest.fixture
def evaluator(heldout, tokenizer, monkeypatch):
    """Function of changed flags giving an Evaluator whose rewards are the length of the answer's text."""

    def rewards(prompts, responses, reward_model, *, messages, answers, answer_reward, finished, return_parts, **_):
        assert len(prompts) == len(messages) == len(answers) and len(finished) == len(responses)
        assert answer_reward == 3.0 and return_parts
        values = torch.tensor([float(len(text)) for text in responses])
        parts = {name: torch.zeros(len(responses)) for name in REWARD_PARTS}
        return values, {**parts, "rm": values - 5, "tag": torch.full_like(values, NAN)}

    monkeypatch.setattr(samples, "calculate_rewards", rewards)

    def build(dataset=heldout, *, policy=None, reference=None, **changes):
        args = SimpleNamespace(**{"eval_prompts": 9, "batch_size": 2, "num_generations": 6, "temperature": 0.8,
                                  "seed": 42, "max_seq_len": 64, "max_gen_len": 8, "top_p": 1.0, "top_k": 0,
                                  "logp_temperature": 0.8, "answer_reward": 3.0, "eval_interval": 0,
                                  "dtype": "float32", **changes})  # fmt: skip
        return Evaluator(Engine(tokenizer), tokenizer, dataset, None, args, "cpu", policy=policy, reference=reference)

    return build


def test_evaluator_by_hand(evaluator, tmp_path):
    log = Log(tmp_path)
    outcome = evaluator().measure(log, step=7)
    table = outcome["per_prompt"]
    assert table.dtype == torch.float64 and table.shape == (5, 6)
    assert table[:, 0].tolist()[:4] == [1, 0, 1, 0] and math.isnan(table[4, 0])
    assert table[:, 3].tolist()[:4] == [0.25, 0.5, 0.75, 1.0] and math.isnan(table[4, 3])
    assert table[:, 1].tolist() == [7, 8, 7, 8, 10]  # "It is 2", "It is 99", …, "It is None"
    assert table[:, 4].tolist() == [7.75, 7.5, 7.25, 7, 10]
    assert table[:, 2].tolist() == table[:, 5].tolist() == [1, 2, 3, 4, 5]
    metrics = outcome["metrics"]
    assert metrics["eval/prompts"] == 5 and metrics["eval/accuracy_greedy"] == 0.5
    assert metrics["eval/accuracy"] == 0.625 and metrics["eval/length"] == 3.0
    # deviations -.375, -.125, .125, .375: variance .3125 / 3, over 4 prompts
    assert metrics["eval/accuracy_se"] == pytest.approx(math.sqrt(0.3125 / 3 / 4), abs=1e-12)
    # 1, 2, 3, 4 right of 4: pass@2 is 1 - C(3,2)/6 = 1/2, 1 - 1/6 = 5/6, 1, 1; the row without an answer is left out
    assert metrics["eval/pass@2"] == pytest.approx((1 / 2 + 5 / 6 + 1 + 1) / 4) and metrics["eval/pass@4"] == 1.0
    assert metrics["eval/rewards/rm"] == pytest.approx((7.75 + 7.5 + 7.25 + 7 + 10) / 5 - 5)
    assert metrics["eval/rewards/length"] == 0.0 and math.isnan(metrics["eval/rewards/tag"])
    assert metrics["eval/clipped_ratio"] == 0.2 and "eval/kl" not in metrics and "table" not in outcome
    # three, spread over the file
    assert [entry["prompt"] for entry in outcome["samples"]] == [QUESTIONS[k][0] for k in (0, 2, 4)]
    assert outcome["samples"][1] == {"prompt": "1+3=?", "answer": "4", "response": "It is 4"}
    assert log.written[0][0] == {"step": 7, **metrics}


def test_kl_by_hand(evaluator, monkeypatch, tmp_path):
    """Log-probs of the engine -1, of the reference -1.5 - index of the prompt; NaN after an answer's end."""
    asked = []

    def score_answers(model, rollout, samples, temperature):
        asked.append((model, samples, temperature))
        lengths = rollout.completion_mask.sum(dim=1, keepdim=True)
        return (0.0 * lengths - 0.5 - lengths).expand(-1, 8).masked_fill(~rollout.completion_mask, NAN), None

    monkeypatch.setattr(evaluation, "score_answers", score_answers)
    reference = torch.nn.Dropout().train()
    metrics = evaluator(reference=reference).measure(Log(tmp_path), 1)["metrics"]
    assert {call[1:] for call in asked} == {(4, 0.8)} and all(call[0] is reference for call in asked)
    # i + 1 tokens with logp - ref = .5 + i: their sum over answers is that times i + 1
    gaps = [0.5 + i for i in range(5)]
    assert metrics["eval/kl_sequence"] == pytest.approx(sum((i + 1) * gap for i, gap in enumerate(gaps)) / 5, abs=1e-6)
    each = [math.exp(-gap) + gap - 1 for gap in gaps]
    assert metrics["eval/kl"] == pytest.approx(sum((i + 1) * k3 for i, k3 in enumerate(each)) / 15, abs=1e-6)
    assert reference.training
    # with the policy at hand its own log-probs are taken, so that policy = reference gives exactly 0
    policy = torch.nn.Identity()
    metrics = evaluator(policy=policy, reference=reference).measure(Log(tmp_path), 1)["metrics"]
    assert (metrics["eval/kl"], metrics["eval/kl_sequence"]) == (0.0, 0.0) and policy in {call[0] for call in asked}


def test_every_evaluation_faces_the_same_dice(evaluator, tmp_path):
    """Keys of a stream of their own, fixed by prompt: not by step, epoch, batch size, or number of ranks."""
    small, large = evaluator(batch_size=1, num_generations=2), evaluator(batch_size=64)
    outcomes = [judge.measure(Log(tmp_path), step) for judge, step in ((small, 1), (large, 2))]
    assert torch.equal(outcomes[0]["per_prompt"].nan_to_num(-1), outcomes[1]["per_prompt"].nan_to_num(-1))
    for judge in (small, large):
        for temperature, count in ((0.0, 1), (0.8, EVAL_SAMPLES)):
            calls = [call for call in judge.answerer.engine.asked if call["temperature"] == temperature]
            assert [key for call in calls for key in call["keys"]] == [(2, 42, 0, index) for index in range(5)]
            assert all(call["count"] == count and call["max_new_tokens"] == 8 for call in calls)
    assert len(large.answerer.engine.asked) == 2 and len(small.answerer.engine.asked) == 10


def test_no_generator_notices_an_evaluation(evaluator, tmp_path):
    """The engine, as a reward function may, draws from python, numpy and torch; training must go on as without it."""
    def states() -> tuple:
        return random.getstate(), str(np.random.get_state(legacy=False)), torch.get_rng_state().tolist()

    before = states()
    evaluator().measure(Log(tmp_path), 1)
    assert states() == before


def test_ranks_share_the_prompts_and_sum_their_tables(evaluator, monkeypatch, tmp_path):
    whole, tables = evaluator().measure(Log(tmp_path), 1)["per_prompt"], []
    monkeypatch.setattr(evaluation, "all_reduce_sum", lambda table: tables.append(table.clone()) or table)
    calls = []
    for rank in range(3):
        monkeypatch.setattr(evaluation, "rank_and_world", lambda rank=rank: (rank, 3))
        judge = evaluator(batch_size=1, num_generations=4)
        judge.measure(Log(tmp_path), 1)
        calls.append(len(judge.answerer.engine.asked))
    assert calls == [4, 4, 4]  # two chunks each, also rank 2 with its one prompt: ranks meet in an engine of servers
    summed = sum(tables)
    assert torch.equal(summed[:, 1:, :3].nanmean(1).nan_to_num(-1), whole[:, 3:].nan_to_num(-1))
    assert torch.equal(summed[:, 0, :3].nan_to_num(-1), whole[:, :3].nan_to_num(-1))
    assert tables[1][:, 1, 2].tolist() == [0, 2, 0, 0, 5]  # rank 1 has prompts 1 and 4


def test_number_of_prompts_and_no_held_out_data(evaluator, tmp_path):
    log = Log(tmp_path)
    assert evaluator(eval_prompts=2).measure(log, 1)["metrics"]["eval/prompts"] == 2
    for judge in (evaluator(None), evaluator(eval_prompts=0)):
        assert judge.measure(log, 1) is None and judge.answerer.engine.asked == []
    assert len(log.written) == 1
