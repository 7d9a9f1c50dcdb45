"""Clocks that are wrong: an engine's, and that of the index. Every clock of such a process is, not only what
Python reads (clock.c)."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.servers.redis import RedisServer
from tests.servers.s3.ceph import CephServer
from trials.faults.bed import PATIENT, Bed, bed, merged
from trials.faults.row import Row
from trials.faults.trial import AT_ONCE, Fault, on

HOURS_S = 6 * 3600
_SOURCE = Path(__file__).with_name("clock.c")


class Clock:
    """The time of day of one process, or of several."""

    def __init__(self, folder: Path, name: str) -> None:
        self._file = folder / f"{name}.clock"
        self._file.write_bytes(bytes(8))
        library = folder / "clock.so"
        if not library.exists():
            compiler = shutil.which("cc") or shutil.which("gcc")
            if compiler is None:
                raise RuntimeError("no C compiler, and so no wrong clocks")
            subprocess.run([compiler, "-shared", "-fPIC", "-O2", "-o", library, _SOURCE], check=True)
        #: What a process must be started with to have this clock.
        self.environment = {"LD_PRELOAD": str(library), "FAULTS_CLOCK": str(self._file)}

    def set(self, seconds: int) -> None:
        """From now on it is so many seconds ahead; behind, if that is less than 0."""
        # In place and in one write: processes have it mapped.
        with self._file.open("r+b", buffering=0) as file:
            file.write(struct.pack("=q", seconds))


@contextmanager
def preloaded(clock: Clock) -> Iterator[None]:
    """What is started meanwhile has this clock."""
    before = {name: os.environ.get(name) for name in clock.environment}
    os.environ.update(clock.environment)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


@contextmanager
def clocked_bed() -> Iterator[Bed]:
    """An engine and a Redis with clocks of their own; payloads in a folder."""
    with ExitStack() as stack:
        top = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvs-bed-")))
        clocks = {name: Clock(top, name) for name in ("engine", "index")}
        with preloaded(clocks["index"]):
            redis = stack.enter_context(RedisServer(top / "redis"))
        settings = {"index": redis.url, "payloads": f"file://{top}/payloads"}
        environment = clocks["engine"].environment
        made = bed(clocks, settings, PATIENT, top / "payloads", environment=environment)
        yield stack.enter_context(made)


@contextmanager
def clocked_bucket_bed() -> Iterator[Bed]:
    """An engine with a clock of its own, Redis, and a bucket whose server looks at signatures' times."""
    with ExitStack() as stack:
        top = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvs-bed-")))
        clock = Clock(top, "engine")
        redis = stack.enter_context(RedisServer(top / "redis"))
        bucket = stack.enter_context(CephServer()).new_bucket()
        settings = {"index": redis.url, "payloads": bucket.url, "s3": bucket.settings["s3"]}
        direct = merged(PATIENT, {})
        made = bed({"engine": clock}, settings, direct, top / "none", environment=clock.environment)
        yield stack.enter_context(made)


def wrong(*names: str, seconds: int) -> Fault:
    """These clocks are so many seconds ahead for a while."""

    @contextmanager
    def fault(one: Bed, _targets: list[str]) -> Iterator[Callable[[], int]]:
        for name in names:
            one.parts[name].set(seconds)
        try:
            yield lambda: 1
        finally:
            for name in names:
                one.parts[name].set(0)

    return fault


def jumping(*names: str) -> Fault:
    """These clocks jump by hours, forth and back, ten times a second."""

    @contextmanager
    def fault(one: Bed, _targets: list[str]) -> Iterator[Callable[[], int]]:
        over, made = threading.Event(), 0

        def jump() -> None:
            nonlocal made
            while not over.wait(0.1):
                made += 1
                for name in names:
                    one.parts[name].set((HOURS_S, 0, -HOURS_S)[made % 3])

        thread = threading.Thread(target=jump, daemon=True)
        thread.start()
        try:
            yield lambda: made
        finally:
            over.set()
            thread.join()
            for name in names:
                one.parts[name].set(0)

    return fault


def _row(fault: str, make: object, how: Fault, **more: object) -> Row:
    return Row("processes", fault, "engine", on(make, how, AT_ONCE, **more))


ROWS = [
    _row("the engine's clock is 6 h ahead", clocked_bed, wrong("engine", seconds=HOURS_S)),
    _row("the engine's clock is 6 h behind", clocked_bed, wrong("engine", seconds=-HOURS_S)),
    _row("the engine's clock jumps by 6 h, forth and back", clocked_bed, jumping("engine")),
    _row("Redis' clock is 6 h ahead, then right again", clocked_bed, wrong("index", seconds=HOURS_S)),
    _row("Redis' clock is 6 h behind, then right again", clocked_bed, wrong("index", seconds=-HOURS_S)),
    _row("Redis' clock jumps by 6 h, forth and back", clocked_bed, jumping("index")),
    _row("both clocks jump by 6 h, forth and back", clocked_bed, jumping("engine", "index")),
    _row(
        "the engine's clock is 6 h ahead, and the bucket refuses its signatures",
        clocked_bucket_bed,
        wrong("engine", seconds=HOURS_S),
        met=("permission", "unavailable", "breaker_open"),
    ),
]
