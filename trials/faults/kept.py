"""Engines and servers that several rows share: started when the first one asks, ended when all are over."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

_T = TypeVar("_T")

_open: dict[Hashable, tuple[contextlib.ExitStack, Any]] = {}


def keep(key: Hashable, make: Callable[[], AbstractContextManager[_T]]) -> _T:
    """What `make()` gives on entry: entered once, and kept under `key` until `let_go`."""
    if key not in _open:
        with contextlib.ExitStack() as stack:
            value = stack.enter_context(make())
            _open[key] = (stack.pop_all(), value)
    made: _T = _open[key][1]
    return made


def let_go(key: Hashable = None) -> None:
    """Ends what is kept under `key`; without one everything, the last first."""
    for one in [key] if key is not None else list(reversed(_open)):
        if one in _open:
            _open.pop(one)[0].close()
