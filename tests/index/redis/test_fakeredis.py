"""RedisIndex on fakeredis: the contract without a server, for the quick tier."""

from __future__ import annotations

from collections.abc import Iterator

import fakeredis
import pytest

from kvstore.index.redis.client import RedisClient
from kvstore.index.redis.index import RedisIndex
from kvstore.keys import NamespaceId
from schemas.settings import JournalSettings
from tests.index.contract.whole import FullIndexConformance
from tests.index.redis.fakes import fake_client


class TestFakeRedisIndex(FullIndexConformance):
    @pytest.fixture
    def index(self) -> Iterator[RedisIndex]:
        self.server = fakeredis.FakeServer()
        with self.reopen() as index:
            yield index

    def reopen(self) -> RedisIndex:
        return self.configured()

    def configured(
        self, *, journal: JournalSettings | None = None, cost_aware: bool = True, by: str = ""
    ) -> RedisIndex:
        client = RedisClient(fake_client(self.server), where="fake")
        return RedisIndex(client, journal=journal or JournalSettings(), cost_aware=cost_aware, by=by)

    def miscount(self, name: NamespaceId, nbytes: int) -> None:
        fake_client(self.server).hincrby(f"kvs:{{{name}}}:meta", "bytes", nbytes)
