"""The picture as one HTML page with drawings in SVG: nothing to install, nothing fetched from a network."""

import math
from html import escape

from scripts.plotting.data import Curve, Picture, Plot

WIDTH, HEIGHT = 470, 230  # of one drawing, in its own units
LEFT, RIGHT, TOP, BOTTOM = 52, 10, 10, 24  # room around the curves

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #222; background: #fff; margin: 24px; }
.heads div { margin: 2px 0; } .heads b { font-weight: 600; }
.grid { display: grid; grid-template-columns: repeat(auto-fill, minmax(400px, 1fr)); gap: 22px 30px; margin: 20px 0; }
h2 { font-size: 17px; margin: 0; } .unit { color: #666; font-size: 13px; }
svg { width: 100%; height: auto; display: block; } svg text { font: 11px system-ui, sans-serif; fill: #444; }
svg .number { fill: #fff; font-weight: bold; text-anchor: middle; }
.legend { font-size: 13px; } .legend span { margin-right: 14px; white-space: nowrap; }
.dot { display: inline-block; width: 10px; height: 10px; border-radius: 5px; margin-right: 5px; }
"""


def page_text(picture: Picture, refresh: float | None = None) -> str:
    """The whole page. refresh: seconds after which a browser loads it again, None = never."""
    reload = f'<meta http-equiv="refresh" content="{max(1, round(refresh))}">' if refresh else ""
    heads = "".join(f"<div>{dot(color)}{head(text)}</div>" for color, text in picture.heads)
    panels = "".join(panel(plot, picture) for plot in picture.plots)
    alarms = "".join(f'<p style="color:{color}"><b>{number}</b> {escape(text)}</p>'
                     for color, number, text in picture.alarms)  # fmt: skip
    title = escape(", ".join(text.split("  ")[0] for _, text in picture.heads))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">{reload}<title>{title}</title>'
        f'<style>{STYLE}</style></head><body><div class="heads">{heads}<div class="unit">x axis: rollout step; strong '
        f'lines are smoothed, faint ones are not; the numbers below are the last ones</div></div>'
        f'<div class="grid">{panels}</div>'
        f'{"<h2>Health alarms</h2>" + alarms if alarms else ""}</body></html>\n'
    )  # fmt: skip


def head(text: str) -> str:
    """A run's line, its name in bold."""
    name, _, flags = text.partition("  ")
    return f"<b>{escape(name)}</b> {escape(flags.strip())}"


def dot(color: str) -> str:
    return f'<span class="dot" style="background:{color}"></span>'


def panel(plot: Plot, picture: Picture) -> str:
    """Title, unit, drawing, and below it each curve's last value."""
    named = len({curve.label for curve in plot.curves}) > 1
    entries = "".join(f"<span>{dot(curve.color)}{escape(curve.label) + ' ' if named else ''}{curve.smooth[-1]:.4g}"
                      "</span>" for curve in plot.curves)  # fmt: skip
    return (f'<section><h2>{escape(plot.title)}</h2><div class="unit">{escape(plot.unit) or "&nbsp;"}</div>'
            f'{drawing(plot, picture)}<div class="legend">{entries}</div></section>')  # fmt: skip


def drawing(plot: Plot, picture: Picture) -> str:
    """The SVG of one panel: grid with numbers, curves, marks."""
    first, last = picture.first_step, picture.last_step
    room = 0.02 * (last - first) or 1

    def across(step: float) -> float:
        return LEFT + (step - first + room) / (last - first + 2 * room) * (WIDTH - LEFT - RIGHT)

    def up(value: float) -> float:
        """Clipped to the drawing; a value that a logarithmic axis cannot show lies at its foot."""
        if plot.log:
            value = math.log10(value) if value > 0 else plot.low
        share = (value - plot.low) / (plot.high - plot.low)
        return HEIGHT - BOTTOM - min(max(share, 0.0), 1.0) * (HEIGHT - TOP - BOTTOM)

    parts = []
    for value in log_ticks(plot.low, plot.high) if plot.log else ticks(plot.low, plot.high):
        y = up(value)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e4e4e4"/>'
                     f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')  # fmt: skip
    for step in ticks(first, last, whole=True):
        parts.append(f'<text x="{across(step):.1f}" y="{HEIGHT - 7}" text-anchor="middle">{step:g}</text>')
    parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{HEIGHT - BOTTOM}" y2="{HEIGHT - BOTTOM}" '
                 'stroke="#888"/>')  # fmt: skip
    parts += [curve_lines(curve, across, up) for curve in plot.curves]
    for mark in plot.marks:
        x, y = across(mark.step), TOP + 9 + 19 * mark.level
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="{mark.line}" '
                     f'stroke-dasharray="2 3" stroke-width="1.6"/><circle cx="{x:.1f}" cy="{y}" r="8" '
                     f'fill="{mark.color}"/><text class="number" x="{x:.1f}" y="{y + 4}">{mark.number}</text>')
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(plot.title)}">{"".join(parts)}</svg>'


def curve_lines(curve: Curve, across, up) -> str:
    """One curve: raw faint and smoothed strong, or points with standard errors."""
    if curve.error is None:
        lines = ""
        if curve.smooth != curve.values:
            lines = polyline(curve.steps, curve.values, across, up, f'stroke="{curve.color}" stroke-opacity="0.3"')
        lines += polyline(curve.steps, curve.smooth, across, up, f'stroke="{curve.color}" stroke-width="2.2"')
        if len(curve.steps) <= 10:
            lines += "".join(f'<circle cx="{across(step):.1f}" cy="{up(value):.1f}" r="3" fill="{curve.color}"/>'
                             for step, value in zip(curve.steps, curve.smooth))  # fmt: skip
        return lines
    style = f'stroke="{curve.color}" stroke-width="1.5"'
    lines = polyline(curve.steps, curve.values, across, up, f'{style} stroke-dasharray="5 4"')
    for step, value, error in zip(curve.steps, curve.values, curve.error):
        x = across(step)
        lines += (f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{up(value - error):.1f}" y2="{up(value + error):.1f}" {style}/>'
                  f'<circle cx="{x:.1f}" cy="{up(value):.1f}" r="4" fill="{curve.color}"/>')  # fmt: skip
    return lines


def polyline(steps, values, across, up, style: str) -> str:
    points = " ".join(f"{across(step):.1f},{up(value):.1f}" for step, value in zip(steps, values))
    return f'<polyline points="{points}" fill="none" {style}/>'


# ---------------------------------------------------------------------------------------------- axis numbers
def ticks(low: float, high: float, about: int = 6, whole: bool = False) -> list[float]:
    """Round numbers from low to high, some `about` of them: 1, 2 or 5 times a power of ten apart."""
    rough = (high - low) / about or 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    gap = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= 0.999 * rough)
    gap = max(gap, 1.0) if whole else gap
    first, last = math.ceil(low / gap - 1e-9), math.floor(high / gap + 1e-9)
    return [round(i * gap, 12) for i in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten between 10**low and 10**high, with 2 and 5 times them where there are fewer than two decades."""
    factors = (1, 2, 5) if high - low < 2 else (1,)
    found = [factor * 10.0**power for power in range(math.floor(low), math.ceil(high) + 1) for factor in factors]
    return [value for value in found if low <= math.log10(value) <= high]
