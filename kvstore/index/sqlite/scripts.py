"""Interpreter: runs the index's scripts in this process, on one connection to SQLite.

Redis runs scripts in Lua 5.1, and lupa has that very interpreter. A script sees what Redis gives it:
KEYS, ARGV, redis.call, redis.pcall, struct and bit, as far as the index uses them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from lupa.lua51 import LuaError, LuaRuntime, lua_type

from kvstore.index.sqlite.keyspace import CommandRefused, Keyspace, Word, commands_of

_MASK = (1 << 32) - 1
#: Values that one call of Lua's unpack returns: its stack has room for some 8,000.
_PIECE = 1000
_PLAIN = (bytes, int)

_LIBRARY = b"""
local commands, pack, unpack_, band, bor, tobit = ...
local function pcall_(name, ...) return commands[name](...) end
local function call(name, ...)
  local reply = commands[name](...)
  if type(reply) == 'table' and reply.err then error(reply.err, 0) end
  return reply
end
redis = {call = call, pcall = pcall_}
struct = {pack = pack, unpack = unpack_}
bit = {band = band, bor = bor, tobit = tobit}
"""


class Interpreter:
    """One Lua state for one Keyspace; not safe for threads, as the connection below it is not."""

    def __init__(self, space: Keyspace) -> None:
        self._lua = LuaRuntime(
            encoding=None, unpack_returned_tuples=True, register_eval=False, register_builtins=False
        )
        self._load = self._lua.globals()[b"loadstring"]
        self._globals = self._lua.globals()
        self._unpack = self._globals[b"unpack"]
        self._compiled: dict[str, Callable[[], Any]] = {}
        commands = self._lua.table_from(
            {name.encode(): self._bridge(call) for name, call in commands_of(space).items()}
        )
        library = self._load(_LIBRARY, b"=library")
        library(commands, _pack, _unpack, lambda a, b: a & b, lambda a, b: a | b, lambda a: int(a) & _MASK)

    def _bridge(self, command: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the command as Lua calls it: no None, and an error is a table."""
        table = self._lua.table_from

        def of(found: Any) -> Any:
            if found is None:
                return False
            if isinstance(found, list):
                return table([of(one) for one in found])
            return found

        def bridged(*words: Word) -> Any:
            try:
                return of(command(*words))
            except CommandRefused as exc:
                return table({b"err": str(exc).encode()})

        return bridged

    def run(self, name: str, source: str, key: bytes, args: Sequence[bytes]) -> Any:
        """Runs a script. Raises CommandRefused with what Lua or a command says."""
        compiled = self._compiled.get(source)
        if compiled is None:
            compiled = self._load(source.encode(), b"@" + name.encode())
            assert callable(compiled), compiled
            self._compiled[source] = compiled
        table = self._lua.table_from
        self._globals[b"KEYS"], self._globals[b"ARGV"] = table([key]), table(args)
        try:
            return _reply(compiled(), self._unpack)
        except LuaError as exc:
            raise CommandRefused(_said(exc)) from None

    def close(self) -> None:
        """Lets go of the Keyspace, which Lua holds where Python's collector doesn't look."""
        self._compiled.clear()
        self._lua.execute(b"redis, KEYS, ARGV = nil, nil, nil; collectgarbage()")


def _said(exc: LuaError) -> str:
    text = exc.args[0] if exc.args else b""
    return text.decode("utf-8", "replace") if isinstance(text, bytes) else str(text)


def _reply(value: Any, unpacked: Callable[..., Any]) -> Any:
    """Returns a script's answer as Redis sends it."""
    if value is None or value is False:
        return None
    if value is True:
        return 1
    if isinstance(value, (bytes, int)):
        return value
    if isinstance(value, float):
        return int(value)
    assert lua_type(value) == "table", value
    if (error := value[b"err"]) is not None:
        raise CommandRefused(error.decode("utf-8", "replace"))
    found: list[Any] = []
    for first in range(1, len(value) + 1, _PIECE):
        some = unpacked(value, first, min(first + _PIECE - 1, len(value)))
        found += some if type(some) is tuple else (some,)
    if None in found:
        del found[found.index(None) :]
    return [one if type(one) in _PLAIN else _reply(one, unpacked) for one in found]


@lru_cache(maxsize=64)
def _format(text: bytes) -> struct.Struct:
    return struct.Struct(text.replace(b"I4", b"I").decode())


def _pack(text: bytes, *values: float) -> bytes:
    return _format(text).pack(*(int(value) & _MASK for value in values))


def _unpack(text: bytes, data: bytes, at: int = 1) -> tuple[int, ...]:
    made = _format(text)
    if len(data) < at - 1 + made.size:
        raise CommandRefused("data string too short")
    return (*made.unpack_from(data, at - 1), at + made.size)
