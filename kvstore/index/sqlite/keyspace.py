"""Keyspace: those commands of Redis that the index uses, on the tables of kvstore.index.sqlite.file.

A command answers as Redis does under RESP2: bytes, whole numbers, lists, and None where there is nothing. It
takes bytes and numbers. What Redis answers with an error raises `CommandRefused` with the same text.

One Keyspace belongs to one connection. Every transaction begins with `begin`: all of its commands see one
moment's clock, as those of a script do in Redis.
"""

from __future__ import annotations

import math
import re
import secrets
import struct
from collections.abc import Callable, Sequence
from sqlite3 import Connection
from typing import Any, Final, NamedTuple

Word = bytes | int | float

#: Bytes of a string in one row: a mark in a sketch rewrites one of them.
CHUNK_BYTES: Final = 1024
#: Expired keys that go when one that expires is made.
_EXPIRED_AT_ONCE: Final = 16
#: Rows of a key that go at once: a call must not hold the file for as long as a large sketch takes.
_REMOVED_AT_ONCE: Final = 256
#: A cursor of HSCAN inside a script tells this many bytes of the next field: scripts take one of 19 digits.
_CURSOR_BYTES: Final = 7
#: A stream is trimmed by so many entries at once, as Redis does that is told "about" how many to keep.
_TRIMMED_AT_ONCE: Final = 100
#: HRANDFIELD draws one field of so many that follow a random place.
_DRAWN_FROM: Final = 512
_INT64: Final = 1 << 63

_TABLES: Final = {
    b"hash": ("fields", "field"),
    b"set": ("fields", "field"),
    b"zset": ("members", "member"),
    b"string": ("chunks", "number"),
    b"stream": ("entries", "ms, number"),
}
_WRONG_TYPE: Final = "WRONGTYPE Operation against a key holding the wrong kind of value"
_NO_FLOAT: Final = "ERR value is not a valid float"


#: A byte of a pattern that stands for itself.
_ESCAPED = re.compile(rb"\\(.)", re.DOTALL)


class CommandRefused(Exception):
    """A command can't do what it was asked for; the text is the one that Redis answers."""


class _Key(NamedTuple):
    id: int
    kind: bytes
    expires_ms: int | None


class _Extent(NamedTuple):
    """What `keys` has of strings and streams alone."""

    #: Bytes of a string, entries of a stream.
    length: int
    #: The last id that a stream has given.
    last_ms: int
    last_number: int


#: How many items one query names: few sizes, so that few queries are compiled.
_AT_ONCE: Final = (4, 16, 64, 256)


class Keyspace:
    """The commands, by their names in lower case."""

    def __init__(self, db: Connection, clock: Callable[[], float]) -> None:
        """`clock` tells unix seconds."""
        self._db = db
        self._clock = clock
        self._now_ms = 0
        self._now_us = 0
        #: What this transaction knows of keys, and of their extents by id.
        self._known: dict[bytes, _Key | None] = {}
        self._extents: dict[int, _Extent] = {}

    def begin(self) -> None:
        """Starts a transaction: forgets what the last one knew, and looks at the clock."""
        self._known.clear()
        self._extents.clear()
        # Rounded up: a time that the index tells is never before one that its caller has just read.
        self._now_us = math.ceil(self._clock() * 1_000_000)
        self._now_ms = self._now_us // 1000

    # Keys

    def _find(self, name: Word, kind: bytes = b"") -> _Key | None:
        """Returns what is known of a key, None if there is none. Raises CommandRefused for another kind."""
        name = _text(name)
        try:
            key = self._known[name]
        except KeyError:
            query = "SELECT id, kind, expires_ms FROM keys WHERE name = ?"
            row = self._db.execute(query, (name,)).fetchone()
            live = row is not None and (row[2] is None or row[2] > self._now_ms)
            self._known[name] = key = _Key(*row) if live else None
        if key is not None and kind and key.kind != kind:
            raise CommandRefused(_WRONG_TYPE)
        return key

    def _extent(self, key: _Key) -> _Extent:
        if key.id not in self._extents:
            query = "SELECT length, last_ms, last_number FROM keys WHERE id = ?"
            self._extents[key.id] = _Extent(*self._db.execute(query, (key.id,)).fetchone())
        return self._extents[key.id]

    def _extend(self, key: _Key, extent: _Extent) -> None:
        query = "UPDATE keys SET length = ?, last_ms = ?, last_number = ? WHERE id = ?"
        self._db.execute(query, (*extent, key.id))
        self._extents[key.id] = extent

    def _make(self, name: Word, kind: bytes) -> _Key:
        """Returns the key, which is made if there is none."""
        key = self._find(name, kind)
        if key is None:
            name = _text(name)
            # One that has expired may be there still.
            self._remove(name)
            made = self._db.execute("INSERT INTO keys (name, kind) VALUES (?, ?)", (name, kind))
            self._known[name] = key = _Key(made.lastrowid or 0, kind, None)
        return key

    def _remove(self, name: bytes) -> None:
        row = self._db.execute("SELECT id, kind FROM keys WHERE name = ?", (name,)).fetchone()
        if row is not None:
            self._remove_row(*row)
        self._known[name] = None

    def _remove_row(self, key: int, kind: bytes) -> None:
        """Removes a key with what it holds. The rest of a large one goes bit by bit, out of reach."""
        self._extents.pop(key, None)
        if kind in _TABLES:
            table, columns = _TABLES[kind]
            some = f"SELECT {columns} FROM {table} WHERE key = ? LIMIT {_REMOVED_AT_ONCE}"
            query = f"DELETE FROM {table} WHERE key = ? AND ({columns}) IN ({some})"
            if self._db.execute(query, (key, key)).rowcount == _REMOVED_AT_ONCE:
                name = b"\0%d" % key
                self._db.execute("UPDATE keys SET name = ?, expires_ms = 0 WHERE id = ?", (name, key))
                return
        self._db.execute("DELETE FROM keys WHERE id = ?", (key,))

    def _remove_expired(self) -> None:
        """Removes some of what is out of reach."""
        query = "SELECT id, kind FROM keys WHERE expires_ms <= ? LIMIT ?"
        before = self._db.total_changes
        for row in self._db.execute(query, (self._now_ms, _EXPIRED_AT_ONCE)).fetchall():
            self._remove_row(*row)
            if self._db.total_changes - before >= _REMOVED_AT_ONCE:
                break

    def _emptied(self, name: Word, key: _Key) -> None:
        """Removes the key if nothing is left under it, as Redis does."""
        if not self._db.execute(
            f"SELECT 1 FROM {_TABLES[key.kind][0]} WHERE key = ? LIMIT 1", (key.id,)
        ).fetchone():
            self._db.execute("DELETE FROM keys WHERE id = ?", (key.id,))
            self._known[_text(name)] = None

    def _count(self, key: _Key | None) -> int:
        if key is None:
            return 0
        query = f"SELECT count(*) FROM {_TABLES[key.kind][0]} WHERE key = ?"
        return int(self._db.execute(query, (key.id,)).fetchone()[0])

    def time(self) -> list[bytes]:
        return [b"%d" % (self._now_us // 1_000_000), b"%d" % (self._now_us % 1_000_000)]

    def exists(self, *names: Word) -> int:
        return sum(self._find(name) is not None for name in names)

    def type(self, name: Word) -> bytes:
        key = self._find(name)
        return b"none" if key is None else key.kind

    def unlink(self, *names: Word) -> int:
        gone = 0
        for name in names:
            if self._find(name) is not None:
                self._remove(_text(name))
                gone += 1
        return gone

    def rename(self, name: Word, other: Word) -> None:
        key = self._find(name)
        if key is None:
            raise CommandRefused("ERR no such key")
        self._remove(_text(other))
        self._db.execute("UPDATE keys SET name = ? WHERE id = ?", (_text(other), key.id))
        self._known[_text(name)], self._known[_text(other)] = None, key

    def expire(self, name: Word, seconds: Word) -> int:
        return self._expire(name, _whole(seconds) * 1000)

    def _expire(self, name: Word, in_ms: int) -> int:
        key = self._find(name)
        if key is None:
            return 0
        self._remove_expired()
        at = self._now_ms + in_ms
        self._db.execute("UPDATE keys SET expires_ms = ? WHERE id = ?", (at, key.id))
        self._known[_text(name)] = key._replace(expires_ms=at)
        return 1

    def pttl(self, name: Word) -> int:
        key = self._find(name)
        if key is None:
            return -2
        return -1 if key.expires_ms is None else key.expires_ms - self._now_ms

    # Strings

    def get(self, name: Word) -> bytes | None:
        key = self._find(name, b"string")
        return None if key is None else self.getrange(name, 0, self._extent(key).length - 1)

    def set(self, name: Word, value: Word, px: Word = b"", in_ms: Word = 0) -> bytes:
        self._remove(_text(name))
        self._make(name, b"string")
        self.setrange(name, 0, value)
        if px:
            self._expire(name, _whole(in_ms))
        return b"OK"

    def getrange(self, name: Word, first: Word, last: Word) -> bytes:
        key = self._find(name, b"string")
        start, end = _whole(first), _whole(last) + 1
        if key is None:
            return b""
        start, end = max(0, start), min(end, self._extent(key).length)
        if start >= end:
            return b""
        number, inside = divmod(start, CHUNK_BYTES)
        if inside + end - start <= CHUNK_BYTES:
            return self._chunk(key, number)[inside : inside + end - start].ljust(end - start, b"\0")
        begin = start - start % CHUNK_BYTES
        whole = bytearray(end - begin)
        chunks = self._db.execute(
            "SELECT number, value FROM chunks WHERE key = ? AND number BETWEEN ? AND ?",
            (key.id, start // CHUNK_BYTES, (end - 1) // CHUNK_BYTES),
        )
        for number, value in chunks:
            at = number * CHUNK_BYTES - begin
            part = value[: end - begin - at]
            whole[at : at + len(part)] = part
        return bytes(whole[start - begin :])

    def setrange(self, name: Word, offset: Word, value: Word) -> int:
        key, start, text = self._make(name, b"string"), _whole(offset), _text(value)
        at = 0
        while at < len(text):
            number, inside = divmod(start + at, CHUNK_BYTES)
            part = text[at : at + CHUNK_BYTES - inside]
            at += len(part)
            if part.strip(b"\0") or self._chunk(key, number):
                old = self._chunk(key, number).ljust(inside, b"\0")
                self._put_chunk(key, number, old[:inside] + part + old[inside + len(part) :])
        return self._lengthened(key, start + len(text))

    def _lengthened(self, key: _Key, length: int) -> int:
        extent = self._extent(key)
        if length > extent.length:
            self._extend(key, extent._replace(length=length))
        return max(length, extent.length)

    def _chunk(self, key: _Key, number: int) -> bytes:
        row = self._db.execute(
            "SELECT value FROM chunks WHERE key = ? AND number = ?", (key.id, number)
        ).fetchone()
        return row[0] if row else b""

    def _put_chunk(self, key: _Key, number: int, value: bytes) -> None:
        self._db.execute("INSERT OR REPLACE INTO chunks VALUES (?, ?, ?)", (key.id, number, value))

    def bitfield(self, name: Word, *words: Word) -> list[int]:
        """Takes GET and SET of single bits ("u1") alone."""
        key = self._find(name, b"string")
        chunks: dict[int, bytearray] = {}
        changed: set[int] = set()
        found, at = [], 0
        while at < len(words):
            byte, bit = divmod(_whole(words[at + 2]), 8)
            number, inside = divmod(byte, CHUNK_BYTES)
            if number not in chunks:
                chunks[number] = bytearray(b"" if key is None else self._chunk(key, number))
            chunk = chunks[number]
            mask = 0x80 >> bit
            found.append(1 if inside < len(chunk) and chunk[inside] & mask else 0)
            if words[at] == b"SET":
                chunk.extend(bytes(max(0, inside + 1 - len(chunk))))
                chunk[inside] = chunk[inside] | mask if _whole(words[at + 3]) else chunk[inside] & ~mask
                changed.add(number)
                at += 4
            else:
                at += 3
        for number in changed:
            key = self._make(name, b"string")
            self._put_chunk(key, number, bytes(chunks[number]))
            self._lengthened(key, number * CHUNK_BYTES + len(chunks[number]))
        return found

    def bitcount(self, name: Word) -> int:
        key = self._find(name, b"string")
        chunks = self._db.execute("SELECT value FROM chunks WHERE key = ?", (key.id,)) if key else ()
        return sum(int.from_bytes(value, "big").bit_count() for (value,) in chunks)

    # Hashes, and the one set

    def hget(self, name: Word, field: Word) -> bytes | None:
        key = self._find(name, b"hash")
        if key is None:
            return None
        query = "SELECT value FROM fields WHERE key = ? AND field = ?"
        row = self._db.execute(query, (key.id, _text(field))).fetchone()
        return row[0] if row else None

    def hmget(self, name: Word, *fields: Word) -> list[bytes | None]:
        key = self._find(name, b"hash")
        if key is None:
            return [None] * len(fields)
        return self._each("SELECT field, value FROM fields WHERE key = ? AND field IN", key, fields)

    def _each(self, query: str, key: _Key, items: Sequence[Word]) -> list[Any]:
        """Returns what a query tells of each item; None of one that is not there."""
        wanted = [_text(item) for item in items]
        if len(wanted) < _AT_ONCE[0]:
            rows = [self._db.execute(f"{query} (?)", (key.id, one)).fetchone() for one in wanted]
            return [row[1] if row else None for row in rows]
        found: dict[bytes, Any] = {}
        for at in range(0, len(wanted), _AT_ONCE[-1]):
            some: list[bytes | None] = [*wanted[at : at + _AT_ONCE[-1]]]
            size = next(size for size in _AT_ONCE if size >= len(some))
            # An item is never NULL.
            some += [None] * (size - len(some))
            found.update(self._db.execute(f"{query} ({','.join('?' * size)})", (key.id, *some)).fetchall())
        return [found.get(one) for one in wanted]

    def hset(self, name: Word, *pairs: Word) -> None:
        key = self._make(name, b"hash")
        rows = [
            (key.id, _text(one), _text(value)) for one, value in zip(pairs[::2], pairs[1::2], strict=True)
        ]
        query = "INSERT INTO fields VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET value = excluded.value"
        self._many(query, rows)

    def _many(self, query: str, rows: Sequence[Sequence[Any]]) -> int:
        """Runs a statement once for each row; returns how many rows it changed."""
        if len(rows) == 1:
            return self._db.execute(query, rows[0]).rowcount
        return self._db.executemany(query, rows).rowcount

    def hdel(self, name: Word, *fields: Word) -> int:
        return self._delete(name, fields, b"hash")

    def _delete(self, name: Word, items: Sequence[Word], kind: bytes) -> int:
        key = self._find(name, kind)
        if key is None:
            return 0
        table, column = _TABLES[kind]
        # A deletion that finds nothing would wait for other writers all the same.
        found = self._each(f"SELECT {column}, 1 FROM {table} WHERE key = ? AND {column} IN", key, items)
        there = {_text(item) for item, one in zip(items, found, strict=True) if one}
        if there:
            rows = [(key.id, one) for one in there]
            self._many(f"DELETE FROM {table} WHERE key = ? AND {column} = ?", rows)
            self._emptied(name, key)
        return len(there)

    def hexists(self, name: Word, field: Word) -> int:
        return 0 if self.hget(name, field) is None else 1

    def hlen(self, name: Word) -> int:
        return self._count(self._find(name, b"hash"))

    def hgetall(self, name: Word) -> list[bytes]:
        key = self._find(name, b"hash")
        return self._flat("SELECT field, value FROM fields WHERE key = ?", key.id) if key else []

    def hincrby(self, name: Word, field: Word, amount: Word) -> int:
        old = self.hget(name, field)
        now = (0 if old is None else _counted(old)) + _counted(_text(amount))
        if not -_INT64 <= now < _INT64:
            raise CommandRefused("ERR increment or decrement would overflow")
        self.hset(name, field, now)
        return now

    def hscan(
        self, name: Word, cursor: Word, *options: Word, told_bytes: int | None = _CURSOR_BYTES
    ) -> list[Any]:
        """Answers fields in their order. A cursor is a number that tells where the next field begins."""
        key, begin, words = self._find(name, b"hash"), _begin(cursor), _options(options)
        if key is None:
            return [b"0", []]
        count = _whole(words.get(b"COUNT", 10))
        rows = self._db.execute(
            "SELECT field, value FROM fields WHERE key = ? AND field >= ? ORDER BY field LIMIT ?",
            (key.id, begin, count),
        ).fetchall()
        after = b"0"
        if len(rows) == count:
            last: bytes = rows[-1][0]
            successor = last + b"\0" if told_bytes is None else _successor(last[:told_bytes])
            more = "SELECT field, value FROM fields WHERE key = ? AND field > ? AND {} ORDER BY field"
            if successor is None:
                rows += self._db.execute(more.format("1"), (key.id, last)).fetchall()
            else:
                rows += self._db.execute(more.format("field < ?"), (key.id, last, successor)).fetchall()
                after = b"%d" % int.from_bytes(b"\1" + successor, "big")
        prefix = _ESCAPED.sub(rb"\1", _text(words.get(b"MATCH", b"*")).removesuffix(b"*"))
        return [after, [word for row in rows if row[0].startswith(prefix) for word in row]]

    def hrandfield(self, name: Word, count: Word, withvalues: Word) -> list[bytes]:
        """Draws by random places in the order of fields."""
        key, wanted = self._find(name, b"hash"), _whole(count)
        if key is None:
            return []
        query = "SELECT field FROM fields WHERE key = ? AND field {} ? ORDER BY field LIMIT ?"
        ends = (
            self._flat(f"SELECT {end}(field) FROM fields WHERE key = ?", key.id)[0] for end in ("min", "max")
        )
        low, high = (int.from_bytes(field[:8].ljust(8, b"\0"), "big") for field in ends)
        found: set[bytes] = set()
        for _ in range(2 * wanted):
            if len(found) >= wanted:
                break
            place = (low + secrets.randbelow(high - low + 1)).to_bytes(8, "big")
            # One of several that follow: the first alone would be drawn the more often the wider the gap.
            some = self._flat(query.format(">="), key.id, place, _DRAWN_FROM)
            some += self._flat(query.format("<"), key.id, place, _DRAWN_FROM - len(some))
            found.add(secrets.choice(some))
        return [word for field in found for word in (field, self.hget(name, field) or b"")]

    def sadd(self, name: Word, *members: Word) -> None:
        key = self._make(name, b"set")
        for member in members:
            self._db.execute("INSERT OR IGNORE INTO fields VALUES (?, ?, x'')", (key.id, _text(member)))

    def srem(self, name: Word, *members: Word) -> int:
        return self._delete(name, members, b"set")

    def smembers(self, name: Word) -> list[bytes]:
        key = self._find(name, b"set")
        return self._flat("SELECT field FROM fields WHERE key = ?", key.id) if key else []

    def _flat(self, query: str, *values: Any) -> list[bytes]:
        return [word for row in self._db.execute(query, values) for word in row]

    # Sorted sets

    def zadd(self, name: Word, *words: Word) -> int | None:
        """Answers how many are new with NX alone."""
        only_new = words[0] == b"NX"
        pairs = words[1:] if only_new else words
        scored = [
            (_text(member), _score(score)) for score, member in zip(pairs[::2], pairs[1::2], strict=True)
        ]
        key = self._make(name, b"zset")
        rows = [(key.id, member, score) for member, score in scored]
        if only_new:
            return self._many("INSERT OR IGNORE INTO members VALUES (?, ?, ?)", rows)
        self._many(
            "INSERT INTO members VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET score = excluded.score", rows
        )
        return None

    def zincrby(self, name: Word, amount: Word, member: Word) -> bytes:
        old = self.zscore(name, member)
        now = _score(amount) + (0.0 if old is None else float(old))
        if math.isnan(now):
            raise CommandRefused("ERR resulting score is not a number (NaN)")
        self.zadd(name, now, member)
        return _float_text(now)

    def zscore(self, name: Word, member: Word) -> bytes | None:
        key = self._find(name, b"zset")
        if key is None:
            return None
        row = self._db.execute(
            "SELECT score FROM members WHERE key = ? AND member = ?", (key.id, _text(member))
        ).fetchone()
        return _float_text(row[0]) if row else None

    def zmscore(self, name: Word, *members: Word) -> list[bytes | None]:
        key = self._find(name, b"zset")
        if key is None:
            return [None] * len(members)
        scores = self._each("SELECT member, score FROM members WHERE key = ? AND member IN", key, members)
        return [None if score is None else _float_text(score) for score in scores]

    def zrem(self, name: Word, *members: Word) -> int:
        return self._delete(name, members, b"zset")

    def zcard(self, name: Word) -> int:
        return self._count(self._find(name, b"zset"))

    def zcount(self, name: Word, least: Word, most: Word) -> int:
        key = self._find(name, b"zset")
        if key is None:
            return 0
        where, bounds = _by_score(least, most)
        query = f"SELECT count(*) FROM members WHERE key = ? AND {where}"
        return int(self._db.execute(query, (key.id, *bounds)).fetchone()[0])

    def zrange(self, name: Word, first: Word, last: Word, *options: Word) -> list[bytes]:
        key, words = self._find(name, b"zset"), _options(options)
        if key is None:
            return []
        skip, limit = words.get(b"LIMIT", (0, -1))
        bounds: tuple[float | bytes, ...] = ()
        if b"BYSCORE" in words:
            where, bounds = _by_score(first, last)
        elif b"BYLEX" in words:
            where, bounds = _by_member(first, last)
        else:
            where = "1"
            skip, limit = self._ranks(key, first, last)
        # Under BYLEX all scores are the same.
        order = "member" if b"BYLEX" in words else "score, member"
        rows = self._db.execute(
            f"SELECT member, score FROM members WHERE key = ? AND {where} ORDER BY {order} LIMIT ? OFFSET ?",
            (key.id, *bounds, _whole(limit), _whole(skip)),
        )
        if b"WITHSCORES" in words:
            return [word for member, score in rows for word in (member, _float_text(score))]
        return [member for member, _ in rows]

    def zrevrange(self, name: Word, first: Word, last: Word, *options: Word) -> list[bytes]:
        """Takes ranks from the greatest score on, neither of them negative."""
        key = self._find(name, b"zset")
        if key is None:
            return []
        start, end = _whole(first), _whole(last)
        rows = self._db.execute(
            "SELECT member, score FROM members WHERE key = ? "
            "ORDER BY score DESC, member DESC LIMIT ? OFFSET ?",
            (key.id, max(0, end - start + 1), start),
        )
        if options:
            return [word for member, score in rows for word in (member, _float_text(score))]
        return [member for member, _ in rows]

    def zscan(self, name: Word, cursor: Word, *options: Word) -> list[Any]:
        key, begin = self._find(name, b"zset"), _begin(cursor)
        if key is None:
            return [b"0", []]
        count = _whole(_options(options).get(b"COUNT", 10))
        rows = self._db.execute(
            "SELECT member, score FROM members WHERE key = ? AND member >= ? ORDER BY member LIMIT ?",
            (key.id, begin, count),
        ).fetchall()
        after = b"%d" % int.from_bytes(b"\1" + rows[-1][0] + b"\0", "big") if len(rows) == count else b"0"
        return [after, [word for member, score in rows for word in (member, _float_text(score))]]

    def zremrangebyscore(self, name: Word, least: Word, most: Word) -> int:
        key = self._find(name, b"zset")
        if key is None:
            return 0
        where, bounds = _by_score(least, most)
        gone = self._db.execute(f"DELETE FROM members WHERE key = ? AND {where}", (key.id, *bounds)).rowcount
        if gone:
            self._emptied(name, key)
        return gone

    def zremrangebyrank(self, name: Word, first: Word, last: Word) -> int:
        key = self._find(name, b"zset")
        if key is None:
            return 0
        skip, limit = self._ranks(key, first, last)
        chosen = self._flat(
            "SELECT member FROM members WHERE key = ? ORDER BY score, member LIMIT ? OFFSET ?",
            key.id,
            limit,
            skip,
        )
        return self.zrem(name, *chosen)

    def _ranks(self, key: _Key, first: Word, last: Word) -> tuple[int, int]:
        """Returns how many members come before a range of ranks, and how many are in it."""
        start, end = _whole(first), _whole(last)
        if start < 0 or end < 0:
            size = self._count(key)
            start = max(0, start + size) if start < 0 else start
            end = end + size if end < 0 else end
        return start, max(0, end - start + 1)

    def zunionstore(self, name: Word, count: Word, source: Word, weights: Word, weight: Word) -> None:
        """Takes the one form that the index uses: all scores of a key times a weight."""
        key = self._find(name, b"zset")
        if key is not None:
            self._db.execute("UPDATE members SET score = score * ? WHERE key = ?", (_score(weight), key.id))

    # Streams

    def xadd(self, name: Word, maxlen: Word, about: Word, most: Word, at: Word, *fields: Word) -> bytes:
        key = self._make(name, b"stream")
        extent = self._extent(key)
        last = extent.last_ms, extent.last_number
        if at == b"*":
            ms, number = max((self._now_ms, 0), (last[0], last[1] + 1))
        else:
            ms, number = _position(at, 0)
            if (ms, number) <= last:
                raise CommandRefused(
                    "ERR The ID specified in XADD is equal or smaller than the target stream top item"
                )
        packed = b"".join(struct.pack(">I", len(text)) + text for text in map(_text, fields))
        self._db.execute("INSERT INTO entries VALUES (?, ?, ?, ?)", (key.id, ms, number, packed))
        over = max(0, extent.length + 1 - _whole(most))
        if over < _TRIMMED_AT_ONCE:
            over = 0
        else:
            oldest = "SELECT key, ms, number FROM entries WHERE key = ? ORDER BY ms, number LIMIT ?"
            rows = self._db.execute(oldest, (key.id, over)).fetchall()
            self._db.executemany("DELETE FROM entries WHERE key = ? AND ms = ? AND number = ?", rows)
        self._extend(key, _Extent(extent.length + 1 - over, ms, number))
        return b"%d-%d" % (ms, number)

    def xrange(self, name: Word, first: Word, last: Word, *options: Word) -> list[Any]:
        return self._entries(name, first, last, options, "")

    def xrevrange(self, name: Word, last: Word, first: Word, *options: Word) -> list[Any]:
        return self._entries(name, first, last, options, " DESC")

    def _entries(self, name: Word, first: Word, last: Word, options: Sequence[Word], how: str) -> list[Any]:
        key = self._find(name, b"stream")
        if key is None:
            return []
        least, above = _bound(first, 0)
        most, below = _bound(last, (1 << 63) - 1)
        bounds = (
            f"(ms, number) {'>' if above else '>='} (?, ?) AND (ms, number) {'<' if below else '<='} (?, ?)"
        )
        rows = self._db.execute(
            f"SELECT ms, number, fields FROM entries WHERE key = ? AND {bounds} "
            f"ORDER BY ms{how}, number{how} LIMIT ?",
            (key.id, *least, *most, _whole(_options(options).get(b"COUNT", -1))),
        )
        return [[b"%d-%d" % (ms, number), _unpacked(packed)] for ms, number, packed in rows]


def _text(word: Word) -> bytes:
    """Returns a word as Redis would get it."""
    if isinstance(word, bytes):
        return word
    return b"%d" % word if isinstance(word, int) else _float_text(word)


def _float_text(number: float) -> bytes:
    return b"%.17g" % number


def _whole(word: Word) -> int:
    try:
        return int(word)
    except (ValueError, OverflowError):
        raise CommandRefused("ERR value is not an integer or out of range") from None


def _counted(text: bytes) -> int:
    """Returns a number that HINCRBY counts on."""
    if not text.removeprefix(b"-").isdigit() or len(text) > 20:
        raise CommandRefused("ERR hash value is not an integer")
    return int(text)


def _score(word: Word) -> float:
    try:
        score = float(word)
    except ValueError:
        raise CommandRefused(_NO_FLOAT) from None
    if math.isnan(score):
        raise CommandRefused(_NO_FLOAT)
    return score


def _options(words: Sequence[Word]) -> dict[bytes, Any]:
    """Returns options with what follows them; of those alone, the name."""
    found: dict[bytes, Any] = {}
    at = 0
    while at < len(words):
        name = _text(words[at])
        if name == b"LIMIT":
            found[name] = words[at + 1], words[at + 2]
            at += 3
        elif name in (b"COUNT", b"MATCH"):
            found[name] = words[at + 1]
            at += 2
        else:
            found[name] = name
            at += 1
    return found


def _begin(cursor: Word) -> bytes:
    """Returns the least field that comes at a cursor. Raises CommandRefused for what no scan has told."""
    text = _text(cursor)
    number = int(text) if text.isdigit() and len(text) <= 200 else -1
    if number == 0:
        return b""
    packed = number.to_bytes((number.bit_length() + 7) // 8, "big") if number > 0 else b""
    if not packed.startswith(b"\1"):
        raise CommandRefused("ERR invalid cursor")
    return packed[1:]


def _successor(prefix: bytes) -> bytes | None:
    """Returns the least text that is greater than all with this prefix; None if there is none."""
    cut = prefix.rstrip(b"\xff")
    return cut[:-1] + bytes([cut[-1] + 1]) if cut else None


def _by_score(least: Word, most: Word) -> tuple[str, tuple[float, float]]:
    low, high = _text(least), _text(most)
    bounds = _score(low.removeprefix(b"(")), _score(high.removeprefix(b"("))
    return (
        f"score {'>' if low[:1] == b'(' else '>='} ? AND score {'<' if high[:1] == b'(' else '<='} ?",
        bounds,
    )


def _by_member(least: Word, most: Word) -> tuple[str, tuple[bytes, bytes]]:
    low, high = _text(least), _text(most)
    return f"member {'>' if low[:1] == b'(' else '>='} ? AND member {'<' if high[:1] == b'(' else '<='} ?", (
        low[1:],
        high[1:],
    )


def _position(word: Word, number: int) -> tuple[int, int]:
    """Returns the two parts of an id in a stream; `number` is the second if it is left out."""
    first, _, second = _text(word).partition(b"-")
    return _whole(first), _whole(second) if second else number


def _bound(word: Word, least: int) -> tuple[tuple[int, int], bool]:
    text = _text(word)
    if text in (b"-", b"+"):
        return (least, least), False
    at = _position(text.removeprefix(b"("), least)
    return (min(at[0], _INT64 - 1), min(at[1], _INT64 - 1)), text[:1] == b"("


def _unpacked(packed: bytes) -> list[bytes]:
    texts, at = [], 0
    while at + 4 <= len(packed):
        (size,) = struct.unpack_from(">I", packed, at)
        texts.append(packed[at + 4 : at + 4 + size])
        at += 4 + size
    return texts


def commands_of(space: Keyspace) -> dict[str, Callable[..., Any]]:
    """Returns the commands by their names in Redis."""
    found = {name.upper(): getattr(space, name) for name in dir(space) if not name.startswith("_")}
    del found["BEGIN"]
    return found | {"DEL": space.unlink}
