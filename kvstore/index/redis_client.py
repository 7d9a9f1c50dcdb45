"""One call to Redis: a pooled connection, a deadline, one script or command, errors of our own tree.

What a failure becomes:

    timed out (connect, reply, or waiting for a pooled connection)      DeadlineExceeded
    refused, reset, LOADING, READONLY, CLUSTERDOWN, MASTERDOWN, other   TransientError
    NOAUTH, WRONGPASS, NOPERM                                           PermissionDenied
    OOM (maxmemory reached and nothing may be evicted)                  CapacityExceeded

Nothing is repeated in here but what costs no time and can't do harm: a call on a pooled connection
that the server closed meanwhile (it was restarted, or closes idle clients) is sent once more on a
fresh one, since every script and command of the index is idempotent (but note, which would then count
itself: a first use passes for a second); a script that Redis doesn't know is sent as text; and a server
that turns out to be part of a Cluster is asked as one from then on.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Self

import redis
from redis.backoff import NoBackoff
from redis.cluster import RedisCluster
from redis.connection import parse_url
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    MovedError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    RedisClusterException,
)
from redis.retry import Retry

from kvstore.errors import (
    CapacityExceeded,
    Closed,
    ConfigError,
    DeadlineExceeded,
    KVStoreError,
    PermissionDenied,
    TransientError,
)
from schemas.settings import RedisSettings

#: What redis-py raises for a failed call; RedisClusterException is not a RedisError.
FAILURES = (redis.RedisError, RedisClusterException, OSError)
#: Denials that redis-py has no class for: a large command from a stranger, refused before it is read
#: ("unauthenticated multibulk length"); a right that is missing inside a script, to Redis 7.0 and later.
_DENIALS = ("unauthenticated", "The user executing the script can't", "ACL failure in script")
#: A stale connection fails at once. A failure later than this share of the deadline is no such thing.
_STALE_SHARE = 0.1


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
    """Calls with deadlines on a redis-py client: Redis, a Sentinel's master, or a RedisCluster.

    Safe for threads, and for processes that fork (redis-py's pool notices and starts afresh).
    """

    def __init__(self, client: redis.Redis | RedisCluster, *, where: str, timeout_s: float = 1.0) -> None:
        """Takes a client as redis-py makes it, which should have timeouts, no retries, and RESP2.

        `where` is how messages call it, `timeout_s` its deadline.
        """
        self._client: redis.Redis | RedisCluster = client
        self._where = where
        self._timeout_s = timeout_s
        self._closed = False
        #: How to reach the same server as part of a Cluster; None if the client was made elsewhere.
        self._cluster_options: dict[str, Any] | None = None
        self._becoming = threading.Lock()

    @classmethod
    def from_settings(cls, url: str, settings: RedisSettings) -> Self:
        """A client for `redis://`, `rediss://` or `unix://`. No I/O. Raises ConfigError."""
        try:
            options: dict[str, Any] = dict(parse_url(url))  # type: ignore[no-untyped-call]
        except (ValueError, TypeError):
            # Neither the URL nor the exception is quoted: of a URL that can't be split correctly, a
            # piece of the password may be in any part.
            raise ConfigError(
                "index is not a usable redis URL: redis://[user:password@]HOST:PORT/DB, "
                "with special characters of a password percent-encoded"
            ) from None
        where = options.get("path") or f"{options.get('host', 'localhost')}:{options.get('port', 6379)}"
        where = f"{where}/{options.get('db', 0)}"
        kind = options.pop("connection_class", redis.Connection)
        options |= _options(settings, tls=issubclass(kind, redis.SSLConnection))
        pool = redis.BlockingConnectionPool(  # type: ignore[no-untyped-call]
            connection_class=kind,
            max_connections=settings.max_connections,
            timeout=settings.timeout_s,
            **options,
        )
        self = cls(redis.Redis(connection_pool=pool), where=where, timeout_s=settings.timeout_s)
        if "path" not in options:
            self._cluster_options = {name: value for name, value in options.items() if name != "db"} | {
                "ssl": issubclass(kind, redis.SSLConnection),
                "max_connections": settings.max_connections,
                # Namespaces on the nodes that are left go on working.
                "require_full_coverage": False,
            }
        return self

    @property
    def where(self) -> str:
        """Host, port and database, for messages."""
        return self._where

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

    def many(self, commands: Sequence[Sequence[bytes | str | int | float]]) -> list[Any]:
        """Commands that don't depend on each other, in one round trip to each node that has their keys."""

        def send() -> Any:
            with self._client.pipeline(transaction=False) as pipeline:
                for words in commands:
                    pipeline.execute_command(*words)
                return pipeline.execute()

        return list(self._attempt(str(commands[0][0]), send)) if commands else []

    def close(self) -> None:
        """Close every connection. Idempotent."""
        self._closed = True
        self._client.close()
        if isinstance(self._client, redis.Redis):
            self._client.connection_pool.disconnect()

    def _call(self, name: str, *words: bytes | str | int | float) -> Any:
        return self._attempt(name, lambda: self._client.execute_command(*words))  # type: ignore[no-untyped-call]

    def _attempt(self, name: str, send: Callable[[], Any]) -> Any:
        if self._closed:
            raise Closed(f"redis {self._where}: {name}: closed")
        began = time.monotonic()
        try:
            try:
                return send()
            except MovedError:
                self._become_cluster()
            except (redis.ConnectionError, OSError) as exc:
                if not self._was_stale(exc, time.monotonic() - began):
                    raise
            return send()
        except NoScriptError:
            raise
        except FAILURES as exc:
            raise self._classified(exc, name) from exc

    def _was_stale(self, exc: Exception, took_s: float) -> bool:
        """Whether a failure may mean no more than that the server had closed an idle connection."""
        return took_s < self._timeout_s * _STALE_SHARE and not _denied(exc)

    def _become_cluster(self) -> None:
        with self._becoming:
            single = self._client
            if self._cluster_options is None or isinstance(single, RedisCluster):
                return
            self._client = RedisCluster(**self._cluster_options)
        single.connection_pool.disconnect(inuse_connections=False)

    def _classified(self, exc: Exception, name: str) -> KVStoreError:
        text = str(exc)
        kind: type[KVStoreError] = TransientError
        if isinstance(exc, (redis.TimeoutError, TimeoutError)) or "No connection available" in text:
            kind = DeadlineExceeded
        elif _denied(exc):
            kind = PermissionDenied
        elif isinstance(exc, OutOfMemoryError) or "OOM command not allowed" in text:
            kind = CapacityExceeded
        return kind(f"redis {self._where}: {name}: {text.splitlines()[0] if text else type(exc).__name__}")


def _denied(exc: Exception) -> bool:
    if isinstance(exc, (AuthenticationError, AuthorizationError, NoPermissionError)):
        return True
    text = str(exc)
    return text.startswith(("NOAUTH", "NOPERM", "WRONGPASS")) or any(words in text for words in _DENIALS)


def _options(settings: RedisSettings, *, tls: bool) -> dict[str, Any]:
    options: dict[str, Any] = {
        "socket_timeout": settings.timeout_s,
        "socket_connect_timeout": settings.connect_timeout_s,
        # RESP2 with hiredis decodes a match in two thirds of RESP3's time.
        "protocol": 2,
        "decode_responses": False,
        # The breaker above repeats, after a pause and for all calls together; here a deadline is one.
        "retry": Retry(NoBackoff(), 0),
    }
    if settings.username is not None:
        options["username"] = settings.username
    if settings.password is not None:
        options["password"] = settings.password.get_secret_value()
    if tls:
        options["ssl_cert_reqs"] = "required" if settings.tls_verify else "none"
        options["ssl_check_hostname"] = settings.tls_verify
        if settings.tls_ca is not None:
            if not Path(settings.tls_ca).is_file():
                raise ConfigError(f"redis.tls_ca = {settings.tls_ca!r}: no such file")
            options["ssl_ca_certs"] = settings.tls_ca
    return options
