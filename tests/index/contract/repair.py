"""RepairConformance: the contract of kvstore.index.maintenance.Repair as tests."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from kvstore.index.maintenance import Entry, Usage
from kvstore.index.port import CommitState, Index
from kvstore.keys import Digest, NamespaceId, SegmentId, new_segment_id
from tests.index.contract.chains import UNKNOWN, chain, places, put, put_all, record, served
from tests.index.contract.maintained import NOTHING, Maintained, drain, evict, reap_all, reapable_ranks


class RepairConformance(Maintained):
    """A part of FullIndexConformance. Subclasses define one more method."""

    def miscount(self, name: NamespaceId, nbytes: int) -> None:
        """Adds to the bytes that are recorded for a namespace, behind the index's back."""
        raise NotImplementedError

    # sample

    def test_sample_draws_by_chance(self, index: Index, catalogue: Any, name: NamespaceId) -> None:
        assert catalogue.sample(name, 5) == catalogue.sample(UNKNOWN, 5) == []
        segments = put_all(index, name, chain(40), [1] * 40)
        gone = segments[::8]
        evict(index, name, gone)
        self.pin_some(catalogue, name, segments[1:3])
        right = {one.segment: one for one in catalogue.segments(name)}
        drawn: set[SegmentId] = set()
        for _ in range(60):
            some = catalogue.sample(name, 8)
            assert len({one.segment for one in some}) == len(some) == 8
            assert all(right[one.segment] == one for one in some)
            drawn |= {one.segment for one in some}
        # One of them is never drawn about once in 10**6 runs.
        assert drawn == set(right)
        assert {one.segment for one in catalogue.sample(name, 1000)} == set(right)
        assert catalogue.sample(name, 0) == []
        catalogue.invalidate(name)
        assert catalogue.sample(name, 8) == []

    # unlist

    def test_unlisted_segments_can_be_committed_again(
        self, index: Index, catalogue: Any, name: NamespaceId
    ) -> None:
        digests = chain(12)
        bygone = put(index, name, chain(1, seed="b"))
        catalogue.invalidate(name)
        visible, trashed, twice = put_all(index, name, digests, [4] * 3)
        self.pin_some(catalogue, name, [visible])
        incomplete = new_segment_id(chain(2, seed="i"))
        index.commit(name, incomplete, chain(2, seed="i"), record(2), rank=1, ranks=2)
        evict(index, name, [trashed])
        some = [visible, trashed, incomplete, bygone, new_segment_id(), visible]
        assert catalogue.unlist(UNKNOWN, some) == 0
        assert catalogue.unlist(name, some) == 1
        assert catalogue.states(name, some) == [None] * 6
        assert (catalogue.accounts()[0].bygone, catalogue.accounts()[0].trashed) == (0, 0)
        assert catalogue.unlist(name, some) == catalogue.unlist(name, []) == 0
        assert catalogue.usage(name) == Usage(record(4).nbytes, 1, 4)
        # Nothing is deleted, now or later.
        assert drain(catalogue, name) == 0
        assert reapable_ranks(catalogue, name) == {}
        assert index.match(name, digests) == []
        put(index, name, digests, 0, 4, segment=visible)
        put(index, name, digests, 4, 4, segment=trashed)
        put(index, name, chain(1, seed="b"), segment=bygone)
        assert places(index.match(name, digests)) == [
            (segment, slot) for segment in (visible, trashed, twice) for slot in range(4)
        ]
        assert catalogue.states(name, [visible, trashed, bygone]) == ["visible"] * 3
        assert not any(one.pinned for one in catalogue.segments(name))
        assert len(catalogue.order(name, 10)) == 4
        # The ranks begin anew: the first one's commit was forgotten with the segment.
        state = index.commit(name, incomplete, chain(2, seed="i"), record(2), rank=0, ranks=2)
        assert state is CommitState.WAITING

    def test_unlist_many(self, index: Index, catalogue: Any, name: NamespaceId) -> None:
        segments = put_all(index, name, chain(700), [1] * 700)
        assert catalogue.unlist(name, segments[:600]) == 600
        assert catalogue.usage(name).segments == 100
        assert {one.segment for one in catalogue.segments(name)} == set(segments[600:])

    def test_what_was_invalidated_half_done_and_deleted_is_not_unlisted(
        self, index: Index, catalogue: Any, name: NamespaceId
    ) -> None:
        segment = new_segment_id(chain(2))
        index.commit(name, segment, chain(2), record(2), rank=0, ranks=3)
        catalogue.invalidate(name)
        evict(index, name, [segment], "abandoned")
        reap_all(catalogue, name)
        assert catalogue.unlist(name, [segment]) == 0
        assert catalogue.erase(name, 1000) == "erased"

    def test_unlisting_a_segment_id_of_another_length_is_an_error(
        self, catalogue: Any, name: NamespaceId
    ) -> None:
        with pytest.raises(ValueError, match="segment id of 5 bytes"):
            catalogue.unlist(name, [new_segment_id(), SegmentId(b"short")])

    # unlink

    def test_unlink_drops_entries_that_still_say_so(
        self, index: Index, catalogue: Any, name: NamespaceId
    ) -> None:
        digests = chain(10)
        old = put(index, name, digests)
        entries = sorted(catalogue.entries(name), key=lambda one: one.slot)
        new = put(index, name, digests, 5, 5)
        wrong = [
            replace(entries[0], slot=1),
            replace(entries[1], segment=new),
            Entry(Digest(chain(1, seed="x")), old, 0),
        ]
        assert catalogue.unlink(name, wrong) == catalogue.unlink(name, []) == 0
        assert catalogue.unlink(UNKNOWN, entries) == 0
        assert served(index.match(name, digests)) == 10
        # The last five of the given entries say something else by now.
        assert catalogue.unlink(name, entries[2:]) == 3
        assert catalogue.unlink(name, entries[2:]) == 0
        found = index.find(name, digests)
        assert [run and (run.segment, run.slot) for run in found] == [
            (old, 0),
            (old, 1),
            None,
            None,
            None,
            *((new, slot) for slot in range(5)),
        ]
        put(index, name, digests, segment=old)
        assert None not in index.find(name, digests)

    def test_unlink_thousands(self, index: Index, catalogue: Any, name: NamespaceId) -> None:
        digests = chain(2500)
        put_all(index, name, digests, [500] * 5)
        entries = list(catalogue.entries(name))
        assert catalogue.unlink(name, entries[:2400]) == 2400
        assert {one.digest for one in catalogue.entries(name)} == {one.digest for one in entries[2400:]}

    def test_unlinking_a_segment_id_of_another_length_is_an_error(
        self, catalogue: Any, name: NamespaceId
    ) -> None:
        with pytest.raises(ValueError, match="segment id of 5 bytes"):
            catalogue.unlink(name, [Entry(Digest(chain(1)), SegmentId(b"short"), 0)])

    # reconcile

    def test_reconcile_finds_nothing_to_correct(
        self, index: Index, catalogue: Any, name: NamespaceId
    ) -> None:
        for _ in range(2):
            found = catalogue.reconcile(name)
            assert found.recorded == found.counted == catalogue.usage(name)
            assert found.mended == 0
            segments = put_all(index, name, chain(30), [1, 2, 7, 20])
            self.pin_some(catalogue, name, segments[:2])
            evict(index, name, segments[3:])
        assert catalogue.reconcile(UNKNOWN).counted == NOTHING

    @pytest.mark.parametrize("wrong", [-7, 1, 10**13])
    def test_reconcile_corrects_a_miscount(
        self, index: Index, catalogue: Any, name: NamespaceId, wrong: int
    ) -> None:
        segments = put_all(index, name, chain(1200), [1] * 1200)
        self.pin_some(catalogue, name, segments[:3])
        right = catalogue.usage(name)
        self.miscount(name, wrong)
        assert catalogue.usage(name).nbytes == right.nbytes + wrong
        found = catalogue.reconcile(name)
        assert found.recorded == replace(right, nbytes=right.nbytes + wrong)
        assert found.counted == catalogue.usage(name) == right
        assert catalogue.reconcile(name).recorded == right

    def test_reconcile_corrects_only_what_did_not_change_meanwhile(
        self, index: Index, catalogue: Any, name: NamespaceId
    ) -> None:
        """Under load it may give up, but it never makes a wrong correction."""
        put_all(index, name, chain(100), [1] * 100)
        wrong, drift = 12_345, 0
        other = self.configured()
        stop = threading.Event()

        def save() -> None:
            for i in range(10_000):
                if stop.is_set():
                    return
                segment = put(other, name, chain(2, seed=str(i)))
                if i % 2:
                    evict(other, name, [segment])

        with ThreadPoolExecutor(1) as pool:
            saving = pool.submit(save)
            for _ in range(15):
                self.miscount(name, wrong)
                drift = 0 if catalogue.reconcile(name).counted else drift + wrong
            stop.set()
            saving.result()
        other.close()
        counted = sum(one.record.nbytes for one in catalogue.segments(name))
        # Of several shards one may have been corrected where another gave up.
        assert catalogue.usage(name).nbytes - counted in range(0, drift + 1, wrong)
        assert catalogue.reconcile(name).counted == catalogue.usage(name)
        assert catalogue.usage(name).nbytes == counted
