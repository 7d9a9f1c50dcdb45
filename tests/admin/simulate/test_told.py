"""What a trace says of sessions, replayed: ends, what is retained and for how long, and priorities."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvstore.admin.progress import Silent
from kvstore.admin.simulate import store
from kvstore.admin.simulate.sessions import NONE, Heard, ends, sessions, told
from kvstore.admin.simulate.simulate import Setup, simulate
from kvstore.admin.simulate.store import Rules, StoreReplay
from kvstore.admin.simulate.traces import Assumed, BadTrace, Said, Trace
from tests.admin.simulate import workloads
from tests.admin.simulate.test_simulate import SETTINGS, read

BLOCK = 10


@pytest.fixture(autouse=True)
def _no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "watermarks", lambda capacity: (capacity, capacity))


def line(at_s: float, session: str | None, chain: Sequence[int], **said: Any) -> str:
    named = {} if session is None else {"session_id": session}
    return json.dumps({"timestamp": 1000 * at_s, "hash_ids": list(chain), **named, **said}) + "\n"


def served(tmp_path: Path, *lines: str, blocks: int, share: float = 1.0) -> list[int]:
    """How many blocks each request finds in a store of so many blocks, told what the trace says."""
    trace = read(tmp_path, "".join(lines), Assumed(BLOCK, 512))
    replay = StoreReplay(trace, Rules([1], lambda slots: 0, share), BLOCK * blocks)
    owners, found = sessions(trace), []
    waiting = told(trace, owners)
    for number, request in enumerate(trace.requests):
        while waiting and waiting[0].after < number:
            replay.tell(waiting.pop(0))
        found.append(replay.serve(request, len(request.chain), owners[number]))
    run = StoreReplay(trace, Rules([1], lambda slots: 0, share), BLOCK * blocks)
    assert run.run(None, owners, told(trace, owners)).hit_blocks == sum(found)
    return found


def test_what_is_said_comes_after_the_request_that_says_it(tmp_path: Path) -> None:
    trace = read(
        tmp_path,
        line(10, "a", [1], end=True) + line(5, "b", [2], retain=7.5) + line(20, None, [3], end=True)
        + line(30, "c", [], priority="low") + line(40, "a", [1]),
        Assumed(BLOCK, 512),
    )  # fmt: skip
    assert trace.said == [
        Said(5, 0, "b", retain_s=7.5), Said(10, 0, "a", end=True), Said(30, 0, "c", priority="low")
    ]  # fmt: skip
    owners = sessions(trace)
    assert told(trace, owners) == [
        Heard(0, 5, 0, owners[0], retain_s=7.5),
        Heard(1, 10, 0, owners[1], end=True),
        # Nobody has asked in it.
        Heard(2, 30, 0, NONE, priority="low"),
    ]


@pytest.mark.parametrize("said", [{"end": 1}, {"retain": "1"}, {"priority": "highest"}, {"priority": 1}])
def test_what_makes_no_sense_is_skipped(tmp_path: Path, said: dict[str, Any]) -> None:
    trace = read(tmp_path, line(1, "a", [1]) + line(2, "a", [2], **said), Assumed(BLOCK, 512))
    assert (len(trace.requests), trace.said, trace.skipped) == (1, [], 1)


def test_an_ended_session_goes_first_and_comes_back_by_a_use(tmp_path: Path) -> None:
    old, ended = line(0, "old", [1, 2]), line(60, "new", [1, 3, 4])
    after = [line(120, "x", [5]), line(180, "y", [1, 2])]
    assert served(tmp_path, old, ended, *after, blocks=4)[-1] == 1, "the oldest tail went"
    said = line(60, "new", [], end=True)
    assert served(tmp_path, old, ended, said, *after, blocks=4)[-1] == 2, "one of those that ended went"
    # Used again, they are as any others.
    again = line(90, "new", [1, 3, 4])
    assert served(tmp_path, old, ended, said, again, *after, blocks=4)[-1] == 1


def test_what_others_use_too_is_nobodys(tmp_path: Path) -> None:
    lines = [
        line(0, "a", [1, 2]), line(60, "b", [1, 2, 3]), line(60, "b", [], end=True),
        line(61, "a", [], end=True), line(120, "x", [4]), line(130, "c", [1, 2, 3]),
    ]  # fmt: skip
    assert served(tmp_path, *lines, blocks=3)[-1] == 2


def test_what_is_retained_stays_until_it_is_over(tmp_path: Path) -> None:
    begin = [line(0, "a", [1, 2]), line(10, "b", [1, 3]), line(60, "a", [1, 2])]

    def flood(at_s: float) -> list[str]:
        return [line(at_s + number, "x", [at_s + number]) for number in range(4)]

    def find(*said: str, at_s: int = 300, share: float = 1.0) -> int:
        asked = line(at_s + 10, "a", [1, 2])
        return served(tmp_path, *begin, *said, *flood(at_s), asked, blocks=4, share=share)[-1]

    assert find() == 0
    retain = line(60, "a", [], retain=600)
    assert find(retain) == 2, "what it shares with another, too"
    assert find(retain, share=0.5) == 1, "its head: a session has no room for more"
    assert find(retain, share=0.4) == 0
    assert find(retain, at_s=661) == 0, "it is over"
    assert find(retain, line(70, "a", [], end=True)) == 1, "what is not its own is not let go"
    assert find(line(60, "a", [], retain=601), at_s=590) == 2
    assert find(line(60, "nobody", [], retain=600)) == 0


def test_what_a_session_saves_while_it_is_retained_is_retained(tmp_path: Path) -> None:
    lines = [
        line(0, "a", [1]), line(0, "a", [], retain=900), line(60, "a", [1, 2]),
        *(line(300 + number, "x", [300 + number]) for number in range(5)), line(400, "a", [1, 2]),
    ]  # fmt: skip
    assert served(tmp_path, *lines, blocks=4)[-1] == 2


def test_nothing_is_retained_for_longer_than_a_day(tmp_path: Path) -> None:
    lines = [line(0, "a", [1]), line(0, "a", [], retain=1e9)]
    for day, found in ((86_000, 1), (86_401, 0)):
        flood = [line(day + number, "x", [day + number]) for number in range(4)]
        assert served(tmp_path, *lines, *flood, line(day + 9, "a", [1]), blocks=3)[-1] == found


def test_priority_is_worth_an_hour(tmp_path: Path) -> None:
    def find(priority: str, wait_s: int) -> int:
        lines = [
            line(6000, "a", [1]), line(6000, "a", [], priority=priority), line(6060, "a", [1, 2]),
            line(6060 + wait_s, "b", [8]), line(6060 + wait_s + 1, "b", [8, 9]),
            line(6060 + wait_s + 70, "x", [7]), line(6060 + wait_s + 71, "a", [1, 2]),
        ]  # fmt: skip
        return served(tmp_path, *lines, blocks=4)[-1]

    # Five blocks in a store of four: the oldest tail goes.
    assert [find(one, 0) for one in ("low", "normal", "high")] == [1, 1, 2]
    assert find("high", 3400) == 2 and find("high", 3700) == 1

    def other(priority: str) -> int:
        """Another's blocks, used half an hour before those of low priority."""
        lines = [
            line(6000, "b", [8, 9]), line(7000, "a", [1]), line(7000, "a", [], priority=priority),
            line(7800, "a", [1, 2]), line(7900, "x", [7]), line(7910, "b", [8, 9]),
        ]  # fmt: skip
        return served(tmp_path, *lines, blocks=4)[-1]

    assert [other("normal"), other("low")] == [1, 2]


def chats(path: Path, *, tell: bool) -> list[str]:
    """A workload whose sessions are those that are guessed, and their ends told, or only named."""
    workloads.write(path, workloads.requests(9, 400))
    lines = [json.loads(one) for one in path.read_text().splitlines()]
    trace = read(path.parent, path.read_text(), Assumed(1 << 20, 16))
    owners = sessions(trace)
    last = {one.after for one in ends(trace, owners)}
    return [
        json.dumps(one | {"session_id": owner} | ({"end": True} if tell and number in last else {})) + "\n"
        for number, (one, owner) in enumerate(zip(lines, owners, strict=True))
    ]


def test_ends_that_are_told_are_worth_what_they_are_worth(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(chats(path, tell=True)))
    setup = Setup(SETTINGS, ["kvstore", "told", "told-ends"], [100 << 20, 300 << 20], segment_blocks=(1,))
    blind, heard, known = simulate([path], Assumed(1 << 20, 16), setup, Silent()).curves
    assert (heard.policy, heard.points) == ("told", known.points)
    assert all(one.hit_ratio > other.hit_ratio for one, other in zip(heard.points, blind.points, strict=True))


def test_a_trace_that_says_nothing_has_no_such_curve(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(chats(path, tell=False)))
    report = simulate([path], Assumed(1 << 20, 16), Setup(SETTINGS, points=2), Silent())
    assert "told" not in {curve.policy for curve in report.curves}
    with pytest.raises(BadTrace, match="nothing is said of sessions"):
        simulate([path], Assumed(), Setup(SETTINGS, ["told"], points=2), Silent())


def test_retaining_everything_harms_the_others_by_no_more_than_the_share(tmp_path: Path) -> None:
    """A client that retains all it has, against one that comes again and again."""
    lines = []
    for round_ in range(40):
        at_s = 70 * round_
        greedy = [1000 + 10 * round_ + number for number in range(8)]
        lines += [
            line(at_s, "greedy", greedy), line(at_s, "greedy", [], retain=86_400),
            line(at_s + 60, "modest", range(8)),
        ]  # fmt: skip
    free = served(tmp_path, *[one for one in lines if "retain" not in one], blocks=20, share=0.2)
    bound = served(tmp_path, *lines, blocks=20, share=0.2)
    without = served(tmp_path, *lines, blocks=20, share=1.0)
    assert sum(free[1::2]) == sum(bound[1::2]) == 39 * 8
    assert sum(without[1::2]) < 39 * 8


def test_the_words_of_a_trace(tmp_path: Path) -> None:
    trace: Trace = read(tmp_path, line(1, "a", [1], end=False), Assumed(BLOCK, 512))
    assert trace.said == [Said(1, 0, "a")]
