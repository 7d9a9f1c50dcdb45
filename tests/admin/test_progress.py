"""Progress: a line now and then where there is no terminal, a bar where there is one; stdout stays clean."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import Progress as RichProgress

from kvstore.cli.progress import Bar, Lines
from kvstore.threads.each import for_each
from tests.admin.conftest import Filled
from tests.waiting import PATIENCE_S


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_lines_come_now_and_then() -> None:
    said: list[str] = []
    clock = Clock()
    lines = Lines(said.append, clock)
    lines.begin("export", 4 << 20)
    for _ in range(3):
        clock.now += 6
        lines.advance(1 << 20)
    assert said == ["cache-admin: export: 2.0 MiB of 4.0 MiB, 0 MB/s, 12 s left"]
    clock.now += 60
    lines.begin("bench: the index")
    assert said[1:] == ["cache-admin: bench: the index"]
    lines.advance(0)
    assert len(said) == 2


def test_a_short_verb_says_nothing() -> None:
    said: list[str] = []
    lines = Lines(said.append, Clock())
    lines.begin("warm", 100)
    lines.advance(100)
    assert said == []


def test_bars_of_two_stages() -> None:
    out = io.StringIO()
    with RichProgress(console=Console(file=out, force_terminal=True, width=80)) as bars:
        bar = Bar(bars)
        bar.begin("first", 10)
        bar.advance(10)
        bar.begin("second")
        bars.refresh()
    assert "second" in out.getvalue()


@pytest.mark.slow
def test_on_a_terminal(filled: Filled, tmp_path: Path) -> None:
    """stderr is a terminal, stdout a pipe with nothing but data in it."""
    ours, theirs = pty.openpty()
    with (tmp_path / "out").open("wb") as out:
        ran = subprocess.Popen(
            [sys.executable, "-m", "kvstore.cli", "export", "--to", "-", *filled.options],
            stdout=out,
            stderr=theirs,
            env=os.environ | {"TERM": "xterm"},
        )
        os.close(theirs)
        shown = b""
        try:
            while piece := os.read(ours, 65536):
                shown += piece
        except OSError:
            pass  # how a terminal says that nobody writes any more
        os.close(ours)
        assert ran.wait(PATIENCE_S) == 0, shown
    assert (tmp_path / "out").read_bytes()[257:262] == b"ustar"
    assert b"Traceback" not in shown
    assert b"\x1b" in shown
    assert b"in 5 segments, 14 blocks" in shown


@pytest.mark.parametrize("jobs", [1, 4])
def test_for_each(jobs: int) -> None:
    done: list[int] = []
    for_each(done.append, range(50), jobs)
    assert sorted(done) == list(range(50))

    def failing(number: int) -> None:
        done.append(number)
        if number == 3:
            raise StopIteration("not the end of anything")

    done.clear()
    with pytest.raises((StopIteration, RuntimeError)):
        for_each(failing, range(10_000), jobs)
    assert len(done) < 1000
    nothing: Callable[[int], None] = done.append
    for_each(nothing, [], jobs)
