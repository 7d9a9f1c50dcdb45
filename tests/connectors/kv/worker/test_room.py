"""How much staging an engine takes where no setting says."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="the connectors' tests need the full set-up: make setup")

from connectors.kv.worker.room import Room, memory_bytes

GIB = 1 << 30
MIB = 1 << 20


@pytest.mark.parametrize(
    ("room", "piece", "sizes"),
    [
        # Llama 8B: 128 KiB a token, 8,192 tokens, two batches in flight.
        (Room(2 * GIB, 4, 100 * GIB), 32 * MIB, (256 * MIB, 2 * GIB + 32 * MIB)),
        # A node with little memory.
        (Room(2 * GIB, 4, GIB), 32 * MIB, (256 * MIB, GIB - 256 * MIB)),
        (Room(2 * GIB, 40, GIB), 32 * MIB, (512 * MIB, 512 * MIB)),
        # And with none: two pieces each.
        (Room(2 * GIB, 4, 0), 32 * MIB, (64 * MIB, 64 * MIB)),
        (Room(), 32 * MIB, (256 * MIB, 64 * MIB)),
    ],
)
def test_staging_follows_the_engine_within_its_share(room: Room, piece: int, sizes: tuple[int, int]) -> None:
    assert room.split(piece) == sizes


def test_a_containers_limit_counts(tmp_path: Path) -> None:
    whole = memory_bytes([])
    limits = [tmp_path / name for name in ("absent", "max", "some")]
    limits[1].write_text("max\n")
    assert memory_bytes(list(map(str, limits))) == whole
    limits[2].write_text(f"{whole // 2}\n")
    assert memory_bytes(list(map(str, limits))) == whole // 2
