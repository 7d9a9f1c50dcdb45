"""A real headless Chromium, driven over WebDriver's HTTP: what a person would see of a page.

No client library: of the protocol five commands are needed. It may reach loopback and nothing else.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.servers.redis import end_process, spawn_tied
from tests.waiting import PATIENCE_S

START_TIMEOUT_S = PATIENCE_S
_CALL_TIMEOUT_S = 60.0
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--no-proxy-server",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost",
)


class BrowserError(Exception):
    """The browser can't be found, started or made to do something."""


def find_browser() -> tuple[str, str] | None:
    """chromedriver and chromium, or None if either is missing."""
    driver = shutil.which("chromedriver")
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    return (driver, browser) if driver and browser else None


class Browser:
    """One window. It ends with the process that started it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._base = ""
        self._session = ""

    def start(self) -> Self:
        """Raises BrowserError with what the driver said."""
        found = find_browser()
        if found is None:
            raise BrowserError("no chromedriver and chromium on PATH: run `make setup` as root with apt")
        driver, browser = found
        self._folder.mkdir(parents=True, exist_ok=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        env = {**os.environ, "HOME": str(self._folder), "XDG_CONFIG_HOME": str(self._folder / "config")}
        env |= {"XDG_CACHE_HOME": str(self._folder / "cache"), "TMPDIR": str(self._folder)}
        log = self._folder / "chromedriver.log"
        self._process = spawn_tied([driver, f"--port={port}", "--allowed-ips=127.0.0.1"], log, env)
        self._base = f"http://127.0.0.1:{port}"
        try:
            self._await_driver()
            options = {"binary": browser, "args": [*_FLAGS, f"--user-data-dir={self._folder / 'profile'}"]}
            wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
            answer = self._call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        except BrowserError as exc:
            self.close()
            raise BrowserError(f"{exc}; its log:\n{log.read_text(errors='replace')[-2000:]}") from None
        self._session = f"/session/{answer['sessionId']}"
        return self

    def open(self, url: str) -> None:
        """Returns when the page has been loaded."""
        self._call("POST", f"{self._session}/url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """What the body of a function returns, run in the page."""
        return self._call(
            "POST", f"{self._session}/execute/sync", {"script": script, "args": list(arguments)}
        )

    def until(self, script: str, *arguments: Any, timeout_s: float = PATIENCE_S) -> Any:
        """The first answer of `run` that is true. Raises BrowserError if there is none in time."""
        ends = time.monotonic() + timeout_s
        while not (found := self.run(script, *arguments)):
            if time.monotonic() > ends:
                raise BrowserError(f"not in {timeout_s:g} s: {script}")
            time.sleep(0.05)
        return found

    def size(self, width: int, height: int) -> None:
        """The page's own size, in CSS pixels, as a phone or a screen has it."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._devtools("Emulation.setDeviceMetricsOverride", metrics)

    def colours(self, scheme: str) -> None:
        """`light` or `dark`."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._devtools("Emulation.setEmulatedMedia", {"features": features})

    def screenshot(self, path: Path, *, whole: bool = True) -> Path:
        """What is to be seen, of the whole page, as a PNG."""
        wanted = {"format": "png", "captureBeyondViewport": whole}
        path.write_bytes(base64.b64decode(self._devtools("Page.captureScreenshot", wanted)["data"]))
        return path

    def complaints(self) -> list[str]:
        """What the browser wrote to its console since the last call: errors, refused scripts and styles."""
        entries = self._call("POST", f"{self._session}/se/log", {"type": "browser"})
        return [f"{entry['level']}: {entry['message']}" for entry in entries]

    def close(self) -> None:
        """Idempotent."""
        if self._process is None:
            return
        if self._session:
            try:
                self._call("DELETE", self._session)
            except BrowserError:
                pass
        end_process(self._process, signal.SIGTERM)
        self._process = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _await_driver(self) -> None:
        ends = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                self._call("GET", "/status")
            except BrowserError:
                if time.monotonic() > ends:
                    raise
                time.sleep(0.05)
            else:
                return

    def _devtools(self, command: str, parameters: dict[str, Any]) -> Any:
        return self._call("POST", f"{self._session}/goog/cdp/execute", {"cmd": command, "params": parameters})

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base + path, data, method=method)
        request.add_header("Content-Type", "application/json")
        # A proxy in this machine's environment has no part in it.
        opener: Callable[..., Any] = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
        try:
            with opener(request, timeout=_CALL_TIMEOUT_S) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as exc:
            with exc:
                raise BrowserError(f"{method} {path}: {exc.read().decode(errors='replace')[:1000]}") from None
        except (OSError, ValueError) as exc:
            raise BrowserError(f"{method} {path}: {exc}") from exc
