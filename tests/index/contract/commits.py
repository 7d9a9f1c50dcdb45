"""CommitConformance: claim, commit, touch and evict of the Index port; a part of IndexConformance."""

from __future__ import annotations

import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from kvstore.errors import NamespaceUnknown
from kvstore.index.port import Claim, CommitState, Index
from kvstore.keys import NamespaceId, SegmentId, namespace_id, new_segment_id
from schemas.records import PartRecord, SegmentRecord
from tests.index.contract.chains import (
    CREATED_S,
    EXPECTED_BLOCKS,
    LATER_S,
    UNKNOWN,
    chain,
    namespace,
    part_of,
    places,
    put,
    put_all,
    record,
    served,
)

#: Ids and digests that a text protocol, a pattern or a C string might choke on.
HOSTILE = [
    bytes(8),
    b"\xff" * 8,
    b"\r\n\r\n\r\n\r\n",
    b"%s%d:*?[",
    b"12345678",
    b"\x00{ns}:\x00\n",
    b"\xc3\x28\xa0\xa1\xf0\x28\x8c\xbc",
]


class CommitConformance:
    """The suite of claim, commit, touch and evict, with the fixtures of IndexConformance."""

    # claim

    def test_claim_needs_a_namespace(self, index: Index) -> None:
        with pytest.raises(NamespaceUnknown):
            index.claim(UNKNOWN, chain(1), new_segment_id(chain(1)), 60.0)

    def test_claim_tells_how_much_is_stored(self, index: Index, name: NamespaceId) -> None:
        digests = chain(100)
        put(index, name, digests, 0, 70)
        for asked, claim in [(0, Claim(0, False)), (50, Claim(50, False)), (70, Claim(70, False))]:
            assert index.claim(name, part_of(digests, 0, asked), new_segment_id(digests), 60.0) == claim
        assert index.claim(name, digests, new_segment_id(digests), 60.0) == Claim(70, True)

    def test_claim_does_not_count_evicted_blocks(self, index: Index, name: NamespaceId) -> None:
        digests = chain(100)
        segments = put_all(index, name, digests, [40, 40, 20])
        index.evict(name, segments[1:], delete_after_s=LATER_S, rule="admin")
        assert index.claim(name, digests, new_segment_id(digests), 60.0) == Claim(40, True)

    def test_claim_is_one_segments(self, index: Index, other: Index, name: NamespaceId) -> None:
        digests = chain(10)
        mine, theirs = new_segment_id(digests), new_segment_id(digests)
        assert index.claim(name, digests, mine, 60.0) == Claim(0, True)
        assert other.claim(name, digests, theirs, 60.0) == Claim(0, False)
        # All ranks of one segment share its claim.
        assert other.claim(name, digests, mine, 60.0) == Claim(0, True)
        assert index.match(name, digests) == []

    def test_claim_is_on_the_first_missing_block(self, index: Index, name: NamespaceId) -> None:
        digests = chain(10)
        put(index, name, digests, 0, 5)
        left, right = (chain(5, seed=seed, after=part_of(digests, 0, 5)) for seed in "lr")
        assert index.claim(name, left, new_segment_id(left), 60.0) == Claim(5, True)
        assert index.claim(name, right, new_segment_id(right), 60.0) == Claim(5, True)
        assert index.claim(name, part_of(left, 0, 6), new_segment_id(left), 60.0) == Claim(5, False)

    def test_claim_expires(self, index: Index, name: NamespaceId) -> None:
        digests = chain(3)
        assert index.claim(name, digests, new_segment_id(digests), 0.05).granted
        time.sleep(0.1)
        assert index.claim(name, digests, new_segment_id(digests), 60.0).granted

    def test_claim_is_released_by_its_commit(self, index: Index, other: Index, name: NamespaceId) -> None:
        digests = chain(10)
        segment, next_one = new_segment_id(digests), new_segment_id(digests)
        assert index.claim(name, digests, segment, 60.0).granted
        put(index, name, digests, segment=segment)
        index.evict(name, [segment], delete_after_s=LATER_S, rule="admin")
        assert other.claim(name, digests, next_one, 60.0) == Claim(0, True)

    def test_claim_survives_a_strangers_commit(self, index: Index, name: NamespaceId) -> None:
        digests = chain(10)
        mine = new_segment_id(digests)
        assert index.claim(name, digests, mine, 60.0).granted
        stranger = put(index, name, digests)
        index.evict(name, [stranger], delete_after_s=LATER_S, rule="admin")
        assert index.claim(name, digests, new_segment_id(digests), 60.0) == Claim(0, False)
        assert index.claim(name, digests, mine, 60.0) == Claim(0, True)

    def test_claim_races_have_one_winner(self, index: Index, other: Index, name: NamespaceId) -> None:
        digests = chain(10)
        barrier = threading.Barrier(8)

        def race(handle: Index) -> bool:
            segment = new_segment_id(digests)
            barrier.wait()
            return handle.claim(name, digests, segment, 60.0).granted

        with ThreadPoolExecutor(8) as pool:
            assert sum(pool.map(race, [index, other] * 4)) == 1

    # commit

    def test_commit_needs_a_namespace(self, index: Index) -> None:
        digests = chain(2)
        segment = new_segment_id(digests)
        with pytest.raises(NamespaceUnknown):
            index.commit(namespace_id(namespace()), segment, digests, record(2), rank=0, ranks=1)
        name = index.register(namespace(), expected_blocks=EXPECTED_BLOCKS)
        assert index.match(name, digests) == []
        put(index, name, digests, segment=segment)
        assert served(index.match(name, digests)) == 2

    def test_commit_again_is_harmless(self, index: Index, other: Index, name: NamespaceId) -> None:
        digests = chain(5)
        segment = new_segment_id(digests)
        for handle in (index, other, index):
            put(handle, name, digests, segment=segment)
            assert places(other.match(name, digests)) == [(segment, slot) for slot in range(5)]

    def test_commit_again_repairs_what_a_dead_copy_took_over(self, index: Index, name: NamespaceId) -> None:
        digests = chain(10)
        kept = put(index, name, digests)
        copy = put(index, name, digests)
        index.evict(name, [copy], delete_after_s=LATER_S, rule="admin")
        put(index, name, digests, segment=kept)
        assert places(index.match(name, digests)) == [(kept, slot) for slot in range(10)]
        assert None not in index.find(name, digests)

    def test_commit_of_something_else_under_a_visible_id_is_refused(
        self, index: Index, name: NamespaceId
    ) -> None:
        digests = chain(5)
        segment = new_segment_id(digests)
        put(index, name, digests, segment=segment)
        for strange, changed in [
            (digests, record(5, depth=1)),
            (digests, record(5, data_start=8192)),
            (chain(5, seed="x"), record(5)),
            (part_of(digests, 0, 4), record(4)),
        ]:
            state = index.commit(name, segment, strange, changed, rank=0, ranks=1)
            assert state is CommitState.REFUSED
        assert index.commit(name, segment, digests, record(5), rank=0, ranks=2) is CommitState.REFUSED
        assert [run.record for run in index.match(name, digests)] == [record(5)]
        assert index.match(name, chain(5, seed="x")) == []

    def test_commit_after_an_eviction_is_refused(self, index: Index, other: Index, name: NamespaceId) -> None:
        digests = chain(5)
        segment = put(index, name, digests)
        other.evict(name, [segment], delete_after_s=LATER_S, rule="admin")
        assert index.commit(name, segment, digests, record(5), rank=0, ranks=1) is CommitState.REFUSED
        assert index.match(name, digests) == []

    @pytest.mark.parametrize("slots", [1, 2, 255, 256, 257, 1000])
    def test_commit_of_any_number_of_slots(self, index: Index, name: NamespaceId, slots: int) -> None:
        digests = chain(slots)
        segment = put(index, name, digests)
        assert places(index.match(name, digests)) == [(segment, slot) for slot in range(slots)]
        runs = index.find(name, digests)
        assert [run and run.slot for run in runs] == list(range(slots))

    def test_commit_keeps_the_whole_record(self, index: Index, name: NamespaceId) -> None:
        full = SegmentRecord(
            (PartRecord(12288, (1, 70_000, 2**31, 0)),), 4, "lz4", 2**30 + 1, 2**32 - 1, 2**40 + 1
        )
        digests = chain(4)
        index.commit(name, new_segment_id(digests), digests, full, rank=0, ranks=1)
        assert [run.record for run in index.match(name, digests)] == [full]

    @pytest.mark.parametrize("segment", [SegmentId(text) for text in HOSTILE])
    def test_commit_of_any_bytes(self, index: Index, name: NamespaceId, segment: SegmentId) -> None:
        digest = segment + segment[:5] + segment[-1:] + segment[6:]
        assert index.claim(name, digest, segment, 60.0).granted
        index.commit(name, segment, digest, record(1), rank=1, ranks=2)
        index.commit(name, segment, digest, record(1), rank=0, ranks=2)
        assert places(index.match(name, digest)) == [(segment, 0)]
        index.touch(name, [segment], LATER_S)
        assert index.evict(name, [segment], delete_after_s=LATER_S, rule="admin") == 1
        assert index.find(name, digest) == [None]

    @pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
    def test_commit_of_all_ranks_in_any_order(
        self, index: Index, other: Index, name: NamespaceId, order: tuple[int, ...]
    ) -> None:
        digests = chain(6)
        segment = new_segment_id(digests)
        parts = [record(6, data_start=4096 * (rank + 1)) for rank in range(3)]
        for rank in order:
            assert index.match(name, digests) == []
            assert index.find(name, digests) == [None] * 6
            state = (index, other)[rank % 2].commit(name, segment, digests, parts[rank], rank=rank, ranks=3)
            last = rank == order[-1]
            assert state is (CommitState.VISIBLE if last else CommitState.WAITING)
        runs = index.match(name, digests)
        assert served(runs) == 6
        assert runs[0].record == replace(parts[0], parts=tuple(one.parts[0] for one in parts))

    def test_commit_of_one_rank_twice_is_not_two_ranks(self, index: Index, name: NamespaceId) -> None:
        digests = chain(6)
        segment = new_segment_id(digests)
        for _ in range(3):
            state = index.commit(name, segment, digests, record(6), rank=1, ranks=2)
            assert state is CommitState.WAITING
        assert index.match(name, digests) == []
        assert index.commit(name, segment, digests, record(6), rank=0, ranks=2) is CommitState.VISIBLE

    def test_commit_of_ranks_that_disagree_is_refused(self, index: Index, name: NamespaceId) -> None:
        digests = chain(6)
        segment = new_segment_id(digests)
        first = index.commit(name, segment, digests, record(6), rank=0, ranks=2)
        assert first is CommitState.WAITING
        for strange, changed, ranks in [
            (chain(6, seed="x"), record(6), 2),
            (part_of(digests, 0, 5), record(5), 2),
            (digests, record(6, depth=9), 2),
            (digests, record(6, codec="lz4"), 2),
            (digests, record(6), 3),
        ]:
            state = index.commit(name, segment, strange, changed, rank=1, ranks=ranks)
            assert state is CommitState.REFUSED
            assert index.match(name, digests) == index.match(name, strange) == []
        assert index.commit(name, segment, digests, record(6), rank=1, ranks=2) is CommitState.VISIBLE

    @pytest.mark.parametrize("order", [(0, 1), (1, 0)])
    def test_the_latest_rank_says_when_a_segment_was_created(
        self, index: Index, name: NamespaceId, order: tuple[int, int]
    ) -> None:
        digests = chain(6)
        segment = new_segment_id(digests)
        made = [record(6, created_s=CREATED_S + 7 * rank) for rank in range(2)]
        for rank in (*order, *order):
            state = index.commit(name, segment, digests, made[rank], rank=rank, ranks=2)
        assert state is CommitState.VISIBLE
        assert [run.record.created_s for run in index.match(name, digests)] == [CREATED_S + 7]

    @pytest.mark.parametrize("ranks", [1, 2])
    def test_a_time_that_is_yet_to_come_counts_as_now(
        self, index: Index, name: NamespaceId, ranks: int
    ) -> None:
        digests, before = chain(6), int(time.time())
        segment, made = new_segment_id(digests), record(6, created_s=2**32 - 1)
        for rank in (*range(ranks), 0):
            state = index.commit(name, segment, digests, made, rank=rank, ranks=ranks)
        assert state is CommitState.VISIBLE, "and the same commit again is harmless"
        (run,) = index.match(name, digests)
        assert before - 1 <= run.record.created_s <= time.time() + 1

    def test_a_claim_says_what_time_it_is(self, index: Index, name: NamespaceId) -> None:
        digests = chain(6)
        for segment in (new_segment_id(digests), new_segment_id(digests)):
            before = int(time.time())
            assert before - 1 <= index.claim(name, digests, segment, 60.0).at_s <= time.time() + 1
        put(index, name, digests)
        assert before - 1 <= index.claim(name, digests, new_segment_id(digests), 60.0).at_s

    def test_commit_of_a_rank_again_after_the_last(self, index: Index, name: NamespaceId) -> None:
        digests = chain(6)
        segment = new_segment_id(digests)
        parts = [record(6, data_start=4096 * (rank + 1)) for rank in range(2)]
        for rank in (0, 1, 0, 1, 1):
            state = index.commit(name, segment, digests, parts[rank], rank=rank, ranks=2)
        assert state is CommitState.VISIBLE
        assert index.commit(name, segment, digests, parts[1], rank=0, ranks=2) is CommitState.REFUSED
        runs = index.match(name, digests)
        assert [part.data_start for part in runs[0].record.parts] == [4096, 8192]

    def test_commit_is_refused_once_it_was_evicted_incomplete(
        self, index: Index, other: Index, name: NamespaceId
    ) -> None:
        digests = chain(6)
        segment = new_segment_id(digests)
        index.commit(name, segment, digests, record(6), rank=0, ranks=2)
        assert other.evict(name, [segment], delete_after_s=LATER_S, rule="admin") == 0
        for rank in (1, 0):
            state = index.commit(name, segment, digests, record(6), rank=rank, ranks=2)
            assert state is CommitState.REFUSED
        assert index.match(name, digests) == []

    @pytest.mark.parametrize("slots", [1, 5])
    def test_commit_of_ranks_whose_slots_differ_in_size(
        self, index: Index, name: NamespaceId, slots: int
    ) -> None:
        """The stages of a pipeline hold different numbers of layers."""
        digests = chain(slots)
        segment = new_segment_id(digests)
        parts = [record(slots, sizes=[300 * (1 + rank)] * slots) for rank in range(3)]
        states = [index.commit(name, segment, digests, parts[rank], rank=rank, ranks=3) for rank in (2, 0, 1)]
        assert states[-1] is CommitState.VISIBLE
        (run,) = index.match(name, digests)
        assert [part.slot_sizes for part in run.record.parts] == [
            (300,) * slots,
            (600,) * slots,
            (900,) * slots,
        ]
        # Each rank's commit is told from a different one that comes under the same rank.
        for rank in range(3):
            other = parts[(rank + 1) % 3]
            state = index.commit(name, segment, digests, other, rank=rank, ranks=3)
            assert state is CommitState.REFUSED
            state = index.commit(name, segment, digests, parts[rank], rank=rank, ranks=3)
            assert state is CommitState.VISIBLE

    def test_commit_of_many_ranks(self, index: Index, name: NamespaceId) -> None:
        digests = chain(3)
        segment = new_segment_id(digests)
        parts = [record(3, sizes=[rank + 1, 1, 2], codec="lz4") for rank in range(255)]
        states = [
            index.commit(name, segment, digests, parts[rank], rank=rank, ranks=255) for rank in range(255)
        ]
        assert states == [CommitState.WAITING] * 254 + [CommitState.VISIBLE]
        (run,) = index.match(name, digests)
        assert run.record.parts == tuple(one.parts[0] for one in parts)

    @pytest.mark.parametrize(
        ("segment", "blocks", "given", "rank", "ranks"),
        [
            pytest.param(b"short", 2, record(2), 0, 1, id="short id"),
            pytest.param(bytes(9), 2, record(2), 0, 1, id="long id"),
            pytest.param(bytes(8), 3, record(2), 0, 1, id="more digests than slots"),
            pytest.param(bytes(8), 0, record(2), 0, 1, id="no digests"),
            pytest.param(bytes(8), 2, record(2), 1, 1, id="rank too large"),
            pytest.param(bytes(8), 2, record(2), -1, 1, id="negative rank"),
            pytest.param(bytes(8), 2, record(2), 0, 0, id="no ranks"),
            pytest.param(bytes(8), 2, record(2), 0, 256, id="too many ranks"),
            pytest.param(bytes(8), 2, replace(record(2), parts=()), 0, 1, id="no part"),
            pytest.param(
                bytes(8),
                2,
                replace(record(2), parts=(*record(2).parts, *record(2).parts)),
                0,
                2,
                id="two parts",
            ),
            pytest.param(bytes(8), 2, replace(record(2), parts=record(3).parts), 0, 1, id="a size too many"),
        ],
    )
    def test_commit_of_nonsense_is_an_error(
        self,
        index: Index,
        name: NamespaceId,
        segment: bytes,
        blocks: int,
        given: SegmentRecord,
        rank: int,
        ranks: int,
    ) -> None:
        with pytest.raises(ValueError):
            index.commit(name, SegmentId(segment), chain(blocks), given, rank=rank, ranks=ranks)
        assert index.match(name, chain(2)) == []

    # touch, evict

    def test_touch_ignores_what_is_gone(self, index: Index, name: NamespaceId) -> None:
        digests = chain(4)
        segment = put(index, name, digests)
        index.touch(name, [], LATER_S)
        index.touch(name, [new_segment_id(), segment, new_segment_id()], LATER_S)
        index.touch(UNKNOWN, [segment], LATER_S)
        index.evict(name, [segment], delete_after_s=LATER_S, rule="admin")
        index.touch(name, [segment], LATER_S + 600)
        assert index.match(name, digests) == []
        assert index.evict(name, [segment], delete_after_s=LATER_S, rule="admin") == 0

    def test_touch_of_thousands(self, index: Index, name: NamespaceId) -> None:
        digests = chain(10)
        segments = put_all(index, name, digests, [5, 5])
        index.touch(name, [new_segment_id() for _ in range(2500)] + segments, LATER_S)
        assert served(index.match(name, digests)) == 10

    def test_evict_counts_what_was_visible(self, index: Index, other: Index, name: NamespaceId) -> None:
        segments = put_all(index, name, chain(10), [2] * 5)
        assert index.evict(name, [], delete_after_s=LATER_S, rule="admin") == 0
        assert index.evict(UNKNOWN, segments, delete_after_s=LATER_S, rule="admin") == 0
        some = [new_segment_id(), segments[0], segments[1], segments[0]]
        assert index.evict(name, some, delete_after_s=LATER_S, rule="admin") == 2
        assert other.evict(name, segments, delete_after_s=LATER_S, rule="admin") == 3
        assert index.evict(name, segments, delete_after_s=LATER_S, rule="admin") == 0
