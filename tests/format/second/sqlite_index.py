"""An index in SQLite: the keys of Redis, read from five tables."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path
from typing import Any

from tests.format.second.basics import need
from tests.format.second.redis_index import RedisStore


class SqliteKeys:
    """Reads keys of a file as a client of Redis reads its own."""

    def __init__(self, path: Path) -> None:
        self.db = sqlite3.connect(path, isolation_level=None, timeout=2)
        need(
            self._pragma("application_id") == 0x6B767369 and self._pragma("user_version") == 11,
            "not an index",
        )

    def _pragma(self, name: str) -> int:
        return int(self.db.execute(f"PRAGMA {name}").fetchone()[0])

    def _id(self, name: str, kind: bytes) -> int:
        """The number of a key; 0 for one that is absent."""
        row = self.db.execute(
            "SELECT id, kind, expires_ms FROM keys WHERE name = ?", (name.encode(),)
        ).fetchone()
        if row is None or (row[2] is not None and row[2] <= 1000 * time.time()):
            return 0
        need(row[1] == kind, "another kind of key")
        return int(row[0])

    def time(self) -> tuple[int, int]:
        now = time.time()
        return int(now), int(now % 1 * 1e6)

    def smembers(self, name: str) -> set[bytes]:
        rows = self.db.execute("SELECT field FROM fields WHERE key = ?", (self._id(name, b"set"),))
        return {field for (field,) in rows}

    def hgetall(self, name: str) -> dict[bytes, bytes]:
        return dict(
            self.db.execute("SELECT field, value FROM fields WHERE key = ?", (self._id(name, b"hash"),))
        )

    def hget(self, name: str, field: bytes | str) -> bytes | None:
        return self.hgetall(name).get(field.encode() if isinstance(field, str) else field)

    def zrange(self, name: str, first: int, last: int, *, withscores: bool) -> list[tuple[bytes, float]]:
        need((first, last, withscores) == (0, -1, True), "all of it, with scores")
        rows = self.db.execute("SELECT member, score FROM members WHERE key = ?", (self._id(name, b"zset"),))
        return sorted(rows, key=lambda row: (row[1], row[0]))

    def zrangebylex(self, name: str, first: bytes, last: bytes) -> list[bytes]:
        return [one for one, _ in self.zrange(name, 0, -1, withscores=True) if first[1:] <= one <= last[1:]]

    def xrange(self, name: str) -> list[tuple[bytes, dict[bytes, bytes]]]:
        rows = self.db.execute(
            "SELECT ms, number, fields FROM entries WHERE key = ? ORDER BY ms, number",
            (self._id(name, b"stream"),),
        )
        return [(b"%d-%d" % (ms, number), _pairs(packed)) for ms, number, packed in rows]

    def get(self, name: str) -> bytes:
        key = self._id(name, b"string")
        length = self.db.execute("SELECT length FROM keys WHERE id = ?", (key,)).fetchone()[0]
        text = bytearray(length)
        for number, value in self.db.execute("SELECT number, value FROM chunks WHERE key = ?", (key,)):
            text[1024 * number : 1024 * number + len(value)] = value
        return bytes(text)


def _pairs(packed: bytes) -> dict[bytes, bytes]:
    words: list[bytes] = []
    while packed:
        size = int.from_bytes(packed[:4], "big")
        words.append(packed[4 : 4 + size])
        packed = packed[4 + size :]
    return dict(zip(words[::2], words[1::2], strict=True))


class SqliteStore(RedisStore):
    """An index in a file, to be read."""

    client: Any

    def __init__(self, path: Path) -> None:
        super().__init__(SqliteKeys(path), Path())  # type: ignore[arg-type]
