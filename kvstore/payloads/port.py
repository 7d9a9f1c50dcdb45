"""The port of payload stores, which keep bytes under a name and know nothing of segments.

Rules for every implementation: batch first; sync; safe for many threads and many processes; no call
blocks without a deadline; a miss is a value, a failure is an exception of kvstore.errors; no
caller's buffer is kept after the call. Abstract throughout, so that a forgotten method fails at
construction. Conformance: kvstore.testing.

Not here, and why: exists(one) (batch verbs answer it), retries, breaking, counting, verification (wrappers
and the store add them), locks and leases on what is being read (grace time after an eviction replaces
them: nothing held can leak).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from kvstore.rules.tiers import Tier

if TYPE_CHECKING:
    from typing import Self

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Listed:
    """One payload in a listing."""

    name: str
    nbytes: int
    #: Unix seconds of its last change.
    modified_s: float


class Again(Protocol):
    """Makes a request, and makes it again if that fails."""

    def __call__(self, call: Callable[[], _T], /) -> _T: ...


class PayloadStore(ABC):
    """Immutable bytes under a name such as `0123456789abcdef/ab/ab....0` (kvstore.keys)."""

    @abstractmethod
    def put(self, name: str, buffers: Sequence[memoryview]) -> None:
        """Stores the concatenation of `buffers` (each contiguous bytes) under `name`.

        All or nothing: a reader, also in another process, sees the whole or nothing, even after a
        crash at any instruction. On return the bytes are as durable as configured. The store never
        reuses a name; a second put of one name replaces the first, atomically.
        Raises CapacityExceeded (no space), PermissionDenied, TransientError.
        """

    @abstractmethod
    def read(
        self, name: str, offset: int, into: Sequence[memoryview], *, size: int | None = None
    ) -> int | None:
        """Fills the writable byte buffers `into` in turn with the bytes from `offset` on.

        Returns how many bytes were read: fewer than asked only if the payload ends there. Returns None if
        there is no such payload. After an exception the buffers may hold anything, and are not written
        to any more. `size` is the size of the whole payload in bytes, if the caller knows it: a cache may
        then fetch all of it. It makes no difference to the answer.
        """

    @abstractmethod
    def tier(self, name: str, nbytes: int) -> Tier:
        """Returns where a read of a payload of `nbytes` bytes would find it now, which may change at once.

        It need not exist. Asks nobody over a network, and raises nothing.
        """

    @abstractmethod
    def delete(self, names: Sequence[str]) -> int:
        """Removes payloads; names that don't exist are fine.

        Returns how many did exist; a store that can't tell, such as S3, counts them all.
        """

    @abstractmethod
    def list(self, prefix: str = "") -> Iterator[Listed]:
        """Yields every payload whose name starts with `prefix`, in no order, weakly consistent.

        Things that are not payloads (temporary files, an index file beside them) are not listed.
        """

    def listed(self, prefix: str, again: Again) -> Iterator[Listed]:
        """Yields what `list` does, and makes each request by `again`; here the first one only, since what has
        been yielded can't be taken back."""
        listing, first = again(lambda: _started(self.list(prefix)))
        yield from first
        yield from listing

    @abstractmethod
    def ping(self) -> None:
        """Raises what a put and a read would raise for lack of access. Leaves nothing behind."""

    @abstractmethod
    def close(self) -> None:
        """Releases connections and files. Idempotent; later calls raise StoreClosed or work."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def at_once(call: Callable[[], _T], /) -> _T:
    """Makes a request once."""
    return call()


def _started(listing: Iterator[Listed]) -> tuple[Iterator[Listed], list[Listed]]:
    return listing, [first for first in [next(listing, None)] if first is not None]
