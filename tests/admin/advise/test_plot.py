"""The plot of the page of `advise`."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from kvstore.admin.advise.plot import Plot, Series, svg

SVG = "{http://www.w3.org/2000/svg}"
GIB = 1 << 30
SERIES = (
    Series("ours", [(GIB, 0.1), (10 * GIB, 0.3), (100 * GIB, 0.42)]),
    Series("theirs", [(GIB, 0.05), (100 * GIB, 0.4)]),
    Series("third", [(GIB, 0.06), (100 * GIB, 0.41)]),
    Series("most", [(GIB, 0.45), (100 * GIB, 0.45)], bound=True),
)


def test_points_lie_where_the_axes_say() -> None:
    root = ElementTree.fromstring(svg(Plot("of a test", SERIES)))
    texts = {element.text: element for element in root.iter(f"{SVG}text")}
    ticks = {label: float(texts[label].get("x") or 0) for label in ("1 GiB", "10 GiB", "100 GiB")}
    levels = {share: float(texts[f"{share}%"].get("y") or 0) - 4 for share in (0, 10, 20, 30, 40, 50)}
    # Logarithmic across, linear upwards.
    assert ticks["10 GiB"] - ticks["1 GiB"] == pytest.approx(ticks["100 GiB"] - ticks["10 GiB"], abs=0.2)
    assert levels[0] - levels[10] == pytest.approx(levels[40] - levels[50], abs=0.2)
    circles = [(float(c.get("cx") or 0), float(c.get("cy") or 0)) for c in root.iter(f"{SVG}circle")]
    for at in ((ticks["1 GiB"], levels[10]), (ticks["10 GiB"], levels[30])):
        assert any(c == pytest.approx(at, abs=0.2) for c in circles)
    assert {"ours", "theirs", "most", "of a test"} <= set(texts)


def test_each_series_has_a_look_of_its_own() -> None:
    drawn = svg(Plot("of a test", SERIES))
    styles = re.findall(r'stroke="(#\w+)" stroke-width="2.2" stroke-dasharray="([\w ]+)"/>', drawn)
    # Each is drawn in the plot and in the legend.
    assert len(set(styles)) == len(SERIES) == len(styles) / 2


def test_what_a_recording_says_is_text_and_no_markup() -> None:
    root = ElementTree.fromstring(svg(Plot('<script>"&\x1b[31m', SERIES)))
    assert not list(root.iter(f"{SVG}script"))
    assert any(element.text == '<script>"&?[31m' for element in root.iter(f"{SVG}text"))


@pytest.mark.parametrize(
    "series",
    [
        Series("one", [(GIB, 0.3)]),
        Series("zero", [(GIB, 0.0), (2 * GIB, 0.0)]),
        Series("a byte", [(1, 0.001), (2, 1.0)]),
        Series("much", [(1, 0.5), (1 << 60, 0.6)]),
    ],
)
def test_odd_ranges_are_drawn_inside_of_the_picture(series: Series) -> None:
    root = ElementTree.fromstring(svg(Plot("of a test", [series])))
    _, _, wide, high = map(float, (root.get("viewBox") or "").split())
    for element in root.iter():
        for name, most in (("x", wide), ("cx", wide), ("y", high), ("cy", high)):
            if (value := element.get(name)) is not None:
                assert 0 <= float(value) <= most
