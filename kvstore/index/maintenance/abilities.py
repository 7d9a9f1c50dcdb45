"""Pins, Quotas, Ages, Salts, Heat, Repair: what an index may offer, and the cache works without."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvstore.index.contract import CLOCKS_DIFFER_S as CLOCKS_DIFFER_S
from kvstore.index.maintenance.catalogue import Entry, Listing, Usage
from kvstore.keys import NamespaceId, SaltId, SegmentId


class Pins(ABC):
    """Keeps segments from going by policy: only `evict`, `invalidate` and `unlist` remove a pinned one."""

    @abstractmethod
    def pin(self, namespace: NamespaceId, segments: Sequence[SegmentId], *, most_bytes: int) -> int:
        """Takes visible segments out of the order of eviction; returns how many were pinned by this call.

        Raises CapacityExceeded, and pins none, if the namespace's pinned bytes would exceed `most_bytes`.
        """

    @abstractmethod
    def unpin(self, namespace: NamespaceId, segments: Sequence[SegmentId]) -> int:
        """Puts pinned segments back into the order of eviction, with their last use; returns how many."""


class Quotas(ABC):
    """Keeps the quotas that operators set while engines run. Without it those of the settings hold."""

    @abstractmethod
    def quotas(self) -> dict[str, int]:
        """Returns what operators have set: scope (kvstore.index.eviction.Scope) -> bytes."""

    @abstractmethod
    def set_quota(self, scope: str, nbytes: int | None) -> None:
        """Sets the quota of a scope; None: there is none but the settings'."""


class Ages(ABC):
    """Serves nothing that is older than a time to live. Without it age does not matter."""

    @abstractmethod
    def now(self, namespace: NamespaceId) -> float:
        """Returns unix seconds by the index's own clock, where it keeps that namespace, known or not."""

    @abstractmethod
    def age_out(
        self, namespace: NamespaceId, ttl_s: int | None, *, delete_after_s: float, after: str = ""
    ) -> tuple[int, str]:
        """Sets a namespace's time to live, in seconds; None: nothing there is too old. And evicts some of
        what is older, pinned or not, with the rule `ttl`.

        From then on what was created longer ago, by its record and the index's own clock, is neither matched
        nor found, and a claim takes it for missing. A call looks at a page of the segments. Returns how many
        it evicted, and what the next call is to give as `after`: "" where all have been looked at.
        `delete_after_s` as in Index.evict. Does nothing for an unknown namespace.
        """


class Salts(ABC):
    """Tells apart what requests with different salts (vLLM's `cache_salt`) have stored, by `keys.salt_id`."""

    @abstractmethod
    def of_salt(self, namespace: NamespaceId, salt: SaltId) -> Iterator[Listing]:
        """Yields every visible segment that was saved under a salt, in no order."""

    @abstractmethod
    def holdings(self, namespace: NamespaceId, over_bytes: int) -> dict[SaltId, int]:
        """Returns the salts whose visible segments amount to more than `over_bytes`, and to how much."""

    @abstractmethod
    def forbid(self, namespace: NamespaceId, salt: SaltId) -> float:
        """Refuses, for ever, commits of what was created up to now and `CLOCKS_DIFFER_S` more: of a salt, or
        with an empty id of the whole namespace, registered or not. Returns that time, unix seconds.

        Payloads of such commits that wait for other ranks are to be deleted at once, and evicted ones that
        somebody wanted to keep for longer than the grace time are not. What is visible stays so: a caller
        evicts it afterwards, and knows then that nothing can be added to it.
        """

    @abstractmethod
    def forbidden(self, namespace: NamespaceId) -> dict[SaltId, float]:
        """Returns what `forbid` has refused, and until when it was created, unix seconds."""


class Heat(ABC):
    """Watches which segments begin loads, of all that `Index.touch` is told; a thousand or two at most."""

    @abstractmethod
    def hottest(self, namespace: NamespaceId, limit: int) -> list[tuple[SegmentId, float]]:
        """Returns visible segments that began most of the loads lately, the most used first, with how many
        minutes each was used in; minutes count half as much every time that `cool` is called."""

    @abstractmethod
    def cool(self, namespace: NamespaceId) -> None:
        """Halves what `hottest` counts."""


@dataclass(frozen=True, slots=True)
class Reconciled:
    """What counting a namespace found. `counted` is None if it changed too fast to be counted."""

    recorded: Usage
    counted: Usage | None
    #: Visible segments that were not in the order of eviction, and are now.
    mended: int
    #: What made no sense and was put right or removed, by name.
    replaced: tuple[str, ...] = ()


class Repair(ABC):
    """What fsck and scrubbing need. An index without it can still be deleted and rebuilt."""

    @abstractmethod
    def sample(self, namespace: NamespaceId, count: int) -> list[Listing]:
        """Returns up to `count` different visible segments, drawn by chance; fewer if there are fewer."""

    @abstractmethod
    def unlist(self, namespace: NamespaceId, segments: Sequence[SegmentId]) -> int:
        """Forgets segments in whatever state, without scheduling their payloads' deletion: for a repair that
        commits them again from their payloads. Returns how many were visible."""

    @abstractmethod
    def unlink(self, namespace: NamespaceId, entries: Sequence[Entry]) -> int:
        """Drops entries that still say what is given; returns how many did."""

    @abstractmethod
    def reconcile(self, namespace: NamespaceId) -> Reconciled:
        """Counts what is there, in pages, and corrects the usage if it says otherwise. Exact: corrects only
        what did not change while it was counted, and tries a few times.

        Before that it replaces what makes no sense, so that every verb can go on; what that loses is misses.
        """
