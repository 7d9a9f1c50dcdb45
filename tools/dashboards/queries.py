"""How kvstore's metrics are asked for (docs/metrics.md).

Several servers export one index: of what comes from it the maximum over them is taken. Engines count each for
itself: theirs is added up. An engine's namespace is no label of its counters, but of a gauge that they are
joined with.
"""

from __future__ import annotations

from collections.abc import Mapping

#: Matchers by the variables of a dashboard. What comes from the index; of it, what a namespace has; engines.
INDEX = 'release=~"$release"'
NAMESPACE = INDEX + ', cache_namespace=~"$namespace", model=~"$model", tenant=~"$tenant"'
FLEET = 'release=~"$release"'
ENGINE = 'release=~"$release", model_name=~"$model", instance=~"$instance"'

#: Outcomes of what had to be stored: it was neither there already nor anybody else's to store.
HAD_TO = {"outcome": "stored|dropped|failed|refused"}

WHO = "{{model}} · {{tenant}} · {{cache_namespace}}"
_WHOSE = "release, cache_namespace, model, tenant"


def rate(metric: str, match: str) -> str:
    """Per second."""
    return f"rate({metric}{{{match}}}[$__rate_interval])"


def held(metric: str, match: str = NAMESPACE) -> str:
    """A state of each namespace."""
    return f"max by ({_WHOSE}) ({metric}{{{match}}})"


def counted(metric: str, *labels: str, match: str = NAMESPACE) -> str:
    """What each namespace counts per second, by these labels besides."""
    return f"max by ({', '.join([_WHOSE, *labels])}) ({rate(metric, match)})"


def filled(**where: str) -> str:
    """What scopes hold, of their quotas."""
    match = INDEX + _matchers(where)
    return f"kvstore_quota_used_bytes{{{match}}} / kvstore_quota_bytes{{{match}}}"


def hit_ratio(total: bool = False) -> str:
    """Of the blocks that were asked for, by namespace or in all."""
    served, asked = counted("kvstore_served_blocks_total"), counted("kvstore_asked_blocks_total")
    return f"sum({served}) / sum({asked})" if total else f"{served} / {asked}"


def of_engines(metric: str, *labels: str, match: str = FLEET, **where: str) -> str:
    """What engines count per second, by these labels; `where` is matched besides, with a | as a pattern."""
    by = f" by ({', '.join(labels)})" if labels else ""
    return f"sum{by} ({rate(metric, match + _matchers(where))})"


def share(
    metric: str, *labels: str, match: str = FLEET, of: Mapping[str, str] | None = None, **where: str
) -> str:
    """Of what engines count, or of that part of it which `of` matches, what `where` matches."""
    part = of_engines(metric, *labels, match=match, **where)
    return f"{part} / {of_engines(metric, *labels, match=match, **(of or {}))}"


def _matchers(where: Mapping[str, str]) -> str:
    return "".join(f', {label}{"=~" if "|" in value else "="}"{value}"' for label, value in where.items())


def by_namespace(connector: str, metric: str, **where: str) -> str:
    """What engines count per second, by the namespace that they use: `connector` is `kv` or `ec`."""
    now = f'vllm:kvstore_{connector}_namespace{{{FLEET}, cache_namespace=~"$namespace"}} == 1'
    own = "instance, model_name, engine"
    return (
        f"sum by (cache_namespace) ({rate(f'vllm:kvstore_{connector}_{metric}', FLEET + _matchers(where))}"
        # One of them, should an engine that was replaced under the same address still be there.
        f" * on ({own}) group_left (cache_namespace) topk by ({own}) (1, {now}))"
    )


def either(kv: str, ec: str) -> str:
    """The sum of two numbers of which either may not be there."""
    return f"({kv} or vector(0)) + ({ec} or vector(0))"


def percentile(part: float, histogram: str, *labels: str, match: str = ENGINE) -> str:
    """Of a histogram of engines, by these labels."""
    return f"histogram_quantile({part:g}, {of_engines(f'{histogram}_bucket', *labels, 'le', match=match)})"
