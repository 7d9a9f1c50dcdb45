"""RedisIndex on fakeredis: what engines ask of an index, without a server, for the quick tier."""

from __future__ import annotations

from collections.abc import Iterator

import fakeredis
import pytest

from kvstore.index.redis.client import RedisClient
from kvstore.index.redis.index import RedisIndex
from tests.index.contract.admission import NoteConformance
from tests.index.contract.index import IndexConformance
from tests.index.redis.fakes import fake_client


class TestFakeRedisIndex(IndexConformance, NoteConformance):
    @pytest.fixture
    def index(self) -> Iterator[RedisIndex]:
        self.server = fakeredis.FakeServer()
        with self.reopen() as index:
            yield index

    def reopen(self) -> RedisIndex:
        return RedisIndex(RedisClient(fake_client(self.server), where="fake"))
