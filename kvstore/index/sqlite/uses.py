"""The sketch of uses in SQLite: one row per line. The algorithm stands in kvstore.index.sketch."""

from __future__ import annotations

import sqlite3

from kvstore.index.sketch import LINE_BYTES, Marks, Window, note

_READ = "SELECT bits FROM uses WHERE namespace = ? AND parity = ? AND line = ? AND sketch = ?"
_LINES = "SELECT bits FROM uses WHERE namespace = ? AND parity = ? AND sketch = ?"


def look(db: sqlite3.Connection, key: int, marks: Marks, window: Window) -> tuple[int, dict[int, int]]:
    """Returns how many leading blocks were noted before, and the lines to write so that all blocks are."""
    before = 1 - window.parity
    return note(
        marks,
        window.lines,
        lambda line: _line(db, (key, window.parity, line, window.now)),
        lambda line: _line(db, (key, before, line, window.before)),
    )


def write(db: sqlite3.Connection, key: int, window: Window, lines: dict[int, int]) -> None:
    """Writes lines into this window's sketch, over the lines that an older window has left there."""
    db.executemany(
        "INSERT OR REPLACE INTO uses VALUES (?, ?, ?, ?, ?)",
        [
            (key, window.parity, line, window.now, bits.to_bytes(LINE_BYTES))
            for line, bits in sorted(lines.items())
        ],
    )


def bits(db: sqlite3.Connection, key: int, window: Window) -> int:
    """Returns how many bits are set in the fuller one of the two windows."""
    found = []
    for parity, sketch in ((window.parity, window.now), (1 - window.parity, window.before)):
        rows = db.execute(_LINES, (key, parity, sketch))
        found.append(sum(int.from_bytes(row[0]).bit_count() for row in rows))
    return max(found)


def _line(db: sqlite3.Connection, where: tuple[int, int, int, str]) -> int:
    row = db.execute(_READ, where).fetchone()
    return int.from_bytes(row[0]) if row else 0
