"""Catalogue and Diagnosis: looking at an index, and at whether it is well."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from kvstore.errors import KVStoreError
from kvstore.keys import Digest, NamespaceId, SegmentId
from schemas.records import SegmentRecord


@dataclass(frozen=True, slots=True)
class Usage:
    """What the visible segments of one namespace amount to; exact, kept in the same transaction."""

    nbytes: int
    segments: int
    blocks: int
    #: Pinned segments' share of nbytes.
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
    #: What of this could not be read, and is "" or 0 here; "" if all could.
    problem: str = ""
    #: The time to live that the index holds to there (Ages.age_out); 0: none.
    ttl_s: int = 0
    #: How it lies (kvstore.index.sharding.names), and the shards that these are the sums of.
    layout: str = "1"
    summed: tuple[NamespaceId, ...] = ()
    #: The layout that a reshard fills, or that it has left and not dropped yet; "": none is under way.
    to: str = ""
    left: str = ""

    @property
    def shards(self) -> int:
        """In how many shards it lies."""
        return int(self.layout.partition(".")[0])


@dataclass(frozen=True, slots=True)
class Listing:
    """A segment as the catalogue lists it."""

    segment: SegmentId
    record: SegmentRecord
    #: Unix seconds, to the quarter of a minute.
    last_use_s: float
    pinned: bool = False


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
        """Returns every registered namespace: id -> canonical JSON, or what stands in its place."""

    @abstractmethod
    def accounts(self) -> list[Account]:
        """Returns every registered namespace in a few round trips altogether, each exact by itself; by id.

        A damaged namespace says so in its account, and fails no other's.
        """

    @abstractmethod
    def reachable(self) -> tuple[list[Account], KVStoreError | None]:
        """Returns `accounts` without those on a node of the index that doesn't answer, and that node's error.

        For maintenance: an unreachable node does not hold up the others. A caller that would treat a missing
        namespace as deleted must use `accounts`.
        """

    @abstractmethod
    def usage(self, namespace: NamespaceId) -> Usage:
        """Returns what the visible segments amount to: zeros for an unknown namespace."""

    @abstractmethod
    def segments(self, namespace: NamespaceId) -> Iterator[Listing]:
        """Yields every visible segment, in no order."""

    @abstractmethod
    def get(self, namespace: NamespaceId, segments: Sequence[SegmentId]) -> list[Listing | None]:
        """Returns the named segments, None where one is not visible."""

    @abstractmethod
    def states(self, namespace: NamespaceId, segments: Sequence[SegmentId]) -> list[SegmentState | None]:
        """Returns what the index knows of each; None: nothing. A segment in two states is the first of
        visible, incomplete, bygone, trash."""

    @abstractmethod
    def entries(self, namespace: NamespaceId) -> Iterator[Entry]:
        """Yields every block's entry, dangling ones included, in no order. A page holds the index for a few
        milliseconds."""


class Diagnosis(ABC):
    """Answers whether the index is well."""

    @abstractmethod
    def ping(self) -> None:
        """Raises TransientError or PermissionDenied if the index can't be read and written."""

    @abstractmethod
    def memory(self) -> tuple[int, int] | None:
        """Returns how many bytes of memory the index uses and may use (0: any number); None if unknown."""

    @abstractmethod
    def warnings(self) -> list[str]:
        """Returns sentences on what is wrong with the index's configuration. Raises what `ping` raises."""
