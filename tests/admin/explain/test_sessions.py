"""explain says what sessions have to do with what is stored: whose own it is, and what was said of them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.format.segment import Slot
from kvstore.index.sessions import Hint
from kvstore.keys import NO_SALT, SegmentId, block_key, chain_like, digest, new_segment_id, session_id
from tests.admin.conftest import Admin
from tests.admin.explain.test_explain import SHAPE, SIZE, World, names

MINE, OTHERS = session_id(NO_SALT, "mine"), session_id(NO_SALT, "others")


@pytest.fixture
def world(admin: Admin, tmp_path: Path) -> Iterator[World]:
    """Two blocks that a session shares, three of its own, three of nobody's."""
    made = World(admin)
    made.folder = tmp_path
    shared = _save(made, range(2))
    _save(made, range(2, 5))
    made.save(range(5, 8))
    made.space.session(OTHERS, [shared])
    yield made
    made.store.close()


def _save(world: World, blocks: range) -> SegmentId:
    segment = new_segment_id()
    slots = [
        Slot(block_key(one), memoryview(bytes(4 * SIZE * 2)), "F32", SHAPE)
        for one in names()[blocks.start : blocks.stop]
    ]
    world.space.save(slots, depth=blocks.start, chain=chain_like(segment), segment=segment, session=MINE)
    return segment


def test_a_prompts_blocks_are_somebodys_own(world: World) -> None:
    said = f"only session {MINE.hex()} has used 3 of its blocks"
    assert said in world.tokens()["remarks"]
    world.space.session(MINE, [], Hint(retain_s=600))
    [remark] = [one for one in world.tokens()["remarks"] if "session" in one]
    head, _, seconds = remark.partition(", which retains that for ")
    assert head == said and 0 < int(seconds.split()[0]) <= 600
    world.space.session(MINE, [], Hint(end=True))
    assert f"{said}, which has ended: that goes before all else" in world.tokens()["remarks"]
    assert OTHERS.hex() not in str(world.tokens())


def test_an_evicted_blocks_session_had_ended(world: World) -> None:
    wanted = digest(block_key(names()[2])).hex()
    world.space.session(MINE, [], Hint(end=True))
    index = world.store.maintenance
    [first, *_] = index.order(world.space.id, 1)
    assert index.owners(world.space.id, [first.segment]) == [MINE]
    index.cull(world.space.id, keep_bytes=0, delete_after_s=0, limit=1, rule="capacity")
    [block] = world.explain("--digest", wanted, "--json").json["blocks"]
    found = block["findings"][0]
    assert (found["cause"], found["rule"], found["session"]) == ("evicted", "capacity", MINE.hex())
    assert "its session had ended" in found["text"] and MINE.hex() in found["text"]
    assert "its session had ended" in world.explain("--digest", wanted).out


def test_an_evicted_block_was_retained_until_a_time_that_was_over(world: World) -> None:
    while world.space.session(MINE, [], Hint(retain_s=2)).state != "retained":
        pass
    index = world.store.maintenance
    while index.find_sessions(world.space.id, [MINE])[0].state == "retained":
        time.sleep(0.1)
    index.cull(world.space.id, keep_bytes=0, delete_after_s=0, limit=9, rule="capacity")
    for block, told in ((0, False), (3, True), (6, False)):
        wanted = digest(block_key(names()[block])).hex()
        [found] = world.explain("--digest", wanted, "--json").json["blocks"]
        [evicted] = [one for one in found["findings"] if one["cause"] == "evicted"]
        assert ("until a time that was over" in evicted["text"]) == (evicted["session"] == MINE.hex()) == told


def test_a_block_is_somebodys_own_or_nobodys(world: World) -> None:
    world.space.session(MINE, [], Hint(end=True))
    for block, whose in ((0, ""), (3, MINE.hex()), (6, "")):
        wanted = digest(block_key(names()[block]))
        ran = world.explain("--digest", wanted.hex(), "--json")
        [found] = ran.json["blocks"]
        assert (found["findings"][0]["cause"], found["findings"][0]["session"]) == ("stored", whose)
        assert ("has ended" in found["findings"][0]["text"]) == bool(whose)
    assert (
        f"only session {MINE.hex()} has used it"
        in world.explain("--digest", digest(block_key(names()[3])).hex()).out
    )
