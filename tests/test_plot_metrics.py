"""Pictures of runs: which panels, which curves, where the alarms stand; one clear line when nothing can be drawn."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from statistics import median
from xml.etree import ElementTree

import pytest

from scripts import plot_metrics
from scripts.plotting.data import (
    ALARM_COLORS, COLORS, PANELS, Curve, Mark, Picture, Plot, Run, build_picture, metrics_path, read_run,
    smoothed, stagger, tell_apart, thinned, value_axis,
)  # fmt: skip
from scripts.plotting.page import drawing, log_ticks, page_text, ticks
from trainer.arguments import REPO_ROOT
from trainer.health_checks import CHECKS

SCRIPT = str(REPO_ROOT / "scripts" / "plot_metrics.py")


def rows_of(steps: int, **more) -> list[dict]:
    """Training lines 1 … steps between two evaluations."""
    rows = [{"step": i, "reward": i / 10, "kl": 0.01 * i, "rewards/rm/mean": 1.0, "rewards/tag/mean": 0.25,
             "completions/clipped_ratio": 0.5, "completions/mean_length": 20.0, "completions/max_length": 30.0,
             "lr": 1e-4, **more} for i in range(1, steps + 1)]  # fmt: skip
    first = {"step": 0, "eval/accuracy": 0.25, "eval/accuracy_se": 0.05, "eval/reward": 1.0, "eval/reward_se": None}
    return [first, *rows, {**first, "step": steps, "eval/accuracy": 0.5}]


@pytest.fixture
def folder(tmp_path):
    """Function that writes a run's folder: its name, its lines, its flags and its command line."""

    def write(name: str, rows: list[dict], flags: dict | None = None, command: str = "", end: str = ""):
        path = tmp_path / name
        path.mkdir()
        (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + end, encoding="utf-8")
        if flags is not None:
            (path / "config.json").write_text(json.dumps({"args": flags, "command": command.split()}))
        return path

    return write


def titles(picture: Picture) -> list[str]:
    return [plot.title for plot in picture.plots]


# ---------------------------------------------------------------------------------------------- reading
def test_a_half_written_last_line_is_left_out(folder):
    path = folder("run", rows_of(3), end='{"step": 4, "rew')
    run = read_run(metrics_path(str(path)))
    assert run.points("reward") == [(1, 0.1), (2, 0.2), (3, 0.3)] and run.name == "run" and run.flags == {}
    assert read_run(metrics_path(str(path / "metrics.jsonl"))).rows == run.rows


def test_points_are_finite_numbers():
    run = Run("run", None, [{"step": 1, "kl": None}, {"step": 2, "kl": math.nan}, {"step": 3, "kl": "x"},
                            {"step": 4, "kl": 2}, {"step": 5}])  # fmt: skip
    assert run.points("kl") == [(4, 2.0)]


def test_one_run_names_the_flags_it_was_given_several_those_in_which_they_differ(folder):
    flags = {"starter": True, "beta": 0.01, "max_steps": 30, "save_dir": "a", "seed": 1}
    one = read_run(metrics_path(str(folder("one", rows_of(2), flags, "train.py --starter --beta 0.01 --save_dir a"))))
    assert tell_apart([one]) == ["one   --starter  --beta 0.01"]
    changed = {**flags, "beta": 0.5, "save_dir": "b", "new_flag": 1}
    two = read_run(metrics_path(str(folder("two", rows_of(2), changed))))
    assert tell_apart([one, two]) == ["one   --beta 0.01", "two   --beta 0.5"]
    two.name = "one"
    assert [line.split("  ")[0] for line in tell_apart([one, two])] == [str(one.path.parent), str(two.path.parent)]


# ---------------------------------------------------------------------------------------------- what is drawn
def test_smoothing_by_hand():
    assert smoothed([1.0, 3.0, 8.0, 0.0], 2) == [1.0, 2.0, 5.5, 4.0]
    assert smoothed([1.0, 9.0, 2.0, 2.0], 3, median) == [1.0, 5.0, 2.0, 2.0]
    assert smoothed([5.0], 7) == [5.0]


def test_long_runs_are_thinned_by_means():
    assert thinned([(1, 1.0), (2, 3.0), (3, 8.0)], most=2) == [(2, 2.0), (3, 8.0)]
    points = [(i, float(i)) for i in range(5)]
    assert thinned(points, most=5) == points and thinned([]) == []


def test_panels_with_data_only_and_curves_by_hand():
    picture = build_picture([Run("run", None, rows_of(4))], smooth=2)
    assert titles(picture) == ["Reward", "Parts of the reward", "Held-out accuracy: sampled",
                               "KL to the reference: k3 estimate", "Answer length", "Answers cut at the limit",
                               "Learning rate: policy"]  # fmt: skip
    reward, parts, accuracy, kl, length, cut, rate = (plot.curves for plot in picture.plots)
    assert reward[0].values == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert reward[0].smooth == pytest.approx([0.1, 0.15, 0.25, 0.35])
    assert (reward[1].label, reward[1].steps, reward[1].error) == ("held out", [0, 4], [0.0, 0.0])
    assert {curve.label: curve.color for curve in parts} == {"reward model": COLORS[0], "tag": COLORS[1]}
    assert accuracy[0].values == [25.0, 50.0] and accuracy[0].error == [5.0, 5.0]  # %
    assert accuracy[0].smooth == accuracy[0].values
    assert [curve.label for curve in length] == ["mean", "longest"] and cut[0].values == [50.0] * 4
    assert rate[0].smooth == rate[0].values and (picture.first_step, picture.last_step) == (0, 4)


def test_several_runs_have_one_panel_a_metric_and_one_colour_each():
    other = rows_of(2, **{"completions/mean_length": 9.0, "completions/max_length": 9.0, "rewards/tag/mean": 0.0})
    picture = build_picture([Run("a", None, rows_of(4), {"beta": 1}), Run("b", None, other, {"beta": 2})], 0)
    # the reward model's part, 1 throughout in both, tells nothing; of the lengths the mean is enough
    assert titles(picture) == ["Reward: training", "Parts of the reward: tag", "Held-out accuracy: sampled",
                               "KL to the reference: k3 estimate", "Answer length: mean"]  # fmt: skip
    for plot in picture.plots:
        assert [curve.color for curve in plot.curves] == list(COLORS[:2])
    assert picture.heads == [(COLORS[0], "a   --beta 1"), (COLORS[1], "b   --beta 2")]


def alarmed(step: int, name: str, grade: float = 1.0, message: str = "words") -> dict:
    return {f"health/{name}": grade, "health/messages": [message]}


def test_alarms_are_numbered_and_stand_in_their_panels():
    rows = rows_of(100)
    for step, name, grade in ((10, "kl_runaway", 1.0), (12, "length_limit", 1.0), (60, "kl_runaway", 1.0),
                              (61, "kl_runaway", 2.0), (99, "kl_runaway", 2.0)):  # fmt: skip
        rows[step] |= alarmed(step, name, grade)
    picture = build_picture([Run("run", None, rows)], 0)
    warning, severe = ALARM_COLORS[1.0], ALARM_COLORS[2.0]
    assert picture.alarms == [(warning, 1, "step 10: kl runaway: words"), (warning, 2, "step 12: length limit: words"),
                              (severe, 3, "step 61: kl runaway (severe): words")]  # fmt: skip
    marks = {plot.title: [(mark.step, mark.number, mark.line) for mark in plot.marks] for plot in picture.plots}
    assert marks.pop("KL to the reference: k3 estimate") == [(10, 1, warning), (61, 3, severe)]
    assert marks.pop("Answers cut at the limit") == [(12, 2, warning)] and not any(marks.values())


def test_alarms_of_several_runs_name_the_run_and_take_its_colour():
    rows = rows_of(5)
    rows[3] |= alarmed(3, "kl_runaway")
    picture = build_picture([Run("a", None, rows_of(5)), Run("b", None, rows)], 0)
    assert picture.alarms == [(ALARM_COLORS[1.0], 1, "b, step 3: kl runaway: words")]
    mark = next(plot.marks[0] for plot in picture.plots if plot.marks)
    assert (mark.color, mark.line) == (ALARM_COLORS[1.0], COLORS[1])


def test_every_alarm_has_a_panel():
    assert {name for panel in PANELS for name in panel.alarms} == {check.__name__ for check in CHECKS}


def test_marks_close_by_stand_below_each_other():
    marks = [Mark(step, 1, "", "") for step in (10, 10, 11, 20, 21)]
    stagger(marks, near=5)
    assert [mark.level for mark in marks] == [0, 1, 2, 0, 1]


def curve_of(*values, error=None) -> Curve:
    return Curve("c", "#000", list(range(len(values))), list(values), list(values), error)


def test_value_axis():
    assert value_axis([curve_of(0.0, 100.0)], "linear") == (False, -6.0, 106.0)
    assert value_axis([curve_of(0.0, 100.0, error=[10.0, 10.0])], "%") == pytest.approx((False, -17.2, 117.2))
    assert value_axis([curve_of(3.0, 3.0)], "linear") == pytest.approx((False, 2.7, 3.3))
    assert value_axis([curve_of(1.0, 100.0)], "log") == pytest.approx((True, -0.1, 2.1))
    assert value_axis([curve_of(1.0, 10.0)], "log")[0] is False
    assert value_axis([curve_of(-1.0, 1.0, 100.0)], "log")[0] is False  # a third could not be shown
    times = curve_of(*[1.0] * 19, 2.0, 500.0)  # 95% are at most 2
    assert value_axis([times], "cut") == pytest.approx((False, 0.82, 4.18))
    assert value_axis([curve_of(1.0, 9.0)], "cut") == pytest.approx((False, 0.52, 9.48))  # too few to say what is rare


def test_numbers_on_axes():
    assert ticks(0.0, 1.0) == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert ticks(-0.01, 0.032) == pytest.approx([-0.01, 0.0, 0.01, 0.02, 0.03])
    assert ticks(1, 3, whole=True) == [1, 2, 3] and ticks(7, 7, whole=True) == [7]
    assert log_ticks(-2.1, 1.1) == pytest.approx([0.01, 0.1, 1, 10])
    assert log_ticks(0.0, 1.0) == pytest.approx([1, 2, 5, 10])


# ---------------------------------------------------------------------------------------------- the page
def test_a_curve_lies_where_it_should():
    # 470 x 230 with room 52, 10, 10, 24; steps 0 to 2 with 0.04 at each side: 0 -> 52 + 408 * .04 / 2.08 = 59.8
    plot = Plot("t", "u", [curve_of(0.0, 5.0, 10.0)], [Mark(1, 4, "#111111", "#222222")], False, 0.0, 10.0)
    root = ElementTree.fromstring(drawing(plot, Picture([], [], [], 2, 0)))
    assert root.find("polyline").get("points") == "59.8,206.0 256.0,108.0 452.2,10.0"
    assert root.find("circle[@r='8']").get("cx") == "256.0" and "4" in [text.text for text in root.iter("text")]
    log = Plot("t", "u", [curve_of(0.0, 1.0, 100.0)], [], True, 0.0, 2.0)  # 0 cannot be shown: at the foot
    root = ElementTree.fromstring(drawing(log, Picture([], [], [], 2, 0)))
    assert root.find("polyline").get("points") == "59.8,206.0 256.0,206.0 452.2,10.0"


def test_raw_is_faint_behind_smooth_and_held_out_points_have_errors():
    curve = Curve("c", "#000", list(range(12)), [0.0, 2.0] * 6, [1.0] * 12)
    lines = ElementTree.fromstring(drawing(Plot("t", "", [curve], [], False, 0, 2), Picture([], [], [], 9, 0)))
    assert [line.get("stroke-opacity") for line in lines.iter("polyline")] == ["0.3", None]
    held_out = curve_of(0.0, 1.0, error=[0.5, 0.5])
    lines = ElementTree.fromstring(drawing(Plot("t", "", [held_out], [], False, 0, 2), Picture([], [], [], 1, 0)))
    # 0.5 to 1.5 of 0 to 2 on 206 to 10
    assert [line.get("y1") + " " + line.get("y2") for line in lines.iter("line")][-1] == "157.0 59.0"


def test_a_page_is_self_contained_and_escapes_what_it_shows():
    rows = rows_of(3)
    rows[2] |= alarmed(2, "kl_runaway", message="a < b & c")
    picture = build_picture([Run("<run>", None, rows, {"beta": 0.01}, ["beta"])], 0)
    page = page_text(picture, refresh=7.0)
    assert "<b>&lt;run&gt;</b> --beta 0.01" in page and "a &lt; b &amp; c" in page and "<run>" not in page
    assert 'content="7"' in page and 'http-equiv="refresh"' not in page_text(picture)
    assert not re.search(r"https?:|<script|src=|url\(|@import", page)
    assert page.count("<svg ") == len(picture.plots)
    for svg in re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL):
        ElementTree.fromstring(svg)
    assert "training 0.3<" in page and "held out 1<" in page  # last values


# ---------------------------------------------------------------------------------------------- the PNG
def test_a_png_is_drawn(folder, capsys):
    pytest.importorskip("matplotlib")
    rows = rows_of(30)
    rows[20] |= alarmed(20, "kl_runaway", 2.0)
    path = folder("run", rows)
    assert plot_metrics.main([str(path)]) == 0
    assert (path / "metrics.png").read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out == f"wrote {path / 'metrics.png'}\n"
    assert sorted(file.name for file in path.iterdir()) == ["metrics.jsonl", "metrics.png"]  # nothing half written


def test_what_matplotlib_draws():
    pyplot = pytest.importorskip("matplotlib.pyplot")
    from scripts.plotting.png import draw_plot

    plot = Plot("Title", "unit", [Curve("a", COLORS[0], [1, 2, 9], [1.0, 100.0, 3.0], [1.0, 2.0, 3.0]),
                                  Curve("b", COLORS[1], [1, 2], [1.0, 10.0], [1.0, 10.0], [0.1, 0.2])],
                [Mark(2, 1, "#111111", "#222222")], True, -0.1, 2.1)  # fmt: skip
    figure, axis = pyplot.subplots()
    draw_plot(axis, plot, Picture([], [], [], 9, 0))
    assert axis.get_yscale() == "log" and axis.get_title(loc="left") + axis.get_title() == "Title"
    assert [(line.get_alpha(), list(line.get_ydata())) for line in axis.lines[:2]] == [(0.28, [1.0, 100.0, 3.0]),
                                                                                       (None, [1.0, 2.0, 3.0])]
    assert {text.get_text() for text in axis.texts} == {"unit", "1"}
    assert [text.get_text() for text in axis.get_legend().get_texts()] == ["a", "b"]
    assert any(list(line.get_xdata()) == [2, 2] and line.get_color() == "#222222" for line in axis.lines)
    pyplot.close(figure)


def without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "scripts.plotting.png", raising=False)


def test_without_matplotlib_a_png_is_refused_in_one_line_and_a_page_is_written(folder, monkeypatch, capsys, tmp_path):
    without_matplotlib(monkeypatch)
    path, page = folder("run", rows_of(3)), tmp_path / "page.html"
    assert plot_metrics.main([str(path)]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith("error: a PNG needs matplotlib: pip install -r requirements-extras.txt") and "--html" in err
    assert plot_metrics.main([str(path), "--html", str(page)]) == 0
    assert page.read_text().startswith("<!doctype html>") and not (path / "metrics.png").exists()


# ---------------------------------------------------------------------------------------------- the command line
@pytest.mark.parametrize(("content", "words"), [
    (None, "holds no metrics.jsonl"), ("", "holds no whole line of metrics yet"), ('{"step": 1, "re', "no whole line"),
    ("no json\n[1]\n{}\n", "no whole line"), ('{"step": 1, "note": "x"}\n', "no line holds a number"),
])  # fmt: skip
def test_nothing_to_draw_is_one_clear_line(tmp_path, capsys, content, words):
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    assert plot_metrics.main([str(tmp_path), "--html", str(tmp_path / "page.html")]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and words in err and err.count("\n") == 1
    assert not (tmp_path / "page.html").exists()


def test_a_folder_that_is_not_there_and_one_that_cannot_be_written(folder, tmp_path, capsys):
    assert plot_metrics.main([str(tmp_path / "absent")]) == 1
    assert "absent does not exist; expected a run's folder" in capsys.readouterr().err
    assert plot_metrics.main([str(folder("run", rows_of(2))), "--html", str(tmp_path / "no" / "page.html")]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_watching_draws_when_there_is_more_and_ends_quietly(folder, tmp_path, monkeypatch, capsys):
    path = folder("run", []) / "metrics.jsonl"  # not a step yet
    drawn = []
    monkeypatch.setattr(plot_metrics, "draw", lambda paths, args: drawn.append(path.read_text()) or ["page"])

    def sleep(seconds):
        assert seconds == 2.0
        turn.append(1)
        if len(turn) == 2 or len(turn) == 4:
            path.write_text(path.read_text() + "line\n")
        if len(turn) == 6:
            raise KeyboardInterrupt

    turn = []
    monkeypatch.setattr(time, "sleep", sleep)
    assert plot_metrics.main([str(path.parent), "--watch", "2"]) == 0
    assert drawn == ["line\n", "line\nline\n"]
    out, err = capsys.readouterr()
    assert out.count("wrote page") == 2 and err == ""


def test_a_watched_run_s_page_as_a_process_that_ctrl_c_ends(folder, tmp_path):
    page = tmp_path / "page.html"
    process = subprocess.Popen([sys.executable, SCRIPT, str(folder("run", rows_of(3))), "--html", str(page),
                                "--watch", "0.05"], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               # a shell's background job ignores SIGINT, and so would its child
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))  # fmt: skip
    until = time.monotonic() + 30
    while not page.exists() and time.monotonic() < until:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (0, b"") and b"wrote" in out and page.exists()


def test_neither_torch_nor_matplotlib_is_imported_for_a_page():
    """So that it starts at once."""
    probe = ("import sys, scripts.plot_metrics, trainer.health; "
             "print(sorted({'torch', 'numpy', 'transformers', 'matplotlib'} & set(sys.modules)))")  # fmt: skip
    run = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, cwd=REPO_ROOT, timeout=60)
    assert run.stdout == "[]\n", run.stderr


def test_wrong_flags_are_refused(capsys):
    for argv in ([], ["run", "--smooth", "-1"], ["run", "--watch", "0"]):
        with pytest.raises(SystemExit) as stop:
            plot_metrics.parse_args(argv)
        assert stop.value.code == 2 and capsys.readouterr().err.startswith("error: ")
