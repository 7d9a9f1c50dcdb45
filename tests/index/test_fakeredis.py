"""RedisIndex on fakeredis: the contract without a server, for the quick tier."""

from __future__ import annotations

from collections.abc import Iterator

import fakeredis
import pytest

from kvstore.index.redis import RedisIndex
from kvstore.index.redis_client import RedisClient
from kvstore.testing import CatalogueConformance, IndexConformance
from tests.index.fakes import fake_client


class TestFakeRedisIndex(IndexConformance, CatalogueConformance):
    @pytest.fixture
    def index(self) -> Iterator[RedisIndex]:
        self.server = fakeredis.FakeServer()
        with self.reopen() as index:
            yield index

    def reopen(self) -> RedisIndex:
        return RedisIndex(RedisClient(fake_client(self.server), where="fake"))
