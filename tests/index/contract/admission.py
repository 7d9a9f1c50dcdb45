"""NoteConformance and VerdictConformance: the contracts of kvstore.index.port.Notes and of
kvstore.index.verdicts.Verdicts as tests."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from kvstore.errors import NamespaceUnknown
from kvstore.index.port import CommitState, EngineIndex
from kvstore.index.verdicts import NAME_CHARS, VERDICTS_KEPT, Opinion, VerdictState
from kvstore.keys import (
    SEGMENT_ID_BYTES,
    NamespaceId,
    PlaceId,
    SegmentId,
    WriterId,
    new_segment_id,
    place_of,
    writer_id,
)
from tests.index.contract.chains import (
    EXPECTED_BLOCKS,
    blocks_of,
    chain,
    namespace,
    part_of,
    put,
    record,
    served,
)

UNKNOWN = NamespaceId("0000000000000000")
DAY_S = 86_400.0
#: The middle of a window of a day.
NOON_S = 19_676 * DAY_S + DAY_S / 2
#: Bytes of a sketch so roomy that none of these tests' blocks passes by accident.
ROOMY = 1 << 18


def use(
    index: EngineIndex,
    name: NamespaceId,
    digests: bytes,
    *,
    at_s: float = NOON_S,
    window_s: float = DAY_S,
    sketch_bytes: int = ROOMY,
) -> int:
    """Notes one use, in windows of a day unless a test says otherwise."""
    return index.note(name, digests, now_s=at_s, window_s=window_s, sketch_bytes=sketch_bytes)


def is_about(answer: int, truth: int) -> bool:
    """Returns whether the answer is right, give or take an accident: one or two new blocks may pass."""
    return truth <= answer <= truth + 2


class NoteConformance:
    """The suite of Notes. It is combined with IndexConformance, whose fixtures it takes."""

    def test_note_counts_from_the_second_use(
        self, index: EngineIndex, other: EngineIndex, name: NamespaceId
    ) -> None:
        digests = chain(100)
        assert use(index, name, digests) == 0
        assert use(other, name, digests) == 100
        assert use(index, name, digests) == 100

    def test_note_of_nothing(self, index: EngineIndex, name: NamespaceId) -> None:
        assert use(index, name, b"") == 0
        use(index, name, chain(3))
        assert use(index, name, b"") == 0

    def test_note_needs_a_namespace(self, index: EngineIndex, name: NamespaceId) -> None:
        with pytest.raises(NamespaceUnknown):
            use(index, UNKNOWN, chain(3))
        assert use(index, name, chain(3)) == 0

    @pytest.mark.parametrize("blocks", [1, 2, 31, 32, 33, 63, 64, 65, 200])
    def test_note_knows_every_prefix(self, index: EngineIndex, name: NamespaceId, blocks: int) -> None:
        digests = chain(blocks)
        use(index, name, digests)
        for asked in range(blocks + 1):
            assert use(index, name, part_of(digests, 0, asked)) == asked
        assert is_about(use(index, name, chain(70, after=digests)), blocks)

    @pytest.mark.parametrize("common", [0, 1, 2, 5, 31, 32, 33, 60, 64, 65, 99, 100])
    def test_note_ends_where_a_chain_is_new(
        self, index: EngineIndex, other: EngineIndex, name: NamespaceId, common: int
    ) -> None:
        trunk = chain(100)
        use(index, name, trunk)
        branch = chain(80, seed="branch", after=part_of(trunk, 0, common))
        assert is_about(use(other, name, branch), common)
        twig = chain(40, seed="twig", after=part_of(branch, 0, common + 7))
        assert is_about(use(index, name, twig), common + 7)
        for known in (trunk, branch, twig):
            assert use(other, name, known) == blocks_of(known)

    @pytest.mark.parametrize("turn", [1, 3, 10, 40])
    def test_note_of_a_chain_that_grows(self, index: EngineIndex, name: NamespaceId, turn: int) -> None:
        """Every request of a conversation is the one before and a bit more."""
        digests = chain(150)
        for known in range(0, 150, turn):
            assert is_about(use(index, name, part_of(digests, 0, known + turn)), known)
        assert use(index, name, digests) == 150

    def test_note_of_many_prompts_behind_one_prefix(self, index: EngineIndex, name: NamespaceId) -> None:
        """A system prompt with which every request begins must not make every request look known."""
        system = chain(3)
        use(index, name, system)
        counts = [use(index, name, chain(50, seed=f"user {i}", after=system)) for i in range(200)]
        assert min(counts) == 3
        assert sum(counts) <= 200 * 3 + 10
        assert use(index, name, chain(50, seed="user 0", after=system)) == 53

    def test_note_keeps_namespaces_apart(self, index: EngineIndex, name: NamespaceId) -> None:
        beside = index.register(namespace("another"), expected_blocks=EXPECTED_BLOCKS)
        digests = chain(40)
        use(index, name, digests)
        assert use(index, beside, digests) == 0
        assert use(index, name, digests) == use(index, beside, digests) == 40

    def test_note_has_nothing_to_do_with_what_is_stored(self, index: EngineIndex, name: NamespaceId) -> None:
        digests = chain(10)
        put(index, name, digests)
        assert use(index, name, digests) == 0
        noted = chain(10, seed="noted")
        use(index, name, noted)
        assert index.match(name, noted) == []
        assert served(index.match(name, digests)) == 10
        assert index.find(name, noted) == [None] * 10

    # Time

    def test_a_note_lasts_until_the_end_of_the_next_window(
        self, index: EngineIndex, name: NamespaceId
    ) -> None:
        start, days = NOON_S - DAY_S / 2, [0, 0.99, 1, 1.99, 2, 3, 100]
        # Asking counts as a use as well, so each question has a chain of its own.
        chains = [chain(70, seed=f"{later}") for later in days]
        for digests in chains:
            assert use(index, name, digests, at_s=start) == 0
        for later, digests in zip(days, chains, strict=True):
            assert use(index, name, digests, at_s=start + later * DAY_S) == (70 if later < 2 else 0)

    def test_a_use_every_window_keeps_a_chain_noted(self, index: EngineIndex, name: NamespaceId) -> None:
        digests = chain(40)
        assert use(index, name, digests) == 0
        for day in range(1, 6):
            assert use(index, name, digests, at_s=NOON_S + day * DAY_S) == 40
        assert use(index, name, digests, at_s=NOON_S + 7 * DAY_S) == 0

    def test_two_windows_together_make_a_prefix(self, index: EngineIndex, name: NamespaceId) -> None:
        """The head was used today and yesterday, the rest yesterday."""
        digests = chain(100)
        use(index, name, digests)
        assert use(index, name, part_of(digests, 0, 45), at_s=NOON_S + DAY_S) == 45
        longer = chain(20, seed="more", after=digests)
        assert is_about(use(index, name, longer, at_s=NOON_S + DAY_S), 100)
        assert use(index, name, longer, at_s=NOON_S + 2 * DAY_S) == 120

    def test_a_sketch_is_used_again_without_what_it_held(self, index: EngineIndex, name: NamespaceId) -> None:
        """This holds also where two sketches take turns in one place."""
        for day in range(8):
            digests = chain(300, seed=f"day {day}")
            assert use(index, name, digests, at_s=NOON_S + day * DAY_S) == 0
            assert use(index, name, digests, at_s=NOON_S + day * DAY_S + 1) == 300
        for day in range(6):
            mine = chain(300, seed=f"day {day}")
            assert use(index, name, mine, at_s=NOON_S + 7 * DAY_S) == 0

    @pytest.mark.parametrize("window_s", [0.25, 1.0, 7.5, 3600.0, 1e7, 1e300])
    def test_windows_of_any_length(self, index: EngineIndex, name: NamespaceId, window_s: float) -> None:
        digests = chain(5)
        assert use(index, name, digests, window_s=window_s) == 0
        assert use(index, name, digests, window_s=window_s) == 5
        if window_s < 1e100:
            assert use(index, name, digests, window_s=window_s, at_s=NOON_S + 2 * window_s) == 0

    # Space

    @pytest.mark.parametrize("sketch_bytes", [64, 100, 1024, 5000])
    def test_a_small_sketch_forgets_nothing(
        self, index: EngineIndex, name: NamespaceId, sketch_bytes: int
    ) -> None:
        """However crowded the sketch is, too many blocks may pass, but never too few."""
        for i in range(20):
            digests = chain(90, seed=f"{i}")
            use(index, name, digests, sketch_bytes=sketch_bytes)
        for i in range(20):
            digests = chain(90, seed=f"{i}")
            assert use(index, name, digests, sketch_bytes=sketch_bytes) == 90
            branch = chain(20, seed="branch", after=part_of(digests, 0, 50))
            assert use(index, name, branch, sketch_bytes=sketch_bytes) >= 50
            assert use(index, name, branch, sketch_bytes=sketch_bytes) == 70

    @pytest.mark.parametrize("blocks", [1, 20, 128])
    def test_few_new_blocks_pass_in_a_sketch_filled_as_promised(
        self, index: EngineIndex, name: NamespaceId, blocks: int
    ) -> None:
        size = 8192
        for i in range(size // 2 // blocks):
            use(index, name, chain(blocks, seed=f"{i}"), sketch_bytes=size)
        # In the next window `note` looks at this sketch and at its own empty one, which asking fills a bit.
        strange = [chain(40, seed=f"strange {i}") for i in range(300)]
        counts = [use(index, name, one, sketch_bytes=size, at_s=NOON_S + DAY_S) for one in strange[:40]]
        counts += [use(index, name, one[:16], sketch_bytes=size) for one in strange[40:]]
        assert sum(count > 0 for count in counts) <= 0.03 * 300 + 3
        # A new prompt of 40 blocks is no likelier to pass, and if it does, only a block or two do.
        assert max(counts) <= 3

    @pytest.mark.parametrize(("window_s", "sketch_bytes"), [(0.0, 1024), (-1.0, 1024), (1.0, 0), (1.0, 63)])
    def test_half_a_sketch_is_an_error(
        self, index: EngineIndex, name: NamespaceId, window_s: float, sketch_bytes: int
    ) -> None:
        with pytest.raises(ValueError, match="sketch"):
            use(index, name, chain(2), window_s=window_s, sketch_bytes=sketch_bytes)

    def test_note_of_half_a_digest_is_an_error(self, index: EngineIndex, name: NamespaceId) -> None:
        with pytest.raises(ValueError, match="16"):
            use(index, name, bytes(24))

    def test_note_of_a_long_chain(self, index: EngineIndex, other: EngineIndex, name: NamespaceId) -> None:
        digests = chain(8192)
        assert use(index, name, digests) == 0
        assert use(other, name, digests) == 8192
        assert use(index, name, digests, at_s=NOON_S + DAY_S) == 8192

    # Many at once

    def test_of_many_at_once_one_is_the_first(
        self, index: EngineIndex, other: EngineIndex, name: NamespaceId
    ) -> None:
        chains = [chain(20, seed=f"{i}") for i in range(10)]

        def work(worker: int) -> list[int]:
            return [use((index, other)[worker % 2], name, digests) for digests in chains]

        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(work, range(4)))
        for counts in zip(*answers, strict=True):
            assert sorted(counts) == [0, 20, 20, 20]


WRITER, ANOTHER = writer_id("a writer"), writer_id("another")
ONE, OTHER = place_of("a place"), place_of("another place")


def opine(
    index: EngineIndex,
    name: NamespaceId,
    opinion: Opinion,
    by: PlaceId = ONE,
    *,
    writer: WriterId = WRITER,
    stands: bool = False,
) -> VerdictState:
    return index.judge(name, writer, opinion, by=by, stands=stands, name="its name")


class VerdictConformance:
    """The suite of Verdicts. It is combined with IndexConformance, whose fixtures it takes."""

    def test_nobody_is_judged_at_first(self, index: EngineIndex, name: NamespaceId) -> None:
        assert index.verdicts(name) == index.verdicts(name, [WRITER]) == index.verdicts(name, []) == {}
        assert index.verdicts(UNKNOWN) == {}

    def test_what_agrees_is_proven_for_all(
        self, index: EngineIndex, other: EngineIndex, name: NamespaceId
    ) -> None:
        assert opine(index, name, "alike") == "proven"
        verdict = other.verdicts(name)[WRITER]
        assert (verdict.state, verdict.by, verdict.name) == ("proven", ONE, "its name")
        assert verdict.at_s > 0
        assert other.verdicts(name, [ANOTHER, WRITER]) == {WRITER: verdict}
        assert other.verdicts(name, [ANOTHER]) == {}

    def test_a_proven_writer_stays_proven(self, index: EngineIndex, name: NamespaceId) -> None:
        opine(index, name, "alike")
        assert opine(index, name, "differs", OTHER, stands=True) == "proven"
        assert index.verdicts(name)[WRITER].by == ONE

    def test_one_that_stands_fails_a_writer(self, index: EngineIndex, name: NamespaceId) -> None:
        assert opine(index, name, "differs", stands=True) == "failed"
        assert opine(index, name, "alike", OTHER) == "failed"
        assert index.verdicts(name)[WRITER].state == "failed"

    def test_one_that_does_not_stand_disputes_and_a_second_fails(
        self, index: EngineIndex, other: EngineIndex, name: NamespaceId
    ) -> None:
        assert opine(index, name, "differs") == "disputed"
        assert opine(index, name, "differs") == "disputed", "it is the same place"
        assert opine(other, name, "differs", OTHER) == "failed"

    def test_one_that_has_come_to_stand_fails_what_it_disputed(
        self, index: EngineIndex, name: NamespaceId
    ) -> None:
        opine(index, name, "differs")
        assert opine(index, name, "differs", stands=True) == "failed"

    def test_a_writer_that_has_failed_can_commit_no_more(
        self, index: EngineIndex, other: EngineIndex, name: NamespaceId
    ) -> None:
        def commits(index: EngineIndex, writer: WriterId, rank: int = 0, ranks: int = 1) -> CommitState:
            # In a namespace of several shards each of these is in another.
            states = set()
            for number in range(8):
                digests = chain(2, seed=f"{writer.hex()} {number}")
                made = replace(record(2), writer=writer)
                segment = SegmentId(digests[: SEGMENT_ID_BYTES - 1] + new_segment_id(digests)[-1:])
                states.add(index.commit(name, segment, digests, made, rank=rank, ranks=ranks))
            assert len(states) == 1
            return states.pop()

        opine(index, name, "differs")
        assert commits(index, WRITER) is CommitState.VISIBLE, "a dispute may be the other's fault"
        third = writer_id("a third")
        assert commits(index, third, 0, 2) is CommitState.WAITING
        for writer in (WRITER, third):
            opine(index, name, "differs", OTHER, writer=writer, stands=True)
        assert commits(other, WRITER) is CommitState.REFUSED
        assert commits(other, third, 1, 2) is CommitState.REFUSED
        assert commits(other, ANOTHER) is CommitState.VISIBLE

    def test_who_agrees_ends_a_dispute(self, index: EngineIndex, name: NamespaceId) -> None:
        opine(index, name, "differs")
        assert opine(index, name, "alike", OTHER) == "proven"

    def test_verdicts_of_namespaces_and_writers_are_apart(
        self, index: EngineIndex, name: NamespaceId
    ) -> None:
        beside = index.register(namespace("another"), expected_blocks=EXPECTED_BLOCKS)
        opine(index, name, "alike")
        opine(index, beside, "differs", writer=ANOTHER)
        assert list(index.verdicts(name)) == [WRITER] and list(index.verdicts(beside)) == [ANOTHER]

    def test_of_two_disputes_at_a_time_one_fails_the_writer(
        self, index: EngineIndex, other: EngineIndex, name: NamespaceId
    ) -> None:
        writers = [writer_id(f"writer {i}") for i in range(30)]
        with ThreadPoolExecutor(2) as threads:
            answers = list(
                zip(
                    threads.map(lambda one: opine(index, name, "differs", ONE, writer=one), writers),
                    threads.map(lambda one: opine(other, name, "differs", OTHER, writer=one), writers),
                    strict=True,
                )
            )
        assert {frozenset(pair) for pair in answers} == {frozenset(("disputed", "failed"))}

    def test_verdicts_are_bounded(self, index: EngineIndex, name: NamespaceId) -> None:
        for number in range(VERDICTS_KEPT + 5):
            opine(index, name, "alike", writer=writer_id(f"writer {number}"))
        kept = index.verdicts(name)
        assert len(kept) == VERDICTS_KEPT
        assert writer_id(f"writer {VERDICTS_KEPT + 4}") in kept

    def test_a_name_is_bounded(self, index: EngineIndex, name: NamespaceId) -> None:
        index.judge(name, WRITER, "alike", by=ONE, stands=False, name="\u00fc" * 1000)
        assert index.verdicts(name)[WRITER].name == "\u00fc" * NAME_CHARS

    def test_verdicts_go_with_their_namespace(self, index: Any, name: NamespaceId) -> None:
        opine(index, name, "alike")
        while index.erase(name, 1000) == "more":
            pass
        assert index.verdicts(name) == {}
