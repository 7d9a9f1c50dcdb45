"""Where the replicas of a master are, by what a client knows of a Cluster and by what the master names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import redis
from redis.cluster import RedisCluster

from kvstore.index.numbers import whole

Address = tuple[str, int]
#: Most replicas of one master that are read.
MOST_REPLICAS: Final = 8
#: What taking apart an answer raises that no server of Redis gives.
GARBLED: Final = (LookupError, ValueError, TypeError, AttributeError)


def masters_of(client: redis.Redis | RedisCluster) -> list[list[Address]]:
    """Returns each master of a Cluster and its replicas, as `nodes_of` does."""
    if not isinstance(client, RedisCluster):
        return [[]]
    slots = client.nodes_manager.slots_cache.values()
    return list({nodes[0].name: [(one.host, one.port) for one in nodes] for nodes in slots if nodes}.values())


def nodes_of(client: redis.Redis | RedisCluster, key: str) -> list[Address] | None:
    """Returns a Cluster's master that has a key, and its replicas as far as the client knows; nothing without
    a Cluster, and None if nobody has the key."""
    if not isinstance(client, RedisCluster):
        return []
    nodes = client.nodes_manager.slots_cache.get(client.keyslot(key))  # type: ignore[no-untyped-call]
    return [(node.host, node.port) for node in nodes] if nodes else None


def client_of(client: redis.Redis | RedisCluster, nodes: Sequence[Address]) -> Any:
    if not isinstance(client, RedisCluster):
        return client
    node = client.get_node(*nodes[0])  # type: ignore[no-untyped-call]
    return client.get_redis_connection(node)


def listed(told: dict[str, Any]) -> list[Address]:
    """Returns the replicas that a master names. Raises one of GARBLED."""
    count = min(whole(told["connected_slaves"]), MOST_REPLICAS)
    lines = [told[f"slave{number}"] for number in range(count)]
    return [(str(line["ip"]), _port(line["port"])) for line in lines if line["state"] == "online"]


def listed_by_cluster(client: Any, master: Address) -> list[Address]:
    """Returns the replicas that a Cluster's master names as its own. Raises one of FAILURES or GARBLED."""
    # In two words: redis-py takes the answer to "CLUSTER SLOTS" apart.
    for _, _, *nodes in client.execute_command("CLUSTER", "SLOTS"):
        # A node that doesn't know its own name is where it was asked.
        first, *others = [((one[0] or b"").decode("ascii") or master[0], _port(one[1])) for one in nodes]
        if first == master:
            return others
    return []


def _port(told: Any) -> int:
    return whole(told, least=1, most=65_535)
