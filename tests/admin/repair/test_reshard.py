"""reshard: the verb, and stores that save, match and load all the while."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kvstore.admin.backends import Refused
from kvstore.admin.repair import reshard as verb
from kvstore.admin.repair.gc import gc
from kvstore.admin.repair.reshard import reshard
from kvstore.errors import NamespaceUnknown
from kvstore.index.redis.index import RedisIndex
from kvstore.index.sharding import layouts, resharding
from kvstore.index.sharding.index import ShardedIndex
from kvstore.index.sharding.layouts import lease_of
from kvstore.rules.lateness import SETTLED_S
from tests.admin.conftest import Admin
from tests.servers.redis import RedisServer
from tests.store.ground import BLOCKS, CHAINS, Ground, hashes, ids, later, loaded, open_space
from tests.store.world import content, match

pytestmark = pytest.mark.servers


@pytest.fixture
def ground(redis_url: str, tmp_path: Path) -> Ground:
    return Ground({"payloads": f"file://{tmp_path}/payloads", "index": redis_url})


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes believe a number for half a second."""
    monkeypatch.setattr(layouts, "LOOK_S", 0.5)
    monkeypatch.setattr(resharding, "LOOK_S", 0.5)
    monkeypatch.setattr(verb, "_late_s", lambda cache: 0.5)


def shards_of(ground: Ground) -> dict[str, int]:
    with ground.index() as index:
        return {one.namespace: one.shards for one in index.accounts()}


@pytest.mark.usefixtures("hasty")
def test_the_verb(ground: Ground, admin: Admin) -> None:
    ground.fill()
    name = ids()["one"]
    options = ["--index", ground.settings["index"], "--payloads", ground.settings["payloads"]]
    before = ground.look()
    plan = admin("reshard", name[:8], "--shards", "8", *options)
    assert plan.code == 0, plan.err
    assert "1 -> 8" in plan.out and "--apply does it" in plan.out + plan.err
    assert shards_of(ground) == {name: 1, ids()["two"]: 1}

    ran = admin("reshard", name, "--shards", "8", "--apply", "--json", *options)
    assert ran.code == 0, ran.err
    report = ran.json
    assert (report["before"], report["after"], report["applied"], report["ended"]) == (1, 8, True, "complete")
    assert (report["copied"], report["entries"], report["withdrawn"], report["rounds"]) == (8, 16, 0, 3)
    assert report["sealed_s"] > 0
    assert shards_of(ground) == {name: 8, ids()["two"]: 1}
    assert ground.look() == before
    done = admin("operations", "--json", *options).json["operations"]
    assert [(one["verb"], one["what"]) for one in done] == [("reshard", f"{name}: 1 -> 8 shards")]
    assert admin("reshard", name, "--shards", "0", *options).code == 2
    assert "no namespace starts with" in admin("reshard", "ffff", "--shards", "2", *options).err


def test_a_file_has_one_shard(tmp_path: Path) -> None:
    ground = Ground({"payloads": f"file://{tmp_path}/payloads"})
    ground.fill()
    with ground.cache() as cache, pytest.raises(Refused, match="Redis"):
        reshard(cache, ids()["one"], 8, apply=True)


def test_one_at_a_time(ground: Ground) -> None:
    ground.fill()
    name = ids()["one"]
    with ground.cache() as cache:
        index = cache.made_index()
        assert index.lease(f"reshard:{name}", "another", 60.0)
        report = reshard(cache, name, 8, apply=True)
        assert (report.ended, report.copied) == ("failed", 0)
        assert "another process is about it" in report.problem
        assert [one.to for one in cache.accounts(name)] == [0]
        index.release(f"reshard:{name}", "another")
        assert reshard(cache, name, 8, apply=True, wait=lambda seconds: None).ended == "complete"
        assert index.leaseholder(f"reshard:{name}") is None


def test_who_interrupts_it_goes_on_later(ground: Ground) -> None:
    ground.fill()
    name = ids()["one"]

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    with ground.cache() as cache:
        report = reshard(cache, name, 8, apply=True, wait=interrupted)
        assert (report.ended, report.problem) == ("cancelled", "cancelled; run it again to go on")
        assert [(one.shards, one.left) for one in cache.accounts(name)] == [(8, 1)]
        report = reshard(cache, name, 8, apply=True, wait=lambda seconds: None)
        assert (report.before, report.ended) == (1, "complete")
        assert [(one.shards, one.left) for one in cache.accounts(name)] == [(8, 0)]


def test_what_would_not_fit_does_not_begin(private_redis: RedisServer, tmp_path: Path) -> None:
    ground = Ground(
        {"payloads": f"file://{tmp_path}/payloads", "index": f"redis://127.0.0.1:{private_redis.port}/0"}
    )
    ground.fill()
    name = ids()["one"]
    with ground.cache() as cache:
        used, _ = cache.made_index().memory() or (0, 0)
        private_redis.command("CONFIG", "SET", "maxmemory", str(used))
        with pytest.raises(Refused, match="raise maxmemory first"):
            reshard(cache, name, 8, apply=True)
        assert [one.to for one in cache.accounts(name)] == [0]
        private_redis.command("CONFIG", "SET", "maxmemory", str(2 * used))
        assert reshard(cache, name, 8, apply=True, wait=lambda seconds: None).ended == "complete"


def test_a_store_asks_about_a_seal_once(ground: Ground) -> None:
    """Until a breaker's shortest backoff is over its saves are refused without a call."""
    ground.fill()
    name, calls = ids()["one"], 0
    with ground.cache() as cache, ground.store() as store:
        index = cache.made_index()
        assert isinstance(index, ShardedIndex) and isinstance(index.leaf, RedisIndex)
        leaf = index.leaf
        space = open_space(store, "one")
        assert leaf.reshard(name, "begin", run="r", before=1, after=8, told=1000)
        assert leaf.reshard(name, "seal", run="r")
        assert leaf.lease(lease_of(name), "holder", 60.0)

        def call() -> None:
            nonlocal calls
            calls += 1
            raise NamespaceUnknown("it is sealed")

        for _ in range(3):
            with pytest.raises(NamespaceUnknown, match="it is sealed"):
                space.registered(call)
            assert space._refused_until > 0
            space._refused_until = float("inf")
        assert calls == 2
        space._refused_until = 0.0
        assert space.registered(lambda: 1) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("hasty")
def test_stores_go_on(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a store of its own. What one has saved all find, and nothing that is loaded is wrong."""
    monkeypatch.setattr(verb, "LEASE_S", 5.0)
    ground.fill()
    name, over = ids()["one"], threading.Event()
    saved, wrong, misses = list[int](), list[Any](), 0

    def save() -> None:
        try:
            with ground.store() as store:
                space, number = open_space(store, "one"), 100
                while not over.is_set():
                    number += 1
                    # Nothing is while the namespace is sealed, and who writes is told.
                    with suppress(NamespaceUnknown):
                        ground.save(store, "one", number)
                    if match(space, hashes("one", number)).blocks == BLOCKS:
                        saved.append(number)
        except BaseException as exc:
            wrong.append(exc)
            raise

    def load() -> None:
        nonlocal misses
        try:
            with ground.store() as store:
                space = open_space(store, "one")
                while not over.is_set():
                    for which, number in [*CHAINS, *(("one", one) for one in saved[-3:])]:
                        if which != "one":
                            continue
                        blocks = hashes(which, number)
                        found = match(space, blocks)
                        misses += number < 100 and found.blocks < BLOCKS
                        got = loaded(space, blocks, found, 0)
                        if got != [content(one) for one in blocks[: found.blocks]]:
                            wrong.append((which, number))
        except BaseException as exc:
            wrong.append(exc)
            raise

    threads = [threading.Thread(target=work) for work in (save, load, load)]
    for thread in threads:
        thread.start()
    try:
        with ground.cache() as cache:
            for shards in (8, 3, 1):
                report = reshard(cache, name, shards, apply=True)
                assert report.ended == "complete", report.problem
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert (wrong, misses) == ([], 0)
    with ground.store() as store:
        space = open_space(store, "one")
        lost = [one for one in saved if match(space, hashes("one", one)).blocks != BLOCKS]
    assert lost == [] and len(saved) > 3
    # What was written, and then refused, nothing names.
    with ground.cache() as cache:
        gc(cache, delete=True, older_than_s=SETTLED_S, clock=later)
    assert ground.leaks() == []
