"""evict --all and drop: a namespace goes as a whole, and another one loses nothing."""

from __future__ import annotations

import os
import time
from contextlib import closing

import pytest

from kvstore.admin.remove.drop import drop
from kvstore.admin.remove.evict import evict_all
from kvstore.admin.remove.reports import DropReport, EvictReport
from kvstore.admin.repair.fsck import fsck
from kvstore.build import open_store
from kvstore.cli import exits
from kvstore.conformance.faulty import FaultyPayloads, Plan, Rule
from kvstore.errors import PermissionDenied
from kvstore.keys import digest, namespace_id
from tests.admin.conftest import Admin
from tests.admin.repair.damage import KV, TWO_RANKS, World, chain, content


@pytest.fixture
def world(empty_world: World) -> World:
    """A namespace of two segments, and one of two ranks."""
    keys = chain("a", 6)
    empty_world.write(KV, keys[:4], 0)
    empty_world.write(KV, keys[4:], 4)
    empty_world.write(TWO_RANKS, chain("b", 3), 0)
    empty_world.chains = [(KV, keys), (TWO_RANKS, chain("b", 3))]
    return empty_world


def payloads(world: World, namespace: str) -> int:
    with world.cache() as cache:
        return len(list(cache.payloads.list(f"{namespace}/")))


def others_are_well(world: World) -> None:
    two = world.written[2]
    assert world.whole(two)
    with world.cache() as cache:
        assert cache.index is not None
        listing = cache.index.get(two.name, [two.segment])[0]
        assert listing is not None and listing.record == two.record
        assert fsck(cache).found == 0


def blocks_matched(world: World) -> int:
    with closing(open_store(world.settings)) as store:
        space = store.open(KV, block_bytes=256)
        return space.match(b"".join(digest(key) for key in world.chains[0][1])).blocks


def test_evict_all(admin: Admin, world: World) -> None:
    name = namespace_id(KV)
    with world.cache() as cache:
        assert cache.index is not None
        cache.index.pin(name, [world.written[0].segment], most_bytes=1 << 30)
    ran = admin("evict", name[:6], "--all", "--json", *world.options)
    assert ran.code == 0, ran.err
    plan = EvictReport.model_validate_json(ran.out)
    assert (plan.applied, plan.planned.segments, plan.planned.blocks) == (False, 2, 6)
    assert "--apply does it" in ran.err
    assert blocks_matched(world) == 6
    ran = admin("evict", name, "--all", "--apply", *world.options)
    assert ran.code == 0 and "2 segments, 6 blocks" in ran.out
    assert blocks_matched(world) == 0
    assert payloads(world, name) == 2, "deleted after the grace time"
    others_are_well(world)
    # Engines go on: what they save is seen.
    world.write(KV, world.chains[0][1][:4], 0)
    assert blocks_matched(world) == 4
    for words in (["--all"], [name, "--all", "--pinned"], [name, "ab", "--all"]):
        assert admin("evict", *words, "--apply", *world.options).code == 2
    assert blocks_matched(world) == 4


def test_drop_with_a_grace_time(admin: Admin, world: World) -> None:
    name = namespace_id(KV)
    ran = admin("drop", name, "--json", *world.options)
    plan = DropReport.model_validate_json(ran.out)
    assert (plan.state, plan.applied, plan.visible.segments) == ("kept", False, 2)
    assert plan.seen_s is not None and abs(plan.seen_s - time.time()) < 600
    assert blocks_matched(world) == 6
    ran = admin("drop", name, "--apply", *world.options)
    assert ran.code == 0, ran.err
    assert "payloads go after the grace time, the empty namespace when drop is run again then" in ran.out
    assert blocks_matched(world) == 0
    assert payloads(world, name) == 2
    with world.cache() as cache:
        # Whatever the clock of this machine says: the grace time is the index's.
        assert drop(cache, name, apply=True, clock=lambda: time.time() + 3600).state == "waiting"
        assert payloads(world, name) == 2
        world.raw.expire(name)
        done = drop(cache, name, apply=True)
        assert (done.state, done.deleted_payloads) == ("erased", 2)
        assert cache.index is not None
        assert list(cache.namespaces()) == [namespace_id(TWO_RANKS)]
    assert payloads(world, name) == 0
    others_are_well(world)
    ran = admin("drop", name, *world.options)
    assert ran.code == 1 and "no namespace" in ran.err


def test_drop_at_once(admin: Admin, world: World) -> None:
    name = namespace_id(KV)
    unknown = world.write(KV, chain("died before its commit", 2), 0, listed=False)
    [path] = (world.objects.folder / one for one in unknown.names)  # type: ignore[attr-defined]
    os.utime(path, (1e9, 1e9))
    saving = world.write(KV, chain("is about to be committed", 2), 0, listed=False)
    with world.cache() as cache:
        assert cache.index is not None
        # Evicted before: its grace time is not waited for either.
        first = world.written[0]
        cache.index.evict(name, [first.segment], delete_after_s=time.time() + 3600, rule="admin")
    world.objects.put(f"{name}/notes.txt", b"precious")
    ran = admin("drop", name, "--now", "--apply", "--json", *world.options)
    assert ran.code == 0, ran.err
    report = DropReport.model_validate_json(ran.out)
    assert (report.state, report.deleted_payloads) == ("erased", 3)
    assert payloads(world, name) == 1 and world.objects.get(unknown.names[0]) is None
    assert world.objects.get(saving.names[0]) is not None
    assert world.objects.get(f"{name}/notes.txt") == b"precious"
    others_are_well(world)


def test_an_engine_that_still_saves(world: World) -> None:
    name = namespace_id(KV)

    class Saving(FaultyPayloads):
        """An engine that saves as soon as something is deleted."""

        def delete(self, names):  # type: ignore[no-untyped-def]
            done = super().delete(names)
            if not saved:
                saved.append(world.write(KV, chain("new", 2), 0))
            return done

    saved: list[object] = []
    with world.cache() as cache:
        cache.__dict__["payloads"] = Saving(cache.payloads, Plan())
        report = drop(cache, name, apply=True, now=True)
    assert report.state == "in_use"
    assert exits.of_report(report) == exits.ExitCode.PARTIAL
    assert world.whole(world.written[-1]), "what it saved is its"
    assert content(KV, world.written[-1].keys[0], 0) in world.written[-1].payloads[0]
    others_are_well(world)
    with world.cache() as cache:
        assert drop(cache, name, apply=True, now=True).state == "erased"


def test_payloads_that_cannot_be_deleted(world: World) -> None:
    name = namespace_id(KV)
    with world.cache() as cache:
        inner = cache.payloads
        cache.__dict__["payloads"] = FaultyPayloads(inner, Plan(Rule("permission", verbs=("delete",))))
        with pytest.raises(PermissionDenied):
            drop(cache, name, apply=True, now=True)
        assert cache.index is not None and name in cache.index.namespaces()
        cache.__dict__["payloads"] = inner
        assert drop(cache, name, apply=True, now=True).state == "erased"
    assert payloads(world, name) == 0


def test_invalidating_twice(world: World) -> None:
    with world.cache() as cache:
        assert evict_all(cache, namespace_id(KV), applied=True, now_s=time.time()).planned.segments == 2
        assert evict_all(cache, namespace_id(KV), applied=True, now_s=time.time()).planned.segments == 0
