"""Write-back: saved when the folder has it, uploaded afterwards, whatever happens in between."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kvstore.conformance.arrange import fetch, fresh_name, views
from kvstore.conformance.faulty import Rule
from kvstore.errors import TransientError
from kvstore.payloads.port import Listed
from tests.payloads.tiered.world import Clock, Queue, Rig, check_ledger
from tests.waiting import PATIENCE_S

DATA = bytes(range(250)) * 400
SIZE = len(DATA)


def back(root: Path, queue: Queue | None = None, capacity: int = 10 * SIZE, **options: Any) -> Rig:
    return Rig(root, write="back", capacity=capacity, later=Queue() if queue is None else queue, **options)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = back(tmp_path, clock=(clock := Clock()), sleep=clock.sleep)
    yield made
    made.tier.close()


def put(rig: Rig, data: bytes = DATA) -> str:
    rig.tier.put(name := fresh_name(), views(data[:10], data[10:]))
    return name


def markers(rig: Rig) -> set[str]:
    return {marker.name for marker in rig.tier._back._markers.all()}


def settled(rig: Rig) -> None:
    """Nothing is dirty, and the books are right."""
    assert markers(rig) == set()
    assert rig.tier.usage().dirty_payloads == 0
    check_ledger(rig.ledger, rig.folder)


def test_a_save_is_over_when_the_folder_has_it(rig: Rig) -> None:
    name = put(rig)
    assert rig.slow.calls == {}
    assert rig.fast_files() == {name: SIZE}
    assert rig.tier.usage().dirty_bytes == SIZE
    assert fetch(rig.tier, name) == DATA
    assert rig.tier.read(name, 0, [memoryview(bytearray(SIZE))], size=SIZE) == SIZE
    rig.later.run()
    assert rig.slow_files() == {name: SIZE}
    assert (rig.shared / name).read_bytes() == DATA
    assert rig.counts["uploads"] == 1
    settled(rig)


def test_another_node_misses_it_until_then(tmp_path: Path, rig: Rig) -> None:
    name = put(rig)
    other = Rig(tmp_path / "other")
    other.slow.inner = rig.slow.inner
    assert fetch(other.tier, name) is None
    rig.later.run()
    assert fetch(other.tier, name) == DATA


def test_dirty_payloads_outlive_any_number_of_others(rig: Rig) -> None:
    names = [put(rig) for _ in range(5)]
    for _ in range(12):
        rig.slow.inner.put(other := fresh_name(), views(DATA))
        assert rig.tier.fill(other, SIZE)
    assert set(names) < set(rig.fast_files())
    assert len(rig.fast_files()) == 10
    rig.later.run()
    settled(rig)
    for _ in range(12):
        rig.slow.inner.put(other := fresh_name(), views(DATA))
        assert rig.tier.fill(other, SIZE)
    assert not set(names) & set(rig.fast_files())


def test_more_than_half_of_the_folder_is_written_through(rig: Rig) -> None:
    names = [put(rig) for _ in range(7)]
    assert rig.tier.usage().dirty_payloads == 5
    assert set(rig.slow_files()) == set(names[5:])
    assert set(rig.fast_files()) == set(names)


@pytest.mark.parametrize("fault", ["transient", "unanswered", "permission", "no_space"])
def test_a_folder_that_fails_is_written_through(rig: Rig, fault: str) -> None:
    rig.fast_plan.replace(Rule(fault, verbs=("put",)))  # type: ignore[arg-type]
    names = [put(rig) for _ in range(2)]
    assert rig.slow_files() == dict.fromkeys(names, SIZE)
    assert rig.fast_files() == {}
    settled(rig)


def test_neither_folder_nor_shared_store(rig: Rig) -> None:
    rig.fast_plan.replace(Rule("unanswered", verbs=("put",)))
    rig.slow_plan.replace(Rule("transient", verbs=("put",)))
    with pytest.raises(TransientError):
        put(rig)
    assert rig.fast_files() == rig.slow_files() == {}
    settled(rig)


def test_a_buffer_that_was_taken_back(rig: Rig) -> None:
    gone = memoryview(b"gone")
    gone.release()
    with pytest.raises(ValueError, match="released"):
        rig.tier.put(fresh_name(), [memoryview(DATA), gone])
    assert rig.fast_files() == rig.slow_files() == {}
    settled(rig)


def test_a_failed_upload_is_tried_again_less_and_less_often(rig: Rig) -> None:
    clock: Clock = rig.tier._clock  # type: ignore[assignment]
    rig.slow_plan.replace(Rule("transient", verbs=("put",)))
    name = put(rig)
    rig.later.run()
    tries = []
    for _ in range(300):
        before = rig.slow.calls["put", name]
        clock.now += 1
        rig.tend()
        rig.later.run()
        tries.append(rig.slow.calls["put", name] - before)
    assert set(tries) == {0, 1}
    at = [second for second, tried in enumerate(tries) if tried]
    pauses = [later - sooner for sooner, later in pairwise(at)]
    assert pauses == sorted(pauses)
    assert 55 <= pauses[-1] <= 65
    assert rig.counts["upload_failures"] == sum(tries) + 1
    rig.slow_plan.replace()
    clock.now += 100
    rig.tend()
    rig.later.run()
    assert rig.slow_files() == {name: SIZE}
    settled(rig)


def test_uploads_survive_a_restart_and_a_full_queue(tmp_path: Path) -> None:
    rig = back(tmp_path, Queue(room=0))
    names = [put(rig) for _ in range(3)]
    rig.tier.close()
    # Also in the other mode: what is dirty is dirty.
    for options in ({"write": "back"}, {"write": "through"}):
        rig = Rig(tmp_path, later=Queue(), capacity=10 * SIZE, **options)
        rig.tend()
        assert rig.tier.usage().dirty_payloads == 3
        rig.tier.close()
    rig.tend()
    rig = back(tmp_path)
    rig.tend()
    rig.later.run()
    assert set(rig.slow_files()) == set(names)
    settled(rig)


def test_a_dead_processs_uploads_are_taken_over_and_a_living_ones_not(tmp_path: Path) -> None:
    mine, theirs = back(tmp_path), back(tmp_path)
    name = put(theirs)

    def meanwhile(verb: str, _name: str) -> None:
        mine.tend()
        mine.later.run()

    theirs.slow.before = meanwhile
    theirs.later.run()
    assert mine.slow.calls["put", name] == 0
    assert theirs.slow.calls["put", name] == 1
    other = put(theirs)
    theirs.die()
    mine.tend()
    mine.later.run()
    assert mine.slow_files() == {name: SIZE, other: SIZE}
    settled(mine)


def test_a_lost_ledger_loses_nothing_dirty(tmp_path: Path) -> None:
    rig = back(tmp_path)
    names = [put(rig) for _ in range(4)]
    for path in (rig.folder / ".tier").glob("ledger*"):
        path.unlink()
    rig = back(tmp_path)
    assert rig.tier.fill(_stored(rig), SIZE)
    assert rig.tier.usage().dirty_payloads == 4
    for _ in range(12):
        rig.tier.fill(_stored(rig), SIZE)
    rig.tend()
    rig.later.run()
    for name in names:
        assert (rig.shared / name).read_bytes() == DATA
    settled(rig)


def _stored(rig: Rig) -> str:
    rig.slow.inner.put(name := fresh_name(), views(DATA))
    return name


def test_deleted_before_its_upload(rig: Rig) -> None:
    name, other = put(rig), put(rig)
    assert rig.tier.delete([name, fresh_name()]) == 1
    assert rig.tier.delete([name]) == 0
    rig.later.run()
    assert rig.fast_files() == rig.slow_files() == {other: SIZE}
    settled(rig)


def test_deleted_while_it_is_uploaded(tmp_path: Path) -> None:
    mine, theirs = back(tmp_path), back(tmp_path)
    for deleter in (mine, theirs):
        name = put(mine)
        mine.slow.before = lambda verb, _name: (
            deleter.tier.delete([name]) if verb == "put" and name in markers(mine) else None
        )
        mine.later.run()
        assert mine.fast_files() == mine.slow_files() == {}
        assert fetch(mine.tier, name) is None
        settled(mine)


def test_a_second_put_comes_after_the_first_ones_upload(tmp_path: Path) -> None:
    mine, theirs = back(tmp_path), back(tmp_path, wait_s=0.05)
    name = put(mine)
    mine.tier.put(name, views(b"second"))
    mine.later.run()
    assert mine.slow_files() == mine.fast_files() == {name: 6}
    settled(mine)
    other = put(mine)
    mine.slow.before = lambda verb, _name: theirs.slow.calls["put", other] or _refused(theirs, other)
    mine.later.run()
    assert mine.slow_files()[other] == SIZE


def _refused(rig: Rig, name: str) -> None:
    with pytest.raises(TransientError, match="being uploaded"):
        rig.tier.put(name, views(b"second"))


@pytest.mark.parametrize("left", [None, 1000])
def test_a_dirty_file_that_is_lost_or_cut_short_is_given_up(rig: Rig, left: int | None) -> None:
    name, other = put(rig), put(rig)
    path = rig.folder / name
    path.unlink()
    if left:
        path.write_bytes(DATA[:left])
    rig.later.run()
    assert rig.slow_files() == rig.fast_files() == {other: SIZE}
    assert rig.counts["upload_failures"] == 1
    settled(rig)


def test_a_dirty_file_that_cannot_be_read_is_tried_again(rig: Rig) -> None:
    name = put(rig)
    rig.fast_plan.replace(Rule("transient", verbs=("read",), times=1))
    rig.later.run()
    assert rig.slow_files() == {}
    rig.tier._clock.now += 10  # type: ignore[attr-defined]
    rig.tend()
    rig.later.run()
    assert rig.slow_files() == {name: SIZE}
    settled(rig)


def test_dropping_a_dirty_copy_says_that_nothing_better_exists(rig: Rig) -> None:
    name = put(rig)
    assert rig.tier.drop_copy(name) is False
    rig.later.run()
    assert rig.fast_files() == rig.slow_files() == {}
    assert fetch(rig.tier, name) is None
    settled(rig)


def test_listed_once_wherever_it_is(rig: Rig) -> None:
    names = [put(rig), put(rig)]
    rig.later.run()
    names += [put(rig, b"12345"), put(rig, b"12345")]
    # Uploaded already, but nobody has noticed yet.
    rig.slow.inner.put(names[2], views(b"12345"))
    listed = list(rig.tier.list())
    assert sorted((one.name, one.nbytes) for one in listed) == sorted(
        zip(names, [SIZE, SIZE, 5, 5], strict=True)
    )
    assert [one.name for one in rig.tier.list(names[3])] == [names[3]]
    (rig.folder / names[3]).unlink()
    assert {one.name for one in rig.tier.list()} == set(names[:3])


def test_listing_while_uploads_go_on(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [put(rig)]
    rig.later.run()
    names += [put(rig) for _ in range(4)]
    listing = rig.slow.list

    def list_and_upload(prefix: str = "") -> Iterator[Listed]:
        yield from list(listing(prefix))
        # Uploaded behind the back of the listing.
        rig.later.run()

    monkeypatch.setattr(rig.slow, "list", list_and_upload)
    assert sorted(one.name for one in rig.tier.list()) == sorted(names)
    settled(rig)


def test_close_leaves_what_is_dirty(tmp_path: Path) -> None:
    rig = back(tmp_path, busy_timeout_s=PATIENCE_S)
    name = put(rig)
    began = time.monotonic()
    rig.tier.close()
    assert time.monotonic() - began < PATIENCE_S / 2, "it waited for something"
    assert rig.slow_files() == {}
    # The queue that is drained after all finds no ledger, and uploads all the same.
    rig.later.run()
    assert rig.slow_files() == {name: SIZE}
    rig = back(tmp_path)
    rig.tend()
    settled(rig)


def test_a_ledger_that_is_locked_is_written_through(tmp_path: Path) -> None:
    rig, blocker = back(tmp_path, busy_timeout_s=0.05), back(tmp_path)
    put(rig)
    with blocker.ledger.file.writing("hold"):
        name = put(rig)
    assert rig.slow_files() == {name: SIZE}
    rig.later.run()
    settled(rig)


def test_a_payload_too_large_for_the_buffers_is_uploaded_alone(tmp_path: Path) -> None:
    rig = back(tmp_path, memory_bytes=1000)
    names = [put(rig) for _ in range(3)]
    rig.later.run()
    assert set(rig.slow_files()) == set(names)
    settled(rig)


def test_an_entry_that_only_seems_dirty_is_cleaned(rig: Rig) -> None:
    name = put(rig)
    # A process that died between the last two steps of an upload.
    rig.slow.inner.put(name, views(DATA))
    rig.tier._back._markers.remove(name)
    rig.later.jobs.clear()
    rig.tend()
    settled(rig)


def test_a_marker_without_a_file_goes_unless_somebody_is_writing_it(tmp_path: Path) -> None:
    mine, theirs = back(tmp_path), back(tmp_path)
    put(mine)
    mine.later.run()
    left = fresh_name()
    mine.tier._back._markers.add(left, 10)

    def meanwhile(verb: str, _name: str) -> None:
        if verb == "put":
            theirs.tend()
            theirs.later.run()

    mine.fast.before = meanwhile
    name = put(mine)
    assert markers(mine) == {name}
    mine.later.run()
    assert mine.slow_files()[name] == SIZE
    settled(mine)


@pytest.mark.parametrize("mode", ["data", "full"])
def test_the_folders_promise_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: Any) -> None:
    """A dirty payload is as durable as the folder makes it: its bytes are synced before the save returns."""
    from kvstore.payloads.local import LocalPayloads

    rig = back(tmp_path)
    rig.fast.inner = LocalPayloads(rig.folder, fsync=mode)
    synced = []
    fdatasync = os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda fd: (synced.append(fd), fdatasync(fd)))
    put(rig)
    assert len(synced) == 1


def test_what_can_not_be_uploaded_later_is_saved_through(tmp_path: Path) -> None:
    rig = back(tmp_path, memory_bytes=SIZE - 1)
    name = put(rig)
    assert rig.slow_files() == {name: SIZE}
    settled(rig)
    rig.tier.close()
