"""Metrics of a cache for Prometheus: a Monitor's last look, and the janitor's own counts.

Nothing here does I/O. docs/metrics.md explains each metric; a test compares the two. Counters of a namespace
are those of the index, so every server that looks at one index exports the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import get_args

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvstore import __version__
from kvstore.admin.serve.collector import Look
from kvstore.admin.serve.door import REFUSALS, Refusal
from kvstore.admin.serve.monitor import Monitor
from kvstore.index.maintenance import Account
from kvstore.janitor.reports import JanitorState
from kvstore.keys import NamespaceId
from kvstore.rules.reasons import MISS_REASONS, UNSAVED
from kvstore.rules.text import readable
from schemas.records import EvictionRule

#: Labels of a namespace; those that are not told apart are summed with the namespace "other". The first is
#: not `namespace`: that is the pod's where Prometheus runs on Kubernetes, and alerts are routed by it.
_NAMESPACE = ("cache_namespace", "kind", "model", "tenant")
_OTHER = ("other", "", "", "")
_ELSE = "other"

#: Text, field of an account, and unit of each metric of what is held.
_HELD: Mapping[str, tuple[str, str, float]] = {
    "stored_bytes": ("Bytes of visible segments", "usage.nbytes", 1),
    "segments": ("Visible segments", "usage.segments", 1),
    "blocks": ("Blocks in visible segments; an encoder item is one", "usage.blocks", 1),
    "pinned_bytes": ("Of the stored bytes, those of pinned segments", "usage.pinned_bytes", 1),
    "recompute_seconds": (
        "What computing all that is stored would take, as engines told",
        "usage.cost_us",
        1e6,
    ),
    "trashed_segments": ("Evicted segments whose payloads are not deleted yet", "trashed", 1),
    "invalidated_segments": ("Invalidated segments that are not in the trash yet", "bygone", 1),
}
#: Text, and name of the total in the index, of each counter.
_COUNTED: Mapping[str, tuple[str, str]] = {
    "requests": ("Requests that engines told of", "requests"),
    "asked_blocks": ("Blocks that requests asked for", "asked"),
    "served_blocks": ("Of the blocks asked for, those found", "served"),
    "offered_blocks": ("Blocks offered for saving", "offered"),
    "saved_blocks": ("Of the blocks offered, those stored", "stored"),
    "evicted_bytes": ("Bytes evicted to meet a quota", "evicted"),
}
#: Text, prefix of the totals in the index, and known reasons of each counter by reason.
_BY_REASON: Mapping[str, tuple[str, str, Sequence[str]]] = {
    "missed_blocks": ("Blocks asked for that did not come", "miss:", MISS_REASONS),
    "unsaved_blocks": ("Blocks offered that were not stored", "unsaved:", tuple(UNSAVED)),
}


class Exporter:
    """Makes the metrics. Any thread may ask."""

    def __init__(
        self,
        monitor: Monitor,
        janitor: Callable[[], JanitorState | None],
        refused: Callable[[], Mapping[Refusal, int]] = dict,
    ) -> None:
        self._monitor = monitor
        self._janitor = janitor
        self._refused = refused

    def metrics(self) -> Iterator[Metric]:
        """Yields all metrics but those of the process."""
        info = GaugeMetricFamily("kvstore_info", "1, with the version of this server", labels=["version"])
        info.add_metric([__version__], 1)
        yield info
        yield from self._backends()
        refused = _counter("serve_refused", "Requests and connections that were turned away", "reason")
        counted = self._refused()
        for reason in REFUSALS:
            refused.add_metric([reason], counted.get(reason, 0))
        yield refused
        look = self._monitor.last_look()
        if look is not None:
            yield from _of_look(look)
            evictions = _counter("evictions", "Evictions that the index's journal told of", "rule")
            by_rule = self._monitor.evictions_by_rule()
            for rule in get_args(EvictionRule):
                evictions.add_metric([rule], by_rule.get(rule, 0))
            yield evictions
        if (janitor := self._janitor()) is not None:
            yield from _of_janitor(janitor)

    def _backends(self) -> Iterator[Metric]:
        index, payloads, fast = self._monitor.backends()
        up = _gauge("up", "1 if the backend answered when it was asked last", "backend")
        answered = _gauge("answered_timestamp_seconds", "When the backend answered last", "backend")
        for name, backend in (("index", index), ("payloads", payloads)):
            up.add_metric([name], float(backend.state.state != "unreachable"))
            if backend.answering.answered_s is not None:
                answered.add_metric([name], backend.answering.answered_s)
        yield from (up, answered)
        if fast is not None and fast.used_bytes is not None:
            tiers = {
                "capacity": ("Bytes that this node's fast tier may hold", fast.capacity_bytes),
                "used": ("Bytes in this node's fast tier", fast.used_bytes),
                "dirty": ("Of them, those not uploaded yet", fast.dirty_bytes or 0),
            }
            for name, (text, value) in tiers.items():
                yield GaugeMetricFamily(f"kvstore_tier_{name}_bytes", text, value=value)


def _of_look(look: Look) -> Iterator[Metric]:
    yield GaugeMetricFamily("kvstore_look_timestamp_seconds", "When the index was looked at", look.at_s)
    yield GaugeMetricFamily("kvstore_look_seconds", "How long that took", look.seconds)
    count = len(look.named) + len(look.others)
    yield GaugeMetricFamily("kvstore_namespaces", "Namespaces that the index knows", count)
    yield GaugeMetricFamily("kvstore_capacity_bytes", "Quota of the whole store", look.status.capacity_bytes)
    if look.memory is not None:
        used_bytes, limit_bytes = look.memory
        yield GaugeMetricFamily("kvstore_index_used_bytes", "Memory that Redis uses", used_bytes)
        if limit_bytes:
            yield GaugeMetricFamily("kvstore_index_limit_bytes", "Memory that it may use", limit_bytes)
    yield CounterMetricFamily(
        "kvstore_journal_unreadable_entries",
        "How often this server met an entry of the journal that it could not read",
        look.unreadable,
    )
    damaged = "Namespaces in which the index holds something that makes no sense"
    yield GaugeMetricFamily("kvstore_damaged_namespaces", damaged, len(look.damaged))
    quota = _gauge("quota_bytes", "Bytes that the namespaces of a scope may hold together", "scope")
    used = _gauge("quota_used_bytes", "Bytes that they hold", "scope")
    for one in look.status.quotas:
        quota.add_metric([readable(one.scope)], one.quota_bytes)
        used.add_metric([readable(one.scope)], one.used_bytes)
    yield from (quota, used)
    labels = {account.namespace: _labels(account, look.models) for account in look.named}
    for name, (text, path, unit) in _HELD.items():
        gauge, field = _gauge(name, text, *_NAMESPACE), attrgetter(path)
        for account in look.named:
            gauge.add_metric(labels[account.namespace], field(account) / unit)
        if look.others:
            gauge.add_metric(_OTHER, sum(map(field, look.others)) / unit)
        yield gauge
    # The others' counters are exported from the start, so that their first count shows as an increase.
    rows = [(labels[name], totals) for name, totals in look.totals.items()]
    rows.append((_OTHER, look.others_counted))
    for name, (text, total) in _COUNTED.items():
        counter = _counter(name, text, *_NAMESPACE)
        for row, totals in rows:
            counter.add_metric(row, totals.get(total, 0))
        yield counter
    for name, (text, prefix, known) in _BY_REASON.items():
        counter = _counter(name, text, *_NAMESPACE, "reason")
        for row, totals in rows:
            counted = {key.removeprefix(prefix): n for key, n in totals.items() if key.startswith(prefix)}
            # Every known reason is there, also at 0; a newer engine's unknown reasons are summed as one more.
            for reason in known:
                counter.add_metric([*row, reason], counted.pop(reason, 0))
            counter.add_metric([*row, _ELSE], sum(counted.values()))
        yield counter


def _of_janitor(state: JanitorState) -> Iterator[Metric]:
    yield CounterMetricFamily("kvstore_janitor_rounds", "Rounds that ended", state.rounds)
    if state.last_round_s is not None:
        yield GaugeMetricFamily(
            "kvstore_janitor_round_timestamp_seconds", "When the last round ended", state.last_round_s
        )
    steps = {
        "runs": _counter("janitor_step_runs", "How often a step was begun", "step"),
        "failures": _counter("janitor_step_failures", "How often it did not do all that it should", "step"),
        "seconds": _counter("janitor_step_seconds", "Time spent in it", "step"),
        "done": _counter("janitor_step_done", "What it did, in the step's own unit", "step"),
    }
    for step in state.steps:
        for name, counter in steps.items():
            counter.add_metric([step.step], getattr(step, name))
    yield from steps.values()
    scrub = state.scrub
    scrubbed = {
        "payloads": ("Payloads read and verified", scrub.payloads),
        "bytes": ("Bytes of them", scrub.read_bytes),
        "bad_segments": ("Segments that were bad twice", scrub.bad),
        "evicted_segments": ("Of those, the ones that were evicted for it", scrub.evicted),
        "unanswered_segments": ("Segments that could not be read", scrub.unanswered),
        "unreadable_segments": ("Segments that no key of the janitor can judge", scrub.unreadable),
    }
    for name, (text, value) in scrubbed.items():
        yield CounterMetricFamily(f"kvstore_janitor_scrubbed_{name}", text, value)
    yield GaugeMetricFamily(
        "kvstore_janitor_scrub_behind_segments", "Segments whose turn has come, not read yet", scrub.behind
    )


def _labels(account: Account, models: Mapping[NamespaceId, str]) -> tuple[str, ...]:
    name = account.namespace
    return (name, *map(readable, (account.kind, models[name], account.tenant)))


def _gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"kvstore_{name}", text, labels=labels)


def _counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(f"kvstore_{name}", text, labels=labels)
