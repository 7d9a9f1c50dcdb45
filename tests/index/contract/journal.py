"""JournalConformance: the contract of kvstore.index.maintenance.Journal as tests."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, get_args

import pytest

from kvstore.index.eviction import GHOST_LEAST, ghost_bytes
from kvstore.index.maintenance import Event, Ghosts
from kvstore.index.port import DETAIL_CHARS, MISSING_DIGESTS, REQUEST_CHARS, EngineIndex, Outcome
from kvstore.keys import NamespaceId, SegmentId, new_segment_id
from schemas.records import EvictionRule
from schemas.settings import JournalSettings
from tests.index.contract.chains import (
    CREATED_S,
    EXPECTED_BLOCKS,
    UNKNOWN,
    chain,
    namespace,
    part_of,
    put,
    put_all,
    record,
)
from tests.index.contract.maintained import DELETE_AFTER_S, Maintained, evict

#: Entries that a ring may hold beyond its bound.
SLACK = 250


def outcome(
    op: Any = "match",
    asked: int = 10,
    served: int = 0,
    reason: str = "absent",
    *,
    missing: bytes = b"",
    position: int | None = None,
    request: str = "request",
    at_s: float = 1.5,
    detail: str = "",
    chain: bytes = b"",
) -> Outcome:
    """Returns an outcome; unless `position` says otherwise, the first blocks were served."""
    at = served if position is None else position
    return Outcome(at_s, request, op, asked, served, reason, at, missing, detail, chain)


def put_large(
    index: EngineIndex, name: NamespaceId, digests: bytes, first: int, count: int, nbytes: int
) -> SegmentId:
    """Commits blocks as a segment that has `nbytes` bytes according to its record."""
    sizes = [nbytes - 4096 - (count - 1), *[1] * (count - 1)]
    one = record(count, depth=first, sizes=sizes, codec="lz4")
    assert one.nbytes == nbytes
    segment = new_segment_id(digests)
    index.commit(name, segment, part_of(digests, first, count), one, rank=0, ranks=1)
    return segment


class JournalConformance(Maintained):
    """A part of FullIndexConformance."""

    @pytest.fixture
    def small(self, index: EngineIndex) -> Iterator[Any]:
        """A handle on the same storage, with short rings."""
        handle = self.configured(journal=JournalSettings(events=20, outcomes=20, ghosts=4))
        yield handle
        handle.close()

    @pytest.fixture
    def forgetful(self, index: EngineIndex) -> Iterator[Any]:
        """A handle on the same storage, that writes no rings."""
        handle = self.configured(journal=JournalSettings(events=0, outcomes=0, ghosts=0))
        yield handle
        handle.close()

    # events

    def test_events_tell_what_changed(self, index: EngineIndex, catalogue: Any, name: NamespaceId) -> None:
        assert catalogue.events(name) == catalogue.events(UNKNOWN) == []
        assert catalogue.last_position(name) == catalogue.last_position(UNKNOWN) == ""
        began = time.time()
        digests = chain(30)
        segments = put_all(index, name, digests, [10, 5, 15])
        evict(index, name, [segments[2], new_segment_id(), segments[1]], "bad")
        assert catalogue.invalidate(name) == 1
        found = catalogue.events(name)
        assert [(one.op, one.segment, one.depth, one.slots, one.nbytes, one.rule) for one in found[:5]] == [
            ("commit", segments[0], 0, 10, record(10).nbytes, None),
            ("commit", segments[1], 10, 5, record(5).nbytes, None),
            ("commit", segments[2], 15, 15, record(15).nbytes, None),
            ("evict", segments[2], 15, 15, record(15).nbytes, "bad"),
            ("evict", segments[1], 10, 5, record(5).nbytes, "bad"),
        ]
        first = [part_of(digests, at, 1) for at in (0, 10, 15, 15, 10)]
        last = [part_of(digests, at, 1) for at in (9, 14, 29)]
        assert [one.first for one in found] == [*first, None]
        assert [one.last for one in found] == [*last, None, None, None]
        assert (found[5].op, found[5].segment, found[5].rule) == ("invalidate", None, "invalidated")
        assert len(found) == 6
        assert all(began - 5 < one.at_s < time.time() + 5 for one in found)
        assert [one.at_s for one in found] == sorted(one.at_s for one in found)

    def test_events_are_of_what_changed_only(
        self, index: EngineIndex, catalogue: Any, name: NamespaceId
    ) -> None:
        digests = chain(10)
        segment, ranked = put(index, name, digests), new_segment_id(chain(3, seed="r"))
        for rank in (1, 1, 0):
            index.commit(name, ranked, chain(3, seed="r"), record(3), rank=rank, ranks=2)
        before = catalogue.events(name)
        # Of two shards, what happens in one millisecond has no order.
        assert {(one.op, one.segment, one.nbytes) for one in before} == {
            ("commit", segment, record(10).nbytes),
            ("commit", ranked, 2 * record(3).nbytes),
        }
        put(index, name, digests, segment=segment)
        index.commit(name, segment, digests, record(10, depth=5), rank=0, ranks=1)
        index.commit(name, new_segment_id(digests), digests, record(10), rank=0, ranks=2)
        index.touch(name, [segment], CREATED_S + 3600)
        self.pin_some(catalogue, name, [segment])
        self.unpin_some(catalogue, name, [segment])
        evict(index, name, [new_segment_id()])
        catalogue.drain(name, delete_after_s=DELETE_AFTER_S, limit=10)
        catalogue.sweep(name, 1000)
        assert catalogue.events(name) == before

    def test_an_invalidation_of_nothing_is_no_event(
        self, index: EngineIndex, catalogue: Any, name: NamespaceId
    ) -> None:
        catalogue.invalidate(name)
        put(index, name, chain(4))
        catalogue.invalidate(name)
        catalogue.invalidate(name)
        assert [one.op for one in catalogue.events(name)] == ["commit", "invalidate"]

    @pytest.mark.parametrize("rule", get_args(EvictionRule))
    def test_events_tell_the_rule(
        self, index: EngineIndex, catalogue: Any, name: NamespaceId, rule: EvictionRule
    ) -> None:
        one, two = put_all(index, name, chain(2), [1, 1])
        evict(index, name, [one], rule)
        catalogue.cull(name, keep_bytes=0, delete_after_s=DELETE_AFTER_S, limit=9, rule=rule)
        assert [(one.segment, one.rule) for one in catalogue.events(name)[2:]] == [(one, rule), (two, rule)]
        # More capacity would have kept what a quota evicts, and only that.
        quota = rule in ("capacity", "tenant_quota", "namespace_quota", "salt_quota")
        assert dict(catalogue.seen(name)) == ({"evicted": 2 * record(1).nbytes} if quota else {})

    def test_events_are_read_from_a_position_on(
        self, index: EngineIndex, catalogue: Any, name: NamespaceId
    ) -> None:
        beside = index.register(namespace("another"), expected_blocks=EXPECTED_BLOCKS)
        segments = []
        for i in range(1200):
            segments.append(put(index, name, chain(1, seed=str(i))))
            if i % 100 == 0:
                put(index, beside, chain(1, seed=str(i)))
        whole = catalogue.events(name, limit=5000)
        # Shards have one order only as far as their clocks can tell.
        assert self.in_step(one.segment for one in whole) == self.in_step(segments)
        assert len({one.position for one in whole}) == 1200
        assert catalogue.events(name) == whole[:1000]
        assert catalogue.last_position(name) == whole[-1].position
        read: list[Event] = []
        while page := catalogue.events(name, after=read[-1].position if read else "", limit=350):
            read += page
            assert len(read) <= len(whole)
        assert read == whole
        assert catalogue.events(name, limit=0) == []
        assert catalogue.events(name, after=whole[-1].position) == []
        last = put(index, name, chain(1, seed="last"))
        assert [one.segment for one in catalogue.events(name, after=whole[-1].position)] == [last]
        assert len(catalogue.events(beside)) == 12
        # Positions ascend, compared number by number.
        numbers = [tuple(map(int, one.position.split("-"))) for one in whole]
        assert numbers == sorted(numbers)

    @pytest.mark.parametrize(
        "position", ["x", "-", "+", "$", "-1", "1.5", "1 ", "(1-1", "0x10", "1-2-3-", "9" * 40]
    )
    def test_a_position_that_never_was_is_an_error(
        self, index: EngineIndex, catalogue: Any, name: NamespaceId, position: str
    ) -> None:
        put(index, name, chain(1))
        with pytest.raises(ValueError, match="position"):
            catalogue.events(name, after=position)

    def test_events_are_bounded(self, small: Any, catalogue: Any, name: NamespaceId, forgetful: Any) -> None:
        segments = put_all(small, name, chain(600), [1] * 600)
        kept = catalogue.events(name, limit=10_000)
        assert 20 <= len(kept) <= 20 + SLACK
        assert [one.segment for one in kept] == segments[-len(kept) :]
        # A reader that has fallen behind goes on with the events that are left.
        early = catalogue.events(name)[0].position
        put_all(small, name, chain(600, seed="more"), [1] * 600)
        later = catalogue.events(name, after=early, limit=10_000)
        assert 20 <= len(later) <= 20 + SLACK
        # Who has read all that is there has lost nothing, nor has who has read nothing.
        assert not catalogue.has_lost(name, catalogue.last_position(name))
        assert not catalogue.has_lost(name, "")
        assert not catalogue.has_lost(name, catalogue.events(name)[0].position)
        assert catalogue.has_lost(name, early)
        with pytest.raises(ValueError, match="x"):
            catalogue.has_lost(name, "x")
        before = catalogue.last_position(name)
        put(forgetful, name, chain(1, seed="unseen"))
        evict(forgetful, name, segments[:5])
        assert catalogue.events(name, after=before) == []

    def test_events_of_threads_are_all_there(
        self, index: EngineIndex, catalogue: Any, name: NamespaceId
    ) -> None:
        other = self.configured()

        def work(worker: int) -> None:
            for step in range(40):
                put((index, other)[worker % 2], name, chain(1, seed=f"{worker}/{step}"))

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))
        other.close()
        found = catalogue.events(name)
        assert len(found) == len({one.position for one in found}) == 160
        assert {one.segment for one in found} == {one.segment for one in catalogue.segments(name)}

    # tell: outcomes and totals

    def test_told_outcomes_are_kept_the_newest_first(
        self, index: EngineIndex, catalogue: Any, name: NamespaceId
    ) -> None:
        digests = chain(7)
        told = [
            outcome("match", 10, 3, "absent", missing=part_of(digests, 3), request="caf\u00e9", at_s=1.25),
            outcome("load", 5, 0, "corrupt", position=8, at_s=CREATED_S + 0.5),
            outcome(
                "save",
                9,
                4,
                "held",
                missing=part_of(digests, 0, 1),
                request="",
                position=6,
                at_s=CREATED_S + 1.5,
            ),
        ]
        index.tell(name, told[:1])
        index.tell(name, [outcome(asked=4, served=4, reason=""), *told[1:]])
        index.tell(name, [])
        kept = [replace(one, missing=one.missing[:16]) for one in told[::-1]]
        assert catalogue.outcomes(name, 10) == kept
        assert catalogue.outcomes(name, 2) == kept[:2]
        assert catalogue.outcomes(name, 0) == catalogue.outcomes(UNKNOWN, 10) == []

    def test_told_in_an_unknown_namespace_is_nothing(self, index: EngineIndex, catalogue: Any) -> None:
        index.tell(UNKNOWN, [outcome(missing=chain(3)), outcome("save")])
        assert not any((catalogue.outcomes(UNKNOWN, 10), catalogue.ghosts(UNKNOWN)))
        assert dict(catalogue.seen(UNKNOWN)) == {}
        # It does not begin with outcomes that were told before it was registered.
        for which in ("another", "model"):
            name = index.register(namespace(which), expected_blocks=1)
            assert catalogue.outcomes(name, 10) == []
            assert dict(catalogue.seen(name)) == {}

    @pytest.mark.parametrize("text", ["x" * 500, "\ud800\udfff", "\x00\r\n*3", "\U0001f600" * 200, "{}:%s"])
    def test_a_clients_text_is_kept_as_it_is_but_no_more_than_a_part(
        self, index: EngineIndex, catalogue: Any, name: NamespaceId, text: str
    ) -> None:
        index.tell(name, [outcome(request=text)])
        (one,) = catalogue.outcomes(name, 10)
        assert one.request == text[:REQUEST_CHARS]

    def test_what_goes_with_a_reason_is_kept_and_counted_under_the_reason_alone(
        self, index: EngineIndex, catalogue: Any, name: NamespaceId
    ) -> None:
        told = [
            outcome(reason="computing_is_faster", detail="340 120 8192 bucket"),
            outcome(reason="computing_is_faster", detail="x" * 500),
            # Nothing stands in the way of finding faults.
            outcome("load", 5, 0, "corrupt", detail="why"),
        ]
        index.tell(name, told)
        assert [(one.reason, one.detail) for one in catalogue.outcomes(name, 10)] == [
            ("corrupt", ""),
            ("computing_is_faster", "x" * DETAIL_CHARS),
            ("computing_is_faster", "340 120 8192 bucket"),
        ]
        assert catalogue.outcomes(name, 10, faults=True) == [replace(told[2], detail="")]
        assert catalogue.seen(name)["miss:computing_is_faster"] == 20

    def test_outcomes_are_bounded(
        self, small: Any, catalogue: Any, name: NamespaceId, forgetful: Any
    ) -> None:
        told = [outcome(asked=i + 1) for i in range(600)]
        for first in range(0, 600, 30):
            small.tell(name, told[first : first + 30])
        kept = catalogue.outcomes(name, 10_000)
        assert 20 <= len(kept) <= 20 + SLACK
        assert kept == told[::-1][: len(kept)]
        small.tell(name, told)
        assert catalogue.outcomes(name, 5) == told[:-6:-1]
        forgetful.tell(name, [outcome("load", 1, 0, "corrupt")])
        assert "corrupt" not in {one.reason for one in catalogue.outcomes(name, 10_000)}
        assert catalogue.seen(name)["miss:corrupt"] == 1

    def test_a_clients_misses_do_not_push_out_faults(
        self, small: Any, catalogue: Any, name: NamespaceId
    ) -> None:
        faults = [
            outcome("load", 5, 0, "corrupt", at_s=1.0),
            outcome("match", 3, 0, "unavailable", at_s=2.0),
            outcome("save", 2, 0, "failed", at_s=3.0),
        ]
        misses = [outcome(asked=i + 1, at_s=4.0 + i) for i in range(600)]
        small.tell(name, faults)
        for first in range(0, 600, 60):
            small.tell(name, misses[first : first + 60])
        assert catalogue.outcomes(name, 10, faults=True) == faults[::-1]
        assert catalogue.outcomes(name, 2, faults=True) == faults[:0:-1]
        kept = catalogue.outcomes(name, 10_000)
        assert kept[-3:] == faults[::-1] and kept[:20] == misses[:-21:-1]
        assert len(kept) <= 20 + 3 + SLACK
        # They are bounded as well, and come once even while both rings have them.
        many = [outcome("load", i + 1, 0, "corrupt", at_s=1000.0 + i) for i in range(600)]
        small.tell(name, many)
        found = catalogue.outcomes(name, 10_000, faults=True)
        assert 5 <= len(found) <= 5 + SLACK and found == many[::-1][: len(found)]
        assert catalogue.outcomes(name, 10_000)[:20] == many[:-21:-1]

    def test_totals_of_what_was_told(self, index: EngineIndex, catalogue: Any, name: NamespaceId) -> None:
        assert dict(catalogue.seen(name)) == dict(catalogue.seen(UNKNOWN)) == {}
        index.tell(name, [outcome("match", 100, 100, ""), outcome("match", 50, 20, "absent")])
        assert dict(catalogue.seen(name)) == {
            "requests": 2,
            "asked": 150,
            "served": 120,
            "miss:absent": 30,
        }
        index.tell(
            name,
            [
                outcome("match", 7, 0, "deadline"),
                outcome("match", 3, 0, "absent"),
                # A block that a match found and a load didn't bring is a miss after all.
                outcome("load", 20, 15, "corrupt", position=4),
                outcome("load", 20, 20, ""),
                outcome("save", 40, 40, ""),
                outcome("save", 10, 2, "held"),
                outcome("save", 5, 0, "failed"),
                outcome("save", 2**40, 0, "not_admitted"),
            ],
        )
        assert dict(catalogue.seen(name)) == {
            "requests": 4,
            "asked": 160,
            "served": 115,
            "miss:absent": 33,
            "miss:deadline": 7,
            "miss:corrupt": 5,
            "offered": 55 + 2**40,
            "stored": 42,
            "unsaved:held": 8,
            "unsaved:failed": 5,
            "unsaved:not_admitted": 2**40,
        }
        index.tell(name, [outcome("load", 115, 0, "missing")])
        seen = catalogue.seen(name)
        assert seen.get("served", 0) == 0
        assert seen["asked"] == sum(blocks for reason, blocks in seen.items() if reason.startswith("miss:"))

    def test_totals_of_threads_are_exact(self, index: EngineIndex, catalogue: Any, name: NamespaceId) -> None:
        other = self.configured()

        def work(worker: int) -> None:
            for _ in range(25):
                (index, other)[worker % 2].tell(name, [outcome("match", 4, 1, "absent")] * 3)

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))
        other.close()
        right = {"requests": 300, "asked": 1200, "served": 300, "miss:absent": 900}
        assert dict(catalogue.seen(name)) == right
        assert len(catalogue.outcomes(name, 1000)) == 300

    def test_totals_have_the_bytes_that_quotas_evicted(
        self, index: EngineIndex, catalogue: Any, name: NamespaceId
    ) -> None:
        segments = [put_large(index, name, chain(2, seed=str(i)), 0, 2, 10**9 + i) for i in range(4)]
        evict(index, name, segments[:1], "admin")
        evict(index, name, segments[1:2], "tenant_quota")
        catalogue.cull(name, keep_bytes=0, delete_after_s=DELETE_AFTER_S, limit=1, rule="capacity")
        left = sum(one.record.nbytes for one in catalogue.segments(name))
        assert dict(catalogue.seen(name)) == {"evicted": 10**9 + 1 + (2 * 10**9 + 5 - left)}
        catalogue.invalidate(name)
        assert set(catalogue.seen(name)) == {"evicted"}

    # ghosts

    def test_ghosts_say_what_more_capacity_would_have_served(
        self, index: EngineIndex, catalogue: Any, name: NamespaceId
    ) -> None:
        """The sizes lie in the middle of their steps, because a stamp may be off by some KiB."""
        assert catalogue.ghosts(name) == catalogue.ghosts(UNKNOWN) == []
        digests = chain(100)
        sizes = [int(GHOST_LEAST * factor) for factor in (1.1, 3.0, 10.0)]
        segments = [
            put_large(index, name, digests, first, count, nbytes)
            for first, count, nbytes in zip((0, 10, 40), (10, 30, 60), sizes, strict=True)
        ]
        for segment in segments[::-1]:
            evict(index, name, [segment], "capacity")
        # The tail was evicted first, so keeping it would have taken the most capacity.
        extra = {10: 1.1, 30: 4.1, 60: 14.1}

        def ghosts() -> dict[int, int]:
            return {one.extra_bytes: one.blocks for one in catalogue.ghosts(name)}

        def step_of(factor: float) -> int:
            least = next(s for step in range(100) if (s := ghost_bytes(step)) >= GHOST_LEAST * factor)
            return least * self.shards

        steps = {count: step_of(factor) for count, factor in extra.items()}
        index.tell(name, [outcome("match", 100, 0, "absent", missing=digests)])
        assert ghosts() == {steps[10]: 10, steps[30]: 30, steps[60]: 60}
        # A ghost is known by its first digest, so one that begins before block 25 is not found.
        index.tell(name, [outcome("match", 100, 25, "absent", missing=part_of(digests, 25), chain=digests)])
        assert ghosts() == {steps[10]: 10, steps[30]: 30, steps[60]: 120}
        # Only blocks that were asked for count, wherever in the chain they begin.
        index.tell(
            name,
            [outcome("match", 18, 3, "absent", missing=part_of(digests, 0, 15), position=70, chain=digests)],
        )
        assert ghosts() == {steps[10]: 20, steps[30]: 35, steps[60]: 120}
        # And no others count, even if their digests are told.
        index.tell(name, [outcome("match", 15, 0, "absent", missing=digests)])
        assert ghosts() == {steps[10]: 30, steps[30]: 40, steps[60]: 120}
        # Other misses have other causes than a lack of room, and saves ask for nothing.
        index.tell(name, [outcome("match", 100, 0, "deadline", missing=digests)])
        index.tell(name, [outcome("load", 100, 0, "absent", missing=digests)])
        index.tell(name, [outcome("save", 100, 0, "absent", missing=digests)])
        assert ghosts() == {steps[10]: 30, steps[30]: 40, steps[60]: 120}
        assert [one.extra_bytes for one in catalogue.ghosts(name)] == sorted(ghosts())
        assert all(isinstance(one, Ghosts) for one in catalogue.ghosts(name))
        # Later evictions raise the capacity that would have kept the ghosts.
        more = chain(1, seed="x", after=part_of(digests, 0, 1))
        evict(index, name, [put_large(index, name, more, 1, 1, sizes[2])], "capacity")
        index.tell(name, [outcome("match", 10, 0, "absent", missing=part_of(digests, 0, 10))])
        assert ghosts() == {steps[10]: 30, steps[30]: 40, steps[60]: 120, step_of(11.1): 10}

    def test_a_ghost_ends_with_its_next_commit(
        self, index: EngineIndex, catalogue: Any, name: NamespaceId
    ) -> None:
        digests = chain(20)
        evict(index, name, put_all(index, name, digests, [10, 10]), "capacity")
        evict(index, name, [put(index, name, digests, 0, 10)], "admin")
        index.tell(name, [outcome("match", 20, 0, "absent", missing=digests)])
        assert catalogue.ghosts(name) == [Ghosts(GHOST_LEAST * self.shards, 10)]

    @pytest.mark.parametrize("rule", ["bad", "abandoned", "admin", "invalidated", "repair"])
    def test_what_no_quota_evicted_has_no_ghost(
        self, index: EngineIndex, catalogue: Any, name: NamespaceId, rule: EvictionRule
    ) -> None:
        evict(index, name, [put(index, name, chain(5))], rule)
        index.tell(name, [outcome("match", 5, 0, "absent", missing=chain(5))])
        assert catalogue.ghosts(name) == []

    def test_ghosts_do_not_outlive_an_invalidation(
        self, index: EngineIndex, catalogue: Any, name: NamespaceId
    ) -> None:
        """More capacity would not have kept these segments either."""
        evict(index, name, [put(index, name, chain(5))], "capacity")
        put(index, name, chain(1, seed="x"))
        catalogue.invalidate(name)
        index.tell(name, [outcome("match", 5, 0, "absent", missing=chain(5))])
        assert catalogue.ghosts(name) == []

    def test_overlapping_ghosts_are_credited_once(
        self, index: EngineIndex, catalogue: Any, name: NamespaceId
    ) -> None:
        digests = chain(30)
        long = put(index, name, digests, 0, 30)
        short = put(index, name, digests, 8, 10)
        evict(index, name, [long, short], "namespace_quota")
        index.tell(name, [outcome("match", 30, 0, "absent", missing=digests)])
        assert catalogue.ghosts(name) == [Ghosts(GHOST_LEAST * self.shards, 18)]

    def test_ghosts_are_bounded(self, small: Any, catalogue: Any, name: NamespaceId, forgetful: Any) -> None:
        digests = chain(8)
        segments = put_all(small, name, digests, [1] * 8)
        for segment in segments[:5]:
            evict(small, name, [segment], "capacity")
        evict(small, name, segments[5:], "capacity")
        small.tell(name, [outcome("match", 8, 0, "absent", missing=digests)])
        assert catalogue.ghosts(name) == [Ghosts(GHOST_LEAST * self.shards, 4)]
        # The ghosts that were evicted last are left.
        small.tell(name, [outcome("match", 4, 0, "absent", missing=part_of(digests, 0, 4))])
        assert catalogue.ghosts(name) == [Ghosts(GHOST_LEAST * self.shards, 4)]
        beside = forgetful.register(namespace("another"), expected_blocks=EXPECTED_BLOCKS)
        evict(forgetful, beside, [put(forgetful, beside, digests)], "capacity")
        forgetful.tell(beside, [outcome("match", 8, 0, "absent", missing=digests)])
        assert catalogue.ghosts(beside) == []
        assert catalogue.seen(beside)["evicted"] == record(8).nbytes

    def test_only_so_many_missing_digests_are_looked_at(
        self, index: EngineIndex, catalogue: Any, name: NamespaceId
    ) -> None:
        digests = chain(MISSING_DIGESTS + 2)
        evict(index, name, put_all(index, name, digests, [1] * (MISSING_DIGESTS + 2)), "capacity")
        index.tell(name, [outcome("match", 1000, 0, "absent", missing=digests)])
        assert catalogue.ghosts(name) == [Ghosts(GHOST_LEAST * self.shards, MISSING_DIGESTS)]

    @pytest.mark.parametrize("op", ["match", "load", "save"])
    def test_half_a_missing_digest_is_an_error(
        self, index: EngineIndex, catalogue: Any, name: NamespaceId, op: str
    ) -> None:
        with pytest.raises(ValueError, match="16"):
            index.tell(name, [outcome(), outcome(op, missing=bytes(24))])
        assert dict(catalogue.seen(name)) == {}
