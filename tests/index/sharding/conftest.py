"""Redis as the tests of resharding use it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import redis

from kvstore.index.redis.index import RedisIndex
from tests.index.sharding.moving import Stepped
from tests.servers.redis import PATIENT


@pytest.fixture
def raw(redis_url: str) -> Iterator[Any]:
    with redis.Redis.from_url(redis_url, protocol=2) as client:
        yield client


@pytest.fixture
def leaf(redis_url: str) -> Iterator[RedisIndex]:
    with RedisIndex.from_settings(redis_url, PATIENT) as leaf:
        yield leaf


@pytest.fixture
def stepped(redis_url: str) -> Iterator[Stepped]:
    stepped = Stepped(redis_url)
    yield stepped
    stepped.close()
