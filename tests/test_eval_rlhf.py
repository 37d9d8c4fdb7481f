"""scripts/eval_rlhf.py: statistics worked by hand, what it prints and writes, and what it refuses."""

import itertools
import json
import math

import pytest
import torch

from dataset.lm_dataset import RLAIFDataset
from scripts import eval_rlhf
from scripts.eval_rlhf import main, parse_args, table_lines, verdict
from trainer.arguments import STARTER_DIR
from trainer.checkpoints import read_torch_file
from trainer.evaluation import Evaluator, bootstrap_interval, load_for_inference, pass_at_k, win_rate
from trainer.rollout_engine import TorchRolloutEngine

NAN = math.nan
STARTER = STARTER_DIR / "starter_sft_128.pth"


# ---------------------------------------------------------------------------------------------- statistics
@pytest.mark.parametrize(("samples", "k"), [(1, 1), (4, 1), (4, 2), (4, 4), (7, 3)])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(samples, k):
    counts = torch.arange(samples + 1.0)
    for count, chance in zip(range(samples + 1), pass_at_k(counts, samples, k).tolist(), strict=True):
        subsets = list(itertools.combinations([i < count for i in range(samples)], k))
        assert chance == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


def test_pass_at_k_by_hand_and_its_limits():
    # 2 right of 5, k = 2: 1 - C(3,2) / C(5,2) = 1 - 3/10; the naive 1 - (1 - 2/5)² would say 0.64
    assert pass_at_k(torch.tensor([2.0, NAN]), 5, 2).nan_to_num(-1).tolist() == pytest.approx([0.7, -1.0])
    for k in (0, 6):
        with pytest.raises(ValueError, match=f"pass@{k} of 5 answers"):
            pass_at_k(torch.tensor([2.0]), 5, k)


def test_bootstrap_interval():
    values = torch.tensor([0.0, 1.0] * 50, dtype=torch.float64)
    low, high = bootstrap_interval(values)
    # normal approximation: 0.5 ± 1.96 · 0.05
    assert low == pytest.approx(0.402, abs=0.015) and high == pytest.approx(0.598, abs=0.015)
    assert bootstrap_interval(torch.cat([values, torch.tensor([NAN, math.inf])])) == (low, high)  # the same each time
    assert bootstrap_interval(torch.full((5,), 2.0)) == (2.0, 2.0)
    assert all(math.isnan(end) for end in bootstrap_interval(torch.tensor([1.0, NAN])))


def test_win_rate_by_hand():
    ours = torch.tensor([[2.0, 1.0], [0.0, 3.0], [NAN, 1.0]])
    theirs = torch.tensor([[1.0, 1.0], [1.0, 1.0], [0.0, 2.0]])
    found = win_rate(ours, theirs)
    # prompt 0: won, tied = .75; prompt 1: lost, won = .5; prompt 2: left out, lost = 0
    assert (found["wins"], found["ties"], found["losses"]) == (2, 1, 2)
    assert found["win_rate"] == pytest.approx((0.75 + 0.5 + 0) / 3) and found["interval"][0] <= found["win_rate"]
    mirrored = win_rate(theirs, ours)
    assert mirrored["wins"] == 2 and mirrored["win_rate"] == pytest.approx(1 - found["win_rate"])
    assert win_rate(ours, ours + 1e-8)["ties"] == 5  # rounding does not win


def test_the_verdict_needs_an_interval_without_a_half():
    found = {"wins": 6, "ties": 0, "losses": 4, "win_rate": 0.6}
    assert verdict({**found, "interval": (0.45, 0.7)}).endswith("no clear difference")
    assert verdict({**found, "interval": (0.51, 0.7)}).endswith("A earns more")
    assert verdict({**found, "interval": (0.1, 0.49)}).endswith("A earns less")
    assert "60.0% [51.0%, 70.0%]" in verdict({**found, "interval": (0.51, 0.7)})
    none = {"wins": 0, "ties": 0, "losses": 0, "win_rate": NAN, "interval": (NAN, NAN)}
    assert "no answer of both has a finite reward" in verdict(none)


def test_table_by_hand():
    def result(accuracy, kl):
        values = {"accuracy": accuracy, "kl": kl, "rewards/rm": [NAN, NAN]}
        return {"values": {name: torch.tensor(numbers, dtype=torch.float64) for name, numbers in values.items()}}

    ours, theirs = result([1.0, 0.5], [0.01, 0.03]), result([0.5, 0.0], [0.0, 0.0])
    lines = table_lines(ours, theirs)
    assert len({len(line) for line in lines}) == 1 and len(lines) == 3  # a part without a number is left out
    assert lines[1].split() == "accuracy, sampled 75.0% ± 25.0 25.0% ± 25.0 +50.0% [+50.0, +50.0]".split()
    assert "0.0200 ± 0.0100" in lines[2] and "+0.0200" in lines[2]
    assert table_lines(ours, None)[1].split() == "accuracy, sampled 75.0% ± 25.0".split()


# ---------------------------------------------------------------------------------------------- the script
def small(**flags) -> list[str]:
    flags = {"max_prompts": 3, "samples": 2, "max_gen_len": 12, "device": "cpu", "reward_model_path": "none", **flags}
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


@pytest.fixture(scope="module")
def other_weights(tmp_path_factory):
    """The starter, changed enough to say other things."""
    state = read_torch_file(STARTER)
    torch.manual_seed(0)
    state = {name: t + 0.2 * torch.randn_like(t) if "down_proj" in name else t for name, t in state.items()}
    path = tmp_path_factory.mktemp("other") / "other_128.pth"
    torch.save(state, path)
    return path


def test_weights_against_others(other_weights, tmp_path, capsys):
    target = tmp_path / "eval.json"
    assert main(small(weights=STARTER, baseline=other_weights, json=target)) == 0
    shown, content = capsys.readouterr().out, json.loads(target.read_text(encoding="utf-8"))
    for words in (f"A  {STARTER}", f"B  {other_weights}", f"KL to  {other_weights}", "pass@2", "rewards/answer",
                  "95% interval", "A against B by reward, same prompts and seeds", "bootstrap over prompts",
                  f"wrote {target}"):  # fmt: skip
        assert words in shown
    numbers = content["a"]["metrics"]
    assert content["settings"]["prompts"] == 3 and numbers["kl"] > 0 and content["b"]["metrics"]["kl"] == 0
    assert numbers["kl_sequence"] != 0 and numbers["pass@1"] == numbers["accuracy"]
    found = content["a_against_b"]
    assert found["wins"] + found["ties"] + found["losses"] == 6 and len(content["a"]["samples"]) == 3
    gap = content["a_minus_b"]["reward"]["mean"]
    assert gap == pytest.approx(numbers["reward"] - content["b"]["metrics"]["reward"])
    assert list(tmp_path.iterdir()) == [target]


def test_weights_against_themselves_are_all_ties(tmp_path, capsys):
    target = tmp_path / "eval.json"
    assert main(["--starter", *small(baseline=STARTER, json=target)]) == 0
    content = json.loads(target.read_text())
    assert content["a_against_b"] | {"interval": 0} == {"wins": 0, "ties": 6, "losses": 0, "win_rate": 0.5,
                                                       "interval": 0}  # fmt: skip
    assert content["a"]["metrics"] == content["b"]["metrics"] and content["a"]["metrics"]["kl"] == 0


def test_the_numbers_are_those_of_the_training_scripts(tokenizer, tmp_path, capsys):
    """The same flags through the Evaluator as a run makes it: every metric of the log is in the file, equal."""
    target = tmp_path / "eval.json"
    flags = small(weights=STARTER, reference=STARTER, samples=4, json=target)
    assert main(flags) == 0
    args = parse_args(flags)
    data = RLAIFDataset(args.data, tokenizer, args.max_seq_len, args.thinking_ratio, system_ratio=args.system_ratio)
    model = load_for_inference(STARTER, tokenizer, "cpu")
    metrics = Evaluator(TorchRolloutEngine(model, tokenizer), tokenizer, data, None, args, "cpu", policy=model,
                        reference=model).evaluate()["metrics"]  # fmt: skip
    numbers = json.loads(target.read_text())["a"]["metrics"]
    known = {name.removeprefix("eval/"): value for name, value in metrics.items()}
    compared = [name for name in known if name in numbers]
    assert set(known) - set(compared) <= {"prompts", "length_greedy", "length_greedy_se"} and len(compared) > 15
    assert {name: numbers[name] for name in compared} == pytest.approx({name: known[name] for name in compared})


def test_own_rewards_and_weights_count(tmp_path, capsys):
    own = tmp_path / "mine_of_eval.py"
    own.write_text("def halves(responses):\n    return [0.5 if i % 2 else None for i in range(len(responses))]")
    target = tmp_path / "eval.json"
    weights = "length=0,thinking=0,tag=0,repetition=0,answer=0,rm=0"
    # with rm at 0 the reward model is not even looked for
    flags = small(weights=STARTER, json=target, reward_fn=f"{own}:halves:4", reward_weights=weights,
                  reward_model_path="nowhere")  # fmt: skip
    assert main(flags) == 0
    numbers = json.loads(target.read_text())["a"]["metrics"]
    assert numbers["rewards/halves"] == 0.5 and numbers["reward"] == 1.0  # the mean of 0 and 4 · 0.5
    assert "b" not in json.loads(target.read_text()) and "kl" not in numbers


@pytest.mark.parametrize(
    ("flags", "words"),
    [({}, "argument --weights: name the .pth"), ({"weights": "gone.pth"}, "--weights: gone.pth is not there"),
     ({"weights": "."}, "--weights: . is a folder without config.json; expected a .pth"),
     ({"weights": STARTER, "data": "gone.jsonl"}, "--data: gone.jsonl is not there; expected a JSONL file"),
     ({"weights": STARTER, "data": "."}, "--data: . is a folder; expected a JSONL file"),
     ({"weights": STARTER, "baseline": "gone.pth"}, "--baseline: gone.pth is not there; expected a .pth"),
     ({"weights": STARTER, "pass_k": "1,8"}, "--pass_k: 8 is more than --samples 4"),
     ({"weights": STARTER, "pass_k": "0"}, "--pass_k: expected a whole number of at least 1"),
     ({"weights": STARTER, "json": "."}, "--json: . is a folder"), ({"weights": STARTER, "samples": 0}, "--samples")],
)  # fmt: skip
def test_wrong_flags_are_refused_in_one_line(flags, words, capsys):
    with pytest.raises(SystemExit) as stop:
        parse_args([word for name, value in flags.items() for word in (f"--{name}", str(value))])
    shown = capsys.readouterr().err
    assert stop.value.code == 2 and words in shown and shown.count("\n") == 1


def test_without_data_the_starters_settings_hold():
    args = parse_args(["--weights", str(STARTER)])
    assert (args.max_gen_len, args.thinking_ratio, args.answer_reward) == (64, 1.0, 4.0)
    assert args.data.endswith("rlaif_starter_heldout.jsonl") and args.pass_k == [1, 2, 4]
    assert parse_args(["--weights", str(STARTER), "--samples", "6"]).pass_k == [1, 2, 4]
    own = parse_args(["--weights", str(STARTER), "--data", str(STARTER)])
    assert (own.max_gen_len, own.answer_reward, own.reward_model_path) == (1024, 0.0, "none")
    assert parse_args(["--starter", "--data", str(STARTER)]).max_gen_len == 64
    assert parse_args(["--starter"]).weights == str(STARTER) and eval_rlhf.STARTER["max_seq_len"] == 128


def test_an_unwritable_file_is_found_before_the_work(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(eval_rlhf, "start_process", lambda args: pytest.fail("went on"))
    with pytest.raises(OSError):
        main(small(weights=STARTER, json=tmp_path / "file" / "eval.json"))
