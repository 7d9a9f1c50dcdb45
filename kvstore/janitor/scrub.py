"""Scrubbing reads and verifies whole payloads, a few percent of all segments a day, drawn by chance.

A segment that is bad, and still is when it is read once more, is evicted before a request finds out. It is
bad if the payload store answers that a payload is gone, or returns one that is truncated, altered or another
segment's. A store that doesn't answer, or refuses, is no evidence of anything.

A process that finds everything bad is more likely to be wrong than right
(kvstore.store.quarantine.HourlyBound). So no more segments are evicted in an hour than the bound allows, and
none after IN_A_ROW in a row until a good one is found.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from kvstore.errors import CorruptPayload, DamagedIndex, KVStoreError, UnreadablePayload
from kvstore.format.keyring import NO_KEYS, Keyring
from kvstore.index.maintenance import Account, FullIndex, Listing
from kvstore.janitor.reports import ScrubState
from kvstore.keys import NamespaceId, SegmentId, payload_name
from kvstore.payloads.port import PayloadStore
from kvstore.rules.lateness import is_late
from kvstore.store.quarantine import HourlyBound
from kvstore.verify.payloads import promised_header, verify_slots
from schemas.records import SegmentRecord
from schemas.settings import Settings

log = logging.getLogger(__name__)

_DAY_S = 86_400.0
#: Evictions in a row, with no good segment read between them, after which nothing more is evicted.
IN_A_ROW = 8
#: Bytes read in one round, give or take a segment.
ROUND_BYTES = 256 << 20
#: Bytes of a payload in memory at a time; more only if one slot is larger.
_PIECE = 8 << 20
#: Segments drawn with one call.
_DRAW = 64
#: The most seconds that a janitor makes up for when it was away.
_CATCH_UP_S = 600.0


@dataclass(frozen=True, slots=True)
class BadSegment:
    """A segment with a payload that was bad in two readings."""

    namespace: NamespaceId
    segment: SegmentId
    problem: str


class Scrub:
    """Draws, reads and verifies segments, and evicts bad ones. For one thread; any may read `state`."""

    def __init__(
        self,
        index: FullIndex,
        payloads: PayloadStore,
        settings: Settings,
        *,
        keyring: Keyring = NO_KEYS,
        proceed: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        chance: random.Random | None = None,
        bound: HourlyBound | None = None,
    ) -> None:
        self.state = ScrubState()
        self._index = index
        self._payloads = payloads
        self._settings = settings
        self._keyring = keyring
        self._proceed = proceed
        self._clock = clock
        self._monotonic = monotonic
        self._chance = chance or random.Random()
        #: How many segments of each namespace are to be read by now.
        self._owed: dict[NamespaceId, float] = {}
        self._last: float | None = None
        self._bound = bound or HourlyBound(clock=monotonic)
        self._in_a_row = 0
        #: Whether the log has one of the segments that no key here can judge: the first says it all.
        self._told = False

    def round(self, accounts: Sequence[Account], *, until: float) -> Iterator[BadSegment]:
        """Reads segments that are due, up to ROUND_BYTES or the time `until`; yields the bad ones as found.

        `until` is by the clock `monotonic`. `proceed` is called before every piece of a payload, and what it
        raises is raised. Raises what the index raises, and what the payload store raises if it can't say what
        a payload is.
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
                # Begins with a random fraction, or small namespaces would never have their turn where
                # processes don't live for long.
                before = self._owed.get(account.namespace)
                before = self._chance.random() if before is None else before
                owed[account.namespace] = min(before + segments * share, float(segments))
        self._owed = owed

    def _drawn(self) -> Iterator[tuple[NamespaceId, Listing]]:
        """Yields segments whose turn it is, those of all namespaces mixed."""
        tickets = [name for name, owed in self._owed.items() for _ in range(min(int(owed), _DRAW))]
        self._chance.shuffle(tickets)
        drawn = {name: iter(self._sample(name, tickets.count(name))) for name in sorted(set(tickets))}
        for name in tickets:
            listing = next(drawn[name], None)
            if listing is not None and not is_late(
                listing.record, self._settings, partial(self._index.now, name)
            ):
                yield name, listing

    def _sample(self, namespace: NamespaceId, count: int) -> Sequence[Listing]:
        try:
            return self._index.sample(namespace, count)
        except DamagedIndex as exc:
            log.warning("nothing of it is scrubbed: %s", exc)
            return ()

    def _scrub(self, namespace: NamespaceId, listing: Listing) -> BadSegment | None:
        segment = listing.segment
        problem = self._verify(namespace, listing)
        if problem and (problem := self._again(namespace, segment)):
            return self._bad(BadSegment(namespace, segment, problem))
        if problem == "":
            self._in_a_row = 0
        return None

    def _again(self, namespace: NamespaceId, segment: SegmentId) -> str | None:
        """Reads once more; returns what `_verify` does, None if the segment was evicted."""
        [listing] = self._index.get(namespace, [segment])
        if listing is None:
            return None
        return self._verify(namespace, listing)

    def _verify(self, namespace: NamespaceId, listing: Listing) -> str | None:
        """Returns what is wrong, "" if nothing is, None if no key here can tell."""
        try:
            for rank in range(len(listing.record.parts)):
                self._verify_part(namespace, listing.segment, rank, listing.record)
        except CorruptPayload as exc:
            return str(exc)
        except UnreadablePayload as exc:
            self._count(unreadable=1)
            if not self._told:
                self._told = True
                log.warning("segment %s of %s: %s", listing.segment.hex(), namespace, exc)
            return None
        except KVStoreError:
            self._count(unanswered=1)
            raise
        return ""

    def _verify_part(
        self, namespace: NamespaceId, segment: SegmentId, rank: int, record: SegmentRecord
    ) -> None:
        """Reads all of one payload, in pieces. Raises CorruptPayload and what the store raises."""
        self._proceed()
        header = promised_header(self._payloads, self._keyring, namespace, segment, rank, record)
        self._count(payloads=1, read_bytes=header.part.data_start)
        name = payload_name(namespace, segment, rank)
        verify_slots(self._payloads, name, header, most=_PIECE, before=self._before)

    def _before(self, nbytes: int) -> None:
        self._proceed()
        self._count(read_bytes=nbytes)

    def _bad(self, bad: BadSegment) -> BadSegment | None:
        """Evicts the segment, unless too many are bad to be believed.

        Returns it with what people are told; None if another process evicted it meanwhile.
        """
        name = bad.segment.hex()
        if self._in_a_row >= IN_A_ROW or self._bound.reached:
            self._count(bad=1)
            why = "everything is" if self._in_a_row >= IN_A_ROW else f"{self._bound.most} within an hour were"
            problem = f"{bad.problem}; not evicted, because {why} found bad: run `cache-admin doctor` here"
            log.error("segment %s of %s: %s", name, bad.namespace, problem)
            return BadSegment(bad.namespace, bad.segment, problem)
        self._proceed()
        after = self._clock() + self._settings.grace_s
        if not self._index.evict(bad.namespace, [bad.segment], delete_after_s=after, rule="bad"):
            return None  # another process has evicted it, so the payload was gone by right
        self._bound.note()
        self._in_a_row += 1
        self._count(bad=1, evicted=1)
        log.warning("segment %s of %s is evicted: %s", name, bad.namespace, bad.problem)
        return bad

    def _count(self, **more: int) -> None:
        self.state = self.state.model_copy(
            update={name: getattr(self.state, name) + count for name, count in more.items()}
        )
