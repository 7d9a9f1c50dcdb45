"""BreakingPayloads: a payload store behind a circuit breaker."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvstore.breaker import Breaker
from kvstore.payloads.port import Listed, PayloadStore
from kvstore.rules.tiers import Tier


class BreakingPayloads(PayloadStore):
    """Passes every call on, or raises BreakerOpen at once while the breaker is open.

    With `reads_probe` false a read is never the call that finds out whether the store is back, because a
    request waits for it: a put or a ping does.
    """

    def __init__(self, inner: PayloadStore, breaker: Breaker, *, reads_probe: bool = True) -> None:
        self._inner = inner
        self._breaker = breaker
        self._reads_probe = reads_probe

    def __repr__(self) -> str:
        return f"BreakingPayloads({self._inner!r})"

    def put(self, name: str, buffers: Sequence[memoryview]) -> None:
        with self._breaker.guard(subject=name):
            self._inner.put(name, buffers)

    def read(
        self, name: str, offset: int, into: Sequence[memoryview], *, size: int | None = None
    ) -> int | None:
        with self._breaker.guard(may_probe=self._reads_probe, subject=name):
            return self._inner.read(name, offset, into, size=size)

    def tier(self, name: str, nbytes: int) -> Tier:
        return self._inner.tier(name, nbytes)

    def delete(self, names: Sequence[str]) -> int:
        with self._breaker.guard():
            return self._inner.delete(names)

    def list(self, prefix: str = "") -> Iterator[Listed]:
        # A listing is maintenance: long, off the request path, and its failures say little of reads.
        return self._inner.list(prefix)

    def ping(self) -> None:
        with self._breaker.guard():
            self._inner.ping()

    def close(self) -> None:
        self._inner.close()
