"""The JSON that Grafana reads, from the description of a dashboard in YAML.

Panels of a row flow from left to right and wrap; nobody writes a position. Every data source is the variable
`datasource`, so a dashboard works wherever it is imported.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]
Texts = Mapping[str, str]

#: The schema of Grafana 12; older ones from 10 on read it as well.
SCHEMA_VERSION = 41
COLUMNS = 24
#: Shortest step of a query, a quarter of the shortest window of a rate: the interval at which the chart's
#: monitors scrape. Without it the data source chooses, whose default is half of it.
_STEP = "30s"
_DATASOURCE: Json = {"type": "prometheus", "uid": "${datasource}"}
_STATS: Json = {"calcs": ["lastNotNull"], "fields": "", "values": False}
#: Options of each kind of panel.
_OPTIONS: Mapping[str, Json] = {
    "timeseries": {
        "legend": {
            "calcs": ["mean", "max"],
            "displayMode": "table",
            "placement": "bottom",
            "showLegend": True,
        },
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "stat": {
        "colorMode": "value",
        "graphMode": "area",
        "justifyMode": "auto",
        "orientation": "auto",
        "reduceOptions": _STATS,
        "textMode": "auto",
    },
    "bargauge": {
        "displayMode": "basic",
        "orientation": "horizontal",
        "reduceOptions": _STATS,
        "showUnfilled": True,
    },
    "table": {"cellHeight": "sm", "showHeader": True},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One picture. `text` says what it shows, and what to do when it looks bad.

    `queries` are expressions by the names of their series, in a table by what they count. With a histogram
    in `percentiles`, the dashboard's queries of percentiles come first. `limits` are the values from which on
    the panel has a colour; below the first it has the colour `good`. `words` are the meanings of single
    values, and their colours. `alerts` are the alerts on what it shows, to whose runbooks it links.
    """

    title: str
    text: str
    kind: str = "timeseries"
    unit: str = "short"
    queries: Texts = field(default_factory=dict)
    percentiles: str = ""
    width: int = 8
    height: int = 8
    stack: bool = False
    most: float | None = None
    good: str = "green"
    limits: Mapping[float, str] = field(default_factory=dict)
    words: Mapping[float, Sequence[str]] = field(default_factory=dict)
    alerts: Sequence[str] = ()


def made(
    uid: str,
    runbooks: str,
    *,
    title: str,
    text: str,
    variables: Sequence[Json],
    rows: Sequence[Json],
    names: Texts | None = None,
    percentiles: Texts | None = None,
) -> Json:
    """Returns the JSON. The keys of a description are the arguments by name; an unknown one is a TypeError.

    `uid` is part of the dashboard's address, which stays when it is provisioned anew. `runbooks` is the
    address of the runbooks, without #.
    """

    meanings = names or {}

    def meaning(word: re.Match[str]) -> str:
        return written(meanings[word[0]]) if word[0] in meanings else word[0]

    def written(text: str) -> str:
        return re.sub(r"\b[A-Z][A-Z_]+\b", meaning, text)

    def drawn(panel: Panel) -> Json:
        queries = {
            legend: expr.replace("HISTOGRAM", panel.percentiles)
            for legend, expr in (percentiles or {}).items()
            if panel.percentiles
        }
        queries |= panel.queries
        return _panel(panel, {written(legend): written(expr) for legend, expr in queries.items()}, runbooks)

    return {
        "annotations": {"list": []},
        "description": text,
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
        "panels": list(_laid_out(rows, drawn)),
        "refresh": "1m",
        "schemaVersion": SCHEMA_VERSION,
        "tags": ["kvstore"],
        "templating": {"list": [_datasource(), *(_variable(written, **one) for one in variables)]},
        "time": {"from": "now-6h", "to": "now"},
        "timepicker": {},
        "timezone": "",
        "title": title,
        "uid": uid,
    }


def _laid_out(rows: Sequence[Json], drawn: Callable[[Panel], Json]) -> Iterator[Json]:
    number, y = 1, 0
    for row in rows:
        yield {
            "collapsed": False,
            "gridPos": {"h": 1, "w": COLUMNS, "x": 0, "y": y},
            "id": number,
            "panels": [],
            "title": row["title"],
            "type": "row",
        }
        number, y = number + 1, y + 1
        x = tallest = 0
        for described in row["panels"]:
            panel = Panel(**described)
            if x + panel.width > COLUMNS:
                x, y, tallest = 0, y + tallest, 0
            place = {"h": panel.height, "w": panel.width, "x": x, "y": y}
            yield drawn(panel) | {"gridPos": place, "id": number}
            number, x, tallest = number + 1, x + panel.width, max(tallest, panel.height)
        y += tallest


def _panel(panel: Panel, queries: Texts, runbooks: str) -> Json:
    table = panel.kind == "table"
    refs = [chr(ord("A") + number) for number in range(len(queries))]
    targets = [
        {
            "datasource": _DATASOURCE,
            "editorMode": "code",
            "expr": expr,
            "interval": _STEP,
            "legendFormat": "__auto" if table or not legend else legend,
            "refId": ref,
            **({"format": "table", "instant": True, "range": False} if table else {"range": True}),
        }
        for ref, (legend, expr) in zip(refs, queries.items(), strict=True)
    ]
    made = {
        "datasource": _DATASOURCE,
        "description": panel.text,
        "fieldConfig": {"defaults": _defaults(panel), "overrides": []},
        "links": [_link(f"Runbook: {alert}", f"{runbooks}#{alert.lower()}") for alert in panel.alerts],
        "options": _OPTIONS[panel.kind],
        "targets": targets,
        "title": panel.title,
        "type": panel.kind,
    }
    if table:
        named = {f"Value #{ref}": name for ref, name in zip(refs, queries, strict=True)}
        options = {"excludeByName": {"Time": True}, "indexByName": {}, "renameByName": named}
        made["transformations"] = [{"id": "merge", "options": {}}, {"id": "organize", "options": options}]
    return made


def _defaults(panel: Panel) -> Json:
    steps: list[Json] = [{"color": panel.good, "value": None}]
    steps += [{"color": colour, "value": value} for value, colour in panel.limits.items()]
    made: Json = {"unit": panel.unit, "thresholds": {"mode": "absolute", "steps": steps}, "min": 0}
    if panel.most is not None:
        made["max"] = panel.most
    made["color"] = {"mode": "palette-classic" if panel.kind == "timeseries" else "thresholds"}
    if panel.words:
        options = {
            f"{value:g}": {"text": text, "color": colour} for value, (text, colour) in panel.words.items()
        }
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


def _variable(
    written: Callable[[str], str], *, name: str, title: str, metric: str = "", label: str = "", text: str = ""
) -> Json:
    """Returns a choice at the top: all values of `label` of a metric with these matchers, or a text."""
    if text:
        chosen = {"selected": True, "text": text, "value": text}
        return {
            "current": chosen,
            "hide": 0,
            "label": title,
            "name": name,
            "options": [chosen],
            "query": text,
            "type": "textbox",
        }
    query = f"label_values({written(metric)}, {label})"
    return {
        # Series without the label are part of "All".
        "allValue": ".*",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        "datasource": _DATASOURCE,
        "definition": query,
        "hide": 0,
        "includeAll": True,
        "label": title,
        "multi": True,
        "name": name,
        "options": [],
        "query": {"query": query, "refId": "StandardVariableQuery"},
        "refresh": 2,
        "sort": 1,
        "type": "query",
    }


def _link(title: str, url: str) -> Json:
    return {"targetBlank": True, "title": title, "type": "link", "url": url}
