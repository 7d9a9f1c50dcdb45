"""RetryingPayloads: the one place where a failed call to a payload store is made again."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from kvstore.errors import BreakerOpen, StoreClosed, Throttled, TransientError
from kvstore.payloads.port import Listed, PayloadStore
from kvstore.rules.tiers import Tier

_T = TypeVar("_T")

#: Factor of the pauses after Throttled: a server that asks for fewer calls gets longer ones than one that
#: fails.
_THROTTLED = 4.0


class RetryingPayloads(PayloadStore):
    """Makes a call up to `attempts` times while it fails transiently.

    Between attempts it sleeps a random part of a pause that starts at `backoff_s` and doubles up to
    `max_backoff_s` ("full jitter": Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015).
    Every verb can be repeated: a put writes the same bytes under a name that is used once. This wrapper
    stands outside the breaker, so that the breaker counts each attempt, and an open one ends the attempts.
    """

    def __init__(
        self,
        inner: PayloadStore,
        *,
        attempts: int,
        backoff_s: float,
        max_backoff_s: float,
        sleep: Callable[[float], object] = time.sleep,
        rng: Callable[[], float] = random.random,
    ) -> None:
        self._inner = inner
        self._attempts = attempts
        self._backoff_s = backoff_s
        self._max_backoff_s = max_backoff_s
        self._sleep = sleep
        self._rng = rng

    def __repr__(self) -> str:
        return f"RetryingPayloads({self._inner!r}, attempts={self._attempts})"

    def put(self, name: str, buffers: Sequence[memoryview]) -> None:
        self._again(lambda: self._inner.put(name, buffers))

    def read(
        self, name: str, offset: int, into: Sequence[memoryview], *, size: int | None = None
    ) -> int | None:
        return self._again(lambda: self._inner.read(name, offset, into, size=size))

    def tier(self, name: str, nbytes: int) -> Tier:
        return self._inner.tier(name, nbytes)

    def delete(self, names: Sequence[str]) -> int:
        return self._again(lambda: self._inner.delete(names))

    def list(self, prefix: str = "") -> Iterator[Listed]:
        # Only the beginning is repeated: what has been yielded can't be taken back.
        listing, first = self._again(lambda: _started(self._inner.list(prefix)))
        yield from first
        yield from listing

    def ping(self) -> None:
        # Once only: the caller wants to know how the store is now.
        self._inner.ping()

    def close(self) -> None:
        self._inner.close()

    def _again(self, call: Callable[[], _T]) -> _T:
        pause = self._backoff_s
        for _ in range(self._attempts - 1):
            try:
                return call()
            except (BreakerOpen, StoreClosed):
                raise
            except TransientError as exc:
                longest = pause * (_THROTTLED if isinstance(exc, Throttled) else 1.0)
                self._sleep(self._rng() * min(longest, self._max_backoff_s))
                pause *= 2
        return call()


def _started(listing: Iterator[Listed]) -> tuple[Iterator[Listed], list[Listed]]:
    return listing, [first for first in [next(listing, None)] if first is not None]
