"""What the EC connector did, through vLLM's own statistics: its log line and its Prometheus metrics.

The workers' share travels with their metadata rather than by `get_ec_connector_stats`, which only one of
vLLM's two model runners asks them for.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from prometheus_client import Counter, Histogram
from vllm.distributed.ec_transfer.ec_connector.metrics import ECConnectorPromMetrics, ECConnectorStats

from kvstore.metrics import MISS_REASONS, SAVE_OUTCOMES, Counters

if TYPE_CHECKING:
    from vllm.config import VllmConfig

#: Where the output of an encoder input that was scheduled came from.
SOURCES: Final = (
    "store",  # fetched from the store
    "staging",  # fetched earlier and still on this node
    "encoder",  # computed here
    "skipped",  # (producer) the store has it: neither computed nor loaded
)

#: Observations of one kind kept between two reports; what is more is counted but not timed.
_MOST = 1024

_TIER: Final = (
    "hits_fast", "hits_slow", "fills", "fills_skipped", "waits", "evictions", "fast_errors", "uploads",
    "upload_failures",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Metric:
    """A Prometheus counter; with a label, `name{value}` of the tally is its child `value`."""

    name: str
    help: str
    label: str = ""
    values: tuple[str, ...] = ()


_COUNTERS: Final = (
    _Metric("items", "Encoder inputs scheduled, by where the output came from", "source", SOURCES),
    _Metric("misses", "Items not had from the store, by reason", "reason", (*MISS_REASONS, "mismatch")),
    _Metric("unavailable_requests", "Requests failed for an item that could not be had and not be computed"),
    _Metric("loaded_bytes", "Bytes of encoder outputs handed to the workers"),
    _Metric("saves", "Encoder outputs offered to the store, by outcome", "outcome", SAVE_OUTCOMES),
    _Metric("save_failures", "Saves that failed, by reason", "reason", MISS_REASONS),
    _Metric("saved_bytes", "Bytes of segments written"),
    _Metric("tier", "Events of the local tier", "event", _TIER),
)
_SECONDS: Final = {
    "fetch_seconds": "From the first look for an item to its verified bytes on this node",
    "save_seconds": "From the end of the encoder to the commit",
}
_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

#: The store's counters that are reported, and as what.
_RENAMED: Final = {
    **{f"save_blocks{{{one}}}": f"saves{{{one}}}" for one in SAVE_OUTCOMES},
    **{f"save_failures{{{one}}}": f"save_failures{{{one}}}" for one in MISS_REASONS},
    **{f"tier_{one}": f"tier{{{one}}}" for one in _TIER},
    "save_bytes": "saved_bytes",
}


class ECStoreStats(ECConnectorStats):
    """`data`: `counts`, a name's increase, and `seconds`, a name's observations; nothing that isn't there."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data or {"counts": {}, "seconds": {}})

    data: dict[str, Any]

    def reset(self) -> None:
        self.data = {"counts": {}, "seconds": {}}

    def aggregate(self, other: ECConnectorStats) -> ECStoreStats:
        """Add the other's; returns itself."""
        counts, seconds = self.data["counts"], self.data["seconds"]
        for name, amount in other.data["counts"].items():
            counts[name] = counts.get(name, 0) + amount
        for name, values in other.data["seconds"].items():
            seconds[name] = [*seconds.get(name, ()), *values][:_MOST]
        return self

    def reduce(self) -> dict[str, int | float]:
        """For the log: every count, and mean and maximum of what was timed, in milliseconds."""
        made: dict[str, int | float] = dict(sorted(self.data["counts"].items()))
        for name, values in self.data["seconds"].items():
            what = name.removesuffix("_seconds")
            made[f"mean {what} ms"] = round(1000 * sum(values) / len(values), 3)
            made[f"max {what} ms"] = round(1000 * max(values), 3)
        return made

    def is_empty(self) -> bool:
        return not self.data["counts"] and not self.data["seconds"]


class Tally:
    """Counts of one half of the connector since the last report. Any thread."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._lock = threading.Lock()
        self._stats = ECStoreStats()
        self._reported: Mapping[str, int] = {}

    def add(self, name: str, amount: int = 1) -> None:
        """Count `amount` more of `name`, one of this module's."""
        with self._lock:
            counts = self._stats.data["counts"]
            counts[name] = counts.get(name, 0) + amount

    def timed(self, name: str, seconds: float) -> None:
        """Observe a duration of `name`."""
        with self._lock:
            values = self._stats.data["seconds"].setdefault(name, [])
            if len(values) < _MOST:
                values.append(seconds)

    def merge(self, stats: ECStoreStats) -> None:
        """Take over what another half has reported."""
        with self._lock:
            self._stats.aggregate(stats)

    def take(self) -> ECStoreStats | None:
        """What has happened since the last call, the store's own counters included; None if nothing has."""
        now = self._counters.snapshot()
        for name, reported_as in _RENAMED.items():
            if more := now.get(name, 0) - self._reported.get(name, 0):
                self.add(reported_as, more)
        self._reported = now
        with self._lock:
            stats, self._stats = self._stats, ECStoreStats()
        return None if stats.is_empty() else stats


class ECStorePromMetrics(ECConnectorPromMetrics):
    """`vllm:kvstore_ec_*`, every child there from the start, so that "none" reads 0."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters: dict[tuple[int, str], Any] = {}
        self._histograms: dict[tuple[int, str], Any] = {}
        for metric in _COUNTERS:
            made = metric_types[Counter](
                name=f"vllm:kvstore_ec_{metric.name}",
                documentation=metric.help,
                labelnames=[*labelnames, *([metric.label] if metric.label else [])],
            )
            for engine, values in per_engine_labelvalues.items():
                if not metric.label:
                    self._counters[engine, metric.name] = made.labels(*values)
                for value in metric.values:
                    self._counters[engine, f"{metric.name}{{{value}}}"] = made.labels(*values, value)
        for name, text in _SECONDS.items():
            timed = metric_types[Histogram](
                name=f"vllm:kvstore_ec_{name}", documentation=text, labelnames=labelnames, buckets=_BUCKETS
            )
            for engine, values in per_engine_labelvalues.items():
                self._histograms[engine, name] = timed.labels(*values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one report. What this version does not know is left out."""
        for name, amount in transfer_stats_data["counts"].items():
            if (counter := self._counters.get((engine_idx, name))) is not None:
                counter.inc(amount)
        for name, values in transfer_stats_data["seconds"].items():
            if (histogram := self._histograms.get((engine_idx, name))) is not None:
                for value in values:
                    histogram.observe(value)
