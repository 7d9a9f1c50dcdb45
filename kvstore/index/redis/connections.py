"""Makes redis-py's pools and connections from a URL and settings. No I/O."""

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
from kvstore.index.redis.counted import counting
from kvstore.index.redis.sentinel import MasterConnection, Sentinels
from kvstore.index.redis.timed import TimedSocket, connecting
from kvstore.threads.deadline import within
from schemas.settings import RedisSettings
from schemas.urls import RedisLocation, place

#: Options by which connections don't tell the server their library: that costs two round trips each, and
#: users with no more rights than the index needs are denied it, each time with a line in the server's log of
#: denials. redis-py 7 renamed the option.
_NO_LIBRARY_NAME: dict[str, Any] = (
    {"driver_info": None}
    if "driver_info" in inspect.signature(redis.connection.AbstractConnection.__init__).parameters
    else {"lib_name": None, "lib_version": None}
)


class _Counting(redis.connection.AbstractConnection):
    """Bounds how many elements an answer has, whichever parser the client wants."""

    def set_parser(self, parser_class: Any) -> None:
        super().set_parser(counting(parser_class))  # type: ignore[no-untyped-call]


class _InTime(_Counting, redis.Connection):
    """Bounds the time of connecting: getaddrinfo knows no deadline, and each address of a name has a timeout
    of its own. What is then sent and received is bounded by its socket."""

    def _connect(self) -> Any:
        connect: Callable[[], socket.socket] = super()._connect
        connect_s, timeout_s = float(self.socket_connect_timeout or 0), float(self.socket_timeout or 0)
        # Time for a second address if the first is dead, or for a TLS handshake.
        wait_s = min(connect_s + timeout_s, connecting(connect_s))
        return TimedSocket(within(wait_s, connect, late=socket.socket.close), timeout_s)


class TcpConnection(_InTime):
    """A connection to one server."""


class UnixConnection(_Counting, redis.UnixDomainSocketConnection):
    """A connection to a server of this machine."""

    def _connect(self) -> Any:
        timeout_s = float(self.socket_timeout or 0)
        connecting(float(self.socket_connect_timeout or 0))
        return TimedSocket(super()._connect(), timeout_s)  # type: ignore[no-untyped-call]


class TlsConnection(_InTime, redis.SSLConnection):
    """A connection over TLS from which something has been read before the pool gets it.

    With TLS 1.3 a server sends session tickets after the handshake, and redis-py 8.1's pool rejects a
    connection on which something has arrived that nobody asked for: it gives up after the second one.
    """

    def on_connect_check_health(self, check_health: bool = True) -> None:
        super().on_connect_check_health(check_health)
        _read_from(self)


class TcpMasterConnection(MasterConnection, TcpConnection):
    """A connection to the master."""


class TlsMasterConnection(MasterConnection, TlsConnection):
    """A connection to the master over TLS."""


def _read_from(connection: Any) -> None:
    connection.send_command("PING", check_health=False)
    # A user without the right to PING gets the error with the command that comes next.
    with suppress(redis.ResponseError, AuthenticationError):
        connection.read_response()


def pool(
    location: RedisLocation, settings: RedisSettings, sentinels: Sentinels | None = None
) -> redis.BlockingConnectionPool:
    """Returns a pool for one server, or for the master that `sentinels` name. Raises ConfigError."""
    options = _login(location, settings) | _options(settings, tls=location.tls)
    kind: Any
    if sentinels is not None:
        kind = TlsMasterConnection if location.tls else TcpMasterConnection
        options["sentinels"] = sentinels
    elif location.path is not None:
        kind = UnixConnection
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
    """Returns a function that asks the hosts for the nodes of their Cluster and makes a client of it."""
    options = _login(location, settings) | _options(settings, tls=location.tls)
    options["connection_class"] = TlsConnection if location.tls else TcpConnection
    first, *others = location.hosts

    def make() -> RedisCluster:
        return RedisCluster(
            # Only a client that is made from a URL lets the class of its connections be chosen.
            url=f"redis://{place(*first)}",
            startup_nodes=[ClusterNode(*host) for host in others],  # type: ignore[no-untyped-call]
            max_connections=settings.max_connections,
            # Namespaces on the remaining nodes go on working.
            require_full_coverage=False,
            **options,
        )

    return make


def sentinels(location: RedisLocation, settings: RedisSettings) -> Sentinels:
    """Returns the Sentinels that the URL names. Raises ConfigError."""
    options = _options(settings, tls=location.tls)
    # Several may have to be asked, and then the master has to answer within the same call.
    options["socket_timeout"] = options["socket_connect_timeout"]
    if settings.sentinel_password is not None:
        options["username"] = settings.sentinel_username
        options["password"] = settings.sentinel_password.get_secret_value()
    kind: Any = TlsConnection if location.tls else TcpConnection
    clients = {
        (host, port): redis.Redis(
            connection_pool=redis.ConnectionPool(connection_class=kind, host=host, port=port, **options)
        )
        for host, port in location.hosts
    }
    assert location.master is not None
    return Sentinels(clients, location.master, timeout_s=settings.timeout_s)


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
        # hiredis decodes a match in RESP2 in two thirds of the time that RESP3 takes.
        "protocol": 2,
        "decode_responses": False,
        # The breaker above retries, after a pause and for all calls together; retries here would take each
        # call longer than its deadline.
        "retry": Retry(NoBackoff(), 0),
        **_NO_LIBRARY_NAME,
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
        # Without a password OpenSSL asks the terminal for one, should the key be replaced by an encrypted
        # one.
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
