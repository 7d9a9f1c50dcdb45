"""`cache-admin serve` as a process of its own, and what it is asked over HTTP."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from kvstore.admin.serve.reports import ServingReport
from tests.servers.redis import end_process, spawn_tied
from tests.waiting import PATIENCE_S, until

_T = TypeVar("_T")
START_TIMEOUT_S = PATIENCE_S
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class ServeProcess:
    """One server on a free port of loopback; it ends with the process that started it."""

    def __init__(self, folder: Path, options: Sequence[str], env: dict[str, str] | None = None) -> None:
        self._log = folder / "serve.log"
        folder.mkdir(parents=True, exist_ok=True)
        words = [sys.executable, "-m", "kvstore.cli", "serve", "--listen", "127.0.0.1:0", *options]
        clean = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}
        self._process: subprocess.Popen[bytes] = spawn_tied(words, self._log, clean | (env or {}))
        self.url = self._address()

    def _address(self) -> str:
        end = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < end and self._process.poll() is None:
            if found := re.search(r"listening on (https?://\S+/)", self.log()):
                return found[1]
            time.sleep(0.02)
        end_process(self._process, signal.SIGKILL)
        raise AssertionError(f"serve did not start:\n{self.log()}")

    def log(self) -> str:
        with contextlib.suppress(OSError):
            return self._log.read_text(errors="replace")
        return ""

    def get(self, path: str, **headers: str) -> tuple[int, str]:
        """Status and body."""
        request = urllib.request.Request(self.url + path.lstrip("/"), headers=headers)
        try:
            with _OPENER.open(request, timeout=PATIENCE_S) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as exc:
            with exc:
                return exc.code, exc.read().decode()

    def report(self, query: str = "") -> ServingReport:
        status, body = self.get(f"/api/status{query}")
        assert status == 200, body
        return ServingReport.model_validate_json(body)

    def until(self, what: Callable[[], _T], timeout_s: float = PATIENCE_S) -> _T:
        """The first answer that is true."""
        return until(what, timeout_s, say=self.log)

    def end(self, sign: signal.Signals) -> int:
        """Tell it to end; its exit code. Fails if that takes for ever."""
        self._process.send_signal(sign)
        return self._process.wait(PATIENCE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        end_process(self._process, signal.SIGKILL)
