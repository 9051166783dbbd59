import math
import xml.etree.ElementTree as ET

import pytest

from rewarden.evals.chart import COLORS, HEIGHT, WIDTH, Line, Panel, svg, ticks

SVG = "{http://www.w3.org/2000/svg}"


def panel(*lines, **fields):
    return Panel(title="t", x_label="x", y_label="y", lines=lines, **fields)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (0.5, 1, [0.5, 0.6, 0.7, 0.8, 0.9, 1]),
        (-3, 12, [0, 5, 10]),
        (0.013, 0.0171, [0.013, 0.014, 0.015, 0.016, 0.017]),
    ],
)
def test_ticks_are_round_numbers_inside_the_range(low, high, expected):
    assert ticks(low, high) == pytest.approx(expected)


def test_the_picture_is_xml_with_a_line_for_each_name_and_one_legend():
    lines = (Line(name="a <b> & c", points=[(0, 0), (1, 2)]), Line(name="", points=[(0, 0), (1, 1)], guide=True))
    root = ET.fromstring(svg([panel(*lines), panel(*lines), panel(*lines)], columns=2))
    assert root.get("viewBox").split()[2:] == [str(2 * WIDTH), str(2 * HEIGHT + 16 + 8)]
    assert len(root.findall(f".//{SVG}polyline")) == 6
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert texts.count("a <b> & c") == 1
    assert texts.count("t") == 3


def test_points_are_placed_in_the_range_and_what_is_not_finite_is_left_out():
    line = Line(name="a", points=[(0, 0), (0.5, math.nan), (1, 1)])
    root = ET.fromstring(svg([panel(line, x_range=(0.0, 1.0), y_range=(0.0, 1.0))]))
    circles = [(float(c.get("cx")), float(c.get("cy"))) for c in root.iter(f"{SVG}circle")]
    assert circles == [(52.0, HEIGHT - 40.0), (WIDTH - 14.0, 28.0)]


@pytest.mark.parametrize("points", [[], [(1.0, 2.0)], [(1.0, 2.0), (1.0, 2.0)]])
def test_nothing_or_one_point_still_gives_a_picture(points):
    ET.fromstring(svg([panel(Line(name="a", points=points))]))


def test_more_lines_than_colors_are_dashed():
    lines = [Line(name=str(i), points=[(0, i), (1, i)]) for i in range(len(COLORS) + 1)]
    drawn = ET.fromstring(svg([panel(*lines)])).findall(f".//{SVG}polyline")
    assert drawn[0].get("stroke") == drawn[-1].get("stroke")
    assert drawn[0].get("stroke-dasharray") is None
    assert drawn[-1].get("stroke-dasharray") == "6,3"
