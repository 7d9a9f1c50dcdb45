"""Which session each request of a trace belongs to, and what is said of it: for `told` and `told-ends`.

A trace may name them (ours, and `session_id` in Mooncake's form). One that names none is guessed at: a
request goes on with a session if all blocks of that session's latest request are the beginning of its own. So
requests that only share a system prompt are sessions of one request each.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from kvstore.admin.advise.traces import Trace
from kvstore.index.sessions import Priority

#: The session of a request that belongs to none.
NONE = -1


class Heard(NamedTuple):
    """What is said of a session in one space, when the request of number `after` is served."""

    after: int
    at_s: float
    space: int
    session: int
    end: bool = False
    #: How long it is to be retained from then on, in seconds.
    retain_s: float | None = None
    priority: Priority | None = None


def sessions(trace: Trace) -> list[int]:
    """Returns the number of each request's session; NONE for encoder items, and for a request without a name
    in a trace that names others'.
    """
    if all(request.session is None for request in trace.requests):
        return _guessed(trace)
    numbers: dict[str | int | None, int] = {None: NONE}
    return [numbers.setdefault(request.session, len(numbers)) for request in trace.requests]


def _guessed(trace: Trace) -> list[int]:
    #: The session whose latest request ends with a block.
    tips: dict[int, int] = {}
    found, count = [], 0
    for request in trace.requests:
        if trace.spaces[request.space].kind != "kv":
            found.append(NONE)
            continue
        tip = next((block for block in reversed(request.chain) if block in tips), None)
        if tip is None:
            session, count = count, count + 1
        else:
            session = tips.pop(tip)
        tips[request.chain[-1]] = session
        found.append(session)
    return found


def ends(trace: Trace, owners: Sequence[int]) -> list[Heard]:
    """Returns the ends of sessions as if they were told: each with its session's last request."""
    last = {session: number for number, session in enumerate(owners) if session != NONE}
    requests = trace.requests
    return [
        Heard(number, requests[number].at_s, requests[number].space, session, end=True)
        for session, number in sorted(last.items(), key=lambda item: item[1])
    ]


def told(trace: Trace, owners: Sequence[int]) -> list[Heard]:
    """Returns what a trace says of its sessions, in the order of time."""
    numbers = {request.session: owner for request, owner in zip(trace.requests, owners, strict=True)}
    times = [request.at_s for request in trace.requests]
    return [
        Heard(
            bisect_right(times, one.at_s) - 1,
            one.at_s,
            one.space,
            numbers.get(one.session, NONE),
            one.end,
            one.retain_s,
            one.priority,
        )
        for one in trace.said
    ]
