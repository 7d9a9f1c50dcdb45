from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvstore.index.redis import RedisIndex
from kvstore.testing import CatalogueConformance, IndexConformance
from schemas.settings import RedisSettings


class TestRedisIndex(IndexConformance, CatalogueConformance):
    @pytest.fixture
    def index(self, redis_url: str) -> Iterator[RedisIndex]:
        self.url = redis_url
        with self.reopen() as index:
            yield index

    def reopen(self) -> RedisIndex:
        return RedisIndex.from_settings(self.url, RedisSettings())
