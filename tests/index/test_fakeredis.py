"""RedisIndex on fakeredis: the contract without a server, for the quick tier."""

from __future__ import annotations

from collections.abc import Iterator

import fakeredis
import pytest

from kvstore.index.redis import RedisIndex
from kvstore.index.redis_client import RedisClient
from kvstore.keys import NamespaceId
from kvstore.testing import IndexConformance, MaintenanceConformance
from schemas.settings import JournalSettings
from tests.index.fakes import fake_client


class TestFakeRedisIndex(IndexConformance, MaintenanceConformance):
    @pytest.fixture
    def index(self) -> Iterator[RedisIndex]:
        self.server = fakeredis.FakeServer()
        with self.reopen() as index:
            yield index

    def reopen(self) -> RedisIndex:
        return self.configured()

    def configured(self, *, journal: JournalSettings | None = None, cost_aware: bool = True) -> RedisIndex:
        client = RedisClient(fake_client(self.server), where="fake")
        return RedisIndex(client, journal=journal or JournalSettings(), cost_aware=cost_aware)

    def miscount(self, name: NamespaceId, nbytes: int) -> None:
        fake_client(self.server).hincrby(f"kvs:{{{name}}}:meta", "bytes", nbytes)
