"""Scrubbing: whole payloads read and verified, a few percent of all segments a day, drawn by chance.

What is bad, and still is when it is read once more, is evicted before a request finds out. Bad is what the
payload store has answered: gone, truncated, altered, another segment's. A store that doesn't answer, or
refuses, is no evidence of anything.

Who finds everything bad is more likely to have a share that isn't mounted, a wrong prefix or bad memory than
to be right, and must not empty the cache for everybody else. So no more than EVICT_MOST are evicted in an
hour, and none after IN_A_ROW of them in a row until a good segment is found.
"""

from __future__ import annotations

import logging
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvstore.admin.payloads import check_name, check_slot, read_bytes, read_header
from kvstore.catalogue import Account, Listing
from kvstore.errors import CorruptPayload, KVStoreError
from kvstore.index.redis import RedisIndex
from kvstore.index.sqlite import SqliteIndex
from kvstore.keys import NamespaceId, SegmentId, payload_name
from kvstore.ports import PayloadStore
from schemas.janitor import ScrubState
from schemas.records import SegmentRecord
from schemas.settings import Settings

log = logging.getLogger(__name__)

#: Evictions within an hour.
EVICT_MOST = 256
_HOUR_S = 3600.0
_DAY_S = 86_400.0
#: Evictions with no good segment read between them, after which there is no other.
IN_A_ROW = 8
#: Read in one round, give or take a segment.
ROUND_BYTES = 256 << 20
#: Of a payload, in memory at a time; more only if one slot is larger.
_PIECE = 8 << 20
#: Segments drawn with one call.
_DRAW = 64
#: A janitor that was away does not make up for more than this.
_CATCH_UP_S = 600.0
#: With write-back, a payload may be on its way to the shared store for so long.
_LATE_S = 600.0


@dataclass(frozen=True, slots=True)
class Bad:
    """A segment of which a payload was bad twice."""

    namespace: NamespaceId
    segment: SegmentId
    problem: str


class Scrub:
    """One process's scrubbing. For one thread; `state` may be read by any."""

    def __init__(
        self,
        index: RedisIndex | SqliteIndex,
        payloads: PayloadStore,
        settings: Settings,
        *,
        proceed: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        chance: random.Random | None = None,
    ) -> None:
        self.state = ScrubState()
        self._index = index
        self._payloads = payloads
        self._settings = settings
        self._proceed = proceed
        self._clock = clock
        self._monotonic = monotonic
        self._chance = chance or random.Random()
        #: How many segments of each namespace are to be read by now.
        self._owed: dict[NamespaceId, float] = {}
        self._last: float | None = None
        self._evicted_at: deque[float] = deque()
        self._in_a_row = 0

    def round(self, accounts: Sequence[Account], *, until: float) -> Iterator[Bad]:
        """Read what is due, up to ROUND_BYTES or until `monotonic` says `until`; the bad ones, as found.

        Before every piece of a payload `proceed` is asked, and what it raises is raised. Raises what the
        index raises, and what the payload store raises if it can't say what a payload is.
        """
        self._accrue(accounts)
        end_bytes = self.state.read_bytes + ROUND_BYTES
        try:
            for namespace, listing in self._drawn():
                if self.state.read_bytes >= end_bytes or self._monotonic() >= until:
                    break
                self._owed[namespace] -= 1
                if (bad := self._scrub(namespace, listing)) is not None:
                    yield bad
        finally:
            self._count(behind=sum(map(int, self._owed.values())) - self.state.behind)

    def _accrue(self, accounts: Sequence[Account]) -> None:
        now = self._monotonic()
        passed = 0.0 if self._last is None else min(now - self._last, _CATCH_UP_S)
        self._last = now
        share = self._settings.janitor.scrub_percent / 100 * passed / _DAY_S
        owed = {}
        for account in accounts:
            if segments := account.usage.segments:
                # A fraction to begin with, or small namespaces would never have their turn where processes
                # don't live for long.
                before = self._owed.get(account.namespace)
                before = self._chance.random() if before is None else before
                owed[account.namespace] = min(before + segments * share, float(segments))
        self._owed = owed

    def _drawn(self) -> Iterator[tuple[NamespaceId, Listing]]:
        """Segments whose turn it is, of all namespaces alike."""
        tickets = [name for name, owed in self._owed.items() for _ in range(min(int(owed), _DRAW))]
        self._chance.shuffle(tickets)
        drawn = {name: iter(self._index.sample(name, tickets.count(name))) for name in sorted(set(tickets))}
        for name in tickets:
            if (listing := next(drawn[name], None)) is not None and not self._may_be_late(listing.record):
                yield name, listing

    def _may_be_late(self, record: SegmentRecord) -> bool:
        tiers = self._settings.tiers
        return tiers is not None and tiers.write == "back" and self._clock() - record.created_s < _LATE_S

    def _scrub(self, namespace: NamespaceId, listing: Listing) -> Bad | None:
        segment = listing.segment
        problem: str | None = self._verify(namespace, listing)
        if problem and (problem := self._again(namespace, segment)):
            return self._bad(Bad(namespace, segment, problem))
        if problem == "":
            self._in_a_row = 0
        return None

    def _again(self, namespace: NamespaceId, segment: SegmentId) -> str | None:
        """The second reading: what is wrong, "" if nothing is, None if the segment has been evicted."""
        [listing] = self._index.get(namespace, [segment])
        if listing is None:
            return None
        for rank in range(len(listing.record.parts)):
            self._payloads.distrust(payload_name(namespace, segment, rank))
        return self._verify(namespace, listing)

    def _verify(self, namespace: NamespaceId, listing: Listing) -> str:
        try:
            for rank in range(len(listing.record.parts)):
                self._verify_part(namespace, listing.segment, rank, listing.record)
        except CorruptPayload as exc:
            return str(exc)
        except KVStoreError:
            self._count(unanswered=1)
            raise
        return ""

    def _verify_part(
        self, namespace: NamespaceId, segment: SegmentId, rank: int, record: SegmentRecord
    ) -> None:
        """Read all of one payload, in pieces. Raises CorruptPayload and what the store raises."""
        self._proceed()
        part, name = record.parts[rank], payload_name(namespace, segment, rank)
        # Before memory is taken for what the index says: of two bytes from the last one on there is one.
        end = self._payloads.read(name, max(0, part.nbytes - 1), [memoryview(bytearray(2))])
        if end != 1:
            is_what = "missing" if end is None else f"{'longer' if end else 'shorter'} than the index says"
            raise CorruptPayload(f"the payload of rank {rank} is {is_what}")
        header = read_header(self._payloads, name, part.nbytes, namespace)
        check_name(header, namespace, segment, rank)
        if header.part != part or header.meta.ranks != len(record.parts):
            raise CorruptPayload(f"header and index disagree on the layout of rank {rank}")
        self._count(payloads=1, read_bytes=part.data_start)
        for first, count in pieces(part.slot_sizes, _PIECE):
            self._proceed()
            offset, nbytes = part.slot_range(first, count)
            data = read_bytes(self._payloads, name, offset, nbytes)
            self._count(read_bytes=data.nbytes)
            at = 0
            for slot, size in zip(
                header.meta.slots[first : first + count],
                part.slot_sizes[first : first + count],
                strict=True,
            ):
                check_slot(data[at : at + size], slot, decompress=False)
                at += size

    def _bad(self, bad: Bad) -> Bad | None:
        """Evict it, unless too many are bad to be believed."""
        now = self._monotonic()
        while self._evicted_at and self._evicted_at[0] <= now - _HOUR_S:
            self._evicted_at.popleft()
        name = bad.segment.hex()
        if self._in_a_row >= IN_A_ROW or len(self._evicted_at) >= EVICT_MOST:
            self._count(bad=1)
            why = "everything is" if self._in_a_row >= IN_A_ROW else f"{EVICT_MOST} within an hour were"
            problem = f"{bad.problem}; not evicted, because {why} found bad: run `cache-admin doctor` here"
            log.error("segment %s of %s: %s", name, bad.namespace, problem)
            return Bad(bad.namespace, bad.segment, problem)
        self._proceed()
        after = self._clock() + self._settings.grace_s
        if not self._index.evict(bad.namespace, [bad.segment], delete_after_s=after, rule="bad"):
            return None  # somebody else was faster, and the payload was gone by right
        self._evicted_at.append(now)
        self._in_a_row += 1
        self._count(bad=1, evicted=1)
        log.warning("segment %s of %s is evicted: %s", name, bad.namespace, bad.problem)
        return bad

    def _count(self, **more: int) -> None:
        self.state = self.state.model_copy(
            update={name: getattr(self.state, name) + count for name, count in more.items()}
        )


def pieces(sizes: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """Adjacent slots together, as (first, count), up to `most` bytes; a larger slot by itself."""
    first, nbytes = 0, 0
    for at, size in enumerate(sizes):
        if at > first and nbytes + size > most:
            yield first, at - first
            first, nbytes = at, 0
        nbytes += size
    if first < len(sizes):
        yield first, len(sizes) - first
