"""A Redis Cluster of three masters on loopback, for tests, with a replica of each if they are asked for."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import redis

from tests.servers.redis import START_TIMEOUT_S, ServerError, _free_port, find_redis_server
from tests.waiting import PATIENCE_S, until

SLOTS = 16384
#: Seconds between two introductions of nodes that don't know each other yet.
_AGAIN_S = 5.0


class RedisClusterServers:
    """Started on entry, ended on exit, by process id."""

    def __init__(self, folder: Path, masters: int = 3, *, replicas: bool = False) -> None:
        """With `replicas`, that of the k-th of n masters is at `ports[n + k]`."""
        self._folder = folder
        self._masters = masters
        self._nodes = masters * (1 + replicas)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._clients: list[Any] = []
        self.ports: list[int] = []
        self._draw()

    def _draw(self) -> None:
        """Draw the ports anew: another program may have taken a free port before its node listened there."""
        self.ports = [_free_port() for _ in range(self._nodes)]
        # By default a bus listens on its master's port + 10000, which need not be a port.
        self._buses = [_free_port() for _ in self.ports]
        self._clients = [redis.Redis(port=port, protocol=2, socket_timeout=PATIENCE_S) for port in self.ports]

    @property
    def urls(self) -> list[str]:
        return [f"redis://127.0.0.1:{port}/0" for port in self.ports]

    def flush(self) -> None:
        for client in self._clients[: self._masters]:
            client.flushall()

    def sizes(self) -> list[int]:
        """How many keys each master has."""
        return [int(client.dbsize()) for client in self._clients]

    def kill(self, port: int) -> None:
        """`kill -9` of one master."""
        process = self._processes[self.ports.index(port)]
        process.kill()
        process.wait(PATIENCE_S)

    def set(self, name: str, value: str) -> None:
        """CONFIG SET on every node."""
        self.everywhere("CONFIG", "SET", name, value)

    def everywhere(self, *words: str) -> None:
        """One command on every node."""
        for client in self._clients:
            client.execute_command(*words)

    def __enter__(self) -> Self:
        for tries_left in (2, 1, 0):
            try:
                return self._start()
            except ServerError:
                self.stop()
                if not tries_left:
                    raise
                self._draw()
            except BaseException:
                self.stop()
                raise
        raise AssertionError("the last try returns or raises")

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _start(self) -> Self:
        for port, bus in zip(self.ports, self._buses, strict=True):
            self._spawn(port, bus)
        self._wait(lambda client: client.ping())
        for i, client in enumerate(self._clients[: self._masters]):
            first, last = (SLOTS * k // self._masters for k in (i, i + 1))
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", first, last - 1)
            # Different epochs, or they would have to find out in the first second who is right.
            client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", i + 1)
        self._meet()
        self._wait(self._joined, self._meet)
        for replica, client in enumerate(self._clients[self._masters :]):
            of = self.node_id(self.ports[replica])
            until(lambda: _answered(lambda: client.execute_command("CLUSTER", "REPLICATE", of)))
            until(lambda: client.info("replication").get("master_link_status") == "up")
        # Who asks any node is told of all replicas.
        self._wait(self._knows_replicas)
        return self

    def _meet(self) -> None:
        """Introduce all nodes to the first. A node gives an introduction up that a busy machine delays."""
        for port, bus in zip(self.ports[1:], self._buses[1:], strict=True):
            self._clients[0].execute_command("CLUSTER", "MEET", "127.0.0.1", port, bus)

    def _knows_replicas(self, client: Any) -> bool:
        # In two words, or redis-py would take the answer apart.
        ranges = client.execute_command("CLUSTER", "SLOTS")
        return sum(len(one) - 3 for one in ranges) == len(self.ports) - self._masters

    def node_id(self, port: int) -> str:
        """The name of a node in the Cluster."""
        told = self._clients[self.ports.index(port)].execute_command("CLUSTER", "MYID")
        return str(told.decode())

    def take_over(self, port: int) -> None:
        """Makes the replica at this port the master of what its master, which is gone, was the master of."""
        client = self._clients[self.ports.index(port)]
        until(lambda: _answered(lambda: client.execute_command("CLUSTER", "FAILOVER", "TAKEOVER")))
        until(lambda: client.info("replication")["role"] == "master")

    def move(self, slot: int, source: int, target: int) -> None:
        """Moves a slot with its keys, one after the other, from the master at one port to that at another."""
        here, there = (self._clients[self.ports.index(port)] for port in (source, target))
        names = [self.node_id(source), self.node_id(target)]
        there.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", names[0])
        here.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", names[1])
        while keys := here.execute_command("CLUSTER", "GETKEYSINSLOT", slot, 10):
            for key in keys:
                here.execute_command("MIGRATE", "127.0.0.1", target, key, 0, int(PATIENCE_S * 1000))
        for client in (there, here):
            client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", names[1])

    def stop(self) -> None:
        for client in self._clients:
            client.close()
        for process in self._processes:
            process.kill()
            process.wait(PATIENCE_S)
        self._processes.clear()

    def _spawn(self, port: int, bus: int) -> None:
        folder = self._folder / str(port)
        folder.mkdir(parents=True)
        command = [find_redis_server(), "--port", str(port), "--cluster-port", str(bus)]
        command += ["--bind", "127.0.0.1", "--cluster-enabled", "yes", "--save", "", "--dir", str(folder)]
        # Else a replica waits five seconds for others to join it.
        command += ["--repl-diskless-sync-delay", "0"]
        # setpriv replaces itself by the server, which then ends with this process however that ends.
        if tie := shutil.which("setpriv"):
            command = [tie, "--pdeathsig", "KILL", *command]
        with (folder / "redis.log").open("wb") as log:
            self._processes.append(subprocess.Popen(command, stdout=log, stderr=log))

    def _joined(self, client: Any) -> bool:
        info = client.execute_command("CLUSTER", "INFO")
        text = info if isinstance(info, dict) else dict(line.split(":") for line in info.decode().split())
        state = text.get("cluster_state"), text.get("cluster_known_nodes")
        return state == ("ok", str(len(self.ports)))

    def _wait(self, ready: Callable[[Any], object], again: Callable[[], None] | None = None) -> None:
        """Wait until every node is ready; `again` is called every few seconds meanwhile."""
        now = time.monotonic()
        end, next_try = now + START_TIMEOUT_S, now + _AGAIN_S
        for client in self._clients:
            while True:
                try:
                    if ready(client):
                        break
                    if again is not None and time.monotonic() > next_try:
                        again()
                        next_try = time.monotonic() + _AGAIN_S
                except redis.RedisError:
                    pass
                ended = any(process.poll() is not None for process in self._processes)
                if ended or time.monotonic() > end:
                    raise ServerError(f"no cluster on ports {self.ports}; logs in {self._folder}")
                time.sleep(0.02)


def _answered(call: Callable[[], object]) -> bool:
    """Tells whether a node took a command: before it knows of the others it refuses."""
    try:
        call()
    except redis.RedisError:
        return False
    return True
