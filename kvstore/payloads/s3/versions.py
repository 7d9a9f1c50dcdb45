"""S3Versions: the former versions in a bucket (kvstore.payloads.versions).

Order of a removal, so that a crash after any step brings nothing back:
    1. versions   all that were ever written          crash: the marks still hide what is left
    2. marks      that say that they are deleted      crash: the rest of the marks, which hide nothing
Without its mark a deleted object's last version would be the current one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

from kvstore.payloads.s3.clients import Session
from kvstore.payloads.s3.control import S3Control
from kvstore.payloads.versions import Version, Versions
from schemas.settings import S3Settings
from schemas.urls import S3Location


class S3Versions(Versions):
    """The former versions under one prefix of one bucket."""

    def __init__(self, location: S3Location, settings: S3Settings) -> None:
        self._location = location
        self._settings = settings

    def list(self, prefix: str) -> Iterator[Version]:
        yield from self._control.versions(f"list versions of {prefix}", self._location.root + prefix)

    def remove(self, versions: Sequence[Version]) -> None:
        for marker in (False, True):
            chosen = [each for each in versions if each.marker == marker]
            self._control.delete_versions(f"delete {len(chosen)} versions", chosen)

    def close(self) -> None:
        if "_control" in self.__dict__:
            self._control.close()

    @cached_property
    def _control(self) -> S3Control:
        return Session(self._location, self._settings).control()
