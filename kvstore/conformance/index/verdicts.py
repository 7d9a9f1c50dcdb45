"""VerdictConformance: the contract of kvstore.index.verdicts.Verdicts as tests."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kvstore.conformance.index.chains import EXPECTED_BLOCKS, UNKNOWN, namespace
from kvstore.index.port import EngineIndex
from kvstore.index.verdicts import NAME_CHARS, VERDICTS_KEPT, Opinion, VerdictState
from kvstore.keys import NamespaceId, WriterId, writer_id

W, V = writer_id("a writer"), writer_id("another")
ONE, OTHER = writer_id("an engine"), writer_id("another engine")


def say(
    index: EngineIndex,
    name: NamespaceId,
    opinion: Opinion,
    by: WriterId = ONE,
    *,
    writer: WriterId = W,
    stands: bool = False,
) -> VerdictState:
    return index.judge(name, writer, opinion, by=by, stands=stands, name="its name")


class VerdictConformance:
    """The suite of Verdicts. It is combined with IndexConformance, whose fixtures it takes."""

    def test_nobody_is_judged_at_first(self, index: EngineIndex, name: NamespaceId) -> None:
        assert index.verdicts(name) == index.verdicts(name, [W]) == index.verdicts(name, []) == {}
        assert index.verdicts(UNKNOWN) == {}

    def test_what_agrees_is_proven_for_all(
        self, index: EngineIndex, other: EngineIndex, name: NamespaceId
    ) -> None:
        assert say(index, name, "alike") == "proven"
        verdict = other.verdicts(name)[W]
        assert (verdict.state, verdict.by, verdict.name) == ("proven", ONE, "its name")
        assert verdict.at_s > 0
        assert other.verdicts(name, [V, W]) == {W: verdict}
        assert other.verdicts(name, [V]) == {}

    def test_a_proven_writer_stays_proven(self, index: EngineIndex, name: NamespaceId) -> None:
        say(index, name, "alike")
        assert say(index, name, "differs", OTHER, stands=True) == "proven"
        assert index.verdicts(name)[W].by == ONE

    def test_one_that_stands_fails_a_writer(self, index: EngineIndex, name: NamespaceId) -> None:
        assert say(index, name, "differs", stands=True) == "failed"
        assert say(index, name, "alike", OTHER) == "failed"
        assert index.verdicts(name)[W].state == "failed"

    def test_one_that_does_not_stand_disputes_and_a_second_fails(
        self, index: EngineIndex, other: EngineIndex, name: NamespaceId
    ) -> None:
        assert say(index, name, "differs") == "disputed"
        assert say(index, name, "differs") == "disputed", "it is the same engine"
        assert say(other, name, "differs", OTHER) == "failed"

    def test_one_that_has_come_to_stand_fails_what_it_disputed(
        self, index: EngineIndex, name: NamespaceId
    ) -> None:
        say(index, name, "differs")
        assert say(index, name, "differs", stands=True) == "failed"

    def test_who_agrees_ends_a_dispute(self, index: EngineIndex, name: NamespaceId) -> None:
        say(index, name, "differs")
        assert say(index, name, "alike", OTHER) == "proven"

    def test_verdicts_of_namespaces_and_writers_are_apart(
        self, index: EngineIndex, name: NamespaceId
    ) -> None:
        beside = index.register(namespace("another"), expected_blocks=EXPECTED_BLOCKS)
        say(index, name, "alike")
        say(index, beside, "differs", writer=V)
        assert list(index.verdicts(name)) == [W] and list(index.verdicts(beside)) == [V]

    def test_of_two_disputes_at_a_time_one_fails_the_writer(
        self, index: EngineIndex, other: EngineIndex, name: NamespaceId
    ) -> None:
        writers = [writer_id(f"writer {i}") for i in range(30)]
        with ThreadPoolExecutor(2) as threads:
            answers = list(
                zip(
                    threads.map(lambda one: say(index, name, "differs", ONE, writer=one), writers),
                    threads.map(lambda one: say(other, name, "differs", OTHER, writer=one), writers),
                    strict=True,
                )
            )
        assert {frozenset(pair) for pair in answers} == {frozenset(("disputed", "failed"))}

    def test_verdicts_are_bounded(self, index: EngineIndex, name: NamespaceId) -> None:
        for number in range(VERDICTS_KEPT + 5):
            say(index, name, "alike", writer=writer_id(f"writer {number}"))
        kept = index.verdicts(name)
        assert len(kept) == VERDICTS_KEPT
        assert writer_id(f"writer {VERDICTS_KEPT + 4}") in kept

    def test_a_name_is_bounded(self, index: EngineIndex, name: NamespaceId) -> None:
        index.judge(name, W, "alike", by=ONE, stands=False, name="\u00fc" * 1000)
        assert index.verdicts(name)[W].name == "\u00fc" * NAME_CHARS

    def test_verdicts_go_with_their_namespace(self, index: Any, name: NamespaceId) -> None:
        say(index, name, "alike")
        while index.erase(name, 1000) == "more":
            pass
        assert index.verdicts(name) == {}
