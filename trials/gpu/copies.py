"""Right bytes: gathers and scatters on the device, against indexing by hand on the host."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from connectors.engine.tensors import PagedCache, Staging
from tests.connectors.engine.paging.pools import Pool, each, ids, strided
from trials.gpu.machine import Machine
from trials.gpu.pools import LAYOUTS, Twin, odd_pools, placed, put, separate, vllm_layouts, vllm_pools
from trials.gpu.report import NotRun, Report, Wrong

SECTION = "right bytes"
DTYPES = {
    "uint8": torch.uint8,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "f32": torch.float32,
    "fp8": torch.float8_e4m3fn,
}
COUNTS = (1, 3, 16, 100)
#: Most bytes of a pool whose places are beyond 31 bits.
_LARGE = 24 << 30
#: Words that are compared at once in it.
_STRETCH = 1 << 26
#: Odd, so that no two words of a pool are the same.
_FACTOR = 0x1E3779B97F4A7C15


def try_all(machine: Machine, report: Report) -> None:
    """Add the rows of this section."""
    for name, made in LAYOUTS.items():
        report.row(SECTION, name, lambda made=made: _in_dtypes(machine, made))
    for name in vllm_layouts():
        report.row(SECTION, f"vLLM: {name}", lambda name=name: _in_layout(machine, vllm_pools(name)))
    seeds = range(12 if machine.fake else 40)
    report.row(SECTION, f"{len(seeds)} odd ones", lambda: _in_layout(machine, odd_pools(seeds)))
    for name, layers in _LARGE_LAYOUTS.items():
        report.row(SECTION, f"beyond 2^31 bytes: {name}", lambda layers=layers: _large(machine, layers))
    report.row(SECTION, "the kernel beside torch", lambda: _kernel_beside_torch(machine))


def _in_dtypes(machine: Machine, made: Callable[[torch.dtype], list[Pool]]) -> str:
    counts = COUNTS if not machine.fake else COUNTS[:3]
    ways: dict[str, None] = {}
    for number, dtype in enumerate(DTYPES.values()):
        for pool in made(dtype):
            with machine.run(number) as said:
                _there_and_back(machine, pool, counts, ways)
            if said:
                raise Wrong(f"{dtype}: {said[0]}")
    return f"{len(DTYPES)} dtypes, {', '.join(map(str, counts))} blocks, by {', '.join(ways)}"


def _in_layout(machine: Machine, pools: list[Pool]) -> str:
    ways: dict[str, None] = {}
    for number, pool in enumerate(pools):
        with machine.run(number) as said:
            most = pool.blocks // len(pool.tables)
            _there_and_back(machine, pool, sorted({1, min(3, most), min(16, most)}), ways)
        if said:
            raise Wrong(f"pool {number}: {said[0]}")
    return f"{len(pools)} pools, by {', '.join(ways)}"


def way(cache: PagedCache) -> str:
    """Returns by what a cache's pages are copied."""
    pages = cache._pages
    if pages._view is not None:
        return "one view"
    return "the kernel" if pages._kernel is not None else "torch, layer by layer"


def _there_and_back(
    machine: Machine, pool: Pool, counts: list[int] | tuple[int, ...], ways: dict[str, None]
) -> None:
    """Gather some blocks, scatter others, and compare all that there is."""
    twin = placed(pool, machine)
    cache = PagedCache(twin.device.tables, pool.blocks)
    found = way(cache)
    if not machine.fake and found == "torch, layer by layer" and cache._pages._alike:
        raise Wrong("there is neither a view nor a kernel: the log says why the kernel failed")
    ways[found] = None
    staging = Staging(max(1 << 16, max(counts) * cache.slot_bytes), cache.slot_bytes, pin=True)
    for count in counts:
        _compare(machine, twin, cache, staging, count)


def _compare(machine: Machine, twin: Twin, cache: PagedCache, staging: Staging, count: int) -> None:
    twin.refill(count)
    pool = twin.host
    from_blocks, to_blocks = ids(pool, count, count), ids(pool, count + 1, count)
    chunk = staging.acquire(count * cache.slot_bytes, time.monotonic() + 10.0)
    chunk.tensor.fill_(0)
    cache.gather(from_blocks, chunk).wait()
    expected = b"".join(pool.slot(one) for one in each(from_blocks))
    if (found := b"".join(chunk.views(count, cache.slot_bytes))) != expected:
        raise Wrong(f"gather of {count}: {_where(found, expected)}")
    slots = [(~np.frombuffer(pool.slot(one), np.uint8)).tobytes() for one in each(from_blocks)]
    for view, slot in zip(chunk.views(count, cache.slot_bytes), slots, strict=True):
        view[:] = slot
    mark = cache.mark()
    machine.elsewhere(lambda: cache.scatter(to_blocks, chunk, mark)).wait()
    for one, slot in zip(each(to_blocks), slots, strict=True):
        put(pool, one, slot)
    if said := twin.differs(machine):
        raise Wrong(f"scatter of {count}: {said}")
    if not cache.layers_hold({table: blocks[:1] for table, blocks in to_blocks.items()}, chunk.tensor):
        raise Wrong(f"scatter of {count}: the layers' own tensors don't hold it")
    staging.release(chunk)


def _where(found: bytes, expected: bytes) -> str:
    wrong = [at for at, (one, other) in enumerate(zip(found, expected, strict=True)) if one != other]
    return f"{len(wrong)} of {len(expected)} bytes differ, the first at {wrong[0]}"


# ---- a large pool ------------------------------------------------------------------------------------

#: Layers of int64 words, as wide as the pages of 8 heads of 128 in bf16, of about as many bytes.
_WIDE = {"H": 8, "N": 16, "C": 64}


def _as_one(order: str, layers: int) -> Callable[[int], tuple[int, list[dict[str, int]]]]:
    """Returns sizes of layers in one memory: (blocks, strides of each)."""

    def made(nbytes: int) -> tuple[int, list[dict[str, int]]]:
        blocks = max(16, nbytes // (8 * layers * prod(_WIDE.values())))
        sizes, strides, step = _WIDE | {"L": layers, "B": blocks}, {}, 1
        for name in reversed(order):
            strides[name], step = step, step * sizes[name]
        return blocks, [strides | {"start": i * strides["L"], "memory": 0} for i in range(layers)]

    return made


def _apart(order: str, layers: int) -> Callable[[int], tuple[int, list[dict[str, int]]]]:
    one = _as_one(order, 1)

    def made(nbytes: int) -> tuple[int, list[dict[str, int]]]:
        blocks, [strides] = one(nbytes // layers)
        return blocks, [strides | {"memory": i} for i in range(layers)]

    return made


_LARGE_LAYOUTS = {
    "LBNHC": _as_one("LBNHC", 32),
    "LHBNC": _as_one("LHBNC", 32),
    "BLHNC": _as_one("BLHNC", 32),
    "a memory for each of 2 layers, heads outermost": _apart("LHBNC", 2),
}


def _pattern(start: int, end: int, memory: int, device: Any = "cpu") -> torch.Tensor:
    """Returns the words of a stretch of a memory."""
    return torch.arange(start, end, dtype=torch.int64, device=device) * _FACTOR + memory


def _large(machine: Machine, layout: Callable[[int], tuple[int, list[dict[str, int]]]]) -> str:
    """Copy blocks of a pool that is known by a formula, and count all words of it that have changed."""
    if machine.fake:
        nbytes, stretch = 1 << 22, 1 << 17
    else:
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        nbytes, stretch = min(_LARGE, free // 2), _STRETCH
        if nbytes < 9 << 29:
            raise NotRun(f"{free >> 20} MiB are free")
    blocks, layers = layout(nbytes)
    count, words = 16, prod(_WIDE.values())
    sizes = len({one["memory"] for one in layers}), blocks * words * len(layers)
    each_memory = sizes[1] // sizes[0]
    with machine.run(0) as said:
        fresh = machine.torch.empty
        memory = [fresh(each_memory, dtype=torch.int64, device=machine.device) for _ in range(sizes[0])]
        for number, one in enumerate(memory):
            for at in range(0, each_memory, stretch):
                end = min(at + stretch, each_memory)
                if machine.fake:
                    one[at:end].copy_(_pattern(at, end, number))
                else:
                    one[at:end] = _pattern(at, end, number, machine.device)
        shape = (blocks, _WIDE["H"], _WIDE["N"], _WIDE["C"])
        tensors = [
            memory[one["memory"]].as_strided(shape, [one[name] for name in "BHNC"], one.get("start", 0))
            for one in layers
        ]
        cache = PagedCache({0: tensors}, blocks)
        staging = Staging(2 * count * cache.slot_bytes, cache.slot_bytes, pin=True)
        chunk = staging.acquire(count * cache.slot_bytes, time.monotonic() + 10.0)
        chosen = torch.randperm(blocks - 2, generator=torch.Generator().manual_seed(1))[: count - 2] + 1
        from_blocks = [blocks - 1, 0, *chosen.tolist()]
        cache.gather({0: from_blocks}, chunk).wait()
        found = _plain(chunk.tensor)[: count * cache.slot_bytes].view(torch.int64)
        expected = torch.cat([_page(one, block) for block in from_blocks for one in layers])
        if not torch.equal(found, expected):
            raise Wrong(f"gather: {int((found != expected).sum())} of {expected.numel()} words differ")
        # Every bit of the named blocks changes, so that whatever has not is seen as well.
        to_blocks = from_blocks[::-1]
        slots = torch.cat([~_page(one, block) for block in to_blocks for one in layers])
        found.copy_(slots)
        mark = cache.mark()
        machine.elsewhere(lambda: cache.scatter({0: to_blocks}, chunk, mark)).wait()
        changed = 0
        for number, one in enumerate(memory):
            for at in range(0, each_memory, stretch):
                end = min(at + stretch, each_memory)
                if machine.fake:
                    changed += int((machine.down(one[at:end]) != _pattern(at, end, number)).sum())
                else:
                    changed += int((one[at:end] != _pattern(at, end, number, machine.device)).sum())
        if changed != slots.numel():
            raise Wrong(f"scatter: {changed} words have changed, {slots.numel()} should have")
        for i, block in enumerate(to_blocks):
            for j, tensor in enumerate(tensors):
                at = (i * len(tensors) + j) * words
                if not torch.equal(machine.down(tensor[block]).flatten(), slots[at : at + words]):
                    raise Wrong(f"scatter: layer {j} of block {block} differs")
        text = f"{each_memory * sizes[0] * 8 / 2**30:.1f} GiB, by {way(cache)}"
    if said:
        raise Wrong(said[0])
    return text


def _page(layer: dict[str, int], block: int) -> torch.Tensor:
    """Returns the words of one page, by the formula."""
    at = torch.tensor(layer.get("start", 0) + block * layer["B"])
    for name in "HNC":
        at = at.unsqueeze(-1) + torch.arange(_WIDE[name]) * layer[name]
    return at.flatten() * _FACTOR + layer["memory"]


def _plain(host: Any) -> torch.Tensor:
    """Returns memory of the host as torch's own tensor, on the fake accelerator as well."""
    return getattr(host, "raw", host)


# ---- the kernel --------------------------------------------------------------------------------------


def _kernel_beside_torch(machine: Machine) -> str:
    if machine.fake:
        return _interpreted()
    pools = [*odd_pools(range(1, 40, 2)), Pool({0: separate(_KERNEL, torch.bfloat16)}, _KERNEL["B"])]
    pools.append(Pool({0: strided("LHBNC", _KERNEL, torch.bfloat16)}, _KERNEL["B"]))
    with machine.run(0):
        for number, pool in enumerate(pools):
            twin = placed(pool, machine)
            cache, by_torch = (PagedCache(twin.device.tables, pool.blocks) for _ in range(2))
            # The kernel for one, whatever a view could do, and neither for the other.
            pages = cache._pages
            pages._view, pages._kernel = None, pages._launched()
            if pages._kernel is None:
                raise Wrong("it can't be compiled: the log says why")
            plain = by_torch._pages
            plain._view = plain._kernel = None
            plain._first[:], plain._step[:] = 0, 1
            staging = Staging(1 << 20, 4 * cache.slot_bytes, pin=True)
            mine, theirs = (staging.acquire(2 * cache.slot_bytes, 0.0) for _ in range(2))
            twin.refill(number)
            blocks, others = ids(pool, number, 2), ids(pool, number + 1, 2)
            cache.gather(blocks, mine).wait()
            by_torch.gather(blocks, theirs).wait()
            if not torch.equal(mine.tensor, theirs.tensor):
                raise Wrong(f"pool {number}: a gather differs")
            mine.tensor.bitwise_not_()
            cache.scatter(others, mine, cache.mark()).wait()
            by_kernel = [machine.down(one) for one in twin.memory]
            twin.refill(number)
            by_torch.scatter(others, mine, by_torch.mark()).wait()
            if not all(torch.equal(a, machine.down(b)) for a, b in zip(by_kernel, twin.memory, strict=True)):
                raise Wrong(f"pool {number}: a scatter differs")
    return f"{len(pools)} pools, compiled for this device"


_KERNEL = {"B": 24, "H": 8, "N": 16, "C": 128, "L": 4}


def _interpreted() -> str:
    """Let Triton interpret the kernel, in a process of its own: Triton decides that at its import."""
    try:
        import triton  # noqa: F401
    except ImportError:
        raise NotRun("TRITON IS NOT HERE: the kernel was neither compiled nor interpreted") from None
    command = [sys.executable, "-W", "ignore", "-m", "trials.gpu.interpreted"]
    done = subprocess.run(
        command,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise Wrong(f"interpreted: {done.stderr.splitlines()[-1]}")
    return f"{done.stdout.strip()}, interpreted"
