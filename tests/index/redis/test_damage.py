"""RedisIndex over keys that hold what nobody wrote: upkeep goes on, and what it does is done as a whole."""

from __future__ import annotations

import struct
import time
import tracemalloc
from collections.abc import Iterator

import pytest
import redis

from kvstore.errors import CapacityExceeded
from kvstore.index.maintenance import Usage
from kvstore.index.redis.index import RedisIndex
from kvstore.keys import NamespaceId, SegmentId, new_segment_id
from tests.index.contract.chains import chain, namespace, put_all, served
from tests.servers.redis import PATIENT, RedisServer

pytestmark = pytest.mark.servers

BLOCKS = 6
#: Values of `segs`.
DAMAGED = [
    pytest.param(b"", id="empty"),
    pytest.param(b"damaged", id="something else"),
    pytest.param(b"5120:2:", id="a beginning"),
    pytest.param(b"5120:2:" + bytes(30), id="zeros"),
]


@pytest.fixture
def index(redis_url: str) -> Iterator[RedisIndex]:
    with RedisIndex.from_settings(redis_url, PATIENT) as index:
        yield index


@pytest.fixture
def name(index: RedisIndex) -> NamespaceId:
    return index.register(namespace(), expected_blocks=1000)


@pytest.fixture
def raw(redis_server: RedisServer) -> Iterator[redis.Redis]:
    """The server around the index."""
    with redis.Redis(port=redis_server.port, protocol=2) as client:
        yield client


@pytest.fixture
def segments(index: RedisIndex, name: NamespaceId) -> list[SegmentId]:
    return put_all(index, name, chain(BLOCKS), [2, 2, 2])


def damage(raw: redis.Redis, name: NamespaceId, segment: SegmentId, value: bytes) -> None:
    assert raw.hset(f"kvs:{{{name}}}:segs", segment, value) == 0


@pytest.mark.parametrize("value", DAMAGED)
def test_a_damaged_record_is_evicted_like_any_other(
    index: RedisIndex, name: NamespaceId, raw: redis.Redis, segments: list[SegmentId], value: bytes
) -> None:
    damage(raw, name, segments[1], value)
    assert {one.segment for one in index.order(name, 9)} == set(segments)
    counted = index.reconcile(name).counted
    assert counted is not None and counted.segments == 3 and counted.blocks in (4, 6)
    gone = index.cull(name, keep_bytes=-1, delete_after_s=0, limit=9, rule="capacity")
    assert set(gone) == set(segments)
    assert index.usage(name) == Usage(0, 0, 0)
    assert dict.fromkeys(segments, 1) == dict(index.reapable(name, time.time(), 9))


@pytest.mark.parametrize("value", DAMAGED)
def test_what_a_damaged_record_hides_is_written_anew(
    index: RedisIndex, name: NamespaceId, raw: redis.Redis, segments: list[SegmentId], value: bytes
) -> None:
    damage(raw, name, segments[1], value)
    assert served(index.match(name, chain(BLOCKS))) == 2
    claim = index.claim(name, chain(BLOCKS), new_segment_id(), 60.0)
    assert (claim.present, claim.granted) == (2, True)
    put_all(index, name, chain(BLOCKS), [2, 4])
    assert served(index.match(name, chain(BLOCKS))) == BLOCKS


@pytest.mark.parametrize("value", DAMAGED)
def test_a_damaged_record_does_not_hold_up_what_was_invalidated(
    index: RedisIndex, name: NamespaceId, raw: redis.Redis, segments: list[SegmentId], value: bytes
) -> None:
    damage(raw, name, segments[1], value)
    assert index.invalidate(name) == 3
    assert index.drain(name, delete_after_s=0, limit=9) == 3
    assert dict.fromkeys(segments, 1) == dict(index.reapable(name, time.time(), 9))


@pytest.mark.parametrize("value", DAMAGED)
def test_a_damaged_record_can_be_forgotten(
    index: RedisIndex, name: NamespaceId, raw: redis.Redis, segments: list[SegmentId], value: bytes
) -> None:
    damage(raw, name, segments[1], value)
    assert index.unlist(name, segments) == 3
    assert index.reconcile(name).counted == index.usage(name) == Usage(0, 0, 0)


@pytest.mark.parametrize(
    ("ranks", "slots"),
    [pytest.param(255, 1024, id="2 kB say 2 MiB"), pytest.param(100, 2000, id="small enough to keep")],
)
def test_what_a_forged_record_unpacks_to_takes_no_memory(
    index: RedisIndex, name: NamespaceId, raw: redis.Redis, ranks: int, slots: int
) -> None:
    """The attack: who may write to Redis gives an engine records whose slots are said once, and many."""
    digests = chain(100)
    segments = put_all(index, name, digests, [1] * 100)
    head = struct.pack("<BBHBBHIIQ8s", 2, 1, slots, ranks, 0, 0, 0, 0, 0, bytes(8))
    tracemalloc.start()
    try:
        for number in range(4):
            for each, segment in enumerate(segments):
                sizes = (4096, each << 16 | number) * ranks
                forged = f"5120:{slots}:".encode() + bytes(24) + head + struct.pack(f"<{2 * ranks}I", *sizes)
                damage(raw, name, segment, forged)
            runs = index.match(name, digests)
            assert len(runs) == 100
            assert {len(run.record.parts) for run in runs} == {ranks}, "it was not met"
            assert {run.record.parts[ranks - 1].nbytes for run in runs} >= {4096 + number * slots}
        held = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert held < 8 << 20


def test_a_journal_that_cannot_be_written_cuts_nothing_off(
    index: RedisIndex, name: NamespaceId, raw: redis.Redis
) -> None:
    raw.set(f"kvs:{{{name}}}:events", "not a stream")
    blocks = chain(BLOCKS)
    segments = put_all(index, name, blocks, [2, 2, 2])
    assert served(index.match(name, blocks)) == BLOCKS
    assert index.usage(name).segments == 3
    assert index.evict(name, segments[:1], delete_after_s=0, rule="admin") == 1
    assert index.unlist(name, segments[1:2]) == 1
    assert index.usage(name).segments == 1
    assert index.invalidate(name) == 1
    assert index.usage(name) == Usage(0, 0, 0)


def test_pins_of_before_outlive_a_call_that_pins_too_much(index: RedisIndex, name: NamespaceId) -> None:
    segments = put_all(index, name, chain(600), [1] * 600)
    one = index.usage(name).nbytes // 600
    assert index.pin(name, segments[:10], most_bytes=10 * one) == 10
    with pytest.raises(CapacityExceeded):
        index.pin(name, segments, most_bytes=550 * one)
    assert index.usage(name).pinned_bytes == 10 * one
    assert all(listing is not None and listing.pinned for listing in index.get(name, segments[:10]))


@pytest.mark.parametrize("value", [b"", b"-1", b"1e9", b"damaged", "\u0663".encode()])
def test_a_quota_that_is_no_number_is_none(index: RedisIndex, raw: redis.Redis, value: bytes) -> None:
    index.set_quota("tenant/a", 1 << 30)
    raw.hset("kvs:quotas", "tenant/b", value)
    raw.hset("kvs:quotas", b"\xff", "1")
    assert index.quotas() == {"tenant/a": 1 << 30, "\ufffd": 1}
