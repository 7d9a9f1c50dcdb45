"""S3Payloads: payloads as objects of a bucket, shared by all nodes.

    <prefix>/<namespace id>/<2 hex>/<segment id>.<rank>    a payload (kvstore.keys.payload_name)
    <prefix>/.probe/<32 hex>                               a ping that is under way

A PUT is visible whole or not at all, and so is a multipart upload, which appears when it is completed.
A crash in the middle of one leaves parts that no listing shows. A process that uploads in parts aborts
uploads of a day ago, a random part of a minute after its first upload (with the next one) and then about
once an hour, so that they don't cost money for ever (a lifecycle rule AbortIncompleteMultipartUpload does
the same).

Data goes through obstore, everything else through boto3 (docs/adr/0012-clients-of-s3.md says why). Clients
are made with the first call: opening a store makes no request and asks for no credentials.

Objects are read by exact range, and no listing is needed to find one. Without permission to list a bucket S3
answers 403 for an object that isn't there; `ping` checks for that.
"""

from __future__ import annotations

import logging
import os
import random
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar

from kvstore.errors import KVStoreError, PermissionDenied, TransientError
from kvstore.jitter import sooner
from kvstore.keys import parse_payload_name
from kvstore.payloads.buffers import flat, total
from kvstore.payloads.port import Again, Listed, PayloadStore, at_once
from kvstore.payloads.s3.clients import Session
from kvstore.payloads.s3.control import S3Control
from kvstore.payloads.s3.errors import Redirected
from kvstore.payloads.s3.transport import S3Data
from kvstore.rules.tiers import Tier
from schemas.settings import S3Settings
from schemas.urls import S3Location

log = logging.getLogger(__name__)

_T = TypeVar("_T")

#: Pattern of the prefixes with which a payload's name may start.
_WITHIN = re.compile(r"[0-9a-f/.]*")
#: Age in seconds at which an unfinished upload is aborted: no PUT may take so long.
_UPLOAD_AGE_S = 86400.0
#: Most of them that one call looks at.
_UPLOADS = 1000
_ABORT_EVERY_S = 3600.0
#: Longest time from the first upload in parts until one that comes looks for unfinished ones, in seconds: a
#: process may not live for an hour.
_ABORT_FIRST_S = 60.0


class S3Payloads(PayloadStore):
    """Payloads under one prefix of one bucket. Safe for any thread.

    `delete` can't tell which payloads existed and counts them all.
    """

    def __init__(
        self,
        location: S3Location,
        settings: S3Settings,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._location = location
        self._settings = settings
        self._clock = clock
        self._root = location.root
        self._session = Session(location, settings)
        #: Key of all pings: where deleting is forbidden, one object stays and not one per ping.
        self._probe = f"{self._root}.probe/{secrets.token_hex(16)}"
        self._lock = threading.Lock()
        self._draw = draw
        #: When it looks for unfinished uploads; None: it has made none in parts yet.
        self._abort_at: float | None = None
        #: Clients, made with the first call, in each process anew: a child can't share connections.
        self._made: dict[str, Any] = {}
        self._pid = os.getpid()

    def __repr__(self) -> str:
        place = f"{self._location.bucket}/{self._location.prefix}".rstrip("/")
        return f"S3Payloads({place!r})"

    def put(self, name: str, buffers: Sequence[memoryview]) -> None:
        views = flat(buffers)
        key, what = self._key(name), self._what("put", name)
        self._told(key, what, lambda: self._data.put(key, views, what))
        if total(views) > self._settings.multipart_bytes and self._abort_due():
            try:
                self.abort_old_uploads()
            except KVStoreError as exc:
                log.warning("unfinished uploads are not removed: %s", exc)

    def read(
        self, name: str, offset: int, into: Sequence[memoryview], *, size: int | None = None
    ) -> int | None:
        if offset < 0:
            raise ValueError(f"negative offset {offset}")
        views = flat(into)
        # To learn whether it is there, read one byte: a HEAD's 404 doesn't tell if the bucket is missing.
        place = views or [memoryview(bytearray(1))]
        key, what = self._key(name), self._what("read", name)
        got = self._told(key, what, lambda: self._data.get(key, offset, place, what))
        return got if views or got is None else 0

    def tier(self, name: str, nbytes: int) -> Tier:
        return "bucket"

    def delete(self, names: Sequence[str]) -> int:
        keys = [self._key(name) for name in names]
        self._control.delete(f"delete {len(keys)} payloads", keys)
        return len(keys)

    def list(self, prefix: str = "") -> Iterator[Listed]:
        return self.listed(prefix, at_once)

    def listed(self, prefix: str, again: Again) -> Iterator[Listed]:
        if not _WITHIN.fullmatch(prefix):
            return  # no payload's name starts so, and some clients and servers can't spell it
        # One page at a time, so that a failure or a slow consumer costs one page.
        for listed in self._control.objects(f"list {prefix}".rstrip(), self._root + prefix, again):
            if parse_payload_name(listed.name):
                yield listed

    def ping(self) -> None:
        """Puts, reads, deletes and lists, with a key of its own."""
        probe = secrets.token_bytes(64)
        back = bytearray(len(probe))
        key, what = self._probe, self._what("put", "a probe")
        self._told(key, what, lambda: self._data.put(key, [memoryview(probe)], what))
        try:
            got = self._data.get(key, 0, [memoryview(back)], self._what("read", "a probe"))
        finally:
            self._control.ask("delete a probe", "delete_object", Key=key)
        self._control.ask("list payloads", "list_objects_v2", Prefix=self._root, MaxKeys=1)
        if got != len(probe) or back != probe:
            raise TransientError(f"{self._what('read', 'a probe')}: reads back other than written")

    def encryption(self) -> tuple[str, str]:
        """Returns how the bucket encrypts a probe, such as "aws:kms", and the key's ARN; "" if not said."""
        key, what = self._probe, self._what("put", "a probe")
        self._told(key, what, lambda: self._data.put(key, [memoryview(b"probe")], what))
        try:
            head = self._control.ask("read a probe's head", "head_object", Key=key)
        finally:
            self._control.ask("delete a probe", "delete_object", Key=key)
        return str(head.get("ServerSideEncryption", "")), str(head.get("SSEKMSKeyId", ""))

    def may_list(self) -> bool:
        """Returns whether the bucket lets itself be listed. Raises TransientError if there is no answer."""
        try:
            self._control.ask("list payloads", "list_objects_v2", Prefix=self._root, MaxKeys=1)
        except PermissionDenied:
            return False
        return True

    def abort_old_uploads(self) -> int:
        """Aborts uploads in parts that began a day ago or earlier. Returns how many."""
        before = time.time() - _UPLOAD_AGE_S
        removed = 0
        for name, began_s, upload in islice(self._control.uploads("list unfinished uploads"), _UPLOADS):
            if began_s < before and parse_payload_name(name):
                self._control.ask(
                    "abort an unfinished upload",
                    "abort_multipart_upload",
                    Key=self._root + name,
                    UploadId=upload,
                )
                removed += 1
        return removed

    def close(self) -> None:
        if "control" in self._made:
            self._made["control"].close()

    @property
    def _control(self) -> S3Control:
        """Everything but data."""
        made: S3Control = self._once("control", self._session.control)
        return made

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
        # Asked for here for a clear error: from inside a client it would come as a failed request.
        session.credentials()
        _refuse_if_forked(f"bucket {self._location.bucket}")
        return S3Data(
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

    def _told(self, key: str, what: str, call: Callable[[], _T]) -> _T:
        """Makes a call for data. If the server redirects it, says what a HEAD is told about that: obstore
        keeps neither the status nor the headers."""
        try:
            return call()
        except Redirected as exc:
            try:
                self._control.ask(what.partition(": ")[2], "head_object", Key=key)
            except Redirected as told:
                raise told from exc
            except KVStoreError:
                pass
            raise

    def _abort_due(self) -> bool:
        with self._lock:
            now = self._clock()
            if self._abort_at is None:
                # Not at once: a thousand processes that start together would list the uploads together.
                self._abort_at = now + self._draw() * _ABORT_FIRST_S
            due = now >= self._abort_at
            if due:
                self._abort_at = now + sooner(_ABORT_EVERY_S, self._draw)
            return due


#: The process that was the first to use obstore.
_obstore_pid: int | None = None


def _refuse_if_forked(what: str) -> None:
    # Otherwise obstore would hang for ever: its threads don't come along into a forked process.
    global _obstore_pid
    if _obstore_pid is None:
        _obstore_pid = os.getpid()
    if _obstore_pid != os.getpid():
        raise PermissionDenied(
            f"{what}: this process was forked from one that uses a bucket, and obstore can't follow; start "
            "it by spawn (VLLM_WORKER_MULTIPROCESSING_METHOD=spawn), or before a bucket is used"
        )
