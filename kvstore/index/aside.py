"""What knows no deadline, on a thread that nobody waits for longer than a call may take."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

_T = TypeVar("_T")


def aside(work: Callable[[], _T], *, late: Callable[[_T], None] = lambda _: None) -> Future[_T]:
    """Begin `work` on a thread of its own. If the future was cancelled meanwhile, `late` gets the result.

    Raises OSError where no thread can be started: there are too many, or the interpreter ends.
    """
    future: Future[_T] = Future()

    def run() -> None:
        try:
            result = work()
        except Exception as exc:  # noqa: BLE001 - whoever waits gets it
            if future.set_running_or_notify_cancel():
                future.set_exception(exc)
            return
        if future.set_running_or_notify_cancel():
            future.set_result(result)
        else:
            late(result)

    try:
        threading.Thread(target=run, name="kvstore-aside", daemon=True).start()
    except RuntimeError as exc:
        raise OSError(str(exc)) from exc
    return future


def within(wait_s: float, work: Callable[[], _T], *, late: Callable[[_T], None]) -> _T:
    """What `work` returns or raises; TimeoutError if that takes longer, and `late` gets what it returns then.

    Where no thread can be started it takes as long as it takes.
    """
    try:
        future = aside(work, late=late)
    except OSError:
        return work()
    try:
        return future.result(wait_s)
    except TimeoutError:
        if future.cancel():
            raise
        return future.result()  # its own, or just in time
