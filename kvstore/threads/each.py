"""Does the same work on many things, several at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

from kvstore.threads.transfers import Crew

_T = TypeVar("_T")


class _Nothing:
    """Stands for the end of an iterator, whose items may be None."""


_NOTHING = _Nothing()


def for_each(work: Callable[[_T], None], things: Iterable[_T], jobs: int) -> None:
    """Runs `work` on every thing, up to `jobs` at a time. Only one thread at a time draws from `things`.

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
        # Ctrl-C may come while this thread waits for the others, and then no worker has set it.
        stop.set()
        crew.close()
