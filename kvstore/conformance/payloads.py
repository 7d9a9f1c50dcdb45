"""PayloadConformance: the contract of kvstore.payloads.port.PayloadStore as tests.

A payload store passes if a subclass with two fixtures passes:

    class TestMine(PayloadConformance):
        @pytest.fixture
        def payloads(self): ...     an empty store, opened

        @pytest.fixture
        def raw(self): ...          the same storage, not through the object under test

Tests arrange and assert through `raw` where they can, so that a store whose put and read are wrong in the
same way doesn't pass. Every test is about one sentence of the port.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from kvstore.conformance.arrange import (
    BAD_NAMES,
    NAMESPACE,
    NAMESPACES,
    OTHER_NAMESPACE,
    RawPayloads,
    fetch,
    fresh_name,
    name_in,
    strangers_beside,
    views,
)
from kvstore.errors import StoreClosed
from kvstore.keys import new_segment_id, payload_name
from kvstore.payloads.port import PayloadStore
from kvstore.rules.tiers import TIERS

#: More buffers than any kernel takes in one call.
MANY = 2500


class PayloadConformance:
    """The suite of PayloadStore. Subclass it, name the subclass Test..., and define the two fixtures."""

    #: Whether `delete` knows which names existed. A store that doesn't know counts them all.
    delete_tells = True
    #: Bytes of payloads that replace one another while others read them.
    sizes: tuple[int, ...] = (1, 5000, 70_000)

    @pytest.fixture
    def payloads(self) -> PayloadStore | Iterator[PayloadStore]:
        """An empty store."""
        raise NotImplementedError

    @pytest.fixture
    def raw(self) -> RawPayloads:
        """The storage of `payloads`."""
        raise NotImplementedError

    # put

    @pytest.mark.parametrize(
        "parts",
        [
            pytest.param([b"abc"], id="one buffer"),
            pytest.param([b"ab", b"c", b"defgh"], id="three"),
            pytest.param([b"x"], id="one byte"),
            pytest.param([b""], id="an empty buffer"),
            pytest.param([], id="no buffer"),
            pytest.param([b"", b"ab", b"", b"", b"c", b""], id="empty ones between"),
            pytest.param([bytes([i % 256]) * (i % 5) for i in range(MANY)], id="thousands"),
            pytest.param([random.Random(1).randbytes(3 << 20), b"end"], id="megabytes"),
        ],
    )
    def test_put_stores_the_concatenation(
        self, payloads: PayloadStore, raw: RawPayloads, parts: list[bytes]
    ) -> None:
        name = fresh_name()
        payloads.put(name, views(*parts))
        assert raw.get(name) == b"".join(parts)
        assert raw.names() == {name}

    def test_put_takes_slices_of_one_large_buffer_in_any_order(
        self, payloads: PayloadStore, raw: RawPayloads
    ) -> None:
        pool = memoryview(bytearray(random.Random(2).randbytes(100_000)))
        parts = [pool[50_001:70_000], pool[3:4], pool[0:50_000], pool[3:4]]
        name = fresh_name()
        payloads.put(name, parts)
        assert raw.get(name) == b"".join(parts)

    def test_put_keeps_no_buffer(self, payloads: PayloadStore, raw: RawPayloads) -> None:
        name = fresh_name()
        buffer = bytearray(b"before" * 1000)
        payloads.put(name, [memoryview(buffer)])
        buffer[:] = b"after." * 1000
        assert raw.get(name) == b"before" * 1000
        assert fetch(payloads, name) == b"before" * 1000
        # A bytearray with an exported view refuses to change its size.
        buffer.clear()

    def test_put_does_not_change_its_buffers(self, payloads: PayloadStore) -> None:
        buffer = bytearray(b"abcdef" * 1000)
        payloads.put(fresh_name(), [memoryview(buffer)])
        assert buffer == b"abcdef" * 1000

    def test_put_of_ranks_of_one_segment_are_separate(self, payloads: PayloadStore, raw: RawPayloads) -> None:
        segment = new_segment_id()
        names = [payload_name(NAMESPACE, segment, rank) for rank in (0, 1, 10, 99999)]
        for name in names:
            payloads.put(name, views(name.encode()))
        assert {name: raw.get(name) for name in names} == {name: name.encode() for name in names}

    @pytest.mark.parametrize("sizes", [(10, 100_000), (100_000, 10), (5, 5), (5, 0)])
    def test_second_put_replaces(
        self, payloads: PayloadStore, raw: RawPayloads, sizes: tuple[int, int]
    ) -> None:
        name = fresh_name()
        payloads.put(name, views(b"a" * sizes[0]))
        payloads.put(name, views(b"b" * sizes[1]))
        assert raw.get(name) == b"b" * sizes[1]
        assert raw.names() == {name}

    def test_failed_put_leaves_what_was_there(self, payloads: PayloadStore, raw: RawPayloads) -> None:
        old, new = fresh_name(), fresh_name()
        payloads.put(old, views(b"old"))
        gone = memoryview(b"gone")
        gone.release()  # using it raises, as a buffer that its owner took back would
        for name in (old, new):
            with pytest.raises((ValueError, TypeError)):
                payloads.put(name, [memoryview(b"x" * 10_000), gone])
        assert raw.get(old) == b"old"
        assert raw.names() == {old}

    def test_readers_during_a_replacement_see_old_or_new(self, payloads: PayloadStore) -> None:
        name = fresh_name()
        versions = [bytes([i]) * size for i, size in enumerate((300_000, 17, 900_000, 1))]
        payloads.put(name, views(versions[0]))
        seen: list[bytes | None] = []

        def check(until: threading.Event) -> None:
            while not until.is_set():
                seen.append(fetch(payloads, name))

        def write() -> None:
            for i in range(60):
                version = versions[i % len(versions)]
                payloads.put(name, views(version[: len(version) // 2], version[len(version) // 2 :]))

        _run_beside(check, write, threads=3)
        assert {None if data is None else (data[:1], len(data)) for data in seen} <= {
            (version[:1], len(version)) for version in versions
        }
        assert all(data in versions for data in seen)

    # read

    def test_read_fills_buffers_in_turn(self, payloads: PayloadStore, raw: RawPayloads) -> None:
        name = fresh_name()
        raw.put(name, b"abcdefghij")
        into = [bytearray(3), bytearray(0), bytearray(1), bytearray(6)]
        assert payloads.read(name, 0, [memoryview(view) for view in into]) == 10
        assert into == [b"abc", b"", b"d", b"efghij"]

    def test_read_fills_thousands_of_buffers(self, payloads: PayloadStore, raw: RawPayloads) -> None:
        data = random.Random(3).randbytes(3 * MANY)
        name = fresh_name()
        raw.put(name, b"--" + data + b"--")
        into = bytearray(3 * MANY)
        pool = memoryview(into)
        count = payloads.read(name, 2, [pool[3 * i : 3 * i + 3] for i in range(MANY)])
        assert count == len(data)
        assert into == data

    def test_read_fills_slices_backwards(self, payloads: PayloadStore, raw: RawPayloads) -> None:
        name = fresh_name()
        raw.put(name, b"abcdef")
        into = bytearray(6)
        pool = memoryview(into)
        assert payloads.read(name, 0, [pool[4:6], pool[2:4], pool[0:2]]) == 6
        assert into == b"efcdab"

    @pytest.mark.parametrize("offset", [0, 1, 4095, 4096, 4097, 9_999])
    @pytest.mark.parametrize("size", [1, 100, 4096, 20_000])
    def test_read_of_a_range(self, payloads: PayloadStore, raw: RawPayloads, offset: int, size: int) -> None:
        data = random.Random(4).randbytes(10_000)
        name = fresh_name()
        raw.put(name, data)
        into = bytearray(size)
        expected = data[offset : offset + size]
        assert payloads.read(name, offset, [memoryview(into)]) == len(expected)
        assert into[: len(expected)] == expected

    def test_read_touches_nothing_outside_its_buffers(self, payloads: PayloadStore, raw: RawPayloads) -> None:
        name = fresh_name()
        raw.put(name, b"x" * 1000)
        into = bytearray(300)
        payloads.read(name, 10, [memoryview(into)[100:200]])
        assert into == bytes(100) + b"x" * 100 + bytes(100)

    def test_read_past_the_end_is_short(self, payloads: PayloadStore, raw: RawPayloads) -> None:
        name = fresh_name()
        raw.put(name, b"abcdef")
        into = [bytearray(2), bytearray(10), bytearray(10)]
        assert payloads.read(name, 1, [memoryview(view) for view in into]) == 5
        assert into[0] == b"bc"
        assert into[1][:3] == b"def"

    @pytest.mark.parametrize("offset", [6, 7, 1 << 40])
    def test_read_behind_the_end_is_zero(self, payloads: PayloadStore, raw: RawPayloads, offset: int) -> None:
        name = fresh_name()
        raw.put(name, b"abcdef")
        assert payloads.read(name, offset, [memoryview(bytearray(4))]) == 0

    def test_read_of_an_empty_payload_is_zero(self, payloads: PayloadStore, raw: RawPayloads) -> None:
        name = fresh_name()
        raw.put(name, b"")
        assert payloads.read(name, 0, [memoryview(bytearray(4))]) == 0

    def test_read_into_nothing_tells_whether_it_exists(
        self, payloads: PayloadStore, raw: RawPayloads
    ) -> None:
        name = fresh_name()
        raw.put(name, b"abc")
        assert payloads.read(name, 0, []) == 0
        assert payloads.read(fresh_name(), 0, []) is None

    def test_read_of_a_missing_payload_is_none(self, payloads: PayloadStore, raw: RawPayloads) -> None:
        there = name_in("ab")
        raw.put(there, b"abc")
        near = [name_in("ab"), name_in("cd"), name_in("ab", OTHER_NAMESPACE), there[:-1] + "1"]
        assert [fetch(payloads, name) for name in near] == [None] * 4
        assert raw.names() == {there}

    def test_read_refuses_a_negative_offset(self, payloads: PayloadStore, raw: RawPayloads) -> None:
        name = fresh_name()
        raw.put(name, b"abc")
        with pytest.raises(ValueError, match="offset"):
            payloads.read(name, -1, [memoryview(bytearray(1))])

    def test_read_keeps_no_buffer(self, payloads: PayloadStore, raw: RawPayloads) -> None:
        name = fresh_name()
        raw.put(name, b"abc")
        into = bytearray(3)
        payloads.read(name, 0, [memoryview(into)])
        payloads.put(name, views(b"xyz"))
        assert into == b"abc"
        into.clear()

    def test_read_sees_the_latest_put(self, payloads: PayloadStore) -> None:
        name = fresh_name()
        for i in range(20):
            payloads.put(name, views(b"%d" % i))
            assert fetch(payloads, name) == b"%d" % i

    # delete

    def test_delete_counts_what_existed(self, payloads: PayloadStore, raw: RawPayloads) -> None:
        gone, kept = [fresh_name() for _ in range(5)], [fresh_name() for _ in range(3)]
        for name in gone + kept:
            raw.put(name, b"x")
        count = payloads.delete([fresh_name(), *gone[:3], fresh_name(), *gone[3:]])
        assert count == (5 if self.delete_tells else 7)
        assert raw.names() == set(kept)
        assert [fetch(payloads, name) for name in gone] == [None] * 5

    def test_delete_of_what_is_missing_is_fine(self, payloads: PayloadStore) -> None:
        name = fresh_name()
        assert payloads.delete([]) == 0
        assert payloads.delete([name]) == (0 if self.delete_tells else 1)
        payloads.put(name, views(b"x"))
        assert payloads.delete([name]) == 1
        assert payloads.delete([name]) == (0 if self.delete_tells else 1)

    def test_delete_of_a_large_batch(self, payloads: PayloadStore, raw: RawPayloads) -> None:
        # More than the 1000 names of one request to an object store.
        names = [fresh_name() for _ in range(1200)]
        with ThreadPoolExecutor(16) as pool:  # a server may take its time to make a write durable
            list(pool.map(lambda name: raw.put(name, b""), names))
        assert payloads.delete(names) == 1200
        assert raw.names() == set()

    def test_deleted_name_can_be_put_again(self, payloads: PayloadStore, raw: RawPayloads) -> None:
        name = fresh_name()
        payloads.put(name, views(b"one"))
        payloads.delete([name])
        payloads.put(name, views(b"two"))
        assert raw.get(name) == b"two"

    # list

    def test_list_says_name_size_and_time(self, payloads: PayloadStore) -> None:
        sizes = {fresh_name(namespace): size for size in (0, 1, 5000) for namespace in NAMESPACES}
        before = time.time()
        for name, size in sizes.items():
            payloads.put(name, views(b"x" * size))
        listed = list(payloads.list())
        assert {item.name: item.nbytes for item in listed} == sizes
        assert len(listed) == len(sizes)
        # A server's clock may differ, and file systems round.
        assert all(before - 60 <= item.modified_s <= time.time() + 60 for item in listed)

    def test_list_of_an_empty_store_is_empty(self, payloads: PayloadStore) -> None:
        assert list(payloads.list()) == []

    def test_list_with_a_prefix(self, payloads: PayloadStore, raw: RawPayloads) -> None:
        names = [name_in(fan, namespace) for fan in ("00", "0a", "a0") for namespace in NAMESPACES]
        for name in names:
            raw.put(name, b"x")
        prefixes = {name[:size] for name in names for size in range(len(name) + 1)}
        for prefix in prefixes:
            listed = sorted(item.name for item in payloads.list(prefix))
            assert listed == sorted(name for name in names if name.startswith(prefix)), prefix

    @pytest.mark.parametrize(
        "prefix", ["zz", "/", "..", "../", "*", "0123456789abcdef/0a/x", "\x00", "\udc80"]
    )
    def test_list_with_a_prefix_of_nothing(
        self, payloads: PayloadStore, raw: RawPayloads, prefix: str
    ) -> None:
        raw.put(name_in("0a"), b"x")
        assert list(payloads.list(prefix)) == []

    def test_list_leaves_out_what_is_no_payload(self, payloads: PayloadStore, raw: RawPayloads) -> None:
        name = name_in("ab")
        raw.put(name, b"x")
        for stranger in strangers_beside(name):
            raw.put(stranger, b"stranger")
        assert [item.name for item in payloads.list()] == [name]
        assert [item.name for item in payloads.list(NAMESPACE + "/")] == [name]

    def test_list_beside_changes(self, payloads: PayloadStore) -> None:
        """A payload that is there throughout is listed once, whatever else comes and goes."""
        kept = {fresh_name(): i for i in range(50)}
        for name, size in kept.items():
            payloads.put(name, views(b"x" * size))
        passing = [fresh_name() for _ in range(50)]

        def change(until: threading.Event) -> None:
            while not until.is_set():
                for name in passing:
                    payloads.put(name, views(b"passing"))
                payloads.delete(passing)

        def look() -> None:
            for _ in range(15):
                listed = [(item.name, item.nbytes) for item in payloads.list()]
                assert len(listed) == len(set(listed))
                rest = dict(listed)
                assert {name: rest.pop(name) for name in kept} == kept
                assert set(rest) <= set(passing)
                assert set(rest.values()) <= {7}

        _run_beside(change, look)

    def test_deleting_while_listing(self, payloads: PayloadStore, raw: RawPayloads) -> None:
        for _ in range(50):
            raw.put(fresh_name(), b"x")
        assert sum(payloads.delete([item.name]) for item in payloads.list()) == 50
        assert raw.names() == set()

    # names

    @pytest.mark.parametrize("name", BAD_NAMES)
    def test_a_name_that_is_no_payload_name_is_refused(
        self, payloads: PayloadStore, raw: RawPayloads, name: str
    ) -> None:
        good = fresh_name()
        raw.put(good, b"x")
        with pytest.raises(ValueError, match="not a payload name"):
            payloads.put(name, views(b"x"))
        with pytest.raises(ValueError, match="not a payload name"):
            payloads.read(name, 0, [memoryview(bytearray(1))])
        with pytest.raises(ValueError, match="not a payload name"):
            payloads.delete([good, name])
        # A batch with a bad name is refused before anything is deleted.
        assert raw.names() == {good}

    # threads

    def test_threads_put_read_delete_and_list_at_once(self, payloads: PayloadStore, raw: RawPayloads) -> None:
        names = [fresh_name() for _ in range(8)]

        def content(name: str, size: int) -> bytes:
            return (name.encode() * (size // len(name) + 1))[:size]

        def work(seed: int) -> None:
            rng = random.Random(seed)
            for _ in range(150):
                name = rng.choice(names)
                verb = rng.choice(("put", "put", "read", "read", "read", "delete", "list"))
                if verb == "put":
                    data = content(name, rng.choice(self.sizes))
                    middle = rng.randrange(len(data))
                    payloads.put(name, views(data[:middle], data[middle:]))
                elif verb == "read":
                    got = fetch(payloads, name, 100_000)
                    assert got is None or (len(got) in self.sizes and got == content(name, len(got)))
                elif verb == "delete":
                    assert payloads.delete([name]) in (0, 1)
                else:
                    assert {item.name for item in payloads.list()} <= set(names)

        with ThreadPoolExecutor(8) as pool:
            for future in [pool.submit(work, seed) for seed in range(8)]:
                future.result()
        assert raw.names() <= set(names)
        assert {item.name for item in payloads.list()} == raw.names()

    def test_racing_deletes(self, payloads: PayloadStore, raw: RawPayloads) -> None:
        names = [fresh_name() for _ in range(100)]
        for name in names:
            raw.put(name, b"x")
        with ThreadPoolExecutor(4) as pool:
            counts = list(pool.map(payloads.delete, [names] * 4))
        # An object store's delete doesn't say what was there, so racing ones may count a name several times.
        assert len(names) <= sum(counts) <= 4 * len(names)
        assert raw.names() == set()

    # tier

    def test_tier_answers_of_any_name_and_touches_nothing(
        self, payloads: PayloadStore, raw: RawPayloads
    ) -> None:
        name = fresh_name()
        assert payloads.tier(name, 3) in TIERS
        assert raw.names() == set()
        raw.put(name, b"abc")
        assert payloads.tier(name, 3) in TIERS
        payloads.close()
        assert payloads.tier(name, 3) in TIERS

    # ping and close

    def test_ping_leaves_nothing_behind(self, payloads: PayloadStore, raw: RawPayloads) -> None:
        payloads.ping()
        assert raw.names() == set()
        name = fresh_name()
        raw.put(name, b"x")
        payloads.ping()
        assert raw.names() == {name}
        assert raw.get(name) == b"x"

    def test_close_is_idempotent_and_later_calls_return(self, payloads: PayloadStore) -> None:
        name = fresh_name()
        payloads.put(name, views(b"x"))
        payloads.close()
        payloads.close()
        calls: list[Callable[[], object]] = [
            lambda: payloads.put(fresh_name(), views(b"x")),
            lambda: fetch(payloads, name),
            lambda: payloads.delete([name]),
            lambda: list(payloads.list()),
            payloads.ping,
        ]
        for call in calls:
            thread = threading.Thread(target=_closed_or_working, args=(call,), daemon=True)
            thread.start()
            thread.join(timeout=20)
            assert not thread.is_alive(), "a call after close hangs"

    def test_it_is_its_own_context(self, payloads: PayloadStore) -> None:
        name = fresh_name()
        with payloads as entered:
            assert entered is payloads
            payloads.put(name, views(b"x"))
        payloads.close()


def _run_beside(
    background: Callable[[threading.Event], None], work: Callable[[], None], threads: int = 1
) -> None:
    """Runs `work` while threads run `background` until it is done. Raises what any of them raised."""
    done = threading.Event()
    with ThreadPoolExecutor(threads) as pool:
        futures = [pool.submit(background, done) for _ in range(threads)]
        try:
            work()
        finally:
            done.set()
        for future in futures:
            future.result()


def _closed_or_working(call: Callable[[], object]) -> None:
    with suppress(StoreClosed):
        call()
