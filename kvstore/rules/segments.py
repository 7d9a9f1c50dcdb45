"""Sizes of blocks and segments."""

from __future__ import annotations

from typing import Final

from schemas.namespace import Namespace
from schemas.settings import KVSettings, Settings

#: Staging memory where nothing says how much, and nothing is known of an engine.
STAGING_BYTES: Final = 256 << 20
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
