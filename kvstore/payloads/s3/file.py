"""S3File: one object of a bucket that is no payload, such as a pack, by the clients that payloads have."""

from __future__ import annotations

from kvstore.errors import KVStoreError
from kvstore.payloads.s3.store import S3Payloads


class S3File(S3Payloads):
    """The object that an s3 URL names in full: every name stands for it."""

    def size(self) -> int | None:
        """Returns its size in bytes, None if there is no such object. Raises what a read raises."""
        if self.read("", 0, []) is None:
            return None
        return int(self._control.ask("look at an object", "head_object", Key=self._key(""))["ContentLength"])

    def _key(self, name: str) -> str:
        if not self._location.prefix:
            raise KVStoreError("the URL of a pack names an object: s3://BUCKET/FOLDER/NAME.tar")
        return self._location.prefix
