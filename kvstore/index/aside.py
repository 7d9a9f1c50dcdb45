"""What knows no deadline, on a thread that nobody waits for longer than a call may take."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

_T = TypeVar("_T")


def aside(work: Callable[[], _T], *, late: Callable[[_T], None] = lambda _: None) -> Future[_T]:
    """Begin `work` on a thread of its own. If the future was cancelled meanwhile, `late` gets the result.

    Where no thread can be started any more it fails with OSError: to callers that is a network out of reach.
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
    except RuntimeError as exc:  # too many of them, or the interpreter ends
        future.set_exception(OSError(str(exc)))
    return future
