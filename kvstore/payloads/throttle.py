"""Throttle: how fast a process asks a payload store that has asked for fewer requests.

Nobody tells a process how many others there are, or what the store can take. So each one slows down by what
it is told itself, so that the sum of all settles where the store refuses few (as TCP's senders share a link:
Chiu and Jain, "Analysis of the Increase and Decrease Algorithms", 1989):

    a request is refused   the pause between requests doubles
    none is                the pause shrinks: its square root by the same number of seconds in all processes,
                           faster the longer none was refused, down to nothing

With a square root the share of requests that are refused stays small, a few in a hundred, whether a process
has one request a second or a hundred; and whoever has more than the others is refused more often, so that all
come to have the same. There is no throttle before the first refusal, and none again when none came for so
long that the pause is gone, which takes less than a minute.

Reads have a lane of their own, and so has everything else: a refused read slows both, a refused save, delete
or listing only its own, so that of a store that is full of reads and saves the saves give way.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final, Literal

from kvstore.errors import HeldBack
from kvstore.jitter import jittered

Lane = Literal["reads", "saves"]

#: Decrease of the square root of the pause in the first second, in sqrt(s), and after how many seconds it is
#: twice that.
_EASE: Final = 0.02
_SOON_S: Final = 20.0
#: The first refusal halves what was asked in the last second, and that counts as so many requests at least: a
#: process that rarely asks is not what there is too much of.
_WINDOW_S: Final = 1.0
_FEW: Final = 10
#: Most requests of a window that are counted.
_MOST: Final = 4096


class Throttle:
    """The pace of one process at one payload store. Safe for threads."""

    def __init__(
        self,
        *,
        longest_s: float,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        """`longest_s` is the longest pause between two requests of a lane."""
        self._clock = clock
        self._lock = threading.Lock()
        self._lanes: dict[Lane, _Pauses] = {
            "reads": _Pauses(longest_s, draw),
            "saves": _Pauses(longest_s, draw),
        }

    def turn(self, lane: Lane, wait_s: float) -> tuple[float, float]:
        """Takes a place for one request. Returns for how many seconds the caller has to wait before it makes
        the request, and what `refused` has to be told of it.

        Raises HeldBack if that is longer than `wait_s`; then no place is taken.
        """
        with self._lock:
            now = self._clock()
            return max(0.0, self._lanes[lane].turn(now, now + wait_s) - now), now

    def give_back(self, lane: Lane) -> None:
        """Notes that a request that had taken a place was not made, nor those after it: a breaker opened.
        Whoever comes when it has closed doesn't wait for them."""
        with self._lock:
            self._lanes[lane].give_back(self._clock())

    def probe(self, lane: Lane) -> float:
        """Notes a request that finds out whether the store is back, and waits for no turn: a breaker sees to
        it that they are few. Returns what `refused` has to be told of it."""
        with self._lock:
            now = self._clock()
            self._lanes[lane].made(now)
            return now

    def refused(self, lane: Lane, taken: float) -> None:
        """Notes that the store has refused a request whose place was `taken` then."""
        with self._lock:
            now = self._clock()
            self._lanes[lane].refused(now, taken)
            if lane == "reads":
                self._lanes["saves"].refused(now, taken, by_reads=True)

    def pause_s(self, lane: Lane) -> float:
        """Returns the mean pause between two requests, in seconds; 0: there is no bound."""
        with self._lock:
            return self._lanes[lane].pause_s(self._clock())

    def reads_are_scarce(self) -> bool:
        """Tells whether reads have pauses. Then those that nobody waits for should not be made: they would
        take the places of others."""
        return self.pause_s("reads") > 0


class _Pauses:
    """One lane. Guarded by its owner's lock."""

    def __init__(self, longest_s: float, draw: Callable[[], float]) -> None:
        self._longest_s = longest_s
        self._draw = draw
        #: Square root of the pause at the last refusal that counted, and when that was.
        self._root = 0.0
        self._cut_s = -math.inf
        self._next_s = -math.inf
        #: When the requests of the last window were made, or will be.
        self._made: deque[float] = deque(maxlen=_MOST)

    def pause_s(self, now: float) -> float:
        if not self._root:
            return 0.0
        since = now - self._cut_s
        root = self._root - _EASE * (since + since * since / (2 * _SOON_S))
        return root * root if root > 0 else 0.0

    def turn(self, now: float, end: float) -> float:
        pause, at = self.pause_s(now), now
        if pause:
            at = max(now, self._next_s)
            if at > end:
                raise HeldBack(
                    "not tried: the payload store asks for fewer requests, and others go before", at - now
                )
            self._next_s = at + self._jittered(pause)
        self.made(at)
        return at

    def give_back(self, now: float) -> None:
        self._next_s = min(self._next_s, now + self._jittered(self.pause_s(now)))

    def made(self, at: float) -> None:
        self._made.append(at)

    def refused(self, now: float, taken: float, *, by_reads: bool = False) -> None:
        if taken < self._cut_s:
            return  # it was on its way, at the pace of before, when the last one was refused
        lately = sum(1 for at in self._made if now - _WINDOW_S < at <= now)
        pause = max(self.pause_s(now), 1 / max(lately / _WINDOW_S, _FEW))
        pause = min(2 * pause, self._longest_s)
        self._root, self._cut_s = math.sqrt(pause), now
        # Refused reads, of which there may be many, must not put off the next save again and again.
        if not by_reads or self._next_s <= now:
            self._next_s = max(self._next_s, now + self._jittered(pause))

    def _jittered(self, pause: float) -> float:
        return min(jittered(pause, self._draw), self._longest_s)
