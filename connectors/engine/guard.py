"""The one catch-all: between vLLM's threads and this code.

Nothing that the store does may end an engine (design, invariant 3). Errors that are expected are
handled where they arise; what reaches this far is a bug, is logged with its traceback, and costs the
engine a miss or a save instead of its life. Methods where carrying on would be worse are not guarded: a
load that was promised and not started would leave its request waiting for ever.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

log = logging.getLogger(__name__)

_P = ParamSpec("_P")
_R = TypeVar("_R")


def guarded(otherwise: Any) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Make a method return `otherwise` (immutable, because all calls share it) instead of raising."""

    def decorate(method: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(method)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            try:
                return method(*args, **kwargs)
            except Exception:
                log.exception("kvstore: %s failed; the engine goes on without", method.__qualname__)
                answer: _R = otherwise
                return answer

        return call

    return decorate
