"""The dashboards as Grafana reads them: structure, places, variables, links, and words that help."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.helm.chart import CHART
from tests.helm.monitoring import DASHBOARDS, NAMED, dashboards, queries
from tests.helm.prometheus import grouped, metrics
from tools.dashboards.grafana import made

NAMES = [path.name for path in DASHBOARDS]
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
TYPES = {"row", "timeseries", "stat", "bargauge", "table"}
#: Of those that Grafana knows: https://grafana.com/docs, "Standard options", unit.
UNITS = {"none", "short", "percentunit", "bytes", "Bps", "s", "reqps"}
BUILT_IN = {"__rate_interval", "__range", "__interval"}


def panels(name: str) -> list[dict[str, Any]]:
    return [panel for panel in dashboards()[name]["panels"] if panel["type"] != "row"]


def strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for one in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from strings(one)


@pytest.mark.parametrize("name", NAMES)
def test_panels(name: str) -> None:
    titles = [panel["title"] for panel in panels(name)]
    assert len(titles) > 20
    for panel in panels(name):
        title = panel["title"]
        assert panel["type"] in TYPES
        assert panel["datasource"] == DATASOURCE
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS, title
        assert len(panel["description"]) > 20 and panel["description"].endswith("."), title
        assert not re.search(r"\s{2}", panel["description"]), title
        steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
        limits = [step["value"] for step in steps[1:]]
        assert steps[0]["value"] is None
        assert limits == sorted(limits)
        refs = [target["refId"] for target in panel["targets"]]
        assert refs and len(refs) == len(set(refs))
        for target in panel["targets"]:
            assert target["datasource"] == DATASOURCE
            assert (
                len(panel["targets"]) == 1 or target["legendFormat"] != "__auto" or panel["type"] == "table"
            )
        for link in panel["links"]:
            alert = link["title"].removeprefix("Runbook: ")
            assert alert in NAMED
            assert link["url"].endswith(f"/runbooks.md#{alert.lower()}")


def test_every_alert_is_on_some_panel() -> None:
    linked = {link["title"] for name in NAMES for panel in panels(name) for link in panel["links"]}
    # Its jobs are kube-state-metrics' to show; and who is absent has no panel.
    elsewhere = {"KVStoreCronJobFailing", "KVStoreServersAbsent", "KVStoreBackendUnreachable"}
    assert {title.removeprefix("Runbook: ") for title in linked} == set(NAMED) - elsewhere


@pytest.mark.parametrize("name", NAMES)
def test_variables_are_defined_and_used(name: str) -> None:
    page = dashboards()[name]
    defined = [variable["name"] for variable in page["templating"]["list"]]
    assert defined[0] == "datasource"
    assert len(defined) == len(set(defined))
    used: set[str] = set()
    for text in strings({"panels": page["panels"], "variables": page["templating"]}):
        used |= set(re.findall(r"\$\{?(\w+)", text)) - {"1"}
    assert used - BUILT_IN == set(defined) | ({"__all"} & used)
    for variable in page["templating"]["list"]:
        if variable["type"] == "query":
            # What lacks a label is part of all.
            assert variable["includeAll"] and variable["allValue"] == ".*"
            assert variable["datasource"] == DATASOURCE


def test_every_query_chooses_its_release_and_of_the_index_the_maximum() -> None:
    for panel, expr, _ in queries():
        for name in metrics(expr):
            assert re.search(rf'{re.escape(name)}\{{[^}}]*release=~"\$release"', expr), panel
            of_index = name.startswith("kvstore_") and not name.startswith(
                ("kvstore_janitor_", "kvstore_info")
            )
            if of_index:
                assert re.search(rf"max( by \([^)]*\))? ?\((rate\()?{re.escape(name)}", expr) or (
                    "kvstore_quota" in name and re.search(r"max( by \(scope\))? ?\(", expr)
                ), f"{panel}: {name} of several servers"


def test_a_release_that_is_down_does_not_hide_behind_another() -> None:
    """Every release is chosen at first."""
    [expr] = [expr for panel, expr, _ in queries() if panel == "kvstore-overview.json: Backends"]
    assert grouped(expr) == {"release", "backend"}


def test_two_hundred_engines_are_no_legend_of_two_hundred() -> None:
    of_each = [(panel, expr) for panel, expr, legend in queries() if "{{instance}}" in legend]
    assert len(of_each) > 20
    for panel, expr in of_each:
        assert re.match(r"(top|bottom)k\(\$most, ", expr), panel


def test_rates_see_two_scrapes_at_the_charts_interval_whatever_the_data_source_says() -> None:
    # Grafana takes four times the least step of a query for $__rate_interval, or of its data source: 15 s by
    # default, in which a scrape every 30 s is one sample or two.
    tree = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))["monitoring"]
    intervals = {tree[name]["interval"] for name in ("serviceMonitor", "podMonitor", "engines")}
    for name in NAMES:
        for panel in panels(name):
            assert {target["interval"] for target in panel["targets"]} == intervals, panel["title"]


def test_panels_flow() -> None:
    one = {"title": "a", "text": "b", "width": 10, "height": 4}
    tall = {"title": "c", "text": "d", "width": 10, "height": 6}
    rows = [{"title": "r", "panels": [one, tall, one]}, {"title": "s", "panels": [one]}]
    page = made("n", "https://x", title="t", text="x", variables=(), rows=rows)
    places = [(p["title"], p["gridPos"]["x"], p["gridPos"]["y"]) for p in page["panels"]]
    assert places == [("r", 0, 0), ("a", 0, 1), ("c", 10, 1), ("a", 0, 7), ("s", 0, 11), ("a", 0, 12)]
