"""`cache-admin serve`: a janitor, a Watch, and the HTTP server that shows both.

    thread           does                                                      ends
    index            looks at the index every LOOK_S                           within a look
    payloads         asks the payload store every ASK_PAYLOADS_S               within a call
    janitor          Janitor.run                                               between two batches
    accept, 8 more   HTTP                                                      at once

All are daemons: a process that is told to end is not kept by a backend that hangs.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from importlib.resources import files
from secrets import token_hex

from kvstore.admin.cache import Cache
from kvstore.admin.exporter import Exporter
from kvstore.admin.history import KEPT_S, SAMPLE_S
from kvstore.admin.janitor import Janitor
from kvstore.admin.listening import Answer, Asked, Listener, sentence
from kvstore.admin.watching import ASK_PAYLOADS_S, LOOK_S, Readiness, Watch
from kvstore.errors import KVStoreError
from schemas.janitor import JanitorState
from schemas.serving import ServingReport

log = logging.getLogger(__name__)

_HOUR_S = 3600
#: What the page is made of: path, file, type.
_PAGE = (
    ("/", "index.html", "text/html; charset=utf-8"),
    ("/page.css", "page.css", "text/css; charset=utf-8"),
    ("/page.js", "page.js", "text/javascript; charset=utf-8"),
    ("/charts.js", "charts.js", "text/javascript; charset=utf-8"),
    ("/icon.svg", "icon.svg", "image/svg+xml"),
)


class Serving:
    """Nothing runs before `start`."""

    def __init__(self, cache: Cache, *, janitor: bool = True) -> None:
        self._cache = cache
        self._with_janitor = janitor
        self.watch = Watch(cache)
        self._exporter = Exporter(self.watch, self.janitor_state)
        self._janitor: Janitor | None = None
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._listener: Listener | None = None

    def start(self, host: str, port: int) -> str:
        """Listen, look and look after; returns the URL. Raises ConfigError if it can't listen there."""
        self._listener = Listener(host, port, self._routes())
        self._run("index", lambda: self._repeat(self.watch.look, LOOK_S))
        self._run("payloads", lambda: self._repeat(self.watch.ask_payloads, ASK_PAYLOADS_S))
        if self._with_janitor:
            self._run("janitor", self._look_after)
        return self._listener.url

    def stop(self, within_s: float) -> list[str]:
        """End everything; returns the names of threads that a backend still keeps after `within_s`."""
        self._stop.set()
        until = time.monotonic() + within_s
        if self._listener is not None:
            self._listener.close()
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return [thread.name for thread in self._threads if thread.is_alive()]

    def once(self) -> ServingReport:
        """One look and, of a janitor, one round, in this thread. Raises nothing of the backends'."""
        if self._with_janitor:
            try:
                if (janitor := self._opened_janitor()) is not None:
                    janitor.round()
                    ended = threading.Event()
                    ended.set()
                    janitor.run(ended)  # gives the lease back
            except KVStoreError as exc:
                log.warning("no round: %s", exc)
        self.watch.look()
        self.watch.ask_payloads()
        return self.watch.report(_HOUR_S, self.janitor_state())

    def janitor_state(self) -> JanitorState | None:
        """None: there is none, or not yet."""
        return None if self._janitor is None else self._janitor.state()

    def healthy(self) -> Readiness:
        """Whether every thread that should be there is, and the one that looks at the index turns."""
        gone = [thread.name for thread in self._threads if not thread.is_alive()]
        if gone:
            return Readiness(False, f"ended: {', '.join(gone)}")
        return self.watch.turning()

    # Threads.

    def _run(self, name: str, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _repeat(self, turn: Callable[[], None], every_s: float) -> None:
        while not self._stop.is_set():
            began = time.monotonic()
            try:
                turn()
            except Exception:
                log.exception("a look failed")
            self._stop.wait(max(0.5, began + every_s - time.monotonic()))

    def _look_after(self) -> None:
        while not self._stop.is_set():
            try:
                janitor = self._opened_janitor()
            except KVStoreError as exc:
                log.warning("the janitor waits for its index: %s", exc)
                janitor = None
            if janitor is not None:
                janitor.run(self._stop)
                return
            self._stop.wait(LOOK_S)

    def _opened_janitor(self) -> Janitor | None:
        """None while the index is a file that nobody has made: there is nothing to look after."""
        index = self.watch.index()
        if index is not None and self._janitor is None:
            holder = f"{socket.gethostname()}/{os.getpid()}/{token_hex(2)}"
            self._janitor = Janitor(index, self._cache.payloads, self._cache.settings, holder=holder)
        return self._janitor

    # HTTP.

    def _routes(self) -> dict[str, Callable[[Asked], Answer]]:
        folder = files("kvstore.admin") / "page"
        page = {path: Answer((folder / name).read_bytes(), kind) for path, name, kind in _PAGE}
        routes: dict[str, Callable[[Asked], Answer]] = {
            path: lambda _asked, answer=answer: answer  # type: ignore[misc]
            for path, answer in page.items()
        }
        return routes | {
            "/metrics": lambda asked: Answer(*self._exporter.text(asked.accept)),
            "/healthz": lambda _: _probe(self.healthy()),
            "/readyz": lambda _: _probe(self.watch.ready()),
            "/api/status": self._status,
        }

    def _status(self, asked: Asked) -> Answer:
        text = asked.query.get("window_s", str(_HOUR_S))
        if not (text.isascii() and text.isdecimal() and SAMPLE_S <= int(text[:9]) <= KEPT_S):
            return sentence(f"window_s is a number of seconds from {SAMPLE_S} to {KEPT_S}", 400)
        report = self.watch.report(int(text), self.janitor_state())
        return Answer(report.model_dump_json().encode(), "application/json")


def _probe(readiness: Readiness) -> Answer:
    return sentence(readiness.why, 200 if readiness.ok else 503)
