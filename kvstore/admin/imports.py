"""import: the segments of an archive (schemas.archive), committed as a save commits them.

Nothing of a segment is visible before all of it is verified: names, headers, namespace, every slot's
checksum and, where there is a codec, that it decompresses. Order, per segment:
    1. verify     rank 0, in memory                          crash: nothing has happened
    2. claim      blocks that are stored already are left    crash: the claim expires
    3. put        rank 0; then verify and put each other     crash: unreferenced payloads, found by gc
    4. commit     every rank; with the last one it is seen   crash: done, or as after 3
So an import that was cut short, for whatever reason, is continued by running it again: what is there is
skipped. Segments keep their ids, which is how it knows them.

A damaged segment is refused and the rest goes on. A damaged tar can't be read on: the import ends there.

An archive proves that its bytes are whole, not where they come from: who may import may put any content
under any prompt's hash.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import BinaryIO, Literal, TypeVar

from pydantic import ValidationError

from kvstore import codec
from kvstore.admin.payloads import are_there, check_name, check_slots
from kvstore.admin.plans import LeftOut, Tally
from kvstore.admin.progress import Progress, Silent
from kvstore.admin.records import check_same_segment, digests_of, namespace_of, record_of
from kvstore.admin.tarball import BadArchive, Member, read_members
from kvstore.codec import Header
from kvstore.errors import CorruptPayload, KVStoreError, NamespaceUnknown
from kvstore.keys import NamespaceId, SegmentId, namespace_id_of_json, parse_payload_name, payload_name
from kvstore.ports import CommitState
from kvstore.store import Space, Store
from schemas.archive import MANIFEST, Manifest
from schemas.transfers import Ended, ImportReport

_T = TypeVar("_T")

_MAX_MANIFEST = 64 << 20
#: Settings allow segments of 1 GiB; one block may be on top of that.
_MAX_PAYLOAD = 4 << 30
#: Items differ in size; this is what the EC connector registers its namespaces with.
_ITEM_BYTES = 1 << 20
#: Of the capacity: importing more would evict what has just been imported.
_FILL_TO = 0.9


def import_archive(
    stream: BinaryIO,
    store: Store | None,
    *,
    source: str,
    total_bytes: int | None = None,
    progress: Progress | None = None,
) -> ImportReport:
    """Read an archive to its end; store None: verify it and change nothing.

    Ctrl-C, a broken archive and a failing backend end it, and the report says so; what was imported until
    then stays.
    """
    run = _Import(store, progress or Silent())
    began = time.monotonic()
    try:
        run.all(stream, total_bytes)
    except KeyboardInterrupt:
        run.ended, run.problem = "cancelled", "cancelled"
    except BadArchive as exc:
        run.ended, run.problem = "broken", str(exc)
    except OSError as exc:
        run.ended, run.problem = "failed", f"can't read the archive: {exc.strerror or exc}"
    except KVStoreError as exc:
        run.ended, run.problem = "failed", str(exc)
    return ImportReport(
        dry_run=store is None,
        ended=run.ended,
        problem=run.problem,
        source=source,
        namespaces=tuple(run.namespaces),
        announced_segments=run.announced,
        found_segments=run.found,
        verified=run.verified.amount,
        imported=run.imported.amount,
        present=run.present.amount,
        left_out=run.left.count,
        left=tuple(run.left.named),
        seconds=time.monotonic() - began,
    )


@dataclass(frozen=True, slots=True)
class _Payload:
    """One member that is a payload, by its name."""

    namespace: NamespaceId
    segment: SegmentId
    rank: int
    member: Member


@dataclass(slots=True)
class _Segment:
    """The segment that the archive is at."""

    namespace: NamespaceId
    segment: SegmentId
    #: Of the ranks that are verified and, unless it's a dry run, put.
    headers: list[Header] = field(default_factory=list)
    #: `whole`: all of its ranks are. `left`: what else there is of it is passed over.
    state: Literal["open", "whole", "left"] = "open"


class _Skip(Exception):
    """The rest of this segment isn't needed."""


class _Refused(Exception):
    """This segment can't be imported now; the message says why."""


@dataclass
class _Import:
    store: Store | None
    progress: Progress
    verified: Tally = field(default_factory=Tally)
    imported: Tally = field(default_factory=Tally)
    present: Tally = field(default_factory=Tally)
    left: LeftOut = field(default_factory=LeftOut)
    announced: int = 0
    #: Those that a segment was seen of, in the order of the archive.
    namespaces: dict[NamespaceId, None] = field(default_factory=dict)
    ended: Ended = "complete"
    problem: str = ""
    _open: _Segment = field(default_factory=lambda: _Segment(NamespaceId(""), SegmentId(b""), state="left"))
    _seen: set[tuple[NamespaceId, SegmentId]] = field(default_factory=set)
    _spaces: dict[NamespaceId, Space] = field(default_factory=dict)
    _filled: int = 0
    _buffer: bytearray = field(default_factory=bytearray)

    @property
    def found(self) -> int:
        """Segments of which anything is in the archive."""
        return len(self._seen)

    def all(self, stream: BinaryIO, total_bytes: int | None) -> None:
        """Every segment of the archive."""
        self.progress.begin("import" if self.store else "verify", total_bytes)
        members = read_members(stream)
        first = next(members, None)
        if first is None or first.name != MANIFEST:
            raise BadArchive(f"no export of kvstore: its first member is not {MANIFEST}")
        self.announced = _manifest(first).segments
        self.progress.advance(first.size)
        try:
            for member in members:
                self._payload(self._named(member))
        except BadArchive:
            self._abandon()
            raise
        self._abandon()

    def _named(self, member: Member) -> _Payload:
        self.progress.advance(member.size)
        name = parse_payload_name(member.name)
        if name is None:
            raise BadArchive(f"member {member.name!r} is not a payload, and nothing else is in an export")
        if member.size > _MAX_PAYLOAD:
            raise BadArchive(f"member {member.name!r} is larger than any payload")
        return _Payload(*name, member)

    def _payload(self, part: _Payload) -> None:
        """The next payload: another rank of the segment that is open, or the first of the next one."""
        if (part.namespace, part.segment) != (self._open.namespace, self._open.segment):
            self._abandon()
            if (part.namespace, part.segment) in self._seen:
                raise BadArchive(f"segment {part.segment.hex()} is in the archive twice")
            self._seen.add((part.namespace, part.segment))
            self.namespaces.setdefault(part.namespace)
            self._open = _Segment(part.namespace, part.segment)
        if self._open.state == "whole":
            raise BadArchive(f"member {part.member.name!r} is one more than its segment has")
        if self._open.state == "open":
            try:
                self._part(part, self._open.headers)
                if len(self._open.headers) == self._open.headers[0].meta.ranks:
                    # At once: what comes next in the archive may not be readable.
                    self._whole(self._open)
            except _Skip:
                self._open.state = "left"
            except (CorruptPayload, _Refused) as exc:
                self._leave(exc)

    def _whole(self, segment: _Segment) -> None:
        record = record_of(segment.headers)
        segment.state = "whole"
        self.verified.add(record.slots, record.nbytes)
        if self.store is not None:
            self._commit(self.store, segment.namespace, segment.segment, segment.headers)
            self.imported.add(record.slots, record.nbytes)

    def _abandon(self) -> None:
        """No more of the segment that is open will come."""
        if self._open.state == "open":
            self._leave(f"rank {len(self._open.headers)} is not in the archive, or not whole")

    def _leave(self, reason: object) -> None:
        """Refuse the segment that is open, and delete what was put of it.

        Nobody else needs that: whoever imports this archive fails at the same place. After any other
        failure payloads stay, because another import of the same segment may have committed them.
        """
        segment, committing = self._open, self._open.state == "whole"
        segment.state = "left"
        self.left.add(segment.namespace, segment.segment, reason)
        if self.store is None or committing or not segment.headers:
            return
        if self.store.catalogue.get(segment.namespace, [segment.segment])[0] is None:
            ranks = range(len(segment.headers))
            self.store.payloads.delete([payload_name(segment.namespace, segment.segment, r) for r in ranks])

    def _part(self, part: _Payload, headers: list[Header]) -> None:
        """Verify one rank's payload, put it, and add its header to those of the ranks before it."""
        if not headers:
            self._skip_if_visible(part.namespace, part.segment)
        if part.rank != len(headers):
            raise CorruptPayload(f"rank {part.rank} stands where rank {len(headers)} belongs")
        header, buffers = self._verified(part)
        if headers:
            check_same_segment(headers[0], header)
        record_of([header])
        if self.store is not None:
            if not headers:
                self._claim(self.store, part, header)
            name = payload_name(part.namespace, part.segment, part.rank)
            self.store.payloads.put(name, buffers)
        headers.append(header)

    def _verified(self, part: _Payload) -> tuple[Header, Sequence[memoryview]]:
        member = part.member
        start = memoryview(bytearray(min(8, member.size)))
        member.read_into(start)
        length = codec.header_length(start)
        if length > member.size:
            raise CorruptPayload(f"a header of {length} bytes in a payload of {member.size}")
        head = memoryview(bytearray(length))
        head[:8] = start
        member.read_into(head[8:])
        header = codec.parse_header(head, namespace=part.namespace)
        check_name(header, part.namespace, part.segment, part.rank)
        if header.part.nbytes != member.size:
            raise CorruptPayload(f"{member.size} bytes, but {header.part.nbytes} by its header")
        namespace_of(header)
        data = self._room(member.size - length)
        member.read_into(data)
        check_slots(header, data, decompress=True)
        return header, [head, data]

    def _room(self, nbytes: int) -> memoryview:
        # One buffer for all payloads: a fresh one would cost more in page faults than the read itself.
        if len(self._buffer) < nbytes:
            self._buffer = bytearray(nbytes)
        return memoryview(self._buffer)[:nbytes]

    def _skip_if_visible(self, namespace: NamespaceId, segment: SegmentId) -> None:
        if self.store is None:
            return
        listing = self.store.catalogue.get(namespace, [segment])[0]
        if listing is not None:
            self.present.add(listing.record.slots, listing.record.nbytes)
            raise _Skip

    def _claim(self, store: Store, part: _Payload, header: Header) -> None:
        """Whether it is needed and fits. Raises _Skip if all of its blocks are stored already."""
        record = record_of([header])
        nbytes = record.nbytes * header.meta.ranks
        if self._filled + nbytes > store.settings.capacity_bytes * _FILL_TO:
            raise _Refused(
                f"no room: {self._filled} bytes are imported and capacity_bytes is "
                f"{store.settings.capacity_bytes}"
            )
        space = self._space(store, header)
        digests, ttl = digests_of(header), store.settings.claim_ttl_s
        claim = _known(space, partial(store.index.claim, space.id, digests, part.segment, ttl))
        if claim.present == record.slots:
            self.present.add(record.slots, nbytes)
            raise _Skip
        if not claim.granted:
            raise _Refused("an engine is saving these blocks just now; import again for what is left")

    def _space(self, store: Store, header: Header) -> Space:
        """The namespace, opened and registered once."""
        name = NamespaceId(header.meta.namespace_id)
        if name not in self._spaces:
            slots = header.meta.slots
            block = sum(slot.raw_bytes for slot in slots) * header.meta.ranks // len(slots)
            space = store.open(
                namespace_of(header), block_bytes=block if header.meta.kind == "kv" else _ITEM_BYTES
            )
            space.register()
            self._spaces[name] = space
        return self._spaces[name]

    def _commit(
        self, store: Store, namespace: NamespaceId, segment: SegmentId, headers: Sequence[Header]
    ) -> None:
        space, digests = self._spaces[namespace], digests_of(headers[0])
        for rank, header in enumerate(headers):
            commit = partial(store.index.commit, namespace, segment, digests, record_of([header]), rank=rank)
            state = _known(space, partial(commit, ranks=len(headers)))
            if state is CommitState.REFUSED:
                # Its payloads are the trash's to delete, or another import's.
                raise _Refused(
                    "it was evicted here a short time ago, or is stored differently; import again after "
                    f"{store.settings.grace_s:g} s (grace_s)"
                )
        record = record_of(headers)
        if not are_there(store.payloads, namespace, segment, record.parts):
            # It was in the trash, and its payload was deleted between our put and our commit.
            after = store.clock() + store.settings.grace_s
            store.index.evict(namespace, [segment], delete_after_s=after, rule="repair")
            raise _Refused("its old copy was deleted at the same moment; import again")
        # By its age it would be the first to be evicted.
        store.index.touch(namespace, [segment], store.clock())
        self._filled += record.nbytes
        store.committed(record.nbytes)


def _known(space: Space, call: Callable[[], _T]) -> _T:
    """Run an index call; if the index has lost the namespace, register it and run it again."""
    try:
        return call()
    except NamespaceUnknown:
        space.register()
        return call()


def _manifest(member: Member) -> Manifest:
    if member.size > _MAX_MANIFEST:
        raise BadArchive(f"{MANIFEST} is larger than any manifest")
    text = memoryview(bytearray(member.size))
    member.read_into(text)
    try:
        manifest = Manifest.model_validate_json(bytes(text))
    except ValidationError as exc:
        raise BadArchive(f"{MANIFEST} is not one that this version reads") from exc
    for name, namespace in manifest.namespaces.items():
        if not namespace.isascii() or namespace_id_of_json(namespace) != name:
            raise BadArchive(f"{MANIFEST}: namespace {name} is not the one that it describes")
    return manifest
