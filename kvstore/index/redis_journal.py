"""RedisJournal: what the index in Redis remembers. The schema stands in kvstore.index.redis."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, cast

from kvstore.catalogue import Event, Ghosts, Journal
from kvstore.eviction import ghost_bytes
from kvstore.index.contract import count_digests
from kvstore.index.redis_client import Script
from kvstore.index.redis_values import RedisPart, key
from kvstore.keys import DIGEST_BYTES, Digest, NamespaceId, SegmentId
from kvstore.ports import MISSING_DIGESTS, REQUEST_CHARS, Outcome
from schemas.records import EvictionRule

_PAGE = 500
#: Outcomes and digests of missing blocks that one script is given: 1 to 2 ms of Redis' time.
_TOLD = 64
_TOLD_DIGESTS = 4096
_POSITION = re.compile(r"(\d{1,20})-(\d{1,20})")

_TELL = Script.load("tell")


class RedisJournal(RedisPart, Journal):
    """The part of RedisIndex that remembers, and `tell`, which writes it."""

    def tell(self, namespace: NamespaceId, outcomes: Sequence[Outcome]) -> None:
        batch: list[Outcome] = []
        digests = 0
        for outcome in outcomes:
            missing = count_digests(outcome.missing)
            if batch and (len(batch) == _TOLD or digests + missing > _TOLD_DIGESTS):
                self._tell(namespace, batch)
                batch, digests = [], 0
            batch.append(outcome)
            digests += missing
        if batch:
            self._tell(namespace, batch)

    def _tell(self, namespace: NamespaceId, outcomes: Sequence[Outcome]) -> None:
        totals: Counter[str] = Counter()
        kept: list[bytes | str | int] = []
        absent: list[bytes | int] = []
        for one in outcomes:
            totals.update(totals_of(one))
            if one.reason:
                request = one.request[:REQUEST_CHARS].encode("utf-8", "surrogatepass")
                kept += [f"{one.at_s:.17g}", request, one.op, one.asked, one.served, one.reason, one.position]
                kept.append(one.missing[:DIGEST_BYTES])
            missing = one.missing[: MISSING_DIGESTS * DIGEST_BYTES]
            if one.op == "match" and one.reason == "absent" and missing:
                absent += [one.asked - one.position, missing]
        flat = [word for pair in totals.items() if pair[1] for word in pair]
        self._client.run(
            _TELL,
            key(namespace, "meta"),
            self._journal.outcomes,
            len(flat) // 2,
            len(kept) // 8,
            len(absent) // 2,
            *flat,
            *kept,
            *absent,
        )

    def events(self, namespace: NamespaceId, *, after: str = "", limit: int = 1000) -> list[Event]:
        found: list[Event] = []
        while len(found) < limit:
            count = min(_PAGE, limit - len(found))
            page = self._client.command(
                "XRANGE", key(namespace, "events"), _after(after), "+", "COUNT", count
            )
            found += [_event(position, fields) for position, fields in page]
            if len(page) < count:
                break
            after = found[-1].position
        return found

    def last_position(self, namespace: NamespaceId) -> str:
        page = self._client.command("XREVRANGE", key(namespace, "events"), "+", "-", "COUNT", 1)
        return page[0][0].decode("ascii") if page else ""

    def outcomes(self, namespace: NamespaceId, limit: int) -> list[Outcome]:
        found: list[Outcome] = []
        before = "+"
        while len(found) < limit:
            count = min(_PAGE, limit - len(found))
            page = self._client.command("XREVRANGE", key(namespace, "outcomes"), before, "-", "COUNT", count)
            found += [_outcome(fields) for _, fields in page]
            if len(page) < count:
                break
            before = f"({page[-1][0].decode('ascii')}"
        return found

    def seen(self, namespace: NamespaceId) -> Mapping[str, int]:
        totals = self._client.command("HGETALL", key(namespace, "seen"))
        seen = {name.decode(): int(amount) for name, amount in totals.items()}
        evicted = int(self._client.command("HGET", key(namespace, "meta"), "evicted") or 0)
        return seen | ({"evicted": evicted} if evicted else {})

    def ghosts(self, namespace: NamespaceId) -> list[Ghosts]:
        counted = self._client.command("HGETALL", key(namespace, "ghost"))
        steps = sorted((int(step), int(blocks)) for step, blocks in counted.items())
        return [Ghosts(ghost_bytes(step), blocks) for step, blocks in steps]


def totals_of(outcome: Outcome) -> dict[str, int]:
    """What one outcome adds to the totals; zeros included."""
    lacking = outcome.asked - outcome.served
    if outcome.op == "save":
        totals = {"offered": outcome.asked, "stored": outcome.served}
        return totals | {f"unsaved:{outcome.reason}": lacking} if outcome.reason else totals
    totals = {}
    if outcome.op == "match":
        totals = {"requests": 1, "asked": outcome.asked, "served": outcome.served}
    return totals | {f"miss:{outcome.reason}": lacking} if outcome.reason else totals


def _after(position: str) -> str:
    """XRANGE's exclusive start."""
    if not position:
        return "-"
    match = _POSITION.fullmatch(position)
    if match is None or any(int(number) >= 1 << 64 for number in match.groups()):
        raise ValueError(f"{position!r} is not the position of an event; they look like 1700000000000-0")
    return f"({position}"


def _event(position: bytes, fields: dict[bytes, bytes]) -> Event:
    op = cast(Any, fields[b"op"].decode("ascii"))
    return Event(
        position=position.decode("ascii"),
        at_s=int(position.split(b"-")[0]) / 1000,
        op=op,
        segment=SegmentId(fields[b"segment"]) if fields[b"segment"] else None,
        first=Digest(fields[b"first"]) if fields[b"first"] else None,
        last=Digest(fields[b"last"]) if fields[b"last"] else None,
        depth=int(fields[b"depth"]),
        slots=int(fields[b"slots"]),
        nbytes=int(fields[b"bytes"]),
        rule=cast(EvictionRule, fields[b"rule"].decode("ascii")) if fields[b"rule"] else None,
    )


def _outcome(fields: dict[bytes, bytes]) -> Outcome:
    return Outcome(
        at_s=float(fields[b"at"]),
        request=fields[b"request"].decode("utf-8", "surrogatepass"),
        op=cast(Any, fields[b"op"].decode("ascii")),
        asked=int(fields[b"asked"]),
        served=int(fields[b"served"]),
        reason=fields[b"reason"].decode(),
        position=int(fields[b"position"]),
        missing=fields[b"first"],
    )
