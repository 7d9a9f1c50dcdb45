"""S3Control: every request to a bucket that moves no payload: listings, deletes, probes' ends, old uploads,
and whether the bucket keeps former versions.

What a server answers is not trusted to make sense. An entry of a listing without a name, a size or a date, a
page that names no next one or one that was there already, and anything else that boto3 can't read is a
TransientError that says so; redirects are not followed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from botocore.exceptions import BotoCoreError, ClientError
from botocore.parsers import ResponseParserError

from kvstore.errors import KVStoreError, TransientError
from kvstore.payloads.port import Again, Listed, at_once
from kvstore.payloads.s3.errors import ASK_VERSIONING, classify, nonsense, of_boto
from schemas.urls import S3Location

_T = TypeVar("_T")

#: Most keys that S3 takes in one batch delete.
_BATCH = 1000
#: Errors that mean that an answer is not what S3 sends.
_NONSENSE = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError)


class S3Control:
    """The requests of one boto3 client to one bucket, for any thread. Raises errors of kvstore.errors."""

    def __init__(self, client: Any, location: S3Location, owner: str | None) -> None:
        self._client = client
        self._location = location
        self._always = {"Bucket": location.bucket} | ({"ExpectedBucketOwner": owner} if owner else {})

    def ask(self, what: str, operation: str, **arguments: Any) -> Any:
        """Makes one request. `what` names the call in errors."""
        what = f"bucket {self._location.bucket}: {what}"
        try:
            return getattr(self._client, operation)(**self._always, **arguments)
        except (BotoCoreError, ClientError) as exc:
            failed = of_boto(what, exc)
        except (ResponseParserError, *_NONSENSE) as exc:
            failed = nonsense(what, type(exc).__name__)
        # Here, without a cause or context: boto3's error has the answer, which may quote the request.
        raise failed

    def objects(self, what: str, prefix: str, again: Again = at_once) -> Iterator[Listed]:
        """Yields what lies under `prefix`, by its name below the root. `again` asks for each page."""
        root = self._location.root
        tokens = ("ContinuationToken",)
        for page in self._pages(what, "list_objects_v2", "Name", tokens, again, Prefix=prefix):
            yield from self._each(
                what,
                page.get("Contents", ()),
                lambda item: Listed(
                    item["Key"].removeprefix(root), _size(item), item["LastModified"].timestamp()
                ),
            )

    def uploads(self, what: str) -> Iterator[tuple[str, float, str]]:
        """Yields the uploads in parts that nobody has completed: name below the root, begin in Unix seconds,
        id."""
        root = self._location.root
        tokens = ("KeyMarker", "UploadIdMarker")
        for page in self._pages(what, "list_multipart_uploads", "Bucket", tokens, Prefix=root):
            yield from self._each(
                what,
                page.get("Uploads", ()),
                lambda item: (
                    item["Key"].removeprefix(root),
                    item["Initiated"].timestamp(),
                    item["UploadId"],
                ),
            )

    def keeps_versions(self) -> bool:
        """Returns whether the bucket keeps, or ever kept, former versions."""
        # Once turned on, versioning can be suspended, and never be off again.
        self._client.meta.events.register("before-parse.s3.GetBucketVersioning", _is_versioning)
        answer: dict[str, Any] = self.ask(ASK_VERSIONING, "get_bucket_versioning")
        return "Status" in answer

    def delete(self, what: str, keys: Sequence[str]) -> None:
        """Deletes objects, in batches. Raises the first error at the end: a bad key keeps no other alive."""
        failed: KVStoreError | None = None
        rest = iter([{"Key": key} for key in keys])
        while batch := list(islice(rest, _BATCH)):
            answer = self.ask(what, "delete_objects", Delete={"Objects": batch, "Quiet": True})
            for error in answer.get("Errors", ()):
                code = str(error.get("Code", ""))
                about = f"bucket {self._location.bucket}: {what}"
                failed = failed or classify(about, 403 if "Denied" in code else 500, code)
        if failed is not None:
            raise failed

    def close(self) -> None:
        self._client.close()

    def _pages(
        self,
        what: str,
        operation: str,
        named: str,
        tokens: Sequence[str],
        again: Again = at_once,
        **arguments: Any,
    ) -> Iterator[dict[str, Any]]:
        """Yields the pages of a listing. `named` is where each says whose it is; `tokens` are its parameters
        whose values a page gives as `Next...`."""
        about = f"bucket {self._location.bucket}: {what}"
        place: dict[str, str] = {}
        # The place of page 1, 2, 4, 8, ...: a circle of any length comes past one of them.
        mark, number = place, 0
        while True:
            page = again(partial(self.ask, what, operation, **arguments, **place))
            if named not in page:
                # As from a gate that wants to be logged in at: to boto3 any XML is a listing of nothing.
                raise nonsense(about, "no listing")
            yield page
            if not page.get("IsTruncated"):
                return
            # Without those that say nothing: some servers refuse an empty one.
            place = {token: str(page[f"Next{token}"]) for token in tokens if page.get(f"Next{token}")}
            number += 1
            if tokens[0] not in place or place == mark:
                said = "names no next page" if place != mark else "comes back to a page that was there"
                raise TransientError(f"{about}: the listing {said}")
            if number & (number - 1) == 0:
                mark = place

    def _each(self, what: str, items: Any, read: Callable[[Any], _T]) -> Sequence[_T]:
        try:
            return [read(item) for item in items]
        except _NONSENSE as exc:
            raise nonsense(f"bucket {self._location.bucket}: {what}", type(exc).__name__) from None


def _is_versioning(response_dict: Any, **_: Any) -> None:
    """Raises ValueError for another document, as from a gate that wants to be logged in at: to boto3 any XML,
    and an empty answer, says that no version was ever kept."""
    if response_dict["status_code"] < 300 and b"VersioningConfiguration" not in response_dict["body"]:
        raise ValueError("no versioning")


def _size(item: Any) -> int:
    """Returns an object's size in bytes. Raises ValueError for what is none."""
    size = int(item["Size"])
    if size < 0:
        raise ValueError(f"an object of {size} bytes")
    return size
