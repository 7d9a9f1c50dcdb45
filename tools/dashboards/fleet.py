"""Queries on engines: each of them, all together, or those with the largest values."""

from __future__ import annotations

from tools.dashboards.grafana import Query
from tools.dashboards.queries import ENGINE, HAD_TO, of_engines, percentile, share

ENGINE_LABELS = ("model_name", "instance", "engine")
WHO = "{{model_name}} {{instance}} {{engine}}"


def most(expr: str) -> str:
    """Returns the largest of all engines' values: two hundred lines are no picture."""
    return f"topk($most, {expr})"


def least(expr: str) -> str:
    """Returns the smallest of all engines' values, for shares that ought to be high."""
    return f"bottomk($most, {expr})"


def percentiles(histogram: str) -> tuple[Query, ...]:
    """Returns percentiles over all chosen engines, and the engines whose 99th is worst."""
    queries = [Query(percentile(part, histogram), f"p{100 * part:g}, all") for part in (0.5, 0.95, 0.99)]
    return (*queries, Query(most(percentile(0.99, histogram, *ENGINE_LABELS)), f"p99 {WHO}"))


def state(gauge: str, *labels: str) -> str:
    """Returns a gauge of each engine, all its ranks together."""
    return most(f"sum by ({', '.join([*ENGINE_LABELS, *labels])}) (vllm:kvstore_{gauge}{{{ENGINE}}})")


def by(metric: str, *labels: str) -> str:
    """Returns the rate of a counter of the chosen engines, by these labels."""
    return of_engines(f"vllm:kvstore_{metric}", *labels, match=ENGINE)


def unsaved(outcome: str) -> str:
    """Returns the share with this outcome of the blocks that each engine had to store."""
    saves = "vllm:kvstore_kv_saves_total"
    return most(share(saves, *ENGINE_LABELS, match=ENGINE, of=HAD_TO, outcome=outcome))


def tier(gauge: str, what: str) -> Query:
    """Returns a gauge of a node's tier, which all engines of the node share."""
    return Query(most(f"max by (instance) (vllm:kvstore_{gauge}{{{ENGINE}}})"), f"{{{{instance}}}} {what}")
