"""Reads from replicas that are in step with their master, so that tests are answered what they expect."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import redis
from redis.cluster import RedisCluster

from kvstore.index.redis import client as redis_client
from kvstore.index.redis.replication.nodes import nodes_of
from kvstore.index.redis.replication.replicas import Replica, Replicas
from tests.waiting import PATIENCE_S, until


class InStep(Replicas):
    """Every read asks a replica, which then has all that its master has."""

    def of(self, client: redis.Redis | RedisCluster, key: str) -> Replica | None:
        nodes = nodes_of(client, key) or []
        master = self._master(nodes[0] if nodes else ("", 0))
        master.look_s = float("inf")

        def looked() -> bool:
            for asked in self.look(master, client, nodes):
                asked.result(PATIENCE_S)
            return bool(master.written) and any(
                one.as_of_s == master.written[-1][0] for one in master.readable
            )

        until(looked, say=lambda: master.excluded)
        found = super().of(client, key)
        assert found is not None
        return found


@contextmanager
def in_step(patch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Has clients that are made here read from replicas in step alone. Yields what they count, and sees at
    the end that no read failed."""
    counts: Counter[str] = Counter()
    opened = redis_client.RedisClient.from_settings

    def counting(url: str, settings: Any, **more: Any) -> redis_client.RedisClient:
        settings = settings.model_copy(update={"read_from": "replicas", "max_lag_s": PATIENCE_S})
        return opened(url, settings, **{**more, "count": lambda name: counts.update([name])})

    patch.setattr(redis_client, "Replicas", InStep)
    patch.setattr(redis_client.RedisClient, "from_settings", counting)
    yield counts
    assert set(counts) <= {"replica_reads"}
