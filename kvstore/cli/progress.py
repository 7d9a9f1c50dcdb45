"""Progress on stderr: a bar on a terminal, otherwise a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as RichProgress

from kvstore.admin.progress import ProgressListener
from kvstore.rules.units import size

#: Seconds between two lines where there is no terminal.
_EVERY_S = 10.0


@contextmanager
def shown() -> Iterator[ProgressListener]:
    """Yields what a verb tells its progress to."""
    if not sys.stderr.isatty():
        yield Lines()
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn())
    figures = (DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
    with RichProgress(
        *columns, *figures, TimeElapsedColumn(), console=Console(stderr=True), transient=True
    ) as bars:
        yield Bar(bars)


class Bar:
    """Shows a bar per stage, one at a time."""

    def __init__(self, bars: RichProgress) -> None:
        self._bars = bars
        self._task = bars.add_task("", visible=False)

    def begin(self, what: str, total_bytes: int | None = None) -> None:
        self._bars.remove_task(self._task)
        self._task = self._bars.add_task(what, total=total_bytes)

    def advance(self, nbytes: int) -> None:
        self._bars.advance(self._task, nbytes)


class Lines:
    """Writes a line per stage that takes long, and others while it does."""

    def __init__(
        self,
        write: Callable[[str], None] = lambda line: typer.echo(line, err=True),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._write = write
        self._clock = clock
        self._what, self._done = "", 0
        self._total: int | None = None
        self._began = self._said_at = clock()

    def begin(self, what: str, total_bytes: int | None = None) -> None:
        self._what, self._total, self._done = what, total_bytes, 0
        self._began = self._clock()
        self._perhaps()

    def advance(self, nbytes: int) -> None:
        self._done += nbytes
        self._perhaps()

    def _perhaps(self) -> None:
        now = self._clock()
        if now - self._said_at < _EVERY_S:
            return
        self._said_at = now
        seconds = now - self._began
        of = f" of {size(self._total)}" if self._total else ""
        rate = f", {self._done / seconds / 1e6:.0f} MB/s" if self._done and seconds else ""
        left = ""
        if self._total and self._done:
            left = f", {(self._total - self._done) * seconds / self._done:.0f} s left"
        amount = f": {size(self._done)}{of}{rate}{left}" if self._done or self._total else ""
        self._write(f"cache-admin: {self._what}{amount}")
