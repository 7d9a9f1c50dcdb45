"""S3Strays: the strays of a bucket (kvstore.payloads.strays)."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from functools import cached_property

from kvstore.errors import PermissionDenied, TransientError
from kvstore.keys import parse_payload_name
from kvstore.payloads.evidence import EVIDENCE
from kvstore.payloads.s3.clients import Session
from kvstore.payloads.s3.control import S3Control
from kvstore.payloads.strays import Stray, StrayKind, Strays
from schemas.settings import S3Settings
from schemas.urls import S3Location

log = logging.getLogger(__name__)

_PROBE = re.compile(r"\.probe/[0-9a-f]{32}")


class S3Strays(Strays):
    """The strays under one prefix of one bucket."""

    def __init__(self, location: S3Location, settings: S3Settings) -> None:
        self._location = location
        self._settings = settings

    def list(self) -> Iterator[Stray]:
        for item in self._control.objects("list objects", self._location.root):
            if not _is_ours(item.name):
                kind: StrayKind = "probe" if _PROBE.fullmatch(item.name) else "foreign"
                yield Stray(item.name, kind, item.nbytes, item.modified_s)
        yield from self._uploads()

    def _uploads(self) -> Iterator[Stray]:
        try:
            for name, began_s, upload in self._control.uploads("list unfinished uploads"):
                kind: StrayKind = "upload" if _is_ours(name) else "foreign"
                yield Stray(name, kind, 0, began_s, upload)
        except PermissionDenied as exc:
            # Listing uploads takes a right of its own, which a lifecycle rule makes unnecessary.
            log.warning("unfinished uploads are not looked for: %s", exc)

    def remove(self, strays: Sequence[Stray], *, now_s: float, older_than_s: float) -> Sequence[Stray]:
        root = self._location.root
        removed = [stray for stray in strays if stray.kind == "upload" and self._abort(stray)]
        probes = [stray for stray in strays if stray.kind == "probe"]
        self._control.delete("delete probes", [root + stray.name for stray in probes])
        return removed + probes

    def _abort(self, stray: Stray) -> bool:
        """Aborts an upload. Returns False if somebody has completed or aborted it since it was listed."""
        try:
            self._control.ask(
                "abort an unfinished upload",
                "abort_multipart_upload",
                Key=self._location.root + stray.name,
                UploadId=stray.upload,
            )
        except TransientError as exc:
            if "NoSuchUpload" in str(exc):
                return False
            raise
        return True

    def close(self) -> None:
        if "_control" in self.__dict__:
            self._control.close()

    @cached_property
    def _control(self) -> S3Control:
        return Session(self._location, self._settings).control()


def _is_ours(name: str) -> bool:
    """Returns whether it names a payload, or evidence."""
    return parse_payload_name(name.removeprefix(f"{EVIDENCE}/")) is not None
