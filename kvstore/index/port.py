"""The port of indexes: digest -> (segment, slot), segment -> record. A hint: it can be lost and rebuilt.

    Index         what is where: what every index has
    Notes         counts uses, for admission
    OutcomeSink   is told what became of requests
    SessionUses   is told what requests know of their sessions (kvstore.index.sessions)
    EngineIndex   all four, as an engine has them, behind the breaker

What maintenance and people need of the same index, off the request path: kvstore.index.maintenance.

Rules for every implementation: batch first; sync; safe for many threads and many processes; no call
blocks without a deadline; a miss is a value, a failure is an exception of kvstore.errors; no
caller's buffer is kept after the call. Abstract throughout, so that a forgotten method fails at
construction. Contract: tests/index/contract.

Not here, and why: get-or-create (the store composes it), retries, breaking, counting (wrappers add them),
locks and leases on what is being read (grace time after an eviction replaces them: nothing held can leak).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from kvstore.index.sessions import NOTHING_RETAINED, Allowance, SessionUses
from kvstore.index.verdicts import Verdicts
from kvstore.keys import NO_SESSION, NamespaceId, SegmentId, SessionId
from schemas.namespace import Namespace
from schemas.records import EvictionRule, OutcomeOp, SegmentRecord

if TYPE_CHECKING:
    from typing import Self


@dataclass(frozen=True, slots=True)
class Run:
    """`count` blocks of the asked chain, from its block `start` on, in adjacent slots of a segment."""

    start: int
    segment: SegmentId
    slot: int
    count: int
    record: SegmentRecord


@dataclass(frozen=True, slots=True)
class Replaced:
    """A segment that another one is to replace, and its packed digests."""

    segment: SegmentId
    digests: bytes


@dataclass(frozen=True, slots=True)
class Claim:
    """Answer to a writer that wants to save a chain of blocks."""

    #: How many leading blocks are stored already.
    present: int
    #: True: save the rest. False: nothing is left to save, or another writer is at it.
    granted: bool
    #: When it was, unix seconds by the index's own clock: what a save that begins now is created at.
    at_s: float = field(default=0.0, compare=False)


class CommitState(Enum):
    """What became of one rank's commit."""

    VISIBLE = "visible"  # the last rank: the segment can be matched from now on
    WAITING = "waiting"  # durable, but other ranks are missing
    REFUSED = "refused"  # the ranks disagree, it was evicted meanwhile, or its writer has failed


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
    #: Why not all were: one of kvstore.rules.reasons.MISS_REASONS or SAVE_OUTCOMES; "" if all were.
    reason: str
    #: Position in the chain of the first block that was not served.
    position: int
    #: Packed digests from that block on, at most MISSING_DIGESTS of them: what an evicted segment is
    #: recognised by.
    missing: bytes
    #: What goes with the reason, such as the numbers that led to a decision; at most DETAIL_CHARS are kept,
    #: and of a fault nothing is.
    detail: str = ""
    #: Packed digests that begin with the first of the chain that `missing` is of; b"" if that isn't known:
    #: then it may not be recognised. It is not remembered.
    chain: bytes = b""


REQUEST_CHARS = 128
#: Most runs of one match. Each costs Redis 4 to 10 us, and all clients of a shard wait for the same thread: a
#: match takes 40 ms of it at most, a twelfth of the default of `kv.match_deadline_s`. Whole segments of 64
#: blocks of 16 tokens reach 4 million tokens so.
MOST_RUNS = 4096
DETAIL_CHARS = 64
MISSING_DIGESTS = 256


class Index(ABC):
    """Keeps what is where. Digests travel packed: 16 bytes each, one string per call, one round trip."""

    @abstractmethod
    def register(self, namespace: Namespace, *, expected_blocks: int) -> NamespaceId:
        """Makes the namespace known, idempotently, and keeps its JSON for people.

        `expected_blocks` is how many blocks its capacity holds; an index may size its buckets by
        the first registration's number.
        """

    @abstractmethod
    def match(self, namespace: NamespaceId, digests: bytes) -> list[Run]:
        """Returns the longest prefix of the chain that can be served, as runs that follow each other.

        It has MOST_RUNS runs at most: of a chain that lies in more of them the rest is a miss.
        Every block of every run belongs to a segment that is visible at the moment of the call.
        `digests` must be a hash chain (each digest determined by what precedes it): this is what
        lets the walk cost O(segments) and not O(blocks). An unknown namespace has no runs.
        """

    @abstractmethod
    def find(self, namespace: NamespaceId, digests: bytes, chain: bytes = b"") -> list[Run | None]:
        """Finds each digest by itself: a run of one slot (`start`: its place) or None.

        `chain` begins with the first digest of the chain that all of them are of. Without it, an index that
        keeps chains in several places looks in each of them, unless they are items.
        """

    @abstractmethod
    def claim(self, namespace: NamespaceId, digests: bytes, segment: SegmentId, ttl_s: float) -> Claim:
        """Tells how much of the chain is stored, and whether `segment` may be written with the rest.

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
        session: SessionId = NO_SESSION,
        allowance: Allowance = NOTHING_RETAINED,
        replaces: Sequence[Replaced] = (),
    ) -> CommitState:
        """Records that a rank of `ranks` has stored its payload durably; `record.parts` is that one part.

        The digests are consecutive blocks of one hash chain (or one item): `match` relies on it. A
        segment id belongs to one save for ever and is never used for other blocks.

        When the last rank's commit arrives the record and the entries of all digests (slot i =
        digest i) become visible at once. Ranks that disagree on anything but their part are
        REFUSED, and so is a writer that has failed (kvstore.index.verdicts). An incomplete commit is
        forgotten after an hour. Committing again is harmless.

        `session` is that of the request whose blocks they are, if it has one: the segment is its own then
        (kvstore.index.sessions), and if the session retains, `allowance` bounds that. All ranks give the
        same.

        `record.created_s` is Claim.at_s, or what the header says of a segment that comes back; it may differ
        between ranks, of which the latest counts. A time that is yet to come by the index's own clock counts
        as now. So no writer's clock has a part in order, age, or what an erasure covers.

        `replaces` names segments of whose blocks this one has copies. In the very step in which it becomes
        visible they are evicted (rule "joined", for the grace time that the index was told), and it takes
        over their heat and counts as used now; `record.created_s` is that of the oldest. But none goes before
        visible segments have copies of all of its blocks. One that is pinned, that is another session's own,
        that others retain, or that was saved under another salt stays, and so do its entries: this segment's
        copy of its blocks is then found from later blocks alone. What replaces one that nobody owns is
        nobody's own either. All ranks give the same.

        Also releases the claim. Re-registers nothing: raises NamespaceUnknown if the index has lost
        the namespace, and the caller registers it and tries once more.
        """

    @abstractmethod
    def touch(
        self, namespace: NamespaceId, segments: Sequence[SegmentId], used_s: float | None = None
    ) -> None:
        """Notes a use, by no session's request. Segments that are gone are ignored. Recency is per segment,
        to the minute, by the index's own clock; a repair puts back an earlier use (unix seconds)."""

    @abstractmethod
    def evict(
        self,
        namespace: NamespaceId,
        segments: Sequence[SegmentId],
        *,
        delete_after_s: float,
        rule: EvictionRule,
    ) -> int:
        """Makes segments invisible and puts them in the trash until `delete_after_s` (unix time).

        An index that was told the grace time keeps them there for just as long, from the moment that they
        become invisible and by its own clock: neither a caller that is held up on its way nor clocks that
        differ change it. 0: their payloads may be deleted at once.

        `rule` is why, for people. Pinned segments go as well.

        Returns how many were visible. O(1) per segment: their digests' entries dangle, are ignored
        by every other verb and are swept later. A segment whose commit is incomplete is refused
        from then on.
        """

    @abstractmethod
    def close(self) -> None:
        """Releases connections. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Notes(ABC):
    """Counts the uses of chains, stored or not: what saving on second use (`admission.second_use`) needs."""

    @abstractmethod
    def note(
        self, namespace: NamespaceId, digests: bytes, *, now_s: float, window_s: float, sketch_bytes: int
    ) -> int:
        """Counts one use of a chain; returns how many leading blocks had been noted before this call.

        `digests` is a hash chain from its first block on. Whether anything is stored makes no difference.
        Time is cut into windows of `window_s`; this window and the one before are remembered, so a use
        is forgotten after one to two windows. Callers must agree on the window's length, on
        `sketch_bytes` and, roughly, on the time, or they don't see each other's notes.

        The answer is probable: never less than the truth, and more with a chance that grows as the sketch
        fills up. About three in a hundred blocks that were never noted pass, at most, where a window's notes
        name no more than `sketch_bytes` / 2 different blocks. Memory is bounded by two sketches.

        One of two calls at the same moment comes first. Returns 0 for a chain of no blocks. Raises
        NamespaceUnknown if the index doesn't know the namespace.
        """

    @abstractmethod
    def sketch_bits(self, namespace: NamespaceId, *, now_s: float, window_s: float, sketch_bytes: int) -> int:
        """Returns how many bits of the sketch that `note` looks at are set in its fuller window."""


class OutcomeSink(ABC):
    """Is told what became of requests."""

    @abstractmethod
    def tell(self, namespace: NamespaceId, outcomes: Sequence[Outcome]) -> None:
        """Remembers what became of requests (index.maintenance.Journal): in a ring of bounded length, in
        totals, and, for match outcomes that ended "absent", how much more capacity would have served them.

        Takes one round trip for up to 64 outcomes with 4,096 digests. Does nothing for an unknown namespace.
        """


class EngineIndex(Index, Notes, OutcomeSink, SessionUses, Verdicts):
    """All that engines need of an index."""
