"""One operation each way, and no byte beside the right ones, over pages that nobody lays out so.

Those that vLLM lays out are in tests/trials/accelerator/test_operations.py.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the connectors' tests need the full set-up: make setup")

from connectors.engine.tensors import Chunk, PagedCache
from tests.connectors.engine.paging.pools import ORDERS, Operations, Pool, each, ids, odd, strided

pytestmark = pytest.mark.engine  # the full set-up, not an engine

GATHER, SCATTER = ["aten.index_select.out"], ["aten.index_copy_.default"]


def there_and_back(pool: Pool, seed: int, count: int = 2) -> tuple[list[str], list[str]]:
    """Gather some blocks, scatter them to others, and compare all that there is. Returns the operations."""
    pool.fill(seed)
    cache = PagedCache(pool.tables, pool.blocks)
    chunk = Chunk(torch.zeros(count * cache.slot_bytes, dtype=torch.uint8))
    from_blocks, to_blocks = ids(pool, seed, count), ids(pool, seed + 1, count)
    expected = [pool.slot(one) for one in each(from_blocks)]
    with Operations() as gathered:
        cache.gather(from_blocks, chunk)
    assert [bytes(view) for view in chunk.views(count, cache.slot_bytes)] == expected

    before, there = pool.bytes(), Chunk(torch.zeros_like(chunk.tensor))
    cache.gather(to_blocks, there)
    with Operations() as scattered:
        cache.scatter(to_blocks, chunk, None)
    assert [pool.slot(one) for one in each(to_blocks)] == expected
    # Nothing else was written: with what these blocks held, all is as it was.
    cache.scatter(to_blocks, there, None)
    assert pool.bytes() == before
    return gathered.names, scattered.names


@pytest.mark.parametrize("part", range(8))
def test_pages_of_any_size_at_any_place(part: int) -> None:
    joined = 0
    for seed in range(part * 40, part * 40 + 40):
        joined += there_and_back(odd(seed), seed) == (GATHER, SCATTER)
    assert joined == 40


def test_layers_with_memory_of_their_own_take_an_operation_each() -> None:
    for seed in range(40):
        pool = odd(seed, separate=True)
        layers = len(pool.layers)
        one = (GATHER, SCATTER)
        many = tuple(["aten.clone.default"] + way * layers for way in one)
        assert there_and_back(pool, seed) == (one if layers == 1 else many)


def test_layers_whose_pages_are_strided_in_other_ways() -> None:
    """In one memory, which a single view can't show then, and in two."""
    raw = torch.zeros(2, 8, 2 * 4 * 6, dtype=torch.bfloat16)
    for one, other in ((raw[0], raw[1]), (raw[0].clone(), raw[1].clone())):
        layers = [one.view(8, 2, 4, 6), other.view(8, 4, 2, 6).transpose(1, 2)]
        there_and_back(Pool({0: layers}, 8), 1)
        assert PagedCache({0: layers}, 8)._pages.operations == 2


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("content", "gap", "start", "dtype", "word"),
    [
        (8, 0, 0, torch.bfloat16, torch.int64),
        (8, 0, 4, torch.bfloat16, torch.int64),
        (8, 0, 2, torch.bfloat16, torch.int32),  # begins at 4 bytes
        (8, 0, 1, torch.bfloat16, torch.int16),
        (8, 6, 0, torch.bfloat16, torch.int32),  # pages 12 bytes apart
        (8, 0, 0, torch.uint8, torch.int64),
        (1, 0, 0, torch.float64, torch.int64),
        (3, 0, 0, torch.uint8, torch.uint8),
    ],
)
def test_words_are_as_wide_as_places_allow(
    order: str, content: int, gap: int, start: int, dtype: torch.dtype, word: torch.dtype
) -> None:
    sizes = {"B": 6, "H": 3, "N": 5, "C": content, "L": 2}
    pages = PagedCache({0: strided(order, sizes, dtype, gap=gap, start=start)}, 6)._pages
    assert pages.dtype == word


def test_words_begin_where_the_memory_does() -> None:
    raw = torch.from_numpy(np.zeros(2 * 6 * 64 + 8, np.uint8)[2:])[: 2 * 6 * 64].view(2, 6, 2, 4, 8)
    assert raw.data_ptr() % 4 == 2 and raw.storage_offset() == 0
    there_and_back(Pool({0: list(raw)}, 6), 5)
    assert PagedCache({0: list(raw)}, 6)._pages.dtype == torch.int16


def test_pages_of_one_run_are_one_run() -> None:
    """Rows of 6 bytes are moved by 8 where one follows the other."""
    sizes = {"B": 6, "H": 2, "N": 4, "C": 3, "L": 2}
    runs = {
        order: PagedCache({0: strided(order, sizes, torch.bfloat16)}, 6)._pages
        for order in ("LBHNC", "LHBNC", "LBNHC")
    }
    found = {order: (pages.dtype, pages.inner) for order, pages in runs.items()}
    assert found == {
        "LBHNC": (torch.int64, (6,)),
        "LHBNC": (torch.int64, (2, 3)),
        "LBNHC": (torch.int16, (2, 4, 3)),
    }


def test_a_dimension_that_is_not_dense_is_moved_by_its_elements() -> None:
    raw = torch.zeros(2, 6, 2, 4, 8, dtype=torch.uint8)
    layers = [layer[..., ::2] for layer in raw]
    there_and_back(Pool({0: layers}, 6), 3)
    assert PagedCache({0: layers}, 6)._pages.dtype == torch.uint8


def test_places_beyond_31_bits(tmp_path: Path) -> None:
    """Heads and layers of a pool of 4 GiB, of which little is touched."""
    blocks, tokens, content = 1 << 20, 1, 1100
    file = tmp_path / "pool"
    size = 4 * blocks * content * tokens
    with file.open("wb") as raw:
        raw.truncate(size)
    pool = torch.from_file(str(file), shared=True, size=size, dtype=torch.uint8)
    pool = pool.view(2, 2, blocks, tokens, content).transpose(1, 2)  # LHBNC
    layers = [pool[0], pool[1]]
    cache = PagedCache({0: layers}, blocks)
    assert layers[1].storage_offset() > 1 << 31 and cache._pages.operations == 1
    chosen = [blocks - 1, 0, blocks - 7]
    slots = torch.randint(0, 256, (3, 2, 2, tokens, content), dtype=torch.uint8)
    chunk = Chunk(slots.clone().view(-1))
    cache.scatter({0: chosen}, chunk, None)
    for slot, block in zip(slots, chosen, strict=True):
        assert all(torch.equal(layer[block], part) for layer, part in zip(layers, slot, strict=True))
    chunk.tensor.zero_()
    cache.gather({0: chosen}, chunk)
    assert torch.equal(chunk.tensor, slots.view(-1))
