"""What the panels of engines ask: of each engine, of all, of those that have most of something."""

from __future__ import annotations

from tools.dashboards.grafana import Query
from tools.dashboards.queries import ENGINE, HAD_TO, of_engines, percentile, share

ENGINE_LABELS = ("model_name", "instance", "engine")
WHO = "{{model_name}} {{instance}} {{engine}}"


def most(expr: str) -> str:
    """Of what each engine has, the largest: two hundred are no picture."""
    return f"topk($most, {expr})"


def least(expr: str) -> str:
    """The smallest, of shares that ought to be high."""
    return f"bottomk($most, {expr})"


def percentiles(histogram: str) -> tuple[Query, ...]:
    """Over all chosen engines, and the worst percentile of each."""
    queries = [Query(percentile(part, histogram), f"p{100 * part:g}, all") for part in (0.5, 0.95, 0.99)]
    return (*queries, Query(most(percentile(0.99, histogram, *ENGINE_LABELS)), f"p99 {WHO}"))


def state(gauge: str, *labels: str) -> str:
    """A gauge of each engine, all its ranks together."""
    return most(f"sum by ({', '.join([*ENGINE_LABELS, *labels])}) (vllm:kvstore_{gauge}{{{ENGINE}}})")


def by(metric: str, *labels: str) -> str:
    """What the chosen engines count per second, by these labels."""
    return of_engines(f"vllm:kvstore_{metric}", *labels, match=ENGINE)


def unsaved(outcome: str) -> str:
    """Of what each engine had to store, the share with this outcome."""
    saves = "vllm:kvstore_kv_saves_total"
    return most(share(saves, *ENGINE_LABELS, match=ENGINE, of=HAD_TO, outcome=outcome))


def tier(gauge: str, what: str) -> Query:
    """A gauge of a node's tier, which all engines of the node share."""
    return Query(most(f"max by (instance) (vllm:kvstore_{gauge}{{{ENGINE}}})"), f"{{{{instance}}}} {what}")
