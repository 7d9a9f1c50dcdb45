"""From a URL and settings to redis-py's pools and connections. No I/O."""

from __future__ import annotations

import inspect
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.exceptions import AuthenticationError
from redis.retry import Retry

from kvstore.errors import ConfigError
from kvstore.index.aside import within
from kvstore.index.redis_sentinel import Deadline, MasterConnection, Sentinels, TlsMasterConnection
from schemas.settings import RedisSettings
from schemas.urls import RedisLocation

#: Connections don't say which library they are of: that costs two round trips each, and users that may do no
#: more than the index needs are denied it, in the server's log of such things. redis-py 7 renamed the option.
_NAMELESS: dict[str, Any] = (
    {"driver_info": None}
    if "driver_info" in inspect.signature(redis.connection.AbstractConnection.__init__).parameters
    else {"lib_name": None, "lib_version": None}
)


class _Timely(redis.Connection):
    """Made in time, or not: getaddrinfo knows no deadline, and each address of a name has one of its own."""

    def _connect(self) -> Any:
        connect: Callable[[], socket.socket] = super()._connect
        # Time for a second address if the first is dead, or for the handshake of TLS.
        wait_s = float(self.socket_connect_timeout or 0) + float(self.socket_timeout or 0)
        return within(wait_s, connect, late=socket.socket.close)


class TcpConnection(_Timely):
    """A connection to one server."""


class TlsConnection(_Timely, redis.SSLConnection):
    """A connection over TLS that has been read from when the pool gets it.

    With TLS 1.3 a server sends session tickets after the handshake, and to redis-py 8.1's pool a connection
    on which something has arrived that nobody asked for is no good: it gives up after the second.
    """

    def on_connect_check_health(self, check_health: bool = True) -> None:
        super().on_connect_check_health(check_health)
        _read_from(self)


def _read_from(connection: Any) -> None:
    connection.send_command("PING", check_health=False)
    # Whoever may not do so much is told by the command that comes next.
    with suppress(redis.ResponseError, AuthenticationError):
        connection.read_response()


def pool(
    location: RedisLocation,
    settings: RedisSettings,
    sentinels: Sentinels | None = None,
    deadline: Deadline | None = None,
) -> redis.BlockingConnectionPool:
    """Connections to one server, or to the master that `sentinels` name. Raises ConfigError."""
    options = _login(location, settings) | _options(settings, tls=location.tls)
    kind: Any
    if sentinels is not None:
        kind = TlsMasterConnection if location.tls else MasterConnection
        options |= {"sentinels": sentinels, "deadline": deadline}
    elif location.path is not None:
        kind = redis.UnixDomainSocketConnection
        options["path"] = location.path
    else:
        kind = TlsConnection if location.tls else TcpConnection
        options["host"], options["port"] = location.hosts[0]
    return redis.BlockingConnectionPool(  # type: ignore[no-untyped-call]
        connection_class=kind,
        max_connections=settings.max_connections,
        timeout=settings.timeout_s,
        db=location.db,
        **options,
    )


def cluster(location: RedisLocation, settings: RedisSettings) -> Callable[[], RedisCluster]:
    """What makes a client of the Cluster that the hosts are part of, and asks them for its nodes."""
    options = _login(location, settings) | _options(settings, tls=location.tls)
    if location.tls:
        # The class of its connections can't be chosen: this does for them what TlsConnection does.
        options["redis_connect_func"] = _read_from

    def make() -> RedisCluster:
        return RedisCluster(
            startup_nodes=[
                ClusterNode(*host)  # type: ignore[no-untyped-call]
                for host in location.hosts
            ],
            ssl=location.tls,
            max_connections=settings.max_connections,
            # Namespaces on the nodes that are left go on working.
            require_full_coverage=False,
            **options,
        )

    return make


def sentinels(location: RedisLocation, settings: RedisSettings) -> Sentinels:
    """Those that the URL names. Raises ConfigError."""
    options = _options(settings, tls=location.tls)
    # They are asked beside each other, and their master then has to answer within the same call.
    options["socket_timeout"] = options["socket_connect_timeout"]
    if settings.sentinel_password is not None:
        options["username"] = settings.sentinel_username
        options["password"] = settings.sentinel_password.get_secret_value()
    kind = redis.SSLConnection if location.tls else redis.Connection
    assert location.master is not None
    return Sentinels(
        location.hosts,
        location.master,
        timeout_s=settings.connect_timeout_s,
        connect=lambda **host: kind(**host, **options),
    )


def _login(location: RedisLocation, settings: RedisSettings) -> dict[str, Any]:
    known = {"username": location.username, "password": location.password}
    if settings.username is not None:
        known["username"] = settings.username
    if settings.password is not None:
        known["password"] = settings.password.get_secret_value()
    return {name: value for name, value in known.items() if value is not None}


def _options(settings: RedisSettings, *, tls: bool) -> dict[str, Any]:
    options: dict[str, Any] = {
        "socket_timeout": settings.timeout_s,
        "socket_connect_timeout": settings.connect_timeout_s,
        # RESP2 with hiredis decodes a match in two thirds of RESP3's time.
        "protocol": 2,
        "decode_responses": False,
        # The breaker above repeats, after a pause and for all calls together; here a deadline is one.
        "retry": Retry(NoBackoff(), 0),
        **_NAMELESS,
    }
    return options | _tls(settings) if tls else options


def _tls(settings: RedisSettings) -> dict[str, Any]:
    options: dict[str, Any] = {
        "ssl_cert_reqs": "required" if settings.tls_verify else "none",
        "ssl_check_hostname": settings.tls_verify,
    }
    for name in ("tls_ca", "tls_cert", "tls_key"):
        path = getattr(settings, name)
        if path is not None and not Path(path).is_file():
            raise ConfigError(f"redis.{name} = {path!r}: no such file")
    if settings.tls_ca is not None:
        _check_authority(settings.tls_ca)
        options["ssl_ca_certs"] = settings.tls_ca
    if settings.tls_cert is not None and settings.tls_key is not None:
        _check_pair(settings.tls_cert, settings.tls_key)
        # Without a password OpenSSL asks the terminal for that of an encrypted key, which may come later.
        options |= {"ssl_certfile": settings.tls_cert, "ssl_keyfile": settings.tls_key, "ssl_password": ""}
    return options


def _check_authority(path: str) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except OSError as exc:
        raise ConfigError(f"redis.tls_ca = {path!r}: no certificate in PEM in it ({exc})") from None


def _check_pair(cert: str, key: str) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(cert, key, password="")
    except (OSError, ValueError) as exc:  # ssl.SSLError is an OSError
        why = f" ({exc.strerror or exc})" if isinstance(exc, OSError) else ""
        raise ConfigError(
            f"redis.tls_cert = {cert!r} and redis.tls_key = {key!r} are not a certificate and its key, in "
            f"PEM and not encrypted{why}"
        ) from None
