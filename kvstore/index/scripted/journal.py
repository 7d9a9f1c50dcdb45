"""JournalPart: the journal of the index in Redis. The schema stands in kvstore.index.scripted.index."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar, cast

from kvstore.index.contract import (
    OPERATIONS_KEPT,
    BadArgument,
    count_digests,
    faults_kept,
    is_fault,
    missed,
    reason_kept,
    reason_read,
    remembered,
    totals,
)
from kvstore.index.eviction import ghost_bytes
from kvstore.index.maintenance import Event, Fate, Ghosts, Journal, Operation, Operations
from kvstore.index.numbers import MOST, real, whole
from kvstore.index.port import Outcome
from kvstore.index.scripted.scripts import Script
from kvstore.index.scripted.values import OPERATIONS, ScriptedPart, key, number, understood
from kvstore.keys import (
    DIGEST_BYTES,
    NO_SESSION,
    SEGMENT_ID_BYTES,
    SESSION_ID_BYTES,
    Digest,
    NamespaceId,
    SegmentId,
    SessionId,
)
from schemas.records import EvictionRule

_PAGE = 500
#: Outcomes, and digests of missing blocks, that one script is given: 1 to 2 ms of Redis's time.
_TELL_SLICE = 64
_TELL_DIGESTS = 4096
#: The greatest number in an entry's position.
_MOST_PART = (1 << 64) - 1
_POSITION = re.compile(r"(\d{1,20})-(\d{1,20})")

#: Operations are forgotten so long after the last one: 400 days.
_OPERATIONS_S = 400 * 86400

_TELL = Script.load("tell")
_OPERATION = Script.load("operation")
_T = TypeVar("_T")
#: The latest time that is one, in unix seconds: of the year 2242.
_LATEST_S = 2.0**33
#: Most steps that tell.lua counts.
_STEPS = 400


class JournalPart(ScriptedPart, Journal, Operations):
    """The part of ScriptedIndex that reads the journal, and `tell`, which writes outcomes; operations.

    JournalSettings says how many of each are kept.
    """

    @understood
    def tell(self, namespace: NamespaceId, outcomes: Sequence[Outcome]) -> None:
        batch: list[Outcome] = []
        digests = 0
        for outcome in outcomes:
            missing = count_digests(outcome.missing)
            if batch and (len(batch) == _TELL_SLICE or digests + missing > _TELL_DIGESTS):
                self._tell(namespace, batch)
                batch, digests = [], 0
            batch.append(outcome)
            digests += missing
        if batch:
            self._tell(namespace, batch)

    def _tell(self, namespace: NamespaceId, outcomes: Sequence[Outcome]) -> None:
        sums: Counter[str] = Counter()
        kept: list[bytes | str | int] = []
        absent: list[bytes | int] = []
        for one in outcomes:
            sums.update(totals(one))
            if one.reason:
                request, first = remembered(one)
                kept += [1 if is_fault(one) else 0, f"{one.at_s:.17g}", request, one.op]
                kept += [one.asked, one.served, reason_kept(one), one.position, first]
            if missing := missed(one):
                absent += [one.asked - one.served, missing]
        flat = [word for pair in sums.items() if pair[1] for word in pair]
        self._run(
            _TELL,
            namespace,
            self._journal.outcomes,
            faults_kept(self._journal.outcomes),
            len(flat) // 2,
            len(kept) // 9,
            len(absent) // 2,
            *flat,
            *kept,
            *absent,
        )

    @understood
    def events(self, namespace: NamespaceId, *, after: str = "", limit: int = 1000) -> list[Event]:
        found: list[Event] = []
        start = _after(after)
        while len(found) < limit:
            count = min(_PAGE, limit - len(found))
            page = self._client.command("XRANGE", key(namespace, "events"), start, "+", "COUNT", count)
            found += self._readable(_event, page)
            if len(page) < count:
                break
            start = _after(page[-1][0].decode("ascii"))
        if after and not found and _order(after) > _order(self.last_position(namespace)):
            raise BadArgument(f"{after!r} is no position of an event of namespace {namespace}")
        return found

    @understood
    def last_position(self, namespace: NamespaceId) -> str:
        page = self._client.command("XREVRANGE", key(namespace, "events"), "+", "-", "COUNT", 1)
        return page[0][0].decode("ascii") if page else ""

    @understood
    def outcomes(self, namespace: NamespaceId, limit: int, *, faults: bool = False) -> list[Outcome]:
        if faults:
            return self._told(namespace, "faults", "+", limit)
        found = self._told(namespace, "outcomes", "+", limit)
        if len(found) < limit:
            # A fault has one id in both rings: those from here on are no longer in the first one.
            page = self._client.command("XRANGE", key(namespace, "outcomes"), "-", "+", "COUNT", 1)
            before = f"({page[0][0].decode('ascii')}" if page else "+"
            found += self._told(namespace, "faults", before, limit - len(found))
        return found

    def _told(self, namespace: NamespaceId, ring: str, before: str, limit: int) -> list[Outcome]:
        """Returns what a ring holds before an id, newest first."""
        found: list[Outcome] = []
        while len(found) < limit:
            count = min(_PAGE, limit - len(found))
            page = self._client.command("XREVRANGE", key(namespace, ring), before, "-", "COUNT", count)
            found += self._readable(_outcome, page)
            if len(page) < count:
                break
            before = f"({page[-1][0].decode('ascii')}"
        return found

    def _readable(
        self, decode: Callable[[bytes, dict[bytes, bytes]], _T], page: Sequence[tuple[bytes, Any]]
    ) -> list[_T]:
        found: list[_T] = []
        for position, fields in page:
            try:
                found.append(decode(position, fields))
            except (ValueError, TypeError, LookupError, AttributeError, OverflowError):
                self.unreadable += 1
        return found

    @understood
    def seen(self, namespace: NamespaceId) -> Mapping[str, int]:
        counted = self._client.command("HGETALL", key(namespace, "seen"))
        seen = {}
        for name, amount in counted.items():
            with suppress(ValueError):
                # What a match promised and a load did not bring is taken off again, perhaps elsewhere.
                seen[name.decode("utf-8", "replace")] = whole(amount, least=-MOST)
        evicted = number(self._client.command("HGET", key(namespace, "meta"), "evicted"))
        return seen | ({"evicted": evicted} if evicted else {})

    @understood
    def record_operation(self, verb: str, what: str) -> None:
        self._client.run(_OPERATION, OPERATIONS, OPERATIONS_KEPT, _OPERATIONS_S, self._by, verb, what)

    @understood
    def operations(self, limit: int) -> list[Operation]:
        page = self._client.command("XREVRANGE", OPERATIONS, "+", "-", "COUNT", limit) if limit > 0 else []
        return self._readable(_operation, page)

    @understood
    def ghosts(self, namespace: NamespaceId) -> list[Ghosts]:
        counted = self._client.command("HGETALL", key(namespace, "ghost"))
        steps: list[tuple[int, int]] = []
        for step, blocks in counted.items():
            with suppress(ValueError):
                steps.append((whole(step, most=_STEPS), whole(blocks, least=-MOST)))
        return [Ghosts(ghost_bytes(step), blocks) for step, blocks in sorted(steps)]


def _after(position: str) -> str:
    """Returns XRANGE's start for what comes after a position. Raises BadArgument."""
    return f"({position}" if _order(position) else "-"


def _order(position: str) -> tuple[int, ...]:
    """Returns a position's numbers, by which positions are sorted; () for "". Raises BadArgument."""
    match = _POSITION.fullmatch(position)
    try:
        order = tuple(whole(part, most=_MOST_PART) for part in match.groups()) if match else ()
    except ValueError:
        order = ()
    if position and not order:
        raise BadArgument(f"{position!r} is no position of an event; they look like 1700000000000-0")
    return order


def _event(position: bytes, fields: dict[bytes, bytes]) -> Event:
    text = position.decode("ascii")
    return Event(
        position=text,
        at_s=min(_order(text)[0] / 1000, _LATEST_S),
        op=cast(Any, fields[b"op"].decode("ascii")),
        segment=SegmentId(_sized(fields[b"segment"], SEGMENT_ID_BYTES)) if fields[b"segment"] else None,
        first=Digest(_sized(fields[b"first"], DIGEST_BYTES)) if fields[b"first"] else None,
        last=Digest(_sized(fields[b"last"], DIGEST_BYTES)) if fields[b"last"] else None,
        depth=number(fields[b"depth"]),
        slots=number(fields[b"slots"]),
        nbytes=number(fields[b"bytes"]),
        rule=cast(EvictionRule, fields[b"rule"].decode("ascii")) if fields[b"rule"] else None,
        by=fields.get(b"by", b"").decode("utf-8", "replace"),
        fate=cast(Fate, fields[b"fate"].decode("ascii")) if fields.get(b"fate") else None,
        session=SessionId(_sized(fields[b"session"], SESSION_ID_BYTES))
        if fields.get(b"session")
        else NO_SESSION,
    )


def _operation(position: bytes, fields: dict[bytes, bytes]) -> Operation:
    by, verb, what = (fields.get(name, b"").decode("utf-8", "replace") for name in (b"by", b"verb", b"what"))
    return Operation(
        at_s=min(_order(position.decode("ascii"))[0] / 1000, _LATEST_S), by=by, verb=verb, what=what
    )


def _outcome(_position: bytes, fields: dict[bytes, bytes]) -> Outcome:
    at_s = real(fields[b"at"], least=0.0, most=_LATEST_S)
    reason, detail = reason_read(fields[b"reason"].decode())
    return Outcome(
        at_s=at_s,
        request=fields[b"request"].decode("utf-8", "surrogatepass"),
        op=cast(Any, fields[b"op"].decode("ascii")),
        asked=number(fields[b"asked"]),
        served=number(fields[b"served"]),
        reason=reason,
        position=number(fields[b"position"]),
        missing=fields[b"first"],
        detail=detail,
    )


def _sized(value: bytes, size: int) -> bytes:
    if len(value) != size:
        raise ValueError(f"{len(value)} bytes instead of {size}")
    return value
