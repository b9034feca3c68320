"""Charts and rooflines as pictures: places on the paper follow the numbers."""

import math
import re
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest

from shardax.report.charts import TALL, WIDE, Scale, chart_svg, roofline_svg, short, ticks
from shardax.report.proof_section import roofline
from shardax.report.values import Chart

SVG = "{http://www.w3.org/2000/svg}"


def texts(root):
    return [text.text for text in root.iter(f"{SVG}text")]


def dots(root):
    return [(float(dot.get("cx")), float(dot.get("cy"))) for dot in root.iter(f"{SVG}circle")]


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (1.2, 4.3), (1, 60), (-5, 5), (1e-9, 3e-9), (2.5, 2.5), (0, 1e12), (99.999, 100.001)]
)
def test_ticks_are_round_few_and_around_the_range(low, high):
    found = ticks(low, high)
    assert 2 <= len(found) <= 12 and found[0] <= low and found[-1] >= high
    steps = {f"{b - a:.6e}" for a, b in pairwise(found)}
    assert len(steps) == 1 and re.match(r"[125]\.000000e", steps.pop())
    assert all(low <= tick <= high for tick in ticks(low, high, inside=True)) or low == high


def test_scales_are_linear_or_logarithmic():
    assert [Scale(0, 10, 0, 100)(value) for value in (0, 5, 10)] == [0, 50, 100]
    assert [round(Scale(1, 100, 200, 0, log=True)(value)) for value in (1, 10, 100)] == [200, 100, 0]


def test_a_chart_draws_each_line_from_its_first_to_its_last_point():
    root = ET.fromstring(chart_svg(Chart.of("t", {"a": [4.0, 2.0, 3.0], "b": [(0, 1.0), (2, 4.0)]}, "step", "loss")))
    lines = [line.get("points").split() for line in root.iter(f"{SVG}polyline") if line.get("stroke") != "currentColor"]
    assert [len(line) for line in lines] == [3, 2]
    assert lines[0][0] == "0,0" and float(lines[1][0].split(",")[1]) == TALL  # the highest and the lowest
    assert [x for x, _ in dots(root)] == [WIDE, WIDE]
    assert {"step", "loss"} <= set(texts(root))
    assert [line.get("stroke-dasharray") for line in root.iter(f"{SVG}polyline")][
        -1
    ]  # the second is told apart in grey


def test_an_empty_chart_says_so():
    assert "no points" in texts(ET.fromstring(chart_svg(Chart.of("t", {"a": []}))))


def test_roofline_dots_lie_where_their_numbers_say(fits):
    value = roofline(fits.estimate, fits.ledger)
    root = ET.fromstring(roofline_svg(value))
    assert len(dots(root)) == len(value.roofs)
    lowest = max(zip(dots(root), value.roofs, strict=True), key=lambda pair: pair[0][1])
    assert lowest[1].name == value.bound_by == fits.estimate.bottleneck
    for (x, y), roof in zip(dots(root), value.roofs, strict=True):
        for (other_x, other_y), other in zip(dots(root), value.roofs, strict=True):
            assert (x < other_x - 0.2) <= (roof.intensity < other.intensity)
            assert (y < other_y - 0.2) <= (roof.rate > other.rate)
    assert any(text.startswith("peak ") for text in texts(root))


def test_short_numbers():
    assert [short(number) for number in (0.5, 12.34, 99.96, 1234.5, 999_999, 3e9)] == [
        "0.5",
        "12.3",
        "100",
        "1,234",
        "999,999",
        "3e9",
    ]
    assert not math.isnan(float(short(7.25)))
