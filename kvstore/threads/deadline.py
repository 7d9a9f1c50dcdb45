"""Runs calls that know no deadline on threads of their own, so that callers can stop waiting in time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

_T = TypeVar("_T")


def in_background(work: Callable[[], _T], *, late: Callable[[_T], None] = lambda _: None) -> Future[_T]:
    """Starts `work` on a thread of its own. If the future was cancelled meanwhile, `late` gets the result.

    Raises OSError where no thread can be started: there are too many, or the interpreter ends.
    """
    future: Future[_T] = Future()

    def run() -> None:
        try:
            result = work()
        except Exception as exc:  # noqa: BLE001 - the waiting caller gets it
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
    """Returns or raises what `work` does, and raises TimeoutError if that takes longer than `wait_s`.

    After a timeout `late` gets the result as soon as `work` returns. Where no thread can be started, `work`
    runs on the caller's, for as long as it takes.
    """
    try:
        future = in_background(work, late=late)
    except OSError:
        return work()
    try:
        return future.result(wait_s)
    except TimeoutError:
        if future.cancel():
            raise
        return future.result()  # `work` itself raised the TimeoutError, or has ended just in time
