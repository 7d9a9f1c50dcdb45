"""rebuild --follow: keeps an index up with payloads that others bring and delete, such as the replication of
a bucket from another region.

A turn lists the payloads. Segments that are complete and that the index does not know are committed, as a
rebuild does; those of which some rank's payload has not come yet wait for the next turn. Segments that the
index names and whose payloads are gone are evicted. So the index names what is there, a turn later at most;
between a deletion and the next turn a load may find nothing, which is a miss.

Notifications of the bucket, where they can be had, bring single payloads in at once. They may come late,
twice, in any order or never: each only says where to look, and turns find the rest.

Nothing is remembered but in the index, so it may be stopped at any time, run twice, and begun again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from urllib.parse import unquote_plus

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvstore.admin.backends import Cache
from kvstore.admin.counting import AmountSum, paged
from kvstore.admin.progress import ProgressListener, Silent
from kvstore.admin.repair.listing import Stock, StoredSegment, look_up, take_stock
from kvstore.admin.repair.rebuild import Rebuild
from kvstore.admin.repair.reports import FollowReport
from kvstore.errors import KVStoreError
from kvstore.index.maintenance import Listing
from kvstore.keys import NamespaceId, SegmentId, parse_payload_name
from kvstore.rules.lateness import is_late
from kvstore.verify.payloads import are_there
from schemas.urls import s3_location

#: Longest time that a turn may take before it is taken to be stuck, in seconds.
_TURN_S = 900.0
#: If more segments than this seem gone, and they are most of a namespace, the payloads are likelier to be the
#: wrong ones.
_FEW = 16


class PayloadFollower:
    """Follows the payloads of a store. For one thread; any may read `last`."""

    def __init__(
        self,
        cache: Cache,
        prefixes: Sequence[str] = (),
        *,
        jobs: int = 8,
        progress: ProgressListener | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Follows the namespaces whose ids start with one of `prefixes`, or all, also those to come."""
        self._cache = cache
        self._starts = tuple(prefix.lower() for prefix in prefixes)
        self._jobs = jobs
        self._progress = progress or Silent()
        self._clock = clock
        url = cache.settings.origin
        self._root = s3_location(url).root if url.startswith("s3://") else ""
        self._listed = AmountSum()
        self._turns = self._notified = self._gone = 0
        self._seen_s: float | None = None
        self._newest_s = 0.0
        self.last = self._report(None, "")

    def is_turning(self, every_s: float) -> bool:
        """Returns whether something has ended within twice the time between turns, and a quarter of an hour
        for a turn itself. Any thread may ask."""
        return self._clock() - self.last.at_s < 2 * every_s + _TURN_S

    def turn(self) -> FollowReport:
        """Looks at all payloads, and returns what became of them. A backend that fails ends the turn; the
        report says so."""
        began, run, problem = self._clock(), self._rebuild(), ""
        try:
            if not self._turns:
                self._cache.record("rebuild", "follows the payloads")
            stocks = take_stock(self._cache.payloads, self._progress)
            problem = self._drop(stocks)
            run.commit(stocks, [name for name in sorted(stocks) if self._follows(name)])
            self._seen_s = began
        except KVStoreError as exc:
            problem = str(exc)
        self._turns += 1
        return self._told(run, problem)

    def notice(self, lines: Iterable[str]) -> FollowReport:
        """Looks at the payloads that notifications name: S3's event messages, one JSON document a line. What
        is none, or of other objects, is passed over."""
        run, problem = self._rebuild(), ""
        named = {name for line in lines for name in payloads_named(line, self._root)}
        try:
            for name, segments in _by_namespace(named):
                if self._follows(name):
                    for page in paged(sorted(segments)):
                        self._look(run, name, page)
        except KVStoreError as exc:
            problem = str(exc)
        self._notified += len(named)
        return self._told(run, problem)

    def _look(self, run: Rebuild, name: NamespaceId, segments: Sequence[SegmentId]) -> None:
        """Brings the index up with what is stored of these segments."""
        index, payloads = self._cache.made_index(), self._cache.payloads
        stock = Stock()
        for segment in segments:
            for rank, nbytes, modified_s in _payloads(look_up(payloads, name, segment)):
                stock.add(segment, rank, nbytes, modified_s)
        stock.settle()
        visible = [one for one in index.get(name, segments) if one is not None]
        self._evict(name, [one.segment for one in visible if not self._is_there(name, one)])
        run.commit({name: stock}, [name])

    def _drop(self, stocks: dict[NamespaceId, Stock]) -> str:
        """Evicts the segments of which some payload is gone. Returns why it left those of a namespace."""
        index, problem = self._cache.made_index(), ""
        nothing = Stock()
        nothing.settle()
        for name in filter(self._follows, sorted(index.namespaces())):
            stock, gone, count = stocks.get(name, nothing), [], 0
            for listing in index.segments(name):
                count += 1
                sizes = stock.of(listing.segment).sizes
                unlisted = any(sizes.get(rank) != one.nbytes for rank, one in enumerate(listing.record.parts))
                # It may have come after the listing.
                if unlisted and not self._is_there(name, listing):
                    gone.append(listing.segment)
            if len(gone) > _FEW and 2 * len(gone) > count:
                problem = (
                    f"{len(gone):,} of {count:,} segments of namespace {name} are gone: are these its "
                    "payloads? They stay in the index; `cache-admin fsck --apply --force` evicts them"
                )
            else:
                self._evict(name, gone)
        return problem

    def _is_there(self, name: NamespaceId, listing: Listing) -> bool:
        """Returns whether a segment's payloads are there now, or on a node that has not uploaded them yet."""
        return is_late(listing.record, self._cache.settings, self._clock()) or are_there(
            self._cache.payloads, name, listing.segment, listing.record.parts
        )

    def _evict(self, name: NamespaceId, segments: Sequence[SegmentId]) -> None:
        after = self._clock() + self._cache.settings.grace_s
        for page in paged(segments):
            self._gone += self._cache.made_index().evict(name, page, delete_after_s=after, rule="repair")

    def _follows(self, name: NamespaceId) -> bool:
        return not self._starts or name.startswith(self._starts)

    def _rebuild(self) -> Rebuild:
        index = self._cache.made_index()
        return Rebuild(self._cache, index, self._jobs, False, self._progress, self._clock)

    def _told(self, run: Rebuild, problem: str) -> FollowReport:
        for space in run.spaces.values():
            self._listed.segments += space.listed.segments
            self._listed.blocks += space.listed.blocks
            self._listed.nbytes += space.listed.nbytes
        self._newest_s = max(self._newest_s, run.newest_s)
        self.last = self._report(run, problem)
        return self.last

    def _report(self, run: Rebuild | None, problem: str) -> FollowReport:
        now = self._clock()
        return FollowReport(
            at_s=now,
            turns=self._turns,
            notified=self._notified,
            listed=self._listed.amount,
            gone=self._gone,
            incomplete=sum(space.incomplete for space in run.spaces.values()) if run else 0,
            left_out=run.left.count if run else 0,
            behind_s=None if self._seen_s is None else now - self._seen_s,
            newest_s=now - self._newest_s if self._newest_s else None,
            way_s=run.longest_way_s if run else 0.0,
            problem=problem,
        )


def metrics_of(report: FollowReport) -> Iterator[Metric]:
    """Yields the metrics of a report. What isn't known yet is absent."""
    now_s = time.time()
    times = {
        "behind_seconds": ("How long ago the last turn began that ended", report.behind_s),
        "newest_seconds": ("The age of the youngest segment that was committed", report.newest_s),
    }
    for name, (text, seconds) in times.items():
        if seconds is not None:
            yield GaugeMetricFamily(f"kvstore_follow_{name}", text, seconds + now_s - report.at_s)
    way = "The longest time from a segment's making to its coming here, in the last turn"
    yield GaugeMetricFamily("kvstore_follow_way_seconds", way, report.way_s)
    waiting = "Segments of which some payload has not come yet"
    yield GaugeMetricFamily("kvstore_follow_incomplete_segments", waiting, report.incomplete)
    yield GaugeMetricFamily(
        "kvstore_follow_up", "1 if the last turn found all as it should be", not report.problem
    )
    counters = {
        "turns": ("Looks at all payloads", report.turns),
        "notified": ("Segments that notifications named", report.notified),
        "listed_segments": ("Segments committed", report.listed.segments),
        "listed_bytes": ("Bytes of them", report.listed.stored_bytes),
        "gone_segments": ("Segments evicted since their payloads are gone", report.gone),
    }
    for name, (text, count) in counters.items():
        yield CounterMetricFamily(f"kvstore_follow_{name}", text, count)


def payloads_named(line: str, root: str) -> Iterator[tuple[NamespaceId, SegmentId]]:
    """Yields the segments whose payloads an event message of S3 names (`Records`, with `s3.object.key`) below
    `root`; also of a message that another service has wrapped as text, as SNS and SQS do."""
    try:
        message = json.loads(line)
    except ValueError:
        return
    for inner in ("Body", "Message"):
        if isinstance(message, dict) and isinstance(message.get(inner), str):
            yield from payloads_named(message[inner], root)
    records = message.get("Records") if isinstance(message, dict) else None
    for record in records if isinstance(records, list) else ():
        try:
            key = unquote_plus(record["s3"]["object"]["key"])
        except (AttributeError, KeyError, TypeError):
            continue
        name = parse_payload_name(key.removeprefix(root)) if key.startswith(root) else None
        if name is not None:
            yield name[:2]


def _by_namespace(
    named: Iterable[tuple[NamespaceId, SegmentId]],
) -> Iterator[tuple[NamespaceId, set[SegmentId]]]:
    found: dict[NamespaceId, set[SegmentId]] = {}
    for name, segment in named:
        found.setdefault(name, set()).add(segment)
    yield from sorted(found.items())


def _payloads(stored: StoredSegment) -> Iterator[tuple[int, int, float]]:
    for rank, nbytes in stored.sizes.items():
        yield rank, nbytes, stored.modified_s
