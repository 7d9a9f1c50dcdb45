"""TieredPayloads: the contract in both modes, then what is special about two tiers."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvstore.conformance.arrange import fetch, fresh_name, views
from kvstore.conformance.faulty import Rule
from kvstore.errors import KVStoreError, PermissionDenied, TransientError
from kvstore.payloads.port import Listed, PayloadStore
from kvstore.payloads.tiered import fetcher
from kvstore.payloads.tiered.flights import Buffers
from kvstore.rules.tiers import Tier
from kvstore.testing import PayloadConformance
from tests.payloads.test_local import Folder
from tests.payloads.tiered.world import Clock, Queue, Rig, check_ledger
from tests.waiting import PATIENCE_S, until

DATA = bytes(range(251)) * 400
SIZE = len(DATA)


class InTurn(PayloadStore):
    """Several tiers on one folder as one store: each call goes to the next of them."""

    def __init__(self, *stores: PayloadStore) -> None:
        self._stores = stores
        self._calls = 0

    def _next(self) -> PayloadStore:
        self._calls += 1
        return self._stores[self._calls % len(self._stores)]

    def put(self, name: str, buffers: Sequence[memoryview]) -> None:
        self._next().put(name, buffers)

    def read(
        self, name: str, offset: int, into: Sequence[memoryview], *, size: int | None = None
    ) -> int | None:
        return self._next().read(name, offset, into, size=size)

    def tier(self, name: str, nbytes: int) -> Tier:
        return self._next().tier(name, nbytes)

    def delete(self, names: Sequence[str]) -> int:
        return self._next().delete(names)

    def list(self, prefix: str = "") -> Iterator[Listed]:
        return self._next().list(prefix)

    def ping(self) -> None:
        self._next().ping()

    def close(self) -> None:
        for store in self._stores:
            store.close()


class Sized(InTurn):
    """Tells every read how large the payload is, if it exists."""

    def __init__(self, shared: Path, store: PayloadStore) -> None:
        super().__init__(store)
        self._shared = shared

    def read(
        self, name: str, offset: int, into: Sequence[memoryview], *, size: int | None = None
    ) -> int | None:
        path = self._shared / name
        try:
            size = path.stat().st_size if path.is_file() else None
        except (OSError, ValueError):
            size = None
        return super().read(name, offset, into, size=size)


class TestThrough(PayloadConformance):
    @pytest.fixture
    def payloads(self, tmp_path: Path) -> Iterator[PayloadStore]:
        with Rig(tmp_path, capacity=8 << 20).tier as tier:
            yield tier

    @pytest.fixture
    def raw(self, tmp_path: Path) -> Folder:
        return Folder(tmp_path / "slow")


class TestBack(TestThrough):
    """Uploads happen within the put."""

    @pytest.fixture
    def payloads(self, tmp_path: Path) -> Iterator[PayloadStore]:
        with Rig(tmp_path, capacity=8 << 20, write="back").tier as tier:
            yield tier


class TestTwoOnOneFolderWithoutRoom(TestThrough):
    """Most payloads don't fit, and the others evict each other all the time."""

    @pytest.fixture
    def payloads(self, tmp_path: Path) -> Iterator[PayloadStore]:
        rigs = [Rig(tmp_path, capacity=10_000, write=write) for write in ("through", "back")]
        with InTurn(*(rig.tier for rig in rigs)) as both:
            yield both


class TestWholePayloadsFetched(TestThrough):
    """Reads know the size, so that they fill the folder."""

    @pytest.fixture
    def payloads(self, tmp_path: Path) -> Iterator[PayloadStore]:
        with Sized(tmp_path / "slow", Rig(tmp_path, capacity=8 << 20).tier) as sized:
            yield sized

    # These replace payloads under their readers, which a cache of immutable ones need not notice.
    test_readers_during_a_replacement_see_old_or_new = None  # type: ignore[assignment]
    test_threads_put_read_delete_and_list_at_once = None  # type: ignore[assignment]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.tier.close()


def test_a_payload_lies_in_the_folder_only_while_all_of_it_does(rig: Rig) -> None:
    name = fresh_name()
    assert rig.tier.tier(name, 5) == "disk"
    rig.tier.put(name, views(b"whole"))
    assert rig.tier.tier(name, 5) == "folder"
    os.truncate(rig.folder / name, 3)
    assert rig.tier.tier(name, 5) == "disk"
    rig.fast_plan.replace(Rule("permission"))
    assert rig.tier.tier(name, 3) == "disk"
    assert not rig.slow.calls["read", name]


def stored(rig: Rig, data: bytes = DATA) -> str:
    """A payload that only the shared store has."""
    name = fresh_name()
    rig.slow.inner.put(name, views(data))
    return name


def read(rig: Rig, name: str, offset: int = 0, count: int = SIZE, size: int | None = SIZE) -> bytes | None:
    into = [bytearray(count // 3), bytearray(0), bytearray(count - count // 3)]
    got = rig.tier.read(name, offset, [memoryview(part) for part in into], size=size)
    return None if got is None else b"".join(into)[:got]


def fetched(rig: Rig, name: str) -> int:
    return rig.slow.calls["read", name]


# Reading


def test_a_whole_payload_is_fetched_once_and_then_served_by_the_folder(rig: Rig) -> None:
    name = stored(rig)
    for _ in range(3):
        assert read(rig, name) == DATA
    assert fetched(rig, name) == 1
    assert rig.fast_files() == {name: SIZE}
    assert rig.counts == {"hits_slow": 1, "fills": 1, "hits_fast": 2}
    assert rig.tier.usage().payloads == 1
    assert rig.tier.usage().nbytes == SIZE


@pytest.mark.parametrize("offset", [0, 1, SIZE // 2 - 1])
def test_half_of_a_payload_is_reason_enough_to_fetch_all(rig: Rig, offset: int) -> None:
    name, half = stored(rig), SIZE // 2
    assert read(rig, name, offset, half) == DATA[offset : offset + half]
    assert fetched(rig, name) == 1
    assert rig.fast_files() == {name: SIZE}
    assert read(rig, name, 5, 10) == DATA[5:15]
    assert fetched(rig, name) == 1


def test_less_than_half_is_read_as_asked_and_the_rest_in_the_background(tmp_path: Path) -> None:
    queue = Queue()
    rig = Rig(tmp_path, later=queue)
    name = stored(rig)
    for _ in range(2):
        assert read(rig, name, 100, SIZE // 2 - 1) == DATA[100 : 100 + SIZE // 2 - 1]
    assert fetched(rig, name) == 2
    assert rig.fast_files() == {}
    queue.run()
    assert fetched(rig, name) == 3
    assert rig.fast_files() == {name: SIZE}
    assert read(rig, name) == DATA
    assert fetched(rig, name) == 3


def test_without_a_size_only_the_range_is_read(rig: Rig) -> None:
    name = stored(rig)
    assert read(rig, name, size=None) == DATA
    assert rig.fast_files() == {}


def test_the_buffer_serves_until_the_folder_is_filled(tmp_path: Path) -> None:
    queue = Queue()
    rig = Rig(tmp_path, later=queue)
    name = stored(rig)
    assert read(rig, name) == DATA
    assert read(rig, name) == DATA
    assert read(rig, name, 7, 20) == DATA[7:27]
    assert fetched(rig, name) == 1
    assert rig.fast_files() == {}
    queue.run()
    assert rig.fast_files() == {name: SIZE}
    assert read(rig, name) == DATA
    assert fetched(rig, name) == 1


def test_what_nobody_waits_for_is_not_fetched_while_reads_are_scarce(tmp_path: Path) -> None:
    scarce = [True]
    rig = Rig(tmp_path, scarce=lambda: scarce[0])
    name = stored(rig)
    assert read(rig, name, 0, 10) == DATA[:10]
    assert (fetched(rig, name), rig.fast_files(), rig.counts["fills_skipped"]) == (1, {}, 1)
    scarce[0] = False
    assert read(rig, name, 0, 10) == DATA[:10]
    assert fetched(rig, name) == 3
    assert rig.fast_files()
    rig.tier.close()


def test_a_full_queue_costs_the_fill_only(tmp_path: Path) -> None:
    rig = Rig(tmp_path, later=Queue(room=0))
    name = stored(rig)
    for count in (SIZE, SIZE, 10):
        assert read(rig, name, 0, count) == DATA[:count]
    assert fetched(rig, name) == 3
    assert rig.fast_files() == {}
    assert rig.counts["fills_skipped"] == 3


def test_the_memory_in_flight_is_bounded(tmp_path: Path) -> None:
    queue = Queue()
    rig = Rig(tmp_path, later=queue, memory_bytes=3 << 20, capacity=64 << 20)
    data = bytes(1 << 20)
    names = [stored(rig, data) for _ in range(5)]
    for name in names:
        assert read(rig, name, 0, len(data), len(data)) == data
    assert [fetched(rig, name) for name in names] == [1] * 5
    queue.run()
    assert set(rig.fast_files()) == set(names[:3])
    assert rig.counts["fills_skipped"] == 2
    # The memory comes back.
    for name in names[3:]:
        assert read(rig, name, 0, len(data), len(data)) == data
    queue.run()
    assert set(rig.fast_files()) == set(names)


def test_buffers_are_reused_and_bounded() -> None:
    mib = 1 << 20
    buffers = Buffers(8 * mib)
    first = buffers.take(3 * mib)
    assert first is not None
    assert first.nbytes == 3 * mib
    assert buffers.take(6 * mib) is None
    buffers.give_back(first)
    # Not for a much smaller payload, nor for a larger one.
    second, third = buffers.take(mib // 2), buffers.take(4 * mib)
    assert second is not None
    assert third is not None
    assert buffers.take(3 * mib - 5) is first
    for each in (first, second, third):
        buffers.give_back(each)
    assert sum(each.nbytes for each in buffers._free) <= 4 * mib
    # What is kept makes room; one alone may exceed the bound.
    large = buffers.take(20 * mib)
    assert large is not None
    assert buffers.take(1) is None
    assert buffers._free == []


def test_what_is_missing_is_missing(rig: Rig) -> None:
    for size in (None, SIZE):
        assert read(rig, fresh_name(), size=size) is None
    assert read(rig, fresh_name(), 0, 10) is None
    assert rig.fast_files() == {}
    assert not rig.tier.fill(fresh_name(), SIZE)


@pytest.mark.parametrize("count", [10, SIZE])
@pytest.mark.parametrize(
    ("fault", "error"), [("permission", PermissionDenied), ("transient", TransientError)]
)
def test_the_shared_stores_errors_are_the_readers(
    rig: Rig, fault: str, error: type[KVStoreError], count: int
) -> None:
    name = stored(rig)
    rig.slow_plan.replace(Rule(fault))  # type: ignore[arg-type]
    with pytest.raises(error, match="injected"):
        read(rig, name, 0, count)
    with pytest.raises(error, match="injected"):
        rig.tier.fill(name, SIZE)
    rig.slow_plan.replace()
    assert read(rig, name) == DATA
    assert rig.fast_files() == {name: SIZE}


def test_a_payload_shorter_than_promised_is_short_and_not_kept(rig: Rig) -> None:
    name = stored(rig, DATA[:-1])
    assert read(rig, name) == DATA[:-1]
    assert read(rig, name, 10) == DATA[10:-1]
    assert not rig.tier.fill(name, SIZE)
    assert rig.fast_files() == {}


def test_what_is_larger_than_the_folder_is_read_past_it(tmp_path: Path) -> None:
    rig = Rig(tmp_path, capacity=SIZE - 1)
    name = stored(rig)
    assert read(rig, name) == DATA
    rig.tier.put(other := fresh_name(), views(DATA))
    assert fetch(rig.tier, other) == DATA
    assert rig.fast_files() == {}
    assert not rig.tier.fill(name, SIZE)


def test_what_the_shared_store_has_lost_is_served_by_the_folder(rig: Rig) -> None:
    name = stored(rig)
    read(rig, name)
    rig.slow.inner.delete([name])
    assert read(rig, name) == DATA


def test_a_file_cut_short_is_dropped_and_fetched_again(rig: Rig) -> None:
    name = stored(rig)
    read(rig, name)
    (rig.folder / name).write_bytes(DATA[:1000])
    assert read(rig, name, 0, 1000) == DATA[:1000]
    assert read(rig, name) == DATA
    assert (rig.folder / name).read_bytes() == DATA
    assert rig.counts["fast_errors"] == 1
    check_ledger(rig.ledger, rig.folder)


def test_fill_brings_a_payload_now(rig: Rig) -> None:
    name = stored(rig)
    assert rig.tier.fill(name, SIZE)
    assert rig.tier.fill(name, SIZE)
    assert fetched(rig, name) == 1
    assert read(rig, name) == DATA
    assert fetched(rig, name) == 1
    empty = stored(rig, b"")
    assert rig.tier.fill(empty, 0)
    assert rig.fast_files() == {name: SIZE, empty: 0}


def test_looking_makes_nothing(rig: Rig) -> None:
    assert rig.tier.usage().payloads == 0
    assert list(rig.tier.list()) == []
    assert not rig.tier.drop_copy(fresh_name())
    rig.tier.ping()
    assert not rig.folder.exists()


def test_the_least_recently_used_go_first(tmp_path: Path) -> None:
    rig = Rig(tmp_path, capacity=4 * SIZE)
    names = [stored(rig) for _ in range(6)]
    for name in names[:4]:
        read(rig, name)
    read(rig, names[0])
    read(rig, names[4])
    assert set(rig.fast_files()) == {names[0], names[2], names[3], names[4]}
    read(rig, names[5])
    assert set(rig.fast_files()) == {names[0], names[3], names[4], names[5]}
    assert rig.counts["evictions"] == 2
    check_ledger(rig.ledger, rig.folder)


def test_repr_shows_the_stack(rig: Rig) -> None:
    text = repr(rig.tier)
    assert text.startswith("TieredPayloads(")
    assert "write='through'" in text
    assert f"Ledger({str(rig.folder)!r}, capacity_bytes=1048576)" in text


# Many at once


def in_threads(count: int, work: Callable[[], object]) -> list[object]:
    """What `work` returned or raised in each of so many threads that start together."""
    barrier = threading.Barrier(count)

    def one() -> object:
        barrier.wait()
        try:
            return work()
        except KVStoreError as exc:
            return exc

    with ThreadPoolExecutor(count) as pool:
        return [future.result() for future in [pool.submit(one) for _ in range(count)]]


def test_many_threads_and_tiers_fetch_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetcher, "FILL_WAIT_S", PATIENCE_S)
    rigs = [Rig(tmp_path, wait_s=PATIENCE_S) for _ in range(3)]
    name = stored(rigs[0])
    for rig in rigs:
        # Slow enough for the others to come meanwhile.
        rig.slow.before = lambda verb, name: until(lambda: sum(rig.counts["waits"] for rig in rigs) >= 6)
    work = iter(rigs * 4)
    assert in_threads(12, lambda: read(next(work), name)) == [DATA] * 12
    assert sum(fetched(rig, name) for rig in rigs) == 1
    assert sum(rig.counts["hits_slow"] for rig in rigs) == 1
    # Three of each tier waited for the fourth, and two of these for the third tier's.
    assert sum(rig.counts["waits"] for rig in rigs) >= 6


def test_an_error_reaches_everybody_who_waits(rig: Rig) -> None:
    name = stored(rig)
    rig.slow_plan.replace(Rule("transient", verbs=("read",)))
    rig.slow.before = lambda verb, name: until(lambda: rig.counts["waits"] == 4)
    errors = in_threads(5, lambda: read(rig, name))
    assert {type(error) for error in errors} == {TransientError}
    assert len({id(error) for error in errors}) == 5
    assert fetched(rig, name) == 1


def test_nobody_waits_for_ever_for_a_thread(tmp_path: Path) -> None:
    rig = Rig(tmp_path, wait_s=0.02)
    name = stored(rig)
    held, started = threading.Event(), threading.Event()

    def hold_first(verb: str, _name: str) -> None:
        if rig.slow.calls["read", name] == 1:
            started.set()
            held.wait(PATIENCE_S)

    rig.slow.before = hold_first
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(read, rig, name)
        started.wait(PATIENCE_S)
        assert read(rig, name) == DATA
        assert read(rig, name, 0, 10) == DATA[:10]
        assert not rig.tier.fill(name, SIZE)
        held.set()
        assert first.result() == DATA
    assert fetched(rig, name) == 3
    assert rig.fast_files() == {name: SIZE}


def test_nobody_waits_for_ever_for_another_process(tmp_path: Path) -> None:
    clock = Clock()
    mine, theirs = Rig(tmp_path, clock=clock, sleep=clock.sleep), Rig(tmp_path, later=Queue())
    name = stored(mine)
    # They have fetched it, and their queue never comes round to writing it.
    assert read(theirs, name) == DATA
    before = clock.now
    assert read(mine, name) == DATA
    assert 0.4 < clock.now - before < 0.6
    # Their reading hangs.
    other, held, started = stored(mine), threading.Event(), threading.Event()
    theirs.slow.before = lambda verb, name: (started.set(), held.wait(PATIENCE_S))
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(read, theirs, other)
        started.wait(PATIENCE_S)
        before = clock.now
        assert read(mine, other) == DATA
        assert 2.9 < clock.now - before < 3.1
        held.set()
        assert first.result() == DATA
    # They die, and the next reader has the locks at once.
    theirs.die()
    before = clock.now
    assert read(mine, name) == DATA
    assert clock.now == before
    assert mine.fast_files() == {name: SIZE}


# Failures of the folder


def test_a_folder_that_cannot_be_read_is_a_miss(tmp_path: Path) -> None:
    clock = Clock()
    rig = Rig(tmp_path, clock=clock)
    name = stored(rig)
    read(rig, name)
    rig.fast_plan.replace(Rule("transient", verbs=("read",)))
    assert read(rig, name) == DATA
    assert fetched(rig, name) == 2
    rig.fast_plan.replace()
    assert read(rig, name) == DATA
    assert fetched(rig, name) == 2


@pytest.mark.parametrize("fault", ["transient", "unanswered", "permission", "no_space"])
def test_a_folder_that_cannot_be_written_stops_fills(tmp_path: Path, fault: str) -> None:
    clock = Clock()
    rig = Rig(tmp_path, clock=clock)
    names = [stored(rig) for _ in range(10)]
    rig.fast_plan.replace(Rule(fault, verbs=("put",)))  # type: ignore[arg-type]
    for name in names:
        assert read(rig, name) == DATA
    rig.tier.put(own := fresh_name(), views(DATA))
    # Tried once, then left alone for a moment.
    assert sum(rig.fast_plan.injected.values()) == 1
    assert rig.counts["fast_errors"] == 1
    assert rig.fast_files() == {}
    assert rig.slow_files()[own] == SIZE
    check_ledger(rig.ledger, rig.folder)
    rig.fast_plan.replace()
    clock.now += 60
    assert read(rig, names[0]) == DATA
    assert rig.fast_files() == {names[0]: SIZE}


def test_a_disk_smaller_than_the_capacity_goes_on_with_what_it_has(tmp_path: Path) -> None:
    clock = Clock()
    rig = Rig(tmp_path, clock=clock)
    names = [stored(rig) for _ in range(5)]
    for name in names[:3]:
        read(rig, name)
    rig.fast_plan.replace(Rule("no_space", times=1))
    assert read(rig, names[3]) == DATA
    # The oldest has made room for the next.
    assert set(rig.fast_files()) == set(names[1:3])
    clock.now += 10
    assert read(rig, names[4]) == DATA
    assert set(rig.fast_files()) == {*names[1:3], names[4]}
    check_ledger(rig.ledger, rig.folder)


def test_a_folder_that_cannot_evict_stops_fills(tmp_path: Path) -> None:
    rig = Rig(tmp_path, capacity=2 * SIZE)
    names = [stored(rig) for _ in range(3)]
    for name in names[:2]:
        read(rig, name)
    rig.fast_plan.replace(Rule("permission", verbs=("delete",)))
    assert read(rig, names[2]) == DATA
    assert set(rig.fast_files()) == set(names[:2])
    assert rig.counts["fast_errors"] >= 1
    check_ledger(rig.ledger, rig.folder)


def test_a_read_only_folder_serves_and_never_fails(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    name, other = stored(rig), stored(rig)
    read(rig, name)
    rig.tier.close()
    rig = Rig(tmp_path, write="back")
    rig.fast_plan.replace(Rule("permission", verbs=("put", "delete")))
    assert read(rig, name) == DATA
    assert read(rig, other) == DATA
    rig.tier.put(own := fresh_name(), views(DATA))
    assert read(rig, own) == DATA
    assert set(rig.fast_files()) == {name}
    assert set(rig.slow_files()) == {name, other, own}


@pytest.mark.parametrize("write", ["through", "back"])
def test_a_folder_that_cannot_be_made(tmp_path: Path, write: str) -> None:
    (tmp_path / "fast").write_text("a file where the folder should be")
    rig = Rig(tmp_path, write=write)
    name = stored(rig)
    for count in (SIZE, 10):
        assert read(rig, name, 0, count) == DATA[:count]
    rig.tier.put(own := fresh_name(), views(DATA))
    assert rig.tier.delete([own, name]) == 2
    assert rig.tier.drop_copy(own) is False
    assert list(rig.tier.list()) == []
    assert not rig.tier.fill(name, SIZE)
    rig.tend()
    assert rig.tier.usage().nbytes == 0
    rig.tier.close()
    assert rig.counts["fast_errors"] > 0


def test_a_folder_that_is_deleted_comes_back(rig: Rig) -> None:
    name, other = stored(rig), stored(rig)
    read(rig, name)
    rig.folder.rename(rig.folder.with_name("gone"))
    # The first write finds a ledger that has not been compared with its folder yet.
    for one in (name, other, name):
        assert read(rig, one) == DATA
    assert rig.fast_files() == {name: SIZE, other: SIZE}
    check_ledger(rig.ledger, rig.folder)


# Saving


def test_a_save_is_in_both(rig: Rig) -> None:
    rig.tier.put(name := fresh_name(), views(DATA[:100], DATA[100:]))
    assert rig.fast_files() == rig.slow_files() == {name: SIZE}
    assert fetch(rig.tier, name) == DATA
    assert fetched(rig, name) == 0


@pytest.mark.parametrize("write", ["through", "back"])
@pytest.mark.parametrize("fault", ["transient", "no_space", "permission"])
def test_a_save_that_the_shared_store_refuses(tmp_path: Path, write: str, fault: str) -> None:
    rig = Rig(tmp_path, write=write, capacity=SIZE)
    rig.slow_plan.replace(Rule(fault, verbs=("put",)))  # type: ignore[arg-type]
    with pytest.raises(KVStoreError, match="injected"):
        # More than half of the capacity: not to be kept dirty.
        rig.tier.put(fresh_name(), views(DATA))
    assert rig.fast_files() == rig.slow_files() == {}


def test_deleted_everywhere(rig: Rig) -> None:
    names = [fresh_name() for _ in range(4)]
    for name in names:
        rig.tier.put(name, views(DATA))
    assert rig.tier.delete([*names[:2], fresh_name()]) == 2
    assert rig.fast_files() == rig.slow_files() == dict.fromkeys(names[2:], SIZE)
    assert rig.tier.usage().payloads == 2
    rig.fast_plan.replace(Rule("transient", verbs=("delete",)))
    assert rig.tier.delete(names[2:]) == 2
    assert rig.slow_files() == {}


def test_deleted_while_it_comes(tmp_path: Path) -> None:
    queue = Queue()
    rig = Rig(tmp_path, later=queue)
    name = stored(rig)
    assert read(rig, name) == DATA
    assert rig.tier.delete([name]) == 1
    assert read(rig, name) is None
    queue.run()
    assert rig.fast_files() == {}
    assert rig.tier.usage().payloads == 0


def test_deleted_just_before_it_is_written(rig: Rig) -> None:
    name = stored(rig)
    keep = rig.tier._folder.keep

    def keep_too_late(*args: Any) -> bool:
        rig.tier.delete([name])
        return keep(*args)

    rig.tier._folder.keep = keep_too_late  # type: ignore[method-assign]
    assert read(rig, name) == DATA
    assert rig.fast_files() == {}
    check_ledger(rig.ledger, rig.folder)


def test_deleted_by_another_process_while_it_is_written(tmp_path: Path) -> None:
    mine, theirs = Rig(tmp_path), Rig(tmp_path)
    name = stored(mine)
    mine.fast.before = lambda verb, _name: theirs.tier.delete([name]) if verb == "put" else None
    assert read(mine, name) == DATA
    assert mine.fast_files() == mine.slow_files() == {}
    assert mine.tier.usage().nbytes == 0
    check_ledger(mine.ledger, mine.folder)


@pytest.mark.slow
def test_fetched_by_another_process_while_it_is_deleted(tmp_path: Path) -> None:
    mine, theirs = Rig(tmp_path), Rig(tmp_path)
    name = stored(mine)
    read(mine, name)
    mine.announce(
        lambda step: (
            theirs.tier.read(name, 0, views(bytearray(SIZE)), size=SIZE)
            if step == "after fast.delete"
            else None
        )
    )
    assert mine.tier.drop_copy(name)
    # A file that no entry accounts for would be above the capacity until somebody looks.
    check_ledger(mine.ledger, mine.folder)


def test_dropping_a_copy_says_whether_there_was_one(rig: Rig) -> None:
    name = stored(rig)
    assert not rig.tier.drop_copy(name)
    read(rig, name)
    (rig.folder / name).write_bytes(b"x" * SIZE)
    assert read(rig, name) != DATA
    assert rig.tier.drop_copy(name)
    assert rig.fast_files() == {}
    assert read(rig, name) == DATA


def test_dropping_the_copy_of_what_is_in_flight(tmp_path: Path) -> None:
    queue = Queue()
    rig = Rig(tmp_path, later=queue)
    name = stored(rig)
    rig.slow_plan.replace(Rule("flip", verbs=("read",), times=1))
    assert read(rig, name) != DATA
    assert rig.tier.drop_copy(name)
    assert read(rig, name) == DATA
    queue.run()
    assert (rig.folder / name).read_bytes() == DATA


def test_close_is_quick_and_later_calls_work_without_the_folder(tmp_path: Path) -> None:
    rig = Rig(tmp_path, later=Queue())
    rig.tier.put(name := fresh_name(), views(DATA))
    other = stored(rig)
    rig.tier.close()
    rig.tier.close()
    assert read(rig, name) == DATA
    assert read(rig, other) == DATA
    assert rig.fast_files() == {name: SIZE}
