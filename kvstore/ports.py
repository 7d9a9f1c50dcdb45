"""The two ports: where payloads live, and what is where.

PayloadStore   bytes under a name. Knows nothing of segments.
Index          digest -> (segment, slot), segment -> record. A hint: it can be lost and rebuilt.

What maintenance and people need of the same index, off the request path: kvstore.catalogue.

Rules for every implementation: batch first; sync; safe for many threads and many processes; no call
blocks without a deadline; a miss is a value, a failure is an exception of kvstore.errors; no
caller's buffer is kept after the call. Abstract throughout, so that a forgotten method fails at
construction. Conformance: kvstore.testing.

Not here, and why: exists(one) (batch verbs answer it), get-or-create (the store composes it),
retries, breaking, counting, verification (wrappers and the store add them), locks and leases on
what is being read (grace time after an eviction replaces them: nothing held can leak).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from kvstore.keys import NamespaceId, SegmentId
from schemas.namespace import Namespace
from schemas.records import EvictionRule, OutcomeOp, SegmentRecord

if TYPE_CHECKING:
    from typing import Self


@dataclass(frozen=True, slots=True)
class Listed:
    """One payload in a listing."""

    name: str
    nbytes: int
    #: Unix seconds of its last change.
    modified_s: float


class PayloadStore(ABC):
    """Immutable bytes under a name such as `0123456789abcdef/ab/ab....0` (kvstore.keys)."""

    @property
    @abstractmethod
    def gap_bytes(self) -> int:
        """Reading so many bytes more costs no more than another read: how large a gap to read through."""

    @abstractmethod
    def put(self, name: str, buffers: Sequence[memoryview]) -> None:
        """Store the concatenation of `buffers` (each contiguous bytes) under `name`.

        All or nothing: a reader, also in another process, sees the whole or nothing, also after a
        crash at any instruction. On return the bytes are as durable as configured. Names are never
        reused by the store; a second put of one name replaces the first, atomically.
        Raises CapacityExceeded (no space), PermissionDenied, TransientError.
        """

    @abstractmethod
    def read(
        self, name: str, offset: int, into: Sequence[memoryview], *, size: int | None = None
    ) -> int | None:
        """Fill the writable byte buffers `into` in turn with the bytes from `offset` on.

        Returns how many bytes were read: fewer than asked only if the payload ends there. None if
        there is no such payload. On an exception the buffers may hold anything, and are not written
        to any more. `size` is how large the whole payload is, from a caller that knows: a cache may
        then fetch all of it. It changes nothing about the answer.
        """

    @abstractmethod
    def distrust(self, name: str) -> bool:
        """The bytes of `name` failed verification: drop any copy of them that is not the original.

        Returns True if reading again may give other bytes, because there was such a copy. No I/O on a
        network. The original stays: evicting it is the store's business.
        """

    @abstractmethod
    def delete(self, names: Sequence[str]) -> int:
        """Remove payloads; names that don't exist are fine.

        Returns how many did exist; a store that can't tell, as S3, counts them all.
        """

    @abstractmethod
    def list(self, prefix: str = "") -> Iterator[Listed]:
        """Every payload whose name starts with `prefix`, in no order, weakly consistent.

        Things that are not payloads (temporary files, an index file beside them) are not listed.
        """

    @abstractmethod
    def ping(self) -> None:
        """Raise what a put and a read would raise for lack of access; leaves nothing behind."""

    @abstractmethod
    def close(self) -> None:
        """Release what is held. Idempotent; later calls raise Closed or work, never hang."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class Run:
    """`count` blocks of the asked chain, from its block `start` on, in adjacent slots of a segment."""

    start: int
    segment: SegmentId
    slot: int
    count: int
    record: SegmentRecord


@dataclass(frozen=True, slots=True)
class Claim:
    """Answer to a writer that wants to save a chain of blocks."""

    #: How many leading blocks are stored already.
    present: int
    #: True: save the rest. False: nothing is left to save, or another writer is at it.
    granted: bool


class CommitState(Enum):
    """What became of one rank's commit."""

    VISIBLE = "visible"  # the last rank: the segment can be matched from now on
    WAITING = "waiting"  # durable, but other ranks are missing
    REFUSED = "refused"  # the ranks disagree on the segment, or it was evicted meanwhile


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of blocks that a request asked for, or offered for saving."""

    at_s: float
    #: The engine's name of the request; text of a client's, at most REQUEST_CHARS of it are kept.
    request: str
    op: OutcomeOp
    #: Blocks asked for or offered, and how many of them were found, loaded or stored.
    asked: int
    served: int
    #: Why not all were: of kvstore.metrics.MISS_REASONS or SAVE_OUTCOMES; "" if all were.
    reason: str
    #: Position in the chain of the first block that was not served.
    position: int
    #: Packed digests from that block on, at most MISSING_DIGESTS of them: what an evicted segment is
    #: recognised by.
    missing: bytes


REQUEST_CHARS = 128
MISSING_DIGESTS = 256


class Index(ABC):
    """What is where. Digests travel packed: 16 bytes each, one blob per call, one round trip."""

    @abstractmethod
    def register(self, namespace: Namespace, *, expected_blocks: int) -> NamespaceId:
        """Make the namespace known, idempotently, and keep its JSON for people.

        `expected_blocks` is how many blocks its capacity holds; an index may size its buckets by
        the first registration's number.
        """

    @abstractmethod
    def match(self, namespace: NamespaceId, digests: bytes) -> list[Run]:
        """The longest prefix of the chain that can be served, as runs that follow each other.

        Exact at the moment of the call: every block of every run belongs to a visible segment.
        `digests` must be a hash chain (each digest determined by what precedes it): this is what
        lets the walk cost O(segments) and not O(blocks). An unknown namespace has no runs.
        """

    @abstractmethod
    def find(self, namespace: NamespaceId, digests: bytes) -> list[Run | None]:
        """Each digest by itself, no chain assumed: a run of one slot (`start` = its position) or None."""

    @abstractmethod
    def claim(self, namespace: NamespaceId, digests: bytes, segment: SegmentId, ttl_s: float) -> Claim:
        """How much of the chain is stored, and may `segment` be written with the rest?

        The claim is on the first missing digest, names the segment (so that all ranks of one
        segment share it, and asking again is harmless) and expires after `ttl_s`. Advisory: two
        copies of a block would be a waste, not an error.
        """

    @abstractmethod
    def commit(
        self,
        namespace: NamespaceId,
        segment: SegmentId,
        digests: bytes,
        record: SegmentRecord,
        *,
        rank: int,
        ranks: int,
    ) -> CommitState:
        """Rank `rank` of `ranks` has stored its payload durably; `record.parts` is that one part.

        The digests are consecutive blocks of one hash chain (or one item): `match` relies on it. A
        segment id belongs to one save for ever and is never used for other blocks.

        When the last rank's commit arrives the record and the entries of all digests (slot i =
        digest i) become visible at once. Ranks that disagree on anything but their part are
        REFUSED. An incomplete commit is forgotten after an hour. Committing again is harmless.
        Also releases the claim. Re-registers nothing: raises NamespaceUnknown if the index has lost
        the namespace, and the caller registers it and tries once more.
        """

    @abstractmethod
    def touch(self, namespace: NamespaceId, segments: Sequence[SegmentId], now_s: float) -> None:
        """Note a use. Segments that are gone are ignored. Recency is per segment, to the minute."""

    @abstractmethod
    def evict(
        self,
        namespace: NamespaceId,
        segments: Sequence[SegmentId],
        *,
        delete_after_s: float,
        rule: EvictionRule,
    ) -> int:
        """Make segments invisible and put them in the trash until `delete_after_s` (unix time).

        An index that was told the grace time keeps them there for so long in any case, from the moment that
        they become invisible and by its own clock: neither a caller that is held up on its way nor clocks
        that differ cut it short. 0: their payloads may be deleted at once.

        `rule` is why, for people. Pinned segments go as well.

        Returns how many were visible. O(1) per segment: their digests' entries dangle, are ignored
        by every other verb and are swept later. A segment whose commit is incomplete is refused
        from then on.
        """

    @abstractmethod
    def note(
        self, namespace: NamespaceId, digests: bytes, *, now_s: float, window_s: float, sketch_bytes: int
    ) -> int:
        """Count one use of a chain; returns how many leading blocks had been noted before this call.

        `digests` is a hash chain from its first block on. Whether anything is stored makes no difference.
        Time is cut into windows of `window_s`; this window and the one before are remembered, so a use
        is forgotten after one to two windows. Callers must agree on the window's length, on
        `sketch_bytes` and, roughly, on the time, or they don't see each other's notes.

        A probable answer: never fewer than the truth, and more with a chance that grows as the sketch
        fills up; of blocks never noted, at most about three in a hundred pass where a window's notes are
        of no more than `sketch_bytes` / 2 different blocks. Memory is bounded by two sketches.

        Of two calls at the same moment one comes first. Of a chain of no blocks: 0. Raises
        NamespaceUnknown if the index doesn't know the namespace.
        """

    @abstractmethod
    def tell(self, namespace: NamespaceId, outcomes: Sequence[Outcome]) -> None:
        """Remember what became of requests (kvstore.catalogue.Journal): in a ring of bounded length, in
        totals, and, of match outcomes that ended "absent", how much more capacity would have served them.

        One round trip for up to 64 outcomes with 4,096 digests. Nothing for an unknown namespace.
        """

    @abstractmethod
    def close(self) -> None:
        """Release connections. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
