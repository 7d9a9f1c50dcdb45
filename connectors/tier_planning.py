"""Which chunks of the offloading tier are read and written together: pure functions, no vLLM, no I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvstore.keys import ContentKey, block_key
from kvstore.ports import Run

#: vLLM's key of a chunk ends with its KV cache group, big-endian.
_GROUP_BYTES = 4

_T = TypeVar("_T")


def block_hash(key: bytes) -> bytes:
    """The block hash in vLLM's key of a chunk."""
    return key[:-_GROUP_BYTES]


def group_of(key: bytes) -> int:
    """The KV cache group in vLLM's key of a chunk."""
    return int.from_bytes(key[-_GROUP_BYTES:], "big")


def content_key(key: bytes) -> ContentKey:
    """The store's key for vLLM's key of a chunk."""
    return block_key(block_hash(key), group_of(key))


@dataclass(frozen=True, slots=True)
class Piece:
    """Adjacent slots of one segment, and the rows of the CPU tier that they go to."""

    run: Run
    keys: list[bytes]
    chunks: list[int]


def pieces(wanted: Iterable[tuple[bytes, int, Run]], most: int) -> list[Piece]:
    """(key, row, run of one slot) as few reads: adjacent slots together, `most` at a time."""
    out: list[Piece] = []
    last = -2
    for key, chunk, run in sorted(wanted, key=lambda one: (one[2].segment, one[2].slot)):
        piece = out[-1] if out else None
        if (
            piece is None
            or piece.run.segment != run.segment
            or run.slot != last + 1
            or len(piece.keys) == most
        ):
            out.append(Piece(run, [key], [chunk]))
        else:
            piece.keys.append(key)
            piece.chunks.append(chunk)
        last = run.slot
    return [
        Piece(
            Run(0, piece.run.segment, piece.run.slot, len(piece.keys), piece.run.record),
            piece.keys,
            piece.chunks,
        )
        for piece in out
    ]


@dataclass(frozen=True, slots=True)
class Row(Generic[_T]):
    """One chunk to save: where its last token is in its request (None: not known), and whose it is."""

    key: bytes
    chunk: int
    position: int | None
    owner: _T


def follows(last: Row[_T], row: Row[_T], span: Callable[[int], int]) -> bool:
    """Whether `row` is the chunk right after `last` in one chain; `span` is tokens per chunk of a group."""
    group = group_of(row.key)
    return (
        group == group_of(last.key)
        and last.position is not None
        and row.position is not None
        and row.position == last.position + span(group)
    )


def in_order(rows: Iterable[Row[_T]]) -> Sequence[Row[_T]]:
    """By group and position: vLLM hands chunks over as a set."""
    return sorted(rows, key=lambda row: (group_of(row.key), row.position or 0))
