"""Real processes on one folder: they save, load, evict and are killed, and somebody watches the sizes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from tests.blobs.tier_process import CAPACITY, SIZES, content, new_name
from tests.blobs.tier_world import Clock, Rig, check_ledger, files_in

#: How long they are at it.
SECONDS = float(os.environ.get("TIER_TEST_SECONDS", "4"))
ROOT = Path(__file__).resolve().parents[2]


class Children:
    """The processes of a test."""

    def __init__(self, *arguments: str) -> None:
        self._arguments = arguments
        self.running: dict[str, subprocess.Popen[str]] = {}
        self.said: list[str] = []

    def start(self, seed: str, *more: str) -> subprocess.Popen[str]:
        verb, root = self._arguments
        command = [sys.executable, "-m", "tests.blobs.tier_process", verb, root, seed, *more]
        self.running[seed] = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        return self.running[seed]

    def kill(self, seed: str) -> None:
        process = self.running.pop(seed)
        process.kill()
        assert self._wait(process) == -signal.SIGKILL, self.said

    def finish(self) -> None:
        for process in self.running.values():
            assert self._wait(process) == 0, self.said
        self.running.clear()

    def _wait(self, process: subprocess.Popen[str]) -> int:
        out, _ = process.communicate(timeout=60)
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
    most = exact = kills = looks = 0
    try:
        for seed in "abc":
            children.start(seed, write)
        end = time.monotonic() + SECONDS
        next_kill = time.monotonic() + 1.0
        # On a busy machine longer, until they had to evict.
        while time.monotonic() < end or (exact < CAPACITY // 2 and time.monotonic() < end + 30):
            # Files come and go while they are looked at, so one look may count too many of them.
            most = max(most, used(folder))
            looks += 1
            if looks % 20 == 0:
                for process in children.running.values():
                    process.send_signal(signal.SIGSTOP)
                # At rest nothing may be over, leftovers of the dead included.
                exact = max(exact, used(folder))
                assert exact <= CAPACITY
                for process in children.running.values():
                    process.send_signal(signal.SIGCONT)
            assert all(process.poll() is None for process in children.running.values())
            if time.monotonic() > next_kill:
                next_kill = time.monotonic() + 0.7
                seed = rng.choice("abc")
                children.kill(seed)
                children.start(seed, write)
                kills += 1
            time.sleep(0.002)
        (tmp_path / "stop").touch()
        children.finish()
    finally:
        children.end()
    assert CAPACITY // 2 < exact <= CAPACITY
    assert most <= CAPACITY + 6 * max(SIZES)
    saved = _what_is_left(tmp_path)
    print(f"{kills} kills, {looks} looks, {len(saved)} payloads, most {most / CAPACITY:.2f} of the capacity")


def _what_is_left(root: Path) -> set[str]:
    """Nothing that a save promised is lost, and the books agree with the folder."""
    lines = [line for path in root.glob("saved.*") for line in path.read_text().splitlines()]
    saved = {line for line in lines if not line.startswith("-")} - {line[1:] for line in lines}
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
