"""Processes that answer HTTP: vLLM's OpenAI server, and proxies before it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.e2e import engine as engines
from tests.e2e.nursery import Forked
from tests.waiting import PATIENCE_S


class Server:
    """A process that answers HTTP on a port of its own."""

    def __init__(self, arguments: list[str], port: int, log_path: Path, env: Mapping[str, str]) -> None:
        self.url, self._log_path = f"http://127.0.0.1:{port}", log_path
        self._process = self._started([*arguments, "--host", "127.0.0.1", "--port", str(port)], env)

    def _started(self, arguments: list[str], env: Mapping[str, str]) -> subprocess.Popen[bytes] | Forked:
        with self._log_path.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, *arguments],
                stdout=log,
                stderr=log,
                cwd=engines.ROOT,
                env={**os.environ, **env},
                start_new_session=True,
            )

    def wait(self, path: str, timeout_s: float = 300.0) -> None:
        until = time.monotonic() + timeout_s
        while self._process.poll() is None and time.monotonic() < until:
            with contextlib.suppress(OSError), urllib.request.urlopen(self.url + path, timeout=5):
                return
            time.sleep(0.2)
        raise AssertionError(f"no answer; the log ends:\n{self._log_path.read_text()[-4000:]}")

    def post(self, path: str, body: Any = None) -> Any:
        data = b"" if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data=data, headers={"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that have these labels."""
        with urllib.request.urlopen(self.url + "/metrics", timeout=PATIENCE_S) as answer:
            lines = answer.read().decode().splitlines()
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        found = [line for line in lines if line.startswith(name) and all(one in line for one in wanted)]
        return sum(float(line.split()[-1]) for line in found)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(PATIENCE_S)


class VllmServer(Server):
    """`vllm serve` with these arguments, and the environment of engines but for `env`."""

    def _started(self, arguments: list[str], env: Mapping[str, str]) -> Forked:
        return engines.serve(arguments, self._log_path, env)


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as probes:
        made = [probes.enter_context(socket.socket()) for _ in range(count)]
        for probe in made:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in made]
