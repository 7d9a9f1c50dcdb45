"""Indexes in this process's memory, each empty."""

from __future__ import annotations

from itertools import count
from typing import Any

from kvstore.index.sqlite.index import SqliteIndex

_NUMBERS = count()


class Memory:
    """A place for one index, which any number of handles share."""

    def __init__(self) -> None:
        self.name = f"memory {next(_NUMBERS)}"

    def open(self, **options: Any) -> SqliteIndex:
        return SqliteIndex.in_memory(self.name, **options)
