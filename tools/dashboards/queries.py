"""PromQL for kvstore's metrics (docs/metrics.md).

Several servers export one index: metrics from it are the maximum over the servers. Each engine counts for
itself: metrics of engines are added up. An engine's namespace is not a label of its counters, but of a gauge
with which they are joined.
"""

from __future__ import annotations

from collections.abc import Mapping

#: Matchers by the variables of a dashboard: for all from the index, for a namespace's, for engines'.
INDEX = 'release=~"$release"'
NAMESPACE = INDEX + ', cache_namespace=~"$namespace", model=~"$model", tenant=~"$tenant"'
FLEET = 'release=~"$release"'
ENGINE = 'release=~"$release", model_name=~"$model", instance=~"$instance"'

#: Outcomes of blocks that had to be stored: neither stored already nor another engine's to store.
HAD_TO = {"outcome": "stored|dropped|failed|refused"}

WHO = "{{model}} · {{tenant}} · {{cache_namespace}}"
_WHOSE = "release, cache_namespace, model, tenant"


def rate(metric: str, match: str) -> str:
    """Returns the rate of a counter per second."""
    return f"rate({metric}{{{match}}}[$__rate_interval])"


def held(metric: str, match: str = NAMESPACE) -> str:
    """Returns a gauge of each namespace."""
    return f"max by ({_WHOSE}) ({metric}{{{match}}})"


def counted(metric: str, *labels: str, match: str = NAMESPACE) -> str:
    """Returns the rate of a counter of each namespace, by these labels besides."""
    return f"max by ({', '.join([_WHOSE, *labels])}) ({rate(metric, match)})"


def filled(**where: str) -> str:
    """Returns the share of their quotas that scopes hold."""
    match = INDEX + _matchers(where)
    return f"kvstore_quota_used_bytes{{{match}}} / kvstore_quota_bytes{{{match}}}"


def hit_ratio(total: bool = False) -> str:
    """Returns the share of blocks asked for that were served, by namespace or in total."""
    served, asked = counted("kvstore_served_blocks_total"), counted("kvstore_asked_blocks_total")
    return f"sum({served}) / sum({asked})" if total else f"{served} / {asked}"


def of_engines(metric: str, *labels: str, match: str = FLEET, **where: str) -> str:
    """Returns the rate of a counter of engines, by labels; `where` are more matchers, patterns if with |."""
    by = f" by ({', '.join(labels)})" if labels else ""
    return f"sum{by} ({rate(metric, match + _matchers(where))})"


def share(
    metric: str, *labels: str, match: str = FLEET, of: Mapping[str, str] | None = None, **where: str
) -> str:
    """Returns the share of a counter of engines that `where` matches; `of` narrows what it is a share of."""
    part = of_engines(metric, *labels, match=match, **where)
    return f"{part} / {of_engines(metric, *labels, match=match, **(of or {}))}"


def _matchers(where: Mapping[str, str]) -> str:
    return "".join(f', {label}{"=~" if "|" in value else "="}"{value}"' for label, value in where.items())


def by_namespace(connector: str, metric: str, **where: str) -> str:
    """Returns the rate of a counter of engines by the namespace that they use; `connector`: `kv` or `ec`."""
    now = f'vllm:kvstore_{connector}_namespace{{{FLEET}, cache_namespace=~"$namespace"}} == 1'
    own = "instance, model_name, engine"
    return (
        f"sum by (cache_namespace) ({rate(f'vllm:kvstore_{connector}_{metric}', FLEET + _matchers(where))}"
        # One of them, in case an engine that was replaced under the same address is still there.
        f" * on ({own}) group_left (cache_namespace) topk by ({own}) (1, {now}))"
    )


def either(kv: str, ec: str) -> str:
    """Returns the sum of two numbers, of which either may be absent."""
    return f"({kv} or vector(0)) + ({ec} or vector(0))"


def percentile(part: float, histogram: str, *labels: str, match: str = ENGINE) -> str:
    """Returns a percentile of engines' histogram, by these labels."""
    return f"histogram_quantile({part:g}, {of_engines(f'{histogram}_bucket', *labels, 'le', match=match)})"
