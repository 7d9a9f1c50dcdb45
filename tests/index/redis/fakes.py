"""fakeredis, with stand-ins for the two Lua libraries of Redis that it lacks."""

from __future__ import annotations

import os
from pathlib import Path

import fakeredis

from kvstore.index.redis.client import RedisClient
from kvstore.index.redis.index import RedisIndex

_LUA = Path(__file__).parent / "lua"


def fake_client(server: fakeredis.FakeServer) -> fakeredis.FakeRedis:
    """A client of a fake server that runs every script of the index."""
    # Lua reads it when the server's interpreter is made, which is at its first script.
    os.environ["LUA_PATH"] = f"{_LUA}/?.lua"
    return fakeredis.FakeRedis(server=server, protocol=2, lua_modules={"bit", "struct"})


def fake_index(server: fakeredis.FakeServer) -> RedisIndex:
    """An index in a fake server."""
    return RedisIndex(RedisClient(fake_client(server), where="fake"))
