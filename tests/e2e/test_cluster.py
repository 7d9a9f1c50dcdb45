"""A Redis Cluster loses a master, a replica takes its place, slots move: engines give the same tokens, and
load what is in the other shards all the while."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from kvstore.build import load_settings, open_index
from kvstore.index.sharding.names import of_segment, shard_names, slot_of
from kvstore.keys import NamespaceId
from tests.e2e.engine import Engine
from tests.e2e.sharing import check_store, full_blocks, prompt
from tests.index.redis.cluster import RedisClusterServers
from tests.waiting import until

pytestmark = pytest.mark.engine

SHARDS = 8
PROMPTS = [prompt(160 + 32 * i, 500 + i) for i in range(12)]
FULL = [full_blocks(one) for one in PROMPTS]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[RedisClusterServers]:
    with RedisClusterServers(tmp_path / "cluster", replicas=True) as cluster:
        cluster.set("cluster-require-full-coverage", "no")
        yield cluster


@pytest.fixture
def config(cluster: RedisClusterServers, store_config: Any) -> dict[str, Any]:
    hosts = ",".join(f"127.0.0.1:{port}" for port in cluster.ports)
    return {
        **store_config("sqlite"),
        "index": f"redis://{hosts}/0",
        "redis": {"shards": SHARDS, "timeout_s": 20.0, "connect_timeout_s": 20.0},
        "breaker": {"failures": 2, "backoff_s": 0.1, "max_backoff_s": 0.2},
    }


def segments(config: dict[str, Any]) -> tuple[NamespaceId, set[bytes]]:
    """The one namespace, and what is in it."""
    with open_index(load_settings(config, environ={})) as index:
        [namespace] = index.namespaces()
        return namespace, {bytes(one.segment) for one in index.segments(namespace)}


def owner(cluster: RedisClusterServers, name: str) -> int:
    """The port of the master that has a hash tag's slot, as a node says that nobody kills."""
    with redis.RedisCluster.from_url(cluster.urls[-1], protocol=2) as client:
        return int(client.get_node_from_key(f"{{{name}}}").port)


def test_tokens_are_right_and_other_shards_are_loaded_from(
    text_model: Path, tmp_path: Path, cluster: RedisClusterServers, config: dict[str, Any]
) -> None:
    with Engine(text_model, log_path=tmp_path / "reference.log") as engine:
        expected = [result.token_ids for result in engine.generate(PROMPTS)]
    assert len({tuple(tokens) for tokens in expected}) == len(PROMPTS)

    with Engine(text_model, kv=config, log_path=tmp_path / "engine.log") as engine:

        def loaded() -> list[int]:
            """How many tokens of each prompt come from the store; all tokens are right in any case."""
            engine.reset_prefix_cache()
            answers = [engine.generate([one])[0] for one in PROMPTS]
            assert [answer.token_ids for answer in answers] == expected
            return [answer.external_tokens for answer in answers]

        # One after the other, so as to see which segments are whose, and so in which shard each prompt is.
        shards, seen = list[str](), set[bytes]()
        for one, tokens in zip(PROMPTS, expected, strict=True):
            [answer] = engine.generate([one])
            assert answer.token_ids == tokens
            engine.idle(0.1)
            namespace, now = segments(config)
            names = shard_names(namespace, SHARDS)
            [shard] = {of_segment(names, segment) for segment in now - seen}  # type: ignore[arg-type]
            shards.append(shard)
            seen = now
        until(lambda: loaded() == FULL)

        ports = {name: owner(cluster, name) for name in (*names, namespace)}
        down = next(port for name in shards if (port := ports[name]) != ports[namespace])
        replica = cluster.ports[cluster.ports.index(down) + 3]
        lost = [ports[shard] == down for shard in shards]
        assert 0 < sum(lost) < len(lost)
        with redis.Redis(port=down, protocol=2) as client:
            assert client.wait(1, 0) == 1

        cluster.kill(down)

        def missed() -> bool:
            """The others are loaded all the while, and of the lost ones nothing."""
            return loaded() == [0 if gone else full for gone, full in zip(lost, FULL, strict=True)]

        assert missed() and missed() and missed()
        cluster.take_over(replica)
        until(lambda: loaded() == FULL)

        # What the lost master had goes on to another, key by key, while the engine asks.
        moving = [name for name in names if ports[name] == down]
        target, failed = ports[namespace], list[BaseException]()

        def move() -> None:
            try:
                for name in moving:
                    cluster.move(slot_of(name), replica, target)
            except BaseException as exc:
                failed.append(exc)

        mover = threading.Thread(target=move)
        mover.start()
        try:
            while True:
                over = not mover.is_alive()
                found = loaded()
                assert [n for n, gone in zip(found, lost, strict=True) if not gone] == [
                    full for full, gone in zip(FULL, lost, strict=True) if not gone
                ]
                if over:
                    break
        finally:
            mover.join()
        assert failed == []
        assert {owner(cluster, name) for name in moving} == {target}
        until(lambda: loaded() == FULL)
        engine.idle(0.1)
    assert check_store(config)["blocks"] >= sum(FULL) // 32
