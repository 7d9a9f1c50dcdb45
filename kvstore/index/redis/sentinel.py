"""Follows a master that Sentinels watch: Sentinels finds its address, MasterConnection leads to it.

The Sentinels are asked one after another, each up to its timeouts, until one names a master that is up; and
looking up their names knows no deadline. So a thread of its own asks them, once for all calls that
wait for the answer, each until its own deadline. A connection asks when it is made. A master that is cut off
from its Sentinels, or demoted by hand, goes on answering on the connections that it has; so while there are
calls the Sentinels are asked every few seconds as well.

docs/adr/0024-sentinel.md says why this is not redis-py's Sentinel, and what is left out because it would only
save misses.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import Any

import redis

from kvstore.index.redis.errors import FAILURES, demoted, denied
from kvstore.jitter import sooner
from kvstore.threads.deadline import in_background
from schemas.urls import place

Address = tuple[str, int]

#: Greatest age of the answer that calls rely on, in seconds. They ask up to a half of it sooner, so that a
#: fleet doesn't ask in step.
_LOOK_S = 5.0
#: What redis-py raises when it takes apart an answer that no Sentinel gives.
_GARBLED = (LookupError, ValueError, TypeError, AttributeError)


@dataclass(frozen=True, slots=True)
class Answer:
    """What one Sentinel says."""

    #: host:port
    sentinel: str
    address: Address | None = None
    #: The Sentinel can't reach the master.
    down: bool = False
    #: Why there is no address.
    problem: str = ""
    denied: bool = False

    @property
    def text(self) -> str:
        """The answer in words."""
        if self.address is None:
            return self.problem
        return f"{place(*self.address)}{' is down' if self.down else ''}"


class Sentinels:
    """Says who the master is. Safe for threads, and for processes that fork."""

    def __init__(self, clients: Mapping[Address, redis.Redis], master: str, *, timeout_s: float) -> None:
        """`clients` lead to the Sentinels; a call waits up to `timeout_s` for their answer."""
        self._clients = clients
        self._name = master
        self._timeout_s = timeout_s
        #: The Sentinel that answered last, which is asked first.
        self._first = next(iter(clients))
        self._known: Address | None = None
        self._look_s = inf
        #: Held for moments, never while something is waited for.
        self._lock = threading.Lock()
        #: The process that asks, and the answer on its way.
        self._asked: tuple[int, Future[Address]] = 0, Future()

    @property
    def known(self) -> Address | None:
        """The master by the last answer."""
        return self._known

    def trust(self, address: Address) -> bool:
        """Returns whether a connection to `address` may still be used."""
        if time.monotonic() >= self._look_s:
            # Set first, so that other threads that come here meanwhile don't ask as well.
            self._look_s = time.monotonic() + sooner(_LOOK_S)
            with suppress(OSError):
                self._answer()
        return address == self._known

    def master(self) -> Address:
        """Returns the master's address, asked for now. Raises one of FAILURES, within `timeout_s`."""
        answer = self._answer()
        try:
            return answer.result(self._timeout_s)
        except TimeoutError:
            if answer.done():
                raise
            raise redis.TimeoutError(f"the Sentinels of {self._name} don't answer in time") from None

    def survey(self) -> list[Answer]:
        """Returns what every Sentinel says now, for people."""
        return [self._ask_one(host) for host in self._clients]

    def close(self) -> None:
        """Closes the connections to Sentinels. Idempotent."""
        for client in self._clients.values():
            client.close()
            client.connection_pool.disconnect()

    def _answer(self) -> Future[Address]:
        with self._lock:
            pid, asked = self._asked
            if pid != os.getpid() or asked.done():
                asked = in_background(self._ask)
                self._asked = os.getpid(), asked
            return asked

    def _ask(self) -> Address:
        answers = []
        for host in sorted(self._clients, key=lambda host: host != self._first):
            answer = self._ask_one(host)
            if answer.address is not None and not answer.down:
                self._first, self._known = host, answer.address
                break
            answers.append(answer)
        else:
            refused = any(answer.denied for answer in answers)
            # If no Sentinel names any, the known master stays: should it be none any more, it refuses writes.
            if self._known is None or refused or any(answer.address for answer in answers):
                kind = redis.AuthenticationError if refused else redis.ConnectionError
                raise kind(self._problems(answers))
        self._look_s = time.monotonic() + sooner(_LOOK_S)
        return self._known

    def _ask_one(self, host: Address) -> Answer:
        sentinel = place(*host)
        try:
            masters: Any = self._clients[host].sentinel_masters()
            state = masters.get(self._name)
            if state is not None:
                down = state["is_sdown"] or state["is_odown"]
                return Answer(sentinel, (state["ip"], state["port"]), down=down)
        except FAILURES as exc:
            return Answer(sentinel, problem=str(exc), denied=denied(exc))
        except _GARBLED:
            return Answer(sentinel, problem="it answers, but not as Sentinels do")
        knows = f"; it knows {', '.join(sorted(masters))}" if masters else ""
        hint = "the index URL is redis+sentinel://HOST:26379/MASTER/0"
        return Answer(sentinel, problem=f"it knows no master {self._name!r}{knows} ({hint})")

    def _problems(self, answers: Sequence[Answer]) -> str:
        """Returns what the Sentinels say instead of naming a master that is up, each different text once."""
        said: dict[str, list[str]] = {}
        for answer in answers:
            said.setdefault(answer.text, []).append(answer.sentinel)
        texts = [f"Sentinel {', '.join(who)}: {text}" for text, who in said.items()]
        if any(answer.denied for answer in answers):
            texts.append("give its credentials as redis.sentinel_username and redis.sentinel_password")
        return "; ".join([f"no master {self._name}", *texts])


class MasterConnection(redis.Connection):
    """A connection to the server that is the master when it is made, used only while that one is the
    master."""

    def __init__(self, *, sentinels: Sentinels, **options: Any) -> None:
        super().__init__(**options)  # type: ignore[no-untyped-call]
        self._sentinels = sentinels

    def connect(self) -> None:
        # The pool calls this whenever the connection is taken out of it.
        if not self._sentinels.trust((self.host, self.port)):
            self.disconnect()  # type: ignore[no-untyped-call]
        super().connect()  # type: ignore[no-untyped-call]

    def _connect(self) -> Any:
        self.host, self.port = self._sentinels.master()
        return super()._connect()  # type: ignore[no-untyped-call]

    def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            return super().read_response(*args, **options)
        except redis.ResponseError as exc:
            if not demoted(exc):
                raise
            # The replica has changed nothing. The next attempt asks who the master is.
            self.disconnect()  # type: ignore[no-untyped-call]
            raise redis.ConnectionError(str(exc)) from exc
