"""CullConformance: order, cull, reapable, reaped and sweep of kvstore.index.maintenance.Removal as tests."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvstore.index.maintenance import Maintenance
from kvstore.index.port import CommitState, Index
from kvstore.keys import NamespaceId, SegmentId, new_segment_id
from tests.index.contract.chains import (
    CREATED_S,
    UNKNOWN,
    chain,
    namespace,
    part_of,
    put,
    put_all,
    record,
    served,
)
from tests.index.contract.maintained import (
    DELETE_AFTER_S,
    MINUTE,
    NOTHING,
    SAVED_S,
    SOON_S,
    Maintained,
    cull,
    evict,
    fill,
    in_order,
    keep_minute,
)


class CullConformance(Maintained):
    """A part of FullIndexConformance."""

    # order

    def test_order_is_the_order_of_eviction(
        self, index: Index, catalogue: Maintenance, name: NamespaceId, encoder: NamespaceId
    ) -> None:
        assert catalogue.order(name, 10) == catalogue.order(UNKNOWN, 10) == []
        source = random.Random(7)
        for namespace_, cost_counts in ((name, False), (encoder, True)):
            segments = fill(index, namespace_, source, 150)
            for minutes in range(3):
                index.touch(namespace_, source.sample(segments, 20), SOON_S + MINUTE * minutes)
            self.pin_some(catalogue, namespace_, source.sample(segments, 10))
            self.unpin_some(catalogue, namespace_, source.sample(segments, 75))
            evict(index, namespace_, source.sample(segments, 15))
            listed = {one.segment: one for one in catalogue.segments(namespace_)}
            order = catalogue.order(namespace_, 1000)
            assert [one.segment for one in order] == in_order(listed.values(), cost_counts=cost_counts)
            for one in order:
                right = listed[one.segment]
                assert (one.nbytes, one.used_s) == (right.record.nbytes, right.last_use_s)
                assert one.keep_s == keep_minute(right, cost_counts=cost_counts) * MINUTE
            assert len({one.keep_s - one.used_s for one in order}) == (8 if cost_counts else 1)
            assert catalogue.order(namespace_, 7) == order[:7]
            assert catalogue.order(namespace_, 0) == []

    def test_order_goes_by_costs_only_if_asked_to(
        self, index: Index, catalogue: Maintenance, encoder: NamespaceId
    ) -> None:
        plain = self.configured(cost_aware=False)
        dear = put(plain, encoder, chain(1, seed="a"), cost_us=10**9)
        plain.close()
        cheap = put(index, encoder, chain(1, seed="b"), created_s=CREATED_S + MINUTE)
        costly = put(index, encoder, chain(1, seed="c"), created_s=CREATED_S - MINUTE, cost_us=10**9)
        order = catalogue.order(encoder, 10)
        assert [one.segment for one in order] == [dear, cheap, costly]
        assert [one.used_s for one in order] == [SAVED_S, SAVED_S + MINUTE, SAVED_S - MINUTE]
        assert [one.keep_s - one.used_s for one in order] == [0, 0, 150 * MINUTE]

    # cull

    def test_cull_takes_the_least_recently_used(
        self, index: Index, catalogue: Maintenance, name: NamespaceId
    ) -> None:
        segments = [put(index, name, chain(1, seed=str(i))) for i in range(6)]
        for minutes, i in enumerate([3, 0, 5, 1, 4, 2]):
            index.touch(name, [segments[i]], SOON_S + MINUTE * minutes)
        one = record(1).nbytes
        assert cull(catalogue, name, keep=4 * one) == [segments[3], segments[0]]
        assert cull(catalogue, name, keep=4 * one) == []
        assert cull(catalogue, name, keep=4 * one - 1) == [segments[5]]
        assert cull(catalogue, name) == [segments[1], segments[4], segments[2]]
        assert catalogue.usage(name) == NOTHING
        assert cull(catalogue, name) == cull(catalogue, UNKNOWN) == []

    def test_cull_takes_tails_of_chains_before_heads(
        self, index: Index, catalogue: Maintenance, name: NamespaceId
    ) -> None:
        chains = [chain(400, seed=seed) for seed in "ab"]
        heads, middles, tails = zip(
            *(put_all(index, name, digests, [64, 300, 36]) for digests in chains), strict=True
        )
        index.touch(name, [*heads, *middles, *tails], SOON_S)
        gone = cull(catalogue, name)
        assert [set(gone[:2]), set(gone[2:4]), set(gone[4:])] == [set(tails), set(middles), set(heads)]

    def test_cull_prefers_an_old_head_to_a_new_tail(
        self, index: Index, catalogue: Maintenance, name: NamespaceId
    ) -> None:
        head, tail = put_all(index, name, chain(100), [50, 50])
        index.touch(name, [tail], SOON_S)
        assert cull(catalogue, name, limit=1) == [head]

    def test_cull_orders_segments_of_enormous_depth(
        self, index: Index, catalogue: Maintenance, name: NamespaceId
    ) -> None:
        depths = [0, 1, 2**20 - 2, 2**20 - 1]
        chains = [chain(1, seed=str(depth)) for depth in depths]
        segments = [new_segment_id(digests) for digests in chains]
        for segment, depth, digests in zip(segments, depths, chains, strict=True):
            index.commit(name, segment, digests, record(1, depth=depth), rank=0, ranks=1)
        assert cull(catalogue, name) == segments[::-1]

    def test_cull_stops_at_its_limit(self, index: Index, catalogue: Maintenance, name: NamespaceId) -> None:
        segments = put_all(index, name, chain(50), [1] * 50)
        assert cull(catalogue, name, limit=0) == []
        assert cull(catalogue, name, limit=20) == segments[:29:-1]
        assert len(cull(catalogue, name, limit=31)) == 30

    def test_cull_follows_the_order_of_eviction(
        self, index: Index, catalogue: Maintenance, name: NamespaceId, encoder: NamespaceId
    ) -> None:
        source = random.Random(11)
        for namespace_, cost_counts in ((name, False), (encoder, True)):
            segments = fill(index, namespace_, source, 130)
            index.touch(namespace_, source.sample(segments, 30), SOON_S)
            pinned = self.pin_some(catalogue, namespace_, source.sample(segments, 12))
            listed = {one.segment: one for one in catalogue.segments(namespace_)}
            left = in_order(listed.values(), cost_counts=cost_counts)
            while left:
                used = catalogue.usage(namespace_).nbytes
                keep, limit = used - source.randrange(300_000), source.choice([1, 7, 100])
                expected: list[SegmentId] = []
                for segment in left[:limit]:
                    if used <= keep:
                        break
                    expected.append(segment)
                    used -= listed[segment].record.nbytes
                assert cull(catalogue, namespace_, keep, limit) == expected
                left = left[len(expected) :]
            assert cull(catalogue, namespace_) == []
            assert {one.segment for one in catalogue.segments(namespace_)} == set(pinned)

    def test_cull_passes_over_what_was_used_lately(
        self, index: Index, catalogue: Maintenance, encoder: NamespaceId
    ) -> None:
        source = random.Random(13)
        fill(index, encoder, source, 120)
        listed = {one.segment: one for one in catalogue.segments(encoder)}
        order = in_order(listed.values(), cost_counts=True)
        spare_from_s = SAVED_S - 17 * MINUTE
        expected = [segment for segment in order if listed[segment].last_use_s < spare_from_s]
        # Spared segments stand between them, and in front of them.
        assert expected != order[: len(expected)] and len(expected) > 30

        def cull(limit: int, spare_from_s: float) -> list[SegmentId]:
            return catalogue.cull(
                encoder,
                keep_bytes=0,
                delete_after_s=DELETE_AFTER_S,
                limit=limit,
                rule="namespace_quota",
                spare_from_s=spare_from_s,
            )

        assert cull(5, spare_from_s) == expected[:5]
        assert cull(1000, spare_from_s) == expected[5:]
        assert cull(1000, spare_from_s) == []
        # A last use is known to the quarter of a minute: all uses of one are before a moment in its middle.
        same = [s for s in order if listed[s].last_use_s == spare_from_s]
        assert same and cull(1000, spare_from_s + 0.5) == same
        assert {one.segment for one in catalogue.segments(encoder)} == set(order) - {*expected, *same}

    def test_cull_looks_at_no_more_than_it_may(
        self, index: Index, catalogue: Maintenance, encoder: NamespaceId
    ) -> None:
        late = put_all(index, encoder, chain(4096), [1] * 4096)
        old = put(index, encoder, chain(1, seed="o"), created_s=CREATED_S - 3600, cost_us=10**12)

        def cull() -> list[SegmentId]:
            return catalogue.cull(
                encoder,
                keep_bytes=0,
                delete_after_s=DELETE_AFTER_S,
                limit=10,
                rule="capacity",
                spare_from_s=SAVED_S,
            )

        assert [one.segment for one in catalogue.order(encoder, 5000)][-1] == old
        assert cull() == []
        evict(index, encoder, late[:1])
        assert cull() == [old]

    def test_cull_by_several_at_once_takes_what_one_would_have(
        self, index: Index, catalogue: Maintenance, name: NamespaceId
    ) -> None:
        segments = put_all(index, name, chain(200), [1] * 200)
        one = record(1).nbytes
        handles = [self.configured() for _ in range(3)]
        barrier = threading.Barrier(3)

        def work(handle: Maintenance) -> list[SegmentId]:
            barrier.wait()
            return cull(handle, name, keep=80 * one)

        with ThreadPoolExecutor(3) as pool:
            gone = [segment for part in pool.map(work, handles) for segment in part]
        for handle in handles:
            handle.close()
        assert sorted(gone) == sorted(segments[80:])
        assert catalogue.usage(name).nbytes == 80 * one

    def test_culled_segments_are_evicted(
        self, index: Index, catalogue: Maintenance, name: NamespaceId
    ) -> None:
        digests = chain(20)
        segments = put_all(index, name, digests, [10, 10])
        assert cull(catalogue, name, limit=1) == [segments[1]]
        assert served(index.match(name, digests)) == 10
        assert catalogue.reapable(name, DELETE_AFTER_S, 10) == [(segments[1], 1)]

    # reapable, reaped

    def test_reapable_when_the_time_has_come(
        self, index: Index, catalogue: Maintenance, name: NamespaceId
    ) -> None:
        segments = put_all(index, name, chain(6), [1] * 6)
        times = [1000.0, 1000.5, 2000.0, 2000.0, 3000.0]
        for segment, time_s in zip(segments, times, strict=False):
            index.evict(name, [segment], delete_after_s=time_s, rule="admin")

        def reapable(now_s: float, limit: int = 100) -> list[SegmentId]:
            found = catalogue.reapable(name, now_s, limit)
            assert {ranks for _, ranks in found} <= {1}
            return [segment for segment, _ in found]

        assert reapable(999.9) == []
        assert reapable(1000.0) == segments[:1]
        assert segments[1] not in reapable(1000.4)
        assert reapable(1001.0) == segments[:2]
        assert reapable(1999.9) == segments[:2]
        assert set(reapable(2000.0)) == set(segments[:4])
        assert reapable(5000.0, limit=2) == segments[:2]
        assert reapable(5000.0, limit=0) == []
        assert set(reapable(5000.0)) == set(segments[:5])
        assert catalogue.reapable(UNKNOWN, 5000.0, 10) == []

    def test_reapable_tells_the_ranks(self, index: Index, catalogue: Maintenance, name: NamespaceId) -> None:
        expected = {}
        for ranks in (1, 2, 3, 64, 255):
            digests = chain(1, seed=str(ranks))
            segment = new_segment_id(digests)
            expected[segment] = ranks
            for rank in range(ranks):
                index.commit(name, segment, digests, record(1), rank=rank, ranks=ranks)
        incomplete = new_segment_id(chain(1, seed="x"))
        expected[incomplete] = 7
        index.commit(name, incomplete, chain(1, seed="x"), record(1), rank=6, ranks=7)
        assert index.evict(name, list(expected), delete_after_s=DELETE_AFTER_S, rule="admin") == 5
        assert dict(catalogue.reapable(name, DELETE_AFTER_S, 100)) == expected

    def test_reapable_until_reaped(self, index: Index, catalogue: Maintenance, name: NamespaceId) -> None:
        segments = put_all(index, name, chain(4), [1] * 4)
        index.evict(name, segments[:3], delete_after_s=DELETE_AFTER_S, rule="admin")
        catalogue.reaped(name, [])
        catalogue.reaped(name, [segments[0], segments[2], segments[3], new_segment_id()])
        catalogue.reaped(UNKNOWN, segments)
        assert catalogue.reapable(name, DELETE_AFTER_S, 10) == [(segments[1], 1)]
        catalogue.reaped(name, segments)
        assert catalogue.reapable(name, DELETE_AFTER_S, 10) == []
        assert index.find(name, part_of(chain(4), 3), chain(4)) != [None]

    def test_an_incomplete_commit_that_was_reaped_begins_anew(
        self, index: Index, catalogue: Maintenance, name: NamespaceId
    ) -> None:
        """The first rank's payload is deleted by then, so it must be written and committed again."""
        segment = new_segment_id(chain(2))
        index.commit(name, segment, chain(2), record(2), rank=0, ranks=2)
        index.evict(name, [segment], delete_after_s=DELETE_AFTER_S, rule="admin")
        catalogue.reaped(name, [segment])
        state = index.commit(name, segment, chain(2), record(2), rank=1, ranks=2)
        assert state is CommitState.WAITING
        assert index.match(name, chain(2)) == []

    def test_evicting_again_does_not_put_off_the_deletion(
        self, index: Index, catalogue: Maintenance, name: NamespaceId
    ) -> None:
        segment = put(index, name, chain(1))
        index.evict(name, [segment], delete_after_s=1000.0, rule="admin")
        index.evict(name, [segment], delete_after_s=9000.0, rule="admin")
        assert catalogue.reapable(name, 1000.0, 10) == [(segment, 1)]
        catalogue.reaped(name, [segment])
        index.evict(name, [segment], delete_after_s=1000.0, rule="admin")
        assert catalogue.reapable(name, 9000.0, 10) == []

    # sweep

    def sweep(self, catalogue: Maintenance, name: NamespaceId, limit: int, calls: int = 40) -> int:
        """Sweeps again and again."""
        return sum(catalogue.sweep(name, limit) for _ in range(calls))

    @pytest.mark.parametrize("expected_blocks", [1, 1000, 40_000])
    def test_sweep_drops_every_dangling_entry_once(
        self, index: Index, catalogue: Maintenance, expected_blocks: int
    ) -> None:
        name = index.register(namespace(), expected_blocks=expected_blocks)
        digests = chain(1000)
        segments = put_all(index, name, digests, [50] * 20)
        assert self.sweep(catalogue, name, 10_000, 3) == 0
        index.evict(name, segments[7:], delete_after_s=DELETE_AFTER_S, rule="admin")
        assert self.sweep(catalogue, name, 200) == 650
        assert self.sweep(catalogue, name, 10_000, 3) == 0
        assert served(index.match(name, digests)) == 350
        assert [run is not None for run in index.find(name, digests)] == [True] * 350 + [False] * 650

    def test_sweep_keeps_entries_that_were_written_anew(
        self, index: Index, catalogue: Maintenance, name: NamespaceId
    ) -> None:
        digests = chain(100)
        old = put(index, name, digests)
        index.evict(name, [old], delete_after_s=DELETE_AFTER_S, rule="admin")
        put(index, name, digests, 0, 60)
        assert self.sweep(catalogue, name, 1000, 3) == 40
        assert served(index.match(name, digests)) == 60

    def test_sweep_stops_at_about_its_limit(
        self, index: Index, catalogue: Maintenance, name: NamespaceId
    ) -> None:
        index.evict(
            name, put_all(index, name, chain(2000), [500] * 4), delete_after_s=DELETE_AFTER_S, rule="admin"
        )
        assert catalogue.sweep(name, 0) == 0
        first = catalogue.sweep(name, 100)
        assert 100 <= first < (1000 if self.shards == 1 else 1500)
        assert first + self.sweep(catalogue, name, 100) == 2000

    def test_sweep_goes_on_where_it_stopped(
        self, index: Index, catalogue: Maintenance, name: NamespaceId
    ) -> None:
        # There are many more entries that don't dangle than one call looks at: starting anew would find
        # nothing.
        digests = chain(10_000)
        segments = put_all(index, name, digests, [1000] * 10)
        index.evict(name, [segments[3]], delete_after_s=DELETE_AFTER_S, rule="admin")
        assert self.sweep(catalogue, name, 50, calls=60) == 1000
        assert served(index.match(name, digests)) == 3000

    def test_sweep_of_nothing(self, catalogue: Maintenance, name: NamespaceId) -> None:
        assert catalogue.sweep(name, 100) == catalogue.sweep(UNKNOWN, 100) == 0
