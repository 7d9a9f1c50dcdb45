"""export: writes segments to one archive (schemas.archive), and verifies them on the way.

All that an archive holds has been verified: header, layout, every slot's checksum. A payload that fails is
left out with its segment, and reported. Only an archive that is finished gets its name (FILE.partial
until then, renamed when it is on the disk), so a file of that name is whole.

One payload is in memory at a time. The price: if a segment has several ranks and a later one turns out
damaged, the earlier ones have been written. A file is cut back to before them; a pipe can't be, and the
import then says which rank is missing.
"""

from __future__ import annotations

import fcntl
import io
import os
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Self

from kvstore import __version__
from kvstore.admin.archive.manifest import Prompts, document_of, signed
from kvstore.admin.archive.reports import ExportReport, PackReport
from kvstore.admin.archive.tar import TarWriter
from kvstore.admin.backends import Cache, Refused
from kvstore.admin.counting import AmountSum, LeftOut
from kvstore.admin.curate.plan import MovePlan, Planned
from kvstore.admin.patience import Patience
from kvstore.admin.progress import ProgressListener, Silent
from kvstore.admin.reports import Ended
from kvstore.errors import CorruptPayload, KVStoreError, TransientError, UnreadablePayload
from kvstore.files import open_file
from kvstore.index.maintenance import Listing
from kvstore.keys import payload_name
from kvstore.verify.payloads import are_there, read_part
from schemas.archive import MANIFEST, Manifest
from schemas.pack import Pack

#: Memory for a payload that is taken without a look at its size, in bytes: twice a segment's usual size.
_FREELY = 64 << 20


def export(
    cache: Cache,
    plan: MovePlan,
    to: Path | BinaryIO,
    *,
    overwrite: bool = False,
    dry_run: bool = False,
    progress: ProgressListener | None = None,
    clock: Callable[[], float] = time.time,
    pack: Pack | None = None,
) -> ExportReport:
    """Writes the planned segments to a file or into a pipe; with `pack` as a pack, whose manifest is signed
    if the cache has a key to sign with.

    Ctrl-C and a failing backend end it: the report says so, no file is left, and what went into a pipe has no
    end mark. So it is with a pack of which something was left out. Raises Refused if the file
    exists, CannotWrite and BrokenPipeError.
    """
    began = time.monotonic()
    if dry_run:
        return _Export(cache, plan, TarWriter(io.BytesIO()), Silent()).report(str(to), 0.0, dry_run=True)
    if not isinstance(to, Path):
        run = _Export(cache, plan, TarWriter(to), progress or Silent(), pack)
        run.all(int(clock()))
        return run.report("-", time.monotonic() - began)
    with ArchiveFile(to, overwrite=overwrite) as archive:
        run = _Export(cache, plan, TarWriter(archive.file), progress or Silent(), pack)
        run.all(int(clock()))
        if run.ended == "complete":
            archive.finish()
        return run.report(str(to), time.monotonic() - began)


@dataclass
class _Export:
    cache: Cache
    plan: MovePlan
    tar: TarWriter
    progress: ProgressListener
    pack: Pack | None = None
    said: PackReport | None = None
    done: AmountSum = field(default_factory=AmountSum)
    left: LeftOut = field(default_factory=LeftOut)
    ended: Ended = "complete"
    problem: str = ""
    _buffer: bytearray = field(default_factory=bytearray)

    def all(self, now_s: int) -> None:
        """Writes the manifest, every segment and the end mark."""
        try:
            self._all(now_s)
        except KeyboardInterrupt:
            self.ended, self.problem = "cancelled", "cancelled"
        except BrokenPipeError:
            raise
        except OSError as exc:
            self.ended, self.problem = "failed", f"can't write the archive: {exc.strerror or exc}"
        except KVStoreError as exc:
            self.ended, self.problem = "failed", str(exc)

    def report(self, to: str, seconds: float, *, dry_run: bool = False) -> ExportReport:
        """Returns what has been done."""
        return ExportReport(
            dry_run=dry_run,
            ended=self.ended,
            problem=self.problem,
            to=to,
            namespaces=tuple(self.plan.namespaces),
            planned=self.plan.amount,
            beyond=self.plan.beyond,
            exported=self.done.amount,
            archive_bytes=self.tar.nbytes,
            left_out=self.left.count,
            left=tuple(self.left.named),
            pack=self.said if self.ended == "complete" else None,
            seconds=seconds,
        )

    def _all(self, now_s: int) -> None:
        tar, plan = self.tar, self.plan
        manifest = Manifest(
            version=__version__,
            created_s=now_s,
            namespaces={str(name): text for name, text in plan.namespaces.items()},
            segments=len(plan.entries),
            payloads=plan.payloads,
            payload_bytes=plan.amount.stored_bytes,
            pack=self.pack,
        )
        manifest = signed(manifest, self.cache.keyring)
        prompts = Prompts.of(manifest)
        self.said = prompts.report().model_copy(update={"checked": True}) if prompts is not None else None
        text = document_of(manifest)
        tar.add(MANIFEST, [memoryview(text)], now_s)
        self.progress.begin("export", plan.amount.stored_bytes)
        patience = Patience()
        for entry, listing in plan.listings(self.cache):
            mark = tar.nbytes
            try:
                self._segment(entry, listing)
                patience.answered()
            except (CorruptPayload, UnreadablePayload) as exc:
                self._leave(entry, mark, exc)
            except TransientError as exc:
                self._leave(entry, mark, exc)
                patience.unanswered(exc)
        if self.pack is not None and self.left.count:
            self.ended, self.problem = "broken", "not all that the prompts need could be read: export again"
            self.done = AmountSum()
            return
        tar.end()

    def _segment(self, entry: Planned, listing: Listing | None) -> None:
        if listing is None:
            raise CorruptPayload("it was evicted meanwhile")
        record, payloads = listing.record, self.cache.payloads
        ranks = len(record.parts)
        # Looked at first where a later rank may be missing, and before much memory is taken on the index's
        # word.
        if (ranks > 1 or record.nbytes > _FREELY) and not are_there(
            payloads, entry.namespace, entry.segment, record.parts
        ):
            raise CorruptPayload("a rank's payload is missing, or has another size than the index says")
        for rank, part in enumerate(record.parts):
            view = self._room(part.nbytes)
            read_part(payloads, self.cache.keyring, entry.namespace, entry.segment, rank, record, view)
            name = payload_name(entry.namespace, entry.segment, rank)
            self.tar.add(name, [view], record.created_s)
            self.progress.advance(part.nbytes)
        self.done.add(record.slots, record.nbytes)

    def _leave(self, entry: Planned, mark: int, reason: KVStoreError) -> None:
        if self.tar.nbytes > mark:
            self.tar.go_back(mark)
        self.left.add(entry.namespace, entry.segment, reason)

    def _room(self, nbytes: int) -> memoryview:
        # One buffer for all payloads: a fresh one would cost more in page faults than the read itself.
        if len(self._buffer) < nbytes:
            self._buffer = bytearray(nbytes)
        return memoryview(self._buffer)[:nbytes]


class CannotWrite(KVStoreError):
    """The archive can't be written where it should be."""

    reason = "archive"


class ArchiveFile:
    """A file that gets its name when it is finished, and is removed otherwise.

    Only its owner may read it: KV blocks tell what prompts said. Raises Refused if `path` exists or another
    export is writing it, CannotWrite if it can't be made.
    """

    def __init__(self, path: Path, *, overwrite: bool) -> None:
        self._path, self._overwrite = path, overwrite
        self._partial = path.with_name(f"{path.name}.partial")
        self._finished = False
        self.check(path, overwrite=overwrite)
        try:
            self.file: BinaryIO = os.fdopen(open_file(self._partial, os.O_RDWR | os.O_CREAT), "w+b")
        except OSError as exc:
            raise CannotWrite(f"can't write {self._partial}: {exc.strerror}") from exc
        try:
            owner = os.fstat(self.file.fileno()).st_uid
            if owner != os.geteuid():
                raise CannotWrite(f"{self._partial} is user {owner}'s, who could read the archive: remove it")
            # On a file system without locks two exports to one name go unnoticed.
            with suppress(OSError):
                self._lock()
            # A killed export may have left something in it.
            self.file.truncate()
        except BaseException:
            self.file.close()
            raise

    @staticmethod
    def check(path: Path, *, overwrite: bool) -> None:
        """Raises Refused if the archive may not have this name."""
        with suppress(OSError):
            mode = path.lstat().st_mode
            if not stat.S_ISREG(mode):
                raise Refused(f"{path} is not a file; `--to -` writes into a pipe")
            if not overwrite:
                raise Refused(f"{path} exists; --force overwrites it")

    def finish(self) -> None:
        """Syncs the complete archive to the disk, then gives it its name. Raises Refused and CannotWrite."""
        self.check(self._path, overwrite=self._overwrite)
        try:
            self.file.flush()
            os.fsync(self.file.fileno())
            self._partial.rename(self._path)
        except OSError as exc:
            raise CannotWrite(f"can't write {self._path}: {exc.strerror}") from exc
        self._finished = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        # Removed while the lock is held: after that, a file of that name may be another export's.
        if not self._finished:
            with suppress(OSError):
                self._partial.unlink()
        with suppress(OSError):
            self.file.close()

    def _lock(self) -> None:
        try:
            fcntl.flock(self.file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Refused(f"another export is writing {self._partial}") from None
        # Between our open and our lock another export may have finished it; truncating it would destroy that.
        if not self._partial.exists() or not os.path.samestat(
            os.fstat(self.file.fileno()), self._partial.stat()
        ):
            raise Refused(f"another export has just written {self._path}")
