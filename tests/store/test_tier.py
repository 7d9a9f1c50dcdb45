"""The whole store over two tiers: nodes share an index and a payload store, each has a folder of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.breaker import Breaker
from kvstore.build import load_settings, open_evidence, open_index
from kvstore.errors import CorruptPayload, KVStoreError
from kvstore.index.breaking import BreakingIndex
from kvstore.metrics import Counters
from kvstore.payloads.local import LocalPayloads
from kvstore.payloads.tiered.ledger import Ledger
from kvstore.payloads.tiered.store import TieredPayloads
from kvstore.store.backends import Backends
from kvstore.store.space import Space
from kvstore.store.store import Store
from kvstore.threads.transfers import Transfers
from tests.payloads.tiered.world import check_ledger
from tests.store.world import buffers, chain, content, fetch, keys, match, open_space, slots
from tests.waiting import PATIENCE_S

A = chain(*range(40))
Node = Callable[..., tuple[Store, Space]]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """Opens the store of a node: `node("a")`."""
    opened: list[Store] = []

    def open_node(name: str, capacity: int = 10 << 20, **tiers: Any) -> tuple[Store, Space]:
        made = load_settings(
            {
                "payloads": {
                    "fast": f"file://{tmp_path}/{name}",
                    "slow": f"file://{tmp_path}/shared",
                    "fast_capacity": capacity,
                    **tiers,
                },
                "segment": {"target_bytes": "1MiB"},
                "index": f"sqlite://{tmp_path}/index.sqlite",
            },
            environ={},
        )
        assert made.tiers is not None
        transfers, index = Transfers(made.transfers), open_index(made)
        tier = TieredPayloads(
            LocalPayloads(tmp_path / name),
            LocalPayloads(tmp_path / "shared"),
            Ledger(tmp_path / name, made.tiers.fast_capacity),
            later=transfers.write,
            write=made.tiers.write,
        )
        store = Store(
            Backends(
                settings=made,
                payloads=tier,
                index=BreakingIndex(index, Breaker("index", made.breaker)),
                maintenance=index,
                transfers=transfers,
                counters=Counters(),
                evidence=open_evidence(made),
                drop_copy=tier.drop_copy,
                tier=tier,
            )
        )
        opened.append(store)
        return store, open_space(store)

    yield open_node
    for store in opened:
        store.close()


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/??/*"))


def loads(space: Space, hashes: list[bytes] = A) -> list[bytes]:
    return fetch(space, hashes, match(space, hashes))


def test_one_node_saves_and_another_loads_through_its_own_folder(tmp_path: Path, node: Node) -> None:
    (_, mine), (store, theirs) = node("mine"), node("theirs")
    mine.save(slots(A))
    assert len(files(tmp_path / "mine")) == 1
    assert loads(theirs) == [content(one) for one in A]
    assert store.transfers.drain(PATIENCE_S)
    assert len(files(tmp_path / "theirs")) == 1
    # From here on the folder is enough.
    for path in files(tmp_path / "shared"):
        path.unlink()
    assert loads(theirs) == [content(one) for one in A]


def test_a_few_blocks_are_read_as_they_are_and_the_segment_follows(tmp_path: Path, node: Node) -> None:
    (_, mine), (store, theirs) = node("mine"), node("theirs")
    mine.save(slots(A))
    assert loads(theirs, A[:3]) == [content(one) for one in A[:3]]
    assert store.transfers.drain(PATIENCE_S)
    assert len(files(tmp_path / "theirs")) == 1


def test_damage_in_the_folder_costs_one_more_read(tmp_path: Path, node: Node) -> None:
    store, space = node("mine")
    space.save(slots(A))
    [path] = files(tmp_path / "mine")
    blob = bytearray(path.read_bytes())
    blob[-1000] ^= 1
    path.write_bytes(blob)
    assert loads(space) == [content(one) for one in A]
    assert store.counters.snapshot()["dropped_copies"] == 1
    assert store.counters.snapshot()["quarantined_segments"] == 0
    assert store.transfers.drain(PATIENCE_S)
    assert files(tmp_path / "mine")[0].read_bytes() == files(tmp_path / "shared")[0].read_bytes()


def test_damage_in_both_is_a_miss(tmp_path: Path, node: Node) -> None:
    store, space = node("mine")
    space.save(slots(A))
    for folder in ("mine", "shared"):
        [path] = files(tmp_path / folder)
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptPayload):
        loads(space)
    assert store.counters.snapshot()["quarantined_segments"] == 1
    assert match(space, A).blocks == 0


def test_write_back_is_loaded_here_at_once_and_elsewhere_after_its_upload(tmp_path: Path, node: Node) -> None:
    (store, mine), (_, theirs) = node("mine", write="back"), node("theirs", write="back")
    held = store.payloads._back._later  # type: ignore[attr-defined]
    jobs: list[Callable[[], None]] = []
    store.payloads._back._later = lambda nbytes, job: not jobs.append(job)  # type: ignore[attr-defined, func-returns-value]
    mine.save(slots(A))
    assert files(tmp_path / "shared") == []
    assert loads(mine) == [content(one) for one in A]
    # Late, not lost: the segment stays.
    with pytest.raises(KVStoreError):
        loads(theirs)
    assert match(theirs, A).blocks == 40
    store.payloads._back._later = held  # type: ignore[attr-defined]
    for job in jobs:
        job()
    assert loads(theirs) == [content(one) for one in A]


def test_a_restart_uploads_what_was_not(tmp_path: Path, node: Node) -> None:
    store, mine = node("mine", write="back")
    store.payloads._back._later = lambda nbytes, job: False  # type: ignore[attr-defined]
    mine.save(slots(A))
    store.close()
    assert files(tmp_path / "shared") == []
    store, mine = node("mine", write="back")
    assert loads(mine) == [content(one) for one in A]
    assert store.transfers.drain(PATIENCE_S)
    assert len(files(tmp_path / "shared")) == 1


def test_a_small_folder_serves_what_it_can(tmp_path: Path, node: Node) -> None:
    store, space = node("mine", capacity=1 << 20)
    chains = [chain(number, *range(59)) for number in range(30)]
    for one in chains:
        space.save(slots(one))
    for _ in range(2):
        for one in chains:
            assert loads(space, one) == [content(block) for block in one]
            store.transfers.drain(PATIENCE_S)
            assert sum(path.stat().st_size for path in files(tmp_path / "mine")) <= 1 << 20
    assert 0 < len(files(tmp_path / "mine")) < len(chains)
    check_ledger(store.payloads._ledger, tmp_path / "mine")  # type: ignore[attr-defined]


def test_an_evicted_segment_leaves_both(tmp_path: Path, node: Node) -> None:
    store, space = node("mine")
    space.save(slots(A))
    [run] = match(space, A).runs
    store.index.evict(space.id, [run.segment], delete_after_s=0, rule="admin")
    store.rounds.housekeep()
    assert files(tmp_path / "mine") == files(tmp_path / "shared") == []
    into = buffers(40)
    with pytest.raises(KVStoreError):
        space.load(run, keys(A), into)
