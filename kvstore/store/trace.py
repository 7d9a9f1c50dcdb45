"""A record of which blocks requests ask for, for `cache-admin advise` (settings: `trace`).

One file per process at a time, JSON lines:

    {"kvstore_trace": 1, "began_s": 1790000000.123}
    {"space": 0, "namespace": "8a7...", "kind": "kv", "block_tokens": 16, "block_bytes": 65536, "parts": 1,
     "model": "org/model", "tenant": "default", "gpus": 8}                                  (on one line)
    {"t": 0.52, "n": 0, "d": "<base64>"}
    {"t": 1.07, "n": 0, "like": [2, 96], "d": "<base64>", "session": "<base64>"}
    {"t": 1.9, "n": 0, "session": "<base64>", "end": true, "retain": 300.0, "priority": "low"}
    {"t": 2.4, "n": 0, "d": "<base64>", "local": 7}
    {"t": 2.4, "n": 0, "token_us": 81.2, "depth_us": 0.0014}

A `space` line describes a namespace's blocks; `block_bytes` is the size of one on all ranks together, which
store it in `parts`; `gpus` is how many an engine has, where it is known. A request is a line with `t`,
seconds since `began_s`, and `n`, the number of its space. Its chain of blocks, from the first one on, is `d`,
8 bytes of each digest: the last eight, because the first ones don't tell the groups of a hybrid model apart.
With `like` [line, blocks] the chain begins with the first `blocks` blocks of the request on that line of this
file, counted from 0. `d` then has the blocks behind them. Prompts share long prefixes, so this makes a trace
of chats a fraction as long.

`session` is 8 bytes of a session's id, the last ones, because sessions of one salt share the first. A line
with a session and no blocks has the hints on it in that namespace at that moment, at least one of: `end`,
`retain` (seconds from then on), `priority`.

`local` is how many of the chain's leading blocks the engine had itself when it came to the request. It is
left out if that is unknown. A line with `token_us` has the engine's recent cost of computing a token of a
prompt, in microseconds: `token_us` for the first token, and `depth_us` more for each token before it. Readers
that don't know such a line skip it.

A file is complete by itself: when it holds half of `trace.most_bytes` another is begun, and the one before it
is deleted. A disk that fails ends a file early, and nothing is deleted until the bytes are needed. A process
that dies leaves at most its last line torn, which a reader skips. A recorded request is digests only: no
tokens, no names of requests or sessions.

Locking: `_lock` guards the queue, `_file_lock` everything about the file; the latter is never taken on the
thread of a caller of `record`.
"""

from __future__ import annotations

import base64
import io
import json
import logging
import os
import re
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from kvstore.files import OWNER, Access, make_folder, open_file
from kvstore.keys import DIGEST_BYTES, NamespaceId
from kvstore.keys import digests as pack_digests
from kvstore.store.recorded import WORD_BYTES, RecordedEntry, RecordedLines
from schemas.namespace import Namespace
from schemas.settings import TraceSettings

log = logging.getLogger(__name__)

#: Bounds of the queue of unwritten requests: digests of thousands of long prompts.
_QUEUE_BYTES = 16 << 20
_QUEUE_REQUESTS = 8192
#: Bytes that a block hash counts for while it waits: as an object, with its place in a list.
_HASH_BYTES = 80
#: A write is queued when so many requests wait, or so many seconds after the last one.
_BATCH = 64
_EVERY_S = 1.0
#: Pause after a failure of the disk, in seconds, during which nothing is recorded.
_PAUSE_S = 60.0
#: Bytes that a file's head and the rest of a line take, at most.
_HEAD_BYTES = 256
#: Longest wait of `close` for a thread that writes, in seconds.
_CLOSE_S = 5.0

#: `submit(nbytes, job)` runs `job` on a thread beside all requests; False: it will not run.
Submit = Callable[[int, Callable[[], None]], bool]


class TraceRecorder:
    """The recorder of one process. Safe for threads."""

    def __init__(
        self,
        settings: TraceSettings,
        submit: Submit,
        *,
        lost: Callable[[int], None] = lambda requests: None,
        clock: Callable[[], float] = time.time,
        access: Access = OWNER,
    ) -> None:
        """`settings.folder` must be given. `lost` gets the number of requests that could not be recorded. No
        I/O."""
        self._submit = submit
        self._lost = lost
        self._clock = clock
        self._lock = threading.Lock()
        self._queue: deque[RecordedEntry] = deque()
        self._queued_bytes = 0
        self._writing = False
        self._closed = False
        self._asked_s = float("-inf")
        self._spaces: dict[NamespaceId, str] = {}
        self._file_lock = threading.Lock()
        self._file = _Files(Path(settings.folder or "."), settings.most_bytes // 2, access)
        self._failed_s = float("-inf")

    def __repr__(self) -> str:
        return f"TraceRecorder({str(self._file.folder)!r})"

    def describe(
        self,
        name: NamespaceId,
        namespace: Namespace,
        block_bytes: int,
        *,
        group: int = 0,
        gpus: int | None = None,
    ) -> None:
        """Describes a namespace's blocks, before the first of its requests. `block_bytes` is the size of a
        typical block on all ranks together; `group` is the one whose tokens and parts such a block has, and
        `gpus` are those of the engine; None: unknown.
        """
        about = {
            "namespace": name,
            "kind": namespace.kind,
            "block_tokens": namespace.groups[group].block_tokens if namespace.groups else 0,
            "block_bytes": block_bytes,
            "parts": namespace.parts(group),
            "model": namespace.model,
            "tenant": namespace.tenant,
            **({"gpus": gpus} if gpus is not None else {}),
        }
        self._spaces[name] = json.dumps(about)[1:]

    def record(
        self,
        namespace: NamespaceId,
        digests: bytes,
        now_s: float,
        session: bytes = b"",
        *,
        local: int | None = None,
    ) -> None:
        """Records that a request, of this session if any, asked for a chain of packed digests, of which the
        engine had the first `local` blocks itself; None: unknown. Takes microseconds, no I/O; never raises.

        If too much waits to be written, the request is lost, and `lost` is called.
        """
        if digests:
            self._add(RecordedEntry(namespace, digests, now_s, _more(session, local)), len(digests))

    def record_hashes(
        self,
        namespace: NamespaceId,
        hashes: Sequence[bytes],
        group: int,
        now_s: float,
        *,
        session: bytes = b"",
        local: int | None = None,
    ) -> None:
        """Records that a request asked for the chain of these block hashes, of which the engine had the first
        `local` blocks itself; None: unknown. As `record` otherwise, but for the work: however long the chain,
        it is packed where it is written. Until then the list itself is kept, to which its owner may append.
        """
        if count := len(hashes):
            packed = partial(_packed, hashes, count, group)
            self._add(RecordedEntry(namespace, packed, now_s, _more(session, local)), count * _HASH_BYTES)

    def record_cost(
        self, namespace: NamespaceId, now_s: float, token_us: float, depth_us: float = 0.0
    ) -> None:
        """Records what computing a token of a prompt takes the engine now. As `record` otherwise."""
        self._add(
            RecordedEntry(namespace, b"", now_s, f', "token_us": {token_us:.4g}, "depth_us": {depth_us:.4g}')
        )

    def record_hints(
        self,
        namespace: NamespaceId,
        session: bytes,
        now_s: float,
        *,
        end: bool = False,
        retain_s: float | None = None,
        priority: str | None = None,
    ) -> None:
        """Records the hints on a session, if there are any. In all else as `record`."""
        said = {"end": end or None, "retain": retain_s, "priority": priority}
        given = {name: value for name, value in said.items() if value is not None}
        if given:
            self._add(RecordedEntry(namespace, b"", now_s, f"{_named(session)}, {json.dumps(given)[1:-1]}"))

    def _add(self, entry: RecordedEntry, nbytes: int = 0) -> None:
        now_s = entry.now_s
        with self._lock:
            full = self._queued_bytes + nbytes > _QUEUE_BYTES or len(self._queue) >= _QUEUE_REQUESTS
            if full or self._closed:
                due, gone = False, 1
            else:
                self._queue.append(entry)
                self._queued_bytes += nbytes
                since = now_s - self._asked_s
                due = not self._writing and (len(self._queue) >= _BATCH or not 0 <= since < _EVERY_S)
                gone = 0
            if due:
                self._writing, self._asked_s = True, now_s
        if gone:
            self._lost(gone)
        if due and not self._submit(0, self._write_all):
            self._writing = False

    def close(self) -> None:
        """Writes what waits. Idempotent; what is recorded afterwards is lost."""
        with self._lock:
            self._closed = True
        if not self._file_lock.acquire(timeout=_CLOSE_S):
            return  # the disk hangs: a wait for it would keep the store from closing anything else
        try:
            self._write_queue()
            self._file.close()
        finally:
            self._file_lock.release()

    def _write_all(self) -> None:
        with self._file_lock:
            try:
                self._write_queue()
            finally:
                self._writing = False

    def _write_queue(self) -> None:
        while True:
            with self._lock:
                batch = list(self._queue)
                self._queue.clear()
                self._queued_bytes = 0
            if not batch:
                return
            lost = self._write(batch)
            if lost:
                self._lost(lost)

    def _write(self, batch: Sequence[RecordedEntry]) -> int:
        """Writes requests; returns how many could not be written."""
        if 0 <= self._clock() - self._failed_s < _PAUSE_S:
            return len(batch)
        written = lost = 0
        try:
            for entry in batch:
                about = self._spaces.get(entry.namespace)
                digests = entry.digests if isinstance(entry.digests, bytes) else entry.digests()
                if about is None or digests is None or not self._file.add(about, entry, digests):
                    lost += 1
                written += 1
            self._file.flush()
        except OSError as exc:
            log.warning("trace %s: %s; nothing is recorded for a minute", self._file.folder, exc.strerror)
            self._failed_s = self._clock()
            self._file.give_up()
            return lost + len(batch) - written
        return lost


class _Files:
    """The files of one process, which hold `most_bytes` each: two, or more and shorter ones if the disk has
    failed, of the same bytes. Raises OSError."""

    def __init__(self, folder: Path, most_bytes: int, access: Access) -> None:
        self.folder = folder
        self._access = access
        self._most = most_bytes
        host = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())[:64]
        self._name = f"{host}-{os.getpid()}-{secrets.token_hex(4)}"
        self._number = 0
        self._out: io.BufferedWriter | None = None
        self._size = 0
        #: Whether something of the file is surely on the disk.
        self._flushed = False
        #: The files before it, the oldest first, and the bytes that each counts for.
        self._former: deque[tuple[Path, int]] = deque()
        self._lines = RecordedLines(0.0)

    def add(self, about: str, entry: RecordedEntry, digests: bytes) -> bool:
        """Writes one request, or the hints on a session. Returns False if it is longer than a file may be."""
        words = len(digests) // DIGEST_BYTES
        if _HEAD_BYTES + len(about) + words * WORD_BYTES * 4 // 3 > self._most:
            return False
        if self._out is None:
            self._begin(entry.now_s)
        line = self._lines.of(about, entry, digests)
        if self._size + len(line) > self._most:
            self.flush()
            self.close()
            self._former.append((self._path, self._most))
            self._begin(entry.now_s)
            line = self._lines.of(about, entry, digests)
        assert self._out is not None
        # Only what is about to be written makes the oldest go, and not an attempt that may fail.
        needed = self._size + len(line) - 2 * self._most
        while self._former and needed + sum(size for _, size in self._former) > 0:
            self._former[0][0].unlink(missing_ok=True)
            self._former.popleft()
        self._out.write(line)
        self._size += len(line)
        return True

    def flush(self) -> None:
        if self._out is not None:
            self._out.flush()
            self._flushed = True

    def close(self) -> None:
        """Ends the file, if there is one. Lines that could not be written are lost. Never raises."""
        out, self._out = self._out, None
        if out is not None:
            try:
                out.close()
            except OSError as exc:
                log.debug("trace: %s", exc)

    def give_up(self) -> None:
        """Ends a file that can't be written, and deletes it if nothing of it ever was. Never raises."""
        if self._out is None:
            return
        self.close()
        if self._flushed:
            self._former.append((self._path, self._size))
            return
        try:
            self._path.unlink(missing_ok=True)
        except OSError as exc:
            log.debug("trace: %s", exc)

    @property
    def _path(self) -> Path:
        return self.folder / f"{self._name}.{self._number}.jsonl"

    def _begin(self, now_s: float) -> None:
        make_folder(self.folder, self._access)
        path = self.folder / f"{self._name}.{self._number + 1}.jsonl"
        self._out = os.fdopen(open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, self._access), "wb")
        self._number += 1
        self._flushed = False
        self._lines = RecordedLines(now_s)
        head = self._lines.head()
        self._out.write(head)
        self._size = len(head)


def _packed(hashes: Sequence[bytes], count: int, group: int) -> bytes | None:
    try:
        return pack_digests(hashes[:count], group) or None
    except (ValueError, OverflowError):
        return None


def _more(session: bytes, local: int | None) -> str:
    """Returns what the line of a request says beside its chain."""
    return (_named(session) if session else "") + (f', "local": {local}' if local is not None else "")


def _named(session: bytes) -> str:
    """Returns the part of a line that names a session by its id."""
    return f', "session": "{base64.b64encode(session[-WORD_BYTES:]).decode("ascii")}"'
