"""The ledger: room for payloads, in which order; shared, damaged, locked, after crashes and forks."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvstore.conformance.arrange import fresh_name, views
from kvstore.errors import (
    BreakerOpen,
    DeadlineExceeded,
    KVStoreError,
    PermissionDenied,
    StoreClosed,
    TransientError,
)
from kvstore.payloads import local
from kvstore.payloads.local import LocalPayloads
from kvstore.payloads.tiered import schema
from kvstore.payloads.tiered.folder import BoundedFolder
from kvstore.payloads.tiered.ledger import MAX_USES, Ledger
from kvstore.payloads.tiered.locks import RangeLocks, number_of
from kvstore.payloads.tiered.markers import Markers
from schemas.settings import BreakerSettings
from tests.payloads.test_local import _in_child
from tests.payloads.tiered.world import Clock, check_ledger
from tests.waiting import PATIENCE_S

#: Opens after three failures, as always, and closes sooner.
BREAKER = BreakerSettings(backoff_s=1.0, max_backoff_s=1.0)


def opened(root: Path, capacity: int = 100) -> Ledger:
    """A ledger that need not be compared with any folder."""
    made = Ledger(root, capacity, busy_timeout_s=0.1, breaker=BREAKER)
    with made.file.writing("test") as db:
        db.execute("UPDATE totals SET scanned_s = 1")
    return made


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    made = opened(tmp_path)
    yield made
    made.close()


class Unlinked(list[str]):
    """Stands for the folder: notes what is evicted."""

    def __call__(self, names: Sequence[str]) -> None:
        self.extend(names)


def add(ledger: Ledger, name: str, nbytes: int, *, dirty: bool = False) -> list[str] | None:
    """Reserve and settle; what was evicted for it, or None."""
    gone = Unlinked()
    made = ledger.reserve(name, nbytes, gone, dirty=dirty)
    if made is None:
        return None
    assert ledger.settle(made)
    return gone


def entries(ledger: Ledger) -> dict[str, int]:
    with ledger.file.reading("test") as db:
        return dict(db.execute("SELECT name, nbytes FROM entries").fetchall())


def total(ledger: Ledger) -> int:
    return ledger.usage().nbytes


# Room


def test_the_least_recently_used_make_room(ledger: Ledger) -> None:
    for name in "abcd":
        assert add(ledger, name, 25) == []
    ledger.note("a")
    ledger.note("b")
    assert add(ledger, "e", 20) == ["c"]
    # 95 are taken: 35 more need two of 25.
    assert add(ledger, "f", 40) == ["d", "a"]
    assert entries(ledger) == {"b": 25, "e": 20, "f": 40}
    assert total(ledger) == 85


def test_sizes_count_not_numbers(ledger: Ledger) -> None:
    for i in range(10):
        add(ledger, f"small{i}", 1)
    assert add(ledger, "large", 90) == []
    assert add(ledger, "more", 5) == [f"small{i}" for i in range(5)]
    assert add(ledger, "most", 100) == [*(f"small{i}" for i in range(5, 10)), "large", "more"]
    assert add(ledger, "too much", 101) is None
    assert entries(ledger) == {"most": 100}


def test_reservations_count_and_are_not_evicted(ledger: Ledger) -> None:
    gone = Unlinked()
    first = ledger.reserve("a", 60, gone)
    assert first
    assert ledger.reserve("b", 41, gone) is None
    second = ledger.reserve("b", 40, gone)
    assert second
    assert total(ledger) == 100
    ledger.release(first)
    ledger.release(first)
    assert total(ledger) == 40
    assert ledger.settle(second)
    assert ledger.usage().payloads == 1
    assert gone == []


def test_dirty_payloads_stay_and_are_at_most_half(ledger: Ledger) -> None:
    assert add(ledger, "d1", 30, dirty=True) == []
    assert ledger.reserve("d2", 21, Unlinked(), dirty=True) is None
    assert add(ledger, "d2", 20, dirty=True) == []
    assert add(ledger, "c", 50) == []
    assert add(ledger, "e", 50) == ["c"]
    # Nothing is evicted for what can't fit.
    assert add(ledger, "f", 51) is None
    assert set(entries(ledger)) == {"d1", "d2", "e"}
    usage = ledger.usage()
    assert (usage.dirty_bytes, usage.dirty_payloads) == (50, 2)
    ledger.uploaded("d1")
    assert ledger.usage().dirty_bytes == 20
    assert add(ledger, "f", 60) == ["d1", "e"]


def test_a_second_payload_of_a_name_counts_beside_the_first_until_it_is_settled(ledger: Ledger) -> None:
    add(ledger, "a", 40)
    made = ledger.reserve("a", 50, Unlinked())
    assert made
    assert total(ledger) == 90
    assert ledger.settle(made)
    assert entries(ledger) == {"a": 50}
    assert total(ledger) == 50


def test_a_failed_unlink_evicts_nothing(ledger: Ledger) -> None:
    add(ledger, "a", 60)

    def fail(names: Sequence[str]) -> None:
        raise PermissionDenied("no")

    with pytest.raises(PermissionDenied):
        ledger.reserve("b", 60, fail)
    assert entries(ledger) == {"a": 60}
    assert total(ledger) == 60


def test_what_is_deleted_while_it_is_written_is_not_settled(ledger: Ledger) -> None:
    made = ledger.reserve("a", 10, Unlinked())
    assert made
    assert ledger.state("a") == "writing"
    ledger.delete(["a", "b"], len)
    assert not ledger.settle(made)
    # Its bytes count until its file is gone.
    assert total(ledger) == 10
    ledger.release(made)
    assert total(ledger) == 0
    assert ledger.state("a") != "writing"


def test_delete_many(ledger: Ledger) -> None:
    for i in range(100):
        add(ledger, str(i), 1)
    assert ledger.delete([str(i) for i in range(5, 2000)], len) == 1995
    assert entries(ledger) == {str(i): 1 for i in range(5)}
    assert total(ledger) == 5
    assert ledger.delete([], len) == 0


def test_uses_are_bounded_and_those_of_strangers_ignored(ledger: Ledger) -> None:
    add(ledger, "a", 10)
    for i in range(MAX_USES + 10):
        ledger.note(str(i))
    ledger.note("a")
    assert len(ledger._uses) == MAX_USES
    ledger.flush()
    ledger.flush()
    assert entries(ledger) == {"a": 10}


def test_uses_of_all_processes_count_once_they_are_flushed(tmp_path: Path, ledger: Ledger) -> None:
    other = opened(tmp_path)
    for name in "abcd":
        add(ledger, name, 25)
    other.note("a")
    assert add(ledger, "e", 25) == ["a"]
    other.note("b")
    other.flush()
    assert add(ledger, "f", 25) == ["c"]
    other.close()


def test_two_processes_share_one_bound(tmp_path: Path, ledger: Ledger) -> None:
    other = opened(tmp_path)
    gone = Unlinked()
    made = [one.reserve(str(i), 26, gone) for i, one in enumerate((ledger, other) * 3)]
    assert [one is not None for one in made] == [True] * 3 + [False] * 3
    assert other.usage() == ledger.usage()
    other.close()


def test_threads_never_exceed_the_bound(tmp_path: Path, ledger: Ledger) -> None:
    ledgers = [ledger, opened(tmp_path)]
    worst = 0

    def work(seed: int) -> None:
        nonlocal worst
        mine = ledgers[seed % 2]
        for i in range(40):
            try:
                made = mine.reserve(f"{seed}/{i}", 1 + (seed * 7 + i * 13) % 40, Unlinked())
                worst = max(worst, mine.usage().nbytes)
                if made and i % 3:
                    mine.settle(made)
                elif made:
                    mine.release(made)
            except DeadlineExceeded:
                pass

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 60 < worst <= 100
    with ledger.file.reading("test") as db:
        both = "SELECT nbytes FROM entries UNION ALL SELECT nbytes FROM reservations"
        held = db.execute(f"SELECT sum(nbytes) FROM ({both})").fetchone()[0]
    assert held == total(ledger)
    ledgers[1].close()


# The file


def test_a_new_ledger_grants_nothing_until_it_was_compared(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, 100)
    assert ledger.reserve("a", 10, Unlinked()) is None
    ledger.close()


def test_nothing_is_made_before_it_is_used(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "x", 100)
    ledger.note("a")
    ledger.close()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(StoreClosed):
        ledger.flush()
    with pytest.raises(StoreClosed):
        ledger.usage()


def _spoil(path: Path, how: str) -> None:
    if how == "garbage":
        path.write_bytes(b"garbage" * 1000)
    elif how == "inside":
        blob = bytearray(path.read_bytes())
        blob[4096:] = b"\xff" * (len(blob) - 4096)
        path.write_bytes(blob)
    elif how == "another program's":
        path.unlink()
        with sqlite3.connect(path) as db:
            db.execute("CREATE TABLE mine (x)")
        db.close()
    else:
        with sqlite3.connect(path) as db:
            db.execute("UPDATE totals SET boot = 'earlier'")
        db.close()


@pytest.mark.parametrize("how", ["garbage", "inside", "another program's", "before the last boot"])
def test_a_damaged_ledger_is_made_anew(tmp_path: Path, how: str) -> None:
    ledger = opened(tmp_path)
    add(ledger, "a", 10)
    ledger.close()
    path = tmp_path / ".tier" / "ledger.sqlite"
    _spoil(path, how)
    ledger = Ledger(tmp_path, 100)
    for _ in range(2):
        try:
            made = ledger.reserve("a", 10, Unlinked())
        except TransientError:
            continue
        assert made is None
        break
    assert entries(ledger) == {}
    assert total(ledger) == 0
    ledger.close()


def test_damage_under_a_running_process(tmp_path: Path) -> None:
    ledgers = [opened(tmp_path) for _ in range(3)]
    for i in range(50):
        add(ledgers[i % 3], str(i), 1)
    ledgers[0].file._idle[0].execute("PRAGMA wal_checkpoint(TRUNCATE)")
    _spoil(tmp_path / ".tier" / "ledger.sqlite", "inside")
    for one in ledgers:
        one.file._idle[0].execute("PRAGMA shrink_memory")
    states = []
    for i in range(30):
        try:
            add(ledgers[i % 3], f"new{i}", 1)
            states.append("ok")
        except KVStoreError:
            states.append("error")
    assert "error" in states
    assert states[-10:] == ["ok"] * 10
    # All are on the same new file.
    assert len({one.file._idle[0].file for one in ledgers}) == 1
    for one in ledgers:
        one.close()


def test_a_newer_releases_ledger_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = opened(tmp_path)
    add(ledger, "a", 10)
    ledger.close()
    path = tmp_path / ".tier" / "ledger.sqlite"
    with sqlite3.connect(path) as db:
        db.execute(f"PRAGMA user_version = {schema.SCHEMA_VERSION + 1}")
    db.close()
    with pytest.raises(TransientError, match="newer"):
        Ledger(tmp_path, 100).usage()
    assert path.exists()
    # It makes anew what is older than itself.
    monkeypatch.setattr(schema, "SCHEMA_VERSION", schema.SCHEMA_VERSION + 2)
    ledger = Ledger(tmp_path, 100)
    assert entries(ledger) == {}
    ledger.close()


@pytest.mark.slow
def test_a_locked_ledger_costs_a_short_wait_and_then_nothing(tmp_path: Path, ledger: Ledger) -> None:
    add(ledger, "a", 10)
    blocker = sqlite3.connect(tmp_path / ".tier" / "ledger.sqlite", isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    ledger.file._breaker._clock = clock = Clock()
    began = time.monotonic()
    for _ in range(3):
        with pytest.raises(DeadlineExceeded):
            ledger.reserve("b", 10, Unlinked())
    assert time.monotonic() - began < PATIENCE_S / 2
    began = time.monotonic()
    for _ in range(1000):
        with pytest.raises(BreakerOpen):
            ledger.reserve("b", 10, Unlinked())
    assert time.monotonic() - began < PATIENCE_S / 2  # of a thousand short waits, a hundred seconds
    blocker.execute("ROLLBACK")
    blocker.close()
    clock.now += BREAKER.backoff_s
    assert add(ledger, "b", 10) == []


def test_a_deleted_ledger_comes_back_empty(tmp_path: Path, ledger: Ledger) -> None:
    made = ledger.reserve("a", 10, Unlinked())
    assert made
    for path in (tmp_path / ".tier").iterdir():
        path.unlink()
    assert not ledger.settle(made)
    assert ledger.reserve("b", 10, Unlinked()) is None


def test_a_fork_uses_nothing_of_its_parents(tmp_path: Path, ledger: Ledger) -> None:
    held = number_of("x")
    assert ledger.locks.acquire(held)
    mine = ledger.reserve("mine", 10, Unlinked())
    assert mine

    def child() -> None:
        assert not ledger.locks.acquire(held)
        assert add(ledger, "child's", 10) == []
        made = ledger.reserve("left by the child", 10, Unlinked())
        with ledger.file.reading("test") as db:
            owners = dict(db.execute("SELECT name, owner FROM reservations").fetchall())
        assert len(set(owners.values())) == 2
        assert made

    assert _in_child(child) == 0
    assert not ledger.locks.acquire(held)
    assert ledger.settle(mine)
    assert entries(ledger) == {"mine": 10, "child's": 10}
    assert total(ledger) == 30


# Locks


def test_locks_exclude_threads_objects_and_processes(tmp_path: Path) -> None:
    path = str(tmp_path / "deep" / "locks")
    mine, other = RangeLocks(path), RangeLocks(path)
    assert mine.acquire(5)
    assert not mine.acquire(5)
    assert not other.acquire(5)
    assert other.acquire(6)
    assert other.taken(5)
    assert other.taken(0, 100)
    assert not other.taken(6, 100)
    assert not mine.taken(5)
    code = (
        "import sys; from kvstore.payloads.tiered.locks import RangeLocks; a = RangeLocks(sys.argv[1]); "
        "print(a.acquire(5), a.acquire(7), a.taken(6))"
    )
    out = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["False", "True", "True"]
    mine.release(5)
    mine.release(5)
    assert other.acquire(5)
    # The dead process's is free.
    assert mine.acquire(7)
    other.close()
    other.close()
    assert mine.acquire(5)
    mine.close()


def test_locks_go_along_when_their_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "locks"
    mine = RangeLocks(str(path))
    assert mine.acquire(5)
    path.unlink()
    assert mine.acquire(6)
    assert RangeLocks(str(path)).taken(5)
    mine.close()


def test_locks_that_cannot_be_had_are_errors(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in ("file/locks", "."):
        with pytest.raises(KVStoreError):
            RangeLocks(str(tmp_path / path)).acquire(5)


def test_markers(tmp_path: Path) -> None:
    markers, names = Markers(str(tmp_path)), [fresh_name() for _ in range(3)]
    assert markers.all() == []
    assert markers.find(names[0]) is None
    assert not markers.remove(names[0])
    for size, name in enumerate(names):
        markers.add(name, size)
        markers.add(name, 99)
    (tmp_path / ".tier" / "dirty" / "a stranger's").write_text("x")
    assert {marker.name: marker.nbytes for marker in markers.all()} == {n: i for i, n in enumerate(names)}
    assert markers.remove(names[1])
    assert not markers.remove(names[1])
    assert markers.find(names[2]) is not None
    assert len(markers.all()) == 2


# Comparing the folder with the ledger


class Tended:
    """A bounded folder and its parts."""

    def __init__(self, root: Path, capacity: int = 1000) -> None:
        self.root = root
        self.clock = Clock()
        self.ledger = Ledger(root, capacity, busy_timeout_s=0.1, breaker=BREAKER)
        self.folder = BoundedFolder(
            LocalPayloads(root),
            self.ledger,
            Markers(str(root)),
            queue_housekeeping=lambda: None,
            count=lambda name, amount: None,
            clock=self.clock,
        )

    def keep(self, nbytes: int, name: str | None = None) -> str:
        name = name or fresh_name()
        assert self.folder.keep(name, views(b"x" * nbytes), nbytes)
        return name

    def tend(self, seconds: float = 10.0) -> None:
        """What happens in that time, and leftovers grow older with it."""
        for _ in range(2):
            self.clock.now += seconds / 2
            self.folder.housekeeping()
        check_ledger(self.ledger, self.root)


def put(root: Path, nbytes: int, age_s: float) -> str:
    """A file that no ledger knows."""
    name = fresh_name()
    LocalPayloads(root).put(name, views(b"x" * nbytes))
    os.utime(root / name, (time.time() - age_s,) * 2)
    return name


def test_a_folder_with_files_is_adopted_oldest_first(tmp_path: Path) -> None:
    names = [put(tmp_path, 300, age_s) for age_s in (100, 50, 200)]
    tended = Tended(tmp_path)
    new = tended.keep(300)
    assert set(entries(tended.ledger)) == {names[0], names[1], new}
    assert not (tmp_path / names[2]).exists()
    check_ledger(tended.ledger, tmp_path)


def test_a_folder_over_its_capacity_is_trimmed_before_anything_is_written(tmp_path: Path) -> None:
    names = [put(tmp_path, 300, 100 - i) for i in range(10)]
    tended = Tended(tmp_path)
    assert not tended.folder.write(fresh_name(), views(b"x" * 2000), 2000)
    check_ledger(tended.ledger, tmp_path)
    assert set(entries(tended.ledger)) == set(names[7:])
    # A smaller capacity at the next start.
    tended.folder.close()
    tended = Tended(tmp_path, capacity=400)
    tended.keep(50)
    assert len(entries(tended.ledger)) == 2
    check_ledger(tended.ledger, tmp_path)


def test_a_much_smaller_capacity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tended = Tended(tmp_path)
    for _ in range(50):
        tended.keep(10)
    tended.folder.close()
    monkeypatch.setattr("kvstore.payloads.tiered.ledger.MAX_VICTIMS", 7)
    tended = Tended(tmp_path, capacity=25)
    new = tended.keep(5)
    assert sorted(entries(tended.ledger).values()) == [5, 10, 10]
    assert new in entries(tended.ledger)
    check_ledger(tended.ledger, tmp_path)


def test_many_files_are_compared_in_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {put(tmp_path, 1, 100) for _ in range(25)}
    monkeypatch.setattr("kvstore.payloads.tiered.reconcile.STEP", 4)
    monkeypatch.setattr("kvstore.payloads.tiered.folder._SCAN_S", 0)
    monkeypatch.setattr("kvstore.payloads.tiered.folder._HOUSEKEEPING_S", 0)
    tended, other = Tended(tmp_path), Tended(tmp_path)
    assert not tended.folder.keep(fresh_name(), views(b"x"), 1)
    # One process at a time; nobody writes meanwhile.
    assert not other.folder.keep(fresh_name(), views(b"x"), 1)
    steps = 0
    while tended.folder.housekeeping():
        steps += 1
        assert not other.folder.keep(fresh_name(), views(b"x"), 1)
    assert steps > 6
    assert set(entries(tended.ledger)) == names
    assert other.folder.keep(fresh_name(), views(b"x"), 1)
    check_ledger(tended.ledger, tmp_path)


def test_a_comparing_process_that_dies_is_followed_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(5):
        put(tmp_path, 1, 100)
    monkeypatch.setattr("kvstore.payloads.tiered.reconcile.STEP", 2)
    monkeypatch.setattr("kvstore.payloads.tiered.folder._SCAN_S", 0)
    tended, other = Tended(tmp_path), Tended(tmp_path)
    assert not tended.folder.keep(fresh_name(), views(b"x"), 1)
    tended.ledger.locks.close()
    monkeypatch.setattr("kvstore.payloads.tiered.folder._SCAN_S", 10)
    other.keep(1)
    assert len(entries(other.ledger)) == 6


def test_the_first_process_to_open_a_folder_compares_it_again(tmp_path: Path) -> None:
    first = Tended(tmp_path)
    name = first.keep(100)
    added = put(tmp_path, 50, 0)
    second = Tended(tmp_path)
    second.keep(1)
    assert added not in entries(first.ledger)
    first.folder.close()
    second.folder.close()
    third = Tended(tmp_path)
    third.keep(1)
    assert {name, added} < set(entries(third.ledger))
    check_ledger(third.ledger, tmp_path)


def test_an_entry_whose_file_comes_back_meanwhile_stays(tmp_path: Path) -> None:
    tended, other = Tended(tmp_path), Tended(tmp_path)
    name = tended.keep(100)
    (tmp_path / name).unlink()
    with tended.ledger.file.writing("test") as db:
        db.execute("UPDATE totals SET scanned_s = 1")
    fast = tended.folder.fast
    read = fast.read

    def read_too_early(*args: Any, **kwargs: Any) -> int | None:
        got = read(*args, **kwargs)
        other.keep(100, name)
        return got

    fast.read = read_too_early  # type: ignore[method-assign]
    tended.tend()
    assert entries(tended.ledger) == {name: 100}


def test_files_that_were_removed_by_hand_are_found_by_the_next_comparison(tmp_path: Path) -> None:
    tended = Tended(tmp_path)
    names = [tended.keep(100) for _ in range(3)]
    (tmp_path / names[1]).unlink()
    added = put(tmp_path, 50, 0)
    (tmp_path / names[2]).write_bytes(b"x" * 70)
    with tended.ledger.file.writing("test") as db:
        db.execute("UPDATE totals SET scanned_s = 1")
    tended.tend()
    assert entries(tended.ledger) == {names[0]: 100, added: 50, names[2]: 70}


def _reserved_by_the_dead(tmp_path: Path, settle: Callable[[Tended], object]) -> tuple[Tended, str]:
    dead = Tended(tmp_path)
    dead.keep(100)
    name = fresh_name()
    assert dead.ledger.reserve(name, 500, lambda names: None)
    settle(dead)
    dead.ledger.locks.close()
    return Tended(tmp_path), name


def test_a_dead_owners_reservation_is_freed_behind_its_temporary_file(tmp_path: Path) -> None:
    leftover = tmp_path / ".tmp" / ("0" * 32)

    def write_half(dead: Tended) -> None:
        leftover.write_bytes(b"x" * 250)

    alive = Tended(tmp_path)
    alive.keep(100)
    tended, name = _reserved_by_the_dead(tmp_path, write_half)
    alive.tend(1.0)
    # Somebody may just have died: nothing is freed whose file might still be there.
    assert alive.ledger.state(name) == "writing"
    assert total(alive.ledger) == 700
    os.utime(leftover, (time.time() - 2,) * 2)
    tended.tend()
    assert not leftover.exists()
    assert tended.ledger.state(name) != "writing"
    assert total(tended.ledger) == 200


def test_nothing_is_freed_while_not_all_leftovers_were_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tended, name = _reserved_by_the_dead(tmp_path, lambda dead: None)
    monkeypatch.setattr(local, "MAX_TEMPORARY", 2)
    strangers = [tmp_path / ".tmp" / stranger for stranger in ("a", "b")]
    for path in strangers:
        path.write_text("x")
    tended.clock.now += 100
    tended.folder.housekeeping()
    tended.clock.now += 100
    tended.folder.housekeeping()
    assert tended.ledger.state(name) == "writing"
    for path in strangers:
        path.unlink()
    tended.tend()
    assert tended.ledger.state(name) != "writing"


def test_a_dead_owners_file_that_has_its_name_is_adopted(tmp_path: Path) -> None:
    tended, name = _reserved_by_the_dead(tmp_path, lambda dead: None)
    LocalPayloads(tmp_path).put(name, views(b"x" * 500))
    tended.tend()
    assert entries(tended.ledger)[name] == 500
    assert tended.ledger.state(name) != "writing"


def test_a_dead_owners_file_that_was_deleted_goes(tmp_path: Path) -> None:
    tended, name = _reserved_by_the_dead(tmp_path, lambda dead: None)
    tended.ledger.delete([name], len)
    LocalPayloads(tmp_path).put(name, views(b"x" * 500))
    tended.tend()
    assert not (tmp_path / name).exists()
    assert total(tended.ledger) == 100


def test_the_living_keep_their_reservations(tmp_path: Path) -> None:
    tended, other = Tended(tmp_path), Tended(tmp_path)
    tended.keep(100)
    assert other.ledger.reserve(fresh_name(), 500, lambda names: None)
    tended.tend()
    other.tend()
    assert total(tended.ledger) == 600


@pytest.mark.slow
def test_a_write_that_could_not_be_undone_is_undone_later(tmp_path: Path) -> None:
    tended = Tended(tmp_path)
    tended.keep(100)
    name = fresh_name()
    blocker = sqlite3.connect(tmp_path / ".tier" / "ledger.sqlite", isolation_level=None)
    put = tended.folder.fast.put

    def put_and_lock(name: str, buffers: Sequence[memoryview]) -> None:
        put(name, buffers)
        blocker.execute("BEGIN IMMEDIATE")

    tended.folder.fast.put = put_and_lock  # type: ignore[method-assign]
    assert not tended.folder.keep(name, views(b"x" * 100), 100)
    assert not (tmp_path / name).exists()
    blocker.execute("ROLLBACK")
    blocker.close()
    assert total(tended.ledger) == 200
    time.sleep(1.1)
    tended.tend()
    assert total(tended.ledger) == 100
