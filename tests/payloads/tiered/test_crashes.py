"""A process is killed at every step of everything that writes; another one opens what it has left.

A step is just before or just after one call of a tier, a ledger or the markers, and of the system calls by
which LocalPayloads writes, names and unlinks a file; a write that is killed has stored half of its bytes.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from kvstore.conformance.arrange import NAMESPACE, fetch, views
from kvstore.payloads import local
from tests.payloads.test_local import _Crashing, _in_child
from tests.payloads.tiered.world import Clock, Rig, check_ledger, files_in

SIZE = 20_000
#: Four fit.
CAPACITY = 4 * SIZE + 100


class Writes(_Crashing):
    CALLS = ("pwritev", "rename", "unlink")


def name_of(number: int) -> str:
    return f"{NAMESPACE}/ab/ab{number:014x}.0"


def content(number: int) -> bytes:
    return (b"%d," % number * SIZE)[:SIZE]


#: 0 to 3 are in the folder before, 4 and 5 in the shared store only, 6 is new.
BEFORE, STORED, NEW = range(4), (4, 5), 6


def prepare(root: Path, kind: str) -> None:
    rig = Rig(root, capacity=CAPACITY)
    for number in (*BEFORE, *STORED):
        rig.slow.inner.put(name_of(number), views(content(number)))
    for number in BEFORE:
        assert rig.tier.fill(name_of(number), SIZE)
    rig.tier.close()
    if kind == "compare":
        # A new ledger, and a folder over its capacity.
        for path in (rig.folder / ".tier").glob("ledger*"):
            path.unlink()
        rig.fast.inner.put(name_of(5), views(content(5)))


def _save(rig: Rig) -> None:
    rig.tier.put(name_of(NEW), views(content(NEW)[:9000], content(NEW)[9000:]))


def _fill(rig: Rig) -> None:
    rig.tier.read(name_of(4), 0, [memoryview(bytearray(SIZE))], size=SIZE)


def _delete(rig: Rig) -> None:
    assert rig.tier.delete([name_of(0), name_of(4)]) == 2


def _save_and_delete(rig: Rig) -> None:
    later, rig.tier._back._later = rig.tier._back._later, lambda nbytes, job: False
    _save(rig)
    rig.tier._back._later = later
    assert rig.tier.delete([name_of(NEW)]) == 1


WORK: dict[str, tuple[str, Callable[[Rig], None]]] = {
    "save, through": ("through", _save),
    "save and upload": ("back", _save),
    "fill": ("through", _fill),
    "delete": ("through", _delete),
    "delete what is dirty": ("back", _save_and_delete),
    "compare": ("through", _fill),
}


def crash(root: Path, write: str, work: Callable[[Rig], None], at: int) -> int:
    """The child's exit status; what it could say before it died is in `root`/returned."""

    def child() -> None:
        steps = iter(range(10_000))

        def step(_what: str) -> None:
            if next(steps) == at:
                os.kill(os.getpid(), signal.SIGKILL)

        rig = Rig(root, capacity=CAPACITY, write=write)
        rig.announce(step)
        local.os = Writes(os, steps, at)  # type: ignore[assignment]
        if write == "back":
            # The save returns before its upload starts.
            jobs: list[Callable[[], None]] = []
            rig.tier._back._later = lambda nbytes, job: not jobs.append(job)  # type: ignore[func-returns-value]
            work(rig)
            (root / "returned").touch()
            for job in jobs:
                job()
        else:
            work(rig)
            (root / "returned").touch()

    return _in_child(child)


def inspect(root: Path, kind: str) -> None:
    """What another process finds, at once and after a while."""
    returned = (root / "returned").exists()
    assert sum(files_in(root / "fast").values()) <= CAPACITY or kind == "compare"
    clock = Clock()
    rig = Rig(root, capacity=CAPACITY, clock=clock)
    saved = kind.startswith("save") and returned
    deleted = {"delete": (0, 4), "delete what is dirty": (NEW,)}.get(kind, ()) if returned else ()

    def everything() -> Iterator[tuple[int, bytes | None]]:
        for number in range(7):
            yield number, fetch(rig.tier, name_of(number))

    for number, got in everything():
        assert got in (None, content(number))
        if got is None:
            gone = kind.startswith("delete") and number in (0, 4, NEW)
            assert gone or (number == NEW and not saved), number
        else:
            assert number not in deleted
    for path in (root / "fast" / ".tmp").glob("*"):
        with suppress(FileNotFoundError):
            os.utime(path, (time.time() - 2,) * 2)
    for _ in range(3):
        clock.now += 10
        rig.tend()
    # Nothing is left of it: no reservation, no temporary file, no marker, no byte unaccounted for.
    assert not list((root / "fast" / ".tmp").glob("*"))
    assert rig.tier._back._markers.all() == []
    with rig.ledger.file.reading("check") as db:
        assert db.execute("SELECT count(*) FROM reservations").fetchone() == (0,)
    check_ledger(rig.ledger, rig.folder)
    assert rig.tier.usage().dirty_payloads == 0
    if saved:
        assert (root / "slow" / name_of(NEW)).read_bytes() == content(NEW)
    # And the folder works.
    assert rig.tier.fill(name_of(5), SIZE)
    check_ledger(rig.ledger, rig.folder)
    rig.tier.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", WORK)
def test_killed_at_any_step(tmp_path: Path, kind: str) -> None:
    write, work = WORK[kind]
    returned = []
    for at in range(1000):
        root = tmp_path / str(at)
        prepare(root, kind)
        status = crash(root, write, work, at)
        assert status in (0, -signal.SIGKILL)
        inspect(root, kind)
        returned.append((root / "returned").exists())
        if status == 0:
            break
    # There were steps enough, and the work was over once.
    assert len(returned) > 10
    assert returned == sorted(returned)
