"""Hints of a request: its session, and how the store should treat the segments that the session used.

The session is vLLM's `session_id` of the request: of its body, or the header X-Session-ID. Hints come in two
ways; where both differ, the envelope counts:

    kv_transfer_params   of the HTTP API: {"kv_hints": {"retain": 300}}
    kv_hints             vLLM's envelope of actions, which an orchestrator attaches in process: the HTTP API
                         has no field for it

    kv_transfer_params   action and payload                     meaning
    "end": true          kv.evict                               the session asks for nothing more
    "retain": seconds    kv.retain {"ttl_seconds": seconds}     it waits, for a tool perhaps, and goes on; a
                                                                "priority" may stand beside the seconds
    "priority": word     kv.priority {"priority": word}         what it is worth beside others: low, normal or
                                                                high; or a number: below 0, 0, above it
    "prefetch": true     kv.prefetch                            bring what it has to this node

All of it comes from a client and may be anything. A hint that makes no sense is ignored and counted, never
raised. The session's name is hashed at once with the request's salt, so it never leaves the process. Requests
of another salt can say nothing of the session.

Pure code. A call takes microseconds, whatever was sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, get_args

from connectors.engine.step import MOST_HINTS, RequestView
from kvstore.index.sessions import LONGEST_RETAINED_S, Priority
from kvstore.keys import NO_SESSION, SESSION_NAME_CHARS, SessionId, salt_id, session_id

_PRIORITIES: Final[tuple[Priority, ...]] = get_args(Priority)


@dataclass(frozen=True, slots=True)
class Hints:
    """A request's hints on its session."""

    #: NO_SESSION if it has none; then all other hints are empty.
    session: SessionId = NO_SESSION
    end: bool = False
    #: How long the session is to be retained after this request, in seconds; None: it has no such hint.
    retain_s: float | None = None
    priority: Priority | None = None
    prefetch: bool = False
    #: How many hints make no sense.
    ignored: int = 0

    @classmethod
    def of(cls, request: RequestView) -> Hints:
        """Returns a request's hints, which are read once, as it arrives. Never raises."""
        params = request.kv_transfer_params
        try:
            actions = request.kv_hints
        except (AttributeError, LookupError, TypeError, ValueError):
            # An engine in the client's process gets an envelope that nothing has held to vLLM's types.
            actions = [(None, None, None)]
        return read(request.session_id, request.cache_salt, params, actions)

    @property
    def says(self) -> bool:
        """Whether there is a hint beside the session's name that the index has to know."""
        return self.end or self.retain_s is not None or self.priority is not None


#: One action: its type, its version and its payload.
Action = tuple[object, object, object]


def read(name: object, salt: str, params: Mapping[str, Any], actions: Sequence[Action] = ()) -> Hints:
    """Returns the hints of a request of the session `name`, in its `kv_transfer_params` and in its envelope's
    actions. Never raises."""
    if name is None and "kv_hints" not in params and not actions:
        return NOTHING
    said: dict[str, Any] = {}
    ignored = 0
    for hint in islice(_said(params, actions), MOST_HINTS):
        ignored += hint is None
        said |= hint or {}
    if not isinstance(name, str) or not 0 < len(name) <= SESSION_NAME_CHARS:
        # The hints are on no session, or on a session without a valid name.
        return Hints(ignored=ignored + len(said) + (name is not None and name != ""))
    return Hints(session_id(salt_id(salt), name), ignored=ignored, **said)


NOTHING: Final = Hints()


def _said(params: Mapping[str, Any], actions: Sequence[Action]) -> Iterator[dict[str, Any] | None]:
    """Yields the fields of each hint, or None for a hint that makes no sense."""
    given = params.get("kv_hints")
    if isinstance(given, Mapping):
        for word, value in islice(given.items(), MOST_HINTS):
            yield _WORDS[word](value) if word in _WORDS else None
    elif given is not None:
        yield None
    for kind, version, payload in actions:
        reads = _ACTIONS.get(kind) if isinstance(kind, str) and _major(version) <= 1 else None
        yield reads(payload) if reads is not None and isinstance(payload, Mapping) else None


def _end(value: object) -> dict[str, Any] | None:
    return {"end": value} if isinstance(value, bool) else None


def _prefetch(value: object) -> dict[str, Any] | None:
    return {"prefetch": value} if isinstance(value, bool) else None


def _retain(value: object) -> dict[str, Any] | None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
        return None
    return {"retain_s": float(min(value, LONGEST_RETAINED_S))}


def _priority(value: object) -> dict[str, Any] | None:
    if isinstance(value, int) and not isinstance(value, bool):
        # Numbers mean something else everywhere; what is below and above the usual does not.
        value = _PRIORITIES[1 + (value > 0) - (value < 0)]
    return {"priority": value} if isinstance(value, str) and value in _PRIORITIES else None


def _kv_retain(payload: Mapping[str, Any]) -> dict[str, Any] | None:
    retain = _retain(payload.get("ttl_seconds"))
    if retain is None or payload.get("priority") is None:
        return retain
    priority = _priority(payload["priority"])
    return None if priority is None else retain | priority


def _major(version: object) -> float:
    """Returns the major number of a version such as "1.0"; infinity for anything else."""
    number = version.partition(".")[0] if isinstance(version, str) else ""
    return int(number) if len(number) < 4 and number.isdecimal() else float("inf")


_WORDS: Final[Mapping[str, Callable[[object], dict[str, Any] | None]]] = {
    "end": _end,
    "retain": _retain,
    "priority": _priority,
    "prefetch": _prefetch,
}
_ACTIONS: Final[Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any] | None]]] = {
    "kv.evict": lambda _: {"end": True},
    "kv.retain": _kv_retain,
    "kv.priority": lambda payload: _priority(payload.get("priority")),
    "kv.prefetch": lambda _: {"prefetch": True},
}
