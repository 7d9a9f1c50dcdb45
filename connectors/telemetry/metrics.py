"""Carries statistics from where something happened to vLLM's log and to Prometheus.

    halves      a `Tally` in each process counts what happened since it was last asked: the increase of the
                store's counters, and durations
    engine      vLLM asks every half in every step, adds up the reports of all ranks and of the scheduler
                (`merge`), and sends the sum to the front end
    front end   adds it to its log's interval (`merge`, `summary`) and to Prometheus (`Exports`)

A report is a plain dictionary, which any serialiser takes:

    counts   name -> increase
    seconds  name -> observed durations, at most `MOST` of them; ratios likewise, by names in `_ratio`
    gauges   name -> state at that moment; a later one replaces it, so the name must tell whose state it is

Labelled names are spelled `name{value}`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from prometheus_client import Counter, Gauge, Histogram

from kvstore import __version__
from kvstore.metrics import Counters
from kvstore.rules.reasons import MISS_REASONS, PREFETCH_OUTCOMES, SAVE_OUTCOMES
from kvstore.store.store import Store

#: Most durations of one kind that are kept in one report, or between two lines of the log; more are left out.
#: Counts are exact in any case.
MOST: Final = 1024

#: Buckets for an answer of the index, in seconds: from a fraction of a millisecond, if it is close by, to a
#: deadline of half a second, near which they are narrow enough to tell "near it" from "half of it".
QUICK: Final = (
    0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 1.0,
)  # fmt: skip
#: Buckets for reading or writing payloads, in seconds: a page cache takes one millisecond, a bucket tens of
#: them, and deadlines are 2 and 30 s.
SLOW: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0,
)  # fmt: skip

#: Buckets for a share that ought to be next to nothing, and may be many times the whole.
SHARES: Final = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)

#: Most children of a metric with an open label; all further values share one more child, OTHER.
_MOST_OPEN: Final = 16
OTHER: Final = "other"

#: Events of a local tier; the store's counters of them have `tier_` before the name.
TIER_EVENTS: Final = (
    "hits_fast", "hits_slow", "fills", "fills_skipped", "waits", "evictions", "fast_errors", "uploads",
    "upload_failures",
)  # fmt: skip
#: The store's counters that both connectors report as events.
EVENTS: Final = (
    "evicted_segments", "deleted_payloads", "quarantined_segments", "dropped_copies", "note_failures",
    "session_failures", "hints_ignored", "trace_lost", "follower_failures", "slow_downs", "held_back",
)  # fmt: skip
#: The store's counters that both connectors report -> the names they are reported under.
COMMON: Final = {
    **{f"save_blocks{{{one}}}": f"saves{{{one}}}" for one in SAVE_OUTCOMES},
    **{f"save_failures{{{one}}}": f"save_failures{{{one}}}" for one in MISS_REASONS},
    **{f"tier_{one}": f"tier{{{one}}}" for one in TIER_EVENTS},
    **{
        f"prefetch_{what}{{{one}}}": f"prefetched_{what}{{{one}}}"
        for what in ("segments", "bytes")
        for one in PREFETCH_OUTCOMES
    },
    **{one: f"events{{{one}}}" for one in EVENTS},
    "save_bytes": "saved_bytes",
}

Report = dict[str, Any]


def empty() -> Report:
    """Returns an empty report."""
    return {"counts": {}, "seconds": {}, "gauges": {}}


def is_empty(report: Report) -> bool:
    """Returns whether a report has nothing in it."""
    return not (report["counts"] or report["seconds"] or report["gauges"])


def merge(into: Report, other: Report) -> None:
    """Add to the report `into` the one of other ranks, or of a later time."""
    counts, seconds = into["counts"], into["seconds"]
    for name, amount in other["counts"].items():
        counts[name] = counts.get(name, 0) + amount
    for name, values in other["seconds"].items():
        mine = seconds.setdefault(name, [])
        mine += values[: max(0, MOST - len(mine))]
    into["gauges"].update(other["gauges"])


def summary(report: Report) -> dict[str, int | float]:
    """Returns the values for a log line: counts and gauges that aren't 0, and the mean and maximum of
    durations, in milliseconds, and of ratios."""
    made: dict[str, int | float] = {
        name: value for kind in ("counts", "gauges") for name, value in sorted(report[kind].items()) if value
    }
    for name, values in sorted(report["seconds"].items()):
        ratio = name.endswith("_ratio")
        what, factor = (name, 1) if ratio else (f"{name.removesuffix('_seconds')} ms", 1000)
        made[f"mean {what}"] = round(factor * sum(values) / len(values), 3)
        made[f"max {what}"] = round(factor * max(values), 3)
    return made


class Mergeable:
    """The methods that vLLM asks of any connector's statistics; a mix-in for its base class."""

    data: Report

    def reset(self) -> None:
        self.data = empty()

    def aggregate(self, other: Any) -> Self:
        merge(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        return summary(self.data)

    def is_empty(self) -> bool:
        return is_empty(self.data)


class Tally:
    """Counts what one half did since it was last asked. Any thread may count; one thread asks."""

    def __init__(self, counters: Counters, renamed: Mapping[str, str]) -> None:
        """`renamed`: the store's counters that are reported -> the names they are reported under."""
        self._counters = counters
        self._renamed = renamed
        self._lock = threading.Lock()
        self._report = empty()
        self._touched = False
        self._seen = -1
        self._reported: Mapping[str, int] = dict.fromkeys(counters.snapshot(), 0)
        self._gauges: dict[str, float] = {}

    def add(self, name: str, amount: float = 1) -> None:
        """Count `amount` more of `name`."""
        with self._lock:
            counts = self._report["counts"]
            counts[name] = counts.get(name, 0) + amount
            self._touched = True

    def timed(self, name: str, seconds: float) -> None:
        """Observe a duration of `name`, or a ratio."""
        with self._lock:
            values = self._report["seconds"].setdefault(name, [])
            if len(values) < MOST:
                values.append(seconds)
            self._touched = True

    def state(self, name: str, value: float) -> None:
        """Report a state once. The caller reports each change of it; `take` does not ask for it."""
        with self._lock:
            # Removed first, so that the latest state comes last: Exports depends on the order.
            self._report["gauges"].pop(name, None)
            self._report["gauges"][name] = value
            self._touched = True

    def take(self, busy: bool, gauges: Callable[[], dict[str, float]]) -> Report | None:
        """Returns the report since the last call, or None without events, which is found out without a lock.

        `gauges` is called if something happened, if `busy`, or if some gauge wasn't 0 the last time.
        """
        changed = self._counters.changes != self._seen
        if not (changed or self._touched or busy or self._gauges):
            return None
        if changed:
            self._count()
        now = gauges()
        before, self._gauges = self._gauges, {name: value for name, value in now.items() if value}
        with self._lock:
            report, self._report, self._touched = self._report, empty(), False
        report["gauges"] |= {name: value for name, value in now.items() if value != before.get(name, 0)}
        return None if is_empty(report) else report

    def _count(self) -> None:
        # Read before the values, so that a count in between makes the next call look again.
        self._seen = self._counters.changes
        now = self._counters.snapshot()
        for name, reported_as in self._renamed.items():
            if more := now[name] - self._reported[name]:
                self.add(reported_as, more)
        self._reported = now


class TierStates:
    """Reports what a local tier holds whenever that was measured anew. Belongs to the thread that takes the
    tally."""

    def __init__(self, store: Store, tally: Tally, child: str = "") -> None:
        """`child` is appended to the names, for metrics with a label: `{value}`."""
        self._tier = store.backends.tier
        self._tally = tally
        self._child = child
        self._told: dict[str, int] = {}

    def tell(self) -> None:
        """Report what has changed. Does no I/O: the tier reads its ledger by itself, every few seconds."""
        if self._tier is None or (seen := self._tier.seen) is None:
            return
        states = {
            "tier_capacity_bytes": seen.capacity_bytes,
            "tier_used_bytes": seen.nbytes,
            "tier_dirty_bytes": seen.dirty_bytes,
        }
        for name, value in states.items():
            if self._told.get(name) != value:
                self._tally.state(f"{name}{self._child}", value)
        self._told = states


@dataclass(frozen=True, slots=True)
class Metric:
    """A counter or a gauge; with a label, `name{value}` in a report is its child `value`.

    A gauge with a label but no values is open: the child that was reported last is 1, all earlier ones are 0.
    """

    name: str
    help: str
    label: str = ""
    values: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Timed:
    """A histogram of durations, with its buckets in seconds, or of ratios."""

    help: str
    buckets: tuple[float, ...]


#: A gauge of both connectors, by which counters can be joined with their namespace: engines' metrics have no
#: label for it, because it may change while an engine runs.
NAMESPACE: Final = Metric("namespace", "1 for the namespace that the engine uses now", "cache_namespace")
#: Counters of what is fetched ahead to a local tier (connectors.ahead.prefetch).
PREFETCHED: Final = (
    Metric(
        "prefetched_segments",
        "Segments that were to be fetched ahead, for requests that wait or by a hint, by what became of them",
        "outcome",
        PREFETCH_OUTCOMES,
    ),
    Metric("prefetched_bytes", "Bytes of them", "outcome", PREFETCH_OUTCOMES),
)
#: Gauges of a local tier, which `TierStates` reports.
TIER_GAUGES: Final = (
    Metric("tier_capacity_bytes", "Bytes that the local tier may hold"),
    Metric("tier_used_bytes", "Bytes that it held at the last look"),
    Metric("tier_dirty_bytes", "Bytes of those that were not uploaded yet"),
)


class Exports:
    """A connector's metrics in Prometheus. Every child exists from the start, so that "none" reads 0."""

    def __init__(
        self,
        prefix: str,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        engines: Mapping[int, list[object]],
        *,
        counters: tuple[Metric, ...],
        gauges: tuple[Metric, ...],
        seconds: Mapping[str, Timed],
    ) -> None:
        """`metric_types` maps the classes of prometheus_client to vLLM's stand-ins for them; `engines` has
        the values of `labelnames` for each engine of this front end."""
        self._engines = engines
        self._counters: dict[tuple[int, str], Any] = {}
        self._gauges: dict[tuple[int, str], Any] = {}
        self._histograms: dict[tuple[int, str], Any] = {}
        #: Open gauges by name.
        self._open: dict[str, Any] = {}
        #: Children of open gauges by value, for each engine and gauge.
        self._opened: dict[tuple[int, str], dict[str, Any]] = {}
        #: The child that is 1, for each engine and open gauge.
        self._current: dict[tuple[int, str], Any] = {}
        for kind, children, metrics in (
            (Counter, self._counters, counters),
            (Gauge, self._gauges, gauges),
        ):
            # With several front ends, the front end with the latest report knows the state.
            options = {"multiprocess_mode": "mostrecent"} if kind is Gauge else {}
            for metric in metrics:
                made = metric_types[kind](
                    name=prefix + metric.name,
                    documentation=metric.help,
                    labelnames=[*labelnames, *([metric.label] if metric.label else [])],
                    **options,
                )
                if metric.label and not metric.values:
                    self._open[metric.name] = made
                for engine, values in engines.items():
                    if not metric.label:
                        children[engine, metric.name] = made.labels(*values)
                    for value in metric.values:
                        children[engine, f"{metric.name}{{{value}}}"] = made.labels(*values, value)
        for name, one in seconds.items():
            timed = metric_types[Histogram](
                name=prefix + name, documentation=one.help, labelnames=labelnames, buckets=one.buckets
            )
            for engine, values in engines.items():
                self._histograms[engine, name] = timed.labels(*values)
        info = metric_types[Gauge](
            name=prefix + "info",
            documentation="1, with the version of the connector",
            labelnames=[*labelnames, "version"],
            multiprocess_mode="mostrecent",
        )
        for values in engines.values():
            info.labels(*values, __version__).set(1)

    def observe(self, report: Report, engine: int) -> None:
        """Add one report. Names that this version does not know are left out."""
        for name, amount in report["counts"].items():
            if (counter := self._counters.get((engine, name))) is not None:
                counter.inc(amount)
        for name, value in report["gauges"].items():
            if (gauge := self._gauges.get((engine, name))) is not None:
                gauge.set(value)
                continue
            base, _, child = name.partition("{")
            if child and base in self._open and engine in self._engines:
                self._switch(engine, base, child.removesuffix("}"))
        for name, values in report["seconds"].items():
            if (histogram := self._histograms.get((engine, name))) is not None:
                for value in values:
                    histogram.observe(value)

    def _switch(self, engine: int, name: str, value: str) -> None:
        """Set an open gauge to 1 for `value` and to 0 for the former value; "" means no value."""
        if (former := self._current.pop((engine, name), None)) is not None:
            former.set(0)
        if not value:
            return
        children = self._opened.setdefault((engine, name), {})
        if value not in children:
            # The number of children is bounded: an engine whose weights change every minute has a new
            # namespace as often.
            value = value if len(children) < _MOST_OPEN else OTHER
        if value not in children:
            children[value] = self._open[name].labels(*self._engines[engine], value)
        children[value].set(1)
        self._current[engine, name] = children[value]
