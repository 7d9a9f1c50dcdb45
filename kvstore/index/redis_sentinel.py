"""Following a master that Sentinels watch: who it is, and connections that lead to it and nowhere else.

The Sentinels are asked when a connection is made and the master isn't known, or is in doubt; not for
every connection. In doubt it is after a call that was refused as a write to a replica, that found the
connection lost, or that timed out; until it is known again idle connections aren't used either. And while
there are calls they are asked every few seconds beside them: after an orderly failover, or cut off from
its Sentinels, the old master takes writes for ten seconds and more that are lost when it is demoted.

    all Sentinels are asked at once      one that hangs costs no more than all of them
    the newest configuration wins        a Sentinel that was cut off still names the old master
    a new connection asks for ROLE       what the Sentinels named may not have been promoted yet, or not be
                                         the master any more; a replica is left at once, unread
    no Sentinel answers                  the master known last is good enough, if it still says that it is

redis-py's own Sentinel pool is not used. It asks one Sentinel after another, each up to its timeouts, and
once per connection, so that a call may take many times its deadline, and a fleet that reconnects asks
thousands of times; it raises at once when all connections are in use; it does without ROLE.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import redis

from kvstore.errors import KVStoreError, PermissionDenied, TransientError
from kvstore.index.aside import aside, within
from kvstore.index.redis_errors import FAILURES, demoted, denied
from schemas.urls import place

Address = tuple[str, int]

#: After nobody, or nobody who knew, has answered: nobody is asked for so long.
_PAUSE_S = 0.25
#: How old the answer may be that calls rely on.
_LOOK_S = 5.0
#: The least that a step of a call gets when the deadline is as good as over: 0 would mean "don't wait".
_LEAST_S = 0.001
_NO_MASTER = "No such master"


class Deadline(threading.local):
    """When the call ends that this thread makes now."""

    until_s = float("inf")

    def begin(self, timeout_s: float) -> None:
        """A call begins that may take so long."""
        self.until_s = time.monotonic() + timeout_s

    def left_s(self, most_s: float) -> float:
        """What is left of it, at most `most_s`. Raises redis.TimeoutError if nothing is."""
        left = self.until_s - time.monotonic()
        if left <= 0:
            raise redis.TimeoutError("no time left of the call")
        return max(_LEAST_S, min(left, most_s))


@dataclass(frozen=True, slots=True)
class Answer:
    """What one Sentinel says."""

    #: host:port
    sentinel: str
    address: Address | None = None
    #: Grows with every failover.
    epoch: int = 0
    #: The Sentinel can't reach it.
    down: bool = False
    #: Why there is no address.
    problem: str = ""
    denied: bool = False

    @property
    def text(self) -> str:
        """For people."""
        if self.address is None:
            return self.problem
        return f"{place(*self.address)}{' is down' if self.down else ''}"


class Sentinels:
    """Who the master is. Safe for threads, and for processes that fork."""

    def __init__(
        self,
        hosts: Sequence[Address],
        master: str,
        *,
        timeout_s: float,
        connect: Callable[..., redis.Connection],
    ) -> None:
        """`connect` makes an unconnected connection to a Sentinel from `host` and `port`."""
        self._hosts = tuple(hosts)
        self._name = master
        self._timeout_s = timeout_s
        self._connect = connect
        self._known: Address | None = None
        self._epoch = 0
        self._look_s = float("inf")
        self._doubted = False
        self._silent_until = 0.0
        self._failure: KVStoreError | None = None
        self._asking = threading.Lock()
        self._pid = os.getpid()

    @property
    def known(self) -> Address | None:
        """The master as of now, as far as is known."""
        return self._known

    def trusts(self, address: Address) -> bool:
        """Whether a connection to `address` may go on being used."""
        if time.monotonic() >= self._look_s:
            # Of several threads that come here at once one finds the lock taken and ends.
            self._look_s = time.monotonic() + _LOOK_S
            with suppress(OSError):
                aside(self._look)
        return address == self._known and not self._doubted

    def confirm(self, address: Address) -> None:
        """`address` itself says that it is the master."""
        if address == self._known:
            self._doubted = False

    def doubt(self, address: Address) -> None:
        """`address` has failed as a master."""
        if address == self._known:
            self._doubted = True

    def master(self, wait_s: float) -> Address:
        """Its address, asked for if need be, once for all threads that wait for it.

        Raises TransientError or PermissionDenied, within `wait_s`.
        """
        known = self._known
        if known is not None and not self._doubted:
            return known
        until = time.monotonic() + wait_s
        lock = self._lock()
        if not lock.acquire(timeout=wait_s):
            raise redis.TimeoutError(f"the Sentinels of {self._name} are being asked")
        try:
            known = self._known
            if known is not None and not self._doubted:
                return known
            if time.monotonic() < self._silent_until:
                return self._without_answer()
            return self._ask(max(_LEAST_S, until - time.monotonic()))
        finally:
            lock.release()

    def survey(self) -> list[Answer]:
        """What every Sentinel says now; for people."""
        return self._with_silent(self._collect(3 * self._timeout_s, everybody=True))

    def _look(self) -> None:
        """Whether it is another one by now."""
        lock = self._lock()
        if not lock.acquire(blocking=False):
            return
        try:
            best = self._best(self._collect(self._timeout_s))
            if best is not None and best.epoch > self._epoch and not best.down:
                self._learn(best)
        finally:
            lock.release()

    def _learn(self, best: Answer) -> Address:
        assert best.address is not None
        self._known, self._epoch = best.address, best.epoch
        self._doubted, self._failure = False, None
        self._look_s = time.monotonic() + _LOOK_S
        return best.address

    def _best(self, answers: Sequence[Answer]) -> Answer | None:
        """The newest of those that name a master, but for news that are older than what is known.

        If most say the older thing, the Sentinels have been set up anew.
        """
        named = [answer for answer in answers if answer.address is not None]
        best = max(named, key=lambda answer: (answer.epoch, not answer.down), default=None)
        if best is not None and best.epoch < self._epoch and len(named) <= len(self._hosts) // 2:
            return None
        return best

    def _ask(self, wait_s: float) -> Address:
        answers = self._collect(min(wait_s, self._timeout_s))
        best = self._best(answers)
        if best is not None and not best.down:
            return self._learn(best)
        if best is not None and best.address is not None:
            self._known = None
            where = place(*best.address)
            self._failure = TransientError(f"master {self._name} at {where} is down, say its Sentinels")
        else:
            kind = PermissionDenied if any(answer.denied for answer in answers) else TransientError
            self._failure = kind(_problems(self._with_silent(answers)))
        self._silent_until = time.monotonic() + _PAUSE_S
        return self._without_answer()

    def _without_answer(self) -> Address:
        # No Sentinel says that it is another one, and if it isn't the master any more it will say so.
        if self._known is not None:
            return self._known
        assert self._failure is not None
        raise type(self._failure)(str(self._failure))

    def _collect(self, wait_s: float, *, everybody: bool = False) -> list[Answer]:
        """Answers of all, or of a majority that names a master, or as many as there are in time."""
        arrived: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        for host in self._hosts:
            try:
                aside(lambda host=host: arrived.put(self._ask_one(host)))  # type: ignore[misc]
            except OSError as exc:
                arrived.put(Answer(place(*host), problem=str(exc)))
        until = time.monotonic() + wait_s
        answers: list[Answer] = []
        while len(answers) < len(self._hosts):
            try:
                answers.append(arrived.get(timeout=max(0.0, until - time.monotonic())))
            except queue.Empty:
                break
            named = sum(answer.address is not None for answer in answers)
            if not everybody and named > len(self._hosts) // 2:
                break
        return answers

    def _with_silent(self, answers: list[Answer]) -> list[Answer]:
        """The same, and that those who aren't among them have said nothing."""
        heard = {answer.sentinel for answer in answers}
        silent = [sentinel for host in self._hosts if (sentinel := place(*host)) not in heard]
        return answers + [Answer(sentinel, problem="no answer in time") for sentinel in silent]

    def _ask_one(self, host: Address) -> Answer:
        sentinel = place(*host)
        connection = self._connect(host=host[0], port=host[1])
        try:
            told = _told(connection, "SENTINEL", "MASTER", self._name)
        except redis.ResponseError as exc:
            if _NO_MASTER in str(exc):
                return Answer(sentinel, problem=self._unknown(connection))
            return Answer(sentinel, problem=str(exc), denied=denied(exc))
        except FAILURES as exc:
            return Answer(sentinel, problem=str(exc), denied=denied(exc))
        finally:
            connection.disconnect()  # type: ignore[no-untyped-call]
        fields = dict(zip(told[::2], told[1::2], strict=True))
        return Answer(
            sentinel,
            (fields[b"ip"].decode(), int(fields[b"port"])),
            epoch=int(fields.get(b"config-epoch", 0)),
            down=bool({b"s_down", b"o_down"} & set(fields[b"flags"].split(b","))),
        )

    def _unknown(self, connection: redis.Connection) -> str:
        try:
            masters = _told(connection, "SENTINEL", "MASTERS")
        except FAILURES:
            masters = []
        names = sorted(dict(zip(one[::2], one[1::2], strict=True))[b"name"].decode() for one in masters)
        knows = f"; it knows {', '.join(names)}" if names else ""
        return f"it knows no master {self._name!r}{knows} (the index URL is redis+sentinel://HOST:26379/MASTER/0)"

    def _lock(self) -> threading.Lock:
        if self._pid != os.getpid():
            # Another thread of the parent may have held it when this process began.
            self._asking, self._pid = threading.Lock(), os.getpid()
        return self._asking


def _told(connection: redis.Connection, *words: str) -> Any:
    """The reply. Raises what redis-py raises."""
    connection.connect()  # type: ignore[no-untyped-call]
    connection.send_command(*words)  # type: ignore[no-untyped-call]
    return connection.read_response()


def _problems(answers: Sequence[Answer]) -> str:
    """What each Sentinel that named no master says instead, the same things once."""
    said: dict[str, list[str]] = {}
    for answer in answers:
        said.setdefault(answer.problem, []).append(answer.sentinel)
    texts = [f"Sentinel {', '.join(who)}: {problem}" for problem, who in said.items()]
    if any(answer.denied for answer in answers):
        texts.append("give its credentials as redis.sentinel_username and redis.sentinel_password")
    return "; ".join(texts)


class MasterConnection(redis.Connection):
    """A connection to whoever is the master when it is made, used only while it is that.

    What it does is over at the deadline of the call that it does it for: finding the master, connecting,
    introducing itself, the reply.
    """

    def __init__(self, *, sentinels: Sentinels, deadline: Deadline, **options: Any) -> None:
        super().__init__(**options)  # type: ignore[no-untyped-call]
        self._sentinels = sentinels
        self._deadline = deadline
        self._reply_s = float(options["socket_timeout"])
        self._connect_s = float(options["socket_connect_timeout"])

    @property
    def _address(self) -> Address:
        return self.host, self.port

    def connect(self) -> None:
        # The pool calls this whenever the connection is taken out of it.
        if not self._sentinels.trusts(self._address):
            self.disconnect()  # type: ignore[no-untyped-call]
        super().connect()  # type: ignore[no-untyped-call]

    def _connect(self) -> Any:
        self.host, self.port = self._sentinels.master(self._deadline.left_s(self._reply_s))
        left_s = self._deadline.left_s(self._reply_s)
        self.socket_connect_timeout = min(self._connect_s, left_s)
        # For the handshake of TLS.
        self.socket_timeout = left_s
        connect: Callable[[], socket.socket] = super()._connect
        try:
            # Sentinels may announce names, and looking up a name knows no deadline.
            sock = within(left_s, connect, late=socket.socket.close)
        except OSError:
            self._sentinels.doubt(self._address)
            raise
        finally:
            self.socket_timeout = self._reply_s
        sock.settimeout(self._reply_s)
        return sock

    def on_connect_check_health(self, check_health: bool = True) -> None:
        super().on_connect_check_health(check_health)
        self.send_command("ROLE", check_health=False)  # type: ignore[no-untyped-call]
        try:
            role = self.read_response()[0]
        except redis.exceptions.NoPermissionError:
            role = b"master"  # its answers to writes will tell
        if role != b"master":
            self._sentinels.doubt(self._address)
            where, role = place(*self._address), role.decode(errors="replace")
            raise redis.ConnectionError(f"{where} is a {role}, and no master any more or not yet")
        self._sentinels.confirm(self._address)

    def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        self._limit()
        super().send_packed_command(command, check_health)  # type: ignore[no-untyped-call]

    def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            self._limit()
            return super().read_response(*args, **options)
        except (redis.ConnectionError, redis.TimeoutError) as exc:
            self.disconnect()  # type: ignore[no-untyped-call]
            if not denied(exc):
                self._sentinels.doubt(self._address)
            raise
        except redis.ResponseError as exc:
            if demoted(exc):
                self.disconnect()  # type: ignore[no-untyped-call]
                self._sentinels.doubt(self._address)
            raise

    def _limit(self) -> None:
        """The next step of this connection takes no longer than the call may."""
        sock: Any = self._sock
        if sock is not None:
            sock.settimeout(self._deadline.left_s(self._reply_s))


class TlsMasterConnection(MasterConnection, redis.SSLConnection):
    """The same over TLS."""
