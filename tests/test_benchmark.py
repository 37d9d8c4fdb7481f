"""The benchmark measures what it says, and times nothing when its two sides differ. No test looks at a time."""

import json
import subprocess
import sys

import pytest
import torch

from benchmarks import limits, memory, report
from benchmarks.check import check, compare_updates
from benchmarks.product import Product, answer_lengths, end_after, take_step
from benchmarks.stopwatch import Stopwatch
from benchmarks.textbook import Textbook, token_logps, token_values
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from scripts import benchmark
from trainer import rl_math, train_grpo, train_ppo
from trainer.arguments import REPO_ROOT
from trainer.rollout_engine import compute_per_token_logps

TINY = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 1800, "batch_size": 2, "prompt_len": 20,
        "max_gen_len": 8, "repeats": 1, "threads": 1, "device": "cpu"}  # fmt: skip
GRPO_PHASES = {"decode", "reward", "reference", "forward", "backward", "optimizer", "other", "step"}


def argv(**changes) -> list[str]:
    flags = {**TINY, **changes}
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


def flags(**changes):
    return benchmark.parse_args(argv(**changes))


@pytest.fixture(autouse=True)
def quick_limits(monkeypatch):
    """The fewest calls and a small copy, since no time is looked at."""
    monkeypatch.setattr(limits, "MEASURED_SECONDS", 0.0)
    monkeypatch.setattr(limits, "COPY_BYTES", 1 << 16)


@pytest.fixture
def sides(tmp_path):
    """Function of flags giving (product, textbook)."""

    def build(**changes):
        args = flags(**changes)
        product = Product(args, tmp_path)
        return product, Textbook(product, args.prompt_len + args.max_gen_len)

    return build


# ---------------------------------------------------------------------------------------------- the whole script
@pytest.mark.parametrize(
    ("algo", "lengths", "use_moe"),
    [("grpo", "fixed", 0), ("grpo", "varied", 1), ("ppo", "fixed", 0), ("ppo", "varied", 0)],
)
def test_measures_both_sides_and_writes_all_of_it(tmp_path, capsys, algo, lengths, use_moe):
    more = {"num_generations": 3} if algo == "grpo" else {"batch_size": 3}
    path = tmp_path / "result.json"
    assert benchmark.main(argv(algo=algo, lengths=lengths, use_moe=use_moe, memory=0, json=path, **more)) == 0
    result = json.loads(path.read_text())
    assert list(tmp_path.iterdir()) == [path]
    rows = 6 if algo == "grpo" else 3
    # 3 rows of 8: shares 1/8 + 7/8 · (1/6, 3/6, 5/6) = 0.27, 0.56, 0.85; 6 rows: 0.20, 0.34, 0.49, 0.64, 0.78, 0.93
    answers = {"fixed": 8 * rows, "varied": 2 + 4 + 7 if rows == 3 else 2 + 3 + 4 + 5 + 6 + 7}[lengths]
    longest = 8 if lengths == "fixed" else 7
    assert result["tokens"] == {"prompts": 20 * (3 if algo == "ppo" else 2), "answers": answers, "longest": longest,
                                "rows": rows}  # fmt: skip
    agreement = result["agreement"]
    assert agreement["tokens"] == answers
    assert max(agreement["loss_error"], agreement["gradient_error"]) <= 1e-5
    assert 0 < agreement["gradient_error"] and agreement["logp_error"] <= 1e-4
    phases = result["phases"]
    values = {"values"} if algo == "ppo" else set()
    assert set(phases["this project"]) == GRPO_PHASES | values
    assert set(phases["textbook"]) == GRPO_PHASES | values | {"old log-probs"}
    for side in phases.values():
        assert side["step"] == pytest.approx(sum(seconds for phase, seconds in side.items() if phase != "step"))
        assert all(seconds > 0 for seconds in side.values())
    assert {name: len(steps) for name, steps in result["steps"].items()} == {"textbook": 1, "this project": 1}
    limit = result["limits"]
    assert limit["phases"]["backward"] == pytest.approx(2 * limit["phases"]["forward"])
    assert str(rows) in limit["token_step"] and limit["weights_read"] > 0
    # 2 layers of q, o 32x32, k, v 16x32, four experts' or one's gate, up, down 128x32; the head 1800x32
    matrices = 2 * (2 * 32 * 32 + 2 * 16 * 32 + (4 if use_moe else 1) * 3 * 128 * 32 + 4 * 32 * use_moe) + 1800 * 32
    assert limit["weight_bytes"] == 4 * matrices
    assert result["settings"]["lengths"] == lengths and result["settings"]["device_name"] == "CPU"
    assert result["memory"] is result["scaling"] is result["mfu"] is None
    out = capsys.readouterr().out
    for word in ("decode", "reference", "backward", "step: the textbook takes", "equal: ", "GB/s of a copy"):
        assert word in out


def test_scaling_and_product_alone(tmp_path, capsys):
    path = tmp_path / "result.json"
    assert benchmark.main(argv(textbook=0, memory=0, scale=1, num_generations=2, json=path)) == 0
    result = json.loads(path.read_text())
    assert result["agreement"] is None and set(result["phases"]) == {"this project"}
    assert set(result["scaling"]["twice"]) == {"prompts", "answers"}
    assert [entry["max_gen_len"] for entry in result["scaling"]["lengths"]] == [8, 32, 64]
    out = capsys.readouterr().out
    assert "twice the prompts: " in out and "answers of 64: " in out and "textbook takes" not in out


def test_peak_memory_is_measured_in_processes_of_their_own():
    args = flags(num_generations=2, hidden_size=64, max_gen_len=64, vocab_size=6400)
    peaks = memory.peaks_on_cpu(args, ["textbook"])
    if peaks is None:
        pytest.skip("needs Linux's /proc")
    # Logits and log-softmax of 4 rows x 84 positions in float32 are 2 x 8.6 MB, and their gradients as much again; the
    # process as a whole holds several times the upper bound.
    assert 17e6 < peaks["textbook"] < 150e6
    lines = report.memory_lines({"bytes": {"textbook": 200 << 20, "this project": 50 << 20}, "how": "so"})
    assert "textbook 200 MiB, this project 50 MiB (25%)" in lines[0] and "so" in lines[1]


# ---------------------------------------------------------------------------------------------- the proof of equality
def test_broken_gradients_stop_it(sides, monkeypatch):
    advantages = train_grpo.group_relative_advantages
    monkeypatch.setattr(train_grpo, "group_relative_advantages", lambda *args: 1.0001 * advantages(*args))
    with pytest.raises(RuntimeError, match="gradients are .* apart|policy_loss is"):
        check(*sides(), 8)


def test_a_broken_second_pass_of_ppo_stops_it(sides, monkeypatch):
    """The first optimizer step's gradient is right; what the weights are after it is not."""
    optimizer_step = train_ppo.optimizer_step

    def step_too_far(models, *args, **settings):
        taken = optimizer_step(models, *args, **settings)
        with torch.no_grad():
            models[0].model.norm.weight.mul_(1.001)
        return taken

    monkeypatch.setattr(train_ppo, "optimizer_step", step_too_far)
    with pytest.raises(RuntimeError, match="gradients are .* apart|policy_loss is|kl is"):
        check(*sides(algo="ppo"), 8)


def test_a_missing_optimizer_step_stops_it(sides):
    product, textbook = sides(algo="ppo")
    work = product.work()
    rollouts = product.decode(work), textbook.decode(work)
    work.args.ppo_update_iters = 1
    update = product.update

    def update_and_tell_of_two(*args):
        losses = update(*args)
        work.minibatches = [0, 0]
        return losses

    product.update = update_and_tell_of_two
    with pytest.raises(RuntimeError, match="1 optimizer steps here, 2 in the textbook"):
        compare_updates(product, textbook, work, rollouts)


def broken_decode(change):
    """MiniMindForCausalLM.decode with its result changed."""
    decode = MiniMindForCausalLM.decode
    return lambda self, *args, **settings: change(decode(self, *args, **settings))


def other_token(decoded):
    decoded.completion_ids[0, 1] = (decoded.completion_ids[0, 1] + 1).clamp(max=1000)
    return decoded


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (other_token, "1 of 96 tokens"),
        (lambda decoded: decoded._replace(logps=decoded.logps + 2e-4), "log-probs from decoding are up to 0.000"),
        (lambda decoded: decoded._replace(mask=decoded.mask & (decoded.mask.cumsum(1) < 8)), "answers of \\[7, 7"),
    ],
)
def test_broken_decoding_stops_it(sides, monkeypatch, change, words):
    monkeypatch.setattr(MiniMindForCausalLM, "decode", broken_decode(change))
    with pytest.raises(RuntimeError, match=words):
        check(*sides(), 8)


def test_broken_rewards_stop_it(sides, monkeypatch):
    rewards = train_grpo.calculate_rewards
    monkeypatch.setattr(train_grpo, "calculate_rewards", lambda *args, **settings: rewards(*args, **settings) + 0.001)
    with pytest.raises(RuntimeError, match="rewards are up to 0.001 apart"):
        check(*sides(), 8)


def test_the_textbook_pads_as_the_model_does():
    """Left-padded prompts and answers of several lengths, unfused attention and all: the model's own log-probs."""
    torch.manual_seed(0)
    model = MiniMindForCausalLM(MiniMindConfig(32, 2, vocab_size=50, initializer_range=0.2)).eval()
    ids = torch.randint(50, (3, 9))
    mask = torch.ones(3, 9, dtype=torch.bool)
    mask[0, :3] = mask[1, 7:] = False
    angles = torch.outer(torch.arange(9), 1e6 ** (-torch.arange(0, 4, 2) / 4)).repeat(1, 2)
    rotary = (angles.cos()[:, None], angles.sin()[:, None])
    for chosen in (slice(0, 3), slice(2, 3)):
        found = token_logps(model, ids[chosen], mask[chosen], 4, rotary, 0.7)
        expected = compute_per_token_logps(model, ids[chosen], 4, mask[chosen].long(), 0.7)
        torch.testing.assert_close(found[mask[chosen, -4:]], expected[mask[chosen, -4:]], atol=1e-5, rtol=0)
    critic = train_ppo.CriticModel(MiniMindConfig(32, 2, vocab_size=50, initializer_range=0.2)).eval()
    values = critic(ids, mask.long())[:, 4:8]
    torch.testing.assert_close(token_values(critic, ids, mask, 4, rotary)[:, :2], values[:, :2], atol=1e-5, rtol=0)


def test_the_textbook_clips_as_the_trainer_does(sides):
    """Ratios and values far outside their ranges, which no first update reaches: the trainer's own losses."""
    product, textbook = sides(algo="ppo", batch_size=3, lengths="varied")
    work = product.work()
    rows = textbook.decode(work)
    mask, draws = rows.completion_mask, torch.randn(5, *rows.completion_mask.shape, generator=torch.manual_seed(0))
    logps = textbook.logps(textbook.models[0], work, rows)
    values = token_values(textbook.models[1], rows.output_ids, rows.attention_mask, mask.shape[1], textbook.rotary)
    old, ref, advantages = logps + draws[0] / 4, logps + draws[1], draws[2]
    old_values, returns = values + draws[3], values + draws[4]
    found = textbook.ppo_losses(work, rows, old.detach(), ref.detach(), advantages, old_values.detach(),
                                returns.detach())  # fmt: skip
    expected = (
        rl_math.ppo_policy_loss(logps, old, advantages, mask, clip_epsilon=0.2),
        rl_math.reference_kl_penalty(logps, ref, mask),
        rl_math.ppo_value_loss(values, old_values, returns, mask, cliprange_value=0.2),
    )
    torch.testing.assert_close(torch.stack(found), torch.stack(expected), atol=1e-5, rtol=0)
    assert textbook.ppo_losses(work, rows, old + 1, ref, advantages, old_values, returns) is None, "moved too far"


# ---------------------------------------------------------------------------------------------- what is worked on
def test_answers_end_where_they_are_told_to(sides):
    product, textbook = sides(lengths="varied", num_generations=4, max_gen_len=16)
    work = product.work()
    # 8 rows of 16: 16 · (1/8 + 7/8 · (i + 1/2) / 8) = 2.9, 4.6, 6.4, 8.1, 9.9, 11.6, 13.4, 15.1
    assert sorted(work.lengths) == [3, 5, 6, 8, 10, 12, 13, 15] and work.lengths != sorted(work.lengths)
    for side in (product, textbook):
        rollout = side.decode(work)
        assert rollout.completion_mask.sum(1).tolist() == work.lengths
        ends = (rollout.completion_ids == 0) & rollout.completion_mask
        assert ends.sum(1).tolist() == [1] * 8, "each ends with id 0, which is nowhere else"
    assert answer_lengths("fixed", 3, 16, 0) == [16] * 3
    uniforms = end_after([2, 4], 4, seed=1)
    assert (uniforms == 0).tolist() == [[False, True, False, False], [False] * 4]
    assert uniforms[uniforms > 0].min() >= 0.05


def test_prompts_have_the_length_asked_for_and_a_step_starts_from_the_same_weights(sides):
    product, textbook = sides()
    work = product.work()
    assert [len(ids) for ids in work.batch["prompt_ids"]] == [20, 20]
    before = [parameter.clone() for parameter in product.models[0].parameters()]
    for side in (product, textbook):
        take_step(side, work, Stopwatch("cpu"))
        changed = [not torch.equal(a, b) for a, b in zip(before, product.models[0].parameters(), strict=True)]
        assert all(changed), "both move the one set of weights"
        product.restore()
        assert all(torch.equal(a, b) for a, b in zip(before, product.models[0].parameters(), strict=True))


# ---------------------------------------------------------------------------------------------- stopwatch and limits
def test_phases_add_up_and_go_back(monkeypatch):
    times = iter([0.0, 1.0, 3.0, 3.5, 10.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(times))
    watch = Stopwatch("cpu")
    watch.switch("decode")  # at 0
    watch.switch("forward")  # at 1
    with watch.phase("backward"):  # from 3 to 3.5
        pass
    # decode 1, forward 2 + 6.5, backward 0.5
    assert watch.stop() == {"decode": 1.0, "forward": 8.5, "backward": 0.5, "step": 10.0}


def test_rows_of_each_token_step():
    # answers of 3, 1 and 2 tokens: the prompt gives each its first, two rows go on for a second, one for a third
    assert limits.running_rows([3, 1, 2]) == [2, 1]
    assert limits.running_rows([1, 1]) == []
    assert limits.measured_rows(12) == [1, 2, 4, 8, 12]
    assert limits.measured_rows(1) == [1]
    # a quarter of the way from 2 to 4
    assert limits.interpolate({2: 10.0, 4: 20.0}, 3) == 15.0
    assert limits.interpolate({2: 10.0, 4: 20.0}, 4) == 20.0


def test_products_are_those_of_the_model(monkeypatch):
    """Each way of asking multiplies every weight once, by as many tokens as go through it."""
    model = MiniMindForCausalLM(MiniMindConfig(32, 1, vocab_size=50))
    products, seen = limits.Products(model, "cpu", torch.float32), []
    monkeypatch.setattr(limits, "seconds_of", lambda call, device: call() or 1.0)
    ways = ((products.separate, limits.F.linear), (products.stacked, limits.turned_linear))
    ways += ((products.packed, limits.times),)
    for form, product in ways:

        def noted(x, weight, product=product):
            out = product(x, weight)
            seen.append((weight.shape, x.shape[0], out.numel()))

        products._seconds(form, 5, 3, True, noted)
        assert sum(rows * shape[0] * shape[1] for shape, rows, _ in seen) == limits.forward_flops(model, 5, 3, 0) / 2
        assert all(outputs == rows * shape[0] for shape, rows, outputs in seen)
        seen.clear()
    x, weight = torch.randn(4, 6), torch.randn(3, 6)
    torch.testing.assert_close(limits.turned_linear(x, weight).t(), limits.F.linear(x, weight))


@pytest.mark.parametrize("use_moe", [False, True])
def test_operations_are_two_a_weight_and_token(use_moe):
    model = MiniMindForCausalLM(MiniMindConfig(32, 1, use_moe, vocab_size=50))
    # q and o 32x32, k and v 16x32, gate, up and down 128x32: a token goes through one expert of four, and the router
    weights = 2 * 32 * 32 + 2 * 16 * 32 + 3 * 128 * 32 + (4 * 32 if use_moe else 0)
    assert limits.forward_flops(model, 10, 10, 0, head=False) == 2 * 10 * weights
    assert limits.forward_flops(model, 10, 10, 0) == 2 * 10 * (weights + 32 * 50)
    # of tokens whose states are not wanted, q, k and v alone are; with experts all, for their balance loss
    few = weights if use_moe else 32 * 32 + 2 * 16 * 32
    assert limits.forward_flops(model, 10, 0, 0) == 2 * 10 * few
    assert limits.forward_flops(model, 0, 0, 5) == 4 * 5 * 32


def test_operations_of_a_step_count_each_prompt_once(sides):
    product, _ = sides(num_generations=3)
    tokens, answers = 2 * 20 + 6 * 8, 6 * 8
    # pairs: 20 · 21 / 2 within each prompt; each answer looks back on 20 and on its own, 8 · 20 + 8 · 9 / 2
    once = limits.forward_flops(product.models[0], tokens, answers, 2 * 210 + 6 * (160 + 36))
    assert limits.step_flops(product, product.work()) == 5 * once  # decoding, reference, and forward with backward: 3


@pytest.mark.parametrize(("batch_size", "before"), [(2, 0), (3, 1)])
def test_operations_of_ppo_count_what_is_known_before_only_where_a_minibatch_is_not_all(sides, batch_size, before):
    product, _ = sides(algo="ppo", batch_size=batch_size)
    work = product.work()
    sizes = batch_size * 28, batch_size * (210 + 160 + 36)
    whole = limits.forward_flops(product.models[0], sizes[0], batch_size * 8, sizes[1])
    critic = limits.forward_flops(product.models[0], sizes[0], batch_size * 8, sizes[1], head=False)
    # decoding and reference; two passes of forward and backward
    assert limits.step_flops(product, work) == 2 * whole + before * critic + 2 * 3 * (whole + critic)
    work.args.dtype = "bfloat16"  # decoding's log-probs are rounded: old ones are worked out apart
    assert limits.step_flops(product, work) == (2 + before) * whole + before * critic + 2 * 3 * (whole + critic)


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [("NVIDIA H100 PCIe", 756), ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA L40S", 362), ("NVIDIA L4", 121),
     ("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA GeForce GT 1030", None)],
)  # fmt: skip
def test_peak_of_a_device(monkeypatch, name, teraflops):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert limits.peak_flops("cuda:0") == (name, teraflops and teraflops * 1e12)


# ---------------------------------------------------------------------------------------------- command line
BAD = [("algo", "dpo"), ("lengths", "mixed"), ("hidden_size", "100"), ("repeats", "0"), ("dtype", "int8"),
       ("max_gen_len", "40000"), ("json", "no/such/folder/result.json"), ("num_generations", "1")]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), [*BAD, ("algo", "ppo --num_generations 4")])
def test_a_wrong_flag_is_refused_in_one_line(capsys, name, value):
    with pytest.raises(SystemExit) as stop:
        benchmark.parse_args([f"--{name}", *value.split()])
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and out == "" and err.count("\n") == 1 and err.startswith("error: argument --")
    assert f"--{name}" in err or "--num_generations" in err


def test_a_prompt_too_short_for_the_chat_headers_is_refused():
    with pytest.raises(ValueError, match="--prompt_len 5: the chat headers alone take 14 tokens; give at least 15"):
        benchmark.main(argv(prompt_len=5))


PROBE = """
import runpy, sys
sys.argv = [sys.argv[1], "--help"]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as stop:
    print("status", stop.code, "torch" in sys.modules)
"""


def test_help_does_not_import_torch():
    run = subprocess.run([sys.executable, "-c", PROBE, str(REPO_ROOT / "scripts" / "benchmark.py")], timeout=60,
                         capture_output=True, text=True)  # fmt: skip
    assert run.stdout.endswith("status 0 False\n"), run.stdout + run.stderr
