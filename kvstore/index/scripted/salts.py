"""SaltsPart: what different salts have stored in Redis. The schema stands in kvstore.index.scripted.index."""

from __future__ import annotations

from collections.abc import Iterator
from math import floor

from kvstore.index.contract import check_salt
from kvstore.index.maintenance import CLOCKS_DIFFER_S, Listing
from kvstore.index.numbers import MOST, real
from kvstore.index.scripted.scripts import Script
from kvstore.index.scripted.sessions import SessionsPart
from kvstore.index.scripted.values import key, segment_ids, understood
from kvstore.keys import NamespaceId, SaltId, SegmentId
from schemas.records import SALT_ID_BYTES

#: Segments that one script looks at: less than 1 ms of Redis's time.
_PAGE = 500

_FORBID = Script.load("forbid", "forbidden")
_SALTED = Script.load("salted")


class SaltsPart(SessionsPart):
    """The part of ScriptedIndex that tells apart what different salts have stored."""

    def of_salt(self, namespace: NamespaceId, salt: SaltId) -> Iterator[Listing]:
        check_salt(salt)
        after: SegmentId | None = SegmentId(b"")
        while after is not None:
            after, found = self._of_salt_page(namespace, salt, after)
            yield from found

    @understood
    def _of_salt_page(
        self, namespace: NamespaceId, salt: SaltId, after: SegmentId
    ) -> tuple[SegmentId | None, list[Listing]]:
        page, last = self._run(_SALTED, namespace, salt, after, _PAGE)
        found = [one for one in self.get(namespace, segment_ids(page)) if one is not None]
        return (segment_ids([last])[0] if last else None), found

    @understood
    def holdings(self, namespace: NamespaceId, over_bytes: int) -> dict[SaltId, int]:
        flat = self._client.command(
            "ZRANGE", key(namespace, "held"), f"({over_bytes}", "+inf", "BYSCORE", "WITHSCORES"
        )
        found = zip(flat[::2], flat[1::2], strict=True)
        return {SaltId(salt): floor(real(n, most=MOST)) for salt, n in found if len(salt) == SALT_ID_BYTES}

    @understood
    def forbid(self, namespace: NamespaceId, salt: SaltId) -> float:
        return self._forbid(namespace, salt)

    @understood
    def forbid_until(self, name: NamespaceId, salt: SaltId, until_s: float) -> None:
        self._forbid(name, salt, f"{until_s:.0f}")

    def _forbid(self, namespace: NamespaceId, salt: SaltId, until: str = "") -> float:
        if salt:
            check_salt(salt)
        told = self._run(_FORBID, namespace, salt, CLOCKS_DIFFER_S, until)
        self._forget_sessions(namespace, salt)
        return real(told)

    @understood
    def forbidden(self, namespace: NamespaceId) -> dict[SaltId, float]:
        told = self._client.command("HGETALL", key(namespace, "erased"))
        return {SaltId(salt): real(until) for salt, until in told.items()}
