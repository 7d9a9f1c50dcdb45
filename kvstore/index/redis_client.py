"""One call to Redis: a pooled connection, a deadline, one script or command, errors of our own tree.

Nothing is repeated in here but what costs no time and can't do harm: a call on a pooled connection
that the server closed meanwhile (it was restarted, or closes idle clients) is sent once more on a
fresh one, since every script and command of the index is idempotent (but note, which would then count
itself: a first use passes for a second); so is one that a replica refused because it was the master until
a moment ago; a script that Redis doesn't know is sent as text; and a server that turns out to be part of a
Cluster is asked as one from then on.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from importlib import resources
from typing import Any, Self, TypeVar, cast

import redis
from redis.cluster import RedisCluster
from redis.exceptions import MovedError, NoScriptError, RedisClusterException, SlotNotCoveredError

from kvstore.errors import Closed, ConfigError
from kvstore.index.aside import aside
from kvstore.index.redis_errors import FAILURES, classified, demoted, denied
from kvstore.index.redis_opening import cluster, pool, sentinels
from kvstore.index.redis_sentinel import Deadline, Sentinels
from schemas.settings import RedisSettings
from schemas.urls import redis_location

#: A stale connection fails at once. A failure later than this share of the deadline is no such thing.
_STALE_SHARE = 0.1
_Client = redis.Redis | RedisCluster
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Script:
    """A Lua script: the chunks it shares with others, then its own file."""

    name: str
    source: str
    sha: str

    @classmethod
    def load(cls, name: str, *shared: str) -> Self:
        """Read `kvstore/index/<name>.lua`, with keys.lua and the `shared` chunks before it."""
        folder = resources.files("kvstore.index")
        files = [folder / f"{chunk}.lua" for chunk in ("keys", *shared, name)]
        source = "\n".join(file.read_text(encoding="ascii") for file in files)
        return cls(name, source, hashlib.sha1(source.encode("ascii"), usedforsecurity=False).hexdigest())


class RedisClient:
    """Calls with deadlines on redis-py: a single Redis, the master that Sentinels name, or a Cluster.

    Safe for threads, and for processes that fork (redis-py's pool notices and starts afresh).
    """

    def __init__(
        self,
        client: _Client | None,
        *,
        where: str,
        timeout_s: float = 1.0,
        cluster: Callable[[], RedisCluster] | None = None,
        sentinels: Sentinels | None = None,
        deadline: Deadline | None = None,
    ) -> None:
        """Takes a client as redis-py makes it, which should have timeouts, no retries, and RESP2.

        `where` is how messages call it, `timeout_s` its deadline. `cluster` reaches the same server as part
        of a Cluster; without a `client`, that is what there is.
        """
        self._first = client
        self._current = client
        self._where = where
        self._timeout_s = timeout_s
        self._closed = False
        self._cluster = cluster
        #: Held for moments, never while something is waited for.
        self._becoming = threading.Lock()
        #: The process that makes the Cluster's client, and the client on its way.
        self._opening: tuple[int, Future[RedisCluster]] = 0, Future()
        self._sentinels = sentinels
        self._deadline = deadline or Deadline()

    @classmethod
    def from_settings(cls, url: str, settings: RedisSettings) -> Self:
        """A client for the URL of a Redis (schemas.urls). No I/O. Raises ConfigError."""
        try:
            location = redis_location(url)
        except ValueError as exc:
            raise ConfigError(f"index is not a usable redis URL: {exc}") from None
        where, timeout_s = location.where, settings.timeout_s
        if location.master is not None:
            deadline, found = Deadline(), sentinels(location, settings)
            client = redis.Redis(connection_pool=pool(location, settings, found, deadline))
            return cls(client, where=where, timeout_s=timeout_s, sentinels=found, deadline=deadline)
        many = len(location.hosts) > 1
        return cls(
            None if many else redis.Redis(connection_pool=pool(location, settings)),
            where=where,
            timeout_s=timeout_s,
            cluster=None if location.path else cluster(location, settings),
        )

    @property
    def where(self) -> str:
        """Host, port and database, for messages."""
        return self._where

    @property
    def sentinels(self) -> Sentinels | None:
        """Who says where the master is."""
        return self._sentinels

    def run(self, script: Script, key: str, *args: bytes | str | int | float) -> Any:
        """Run a script; `key` is its KEYS[1], which says which node of a Cluster has it all."""
        try:
            return self._call(script.name, "EVALSHA", script.sha, 1, key, *args)
        except NoScriptError:
            # First use on this server, or its scripts were flushed. EVAL also keeps the script.
            return self.command("EVAL", script.source, 1, key, *args, name=script.name)

    def command(self, *words: bytes | str | int | float, name: str = "") -> Any:
        """Run one command."""
        return self._call(name or str(words[0]), *words)

    def everywhere(self, *words: bytes | str | int | float) -> list[Any]:
        """Run one command on the server, or on each primary of a Cluster."""

        def send(client: Any) -> Any:
            if not isinstance(client, RedisCluster):
                return [client.execute_command(*words)]
            client = cast(Any, client)
            names = [node.name for node in client.get_primaries()]
            return [client.execute_command(*words, target_nodes=client.get_node(node_name=n)) for n in names]

        return list(self._attempt(str(words[0]), send))

    def many(self, commands: Sequence[Sequence[bytes | str | int | float]]) -> list[Any]:
        """Commands that don't depend on each other, in one round trip to each node that has their keys."""

        def send(client: _Client) -> Any:
            with client.pipeline(transaction=False) as pipeline:
                for words in commands:
                    pipeline.execute_command(*words)
                return pipeline.execute()

        return list(self._attempt(str(commands[0][0]), send)) if commands else []

    def by_node(self, keys: Mapping[_T, str]) -> list[list[_T]]:
        """What has these keys, in groups of what one node of a Cluster has; without a Cluster all in one."""
        client = self._current
        if not isinstance(client, RedisCluster):
            return [list(keys)] if keys else []
        groups: defaultdict[str, list[_T]] = defaultdict(list)
        for item, key in keys.items():
            nodes = client.nodes_manager.slots_cache.get(client.keyslot(key))  # type: ignore[no-untyped-call]
            groups[nodes[0].name if nodes else ""].append(item)
        return list(groups.values())

    def close(self) -> None:
        """Close every connection. Idempotent."""
        self._closed = True
        for client in (self._first, self._current):
            if client is not None:
                client.close()
            if isinstance(client, redis.Redis):
                client.connection_pool.disconnect()

    def _call(self, name: str, *words: bytes | str | int | float) -> Any:
        return self._attempt(name, lambda client: client.execute_command(*words))  # type: ignore[no-untyped-call]

    def _attempt(self, name: str, send: Callable[[_Client], Any]) -> Any:
        operation = f"redis {self._where}: {name}"
        if self._closed:
            raise Closed(f"{operation}: closed")
        began = time.monotonic()
        self._deadline.begin(self._timeout_s)
        client: _Client | None = None
        try:
            try:
                client = self._client()
                return send(client)
            except FAILURES as exc:
                if not self._mended(exc, client, time.monotonic() - began):
                    raise
            return send(self._client())
        except NoScriptError:
            raise
        except FAILURES as exc:
            raise classified(exc, operation) from exc

    def _client(self) -> _Client:
        """The client to use now. Connects, if it is to be a Cluster's. Raises one of FAILURES."""
        return self._current or self._become_cluster(None)

    def _mended(self, exc: Exception, client: _Client | None, took_s: float) -> bool:
        """Whether what `client` failed with so, after so long, may be sent once more."""
        if isinstance(exc, MovedError):
            self._become_cluster(self._first)
            return True
        if isinstance(exc, RedisClusterException) and not isinstance(exc, SlotNotCoveredError):
            # No node that it knew is left. What the URL names may lead to their successors.
            self._begin_again(client)
            return False
        if took_s >= self._timeout_s * _STALE_SHARE or denied(exc):
            return False
        # The server may only have closed an idle connection; or it was demoted, and has changed nothing.
        lost = isinstance(exc, (redis.ConnectionError, OSError))
        return lost or (self._sentinels is not None and demoted(exc))

    def _become_cluster(self, instead_of: _Client | None) -> _Client:
        """A Cluster's client, made once for all calls that need it; each waits until its own deadline.

        redis-py asks one seed after the other, each up to its timeouts.
        """
        with self._becoming:
            current = self._current
            if current is not None and (self._cluster is None or current is not instead_of):
                return current
            pid, opening = self._opening
            if pid != os.getpid() or opening.done():
                opening = aside(lambda: self._open_cluster(instead_of))
                self._opening = os.getpid(), opening
        try:
            return opening.result(self._deadline.left_s(self._timeout_s))
        except TimeoutError:
            if opening.done():
                raise
            raise redis.TimeoutError("nodes of the Cluster don't answer in time") from None

    def _open_cluster(self, instead_of: _Client | None) -> RedisCluster:
        assert self._cluster is not None
        opened = self._cluster()
        with self._becoming:
            self._current = opened
            closed = self._closed
        if closed:
            opened.close()
        if isinstance(instead_of, redis.Redis):
            instead_of.connection_pool.disconnect(inuse_connections=False)
        return opened

    def _begin_again(self, failed: _Client | None) -> None:
        with self._becoming:
            # Of several calls that fail with it the first has done this, and there may be another by now.
            if (
                self._cluster is None
                or failed is None
                or failed is self._first
                or self._current is not failed
            ):
                return
            self._current = self._first
        failed.close()
