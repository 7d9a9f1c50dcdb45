"""Places for indexes to live in."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.index.redis.cluster import RedisClusterServers

_SHM = Path("/dev/shm")


@pytest.fixture
def fast_path() -> Iterator[Path]:
    """An empty folder, in memory where that can be had: a new SQLite file costs several fsyncs."""
    folder = tempfile.mkdtemp(prefix="kvstore-test-", dir=_SHM if _SHM.is_dir() else None)
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder)


@pytest.fixture(scope="session")
def _session_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisClusterServers]:
    with RedisClusterServers(tmp_path_factory.mktemp("cluster")) as servers:
        yield servers


@pytest.fixture
def redis_cluster(_session_cluster: RedisClusterServers) -> RedisClusterServers:
    """Three masters that share all slots, empty."""
    _session_cluster.flush()
    return _session_cluster
