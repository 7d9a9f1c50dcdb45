"""The servers of a fleet, and what they tell of what they did."""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import redis
import yaml

from tests.index.redis.cluster import RedisClusterServers
from tests.index.redis.scripts import script_name
from tests.servers.redis import _free_port, end_process, spawn_tied
from tests.servers.s3.ceph import CephServer
from tests.waiting import PATIENCE_S, until

_MOST_CALLS = 1_000_000
_REQUEST = re.compile(r'beast: .*"([A-Z]+) [^"]*" \d+ (\d+) \S+ "kvstore/')


class SixNodes(RedisClusterServers):
    """Three masters, each with a replica."""

    def _start(self) -> Self:
        super()._start()
        masters = list(zip(self.ports, self._buses, self._clients, strict=True))
        self.masters = [port for port, _, _ in masters]
        for port, bus, master in masters:
            mine, my_bus = _free_port(), _free_port()
            self._spawn(mine, my_bus)
            client = redis.Redis(port=mine, protocol=2, socket_timeout=PATIENCE_S)
            self.ports.append(mine)
            self._buses.append(my_bus)
            self._clients.append(client)
            until(lambda client=client: _answers(client))
            client.execute_command("CLUSTER", "MEET", "127.0.0.1", port, bus)
            name = master.execute_command("CLUSTER", "MYID").decode()
            until(lambda client=client, name=name: _follows(client, name))
            until(lambda client=client: client.info("replication")["master_link_status"] == "up")
        self._wait(self._joined)
        return self


def _answers(client: Any) -> bool:
    try:
        return bool(client.ping())
    except redis.RedisError:
        return False


def _follows(client: Any, master: str) -> bool:
    try:
        return bool(client.execute_command("CLUSTER", "REPLICATE", master))
    except redis.RedisError:
        return False  # it has not heard of its master yet


@dataclass
class Told:
    """What servers say they did until now; the difference of two is what they did in between."""

    #: By the monotonic clock.
    at_s: float = field(default_factory=time.monotonic)
    #: CPU seconds of each Redis node, masters first.
    redis_cpu_s: list[float] = field(default_factory=list)
    #: Of all masters.
    redis_calls: int = 0
    redis_in: int = 0
    redis_out: int = 0
    redis_bytes: int = 0
    connections: int = 0
    #: Requests of engines by method, and bytes of the payloads that they brought or took.
    s3_requests: Counter[str] = field(default_factory=Counter)
    s3_bytes: int = 0
    s3_cpu_s: float = 0.0


@contextmanager
def janitor(settings: Mapping[str, Any], log: Path) -> Iterator[None]:
    """A janitor, as a fleet has one: without it each engine sweeps for a moment every ten seconds."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(dict(settings), file)
        file.flush()
        environ = {name: text for name, text in os.environ.items() if not name.startswith("KVSTORE_")}
        command = [sys.executable, "-m", "kvstore.cli", "serve", "--listen", "127.0.0.1:0"]
        process = spawn_tied(command, log, environ | {"KVSTORE_SETTINGS": file.name})
        try:
            yield
        finally:
            end_process(process, signal.SIGTERM)


def watch(nodes: SixNodes) -> None:
    """From now on the masters note how long each call takes them."""
    for port in nodes.masters:
        with redis.Redis(port=port, protocol=2) as client:
            client.config_set("slowlog-max-len", _MOST_CALLS)
            client.config_set("slowlog-log-slower-than", 0)
            client.slowlog_reset()


def watched(nodes: SixNodes) -> dict[str, list[int]]:
    """Returns how many microseconds each call has taken since `watch`, by what was called."""
    found: dict[str, list[int]] = {}
    for port in nodes.masters:
        with redis.Redis(port=port, protocol=2) as client:
            for one in client.slowlog_get(_MOST_CALLS):
                found.setdefault(script_name(one["command"]), []).append(one["duration"])
            client.config_set("slowlog-log-slower-than", -1)
            client.slowlog_reset()
    return found


def told(nodes: SixNodes, s3: CephServer) -> Told:
    """Asks all servers."""
    found = Told()
    for port in nodes.ports:
        with redis.Redis(port=port, protocol=2) as client:
            info = client.info("everything")
        found.redis_cpu_s.append(info["used_cpu_user"] + info["used_cpu_sys"])
        if port in nodes.masters:
            found.redis_calls += sum(
                one["calls"] for name, one in info.items() if name.startswith("cmdstat_eval")
            )
            found.redis_in += info["total_net_input_bytes"]
            found.redis_out += info["total_net_output_bytes"]
            found.redis_bytes += info["used_memory_dataset"]
            found.connections += info["connected_clients"]
    log = Path(s3.folder) / "client.rgw.log"
    for method, nbytes in _REQUEST.findall(log.read_text(errors="replace")):
        found.s3_requests[method] += 1
        found.s3_bytes += int(nbytes)
    found.s3_cpu_s = sum(_cpu_s(process.pid) for process in s3.processes)
    return found


def _cpu_s(pid: int) -> float:
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")
