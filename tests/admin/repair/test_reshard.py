"""rebuild --shards: the verb, and stores that save, match and load all the while."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from kvstore.admin.backends import Refused
from kvstore.admin.repair import reshard as verb
from kvstore.admin.repair.check import Depth
from kvstore.admin.repair.fsck import fsck
from kvstore.admin.repair.reports import ReshardReport
from kvstore.admin.repair.reshard import reshard
from kvstore.index.sharding import layouts, resharding
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
    plan = admin("rebuild", name[:8], "--shards", "8", *options)
    assert plan.code == 0, plan.err
    assert "1 -> 8" in plan.out and "--apply does it" in plan.out + plan.err
    assert shards_of(ground) == {name: 1, ids()["two"]: 1}

    ran = admin("rebuild", name, "--shards", "8", "--apply", "--json", *options)
    assert ran.code == 0, ran.err
    report = ran.json
    assert (report["before"], report["after"], report["applied"], report["ended"]) == (1, 8, True, "complete")
    assert (report["copied"], report["entries"], report["withdrawn"], report["rounds"]) == (8, 16, 0, 2)
    assert shards_of(ground) == {name: 8, ids()["two"]: 1}
    assert ground.look() == before
    done = admin("events", "--operators", "--json", *options).json["operations"]
    assert [(one["verb"], one["what"]) for one in done] == [("rebuild", f"{name}: 1 -> 8 shards")]
    assert admin("rebuild", name, "--shards", "0", *options).code == 2
    assert "no namespace starts with" in admin("rebuild", "ffff", "--shards", "2", *options).err


def test_a_file_has_one_shard(tmp_path: Path) -> None:
    ground = Ground({"payloads": f"file://{tmp_path}/payloads"})
    ground.fill()
    with ground.cache() as cache, pytest.raises(Refused, match="Redis"):
        reshard(cache, ids()["one"], 8, apply=True)


def test_of_two_the_later_one_goes_on(ground: Ground) -> None:
    ground.fill()
    name, second = ids()["one"], list[ReshardReport]()
    with ground.cache() as cache:

        def wait(seconds: float) -> None:
            if not second:
                second.append(reshard(cache, name, 4, apply=True, wait=lambda seconds: None))

        report = reshard(cache, name, 8, apply=True, wait=wait)
        assert (report.ended, report.copied) == ("failed", 0)
        assert "another process brings it into other shards" in report.problem
        assert second[0].ended == "complete"
        assert [(one.shards, one.to, one.left) for one in cache.accounts(name)] == [(4, "", "")]


def test_who_interrupts_it_goes_on_later(ground: Ground) -> None:
    ground.fill()
    name = ids()["one"]

    waits = 0

    def interrupted(seconds: float) -> None:
        nonlocal waits
        waits += 1
        if waits != 2:
            raise KeyboardInterrupt

    with ground.cache() as cache:
        report = reshard(cache, name, 8, apply=True, wait=interrupted)
        assert (report.ended, report.problem) == ("cancelled", "cancelled; run it again to go on")
        assert [(one.shards, one.to) for one in cache.accounts(name)] == [(1, "")]
        report = reshard(cache, name, 8, apply=True, wait=interrupted)
        assert report.ended == "cancelled"
        assert [(one.shards, one.left) for one in cache.accounts(name)] == [(8, "1")]
        report = reshard(cache, name, 8, apply=True, wait=lambda seconds: None)
        assert (report.before, report.ended) == (1, "complete")
        assert [(one.shards, one.left) for one in cache.accounts(name)] == [(8, "")]


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
        assert [one.to for one in cache.accounts(name)] == [""]
        private_redis.command("CONFIG", "SET", "maxmemory", str(2 * used))
        assert reshard(cache, name, 8, apply=True, wait=lambda seconds: None).ended == "complete"


@pytest.mark.slow
@pytest.mark.usefixtures("hasty")
def test_stores_go_on(ground: Ground) -> None:
    """Each has a store of its own. What there was all find, and nothing that is loaded is wrong."""
    ground.fill()
    name, over = ids()["one"], threading.Event()
    saved, wrong, misses = list[int](), list[Any](), 0

    def save() -> None:
        try:
            with ground.store() as store:
                space, number = open_space(store, "one"), 100
                while not over.is_set():
                    number += 1
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
    # What was saved while it turned is a miss.
    assert len(lost) < len(saved) and len(saved) > 3
    with ground.cache() as cache:
        fsck(cache, depth=Depth(only_list=True), apply=True, older_than_s=SETTLED_S, clock=later)
    assert ground.leaks() == []
