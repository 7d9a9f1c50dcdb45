"""The repairs of fsck. Each fault is looked at once more, and repaired as it is then.

    missing, damaged     evicted; the payloads are deleted after the grace time
    record               removed and committed again from the payloads, with its last use and its pin
    unlisted             committed
    astray               the entries are removed, unless they were changed meanwhile
    hidden               committed again, which writes every entry of the segment
    accounts             counted anew
Nothing is deleted that is valid, that the store could not read, that no key here can judge, or that is
foreign.

A crash between the removal of a record and its commit leaves a segment that the index does not know: the next
fsck, or a rebuild, finds it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvstore.admin.backends import Cache
from kvstore.admin.counting import paged
from kvstore.admin.progress import ProgressListener
from kvstore.admin.repair.check import FaultySegment, FoundFault, Key, examine
from kvstore.admin.repair.recommit import recommit
from kvstore.admin.repair.reports import FaultKind, Mended
from kvstore.admin.repair.survey import look_up
from kvstore.errors import CorruptPayload, PermissionDenied, UnreadablePayload
from kvstore.index.maintenance import FullIndex, Listing
from kvstore.index.port import CommitState
from kvstore.keys import NamespaceId, SegmentId
from kvstore.threads.each import for_each
from kvstore.verify.returning import Returns
from kvstore.verify.segments import Whole, read_whole, verify_whole

#: The order of repairs: a segment that is evicted or committed again changes what entries should say.
_ORDER: tuple[tuple[FaultKind, ...], ...] = (
    ("missing", "damaged", "record", "unlisted"),
    ("astray",),
    ("hidden",),
    ("accounts",),
)


@dataclass
class Repairs:
    """Repairs found faults with `jobs` threads. `_lock` guards the outcomes."""

    cache: Cache
    index: FullIndex
    returns: Returns
    progress: ProgressListener
    clock: Callable[[], float]
    jobs: int = 8
    outcomes: dict[Key, tuple[FoundFault, Mended]] = field(default_factory=dict)
    #: Stray segments that can't be used, so that the next check does not take them for `unlisted`.
    unusable: set[SegmentId] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def all(self, findings: Sequence[FoundFault]) -> None:
        """Repairs what can be repaired. Raises what the backends raise; repairs done until then stay."""
        for kinds in _ORDER:
            some = [finding for finding in findings if finding.kind in kinds]
            if some:
                self.progress.begin(f"repair: {', '.join(kinds)}")
                for_each(self._one, some, self.jobs)

    def reconcile(self, names: Iterable[NamespaceId]) -> None:
        """Counts every namespace anew, even if its sums are right.

        A segment that is not in the order of eviction shows in no other way.
        """
        for name in names:
            misplaced = self.index.reconcile(name).mended
            if misplaced:
                detail = f"{misplaced} segments were not in the order of eviction"
                finding = FoundFault(name, "accounts", detail)
                self.outcomes[finding.key] = (finding, "corrected")

    def _one(self, finding: FoundFault) -> None:
        done = self._repair(finding)
        with self._lock:
            self.outcomes[finding.key] = (finding, done)

    def _repair(self, finding: FoundFault) -> Mended:
        if finding.kind == "accounts":
            return "corrected" if self.index.reconcile(finding.namespace).counted is not None else "failed"
        if finding.kind == "astray":
            for page in paged(finding.entries):
                self.index.unlink(finding.namespace, page)
            return "unlinked"
        assert finding.segment is not None, "every other kind is one segment's"
        try:
            return self._segment(finding, finding.namespace, finding.segment)
        except (PermissionDenied, CorruptPayload, UnreadablePayload):
            # It has changed since it was found; the check that follows says how it is now.
            return "failed"

    def _segment(self, finding: FoundFault, name: NamespaceId, segment: SegmentId) -> Mended:
        listing = self.index.get(name, [segment])[0]
        stored = look_up(self.cache.payloads, name, segment)
        if listing is None:
            return self._unseen(name, segment, read=finding.read)
        try:
            whole = examine(self.cache, name, listing, stored, read=finding.read)
        except FaultySegment as bad:
            if bad.kind == "record":
                whole = read_whole(self.cache.payloads, self.cache.keyring, name, segment, stored.sizes)
                return self._relist(listing, name, whole)
            if bad.kind == "unreadable":
                return "failed"
            after = self.clock() + self.cache.settings.grace_s
            self.index.evict(name, [segment], delete_after_s=after, rule="repair")
            return "evicted"
        assert whole is not None, "headers were read"
        if finding.kind != "hidden":
            return "none"
        return self._commit(segment, whole) or self._relist(listing, name, whole)

    def _unseen(self, name: NamespaceId, segment: SegmentId, *, read: bool) -> Mended:
        """Commits a segment that no readable record names, unless it was evicted or invalidated."""
        state = self.index.states(name, [segment])[0]
        if state in ("trash", "bygone"):
            return "none"
        sizes = look_up(self.cache.payloads, name, segment).sizes
        try:
            whole = read_whole(self.cache.payloads, self.cache.keyring, name, segment, sizes)
            if read:
                verify_whole(self.cache.payloads, name, segment, whole)
        except CorruptPayload:
            self.unusable.add(segment)
            if state == "visible":
                # Neither the record nor the payloads can be used: the payloads are waste.
                self.index.unlist(name, [segment])
                return "evicted"
            raise
        if state == "visible":
            self.index.unlist(name, [segment])
        return self._commit(segment, whole) or "failed"

    def _relist(self, listing: Listing, name: NamespaceId, whole: Whole) -> Mended:
        segment = listing.segment
        if self.returns.barred(name, segment, whole.record) is not None:
            # It could not be committed again: an archive brought it back after an invalidation.
            return "failed"
        self.index.unlist(name, [segment])
        done = self._commit(segment, whole)
        if done is None:
            return "failed"
        # What was retained is so no more, and that would be a time to come.
        self.index.touch(name, [segment], listing.last_use_s)
        if listing.pinned:
            # It was within the bound when it was pinned.
            self.index.pin(name, [segment], most_bytes=1 << 62)
        return done

    def _commit(self, segment: SegmentId, whole: Whole) -> Mended | None:
        now = self.clock()
        state = recommit(self.cache, segment, whole, self.returns, now)
        return "listed" if state is CommitState.VISIBLE else None
