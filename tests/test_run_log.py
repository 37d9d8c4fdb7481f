"""The run's folder: no metrics line lost, repeated or half written; the same numbers everywhere."""

import argparse
import json
import math
import sys
from types import SimpleNamespace

import pytest
import torch

from trainer import run_log
from trainer.arguments import REPO_ROOT
from trainer.health import Alarm
from trainer.run_files import read_metrics_lines, write_whole
from trainer.run_log import (
    DryLog, HealthStop, RolloutBar, RunLog, Tracker, config_lines, device_name, git_output, installed_version,
    start_tracker,
)  # fmt: skip


def flags(tmp_path=None, **changes):
    return argparse.Namespace(**{
        "batch_size": 2, "epochs": 1, "save_dir": str(tmp_path), "save_weight": "grpo", "run_dir": None,
        "use_wandb": False, "wandb_project": "MiniMind-GRPO", "starter": False, "checkpoint_dir": str(tmp_path),
        "from_resume": 0, **changes,
    })  # fmt: skip


class Recorder:
    """Stands for anything whose calls matter: remembers the names of its methods that were called."""

    def __init__(self, **gives):
        self.gives, self.called = gives, []

    def __getattr__(self, name):
        def call(*args, **kwargs):
            self.called.append((name, *[value for value in args if isinstance(value, (int, str))]))
            return self.gives.get(name)

        return call


# ---------------------------------------------------------------------------------------------- the run's folder
def lines_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def open_log(tmp_path, resumed=None, **changes):
    return RunLog(flags(tmp_path, **changes), {"batch_size": 9, "epochs": 1}, resumed, "cpu", 5)


def test_a_fresh_run_does_not_empty_another_run_s_metrics(tmp_path):
    open_log(tmp_path, run_dir=str(tmp_path / "run")).write({"step": 1})
    with pytest.raises(ValueError, match="already holds the metrics of a run.*--from_resume 1"):
        open_log(tmp_path, run_dir=str(tmp_path / "run"))
    assert read_metrics_lines(tmp_path / "run" / "metrics.jsonl") == [('{"step": 1}', 1)]
    # killed before its first save: there is nothing to resume from, and starting over is what was asked for
    open_log(tmp_path, run_dir=str(tmp_path / "run"), from_resume=1)
    assert read_metrics_lines(tmp_path / "run" / "metrics.jsonl") == []


def test_run_folder_config_and_lines(tmp_path, capsys):
    log = open_log(tmp_path)
    assert log.folder.parent == tmp_path / "runs" and log.folder.name.startswith("grpo-2")
    log.write({"step": 1, "reward": 0.5, "entropy": math.nan, "note": "x"}, "Epoch:[1/1]")
    log.write({"step": 2, "eval/reward": math.inf, "entropy": 0.25})
    assert lines_of(log.folder) == [{"step": 1, "reward": 0.5, "entropy": None, "note": "x"},
                                    {"step": 2, "eval/reward": None, "entropy": 0.25}]
    assert log.series("reward") == [0.5] and log.series("entropy") == [0.25] and log.series("absent") == []
    config = json.loads((log.folder / "config.json").read_text())
    assert config["args"]["batch_size"] == 2 and config["changed"] == ["batch_size"] and config["device"] == "cpu"
    assert config["versions"]["torch"] == torch.__version__ and config["command"] == sys.argv
    assert set(config["versions"]) == {"python", "torch", "transformers", "numpy"}
    assert (config["world_size"], config["threads"], config["resumed_after_step"]) == (1, 1, None)
    assert set(config["git"]) == {"commit", "dirty"} and config["device_name"]
    shown = capsys.readouterr().out
    assert "Epoch:[1/1]" in shown and "  *batch_size=2\n" in shown and "epochs=1" in shown and "*epochs" not in shown
    assert f"run folder {log.folder}\n" in shown and f"torch {torch.__version__}" in shown
    log.close()


def test_run_dir_wins_then_the_resumed_run_s_own(tmp_path):
    resumed = {"run_dir": str(tmp_path / "old"), "progress": {"step": 1}}
    assert open_log(tmp_path, resumed).folder == tmp_path / "old"
    assert open_log(tmp_path, resumed, run_dir=str(tmp_path / "given")).folder == tmp_path / "given"


@pytest.mark.parametrize("half", ["", '{"step": 4, "rew', '{"step": 4}', "\x00\x00\x00", '["step"]\n', "\n\n"])
def test_resume_drops_lines_after_the_saved_step_and_a_half_written_one(tmp_path, half):
    """Killed after step 3 was logged, but only step 2 was saved: step 3 will be done, and logged, again."""
    folder = tmp_path / "run"
    log = open_log(tmp_path, run_dir=str(folder))
    for step in (0, 1, 2, 2, 3):  # step 2 has a line of the evaluation as well
        log.write({"step": step})
    with open(log.path, "a") as file:
        file.write(half)
    resumed = open_log(tmp_path, {"run_dir": str(folder), "progress": {"step": 2}})
    resumed.write({"step": 3})
    assert [line["step"] for line in lines_of(folder)] == [0, 1, 2, 2, 3]
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "metrics.jsonl"]
    assert json.loads((folder / "config.json").read_text())["resumed_after_step"] == 2


def test_a_resumed_run_without_its_folder_starts_one(tmp_path):
    log = open_log(tmp_path, {"run_dir": str(tmp_path / "gone"), "progress": {"step": 2}})
    log.write({"step": 3})
    assert lines_of(tmp_path / "gone") == [{"step": 3}]
    assert read_metrics_lines(tmp_path / "absent") == []


def test_a_folder_that_cannot_be_written_is_one_clear_error(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(RuntimeError, match="cannot write this run's files: .*file/run.*--run_dir"):
        open_log(tmp_path, run_dir=str(tmp_path / "file" / "run"))
    log = open_log(tmp_path)
    log.path.unlink()
    log.path.mkdir()
    with pytest.raises(RuntimeError, match="cannot append to .*metrics.jsonl"):
        log.write({"step": 1})


def test_other_ranks_write_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(run_log, "is_main_process", lambda: False)
    log = open_log(tmp_path, use_wandb=True)
    log.write({"step": 1})
    log.advance(reward=1.0)
    log.close()
    assert list(tmp_path.iterdir()) == []


def test_quiet_leaves_out_the_lines_of_steps_and_nothing_else(tmp_path, capsys):
    log = open_log(tmp_path, quiet=True)
    start = capsys.readouterr().out
    assert "*batch_size=2" in start and "epochs=1" not in start  # only what differs
    log.write({"step": 1, "reward": 1.0, "kl": 0.1}, "a step")
    log.write({"step": 1, "eval/reward": 1.0}, "held out")
    log.write({"step": 2, "reward": None, "kl": 0.1}, "a step")
    shown = capsys.readouterr().out
    assert "a step" not in shown and shown.startswith("held out\n[health] step 2, severe, nonfinite: ")
    assert [line["step"] for line in lines_of(log.folder)] == [1, 1, 2] and log._bar.disable
    assert open_log(tmp_path, run_dir=str(tmp_path / "loud")).quiet is False


def test_whole_files_or_the_old_ones(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_whole(path, "old ü")
    monkeypatch.setattr("os.fsync", lambda handle: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_whole(path, b"new")
    assert path.read_text(encoding="utf-8") == "old ü" and list(tmp_path.iterdir()) == [path]


def test_what_is_shown_of_the_configuration(tmp_path):
    config = {"args": {"data_path": f"{REPO_ROOT}/dataset/x.jsonl", "beta": 0.5, "seed": 1}, "changed": ["beta"],
              "device": "cuda:1", "device_name": "GPU", "world_size": 2, "threads": 4, "versions": {"torch": "2.9"},
              "git": {"commit": "a" * 40, "dirty": True}}  # fmt: skip
    assert config_lines(config, tmp_path, quiet=False) == [
        f"run folder {tmp_path}",
        "device cuda:1 (GPU), processes 2, CPU threads each 4; torch 2.9; code aaaaaaaaaa with changed files",
        "flags; those marked * differ from the default:", "  *beta=0.5", "  data_path=dataset/x.jsonl  seed=1",
    ]  # fmt: skip
    config |= {"changed": [], "git": {"commit": None, "dirty": None}}
    assert config_lines(config, tmp_path, quiet=True)[1:] == [
        "device cuda:1 (GPU), processes 2, CPU threads each 4; torch 2.9; code not in a git repository",
        "flags; those marked * differ from the default:", "  (none differs)",
    ]  # fmt: skip


# ---------------------------------------------------------------------------------------------- health
def run_away(log, steps) -> None:
    for step in steps:
        log.write({"step": step, "reward": 1.0, "kl": 1.0 * step, "lr": 1e-4})


def test_alarms_are_printed_and_stand_in_the_step_s_line(tmp_path, capsys):
    log = open_log(tmp_path)
    run_away(log, [1, 2])
    assert log.severe is None
    run_away(log, [3, 4, 5])  # medians 2, 2.5, 3: only the first is news
    lines = lines_of(log.folder)
    assert [line.get("health/kl_runaway") for line in lines] == [None, None, 1.0, 2.0, None]
    assert lines[2]["health/messages"][0].startswith("KL to the reference is 2 nats a token")
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("[health]")]
    assert len(shown) == 2 and shown[0].startswith("[health] step 3, warning, kl_runaway: KL to the reference is 2 ")
    assert log.severe.name == "kl_runaway" and log.severe.step == 4


def test_a_resumed_run_alarms_as_the_one_it_goes_on_with(tmp_path, capsys):
    log = open_log(tmp_path, run_dir=str(tmp_path / "run"))
    run_away(log, range(1, 4))
    capsys.readouterr()
    resumed = open_log(tmp_path, {"run_dir": str(tmp_path / "run"), "progress": {"step": 3}})
    assert "[health]" not in capsys.readouterr().out and resumed.severe is None
    run_away(resumed, [4])
    assert "[health] step 4, severe, kl_runaway" in capsys.readouterr().out
    assert lines_of(tmp_path / "run")[2]["health/kl_runaway"] == 1.0  # what was said before is kept


def test_a_health_stop_names_the_alarm_and_what_to_do():
    assert str(HealthStop(Alarm("kl_runaway", "severe", 7, "KL is 3."))) == (
        "stopped by --health_stop 1 on kl_runaway at step 7: KL is 3. (saved; --from_resume 1 goes on from there)"
    )
    assert "rank 0" in str(HealthStop(None))


# ---------------------------------------------------------------------------------------------- bars
class FakeBar:
    """Stands for tqdm: remembers what it was told."""

    made = []

    def __init__(self, **settings):
        self.settings, self.n, self.postfix, self.closed = settings, settings.get("initial", 0), None, False
        self.disable = settings.get("disable", False)
        self.made.append(self)

    def update(self, count=1):
        self.n += count

    def set_postfix(self, values, refresh):
        self.postfix = values

    def close(self):
        self.closed = True


@pytest.fixture
def bars(monkeypatch):
    monkeypatch.setattr("tqdm.tqdm", FakeBar)
    monkeypatch.setattr(run_log, "Logger", lambda line: None)
    monkeypatch.setattr(FakeBar, "made", [])
    return FakeBar.made


@pytest.mark.parametrize(("terminal", "quiet"), [(True, False), (True, True), (False, False)])
def test_a_bar_shows_the_numbers_on_a_terminal_only(tmp_path, monkeypatch, bars, terminal, quiet):
    monkeypatch.setattr("sys.stderr", SimpleNamespace(isatty=lambda: terminal))
    log = open_log(tmp_path, quiet=quiet)
    log.advance(reward=1.23456, kl=0.000123456, tokens_per_s=7921.4)
    (bar,) = bars
    assert bar.postfix == {"reward": "1.235", "kl": "0.0001235", "tokens_per_s": "7921"}
    assert (bar.n, bar.settings["total"], bar.disable) == (1, 5, not terminal or quiet)
    assert log.rollout_bar(9).visible is not bar.disable and not bar.closed
    log.close()
    assert bar.closed


def test_the_bar_ends_with_the_last_step(tmp_path, monkeypatch, bars):
    log = open_log(tmp_path)
    for step in range(5):
        assert not bars[0].closed
        log.advance(reward=float(step))
    assert bars[0].closed


def test_a_rollout_s_bar_appears_after_five_seconds(bars):
    now = [100.0]
    with RolloutBar(64, "token", visible=True, clock=lambda: now[0]) as bar:
        for seconds in (101.0, 104.9):
            now[0] = seconds
            bar.advance(torch.zeros(3))
        assert bars == []
        now[0] = 105.0
        bar.advance()
        bar.advance()
    assert (bars[0].n, bars[0].settings["total"], bars[0].settings["unit"]) == (4, 64, "token")
    assert bars[0].settings["leave"] is False and bars[0].closed


def test_no_rollout_bar_outside_a_terminal_or_in_a_dry_run(bars):
    for bar in (RolloutBar(64, "token", visible=False, after=0.0), DryLog().rollout_bar(64)):
        with bar:
            bar.advance()
    assert bars == []


# ---------------------------------------------------------------------------------------------- trackers
class Library(Recorder):
    """A tracker's module: init gives itself."""

    id = "run-7"

    def init(self, **settings):
        self.settings = settings
        return self

    def log(self, metrics, step):
        self.called.append((step, metrics))


@pytest.fixture
def wandb(monkeypatch):
    library = Library()
    monkeypatch.setitem(sys.modules, "swanlab", None)  # not installed
    monkeypatch.setitem(sys.modules, "wandb", library)
    return library


class Writer(Recorder):
    """Stands for torch's SummaryWriter."""

    made = []

    def __init__(self, **settings):
        super().__init__()
        self.settings = settings
        self.made.append(self)


@pytest.fixture
def tensorboard(monkeypatch):
    monkeypatch.setattr(Writer, "made", [])
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Writer))
    return Writer.made


def test_the_tracker_gets_the_same_numbers(tmp_path, wandb):
    log = open_log(tmp_path, use_wandb=True)
    log.write({"step": 1, "reward": 0.5, "entropy": math.nan, "note": "x"})
    log.write({"step": 2, "reward": None})
    log.close()
    # no texts, nothing that is not finite
    assert wandb.called == [(1, {"step": 1, "reward": 0.5}), (2, {"step": 2, "health/nonfinite": 2.0}), ("finish",)]
    assert wandb.settings["project"] == "MiniMind-GRPO" and wandb.settings["config"]["batch_size"] == 2
    assert wandb.settings["name"] == log.folder.name and "id" not in wandb.settings and log.tracker.id == "run-7"


def test_swanlab_is_taken_first_where_both_are_installed(tmp_path, wandb, monkeypatch):
    swanlab = Library()
    monkeypatch.setitem(sys.modules, "swanlab", swanlab)
    assert open_log(tmp_path, use_wandb=True).tracker.targets == (swanlab,)


def test_a_resumed_run_goes_on_under_its_id(tmp_path, wandb, tensorboard):
    resumed = {"run_dir": str(tmp_path / "run"), "progress": {"step": 4}, "wandb_id": "run-3"}
    open_log(tmp_path, resumed, use_wandb=True, use_tensorboard=True)
    assert (wandb.settings["id"], wandb.settings["resume"]) == ("run-3", "allow")
    assert tensorboard[0].settings["purge_step"] == 5


def test_both_trackers_at_once(tmp_path, wandb, tensorboard):
    log = open_log(tmp_path, use_wandb=True, use_tensorboard=True)
    log.write({"step": 3, "reward": 0.5, "entropy": None})
    log.close()
    (writer,) = tensorboard
    assert writer.settings == {"log_dir": str(log.folder / "tensorboard"), "purge_step": None}
    assert writer.called == [("add_scalar", "step", 3, 3), ("add_scalar", "reward", 3), ("close",)]
    assert wandb.called == [(3, {"step": 3, "reward": 0.5}), ("finish",)]


@pytest.mark.parametrize(("modules", "flag", "words"), [
    (["swanlab", "wandb"], "use_wandb", "--use_wandb needs swanlab or wandb: pip install swanlab"),
    (["torch.utils.tensorboard"], "use_tensorboard", "--use_tensorboard needs the tensorboard package: pip install"),
])  # fmt: skip
def test_a_missing_tracker_is_said_before_anything_is_trained(tmp_path, monkeypatch, modules, flag, words):
    for name in modules:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(RuntimeError, match=words):
        open_log(tmp_path, **{flag: True})


def test_trackers_that_are_off_take_everything(tmp_path):
    tracker = start_tracker(flags(), tmp_path)
    tracker.log({"a": torch.tensor(1.0)}, step=1)
    tracker.finish()
    assert tracker.id is None and tracker.targets == () and DryLog.tracker.id is None
    assert Tracker(SimpleNamespace(), SimpleNamespace(id="x")).id == "x"


# ---------------------------------------------------------------------------------------------- versions
def test_the_commit_is_a_hash_or_nothing(monkeypatch):
    commit = git_output("rev-parse", "HEAD")
    assert commit is None or len(commit) == 40
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    assert git_output("rev-parse", "HEAD") is None  # no repository
    monkeypatch.setenv("PATH", "")
    assert git_output("rev-parse", "HEAD") is None  # no git


def test_versions_and_device(monkeypatch):
    assert installed_version("torch").split("+")[0] == torch.__version__.split("+")[0]
    assert installed_version("no-such-package") is None
    assert device_name("cpu")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"name of {device}")
    assert device_name("cuda:1") == "name of cuda:1"
