"""RedisJournal: what the index in Redis remembers. The schema stands in kvstore.index.redis."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, cast

from kvstore.catalogue import Event, Ghosts, Journal
from kvstore.eviction import ghost_bytes
from kvstore.index.contract import count_digests, totals
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
        sums: Counter[str] = Counter()
        kept: list[bytes | str | int] = []
        absent: list[bytes | int] = []
        for one in outcomes:
            sums.update(totals(one))
            if one.reason:
                request = one.request[:REQUEST_CHARS].encode("utf-8", "surrogatepass")
                kept += [f"{one.at_s:.17g}", request, one.op, one.asked, one.served, one.reason, one.position]
                kept.append(one.missing[:DIGEST_BYTES])
            missing = one.missing[: MISSING_DIGESTS * DIGEST_BYTES]
            if one.op == "match" and one.reason == "absent" and missing:
                absent += [one.asked - one.served, missing]
        flat = [word for pair in sums.items() if pair[1] for word in pair]
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
        start = _after(after)
        while len(found) < limit:
            count = min(_PAGE, limit - len(found))
            page = self._client.command("XRANGE", key(namespace, "events"), start, "+", "COUNT", count)
            found += [_event(position, fields) for position, fields in page]
            if len(page) < count:
                break
            start = _after(found[-1].position)
        if after and not found and _order(after) > _order(self.last_position(namespace)):
            raise ValueError(f"{after!r} is no position of an event of namespace {namespace}")
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
        counted = self._client.command("HGETALL", key(namespace, "seen"))
        seen = {name.decode(): int(amount) for name, amount in counted.items()}
        evicted = int(self._client.command("HGET", key(namespace, "meta"), "evicted") or 0)
        return seen | ({"evicted": evicted} if evicted else {})

    def ghosts(self, namespace: NamespaceId) -> list[Ghosts]:
        counted = self._client.command("HGETALL", key(namespace, "ghost"))
        steps = sorted((int(step), int(blocks)) for step, blocks in counted.items())
        return [Ghosts(ghost_bytes(step), blocks) for step, blocks in steps]


def _after(position: str) -> str:
    """XRANGE's exclusive start. Raises ValueError."""
    return f"({position}" if _order(position) else "-"


def _order(position: str) -> tuple[int, ...]:
    """Positions as they follow each other; that of nothing is before all. Raises ValueError."""
    match = _POSITION.fullmatch(position)
    order = tuple(int(number) for number in match.groups()) if match else ()
    if (position and not order) or any(number >= 1 << 64 for number in order):
        raise ValueError(f"{position!r} is no position of an event; they look like 1700000000000-0")
    return order


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
