"""What clients and orchestrators say of sessions: read, bounded, and never trusted to make sense."""

from __future__ import annotations

from typing import Any

import pytest

from connectors.engine.sessions.hints import Action, Hints, read
from connectors.engine.step import MOST_HINTS, RequestView
from kvstore.index.sessions import LONGEST_RETAINED_S
from kvstore.keys import NO_SALT, NO_SESSION, SESSION_NAME_CHARS, session_id
from tests.fake_vllm import FakeAction, FakeEnvelope, FakeRequest

MINE = session_id(NO_SALT, "mine")


def said(name: Any = "mine", hints: Any = None, *actions: Action, salt: str = "") -> Hints:
    return read(name, salt, {} if hints is None else {"kv_hints": hints}, actions)


def test_a_session_is_its_name_and_the_salt_of_its_request() -> None:
    assert said() == Hints(MINE)
    assert b"mine" not in MINE and len(MINE) == 16
    assert len({said().session, said("other").session, said(salt="a").session, said("\ud800").session}) == 4
    # Nobody can move the border between the two.
    assert said("bc", salt="a").session != said("c", salt="ab").session


@pytest.mark.parametrize(
    ("hints", "expected"),
    [
        ({"end": True}, {"end": True}),
        ({"end": False}, {}),
        ({"retain": 300}, {"retain_s": 300.0}),
        ({"retain": 0.5, "priority": 2}, {"retain_s": 0.5, "priority": "high"}),
        ({"retain": 10**400}, {"retain_s": LONGEST_RETAINED_S}),
        ({"priority": -(10**30)}, {"priority": "low"}),
        ({"priority": 0}, {"priority": "normal"}),
        ({"priority": "high"}, {"priority": "high"}),
        ({"prefetch": True}, {"prefetch": True}),
        ({}, {}),
    ],
)
def test_what_a_client_writes(hints: dict[str, Any], expected: dict[str, Any]) -> None:
    assert said("mine", hints) == Hints(MINE, **expected)


@pytest.mark.parametrize(
    ("action", "expected"),
    [
        (("kv.evict", "1.0", {"block_hashes": ["1"]}), {"end": True}),
        (("kv.retain", "0.1", {"ttl_seconds": 2.5, "priority": 3}), {"retain_s": 2.5, "priority": "high"}),
        (("kv.retain", "1.7", {"ttl_seconds": 2.5}), {"retain_s": 2.5}),
        (("kv.priority", "1", {"priority": "low"}), {"priority": "low"}),
        (("kv.prefetch", "1.0", {}), {"prefetch": True}),
    ],
)
def test_what_an_orchestrator_attaches(action: Action, expected: dict[str, Any]) -> None:
    assert said("mine", None, action) == Hints(MINE, **expected)
    # It is told later than what the client wrote.
    assert said("mine", {"retain": 7, "priority": "low", "end": False}, action) == Hints(
        MINE, **{"retain_s": 7.0, "priority": "low"} | expected
    )


@pytest.mark.parametrize(
    "hints",
    [
        {"pin": True},
        {"end": 1},
        {"end": "yes"},
        {"retain": 0},
        {"retain": -1},
        {"retain": float("nan")},
        {"retain": float("inf")},
        {"retain": True},
        {"retain": "300"},
        {"priority": 1.5},
        {"priority": True},
        {"priority": "highest"},
        {"prefetch": "node-1"},
        {7: 7},
        [{"end": True}],
        "end",
        5,
    ],
)
def test_what_makes_no_sense_is_ignored_and_counted(hints: Any) -> None:
    assert said("mine", hints) == Hints(MINE, ignored=1)


@pytest.mark.parametrize(
    "action",
    [
        ("kv.fetch", "1.0", {}),
        ("kv.evict", "2.0", {}),
        ("kv.evict", "", {}),
        ("kv.evict", "9" * 5000, {}),
        ("kv.evict", None, {}),
        ("kv.evict", "1.0", None),
        (["kv.evict"], "1.0", {}),
        ("kv.retain", "1.0", {}),
        ("kv.retain", "1.0", {"ttl_seconds": "60"}),
        ("kv.retain", "1.0", {"ttl_seconds": 60, "priority": "most"}),
        ("kv.retain", "1.0", {"scope": "a", "directives": [{"start": 0, "end": 32, "priority": 80}]}),
        ("kv.priority", "1.0", {}),
    ],
)
def test_an_action_that_makes_no_sense_is_ignored_and_counted(action: Action) -> None:
    assert said("mine", None, action) == Hints(MINE, ignored=1)
    # Others count all the same.
    assert said("mine", {"retain": 1}, action, ("kv.evict", "1.0", {})) == Hints(
        MINE, end=True, retain_s=1.0, ignored=1
    )


@pytest.mark.parametrize("name", ["", None])
def test_without_a_session_nothing_is_said(name: Any) -> None:
    assert said(name) == Hints() and Hints().session == NO_SESSION
    assert said(name, {"end": True, "retain": 5}, ("kv.fetch", "1", {})) == Hints(ignored=3)


@pytest.mark.parametrize("name", ["x" * (SESSION_NAME_CHARS + 1), b"mine", 5, ["mine"], True])
def test_a_name_that_is_none_is_ignored(name: Any) -> None:
    assert said(name) == Hints(ignored=1)
    assert said(name, {"end": True}) == Hints(ignored=2)
    assert said("x" * SESSION_NAME_CHARS).session


def test_so_many_hints_and_no_more() -> None:
    many = {f"word {number}": True for number in range(10_000)}
    assert said("mine", many).ignored == MOST_HINTS
    actions = [("kv.evict", "1.0", {})] * 10_000
    assert said("mine", None, *[("no", "1.0", {})] * MOST_HINTS, *actions) == Hints(MINE, ignored=MOST_HINTS)


def test_a_request_says_it_in_both_ways() -> None:
    envelope = FakeEnvelope([FakeAction("kv.retain", {"ttl_seconds": 60}), FakeAction("kv.fetch")])
    request = FakeRequest(
        "r", [1], session_id="mine", kv_transfer_params={"kv_hints": {"priority": 2}}, kv_hints=envelope
    )
    assert Hints.of(RequestView(request)) == Hints(MINE, retain_s=60.0, priority="high", ignored=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("envelope", [{"actions": []}, FakeEnvelope([None]), FakeEnvelope(5), "kv.evict"])  # type: ignore[list-item, arg-type]
def test_an_envelope_that_is_none_costs_no_request(envelope: Any) -> None:
    """In process nothing holds a caller to the types."""
    request = FakeRequest("r", [1], session_id="mine", kv_hints=envelope)
    assert Hints.of(RequestView(request)) == Hints(MINE, ignored=1)  # type: ignore[arg-type]
