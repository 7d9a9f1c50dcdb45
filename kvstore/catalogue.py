"""The index as maintenance and people see it: the ports beside kvstore.ports.Index. None of them is on a
request's path, and none is behind the breaker.

Catalogue    looks: what there is, how much of it, in which order it would go
Upkeep       changes: evict to a quota, reap, sweep, pin, invalidate, repair, lease
Journal      remembers: what was committed and evicted, what became of requests, what more room would bring
Maintenance  all three; every index is one

The rules of kvstore.ports hold here too: batch first, sync, safe for many threads and processes, every call
with a deadline, bounded in time and in answer. What a verb changes it accounts for in the same transaction.

Not here, and why: anything that needs several namespaces at one moment (in a Redis Cluster they lie on
different nodes; kvstore.eviction plans over them, and its plan is safe to carry out twice), payloads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from kvstore.errors import KVStoreError
from kvstore.keys import Digest, NamespaceId, SegmentId
from kvstore.ports import Outcome
from schemas.records import EvictionRule, SegmentRecord


@dataclass(frozen=True, slots=True)
class Usage:
    """What the visible segments of one namespace amount to; exact, kept in the same transaction."""

    nbytes: int
    segments: int
    blocks: int
    #: Of nbytes, those of pinned segments.
    pinned_bytes: int = 0
    #: Sum of the records' cost_us: microseconds that computing all of it again would take.
    cost_us: int = 0


@dataclass(frozen=True, slots=True)
class Account:
    """One namespace as quotas and the janitor see it."""

    namespace: NamespaceId
    kind: str
    tenant: str
    usage: Usage
    #: Evicted segments whose payloads are not deleted yet.
    trashed: int
    #: Invalidated segments that are not in the trash yet.
    bygone: int
    #: When an engine registered it last, unix seconds.
    seen_s: float


@dataclass(frozen=True, slots=True)
class Listing:
    """A segment as the catalogue lists it."""

    segment: SegmentId
    record: SegmentRecord
    #: Unix seconds, to the minute.
    last_use_s: float
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class Candidate:
    """A segment in the order of eviction, which is that of (keep_s, -depth, used_s, id), ascending.

    Depths from 2**22 - 1 on are alike.
    """

    segment: SegmentId
    nbytes: int
    #: Last use plus what its cost is worth (kvstore.eviction), unix seconds, to the minute.
    keep_s: float
    #: Last use alone.
    used_s: float


@dataclass(frozen=True, slots=True)
class Entry:
    """One block's entry: where the index says that it is, true or not."""

    digest: Digest
    segment: SegmentId
    slot: int


#: `visible`: can be matched. `trash`: evicted, to be deleted. `incomplete`: some rank has not committed.
#: `bygone`: invalidated, on its way into the trash.
SegmentState = Literal["visible", "trash", "incomplete", "bygone"]


class Catalogue(ABC):
    """Looks. Listings are weakly consistent and in bounded pages; single answers are exact."""

    @abstractmethod
    def namespaces(self) -> dict[NamespaceId, str]:
        """Every registered namespace: id -> canonical JSON."""

    @abstractmethod
    def accounts(self) -> list[Account]:
        """Every registered namespace in a few round trips altogether, each exact by itself; by id."""

    @abstractmethod
    def reachable(self) -> tuple[list[Account], KVStoreError | None]:
        """As `accounts`, without what is kept on a node of the index that doesn't answer, and why it doesn't.

        For upkeep, which one node must not keep from all others. Who takes a namespace that isn't there for
        one that is no more asks `accounts`.
        """

    @abstractmethod
    def usage(self, namespace: NamespaceId) -> Usage:
        """Zeros for an unknown namespace."""

    @abstractmethod
    def segments(self, namespace: NamespaceId) -> Iterator[Listing]:
        """Every visible segment, in no order."""

    @abstractmethod
    def get(self, namespace: NamespaceId, segments: Sequence[SegmentId]) -> list[Listing | None]:
        """The named segments, None where one is not visible."""

    @abstractmethod
    def states(self, namespace: NamespaceId, segments: Sequence[SegmentId]) -> list[SegmentState | None]:
        """What the index knows of each; None: nothing. A segment that is in two states is the first of
        visible, incomplete, bygone, trash."""

    @abstractmethod
    def sample(self, namespace: NamespaceId, count: int) -> list[Listing]:
        """Up to `count` different visible segments, drawn by chance; fewer if there are fewer."""

    @abstractmethod
    def entries(self, namespace: NamespaceId) -> Iterator[Entry]:
        """Every block's entry, dangling ones included, in no order. A page holds the index for a few
        milliseconds."""

    @abstractmethod
    def order(self, namespace: NamespaceId, limit: int) -> list[Candidate]:
        """The first `limit` in the order of eviction. Pinned segments are not in it."""

    @abstractmethod
    def hottest(self, namespace: NamespaceId, limit: int) -> list[tuple[SegmentId, float]]:
        """Segments that began most of the loads lately, the most used first, with how many minutes each was
        used in; minutes count half as much every time that `cool` is called. Of at most a thousand or two
        that are watched; visible ones only."""

    @abstractmethod
    def quotas(self) -> dict[str, int]:
        """What operators have set: scope (kvstore.eviction.Scope) -> bytes."""

    @abstractmethod
    def ping(self) -> None:
        """Raise TransientError or PermissionDenied if the index can't be read and written."""


#: What became of an erasing: all gone; call again; something is stored there, so nothing more was erased.
Erased = Literal["erased", "more", "in_use"]


@dataclass(frozen=True, slots=True)
class Reconciled:
    """What counting a namespace found. `counted` is None if it changed too fast to be counted."""

    recorded: Usage
    counted: Usage | None
    #: Visible segments that were not in the order of eviction, and are now.
    mended: int


class Upkeep(ABC):
    """Changes. Safe from several processes at once; what is done twice is done once."""

    @abstractmethod
    def cull(
        self,
        namespace: NamespaceId,
        *,
        keep_bytes: int,
        delete_after_s: float,
        limit: int,
        rule: EvictionRule,
        spare_from_s: float | None = None,
    ) -> list[SegmentId]:
        """Evict in the order of eviction until at most `keep_bytes` remain.

        `delete_after_s` as in Index.evict. At most `limit` per call, so that no call holds the index for
        long. Returns those evicted. Segments whose last use, to the minute, is not before `spare_from_s` are
        passed over; a call looks at no more than 4,096.
        """

    @abstractmethod
    def due(self, namespace: NamespaceId, now_s: float | None, limit: int) -> list[tuple[SegmentId, int]]:
        """Trashed segments whose time has come by `now_s`, with their number of ranks.

        None: by the index's own clock, by which the grace time began: for those who delete.
        """

    @abstractmethod
    def bury(self, namespace: NamespaceId, segments: Sequence[SegmentId]) -> None:
        """Their payloads are deleted: forget the trash entries."""

    @abstractmethod
    def sweep(self, namespace: NamespaceId, limit: int) -> int:
        """Drop up to about `limit` entries that point at no visible segment; returns how many.

        Remembers where it stopped, so that repeated calls cover everything.
        """

    @abstractmethod
    def pin(self, namespace: NamespaceId, segments: Sequence[SegmentId], *, most_bytes: int) -> int:
        """Take visible segments out of the order of eviction; returns how many were pinned by this call.

        Only `evict`, `invalidate` and `unlist` remove a pinned segment. Raises CapacityExceeded, and pins
        none, if the namespace's pinned bytes would exceed `most_bytes`.
        """

    @abstractmethod
    def unpin(self, namespace: NamespaceId, segments: Sequence[SegmentId]) -> int:
        """Put pinned segments back into the order of eviction, with their last use; returns how many."""

    @abstractmethod
    def set_quota(self, scope: str, nbytes: int | None) -> None:
        """Set the quota of a scope (kvstore.eviction.Scope); None: there is none but the settings'."""

    @abstractmethod
    def invalidate(self, namespace: NamespaceId) -> int:
        """Make all that a namespace holds invisible in O(1); returns how many segments that were.

        Pinned ones too. Incomplete commits are refused from then on. What engines commit afterwards is
        visible as usual. `drain` puts what was there into the trash; until it is deleted, a commit of one
        of those segments is refused, as that of an evicted one is. An invalidation of what holds nothing
        visible is no event.
        """

    @abstractmethod
    def drain(self, namespace: NamespaceId, *, delete_after_s: float, limit: int) -> int:
        """Move up to about `limit` invalidated segments into the trash; returns how many; 0: none is left."""

    @abstractmethod
    def erase(self, namespace: NamespaceId, limit: int) -> Erased:
        """Forget a namespace that holds nothing: no segment in any state. Drops up to about `limit` entries
        per call. An engine that still uses it registers it again."""

    @abstractmethod
    def unlist(self, namespace: NamespaceId, segments: Sequence[SegmentId]) -> int:
        """Forget segments in whatever state, without scheduling their payloads' deletion: for a repair that
        commits them again from their payloads. Returns how many were visible."""

    @abstractmethod
    def unlink(self, namespace: NamespaceId, entries: Sequence[Entry]) -> int:
        """Drop entries that still say what is given; returns how many did."""

    @abstractmethod
    def reconcile(self, namespace: NamespaceId) -> Reconciled:
        """Count what is there, in pages, and correct the usage if it says otherwise. Exact: corrects only
        what did not change while it was counted, and tries a few times."""

    @abstractmethod
    def cool(self, namespace: NamespaceId) -> None:
        """Halve what `hottest` counts."""

    @abstractmethod
    def lease(self, name: str, holder: str, ttl_s: float) -> bool:
        """Take or renew a lease that at most one holder has; False: somebody else has it. It ends after
        `ttl_s` by itself. Advisory: what is done under it must be safe to be done by two."""

    @abstractmethod
    def release(self, name: str, holder: str) -> None:
        """Give a lease back, if `holder` has it."""

    @abstractmethod
    def leaseholder(self, name: str) -> str | None:
        """Who has it."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that changed what can be matched."""

    #: Position in the namespace's stream: ask for what comes after it. Numbers joined by hyphens, ascending.
    position: str
    #: By the index's clock.
    at_s: float
    op: Literal["commit", "evict", "invalidate"]
    #: None: all of the namespace's (invalidate).
    segment: SegmentId | None
    #: Of its blocks, the first and (commit only) the last: the digest of the last one stands for the prefix
    #: that ends there.
    first: Digest | None
    last: Digest | None
    #: Index in its chain of the first block.
    depth: int
    slots: int
    nbytes: int
    #: Why it went; None for a commit.
    rule: EvictionRule | None


@dataclass(frozen=True, slots=True)
class Ghosts:
    """Blocks that were asked for, absent, and would have been there with `extra_bytes` more, but not with the
    next smaller number (kvstore.eviction.GHOST_STEPS)."""

    extra_bytes: int
    blocks: int


class Journal(ABC):
    """Remembers, in rings of bounded length (journal.* of the settings), what `commit`, `evict`, `cull`,
    `invalidate` and `tell` wrote. Nothing depends on it being complete."""

    @abstractmethod
    def events(self, namespace: NamespaceId, *, after: str = "", limit: int = 1000) -> list[Event]:
        """Commits and evictions after a position, oldest first; from the oldest kept with `after` "".
        Raises ValueError for a text that is no position."""

    @abstractmethod
    def last_position(self, namespace: NamespaceId) -> str:
        """That of the newest event; "" if there is none. For a reader that wants only what comes."""

    @abstractmethod
    def outcomes(self, namespace: NamespaceId, limit: int) -> list[Outcome]:
        """What became of requests, newest first. `missing` holds the first digest only."""

    @abstractmethod
    def seen(self, namespace: NamespaceId) -> Mapping[str, int]:
        """Totals of what engines have told: `requests`, `asked`, `served` (blocks of match outcomes, the
        latter without what load outcomes lack), `offered`, `stored` (of save outcomes), `miss:<reason>` (of
        match and load outcomes; asked = served + all of them), `unsaved:<reason>` (blocks), and `evicted`
        (bytes evicted by a quota). Names that were never counted, or counted nothing, are absent."""

    @abstractmethod
    def ghosts(self, namespace: NamespaceId) -> list[Ghosts]:
        """What more capacity would have brought since the namespace was made; ascending."""


class Maintenance(Catalogue, Upkeep, Journal):
    """Everything that an index offers beside the path of requests."""
