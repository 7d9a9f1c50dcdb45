"""Reads from replicas of the masters that a Cluster has, or that Sentinels watch.

A replica is as of a time: the latest one at which its master had written no more than the replica has now. To
know it, a thread of its own asks the master how much it has written, and then each replica how much it has;
once in a quarter of the longest lag that is allowed, and only while something is read. So what is known of
a replica grows old by itself when it hangs, when its link or its master's is cut, and when nobody can ask:
after `max_lag_s` the master is read again, without anybody having waited to find out.

A replica that fails a read is not read again before it has answered the next look, and the master is asked in
the same call. What a replica may do to answers: docs/adr/0046-hot-prefixes.md.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import redis
from redis.cluster import RedisCluster

from kvstore.index.redis.errors import FAILURES, denied
from kvstore.rules.text import readable
from kvstore.threads.deadline import in_background
from schemas.urls import place

log = logging.getLogger(__name__)

Address = tuple[str, int]

#: What becomes of reads: a replica answers, it fails and its master is asked, or none is close enough.
COUNTED: Final = ("replica_reads", "replica_failures", "replica_lags")
#: Looks within the longest lag that is allowed.
_LOOKS = 4
#: Most replicas of one master that are read, and most masters of which any are.
_MOST_REPLICAS, _MOST_MASTERS = 8, 1024
#: What taking apart an answer raises that no server of Redis gives.
_GARBLED = (LookupError, ValueError, TypeError, AttributeError)
#: Most characters of a reason in the log.
_CHARS = 200


@dataclass(frozen=True, slots=True)
class Replica:
    """A replica that has answered the last look."""

    address: Address
    client: redis.Redis
    #: `time.monotonic` time of which it is, at least.
    as_of_s: float
    master: _Master


@dataclass(slots=True)
class _Master:
    """What is known of one master's replicas. Attributes are replaced as a whole, by any thread."""

    look_s: float = 0.0
    #: The process that looks, and its look.
    looking: tuple[int, Future[None] | None] = (0, None)
    #: The name of what it has written, which is another after a failover.
    history: str = ""
    #: When it was asked, and how much it had written.
    written: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_LOOKS + 2))
    readable: tuple[Replica, ...] = ()
    clients: dict[Address, redis.Redis] = field(default_factory=dict)
    #: Why a replica is not read; what is in the log already.
    excluded: dict[Address, str] = field(default_factory=dict)


class Replicas:
    """Says which replica may be read instead of a key's master. Safe for threads, and for processes that
    fork."""

    def __init__(
        self,
        connect: Callable[[Address, bool], redis.Redis],
        *,
        max_lag_s: float,
        count: Callable[[str], None],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`connect` makes a client of an address, and of a Cluster's replica if its second argument is true;
        no I/O. `count` is told of each of COUNTED."""
        self._connect = connect
        self._max_lag_s = max_lag_s
        self._count = count
        self._monotonic = monotonic
        self._masters: dict[Address, _Master] = {}
        self._turn = itertools.count()

    def of(self, client: redis.Redis | RedisCluster, key: str) -> Replica | None:
        """Returns a replica that may be read instead of the master that has `key`, the next one at each call;
        None: read the master. No I/O."""
        nodes = _nodes(client, key)
        if nodes is None:
            return None
        master = self._master(nodes[0] if nodes else ("", 0))
        now = self._monotonic()
        if now >= master.look_s:
            # Set first, so that other threads that come here meanwhile don't look as well.
            master.look_s = now + self._max_lag_s / _LOOKS
            with suppress(OSError):
                self._start(master, client, nodes)
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
        master = replica.master
        master.readable = tuple(one for one in master.readable if one.client is not replica.client)

    def close(self) -> None:
        """Closes the connections to replicas. Idempotent."""
        for master in list(self._masters.values()):
            for client in list(master.clients.values()):
                _close(client)

    def _master(self, address: Address) -> _Master:
        if len(self._masters) >= _MOST_MASTERS:
            self.close()
            self._masters = {}
        return self._masters.setdefault(address, _Master())

    def _start(self, master: _Master, client: redis.Redis | RedisCluster, nodes: Sequence[Address]) -> None:
        pid, looking = master.looking
        # A look that hangs is waited for; what it found before grows old meanwhile.
        if looking is None or looking.done() or pid != os.getpid():
            master.looking = os.getpid(), in_background(lambda: self.look(master, client, nodes))

    def look(self, master: _Master, client: redis.Redis | RedisCluster, nodes: Sequence[Address]) -> None:
        """Finds out of what time each replica is. Takes as long as the timeouts of each; never raises."""
        asked_s = self._monotonic()
        try:
            told = _told(_client_of(client, nodes))
            history, written = str(told["master_replid"]), int(told["master_repl_offset"])
            if told["role"] != "master":
                raise ValueError(f"the role is {told['role']!r}")
        except (*FAILURES, *_GARBLED) as exc:
            log.debug("replicas: the master can't tell: %s", exc)
            return
        if history != master.history:
            master.history = history
            master.written.clear()
        master.written.append((asked_s, written))
        try:
            addresses = self._addresses(master, told, client, nodes)[:_MOST_REPLICAS]
        except (*FAILURES, *_GARBLED) as exc:
            log.debug("replicas: the master can't name them: %s", exc)
            return
        for gone in master.clients.keys() - set(addresses):
            _close(master.clients.pop(gone))
            master.excluded.pop(gone, None)
        found = []
        for address in addresses:
            replica = self._ask(master, address, of_cluster=bool(nodes))
            if replica is not None:
                found.append(replica)
        master.readable = tuple(found)

    @staticmethod
    def _addresses(
        master: _Master,
        told: dict[str, Any],
        client: redis.Redis | RedisCluster,
        nodes: Sequence[Address],
    ) -> Sequence[Address]:
        """Raises one of FAILURES or _GARBLED."""
        if not nodes:
            return _listed(told)
        if int(told["connected_slaves"]) == len(nodes) - 1 and not master.excluded:
            return nodes[1:]
        # The client asks for a Cluster's nodes when something fails on its own way, and not for replicas that
        # came since, or came back elsewhere.
        return _listed_by_cluster(_client_of(client, nodes), nodes[0])

    def _ask(self, master: _Master, address: Address, *, of_cluster: bool) -> Replica | None:
        client = master.clients.get(address)
        if client is None:
            client = master.clients[address] = self._connect(address, of_cluster)
        why = ""
        try:
            told = _told(client)
            known = int(told["slave_repl_offset"])
            if str(told["master_replid"]) != master.history or int(told["master_sync_in_progress"]):
                why = "it follows another master, or has not begun to"
            else:
                longest_s = self._monotonic() - self._max_lag_s
                as_of_s = max((at for at, written in master.written if written <= known), default=0.0)
                if as_of_s >= longest_s:
                    self._tell(master, address, "")
                    return Replica(address, client, as_of_s, master)
                if master.written[0][0] > longest_s:
                    return None  # It can't be told yet.
                why = f"it lags by more than redis.max_lag_s = {self._max_lag_s:g}"
        except FAILURES as exc:
            why = str(exc)
            if denied(exc):
                why += "; the user's rights are in the documentation's chapter on security"
        except _GARBLED:
            why = "it does not answer as replicas do"
        self._tell(master, address, why)
        return None

    @staticmethod
    def _tell(master: _Master, address: Address, why: str) -> None:
        before = master.excluded.pop(address, "")
        if why:
            master.excluded[address] = why
            if not before:
                shown = readable(why, _CHARS)
                log.warning("replica %s is not read: %s; its master is", place(*address), shown)
        elif before:
            log.info("replica %s is read again", place(*address))


def _nodes(client: redis.Redis | RedisCluster, key: str) -> list[Address] | None:
    """Returns a Cluster's master that has a key, and its replicas as far as the client knows; nothing without
    a Cluster, and None if nobody has the key."""
    if not isinstance(client, RedisCluster):
        return []
    nodes = client.nodes_manager.slots_cache.get(client.keyslot(key))  # type: ignore[no-untyped-call]
    return [(node.host, node.port) for node in nodes] if nodes else None


def _client_of(client: redis.Redis | RedisCluster, nodes: Sequence[Address]) -> Any:
    if not isinstance(client, RedisCluster):
        return client
    node = client.get_node(*nodes[0])  # type: ignore[no-untyped-call]
    return client.get_redis_connection(node)


def _told(client: Any) -> dict[str, Any]:
    told = client.info("replication")
    if not isinstance(told, dict):
        raise TypeError("no INFO")
    return told


def _listed(told: dict[str, Any]) -> list[Address]:
    """Returns the replicas that a master names. Raises one of _GARBLED."""
    lines = [told[f"slave{number}"] for number in range(min(int(told["connected_slaves"]), _MOST_REPLICAS))]
    return [(str(line["ip"]), int(line["port"])) for line in lines if line["state"] == "online"]


def _listed_by_cluster(client: Any, master: Address) -> list[Address]:
    """Returns the replicas that a Cluster's master names as its own. Raises one of FAILURES or _GARBLED."""
    # In two words: redis-py takes the answer to "CLUSTER SLOTS" apart.
    for _, _, *nodes in client.execute_command("CLUSTER", "SLOTS"):
        # A node that doesn't know its own name is where it was asked.
        first, *others = [((one[0] or b"").decode("ascii") or master[0], int(one[1])) for one in nodes]
        if first == master:
            return others
    return []


def _close(client: redis.Redis) -> None:
    client.close()
    client.connection_pool.disconnect()
