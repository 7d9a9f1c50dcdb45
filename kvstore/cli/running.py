"""Commands that run until they are stopped: where they listen, what they read, when they end, where their
warnings go."""

from __future__ import annotations

import logging
import queue
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import typer

from kvstore.cli.tables import plain

#: Most bytes of a line; of a longer one each piece counts as a line.
_LONGEST = 1 << 20


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


class Lines:
    """The lines of a file or a pipe, read on a thread of its own as they come, no more than are taken."""

    def __init__(self, file: Path, most: int = 1000) -> None:
        """`file` is - for stdin. Raises typer.BadParameter if it can't be read."""
        try:
            self._file = sys.stdin.buffer if str(file) == "-" else file.open("rb")
        except OSError as exc:
            raise typer.BadParameter(f"{file} can't be read: {exc.strerror}") from None
        self._most = most
        self._lines: queue.Queue[str] = queue.Queue(most)
        threading.Thread(target=self._read, name="lines", daemon=True).start()

    def _read(self) -> None:
        while line := self._file.readline(_LONGEST):
            self._lines.put(line.decode(errors="replace"))

    def take(self, wait_s: float) -> list[str]:
        """Returns the lines that are there, waiting up to so many seconds for the first one."""
        found: list[str] = []
        with suppress(queue.Empty):
            found.append(self._lines.get(timeout=wait_s))
            while len(found) < self._most:
                found.append(self._lines.get_nowait())
        return found


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
