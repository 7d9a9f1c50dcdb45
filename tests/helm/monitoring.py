"""What the chart renders for monitoring, and the dashboards, for those who test them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import yaml

from tests.helm.chart import CHART, ROOT, Manifest, pick, render

VALUES = CHART / "ci" / "monitoring-values.yaml"
#: As tests.helm.chart renders it.
RELEASE = "inference/cache"
DASHBOARDS = sorted((CHART / "files" / "dashboards").glob("*.json"))
#: Every alert and its severity, as they stand in the chart's file: known without a helm.
NAMED: dict[str, str] = {
    rule["alert"]: rule["labels"]["severity"]
    for group in yaml.safe_load((CHART / "files" / "alerts.yaml").read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
    if "alert" in rule
}
RUNBOOKS = ROOT / "docs" / "runbooks.md"


@cache
def rules() -> dict[str, Any]:
    """The groups of the PrometheusRule, with everything on."""
    return dict(pick(render(VALUES), "PrometheusRule")["spec"])


def every_rule() -> Iterator[dict[str, Any]]:
    for group in rules()["groups"]:
        yield from group["rules"]


def alerts() -> dict[str, dict[str, Any]]:
    """By name."""
    return {rule["alert"]: rule for rule in every_rule() if "alert" in rule}


def monitor(kind: str, name: str) -> Manifest:
    return pick(render(VALUES), kind, name)


@cache
def dashboards() -> dict[str, dict[str, Any]]:
    """By file name."""
    return {path.name: json.loads(path.read_text(encoding="utf-8")) for path in DASHBOARDS}


def queries() -> Iterator[tuple[str, str, str]]:
    """Dashboard and panel, expression, legend."""
    for name, dashboard in dashboards().items():
        for panel in dashboard["panels"]:
            for target in panel.get("targets", ()):
                yield f"{name}: {panel['title']}", target["expr"], target["legendFormat"]


def filled_in(expr: str, variables: Mapping[str, str]) -> str:
    """An expression as Grafana sends it."""
    text = expr.replace("$__rate_interval", variables["__rate_interval"])
    return re.sub(r"\$(\w+)", lambda found: variables[found[1]], text)
