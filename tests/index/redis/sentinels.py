"""A master, a replica and three Sentinels on loopback, for tests."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import redis

from tests.servers.redis import (
    START_TIMEOUT_S,
    RedisServer,
    ServerError,
    _free_port,
    end_process,
    find_redis_server,
    spawn_tied,
)
from tests.waiting import PATIENCE_S

MASTER = "kv-master"


class SentinelServer:
    """One Sentinel. What it has learnt is kept in its file, so it may be stopped and started again."""

    def __init__(self, folder: Path) -> None:
        self.port = _free_port()
        self.id = f"{self.port:040x}"
        self._file = folder / "sentinel.conf"
        self._process: subprocess.Popen[bytes] | None = None

    def configure(self, lines: str) -> None:
        folder = self._file.parent
        folder.mkdir(parents=True)
        self._file.write_text(
            f"port {self.port}\nbind 127.0.0.1\ndir {folder}\nsentinel myid {self.id}\n{lines}"
        )

    def start(self) -> None:
        command = [find_redis_server(), str(self._file), "--sentinel"]
        self._process = spawn_tied(command, self._file.with_suffix(".log"))

    def kill(self) -> None:
        if self._process is not None:
            end_process(self._process, signal.SIGKILL)

    def pause(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def ask(self, *words: str) -> Any:
        options: dict[str, Any] = {"protocol": 2, "socket_timeout": PATIENCE_S, "decode_responses": True}
        with redis.Redis(port=self.port, **options) as client:
            return client.execute_command(*words)


class SentinelServers:
    """Started on entry, ended on exit."""

    def __init__(self, folder: Path, *, down_after_ms: int = 500, extra: str = "") -> None:
        """`extra` are lines for every Sentinel's configuration."""
        # Else a replica waits five seconds for others to join it.
        self.servers = [RedisServer(folder / name, "--repl-diskless-sync-delay", "0") for name in "ab"]
        self._folder, self._down_after_ms, self._extra = folder, down_after_ms, extra
        self.sentinels = [SentinelServer(folder / f"s{number}") for number in range(3)]

    @property
    def url(self) -> str:
        return self.url_of(*self.sentinels)

    @staticmethod
    def url_of(*sentinels: SentinelServer, master: str = MASTER) -> str:
        hosts = ",".join(f"127.0.0.1:{one.port}" for one in sentinels)
        return f"redis+sentinel://{hosts}/{master}/0"

    def master(self) -> RedisServer:
        """Whom the first Sentinel that answers calls the master."""
        for sentinel in self.sentinels:
            try:
                port = int(sentinel.ask("SENTINEL", "GET-MASTER-ADDR-BY-NAME", MASTER)[1])
            except redis.RedisError:
                continue
            return next(server for server in self.servers if server.port == port)
        raise ServerError("no Sentinel answers")

    def replica(self) -> RedisServer:
        return next(server for server in self.servers if server is not self.master())

    def settle(self) -> None:
        """Returns when a failover would succeed: both servers in step, and every Sentinel knows all."""
        self.wait(lambda: b"master_link_status:up" in self.replica().command("INFO", "replication"))
        self.wait(lambda: all(self._knows_all(one) for one in self.sentinels))

    @staticmethod
    def wait(ready: Callable[[], bool]) -> None:
        until = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                if ready():
                    return
            except (redis.RedisError, OSError, ServerError):
                pass
            if time.monotonic() > until:
                raise ServerError("master, replica and Sentinels don't get together")
            time.sleep(0.02)

    def _knows_all(self, sentinel: SentinelServer) -> bool:
        seen = _fields(sentinel.ask("SENTINEL", "MASTER", MASTER))
        others = int(seen["num-other-sentinels"])
        replicas = [_fields(one) for one in sentinel.ask("SENTINEL", "REPLICAS", MASTER)]
        healthy = [one for one in replicas if one["flags"] == "slave" and one["master-link-status"] == "ok"]
        return seen["flags"] == "master" and others == 2 and len(healthy) == 1

    def __enter__(self) -> Self:
        try:
            first, second = (server.start() for server in self.servers)
            second.command("REPLICAOF", "127.0.0.1", str(first.port))
            # By themselves they would find all this out in two to twelve seconds.
            self.wait(lambda: b"master_link_status:up" in second.command("INFO", "replication"))
            watched = (
                f"sentinel monitor {MASTER} 127.0.0.1 {first.port} 2\n"
                f"sentinel down-after-milliseconds {MASTER} {self._down_after_ms}\n"
                f"sentinel failover-timeout {MASTER} 3000\n"
                f"sentinel known-replica {MASTER} 127.0.0.1 {second.port}\n"
            )
            for one in self.sentinels:
                others = [
                    f"sentinel known-sentinel {MASTER} 127.0.0.1 {other.port} {other.id}\n"
                    for other in self.sentinels
                    if other is not one
                ]
                one.configure(watched + "".join(others) + self._extra)
                one.start()
            self.settle()
            return self
        except BaseException:
            self.stop()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        for one in (*self.sentinels, *self.servers):
            one.kill()


def _fields(flat: list[str]) -> dict[str, str]:
    return dict(zip(flat[::2], flat[1::2], strict=True))
