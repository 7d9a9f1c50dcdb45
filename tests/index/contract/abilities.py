"""The contracts of Pins, Quotas, Ages, Leases, Heat and Operations (and of Event.by), of
kvstore.index.maintenance, as tests."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest

from kvstore.errors import CapacityExceeded
from kvstore.index.contract import OPERATIONS_KEPT
from kvstore.index.maintenance import Account, Usage
from kvstore.index.port import Index
from kvstore.keys import NamespaceId, SegmentId, new_segment_id
from schemas.records import rounded_cost
from tests.index.contract.chains import (
    EXPECTED_BLOCKS,
    UNKNOWN,
    chain,
    namespace,
    places,
    put,
    put_all,
    record,
    served,
)
from tests.index.contract.journal import SLACK
from tests.index.contract.maintained import (
    DELETE_AFTER_S,
    MADE_S,
    MINUTE,
    NOTHING,
    SAVED_S,
    SOON_S,
    Maintained,
    cull,
    erased,
    evict,
    pin,
)

_ANNA = "anna@desk"
_DAY_S = 86_400


class PinConformance(Maintained):
    """A part of FullIndexConformance. With it, the other parts pin some of their segments, too."""

    def pin_some(
        self, catalogue: Any, name: NamespaceId, segments: Sequence[SegmentId]
    ) -> Sequence[SegmentId]:
        pin(catalogue, name, segments)
        return [one.segment for one in catalogue.get(name, segments) if one and one.pinned]

    def unpin_some(self, catalogue: Any, name: NamespaceId, segments: Sequence[SegmentId]) -> None:
        catalogue.unpin(name, segments)

    def test_pin_counts_what_it_pinned(self, index: Index, catalogue: Any, name: NamespaceId) -> None:
        segments = put_all(index, name, chain(5), [1] * 5)
        gone = segments.pop()
        evict(index, name, [gone])
        one = record(1).nbytes
        some = [segments[0], gone, new_segment_id(), segments[1], segments[0]]
        assert pin(catalogue, name, some) == 2
        assert pin(catalogue, name, segments[:3]) == 1
        assert pin(catalogue, name, segments[:3]) == pin(catalogue, name, []) == 0
        assert pin(catalogue, UNKNOWN, segments) == 0
        assert [one.pinned for one in catalogue.get(name, segments) if one] == [True] * 3 + [False]
        assert {one.segment for one in catalogue.segments(name) if one.pinned} == set(segments[:3])
        assert [one.segment for one in catalogue.order(name, 10)] == segments[3:]
        assert catalogue.usage(name) == Usage(4 * one, 4, 4, 3 * one)
        assert catalogue.accounts()[0].usage == catalogue.usage(name)
        assert catalogue.unpin(name, [segments[3], gone, *segments[:2], segments[0]]) == 2
        assert catalogue.unpin(name, []) == catalogue.unpin(UNKNOWN, segments) == 0
        assert catalogue.usage(name) == Usage(4 * one, 4, 4, one)
        # Pinned segments are served, and noted as used, like all others.
        assert served(index.match(name, chain(4))) == 4

    def test_pin_keeps_to_its_limit(self, index: Index, catalogue: Any, name: NamespaceId) -> None:
        segments = put_all(index, name, chain(30), [1, 2, 3, 4, 20])
        most = sum(record(blocks).nbytes for blocks in (2, 3, 4))
        assert catalogue.pin(name, segments[1:3], most_bytes=most) == 2
        for some in (segments[:1] + segments[3:4], [segments[3], segments[0]], segments):
            with pytest.raises(CapacityExceeded):
                catalogue.pin(name, some, most_bytes=most)
            assert [one.pinned for one in catalogue.get(name, segments) if one] == [
                False,
                True,
                True,
                False,
                False,
            ]
        # What is pinned already doesn't count twice.
        assert catalogue.pin(name, segments[1:4] + segments[1:4], most_bytes=most) == 1
        assert catalogue.usage(name).pinned_bytes == most
        catalogue.unpin(name, segments[2:3])
        with pytest.raises(CapacityExceeded):
            catalogue.pin(name, segments[4:], most_bytes=most)
        assert catalogue.pin(name, segments[:1], most_bytes=most) == 1
        with pytest.raises(CapacityExceeded):
            catalogue.pin(name, segments[2:3], most_bytes=0)
        # A limit that was lowered since matters to new pins only.
        assert catalogue.pin(name, segments[:2], most_bytes=0) == 0

    def test_pins_at_once_keep_to_their_limit_together(
        self, index: Index, catalogue: Any, name: NamespaceId
    ) -> None:
        segments = put_all(index, name, chain(40), [1] * 40)
        handles = [self.configured() for _ in range(4)]
        barrier = threading.Barrier(4)

        def work(worker: int) -> int:
            barrier.wait()
            done = 0
            for segment in segments[worker * 10 : worker * 10 + 10]:
                with suppress(CapacityExceeded):
                    done += handles[worker].pin(name, [segment], most_bytes=25 * record(1).nbytes)
            return done

        with ThreadPoolExecutor(4) as pool:
            assert sum(pool.map(work, range(4))) == 25
        for handle in handles:
            handle.close()
        assert catalogue.usage(name).pinned_bytes == 25 * record(1).nbytes

    def test_unpinned_segments_go_by_their_last_use(
        self, index: Index, catalogue: Any, name: NamespaceId, encoder: NamespaceId
    ) -> None:
        digests = chain(128)
        head, tail = put_all(index, name, digests, [64, 64])
        fresh = put(index, name, chain(1, seed="f"), created_s=SOON_S + 2 * MINUTE)
        pin(catalogue, name, [head, tail])
        index.touch(name, [head, tail], SOON_S)
        index.touch(name, [head], SOON_S + MINUTE)
        index.touch(name, [head], MADE_S)
        assert [one.last_use_s for one in catalogue.get(name, [head, tail]) if one] == [
            SOON_S + MINUTE,
            SOON_S,
        ]
        catalogue.unpin(name, [head, tail])
        assert [(one.segment, one.used_s) for one in catalogue.order(name, 9)] == [
            (tail, SOON_S),
            (head, SOON_S + MINUTE),
            (fresh, SAVED_S + 3 * MINUTE),
        ]
        # An item keeps what its cost is worth.
        item = put(index, encoder, chain(1), cost_us=10**9)
        pin(catalogue, encoder, [item])
        index.touch(encoder, [item], SOON_S)
        catalogue.unpin(encoder, [item])
        (one,) = catalogue.order(encoder, 9)
        assert (one.used_s, one.keep_s) == (SOON_S, SOON_S + 150 * MINUTE)

    def test_usage_has_pinned_bytes_and_costs(self, index: Index, catalogue: Any, name: NamespaceId) -> None:
        costs = [rounded_cost(cost) for cost in (0, 5, 123_456, 7 * 10**11)]
        one = record(1).nbytes
        segments = [put(index, name, chain(1, seed=str(i)), cost_us=cost) for i, cost in enumerate(costs)]
        assert catalogue.usage(name) == Usage(4 * one, 4, 4, 0, sum(costs))
        pin(catalogue, name, segments[2:])
        put(index, name, chain(1, seed="3"), segment=segments[3], cost_us=costs[3])
        assert catalogue.usage(name) == Usage(4 * one, 4, 4, 2 * one, sum(costs))
        evict(index, name, segments[1:3])
        assert catalogue.usage(name) == Usage(2 * one, 2, 2, one, costs[0] + costs[3])
        catalogue.unpin(name, segments)
        assert catalogue.usage(name) == Usage(2 * one, 2, 2, 0, costs[0] + costs[3])
        evict(index, name, segments)
        assert catalogue.usage(name) == NOTHING

    def test_pinned_segments_are_not_culled(self, index: Index, catalogue: Any, name: NamespaceId) -> None:
        segments = put_all(index, name, chain(10), [1] * 10)
        pin(catalogue, name, segments[5:])
        assert cull(catalogue, name, keep=6 * record(1).nbytes) == segments[4:0:-1]
        assert cull(catalogue, name) == segments[:1]
        assert cull(catalogue, name) == []
        assert catalogue.unpin(name, segments[7:]) == 3
        assert cull(catalogue, name) == segments[:6:-1]

    def test_eviction_takes_pinned_segments_and_their_bytes(
        self, index: Index, catalogue: Any, name: NamespaceId
    ) -> None:
        segments = put_all(index, name, chain(6), [2] * 3)
        pin(catalogue, name, segments)
        assert evict(index, name, segments[:1]) == 1
        assert catalogue.usage(name).pinned_bytes == 2 * record(2).nbytes
        put(index, name, chain(6), 2, 2, segment=segments[1])
        assert [one and one.pinned for one in catalogue.get(name, segments)] == [None, True, True]
        assert evict(index, name, segments[1:2]) == 1
        assert catalogue.usage(name) == Usage(record(2).nbytes, 1, 2, record(2).nbytes)
        assert catalogue.invalidate(name) == 1
        assert catalogue.usage(name) == NOTHING

    def test_what_was_invalidated_is_neither_pinned_nor_unpinned(
        self, index: Index, catalogue: Any, name: NamespaceId
    ) -> None:
        segments = put_all(index, name, chain(4), [2, 2])
        pin(catalogue, name, segments[:1])
        catalogue.invalidate(name)
        assert catalogue.unpin(name, segments) == pin(catalogue, name, segments) == 0
        assert catalogue.order(name, 10) == []

    def test_pins_of_a_segment_id_of_another_length_are_errors(
        self, catalogue: Any, name: NamespaceId
    ) -> None:
        with pytest.raises(ValueError, match="segment id of 5 bytes"):
            pin(catalogue, name, [new_segment_id(), SegmentId(b"short")])
        with pytest.raises(ValueError, match="segment id of 5 bytes"):
            catalogue.unpin(name, [new_segment_id(), SegmentId(b"short")])


class QuotaConformance(Maintained):
    """A part of FullIndexConformance."""

    def test_quotas_are_kept_until_they_are_taken_back(self, index: Index, catalogue: Any) -> None:
        assert catalogue.quotas() == {}
        other = self.configured()
        scopes = {"store": 1 << 50, "tenant/caf\u00e9 {x}": 1, f"namespace/{UNKNOWN}": 10**15}
        for scope, nbytes in scopes.items():
            other.set_quota(scope, nbytes)
        assert catalogue.quotas() == scopes
        other.set_quota("store", 7)
        other.set_quota(f"namespace/{UNKNOWN}", None)
        other.set_quota("tenant/nobody", None)
        other.close()
        assert catalogue.quotas() == {"store": 7, "tenant/caf\u00e9 {x}": 1}

    def test_the_time_to_live_of_a_namespace_is_no_quota(
        self, index: Index, catalogue: Any, name: NamespaceId
    ) -> None:
        catalogue.age_out(name, 60, delete_after_s=0)
        assert catalogue.quotas() == {}


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
    """A part of FullIndexConformance: what a time to live does."""

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
        fresh = new_segment_id(digests)
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


class HeatConformance(Maintained):
    """A part of FullIndexConformance."""

    def test_hottest_are_those_that_begin_loads(
        self, index: Index, catalogue: Any, name: NamespaceId
    ) -> None:
        a, b, c, d = put_all(index, name, chain(8), [2] * 4)
        assert catalogue.hottest(name, 10) == catalogue.hottest(UNKNOWN, 10) == []
        for minutes, touched in [(0, [a, b]), (0, [a, b]), (1, [a, c]), (1, [b, a]), (2, [a]), (9, [])]:
            index.touch(name, touched, SOON_S + MINUTE * minutes)
        # A use that is told late counts no new minute, and a segment that is not there begins no load.
        index.touch(name, [a, b], SOON_S)
        index.touch(name, [new_segment_id(chain(8)), d], SOON_S + MINUTE)
        assert catalogue.hottest(name, 10) == [(a, 3.0), (b, 1.0)]
        assert catalogue.hottest(name, 1) == [(a, 3.0)]
        assert catalogue.hottest(name, 0) == []
        self.pin_some(catalogue, name, [a, b])
        index.touch(name, [b], SOON_S + 5 * MINUTE)
        assert catalogue.hottest(name, 10) == [(a, 3.0), (b, 2.0)]
        catalogue.cool(name)
        assert catalogue.hottest(name, 10) == [(a, 1.5), (b, 1.0)]
        evict(index, name, [a])
        assert catalogue.hottest(name, 10) == [(b, 1.0)]
        for _ in range(5):
            catalogue.cool(name)
        assert catalogue.hottest(name, 10) == []
        catalogue.cool(UNKNOWN)
        index.touch(name, [b], SOON_S + 6 * MINUTE)
        catalogue.invalidate(name)
        assert catalogue.hottest(name, 10) == []

    def test_hottest_watches_a_bounded_number(self, index: Index, catalogue: Any, name: NamespaceId) -> None:
        segments = put_all(index, name, chain(2060), [1] * 2060)
        often = segments[:20]
        for minutes in range(2):
            for segment in often:
                index.touch(name, [segment], SOON_S + MINUTE * minutes)
        for segment in segments[20:]:
            index.touch(name, [segment], SOON_S)
        found = catalogue.hottest(name, 10_000)
        assert 1000 <= len(found) <= 2048
        assert {segment for segment, minutes in found if minutes == 2.0} == set(often)


class OperationsConformance(Maintained):
    """A part of FullIndexConformance."""

    def test_operations_are_listed_newest_first(self, catalogue: Any) -> None:
        assert catalogue.operations(10) == []
        anna, ben = self.configured(by=_ANNA), self.configured(by="ben \u00e9 \U0001f43b")
        anna.record_operation("quota", "store: 10 GiB")
        ben.record_operation("drop", "")
        anna.record_operation("pin", "3 segments")
        found = catalogue.operations(10)
        assert [(one.by, one.verb, one.what) for one in found] == [
            (_ANNA, "pin", "3 segments"),
            ("ben \u00e9 \U0001f43b", "drop", ""),
            (_ANNA, "quota", "store: 10 GiB"),
        ]
        assert found[0].at_s >= found[2].at_s > 1.6e9
        assert catalogue.operations(1) == found[:1]
        assert catalogue.operations(0) == []

    def test_operations_are_bounded(self, catalogue: Any) -> None:
        for number in range(OPERATIONS_KEPT + SLACK):
            catalogue.record_operation("evict", str(number))
        found = catalogue.operations(10 * OPERATIONS_KEPT)
        assert OPERATIONS_KEPT <= len(found) < OPERATIONS_KEPT + SLACK
        assert found[0].what == str(OPERATIONS_KEPT + SLACK - 1)

    def test_operations_outlive_the_namespace(self, index: Index, catalogue: Any, name: NamespaceId) -> None:
        catalogue.record_operation("drop", name)
        assert catalogue.erase(name, 10_000) == "erased"
        assert [one.what for one in catalogue.operations(10)] == [name]

    def test_events_tell_who_did_it(self, index: Index, catalogue: Any, name: NamespaceId) -> None:
        anna = self.configured(by=_ANNA)
        segments = put_all(index, name, chain(6), [1] * 6)
        evict(anna, name, segments[:1])
        evict(index, name, segments[1:2])
        kept = catalogue.usage(name).nbytes - 1
        rest = {"delete_after_s": DELETE_AFTER_S, "limit": 1, "rule": "capacity"}
        assert len(anna.cull(name, keep_bytes=kept, **rest)) == 1
        visible = [one.segment for one in catalogue.segments(name)]
        assert anna.unlist(name, visible[:1]) == 1
        begin = chain(1)
        put(anna, name, chain(1, seed="by anna", after=begin), 1)
        assert anna.invalidate(name) > 0
        put(index, name, chain(1, seed="by an engine", after=begin), 1)
        done = [(one.op, one.rule, one.by) for one in catalogue.events(name)][6:]
        assert done == [
            ("evict", "admin", _ANNA),
            ("evict", "admin", ""),
            ("evict", "capacity", _ANNA),
            ("evict", "repair", _ANNA),
            ("commit", None, _ANNA),
            ("invalidate", "invalidated", _ANNA),
            ("commit", None, ""),
        ]

    def test_names_change_nothing_else(self, index: Index, name: NamespaceId) -> None:
        anna = self.configured(by=_ANNA)
        segments = put_all(anna, name, chain(2), [1] * 2)
        assert pin(anna, name, segments) == anna.unpin(name, segments) == 2
        assert anna.cull(UNKNOWN, keep_bytes=0, delete_after_s=0.0, limit=1, rule="capacity") == []
        with pytest.raises(ValueError):
            anna.unlist(name, [b"short"])
