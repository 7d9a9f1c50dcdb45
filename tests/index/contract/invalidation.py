"""InvalidationConformance: invalidate, drain and erase of kvstore.index.maintenance.Removal as tests."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvstore.errors import NamespaceUnknown
from kvstore.index.maintenance import Maintenance
from kvstore.index.port import Claim, CommitState, Index
from kvstore.keys import NamespaceId, new_segment_id
from tests.index.contract.chains import (
    EXPECTED_BLOCKS,
    UNKNOWN,
    blocks_of,
    chain,
    namespace,
    places,
    put,
    put_all,
    record,
    served,
)
from tests.index.contract.maintained import (
    DELETE_AFTER_S,
    NOTHING,
    SOON_S,
    Maintained,
    drain,
    erased,
    evict,
    reap_all,
    reapable_ranks,
    usage_of,
)


class InvalidationConformance(Maintained):
    """A part of FullIndexConformance."""

    # invalidate

    def test_invalidate_makes_everything_invisible(
        self, index: Index, catalogue: Maintenance, name: NamespaceId
    ) -> None:
        beside = index.register(namespace("another"), expected_blocks=EXPECTED_BLOCKS)
        digests = chain(40)
        put(index, beside, digests)
        segments = put_all(index, name, digests, [10, 10, 20])
        self.pin_some(catalogue, name, segments[:1])
        evict(index, name, segments[1:2])
        assert catalogue.invalidate(name) == 2
        assert index.match(name, digests) == []
        assert index.find(name, digests) == [None] * 40
        assert catalogue.usage(name) == NOTHING
        assert not any((list(catalogue.segments(name)), catalogue.order(name, 10)))
        assert catalogue.get(name, segments) == [None] * 3
        index.touch(name, segments, SOON_S)
        assert evict(index, name, segments) == 0
        assert not self.pin_some(catalogue, name, segments)
        assert catalogue.order(name, 10) == []
        assert catalogue.states(name, segments) == ["bygone", "trash", "bygone"]
        assert served(index.match(beside, digests)) == 40
        assert catalogue.invalidate(name) == catalogue.invalidate(UNKNOWN) == 0

    def test_what_is_saved_after_an_invalidation_is_visible(
        self, index: Index, catalogue: Maintenance, name: NamespaceId
    ) -> None:
        digests = chain(40)
        put_all(index, name, digests, [20, 20])
        catalogue.invalidate(name)
        mine, theirs = new_segment_id(digests), new_segment_id(digests)
        assert index.claim(name, digests, mine, 60.0) == Claim(0, True)
        assert index.claim(name, digests, theirs, 60.0) == Claim(0, False)
        put(index, name, digests, 0, 30, segment=mine)
        assert places(index.match(name, digests)) == [(mine, slot) for slot in range(30)]
        assert index.claim(name, digests, theirs, 60.0) == Claim(30, True)
        put(index, name, digests, 30, 10, segment=theirs)
        assert served(index.match(name, digests)) == 40
        assert catalogue.usage(name) == usage_of(catalogue.segments(name))
        assert catalogue.usage(name).blocks == 40
        # Invalidated segments are neither seen nor counted, also while they are drained.
        assert drain(catalogue, name) == 2
        assert catalogue.sweep(name, 1000) == 0
        assert served(index.match(name, digests)) == 40
        assert catalogue.usage(name).segments == 2

    def test_an_incomplete_commit_is_refused_after_an_invalidation(
        self, index: Index, catalogue: Maintenance, name: NamespaceId
    ) -> None:
        segment, later = new_segment_id(chain(2)), new_segment_id(chain(2))
        index.commit(name, segment, chain(2), record(2), rank=0, ranks=3)
        catalogue.invalidate(name)
        for rank in (1, 2, 0, 1):
            state = index.commit(name, segment, chain(2), record(2), rank=rank, ranks=3)
            assert state is CommitState.REFUSED
        assert index.match(name, chain(2)) == []
        states = [index.commit(name, later, chain(2), record(2), rank=rank, ranks=2) for rank in (1, 0)]
        assert states == [CommitState.WAITING, CommitState.VISIBLE]

    def test_what_was_invalidated_half_done_can_be_abandoned(
        self, index: Index, catalogue: Maintenance, name: NamespaceId
    ) -> None:
        """The ranks' payloads are deleted like those of any commit that was never completed."""
        segment = new_segment_id(chain(2))
        index.commit(name, segment, chain(2), record(2), rank=0, ranks=3)
        catalogue.invalidate(name)
        assert evict(index, name, [segment], "abandoned") == 0
        assert reapable_ranks(catalogue, name) == {segment: 3}
        assert catalogue.states(name, [segment]) == ["trash"]
        reap_all(catalogue, name)
        assert catalogue.erase(name, 1000) == "erased"

    def test_an_invalidated_segment_that_is_committed_again_is_not_deleted_while_visible(
        self, index: Index, catalogue: Maintenance, name: NamespaceId
    ) -> None:
        """The answer to the commit got lost, and the engine tries once more."""
        digests = chain(5)
        segment = new_segment_id(digests)
        put(index, name, digests, segment=segment)
        catalogue.invalidate(name)
        state = index.commit(name, segment, digests, record(5), rank=0, ranks=1)
        drain(catalogue, name)
        visible = catalogue.get(name, [segment]) != [None]
        assert visible == (state is CommitState.VISIBLE) == (served(index.match(name, digests)) == 5)
        assert (segment in reapable_ranks(catalogue, name)) == (not visible)

    def test_invalidations_and_commits_at_once(
        self, index: Index, catalogue: Maintenance, name: NamespaceId
    ) -> None:
        other = self.configured()
        barrier = threading.Barrier(3)

        def save(seed: str) -> None:
            barrier.wait()
            for i in range(40):
                put(other, name, chain(3, seed=f"{seed}/{i}"))

        def invalidate() -> int:
            barrier.wait()
            return sum(catalogue.invalidate(name) for _ in range(10))

        with ThreadPoolExecutor(3) as pool:
            for future in [pool.submit(save, seed) for seed in "ab"] + [waiting := pool.submit(invalidate)]:
                future.result()
        other.close()
        usage = catalogue.usage(name)
        assert usage == usage_of(catalogue.segments(name))
        # Every segment is either visible or invalidated, and each invalidated one is drained once.
        assert usage.segments + waiting.result() == 80
        assert drain(catalogue, name) == waiting.result() == len(reapable_ranks(catalogue, name))

    # drain

    def test_drain_puts_what_was_invalidated_into_the_trash(
        self, index: Index, catalogue: Maintenance, name: NamespaceId
    ) -> None:
        assert drain(catalogue, name) == drain(catalogue, UNKNOWN) == 0
        expected = {}
        for generation, count in enumerate((5, 0, 600, 3)):
            for i in range(count):
                digests = chain(1, seed=f"{generation}/{i}")
                segment = new_segment_id(digests)
                expected[segment] = 1 + (i == 2)
                for rank in range(expected[segment]):
                    index.commit(name, segment, digests, record(1), rank=rank, ranks=expected[segment])
            assert catalogue.invalidate(name) == count
        kept = put(index, name, chain(3))
        left = len(expected)
        while left:
            moved = drain(catalogue, name, limit=20)
            assert 0 < moved <= min(left, 20 + 200)
            left -= moved
            (account,) = catalogue.accounts()
            assert (account.bygone, account.trashed) == (left, len(expected) - left)
        assert drain(catalogue, name, limit=20) == 0
        assert catalogue.reapable(name, DELETE_AFTER_S - 1, 1000) == []
        assert reapable_ranks(catalogue, name) == expected
        assert catalogue.states(name, [kept, *expected]) == ["visible", *["trash"] * len(expected)]
        reap_all(catalogue, name)
        assert catalogue.states(name, list(expected)) == [None] * len(expected)
        assert served(index.match(name, chain(3))) == 3

    def test_drain_by_several_at_once(self, index: Index, catalogue: Maintenance, name: NamespaceId) -> None:
        segments = put_all(index, name, chain(300), [1] * 300)
        catalogue.invalidate(name)
        handles = [self.configured() for _ in range(3)]
        with ThreadPoolExecutor(3) as pool:
            moved = sum(pool.map(lambda handle: drain(handle, name), handles))
        for handle in handles:
            handle.close()
        assert moved == 300
        assert set(reapable_ranks(catalogue, name)) == set(segments)

    # erase

    @pytest.mark.parametrize("state", ["visible", "pinned", "trash", "bygone", "incomplete"])
    def test_erase_leaves_alone_what_is_in_use(
        self, index: Index, catalogue: Maintenance, name: NamespaceId, state: str
    ) -> None:
        segment = new_segment_id(chain(2))
        ranks = 2 if state == "incomplete" else 1
        index.commit(name, segment, chain(2), record(2), rank=0, ranks=ranks)
        if state == "pinned":
            self.pin_some(catalogue, name, [segment])
        elif state == "trash":
            evict(index, name, [segment])
        elif state == "bygone":
            catalogue.invalidate(name)
        before = list(catalogue.entries(name)), catalogue.accounts()
        assert erased(catalogue, name) == ["in_use"]
        assert (list(catalogue.entries(name)), catalogue.accounts()) == before
        if state == "incomplete":
            assert index.commit(name, segment, chain(2), record(2), rank=1, ranks=2) is CommitState.VISIBLE

    def test_erase_forgets_an_empty_namespace(
        self, index: Index, catalogue: Maintenance, name: NamespaceId
    ) -> None:
        beside = index.register(namespace("another"), expected_blocks=EXPECTED_BLOCKS)
        put(index, beside, chain(5))
        evict(index, name, put_all(index, name, chain(900), [300] * 3), "capacity")
        reap_all(catalogue, name)
        index.claim(name, chain(1), new_segment_id(chain(1)), 60.0)
        answers = erased(catalogue, name, 100)
        assert answers[-1] == "erased" and answers.count("more") > 2 // self.shards
        assert erased(catalogue, name) == erased(catalogue, UNKNOWN) == ["erased"]
        assert set(catalogue.namespaces()) == {beside} == {one.namespace for one in catalogue.accounts()}
        assert list(catalogue.entries(name)) == []
        with pytest.raises(NamespaceUnknown):
            put(index, name, chain(3))
        assert served(index.match(beside, chain(5))) == 5

    def test_an_erased_namespace_begins_anew(
        self, index: Index, catalogue: Maintenance, name: NamespaceId
    ) -> None:
        digests = chain(20)
        segment = put(index, name, digests, cost_us=5)
        index.touch(name, [segment], SOON_S)
        catalogue.invalidate(name)
        drain(catalogue, name)
        reap_all(catalogue, name)
        assert erased(catalogue, name)[-1] == "erased"
        # Another namespace is registered first, and must not inherit anything.
        for other in ("another", "model"):
            fresh = index.register(namespace(other), expected_blocks=EXPECTED_BLOCKS)
            assert catalogue.usage(fresh) == NOTHING
            assert list(catalogue.entries(fresh)) == []
            assert index.match(fresh, digests) == []
            if other == "model":
                assert fresh == name
            segment = new_segment_id(digests)
            assert index.claim(fresh, digests, segment, 60.0) == Claim(0, True)
            put(index, fresh, digests, segment=segment)
            assert served(index.match(fresh, digests)) == blocks_of(digests)
            (account,) = [one for one in catalogue.accounts() if one.namespace == fresh]
            assert (account.trashed, account.bygone, account.usage.segments) == (0, 0, 1)

    def test_what_is_saved_while_a_namespace_is_erased_stays(
        self, index: Index, catalogue: Maintenance, name: NamespaceId
    ) -> None:
        digests = chain(2000)
        evict(index, name, [put(index, name, digests)])
        reap_all(catalogue, name)
        assert catalogue.erase(name, 100) == "more"
        put(index, name, digests, 0, 50)
        assert catalogue.erase(name, 100) == "in_use"
        assert served(index.match(name, digests)) == 50
        evict(index, name, [one.segment for one in catalogue.segments(name)])
        reap_all(catalogue, name)
        assert erased(catalogue, name, 100)[-1] == "erased"
        again = index.register(namespace(), expected_blocks=EXPECTED_BLOCKS)
        assert list(catalogue.entries(again)) == []
