"""SessionsPart: records of sessions in Redis. The schema stands in kvstore.index.scripted.index."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from kvstore.errors import NamespaceUnknown
from kvstore.index.contract import HOT_KEPT, HOT_MOST, check_segments, check_session, minute
from kvstore.index.eviction import MINUTE_S
from kvstore.index.numbers import MOST, MOST_S, real, whole
from kvstore.index.scripted.catalogue import CataloguePart
from kvstore.index.scripted.scripts import Script
from kvstore.index.scripted.values import key, record_of, size_of, understood
from kvstore.index.sessions import (
    NOTHING_RETAINED,
    SESSION_SLICE,
    USE,
    Allowance,
    Hint,
    HintEffect,
    Priority,
    SessionListing,
    SessionState,
    retained_s,
)
from kvstore.keys import (
    NO_SESSION,
    SEGMENT_ID_BYTES,
    SESSION_ID_BYTES,
    NamespaceId,
    SaltId,
    SegmentId,
    SessionId,
    sessions_of_salt,
)
from kvstore.rules.units import batches
from schemas.records import SALT_ID_BYTES, SegmentRecord

_SESSION = Script.load("session", "score", "retention", "sessions")
_OWNED = Script.load("owned")
_TIME = Script.load("time")
_RETAINED = Script.load("retained")
_EXPIRE = Script.load("expire", "score", "retention")

#: Sessions on a page of a listing.
_PAGE = 200
#: Retained segments that one script looks at.
_RETAINED_SLICE = 500
#: Retained segments whose time is over that a look takes off at most: later ones count until somebody expires
#: them.
_MOST_OVER = 1 << 20
#: Calls of one `expire`, of some hundred segments each; the next one goes on.
_EXPIRE_ROUNDS = 10_000
_HASHES = ("sessions:0", "sessions:1")
_HEAD = struct.Struct(">II")
_STATES: tuple[SessionState, ...] = ("live", "retained", "ended")
_PRIORITIES: tuple[Priority, ...] = ("low", "normal", "high")


def _own(record: bytes) -> list[SegmentId]:
    """Returns the segments that a record lists as its session's own."""
    ends = range(_HEAD.size + SEGMENT_ID_BYTES, len(record) + 1, SEGMENT_ID_BYTES)
    return [SegmentId(record[end - SEGMENT_ID_BYTES : end]) for end in ends]


class SessionsPart(CataloguePart):
    """The part of ScriptedIndex that remembers sessions."""

    @understood
    def session(
        self,
        namespace: NamespaceId,
        session: SessionId,
        segments: Sequence[SegmentId],
        used_s: float | None = None,
        hint: Hint = USE,
        *,
        allowance: Allowance = NOTHING_RETAINED,
    ) -> HintEffect:
        check_segments(segments)
        check_session(session)
        demoted = retained = refused = 0
        retain_s = None if hint.end else retained_s(hint)
        slices = list(batches(list(dict.fromkeys(segments)), SESSION_SLICE)) or [[]]
        for number, some in enumerate(slices):
            first, last = number == 0, number == len(slices) - 1
            answer = self._run(
                _SESSION,
                namespace,
                session,
                b"".join(some),
                "" if used_s is None else minute(used_s),
                1 if first else 0,
                1 if last and hint.end else 0,
                "" if retain_s is None or not first else retain_s,
                "" if hint.priority is None else _PRIORITIES.index(hint.priority),
                allowance.namespace_bytes,
                allowance.salt_bytes,
                allowance.session_bytes,
                HOT_MOST,
                HOT_KEPT,
            )
            if answer is None:
                raise NamespaceUnknown(
                    f"{self._client.name}: session: namespace {namespace} is not registered"
                )
            told, own, moved, nbytes, over = answer
            state, own = _STATES[whole(told, most=len(_STATES) - 1)], whole(own)
            demoted, retained, refused = (
                demoted + whole(moved),
                retained + whole(nbytes),
                refused + whole(over),
            )
        return HintEffect(state, own, demoted, retained, refused)

    @understood
    def owned(self, namespace: NamespaceId, session: SessionId) -> dict[SegmentId, SegmentRecord]:
        check_session(session)
        found = self._run(_OWNED, namespace, session)
        known = (
            (SegmentId(one), record_of(value)) for one, value in zip(found[::2], found[1::2], strict=True)
        )
        return {segment: record for segment, record in known if record is not None}

    def sessions(self, namespace: NamespaceId) -> Iterator[SessionListing]:
        for part in _HASHES:
            cursor: Any = 0
            while True:
                cursor, page = self._sessions_page(namespace, part, cursor)
                yield from page
                if cursor == 0:
                    break

    @understood
    def _sessions_page(
        self, namespace: NamespaceId, part: str, cursor: Any
    ) -> tuple[Any, list[SessionListing]]:
        cursor, page = self._client.command("HSCAN", key(namespace, part), cursor, "COUNT", _PAGE)
        return cursor, self._sessions_listed(namespace, page)

    @understood
    def find_sessions(
        self, namespace: NamespaceId, sessions: Sequence[SessionId]
    ) -> list[SessionListing | None]:
        for session in sessions:
            check_session(session)
        found: dict[bytes, bytes] = {}
        for some in batches(sessions, _PAGE):
            for part in _HASHES:
                values = self._client.command("HMGET", key(namespace, part), *some)
                found |= {one: value for one, value in zip(some, values, strict=True) if value}
        listed = {one.session: one for one in self._sessions_listed(namespace, found)}
        return [listed.get(session) for session in sessions]

    def _sessions_listed(self, namespace: NamespaceId, records: dict[bytes, bytes]) -> list[SessionListing]:
        listed = []
        now = real(self._run(_TIME, namespace), least=0.0, most=MOST_S) if records else 0.0
        for session, value in records.items():
            rest = len(value) - _HEAD.size
            if len(session) != SESSION_ID_BYTES or rest < 0 or rest % SEGMENT_ID_BYTES:
                continue
            head, ends = _HEAD.unpack_from(value)
            own = _own(value)
            owners = self.owners(namespace, own)
            sizes = self._sizes(namespace, [a for a, b in zip(own, owners, strict=True) if b == session])
            state: SessionState = "retained" if ends > now else "live"
            listed.append(
                SessionListing(
                    SessionId(session),
                    "ended" if head % 8 >= 4 else state,
                    real(ends) if ends > now else 0.0,
                    _PRIORITIES[min(head % 4, 2)],
                    real(head // 8 * MINUTE_S),
                    len(sizes),
                    sum(sizes),
                )
            )
        return listed

    def _sizes(self, namespace: NamespaceId, segments: Sequence[SegmentId]) -> list[int]:
        """Returns the bytes of those segments that are visible."""
        if not segments:
            return []
        values = self._client.command("HMGET", key(namespace, "segs"), *segments)
        return [size_of(value) for value in values if value]

    @understood
    def owners(self, namespace: NamespaceId, segments: Sequence[SegmentId]) -> list[SessionId]:
        check_segments(segments)
        found: list[SessionId] = []
        for some in batches(segments, SESSION_SLICE):
            values = self._client.command("HMGET", key(namespace, "owner"), *some)
            found += [
                SessionId(value) if value and len(value) == SESSION_ID_BYTES else NO_SESSION
                for value in values
            ]
        return found

    @understood
    def retained(self, namespace: NamespaceId) -> dict[SaltId, int]:
        over: Counter[bytes] = Counter()
        told: list[bytes] = []
        for first in range(0, _MOST_OVER, _RETAINED_SLICE):
            told, some = self._run(_RETAINED, namespace, first, _RETAINED_SLICE)
            for salt, nbytes in zip(some[::2], some[1::2], strict=True):
                over[b""] += whole(nbytes)
                over[salt] += whole(nbytes) if salt else 0
            if len(some) < 2 * _RETAINED_SLICE:
                break
        held = {
            salt: whole(n, least=-MOST) - over[salt] for salt, n in zip(told[::2], told[1::2], strict=True)
        }
        return {SaltId(salt): n for salt, n in held.items() if len(salt) in (0, SALT_ID_BYTES) and n > 0}

    @understood
    def expire(self, namespace: NamespaceId) -> int:
        gone = 0
        for _ in range(_EXPIRE_ROUNDS):
            some = whole(self._run(_EXPIRE, namespace))
            if not some:
                break
            gone += some
        return gone

    def _forget_sessions(self, namespace: NamespaceId, salt: SaltId) -> None:
        """Forgets a salt's sessions, and with an empty one all: nothing is their own any more."""
        begin = sessions_of_salt(salt) if salt else b""
        pattern = b"".join(b"\\" + bytes([one]) for one in begin) + b"*"
        for part in _HASHES:
            cursor: Any = 0
            while True:
                cursor, page = self._client.command(
                    "HSCAN", key(namespace, part), cursor, "MATCH", pattern, "COUNT", 10 * _PAGE
                )
                for session in page:
                    self._client.command("HDEL", key(namespace, part), session)
                    if own := _own(page[session]):
                        self._client.command("HDEL", key(namespace, "owner"), *own)
                if cursor == 0:
                    break
