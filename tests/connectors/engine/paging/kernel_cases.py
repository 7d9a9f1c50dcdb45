"""What `test_kernel` runs in processes of its own: Triton decides at its import whether it interprets.

    TRITON_INTERPRET=1 python -m tests.connectors.engine.paging.kernel_cases interpret FOLDER
    python -m tests.connectors.engine.paging.kernel_cases compile

Each prints one JSON object.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from connectors.engine.paging import kernel
from connectors.engine.paging.pages import GroupPages
from connectors.engine.tensors import Chunk, PagedCache
from tests.connectors.engine.paging.pools import ORDERS, Pool, each, ids, odd, strided


def launched(cache: PagedCache) -> GroupPages:
    """Let the kernel copy this cache's pages, as it would on CUDA."""
    pages = cache._pages
    pages._view, pages._kernel = None, pages._launched()
    assert pages._kernel is not None
    return pages


def compared(pool: Pool, seed: int, seen: Counter[str], count: int = 2) -> None:
    """Gather and scatter some blocks by the kernel, and by torch."""
    pool.fill(seed)
    cache, by_torch = PagedCache(pool.tables, pool.blocks), PagedCache(pool.tables, pool.blocks)
    by_torch._pages._view = None
    by_torch._pages._first[:], by_torch._pages._step[:] = 0, 1
    before = pool.bytes()
    pages = launched(cache)
    assert pool.bytes() == before, "what it compiles with changes nothing"
    from_blocks, to_blocks = ids(pool, seed, count), ids(pool, seed + 1, count)
    mine, theirs = (Chunk(torch.zeros(count * cache.slot_bytes, dtype=torch.uint8)) for _ in range(2))
    cache.gather(from_blocks, mine)
    by_torch.gather(from_blocks, theirs)
    assert torch.equal(mine.tensor, theirs.tensor)
    assert bytes(mine.views(1, cache.slot_bytes)[0]) == pool.slot(each(from_blocks)[0])
    mine.tensor.bitwise_not_()
    cache.scatter(to_blocks, mine, None)
    after, slots = pool.bytes(), [pool.slot(one) for one in each(to_blocks)]
    assert slots == [bytes(view) for view in mine.views(count, cache.slot_bytes)]
    # The same again, by torch, on what was there before.
    pool.fill(seed)
    by_torch.scatter(to_blocks, mine, None)
    assert pool.bytes() == after
    seen["cases"] += 1
    seen[f"aligned {pages._aligned}"] += 1
    seen[f"dimensions {len(pages.inner)}"] += 1


def far(folder: Path) -> None:
    """A head that begins more than 31 bits of words behind the one before it, in a file with holes."""
    blocks, content = 1 << 20, 2201
    file = folder / "pool"
    size = 2 * blocks * content
    with file.open("wb") as raw:
        raw.truncate(size)
    whole = torch.from_file(str(file), shared=True, size=size, dtype=torch.uint8)
    layer = whole.view(2, blocks, 1, content).transpose(0, 1)
    assert layer.stride(1) > 1 << 31
    cache = PagedCache({0: [layer]}, blocks)
    launched(cache)
    slots = torch.randint(0, 256, (2, 2 * content), dtype=torch.uint8)
    chunk = Chunk(slots.clone().view(-1))
    cache.scatter({0: [blocks - 1, 5]}, chunk, None)
    for slot, block in zip(slots, (blocks - 1, 5), strict=True):
        assert torch.equal(layer[block].flatten(), slot)
    chunk.tensor.zero_()
    cache.gather({0: [blocks - 1, 5]}, chunk)
    assert torch.equal(chunk.tensor, slots.view(-1))


def interpret(folder: Path) -> dict[str, int]:
    seen: Counter[str] = Counter()
    for seed in range(150):
        pool = odd(seed, separate=seed % 3 > 0)
        compared(pool, seed, seen)
    for order in ORDERS:
        # More words than one program copies, and not a multiple of them.
        sizes = {"B": 6, "H": 3, "N": 32, "C": 40, "L": 2}
        compared(Pool({0: strided(order, sizes, torch.bfloat16)}, 6), 1, seen, count=3)
    far(folder)
    # A block twice, as no scatter but any gather may be told.
    pool = odd(4)
    pool.fill(4)
    cache = PagedCache(pool.tables, pool.blocks)
    launched(cache)
    chunk = Chunk(torch.zeros(2 * cache.slot_bytes, dtype=torch.uint8))
    cache.gather({table: [1, 1] for table in pool.tables}, chunk)
    assert [bytes(view) for view in chunk.views(2, cache.slot_bytes)] == [
        pool.slot(dict.fromkeys(pool.tables, 1))
    ] * 2
    return dict(seen)


def compiled() -> dict[str, dict[str, int]]:
    """How many accesses of each width the machine code has, by accelerator, alignment and direction."""
    names = kernel.copy_page.arg_names
    found: dict[str, dict[str, int]] = {}
    for target in (GPUTarget("cuda", 80, 32), GPUTarget("cuda", 90, 32), GPUTarget("hip", "gfx942", 64)):
        for aligned in (16, 8):
            for into in (False, True):
                calls: list[tuple[Any, ...]] = []
                launch = mock.MagicMock()
                launch.__getitem__.side_effect = lambda grid: lambda *args: calls.append(args)
                with mock.patch.object(kernel, "copy_page", launch):
                    slots = torch.zeros(2, 8, 16, 64, dtype=torch.int64)
                    kernel.copy_pages(slots, slots, (1 << 33, 64, 1), into=into, aligned=aligned)
                constants = dict(zip(names[2:], calls[0][2:], strict=True))
                signature = {"addresses": "*i64", "slots": "*i64"} | dict.fromkeys(names[2:], "constexpr")
                both = {(0,): [["tt.divisibility", 16]], (1,): [["tt.divisibility", 16]]}
                made = compile(ASTSource(kernel.copy_page, signature, constants, both), target=target)
                code = made.asm["ptx" if target.backend == "cuda" else "amdgcn"]
                widths = Counter(
                    16 if "v2.b64" in line or "dwordx4" in line else 8
                    for line in code.splitlines()
                    if "global" in line
                    and ("ld." in line or "st." in line or "_load_" in line or "_store_" in line)
                )
                name = f"{target.arch} aligned {aligned} {'into' if into else 'from'} pages"
                found[name] = {str(width): count for width, count in widths.items()}
    return found


if __name__ == "__main__":
    what, *rest = sys.argv[1:]
    print(json.dumps(interpret(Path(*rest)) if what == "interpret" else compiled()))
