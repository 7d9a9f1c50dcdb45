"""SqliteClient: runs scripts and commands on an SQLite database, in this process.

A call begins as a reader, which waits for nobody; its first write makes it a writer. If another writer was
faster the call is undone and done again, alone among writers. So most calls of a request's path, which find
that nothing has to change, never wait for a writer.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from kvstore.errors import DamagedIndex
from kvstore.index.scripted.scripts import Script, Word
from kvstore.index.sqlite.keyspace import CommandRefused, Keyspace, commands_of
from kvstore.index.sqlite.scripts import Interpreter
from kvstore.sqlite import Connection, SqliteDatabase, is_busy

_T = TypeVar("_T")


class _Lost(Exception):
    """Another writer was faster."""


class SqliteClient:
    """Calls on one SQLite database. Safe for threads, and for processes that fork."""

    def __init__(self, database: SqliteDatabase, clock: Callable[[], float]) -> None:
        self._database = database
        self._clock = clock

    @property
    def name(self) -> str:
        """The file or the name, for messages."""
        return f"sqlite {self._database.where}"

    def run(self, script: Script, key: str, *args: Word) -> Any:
        """Runs a script; `key` is its KEYS[1]."""
        words = [_text(arg) for arg in args]
        return self._attempt(
            script.name,
            lambda engine: engine.interpreter.run(script.name, script.source, key.encode(), words),
        )

    def command(self, *words: Word, name: str = "") -> Any:
        """Runs one command; answers as redis-py does."""
        return self._attempt(name or str(words[0]), lambda engine: engine.command(words))

    def many(self, commands: Sequence[Sequence[Word]]) -> list[Any]:
        """Runs independent commands. The answer to a command whose key is damaged is a DamagedIndex."""

        def send(engine: _Engine) -> list[Any]:
            answers: list[Any] = []
            for words in commands:
                try:
                    answers.append(engine.command(words))
                except CommandRefused as exc:
                    answers.append(DamagedIndex(f"{self.name}: {words[0]!s}: {exc}"))
            return answers

        return list(self._attempt(str(commands[0][0]), send)) if commands else []

    def by_node(self, keys: Mapping[_T, str]) -> list[list[_T]]:
        """Returns all items in one group."""
        return [list(keys)] if keys else []

    def close(self) -> None:
        """Closes every connection. Idempotent."""
        self._database.close()

    def _attempt(self, name: str, send: Callable[[_Engine], _T]) -> _T:
        try:
            try:
                with self._database.reading(name) as connection:
                    return self._send(connection, send, alone=False)
            except _Lost:
                with self._database.writing(name) as connection:
                    return self._send(connection, send, alone=True)
        except CommandRefused as exc:
            raise DamagedIndex(f"{self.name}: {name}: {exc}") from exc

    def _send(self, connection: Connection, send: Callable[[_Engine], _T], *, alone: bool) -> _T:
        engine = connection.attached
        if not isinstance(engine, _Engine) or engine.clock is not self._clock:
            connection.attached = engine = _Engine(connection, self._clock)
        engine.space.begin()
        try:
            return send(engine)
        except sqlite3.OperationalError as exc:
            if alone or not is_busy(exc):
                raise
            raise _Lost from exc


class _Engine:
    """What runs calls on one connection."""

    def __init__(self, connection: Connection, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.space = Keyspace(connection, clock)
        self.interpreter = Interpreter(self.space)
        self._commands = commands_of(self.space)

    def command(self, words: Sequence[Word]) -> Any:
        name, *rest = words
        arguments = [word.encode() if isinstance(word, str) else word for word in rest]
        if name in ("HSCAN", "ZSCAN"):
            cursor, flat = self._commands[str(name)](
                *arguments, **({"told_bytes": None} if name == "HSCAN" else {})
            )
            return int(cursor), _pairs(flat) if name == "HSCAN" else list(_pairs(flat, float).items())
        answer = self._commands[str(name)](*arguments)
        if name == "HGETALL":
            return _pairs(answer)
        if name == "SMEMBERS":
            return set(answer)
        if name in ("XRANGE", "XREVRANGE"):
            return [(position, _pairs(fields)) for position, fields in answer]
        return answer

    def close(self) -> None:
        self.interpreter.close()


def _text(word: Word) -> bytes:
    if isinstance(word, bytes):
        return word
    return word.encode() if isinstance(word, str) else repr(word).encode()


def _pairs(flat: Sequence[Any], of: Callable[[Any], Any] | None = None) -> dict[Any, Any]:
    values = flat[1::2] if of is None else map(of, flat[1::2])
    return dict(zip(flat[::2], values, strict=False))
