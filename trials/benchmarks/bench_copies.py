"""Copies between pages and slots: how many operations a chunk takes, and what they cost the calling thread.

    python -m trials.benchmarks.bench_copies [--repeat 30] [--json FILE]

A chunk is a segment of 32 MiB, of the KV geometry of a Llama of 8 billion parameters (32 layers, 8 heads of
128, blocks of 16 tokens) in some layouts, and of a Gemma-like model: 50 layers with windows in 5 block tables
that share one memory. Beside what the connectors do, layer by layer what they did until then.

    operations   what torch runs for a chunk, and copies of ids to the device
    calls        of the same shape with pages of 64 bytes: the calls are left, not the bytes. On a GPU the
                 engine's thread pays for these alone, and for launches
    copy         of all the bytes, on one thread of this machine

Of a layer that has memory of its own each, a device's kernel needs one launch; that isn't timed here.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from connectors.engine.paging.pages import BITS
from connectors.engine.tensors import Chunk, PagedCache
from tests.connectors.engine.paging.pools import Operations, Pool, strided

SEGMENT_BYTES = 32 << 20
#: Tokens of a block, and its layers, heads and elements of a head.
LLAMA = {"N": 16, "L": 32, "H": 8, "C": 256}
GEMMA = {"N": 16, "L": 10, "H": 16, "C": 256}
#: Pages of 64 bytes, by the same operations.
TINY = {"N": 4, "H": 2, "C": 4}


class LayerByLayer:
    """What was done before: elements as they are, one index per table, and a view that joins a table's layers
    for gathers, where there is one table."""

    def __init__(self, pool: Pool) -> None:
        self._pool, self._joined = pool, None
        layers = {table: [self._by_block(one) for one in layers] for table, layers in pool.tables.items()}
        self._tables = {
            table: [one.view(BITS[one.element_size()]) for one in layers] for table, layers in layers.items()
        }
        first, *others = [layer for layers in self._tables.values() for layer in layers]
        self._layers = 1 + len(others)
        steps = {b.storage_offset() - a.storage_offset() for a, b in pairwise([first, *others])}
        one = all(o.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() for o in others)
        if len(self._tables) == 1 and one and len(steps) == 1:
            self._joined = first.as_strided(
                (first.shape[0], self._layers, *first.shape[1:]),
                (first.stride(0), steps.pop(), *first.stride()[1:]),
                first.storage_offset(),
            )

    def _by_block(self, cache: torch.Tensor) -> torch.Tensor:
        if cache.shape[0] == self._pool.blocks:
            return cache
        return cache.unflatten(0, (self._pool.blocks, -1)).transpose(1, 2)

    def _parts(self, blocks: dict[int, list[int]], chunk: Chunk) -> Any:
        [first, *_] = next(iter(self._tables.values()))
        count, at = len(next(iter(blocks.values()))), 0
        slots = chunk.tensor.view(first.dtype).view(count, self._layers, *first.shape[1:])
        for table, layers in self._tables.items():
            yield torch.tensor(blocks[table]), layers, slots[:, at : at + len(layers)]
            at += len(layers)

    def gather(self, blocks: dict[int, list[int]], chunk: Chunk) -> None:
        for index, layers, part in self._parts(blocks, chunk):
            if self._joined is not None:
                torch.index_select(self._joined, 0, index, out=part)
                continue
            for i, layer in enumerate(layers):
                part[:, i].copy_(layer.index_select(0, index))

    def scatter(self, blocks: dict[int, list[int]], chunk: Chunk) -> None:
        for index, layers, part in self._parts(blocks, chunk):
            for i, layer in enumerate(layers):
                layer.index_copy_(0, index, part[:, i])


class Now:
    """What is done now."""

    def __init__(self, pool: Pool) -> None:
        self.cache = PagedCache(pool.tables, pool.blocks)

    def gather(self, blocks: dict[int, list[int]], chunk: Chunk) -> None:
        self.cache.gather(blocks, chunk)

    def scatter(self, blocks: dict[int, list[int]], chunk: Chunk) -> None:
        self.cache.scatter(blocks, chunk, None)


def _llama(order: str, ratio: int = 1) -> Callable[[dict[str, int], int], Pool]:
    def made(sizes: dict[str, int], blocks: int) -> Pool:
        whole = {**LLAMA, **sizes, "B": blocks}
        return Pool({0: strided(order, whole, torch.bfloat16, ratio=ratio)}, blocks)

    return made


def _separate(sizes: dict[str, int], blocks: int) -> Pool:
    whole = {**LLAMA, **sizes, "B": blocks, "L": 1}
    layers = [strided("LBNHC", whole, torch.bfloat16)[0] for _ in range(LLAMA["L"])]
    return Pool({0: layers}, blocks)


def _gemma(sizes: dict[str, int], blocks: int) -> Pool:
    layers = strided("LBNHC", {**GEMMA, **sizes, "B": blocks}, torch.bfloat16)
    return Pool({table: list(layers) for table in range(5)}, blocks)


LAYOUTS: dict[str, Callable[[dict[str, int], int], Pool]] = {
    "LBNHC, vLLM's default": _llama("LBNHC"),
    "LBHNC": _llama("LBHNC"),
    "BLHNC": _llama("BLHNC"),
    "split kernel blocks": _llama("LBNHC", ratio=2),
    "separate layers": _separate,
    "Gemma-like, 5 tables": _gemma,
}


def _chosen(pool: Pool, count: int) -> dict[int, list[int]]:
    """Blocks that are all different, and not in order."""
    drawn = torch.randperm(pool.blocks, generator=torch.Generator().manual_seed(0)).tolist()
    return {table: drawn[i * count : (i + 1) * count] for i, table in enumerate(pool.tables)}


def _timed(calls: Sequence[Callable[[], None]], repeat: int) -> list[float]:
    """Median seconds of this thread for each call, one after the other in every round."""
    seen: list[list[float]] = [[] for _ in calls]
    for _ in range(repeat + 1):
        for call, times in zip(calls, seen, strict=True):
            began = time.thread_time()
            call()
            times.append(time.thread_time() - began)
    return [statistics.median(times[1:]) for times in seen]


def measure(made: Callable[[dict[str, int], int], Pool], segment_bytes: int, repeat: int) -> dict[str, Any]:
    row: dict[str, Any] = {}
    slot_bytes = Now(made({}, 2)).cache.slot_bytes
    count = max(1, segment_bytes // slot_bytes)
    for what, sizes, unit in (("calls_us", TINY, 1e6), ("copy_ms", {}, 1e3)):
        pool = made(sizes, 8 * count)
        pool.fill(0)
        now, before, blocks = Now(pool), LayerByLayer(pool), _chosen(pool, count)
        mine, theirs = (Chunk(torch.zeros(count * now.cache.slot_bytes, dtype=torch.uint8)) for _ in range(2))
        for name in ("gather", "scatter"):
            way = {"before": getattr(before, name), "now": getattr(now, name)}
            chunks = {"before": theirs, "now": mine}
            times = _timed([lambda k=k: way[k](blocks, chunks[k]) for k in way], repeat)
            row.setdefault(name, {})[what] = dict(zip(way, (one * unit for one in times), strict=True))
            assert torch.equal(mine.tensor, theirs.tensor), "the two ways differ"
            for key in way:
                with Operations() as seen:
                    way[key](blocks, chunks[key])
                row[name].setdefault("operations", {})[key] = len(seen.names)
        row["word_bytes"] = now.cache._pages.dtype.itemsize
    tables = len(pool.tables)
    joined = now.cache._pages.operations == 1
    return row | {"slots": count, "uploads": {"before": tables, "now": 1}, "kernel": not joined}


def run(segment_bytes: int = SEGMENT_BYTES, repeat: int = 30) -> dict[str, Any]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows = {name: measure(made, segment_bytes, repeat) for name, made in LAYOUTS.items()}
    finally:
        torch.set_num_threads(threads)
    return {
        "machine": f"{platform.machine()}, {platform.python_version()}, torch {torch.__version__}",
        "segment_bytes": segment_bytes,
        "layouts": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeat", type=int, default=30)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    report = run(repeat=options.repeat)
    print(f"a chunk of 32 MiB: before, now ({report['machine']})")
    print(f"{'':32s}{'operations':>14s}{'ids':>8s}{'calls, us':>22s}{'copy, ms':>22s}")
    for name, row in report["layouts"].items():
        for what in ("gather", "scatter"):
            one = row[what]
            operations, calls, copy = one["operations"], one["calls_us"], one["copy_ms"]
            on_device = "*" if row["kernel"] else " "
            print(
                f"{name:24s}{what:8s}{operations['before']:8d} {operations['now']:4d}{on_device}"
                f"{row['uploads']['before']:4d} {row['uploads']['now']:3d}"
                + "".join(
                    f"{pair['before']:9.1f} {pair['now']:7.1f} {pair['now'] / pair['before']:5.2f}"
                    for pair in (calls, copy)
                )
            )
    print("* on CUDA one launch of a kernel, with Triton")
    if options.json:
        options.json.write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
