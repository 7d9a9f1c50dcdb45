"""Commands that run until they are stopped: where they listen, when they end, where their warnings go."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import typer

from kvstore.cli.tables import plain


def place(listen: str, port: int) -> tuple[str, int]:
    """Returns the two parts of HOST:PORT. `port` is an example's. Raises typer.BadParameter."""
    host, colon, number = listen.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") if host.startswith("[") else host
    wrong = not colon or not host or not (number.isascii() and number.isdecimal()) or int(number) > 65535
    if wrong or (":" in host and not listen.startswith("[")):
        raise typer.BadParameter(
            f"{listen!r} is not HOST:PORT, such as 127.0.0.1:{port} or [::1]:{port}", param_hint="--listen"
        )
    return host, int(number)


@contextmanager
def until_told() -> Iterator[threading.Event]:
    """Yields an event that SIGTERM and SIGINT set. The second ends the process as without a handler."""
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
        """Says it as `say` does."""
        typer.echo(f"cache-admin: {record.levelname.lower()}: {plain(self.format(record))}", err=True)


@contextmanager
def logged() -> Iterator[None]:
    """Brings the store's warnings to stderr, as long as this runs."""
    handler = _Lines(logging.INFO)
    log = logging.getLogger("kvstore")
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
