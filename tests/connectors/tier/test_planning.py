"""Which chunks of the offloading tier go together: pure functions."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from connectors.tier.planning import Read, Row, content_key, follows, group_of, in_order, reads
from kvstore.index.port import Run
from kvstore.keys import block_key
from schemas.records import PartRecord, SegmentRecord

HASH = bytes(range(32))


def run(segment: int, slot: int) -> Run:
    record = SegmentRecord((PartRecord(4096, (8,) * 64),), 64, "none", 0)
    return Run(0, bytes([segment]) * 8, slot, 1, record)  # type: ignore[arg-type]


def key(group: int, number: int = 0) -> bytes:
    return HASH[:-1] + bytes([number]) + group.to_bytes(4, "big")


def test_keys_are_those_of_the_store() -> None:
    assert content_key(key(3)) == block_key(HASH[:-1] + b"\0", 3)
    assert group_of(key(70000)) == 70000


@given(
    wanted=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 20)), unique=True, max_size=40),
    most=st.integers(1, 6),
)
def test_reads_cover_everything_once_in_adjacent_slots(wanted: list[tuple[int, int]], most: int) -> None:
    asked = [(bytes([segment, slot]), number, run(segment, slot)) for number, (segment, slot) in
             enumerate(wanted)]  # fmt: skip
    made: list[Read] = reads(asked, most)
    seen = []
    for read in made:
        assert read.run.count == len(read.keys) == len(read.chunks) <= most
        for at, (one, chunk) in enumerate(zip(read.keys, read.chunks, strict=True)):
            assert (bytes([one[0]]) * 8, one[1]) == (read.run.segment, read.run.slot + at)
            seen.append((one, chunk))
    assert sorted(seen) == sorted((one, chunk) for one, chunk, _ in asked)
    # As few as there can be: one per stretch of adjacent slots, cut at `most`.
    fewest, left = 0, 0
    for segment, slot in sorted(wanted):
        if left == 0 or (segment, slot - 1) not in wanted:
            fewest, left = fewest + 1, most
        left -= 1
    assert len(made) == fewest


def test_a_chunk_follows_its_chain_only() -> None:
    def row(group: int, position: int | None) -> Row[None]:
        return Row(key(group), 0, position, None)

    def span(group: int) -> int:
        return {0: 64, 1: 128}[group]

    assert follows(row(0, 64), row(0, 128), span)
    assert follows(row(1, 128), row(1, 256), span)
    assert not follows(row(1, 64), row(1, 128), span)
    assert not follows(row(0, 64), row(1, 128), span)
    assert not follows(row(0, 64), row(0, 192), span)
    assert not follows(row(0, 128), row(0, 64), span)
    assert not follows(row(0, None), row(0, 64), span)
    assert not follows(row(0, 64), row(0, None), span)
    rows = [row(1, 128), row(0, 192), row(0, 64), row(0, 128)]
    assert [(group_of(r.key), r.position) for r in in_order(rows)] == [(0, 64), (0, 128), (0, 192), (1, 128)]
