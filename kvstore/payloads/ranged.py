"""RangedPayloads: reads long payloads as several ranges at a time.

One connection to an object store is slow (tens of MB/s from S3), many together are not; and of a read that
fails or hangs only one range has to be repeated.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from kvstore.payloads.buffers import flat, total, window
from kvstore.payloads.port import Listed, PayloadStore
from kvstore.rules.tiers import Tier

#: Runs calls side by side and returns when all have ended. Raises what the first failure raised.
Together = Callable[[Sequence[Callable[[], int | None]]], list[int | None]]


class RangedPayloads(PayloadStore):
    """Splits a read into equal ranges of about `range_bytes`, at most half as much again, for `together`.

    At most `concurrency` reads are under way in this store at once, however many threads call, so the client
    below holds at most `1.5 * concurrency * range_bytes` of memory. If a payload is replaced meanwhile, parts
    of both may be read; the store never replaces one, and a checksum would tell.
    """

    def __init__(
        self, inner: PayloadStore, *, range_bytes: int, concurrency: int, together: Together
    ) -> None:
        self._inner = inner
        self._range_bytes = range_bytes
        self._together = together
        self._slots = threading.BoundedSemaphore(concurrency)
        self._concurrency = concurrency

    def __repr__(self) -> str:
        return (
            f"RangedPayloads({self._inner!r}, range_bytes={self._range_bytes}, "
            f"concurrency={self._concurrency})"
        )

    def put(self, name: str, buffers: Sequence[memoryview]) -> None:
        self._inner.put(name, buffers)

    def read(
        self, name: str, offset: int, into: Sequence[memoryview], *, size: int | None = None
    ) -> int | None:
        views = flat(into)
        want = total(views)
        # A payload has a header besides its slots, which is not worth a request of its own.
        count = max(1, round(want / self._range_bytes))
        if count == 1:
            return self._one(name, offset, views, size)
        step = -(-want // count)
        ranges = [(at, min(step, want - at)) for at in range(0, want, step)]
        got = self._together(
            [partial(self._one, name, offset + at, window(views, at, length), size) for at, length in ranges]
        )
        return _joined(got, [length for _, length in ranges])

    def _one(self, name: str, offset: int, into: Sequence[memoryview], size: int | None) -> int | None:
        with self._slots:
            return self._inner.read(name, offset, into, size=size)

    def tier(self, name: str, nbytes: int) -> Tier:
        return self._inner.tier(name, nbytes)

    def delete(self, names: Sequence[str]) -> int:
        return self._inner.delete(names)

    def list(self, prefix: str = "") -> Iterator[Listed]:
        return self._inner.list(prefix)

    def ping(self) -> None:
        self._inner.ping()

    def close(self) -> None:
        self._inner.close()


def _joined(got: Sequence[int | None], lengths: Sequence[int]) -> int | None:
    """Returns how many bytes there are up to the first hole; None if the payload was missing for any
    range."""
    done = 0
    for count, length in zip(got, lengths, strict=True):
        if count is None:
            return None
        done += count
        if count < length:
            break
    return done
