"""The data path of S3: ranged GETs and PUTs by obstore (the Rust crate object_store).

Network, TLS and HTTP run outside the interpreter's lock, which an engine's other threads need. The figures
behind the choice: docs/adr/0012-clients-of-s3.md and trials/benchmarks/bench_s3.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store

from kvstore.errors import TransientError
from kvstore.payloads.buffers import pour, total, window
from kvstore.payloads.s3.errors import BEYOND, MISSING, code_of, of_obstore

#: Answers that are no failures: there is no such object, or it has no bytes from there on.
_ABSENT: dict[str, int | None] = {MISSING: None, BEYOND: 0}


class S3Data:
    """Reads and writes objects, each call in whole requests. Safe for any thread."""

    def __init__(self, reads: S3Store, writes: S3Store, *, multipart_bytes: int, part_bytes: int) -> None:
        self._reads = reads
        self._writes = writes
        self._multipart_bytes = multipart_bytes
        self._part_bytes = part_bytes

    def get(self, key: str, offset: int, into: Sequence[memoryview], what: str) -> int | None:
        """Fills flat `into`, of at least one byte, from `offset` on. Returns how many bytes there were, None
        if there is no such object.

        `what` names the call in errors.
        """
        want = total(into)
        try:
            result = obstore.get(self._reads, key, options={"range": (offset, offset + want)})
            (start, stop), size = result.range, result.meta["size"]
            # As one piece that ends about where the range does: the length that a server claims would
            # take any memory.
            data = memoryview(next(iter(result.stream(min_chunk_size=want)), b""))
        except (BaseError, OSError, ValueError) as exc:
            if (code := code_of(exc)) in _ABSENT:
                return _ABSENT[code]
            failed = of_obstore(what, exc)
        else:
            _check_extent(what, offset, want, start, stop, size, data.nbytes)
            return pour(data, into)
        # Here, without a cause or context: obstore's error quotes the answer, which may quote the request.
        raise failed

    def put(self, key: str, buffers: Sequence[memoryview], what: str) -> None:
        """Stores flat `buffers` under `key`, whole or not at all. `what` names the call in errors."""
        nbytes = total(buffers)
        try:
            if nbytes > self._multipart_bytes:
                # obstore aborts the upload by itself if a part fails.
                obstore.put(
                    self._writes,
                    key,
                    _parts(buffers, self._part_bytes),
                    use_multipart=True,
                    chunk_size=self._part_bytes,
                    max_concurrency=4,
                )
            else:
                obstore.put(self._writes, key, buffers, use_multipart=False)
            return
        except (BaseError, OSError, ValueError) as exc:
            failed = of_obstore(what, exc)
        raise failed


def _check_extent(what: str, offset: int, want: int, start: int, stop: int, size: int, got: int) -> None:
    # A proxy on the way may cut a body and its length alike, or ignore the range.
    if start != offset or stop != min(offset + want, size) or got != stop - start:
        raise TransientError(
            f"{what}: asked for {want} bytes from {offset} of {size}, was sent {got} from {start}"
        )


def _parts(buffers: Sequence[memoryview], part_bytes: int) -> Iterator[bytes]:
    """Yields copies of the bytes, `part_bytes` at a time: all parts but the last have the same size."""
    for start in range(0, total(buffers), part_bytes):
        yield b"".join(window(buffers, start, part_bytes))
