"""RangedPayloads: a long read is many reads, side by side, and still one answer."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.conformance.arrange import fetch, fresh_name, views
from kvstore.conformance.faulty import FaultyPayloads, Plan, Rule
from kvstore.errors import TransientError
from kvstore.payloads.buffers import flat, pour, total, window
from kvstore.payloads.memory import MemoryPayloads
from kvstore.payloads.port import PayloadStore
from kvstore.payloads.ranged import RangedPayloads
from kvstore.testing import PayloadConformance
from kvstore.threads.transfers import Crew
from tests.payloads.test_memory import Dictionary
from tests.waiting import PATIENCE_S


@pytest.fixture
def crew() -> Iterator[Crew]:
    crew = Crew(4)
    yield crew
    crew.close()


def ranged(inner: PayloadStore, crew: Crew, range_bytes: int = 100, concurrency: int = 3) -> RangedPayloads:
    return RangedPayloads(inner, range_bytes=range_bytes, concurrency=concurrency, together=crew.together)


class TestRangedPayloads(PayloadConformance):
    #: Of one range each: see the test that is skipped below.
    sizes = (1, 500, 900)

    @pytest.fixture
    def payloads(self, store_name: str, crew: Crew) -> PayloadStore:
        return ranged(MemoryPayloads(store_name), crew, range_bytes=1000)

    @pytest.fixture
    def raw(self, store_name: str, payloads: PayloadStore) -> Dictionary:
        return Dictionary(store_name)

    @pytest.mark.skip(
        reason="several reads of one payload see several versions; the store never replaces one"
    )
    def test_readers_during_a_replacement_see_old_or_new(self, payloads: PayloadStore) -> None: ...


class Watched(MemoryPayloads):
    """Notes each read and how many are under way at once."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.lock = threading.Lock()
        self.reads: list[tuple[int, int]] = []
        self.now = self.most = 0
        self.meet: threading.Barrier | None = None

    def read(
        self, name: str, offset: int, into: Sequence[memoryview], *, size: int | None = None
    ) -> int | None:
        with self.lock:
            self.reads.append((offset, total(into)))
            self.now += 1
            self.most = max(self.most, self.now)
        try:
            if self.meet is not None:
                self.meet.wait(PATIENCE_S)
            return super().read(name, offset, into, size=size)
        finally:
            with self.lock:
                self.now -= 1


def test_ranges_are_read_side_by_side_and_no_more_than_allowed(store_name: str, crew: Crew) -> None:
    inner = Watched(store_name)
    payload, data = fresh_name(), bytes(range(256)) * 4
    inner.put(payload, views(data))
    inner.meet = threading.Barrier(3)  # broken, and an error, unless three are under way at once
    into = bytearray(900)
    assert ranged(inner, crew).read(payload, 10, [memoryview(into)]) == 900
    assert into == data[10:910]
    assert sorted(inner.reads) == [(10 + at, 100) for at in range(0, 900, 100)]
    assert inner.most == 3


def test_a_short_read_is_one_read(store_name: str, crew: Crew) -> None:
    inner = Watched(store_name)
    payload = fresh_name()
    inner.put(payload, views(b"x" * 500))
    ranged(inner, crew).read(payload, 0, [memoryview(bytearray(100))])
    assert inner.reads == [(0, 100)]


def test_ranges_are_of_one_size(store_name: str, crew: Crew) -> None:
    inner = Watched(store_name)
    ranged(inner, crew).read(fresh_name(), 0, [memoryview(bytearray(151))])
    assert sorted(inner.reads) == [(0, 76), (76, 75)]


def test_an_error_is_raised_when_nothing_writes_any_more(store_name: str, crew: Crew) -> None:
    inner = Watched(store_name)
    payload = fresh_name()
    inner.put(payload, views(b"x" * 1000))
    plan = Plan(Rule("transient", verbs=("read",), skip=1, times=1), Rule("delay", delay_s=0.01))
    payloads = ranged(FaultyPayloads(inner, plan), crew)
    with pytest.raises(TransientError, match="injected"):
        payloads.read(payload, 0, [memoryview(bytearray(1000))])
    assert inner.now == 0
    assert len(inner.reads) < 9  # what had not begun was left out
    assert fetch(payloads, payload, 1000) == b"x" * 1000


def test_missing_is_missing(store_name: str, crew: Crew) -> None:
    assert (
        ranged(MemoryPayloads(store_name), crew).read(fresh_name(), 0, [memoryview(bytearray(1000))]) is None
    )


@given(st.data())
def test_any_read_is_the_read_of_the_inner_store(data: st.DataObject) -> None:
    inner = MemoryPayloads("any read")
    payload = fresh_name()
    content = data.draw(st.binary(max_size=300))
    inner.put(payload, views(content))
    sizes = data.draw(st.lists(st.integers(0, 120), max_size=6))
    offset = data.draw(st.integers(0, 350))
    into = [memoryview(bytearray(size)) for size in sizes]
    crew = Crew(2)
    try:
        payloads = ranged(inner, crew, range_bytes=data.draw(st.integers(1, 200)))
        got = payloads.read(payload, offset, into)
    finally:
        crew.close()
        inner.delete([payload])
    expected = content[offset : offset + sum(sizes)]
    assert got == len(expected)
    assert b"".join(into)[:got] == expected


# Lists of buffers


@given(st.lists(st.binary(max_size=9), max_size=8), st.integers(0, 80), st.integers(0, 80))
def test_a_window_is_a_slice_of_the_whole(parts: list[bytes], start: int, length: int) -> None:
    buffers = flat(views(*parts))
    whole = b"".join(parts)
    assert total(buffers) == len(whole)
    assert b"".join(window(buffers, start, length)) == whole[start : start + length]


@given(st.binary(max_size=40), st.lists(st.integers(0, 9), max_size=8))
def test_what_is_poured_fills_in_turn(data: bytes, sizes: list[int]) -> None:
    into = flat([memoryview(bytearray(size)) for size in sizes])
    count = pour(data, into)
    assert count == min(len(data), sum(sizes))
    assert b"".join(into) == data[:count].ljust(sum(sizes), b"\x00")


def test_neighbours_in_memory_are_joined_and_nothing_else() -> None:
    pool = memoryview(bytearray(range(100)))
    other = memoryview(bytearray(b"other"))
    rows = [pool[i * 10 : (i + 1) * 10] for i in range(10)]
    assert [view.nbytes for view in flat(rows)] == [100]
    assert [bytes(view) for view in flat([*rows[:3], other, *rows[3:5], rows[7]])] == [
        bytes(range(30)),
        b"other",
        bytes(range(30, 50)),
        bytes(range(70, 80)),
    ]
    [joined] = flat([rows[4], pool[50:50], rows[5]])
    joined[:] = b"x" * 20
    assert bytes(pool[40:60]) == b"x" * 20
    # Touching, but not to be written alike; backwards; twice the same.
    assert len(flat([rows[0], rows[1].toreadonly()])) == 2
    assert len(flat([rows[1], rows[0]])) == 2
    assert len(flat([rows[0], rows[0]])) == 2


def test_views_of_numbers_are_joined_as_bytes() -> None:
    numbers = np.arange(12, dtype=np.float32)
    view = memoryview(numbers)
    [joined] = flat([view[:4], view[4:]])
    assert bytes(joined) == numbers.tobytes()
    assert len(flat([view[:4], view[8:]])) == 2
