"""The picture as a PNG, drawn by matplotlib; imported only when a PNG is asked for."""

import io
import math
import textwrap

import matplotlib

matplotlib.use("Agg")  # draws without a screen
from matplotlib import pyplot  # noqa: E402  (after the choice of how to draw)
from matplotlib.ticker import LogLocator, NullFormatter  # noqa: E402

from scripts.plotting.data import Picture, Plot  # noqa: E402

COLUMNS, WIDTH, HEIGHT, DPI = 3, 5.4, 3.0, 100  # inches a panel, dots an inch
SHOWN_ALARMS = 8
STYLE = {
    "font.size": 10, "axes.titlesize": 12, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25,
    "legend.frameon": False, "legend.fontsize": 9, "axes.titlepad": 18,
}  # fmt: skip


def png_bytes(picture: Picture) -> bytes:
    """The picture: heads on top, panels in rows of COLUMNS, the alarms' texts below."""
    columns = min(COLUMNS, len(picture.plots))
    rows = math.ceil(len(picture.plots) / columns)
    width = columns * WIDTH
    heads = [line for color, text in picture.heads for line in _wrapped(text, color, width, indent="      ")]
    notes = [line for color, number, text in picture.alarms[:SHOWN_ALARMS]
             for line in _wrapped(f"{number}  {text}", color, width, indent="    ")]  # fmt: skip
    if len(picture.alarms) > SHOWN_ALARMS:
        notes.append((f"… and {len(picture.alarms) - SHOWN_ALARMS} more: health/messages in metrics.jsonl", "#555555"))
    line = 0.21  # inches
    top, bottom = 0.25 + line * len(heads), 0.15 + (line * (len(notes) + 1.5) if notes else 0.0)
    height = top + rows * HEIGHT + bottom
    with pyplot.rc_context(STYLE):
        figure = pyplot.figure(figsize=(width, height))
        axes = figure.subplots(rows, columns, squeeze=False).flatten()
        figure.subplots_adjust(left=0.75 / width, right=1 - 0.2 / width, top=1 - (top + 0.5) / height,
                               bottom=(bottom + 0.5) / height, wspace=0.24, hspace=0.62)  # fmt: skip
        for axis, plot in zip(axes, picture.plots):
            draw_plot(axis, plot, picture)
        for axis in axes[len(picture.plots) :]:
            axis.set_axis_off()
        figure.text(1 - 0.2 / width, 1 - 0.2 / height, "x axis: rollout step", color="#666666", ha="right", va="top")
        _lines(figure, heads, 1 - 0.2 / height, height, line, dots=len(picture.heads) > 1)
        if notes:
            figure.text(0.25 / width, (bottom - line) / height, "Health alarms", weight="bold", va="top")
            _lines(figure, notes, (bottom - 2.1 * line) / height, height, line, dots=False)
        target = io.BytesIO()
        figure.savefig(target, format="png", dpi=DPI)
        pyplot.close(figure)
    return target.getvalue()


def draw_plot(axis, plot: Plot, picture: Picture) -> None:
    """One panel: raw curves faint, smoothed ones over them, held-out points with their standard errors, marks."""
    named = len({curve.label for curve in plot.curves}) > 1
    for curve in plot.curves:
        label = curve.label if named else None
        alone = len(curve.steps) == 1
        if curve.error is not None:
            axis.errorbar(curve.steps, curve.values, yerr=curve.error, color=curve.color, marker="D", markersize=5,
                          linewidth=1.4, linestyle="--", capsize=3, label=label)  # fmt: skip
            continue
        if curve.smooth != curve.values:
            axis.plot(curve.steps, curve.values, color=curve.color, alpha=0.28, linewidth=1)
        axis.plot(curve.steps, curve.smooth, color=curve.color, linewidth=2, label=label,
                  marker="o" if alone or len(curve.steps) <= 10 else None, markersize=4)  # fmt: skip
    if plot.log:
        axis.set_yscale("log")
    axis.set_ylim(*((10**plot.low, 10**plot.high) if plot.log else (plot.low, plot.high)))
    room = 0.02 * (picture.last_step - picture.first_step) or 1
    axis.set_xlim(picture.first_step - room, picture.last_step + room)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.set_title(plot.title)
    axis.text(0, 1.03, plot.unit, transform=axis.transAxes, color="#666666", fontsize=9)
    if plot.log:
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if plot.high - plot.low < 2 else (1,)))
        axis.yaxis.set_minor_formatter(NullFormatter())
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    for mark in plot.marks:
        axis.axvline(mark.step, color=mark.line, linestyle=":", linewidth=1.6)
        axis.text(mark.step, 0.94 - 0.13 * mark.level, str(mark.number), transform=axis.get_xaxis_transform(),
                  ha="center", va="center", fontsize=8, color="white", weight="bold",
                  bbox={"boxstyle": "circle,pad=0.25", "color": mark.color})  # fmt: skip
    if named:
        axis.legend(loc="upper left", bbox_to_anchor=(-0.02, -0.08), ncols=min(5, len(plot.curves)), columnspacing=1.0,
                    handlelength=1.2, handletextpad=0.5, borderaxespad=0.3)  # fmt: skip


def _wrapped(text: str, color: str, width: float, indent: str) -> list[tuple[str, str]]:
    """The text in lines as wide as the figure (about 13 letters an inch), with their colour."""
    lines = textwrap.wrap(text, int(width * 12.5), subsequent_indent=indent, break_long_words=False,
                          break_on_hyphens=False)  # fmt: skip
    return [(line, color) for line in lines]


def _lines(figure, lines: list[tuple[str, str]], y: float, height: float, step: float, dots: bool) -> None:
    """Write lines below each other from y (fraction of the figure) down."""
    for number, (text, color) in enumerate(lines):
        figure.text(0.25 / figure.get_figwidth(), y - number * step / height, ("● " if dots and text[0] != " " else "")
                    + text, color=color if dots or color != "#0072B2" else "black", fontsize=10, va="top")  # fmt: skip
