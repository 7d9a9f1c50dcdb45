"""Sizes of blocks and segments."""

from __future__ import annotations

from typing import Final

from schemas.namespace import Namespace
from schemas.settings import KVSettings, Settings

#: Staging memory where nothing says how much, and nothing is known of an engine.
STAGING_BYTES: Final = 256 << 20
#: Redis' memory, as fitted to what was measured (docs/production.md): of a block, of a segment, of each of
#: its payloads beside the first, of a namespace's journal and of its sketches.
ENTRY_BYTES: Final = 33
SEGMENT_BYTES: Final = 266
PART_BYTES: Final = 8
JOURNAL_BYTES: Final = 1_900_000
SKETCH_BYTES: Final = 5 << 19
#: Guessed size of an encoder item; they differ.
_ITEM_BYTES: Final = 1 << 20


def staging_bytes(settings: KVSettings) -> int:
    """Returns how many bytes of staging memory there are for one direction, where no engine says more."""
    return settings.staging_bytes or STAGING_BYTES


def segment_blocks(settings: Settings, block_bytes: int, parts: int = 1) -> int:
    """Returns how many blocks of `block_bytes`, each cut into `parts` parts, a segment has at most.

    The target size of one part, the maximum count and the size of staging bound it.
    """
    most = min(settings.segment.target_bytes, staging_bytes(settings.kv))
    return max(1, min(settings.segment.max_blocks, most * parts // block_bytes))


def typical_block_bytes(namespace: Namespace) -> int:
    """Returns the raw bytes of a block on all ranks, by which an index is sized for a namespace."""
    return max((group.slot_bytes for group in namespace.groups), default=_ITEM_BYTES)


def index_bytes(
    blocks: int, segments: int, parts: int = 1, *, namespaces: int = 1, second_use: bool = False
) -> int:
    """Returns about how much memory an index in Redis takes: of so many blocks in segments of `parts`
    payloads each, with or without `admission.second_use`."""
    each = JOURNAL_BYTES + (SKETCH_BYTES if second_use else 0)
    return blocks * ENTRY_BYTES + segments * (SEGMENT_BYTES + PART_BYTES * (parts - 1)) + namespaces * each


def redis_memory(index: int) -> int:
    """Returns the `maxmemory` that docs/production.md recommends for an index of so many bytes."""
    return max(512_000_000, 2 * index + 256_000_000)
