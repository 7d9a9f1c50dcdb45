"""A process that has imported vLLM, and forks one that becomes an engine or a server whenever it is asked to.

Importing takes four of the five seconds in which an engine starts. `tests.e2e.engine` talks to this process
over a Unix socket, one JSON message a packet:

    to it     {"environment": {name: text or null}, "serve": arguments or null} with three descriptors: the
              engine's input, its output and its log
    from it   {"born": pid}, and once for each engine that has ended {"dead": pid, "status": returncode}

It ends with the process that started it, and its engines with it (tests.e2e.engine_child watches its parent).
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
#: Imported before any fork; with these nothing that takes long is left to an engine's own start.
_MODULES = (
    "vllm.entrypoints.llm",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.attention.backends.cpu_attn",
    "tests.e2e.engine_child",
)


class Forked:
    """An engine's process, with what of subprocess.Popen is used of it."""

    def __init__(self, nursery: Nursery, pid: int, stdin: int, stdout: int) -> None:
        self._nursery = nursery
        self.pid = pid
        self.stdin = os.fdopen(stdin, "wb")
        self.stdout = os.fdopen(stdout, "rb", buffering=0)

    @property
    def returncode(self) -> int | None:
        """The status as far as it is known; None before the end."""
        return self._nursery.ended.get(self.pid)

    def poll(self) -> int | None:
        """The status; None as long as it runs."""
        self._nursery.hear(0.0)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """The status, once it has ended."""
        end = time.monotonic() + timeout
        while self.poll() is None:
            left = end - time.monotonic()
            if left <= 0:
                raise subprocess.TimeoutExpired("engine", timeout)
            self._nursery.hear(left)
        assert self.returncode is not None
        return self.returncode


class Nursery:
    """The parent of this process' engines. For one thread at a time."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = dict(environment)
        self.ended: dict[int, int] = {}
        self._born: list[int] = []
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.e2e.nursery", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                cwd=ROOT,
                env=self.environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def fork(
        self,
        log: int,
        timeout_s: float,
        *,
        environment: Mapping[str, str | None] | None = None,
        serve: Sequence[str] | None = None,
    ) -> Forked:
        """A new engine's process, or with `serve` that of `vllm serve` with these arguments, which writes to
        the descriptor `log`. `environment` changes what was not read yet when vLLM had been imported."""
        told = json.dumps({"environment": dict(environment or {}), "serve": serve})
        (stdin, ours), (mine, stdout) = os.pipe(), os.pipe()
        try:
            socket.send_fds(self._socket, [told.encode()], [stdin, stdout, log])
        finally:
            os.close(stdin)
            os.close(stdout)
        end = time.monotonic() + timeout_s
        while not self._born:
            left = end - time.monotonic()
            if left <= 0 or not self.alive:
                raise RuntimeError(f"no engine was forked within {timeout_s:g} s")
            self.hear(min(left, 1.0))
        return Forked(self, self._born.pop(), ours, mine)

    def hear(self, timeout_s: float) -> None:
        """Takes what the process says within `timeout_s`, and returns at the first word."""
        while select.select([self._socket], [], [], timeout_s)[0]:
            message = self._socket.recv(4096)
            if not message:
                # It is gone, and its engines end with it.
                time.sleep(min(timeout_s, 0.1))
                return
            told = json.loads(message)
            if "born" in told:
                self._born.append(told["born"])
            else:
                self.ended[told["dead"]] = told["status"]
            timeout_s = 0.0


def main() -> None:
    ours = socket.socket(fileno=int(sys.argv[1]))
    # What is imported is never garbage, and stays shared between all engines as long as nobody looks at it.
    gc.disable()
    for name in _MODULES:
        __import__(name)
    gc.freeze()
    gc.enable()
    woken, wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    while True:
        ready, _, _ = select.select([ours, woken], [], [])
        if woken in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(woken, 4096)
            _tell_of_the_dead(ours)
        if ours in ready:
            message, descriptors, _, _ = socket.recv_fds(ours, 1 << 16, 3)
            if not message:
                # Whatever runs at the end of an interpreter that has imported vLLM is not worth waiting for.
                os._exit(0)
            pid = os.fork()
            if not pid:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for number in (ours.detach(), woken, wakes):
                    os.close(number)
                _become(descriptors, json.loads(message))
            for number in descriptors:
                os.close(number)
            ours.send(json.dumps({"born": pid}).encode())


def _tell_of_the_dead(ours: socket.socket) -> None:
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            ours.send(json.dumps({"dead": pid, "status": os.waitstatus_to_exitcode(status)}).encode())


def _become(descriptors: list[int], told: dict[str, Any]) -> None:
    """Goes on as `python -m tests.e2e.engine_child` or `tests.e2e.serve` would with these as its input,
    output and errors."""
    status = 1
    try:
        # A group of its own, so that a kill ends the other processes of an engine too.
        os.setsid()
        for number, standard in enumerate(descriptors):
            os.dup2(standard, number)
            os.close(standard)
        for name, text in told["environment"].items():
            os.environ.pop(name, None) if text is None else os.environ.update({name: text})
        if told["serve"] is None:
            from tests.e2e import engine_child

            engine_child.main()
        else:
            from tests.e2e import serve

            os.dup2(2, 1)
            serve.main(told["serve"])
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


if __name__ == "__main__":
    main()
