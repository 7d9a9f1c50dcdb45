"""IndexConformance: the contract of kvstore.index.port.Index as tests.

An index passes if a subclass with one fixture and one method passes:

    class TestMine(IndexConformance):
        @pytest.fixture
        def index(self): ...        an empty index, opened

        def reopen(self): ...       a second handle on the storage of `index`

Digests are chained by hashing, and segments are runs of consecutive blocks. A test looks through one handle
at what it has committed through another, where that can make a difference.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress

import pytest

from kvstore.errors import StoreClosed
from kvstore.index.port import Index
from kvstore.keys import NamespaceId, SegmentId, namespace_id, new_segment_id
from tests.index.contract.chains import (
    EXPECTED_BLOCKS,
    LATER_S,
    UNKNOWN,
    blocks_of,
    chain,
    namespace,
    part_of,
    places,
    put,
    put_all,
    record,
    served,
)
from tests.index.contract.commits import CommitConformance


class IndexConformance(CommitConformance):
    """The suite of Index. Subclass it, name the subclass Test..., and define the fixture and the method."""

    @pytest.fixture
    def index(self) -> Index | Iterator[Index]:
        """An empty index."""
        raise NotImplementedError

    def reopen(self) -> Index:
        """Another handle on the storage of the index that the fixture gave last."""
        raise NotImplementedError

    @pytest.fixture
    def name(self, index: Index) -> NamespaceId:
        """A registered namespace."""
        return index.register(namespace(), expected_blocks=EXPECTED_BLOCKS)

    @pytest.fixture
    def other(self, index: Index) -> Iterator[Index]:
        """A second handle."""
        with closing(self.reopen()) as handle:
            yield handle

    # register

    def test_register_is_idempotent_and_keeps_what_is_there(self, index: Index, other: Index) -> None:
        name = index.register(namespace(), expected_blocks=EXPECTED_BLOCKS)
        assert name == namespace_id(namespace())
        digests = chain(10)
        put(index, name, digests)
        for expected in (1, 10**9):
            assert other.register(namespace(), expected_blocks=expected) == name
        assert served(other.match(name, digests)) == 10

    @pytest.mark.parametrize("expected", [0, 1, 64, 65, 100_000, 10**12])
    def test_any_number_of_expected_blocks_works(self, index: Index, expected: int) -> None:
        name = index.register(namespace(), expected_blocks=expected)
        digests = chain(200)
        put_all(index, name, digests, [64, 64, 64, 8])
        assert served(index.match(name, digests)) == 200
        assert None not in index.find(name, digests)

    def test_namespaces_do_not_mix(self, index: Index, name: NamespaceId) -> None:
        beside = index.register(namespace("another"), expected_blocks=EXPECTED_BLOCKS)
        assert beside != name
        digests = chain(10)
        segment = put(index, name, digests)
        assert index.match(beside, digests) == []
        assert index.find(beside, digests) == [None] * 10
        assert index.evict(beside, [segment], delete_after_s=LATER_S, rule="admin") == 0
        put(index, beside, digests, 0, 4, segment=segment)
        assert served(index.match(name, digests)) == 10
        assert served(index.match(beside, digests)) == 4

    # match

    def test_match_of_an_unknown_namespace_has_no_runs(self, index: Index) -> None:
        assert index.match(UNKNOWN, chain(10)) == []

    def test_match_of_nothing_has_no_runs(self, index: Index, name: NamespaceId) -> None:
        assert index.match(name, b"") == []
        assert index.match(name, chain(10)) == []
        put(index, name, chain(10))
        assert index.match(name, b"") == []
        assert index.match(name, chain(10, seed="other")) == []

    def test_match_tells_where_blocks_are(self, index: Index, other: Index, name: NamespaceId) -> None:
        digests = chain(12)
        head = put(index, name, digests, 0, 5)
        tail = put(index, name, digests, 5, 7)
        runs = other.match(name, digests)
        assert [(run.start, run.segment, run.slot, run.count) for run in runs] == [
            (0, head, 0, 5),
            (5, tail, 0, 7),
        ]
        assert [run.record for run in runs] == [record(5), record(7, depth=5)]

    @pytest.mark.parametrize(
        "sizes",
        [
            pytest.param([1], id="one block"),
            pytest.param([1] * 130, id="single blocks"),
            pytest.param([64] * 4, id="full segments"),
            pytest.param([64, 64, 13, 64, 64, 2], id="a stub in the middle"),
            pytest.param([63, 65, 64, 1, 64], id="off by one"),
            pytest.param([1000], id="one large"),
            pytest.param([7, 1000, 3, 200, 1], id="mixed"),
            pytest.param([2, 3] * 70, id="small"),
        ],
    )
    def test_match_serves_every_prefix(self, index: Index, name: NamespaceId, sizes: list[int]) -> None:
        total = sum(sizes)
        digests = chain(total + 70)
        segments = put_all(index, name, digests, sizes)
        where = [(s, slot) for s, size in zip(segments, sizes, strict=True) for slot in range(size)]
        ends = {0, 1, 2, total - 1, total, total + 1, total + 70, *itertools.accumulate(sizes)}
        for asked in sorted(ends | {end - 1 for end in ends if end} | {end + 1 for end in ends}):
            runs = index.match(name, part_of(digests, 0, asked))
            assert served(runs) == min(asked, total)
            assert places(runs) == where[:asked]
            assert len(runs) == len({run.segment for run in runs})

    @pytest.mark.parametrize("common", [0, 1, 2, 31, 32, 63, 64, 65, 100, 127, 128, 150, 199])
    def test_match_ends_where_a_chain_diverges(self, index: Index, name: NamespaceId, common: int) -> None:
        digests = chain(200)
        put_all(index, name, digests, [64, 64, 72])
        branch = chain(100, seed="branch", after=part_of(digests, 0, common))
        assert served(index.match(name, branch)) == common
        put(index, name, branch, common)
        assert served(index.match(name, branch)) == common + 100
        assert served(index.match(name, digests)) == 200

    def test_match_needs_the_first_block(self, index: Index, name: NamespaceId) -> None:
        digests = chain(100)
        put(index, name, digests, 1, 99)
        assert index.match(name, digests) == []
        put(index, name, digests, 0, 1)
        assert served(index.match(name, digests)) == 100

    @pytest.mark.parametrize("hole", [1, 50, 63, 64, 65, 120])
    def test_match_ends_at_a_hole(self, index: Index, name: NamespaceId, hole: int) -> None:
        digests = chain(200)
        put(index, name, digests, 0, hole)
        put(index, name, digests, hole + 1)
        assert served(index.match(name, digests)) == hole
        put(index, name, digests, hole, 1)
        assert served(index.match(name, digests)) == 200

    def test_match_serves_overlapping_segments(self, index: Index, name: NamespaceId) -> None:
        digests = chain(60)
        spans = [(0, 10), (5, 15), (18, 22), (20, 40), (25, 5), (50, 10)]
        segments = {put(index, name, digests, *span): span for span in spans}
        runs = index.match(name, digests)
        assert served(runs) == 60
        for position, (segment, slot) in enumerate(places(runs)):
            first, count = segments[segment]
            assert position == first + slot < first + count

    def test_match_sees_an_eviction_at_once(self, index: Index, other: Index, name: NamespaceId) -> None:
        digests = chain(150)
        segments = put_all(index, name, digests, [50, 50, 50])
        assert index.evict(name, [segments[1]], delete_after_s=LATER_S, rule="admin") == 1
        for handle in (index, other):
            assert places(handle.match(name, digests)) == [(segments[0], slot) for slot in range(50)]
        assert other.evict(name, [segments[0]], delete_after_s=LATER_S, rule="admin") == 1
        assert index.match(name, digests) == []

    def test_match_of_blocks_stored_anew_after_an_eviction(self, index: Index, name: NamespaceId) -> None:
        digests = chain(150)
        segments = put_all(index, name, digests, [50, 50, 50])
        index.evict(name, segments[1:], delete_after_s=LATER_S, rule="admin")
        again = put(index, name, digests, 50, 60)
        expected = [(segments[0], slot) for slot in range(50)] + [(again, slot) for slot in range(60)]
        assert places(index.match(name, digests)) == expected

    def test_match_with_a_copy_evicted_serves_the_other_or_nothing(
        self, index: Index, name: NamespaceId
    ) -> None:
        digests = chain(30)
        old = put(index, name, digests, 0, 20)
        new = put(index, name, digests, 0, 30)
        assert served(index.match(name, digests)) == 30
        index.evict(name, [new], delete_after_s=LATER_S, rule="admin")
        left = places(index.match(name, digests))
        assert left == [(old, slot) for slot in range(len(left))]
        index.evict(name, [old], delete_after_s=LATER_S, rule="admin")
        assert index.match(name, digests) == []

    def test_match_never_takes_a_new_segment_for_an_evicted_one(
        self, index: Index, name: NamespaceId
    ) -> None:
        """An index that numbers its segments may not use a number again while entries hold it."""
        old = chain(10, seed="old")
        segment = put(index, name, old)
        for i in range(5):
            index.evict(name, [segment], delete_after_s=LATER_S, rule="admin")
            segment = put(index, name, chain(10, seed=f"new {i}"))
            assert index.match(name, old) == []
            assert index.find(name, old) == [None] * 10

    def test_match_of_a_long_chain(self, index: Index, name: NamespaceId) -> None:
        digests = chain(8192)
        segments = put_all(index, name, digests, [64] * 128)
        runs = index.match(name, digests)
        assert [run.segment for run in runs] == segments
        assert served(runs) == 8192
        index.evict(name, segments[100:], delete_after_s=LATER_S, rule="admin")
        assert served(index.match(name, digests)) == 6400

    def test_match_of_thousands_of_segments(self, index: Index, name: NamespaceId) -> None:
        digests = chain(2300)
        segments = put_all(index, name, digests, [1] * 2300)
        assert [run.segment for run in index.match(name, digests)] == segments
        index.evict(name, [segments[2222]], delete_after_s=LATER_S, rule="admin")
        assert served(index.match(name, digests)) == 2222

    @pytest.mark.parametrize("verb", ["match", "find"])
    def test_half_a_digest_is_an_error(self, index: Index, name: NamespaceId, verb: str) -> None:
        with pytest.raises(ValueError, match="16"):
            getattr(index, verb)(name, bytes(24))

    # find

    def test_find_takes_each_digest_by_itself(self, index: Index, other: Index, name: NamespaceId) -> None:
        digests, strange = chain(10), chain(3, seed="strange")
        segment = put(index, name, digests, 2, 6)
        asked = [part_of(digests, i, 1) for i in (7, 1, 2, 2, 9)] + [part_of(strange, 0, 1)]
        found = other.find(name, b"".join(asked))
        assert [run and (run.start, run.segment, run.slot, run.count) for run in found] == [
            (0, segment, 5, 1),
            None,
            (2, segment, 0, 1),
            (3, segment, 0, 1),
            None,
            None,
        ]
        assert {run.record for run in found if run} == {record(6, depth=2)}

    def test_find_of_nothing(self, index: Index, name: NamespaceId) -> None:
        assert index.find(name, b"") == []
        assert index.find(name, chain(3)) == [None] * 3
        assert index.find(UNKNOWN, chain(3)) == [None] * 3

    def test_find_does_not_see_evicted_segments(self, index: Index, name: NamespaceId) -> None:
        digests = chain(4)
        gone, kept = put_all(index, name, digests, [2, 2])
        index.evict(name, [gone], delete_after_s=LATER_S, rule="admin")
        assert [run and run.segment for run in index.find(name, digests)] == [None, None, kept, kept]

    def test_find_of_thousands(self, index: Index, name: NamespaceId) -> None:
        digests = chain(3000)
        segments = put_all(index, name, digests, [2] * 1500)
        found = index.find(name, digests + chain(5, seed="x"))
        assert [run and run.segment for run in found] == [s for s in segments for _ in "ab"] + [None] * 5

    # many at once

    def test_threads_and_handles_never_see_a_wrong_block(
        self, index: Index, other: Index, name: NamespaceId
    ) -> None:
        trunk = chain(64)
        branches = [chain(64, seed=f"b{i}", after=part_of(trunk, 0, 16 * i)) for i in range(4)]
        contents: dict[SegmentId, bytes] = {}  # never loses a key; one writer per key
        failures: list[str] = []

        def work(worker: int) -> None:
            handle = (index, other)[worker % 2]
            mine: list[SegmentId] = []
            for step in range(40):
                digests = branches[(worker + step) % 4]
                first = 8 * ((worker * 5 + step * 3) % (blocks_of(digests) // 8 - 2))
                segment = new_segment_id(digests)
                contents[segment] = part_of(digests, first, 16)
                mine.append(put(handle, name, digests, first, 16, segment=segment))
                runs = handle.match(name, digests)
                for position, (found, slot) in enumerate(places(runs)):
                    if part_of(contents[found], slot, 1) != part_of(digests, position, 1):
                        failures.append(f"block {position} is not slot {slot} of {found.hex()}")
                served(runs)
                if step % 3 == 2:
                    handle.evict(name, [mine.pop(0)], delete_after_s=LATER_S, rule="admin")

        with ThreadPoolExecutor(6) as pool:
            for future in [pool.submit(work, worker) for worker in range(6)]:
                future.result()
        assert not failures

    # close

    def test_close_is_idempotent_and_leaves_others_alone(
        self, index: Index, other: Index, name: NamespaceId
    ) -> None:
        put(index, name, chain(3))
        index.close()
        index.close()
        with suppress(StoreClosed):
            index.match(name, chain(3))
        assert served(other.match(name, chain(3))) == 3
