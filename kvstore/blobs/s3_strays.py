"""What lies beside the payloads of a bucket (kvstore.blobs.strays)."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from kvstore.blobs.s3_clients import Session
from kvstore.blobs.s3_errors import classify, of_boto
from kvstore.blobs.strays import Stray, StrayKind, Strays
from kvstore.errors import PermissionDenied
from kvstore.keys import parse_payload_name
from schemas.settings import S3Settings
from schemas.urls import S3Location

log = logging.getLogger(__name__)

_PROBE = re.compile(r"\.probe/[0-9a-f]{32}")
#: Most keys that S3 takes in one batch delete.
_BATCH = 1000


class S3Strays(Strays):
    """Under one prefix of one bucket."""

    def __init__(self, location: S3Location, settings: S3Settings) -> None:
        self._location = location
        self._settings = settings

    def list(self) -> Iterator[Stray]:
        root = self._location.root
        for page in self._pages("list objects", "list_objects_v2", ("ContinuationToken",)):
            for item in page.get("Contents", ()):
                name = item["Key"].removeprefix(root)
                if not parse_payload_name(name):
                    kind: StrayKind = "probe" if _PROBE.fullmatch(name) else "foreign"
                    yield Stray(name, kind, item["Size"], item["LastModified"].timestamp())
        yield from self._uploads()

    def _uploads(self) -> Iterator[Stray]:
        markers = ("KeyMarker", "UploadIdMarker")
        try:
            for page in self._pages("list unfinished uploads", "list_multipart_uploads", markers):
                for item in page.get("Uploads", ()):
                    name = item["Key"].removeprefix(self._location.root)
                    kind: StrayKind = "upload" if parse_payload_name(name) else "foreign"
                    yield Stray(name, kind, 0, item["Initiated"].timestamp(), item["UploadId"])
        except PermissionDenied as exc:
            # A right of its own, which a lifecycle rule makes unnecessary.
            log.warning("unfinished uploads are not looked for: %s", exc)

    def remove(self, strays: Sequence[Stray], *, now_s: float, older_than_s: float) -> Sequence[Stray]:
        root = self._location.root
        removed = [stray for stray in strays if stray.kind == "upload" and self._abort(stray)]
        probes = [stray for stray in strays if stray.kind == "probe"]
        for start in range(0, len(probes), _BATCH):
            batch = probes[start : start + _BATCH]
            keys = [{"Key": root + stray.name} for stray in batch]
            answer = self._ask("delete probes", "delete_objects", Delete={"Objects": keys, "Quiet": True})
            for error in answer.get("Errors", ()):
                status = 403 if "Denied" in error["Code"] else 500
                raise classify(f"bucket {self._location.bucket}: delete a probe", status, error["Code"])
            removed += batch
        return removed

    def _abort(self, stray: Stray) -> bool:
        """False: it was completed or aborted by somebody else since it was listed."""
        try:
            key = self._location.root + stray.name
            self._client.abort_multipart_upload(Bucket=self._location.bucket, Key=key, UploadId=stray.upload)
        except (BotoCoreError, ClientError) as exc:
            if isinstance(exc, ClientError) and exc.response["Error"]["Code"] == "NoSuchUpload":
                return False
            raise of_boto(f"bucket {self._location.bucket}: abort an unfinished upload", exc) from exc
        return True

    def close(self) -> None:
        if "_client" in self.__dict__:
            self._client.close()

    @cached_property
    def _client(self) -> Any:
        return Session(self._location, self._settings).boto(self._settings.read_timeout_s)

    def _pages(self, what: str, operation: str, tokens: Sequence[str]) -> Iterator[Any]:
        """Every page of a listing; a page names the `Next` of each token."""
        place: dict[str, str] = {}
        while True:
            page = self._ask(what, operation, Prefix=self._location.root, **place)
            yield page
            if not page.get("IsTruncated"):
                return
            place = {token: page[f"Next{token}"] for token in tokens}

    def _ask(self, what: str, operation: str, **arguments: Any) -> Any:
        try:
            return getattr(self._client, operation)(Bucket=self._location.bucket, **arguments)
        except (BotoCoreError, ClientError) as exc:
            raise of_boto(f"bucket {self._location.bucket}: {what}", exc) from exc
