"""Waiting for what another thread, process or server does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from kvstore.errors import KVStoreError

_T = TypeVar("_T")

#: Only what is broken takes so long: a busy machine may be twenty times as slow as an idle one.
PATIENCE_S = 120.0


def until(what: Callable[[], _T], within_s: float = PATIENCE_S, *, say: Callable[[], object] = str) -> _T:
    """Returns the first answer that is true; AssertionError with what `say` says if none is in time."""
    end = time.monotonic() + within_s
    while not (found := what()):
        assert time.monotonic() < end, f"not within {within_s:g} s {say()}"
        time.sleep(0.005)
    return found


def done(call: Callable[[], _T]) -> _T:
    """Returns what `call` returns the first time that it raises no KVStoreError: where its deadline must be
    short, a machine that stands still for a moment costs a try."""
    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            return call()
        except KVStoreError:
            if time.monotonic() >= end:
                raise
        time.sleep(0.005)
