"""Scrubbing: how much is read and when, what is bad, and what is not believed."""

from __future__ import annotations

import random
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.conformance.faulty import Rule
from kvstore.errors import KVStoreError, PermissionDenied, TransientError
from kvstore.format.segment import Slot
from kvstore.janitor import scrub as scrubbing
from kvstore.janitor.scrub import BadSegment, Scrub
from kvstore.keys import block_key, canonical_json, new_segment_id
from kvstore.payloads.local import LocalPayloads
from kvstore.store.quarantine import HourlyBound
from kvstore.store.space import Space
from schemas.namespace import GroupSpec, Parallel
from schemas.records import PartRecord, SegmentRecord
from tests.format import hostile
from tests.janitor.world import READS, World
from tests.store.world import SHAPE, chain, slots

ALL_DAY = {"janitor": {"scrub_percent": 100}}


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    made = World(request.node.name, ALL_DAY)
    yield made
    made.close()


def turn(world: World, scrub: Scrub, seconds: float = 600.0) -> list[BadSegment]:
    world.clock.now += seconds
    return list(scrub.round(world.index.accounts(), until=world.clock.now + 1e9))


def until_read(world: World, scrub: Scrub, payloads: int) -> list[BadSegment]:
    """Rounds until so many payloads were read; what was bad in them."""
    found: list[BadSegment] = []
    for _ in range(100_000):
        if scrub.state.payloads + scrub.state.bad >= payloads:
            return found
        found += turn(world, scrub)
    raise AssertionError(f"nothing is read any more: {scrub.state}")


@pytest.mark.slow
def test_a_few_percent_a_day_evenly_and_of_all_segments_alike(world: World) -> None:
    space, other = world.space(), world.space(model="other")
    world.save(space, 0, 150)
    world.save(other, 500, 50)
    scrub = world.scrub()
    by_hour = []
    for _ in range(24 * 7):
        before = scrub.state.payloads
        for _ in range(60):
            turn(world, scrub, 60.0)
        by_hour.append(scrub.state.payloads - before)
    # 200 a day for a week, each namespace by its share, give or take the fractions under way.
    assert sum(by_hour) == pytest.approx(1400, abs=2)
    # 8.33 an hour: a namespace is behind or ahead of its share by less than one segment.
    assert {min(by_hour), max(by_hour)} <= {7, 8, 9, 10}
    read = Counter(name.split(".")[0] for name, nbytes in world.payloads.reads if nbytes == 2)
    assert sum(count for name, count in read.items() if name.startswith(other.id)) == pytest.approx(
        350, abs=1
    )
    # Drawn by chance, so hardly one segment of 200 is never drawn in a week, and none very often.
    assert len(read) > 195 and max(read.values()) < 25
    assert scrub.state.read_bytes == sum(nbytes for name, nbytes in world.payloads.reads) - _extra(world)


def _extra(world: World) -> int:
    """Bytes that were asked for and are not the payload's: the look at its end, and beyond its header."""
    return sum(nbytes for name, nbytes in world.payloads.reads) - sum(
        len(world.payloads.content(name)) for name, nbytes in world.payloads.reads if nbytes == 2
    )


@pytest.mark.slow
def test_janitors_that_live_for_minutes_read_as_much_of_small_namespaces_as_others(world: World) -> None:
    spaces = [world.space(model=f"m{i}") for i in range(20)]
    for i, space in enumerate(spaces):
        world.save(space, i)
    read = 0
    for seed in range(24 * 12 * 2):  # two days, a new process every five minutes
        scrub = world.scrub(seed)
        turn(world, scrub, 0.0)
        for _ in range(5):
            turn(world, scrub, 60.0)
        read += scrub.state.payloads
    assert read == pytest.approx(40, abs=16)


def test_none_is_read_with_zero_percent_or_without_time(world: World) -> None:
    world.save(world.space(), 0, 5)
    scrub = world.scrub()
    for _ in range(100):
        turn(world, scrub, 0.0)
    assert scrub.state.payloads == 0


def test_time_that_was_slept_through_is_not_made_up_for(world: World) -> None:
    world.save(world.space(), 0, 200)
    scrub = world.scrub()
    turn(world, scrub)
    turn(world, scrub, 10 * 86400.0)
    assert scrub.state.payloads + scrub.state.behind <= 3  # ten minutes' worth


def until_bad(world: World, scrub: Scrub) -> list[BadSegment]:
    """Rounds until something was bad."""
    for _ in range(100_000):
        if found := turn(world, scrub):
            return found
    raise AssertionError(f"nothing is bad: {scrub.state}")


def _flip(at: int) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        altered = bytearray(data)
        altered[at] ^= 1
        return bytes(altered)

    return change


DAMAGE: dict[str, tuple[Callable[[bytes], bytes | None], str]] = {
    "gone": (lambda data: None, "missing"),
    "empty": (lambda data: b"", "shorter"),
    "short by a byte": (lambda data: data[:-1], "shorter"),
    "longer by a byte": (lambda data: data + b"x", "longer"),
    "first bit": (_flip(0), "header"),
    "in the header": (_flip(200), "header"),
    "first byte of the first slot": (_flip(4096), "checksum"),
    "last byte": (_flip(-1), "checksum"),
    "zeros": (lambda data: bytes(len(data)), "header"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_damaged_is_evicted_and_nothing_else(world: World, damage: str) -> None:
    change, word = DAMAGE[damage]
    space = world.space()
    segments = world.save(space, 0, 6)
    hurt = segments[2]
    world.payloads.tamper(world.payload(space, hurt), change)
    scrub = world.scrub()
    [bad] = until_bad(world, scrub)
    assert (bad.namespace, bad.segment) == (space.id, hurt)
    assert word in bad.problem
    assert world.index.reapable(space.id, world.clock.now + 119, 10) == []
    assert world.index.reapable(space.id, world.clock.now + 121, 10) == [(hurt, 1)]
    assert until_read(world, scrub, 60) == []
    assert world.visible(space.id) == set(segments) - {hurt}
    [gone] = [event for event in world.index.events(space.id) if event.op == "evict"]
    assert (gone.segment, gone.rule) == (hurt, "bad")
    assert world.payloads.deleted == []


@pytest.mark.parametrize("nbytes", [1 << 20, 4 << 20])
def test_a_header_that_takes_long_to_parse_stops_nobody(world: World, nbytes: int) -> None:
    """A payload that a bucket's writer put in another's place; probes are answered by threads like ours."""
    space = world.space()
    [segment] = world.save(space, 0, 1)
    name = world.payload(space, segment)
    slots, tensors, _ = hostile.HOSTILE["a shape of huge numbers"](nbytes - 8192)
    header = hostile.header(canonical_json(space.namespace), space.id, slots, tensors, {})
    world.index.evict(space.id, [segment], delete_after_s=0.0, rule="admin")
    world.index.reaped(space.id, [segment])
    record = SegmentRecord((PartRecord(4096, (len(header) - 4096,)),), 1, "none", 0)
    world.index.commit(space.id, segment, bytes(16), record, rank=0, ranks=1)
    world.payloads.tamper(name, lambda data: header)
    scrub = world.scrub()
    began = time.thread_time()
    [bad] = until_bad(world, scrub)
    assert bad.segment == segment and "header" in bad.problem
    assert time.thread_time() - began < 5


def test_another_segments_payload_under_its_name_is_bad(world: World) -> None:
    space = world.space()
    one, two = world.save(space, 0, 2)
    other = world.payloads.content(world.payload(space, two))
    world.payloads.tamper(world.payload(space, one), lambda data: other)
    [bad] = until_read(world, world.scrub(), 20)
    assert bad.segment == one and "by its header" in bad.problem


def test_any_rank_s_payload_may_be_the_bad_one(world: World) -> None:
    group = GroupSpec(kind="full", block_tokens=8, dtype="BF16", shape=SHAPE, shards=2)
    space = world.space(parallel=Parallel(tp=2), groups=(group,))
    shard = (SHAPE[0], SHAPE[1] // 2, *SHAPE[2:])

    def save(number: int) -> Any:
        segment = new_segment_id()
        for rank in range(2):
            noise = random.Random(f"{number} {rank}").randbytes
            nbytes = group.slot_bytes // 2
            parts = [
                Slot(block_key(h), memoryview(noise(nbytes)), "BF16", shard) for h in chain(number, number)
            ]
            space.save(parts, segment=segment, rank=rank, ranks=2)
        return segment

    segments = [save(number) for number in range(4)]
    world.payloads.tamper(world.payload(space, segments[1], 1), _flip(-1))
    [bad] = until_read(world, world.scrub(), 60)
    assert bad.segment == segments[1]
    assert world.visible(space.id) == set(segments) - {segments[1]}


@pytest.mark.parametrize("fault", ["flip", "truncate", "missing"])
def test_what_comes_badly_over_the_network_once_is_read_again(world: World, fault: Any) -> None:
    space = world.space()
    segments = world.save(space, 0, 3)
    for skip in range(9):  # each read of a payload in turn
        world.plan.replace(Rule(fault, ("read",), times=1, skip=skip))
        scrub = world.scrub(skip)
        assert until_read(world, scrub, 12) == []
        assert scrub.state.bad == 0
    assert world.plan.injected[("read", fault)] == 9
    assert world.visible(space.id) == set(segments)


@pytest.mark.parametrize(
    ("fault", "error"), [("transient", TransientError), ("permission", PermissionDenied)]
)
def test_a_store_that_does_not_answer_is_no_evidence(
    world: World, fault: Any, error: type[KVStoreError]
) -> None:
    space = world.space()
    segments = world.save(space, 0, 3)
    scrub = world.scrub()
    until_read(world, scrub, 2)
    world.plan.replace(Rule(fault, ("read",)))
    failures = 0
    for _ in range(1000):
        try:
            assert turn(world, scrub) == []
        except error:
            failures += 1
    assert scrub.state.unanswered == failures >= 15
    assert scrub.state.bad == 0 and world.visible(space.id) == set(segments)
    world.plan.replace()
    before = scrub.state.payloads
    until_read(world, scrub, before + 10)


def test_where_everything_is_bad_nearly_nothing_is_evicted(world: World) -> None:
    space = world.space()
    segments = world.save(space, 0, 100)
    world.plan.replace(Rule("missing", ("read",)))  # a share that isn't mounted
    scrub = world.scrub()
    found = until_read(world, scrub, 200)
    assert len(world.visible(space.id)) == 100 - scrubbing.IN_A_ROW
    assert (scrub.state.evicted, scrub.state.bad) == (scrubbing.IN_A_ROW, len(found))
    assert ["not evicted" in bad.problem for bad in found] == [False] * 8 + [True] * (len(found) - 8)
    # It is back, and one that really is bad goes again.
    world.plan.replace()
    hurt = next(iter(world.visible(space.id)))
    until_read(world, scrub, scrub.state.payloads + scrub.state.bad + 3)
    world.payloads.tamper(world.payload(space, hurt), _flip(-1))
    until_bad(world, scrub)
    assert hurt not in world.visible(space.id)
    assert set(segments) - world.visible(space.id) >= {hurt}


@pytest.mark.slow
def test_no_more_than_so_many_are_evicted_in_an_hour(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    assert HourlyBound().most == 256
    monkeypatch.setattr(scrubbing, "IN_A_ROW", 10**6)
    space = world.space()
    world.save(space, 0, 2000)
    world.plan.replace(Rule("missing", ("read",)))
    scrub = world.scrub(bound=HourlyBound(5, world.clock))
    when: list[float] = []
    for _ in range(24 * 30):
        for bad in turn(world, scrub, 120.0):
            if "not evicted" not in bad.problem:
                when.append(world.clock.now)
            else:
                assert "5 within an hour" in bad.problem
    assert len(when) == scrub.state.evicted == 2000 - len(world.visible(space.id))
    assert all(later - earlier >= 3600 for earlier, later in zip(when, when[5:], strict=False))
    assert len(when) == pytest.approx(24 * 5, abs=6)  # and all that it may


def test_a_round_reads_so_many_bytes_and_the_rest_in_the_next_ones(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = world.space()
    world.save(space, 0, 300)
    size = len(world.payloads.content(world.payload(space, next(iter(world.visible(space.id))))))
    scrub = world.scrub()
    turn(world, scrub)
    while scrub.state.payloads + scrub.state.behind == 0:
        turn(world, scrub)
    monkeypatch.setattr(scrubbing, "ROUND_BYTES", 0)
    for _ in range(20):
        turn(world, scrub)
    behind = scrub.state.behind
    assert behind == pytest.approx(20 * 300 * 600 / 86400, abs=2)
    monkeypatch.setattr(scrubbing, "ROUND_BYTES", 3 * size)
    before = scrub.state.payloads
    turn(world, scrub, 0.0)
    assert scrub.state.payloads - before == 3
    assert scrub.state.behind == behind - 3


def test_what_a_round_has_no_room_for_is_of_any_namespace(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scrubbing, "ROUND_BYTES", 1)  # one segment
    spaces = [world.space(model=model) for model in ("one", "two")]
    for number, space in enumerate(spaces):
        world.save(space, 100 * number, 30)
    scrub = world.scrub()
    world.fall_due(scrub)
    for _ in range(20):
        turn(world, scrub, 0.0)
    read = Counter(name[:16] for name, nbytes in world.payloads.reads if nbytes == 2)
    assert min(read[space.id] for space in spaces) >= 4 and sum(read.values()) == 20


def test_a_round_ends_when_its_time_is_over(world: World) -> None:
    space = world.space()
    world.save(space, 0, 20)
    scrub = world.scrub()
    world.fall_due(scrub)
    world.plan.replace(Rule("delay", ("read",), delay_s=1 / READS))
    assert list(scrub.round(world.index.accounts(), until=world.clock.now + 3.5)) == []
    assert (scrub.state.payloads, scrub.state.behind) == (4, 16)


def test_what_is_behind_is_never_more_than_everything(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.save(world.space(), 0, 10)
    monkeypatch.setattr(scrubbing, "ROUND_BYTES", 0)
    scrub = world.scrub()
    for _ in range(2000):
        turn(world, scrub)
    assert scrub.state.behind == 10


def test_a_segment_that_was_evicted_and_deleted_meanwhile_is_no_fault(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = world.space()
    world.save(space, 0, 4)
    sample = world.index.sample

    def late(namespace: Any, count: int) -> Any:
        found = sample(namespace, count)
        for listing in found:  # while this process was stopped
            world.index.evict(
                namespace, [listing.segment], delete_after_s=world.clock.now, rule="namespace_quota"
            )
            world.payloads.delete([world.payload(space, listing.segment)])
        return found

    monkeypatch.setattr(world.index, "sample", late)
    scrub = world.scrub()
    scrub._in_a_row = scrubbing.IN_A_ROW
    for _ in range(3000):
        assert turn(world, scrub) == []
    assert world.visible(space.id) == set()
    assert (scrub.state.bad, scrub.state.payloads, scrub.state.unanswered) == (0, 0, 0)


def test_one_that_is_evicted_between_the_second_reading_and_the_eviction_is_no_fault(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = world.space()
    world.save(space, 0, 4)
    world.plan.replace(Rule("missing", ("read",)))
    monkeypatch.setattr(world.index, "evict", lambda *args, **more: 0)
    scrub = world.scrub()
    for _ in range(1000):
        assert turn(world, scrub) == []
    assert scrub.state.bad == 0


class Soon(random.Random):
    """Chance that gives each new namespace its first turn as soon as any time has passed."""

    def random(self) -> float:
        return 1 - 1e-9


def in_two_tiers(request: pytest.FixtureRequest, folder: Path, write: str) -> World:
    tiers = {"fast": f"file://{folder}/fast", "slow": f"file://{folder}/slow", "write": write}
    world = World(request.node.name, ALL_DAY)
    given = type(world.settings).model_validate({"payloads": tiers, "index": "redis://h/0"})
    world.settings = world.settings.model_copy(update={"payloads": given.payloads})
    return world


@pytest.mark.parametrize(
    ("write", "off_s", "found"),
    [("through", 0.0, 1), ("back", 0.0, 0), ("back", 3600.0, 0), ("back", -3600.0, 0)],
    ids=["written through", "written back", "and the scrub's clock is ahead", "and it is behind"],
)
def test_what_another_node_may_still_upload_is_left_alone(
    request: pytest.FixtureRequest, tmp_path: Path, write: str, off_s: float, found: int
) -> None:
    world = in_two_tiers(request, tmp_path, write)
    space = world.space()
    assert len(world.save(space, 0)) == 1
    world.plan.replace(Rule("missing", ("read",)))
    scrub = world.scrub(chance=Soon(), clock=lambda: world.clock.now + off_s)
    turn(world, scrub, 0.0)
    assert len(turn(world, scrub, 599.0)) == found
    if not found:
        assert scrub.state.behind == 1
        assert len(turn(world, scrub, 2.0)) == 1
    assert world.visible(space.id) == set()


def test_a_writer_whose_clock_is_a_day_ahead_gets_no_day_to_upload(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    world = in_two_tiers(request, tmp_path, "back")
    space = world.space()
    world.clock.now += 86400.0
    assert len(world.save(space, 0)) == 1
    world.clock.now -= 86400.0
    world.plan.replace(Rule("missing", ("read",)))
    scrub = world.scrub(chance=Soon())
    turn(world, scrub, 0.0)
    assert len(turn(world, scrub, 1.0)) == 1
    assert world.visible(space.id) == set()


def test_memory_is_that_of_a_piece_not_of_a_segment(world: World, tmp_path: Path) -> None:
    shape = (2, 2, 64, 2048)  # 1 MiB a slot
    group = GroupSpec(kind="full", block_tokens=64, dtype="BF16", shape=shape)
    folder: Any = LocalPayloads(str(tmp_path))
    world.open(folder)
    space: Space = world.space(groups=(group,))
    noise = random.Random(1).randbytes(1 << 20)
    assert group.slot_bytes == len(noise)
    space.save([Slot(block_key(h), memoryview(noise), "BF16", shape) for h in chain(*range(96))])
    scrub = world.scrub()
    world.fall_due(scrub)
    tracemalloc.start()
    try:
        assert turn(world, scrub, 0.0) == []
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert scrub.state.payloads == 1 and scrub.state.read_bytes > 96 << 20
    assert peak < 24 << 20


def test_it_is_asked_whether_to_go_on_before_every_piece(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scrubbing, "_PIECE", 3 * slots(chain(1))[0].data.nbytes)
    space = world.space()
    world.save(space, 0, 1, blocks=10)

    class Enough(Exception):
        pass

    asked, allowed = 0, 0

    def proceed() -> None:
        nonlocal asked
        asked += 1
        if asked > allowed:
            raise Enough

    scrub = world.scrub(proceed=proceed)
    for allowed in range(5):
        world.fall_due(scrub)
        asked = 0
        world.payloads.reads.clear()
        with pytest.raises(Enough):
            turn(world, scrub, 0.0)
        # The look at the end and the header, then one read for each piece.
        assert len(world.payloads.reads) == (0 if allowed == 0 else 1 + allowed)
    world.fall_due(scrub)
    asked, allowed = 0, 5
    assert turn(world, scrub, 0.0) == []
    assert asked == 5
