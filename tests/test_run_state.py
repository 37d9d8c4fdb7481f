"""How far a run is, what is left, and what happens from start to end, whatever interrupts it."""

import argparse
import os
import signal
from types import SimpleNamespace

import pytest

from trainer import run_state
from trainer.health import Alarm
from trainer.run_log import HealthStop
from trainer.run_state import (
    Progress, end_epoch, finish_step, passes, planned_rows, resume_entries, resumed_progress, train_until_done,
)  # fmt: skip
from trainer.trainer_utils import Interrupted


def flags(tmp_path=None, **changes):
    return argparse.Namespace(**{
        "batch_size": 2, "epochs": 1, "max_steps": 0, "save_dir": str(tmp_path), "save_weight": "grpo", "run_dir": None,
        "use_wandb": False, "wandb_project": "MiniMind-GRPO", "starter": False, "self_check": 0, "dry_run": False,
        "sample_interval": 0, "health_stop": 0,
        "eval_interval": 0, "check_sync": 0, "save_interval": 10, "checkpoint_dir": str(tmp_path), "from_resume": 0,
        **changes,
    })  # fmt: skip


# ---------------------------------------------------------------------------------------------- how far, what is left
def test_progress_counts_prompts_of_the_epoch_and_steps_of_the_run():
    at = Progress().next_step(4, 50.0).next_step(3, 20.0)
    assert at == Progress(epoch=0, consumed=7, step=2, optimizer_steps=0, tokens=70)
    assert at.next_epoch() == Progress(epoch=1, consumed=0, step=2, optimizer_steps=0, tokens=70)


@pytest.mark.parametrize(("progress", "size", "changes", "expected"), [
    (Progress(), 8, {}, [[2, 2, 2, 2]]),
    (Progress(), 7, {"epochs": 2}, [[2, 2, 2, 1], [2, 2, 2, 1]]),
    (Progress(), 1, {}, [[1]]),  # fewer prompts than a batch
    (Progress(), 8, {"max_steps": 3}, [[2, 2, 2]]),
    (Progress(), 8, {"max_steps": 6, "epochs": 3}, [[2, 2, 2, 2], [2, 2], []]),
    (Progress(), 8, {"max_steps": 99}, [[2, 2, 2, 2]]),
    (Progress(consumed=5, step=3), 8, {}, [[2, 1]]),  # after another batch size: 3 prompts are left
    (Progress(consumed=4, step=2), 8, {"max_steps": 3}, [[2]]),  # steps before the resume count
    (Progress(epoch=1, consumed=2, step=5), 8, {"epochs": 2}, [[2, 2, 2]]),
    (Progress(epoch=1, step=4), 8, {}, []),  # finished
    (Progress(epoch=1, step=4), 8, {"epochs": 2}, [[2, 2, 2, 2]]),  # goes on
    (Progress(consumed=4, step=2), 8, {"max_steps": 2}, [[]]),
])  # fmt: skip
def test_planned_rows(progress, size, changes, expected):
    assert planned_rows(progress, size, flags(**changes)) == expected


def test_planned_rows_count_all_ranks(monkeypatch):
    monkeypatch.setattr(run_state, "rank_and_world", lambda: (1, 3))
    assert planned_rows(Progress(), 14, flags()) == [[6, 6, 2]]


def test_passes_finds_multiples_however_far_a_step_goes():
    assert [passes(3, step, step + 1) for step in range(6)] == [False, False, True, False, False, True]
    assert passes(3, 2, 7) and not passes(3, 3, 5) and not passes(0, 0, 99)


def test_an_epoch_that_max_steps_cut_short_goes_on_after_resume():
    """`--max_steps 2`, then `--max_steps 4 --from_resume 1`: the epoch is not over, so there is something to do."""
    run = SimpleNamespace(progress=Progress(consumed=4, step=2), dataset=range(8))
    end_epoch(run)
    assert run.progress == Progress(consumed=4, step=2)
    assert planned_rows(run.progress, 8, flags(max_steps=4)) == [[2, 2]]
    run.progress = Progress(consumed=8, step=4)
    end_epoch(run)
    assert run.progress == Progress(epoch=1, step=4)


def test_what_a_resume_file_tells(tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text("{}\n")
    args = flags(data_path=str(data), folder=tmp_path, lam=0.95, names=["a"])
    run = SimpleNamespace(progress=Progress(1, 2, 3, 4), log=SimpleNamespace(folder=tmp_path / "run"), before=None)
    entries = resume_entries(run, args)
    assert entries["args"]["lam"] == 0.95 and entries["args"]["run_dir"] is None and "folder" not in entries["args"]
    assert entries["run_dir"] == str(tmp_path / "run") and entries["before"] is None
    assert resumed_progress(entries, args) == run.progress
    assert resumed_progress(None, args) == Progress()
    data.write_text("{} \n")
    with pytest.raises(ValueError, match="--data_path .*other content.*--from_resume 0"):
        resumed_progress(entries, args)


class Recorder:
    """Stands for anything whose calls matter: remembers the names of its methods that were called."""

    def __init__(self, **gives):
        self.gives, self.called = gives, []

    def __getattr__(self, name):
        def call(*args, **kwargs):
            self.called.append((name, *[value for value in args if isinstance(value, (int, str))]))
            return self.gives.get(name)

        return call


def test_finish_step_does_what_is_due():
    run = SimpleNamespace(progress=Progress(step=3), evaluator=Recorder(), log=SimpleNamespace(severe=None), models={},
                          engine=Recorder(), sampler=Recorder(), device="cpu", evaluated=None)
    saved = []

    def finish(step, **changes):
        finish_step(run, flags(eval_interval=3, save_interval=2, sample_interval=5, **changes), Progress(step=step),
                    lambda run, args: saved.append(run.progress.step))  # fmt: skip

    for step in (4, 6, 7):  # GRPO's accumulation finishes several steps at once
        finish(step)
    assert saved == [4, 6] and run.evaluator.called == [("measure", 6)] and run.sampler.called == [("take", 6)]
    assert run.progress.step == 7
    run.log.severe = Alarm("kl_runaway", "severe", 9, "too far")
    finish(9)
    assert saved == [4, 6, 9]  # 8 was passed; without --health_stop the run goes on
    run_state.evaluate(run, 9)
    assert run.evaluator.called == [("measure", 6), ("measure", 9)], "the last step's is the run's last as well"
    with pytest.raises(HealthStop, match="--health_stop 1 on kl_runaway at step 9: too far"):
        finish(11, health_stop=1)
    assert saved == [4, 6, 9, 11], "what is stopped is saved"


def small_run(progress=None, plan=None, before=None):
    return SimpleNamespace(progress=progress or Progress(), plan=[[2, 2]] if plan is None else plan, before=before,
                           log=Recorder(), engine=Recorder(), sampler=None, evaluated=None,
                           evaluator=Recorder(measure={"fresh": 1}), config=SimpleNamespace(
                           hidden_size=8, use_moe=False), interrupts=run_state.Interrupts())  # fmt: skip


def until_done(monkeypatch, run, train_epoch, **changes):
    saved = []
    monkeypatch.setattr(run_state, "report", lambda log, before, after, *rest: saved.append((before, after)))
    status = train_until_done(run, flags("out", **changes), train_epoch, lambda run, args: saved.append("saved"),
                              curves=[])  # fmt: skip
    return status, saved


def test_a_run_is_measured_trained_saved_measured_and_reported(monkeypatch):
    run, trained = small_run(), []

    def train(run, args, rows):
        trained.append(rows)
        run.progress.step += 2

    status, saved = until_done(monkeypatch, run, train)
    assert (status, trained, saved) == (0, [[2, 2]], ["saved", ({"fresh": 1}, {"fresh": 1})])
    assert [name for name, *_ in run.evaluator.called] == ["measure", "measure"] and ("close",) in run.log.called


@pytest.mark.parametrize("step", [0, 5])
def test_a_resumed_run_keeps_its_first_evaluation(monkeypatch, step):
    """Also one that was stopped before its first step: another line for step 0 would be a repetition."""
    run = small_run(Progress(step=step), before={"old": 1})
    _, saved = until_done(monkeypatch, run, lambda run, args, rows: None)
    assert saved[-1] == ({"old": 1}, {"fresh": 1}) and run.evaluator.called == [("measure", step)]


def test_a_finished_run_has_nothing_to_do(monkeypatch, capsys):
    run = small_run(Progress(epoch=1, step=4), plan=[[]])
    assert until_done(monkeypatch, run, None) == (0, [])
    assert "nothing to do: 4 steps and 1 epochs are done; raise --epochs or --max_steps" in capsys.readouterr().out


def test_a_signal_is_answered_with_a_checkpoint_and_its_status(monkeypatch, capsys):
    def interrupted(run, args, rows):
        run.interrupts.signal = 15
        raise Interrupted

    status, saved = until_done(monkeypatch, small_run(), interrupted)
    assert (status, saved) == (143, ["saved"])
    assert "stopped by a signal after step 0; saved, --from_resume 1 goes on" in capsys.readouterr().out


@pytest.mark.parametrize(("changes", "saves"), [({"self_check": 1}, ["saved"]), ({"dry_run": True}, [])])
def test_a_signal_during_the_self_check_is_answered_too(monkeypatch, changes, saves):
    """A dry run writes nothing, even then."""
    run = small_run()
    monkeypatch.setattr(run_state, "self_check", lambda run, args: os.kill(os.getpid(), signal.SIGINT))
    assert until_done(monkeypatch, run, None, **changes) == (130, saves)
