"""How large blocks are, and how many go into one segment, by each of the three bounds."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.rules.segments import segment_blocks, typical_block_bytes
from schemas.namespace import GroupSpec, Namespace
from schemas.settings import Settings

MIB = 1 << 20


@pytest.mark.parametrize(
    ("block_bytes", "parts", "expected"),
    [
        (1000, 1, 64),  # the most that a segment may have
        (MIB, 1, 32),  # the target size
        (5 * MIB, 1, 6),
        (64 * MIB, 1, 1),  # never less than one
        (2 * MIB, 2, 32),  # of each part it is the size that counts
    ],
)
def test_the_least_of_the_bounds_decides(block_bytes: int, parts: int, expected: int) -> None:
    settings = Settings.model_validate(
        {
            "payloads": "memory://s",
            "index": "memory://s",
            "segment": {"target_bytes": 32 * MIB, "max_blocks": 64},
        }
    )
    assert segment_blocks(settings, block_bytes, parts) == expected


def test_a_segment_is_no_larger_than_what_staging_holds() -> None:
    settings = Settings.model_validate(
        {"payloads": "memory://s", "index": "memory://s", "kv": {"staging_bytes": 8 * MIB}}
    )
    assert segment_blocks(settings, MIB) == 8


def test_a_typical_block_is_the_largest_groups_and_of_items_a_guess() -> None:
    groups = [
        GroupSpec(kind="full", block_tokens=4, dtype="F32", shape=(layers, 1, 4, 2)) for layers in (2, 3, 1)
    ]
    common: dict[str, Any] = {"model": "m", "weights": "w", "dtype": "float32"}
    kv = Namespace(kind="kv", **common, block_tokens=4, hash_algo="sha256", groups=tuple(groups))
    assert typical_block_bytes(kv) == 3 * 4 * 2 * 4
    assert typical_block_bytes(Namespace(kind="ec", **common)) == MIB
