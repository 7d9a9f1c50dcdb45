"""serve: the janitor and the exporter, with a page for people."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Annotated

import typer

from kvstore.cli import render_serving
from kvstore.cli.call import Call, say, verb
from kvstore.cli.tables import plain

#: What is going on when the process is told to end, such as a backend's call, has so long.
_STOP_S = 5.0
_PORT = 9464


def add_to(app: typer.Typer) -> None:
    """Register these commands."""
    verb(app.command())(serve)


def serve(
    call: Call,
    listen: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            help="Where to listen; [::]:PORT or 0.0.0.0:PORT is everywhere, port 0 any free one.",
        ),
    ] = f"127.0.0.1:{_PORT}",
    janitor: Annotated[
        bool,
        typer.Option("--janitor/--no-janitor", help="Look after the cache, or only show it."),
    ] = True,
    once: Annotated[
        bool, typer.Option("--once", help="One round, print what there is then, and end; listens nowhere.")
    ] = False,
    probe: Annotated[
        bool,
        typer.Option(
            "--probe",
            help="Ask the server that listens there whether it is ready, print what it says, and end: for "
            "health checks. Exits with 5 if it is not, or does not answer.",
        ),
    ] = False,
) -> None:
    """Look after the cache until it is stopped, and show it: a page, metrics, probes.

    The janitor evicts down to the quotas, deletes what was evicted, sweeps, checks the accounts, and reads a
    few percent of the payloads a day to find damage. Of any number of them one works and the others stand by.

    `/` is a page for people, `/metrics` is for Prometheus, `/healthz` and `/readyz` for probes, `/api/status`
    is the page as JSON. There is no password: by default only this machine is listened to.
    """
    host, port = _place(listen)
    if probe:
        from kvstore.admin.probing import probe as ask

        answer = ask(host, port)
        call.print(answer, render_serving.probed)
        call.exit_by(answer)
        return
    # Prometheus' library and the page are for this verb alone.
    from kvstore.admin.serving import Serving

    with call.cache() as cache, _log():
        serving = Serving(cache, janitor=janitor)
        if once:
            report = serving.once()
            call.print(report, render_serving.serving)
            call.exit_by(report)
            return
        with _signals() as stop:
            say(f"listening on {serving.start(host, port)}")
            stop.wait()
        # A backend that hangs is left alone: whatever is being done there is safe to be cut off.
        kept = serving.stop(_STOP_S)
        say(f"stopped, not waiting for: {', '.join(kept)}" if kept else "stopped")


def _place(listen: str) -> tuple[str, int]:
    host, colon, port = listen.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") if host.startswith("[") else host
    wrong = not colon or not host or not (port.isascii() and port.isdecimal()) or int(port) > 65535
    if wrong or (":" in host and not listen.startswith("[")):
        raise typer.BadParameter(
            f"{listen!r} is not HOST:PORT, such as 127.0.0.1:{_PORT} or [::1]:{_PORT}", param_hint="--listen"
        )
    return host, int(port)


@contextmanager
def _signals() -> Iterator[threading.Event]:
    """An event that SIGTERM and SIGINT set. A second one ends the process as if there were no handler."""
    stop = threading.Event()
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def told(_number: int, _frame: FrameType | None) -> None:
        for number, handler in before.items():
            signal.signal(number, handler)
        stop.set()

    for number in before:
        signal.signal(number, told)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Lines(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        """As `say` says it."""
        typer.echo(f"cache-admin: {record.levelname.lower()}: {plain(self.format(record))}", err=True)


@contextmanager
def _log() -> Iterator[None]:
    """The store's warnings on stderr, as long as this runs."""
    handler = _Lines(logging.INFO)
    log = logging.getLogger("kvstore")
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
