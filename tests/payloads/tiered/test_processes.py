"""Real processes on one folder: they save, load, evict and are killed, and somebody watches the sizes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.payloads.tiered.process import CAPACITY, content, new_name
from tests.payloads.tiered.world import Clock, Rig, check_ledger, files_in
from tests.waiting import PATIENCE_S

#: How long they are at it, at least.
SECONDS = float(os.environ.get("TIER_TEST_SECONDS", "4"))
ROOT = Path(__file__).resolve().parents[3]


class Children:
    """The processes of a test."""

    def __init__(self, *arguments: str) -> None:
        self._arguments = arguments
        self.running: dict[str, subprocess.Popen[str]] = {}
        self.said: list[str] = []

    def start(self, seed: str, *more: str) -> subprocess.Popen[str]:
        verb, root = self._arguments
        command = [sys.executable, "-m", "tests.payloads.tiered.process", verb, root, seed, *more]
        self.running[seed] = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        return self.running[seed]

    def kill(self, seed: str) -> None:
        process = self.running.pop(seed)
        process.kill()
        assert self._wait(process) == -signal.SIGKILL, self.said

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """All of them stand still meanwhile."""
        for process in self.running.values():
            process.send_signal(signal.SIGSTOP)
        for process in self.running.values():
            # Its threads stop one after the other.
            os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        yield
        for process in self.running.values():
            process.send_signal(signal.SIGCONT)

    def finish(self) -> None:
        for process in self.running.values():
            assert self._wait(process) == 0, self.said
        self.running.clear()

    def _wait(self, process: subprocess.Popen[str]) -> int:
        out, _ = process.communicate(timeout=PATIENCE_S)
        self.said.append(out)
        return process.returncode

    def end(self) -> None:
        for process in self.running.values():
            process.kill()
            process.communicate()


def used(folder: Path) -> int:
    return sum(files_in(folder).values())


@pytest.mark.slow
@pytest.mark.parametrize("write", ["through", "back"])
def test_three_processes_share_a_folder_and_are_killed(tmp_path: Path, write: str) -> None:
    children = Children("churn", str(tmp_path))
    rng, folder = random.Random(1), tmp_path / "fast"
    most = kills = looks = 0
    began = next_kill = time.monotonic()
    #: The bytes that each process and those before it had said when it was started.
    said: dict[str, int] = {}

    def start(seed: str) -> None:
        said[seed] = _said(tmp_path, seed)
        children.start(seed, write)

    def enough() -> bool:
        """They had to evict, and were killed at work."""
        return most > CAPACITY // 2 and kills >= 3 and len(_saved(tmp_path)) > 20

    try:
        for seed in "abc":
            start(seed)
        while time.monotonic() < began + SECONDS or not enough():
            assert time.monotonic() < began + SECONDS + 2 * PATIENCE_S, (most, kills, children.said)
            # While it goes on, files come and go under a look, which counts too many of them.
            with children.stopped():
                most = max(most, used(folder))
            # Leftovers of the dead included.
            assert most <= CAPACITY
            looks += 1
            assert all(process.poll() is None for process in children.running.values())
            # Whoever is killed has been at work: on a busy machine the start alone takes seconds.
            working = [seed for seed in "abc" if _said(tmp_path, seed) > said[seed]]
            if working and time.monotonic() > next_kill:
                next_kill = time.monotonic() + 0.7
                seed = rng.choice(working)
                children.kill(seed)
                start(seed)
                kills += 1
            time.sleep(0.02)
        (tmp_path / "stop").touch()
        children.finish()
    finally:
        children.end()
    saved = _what_is_left(tmp_path)
    print(f"{kills} kills, {looks} looks, {len(saved)} payloads, most {most / CAPACITY:.2f} of the capacity")


def _said(root: Path, seed: str) -> int:
    """Bytes of what processes of that name have written of their saves."""
    with suppress(FileNotFoundError):
        return (root / f"saved.{seed}").stat().st_size
    return 0


def _saved(root: Path) -> set[str]:
    """What saves have promised, less what was deleted."""
    lines = [line for path in root.glob("saved.*") for line in path.read_text().splitlines()]
    return {line for line in lines if not line.startswith("-")} - {line[1:] for line in lines}


def _what_is_left(root: Path) -> set[str]:
    """Nothing that a save promised is lost, and the books agree with the folder."""
    saved = _saved(root)
    for path in (root / "fast" / ".tmp").glob("*"):
        with suppress(FileNotFoundError):
            os.utime(path, (time.time() - 5,) * 2)
    clock = Clock()
    rig = Rig(root, capacity=CAPACITY, clock=clock)
    for _ in range(4):
        clock.now += 60
        rig.tend()
    check_ledger(rig.ledger, rig.folder)
    with rig.ledger.file.reading("check") as db:
        assert db.execute("SELECT count(*) FROM reservations").fetchone() == (0,)
    assert rig.tier._back._markers.all() == []
    assert rig.tier.usage().dirty_payloads == 0
    files = rig.fast_files()
    assert all((root / "fast" / name).read_bytes() == content(name) for name in files)
    for name in saved:
        assert (root / "slow" / name).read_bytes() == content(name)
    assert len(saved) > 20
    rig.tier.close()
    return saved


@pytest.mark.slow
def test_a_segment_is_fetched_once_by_all_threads_of_all_processes(tmp_path: Path) -> None:
    rng, rig = random.Random(2), Rig(tmp_path)
    names = [new_name(rng) for _ in range(12)]
    for name in names:
        rig.slow.inner.put(name, [memoryview(content(name))])
    children = Children("fetch", str(tmp_path))
    try:
        started = [children.start(seed) for seed in "abcd"]
        for process in started:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        (tmp_path / "go").touch()
        children.finish()
    finally:
        children.end()
    fetched = Counter((tmp_path / "fetched").read_text().splitlines())
    assert fetched == {f"read {name}": 1 for name in names}
    assert set(rig.fast_files()) == set(names)
