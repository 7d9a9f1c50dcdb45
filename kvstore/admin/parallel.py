"""One piece of work on many things, some of them side by side."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

from kvstore.transfers import Crew

_T = TypeVar("_T")


class _Nothing:
    """What is left of an iterator at its end."""


_NOTHING = _Nothing()


def for_each(work: Callable[[_T], None], things: Iterable[_T], jobs: int) -> None:
    """Run `work` on every thing, up to `jobs` at a time. `things` is drawn from by one thread at a time.

    If one fails, or on Ctrl-C, no other is begun, and the error is raised when those under way have ended.
    """
    source = iter(things)
    lock, stop = threading.Lock(), threading.Event()

    def worker() -> None:
        while not stop.is_set():
            with lock:
                thing = next(source, _NOTHING)
            if isinstance(thing, _Nothing):
                return
            try:
                work(thing)
            except BaseException:
                stop.set()
                raise

    crew = Crew(jobs - 1, "cache-admin")
    try:
        crew.together([worker] * jobs)
    finally:
        # Also where Ctrl-C has found this thread waiting for the others.
        stop.set()
        crew.close()
