"""Does the same work on many things, several at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import TypeVar

from kvstore.errors import StoreClosed
from kvstore.threads.transfers import Crew

_T = TypeVar("_T")


class _Nothing:
    """Stands for the end of an iterator, whose items may be None."""


class _Stopped(StoreClosed):
    """The `for_each` of this thread has been stopped while a thing waited."""


_NOTHING = _Nothing()
#: Set when `for_each` begins no other thing.
_stop: ContextVar[threading.Event | None] = ContextVar("stop", default=None)


def pause(seconds: float) -> None:
    """Sleeps. Raises StoreClosed as soon as the `for_each` that this thread works for begins no other
    thing."""
    if (stop := _stop.get()) is None:
        time.sleep(seconds)
    elif stop.wait(seconds):
        raise _Stopped("not waited for: the work has been stopped")


def for_each(work: Callable[[_T], None], things: Iterable[_T], jobs: int) -> None:
    """Runs `work` on every thing, up to `jobs` at a time. Only one thread at a time draws from `things`.

    If a call of `work` fails, or on Ctrl-C, no other call begins. The error is raised when the calls under
    way have ended.
    """
    source = iter(things)
    lock, stop = threading.Lock(), threading.Event()

    def worker() -> None:
        token = _stop.set(stop)
        try:
            while not stop.is_set():
                with lock:
                    thing = next(source, _NOTHING)
                if isinstance(thing, _Nothing):
                    return
                work(thing)
        except _Stopped:
            pass  # another one has failed, and its error is the one to raise
        except BaseException:
            stop.set()
            raise
        finally:
            _stop.reset(token)

    crew = Crew(jobs - 1, "cache-admin")
    try:
        crew.together([worker] * jobs)
    finally:
        # Ctrl-C may come while this thread waits for the others, and then no worker has set it.
        stop.set()
        crew.close()
