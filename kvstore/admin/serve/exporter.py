"""Metrics of a cache for Prometheus: what a Monitor saw last, and what the janitor says of itself.

Nothing here does I/O. docs/metrics.md explains each metric; a test compares the two. Counters of a namespace
are those of the index, so every server that looks at one index exports the same.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import get_args

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvstore import __version__
from kvstore.admin.serve.collector import Look
from kvstore.admin.serve.door import REFUSALS, Refusal
from kvstore.admin.serve.monitor import Monitor
from kvstore.admin.serve.reports import BlockTotals, Held, ServedNamespace
from kvstore.janitor.reports import JanitorState
from kvstore.rules.reasons import MISS_REASONS, UNSAVED
from schemas.records import EvictionRule

#: Seconds that a text is kept for: with many namespaces it takes tens of milliseconds to make.
KEPT_S = 2.0
#: Labels of a namespace; those that are not told apart are summed with the namespace "other". The first is
#: not `namespace`: that is the pod's where Prometheus runs on Kubernetes, and alerts are routed by it.
_NAMESPACE = ("cache_namespace", "kind", "model", "tenant")
_OTHER = ("other", "", "", "")
_ELSE = "other"

_HELD: Mapping[str, tuple[str, Callable[[Held], float]]] = {
    "stored_bytes": ("Bytes of visible segments", lambda held: held.stored_bytes),
    "segments": ("Visible segments", lambda held: held.segments),
    "blocks": ("Blocks in visible segments; an encoder item is one", lambda held: held.blocks),
    "pinned_bytes": ("Of the stored bytes, those of pinned segments", lambda held: held.pinned_bytes),
    "recompute_seconds": (
        "What computing all that is stored would take, as engines told",
        lambda held: held.cost_us / 1e6,
    ),
    "trashed_segments": (
        "Evicted segments whose payloads are not deleted yet",
        lambda held: held.trashed_segments,
    ),
    "invalidated_segments": (
        "Invalidated segments that are not in the trash yet",
        lambda held: held.bygone_segments,
    ),
}
_BLOCKS: Mapping[str, tuple[str, Callable[[BlockTotals], float]]] = {
    "requests": ("Requests that engines told of", lambda blocks: blocks.requests),
    "asked_blocks": ("Blocks that requests asked for", lambda blocks: blocks.asked),
    "served_blocks": ("Of the blocks asked for, those found", lambda blocks: blocks.served),
    "offered_blocks": ("Blocks offered for saving", lambda blocks: blocks.offered),
    "saved_blocks": ("Of the blocks offered, those stored", lambda blocks: blocks.stored),
}


class Exporter(Collector):
    """Writes the metrics. Any thread may call `text`."""

    def __init__(
        self,
        monitor: Monitor,
        janitor: Callable[[], JanitorState | None],
        refused: Callable[[], Mapping[Refusal, int]] = dict,
        *,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._monitor = monitor
        self._janitor = janitor
        self._refused = refused
        self._monotonic = monotonic
        #: The text that was made last: when, its content type, and its bytes.
        self._written = (float("-inf"), "", b"")
        self._lock = threading.Lock()
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def text(self, accept: str) -> tuple[bytes, str]:
        """Returns all metrics in the format that an Accept header asks for, and its content type.

        The text is made once in KEPT_S, however many ask.
        """
        encode, content_type = choose_encoder(accept)
        with self._lock:
            written_at, kind, text = self._written
            if kind != content_type or self._monotonic() - written_at >= KEPT_S:
                text = encode(self._registry)
                self._written = (self._monotonic(), content_type, text)
        return text, content_type

    def collect(self) -> Iterator[Metric]:
        """Yields all metrics; called by prometheus-client."""
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
            up.add_metric([name], float(backend.state in ("ok", "absent")))
            if backend.answered_s is not None:
                answered.add_metric([name], backend.answered_s)
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
    count = len(look.named) + look.others
    yield GaugeMetricFamily("kvstore_namespaces", "Namespaces that the index knows", count)
    yield GaugeMetricFamily("kvstore_capacity_bytes", "Quota of the whole store", look.capacity_bytes)
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
    for one in look.quotas:
        quota.add_metric([one.scope], one.quota_bytes)
        used.add_metric([one.scope], one.used_bytes)
    yield from (quota, used)
    for name, (text, of_held) in _HELD.items():
        gauge = _gauge(name, text, *_NAMESPACE)
        for line in look.named:
            gauge.add_metric(_labels(line), of_held(line.held))
        if look.others:
            gauge.add_metric(_OTHER, of_held(look.others_held))
        yield gauge
    yield from _counted(look)


def _counted(look: Look) -> Iterator[Metric]:
    # The others' counters are exported from the start, so that their first count shows as an increase.
    rows = [(_labels(line), line.blocks, line.evicted_bytes) for line in look.named]
    rows.append((_OTHER, look.others_blocks, look.others_evicted_bytes))
    for name, (text, of_blocks) in _BLOCKS.items():
        counter = _counter(name, text, *_NAMESPACE)
        for labels, blocks, _ in rows:
            counter.add_metric(labels, of_blocks(blocks))
        yield counter
    evicted = _counter("evicted_bytes", "Bytes evicted to meet a quota", *_NAMESPACE)
    missed = _counter("missed_blocks", "Blocks asked for that did not come", *_NAMESPACE, "reason")
    unsaved = _counter("unsaved_blocks", "Blocks offered that were not stored", *_NAMESPACE, "reason")
    for labels, blocks, nbytes in rows:
        evicted.add_metric(labels, nbytes)
        _add_reasons(missed, labels, blocks.missed, MISS_REASONS)
        _add_reasons(unsaved, labels, blocks.unsaved, tuple(UNSAVED))
    yield from (evicted, missed, unsaved)


def _add_reasons(
    counter: CounterMetricFamily, labels: tuple[str, ...], counted: Mapping[str, int], known: tuple[str, ...]
) -> None:
    """Adds every known reason, also at 0; a newer engine's unknown reasons are summed as one more."""
    for reason in known:
        counter.add_metric([*labels, reason], counted.get(reason, 0))
    counter.add_metric([*labels, _ELSE], sum(n for reason, n in counted.items() if reason not in known))


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


def _labels(line: ServedNamespace) -> tuple[str, ...]:
    return (line.id, line.kind, line.model, line.tenant)


def _gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"kvstore_{name}", text, labels=labels)


def _counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(f"kvstore_{name}", text, labels=labels)
