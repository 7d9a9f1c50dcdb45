"""What fsck does about what it found. Each fault is looked at once more, and acted upon as it is then.

    missing, damaged     evicted; the payloads are deleted after the grace time
    record               forgotten and committed again from the payloads, with its last use and its pin
    unlisted             committed
    astray               the entries are dropped, if they still say what they said
    hidden               committed again, which writes every entry of the segment
    accounts             counted anew
Never deleted: anything valid, anything that could not be read for the store's sake, anything foreign.

A crash between forgetting a record and committing it leaves a segment that the index does not know: the next
fsck, or a rebuild, finds it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvstore.admin.checking import Bad, Finding, Key, examine, paged
from kvstore.admin.parallel import for_each
from kvstore.admin.progress import Progress
from kvstore.admin.recommit import AnyIndex, Whole, commit_whole, read_whole, verify
from kvstore.admin.stock import look_up
from kvstore.catalogue import Listing
from kvstore.errors import CorruptPayload, PermissionDenied
from kvstore.keys import NamespaceId, SegmentId
from kvstore.ports import CommitState, PayloadStore
from schemas.repairs import FaultKind, Mended
from schemas.settings import Settings

#: In this order: what is evicted or relisted changes what entries should say.
_ORDER: tuple[tuple[FaultKind, ...], ...] = (
    ("missing", "damaged", "record", "unlisted"),
    ("astray",),
    ("hidden",),
    ("accounts",),
)


@dataclass
class Mending:
    """`_lock` guards the outcomes."""

    index: AnyIndex
    payloads: PayloadStore
    settings: Settings
    progress: Progress
    clock: Callable[[], float]
    jobs: int = 8
    outcomes: dict[Key, tuple[Finding, Mended]] = field(default_factory=dict)
    #: As of a check: segments that are not to be listed when nobody names them any more.
    unusable: set[SegmentId] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def all(self, findings: Sequence[Finding]) -> None:
        """Mend what can be. Raises what the backends raise: what was mended until then stays so."""
        for kinds in _ORDER:
            some = [finding for finding in findings if finding.kind in kinds]
            if some:
                self.progress.begin(f"mend: {', '.join(kinds)}")
                for_each(self._one, some, self.jobs)

    def reconcile(self, names: Iterable[NamespaceId]) -> None:
        """Count anew, also where nothing is wrong by its sums: a segment that is not in the order of eviction
        shows in no other way."""
        for name in names:
            mended = self.index.reconcile(name).mended
            if mended:
                detail = f"{mended} segments were not in the order of eviction"
                finding = Finding(name, "accounts", detail)
                self.outcomes[finding.key] = (finding, "corrected")

    def _one(self, finding: Finding) -> None:
        done = self._mend(finding)
        with self._lock:
            self.outcomes[finding.key] = (finding, done)

    def _mend(self, finding: Finding) -> Mended:
        if finding.kind == "accounts":
            return "corrected" if self.index.reconcile(finding.namespace).counted is not None else "failed"
        if finding.kind == "astray":
            for page in paged(finding.entries):
                self.index.unlink(finding.namespace, page)
            return "unlinked"
        assert finding.segment is not None, "every other kind is one segment's"
        try:
            return self._segment(finding, finding.namespace, finding.segment)
        except (PermissionDenied, CorruptPayload):
            # Not as it was a moment ago; the check that follows says how it is now.
            return "failed"

    def _segment(self, finding: Finding, name: NamespaceId, segment: SegmentId) -> Mended:
        listing = self.index.get(name, [segment])[0]
        stored = look_up(self.payloads, name, segment)
        if listing is None:
            return self._unseen(name, segment, read=finding.read)
        try:
            whole = examine(self.payloads, name, listing, stored, read=finding.read)
        except Bad as bad:
            if bad.kind == "record":
                return self._relist(listing, name, read_whole(self.payloads, name, segment, stored.sizes))
            if bad.kind == "unreadable":
                return "failed"
            after = self.clock() + self.settings.grace_s
            self.index.evict(name, [segment], delete_after_s=after, rule="repair")
            return "evicted"
        assert whole is not None, "headers were read"
        if finding.kind != "hidden":
            return "none"
        return self._commit(segment, whole) or self._relist(listing, name, whole)

    def _unseen(self, name: NamespaceId, segment: SegmentId, *, read: bool) -> Mended:
        """One that no readable record names, if nothing else has become of it."""
        state = self.index.states(name, [segment])[0]
        if state in ("trash", "bygone"):
            return "none"
        sizes = look_up(self.payloads, name, segment).sizes
        try:
            whole = read_whole(self.payloads, name, segment, sizes)
            if read:
                verify(self.payloads, name, segment, whole)
        except CorruptPayload:
            self.unusable.add(segment)
            if state == "visible":
                # A record that can't be read, of payloads that can't be used: the payloads are gc's.
                self.index.unlist(name, [segment])
                return "evicted"
            raise
        if state == "visible":
            self.index.unlist(name, [segment])
        return self._commit(segment, whole) or "failed"

    def _relist(self, listing: Listing, name: NamespaceId, whole: Whole) -> Mended:
        segment = listing.segment
        self.index.unlist(name, [segment])
        done = self._commit(segment, whole)
        if done is None:
            return "failed"
        self.index.touch(name, [segment], listing.last_use_s)
        if listing.pinned:
            # It was pinned within the bound before.
            self.index.pin(name, [segment], most_bytes=1 << 62)
        return done

    def _commit(self, segment: SegmentId, whole: Whole) -> Mended | None:
        now = self.clock()
        state = commit_whole(self.index, self.payloads, self.settings, segment, whole, now)
        return "listed" if state is CommitState.VISIBLE else None
