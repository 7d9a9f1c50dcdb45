"""`cache-admin serve`: a janitor, a Monitor, and the HTTP server that shows both.

    thread           does                                                      ends
    index            looks at the index every LOOK_S                           within a look
    payloads         asks the payload store every ASK_PAYLOADS_S               within a call
    janitor          Janitor.run                                               between two batches
    http             waits for all connections, answers probes                 at once
    http, 2 more     make the other answers, from memory                       within one

All that ask a backend are daemons: a process that is told to end is not kept by one that hangs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib.resources import files

from kvstore.admin.backends import Cache
from kvstore.admin.serve.door import Guests, Refusal
from kvstore.admin.serve.exporter import Exporter
from kvstore.admin.serve.exposed import Exposition
from kvstore.admin.serve.history import KEPT_S, SAMPLE_S
from kvstore.admin.serve.listener import HttpRequest, Listener, Response, Routes, sentence
from kvstore.admin.serve.monitor import ASK_PAYLOADS_S, LOOK_S, Monitor, Readiness
from kvstore.admin.serve.reports import ServingReport
from kvstore.errors import KVStoreError
from kvstore.format.keyring import NO_KEYS
from kvstore.janitor.janitor import Janitor
from kvstore.janitor.reports import JanitorState

log = logging.getLogger(__name__)

_HOUR_S = 3600
#: Seconds that the metrics' text is kept for: with many namespaces it takes tens of milliseconds to make.
TEXT_KEPT_S = 2.0
#: The files of the page, and their content types.
_PAGE = {
    "index.html": "text/html",
    "page.css": "text/css",
    "page.js": "text/javascript",
    "charts.js": "text/javascript",
    "icon.svg": "image/svg+xml",
}


class Serving:
    """A server with its threads. Nothing runs before `start`.

    Raises ConfigError if the janitor's keys are wrong.
    """

    def __init__(self, cache: Cache, *, janitor: bool = True) -> None:
        self._cache = cache
        #: Read at once: keys that are wrong end the start, and are no fault of a round.
        self._keyring = cache.keyring if janitor else NO_KEYS
        self._with_janitor = janitor
        self.monitor = Monitor(cache)
        self._exporter = Exporter(self.monitor, self.janitor_state, self._refused)
        self._janitor: Janitor | None = None
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._listener: Listener | None = None

    def start(self, host: str, port: int, access: Guests | None = None) -> str:
        """Starts to listen and to look at the backends, and the janitor; returns the URL.

        Raises ConfigError if it can't listen there, or `access` names what it can't read.
        """
        self._listener = Listener(host, port, self._routes(), self._probes(), access)
        if self._listener.door.open and not self._listener.local:
            log.warning("whoever reaches this port may ask: there is no --password-file and no --client-ca")
        self._run("index", lambda: self._repeat(self.monitor.look, LOOK_S))
        self._run("payloads", lambda: self._repeat(self.monitor.ask_payloads, ASK_PAYLOADS_S))
        if self._with_janitor:
            self._run("janitor", self._run_janitor)
        return self._listener.url

    def stop(self, within_s: float) -> list[str]:
        """Ends everything; returns the names of the threads that a backend still keeps after `within_s`."""
        self._stop.set()
        until = time.monotonic() + within_s
        if self._listener is not None:
            self._listener.close()
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return [thread.name for thread in self._threads if thread.is_alive()]

    def once(self) -> ServingReport:
        """Does one round of the janitor, if there is one, and one look, in this thread.

        Raises none of the backends' errors.
        """
        if self._with_janitor:
            try:
                if (janitor := self._opened_janitor()) is not None:
                    janitor.round()
                    ended = threading.Event()
                    ended.set()
                    janitor.run(ended)  # takes its word back
            except KVStoreError as exc:
                log.warning("no round: %s", exc)
        self.monitor.look()
        self.monitor.ask_payloads()
        return self.monitor.report(_HOUR_S, self.janitor_state())

    def janitor_state(self) -> JanitorState | None:
        """Returns the janitor's state; None if there is none, or not yet."""
        return None if self._janitor is None else self._janitor.state()

    def healthy(self) -> Readiness:
        """Returns whether all threads run, and the one that looks at the index turns."""
        gone = [thread.name for thread in self._threads if not thread.is_alive()]
        if gone:
            return Readiness(False, f"ended: {', '.join(gone)}")
        return self.monitor.turning()

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

    def _run_janitor(self) -> None:
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
        """Returns the janitor; None while the index is a file that nobody has made: nothing is to be done."""
        index = self.monitor.index()
        if index is not None and self._janitor is None:
            cache = self._cache
            self._janitor = Janitor(
                index,
                cache.brief_payloads,
                cache.brief_evidence,
                cache.settings,
                keyring=self._keyring,
            )
        return self._janitor

    # HTTP.

    def _routes(self) -> Routes:
        folder = files("kvstore.admin.serve") / "page"
        page = {
            f"/{name}".removesuffix("index.html"): Response(
                (folder / name).read_bytes(), f"{kind}; charset=utf-8"
            )
            for name, kind in _PAGE.items()
        }
        return {
            **{path: partial(_fixed, answer) for path, answer in page.items()},
            "/metrics": Exposition(self._exporter.metrics, kept_s=TEXT_KEPT_S),
            "/api/status": self._status,
        }

    def _probes(self) -> Routes:
        return {
            "/healthz": lambda _: _probe(self.healthy()),
            "/readyz": lambda _: _probe(self.monitor.ready()),
        }

    def _refused(self) -> Mapping[Refusal, int]:
        return {} if self._listener is None else self._listener.door.refused()

    def _status(self, request: HttpRequest) -> Response:
        text = request.query.get("window_s", str(_HOUR_S))
        if not (text.isascii() and text.isdecimal() and len(text) < 10 and SAMPLE_S <= int(text) <= KEPT_S):
            return sentence(f"window_s is a number of seconds from {SAMPLE_S} to {KEPT_S}", 400)
        report = self.monitor.report(int(text), self.janitor_state())
        return Response(report.model_dump_json().encode(), "application/json")


def _fixed(answer: Response, _request: HttpRequest) -> Response:
    return answer


def _probe(readiness: Readiness) -> Response:
    return sentence(readiness.why, 200 if readiness.ok else 503)
