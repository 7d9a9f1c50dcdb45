"""A Redis Cluster of three masters on loopback, with replicas or without, for tests."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import redis

from tests.servers.redis import START_TIMEOUT_S, ServerError, _free_port, find_redis_server
from tests.waiting import PATIENCE_S

SLOTS = 16384


class RedisClusterServers:
    """Started on entry, ended on exit, by process id."""

    def __init__(self, folder: Path, masters: int = 3, replicas: int = 0) -> None:
        """`replicas` are those of each master."""
        self._folder = folder
        self.ports = [_free_port() for _ in range(masters)]
        #: Replica k of a cluster is one of master k modulo the number of masters.
        self.replica_ports = [_free_port() for _ in range(masters * replicas)]
        self._all = [*self.ports, *self.replica_ports]
        # By default a bus listens on its master's port + 10000, which need not be a port.
        self._buses = [_free_port() for _ in self._all]
        self._processes: list[subprocess.Popen[bytes]] = []
        self._clients = [self._client(port) for port in self.ports]
        self._replicas = [self._client(port) for port in self.replica_ports]

    @staticmethod
    def _client(port: int) -> redis.Redis:
        return redis.Redis(port=port, protocol=2, socket_timeout=PATIENCE_S)

    @property
    def urls(self) -> list[str]:
        return [f"redis://127.0.0.1:{port}/0" for port in self.ports]

    def flush(self) -> None:
        for client in self._clients:
            client.flushall()

    def sizes(self) -> list[int]:
        """How many keys each master has."""
        return [int(client.dbsize()) for client in self._clients]

    def kill(self, port: int) -> None:
        """`kill -9` of one node."""
        process = self._processes[self._all.index(port)]
        process.kill()
        process.wait(PATIENCE_S)

    def set(self, name: str, value: str) -> None:
        """CONFIG SET on every master."""
        for client in self._clients:
            client.config_set(name, value)

    def everywhere(self, *words: str) -> None:
        """One command on every node."""
        for client in self._clients + self._replicas:
            client.execute_command(*words)

    def promote(self, port: int) -> None:
        """Makes the replica of a master that is dead the master, at once."""
        self._replicas[self.ports.index(port)].execute_command("CLUSTER", "FAILOVER", "TAKEOVER")

    def __enter__(self) -> Self:
        try:
            return self._start()
        except BaseException:
            self.stop()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _start(self) -> Self:
        for port, bus in zip(self._all, self._buses, strict=True):
            self._spawn(port, bus)
        self._wait(lambda client: client.ping(), self._clients + self._replicas)
        for i, client in enumerate(self._clients):
            first, last = (SLOTS * k // len(self._clients) for k in (i, i + 1))
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", first, last - 1)
            # Different epochs, or they would have to find out in the first second who is right.
            client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", i + 1)
        for port, bus in zip(self._all[1:], self._buses[1:], strict=True):
            self._clients[0].execute_command("CLUSTER", "MEET", "127.0.0.1", port, bus)
        self._wait(self._joined, self._clients + self._replicas)
        for number, replica in enumerate(self._replicas):
            of = self._clients[number % len(self._clients)]
            replica.execute_command("CLUSTER", "REPLICATE", of.execute_command("CLUSTER", "MYID"))
        self._wait(
            lambda client: client.info("replication").get("master_link_status") == "up", self._replicas
        )
        # Who asks any node must be told of all replicas.
        self._wait(self._knows_replicas, self._clients)
        return self

    def _knows_replicas(self, client: Any) -> bool:
        # Two words, or redis-py would take the answer apart.
        ranges = client.execute_command("CLUSTER", "SLOTS")
        return sum(len(one) - 3 for one in ranges) == len(self._replicas)

    def stop(self) -> None:
        for client in self._clients + self._replicas:
            client.close()
        for process in self._processes:
            process.kill()
            process.wait(PATIENCE_S)

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
        return state == ("ok", str(len(self._all)))

    def _wait(self, ready: Any, clients: list[redis.Redis]) -> None:
        until = time.monotonic() + START_TIMEOUT_S
        for client in clients:
            while True:
                try:
                    if ready(client):
                        break
                except redis.RedisError:
                    pass
                if time.monotonic() > until:
                    raise ServerError(f"no cluster on ports {self.ports}; logs in {self._folder}")
                time.sleep(0.02)
