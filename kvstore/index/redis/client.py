"""One call to Redis: a pooled connection, a deadline, one script or command, errors of our own tree.

A call is repeated only where that costs no time and can't do harm:

    - The server closed the pooled connection meanwhile (it was restarted, or closes idle clients): the call
      is sent once more on a fresh one. Every script and command of the index is idempotent, except note,
      which may then count itself, so that a first use passes for a second.
    - A replica refused the call because it was the master until a moment ago: the same.
    - Redis doesn't know the script: it is sent as text.
    - The server turns out to be part of a Cluster: it is asked as one from then on.
"""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Self, TypeVar, cast

import redis
from redis.cluster import RedisCluster
from redis.exceptions import MovedError, NoScriptError, RedisClusterException, SlotNotCoveredError

from kvstore.errors import ConfigError, StoreClosed, TransientError
from kvstore.index.redis.connections import cluster, pool, sentinels
from kvstore.index.redis.errors import FAILURES, classified, damaged, denied
from kvstore.index.redis.sentinel import Sentinels
from kvstore.index.redis.timed import in_time
from kvstore.index.scripted.scripts import Script, Word
from kvstore.threads.deadline import in_background
from schemas.settings import RedisSettings
from schemas.urls import redis_location

#: A stale connection fails at once. A failure later than this share of the deadline has another cause.
_STALE_SHARE = 0.1
_Client = redis.Redis | RedisCluster
_T = TypeVar("_T")


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
    ) -> None:
        """Takes a client as redis-py makes it, which should have timeouts, no retries, and RESP2.

        `where` is its name in messages, `timeout_s` its deadline. `cluster` makes a client of the Cluster
        that the same server is part of; without a `client`, that one is used from the first call on.
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

    @classmethod
    def from_settings(cls, url: str, settings: RedisSettings) -> Self:
        """Returns a client for the URL of a Redis (schemas.urls). Does no I/O. Raises ConfigError."""
        try:
            location = redis_location(url)
        except ValueError as exc:
            raise ConfigError(f"index is not a usable redis URL: {exc}") from None
        where, timeout_s = location.where, settings.timeout_s
        if location.master is not None:
            found = sentinels(location, settings)
            client = redis.Redis(connection_pool=pool(location, settings, found))
            return cls(client, where=where, timeout_s=timeout_s, sentinels=found)
        many = len(location.hosts) > 1
        return cls(
            None if many else redis.Redis(connection_pool=pool(location, settings)),
            where=where,
            timeout_s=timeout_s,
            cluster=None if location.path else cluster(location, settings),
        )

    @property
    def name(self) -> str:
        """The kind of server and its place, for messages."""
        return f"redis {self._where}"

    @property
    def where(self) -> str:
        """Host, port and database, for messages."""
        return self._where

    @property
    def sentinels(self) -> Sentinels | None:
        """The Sentinels that say where the master is; None without any."""
        return self._sentinels

    def run(self, script: Script, key: str, *args: Word) -> Any:
        """Runs a script; `key` is its KEYS[1], which says which node of a Cluster has all of its keys."""

        return self._attempt(script.name, lambda client: _evaluated(client, script, key, args))

    def command(self, *words: Word, name: str = "") -> Any:
        """Runs one command."""

        def send(client: Any) -> Any:
            return client.execute_command(*words)

        return self._attempt(name or str(words[0]), send)

    def everywhere(self, *words: Word) -> list[Any]:
        """Runs one command on the server, or on each primary of a Cluster."""

        def send(client: Any) -> Any:
            if not isinstance(client, RedisCluster):
                return [client.execute_command(*words)]
            client = cast(Any, client)
            names = [node.name for node in client.get_primaries()]
            return [client.execute_command(*words, target_nodes=client.get_node(node_name=n)) for n in names]

        return list(self._attempt(str(words[0]), send))

    def many(self, commands: Sequence[Sequence[Word]]) -> list[Any]:
        """Runs independent commands, in one round trip to each node that has keys of them.

        The answer to a command whose key is damaged is a DamagedIndex; any other error is raised.
        """

        def send(client: _Client) -> Any:
            with client.pipeline(transaction=False) as pipeline:
                for words in commands:
                    pipeline.execute_command(*words)
                answers = pipeline.execute(raise_on_error=False)
            for answer in answers:
                if isinstance(answer, Exception) and not damaged(answer):
                    raise answer
            return answers

        if not commands:
            return []
        name = str(commands[0][0])
        answers = list(self._attempt(name, send))
        operation = f"{self.name}: {name}"
        return [classified(one, operation) if isinstance(one, Exception) else one for one in answers]

    def by_node(self, keys: Mapping[_T, str]) -> list[list[_T]]:
        """Groups items by the node of a Cluster that has their keys; without a Cluster they are one group."""
        client = self._current
        if not isinstance(client, RedisCluster):
            return [list(keys)] if keys else []
        groups: defaultdict[str, list[_T]] = defaultdict(list)
        for item, key in keys.items():
            nodes = client.nodes_manager.slots_cache.get(client.keyslot(key))  # type: ignore[no-untyped-call]
            groups[nodes[0].name if nodes else ""].append(item)
        return list(groups.values())

    def close(self) -> None:
        """Closes every connection. Idempotent."""
        self._closed = True
        for client in (self._first, self._current):
            if client is not None:
                client.close()
            if isinstance(client, redis.Redis):
                client.connection_pool.disconnect()
        if self._sentinels is not None:
            self._sentinels.close()

    def _attempt(self, name: str, send: Callable[[_Client], Any]) -> Any:
        operation = f"{self.name}: {name}"
        if self._closed:
            raise StoreClosed(f"{operation}: closed")
        began = time.monotonic()
        client: _Client | None = None
        try:
            with in_time(self._timeout_s):
                try:
                    client = self._client()
                    return send(client)
                except FAILURES as exc:
                    if not self._may_repeat(exc, client, time.monotonic() - began):
                        raise
                return send(self._client())
        except FAILURES as exc:
            raise classified(exc, operation) from exc
        except MemoryError as exc:
            raise TransientError(
                f"{operation}: the answer says that it is too large for this machine"
            ) from exc

    def _client(self) -> _Client:
        """Returns the client to use now. Connects, if it is to be a Cluster's. Raises one of FAILURES."""
        return self._current or self._become_cluster(None)

    def _may_repeat(self, exc: Exception, client: _Client | None, took_s: float) -> bool:
        """Returns whether a call that failed with `exc` after `took_s` may be sent once more, and sees to it
        that `_client` then answers another client if `client` is the wrong one."""
        if isinstance(exc, MovedError):
            self._become_cluster(self._first)
            return True
        if isinstance(exc, RedisClusterException) and not isinstance(exc, SlotNotCoveredError):
            # No node that it knew is left. The hosts in the URL may lead to their successors.
            self._start_over(client)
            return False
        if took_s >= self._timeout_s * _STALE_SHARE or denied(exc):
            return False
        # The server may only have closed an idle connection; or it was demoted, and has changed nothing.
        return isinstance(exc, (redis.ConnectionError, OSError))

    def _become_cluster(self, instead_of: _Client | None) -> _Client:
        """Returns a Cluster's client, made once for all calls that wait for it, each until its own deadline.

        A thread of its own makes it: redis-py asks one seed after the other, each up to its timeouts.
        """
        with self._becoming:
            current = self._current
            if current is not None and (self._cluster is None or current is not instead_of):
                return current
            pid, opening = self._opening
            if pid != os.getpid() or opening.done():
                opening = in_background(lambda: self._open_cluster(instead_of))
                self._opening = os.getpid(), opening
        try:
            return opening.result(self._timeout_s)
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

    def _start_over(self, failed: _Client | None) -> None:
        with self._becoming:
            # If several calls fail with it, the first does this; there may be another client by now.
            if (
                self._cluster is None
                or failed is None
                or failed is self._first
                or self._current is not failed
            ):
                return
            self._current = self._first
        failed.close()


def _evaluated(client: Any, script: Script, key: str, args: Sequence[Word]) -> Any:
    try:
        return client.execute_command("EVALSHA", script.sha, 1, key, *args)
    except NoScriptError:
        # First use on this server, or its scripts were flushed. EVAL also keeps the script.
        return client.execute_command("EVAL", script.source, 1, key, *args)
