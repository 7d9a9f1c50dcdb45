"""sessions: lists what the index remembers of clients' sessions, ends them, and retains what they have used.

Neither deletes anything: kvstore.index.sessions says what either does to the order of eviction. A session is
known by one id in every namespace in which its requests were served, and is told the same in all of them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from typing import Literal

from pydantic import ValidationError

from kvstore.admin.backends import Cache, UnknownName
from kvstore.admin.curate.plan import MovePlan, Planned, plan_of
from kvstore.admin.curate.reports import SessionLine, SessionReport, SessionsReport, ToldSession
from kvstore.errors import ConfigError
from kvstore.index.sessions import Hint, HintEffect, SessionListing, SessionState
from kvstore.keys import (
    NO_SALT,
    SESSION_ID_BYTES,
    SESSION_NAME_CHARS,
    NamespaceId,
    SaltId,
    SessionId,
    salt_id,
    session_id,
)
from kvstore.store.sessions import SpaceSessions
from schemas.namespace import Namespace

NOTHING_TOLD = HintEffect("live", 0, 0, 0, 0)
_ID = re.compile(f"[0-9a-f]{{1,{2 * SESSION_ID_BYTES}}}")


def sessions(
    cache: Cache, prefix: str | None, state: SessionState | None, most: int, now_s: float
) -> SessionsReport:
    """Returns the `most` sessions that own most bytes, of one namespace or all, in one state or any, and how
    many there are in each state. Reads through all that is remembered.

    Raises UnknownName and what the index raises.
    """
    names = list(cache.namespaces()) if prefix is None else [cache.namespace(prefix)]
    tally = SessionTally(most, state)
    for name in names:
        for one in _all(cache, name):
            tally.add(name, one)
    retained = sum(cache.index.retained(name).get(NO_SALT, 0) for name in names if cache.index)
    return tally.report(retained, now_s)


class SessionTally:
    """Counts sessions by their states, and keeps the `most` that own most bytes, in one state or any."""

    def __init__(self, most: int, state: SessionState | None = None) -> None:
        self._most = most
        self._state = state
        self._counted: Counter[SessionState] = Counter()
        #: A heap, whose least is first. The number of the session decides where all else is equal.
        self._largest: list[tuple[tuple[int, float, str], int, SessionLine]] = []

    def add(self, name: NamespaceId, one: SessionListing) -> None:
        """Counts a session of a namespace."""
        self._counted[one.state] += 1
        if self._state in (None, one.state):
            line, number = session_line(name, one), self._counted.total()
            heappush(self._largest, ((line.stored_bytes, line.last_use_s, line.session), number, line))
            if len(self._largest) > self._most:
                heappop(self._largest)

    def report(self, retained_bytes: int, now_s: float) -> SessionsReport:
        """Returns the report of the sessions so far."""
        # A session that is used while all are read may come twice.
        largest = {(line.namespace, line.session): line for *_, line in sorted(self._largest, reverse=True)}
        return SessionsReport(
            at_s=now_s,
            live=self._counted["live"],
            retained=self._counted["retained"],
            ended=self._counted["ended"],
            retained_bytes=retained_bytes,
            sessions=tuple(largest.values()),
        )


def find(cache: Cache, wanted: str, prefix: str | None) -> list[tuple[NamespaceId, SessionListing]]:
    """Returns a session, by its id or the start of it, in each namespace that remembers it, of one or all.

    Raises UnknownName and what the index raises.
    """
    return _find(cache, wanted, list(cache.namespaces()) if prefix is None else [cache.namespace(prefix)])


def plan_session(
    cache: Cache, wanted: str, *, salt: str = "", prefixes: Sequence[str] = (), max_bytes: int | None = None
) -> tuple[MovePlan, list[SessionLine]]:
    """Returns what only a session has used, as what is to be moved, and the session in each namespace that
    remembers it.

    `wanted` is the name that its client gives it, or else, without a salt, its id or the start of it; `salt`
    is its requests' `cache_salt`. It is looked for in the namespaces whose ids start with one of `prefixes`,
    by default in all. Of the segments `max_bytes` takes heads first. Raises UnknownName and what the index
    raises.
    """
    known, found = cache.namespaces(), find_named(cache, wanted, salt=salt, prefixes=prefixes)
    assert cache.index is not None, "a session is known, so there is an index"
    entries = []
    for name, one in found:
        listings = cache.index.get(name, list(cache.index.owned(name, one.session)))
        entries += [Planned.of(name, listing) for listing in listings if listing is not None]
    entries.sort(key=lambda entry: (entry.depth, entry.namespace, entry.segment))
    plan = plan_of({name: known[name] for name, _ in found}, entries, max_bytes)
    return plan, [session_line(name, one) for name, one in found]


def find_named(
    cache: Cache, wanted: str, *, salt: str = "", prefixes: Sequence[str] = ()
) -> list[tuple[NamespaceId, SessionListing]]:
    """Returns a session in each namespace that remembers it; see `plan_session`. Raises UnknownName and what
    the index raises."""
    names = sorted({cache.namespace(prefix) for prefix in prefixes}) if prefixes else list(cache.namespaces())
    named = 0 < len(wanted) <= SESSION_NAME_CHARS
    found = _remembered(cache, session_id(salt_id(salt), wanted), names) if named else []
    if not found:
        found = _known([]) if salt else _find(cache, wanted, names)
    return found


def _find(
    cache: Cache, wanted: str, names: Sequence[NamespaceId]
) -> list[tuple[NamespaceId, SessionListing]]:
    if not _ID.fullmatch(wanted.lower()):
        raise UnknownName(f"{wanted!r} is no session: an id has {2 * SESSION_ID_BYTES} hex digits")
    if len(wanted) == 2 * SESSION_ID_BYTES:
        return found_by_id(cache, SessionId(bytes.fromhex(wanted)), names)
    listed = [(name, one) for name in names for one in _all(cache, name)]
    found = [(name, one) for name, one in listed if one.session.hex().startswith(wanted.lower())]
    if len({one.session for _, one in found}) > 1:
        raise UnknownName(f"several sessions start with {wanted!r}; `cache-admin sessions` lists them")
    return _known(found)


def found_by_id(
    cache: Cache, session: SessionId, names: Sequence[NamespaceId]
) -> list[tuple[NamespaceId, SessionListing]]:
    """Returns a session in each of these namespaces that remembers it. Raises UnknownName and what the index
    raises."""
    return _known(_remembered(cache, session, names))


def _remembered(
    cache: Cache, session: SessionId, names: Sequence[NamespaceId]
) -> list[tuple[NamespaceId, SessionListing]]:
    index = cache.index
    return [(name, one) for name in names if index for one in index.find_sessions(name, [session]) if one]


def tell(
    cache: Cache,
    chosen: Sequence[tuple[NamespaceId, SessionListing]],
    action: Literal["end", "retain"],
    *,
    for_s: float = 0.0,
    salt: SaltId = NO_SALT,
    applied: bool,
    now_s: float,
) -> SessionReport:
    """Ends a session, or retains what it has used for `for_s` seconds from now on; only a plan unless
    `applied`. `salt` is the id of its requests' salt, if that is known: its quota then bounds it, too.

    Raises ConfigError if a namespace is of another version, and what the index raises.
    """
    retains = action == "retain"
    hint = Hint(end=not retains, retain_s=for_s if retains else None)
    told = []
    if applied:
        session = chosen[0][1].session
        words = f"{action} {session.hex()}" + (f" for {for_s:g} s" if retains else "")
        cache.record("sessions", words)
    store = cache.saving() if applied else None
    for name, before in chosen:
        one, done = before, NOTHING_TOLD
        if store is not None:
            try:
                space = Namespace.model_validate_json(cache.namespaces()[name])
            except ValidationError as exc:
                raise ConfigError(f"namespace {name} is of another version of kvstore") from exc
            allowance = SpaceSessions(store.backends, space, lambda call: call()).allowance(one.session, salt)
            done = store.index.session(name, one.session, [], hint=hint, allowance=allowance)
            [after] = store.maintenance.find_sessions(name, [one.session])
            one = after or before
        told.append(
            ToldSession(
                session=session_line(name, one),
                moved=done.demoted,
                retained_bytes=done.retained_bytes,
                refused_bytes=done.refused_bytes,
            )
        )
    until_s = now_s + for_s if retains else None
    return SessionReport(at_s=now_s, action=action, applied=applied, until_s=until_s, sessions=tuple(told))


def _known(found: list[tuple[NamespaceId, SessionListing]]) -> list[tuple[NamespaceId, SessionListing]]:
    if not found:
        raise UnknownName("the index remembers no such session; `cache-admin sessions` lists those it does")
    return found


def _all(cache: Cache, name: NamespaceId) -> Iterator[SessionListing]:
    """Yields every session of a namespace once."""
    seen: set[SessionId] = set()
    for one in cache.index.sessions(name) if cache.index is not None else ():
        if one.session not in seen:
            seen.add(one.session)
            yield one


def session_line(name: NamespaceId, one: SessionListing) -> SessionLine:
    """Returns a session as reports tell of it."""
    return SessionLine(
        namespace=name,
        session=one.session.hex(),
        state=one.state,
        until_s=one.until_s or None,
        priority=one.priority,
        last_use_s=one.last_use_s,
        segments=one.segments,
        stored_bytes=one.nbytes,
    )
