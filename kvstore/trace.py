"""A record of which blocks requests ask for, for `cache-admin simulate` (settings: `trace`).

One file per process at a time, JSON lines:

    {"kvstore_trace": 1, "began_s": 1790000000.123}
    {"space": 0, "namespace": "8a7...", "kind": "kv", "block_tokens": 16, "block_bytes": 65536, "parts": 1}
    {"t": 0.52, "n": 0, "d": "<base64>"}
    {"t": 1.07, "n": 0, "like": [2, 96], "d": "<base64>"}

A `space` line says what a namespace's blocks are; `block_bytes` are those of all ranks together, which store
them in `parts`. A request is a line with `t`, seconds since `began_s`, and `n`, the number of its space. Its
chain of blocks, from the first one on, is `d`, 8 bytes of each digest: the last eight, because the first ones
don't tell the groups of a hybrid model apart. `like` [line, blocks]: it begins with the first `blocks` blocks
of the request on that line of this file, counted from 0, and `d` is what follows them. Prompts share long
prefixes, so this makes a trace of chats a fraction as long.

A file is complete by itself: when it holds half of `trace.most_bytes` another is begun, and the one before it
is deleted. A process that dies leaves at most its last line torn, which a reader skips. Nothing but digests
is recorded: no tokens, no names of requests.

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
from pathlib import Path

import numpy as np

from kvstore.keys import DIGEST_BYTES, NamespaceId
from schemas.namespace import Namespace
from schemas.settings import TraceSettings

log = logging.getLogger(__name__)

VERSION = 1
#: Bytes of a digest that a trace keeps, and how they are read.
WORD_BYTES = 8
WORD = "<u8"

#: What waits to be written: digests of ten thousand long prompts at most.
_QUEUE_BYTES = 16 << 20
_QUEUE_REQUESTS = 8192
#: A thread is asked to write when so much waits, or for so long.
_BATCH = 64
_EVERY_S = 1.0
#: Blocks whose line is remembered; all are forgotten when there are more, and prefixes written once more.
_REMEMBERED = 1 << 17
#: After a failure of the disk nothing is recorded for so long.
_PAUSE_S = 60.0
#: What a file's head and the rest of a line take at most.
_HEAD_BYTES = 256
_CLOSE_S = 5.0

#: `submit(nbytes, job)`: run `job` on a thread that nobody waits for; False: it will not run.
Submit = Callable[[int, Callable[[], None]], bool]


class Trace:
    """The recorder of one process. Any thread."""

    def __init__(
        self,
        settings: TraceSettings,
        submit: Submit,
        *,
        lost: Callable[[int], None] = lambda requests: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`settings.folder` is given. `lost` is told of requests that could not be recorded. No I/O."""
        self._submit = submit
        self._lost = lost
        self._clock = clock
        self._lock = threading.Lock()
        self._queue: deque[tuple[NamespaceId, bytes, float]] = deque()
        self._held = 0
        self._writing = False
        self._closed = False
        self._asked_s = float("-inf")
        self._spaces: dict[NamespaceId, str] = {}
        self._file_lock = threading.Lock()
        self._file = _Files(Path(settings.folder or "."), settings.most_bytes // 2)
        self._failed_s = float("-inf")

    def __repr__(self) -> str:
        return f"Trace({str(self._file.folder)!r})"

    def describe(self, name: NamespaceId, namespace: Namespace, block_bytes: int) -> None:
        """Say what a namespace's blocks are, before the first of its requests. `block_bytes`: of a typical
        block, all ranks together."""
        about = {
            "namespace": name,
            "kind": namespace.kind,
            "block_tokens": namespace.groups[0].block_tokens if namespace.groups else 0,
            "block_bytes": block_bytes,
            "parts": namespace.parts(),
        }
        self._spaces[name] = json.dumps(about)[1:]

    def record(self, namespace: NamespaceId, digests: bytes, now_s: float) -> None:
        """Note that a request asked for a chain of packed digests. A few microseconds, no I/O, never raises.

        Lost, and told to `lost`, if too much waits to be written.
        """
        if not digests:
            return
        with self._lock:
            full = self._held + len(digests) > _QUEUE_BYTES or len(self._queue) >= _QUEUE_REQUESTS
            if full or self._closed:
                due, gone = False, 1
            else:
                self._queue.append((namespace, digests, now_s))
                self._held += len(digests)
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
        """Write what waits. Idempotent; what is recorded afterwards is lost."""
        with self._lock:
            self._closed = True
        if not self._file_lock.acquire(timeout=_CLOSE_S):
            return  # a disk that hangs: whoever waits for it closes nothing either
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
                self._held = 0
            if not batch:
                return
            lost = self._write(batch)
            if lost:
                self._lost(lost)

    def _write(self, batch: Sequence[tuple[NamespaceId, bytes, float]]) -> int:
        """Write requests; returns how many could not be."""
        if 0 <= self._clock() - self._failed_s < _PAUSE_S:
            return len(batch)
        written = lost = 0
        try:
            for namespace, digests, now_s in batch:
                about = self._spaces.get(namespace)
                if about is None or not self._file.add(namespace, about, digests, now_s):
                    lost += 1
                written += 1
            self._file.flush()
        except OSError as exc:
            log.warning("trace %s: %s; nothing is recorded for a minute", self._file.folder, exc.strerror)
            self._failed_s = self._clock()
            self._file.close()
            return lost + len(batch) - written
        return lost


class _Files:
    """The files of one process, of which at most two exist. Raises OSError."""

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self.folder = folder
        self._most = most_bytes
        host = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())[:64]
        self._name = f"{host}-{os.getpid()}-{secrets.token_hex(4)}"
        self._number = 0
        self._out: io.BufferedWriter | None = None
        self._size = 0
        self._lines = _Lines(0.0)

    def add(self, namespace: NamespaceId, about: str, digests: bytes, now_s: float) -> bool:
        """Write one request; False: it is longer than a file may be."""
        words = len(digests) // DIGEST_BYTES
        if _HEAD_BYTES + len(about) + words * WORD_BYTES * 4 // 3 > self._most:
            return False
        if self._out is None:
            self._begin(now_s)
        line = self._lines.of(namespace, about, digests, now_s)
        if self._size + len(line) > self._most:
            self.close()
            self._begin(now_s)
            line = self._lines.of(namespace, about, digests, now_s)
        assert self._out is not None
        self._out.write(line)
        self._size += len(line)
        return True

    def flush(self) -> None:
        if self._out is not None:
            self._out.flush()

    def close(self) -> None:
        """End the file, if there is one. What could not be written is lost. Never raises."""
        out, self._out = self._out, None
        if out is not None:
            try:
                out.close()
            except OSError as exc:
                log.debug("trace: %s", exc)

    def _begin(self, now_s: float) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._number += 1
        (self.folder / f"{self._name}.{self._number - 2}.jsonl").unlink(missing_ok=True)
        self._out = (self.folder / f"{self._name}.{self._number}.jsonl").open("xb")
        self._lines = _Lines(now_s)
        head = self._lines.head()
        self._out.write(head)
        self._size = len(head)


class _Lines:
    """How requests are spelled in one file."""

    def __init__(self, began_s: float) -> None:
        self._began_s = began_s
        self._count = 0
        self._spaces: dict[NamespaceId, int] = {}
        #: Per space, a block's word -> the line on which it came first: a chain, so what precedes it there
        #: precedes it everywhere.
        self._seen: list[dict[int, int]] = []
        self._blocks = 0

    def head(self) -> bytes:
        self._count += 1
        return f'{{"kvstore_trace": {VERSION}, "began_s": {self._began_s:.3f}}}\n'.encode()

    def of(self, namespace: NamespaceId, about: str, digests: bytes, now_s: float) -> bytes:
        """The line of a request, and before it that of its namespace if there is none yet."""
        out = ""
        space = self._spaces.get(namespace)
        if space is None:
            space = self._spaces[namespace] = len(self._spaces)
            self._seen.append({})
            out = f'{{"space": {space}, {about}\n'
            self._count += 1
        words = np.frombuffer(digests, dtype=WORD)[1 :: DIGEST_BYTES // WORD_BYTES]
        like, line = self._known(self._seen[space], words.tolist())
        rest = base64.b64encode(words[like:].tobytes()).decode("ascii")
        shared = f'"like": [{line}, {like}], ' if like else ""
        out += f'{{"t": {now_s - self._began_s:.3f}, "n": {space}, {shared}"d": "{rest}"}}\n'
        self._count += 1
        return out.encode("ascii")

    def _known(self, seen: dict[int, int], words: list[int]) -> tuple[int, int]:
        """How many leading blocks another line has, and which line; remembers the others as this one's."""
        known = 0
        if words[-1] in seen:
            known = len(words)
        else:
            # Whatever is remembered of a chain begins with its first block, so this finds the end of it; were
            # it not so, it would still find blocks that the line has.
            beyond = len(words) - 1
            while known < beyond:
                middle = (known + beyond + 1) // 2
                if words[middle - 1] in seen:
                    known = middle
                else:
                    beyond = middle - 1
        line = seen[words[known - 1]] if known else 0
        fresh = words[known:]
        if self._blocks + len(fresh) > _REMEMBERED:
            for each in self._seen:
                each.clear()
            self._blocks, fresh = 0, words
        seen.update(dict.fromkeys(fresh, self._count))
        self._blocks += len(fresh)
        return known, line
