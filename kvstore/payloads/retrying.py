"""RetryingPayloads: the one place where a failed call to a payload store is made again, and where calls wait
for their turn at a store that asks for fewer of them."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from kvstore.breaker import Breaker
from kvstore.errors import BreakerOpen, HeldBack, StoreClosed, Throttled, TransientError
from kvstore.payloads.port import Listed, PayloadStore
from kvstore.payloads.throttle import Lane, Throttle
from kvstore.rules.tiers import Tier

_T = TypeVar("_T")


class RetryingPayloads(PayloadStore):
    """Makes a call up to `attempts` times while it fails transiently.

    Between attempts it sleeps a random part of a pause that starts at `backoff_s` and doubles up to
    `max_backoff_s` ("full jitter": Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015).
    Every verb can be repeated: a put writes the same bytes under a name that is used once. This wrapper
    stands outside the breaker, so that the breaker counts each attempt, and an open one ends the attempts and
    whatever is waited for between them.

    While the store has refused calls lately, every attempt waits for its turn at `throttle`, each for a new
    one: so repeating makes no more requests than the throttle lets pass. A call that would wait for longer
    than `patience_s` in all is not made, and raises HeldBack.

    A call that the breaker would refuse doesn't wait to be told so. One that may find out whether the store
    is back goes past those that wait: a breaker lets few of them through. A read that the store has refused
    in all its attempts, while it served no other call, is blamed on the breaker.
    """

    def __init__(
        self,
        inner: PayloadStore,
        *,
        attempts: int,
        backoff_s: float,
        max_backoff_s: float,
        patience_s: float | None = None,
        refusals: int | None = None,
        throttle: Throttle | None = None,
        breaker: Breaker | None = None,
        count: Callable[[str], object] = lambda _: None,
        sleep: Callable[[float], object] | None = None,
        rng: Callable[[], float] = random.random,
    ) -> None:
        """`patience_s` is for how long in all a call waits for its turn (None: `max_backoff_s`), and
        `refusals` how many calls for fewer requests it bears, or all calls in a row while none is served
        (None: `attempts`, of one). `breaker` is the one that guards `inner`, where no read is a probe.
        `count` gets "slow_downs", for each call that the store refused, and "held_back", for each that was
        not made."""
        self._inner = inner
        self._attempts = attempts
        self._backoff_s = backoff_s
        self._max_backoff_s = max_backoff_s
        self._patience_s = max_backoff_s if patience_s is None else patience_s
        self._refusals = attempts if refusals is None else refusals
        self._most_in_a_row = math.inf if refusals is None else refusals
        self._throttle = throttle or Throttle(longest_s=max_backoff_s)
        self._breaker = breaker
        #: Number of calls that the store has served. Not exact: compared with what it was, it tells whether
        #: any was.
        self._served = 0
        #: Likewise the number of refusals since the last of them.
        self._in_a_row = 0
        self._count = count
        self._sleep = sleep or (time.sleep if breaker is None else breaker.wait)
        self._rng = rng

    def __repr__(self) -> str:
        return f"RetryingPayloads({self._inner!r}, attempts={self._attempts})"

    def put(self, name: str, buffers: Sequence[memoryview]) -> None:
        self._again(lambda: self._inner.put(name, buffers))

    def read(
        self, name: str, offset: int, into: Sequence[memoryview], *, size: int | None = None
    ) -> int | None:
        return self._again(lambda: self._inner.read(name, offset, into, size=size), lane="reads", blame=name)

    def tier(self, name: str, nbytes: int) -> Tier:
        return self._inner.tier(name, nbytes)

    def delete(self, names: Sequence[str]) -> int:
        return self._again(lambda: self._inner.delete(names))

    def list(self, prefix: str = "") -> Iterator[Listed]:
        return self._inner.listed(prefix, self._again)

    def ping(self) -> None:
        # Once only: the caller wants to know how the store is now.
        self._again(self._inner.ping, once=True)

    def close(self) -> None:
        self._inner.close()

    def _again(
        self, call: Callable[[], _T], /, *, lane: Lane = "saves", once: bool = False, blame: str | None = None
    ) -> _T:
        pause, patience_s, served = self._backoff_s, self._patience_s, self._served
        failures, refusals = (1, 1) if once else (self._attempts, self._refusals)
        refused: Throttled | None = None
        made = 0
        while True:
            made += 1
            try:
                wait_s, taken = self._turn(lane, patience_s)
            except HeldBack as held:
                self._count("held_back")
                # What the store has said itself tells more.
                if refused is not None:
                    refused.wait_s = held.wait_s
                    raise refused from None
                raise
            patience_s -= wait_s
            try:
                found = call()
            except BreakerOpen:
                if wait_s:
                    self._throttle.give_back(lane)
                raise
            except StoreClosed:
                raise
            except Throttled as exc:
                self._count("slow_downs")
                self._throttle.refused(lane, taken)
                self._in_a_row += 1
                if made >= refusals or self._in_a_row >= self._most_in_a_row:
                    if self._breaker is not None and blame is not None and self._served == served:
                        self._breaker.blame(blame)
                    raise
                refused = exc
            except TransientError:
                if made >= failures:
                    raise
                self._sleep(self._rng() * min(pause, self._max_backoff_s))
                pause *= 2
            else:
                self._served += 1
                self._in_a_row = 0
                return found

    def _turn(self, lane: Lane, patience_s: float) -> tuple[float, float]:
        """Waits until a call may be made. Returns for how long that was, and when its place was taken."""
        if self._breaker is not None and self._breaker.check(may_probe=lane != "reads"):
            return 0.0, self._throttle.probe(lane)
        wait_s, taken = self._throttle.turn(lane, patience_s)
        if wait_s:
            self._sleep(wait_s)
        return wait_s, taken
