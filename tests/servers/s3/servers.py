"""S3 servers for tests: what they have in common, and moto's for the quick tier."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

from tests.servers.redis import ServerError, _free_port, end_process, spawn_tied
from tests.servers.s3.bucket import Credentials, S3Bucket, boto3_client
from tests.waiting import PATIENCE_S

#: A machine may be busy with engines when a server starts.
START_TIMEOUT_S = PATIENCE_S


class S3Server(ABC):
    """An S3 server on loopback, in a temporary folder of its own.

    It keeps its port for life and its buckets until `close`, so that a client sees it die and come back
    under one URL. It ends with the thread that started it, however that one ends.
    """

    kind: ClassVar[str]
    region = "us-east-1"

    def __init__(self) -> None:
        self.port = _free_port()
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._clients: dict[tuple[str, Credentials], Any] = {}
        self._numbers = itertools.count(1)
        self._was_up = False

    @property
    @abstractmethod
    def owner(self) -> Credentials:
        """Whose all the buckets are."""

    @property
    @abstractmethod
    def processes(self) -> list[subprocess.Popen[bytes]]:
        """All of the server's, in the order of their start; those that ended, too."""

    @property
    @abstractmethod
    def gateway(self) -> subprocess.Popen[bytes]:
        """The one that clients talk to."""

    @abstractmethod
    def _spawn(self) -> None:
        """Starts what is not running."""

    @abstractmethod
    def _answers(self) -> bool:
        """Whether this server, and no other on its port, takes requests. False, too, if it ends."""

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def access_key(self) -> str:
        return self.owner.access_key

    @property
    def secret_key(self) -> str:
        return self.owner.secret_key

    @property
    def folder(self) -> Path:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="kvs-", ignore_cleanup_errors=True)
        return Path(self._folder.name)

    @property
    def running(self) -> bool:
        return bool(self.processes) and all(process.poll() is None for process in self.processes)

    def start(self) -> Self:
        """Returns once it answers; does nothing if it runs."""
        if self.running:
            return self
        # Someone else may take a port between our look and the server's bind. Once a URL is out, the port
        # stays, whoever has it.
        attempts = 1 if self._was_up else 3
        for left in reversed(range(attempts)):
            try:
                self._spawn()
                if self._answers():
                    self._was_up = True
                    return self
                if not left:
                    raise ServerError(f"{self.kind} did not start; its logs:\n{self.log()}")
            except BaseException:
                self.kill()
                raise
            self.kill()
            self._forget()
        raise AssertionError("unreachable")

    def stop(self) -> None:
        """An orderly end. Does nothing if it does not run."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """`kill -9`, every process of it."""
        self._end(signal.SIGKILL)

    def pause(self) -> None:
        """Stops answering while connections stay open: a hang, not an error."""
        os.kill(self.gateway.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.gateway.pid, signal.SIGCONT)

    def close(self) -> None:
        """Ends it, with all it held."""
        self.kill()
        self._forget()

    def stranger(self) -> Credentials:
        """A user of the server who may not touch the owner's buckets."""
        raise NotImplementedError(f"{self.kind} lets everybody do everything")

    def client(self, endpoint: str | None = None, credentials: Credentials | None = None) -> Any:
        """boto3's, the owner's and to the server itself unless told; made once, closed with the server."""
        key = (endpoint or self.endpoint, credentials or self.owner)
        if key not in self._clients:
            self._clients[key] = boto3_client(key[0], self.region, key[1])
        return self._clients[key]

    def make_bucket(self, name: str) -> None:
        self.client().create_bucket(Bucket=name)

    def new_bucket(self) -> S3Bucket:
        """An empty one that nobody else has."""
        name = f"bucket-{next(self._numbers)}"
        self.make_bucket(name)
        return S3Bucket(self.kind, name, "some/prefix", self.region, self.owner, self.endpoint, self.client())

    def log(self) -> str:
        """Everything its processes wrote, the last lines of each last."""
        return "\n".join(
            f"--- {path.name}\n" + "".join(path.read_text(errors="replace").splitlines(keepends=True)[-20:])
            for path in sorted(self.folder.glob("*.log"))
        )

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _end(self, sign: signal.Signals) -> None:
        for process in reversed(self.processes):
            end_process(process, sign)

    def _forget(self) -> None:
        for client in self._clients.values():
            client.close()
        self._clients.clear()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None
        self.port = _free_port()


class MotoServer(S3Server):
    """moto's imitation, in a process of its own: for the quick tier. What it held is gone when it stops.

    Not for what it does not imitate: it checks no signature and no permission.
    """

    kind = "moto"

    def __init__(self) -> None:
        super().__init__()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def owner(self) -> Credentials:
        return Credentials("quick-tests", "not-checked")

    @property
    def processes(self) -> list[subprocess.Popen[bytes]]:
        return [] if self._process is None else [self._process]

    @property
    def gateway(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "not started"
        return self._process

    def reset(self) -> None:
        """Without a bucket, as after its start."""
        request = urllib.request.Request(f"{self.endpoint}/moto-api/reset", method="POST")
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            answer.read()

    def _spawn(self) -> None:
        log = self.folder / "moto.log"
        log.unlink(missing_ok=True)
        # -P: the names of this folder's modules are not to stand in for those of installed ones.
        child = Path(__file__).with_name("moto_child.py")
        command = [sys.executable, "-P", str(child), str(self.port)]
        self._process = spawn_tied(command, log, clean_environment())

    def _answers(self) -> bool:
        # It says so once it has the port; a request could be answered by someone else.
        return wait_for(lambda: f"Running on {self.endpoint}" in self.log(), lambda: self.running)


def clean_environment() -> dict[str, str]:
    """The environment without what belongs to the tests' own Python or would change a server."""
    unwanted = ("PYTHON", "CEPH", "AWS_", "MOTO_", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}


def find_binary(name: str) -> str | None:
    """From PATH, or from where Debian puts daemons, which is not on everybody's."""
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")


def wait_for(ready: Callable[[], bool], alive: Callable[[], bool]) -> bool:
    """Whether `ready` came true within the time that a start may take; an OSError means not yet."""
    until = time.monotonic() + START_TIMEOUT_S
    while alive() and time.monotonic() < until:
        with contextlib.suppress(OSError):
            if ready():
                return True
        time.sleep(0.01)
    return False
