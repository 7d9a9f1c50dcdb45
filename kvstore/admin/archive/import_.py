"""import: commits the segments of an archive (schemas.archive) as a save commits them.

Nothing of a segment is visible before all of it is verified: names, headers, namespace, every slot's
checksum and, where there is a codec, that it decompresses. Order, per segment:
    1. verify     rank 0, in memory                          crash: nothing has happened
    2. claim      blocks that are stored already are left    crash: the claim expires
    3. put        rank 0; then verify and put each other     crash: unreferenced payloads, found by gc
    4. commit     every rank; the last makes it visible      crash: done, or as after 3
So an import that was cut short, for whatever reason, is continued by running it again: segments that are
there are skipped. They keep their ids, by which it knows them.

A damaged segment is refused and the import goes on. A damaged tar can't be read any further: the import ends.

An archive proves that its bytes are whole. Where they come from only signatures prove, which a keyring of
the importing side checks; without one anyone whose archive is imported puts any content under any prompt's
hash.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import BinaryIO, Literal

from kvstore.admin.archive.intake import Erased, Intake, NotLetIn, NotNow, Present
from kvstore.admin.archive.manifest import Prompts, check_signed, read_manifest
from kvstore.admin.archive.members import ArchivedPayload, PayloadReader
from kvstore.admin.archive.reports import ImportReport, PackReport
from kvstore.admin.archive.tar import BadArchive, read_members
from kvstore.admin.archive.wanted import UnknownNamespace, Wanted, check_fits, check_slots_fit
from kvstore.admin.backends import Cache, Refused
from kvstore.admin.counting import AmountSum, LeftOut
from kvstore.admin.progress import ProgressListener, Silent
from kvstore.admin.reports import Ended
from kvstore.errors import ConfigError, CorruptPayload, KVStoreError, UnreadablePayload, UnsignedPayload
from kvstore.format.keyring import NO_KEYS, Keyring
from kvstore.format.segment import Header
from kvstore.keys import NamespaceId, SegmentId, split_digests
from kvstore.store.store import Store
from kvstore.verify.headers import check_same_segment, digests_of, namespace_of, record_of
from kvstore.verify.segments import Whole
from schemas.namespace import Namespace
from schemas.settings import Settings


def import_archive(
    stream: BinaryIO,
    into: Cache | Store | None,
    *,
    source: str,
    wanted: Wanted,
    settings: Settings | None = None,
    keyring: Keyring = NO_KEYS,
    total_bytes: int | None = None,
    progress: ProgressListener | None = None,
) -> ImportReport:
    """Reads an archive to its end and commits the segments of it that are `wanted`.

    With `into` None it only verifies them, by `settings` and the keys of `keyring`; a cache and a store have
    their own. Only once a cache lets the archive's prompts in, if it has any, is the import recorded there.

    Ctrl-C, a broken archive and a failing backend end it, and the report says so; what was imported until
    then stays. Raises Refused for prompts that the cache's engines would load nothing of, and as
    `check_signed`; then nothing was changed.
    """
    if isinstance(into, Cache):
        settings, keyring = into.settings, into.keyring
    elif into is not None:
        settings, keyring = into.settings, into.backends.keyring
    run = _Import(into, PayloadReader(keyring), progress or Silent(), wanted, settings)
    began = time.monotonic()
    try:
        run.all(stream, source, keyring, total_bytes)
    except KeyboardInterrupt:
        run.ended, run.problem = "cancelled", "cancelled"
    except BadArchive as exc:
        run.ended, run.problem = "broken", str(exc)
    except OSError as exc:
        run.ended, run.problem = "failed", f"can't read the archive: {exc.strerror or exc}"
    except (CorruptPayload, UnreadablePayload, Refused, ConfigError):
        # The import changed nothing yet: the first two leave a segment out, so they are about the manifest.
        raise
    except KVStoreError as exc:
        run.ended, run.problem = "failed", str(exc)
    return ImportReport(
        dry_run=into is None,
        ended=run.ended,
        problem=run.problem,
        source=source,
        namespaces=tuple(run.namespaces),
        announced_segments=run.announced,
        found_segments=run.found,
        verified=run.verified.amount,
        imported=run.imported.amount,
        present=run.present.amount,
        unwanted=run.unwanted,
        left_out=run.left.count,
        left=tuple(run.left.named),
        unsigned=run.unsigned,
        unreadable=run.unreadable,
        erased=run.erased,
        later=run.later,
        pack=run.pack,
        seconds=time.monotonic() - began,
    )


@dataclass(slots=True)
class _Segment:
    """The segment whose payloads are being read."""

    namespace: NamespaceId
    segment: SegmentId
    #: Headers of the ranks that are verified and, unless it's a dry run, put.
    headers: list[Header] = field(default_factory=list)
    #: `whole`: all of its ranks are verified. `left`: its remaining payloads are skipped.
    state: Literal["open", "whole", "left"] = "open"


class _Unwanted(Exception):
    """This segment's namespace wasn't asked for."""


@dataclass
class _Import:
    #: None: a dry run.
    into: Cache | Store | None
    reader: PayloadReader
    progress: ProgressListener
    wanted: Wanted
    settings: Settings | None
    intake: Intake | None = None
    pack: PackReport | None = None
    verified: AmountSum = field(default_factory=AmountSum)
    imported: AmountSum = field(default_factory=AmountSum)
    present: AmountSum = field(default_factory=AmountSum)
    left: LeftOut = field(default_factory=LeftOut)
    announced: int = 0
    #: Segments of namespaces that weren't asked for.
    unwanted: int = 0
    #: Namespaces that a segment was seen of, in the order of the archive.
    namespaces: dict[NamespaceId, None] = field(default_factory=dict)
    unsigned: int = 0
    unreadable: int = 0
    erased: int = 0
    later: int = 0
    ended: Ended = "complete"
    problem: str = ""
    _open: _Segment = field(default_factory=lambda: _Segment(NamespaceId(""), SegmentId(b""), state="left"))
    _seen: set[tuple[NamespaceId, SegmentId]] = field(default_factory=set)
    #: Digests of a pack's blocks that are whole, where no store can be asked for them.
    _held: set[bytes] = field(default_factory=set)

    @property
    def found(self) -> int:
        """The number of segments of which the archive has at least one payload."""
        return len(self._seen)

    def all(self, stream: BinaryIO, source: str, keyring: Keyring, total_bytes: int | None) -> None:
        """Reads every segment of the archive."""
        self.progress.begin("import" if self.into else "verify", total_bytes)
        members = read_members(stream)
        manifest, nbytes = read_manifest(members)
        self.announced = manifest.segments
        prompts = Prompts.of(manifest)
        if prompts is not None:
            check_signed(manifest, keyring)
            self._admit(prompts, keyring)
        self._open_store(source if prompts is None else f"{source}, namespace {prompts.name}")
        self.progress.advance(nbytes)
        try:
            for member in members:
                self.progress.advance(member.size)
                self._payload(ArchivedPayload.of(member))
        except BadArchive:
            self._abandon()
            raise
        self._abandon()
        if prompts is not None:
            self._count(prompts)

    def _admit(self, prompts: Prompts, keyring: Keyring) -> None:
        """Lets in the namespace of a pack, and no other. Raises Refused."""
        known = self.into.namespaces() if isinstance(self.into, Cache) else {}
        found = check_fits(prompts, self.wanted, known)
        self.wanted = Wanted((prompts.name,))
        self.pack = prompts.report().model_copy(
            update={"differences": tuple(found), "whole": False, "checked": bool(keyring.ids)}
        )

    def _open_store(self, what: str) -> None:
        store = self.into
        if isinstance(store, Cache):
            store.record("import", what)
            store = store.saving()
        self.intake = Intake(store) if store else None

    def _count(self, prompts: Prompts) -> None:
        """Adds to a pack's report what an engine would load of it, and whether that is all."""
        assert self.pack is not None, "a pack is admitted before it is read"
        asked, space = prompts.stored(), prompts.space
        loadable = [
            one.loadable(space, [self._there(prompts.name, each) for each in one.digests(space)])
            for one in asked
        ]
        there = self.verified.segments + self.present.segments
        lines = zip(self.pack.prompts, loadable, strict=True)
        self.pack = self.pack.model_copy(
            update={
                "prompts": tuple(line.model_copy(update={"loadable": count}) for line, count in lines),
                "whole": not self.unwanted
                and there == self.found == self.announced
                and loadable == [one.most(space) for one in asked],
            }
        )

    def _there(self, name: NamespaceId, digests: bytes) -> list[bool]:
        if self.intake is not None:
            return self.intake.holds(name, digests)
        return [digest in self._held for digest in split_digests(digests)]

    def _payload(self, part: ArchivedPayload) -> None:
        """Takes the next payload: another rank of the open segment, or the first of the next one."""
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
                    # Committed at once: what comes next in the archive may not be readable.
                    self._whole(self._open)
            except Present as stored:
                self._open.state = "left"
                self.present.add(stored.slots, stored.nbytes)
            except _Unwanted:
                self._open.state = "left"
                self.unwanted += 1
            except (CorruptPayload, UnreadablePayload, UnknownNamespace, NotLetIn) as exc:
                self.unsigned += isinstance(exc, UnsignedPayload)
                self.unreadable += isinstance(exc, UnreadablePayload)
                self.erased += isinstance(exc, Erased)
                self.later += isinstance(exc, NotNow)
                self._leave(exc)

    def _part(self, part: ArchivedPayload, headers: list[Header]) -> None:
        """Verifies one rank's payload, puts it, and adds its header to those of the ranks before it."""
        if self.intake is not None and not headers:
            self.intake.check_absent(part.namespace, part.segment)
        if part.rank != len(headers):
            raise CorruptPayload(f"rank {part.rank} stands where rank {len(headers)} belongs")
        header, head = self.reader.header(part)
        namespace = namespace_of(header)
        self._check_wanted(part.namespace, namespace)
        check_slots_fit(header, namespace, self.settings)
        slots = self.reader.slots(part, header)
        if headers:
            check_same_segment(headers[0], header)
        record = record_of([header])
        if self.intake is not None:
            if not headers:
                self.intake.begin(part.segment, header, record)
            self.intake.put(part.namespace, part.segment, part.rank, [head, slots])
        headers.append(header)

    def _check_wanted(self, name: NamespaceId, namespace: Namespace) -> None:
        if not self.wanted.names(name, namespace):
            raise _Unwanted
        if self.intake is not None:
            self.wanted.check_known(name, namespace, self.intake.known)

    def _whole(self, segment: _Segment) -> None:
        whole = Whole.of(segment.headers)
        record = whole.record
        segment.state = "whole"
        self.verified.add(record.slots, record.nbytes)
        if self.intake is not None:
            self.intake.commit(segment.namespace, segment.segment, whole)
            self.imported.add(record.slots, record.nbytes)
        elif self.pack is not None:
            self._held.update(split_digests(digests_of(segment.headers[0])))

    def _abandon(self) -> None:
        """Leaves the open segment out if it is incomplete: no more of it will come."""
        if self._open.state == "open":
            self._leave(f"rank {len(self._open.headers)} is not in the archive, or not whole")

    def _leave(self, reason: object) -> None:
        """Refuses the open segment, and deletes the payloads of it that were put.

        No other process needs those: every import of this archive fails at the same place. After any other
        failure payloads stay, because another import of the same segment may have committed them.
        """
        segment, committing = self._open, self._open.state == "whole"
        segment.state = "left"
        self.left.add(segment.namespace, segment.segment, reason)
        # What is erased nobody else may have committed either.
        committing = committing and not isinstance(reason, Erased)
        if self.intake is not None and segment.headers and not committing:
            self.intake.give_up(segment.namespace, segment.segment, len(segment.headers))
