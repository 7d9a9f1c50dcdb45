"""Which chunks of the offloading tier are read and written together: pure functions, no vLLM, no I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from connectors.planning import joined, split_run
from kvstore.index.port import Run
from kvstore.keys import ContentKey, block_key

#: vLLM's key of a chunk ends with its KV cache group, big-endian.
_GROUP_BYTES = 4

_T = TypeVar("_T")


def block_hash(key: bytes) -> bytes:
    """Returns the block hash in vLLM's key of a chunk."""
    return key[:-_GROUP_BYTES]


def group_of(key: bytes) -> int:
    """Returns the KV cache group in vLLM's key of a chunk."""
    return int.from_bytes(key[-_GROUP_BYTES:], "big")


def content_key(key: bytes) -> ContentKey:
    """Returns the store's key for vLLM's key of a chunk."""
    return block_key(block_hash(key), group_of(key))


@dataclass(frozen=True, slots=True)
class Read:
    """Adjacent slots of one segment, and the rows of the CPU tier that they go to."""

    run: Run
    keys: list[bytes]
    chunks: list[int]


def reads(wanted: Iterable[tuple[bytes, int, Run]], most: int) -> list[Read]:
    """Returns reads of all (key, row, run of one slot): adjacent slots together, at most `most` in one."""
    ordered = sorted(wanted, key=lambda one: (one[2].segment, one[2].slot))
    runs = joined(Run(at, run.segment, run.slot, 1, run.record) for at, (_, _, run) in enumerate(ordered))
    out = []
    for part in (part for run in runs for part in split_run(run, most)):
        mine = ordered[part.start : part.start + part.count]
        out.append(Read(part, [key for key, _, _ in mine], [chunk for _, chunk, _ in mine]))
    return out


@dataclass(frozen=True, slots=True)
class Row(Generic[_T]):
    """One chunk to save, in the row `chunk` of the CPU tier, and its owner."""

    key: bytes
    chunk: int
    #: The number of its request's tokens up to its end, or None if that is not known.
    position: int | None
    owner: _T


def follows(last: Row[_T], row: Row[_T], span: Callable[[int], int]) -> bool:
    """Returns whether `row` comes right after `last` in one chain; `span` is tokens per chunk of a group."""
    group = group_of(row.key)
    return (
        group == group_of(last.key)
        and last.position is not None
        and row.position is not None
        and row.position == last.position + span(group)
    )


def in_order(rows: Iterable[Row[_T]]) -> Sequence[Row[_T]]:
    """Returns the rows by group and position: vLLM hands chunks over as a set."""
    return sorted(rows, key=lambda row: (group_of(row.key), row.position or 0))
