"""The reader of events: in order, resumable, and never silent about what it has lost. On both indexes."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvstore.build import load_settings, open_index, open_payloads
from kvstore.errors import TransientError
from kvstore.events import EventReader, Gap, follow
from kvstore.index.maintenance import Event, FullIndex
from kvstore.index.scripted.values import key
from kvstore.index.sharding.index import ShardedIndex
from kvstore.index.sqlite.client import SqliteClient
from kvstore.index.sqlite.file import IndexFile
from kvstore.index.sqlite.index import SqliteIndex
from kvstore.keys import Digest, NamespaceId, SegmentId, digest, namespace_id, payload_name
from schemas.records import PartRecord, SegmentRecord
from tests.admin.conftest import kv_slots, kv_space
from tests.waiting import PATIENCE_S, until

NAME = namespace_id(kv_space())
RING = 16


@pytest.fixture(params=["sqlite", pytest.param("redis", marks=pytest.mark.servers)])
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    tree: dict[str, Any] = {"payloads": f"file://{tmp_path}/p", "journal": {"events": RING}}
    if request.param == "redis":
        tree["index"] = request.getfixturevalue("redis_url")
    return tree


@pytest.fixture
def index(settings: dict[str, Any]) -> Iterator[ShardedIndex | SqliteIndex]:
    with closing(open_index(load_settings(settings, {}))) as opened:
        opened.register(kv_space(), expected_blocks=100)
        yield opened


def segment(number: int) -> SegmentId:
    return SegmentId(number.to_bytes(8, "big"))


def block(number: int) -> Digest:
    return digest(kv_slots(1, first=number)[0].key)


def commit(index: Any, number: int, blocks: int = 2) -> None:
    """Segment `number` of one chain, each of as many blocks."""
    record = SegmentRecord((PartRecord(100, (10,) * blocks),), blocks, "none", 1, depth=number * blocks)
    names = b"".join(block(number * blocks + i) for i in range(blocks))
    index.commit(NAME, segment(number), names, record, rank=0, ranks=1)


def evict(index: Any, *numbers: int) -> None:
    index.evict(NAME, [segment(number) for number in numbers], delete_after_s=4e9, rule="admin")


def told(events: list[Event | Gap]) -> list[str]:
    return ["gap" if isinstance(each, Gap) else f"{each.op} {number(each)}" for each in events]


def number(event: Event) -> int | None:
    return None if event.segment is None else event.segment[-1]


def test_events_come_once_and_in_their_order(index: FullIndex) -> None:
    reader = EventReader(index, NAME)
    assert reader.read() == []
    commit(index, 1)
    commit(index, 2)
    first = reader.read()
    assert told(first) == ["commit 1", "commit 2"]
    [one, _] = first
    assert isinstance(one, Event)
    assert (one.first, one.last, one.depth, one.slots, one.nbytes) == (block(2), block(3), 2, 2, 120)
    assert reader.read() == []
    evict(index, 2)
    index.invalidate(NAME)
    [gone, everything] = reader.read()
    assert isinstance(gone, Event) and isinstance(everything, Event)
    assert (gone.op, gone.segment, gone.rule) == ("evict", segment(2), "admin")
    assert (everything.op, everything.segment) == ("invalidate", None)
    assert reader.position == everything.position


def test_a_reader_goes_on_where_another_one_stopped(index: FullIndex) -> None:
    for number in range(5):
        commit(index, number)
    reader = EventReader(index, NAME)
    assert told(reader.read(limit=2)) == ["commit 0", "commit 1"]
    other = EventReader(index, NAME, after=reader.position)
    assert told(other.read()) == ["commit 2", "commit 3", "commit 4"]
    assert told(EventReader(index, NAME).read()) == [f"commit {i}" for i in range(5)]
    latest = EventReader(index, NAME, after=None)
    assert latest.read() == []
    commit(index, 9)
    assert told(latest.read()) == ["commit 9"]


def test_a_reader_that_is_too_slow_is_told(index: FullIndex) -> None:
    reader = EventReader(index, NAME)
    commit(index, 0)
    assert told(reader.read()) == ["commit 0"]
    # Redis trims a ring when a node of it is full.
    for number in range(1, 600):
        commit(index, number % 250, blocks=1)
    [gap, *events] = reader.read()
    assert isinstance(gap, Gap)
    assert gap.position == events[0].position
    assert len(events) < 600
    assert all(isinstance(each, Event) for each in events)
    assert reader.read() == []
    # Whoever is new has missed nothing that he could have known of.
    assert not any(isinstance(each, Gap) for each in EventReader(index, NAME).read())


def test_one_that_keeps_up_is_told_of_no_gap(index: FullIndex) -> None:
    reader = EventReader(index, NAME)
    seen = 0
    for number in range(400):
        commit(index, number % 250, blocks=1)
        if number % 10 == 9:
            found = reader.read()
            assert not any(isinstance(each, Gap) for each in found)
            seen += len(found)
    assert seen >= 250


def emptied(index: Any, settings: dict[str, Any]) -> None:
    if isinstance(index, ShardedIndex):
        index.leaf._client.command("FLUSHDB")  # type: ignore[attr-defined]
    else:
        path = load_settings(settings, {}).index_url.removeprefix("sqlite://")
        SqliteClient(IndexFile(path, PATIENCE_S), time.time).command("UNLINK", key(NAME, "events"))
        # Positions begin with the time in milliseconds.
        time.sleep(0.05)


def test_an_emptied_index_is_a_gap(index: FullIndex, settings: dict[str, Any]) -> None:
    reader = EventReader(index, NAME)
    commit(index, 1)
    commit(index, 2)
    reader.read()
    before = reader.position
    # Redis counts positions in milliseconds: two of one millisecond can't be told apart by who sees neither.
    time.sleep(0.005)
    emptied(index, settings)
    assert told(reader.read()) == ["gap"]
    assert reader.read() == []
    index.register(kv_space(), expected_blocks=100)  # type: ignore[attr-defined]
    commit(index, 3)
    assert told(reader.read()) == ["commit 3"]
    # And for one that comes back after it was filled again.
    assert told(EventReader(index, NAME, after=before).read()) == ["gap", "commit 3"]


def test_what_is_no_position_is_an_error(index: FullIndex) -> None:
    commit(index, 1)
    for nonsense in ("x", "1-x", "-"):
        with pytest.raises(ValueError, match="invalid literal"):
            EventReader(index, NAME, after=nonsense).read()
    # A position of nobody's: what comes after it can't be known to be all.
    for stranger in ("1", "9" * 17):
        reader = EventReader(index, NAME, after=stranger)
        assert told(reader.read()) == ["gap", "commit 1"]
        assert reader.read() == []


def test_follow_waits_for_what_comes_and_outlasts_a_failing_index(
    index: FullIndex, caplog: pytest.LogCaptureFixture
) -> None:
    stop, failing = threading.Event(), threading.Event()

    class Failing:
        def events(self, *args: Any, **options: Any) -> list[Event]:
            if failing.is_set():
                raise TransientError("gone for a moment")
            return index.events(*args, **options)

        def has_lost(self, namespace: NamespaceId, after: str) -> bool:
            return index.has_lost(namespace, after)

    found: list[Event | Gap] = []

    def run() -> None:
        for event in follow(Failing(), NAME, poll_s=0.01, stop=stop):  # type: ignore[arg-type]
            found.append(event)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        commit(index, 1)
        until(lambda: len(found) == 1)
        failing.set()
        until(lambda: bool(caplog.records))
        commit(index, 2)
        failing.clear()
        until(lambda: len(found) == 2)
    finally:
        stop.set()
        thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert told(found) == ["commit 1", "commit 2"]
    assert len(caplog.records) == 1


def examples() -> dict[str, Any]:
    """What the page's examples define."""
    text = (Path(__file__).parents[1] / "docs" / "events.md").read_text(encoding="utf-8")
    made: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)[1:]:
        exec(compile(code, "docs/events.md", "exec"), made)
    return made


def test_the_page_s_router_knows_what_can_be_loaded(index: FullIndex) -> None:
    stored = examples()["Stored"]()
    reader = EventReader(index, NAME)
    chain = [block(i) for i in range(8)]

    def leading() -> int:
        for event in reader.read():
            stored.take(event)
        return int(stored.leading(chain))

    assert leading() == 0
    commit(index, 0)
    commit(index, 1)
    assert leading() == 4
    assert stored.leading([block(0), block(1), block(50)]) == 2
    evict(index, 1)
    assert leading() == 2
    commit(index, 0)
    index.invalidate(NAME)
    assert leading() == 0


def test_the_page_s_warmer_fetches_the_beginnings_of_prompts(
    index: FullIndex, settings: dict[str, Any]
) -> None:
    class Tier:
        def __init__(self) -> None:
            self.filled: list[tuple[str, int]] = []

        def fill(self, name: str, size: int) -> bool:
            self.filled.append((name, size))
            return True

    for number in range(4):
        commit(index, number)
    evict(index, 1)
    tier = Tier()
    with closing(open_payloads(load_settings(settings, {}))):
        examples()["warm"](index, NAME, tier, EventReader(index, NAME).read(), shallow=6)
    # 1 is gone, and 3 begins at its sixth block.
    assert tier.filled == [(payload_name(NAME, segment(n), 0), 120) for n in (0, 2)]
