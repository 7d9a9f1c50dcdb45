"""S3Payloads: payloads as objects of a bucket, shared by all nodes.

    <prefix>/<namespace id>/<2 hex>/<segment id>.<rank>    a payload (kvstore.keys.payload_name)
    <prefix>/.probe/<32 hex>                               a ping that is under way

A PUT is visible whole or not at all, and so is a multipart upload, which appears when it is completed.
A crash in the middle of one leaves parts that nobody lists; whoever uploads in parts removes those of a
day ago, once an hour, so they don't cost money for ever (a lifecycle rule AbortIncompleteMultipartUpload
does the same).

Data goes by obstore, everything else by boto3 (s3_data.py says why). Clients are made with the first
call: opening a store makes no request and asks for no credentials.

Objects are read by exact range and never listed to find one. Without permission to list a bucket S3
answers 403 for an object that isn't there; `ping` looks for that.
"""

from __future__ import annotations

import datetime as dt
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from kvstore.blobs.buffers import flat, total
from kvstore.blobs.s3_clients import Session
from kvstore.blobs.s3_data import BotoData, ObstoreData, S3Data
from kvstore.blobs.s3_errors import classify, of_boto
from kvstore.errors import KVStoreError, TransientError
from kvstore.keys import parse_payload_name
from kvstore.ports import Listed, PayloadStore
from schemas.settings import S3Settings
from schemas.urls import S3Location

log = logging.getLogger(__name__)

#: What the start of a payload's name may look like.
_WITHIN = re.compile(r"[0-9a-f/.]*")
#: Most keys that S3 takes in one batch delete.
_BATCH = 1000
#: An unfinished upload older than this belongs to nobody: no PUT may take so long.
_ABANDONED = dt.timedelta(days=1)
_TIDY_S = 3600.0


class S3Payloads(PayloadStore):
    """Payloads under one prefix of one bucket. Any thread.

    `delete` can't tell which payloads existed and counts them all.
    """

    def __init__(
        self, location: S3Location, settings: S3Settings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._location = location
        self._settings = settings
        self._clock = clock
        self._root = location.root
        self._session = Session(location, settings)
        #: One for good: where deleting is forbidden, one object stays and not one per ping.
        self._probe = f"{self._root}.probe/{secrets.token_hex(16)}"
        self._lock = threading.Lock()
        self._tidy_at = clock()
        #: Made with the first call, in each process anew: connections can't be shared with a child.
        self._made: dict[str, Any] = {}
        self._pid = os.getpid()

    def __repr__(self) -> str:
        place = f"{self._location.bucket}/{self._location.prefix}".rstrip("/")
        return f"S3Payloads({place!r}, client={self._settings.client!r})"

    @property
    def gap_bytes(self) -> int:
        return self._settings.gap_bytes

    def put(self, name: str, buffers: Sequence[memoryview]) -> None:
        views = flat(buffers)
        self._data.put(self._key(name), views, self._what("put", name))
        if total(views) > self._settings.multipart_bytes and self._tidy_due():
            try:
                self.remove_leftovers()
            except KVStoreError as exc:
                log.warning("unfinished uploads are not removed: %s", exc)

    def read(
        self, name: str, offset: int, into: Sequence[memoryview], *, size: int | None = None
    ) -> int | None:
        if offset < 0:
            raise ValueError(f"negative offset {offset}")
        views = flat(into)
        # Whether it is there costs a byte: a HEAD's 404 doesn't say if it is the bucket that is missing.
        got = self._data.get(
            self._key(name), offset, views or [memoryview(bytearray(1))], self._what("read", name)
        )
        return got if views or got is None else 0

    def distrust(self, name: str) -> bool:
        return False

    def delete(self, names: Sequence[str]) -> int:
        keys = [self._key(name) for name in names]
        failed: KVStoreError | None = None
        for batch in _batches(keys):
            what = self._what("delete", f"{len(batch)} payloads")
            answer = self._ask(
                what, "delete_objects", Delete={"Objects": [{"Key": key} for key in batch], "Quiet": True}
            )
            for error in answer.get("Errors", ()):
                # One bad key must not keep the rest of a batch alive.
                failed = failed or classify(what, 403 if "Denied" in error["Code"] else 500, error["Code"])
        if failed is not None:
            raise failed
        return len(keys)

    def list(self, prefix: str = "") -> Iterator[Listed]:
        if not _WITHIN.fullmatch(prefix):
            return  # no payload's name starts so, and not every client and server can spell it
        # One page at a time, so that a failure or a slow consumer costs one page.
        token: dict[str, str] = {}
        while True:
            page = self._ask(
                self._what("list", prefix), "list_objects_v2", Prefix=self._root + prefix, **token
            )
            for item in page.get("Contents", ()):
                name = item["Key"].removeprefix(self._root)
                if parse_payload_name(name):
                    yield Listed(name, item["Size"], item["LastModified"].timestamp())
            if not page.get("IsTruncated"):
                return
            token = {"ContinuationToken": page["NextContinuationToken"]}

    def ping(self) -> None:
        """Put, read, delete and list, with a key of its own."""
        probe = secrets.token_bytes(64)
        back = bytearray(len(probe))
        key = self._probe
        self._data.put(key, [memoryview(probe)], self._what("put", "a probe"))
        try:
            got = self._data.get(key, 0, [memoryview(back)], self._what("read", "a probe"))
        finally:
            self._ask(self._what("delete", "a probe"), "delete_object", Key=key)
        self._ask(self._what("list", "payloads"), "list_objects_v2", Prefix=self._root, MaxKeys=1)
        if got != len(probe) or back != probe:
            raise TransientError(f"{self._what('read', 'a probe')}: reads back other than written")

    def remove_leftovers(self) -> int:
        """Abort uploads in parts that began a day ago or earlier; returns how many."""
        what = self._what("list", "unfinished uploads")
        page = self._ask(what, "list_multipart_uploads", Prefix=self._root)
        before = dt.datetime.now(dt.UTC) - _ABANDONED
        removed = 0
        for upload in page.get("Uploads", ()):
            if upload["Initiated"] < before and parse_payload_name(upload["Key"].removeprefix(self._root)):
                self._ask(
                    self._what("abort", "an unfinished upload"),
                    "abort_multipart_upload",
                    Key=upload["Key"],
                    UploadId=upload["UploadId"],
                )
                removed += 1
        return removed

    def close(self) -> None:
        for client in self._made.values():
            client.close()

    @property
    def _client(self) -> Any:
        """For everything but data."""
        return self._once("client", lambda: self._session.boto(self._settings.read_timeout_s))

    @property
    def _data(self) -> S3Data:
        made: S3Data = self._once("data", self._data_clients)
        return made

    def _once(self, what: str, make: Callable[[], Any]) -> Any:
        if self._pid != os.getpid():
            self._pid, self._lock, self._made = os.getpid(), threading.Lock(), {}
        if what not in self._made:
            with self._lock:
                if what not in self._made:
                    self._made[what] = make()
        return self._made[what]

    def _data_clients(self) -> S3Data:
        settings, session = self._settings, self._session
        # For an error in words: from inside a client it would come as a failed request.
        session.credentials()
        if settings.client == "boto3" or _forked_after_obstore():
            return BotoData(
                session.boto(settings.stall_timeout_s),
                session.boto(settings.write_timeout_s),
                self._location.bucket,
                multipart_bytes=settings.multipart_bytes,
                part_bytes=settings.part_bytes,
                read_timeout_s=settings.read_timeout_s,
            )
        return ObstoreData(
            session.obstore(settings.read_timeout_s, settings.stall_timeout_s),
            session.obstore(settings.write_timeout_s),
            multipart_bytes=settings.multipart_bytes,
            part_bytes=settings.part_bytes,
        )

    def _key(self, name: str) -> str:
        if parse_payload_name(name) is None:
            raise ValueError(f"not a payload name: {name!r}")
        return self._root + name

    def _what(self, verb: str, name: str) -> str:
        return f"bucket {self._location.bucket}: {verb} {name}".rstrip()

    def _ask(self, what: str, operation: str, **arguments: Any) -> Any:
        """One request of the control path."""
        try:
            return getattr(self._client, operation)(Bucket=self._location.bucket, **arguments)
        except (BotoCoreError, ClientError) as exc:
            raise of_boto(what, exc) from exc

    def _tidy_due(self) -> bool:
        with self._lock:
            due = self._clock() >= self._tidy_at
            if due:
                self._tidy_at = self._clock() + _TIDY_S
            return due


#: The process that was the first to use obstore.
_obstore_pid: int | None = None


def _forked_after_obstore() -> bool:
    """Whether obstore would hang for ever: its threads stay behind in the process that was forked."""
    global _obstore_pid
    pid = os.getpid()
    if _obstore_pid is None:
        _obstore_pid = pid
    if _obstore_pid != pid:
        log.warning("this process was forked from one that uses obstore: boto3 moves the bytes here")
    return _obstore_pid != pid


def _batches(keys: Sequence[str]) -> Iterator[Sequence[str]]:
    rest = iter(keys)
    while batch := list(islice(rest, _BATCH)):
        yield batch
