"""The data path of S3: ranged GETs and PUTs, by obstore or by boto3.

Both answer alike: bytes into the caller's buffers, None for a missing object, the store's errors.
Figures that chose obstore: docs/adr and tests/benchmarks/bench_s3.py.
"""

from __future__ import annotations

import contextlib
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import obstore
from botocore.exceptions import BotoCoreError, ClientError
from obstore.exceptions import BaseError
from obstore.store import S3Store
from urllib3.exceptions import HTTPError

from kvstore.blobs.buffers import pour, total, window
from kvstore.blobs.s3_errors import BEYOND, MISSING, code_of, of_boto, of_obstore
from kvstore.errors import DeadlineExceeded, TransientError

#: The answers that are no failures: there is no such object, or nothing of it from there on.
_ABSENT: dict[str, int | None] = {MISSING: None, BEYOND: 0}
#: Reading a body goes past botocore's own translation.
_BOTO_ERRORS = (BotoCoreError, ClientError, HTTPError, OSError)
#: What boto3 is asked for at a time, which it waits for however slowly it comes: little at first, then much,
#: for Python's ssl takes the interpreter's lock each time.
_FIRST_PIECE, _PIECE = 8 << 10, 512 << 10
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")


class S3Data(ABC):
    """Whole requests; any thread."""

    @abstractmethod
    def get(self, key: str, offset: int, into: Sequence[memoryview], what: str) -> int | None:
        """Fill flat `into` from `offset` on; returns how many bytes there were, None without object.

        `what` names the call in errors. At least one byte is asked for.
        """

    @abstractmethod
    def put(self, key: str, buffers: Sequence[memoryview], what: str) -> None:
        """Store flat `buffers` under `key`, whole or not at all."""

    @abstractmethod
    def close(self) -> None:
        """Close connections that would otherwise be missed. Idempotent."""


class ObstoreData(S3Data):
    """obstore (the Rust crate object_store): network, TLS and HTTP happen outside the GIL."""

    def __init__(self, reads: S3Store, writes: S3Store, *, multipart_bytes: int, part_bytes: int) -> None:
        self._reads = reads
        self._writes = writes
        self._multipart_bytes = multipart_bytes
        self._part_bytes = part_bytes

    def get(self, key: str, offset: int, into: Sequence[memoryview], what: str) -> int | None:
        want = total(into)
        try:
            result = obstore.get(self._reads, key, options={"range": (offset, offset + want)})
            (start, stop), size = result.range, result.meta["size"]
            data = memoryview(result.bytes())
        except (BaseError, OSError, ValueError) as exc:
            if (code := code_of(exc)) in _ABSENT:
                return _ABSENT[code]
            # Without the cause, whose text quotes the server's answer, which may quote the request.
            raise of_obstore(what, exc) from None
        _check_extent(what, offset, want, start, stop, size, data.nbytes)
        return pour(data, into)

    def put(self, key: str, buffers: Sequence[memoryview], what: str) -> None:
        nbytes = total(buffers)
        try:
            if nbytes > self._multipart_bytes:
                # Aborts by itself if a part fails.
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
        except (BaseError, OSError, ValueError) as exc:
            # Without the cause, whose text quotes the server's answer, which may quote the request.
            raise of_obstore(what, exc) from None

    def close(self) -> None:
        pass  # its connections go with the object


class BotoData(S3Data):
    """boto3 for everything: where obstore can't be had, or something is to be compared with it."""

    def __init__(
        self,
        reads: Any,
        writes: Any,
        bucket: str,
        *,
        multipart_bytes: int,
        part_bytes: int,
        read_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read_timeout_s = read_timeout_s
        self._clock = clock
        self._reads = reads
        self._writes = writes
        self._bucket = bucket
        self._multipart_bytes = multipart_bytes
        self._part_bytes = part_bytes

    def get(self, key: str, offset: int, into: Sequence[memoryview], what: str) -> int | None:
        want = total(into)
        wanted = f"bytes={offset}-{offset + want - 1}"
        end = self._clock() + self._read_timeout_s
        try:
            answer = self._reads.get_object(Bucket=self._bucket, Key=key, Range=wanted)
            extent = _CONTENT_RANGE.fullmatch(answer.get("ContentRange", ""))
            with contextlib.closing(answer["Body"]) as body:
                got = sum(self._fill(body, view, end, what) for view in into) if extent else 0
        except _BOTO_ERRORS as exc:
            if (code := code_of(exc)) in _ABSENT:
                return _ABSENT[code]
            raise of_boto(what, exc) from exc
        start, last, size = map(int, extent.groups()) if extent else (0, -1, 0)
        _check_extent(what, offset, want, start, last + 1, size, got)
        return got

    def put(self, key: str, buffers: Sequence[memoryview], what: str) -> None:
        try:
            if total(buffers) <= self._multipart_bytes:
                self._writes.put_object(Bucket=self._bucket, Key=key, Body=b"".join(buffers))
            else:
                self._put_parts(key, buffers)
        except _BOTO_ERRORS as exc:
            raise of_boto(what, exc) from exc

    def _put_parts(self, key: str, buffers: Sequence[memoryview]) -> None:
        names = {"Bucket": self._bucket, "Key": key}
        names["UploadId"] = self._writes.create_multipart_upload(**names)["UploadId"]
        try:
            parts = [
                {
                    "PartNumber": number,
                    "ETag": self._writes.upload_part(**names, PartNumber=number, Body=part)["ETag"],
                }
                for number, part in enumerate(_parts(buffers, self._part_bytes), 1)
            ]
            self._writes.complete_multipart_upload(**names, MultipartUpload={"Parts": parts})
        except BaseException:
            # What can't be aborted now is removed with the leftovers.
            with contextlib.suppress(BotoCoreError, ClientError):
                self._writes.abort_multipart_upload(**names)
            raise

    def _fill(self, body: Any, view: memoryview, end: float, what: str) -> int:
        got, piece = 0, _FIRST_PIECE
        while got < view.nbytes:
            # A server that sends a little now and then never meets the socket's timeout.
            if self._clock() >= end:
                raise DeadlineExceeded(f"{what}: the body takes too long")
            count = body.readinto(view[got : got + piece])
            if not count:
                break
            got += count
            piece = min(2 * piece, _PIECE)
        return got

    def close(self) -> None:
        self._reads.close()
        self._writes.close()


def _check_extent(what: str, offset: int, want: int, start: int, stop: int, size: int, got: int) -> None:
    # A proxy on the way may cut a body and its length alike, or ignore the range.
    if start != offset or stop != min(offset + want, size) or got != stop - start:
        raise TransientError(
            f"{what}: asked for {want} bytes from {offset} of {size}, was sent {got} from {start}"
        )


def _parts(buffers: Sequence[memoryview], part_bytes: int) -> Iterator[bytes]:
    """The run of bytes in pieces of `part_bytes`, each a copy: all parts but the last have one size."""
    for start in range(0, total(buffers), part_bytes):
        yield b"".join(window(buffers, start, part_bytes))
