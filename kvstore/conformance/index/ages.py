"""AgeConformance: what a time to live does (kvstore.index.maintenance.Removal.age_out), as tests."""

from __future__ import annotations

import time
from typing import Any

from kvstore.conformance.index.chains import (
    EXPECTED_BLOCKS,
    UNKNOWN,
    chain,
    namespace,
    places,
    put,
    served,
)
from kvstore.conformance.index.maintained import Maintained, erased
from kvstore.index.maintenance import Account
from kvstore.index.port import Index
from kvstore.keys import NamespaceId, SegmentId, new_segment_id

_DAY_S = 86_400


def age_out(catalogue: Any, name: NamespaceId, ttl_s: int | None, *, delete_after_s: float = 0.0) -> int:
    """Evicts all that is older, page by page; returns how many segments."""
    gone, some, after = 0, 0, ""
    for _ in range(1000):
        some, after = catalogue.age_out(name, ttl_s, delete_after_s=delete_after_s, after=after)
        gone += some
        if not after:
            return int(gone)
    raise AssertionError("pages without an end")


class AgeConformance(Maintained):
    """A part of MaintenanceConformance."""

    def _account(self, catalogue: Any, name: NamespaceId) -> Account:
        [found] = [one for one in catalogue.accounts() if one.namespace == name]
        assert isinstance(found, Account)
        return found

    def _made(
        self, index: Index, name: NamespaceId, digests: bytes, first: int, count: int, ago_s: int
    ) -> Any:
        return put(index, name, digests, first, count, created_s=int(time.time()) - ago_s)

    def test_what_is_older_goes_and_the_rest_stays(
        self, index: Index, catalogue: Any, name: NamespaceId
    ) -> None:
        digests, other = chain(6), chain(1, seed="other")
        young = self._made(index, name, digests, 0, 2, ago_s=60)
        old = self._made(index, name, digests, 2, 2, ago_s=2 * _DAY_S)
        behind = self._made(index, name, digests, 4, 2, ago_s=60)
        pinned = self._made(index, name, other, 0, 1, ago_s=2 * _DAY_S)
        self.pin_some(catalogue, name, [pinned])
        index.touch(name, [old, pinned], time.time())
        assert served(index.match(name, digests)) == 6
        assert age_out(catalogue, name, _DAY_S) == 2
        assert served(index.match(name, digests)) == 2
        assert {one.segment for one in catalogue.segments(name)} == {young, behind}
        assert catalogue.states(name, [old, pinned]) == ["trash", "trash"]
        assert {one for one, _ in catalogue.reapable(name, None, 10)} == {old, pinned}
        account = self._account(catalogue, name)
        assert (account.ttl_s, account.usage.segments, account.usage.pinned_bytes) == (_DAY_S, 2, 0)
        assert age_out(catalogue, name, _DAY_S) == 0

    def test_what_has_become_too_old_serves_nobody_before_it_is_evicted(
        self, index: Index, catalogue: Any, name: NamespaceId
    ) -> None:
        age_out(catalogue, name, _DAY_S)
        digests = chain(7)
        head = self._made(index, name, digests, 0, 3, ago_s=60)
        old = self._made(index, name, digests, 3, 2, ago_s=_DAY_S + 1)
        tail = self._made(index, name, digests, 5, 2, ago_s=60)
        assert served(index.match(name, digests)) == 3
        assert served(index.match(name, digests[: 4 * 16])) == 3
        assert [None if one is None else one.segment for one in index.find(name, digests)] == [
            *[head] * 3,
            *[None] * 2,
            *[tail] * 2,
        ]
        # Who computes it again may save it at once, and what it saves serves.
        fresh = new_segment_id()
        claim = index.claim(name, digests, fresh, 60.0)
        assert (claim.present, claim.granted) == (3, True)
        put(index, name, digests, 3, 2, segment=fresh, created_s=int(time.time()))
        assert served(index.match(name, digests)) == 7
        assert places(index.match(name, digests))[3] == (fresh, 0)
        assert age_out(catalogue, name, _DAY_S) == 1
        assert catalogue.states(name, [old]) == ["trash"]
        assert served(index.match(name, digests)) == 7

    def test_an_old_head_hides_all(self, index: Index, catalogue: Any, name: NamespaceId) -> None:
        age_out(catalogue, name, 600)
        digests = chain(4)
        self._made(index, name, digests, 0, 1, ago_s=700)
        self._made(index, name, digests, 1, 3, ago_s=60)
        assert index.match(name, digests) == []
        assert served(index.match(name, digests[:16])) == 0

    def test_a_time_to_live_can_be_taken_back_and_is_one_namespaces(
        self, index: Index, catalogue: Any, name: NamespaceId
    ) -> None:
        other = index.register(namespace("other"), expected_blocks=EXPECTED_BLOCKS)
        age_out(catalogue, name, 600)
        digests = chain(2)
        for space in (name, other):
            self._made(index, space, digests, 0, 2, ago_s=900)
        assert index.match(name, digests) == []
        assert served(index.match(other, digests)) == 2
        assert age_out(catalogue, name, None) == 0
        assert served(index.match(name, digests)) == 2
        assert [one.ttl_s for one in catalogue.accounts()] == [0, 0]
        assert age_out(catalogue, UNKNOWN, 600) == 0

    def test_every_page_is_looked_at(self, index: Index, catalogue: Any, name: NamespaceId) -> None:
        segments: list[SegmentId] = []
        for number in range(1300):
            digests = chain(1, seed=str(number))
            segments.append(self._made(index, name, digests, 0, 1, ago_s=_DAY_S if number % 3 else 60))
        assert age_out(catalogue, name, 3600) == sum(number % 3 > 0 for number in range(1300))
        assert {one.segment for one in catalogue.segments(name)} == set(segments[::3])

    def test_an_erased_namespace_has_no_time_to_live(
        self, index: Index, catalogue: Any, name: NamespaceId
    ) -> None:
        age_out(catalogue, name, 600)
        assert erased(catalogue, name)[-1] == "erased"
        index.register(namespace(), expected_blocks=EXPECTED_BLOCKS)
        assert self._account(catalogue, name).ttl_s == 0
        digest = chain(1)
        self._made(index, name, digest, 0, 1, ago_s=900)
        assert served(index.match(name, digest)) == 1
