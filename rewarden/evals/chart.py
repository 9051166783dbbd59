"""Line charts as SVG text, several panels to a picture, without a plotting library."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from rewarden.maths.precision import Real

Point = tuple[Real, Real]
Band = tuple[Real, Real, Real]
"""x, and the low and high end of an interval there."""

WIDTH, HEIGHT = 340, 250
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 28, 40
LEGEND_LINE = 16

COLORS = ("#1f5fa8", "#c2571a", "#3b7d3a", "#7b4aa0", "#b02a4c", "#2a8c8c", "#8a6d1a", "#555555")
"""Readable on white, and different in grey; a ninth line starts again, dashed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Points joined in order. Lines of one name have one color and one legend entry; a guide is thin, grey and in no legend.

    band: intervals, drawn as an area behind the line.
    """

    name: str
    points: Sequence[Point]
    guide: bool = False
    band: Sequence[Band] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One chart. A range that is not given is that of the points."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    x_range: Point | None = None
    y_range: Point | None = None


def svg(panels: Sequence[Panel], *, columns: int = 2) -> str:
    """The panels row by row, and one legend below them. Points that are not finite are left out."""
    names = list(dict.fromkeys(line.name for panel in panels for line in panel.lines if not line.guide))
    columns = max(1, min(columns, len(panels)))
    across, down = WIDTH * columns, HEIGHT * math.ceil(len(panels) / columns)
    drawn = [
        f'<g transform="translate({WIDTH * (place % columns)},{HEIGHT * (place // columns)})">\n{_panel(panel, names)}\n</g>'
        for place, panel in enumerate(panels)
    ]
    high = down + LEGEND_LINE * len(names) + 8
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {across} {high}" width="{across}" height="{high}" '
        'font-family="sans-serif" font-size="10" fill="#222">\n<rect width="100%" height="100%" fill="#fff"/>'
    )
    return "\n".join([head, *drawn, *_legend(names, down), "</svg>"]) + "\n"


def ticks(low: Real, high: Real, *, most: int = 5) -> list[float]:
    """Round numbers from `low` to `high`, at most `most` + 1 of them: steps of 1, 2 or 5 times a power of ten."""
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [place * step for place in range(first, math.floor(high / step + 1e-9) + 1)]


def _panel(panel: Panel, names: Sequence[str]) -> str:
    lines = [(line, [p for p in line.points if math.isfinite(p[0]) and math.isfinite(p[1])]) for line in panel.lines]
    (low_x, high_x), (low_y, high_y) = (
        _range(given, [point[axis] for line, points in lines for point in [*points, *_edge(line)]])
        for axis, given in enumerate((panel.x_range, panel.y_range))
    )

    def x(value: Real) -> float:
        return LEFT + (value - low_x) / (high_x - low_x) * (WIDTH - LEFT - RIGHT)

    def y(value: Real) -> float:
        return HEIGHT - BOTTOM - (value - low_y) / (high_y - low_y) * (HEIGHT - TOP - BOTTOM)

    foot, middle = HEIGHT - BOTTOM, (TOP + HEIGHT - BOTTOM) / 2
    out = [
        f'<text x="{LEFT}" y="16" font-weight="bold">{escape(panel.title)}</text>',
        f'<path d="M{LEFT},{TOP} V{foot} H{WIDTH - RIGHT}" fill="none" stroke="#888"/>',
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2:.1f}" y="{HEIGHT - 8}" text-anchor="middle">{escape(panel.x_label)}</text>',
        f'<text transform="translate(12,{middle:.1f}) rotate(-90)" text-anchor="middle">{escape(panel.y_label)}</text>',
    ]
    for tick in ticks(low_x, high_x):
        out.append(f'<path d="M{x(tick):.1f},{foot} v4" stroke="#888"/>')
        out.append(f'<text x="{x(tick):.1f}" y="{foot + 15}" text-anchor="middle">{_short(tick)}</text>')
    for tick in ticks(low_y, high_y):
        out.append(f'<path d="M{LEFT},{y(tick):.1f} H{WIDTH - RIGHT}" stroke="#ddd" stroke-width="0.5"/>')
        out.append(f'<text x="{LEFT - 5}" y="{y(tick) + 3:.1f}" text-anchor="end">{_short(tick)}</text>')
    for line, _ in lines:
        if edge := " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in _edge(line)):
            out.append(f'<polygon points="{edge}" fill="{_color(names.index(line.name))}" fill-opacity="0.12"/>')
    for line, points in lines:
        style = 'stroke="#999" stroke-width="1" stroke-dasharray="3,3"' if line.guide else _stroke(names.index(line.name))
        path = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in points)
        out.append(f'<polyline points="{path}" fill="none" {style}/>')
        if not line.guide:
            color = _color(names.index(line.name))
            out += [f'<circle cx="{x(a):.1f}" cy="{y(b):.1f}" r="2.2" fill="{color}"/>' for a, b in points]
    return "\n".join(out)


def _edge(line: Line) -> list[Point]:
    """Round the band of a line: along its upper ends and back along the lower ones."""
    there = [ends for ends in line.band if all(math.isfinite(value) for value in ends)]
    return [(x, high) for x, _, high in there] + [(x, low) for x, low, _ in reversed(there)]


def _legend(names: Sequence[str], top: Real) -> list[str]:
    out = []
    for place, name in enumerate(names):
        height = top + LEGEND_LINE * place + 8
        out.append(f'<path d="M{LEFT},{height} h24" fill="none" {_stroke(place)}/>')
        out.append(f'<text x="{LEFT + 32}" y="{height + 4}">{escape(name)}</text>')
    return out


def _stroke(place: int) -> str:
    dashes = ("", ' stroke-dasharray="6,3"', ' stroke-dasharray="2,2"')[min(place // len(COLORS), 2)]
    return f'stroke="{_color(place)}" stroke-width="1.6"{dashes}'


def _color(place: int) -> str:
    return COLORS[place % len(COLORS)]


def _range(given: Point | None, values: Sequence[Real]) -> Point:
    """From the smallest to the largest value, widened where they are one, or there is none."""
    if given is not None:
        return given
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _short(value: Real) -> str:
    return f"{0.0 if abs(value) < 1e-12 else value:.4g}"
