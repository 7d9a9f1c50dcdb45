"""fsck --list: sums what is held, finds what nobody needs, and deletes nothing else."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis

from kvstore.admin.backends import Cache, Refused
from kvstore.admin.repair.check import Depth
from kvstore.admin.repair.fsck import fsck
from kvstore.admin.repair.reports import FsckReport, WasteReport
from kvstore.build import open_store
from kvstore.cli import exits
from kvstore.conformance.faulty import FaultyPayloads, Plan, Rule
from kvstore.keys import namespace_id, new_segment_id, payload_name
from kvstore.payloads.local import LocalPayloads
from schemas.records import SegmentRecord
from tests.admin.conftest import Admin, kv_slots, kv_space
from tests.admin.repair.damage import (
    KV,
    TWO_RANKS,
    RawBucket,
    RawSqlite,
    World,
    Written,
    chain,
)
from tests.servers.s3.bucket import S3Bucket

HOUR_S = 3600.0


@pytest.fixture
def world(empty_world: World) -> World:
    """Two segments that are needed."""
    empty_world.write(KV, chain("a", 4), 0)
    empty_world.write(TWO_RANKS, chain("b", 3), 0)
    return empty_world


def folder(world: World) -> Path:
    return Path(world.settings["payloads"].removeprefix("file://"))


def age(world: World, name: str, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(folder(world) / name, (then, then))


def listed(cache: Cache, **given: Any) -> FsckReport:
    return fsck(cache, depth=Depth(only_list=True), **given)


def waste_of(report: FsckReport) -> WasteReport:
    assert report.waste is not None
    return report.waste


def run(world: World, *, ahead_s: float = 0.0, **given: Any) -> WasteReport:
    with world.cache() as cache:
        return waste_of(listed(cache, clock=lambda: time.time() + ahead_s, **given))


def told(out: str) -> WasteReport:
    return waste_of(FsckReport.model_validate_json(out))


def orphan(world: World, age_s: float, namespace: Any = KV) -> Written:
    """A writer that died between its put and its commit."""
    done = world.write(namespace, chain(os.urandom(4), 2), 0, listed=False)
    for name in done.names:
        age(world, name, age_s)
    return done


def there(world: World, one: Written) -> list[bool]:
    return [world.objects.get(name) is not None for name in one.names]


def test_orphans_of_a_certain_age(admin: Admin, world: World) -> None:
    old, young = orphan(world, 2 * HOUR_S), orphan(world, HOUR_S / 2)
    halves = orphan(world, 2 * HOUR_S, TWO_RANKS)
    age(world, halves.names[1], 60)  # the youngest rank counts: the other waits for it
    ran = admin("fsck", "--list", "--json", *world.options)
    assert ran.code == 0, ran.err
    report = told(ran.out)
    assert (report.found.objects, report.found.stored_bytes) == (1, len(old.payloads[0]))
    assert sum(space.young.objects for space in report.namespaces) == 3
    assert there(world, old) == [True]
    assert (
        "1 (" in (text := admin("fsck", "--list", *world.options).out)
        and "the same with --apply removes it" in text
    )
    ran = admin("fsck", "--list", "--apply", *world.options)
    assert ran.code == 0, ran.err
    assert (there(world, old), there(world, young), there(world, halves)) == ([False], [True], [True, True])
    assert told(admin("fsck", "--list", "--json", *world.options).out).found.objects == 0
    assert admin("fsck", "--list", *world.options).out.splitlines()[-1].split() == ["waste", "none"]
    ran = admin("fsck", "--list", "--apply", "--older-than", "20m", *world.options)
    assert ran.code == 0
    assert (there(world, young), there(world, halves)) == ([False], [True, True])
    assert all(world.whole(one) for one in world.written[:2])
    with world.cache() as cache:
        assert fsck(cache, depth=Depth(percent=100.0)).found == 0


@pytest.mark.servers
def test_what_a_newer_release_has_written_is_no_waste(redis_url: str, tmp_path: Path) -> None:
    """As after a rollback: to this release's scripts such a namespace is empty."""
    folder = tmp_path / "cache"
    world = World.of(folder, redis_url)
    newer, other = world.write(KV, chain("a", 4), 0), world.write(TWO_RANKS, chain("b", 3), 0)
    done = orphan(world, 2 * HOUR_S, TWO_RANKS)
    age(world, newer.names[0], 2 * HOUR_S)
    with redis.Redis.from_url(redis_url, protocol=2) as client:
        where = f"kvs:{{{newer.name}}}:"
        client.hset(f"{where}meta", "schema", "5")
        client.hdel(f"{where}meta", "bucket_bits")
        client.rename(f"{where}segs", f"{where}segments")
    assert run(world, apply=True).deleted.objects == len(done.names)
    assert (there(world, newer), there(world, other)) == ([True], [True, True])


def test_what_waits_for_other_ranks_is_not_waste(world: World) -> None:
    done = orphan(world, 2 * HOUR_S, TWO_RANKS)
    record = done.record
    one = SegmentRecord(
        (record.parts[0],), record.slots, record.codec, record.created_s, 0, 0, record.cost_us
    )
    with world.cache() as cache:
        assert cache.index is not None
        cache.index.commit(done.name, done.segment, b"".join(done.digests), one, rank=0, ranks=2)
    assert run(world, apply=True).found.objects == 0
    assert there(world, done) == [True, True]


def test_evicted_segments_have_their_grace_time(world: World) -> None:
    one = world.written[1]
    with world.cache() as cache:
        assert cache.index is not None
        cache.index.evict(one.name, [one.segment], delete_after_s=time.time() + 120, rule="admin")
    report = run(world, apply=True)
    assert there(world, one) == [True, True]
    assert [(s.trashed, s.due, s.reaped) for s in report.namespaces if s.id == one.name] == [(1, 0, 0)]
    world.raw.expire(one.name)
    report = run(world, apply=True)
    assert there(world, one) == [False, False]
    assert [(s.trashed, s.due, s.reaped) for s in report.namespaces if s.id == one.name] == [(1, 1, 2)]


def test_invalidated_segments_are_drained_reaped_and_swept(world: World) -> None:
    one = world.written[0]
    with world.cache() as cache:
        assert cache.index is not None
        cache.index.invalidate(one.name)
    plan = run(world)
    assert [s.bygone for s in plan.namespaces if s.id == one.name] == [1]
    assert plan.found.objects == 0
    report = run(world, apply=True)
    assert [(s.drained, s.swept) for s in report.namespaces if s.id == one.name] == [(1, 4)]
    assert there(world, one) == [True]
    world.raw.expire(one.name)
    run(world, apply=True)
    assert there(world, one) == [False]
    with world.cache() as cache:
        assert cache.index is not None
        assert list(cache.index.entries(one.name)) == []


def test_accounts_are_corrected(world: World) -> None:
    world.raw.miscount(world.written[0].name, 4096)
    run(world)
    report = run(world, apply=True)
    assert [s.corrected for s in report.namespaces] == [
        s.id == world.written[0].name for s in report.namespaces
    ]
    assert not any(s.corrected for s in run(world, apply=True).namespaces)


def test_what_dead_writers_left_in_the_folder(world: World) -> None:
    tmp = folder(world) / ".tmp"
    tmp.mkdir(exist_ok=True)
    dead, alive, young = (f"{number:032x}" for number in range(3))
    # Opening the store removes those of the dead; these come afterwards, as from another node.
    with world.cache() as cache:
        assert isinstance(cache.payloads, LocalPayloads)
        for name in (dead, alive, young):
            (tmp / name).write_bytes(b"x" * 100)
        for name in (dead, alive):
            age(world, f".tmp/{name}", 2 * HOUR_S)
        with (tmp / alive).open() as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            plan = waste_of(listed(cache))
            assert [(s.kind, s.old.objects, s.young.objects) for s in plan.strays] == [("temporary", 2, 1)]
            report = waste_of(listed(cache, apply=True))
    assert sorted(path.name for path in tmp.iterdir()) == sorted([alive, young])
    assert (report.deleted.objects, report.deleted.stored_bytes, report.left_out) == (1, 100, 1)


def test_foreign_objects_are_listed_and_left_alone(admin: Admin, world: World) -> None:
    beside = world.written[0].names[0].rpartition("/")[0]
    names = ["README.txt", f"{beside}/notes.txt", f"{beside}/0.bak", "backup/old.tar", ".tmp/mine"]
    for name in names:
        world.objects.put(name, b"precious")
        age(world, name, 90 * 24 * HOUR_S)
    report = told(admin("fsck", "--list", "--json", *world.options).out)
    assert sorted(report.foreign) == sorted([*names[:3], "backup/", names[4]])
    assert report.found.objects == 0
    assert admin("fsck", "--list", "--apply", *world.options).code == 0
    assert all(world.objects.get(name) == b"precious" for name in names)


def test_a_link_out_of_the_folder_is_foreign(world: World, tmp_path: Path) -> None:
    precious = tmp_path / "elsewhere" / "ab"
    precious.mkdir(parents=True)
    name = payload_name(namespace_id(KV), new_segment_id(), 0)
    (precious / name.rpartition("/")[2]).write_bytes(b"precious")
    (folder(world) / "0123456789abcdef").symlink_to(tmp_path / "elsewhere")
    run(world, apply=True, ahead_s=2 * HOUR_S, force=True)
    assert (precious / name.rpartition("/")[2]).read_bytes() == b"precious"


def test_an_index_that_was_lost_is_no_reason_to_delete(admin: Admin, tmp_path: Path) -> None:
    place = tmp_path / "cache"
    world = World.of(place)
    for number in range(20):
        world.write(KV, chain(number, 2), 0)
    for end in ("", "-wal", "-shm"):
        (place / f"index.sqlite{end}").unlink(missing_ok=True)
    ran = admin("fsck", "--list", "--apply", *world.options)
    assert ran.code == 1 and "rebuild" in ran.err
    with world.cache() as cache:
        cache.made_index()
    with pytest.raises(Refused, match="rebuild"):
        run(world, apply=True, ahead_s=2 * HOUR_S)
    with world.cache() as cache:
        cache.made_index().register(KV, expected_blocks=1000)
    with pytest.raises(Refused, match="20 of 20 payloads"):
        run(world, apply=True, ahead_s=2 * HOUR_S)
    assert all(world.whole(one) for one in world.written)
    assert run(world, apply=True, ahead_s=2 * HOUR_S, force=True).deleted.objects == 20


def test_half_an_index_is_no_reason_either(tmp_path: Path) -> None:
    place = tmp_path / "cache"
    world = World.of(place)
    world.write(KV, chain("a", 1), 0)
    for number in range(300):
        world.write(KV, chain(number, 1), 0, listed=False)
    with pytest.raises(Refused, match="300 of 301 payloads"):
        run(world, apply=True, ahead_s=2 * HOUR_S)


def test_an_unreachable_index_costs_nothing(admin: Admin, world: World) -> None:
    done = orphan(world, 2 * HOUR_S)
    words = ["--payloads", world.settings["payloads"], "--index", "redis://127.0.0.1:1"]
    ran = admin("fsck", "--list", "--apply", *words)
    assert ran.code == 5
    assert "`cache-admin doctor` says what to do" in ran.err
    assert there(world, done) == [True]


def test_a_payload_store_that_does_not_answer(world: World) -> None:
    done = orphan(world, 2 * HOUR_S)
    for verb in ("list", "delete"):
        with world.cache() as cache:
            plan = Plan(Rule("transient", verbs=(verb,)))
            cache.__dict__["payloads"] = FaultyPayloads(cache.payloads, plan)
            report = listed(cache, apply=True)
        assert report.ended == "failed"
        assert exits.of_report(report) == exits.ExitCode.UNREACHABLE
    assert there(world, done) == [True]


def test_what_could_not_be_reaped_is_said(world: World) -> None:
    one = world.written[1]
    with world.cache() as cache:
        assert cache.index is not None
        cache.index.evict(one.name, [one.segment], delete_after_s=0, rule="admin")
        cache.__dict__["payloads"] = FaultyPayloads(
            cache.payloads, Plan(Rule("permission", verbs=("delete",)))
        )
        report = listed(cache, apply=True)
    assert "could not all be deleted" in report.problem
    assert exits.of_report(report) == exits.ExitCode.PARTIAL


class Committing(FaultyPayloads):
    """Somebody commits the segment at the worst moment: after fsck has asked, and before it deletes."""

    def __init__(self, cache: Cache, one: Written) -> None:
        super().__init__(cache.payloads, Plan())
        self._index, self._one = cache.index, one

    def delete(self, names: Sequence[str]) -> int:
        one = self._one
        assert self._index is not None
        packed = b"".join(one.digests)
        self._index.commit(one.name, one.segment, packed, one.record, rank=0, ranks=1)
        return super().delete(names)


def test_what_is_committed_while_it_is_deleted_is_not_promised(world: World) -> None:
    done = orphan(world, 2 * HOUR_S)
    with world.cache() as cache:
        cache.__dict__["payloads"] = Committing(cache, done)
        listed(cache, apply=True)
        assert cache.index is not None
        assert there(world, done) == [False]
        assert cache.index.states(done.name, [done.segment]) == ["trash"]
        assert fsck(cache).found == 0


def test_what_is_committed_after_the_look_is_kept(world: World) -> None:
    done = orphan(world, 2 * HOUR_S)

    class Committer:
        def begin(self, what: str, total_bytes: int | None = None) -> None:
            if what.startswith("collect"):
                with world.cache() as cache:
                    index, packed = cache.made_index(), b"".join(done.digests)
                    index.commit(done.name, done.segment, packed, done.record, rank=0, ranks=1)

        def advance(self, nbytes: int) -> None: ...

    report = run(world, apply=True, progress=Committer())
    assert (report.deleted.objects, report.left_out) == (0, 1)
    assert there(world, done) == [True]
    with world.cache() as cache:
        assert fsck(cache).found == 0


def test_an_age_is_said_as_the_times_of_other_commands_are(admin: Admin, world: World) -> None:
    old, young = orphan(world, 169 * HOUR_S), orphan(world, 167 * HOUR_S)
    ran = admin("fsck", "--list", "--apply", "--older-than", "1w", "--json", *world.options)
    assert ran.code == 0, ran.err
    assert told(ran.out).older_than_s == 7 * 86400
    assert (there(world, old), there(world, young)) == ([False], [True])


def test_a_check_deletes_no_payload(admin: Admin, world: World) -> None:
    """A check lists again what is valid, and leaves the rest for `--list`."""
    valid, damaged, sick = (orphan(world, 2 * HOUR_S, KV) for _ in range(3))
    world.objects.put(damaged.names[0], b"x" * 100)
    age(world, damaged.names[0], 2 * HOUR_S)
    with world.cache() as cache:
        plan = Plan(Rule("permission", verbs=("read",), name=sick.segment.hex()))
        cache.__dict__["payloads"] = FaultyPayloads(cache.payloads, plan)
        report = fsck(cache, apply=True)
        assert cache.index is not None
        assert cache.index.states(valid.name, [valid.segment, sick.segment]) == ["visible", None]
    assert report.waste is None
    assert [there(world, one)[0] for one in (valid, damaged, sick)] == [True, True, True]
    assert admin("fsck", "--older-than", "1d", *world.options).code == 2
    assert admin("fsck", "--list", "--apply", *world.options).code == 0
    assert [there(world, one)[0] for one in (valid, damaged, sick)] == [True, False, False]


def test_a_namespace_that_is_named_is_no_way_round_a_lost_index(admin: Admin, tmp_path: Path) -> None:
    world = World.of(tmp_path / "cache")
    for number in range(12):
        world.write(KV, chain(number, 2), 0, listed=False)
    with world.cache() as cache:
        name = cache.made_index().register(KV, expected_blocks=1000)
        later = partial(listed, cache, prefixes=[name], clock=lambda: time.time() + 2 * HOUR_S)
        assert "12 of 12 payloads" in later().problem
        with pytest.raises(Refused, match="12 of 12 payloads"):
            later(apply=True)
        assert len(list(cache.payloads.list())) == 12
        assert waste_of(later(apply=True, force=True)).deleted.objects == 12
    assert "no namespace starts with ''" in admin("fsck", "", "--list", *world.options).err


def test_only_of_the_namespaces_that_are_named(world: World) -> None:
    one, other = orphan(world, 2 * HOUR_S), orphan(world, 2 * HOUR_S, TWO_RANKS)
    world.objects.put("README.txt", b"precious")
    with world.cache() as cache:
        report = listed(cache, prefixes=[one.name.upper()[:6], one.name], apply=True)
    assert report.held is not None and {line.namespace for line in report.held.lines} == {one.name}
    assert (waste_of(report).deleted.objects, waste_of(report).foreign) == (1, ())
    assert (there(world, one), there(world, other)) == ([False], [True, True])


@pytest.mark.parametrize("text", ["5m", "0s", "an hour", "1", "-1h"])
def test_ages_that_are_none(admin: Admin, tmp_path: Path, text: str) -> None:
    ran = admin("fsck", "--list", "--older-than", text, "--payloads", f"file://{tmp_path}")
    assert ran.code == 2 and "--older-than" in ran.err


def in_bucket(bucket: S3Bucket, tmp_path: Path) -> World:
    index = tmp_path / "index.sqlite"
    settings = {"payloads": bucket.url, "index": f"sqlite://{index}", **bucket.settings}
    world = World(settings, RawBucket(bucket), RawSqlite(index))
    world.write(KV, chain("a", 4), 0)
    return world


def leftovers(world: World, bucket: S3Bucket) -> None:
    client, done = bucket.client(), world.write(KV, chain("b", 2), 0, listed=False)
    bucket.put(f".probe/{'0' * 32}", b"probe")
    bucket.put(".probe/else", b"precious")
    bucket.put("README.txt", b"precious")
    for name in (payload_name(done.name, new_segment_id(), 0), "not/ours"):
        started = client.create_multipart_upload(Bucket=bucket.bucket, Key=bucket.name(name))
        client.upload_part(
            Bucket=bucket.bucket, Key=bucket.name(name), UploadId=started["UploadId"], PartNumber=1, Body=b"x"
        )


def check_bucket(world: World, bucket: S3Bucket) -> None:
    leftovers(world, bucket)
    assert run(world, apply=True).deleted.objects == 0
    plan = run(world, ahead_s=2 * HOUR_S)
    assert [(s.kind, s.old.objects) for s in plan.strays] == [("probe", 1), ("upload", 1), ("foreign", 3)]
    assert plan.found.objects == 3
    report = run(world, apply=True, ahead_s=2 * HOUR_S)
    assert report.deleted.objects == 3, report
    assert sorted(bucket.keys()) == sorted([*world.written[0].names, ".probe/else", "README.txt"])
    uploads = bucket.client().list_multipart_uploads(Bucket=bucket.bucket)["Uploads"]
    assert [upload["Key"] for upload in uploads] == [bucket.name("not/ours")]
    assert run(world, ahead_s=2 * HOUR_S).found.objects == 0


def test_a_bucket(s3_bucket: S3Bucket, tmp_path: Path) -> None:
    check_bucket(in_bucket(s3_bucket, tmp_path), s3_bucket)


@pytest.mark.servers
def test_what_shards_name_is_no_waste(redis_url: str, tmp_path: Path) -> None:
    """The node that says in how many shards a namespace lies has lost it, and the shards' nodes nothing.
    What is elsewhere doesn't wait for that."""
    world = World.of(tmp_path / "cache", redis_url)
    world.settings["redis"]["shards"] = 4
    with closing(open_store(world.settings)) as store:
        space = store.open(kv_space(), block_bytes=4096)
        for seed in range(12):
            space.save(kv_slots(2, seed=seed))
    saved = sorted(folder(world).glob("*/??/*.*"))
    assert len(saved) == 12
    for path in saved:
        age(world, str(path.relative_to(folder(world))), 2 * HOUR_S)
    done = orphan(world, 2 * HOUR_S, TWO_RANKS)
    assert run(world, apply=False).found.objects == len(done.names)
    where = f"kvs:{{{namespace_id(kv_space())}}}:meta"
    with redis.Redis.from_url(redis_url, protocol=2) as client:
        client.hdel(where, "shards")
        assert run(world).found.objects == len(done.names)
        client.delete(where)
        assert run(world).found.objects == len(done.names)
        # Another number that somebody has told, and that is lost as well.
        client.hset(where, mapping={"schema": "3", "shards": "2"})
        with closing(open_store({**world.settings, "redis": {"shards": 2}})) as store:
            store.open(kv_space(), block_bytes=4096).register()
        client.delete(where)
    with world.cache() as cache:
        report = listed(cache, apply=True, force=True)
    assert namespace_id(kv_space()) in report.problem
    assert "left alone" in report.problem
    assert waste_of(report).deleted.objects == len(done.names)
    assert report.held is not None
    assert {(line.state, line.payloads) for line in report.held.lines} >= {("unknown", 12)}
    assert sorted(folder(world).glob("*/??/*.*")) == saved
    with closing(open_store(world.settings)) as store:
        store.open(kv_space(), block_bytes=4096).register()
    with world.cache() as cache:
        report = listed(cache, apply=True)
    assert (report.problem, waste_of(report).deleted.objects) == ("", 0)
    assert sorted(folder(world).glob("*/??/*.*")) == saved
