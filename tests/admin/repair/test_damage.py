"""Damage of every kind, at random: a repair ends clean, loses nothing valid, and no load ever returns wrong
bytes.

More of it: DAMAGE_RUNS=500 pytest tests/admin/repair/test_damage.py
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from kvstore.admin.repair.check import Depth
from kvstore.admin.repair.fsck import fsck
from kvstore.admin.repair.reports import FsckReport
from tests.admin.repair.damage import (
    INDEX,
    PAYLOADS,
    RawBucket,
    RawRedis,
    World,
    Written,
)
from tests.servers.s3.bucket import S3Bucket

RUNS = int(os.environ.get("DAMAGE_RUNS", "14"))
NOW_S = 1_800_000_000.0
ALL = Depth(percent=100.0, settled_s=0.0, jobs=4)


def check(world: World, *, apply: bool = False) -> FsckReport:
    with world.cache() as cache:
        return fsck(cache, depth=ALL, apply=apply, force=True, clock=lambda: NOW_S)


def damage_and_mend(world: World, seed: int) -> None:
    rng = random.Random(seed)
    world.fill(rng)
    assert check(world).found == 0
    world.loads(complete=True)
    for _ in range(rng.randint(1, 10)):
        rng.choice(rng.choice([PAYLOADS, INDEX]))(world, rng)
    world.loads()
    valid = world.valid()
    before = check(world)
    assert world.valid() == valid, "a check changes nothing"
    mended = check(world, apply=True)
    assert mended.ended == "complete", mended.problem
    assert mended.remaining == 0, list(check(world).faults)
    assert {count.kind for count in before.counts} <= {count.kind for count in mended.counts}
    assert check(world).found == 0
    nothing_is_lost(world, valid)
    world.loads(complete=True)


def nothing_is_lost(world: World, valid: list[Written]) -> None:
    assert world.valid() == valid, "a valid payload has gone"
    with world.cache() as cache:
        index = cache.index
        assert index is not None
        for one in valid:
            listing = index.get(one.name, [one.segment])[0]
            assert listing is not None and listing.record == one.record, one.segment.hex()
            assert None not in index.find(one.name, b"".join(one.digests))
        for one in world.written:
            if one.segment in world.trashed:
                assert index.states(one.name, [one.segment]) == ["trash"]
            elif one not in valid:
                assert index.get(one.name, [one.segment]) == [None]
        for name in {one.name for one in world.written}:
            counted = [listing.record for listing in index.segments(name)]
            usage = index.usage(name)
            assert usage.nbytes == sum(record.nbytes for record in counted)
            assert usage.cost_us == sum(record.cost_us for record in counted)
            # Every visible one can be evicted.
            assert len(index.order(name, 1000)) == len(counted) == usage.segments
    for name, data in world.foreign.items():
        assert world.objects.get(name) == data


@pytest.mark.parametrize("seed", range(RUNS))
def test_files_and_sqlite(tmp_path: Path, seed: int) -> None:
    damage_and_mend(World.of(tmp_path / "cache"), seed)


@pytest.mark.parametrize("seed", range(1000, 1000 + RUNS))
def test_files_and_redis(tmp_path: Path, redis_url: str, seed: int) -> None:
    damage_and_mend(World.of(tmp_path / "cache", redis_url), seed)


@pytest.mark.parametrize("seed", [2000, 2001])
def test_a_bucket_and_redis(redis_url: str, s3_bucket: S3Bucket, seed: int) -> None:
    settings = {"payloads": s3_bucket.url, "index": redis_url, **s3_bucket.settings}
    damage_and_mend(World(settings, RawBucket(s3_bucket), RawRedis(redis_url)), seed)


@pytest.mark.parametrize("each", [*PAYLOADS, *INDEX], ids=lambda each: each.__name__)
def test_one_kind_of_damage_many_times(tmp_path: Path, each: object) -> None:
    world, rng = World.of(tmp_path / "cache"), random.Random(7)
    world.fill(rng)
    for _ in range(4):
        each(world, rng)  # type: ignore[operator]
    valid = world.valid()
    assert check(world, apply=True).remaining == 0
    nothing_is_lost(world, valid)
    world.loads(complete=True)
