"""Stores over a namespace in shards, while a Cluster of six nodes loses a master and moves slots."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from kvstore.errors import KVStoreError
from kvstore.index.sharding.names import of_chain, shard_names, slot_of
from kvstore.keys import digests
from kvstore.store.space import Space
from tests.index.redis.cluster import RedisClusterServers
from tests.store.ground import Ground, hashes, ids, loaded, open_space
from tests.store.world import content, match
from tests.waiting import until

pytestmark = [pytest.mark.servers, pytest.mark.slow]

SHARDS = 8
CHAINS = range(48)
BLOCKS = 4


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[RedisClusterServers]:
    with RedisClusterServers(tmp_path / "cluster", replicas=True) as cluster:
        cluster.set("cluster-require-full-coverage", "no")
        yield cluster


@pytest.fixture
def ground(cluster: RedisClusterServers, tmp_path: Path) -> Ground:
    hosts = ",".join(f"127.0.0.1:{port}" for port in cluster.ports)
    return Ground(
        {
            "payloads": f"file://{tmp_path}/payloads",
            "index": f"redis://{hosts}/0",
            "redis": {"shards": SHARDS, "timeout_s": 20.0, "connect_timeout_s": 20.0},
            "breaker": {"failures": 2, "backoff_s": 0.1, "max_backoff_s": 0.2},
        }
    )


def served(space: Space, number: int) -> int:
    """How many blocks of a chain are matched, and loaded, and right."""
    blocks = hashes("one", number)
    found = match(space, blocks)
    try:
        got = loaded(space, blocks, found, 0)
    except KVStoreError:
        return 0  # a miss, as the connectors take it
    assert got == [content(one) for one in blocks[: found.blocks]], number
    return found.blocks


def shard_of(number: int) -> str:
    names = shard_names(ids()["one"], SHARDS)
    return of_chain(names, digests(hashes("one", number)))


def owner(cluster: RedisClusterServers, name: str) -> int:
    """The port of the master that has a hash tag's slot, as a node says that nobody kills."""
    with redis.RedisCluster.from_url(cluster.urls[-1], protocol=2) as client:
        return int(client.get_node_from_key(f"{{{name}}}").port)


def test_a_master_lost_failed_over_and_its_slots_moved(cluster: RedisClusterServers, ground: Ground) -> None:
    with ground.store() as store:
        for number in CHAINS:
            ground.save(store, "one", number)
        space = open_space(store, "one")
        space.register()
        assert [served(space, number) for number in CHAINS] == [BLOCKS] * len(CHAINS)
        names = shard_names(ids()["one"], SHARDS)
        ports = {name: owner(cluster, name) for name in (*names, ids()["one"])}
        assert len(set(ports.values())) == 3
        down = next(port for port in cluster.ports[:3] if port != ports[ids()["one"]])
        lost = [number for number in CHAINS if ports[shard_of(number)] == down]
        left = [number for number in CHAINS if number not in lost]
        assert lost and left
        replica = cluster.ports[cluster.ports.index(down) + 3]
        with redis.Redis(port=down, protocol=2) as client:
            assert client.wait(1, 0) == 1

        cluster.kill(down)

        def missed() -> bool:
            """Each of the others serves all the while; what is lost is a miss."""
            assert [served(space, number) for number in left] == [BLOCKS] * len(left)
            return {served(space, number) for number in lost} == {0}

        assert missed() and missed() and missed()
        cluster.take_over(replica)
        until(lambda: all(served(space, number) == BLOCKS for number in CHAINS))

        # The shards of one master go to another, key by key, while two engines ask.
        source, target = replica, ports[ids()["one"]]
        moved = [name for name in names if ports[name] == down]
        others = [number for number in CHAINS if shard_of(number) not in moved]
        wrong, asked, over = list[Any](), [0, 0], threading.Event()

        def ask(which: int) -> None:
            try:
                with ground.store() as mine:
                    own = open_space(mine, "one")
                    while not over.is_set():
                        for number in CHAINS:
                            found = served(own, number)
                            if number in others and found != BLOCKS:
                                wrong.append((number, found))
                        asked[which] += 1
            except BaseException as exc:
                wrong.append(exc)
                raise

        threads = [threading.Thread(target=ask, args=(which,)) for which in range(2)]
        for thread in threads:
            thread.start()
        try:
            until(lambda: all(asked) or wrong)
            for name in moved:
                cluster.move(slot_of(name), source, target)
                before = list(asked)
                until(lambda: all(a > b for a, b in zip(asked, before, strict=True)) or wrong)
        finally:
            over.set()
            for thread in threads:
                thread.join()
        assert wrong == []
        assert {owner(cluster, name) for name in moved} == {target}
        until(lambda: all(served(space, number) == BLOCKS for number in CHAINS))
        for number in range(60, 70):
            ground.save(store, "one", number)
            assert served(space, number) == BLOCKS
    assert ground.look()["wrong"] == 0
