"""Real servers for tests, on loopback, in temporary folders, ended by process id."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from schemas.settings import RedisSettings
from tests.waiting import PATIENCE_S

START_TIMEOUT_S = PATIENCE_S
#: For tests that are not about deadlines: a busy machine is in time.
PATIENT = RedisSettings(timeout_s=PATIENCE_S, connect_timeout_s=PATIENCE_S)


def patient(**more: Any) -> RedisSettings:
    """PATIENT with other settings beside."""
    return PATIENT.model_copy(update=more)


class ServerError(Exception):
    """A server cannot be found, started or talked to."""


def find_redis_server() -> str:
    """redis-server or valkey-server from PATH, else the one that tools/setup.sh put into the venv."""
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            return found
    beside = Path(sys.prefix) / "bin" / "redis-server"
    if beside.exists():
        return str(beside)
    raise ServerError("no redis-server on PATH nor in the venv: run `make setup`")


class RedisServer:
    """One redis-server that keeps nothing: what it held is gone when it stops.

    It keeps its port for life, so that a client sees it die and come back under one URL. It ends with the
    process that started it, however that one ends.
    """

    def __init__(self, folder: Path, *options: str) -> None:
        """`options` are words of the command line, after our own."""
        self._folder = folder
        self._options = options
        self._binary = find_redis_server()
        self._process: subprocess.Popen[bytes] | None = None
        self._was_up = False
        self.port = _free_port()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> Self:
        """Returns once it answers; does nothing if it runs."""
        if self.running:
            return self
        # Someone else may take a port between our look and the server's bind. Once a URL is out, the port
        # stays, whoever has it.
        attempts = 1 if self._was_up else 3
        for _ in range(attempts):
            self._spawn()
            if self._answers():
                self._was_up = True
                return self
            self.kill()
            if attempts > 1:
                self.port = _free_port()
        raise ServerError(f"{self._binary} did not start; its log:\n{self.log()[-2000:]}")

    def stop(self) -> None:
        """An orderly end. Does nothing if it does not run."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """`kill -9`."""
        self._end(signal.SIGKILL)

    def restart_empty(self) -> None:
        """Gone and back at once on the same port, as after a crash without persistence."""
        self.kill()
        self.start()

    def pause(self) -> None:
        """Stops answering while connections stay open: a hang, not an error."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def flush(self) -> None:
        if self.command("FLUSHALL") != b"+OK":
            raise ServerError("FLUSHALL failed")

    def command(self, *words: str | bytes, timeout_s: float = PATIENCE_S) -> bytes:
        """Sends one command over a connection of its own; the reply as it came, for one that fits a line
        or a bulk string.

        For arranging and for checking around the client under test; not a client.
        """
        parts = [word.encode() if isinstance(word, str) else word for word in words]
        request = b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%s\r\n" % (len(p), p) for p in parts)
        with (
            socket.create_connection(("127.0.0.1", self.port), timeout_s) as connection,
            connection.makefile("rb") as replies,
        ):
            connection.sendall(request)
            line = replies.readline()
            if not line:
                raise ServerError("the server closed the connection")
            if line.startswith(b"$") and line != b"$-1\r\n":
                return replies.read(int(line[1:]))
            return line.rstrip()

    def log(self) -> str:
        try:
            return (self._folder / "redis.log").read_text(errors="replace")
        except OSError:
            return ""

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def _spawn(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        command = [self._binary, "--port", str(self.port), "--bind", "127.0.0.1"]
        command += ["--save", "", "--appendonly", "no", "--daemonize", "no", "--dir", str(self._folder)]
        command += self._options
        self._process = spawn_tied(command, self._folder / "redis.log")

    def _answers(self) -> bool:
        until = time.monotonic() + START_TIMEOUT_S
        # Another server on this port would answer a PING as well.
        mine = b"process_id:%d\r" % self.pid
        while self.running and time.monotonic() < until:
            with contextlib.suppress(OSError, ServerError):
                if mine in self.command("INFO", "server"):
                    return True
            time.sleep(0.005)
        return False

    def _end(self, sign: signal.Signals) -> None:
        if self._process is not None:
            end_process(self._process, sign)


def spawn_tied(
    command: Sequence[str], log: Path, env: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """A daemon that stays in the foreground, its output appended to `log`.

    It ends with the thread that called this, which is what Linux takes for its parent: call it from one
    that lives as long as the server is to.
    """
    words = list(command)
    # setpriv replaces itself by the server, so the process id is the server's.
    if tie := shutil.which("setpriv"):
        words = [tie, "--pdeathsig", "KILL", *words]
    with log.open("ab") as output:
        return subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True, env=env
        )


def end_process(process: subprocess.Popen[bytes], sign: signal.Signals) -> None:
    """Returns once it is gone, by `sign` or, ten seconds later, by SIGKILL."""
    if process.poll() is None:
        process.send_signal(sign)
        # A stopped process takes SIGTERM only once it continues.
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(PATIENCE_S)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
