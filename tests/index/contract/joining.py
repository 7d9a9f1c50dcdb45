"""JoinConformance: segments that replace others, and the bound of a match, as tests."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kvstore.index.port import MOST_RUNS, Claim, CommitState, Index, Replaced
from kvstore.index.sessions import Allowance
from kvstore.keys import NO_SESSION, NamespaceId, SegmentId, SessionId, new_segment_id, salt_id
from tests.index.contract.chains import (
    CREATED_S,
    blocks_of,
    chain,
    part_of,
    places,
    put,
    put_all,
    record,
    served,
)
from tests.index.contract.maintained import (
    SOON_S,
    Maintained,
    evict,
    pin,
    reap_all,
    reapable_ranks,
    usage_of,
)
from tests.index.contract.sessions import ALICE, ALL, BOB, END, later


def join(
    index: Index,
    name: NamespaceId,
    digests: bytes,
    first: int,
    olds: Sequence[Replaced],
    *,
    ranks: int = 1,
    salt: bytes = b"",
    session: SessionId = NO_SESSION,
    allowance: Allowance = ALL,
    segment: SegmentId | None = None,
) -> SegmentId:
    """Commits a chain from a block on as one segment in the place of others, rank by rank; returns its id."""
    mine = part_of(digests, first)
    segment = segment or new_segment_id(digests)
    made = record(blocks_of(mine), depth=first, created_s=CREATED_S, salt=salt, cost_us=64)
    for rank in range(ranks):
        state = index.commit(
            name,
            segment,
            mine,
            made,
            rank=rank,
            ranks=ranks,
            session=session,
            allowance=allowance,
            replaces=olds,
        )
        assert state is (CommitState.VISIBLE if rank == ranks - 1 else CommitState.WAITING)
    return segment


def put_olds(
    index: Index, name: NamespaceId, digests: bytes, sizes: Sequence[int], first: int = 0
) -> list[Replaced]:
    """Commits blocks of a chain, from one on, as segments of these sizes, as it takes to replace them."""
    olds = []
    for size in sizes:
        olds.append(Replaced(put(index, name, digests, first, size), part_of(digests, first, size)))
        first += size
    return olds


def found_olds(index: Index, name: NamespaceId, digests: bytes) -> list[Replaced]:
    """Returns all segments of a chain, as it takes to replace them."""
    runs = index.match(name, digests)
    return [Replaced(run.segment, part_of(digests, run.start, run.count)) for run in runs]


class JoinConformance(Maintained):
    """A part of FullIndexConformance."""

    def test_the_new_segment_serves_and_the_old_ones_go(
        self, index: Any, catalogue: Any, name: NamespaceId
    ) -> None:
        digests = chain(12)
        first, *olds = put_olds(index, name, digests, [4, 2, 3])
        old = [one.segment for one in olds]
        new = join(index, name, digests, 4, olds)
        assert places(index.match(name, digests)) == places(index.match(name, part_of(digests, 0, 4))) + [
            (new, slot) for slot in range(8)
        ]
        # Each of its blocks is found by itself, too.
        found = index.find(name, part_of(digests, 4), digests)
        assert [(one.segment, one.slot) for one in found if one] == [(new, slot) for slot in range(8)]
        assert {one.segment for one in catalogue.segments(name)} == {first.segment, new}
        assert catalogue.usage(name) == usage_of(catalogue.segments(name))
        assert [(e.op, e.segment, e.rule) for e in catalogue.events(name)][-3:] == [
            ("commit", new, None),
            ("evict", old[0], "joined"),
            ("evict", old[1], "joined"),
        ]
        assert reapable_ranks(catalogue, name) == dict.fromkeys(old, 1)
        reap_all(catalogue, name)
        assert served(index.match(name, digests)) == 12

    def test_nothing_goes_before_the_last_rank(self, index: Any, catalogue: Any, name: NamespaceId) -> None:
        digests = chain(5)
        olds = put_olds(index, name, digests, [2, 1])
        new, made, before = new_segment_id(digests), record(5), places(index.match(name, digests))
        assert index.commit(name, new, digests, made, rank=0, ranks=2, replaces=olds) is CommitState.WAITING
        assert places(index.match(name, digests)) == before
        assert {segment for segment, _ in before} == {one.segment for one in olds}
        assert index.commit(name, new, digests, made, rank=1, ranks=2, replaces=olds) is CommitState.VISIBLE
        assert [one.segment for one in catalogue.segments(name)] == [new]

    def test_it_has_just_been_used_and_takes_over_heat(
        self, index: Any, catalogue: Any, name: NamespaceId
    ) -> None:
        digests = chain(6)
        olds = put_olds(index, name, digests, [2, 2])
        old = [one.segment for one in olds]
        index.touch(name, old, SOON_S)
        (used,) = {one.last_use_s for one in catalogue.get(name, old)}
        assert [segment for segment, _ in catalogue.hottest(name, 9)] == old[:1]
        ((_, heat),) = catalogue.hottest(name, 9)
        new = join(index, name, digests, 0, olds)
        assert catalogue.get(name, [new])[0].last_use_s > used
        assert catalogue.hottest(name, 9) == [(new, heat)]

    def test_what_is_pinned_stays(self, index: Any, catalogue: Any, name: NamespaceId) -> None:
        digests = chain(6)
        olds = put_olds(index, name, digests, [2, 2])
        old = [one.segment for one in olds]
        pin(catalogue, name, old[:1])
        new = join(index, name, digests, 0, olds)
        assert {one.segment: one.pinned for one in catalogue.segments(name)} == {old[0]: True, new: False}
        assert places(index.match(name, part_of(digests, 0, 2))) == [(old[0], 0), (old[0], 1)]
        assert served(index.match(name, digests)) == 6
        # It can be relied on, whatever becomes of the new one.
        evict(index, name, [new])
        assert served(index.match(name, digests)) == 2
        assert catalogue.usage(name) == usage_of(catalogue.segments(name))

    def test_a_repeated_commit_leaves_alone_what_stayed(
        self, index: Any, catalogue: Any, name: NamespaceId
    ) -> None:
        digests = chain(6)
        olds = put_olds(index, name, digests, [2, 2])
        old = olds[0].segment
        pin(catalogue, name, [old])

        def entered() -> list[tuple[SegmentId, int] | None]:
            return [one and (one.segment, one.slot) for one in index.find(name, digests, digests)]

        new = join(index, name, digests, 0, olds)
        all_of_it = [(new, slot) for slot in range(6)]
        # Its answer got lost; a rebuild doesn't even know what it was to replace.
        for again in (olds, []):
            join(index, name, digests, 0, again, segment=new)
            assert entered() == [(old, 0), (old, 1), *all_of_it[2:]]
        # An evicted segment serves no block.
        evict(index, name, [old])
        join(index, name, digests, 0, olds, segment=new)
        assert entered() == all_of_it

    def test_what_another_session_owns_stays(self, index: Any, catalogue: Any, name: NamespaceId) -> None:
        for number, (before, after) in enumerate([(BOB, ALICE), (ALICE, NO_SESSION), (ALICE, BOB)]):
            digests = chain(4, seed=str(number))
            head = part_of(digests, 0, 2)
            old = join(index, name, head, 0, [], session=before)
            new = join(index, name, digests, 0, [Replaced(old, head)], session=after)
            assert places(index.match(name, head)) == [(old, 0), (old, 1)]
            assert catalogue.owners(name, [old, new]) == [before, after]

    def test_what_replaces_shared_blocks_is_shared(
        self, index: Any, catalogue: Any, name: NamespaceId
    ) -> None:
        digests = chain(8)
        shared, own = put_olds(index, name, digests, [2]), part_of(digests, 2, 2)
        hers = Replaced(join(index, name, part_of(digests, 0, 4), 2, [], session=ALICE), own)
        new = join(index, name, digests, 0, [*shared, hers], session=ALICE)
        assert [one.segment for one in catalogue.segments(name)] == [new]
        assert catalogue.owners(name, [new]) == [NO_SESSION] and not index.owned(name, ALICE)
        # Beside what stays it is her own: nobody else needs it.
        pinned = put_olds(index, name, chain(4, seed="pinned"), [2])
        pin(catalogue, name, [pinned[0].segment])
        new = join(index, name, chain(4, seed="pinned"), 0, pinned, session=ALICE)
        assert catalogue.owners(name, [new]) == [ALICE]

    def test_of_one_session_it_stays_that_sessions(
        self, index: Any, catalogue: Any, name: NamespaceId
    ) -> None:
        digests, head = chain(4), chain(2)
        old = join(index, name, head, 0, [], session=ALICE)
        new = join(index, name, digests, 0, [Replaced(old, head)], session=ALICE)
        assert [one.segment for one in catalogue.segments(name)] == [new]
        assert list(index.owned(name, ALICE)) == [new]
        index.session(name, ALICE, [], time.time(), END)
        assert catalogue.order(name, 1)[0].segment == new

    def test_what_a_session_retains_it_goes_on_to_retain(
        self, index: Any, catalogue: Any, name: NamespaceId
    ) -> None:
        digests, head = chain(4), chain(2)
        old = join(index, name, head, 0, [], session=ALICE)
        index.session(name, ALICE, [], time.time(), later(3600), allowance=ALL)
        # What the old one took of the allowance is free for the new one.
        most = record(4).nbytes * self.shards
        new = join(
            index,
            name,
            digests,
            0,
            [Replaced(old, head)],
            session=ALICE,
            allowance=Allowance(most, most, most),
        )
        assert [one.segment for one in catalogue.segments(name)] == [new]
        assert catalogue.retained(name)[b""] == record(4).nbytes

    def test_what_is_retained_and_nobodys_own_stays(
        self, index: Any, catalogue: Any, name: NamespaceId
    ) -> None:
        digests = chain(4)
        olds = put_olds(index, name, digests, [2])
        index.session(name, ALICE, [olds[0].segment], time.time(), later(3600), allowance=ALL)
        join(index, name, digests, 0, olds)
        assert olds[0].segment in {one.segment for one in catalogue.segments(name)}
        assert catalogue.retained(name)[b""] == record(2).nbytes

    def test_what_another_salt_has_saved_stays(self, index: Any, catalogue: Any, name: NamespaceId) -> None:
        digests, hers = chain(4), salt_id("alice")
        old = put(index, name, digests, 0, 2, salt=hers)
        olds = [Replaced(old, part_of(digests, 0, 2))]
        new = join(index, name, digests, 0, olds)
        assert [one.segment for one in catalogue.of_salt(name, hers)] == [old]
        assert {one.segment for one in catalogue.segments(name)} == {old, new}
        same = join(index, name, digests, 0, olds, salt=hers)
        assert [one.segment for one in catalogue.of_salt(name, hers)] == [same]
        assert catalogue.holdings(name, 0) == {hers: record(4).nbytes}

    def test_what_is_gone_is_nothing_to_replace(self, index: Any, catalogue: Any, name: NamespaceId) -> None:
        digests = chain(4)
        olds = put_olds(index, name, digests, [2])
        evict(index, name, [olds[0].segment])
        new = join(index, name, digests, 0, [*olds, Replaced(new_segment_id(digests), digests)])
        join(index, name, digests, 0, olds, segment=new)
        assert [one.segment for one in catalogue.segments(name)] == [new]
        assert [event.op for event in catalogue.events(name)] == ["commit", "evict", "commit"]

    def test_two_that_join_the_same_are_harmless(self, index: Any, catalogue: Any, name: NamespaceId) -> None:
        stem = chain(3)
        olds = put_olds(index, name, stem, [3])
        left, right = (chain(3, seed=seed, after=stem) for seed in "lr")
        for digests in (left, right):
            join(index, name, digests, 0, olds)
        assert served(index.match(name, left)) == served(index.match(name, right)) == 6
        assert catalogue.usage(name) == usage_of(catalogue.segments(name))

    def test_none_goes_before_all_of_its_blocks_are_elsewhere(
        self, index: Any, catalogue: Any, name: NamespaceId
    ) -> None:
        digests = chain(8)
        olds = put_olds(index, name, digests, [6])
        left = join(index, name, part_of(digests, 0, 4), 0, olds)
        assert served(index.match(name, digests)) == 6
        right = join(index, name, digests, 4, olds)
        assert {one.segment for one in catalogue.segments(name)} == {left, right}
        assert served(index.match(name, digests)) == 8
        # Nor if one of the others is gone by then, or has none of them.
        other = chain(8, seed="other")
        olds = put_olds(index, name, other, [6])
        evict(index, name, [join(index, name, part_of(other, 0, 4), 0, olds)])
        join(index, name, other, 4, olds)
        stranger = chain(3, seed="stranger")
        join(index, name, stranger, 0, olds)
        assert olds[0].segment in {one.segment for one in catalogue.segments(name)}

    def test_a_claim_on_what_comes_after_is_released(self, index: Any, name: NamespaceId) -> None:
        digests = chain(4)
        olds = put_olds(index, name, digests, [2])
        new = new_segment_id(digests)
        assert index.claim(name, digests, new, 60.0) == Claim(2, True)
        join(index, name, digests, 0, olds, segment=new)
        evict(index, name, [new])
        assert index.claim(name, digests, new_segment_id(digests), 60.0) == Claim(0, True)
        evict(index, name, [put(index, name, digests, 0, 2)])
        assert index.claim(name, part_of(digests, 2), new_segment_id(digests), 60.0) == Claim(0, True)

    def test_readers_never_meet_a_hole(self, index: Any, name: NamespaceId) -> None:
        digests, other = chain(64), self.configured()
        put(index, name, digests, 0, 1)
        stored, done = 1, threading.Event()

        def read() -> int:
            reads = 0
            while not done.is_set():
                least = stored
                assert served(other.match(name, digests)) >= least
                reads += 1
            return reads

        try:
            with ThreadPoolExecutor(2) as pool:
                readers = [pool.submit(read) for _ in range(2)]
                try:
                    for end in range(2, 65):
                        olds = found_olds(index, name, part_of(digests, 0, end - 1))
                        join(index, name, part_of(digests, 0, end), 0, olds)
                        stored = end
                finally:
                    done.set()
                assert all(reader.result() for reader in readers)
        finally:
            other.close()

    # the bound of a match

    def test_a_match_ends_after_so_many_runs(self, index: Any, name: NamespaceId) -> None:
        digests = chain(MOST_RUNS + 40)
        put_all(index, name, digests, [1] * (MOST_RUNS + 40))
        runs = index.match(name, digests)
        assert (len(runs), served(runs)) == (MOST_RUNS, MOST_RUNS)
        # Behind a segment that is gone the walk begins anew, and is bounded as well.
        evict(index, name, [runs[-1].segment])
        assert served(index.match(name, digests)) == MOST_RUNS - 1
        # Once they are joined, all of it is found.
        head = part_of(digests, 0, 64)
        join(index, name, head, 0, found_olds(index, name, head))
        put(index, name, digests, MOST_RUNS - 1, 1)
        assert served(index.match(name, digests)) == MOST_RUNS + 40
