"""Commands that run until they are stopped: where they listen, what they read, when they end, where their
warnings go."""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import typer

from kvstore.cli.tables import plain

#: Bytes of a line from which on it counts as one although it has no end, and bytes read at a time.
_LONGEST, _READ_BYTES = 1 << 20, 1 << 16


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


class PipedLines:
    """The lines of a file or a pipe as they come; no more are read than are taken."""

    def __init__(self, file: Path) -> None:
        """`file` is - for stdin. Raises typer.BadParameter if it can't be read."""
        try:
            self._file = sys.stdin.fileno() if str(file) == "-" else os.open(file, os.O_RDONLY)
        except OSError as exc:
            raise typer.BadParameter(f"{file} can't be read: {exc.strerror}") from None
        self._rest = b""
        self._ended = False

    def take(self, wait_s: float) -> list[str]:
        """Returns the lines that are there, waiting up to so many seconds for one. After the end it waits."""
        if self._ended:
            time.sleep(wait_s)
            return []
        if not select.select([self._file], [], [], wait_s)[0]:
            return []
        read = os.read(self._file, _READ_BYTES)
        self._ended = not read
        *lines, self._rest = (self._rest + read).split(b"\n")
        # A line without an end counts as one when it is long, or the last one.
        if self._ended or len(self._rest) > _LONGEST:
            lines, self._rest = [*lines, self._rest], b""
        return [line.decode(errors="replace") for line in lines if line]


class _Warnings(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        """Says it as `say` does."""
        typer.echo(f"cache-admin: {record.levelname.lower()}: {plain(self.format(record))}", err=True)


@contextmanager
def logged() -> Iterator[None]:
    """Brings the store's warnings to stderr, as long as this runs."""
    handler = _Warnings(logging.INFO)
    log = logging.getLogger("kvstore")
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
