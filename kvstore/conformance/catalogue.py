"""CatalogueConformance: the contract of kvstore.ports.Maintenance as tests.

A catalogue passes if a subclass with two fixtures passes; they may be one object:

    class TestMine(CatalogueConformance):
        @pytest.fixture
        def index(self): ...        an empty index, opened

        @pytest.fixture
        def catalogue(self): ...    the catalogue of the same storage; default: `index` itself
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from kvstore.catalogue import Maintenance, Usage
from kvstore.conformance.chains import (
    CREATED_S,
    EXPECTED_BLOCKS,
    chain,
    namespace,
    part_of,
    put,
    put_all,
    record,
    served,
)
from kvstore.keys import NamespaceId, SegmentId, canonical_json, new_segment_id
from kvstore.ports import CommitState, Index

MINUTE = 60
#: A whole minute after the suites' segments were made.
SOON_S = CREATED_S // MINUTE * MINUTE + MINUTE
DELETE_AFTER_S = CREATED_S + 3600
UNKNOWN = NamespaceId("0000000000000000")
NOTHING = Usage(0, 0, 0)


class CatalogueConformance:
    """Subclass it, name the subclass Test..., and give the fixtures."""

    @pytest.fixture
    def index(self) -> Index | Iterator[Index]:
        """An empty index."""
        raise NotImplementedError

    @pytest.fixture
    def catalogue(self, index: Index) -> Maintenance:
        """Its catalogue."""
        assert isinstance(index, Maintenance), "override the fixture `catalogue`"
        return index

    @pytest.fixture
    def name(self, index: Index) -> NamespaceId:
        """A registered namespace."""
        return index.register(namespace(), expected_blocks=EXPECTED_BLOCKS)

    # namespaces, usage

    def test_namespaces_are_listed_with_their_json(self, index: Index, catalogue: Maintenance) -> None:
        assert catalogue.namespaces() == {}
        models = ["one", "two", "caf\u00e9 \U0001f600"]
        ids = [index.register(namespace(model), expected_blocks=1) for model in models]
        assert catalogue.namespaces() == {
            name: canonical_json(namespace(model)) for name, model in zip(ids, models, strict=True)
        }

    def test_usage_is_exact(self, index: Index, catalogue: Maintenance, name: NamespaceId) -> None:
        assert catalogue.usage(UNKNOWN) == NOTHING
        assert catalogue.usage(name) == NOTHING
        digests = chain(10)
        segments = put_all(index, name, digests, [4, 6])
        both = Usage(2 * 4096 + 10 * 512, 2, 10)
        assert catalogue.usage(name) == both
        put(index, name, digests, 4, 6, segment=segments[1])
        assert catalogue.usage(name) == both
        copy = put(index, name, digests, 0, 4)
        assert catalogue.usage(name) == Usage(both.nbytes + 4096 + 4 * 512, 3, 14)
        for _ in range(2):
            index.evict(name, [copy, segments[1]], delete_after_s=DELETE_AFTER_S, rule="admin")
            assert catalogue.usage(name) == Usage(4096 + 4 * 512, 1, 4)
        assert catalogue.usage(UNKNOWN) == NOTHING

    def test_usage_counts_all_ranks_once_complete(
        self, index: Index, catalogue: Maintenance, name: NamespaceId
    ) -> None:
        digests, segment = chain(3), new_segment_id()
        parts = [record(3, sizes=[2**31, rank, 5], codec="lz4") for rank in range(3)]
        for rank in range(3):
            assert catalogue.usage(name) == NOTHING
            index.commit(name, segment, digests, parts[rank], rank=rank, ranks=3)
        total = Usage(sum(part.nbytes for part in parts), 1, 3)
        assert catalogue.usage(name) == total
        index.commit(name, segment, digests, parts[1], rank=1, ranks=3)
        assert catalogue.usage(name) == total
        index.evict(name, [segment], delete_after_s=DELETE_AFTER_S, rule="admin")
        assert catalogue.usage(name) == NOTHING

    def test_usage_of_refused_commits_is_nothing(
        self, index: Index, catalogue: Maintenance, name: NamespaceId
    ) -> None:
        digests, segment = chain(3), new_segment_id()
        index.commit(name, segment, digests, record(3), rank=0, ranks=2)
        index.commit(name, segment, digests, record(3, depth=7), rank=1, ranks=2)
        index.evict(name, [segment], delete_after_s=DELETE_AFTER_S, rule="admin")
        index.commit(name, segment, digests, record(3), rank=1, ranks=2)
        assert catalogue.usage(name) == NOTHING

    def test_usage_stays_exact_under_threads(
        self, index: Index, catalogue: Maintenance, name: NamespaceId
    ) -> None:
        def work(worker: int) -> None:
            digests = chain(40, seed=str(worker % 3))
            for step in range(20):
                segment = put(index, name, digests, step, 1 + step % 7)
                if step % 2:
                    index.evict(name, [segment], delete_after_s=DELETE_AFTER_S, rule="admin")
                catalogue.cull(
                    name, keep_bytes=60_000, delete_after_s=DELETE_AFTER_S, limit=3, rule="capacity"
                )

        with ThreadPoolExecutor(4) as pool:
            for future in [pool.submit(work, worker) for worker in range(4)]:
                future.result()
        listed = list(catalogue.segments(name))
        assert catalogue.usage(name) == Usage(
            sum(one.record.nbytes for one in listed), len(listed), sum(one.record.slots for one in listed)
        )

    # segments, get

    def test_segments_lists_every_visible_one(
        self, index: Index, catalogue: Maintenance, name: NamespaceId
    ) -> None:
        assert list(catalogue.segments(name)) == list(catalogue.segments(UNKNOWN)) == []
        beside = index.register(namespace("another"), expected_blocks=EXPECTED_BLOCKS)
        put(index, beside, chain(3))
        segments = put_all(index, name, chain(2200), [1] * 2200)
        index.evict(name, segments[::100], delete_after_s=DELETE_AFTER_S, rule="admin")
        listed = {one.segment: one.record for one in catalogue.segments(name)}
        assert listed == {s: record(1, depth=i) for i, s in enumerate(segments) if i % 100}

    def test_segments_survives_changes_while_it_is_read(
        self, index: Index, catalogue: Maintenance, name: NamespaceId
    ) -> None:
        segments = put_all(index, name, chain(2200), [1] * 2200)
        seen = set()
        for i, one in enumerate(catalogue.segments(name)):
            seen.add(one.segment)
            if i < 100:
                index.evict(name, [segments[i]], delete_after_s=DELETE_AFTER_S, rule="admin")
        assert seen >= set(segments[100:])

    def test_get_answers_in_order(self, index: Index, catalogue: Maintenance, name: NamespaceId) -> None:
        gone, kept = put_all(index, name, chain(5), [2, 3])
        index.evict(name, [gone], delete_after_s=DELETE_AFTER_S, rule="admin")
        found = catalogue.get(name, [gone, kept, new_segment_id(), kept])
        assert [one and (one.segment, one.record) for one in found] == [
            None,
            (kept, record(3, depth=2)),
            None,
            (kept, record(3, depth=2)),
        ]
        assert catalogue.get(name, []) == []
        assert catalogue.get(UNKNOWN, [kept]) == [None]

    def test_last_use_is_kept_to_the_minute(
        self, index: Index, catalogue: Maintenance, name: NamespaceId
    ) -> None:
        digests = chain(128)
        first, second = put_all(index, name, digests, [64, 64])
        made = CREATED_S // MINUTE * MINUTE

        def uses() -> list[float | None]:
            found = catalogue.get(name, [first, second])
            return [one.last_use_s if one else None for one in found]

        assert uses() == [made, made]
        index.touch(name, [second], SOON_S + 59.9)
        assert uses() == [made, SOON_S]
        # A use that is told late doesn't set a later one back.
        index.touch(name, [first, second], made + 1)
        assert uses() == [made, SOON_S]
        index.touch(name, [first, second], SOON_S + 3600)
        assert uses() == [SOON_S + 3600] * 2
        assert {one.last_use_s for one in catalogue.segments(name)} == {SOON_S + 3600}

    # cull

    def cull(
        self, catalogue: Maintenance, name: NamespaceId, keep: int = 0, limit: int = 1000
    ) -> list[SegmentId]:
        """Cull with this suite's deletion time."""
        return catalogue.cull(
            name, keep_bytes=keep, delete_after_s=DELETE_AFTER_S, limit=limit, rule="capacity"
        )

    def test_cull_takes_the_least_recently_used(
        self, index: Index, catalogue: Maintenance, name: NamespaceId
    ) -> None:
        segments = [put(index, name, chain(1, seed=str(i))) for i in range(6)]
        for minutes, i in enumerate([3, 0, 5, 1, 4, 2]):
            index.touch(name, [segments[i]], SOON_S + MINUTE * minutes)
        one = record(1).nbytes
        assert self.cull(catalogue, name, keep=4 * one) == [segments[3], segments[0]]
        assert self.cull(catalogue, name, keep=4 * one) == []
        assert self.cull(catalogue, name, keep=4 * one - 1) == [segments[5]]
        assert self.cull(catalogue, name) == [segments[1], segments[4], segments[2]]
        assert catalogue.usage(name) == NOTHING
        assert self.cull(catalogue, name) == self.cull(catalogue, UNKNOWN) == []

    def test_cull_takes_tails_of_chains_before_heads(
        self, index: Index, catalogue: Maintenance, name: NamespaceId
    ) -> None:
        chains = [chain(400, seed=seed) for seed in "ab"]
        heads, middles, tails = zip(
            *(put_all(index, name, digests, [64, 300, 36]) for digests in chains), strict=True
        )
        index.touch(name, [*heads, *middles, *tails], SOON_S)
        gone = self.cull(catalogue, name)
        assert [set(gone[:2]), set(gone[2:4]), set(gone[4:])] == [set(tails), set(middles), set(heads)]

    def test_cull_prefers_an_old_head_to_a_new_tail(
        self, index: Index, catalogue: Maintenance, name: NamespaceId
    ) -> None:
        head, tail = put_all(index, name, chain(100), [50, 50])
        index.touch(name, [tail], SOON_S)
        assert self.cull(catalogue, name, limit=1) == [head]

    def test_cull_orders_segments_of_enormous_depth(
        self, index: Index, catalogue: Maintenance, name: NamespaceId
    ) -> None:
        depths = [0, 1, 2**24 - 2, 2**24 - 1]
        segments = [new_segment_id() for _ in depths]
        for segment, depth in zip(segments, depths, strict=True):
            digests = chain(1, seed=str(depth))
            index.commit(name, segment, digests, record(1, depth=depth), rank=0, ranks=1)
        assert self.cull(catalogue, name) == segments[::-1]

    def test_cull_stops_at_its_limit(self, index: Index, catalogue: Maintenance, name: NamespaceId) -> None:
        segments = put_all(index, name, chain(50), [1] * 50)
        assert self.cull(catalogue, name, limit=0) == []
        assert self.cull(catalogue, name, limit=20) == segments[:29:-1]
        assert len(self.cull(catalogue, name, limit=31)) == 30

    def test_culled_segments_are_evicted(
        self, index: Index, catalogue: Maintenance, name: NamespaceId
    ) -> None:
        digests = chain(20)
        segments = put_all(index, name, digests, [10, 10])
        assert self.cull(catalogue, name, limit=1) == [segments[1]]
        assert served(index.match(name, digests)) == 10
        assert catalogue.due(name, DELETE_AFTER_S, 10) == [(segments[1], 1)]

    # due, bury

    def test_due_when_the_time_has_come(
        self, index: Index, catalogue: Maintenance, name: NamespaceId
    ) -> None:
        segments = put_all(index, name, chain(6), [1] * 6)
        times = [1000.0, 1000.5, 2000.0, 2000.0, 3000.0]
        for segment, time_s in zip(segments, times, strict=False):
            index.evict(name, [segment], delete_after_s=time_s, rule="admin")

        def due(now_s: float, limit: int = 100) -> list[SegmentId]:
            found = catalogue.due(name, now_s, limit)
            assert {ranks for _, ranks in found} <= {1}
            return [segment for segment, _ in found]

        assert due(999.9) == []
        assert due(1000.0) == segments[:1]
        assert segments[1] not in due(1000.4)
        assert due(1001.0) == segments[:2]
        assert due(1999.9) == segments[:2]
        assert set(due(2000.0)) == set(segments[:4])
        assert due(5000.0, limit=2) == segments[:2]
        assert due(5000.0, limit=0) == []
        assert set(due(5000.0)) == set(segments[:5])
        assert catalogue.due(UNKNOWN, 5000.0, 10) == []

    def test_due_tells_the_ranks(self, index: Index, catalogue: Maintenance, name: NamespaceId) -> None:
        expected = {}
        for ranks in (1, 2, 3, 64, 255):
            segment = new_segment_id()
            expected[segment] = ranks
            for rank in range(ranks):
                digests = chain(1, seed=str(ranks))
                index.commit(name, segment, digests, record(1), rank=rank, ranks=ranks)
        incomplete = new_segment_id()
        expected[incomplete] = 7
        index.commit(name, incomplete, chain(1, seed="x"), record(1), rank=6, ranks=7)
        assert index.evict(name, list(expected), delete_after_s=DELETE_AFTER_S, rule="admin") == 5
        assert dict(catalogue.due(name, DELETE_AFTER_S, 100)) == expected

    def test_due_until_buried(self, index: Index, catalogue: Maintenance, name: NamespaceId) -> None:
        segments = put_all(index, name, chain(4), [1] * 4)
        index.evict(name, segments[:3], delete_after_s=DELETE_AFTER_S, rule="admin")
        catalogue.bury(name, [])
        catalogue.bury(name, [segments[0], segments[2], segments[3], new_segment_id()])
        catalogue.bury(UNKNOWN, segments)
        assert catalogue.due(name, DELETE_AFTER_S, 10) == [(segments[1], 1)]
        catalogue.bury(name, segments)
        assert catalogue.due(name, DELETE_AFTER_S, 10) == []
        assert served(index.match(name, part_of(chain(4), 3))) == 1

    def test_an_incomplete_commit_that_was_buried_begins_anew(
        self, index: Index, catalogue: Maintenance, name: NamespaceId
    ) -> None:
        """The payload of the first rank is deleted by then: it must be written and committed again."""
        segment = new_segment_id()
        index.commit(name, segment, chain(2), record(2), rank=0, ranks=2)
        index.evict(name, [segment], delete_after_s=DELETE_AFTER_S, rule="admin")
        catalogue.bury(name, [segment])
        state = index.commit(name, segment, chain(2), record(2), rank=1, ranks=2)
        assert state is CommitState.WAITING
        assert index.match(name, chain(2)) == []

    def test_evicting_again_does_not_put_off_the_deletion(
        self, index: Index, catalogue: Maintenance, name: NamespaceId
    ) -> None:
        segment = put(index, name, chain(1))
        index.evict(name, [segment], delete_after_s=1000.0, rule="admin")
        index.evict(name, [segment], delete_after_s=9000.0, rule="admin")
        assert catalogue.due(name, 1000.0, 10) == [(segment, 1)]
        catalogue.bury(name, [segment])
        index.evict(name, [segment], delete_after_s=1000.0, rule="admin")
        assert catalogue.due(name, 9000.0, 10) == []

    # sweep

    def sweep(self, catalogue: Maintenance, name: NamespaceId, limit: int, calls: int = 40) -> int:
        """Sweep again and again."""
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
        assert 100 <= first < 1000
        assert first + self.sweep(catalogue, name, 100) == 2000

    def test_sweep_goes_on_where_it_stopped(
        self, index: Index, catalogue: Maintenance, name: NamespaceId
    ) -> None:
        # Many more living entries than one call looks at, so that starting anew would find nothing.
        digests = chain(10_000)
        segments = put_all(index, name, digests, [1000] * 10)
        index.evict(name, [segments[3]], delete_after_s=DELETE_AFTER_S, rule="admin")
        assert self.sweep(catalogue, name, 50, calls=60) == 1000
        assert served(index.match(name, digests)) == 3000

    def test_sweep_of_nothing(self, catalogue: Maintenance, name: NamespaceId) -> None:
        assert catalogue.sweep(name, 100) == catalogue.sweep(UNKNOWN, 100) == 0

    # ping

    def test_ping_changes_nothing(self, index: Index, catalogue: Maintenance, name: NamespaceId) -> None:
        put(index, name, chain(3))
        before = replace(catalogue.usage(name))
        catalogue.ping()
        assert catalogue.usage(name) == before
        assert catalogue.namespaces() == {name: canonical_json(namespace())}
