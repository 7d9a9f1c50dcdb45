"""rebuild: what comes back is what was there, also after it was cut short."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvstore.admin.repair.check import Depth
from kvstore.admin.repair.fsck import fsck
from kvstore.admin.repair.rebuild import rebuild
from kvstore.admin.repair.reports import RebuildReport
from kvstore.cli import exits
from kvstore.conformance.faulty import FaultyPayloads, Plan, Rule
from kvstore.index.contract import saved_minute
from kvstore.keys import NamespaceId, namespace_id, new_segment_id, payload_name
from schemas.records import pack_record
from tests.admin.conftest import Admin
from tests.admin.repair.damage import CREATED_S, TWO_RANKS, RawRedis, RawSqlite, World, chain
from tests.servers.redis import RedisServer
from tests.waiting import PATIENCE_S


@pytest.fixture
def world(empty_world: World) -> World:
    """Chains of one rank and of two, and items."""
    empty_world.fill(random.Random(5))
    return empty_world


ENVIRON = {"KVSTORE_CAPACITY_BYTES": str(16 << 20)}


def lose_the_index(world: World) -> None:
    if isinstance(world.raw, RawRedis):
        world.raw.client.flushall()
    else:
        for end in ("", "-wal", "-shm"):
            Path(f"{world.raw.path}{end}").unlink(missing_ok=True)  # type: ignore[attr-defined]


def known(world: World) -> dict[NamespaceId, Any]:
    """All that the index says; of a block that is stored twice, that it is there."""
    with world.cache() as cache:
        index = cache.made_index()
        return {
            name: (
                text,
                index.usage(name),
                sorted(
                    (one.segment, pack_record(one.record), one.last_use_s, one.pinned)
                    for one in index.segments(name)
                ),
                sorted(entry.digest for entry in index.entries(name)),
                [one.segment for one in index.order(name, 1000)],
            )
            for name, text in index.namespaces().items()
        }


def test_what_comes_back_is_what_was_there(admin: Admin, world: World) -> None:
    before = known(world)
    lose_the_index(world)
    ran = admin("rebuild", "--apply", "--json", *world.options, env=ENVIRON)
    assert ran.code == 0, ran.err
    report = RebuildReport.model_validate_json(ran.out)
    assert known(world) == before
    assert sum(space.listed.segments for space in report.namespaces) == len(world.written)
    assert all(
        used == 60 * saved_minute(CREATED_S)
        for _, _, segments, _, _ in before.values()
        for *_, used, _ in segments
    )
    with world.cache() as cache:
        assert fsck(cache, depth=Depth(percent=100.0)).found == 0
    world.loads(complete=True)
    again = RebuildReport.model_validate_json(
        admin("rebuild", "--apply", "--json", *world.options, env=ENVIRON).out
    )
    assert sum(space.listed.segments for space in again.namespaces) == 0
    assert sum(space.known for space in again.namespaces) == len(world.written)
    assert known(world) == before


def test_a_plan_makes_nothing(admin: Admin, world: World) -> None:
    lose_the_index(world)
    ran = admin("rebuild", "--json", *world.options)
    assert ran.code == 0
    report = RebuildReport.model_validate_json(ran.out)
    assert sum(space.listed.segments for space in report.namespaces) == len(world.written)
    if isinstance(world.raw, RawSqlite):
        assert not world.raw.path.exists()
    assert known(world) == {}


class Impatient:
    """Ctrl-C after so many words of progress."""

    def __init__(self, patience: int) -> None:
        self.patience = patience

    def begin(self, what: str, total_bytes: int | None = None) -> None: ...

    def advance(self, nbytes: int) -> None:
        self.patience -= 1
        if self.patience < 0:
            raise KeyboardInterrupt


def test_one_that_was_cut_short_goes_on(world: World) -> None:
    before = known(world)
    lose_the_index(world)
    steps = []
    for attempt in range(1, 10):
        with world.cache() as cache:
            report = rebuild(cache, apply=True, jobs=2, progress=Impatient(8 * attempt))
        steps.append(sum(space.listed.segments for space in report.namespaces))
        if report.ended == "complete":
            break
        assert exits.of_report(report) == exits.ExitCode.CANCELLED
        with world.cache() as cache:
            # What it has done so far is sound.
            assert not [f for f in fsck(cache, depth=Depth(percent=100.0)).faults if f.kind != "unlisted"]
    assert len(steps) > 2 and sum(steps) == len(world.written)
    assert known(world) == before


def test_a_commit_that_was_cut_short_goes_on(world: World) -> None:
    before = known(world)
    lose_the_index(world)
    two = next(each for each in world.written if each.namespace == TWO_RANKS)
    one = replace(two.record, parts=two.record.parts[:1])
    with world.cache() as cache:
        index = cache.made_index()
        index.register(TWO_RANKS, expected_blocks=10_000)
        index.commit(two.name, two.segment, b"".join(two.digests), one, rank=0, ranks=2)
        assert index.states(two.name, [two.segment]) == ["incomplete"]
        rebuild(cache, apply=True)
    assert known(world) == before


def test_a_store_that_fails_ends_it(world: World) -> None:
    before = known(world)
    lose_the_index(world)
    with world.cache() as cache:
        plan = Plan(Rule("transient", verbs=("read",), skip=9))
        cache.__dict__["payloads"] = FaultyPayloads(cache.payloads, plan)
        report = rebuild(cache, apply=True)
    assert report.ended == "failed"
    assert exits.of_report(report) == exits.ExitCode.UNREACHABLE
    with world.cache() as cache:
        assert rebuild(cache, apply=True).ended == "complete"
    assert known(world) == before


def test_what_cannot_come_back_is_said(admin: Admin, world: World) -> None:
    one, two = world.written[0], next(each for each in world.written if each.namespace == TWO_RANKS)
    world.objects.put(one.names[0], one.payloads[0][:-1])
    world.objects.delete(two.names[1])
    strange = payload_name(NamespaceId("00ff" * 4), new_segment_id(), 0)
    world.objects.put(strange, b"nothing of ours")
    world.objects.put("README.txt", b"precious")
    lose_the_index(world)
    ran = admin("rebuild", "--apply", "--json", *world.options, env=ENVIRON)
    assert ran.code == 4
    report = RebuildReport.model_validate_json(ran.out)
    spaces = {space.id: space for space in report.namespaces}
    assert (spaces[one.name].unusable, spaces[two.name].incomplete) == (1, 1)
    assert (spaces["00ff" * 4].unusable, spaces["00ff" * 4].listed.segments) == (1, 0)
    assert report.left_out == 3
    assert {each.segment for each in report.left} >= {one.segment.hex(), two.segment.hex()}
    assert "00ff" * 4 not in known(world)
    world.loads(complete=True)


def test_only_the_namespaces_that_are_named(world: World) -> None:
    before = known(world)
    lose_the_index(world)
    with world.cache() as cache:
        rebuild(cache, [namespace_id(TWO_RANKS)], apply=True)
    assert known(world) == {namespace_id(TWO_RANKS): before[namespace_id(TWO_RANKS)]}


def test_what_was_evicted_stays_evicted(world: World) -> None:
    one = world.written[0]
    with world.cache() as cache:
        assert cache.index is not None
        cache.index.evict(one.name, [one.segment], delete_after_s=time.time() + 100, rule="admin")
        rebuild(cache, apply=True)
        assert cache.index.states(one.name, [one.segment]) == ["trash"]
        cache.index.invalidate(world.written[-1].name)
        rebuild(cache, apply=True)
        assert cache.index.usage(world.written[-1].name).segments == 0


def test_what_is_deleted_at_that_moment_is_not_promised(world: World) -> None:
    # Not of a block that is stored twice: the other copy would be hidden behind its entry.
    one = world.written[-1]
    lose_the_index(world)

    class Deleting(FaultyPayloads):
        """Its payload is deleted once its header has been read."""

        def read(self, name: str, offset: int, into: Any, *, size: int | None = None) -> int | None:
            got = super().read(name, offset, into, size=size)
            if name == one.names[0]:
                world.objects.delete(name)
            return got

    with world.cache() as cache:
        cache.__dict__["payloads"] = Deleting(cache.payloads, Plan())
        report = rebuild(cache, apply=True)
        assert cache.index is not None
        assert cache.index.states(one.name, [one.segment]) == ["trash"]
    assert [space.refused for space in report.namespaces if space.id == one.name] == [1]
    with world.cache() as cache:
        assert fsck(cache).found == 0


@pytest.mark.slow
def test_a_kill_in_the_middle(tmp_path: Path, private_redis: RedisServer) -> None:
    """kill -9 at some moment, and again: the last one finishes, and nothing is counted twice."""
    folder = tmp_path / "cache"
    url = private_redis.url
    world = World.of(folder, url)
    for number in range(150):
        world.write(TWO_RANKS, chain(number, 16), 0)
    before = known(world)
    lose_the_index(world)
    # What a shell runs in the background ignores SIGINT, and so do its children.
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += "from kvstore.cli import main; main()"
    words = [sys.executable, "-c", code, "rebuild", "--apply", "--jobs", "1", *world.options]
    environ = {name: text for name, text in os.environ.items() if not name.startswith("KVSTORE_")}
    environ |= ENVIRON
    name, partial = namespace_id(TWO_RANKS), 0
    for sign in (signal.SIGKILL, signal.SIGINT):
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environ)
        until = time.monotonic() + PATIENCE_S
        while process.poll() is None and time.monotonic() < until:
            if world.raw.client.hlen(f"kvs:{{{name}}}:segs") > partial + 10:  # type: ignore[attr-defined]
                process.send_signal(sign)
                break
            time.sleep(0.001)
        code = process.wait(PATIENCE_S)
        partial = world.raw.client.hlen(f"kvs:{{{name}}}:segs")  # type: ignore[attr-defined]
        assert 0 < partial < 150
        assert code == (-signal.SIGKILL if sign == signal.SIGKILL else 130)
    assert subprocess.run(words, capture_output=True, env=environ, check=False).returncode == 0
    assert known(world) == before
