"""Seeds, the learning rate, the optimizer step, metric sums and stopping."""

import math
import os
import random
import signal
import time

import numpy as np
import pytest
import torch
from torch import nn

from trainer.distributed import all_reduce_sum, any_rank, global_share, row_is_real
from trainer.metrics import MetricSums, answer_metrics, group_metrics
from trainer.run_state import windows
from trainer.trainer_utils import (
    CosineSchedule, Interrupted, Interrupts, SkipGuard, autocast_context, get_lr, optimizer_step, run_main, setup_seed,
    shuffle_within_groups,
)  # fmt: skip


# ---------------------------------------------------------------------------------------------- seeds and schedule
def test_setup_seed_fixes_python_numpy_and_torch():
    def draws():
        return random.random(), np.random.rand(), torch.rand(()).item()

    setup_seed(5)
    first = draws()
    setup_seed(5)
    assert draws() == first
    setup_seed(6)
    assert all(a != b for a, b in zip(draws(), first, strict=True))
    setup_seed(2**32 + 5)  # numpy takes 32 bits only


def test_get_lr_by_hand():
    # lr · (0.1 + 0.45 · (1 + cos(pi · step / total)))
    assert get_lr(0, 8, 2.0) == 2.0
    assert get_lr(2, 8, 2.0) == pytest.approx(2 * (0.1 + 0.45 * (1 + math.sqrt(0.5))), abs=1e-12)
    assert get_lr(4, 8, 2.0) == pytest.approx(1.1, abs=1e-12)  # halfway: 2 · (0.1 + 0.45)
    assert get_lr(8, 8, 2.0) == pytest.approx(0.2, abs=1e-12)
    assert get_lr(12, 8, 2.0) == get_lr(16, 8, 2.0) == get_lr(8, 8, 2.0)  # a cosine would be back at 2.0 at 16
    assert get_lr(0, 0, 2.0) == 2.0


def one_weight(rate=1.0):
    model = nn.Linear(1, 1, bias=False)
    return model, torch.optim.SGD(model.parameters(), lr=rate)


def test_schedule_sets_the_rate_of_the_step_that_comes():
    _, optimizer = one_weight()
    schedule = CosineSchedule(optimizer, 3.0, total_steps=4)
    seen = []
    for step in range(6):
        assert optimizer.param_groups[0]["lr"] == schedule.lr == pytest.approx(get_lr(step, 4, 3.0), abs=1e-12)
        seen.append(schedule.lr)
        schedule.step()
    assert seen[0] == 3.0 and seen == sorted(seen, reverse=True)
    assert seen[4] == seen[5] == pytest.approx(0.3)


def test_resumed_schedule_goes_on_exactly():
    straight = CosineSchedule(one_weight()[1], 1.0, 10)
    for _ in range(6):
        straight.step()
    stopped = CosineSchedule(one_weight()[1], 1.0, 10)
    for _ in range(3):
        stopped.step()
    _, optimizer = one_weight(rate=77.0)
    resumed = CosineSchedule(optimizer, 1.0, 10)
    resumed.load_state_dict(stopped.state_dict())
    assert optimizer.param_groups[0]["lr"] == stopped.lr
    for _ in range(3):
        resumed.step()
    assert resumed.lr == straight.lr
    assert resumed.state_dict() == straight.state_dict()


@pytest.mark.parametrize("longer", [8, 20, 1000])
def test_a_longer_plan_on_resume_never_raises_the_rate(longer):
    """`--epochs 2` after a finished `--epochs 1` plans a longer cosine, which stands higher at the same step."""
    first = CosineSchedule(one_weight()[1], 1.0, 4)
    for _ in range(4):
        first.step()
    second = CosineSchedule(one_weight()[1], 1.0, longer)
    second.load_state_dict(first.state_dict())
    rates = [second.lr]
    for _ in range(longer - 4):
        second.step()
        rates.append(second.lr)
    assert rates[0] == first.lr
    assert rates == sorted(rates, reverse=True)


def test_a_changed_learning_rate_on_resume_is_honoured():
    first = CosineSchedule(one_weight()[1], 1.0, 4)
    first.step()
    first.step()
    second = CosineSchedule(one_weight()[1], 0.5, 4)
    second.load_state_dict(first.state_dict())
    assert second.lr == pytest.approx(0.5 * 0.55, abs=1e-12)


@pytest.mark.parametrize(("steps", "accumulation", "expected"), [
    (4, 3, [3, 1]), (4, 8, [4]), (6, 3, [3, 3]), (4, 1, [1, 1, 1, 1]), (0, 3, []),
])  # fmt: skip
def test_accumulation_windows(steps, accumulation, expected):
    assert windows(steps, accumulation) == expected


# ---------------------------------------------------------------------------------------------- the update
def no_scaler():
    return torch.amp.GradScaler("cpu", enabled=False)


def two_models():
    """Two models of two weights each, with gradients of norm 5 and 10, plain SGD at rate 1 and their schedules."""
    models, optimizers, schedules = [], [], []
    for gradient in ([3.0, 4.0], [6.0, 8.0]):
        model = nn.Linear(2, 1, bias=False)
        nn.init.zeros_(model.weight)
        model.weight.grad = torch.tensor([gradient])
        optimizers.append(torch.optim.SGD(model.parameters(), lr=1.0))
        schedules.append(CosineSchedule(optimizers[-1], 1.0, 4))
        models.append(model)
    return models, optimizers, schedules


def test_optimizer_step_clips_each_model_by_its_own_norm():
    models, optimizers, schedules = two_models()
    norms, taken = optimizer_step(models, optimizers, schedules, grad_clip=1.0, scaler=no_scaler())
    assert taken and norms == pytest.approx([5.0, 10.0], abs=1e-6)  # norms before clipping
    for model in models:  # both gradients point along [0.6, 0.8] and are cut to length 1
        torch.testing.assert_close(model.weight.detach(), torch.tensor([[-0.6, -0.8]]), atol=1e-5, rtol=0)
        assert model.weight.grad is None
    assert [schedule.steps_done for schedule in schedules] == [1, 1]


@pytest.mark.parametrize("grad_clip", [0.0, 100.0])
def test_no_clipping_leaves_the_gradient_as_it_is(grad_clip):
    models, optimizers, schedules = two_models()
    optimizer_step(models, optimizers, schedules, grad_clip=grad_clip, scaler=no_scaler())
    assert torch.equal(models[0].weight, torch.tensor([[-3.0, -4.0]]))
    assert torch.equal(models[1].weight, torch.tensor([[-6.0, -8.0]]))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", [0, 1])
def test_a_bad_gradient_in_one_model_skips_the_step_of_both(bad, where):
    models, optimizers, schedules = two_models()
    models[where].weight.grad[0, 1] = bad
    norms, taken = optimizer_step(models, optimizers, schedules, grad_clip=1.0, scaler=no_scaler())
    assert not taken and not math.isfinite(norms[where])
    for model, schedule in zip(models, schedules, strict=True):
        assert torch.equal(model.weight, torch.zeros(1, 2)) and model.weight.grad is None
        assert schedule.steps_done == 0


def test_float16_scaling_cancels_out_and_shrinks_after_an_overflow():
    models, optimizers, schedules = two_models()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for model, gradient in zip(models, ([3.0, 4.0], [6.0, 8.0]), strict=True):
        model.weight.grad = None
        scaler.scale((model.weight * torch.tensor([gradient])).sum()).backward()
    norms, taken = optimizer_step(models, optimizers, schedules, grad_clip=0.0, scaler=scaler)
    assert taken and norms == pytest.approx([5.0, 10.0], abs=1e-6)
    assert torch.equal(models[0].weight, torch.tensor([[-3.0, -4.0]]))
    for model in models:
        scaler.scale((model.weight * math.inf).sum()).backward()
    _, taken = optimizer_step(models, optimizers, schedules, grad_clip=0.0, scaler=scaler)
    assert not taken and scaler.get_scale() == 4.0
    assert torch.equal(models[0].weight, torch.tensor([[-3.0, -4.0]]))


def test_skip_guard_counts_in_a_row_and_ends_the_run():
    guard = SkipGuard(limit=3)
    for taken in (False, False, True, False, False):
        guard.record(taken)
    with pytest.raises(RuntimeError, match="3 optimizer steps in a row.*--max_skipped_steps"):
        guard.record(False)


@pytest.mark.parametrize(("dtype", "expected"), [
    ("float32", torch.float32), ("bfloat16", torch.bfloat16), ("float16", torch.float16),
])  # fmt: skip
def test_autocast_context_gives_the_dtype_asked_for(dtype, expected):
    model = nn.Linear(2, 2)
    with autocast_context("cpu", dtype):
        assert model(torch.ones(1, 2)).dtype == expected
    assert model.weight.dtype == torch.float32


# ---------------------------------------------------------------------------------------------- several ranks
@pytest.fixture
def rank_of(monkeypatch):
    """Function that makes this process look like one rank of several, without a process group."""

    def become(rank, world):
        for module in ("trainer.distributed", "trainer.loading", "trainer.run_state", "trainer.trainer_utils"):
            monkeypatch.setattr(f"{module}.rank_and_world", lambda: (rank, world))

    return become


def test_row_is_real_marks_the_copies_of_each_rank(rank_of):
    # 5 prompts on 3 ranks: ranks 0 and 1 hold two real ones, rank 2 one and a copy
    expected = {0: [True, True], 1: [True, True], 2: [True, False]}
    for rank, real in expected.items():
        rank_of(rank, 3)
        assert row_is_real(5, 1, "cpu").tolist() == real
        assert row_is_real(5, 2, "cpu").tolist() == [flag for flag in real for _ in range(2)]
    rank_of(2, 3)
    assert row_is_real(1, 2, "cpu").tolist() == [False, False]  # more ranks than prompts


def test_global_share_turns_means_of_ranks_into_the_global_mean(rank_of, monkeypatch):
    """DDP averages over ranks: with 6 tokens here of 8 in all on 2 ranks, this rank's mean weighs 2 · 6 / 8."""
    rank_of(0, 2)
    monkeypatch.setattr("trainer.distributed.all_reduce_sum", lambda counted: counted + 2)
    assert global_share(torch.tensor(6.0), torch.tensor(6)).item() == 1.5
    # 4 rows in the mean of which 3 count here, and 5 in all
    assert global_share(torch.tensor(4.0), torch.tensor(3)).item() == pytest.approx(2 * 4 / 5)
    monkeypatch.setattr("trainer.distributed.all_reduce_sum", lambda counted: counted)
    assert global_share(torch.tensor(6.0), torch.tensor(0)).item() == 0.0  # nothing counts anywhere


def test_a_single_process_exchanges_nothing():
    assert global_share(torch.tensor(6.0), torch.tensor(6)).item() == 1.0
    assert all_reduce_sum(torch.tensor([1.0, 2.0])).tolist() == [1.0, 2.0]
    assert any_rank(True, "cpu") and not any_rank(False, "cpu")


# ---------------------------------------------------------------------------------------------- metrics
def test_metric_sums_are_weighted_means_without_the_bad_values():
    sums = MetricSums("cpu")
    sums.add("loss", 1.0, 3)
    sums.add("loss", torch.tensor(5.0, requires_grad=True), torch.tensor(1))
    sums.add("loss", math.nan, 100)
    sums.add("loss", math.inf, 100)
    sums.add("nothing", 7.0, 0)
    sums.add("only bad", math.nan)
    sums.add_each("rows", torch.tensor([1.0, 9.0, math.nan, 2.0]), torch.tensor([True, False, True, True]))
    reduced = sums.reduce()
    assert reduced["loss"] == (1 * 3 + 5 * 1) / 4
    assert reduced["rows"] == (1 + 2) / 2
    assert math.isnan(reduced["nothing"]) and math.isnan(reduced["only bad"])


def test_metric_sums_are_reduced_over_ranks_in_one_exchange(monkeypatch):
    """The other rank adds values of sum 10 and weight 3 to each name."""
    exchanged = []

    def with_other_rank(totals):
        exchanged.append(totals.shape)
        return totals + torch.tensor([10.0, 3.0])

    monkeypatch.setattr("trainer.metrics.all_reduce_sum", with_other_rank)
    sums, more = MetricSums("cpu"), MetricSums("cpu")
    sums.add("b", 2.0, 1)
    more.add("a", 6.0, 2)
    sums.merge(more)
    assert sums.reduce() == {"a": (12 + 10) / 5, "b": (2 + 10) / 4}
    assert exchanged == [(2, 2)]


class Answers:
    """Two prompts of two answers, 1, 2, 3 and 3 tokens long; the last was cut."""

    completion_mask = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 1, 1], [1, 1, 1]]).bool()
    finished = torch.tensor([True, True, True, False])
    attention_mask = torch.cat([torch.tensor([[1, 1], [1, 1], [0, 1], [0, 1]]).bool(), completion_mask], dim=1)


def test_answer_and_group_metrics_by_hand():
    sums, real = MetricSums("cpu"), torch.tensor([True, True, True, True])
    rewards = torch.tensor([1.0, 3.0, 5.0, math.nan])
    answer_metrics(sums, Answers, rewards, {"length": torch.tensor([0.5, -0.5, 0.5, 0.5])}, real)
    group_metrics(sums, rewards, real, 2)
    metrics = sums.reduce()
    assert metrics["reward"] == 3.0  # (1 + 3 + 5) / 3
    assert metrics["rewards/length/mean"] == 0.25
    assert metrics["rewards/nonfinite"] == 0.25
    assert metrics["completions/mean_length"] == 2.25
    assert (metrics["completions/min_length"], metrics["completions/max_length"]) == (1, 3)
    assert metrics["num_tokens"] == 2 + 2 + 1 + 1 + 9
    assert metrics["completions/clipped_ratio"] == 0.25
    assert metrics["reward_std"] == 0.5  # groups {1, 3} and {5}: (1 + 0) / 2
    assert metrics["frac_reward_zero_std"] == 0.5


def test_filled_in_rows_count_in_no_metric():
    sums, real = MetricSums("cpu"), torch.tensor([True, True, False, False])
    rewards = torch.tensor([1.0, 3.0, 100.0, math.nan])
    answer_metrics(sums, Answers, rewards, {"length": rewards}, real)
    group_metrics(sums, rewards, real, 2)
    metrics = sums.reduce()
    assert metrics["reward"] == metrics["rewards/length/mean"] == 2.0
    assert metrics["rewards/nonfinite"] == metrics["completions/clipped_ratio"] == 0.0
    assert metrics["completions/mean_length"] == 1.5
    assert (metrics["completions/max_length"], metrics["num_tokens"]) == (2, 7)
    assert metrics["reward_std"] == 1.0 and metrics["frac_reward_zero_std"] == 0.0


def test_shuffled_rewards_stay_in_their_group_and_depend_on_its_key_alone():
    rewards, keys = torch.arange(24.0), [(1, 42, 0, index) for index in (3, 1, 8, 4)]
    shuffled = shuffle_within_groups(rewards, keys)
    groups = shuffled.view(4, 6)
    assert torch.equal(groups.sort(dim=1).values, rewards.view(4, 6))
    assert not torch.equal(shuffled, rewards)
    assert len({tuple((group - group.min()).tolist()) for group in groups}) > 1  # not one order for all groups
    halves = [shuffle_within_groups(rewards.view(4, 6)[i::2].flatten(), keys[i::2]).view(2, 6) for i in range(2)]
    assert torch.equal(torch.stack(halves, dim=1).view(4, 6), groups)  # two ranks
    assert not torch.equal(shuffle_within_groups(rewards, [(1, 42, 1, *key[3:]) for key in keys]), shuffled)


# ---------------------------------------------------------------------------------------------- stopping
def test_a_signal_interrupts_at_once_outside_a_deferred_block():
    interrupts = Interrupts()
    with pytest.raises(Interrupted):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1)
    assert interrupts.signal == signal.SIGTERM and interrupts.exit_status == 143


def test_a_signal_waits_for_the_end_of_the_outermost_deferred_block():
    interrupts, done = Interrupts(), []
    with pytest.raises(Interrupted):
        with interrupts.deferred():
            with interrupts.deferred():
                os.kill(os.getpid(), signal.SIGINT)
                done.append("inner")
            done.append("outer")
        done.append("never")
    assert done == ["inner", "outer"]
    assert interrupts.exit_status == 130


def test_an_error_in_a_deferred_block_is_not_replaced_by_the_signal():
    interrupts = Interrupts()
    with pytest.raises(ValueError, match="the error"), interrupts.deferred():
        os.kill(os.getpid(), signal.SIGINT)
        raise ValueError("the error")


def test_no_except_exception_swallows_the_interruption():
    assert not issubclass(Interrupted, Exception)


def test_several_ranks_stop_together_at_the_end_of_a_step(rank_of, monkeypatch):
    """A rank that left at once would leave the others waiting in an exchange; one without a signal stops as well."""
    rank_of(0, 2)
    interrupts = Interrupts()
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.01)  # no Interrupted
    with interrupts.deferred():
        pass
    monkeypatch.setattr("trainer.trainer_utils.any_rank", lambda flag, device: True)
    assert interrupts.signal == signal.SIGINT and interrupts.stop_together("cpu")
    other = Interrupts()
    assert other.signal is None and other.stop_together("cpu") and other.exit_status == 143
    monkeypatch.setattr("trainer.trainer_utils.any_rank", lambda flag, device: flag)
    assert not Interrupts().stop_together("cpu")


def test_a_second_signal_ends_the_process_at_once(monkeypatch):
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    with pytest.raises(Interrupted), Interrupts().deferred():
        os.kill(os.getpid(), signal.SIGINT)
        assert ended == []
        os.kill(os.getpid(), signal.SIGTERM)
        assert ended == [143]


def test_run_main_gives_one_line_and_the_status(capsys, monkeypatch):
    def failing():
        raise ValueError("two\nlines   here")

    def stopped():
        Interrupts()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1)

    for main, status, words in ((lambda: 0, 0, ""), (lambda: None, 0, ""), (lambda: 143, 143, ""), (stopped, 143, ""),
                                (failing, 1, "error: two lines here (MINIMIND_TRACEBACK=1 shows where)\n")):
        with pytest.raises(SystemExit) as stop:
            run_main(main)
        assert stop.value.code == status
        assert capsys.readouterr().err == words
    monkeypatch.setenv("MINIMIND_TRACEBACK", "1")
    with pytest.raises(SystemExit):
        run_main(failing)
    assert "Traceback" in capsys.readouterr().err
    with pytest.raises(KeyError):  # a bug of ours is not dressed up as a user's slip
        run_main(lambda: {}["absent"])
