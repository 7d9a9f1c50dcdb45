"""The checks of fsck: everything that the index names is compared with the payloads. Changes nothing.

Every fault is looked at twice, the second time with fresh answers from both sides: nothing that engines save,
evict and delete meanwhile is reported as a fault.
"""

from __future__ import annotations

import random
import threading
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kvstore.admin.backends import Cache
from kvstore.admin.counting import PAGE, AmountSum, paged
from kvstore.admin.patience import Patience
from kvstore.admin.progress import ProgressListener
from kvstore.admin.repair.entries import Blocks, collect, compare
from kvstore.admin.repair.reports import FaultKind
from kvstore.admin.repair.survey import Stock, StoredSegment, look_up, surveyed
from kvstore.errors import CorruptPayload, PayloadMissing, PermissionDenied, TransientError, UnreadablePayload
from kvstore.index.maintenance import Entry, FullIndex, Listing, Usage
from kvstore.keys import DIGEST_BYTES, Digest, NamespaceId, SegmentId, chain_like, split_digests
from kvstore.rules.lateness import SETTLED_S, is_late
from kvstore.threads.each import for_each
from kvstore.verify.returning import Returns
from kvstore.verify.segments import Whole, read_whole, verify_whole
from schemas.records import SegmentRecord

Key = tuple[NamespaceId, FaultKind, SegmentId | None]


@dataclass(frozen=True, slots=True)
class FoundFault:
    """A fault, with what repairing it needs."""

    namespace: NamespaceId
    kind: FaultKind
    detail: str
    segment: SegmentId | None = None
    #: (`hidden`) Packed digests that no entry leads to.
    digests: bytes = b""
    #: (`astray`) The entries.
    entries: tuple[Entry, ...] = ()
    #: Whether the check reads every byte of the segment.
    read: bool = False

    @property
    def key(self) -> Key:
        """The identity of the fault, without its details."""
        return self.namespace, self.kind, self.segment

    @property
    def blocks(self) -> int:
        """The number of entries or blocks that it concerns."""
        return len(self.entries) + len(self.digests) // DIGEST_BYTES


@dataclass
class Checked:
    """The result of checking one namespace."""

    checked: AmountSum = field(default_factory=AmountSum)
    verified: AmountSum = field(default_factory=AmountSum)
    findings: list[FoundFault] = field(default_factory=list)
    entries: int = 0
    dangling: int = 0
    stray_payloads: int = 0
    stray_bytes: int = 0

    @property
    def bad_segments(self) -> int:
        """The number of visible segments with a payload that is missing or damaged."""
        return sum(finding.kind in ("missing", "damaged") for finding in self.findings)


@dataclass(frozen=True, slots=True)
class Depth:
    """How closely to look."""

    #: Whether to list the payloads and ask the index what it knows of them, and compare nothing.
    only_list: bool = False
    #: Whether to compare sizes alone.
    quick: bool = False
    #: Percentage of segments of which every byte is read.
    percent: float = 0.0
    jobs: int = 8
    #: Age in seconds from which a payload that the index does not know is looked at; a younger one may still
    #: be committed.
    settled_s: float = SETTLED_S


class FaultySegment(Exception):
    """A segment and its payloads disagree, or a payload can't be used."""

    def __init__(self, kind: FaultKind, detail: str) -> None:
        super().__init__(detail)
        self.kind: FaultKind = kind


def examine(
    cache: Cache,
    namespace: NamespaceId,
    listing: Listing,
    stored: StoredSegment,
    *,
    quick: bool = False,
    read: bool = False,
) -> Whole | None:
    """Compares a visible segment with its payloads, and returns what they hold; None if `quick`.

    With `read` every byte of them is verified. Raises FaultySegment and TransientError.
    """
    record, segment = listing.record, listing.segment
    try:
        if quick:
            _sizes(record, stored)
            return None
        whole = read_whole(cache.payloads, cache.keyring, namespace, segment, stored.sizes)
        if read:
            verify_whole(cache.payloads, namespace, segment, whole)
        true = whole.record
        if true != record:
            raise FaultySegment("record", _difference(record, true))
        return whole
    except PayloadMissing as exc:
        raise FaultySegment("missing", str(exc)) from exc
    except CorruptPayload as exc:
        raise FaultySegment("damaged", str(exc)) from exc
    except (PermissionDenied, UnreadablePayload) as exc:
        raise FaultySegment("unreadable", str(exc)) from exc


def _sizes(record: SegmentRecord, stored: StoredSegment) -> None:
    for rank, part in enumerate(record.parts):
        if rank not in stored.sizes:
            raise PayloadMissing(f"the payload of rank {rank} is missing")
        if stored.sizes[rank] != part.nbytes:
            raise CorruptPayload(
                f"the payload of rank {rank} has {stored.sizes[rank]} bytes, the index says {part.nbytes}"
            )


def _difference(recorded: SegmentRecord, true: SegmentRecord) -> str:
    names = ("slots", "codec", "created_s", "depth", "raw_bytes", "cost_us")
    told = [
        f"{name} {getattr(recorded, name)} by the index, {getattr(true, name)} by the header"
        for name in names
        if getattr(recorded, name) != getattr(true, name)
    ]
    for name in ("salt", "writer"):
        index, header = (getattr(one, name).hex() or "none" for one in (recorded, true))
        if index != header:
            told.append(f"{name} id {index} by the index, {header} by the header")
    if len(recorded.parts) != len(true.parts):
        told.append(f"{len(recorded.parts)} ranks by the index, {len(true.parts)} by the header")
    elif recorded.parts != true.parts:
        told.append("another layout by the index than by the header")
    return "; ".join(told)


@dataclass
class IndexCheck:
    """Checks one namespace after the other. `lock` guards what the workers of one namespace share."""

    cache: Cache
    index: FullIndex
    returns: Returns
    depth: Depth
    progress: ProgressListener
    clock: Callable[[], float]
    draw: random.Random = field(default_factory=random.Random)
    #: Stray segments that were found to be unusable, by this check or by one before it, which may have read
    #: more of them.
    unusable: set[SegmentId] = field(default_factory=set)
    patience: Patience = field(default_factory=Patience)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def namespace(self, name: NamespaceId, stock: Stock, found: Checked) -> None:
        """Checks one namespace and adds the result to `found`.

        Raises TransientError when a store does not answer, and what the index raises.
        """
        with Blocks() as truth:
            _Run(self, name, stock, found, truth).all()

    def again(
        self, name: NamespaceId, bad: FaultySegment, listing: Listing, *, read: bool
    ) -> FoundFault | Whole | None:
        """Looks a second time, with fresh answers.

        Returns the fault, or the segment's content if it is good, or None if it is gone or may still be on
        its way.
        """
        fresh = self.index.get(name, [listing.segment])[0]
        if fresh is None or (
            bad.kind == "missing" and is_late(fresh.record, self.cache.settings, lambda: self.index.now(name))
        ):
            return None
        stored = look_up(self.cache.payloads, name, listing.segment)
        try:
            return examine(self.cache, name, fresh, stored, quick=self.depth.quick, read=read)
        except FaultySegment as exc:
            if self.index.get(name, [listing.segment])[0] is None:
                return None
            return FoundFault(name, exc.kind, str(exc), listing.segment, read=read)


@dataclass
class _Run:
    """The check of one namespace. The check's lock guards `found` and `truth` while workers run."""

    check: IndexCheck
    name: NamespaceId
    stock: Stock
    found: Checked
    truth: Blocks
    _seen: array[int] = field(default_factory=lambda: array("Q"))
    _pinned: int = 0
    _cost: int = 0
    #: Whether so much is missing that a second look at each would take hours and say the same.
    _vanished: bool = False

    def all(self) -> None:
        check, index = self.check, self.check.index
        before, position = index.usage(self.name), index.last_position(self.name)
        check.progress.begin(f"check {self.name}", before.nbytes)
        self._vanished = is_vanished(before.segments, max(0, before.segments - len(self.stock)))
        for_each(self._segment, self._listed(), check.depth.jobs)
        counted = Usage(
            self.found.checked.nbytes,
            self.found.checked.segments,
            self.found.checked.blocks,
            self._pinned,
            self._cost,
        )
        if before != counted and (before, position) == (
            index.usage(self.name),
            index.last_position(self.name),
        ):
            self._note("accounts", f"{_usage(before)} by the accounts, {_usage(counted)} counted")
        self._unknown()
        if not check.depth.quick:
            self._entries()

    def _note(self, kind: FaultKind, detail: str) -> None:
        self.found.findings.append(FoundFault(self.name, kind, detail))

    def _listed(self) -> Iterator[tuple[Listing, bool]]:
        # Only one worker at a time draws from this.
        for listing in self.check.index.segments(self.name):
            record = listing.record
            self._seen.append(int.from_bytes(listing.segment, "big"))
            self.found.checked.add(record.slots, record.nbytes)
            self._cost += record.cost_us
            if listing.pinned:
                self._pinned += record.nbytes
            yield listing, self._drawn()

    def _drawn(self) -> bool:
        return self.check.draw.random() * 100 < self.check.depth.percent

    def _segment(self, work: tuple[Listing, bool]) -> None:
        listing, read = work
        check, depth = self.check, self.check.depth
        finding: FoundFault | None = None
        whole: Whole | None = None
        try:
            try:
                stored = self.stock.of(listing.segment)
                whole = examine(check.cache, self.name, listing, stored, quick=depth.quick, read=read)
            except FaultySegment as bad:
                if self._vanished and bad.kind == "missing":
                    finding = FoundFault(self.name, "missing", str(bad), listing.segment)
                else:
                    second = check.again(self.name, bad, listing, read=read)
                    whole = second if isinstance(second, Whole) else None
                    finding = second if isinstance(second, FoundFault) else None
            check.patience.answered()
        except TransientError as exc:
            check.patience.unanswered(exc)
            finding = FoundFault(self.name, "unreadable", str(exc), listing.segment)
        with check.lock:
            check.progress.advance(listing.record.nbytes)
            if finding is not None:
                self.found.findings.append(finding)
            elif whole is not None:
                self.truth.add_segment(listing.segment, whole.digests)
                if read:
                    self.found.verified.add(whole.record.slots, whole.record.nbytes)

    # Payloads that no visible record names

    def _unknown(self) -> None:
        for stored, state in surveyed(self.check.index, self.name, self.stock.besides(self._seen)):
            if state is None:
                self._unlisted(stored)
            elif state == "visible" and self._unreadable(stored.segment):
                detail, read = "the index holds it, and can't list it", self._drawn()
                self.found.findings.append(FoundFault(self.name, "record", detail, stored.segment, read=read))

    def _unreadable(self, segment: SegmentId) -> bool:
        """Whether a record exists and can't be read.

        `get` returns what was just committed, and nothing that was evicted since it was seen: such a record
        is visible before and after.
        """
        index = self.check.index
        absent = index.get(self.name, [segment]) == [None]
        return absent and index.states(self.name, [segment]) == ["visible"]

    def _unlisted(self, stored: StoredSegment) -> None:
        check = self.check
        settled = check.clock() - stored.modified_s >= check.depth.settled_s
        if not settled:
            return
        try:
            if not check.depth.quick and stored.segment not in check.unusable:
                payloads, name, segment = check.cache.payloads, self.name, stored.segment
                fresh = look_up(payloads, name, segment)
                whole = read_whole(payloads, check.cache.keyring, name, segment, fresh.sizes)
                if read := self._drawn():
                    verify_whole(payloads, name, segment, whole)
                if check.returns.barred(self.name, stored.segment, whole.record) is not None:
                    raise CorruptPayload("it may not come back")
                if check.index.states(self.name, [stored.segment])[0] is None:
                    detail = f"{whole.record.slots} blocks, {whole.record.nbytes} bytes"
                    self.found.findings.append(
                        FoundFault(self.name, "unlisted", detail, stored.segment, read=read)
                    )
                check.patience.answered()
                return
        except TransientError as exc:
            check.patience.unanswered(exc)
        except (CorruptPayload, PermissionDenied, UnreadablePayload):
            check.unusable.add(stored.segment)
        self.found.stray_payloads += len(stored.sizes)
        self.found.stray_bytes += stored.nbytes

    # Entries

    def _entries(self) -> None:
        index = self.check.index
        self.check.progress.begin(f"compare the entries of {self.name}")
        bad = {finding.segment for finding in self.found.findings if finding.segment is not None}
        with Blocks() as entries:
            collect(index.entries(self.name), entries)
            differences = compare(entries, self.truth, bad)
            self.found.entries = len(entries)
        self.found.dangling = differences.elsewhere
        # The content of a segment's slots never changes: an entry that contradicts it is wrong at any time.
        astray = differences.astray
        if astray:
            detail = f"{len(astray)} entries lead to another block than theirs"
            self.found.findings.append(FoundFault(self.name, "astray", detail, entries=tuple(astray)))
        wrong = {entry.digest for entry in astray}
        for page in paged(differences.hidden.items()):
            visible = index.get(self.name, [segment for segment, _ in page])
            for (segment, digests), listing in zip(page, visible, strict=True):
                lost = b"" if listing is None else self._lost(segment, bytes(digests), wrong)
                if lost:
                    detail = f"no entry leads to {len(lost) // DIGEST_BYTES} of its blocks"
                    self.found.findings.append(FoundFault(self.name, "hidden", detail, segment, lost))

    def _lost(self, segment: SegmentId, digests: bytes, wrong: set[Digest]) -> bytes:
        """Returns the digests that still no entry leads to, or only a wrong one, where a match of the
        segment's chain would look."""
        found = self.check.index.find(self.name, digests, chain_like(segment))
        return b"".join(
            digest
            for digest, run in zip(split_digests(digests), found, strict=True)
            if run is None or digest in wrong
        )


def is_vanished(segments: int, bad: int) -> bool:
    """Whether so many of `segments` are bad that the wrong store is the likelier reason."""
    return segments > PAGE and bad * 2 > segments


def _usage(usage: Usage) -> str:
    return f"{usage.nbytes} bytes in {usage.segments} segments of {usage.blocks} blocks"
