from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.index.sqlite import SqliteIndex
from kvstore.testing import CatalogueConformance, IndexConformance


class TestSqliteIndex(IndexConformance, CatalogueConformance):
    @pytest.fixture
    def index(self, tmp_path: Path) -> Iterator[SqliteIndex]:
        self.path = str(tmp_path / "made" / "index.sqlite")
        with SqliteIndex(self.path) as index:
            yield index

    def reopen(self) -> SqliteIndex:
        return SqliteIndex(self.path)


class TestSqliteIndexInMemory(IndexConformance, CatalogueConformance):
    @pytest.fixture
    def index(self, request) -> Iterator[SqliteIndex]:
        self.name = request.node.nodeid
        with SqliteIndex.in_memory(self.name) as index:
            yield index

    def reopen(self) -> SqliteIndex:
        return SqliteIndex.in_memory(self.name)
