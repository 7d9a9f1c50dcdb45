"""The one catch-all: between vLLM's threads and this code, and between the modules of this code.

The store must never end an engine (design, invariant 3). Expected errors are handled where they arise. An
error that reaches this far is a bug: it is logged with its traceback, and costs the engine a miss or a save
instead of its life. Two steps stand bare, as carrying on would be worse: a promised load is sent to the
workers, and a load that has ended is reported. Without either step the request would wait for ever.

`guarded` keeps the fault of a hook from vLLM. A hook also has followers: journal, spans, prefetch, probes,
hints, saves. `Followers` keeps their faults from the hook, so that a fault costs only the work of its
follower. A follower that has failed forgets all that it holds, since that may be incomplete, and goes on with
the next event. If it can't even forget, it is switched off as long as the engine lives.
"""

from __future__ import annotations

import functools
import inspect
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Final, ParamSpec, TypeVar, cast

from kvstore.metrics import Counters

log = logging.getLogger(__name__)

_P = ParamSpec("_P")
_R = TypeVar("_R")
_T = TypeVar("_T")

#: Shortest time between two lines of the log about one method, in seconds: it may fail in every step.
_SAY_S: Final = 60.0
#: How often each method has failed in this process.
faults: Counter[str] = Counter()
_said: dict[str, float] = {}


def guarded(otherwise: Any) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Make a method return `otherwise` (immutable, because all calls share it) instead of raising."""

    def decorate(method: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(method)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            try:
                return method(*args, **kwargs)
            except Exception:  # noqa: BLE001 - `_failed` logs it
                _failed(method.__qualname__)
                answer: _R = otherwise
                return answer

        return call

    return decorate


def otherwise(make: Callable[[], Any]) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Say what a follower's method returns if it fails: what `make` returns. Without this it is None."""

    def mark(method: Callable[_P, _R]) -> Callable[_P, _R]:
        method._otherwise = make  # type: ignore[attr-defined]
        return method

    return mark


def bare(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Say that a follower's method may raise: nothing that it could return would do."""
    method._otherwise = None  # type: ignore[attr-defined]
    return method


class Followers:
    """The followers of one half of a connector, in the order in which they were made."""

    def __init__(self, counters: Counters) -> None:
        """`counters` count what fails."""
        self._counters = counters
        self._guards: list[_Guard] = []

    def guard(self, follower: _T, forget: Callable[[_T], object] | None = None) -> _T:
        """Returns a follower as everybody else is to have it: no public method or property of it raises.
        `forget` makes it forget all that it holds."""
        guard = _Guard(follower, self._counters, cast("Callable[[object], object] | None", forget))
        self._guards.append(guard)
        made: object = object.__new__(_guarded_class(cast("type", type(follower))))
        object.__setattr__(made, "_guard", guard)
        return cast("_T", made)

    def __iter__(self) -> Iterator[object]:
        """Yields the followers themselves, which do raise."""
        return (guard.follower for guard in self._guards)


class _Guard:
    """Stands between a follower and its callers, on any thread."""

    def __init__(
        self, follower: object, counters: Counters, forget: Callable[[object], object] | None
    ) -> None:
        self.follower = follower
        self.off = False
        self._counters = counters
        self._forget = forget
        self._lock = threading.Lock()

    def failed(self, method: str) -> None:
        """The follower has raised, and nothing of it is under way on this thread any more."""
        name = f"{type(self.follower).__qualname__}.{method}"
        _failed(name)
        self._counters.add("follower_failures")
        # One thread at a time, which may be any.
        with self._lock:
            if self._forget is None or self.off:
                return
            try:
                self._forget(self.follower)
            except Exception:  # noqa: BLE001 - `_failed` logs it
                self.off = True
                _failed(f"{name}, and what makes it forget,", "it is switched off")


def _failed(name: str, then: str = "the engine goes on without") -> None:
    """Count and log the exception that is being handled."""
    faults[name] += 1
    now = time.monotonic()
    if now >= _said.get(name, 0.0):
        _said[name] = now + _SAY_S
        log.exception("kvstore: %s failed (%d times so far); %s", name, faults[name], then)


@functools.cache
def _guarded_class(cls: type) -> type:
    """Returns a class of objects that stand for a follower of `cls`, which their `_guard` has."""
    members: dict[str, object] = {"__getattr__": _get, "__setattr__": _set, "__delattr__": _delete}
    for name in dir(cls):
        found = inspect.getattr_static(cls, name)
        if name.startswith("_") or not inspect.isfunction(_function(found)):
            continue
        # Also a base's word counts: a class that does nothing says it for the one that takes its place.
        made = (getattr(_function(vars(one).get(name)), "_otherwise", _nothing) for one in cls.__mro__)
        make = next((one for one in made if one is not _nothing), _nothing)
        call = _guarded_call(name, make, reads=isinstance(found, property))
        members[name] = property(call) if isinstance(found, property) else call
    return type(f"Guarded{cls.__name__}", (cls,), members)


def _function(member: object) -> object:
    return member.fget if isinstance(member, property) else member


def _nothing() -> None:
    """Returns None."""


def _guarded_call(name: str, make: Callable[[], Any] | None, *, reads: bool) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        guard = self._guard
        if guard.off and make is not None:
            return make()
        try:
            found = getattr(guard.follower, name)
            return found if reads else found(*args, **kwargs)
        except Exception:
            guard.failed(name)
            if make is None:
                raise
            return make()

    return call


def _get(self: Any, name: str) -> Any:
    return getattr(self._guard.follower, name)


def _set(self: Any, name: str, value: object) -> None:
    setattr(self._guard.follower, name, value)


def _delete(self: Any, name: str) -> None:
    vars(self._guard.follower).pop(name, None)
