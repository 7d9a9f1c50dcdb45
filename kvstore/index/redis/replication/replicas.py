"""Reads from replicas of the masters that a Cluster has, or that Sentinels watch.

A replica is as of a time: the latest one at which its master had written no more than the replica has now. To
know it, a thread of its own asks the master how much it has written, and then others, side by side, ask each
replica how much it has; once in a quarter of the longest lag that is allowed, and only while something is
read. So what is known of a replica grows old by itself when it hangs, when its link or its master's is cut,
and when nobody can ask: after `max_lag_s` the master is read again, without anybody having waited for it.

A replica that fails a read is not read again before it has answered the next look, and the master is asked in
the same call. A connection that is made meanwhile has to show that its replica still has what it had. And a
replica that takes much longer to answer than its master is not read.

What a replica may do to answers: docs/adr/0046-hot-prefixes.md.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import redis
from redis.cluster import RedisCluster

from kvstore.index.numbers import whole
from kvstore.index.redis.errors import FAILURES, denied
from kvstore.index.redis.replication.nodes import (
    GARBLED,
    MOST_REPLICAS,
    Address,
    client_of,
    listed,
    listed_by_cluster,
    masters_of,
    nodes_of,
)
from kvstore.rules.text import readable
from kvstore.threads.deadline import in_background
from schemas.urls import place

log = logging.getLogger(__name__)

#: Is told by a connection what INFO replication says. Raises redis.ConnectionError.
Proof = Callable[[Mapping[bytes, bytes]], None]

#: What becomes of reads: a replica answers, it fails and its master is asked, or none is close enough.
COUNTED: Final = ("replica_reads", "replica_failures", "replica_lags")
#: Looks within the longest lag that is allowed.
_LOOKS = 4
#: Most masters of which replicas are read.
_MOST_MASTERS = 1024
#: Seconds for which a server that denies looks is left alone.
_REST_S = 300.0
#: Seconds for which a master that has no replicas is left alone.
_ALONE_S = 10.0
#: A replica is far away if the quickest of its last answers took so many times as long as the quickest of its
#: master's, and so many seconds more.
_FAR_TIMES, _FAR_S = 4, 0.005
#: Seconds for which the replicas that a Cluster's master has named are believed to be all.
_NAMED_S = 10.0
#: Seconds within which one that is in step has heard of what was written.
_STEP_S = 1.0
#: Most characters of a reason in the log.
_CHARS = 200


@dataclass(frozen=True, slots=True)
class Replica:
    """A replica that has answered the last look."""

    address: Address
    client: redis.Redis
    #: `time.monotonic` time of which it is, at least.
    as_of_s: float
    #: How much it had of what its master has written, and the name of that.
    has: int
    history: str
    master: _Master


@dataclass(slots=True)
class _Master:
    """What is known of one master's replicas. Attributes are replaced as a whole, by any thread."""

    look_s: float = 0.0
    #: The look that is under way, and its questions.
    looking: Future[Any] | None = None
    asking: dict[Address, Future[None]] = field(default_factory=dict)
    #: When a replica that is left alone is asked again.
    resting: dict[Address, float] = field(default_factory=dict)
    #: What a Cluster's master has named, and until when that is believed.
    named: Sequence[Address] = ()
    named_s: float = 0.0
    #: Seconds that the last answers took, its own (None) and each replica's.
    took: defaultdict[Address | None, deque[float]] = field(
        default_factory=lambda: defaultdict(lambda: deque(maxlen=_LOOKS + 2))
    )
    #: The name of what it has written, which is another after a failover.
    history: str = ""
    #: When it was asked, and how much it had written.
    written: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_LOOKS + 2))
    readable: tuple[Replica, ...] = ()
    #: Held for moments, while `history` and `readable` are replaced.
    lock: threading.Lock = field(default_factory=threading.Lock)
    clients: dict[Address, redis.Redis] = field(default_factory=dict)
    #: Why a replica is not read; what is in the log already.
    excluded: dict[Address, str] = field(default_factory=dict)

    def forget(self, address: Address) -> None:
        """Forgets what is remembered of a replica that is gone."""
        known: tuple[dict[Any, Any], ...] = (self.asking, self.resting, self.took, self.excluded)
        for each in known:
            each.pop(address, None)


class Replicas:
    """Says which replica may be read instead of a key's master. Safe for threads, and for processes that
    fork."""

    def __init__(
        self,
        connect: Callable[[Address, bool, Proof], redis.Redis],
        *,
        max_lag_s: float,
        count: Callable[[str], None],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`connect` makes a client of an address, and of a Cluster's replica if its second argument is true,
        which calls the third with what INFO replication says at each connection; no I/O. `count` is told of
        each of COUNTED."""
        self._connect = connect
        self._max_lag_s = max_lag_s
        self._count = count
        self._monotonic = monotonic
        #: Those of this process; one that forks has threads and locks that its child has not.
        self._masters: dict[Address, _Master] = {}
        self._pid = os.getpid()
        self._turn = itertools.count()
        self._closed = threading.Event()

    def of(self, client: redis.Redis | RedisCluster, key: str) -> Replica | None:
        """Returns a replica that may be read instead of the master that has `key`, the next one at each call;
        None: read the master. No I/O."""
        nodes = nodes_of(client, key)
        if nodes is None:
            return None
        master = self._master(nodes[0] if nodes else ("", 0))
        now = self._monotonic()
        if now >= master.look_s:
            # Set first, so that other threads that come here meanwhile don't look as well.
            master.look_s = now + self._max_lag_s / _LOOKS
            # A look that hangs is waited for; what it found before grows old meanwhile.
            if master.looking is None or master.looking.done():
                with suppress(OSError):
                    master.looking = in_background(lambda: self.look(master, client, nodes))
        found = master.readable
        first = next(self._turn)
        for number in range(len(found)):
            replica = found[(first + number) % len(found)]
            if now - replica.as_of_s <= self._max_lag_s:
                return replica
        if found or master.excluded:
            self._count("replica_lags")
        return None

    def answered(self) -> None:
        """Counts a read that a replica has answered."""
        self._count("replica_reads")

    def failed(self, replica: Replica, exc: Exception) -> None:
        """Reads a replica that has failed no more, until it answers the next look."""
        self._count("replica_failures")
        log.debug("replica %s: %s; the master is asked", place(*replica.address), exc)
        _publish(replica.master, replica.address, None)

    def survey(self, client: redis.Redis | RedisCluster) -> dict[Address, str]:
        """Looks at the replicas of all masters, and says of each why it is not read; "" if it is. Takes as
        long as their timeouts, of one master after the other."""
        found: dict[Address, str] = {}
        for nodes in masters_of(client):
            master = self._master(nodes[0] if nodes else ("", 0))
            for _ in range(_LOOKS):
                for asked in self.look(master, client, nodes):
                    asked.result()
                read = {one.address for one in master.readable}
                if read | master.excluded.keys() >= master.clients.keys():
                    break
                # One that is in step hears meanwhile of what was written before.
                time.sleep(min(self._max_lag_s, _STEP_S) / _LOOKS)
            for address in list(master.clients):
                behind = "" if address in read else "it is behind its master, or can't tell"
                found[address] = master.excluded.get(address, behind)
        return found

    def close(self) -> None:
        """Closes the connections to replicas. A look that is under way ends, and says nothing. Idempotent."""
        self._closed.set()
        self._leave(inuse_connections=True)

    def _leave(self, *, inuse_connections: bool) -> None:
        for master in list(self._masters.values()):
            master.history = ""
            for client in list(master.clients.values()):
                client.connection_pool.disconnect(inuse_connections)

    def _master(self, address: Address) -> _Master:
        if self._pid != os.getpid():
            self._masters, self._pid = {}, os.getpid()
        if len(self._masters) >= _MOST_MASTERS:
            self._leave(inuse_connections=False)
            self._masters = {}
        return self._masters.setdefault(address, _Master())

    def look(
        self, master: _Master, client: redis.Redis | RedisCluster, nodes: Sequence[Address]
    ) -> list[Future[None]]:
        """Asks the master, and then all replicas side by side of what time each is; whichever answers is
        read. Returns the questions that are under way. Takes as long as the master's timeouts; never raises.
        """
        asked_s = self._monotonic()
        try:
            told = self._told(client_of(client, nodes), master.took[None])
            history, written = str(told["master_replid"]), whole(told["master_repl_offset"])
            if told["role"] != "master":
                history = ""
        except (*FAILURES, *GARBLED) as exc:
            log.debug("replicas: the master can't tell: %s", exc)
            if denied(exc):
                master.look_s = asked_s + _REST_S
            return []
        if history != master.history:
            with master.lock:
                master.history, master.readable = history, ()
                master.written.clear()
        if not history:
            log.debug("replicas: what was the master is none any more")
            return []
        master.written.append((asked_s, written))
        try:
            addresses = self._addresses(master, told, client, nodes)[:MOST_REPLICAS]
        except (*FAILURES, *GARBLED) as exc:
            log.debug("replicas: the master can't name them: %s", exc)
            return []
        # Nobody is to be asked before: there is no replica, or all rest.
        rest_s = min((master.resting.get(one, 0.0) for one in addresses), default=asked_s + _ALONE_S)
        master.look_s = max(master.look_s, rest_s)
        for gone in master.clients.keys() - set(addresses):
            _publish(master, gone, None)
            # Reads under way end; the last of these drops its connection.
            master.clients.pop(gone).connection_pool.disconnect(inuse_connections=False)
            master.forget(gone)
        asked = []
        for address in addresses:
            asking = master.asking.get(address)
            if asking is not None and not asking.done():
                continue  # It hangs; what was known of it grows old.
            if asked_s < master.resting.get(address, 0.0):
                continue
            if address not in master.clients:
                master.clients[address] = self._connect(address, bool(nodes), _prover(master, address))
            with suppress(OSError):
                master.asking[address] = in_background(partial(self._ask, master, address, history, asked_s))
                asked.append(master.asking[address])
        return asked

    def _addresses(
        self,
        master: _Master,
        told: dict[str, Any],
        client: redis.Redis | RedisCluster,
        nodes: Sequence[Address],
    ) -> Sequence[Address]:
        """Raises one of FAILURES or GARBLED."""
        if not nodes:
            return listed(told)
        if whole(told["connected_slaves"]) == len(nodes) - 1 and not master.excluded:
            return nodes[1:]
        # The client asks for a Cluster's nodes when something fails on its own way, and not for replicas that
        # came since, or came back elsewhere. Of a large Cluster the answer is long.
        now = self._monotonic()
        if now >= master.named_s:
            master.named = listed_by_cluster(client_of(client, nodes), nodes[0])
            master.named_s = now + _NAMED_S
        return master.named

    def _ask(self, master: _Master, address: Address, history: str, asked_s: float) -> None:
        """Finds out of what time a replica is, and has it read or not. `history` and `asked_s` are of the
        look that asks."""
        client = master.clients.get(address)
        if client is None:
            return
        found, why = None, ""
        try:
            took, own = master.took[address], master.took[None]
            told = self._told(client, took)
            has = whole(told["slave_repl_offset"])
            if str(told["master_replid"]) != history or whole(told["master_sync_in_progress"]):
                why = "it follows another master, or has not begun to"
            elif _is_far(took, own):
                why = f"it answers in {min(took) * 1e3:.1f} ms, its master in {min(own) * 1e3:.1f}"
            else:
                longest_s = asked_s - self._max_lag_s
                as_of_s = max((at for at, written in list(master.written) if written <= has), default=0.0)
                if as_of_s >= longest_s:
                    found = Replica(address, client, as_of_s, has, history, master)
                elif master.written[0][0] > longest_s:
                    return  # It can't be told yet.
                else:
                    why = f"it lags by more than redis.max_lag_s = {self._max_lag_s:g}"
        except FAILURES as exc:
            why = str(exc)
            if denied(exc):
                why += "; the user's rights are in the documentation's chapter on security"
                # Each denial is an entry in the server's log of them.
                master.resting[address] = asked_s + _REST_S
        except GARBLED:
            why = "it does not answer as replicas do"
        # Else there was a failover meanwhile, or an end.
        if master.history == history and not self._closed.is_set():
            _publish(master, address, found)
            self._tell(master, address, why)

    def _told(self, client: Any, took: deque[float]) -> dict[str, Any]:
        """Returns what INFO replication says, and adds how long that took; leaves no connection behind once
        this is closed. Raises one of FAILURES or GARBLED."""
        if self._closed.is_set():
            raise redis.ConnectionError("closed")
        began = time.monotonic()
        try:
            told = client.info("replication")
        finally:
            if self._closed.is_set():
                client.connection_pool.disconnect()
        took.append(time.monotonic() - began)
        if not isinstance(told, dict):
            raise TypeError("no INFO")
        return told

    def _tell(self, master: _Master, address: Address, why: str) -> None:
        before = master.excluded.pop(address, "")
        if why:
            master.excluded[address] = why
            if not before:
                shown = readable(why, _CHARS)
                log.warning("replica %s is not read: %s; its master is", place(*address), shown)
        elif before:
            log.info("replica %s is read again", place(*address))


def _publish(master: _Master, address: Address, replica: Replica | None) -> None:
    """Has a replica read, unless its master is another one by now; None: has what is there read no more."""
    with master.lock:
        others = tuple(one for one in master.readable if one.address != address)
        if replica is not None and replica.history == master.history:
            others = (*others, replica)
        master.readable = others


def _prover(master: _Master, address: Address) -> Proof:
    """Returns a function that raises redis.ConnectionError if a replica has less than it had when it was
    asked last: it was restarted, or another has its address. Before it is read it has nothing to prove."""

    def prove(told: Mapping[bytes, bytes]) -> None:
        known = next((one for one in master.readable if one.address == address), None)
        if known is None:
            return
        same = told.get(b"master_replid") == known.history.encode()
        has = told.get(b"slave_repl_offset", b"")
        if not (same and told.get(b"role") == b"slave" and has.isdigit() and whole(has) >= known.has):
            raise redis.ConnectionError("the replica is another one than was asked, or has less than it had")

    return prove


def _is_far(took: deque[float], own: deque[float]) -> bool:
    """Tells whether a replica is, by its times and its master's; not before there are as many as are kept, of
    which the first ones connect."""
    return len(took) == took.maxlen and min(took) > _FAR_TIMES * min(own) + _FAR_S
