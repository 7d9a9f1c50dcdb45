"""UpkeepConformance: the contract of kvstore.catalogue.Upkeep as tests."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

import pytest

from kvstore.catalogue import Entry, Maintenance, Usage
from kvstore.conformance.chains import (
    UNKNOWN,
    chain,
    places,
    put,
    put_all,
    record,
    served,
)
from kvstore.conformance.culling import CullConformance
from kvstore.conformance.invalidation import InvalidationConformance, drain, due
from kvstore.conformance.maintained import MADE_S, MINUTE, NOTHING, SOON_S, evict, pin
from kvstore.errors import CapacityExceeded
from kvstore.keys import Digest, NamespaceId, SegmentId, new_segment_id
from kvstore.ports import CommitState, Index


class UpkeepConformance(CullConformance, InvalidationConformance):
    """A part of MaintenanceConformance."""

    # pin, unpin

    def test_pin_counts_what_it_pinned(self, index: Index, catalogue: Maintenance, name: NamespaceId) -> None:
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
        assert catalogue.unpin(name, [segments[3], gone, *segments[:2], segments[0]]) == 2
        assert catalogue.unpin(name, []) == catalogue.unpin(UNKNOWN, segments) == 0
        assert catalogue.usage(name) == Usage(4 * one, 4, 4, one)
        # Pinned segments are served, and noted as used, like all others.
        assert served(index.match(name, chain(4))) == 4

    def test_pin_keeps_to_its_limit(self, index: Index, catalogue: Maintenance, name: NamespaceId) -> None:
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
        self, index: Index, catalogue: Maintenance, name: NamespaceId
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
        self, index: Index, catalogue: Maintenance, name: NamespaceId, encoder: NamespaceId
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
            (fresh, SOON_S + 2 * MINUTE),
        ]
        # An item keeps what its cost is worth.
        item = put(index, encoder, chain(1), cost_us=10**9)
        pin(catalogue, encoder, [item])
        index.touch(encoder, [item], SOON_S)
        catalogue.unpin(encoder, [item])
        (one,) = catalogue.order(encoder, 9)
        assert (one.used_s, one.keep_s) == (SOON_S, SOON_S + 150 * MINUTE)

    def test_eviction_takes_pinned_segments_and_their_bytes(
        self, index: Index, catalogue: Maintenance, name: NamespaceId
    ) -> None:
        segments = put_all(index, name, chain(6), [2] * 3)
        pin(catalogue, name, segments)
        assert evict(index, name, segments[:1]) == 1
        assert catalogue.usage(name).pinned_bytes == 2 * record(2).nbytes
        put(index, name, chain(6), 2, 2, segment=segments[1])
        assert [one and one.pinned for one in catalogue.get(name, segments)] == [None, True, True]
        assert catalogue.unlist(name, segments[1:2]) == 1
        assert catalogue.usage(name) == Usage(record(2).nbytes, 1, 2, record(2).nbytes)
        assert catalogue.invalidate(name) == 1
        assert catalogue.usage(name) == NOTHING

    # unlist

    def test_unlisted_segments_can_be_committed_again(
        self, index: Index, catalogue: Maintenance, name: NamespaceId
    ) -> None:
        digests = chain(12)
        bygone = put(index, name, chain(1, seed="b"))
        catalogue.invalidate(name)
        visible, trashed, twice = put_all(index, name, digests, [4] * 3)
        pin(catalogue, name, [visible])
        incomplete = new_segment_id()
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
        assert due(catalogue, name) == {}
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
        # The ranks begin anew: what the first had written was forgotten with it.
        state = index.commit(name, incomplete, chain(2, seed="i"), record(2), rank=0, ranks=2)
        assert state is CommitState.WAITING

    def test_unlist_many(self, index: Index, catalogue: Maintenance, name: NamespaceId) -> None:
        segments = put_all(index, name, chain(700), [1] * 700)
        assert catalogue.unlist(name, segments[:600]) == 600
        assert catalogue.usage(name).segments == 100
        assert {one.segment for one in catalogue.segments(name)} == set(segments[600:])

    # unlink

    def test_unlink_drops_entries_that_still_say_so(
        self, index: Index, catalogue: Maintenance, name: NamespaceId
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
        # Of those that were given, the last five say something else by now.
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

    def test_unlink_thousands(self, index: Index, catalogue: Maintenance, name: NamespaceId) -> None:
        digests = chain(2500)
        put_all(index, name, digests, [500] * 5)
        entries = list(catalogue.entries(name))
        assert catalogue.unlink(name, entries[:2400]) == 2400
        assert {one.digest for one in catalogue.entries(name)} == {one.digest for one in entries[2400:]}

    @pytest.mark.parametrize("verb", ["get", "states", "bury", "unpin", "unlist"])
    def test_a_segment_id_of_another_length_is_an_error(
        self, catalogue: Maintenance, name: NamespaceId, verb: str
    ) -> None:
        with pytest.raises(ValueError, match="segment id of 5 bytes"):
            getattr(catalogue, verb)(name, [new_segment_id(), b"short"])
        with pytest.raises(ValueError, match="segment id of 5 bytes"):
            pin(catalogue, name, [SegmentId(b"short")])
        with pytest.raises(ValueError, match="segment id of 5 bytes"):
            catalogue.unlink(name, [Entry(Digest(chain(1)), SegmentId(b"short"), 0)])

    # reconcile

    def test_reconcile_finds_nothing_to_correct(
        self, index: Index, catalogue: Maintenance, name: NamespaceId
    ) -> None:
        for _ in range(2):
            found = catalogue.reconcile(name)
            assert found.recorded == found.counted == catalogue.usage(name)
            assert found.mended == 0
            segments = put_all(index, name, chain(30), [1, 2, 7, 20])
            pin(catalogue, name, segments[:2])
            evict(index, name, segments[3:])
        assert catalogue.reconcile(UNKNOWN).counted == NOTHING

    @pytest.mark.parametrize("wrong", [-7, 1, 10**13])
    def test_reconcile_corrects_a_miscount(
        self, index: Index, catalogue: Maintenance, name: NamespaceId, wrong: int
    ) -> None:
        segments = put_all(index, name, chain(1200), [1] * 1200)
        pin(catalogue, name, segments[:3])
        right = catalogue.usage(name)
        self.miscount(name, wrong)
        assert catalogue.usage(name).nbytes == right.nbytes + wrong
        found = catalogue.reconcile(name)
        assert found.recorded == replace(right, nbytes=right.nbytes + wrong)
        assert found.counted == catalogue.usage(name) == right
        assert catalogue.reconcile(name).recorded == right

    def test_reconcile_corrects_only_what_did_not_change_meanwhile(
        self, index: Index, catalogue: Maintenance, name: NamespaceId
    ) -> None:
        """Under load it may give up, but never makes anything wrong."""
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
        assert catalogue.usage(name).nbytes == counted + drift
        assert catalogue.reconcile(name).counted == catalogue.usage(name)
        assert catalogue.usage(name).nbytes == counted

    # leases

    @pytest.fixture
    def replicas(self, catalogue: Maintenance) -> Iterator[list[Maintenance]]:
        """Handles of several processes."""
        others = [self.configured() for _ in range(3)]
        yield [catalogue, *others]
        for other in others:
            other.close()

    def test_a_lease_is_one_holders(self, replicas: list[Maintenance]) -> None:
        one, two = replicas[:2]
        assert one.leaseholder("janitor") is None
        assert one.lease("janitor", "a", 60.0)
        assert not two.lease("janitor", "b", 60.0)
        assert two.lease("other {x}", "b", 60.0)
        assert one.lease("janitor", "a", 60.0)
        assert [handle.leaseholder("janitor") for handle in (one, two)] == ["a", "a"]
        two.release("janitor", "b")
        assert one.leaseholder("janitor") == "a"
        one.release("janitor", "a")
        one.release("janitor", "a")
        assert two.leaseholder("janitor") is None
        assert two.lease("janitor", "b", 60.0)
        assert one.leaseholder("other {x}") == "b"

    def test_a_lease_ends_by_itself_unless_it_is_renewed(self, replicas: list[Maintenance]) -> None:
        one, two = replicas[:2]
        assert one.lease("janitor", "a", 60.0)
        assert one.lease("janitor", "a", 0.05)
        until = time.monotonic() + 10
        while not two.lease("janitor", "b", 60.0):
            assert time.monotonic() < until
            time.sleep(0.01)
        assert one.leaseholder("janitor") == "b"
        assert not one.lease("janitor", "a", 60.0)

    def test_a_race_for_a_lease_has_one_winner(self, replicas: list[Maintenance]) -> None:
        for round_ in range(5):
            barrier = threading.Barrier(8)

            def race(racer: int, name: str, barrier: threading.Barrier) -> str | None:
                barrier.wait()
                holder = f"holder {racer}"
                return holder if replicas[racer % 4].lease(name, holder, 60.0) else None

            with ThreadPoolExecutor(8) as pool:
                racing = [pool.submit(race, racer, f"race {round_}", barrier) for racer in range(8)]
                (winner,) = filter(None, (one.result() for one in racing))
            assert replicas[0].leaseholder(f"race {round_}") == winner
