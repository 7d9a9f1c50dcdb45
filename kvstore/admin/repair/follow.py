"""rebuild --follow: keeps an index up with payloads that others bring and delete, such as the replication of
a bucket from another region.

A turn lists the payloads. Segments that are complete and that the index does not know are committed, as a
rebuild does; those of which some rank's payload has not come yet wait for the next turn. Segments that the
index names and whose payloads are gone are evicted, and so are those that may not be served any more
(kvstore.verify.returning), whether the deletion of their payloads has come over or not. So the index names
what is there, a turn later at most; between a deletion and the next turn a load may find nothing, which is a
miss.

Notifications of the bucket, where they can be had, bring single payloads in at once. They may come late,
twice, in any order or never: each only says where to look, and turns find the rest.

Nothing is remembered but in the index, so it may be stopped at any time, run twice, and begun again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import inf
from urllib.parse import unquote_plus

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvstore.admin.backends import Cache
from kvstore.admin.counting import AmountSum, paged
from kvstore.admin.repair.rebuild import Rebuild
from kvstore.admin.repair.reports import FollowReport
from kvstore.admin.repair.survey import Stock, look_up, take_stock
from kvstore.errors import KVStoreError
from kvstore.index.maintenance import Listing
from kvstore.keys import NamespaceId, SegmentId, parse_payload_name
from kvstore.rules.lateness import is_late
from kvstore.threads.each import for_each
from kvstore.verify.payloads import are_there
from kvstore.verify.returning import Returns
from schemas.urls import s3_location

#: Longest time without any progress before a follower is taken to be stuck, in seconds.
_STUCK_S = 900.0
#: If more segments than this seem gone, and they are most of all, the payloads are likelier to be the wrong
#: ones.
_FEW = 16


class PayloadFollower:
    """Follows the payloads of a store. For one thread; any may read `last` and ask `is_turning`."""

    def __init__(
        self,
        cache: Cache,
        prefixes: Sequence[str] = (),
        *,
        jobs: int = 8,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Follows the namespaces whose ids start with one of `prefixes`, or all, also those to come."""
        self._cache = cache
        self._starts = tuple(prefix.lower() for prefix in prefixes)
        self._jobs = jobs
        self._clock = clock
        url = cache.settings.origin
        self._root = s3_location(url).root if url.startswith("s3://") else ""
        self._listed = AmountSum()
        self._turns = self._notified = self._gone = 0
        self._incomplete = self._left_out = 0
        self._problem = ""
        self._seen_s: float | None = None
        self._newest_s = self._way_s = 0.0
        #: When something was done last.
        self._busy_s = clock()
        self.last = self._report("")

    def is_turning(self, every_s: float) -> bool:
        """Returns whether something was done lately; turns begin every so many seconds."""
        return self._clock() - self._busy_s < every_s + _STUCK_S

    def turn(self) -> FollowReport:
        """Looks at all payloads, and returns what became of them. A backend that fails ends the turn; the
        report says so."""
        began, run, self._problem = self._clock(), None, ""
        self._way_s = 0.0
        try:
            run = self._rebuild()
            if not self._turns:
                self._cache.record("rebuild", "follows the payloads")
            stocks = take_stock(self._cache.payloads, self, self._starts)
            self._problem = self._drop(stocks, run.returns)
            run.commit(stocks, sorted(stocks))
            self._seen_s = began
        except KVStoreError as exc:
            self._problem = str(exc)
        if run is not None:
            self._count(run)
            self._incomplete = sum(space.incomplete for space in run.spaces.values())
            self._left_out = run.left.count
        self._turns += 1
        return self._told()

    def notice(self, lines: Iterable[str]) -> FollowReport:
        """Looks at the payloads that notifications name: S3's event messages, one JSON document a line. What
        is none, or of other objects, is passed over."""
        named, run, problem = {name for line in lines for name in payloads_named(line, self._root)}, None, ""
        try:
            run = self._rebuild()
            for name, segments in _by_namespace(named):
                if self._follows(name):
                    for page in paged(sorted(segments)):
                        self._look(run, name, page)
        except KVStoreError as exc:
            problem = str(exc)
        if run is not None:
            self._count(run)
        self._notified += len(named)
        return self._told(problem)

    def begin(self, what: str, total_bytes: int | None = None) -> None:
        """Is told that a stage of a turn begins (kvstore.admin.progress)."""
        self._busy_s = self._clock()

    def advance(self, nbytes: int) -> None:
        """Is told that a stage of a turn goes on."""
        self._busy_s = self._clock()

    def _look(self, run: Rebuild, name: NamespaceId, segments: Sequence[SegmentId]) -> None:
        """Brings the index up with what is stored of these segments."""
        stock = Stock()
        for segment in segments:
            stored = look_up(self._cache.payloads, name, segment)
            for rank, nbytes in stored.sizes.items():
                stock.add(segment, rank, nbytes, stored.modified_s)
        stock.settle()
        self._evict(name, self._not_there(name, segments))
        run.commit({name: stock}, [name])

    def _drop(self, stocks: Mapping[NamespaceId, Stock], returns: Returns) -> str:
        """Evicts the segments that may not be served any more, and those of which some payload is gone.
        Returns why it left these."""
        index, nothing = self._cache.made_index(), Stock()
        nothing.settle()
        unlisted: dict[NamespaceId, list[SegmentId]] = {}
        count = 0
        for name in filter(self._follows, sorted(index.namespaces())):
            stock, barred = stocks.get(name, nothing), []
            for listing in index.segments(name):
                if returns.barred(name, listing.segment, listing.record) is not None:
                    barred.append(listing)
                    continue
                count += 1
                sizes = stock.of(listing.segment).sizes
                if any(sizes.get(rank) != one.nbytes for rank, one in enumerate(listing.record.parts)):
                    unlisted.setdefault(name, []).append(listing.segment)
            if barred:
                # Some may have been imported since this turn asked first.
                again = Returns(index, self._cache.evidence)
                still = [one.segment for one in barred if again.barred(name, one.segment, one.record)]
                for page in paged(still):
                    self._evict(name, page)
        gone = sum(map(len, unlisted.values()))
        if gone > _FEW and 2 * gone > count:
            return (
                f"{gone:,} of {count:,} segments were not listed: are these the index's payloads? They stay "
                "there; `cache-admin fsck --apply --force` evicts them"
            )
        for name, segments in unlisted.items():
            for page in paged(segments):
                # Some may have come after the listing.
                self._evict(name, self._not_there(name, page))
        return ""

    def _not_there(self, name: NamespaceId, segments: Sequence[SegmentId]) -> list[SegmentId]:
        """Returns those that the index names and whose payloads are neither there nor on a node that has not
        uploaded them yet."""
        missing: list[SegmentId] = []
        index = self._cache.made_index()

        def look(one: Listing) -> None:
            late = is_late(one.record, self._cache.settings, lambda: index.now(name))
            if not late and not are_there(self._cache.payloads, name, one.segment, one.record.parts):
                missing.append(one.segment)
            self.advance(0)

        listed = [one for one in index.get(name, segments) if one is not None]
        for_each(look, listed, self._jobs)
        return missing

    def _evict(self, name: NamespaceId, segments: Sequence[SegmentId]) -> None:
        if segments:
            after = self._clock() + self._cache.settings.grace_s
            index = self._cache.made_index()
            self._gone += index.evict(name, segments, delete_after_s=after, rule="repair")

    def _follows(self, name: NamespaceId) -> bool:
        return not self._starts or name.startswith(self._starts)

    def _rebuild(self) -> Rebuild:
        return Rebuild(self._cache, self._cache.made_index(), self._jobs, True, self, self._clock)

    def _count(self, run: Rebuild) -> None:
        """Adds what was committed."""
        for space in run.spaces.values():
            self._listed.segments += space.listed.segments
            self._listed.blocks += space.listed.blocks
            self._listed.nbytes += space.listed.nbytes
        self._newest_s = max(self._newest_s, run.newest_s)
        if self._turns and run.oldest_s < inf:
            self._way_s = max(self._way_s, self._clock() - run.oldest_s)

    def _told(self, problem: str = "") -> FollowReport:
        self._busy_s = self._clock()
        self.last = self._report(self._problem or problem)
        return self.last

    def _report(self, problem: str) -> FollowReport:
        now = self._clock()
        return FollowReport(
            at_s=now,
            turns=self._turns,
            notified=self._notified,
            listed=self._listed.amount,
            gone=self._gone,
            incomplete=self._incomplete,
            left_out=self._left_out,
            behind_s=None if self._seen_s is None else now - self._seen_s,
            newest_s=now - self._newest_s if self._newest_s else None,
            way_s=self._way_s,
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
    way = "The longest time from a segment's making to its commit here, lately"
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
    except (ValueError, RecursionError):
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
