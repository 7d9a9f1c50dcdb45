"""Match, save and load over the real embedded leaves; faults where only a fault shows the behaviour."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.conformance.faulty import Plan, Rule
from kvstore.errors import (
    BreakerOpen,
    CapacityExceeded,
    CorruptPayload,
    DeadlineExceeded,
    KVStoreError,
    NamespaceMismatch,
    PayloadMissing,
    TransientError,
)
from kvstore.format.segment import Slot
from kvstore.index.port import Run
from kvstore.keys import SegmentId, digest, namespace_id, new_segment_id, payload_name
from kvstore.payloads.local import LocalPayloads
from kvstore.store.space import Space
from kvstore.store.store import Store
from tests.store.world import (
    SLOT_BYTES,
    buffers,
    chain,
    content,
    fetch,
    item,
    keys,
    make_store,
    match,
    namespace,
    open_space,
    slots,
    with_parts,
)

A = chain(*range(40))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = make_store(tmp_path)
    yield made
    made.close()


@pytest.fixture
def space(store: Store) -> Space:
    return open_space(store)


def files(root: Path) -> list[Path]:
    return sorted(root.glob("*/??/*"))


def counts(store: Store) -> dict[str, int]:
    return {name: value for name, value in store.counters.snapshot().items() if value}


def test_what_was_saved_is_matched_and_loaded(space: Space) -> None:
    saved = space.save(slots(A))
    assert (saved.outcome, saved.present, saved.stored) == ("stored", 0, 40)
    found = match(space, A)
    assert (found.blocks, found.reason, len(found.runs)) == (40, "complete", 1)
    assert fetch(space, A, found) == [content(one) for one in A]


@pytest.mark.parametrize("codec", ["none", "lz4"])
def test_any_part_of_any_run_in_either_codec(store: Store, codec: str) -> None:
    space = open_space(store, codec=codec)
    # Every second block shrinks under lz4, the others are stored raw.
    blocks = [
        Slot(slot.key, memoryview(bytes(SLOT_BYTES)) if i % 2 else slot.data, slot.dtype, slot.shape)
        for i, slot in enumerate(slots(A))
    ]
    space.save(blocks)
    [whole] = match(space, A).runs
    for first in range(0, 40, 3):
        for count in range(1, 40 - first, 5):
            run = Run(first, whole.segment, first, count, whole.record)
            into = buffers(count)
            space.load(run, keys(A)[first : first + count], into)
            assert [bytes(v) for v in into] == [bytes(b.data) for b in blocks[first : first + count]]


def test_of_many_runs_one_that_is_lost_costs_no_other(tmp_path: Path, space: Space) -> None:
    for start in range(0, 40, 4):
        space.save(slots(A[: start + 4]))
    found = match(space, A)
    assert len(found.runs) == 10
    assert fetch(space, A, found) == [content(one) for one in A]
    (tmp_path / payload_name(space.id, found.runs[6].segment, 0)).unlink()
    with pytest.raises(PayloadMissing):
        fetch(space, A, found)
    found = match(space, A)
    assert found.blocks == 24
    assert fetch(space, A, found) == [content(one) for one in A[:24]]


def test_a_longer_chain_saves_only_its_tail_and_divergence_is_respected(space: Space) -> None:
    space.save(slots(A[:10]))
    saved = space.save(slots(A[:16]))
    assert (saved.outcome, saved.present, saved.stored) == ("stored", 10, 6)
    other = chain(*range(12), 99, 98)
    assert match(space, other).blocks == 12
    assert match(space, other).reason == "absent"
    assert match(space, chain(7)).blocks == 0
    assert fetch(space, other, match(space, other)) == [content(one) for one in other[:12]]
    assert space.save(slots(A[:16])).outcome == "present"


def test_two_writers_of_one_run_upload_it_once(store: Store, space: Space) -> None:
    packed = b"".join(digest(key) for key in keys(A[:4]))
    space.register()
    other = new_segment_id()
    assert store.index.claim(space.id, packed, other, 30).granted
    assert space.save(slots(A[:4])).outcome == "held"
    assert counts(store)["save_blocks{held}"] == 4
    # The claim names the segment: its own writer may go on.
    assert space.save(slots(A[:4]), segment=other).outcome == "stored"


def test_a_save_that_fails_gives_its_claim_back(tmp_path: Path) -> None:
    with make_store(tmp_path, plan=Plan(Rule("transient", ("put",), times=1))) as store:
        space = open_space(store)
        with pytest.raises(TransientError):
            space.save(slots(A[:4]))
        time.sleep(0.01)
        assert space.save(slots(A[:4])).outcome == "stored"


def test_all_ranks_or_none(store: Store) -> None:
    space = open_space(store, parallel={"tp": 2, "pp": 1, "dcp": 1})
    segment = new_segment_id()
    first = space.save(slots(A[:4]), segment=segment, rank=1, ranks=2)
    assert first.outcome == "waiting"
    assert match(space, A[:4]).blocks == 0
    assert space.save(slots(A[:4]), segment=segment, rank=0, ranks=2).outcome == "stored"
    [run] = match(space, A[:4]).runs
    for rank in (0, 1):
        into = buffers(4)
        space.load(run, keys(A[:4]), into, rank=rank)
        assert [bytes(v) for v in into] == [content(one) for one in A[:4]]


def test_namespaces_do_not_see_each_other(store: Store, space: Space) -> None:
    space.save(slots(A[:4]))
    for change in (
        {"tenant": "other"},
        {"weights": "x"},
        {"epoch": 1},
        {"kv_dtype": "fp8"},
        {"codec": "lz4"},
    ):
        assert match(open_space(store, **change), A[:4]).blocks == 0


def test_a_segment_moved_to_another_namespace_is_refused(tmp_path: Path, store: Store, space: Space) -> None:
    space.save(slots(A[:4]))
    other = open_space(store, tenant="other")
    other.save(slots(A[:4]))
    by_ns = {path.parts[-3]: path for path in files(tmp_path)}
    by_ns[space.id].write_bytes(by_ns[other.id].read_bytes())
    found = match(space, A[:4])
    with pytest.raises(NamespaceMismatch):
        fetch(space, A, found)
    assert match(space, A[:4]).blocks == 0
    assert counts(store)["miss_blocks{namespace_mismatch}"] == 4
    assert fetch(other, A, match(other, A[:4])) == [content(one) for one in A[:4]]


def test_every_kind_of_damage_is_a_counted_miss_and_evicts(
    tmp_path: Path, store: Store, space: Space
) -> None:
    damage = {
        "header": lambda d: d[:100] + bytes([d[100] ^ 1]) + d[101:],
        "length": lambda d: b"\xff" * 8 + d[8:],
        "data": lambda d: d[:-5] + bytes([d[-5] ^ 0x10]) + d[-4:],
        "truncated": lambda d: d[:-1],
        "headless": lambda d: d[:1000],
        "empty": lambda d: b"",
    }
    for number, (kind, change) in enumerate(damage.items()):
        hashes = chain(1000 + number, 2, 3)
        space.save(slots(hashes))
        [path] = [
            p
            for p in files(tmp_path)
            if p.stat().st_mtime_ns == max(q.stat().st_mtime_ns for q in files(tmp_path))
        ]
        path.write_bytes(change(path.read_bytes()))
        found = match(space, hashes)
        assert found.blocks == 3, kind
        with pytest.raises(CorruptPayload):
            fetch(space, hashes, found)
        assert match(space, hashes).blocks == 0, kind
        path.unlink()
    assert counts(store)["miss_blocks{corrupt}"] == 3 * len(damage)
    assert counts(store)["quarantined_segments"] == len(damage)


def test_a_deleted_payload_is_a_counted_miss(tmp_path: Path, store: Store, space: Space) -> None:
    space.save(slots(A[:4]))
    [path] = files(tmp_path)
    path.unlink()
    with pytest.raises(PayloadMissing):
        fetch(space, A, match(space, A[:4]))
    assert counts(store)["miss_blocks{missing}"] == 4
    assert match(space, A[:4]).blocks == 0
    # It can be saved anew.
    assert space.save(slots(A[:4])).outcome == "stored"


def test_an_index_that_points_elsewhere_never_gives_other_blocks(store: Store, space: Space) -> None:
    """Entries that name the wrong slot, or a segment of other blocks: refused by the full hash."""
    space.save(slots(A[:4]))
    other = chain(500, 501, 502, 503)
    space.save(slots(other))
    [run], [wrong] = match(space, A[:4]).runs, match(space, other).runs
    for bad in (Run(0, wrong.segment, 0, 4, wrong.record), Run(0, run.segment, 1, 3, run.record)):
        with pytest.raises(CorruptPayload):
            space.load(bad, keys(A)[: bad.count], buffers(bad.count))


def test_eviction_leaves_the_payload_readable_for_the_grace_time(tmp_path: Path) -> None:
    now = [1_000_000.0]
    store = make_store(tmp_path, clock=lambda: now[0])
    space = open_space(store)
    space.save(slots(A[:4]))
    found = match(space, A[:4])
    store.index.evict(
        space.id, [found.runs[0].segment], delete_after_s=now[0] + store.settings.grace_s, rule="admin"
    )
    assert match(space, A[:4]).blocks == 0
    assert fetch(space, A, found) == [content(one) for one in A[:4]]
    store.rounds.housekeep()
    assert len(files(tmp_path)) == 1
    now[0] += store.settings.grace_s + 1
    store.rounds.housekeep()
    assert files(tmp_path) == []
    with pytest.raises(PayloadMissing):
        fetch(space, A, found)
    store.close()


def test_the_namespace_stays_within_its_capacity(tmp_path: Path) -> None:
    capacity, now_s = 40 * (SLOT_BYTES * 4 + 8192), [1_000_000.0]
    store = make_store(tmp_path, clock=lambda: now_s[0], capacity_bytes=capacity)
    space = open_space(store)
    for number in range(200):
        # Uses count by the minute: within one, chance decides.
        now_s[0] += 60.0
        space.save(slots(chain(number, 1, 2, 3)))
        assert store.maintenance.usage(space.id).nbytes <= capacity * 1.05
    assert counts(store)["evicted_segments"] > 100
    there = [match(space, chain(number, 1, 2, 3)).blocks == 4 for number in range(200)]
    assert there[-40:] == [True] * 40 and not any(there[:100])
    store.close()


def test_an_emptied_index_is_refilled(tmp_path: Path) -> None:
    store = make_store(tmp_path / "a", index=None)
    space = open_space(store)
    space.save(slots(A[:4]))
    store.close()
    (tmp_path / "a" / "index.sqlite").unlink()
    for name in ("index.sqlite-wal", "index.sqlite-shm"):
        (tmp_path / "a" / name).unlink(missing_ok=True)
    again = make_store(tmp_path / "a")
    space = open_space(again)
    assert match(space, A[:4]).blocks == 0
    assert space.save(slots(A[:4])).outcome == "stored"
    assert match(space, A[:4]).blocks == 4
    again.close()


@pytest.mark.parametrize(
    ("fault", "error", "reason"),
    [
        ("transient", TransientError, "unavailable"),
        ("permission", KVStoreError, "permission"),
        ("no_space", CapacityExceeded, "capacity"),
    ],
)
def test_a_save_that_fails_leaves_nothing_visible(
    tmp_path: Path, fault: str, error: type[KVStoreError], reason: str
) -> None:
    store = make_store(tmp_path, plan=Plan(Rule(fault, ("put",), times=1)))  # type: ignore[arg-type]
    space = open_space(store)
    with pytest.raises(error):
        space.save(slots(A[:4]))
    assert match(space, A[:4]).blocks == 0
    assert counts(store)["save_blocks{failed}"] == 4
    assert counts(store)[f"save_failures{{{reason}}}"] == 1
    store.close()


def test_saves_that_fail_all_day_are_said_once_a_minute(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    now = [1000.0]
    plan = Plan(Rule("permission", ("put",)))
    unseen = itertools.count(1000)

    def said() -> list[str]:
        """What the log has been told by 50 saves."""
        caplog.clear()
        for _ in range(50):
            with pytest.raises(KVStoreError):
                space.save(slots(chain(next(unseen), 1)))
        return [record.getMessage() for record in caplog.records if record.levelname != "DEBUG"]

    with make_store(tmp_path, plan=plan, clock=lambda: now[0]) as store:
        space = open_space(store)
        (first,) = said()
        assert first.startswith("2 blocks are not cached: ")
        assert said() == []
        # What else goes wrong is said at once.
        plan.replace(Rule("no_space", ("put",)))
        assert len(said()) == 1
        plan.replace(Rule("permission", ("put",)))
        now[0] += 60
        (again,) = said()
        assert again.startswith("2 blocks are not cached, and 198 since this was last said: ")
        # A clock that is set back by a day does not make it dumb for one.
        now[0] -= 86400
        assert len(said()) == 1
        assert counts(store)["save_blocks{failed}"] == 500


@pytest.mark.parametrize("fault", ["truncate", "flip"])
@pytest.mark.parametrize("verb", ["put", "read"])
def test_silent_damage_on_the_way_is_never_served(tmp_path: Path, fault: str, verb: str) -> None:
    store = make_store(tmp_path, plan=Plan(Rule(fault, (verb,), times=1), seed=3))  # type: ignore[arg-type]
    space = open_space(store)
    space.save(slots(A[:8]))
    if verb == "put":
        with pytest.raises(CorruptPayload):
            fetch(space, A, match(space, A[:8]))
    else:
        # Read once more, it is right: nobody loses it for one bad read.
        assert fetch(space, A, match(space, A[:8])) == [content(one) for one in A[:8]]
        assert match(space, A[:8]).blocks == 8
    store.close()


def test_a_load_ends_at_its_deadline(tmp_path: Path) -> None:
    plan = Plan()
    store = make_store(tmp_path, plan=plan)
    space = open_space(store)
    space.save(slots(A[:4]))
    found = match(space, A[:4])
    with pytest.raises(DeadlineExceeded):
        space.load(found.runs[0], keys(A[:4]), buffers(4), deadline_s=1e-9)
    assert counts(store)["miss_blocks{deadline}"] == 4
    assert match(space, A[:4]).blocks == 4  # slow is not bad
    store.close()


def test_a_broken_index_costs_its_deadline_a_few_times_and_then_nothing(tmp_path: Path) -> None:
    class Down:
        calls = 0

        def __getattr__(self, name: str) -> object:
            def fail(*args: object, **kwargs: object) -> None:
                Down.calls += 1
                raise DeadlineExceeded("index: no answer")

            return fail

    down: Any = Down()
    store = make_store(tmp_path / "x", index=down, breaker={"failures": 2, "backoff_s": 5.0})
    space = open_space(store)
    reasons = [match(space, A[:4]).reason for _ in range(5)]
    assert reasons == ["deadline", "deadline", "breaker_open", "breaker_open", "breaker_open"]
    assert Down.calls == 2
    with pytest.raises(TransientError):
        space.save(slots(A[:4]))
    with_parts(store, index=store.maintenance).close()


def test_who_is_refused_registers_no_more_often_than_a_breaker_backs_off(tmp_path: Path) -> None:
    """One shard of many that is down refuses every match in it, and to register asks all of them."""

    class OneShardIsDown:
        registered = 0

        def match(self, *args: object, **options: object) -> None:
            raise BreakerOpen("index shard 3 of 8")

        def register(self, *args: object, **options: object) -> None:
            self.registered += 1

        def close(self) -> None:
            pass

    down: Any = OneShardIsDown()
    whole = make_store(tmp_path, breaker={"backoff_s": 3600.0, "max_backoff_s": 3600.0})
    store = with_parts(whole, index=down)
    space = open_space(store)
    for _ in range(50):
        assert match(space, A[:4]).reason == "breaker_open"
    with_parts(store, index=store.maintenance).close()  # waits for the threads
    assert down.registered == 1


def test_an_item_of_any_shape(store: Store) -> None:
    space = store.open(
        namespace(
            kind="ec", block_tokens=0, groups=(), hash_algo="", hash_root="", kv_dtype="", page_order=""
        ),
        block_bytes=1 << 20,
    )
    for name, rows in (("../../etc/passwd", 3), ("x" * 10_000, 1), ("nul\0 \ud800", 7), ("", 2)):
        data = content(name.encode("utf-8", "surrogatepass"))[: rows * 16]
        key = item(name)
        space.save([Slot(key, memoryview(data), "F32", (rows, 4))])
        found = space.match(digest(key))
        into = memoryview(bytearray(found.runs[0].record.raw_bytes))
        (meta,) = space.load(found.runs[0], [key], [into])
        assert (bytes(into), meta.dtype, meta.shape) == (data, "F32", (rows, 4))


def test_nothing_but_the_error_tree_comes_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = make_store(tmp_path)
    space = open_space(store)
    space.save(slots(A[:4]))
    found = match(space, A[:4])

    class Buggy(LocalPayloads):
        def read(self, *args: object, **kw: object) -> int:
            raise ZeroDivisionError("a bug")

        def put(self, *args: object) -> None:
            raise ZeroDivisionError("a bug")

    space = open_space(with_parts(store, payloads=Buggy(str(tmp_path))))
    with pytest.raises(KVStoreError, match="a bug") as raised:
        fetch(space, A, found)
    assert space.not_loaded.note(4, raised.value, found.runs[0].segment) == "error"
    with pytest.raises(KVStoreError, match="a bug"):
        space.save(slots(chain(77)))
    told = f"4 blocks of segment {found.runs[0].segment.hex()} are computed: load failed: ZeroDivisionError"
    assert told in caplog.text and "1 blocks are not cached" in caplog.text
    assert caplog.text.count('raise ZeroDivisionError("a bug")') == 2, "a bug is told with its traceback"
    store.close()


def test_names_on_disk_are_what_the_design_says(tmp_path: Path, space: Space) -> None:
    segment = SegmentId(bytes.fromhex("ab" * 8))
    space.save(slots(A[:1]), segment=segment)
    name = payload_name(namespace_id(namespace()), segment, 0)
    assert (tmp_path / name).is_file()
    assert name.endswith("/ab/abababababababab.0")
