"""The description of a dashboard, and the JSON that Grafana reads.

Panels of a row flow from left to right and wrap; nobody writes a position. Every data source is the variable
`datasource`, so a dashboard works wherever it is imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["timeseries", "stat", "bargauge", "table"]
Json = dict[str, Any]

#: The schema of Grafana 12; older ones from 10 on read it as well.
SCHEMA_VERSION = 41
COLUMNS = 24
#: Shortest step of a query, a quarter of the shortest window of a rate: the interval at which the chart's
#: monitors scrape. Without it the data source chooses, whose default is half of it.
_STEP = "30s"
_DATASOURCE: Json = {"type": "prometheus", "uid": "${datasource}"}
_STATS: Json = {"calcs": ["lastNotNull"], "fields": "", "values": False}


@dataclass(frozen=True, slots=True)
class Query:
    """One expression, and the name of its series."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """One picture. `text` says what it shows, and what to do when it looks bad.

    `limits` are the values from which on it has a colour; below the first it has the colour `good`. `words`
    are the meanings of single values, and their colours. `alerts` are the alerts on what it shows, to whose
    runbooks it links. `columns` says what each query of a table counts.
    """

    title: str
    kind: Kind
    unit: str
    queries: tuple[Query, ...]
    text: str
    width: int = 8
    height: int = 8
    stack: bool = False
    limits: tuple[tuple[float, str], ...] = ()
    good: str = "green"
    least: float | None = 0
    most: float | None = None
    words: tuple[tuple[float, str, str], ...] = ()
    alerts: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under one heading."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Variable:
    """A choice at the top: all values of `label` of a metric with these matchers, or a text."""

    name: str
    title: str
    metric: str = ""
    label: str = ""
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Dashboard:
    """One dashboard."""

    #: Name of its file, and of its address, which stays when it is provisioned anew.
    name: str
    title: str
    text: str
    variables: tuple[Variable, ...]
    rows: tuple[Row, ...]


def made(dashboard: Dashboard, runbooks: str) -> Json:
    """Returns the JSON. `runbooks` is the address of the runbooks, without #."""
    return {
        "annotations": {"list": []},
        "description": dashboard.text,
        "editable": True,
        "graphTooltip": 1,
        "id": None,
        "links": [
            {
                "asDropdown": False,
                "icon": "external link",
                "includeVars": True,
                "keepTime": True,
                "tags": ["kvstore"],
                "targetBlank": False,
                "title": "kvstore",
                "type": "dashboards",
            },
            _link("Runbooks", runbooks),
        ],
        "panels": list(_laid_out(dashboard.rows, runbooks)),
        "refresh": "1m",
        "schemaVersion": SCHEMA_VERSION,
        "tags": ["kvstore"],
        "templating": {"list": [_datasource(), *map(_variable, dashboard.variables)]},
        "time": {"from": "now-6h", "to": "now"},
        "timepicker": {},
        "timezone": "",
        "title": dashboard.title,
        "uid": dashboard.name,
    }


def _laid_out(rows: Sequence[Row], runbooks: str) -> Iterator[Json]:
    number, y = 1, 0
    for row in rows:
        yield {
            "collapsed": False,
            "gridPos": {"h": 1, "w": COLUMNS, "x": 0, "y": y},
            "id": number,
            "panels": [],
            "title": row.title,
            "type": "row",
        }
        number, y = number + 1, y + 1
        x = tallest = 0
        for panel in row.panels:
            if x + panel.width > COLUMNS:
                x, y, tallest = 0, y + tallest, 0
            place = {"h": panel.height, "w": panel.width, "x": x, "y": y}
            yield _panel(panel, runbooks) | {"gridPos": place, "id": number}
            number, x, tallest = number + 1, x + panel.width, max(tallest, panel.height)
        y += tallest


def _panel(panel: Panel, runbooks: str) -> Json:
    targets = [
        {
            "datasource": _DATASOURCE,
            "editorMode": "code",
            "expr": query.expr,
            "interval": _STEP,
            "legendFormat": query.legend or "__auto",
            "refId": chr(ord("A") + number),
            **(
                {"format": "table", "instant": True, "range": False}
                if panel.kind == "table"
                else {"range": True}
            ),
        }
        for number, query in enumerate(panel.queries)
    ]
    return {
        "datasource": _DATASOURCE,
        "description": panel.text,
        "fieldConfig": {"defaults": _defaults(panel), "overrides": []},
        "links": [_link(f"Runbook: {alert}", f"{runbooks}#{alert.lower()}") for alert in panel.alerts],
        "options": _options(panel),
        "targets": targets,
        "title": panel.title,
        "type": panel.kind,
        **({"transformations": _columns(panel)} if panel.kind == "table" else {}),
    }


def _columns(panel: Panel) -> list[Json]:
    """Returns the transformations of a table of labels."""
    named = {f"Value #{chr(ord('A') + number)}": name for number, name in enumerate(panel.columns)}
    options = {"excludeByName": {"Time": True}, "indexByName": {}, "renameByName": named}
    return [{"id": "merge", "options": {}}, {"id": "organize", "options": options}]


def _defaults(panel: Panel) -> Json:
    steps: list[Json] = [{"color": panel.good, "value": None}]
    steps += [{"color": colour, "value": value} for value, colour in panel.limits]
    made: Json = {"unit": panel.unit, "thresholds": {"mode": "absolute", "steps": steps}}
    made |= {name: value for name, value in (("min", panel.least), ("max", panel.most)) if value is not None}
    made["color"] = {"mode": "palette-classic" if panel.kind == "timeseries" else "thresholds"}
    if panel.words:
        options = {f"{value:g}": {"text": text, "color": colour} for value, text, colour in panel.words}
        made["mappings"] = [{"type": "value", "options": options}]
    if panel.kind == "timeseries":
        made["custom"] = {
            "drawStyle": "line",
            "fillOpacity": 40 if panel.stack else 8,
            "lineWidth": 1,
            "showPoints": "never",
            "spanNulls": False,
            "stacking": {"group": "A", "mode": "normal" if panel.stack else "none"},
            "thresholdsStyle": {"mode": "dashed" if panel.limits else "off"},
        }
    return made


def _options(panel: Panel) -> Json:
    if panel.kind == "timeseries":
        legend = {"calcs": ["mean", "max"], "displayMode": "table", "placement": "bottom", "showLegend": True}
        return {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}
    if panel.kind == "stat":
        return {
            "colorMode": "value",
            "graphMode": "area",
            "justifyMode": "auto",
            "orientation": "auto",
            "reduceOptions": _STATS,
            "textMode": "auto",
        }
    if panel.kind == "bargauge":
        return {
            "displayMode": "basic",
            "orientation": "horizontal",
            "reduceOptions": _STATS,
            "showUnfilled": True,
        }
    return {"cellHeight": "sm", "showHeader": True}


def _datasource() -> Json:
    return {
        "current": {},
        "hide": 0,
        "label": "Prometheus",
        "name": "datasource",
        "options": [],
        "query": "prometheus",
        "refresh": 1,
        "regex": "",
        "type": "datasource",
    }


def _variable(variable: Variable) -> Json:
    if variable.text is not None:
        chosen = {"selected": True, "text": variable.text, "value": variable.text}
        return {
            "current": chosen,
            "hide": 0,
            "label": variable.title,
            "name": variable.name,
            "options": [chosen],
            "query": variable.text,
            "type": "textbox",
        }
    query = f"label_values({variable.metric}, {variable.label})"
    return {
        # Series without the label are part of "All".
        "allValue": ".*",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        "datasource": _DATASOURCE,
        "definition": query,
        "hide": 0,
        "includeAll": True,
        "label": variable.title,
        "multi": True,
        "name": variable.name,
        "options": [],
        "query": {"query": query, "refId": "StandardVariableQuery"},
        "refresh": 2,
        "sort": 1,
        "type": "query",
    }


def _link(title: str, url: str) -> Json:
    return {"targetBlank": True, "title": title, "type": "link", "url": url}
