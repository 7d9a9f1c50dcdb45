"""What fsck looks at: everything that the index names, held against the payloads. Changes nothing.

Every fault is looked at twice, the second time with fresh answers of both sides: what engines save, evict and
delete meanwhile makes none.
"""

from __future__ import annotations

import random
import threading
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

from kvstore.admin.entries import Blocks, collect, compare
from kvstore.admin.parallel import for_each
from kvstore.admin.plans import Tally
from kvstore.admin.progress import Progress
from kvstore.admin.recommit import AnyIndex, Incomplete, Patience, Whole, read_whole, verify
from kvstore.admin.stock import Stock, Stored, look_up
from kvstore.catalogue import Entry, Listing, Usage
from kvstore.errors import CorruptPayload, PermissionDenied, TransientError
from kvstore.keys import DIGEST_BYTES, Digest, NamespaceId, SegmentId, split_digests
from kvstore.ports import PayloadStore
from schemas.records import SegmentRecord
from schemas.repairs import FaultKind
from schemas.settings import Settings

_T = TypeVar("_T")

#: Segments, or entries, asked for in one call.
_PAGE = 256
#: A payload younger than this may be about to be committed by its writer.
SETTLED_S = 600.0
#: With write-back, what is missing for longer than this after its save is lost.
_LATE_S = 600.0


Key = tuple[NamespaceId, FaultKind, SegmentId | None]


@dataclass(frozen=True, slots=True)
class Finding:
    """A fault, with what mending it needs."""

    namespace: NamespaceId
    kind: FaultKind
    detail: str
    segment: SegmentId | None = None
    #: `hidden`: packed digests that no entry leads to.
    digests: bytes = b""
    #: `astray`: the entries.
    entries: tuple[Entry, ...] = ()
    #: Whether every byte of the segment was to be read.
    read: bool = False

    @property
    def key(self) -> Key:
        """What tells it from others, whatever its details."""
        return self.namespace, self.kind, self.segment

    @property
    def blocks(self) -> int:
        """Entries or blocks that it is about."""
        return len(self.entries) + len(self.digests) // DIGEST_BYTES


@dataclass
class Checked:
    """What a check of one namespace found."""

    checked: Tally = field(default_factory=Tally)
    verified: Tally = field(default_factory=Tally)
    findings: list[Finding] = field(default_factory=list)
    entries: int = 0
    dangling: int = 0
    leftover_payloads: int = 0
    leftover_bytes: int = 0

    @property
    def bad_segments(self) -> int:
        """Visible segments that have lost a payload or hold a damaged one."""
        return sum(finding.kind in ("missing", "damaged") for finding in self.findings)


@dataclass(frozen=True, slots=True)
class Depth:
    """How closely to look."""

    #: Sizes alone.
    quick: bool = False
    #: Of all segments, those whose every byte is read.
    percent: float = 0.0
    jobs: int = 8
    #: A payload that the index does not know is taken for a segment's only when it is so old.
    settled_s: float = SETTLED_S


class Bad(Exception):
    """A segment that is not as it should be."""

    def __init__(self, kind: FaultKind, detail: str) -> None:
        super().__init__(detail)
        self.kind: FaultKind = kind


def examine(
    payloads: PayloadStore,
    namespace: NamespaceId,
    listing: Listing,
    stored: Stored,
    *,
    quick: bool = False,
    read: bool = False,
) -> Whole | None:
    """Hold one visible segment against its payloads; None if `quick`. `read`: every byte of them.

    Raises Bad and TransientError.
    """
    record, segment = listing.record, listing.segment
    try:
        if quick:
            _sizes(record, stored)
            return None
        whole = read_whole(payloads, namespace, segment, stored.sizes)
        if read:
            verify(payloads, namespace, segment, whole)
        if whole.record != record:
            raise Bad("record", _difference(record, whole.record))
        return whole
    except Incomplete as exc:
        raise Bad("missing", str(exc)) from exc
    except CorruptPayload as exc:
        raise Bad("damaged", str(exc)) from exc
    except PermissionDenied as exc:
        raise Bad("unreadable", str(exc)) from exc


def _sizes(record: SegmentRecord, stored: Stored) -> None:
    for rank, part in enumerate(record.parts):
        if rank not in stored.sizes:
            raise Incomplete(f"the payload of rank {rank} is missing")
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
    if len(recorded.parts) != len(true.parts):
        told.append(f"{len(recorded.parts)} ranks by the index, {len(true.parts)} by the header")
    elif recorded.parts != true.parts:
        told.append("another layout by the index than by the header")
    return "; ".join(told)


@dataclass
class Check:
    """Of one namespace after the other. `lock` guards what the workers of one share."""

    index: AnyIndex
    payloads: PayloadStore
    settings: Settings
    depth: Depth
    progress: Progress
    clock: Callable[[], float]
    draw: random.Random = field(default_factory=random.Random)
    #: Segments that nobody names and that were found to be unusable, by this check or one before it, which
    #: may have read more of them.
    unusable: set[SegmentId] = field(default_factory=set)
    patience: Patience = field(default_factory=Patience)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def namespace(self, name: NamespaceId, stock: Stock, found: Checked) -> None:
        """Check one, and note in `found` what there is. Raises TransientError when a store does not answer,
        and what the index raises."""
        _Run(self, name, stock, found).all()

    def late(self, record: SegmentRecord) -> bool:
        """Whether a payload that isn't there may be on a node that has not uploaded it yet."""
        tiers = self.settings.tiers
        return tiers is not None and tiers.write == "back" and abs(self.clock() - record.created_s) < _LATE_S

    def again(self, name: NamespaceId, bad: Bad, listing: Listing, *, read: bool) -> Finding | Whole | None:
        """A second look with fresh answers; None if there is nothing to be said of it any more."""
        fresh = self.index.get(name, [listing.segment])[0]
        if fresh is None or (bad.kind == "missing" and self.late(fresh.record)):
            return None
        stored = look_up(self.payloads, name, listing.segment)
        try:
            return examine(self.payloads, name, fresh, stored, quick=self.depth.quick, read=read)
        except Bad as exc:
            if self.index.get(name, [listing.segment])[0] is None:
                return None
            return Finding(name, exc.kind, str(exc), listing.segment, read=read)


@dataclass
class _Run:
    """One namespace. The check's lock guards `found` and `truth` while workers run."""

    check: Check
    name: NamespaceId
    stock: Stock
    found: Checked
    truth: Blocks = field(default_factory=Blocks)
    _seen: array[int] = field(default_factory=lambda: array("Q"))
    _pinned: int = 0
    _cost: int = 0
    #: So much is missing that a second look at each would take hours and say the same.
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
        self.found.findings.append(Finding(self.name, kind, detail))

    def _listed(self) -> Iterator[tuple[Listing, bool]]:
        # Drawn from by one worker at a time.
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
        finding: Finding | None = None
        whole: Whole | None = None
        try:
            try:
                stored = self.stock.of(listing.segment)
                whole = examine(check.payloads, self.name, listing, stored, quick=depth.quick, read=read)
            except Bad as bad:
                if self._vanished and bad.kind == "missing":
                    finding = Finding(self.name, "missing", str(bad), listing.segment)
                else:
                    second = check.again(self.name, bad, listing, read=read)
                    whole = second if isinstance(second, Whole) else None
                    finding = second if isinstance(second, Finding) else None
            check.patience.answered()
        except TransientError as exc:
            check.patience.unanswered(exc)
            finding = Finding(self.name, "unreadable", str(exc), listing.segment)
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
        for page in paged(self.stock.besides(self._seen)):
            states = self.check.index.states(self.name, [stored.segment for stored in page])
            for stored, state in zip(page, states, strict=True):
                if state is None:
                    self._unlisted(stored)
                elif state == "visible" and self.check.index.get(self.name, [stored.segment])[0] is None:
                    # Committed a moment ago it would be there: it is there, and can't be read.
                    self.found.findings.append(
                        Finding(
                            self.name,
                            "record",
                            "the index holds it, and can't list it",
                            stored.segment,
                            read=self._drawn(),
                        )
                    )

    def _unlisted(self, stored: Stored) -> None:
        check = self.check
        settled = check.clock() - stored.modified_s >= check.depth.settled_s
        if not settled:
            return
        try:
            if not check.depth.quick and stored.segment not in check.unusable:
                fresh = look_up(check.payloads, self.name, stored.segment)
                whole = read_whole(check.payloads, self.name, stored.segment, fresh.sizes)
                if read := self._drawn():
                    verify(check.payloads, self.name, stored.segment, whole)
                if check.index.states(self.name, [stored.segment])[0] is None:
                    detail = f"{whole.record.slots} blocks, {whole.record.nbytes} bytes"
                    self.found.findings.append(
                        Finding(self.name, "unlisted", detail, stored.segment, read=read)
                    )
                check.patience.answered()
                return
        except TransientError as exc:
            check.patience.unanswered(exc)
        except (CorruptPayload, PermissionDenied):
            check.unusable.add(stored.segment)
        self.found.leftover_payloads += len(stored.sizes)
        self.found.leftover_bytes += stored.nbytes

    # Entries

    def _entries(self) -> None:
        index = self.check.index
        self.check.progress.begin(f"compare the entries of {self.name}")
        entries = collect(index.entries(self.name))
        bad = {finding.segment for finding in self.found.findings if finding.segment is not None}
        differences = compare(entries, self.truth, bad)
        self.found.entries = len(entries)
        self.found.dangling = differences.elsewhere
        # What a segment's slots hold never changes: an entry that says otherwise is wrong at any time.
        astray = differences.astray
        if astray:
            detail = f"{len(astray)} entries lead to another block than theirs"
            self.found.findings.append(Finding(self.name, "astray", detail, entries=tuple(astray)))
        wrong = {entry.digest for entry in astray}
        for page in paged(differences.hidden.items()):
            visible = index.get(self.name, [segment for segment, _ in page])
            for (segment, digests), listing in zip(page, visible, strict=True):
                lost = b"" if listing is None else self._lost(digests, wrong)
                if lost:
                    detail = f"no entry leads to {len(lost) // DIGEST_BYTES} of its blocks"
                    self.found.findings.append(Finding(self.name, "hidden", detail, segment, lost))

    def _lost(self, digests: bytes, wrong: set[Digest]) -> bytes:
        """Those that still nothing leads to but an entry that is wrong."""
        found = self.check.index.find(self.name, digests)
        return b"".join(
            digest
            for digest, run in zip(split_digests(digests), found, strict=True)
            if run is None or digest in wrong
        )


def is_vanished(segments: int, bad: int) -> bool:
    """Whether so many of so many segments are bad that the wrong store is the likelier reason."""
    return segments > _PAGE and bad * 2 > segments


def _usage(usage: Usage) -> str:
    return f"{usage.nbytes} bytes in {usage.segments} segments of {usage.blocks} blocks"


def paged(things: Iterable[_T]) -> Iterator[list[_T]]:
    """In pages that one call may carry."""
    rest = iter(things)
    while page := list(islice(rest, _PAGE)):
        yield page
