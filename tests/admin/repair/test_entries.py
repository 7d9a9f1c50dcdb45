"""The comparison of entries with what payloads hold is the same whether it fits memory or not."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvstore.admin.repair import entries as entries_module
from kvstore.admin.repair.entries import Blocks, Differences, collect, compare
from kvstore.admin.repair.fsck import fsck
from kvstore.errors import KVStoreError
from kvstore.index.maintenance import Entry
from kvstore.keys import DIGEST_BYTES, Digest, SegmentId, split_digests
from tests.admin.repair.damage import KV, World, chain

#: Blocks that wait in memory: always a file, sometimes one, never one.
ROOMS = (1, 7, 50, 100_000)


def segment(number: int) -> SegmentId:
    return SegmentId(number.to_bytes(8, "big"))


def digest_of(draw: random.Random) -> Digest:
    """Few parts, and some digests that end in zeros, as one of 256 does."""
    zeros = draw.choice((0, 0, 1, 3))
    return Digest(bytes([draw.choice((0, 1, 255))]) + draw.randbytes(DIGEST_BYTES - 1 - zeros) + bytes(zeros))


def told(
    entries: Sequence[Entry], truth: dict[SegmentId, bytes], bad: Sequence[SegmentId], at_once: int
) -> Differences:
    with Blocks(at_once) as listed, Blocks(at_once) as true:
        collect(entries, listed)
        for one, digests in truth.items():
            true.add_segment(one, digests)
        assert len(listed) == len(entries) and len(true) == sum(map(len, truth.values())) // DIGEST_BYTES
        return compare(listed, true, bad)


def expected(
    entries: Sequence[Entry], truth: dict[SegmentId, bytes], bad: Sequence[SegmentId]
) -> tuple[dict[SegmentId, list[Digest]], list[Entry], int]:
    places = {
        Entry(one, name, slot) for name, text in truth.items() for slot, one in enumerate(split_digests(text))
    }
    served = {entry.digest for entry in entries if entry in places}
    hidden: dict[SegmentId, list[Digest]] = {}
    seen: set[Digest] = set()
    for name, text in truth.items():
        for one in split_digests(text):
            if one not in served and one not in seen:
                seen.add(one)
                hidden.setdefault(name, []).append(one)
    wrong = [entry for entry in entries if entry not in places]
    astray = [entry for entry in wrong if entry.segment in truth]
    elsewhere = sum(entry.segment not in truth and entry.segment not in bad for entry in wrong)
    return {name: sorted(found) for name, found in hidden.items()}, sorted(astray, key=repr), elsewhere


@pytest.mark.parametrize("seed", range(20))
def test_what_differs_is_found_whatever_fits_memory(seed: int) -> None:
    draw = random.Random(seed)
    digests = [digest_of(draw) for _ in range(120)]
    # Some blocks are stored twice.
    truth = {
        segment(draw.getrandbits(64)): b"".join(draw.choices(digests, k=draw.randint(1, 12)))
        for _ in range(20)
    }
    bad, gone = [segment(draw.getrandbits(64)) for _ in range(3)], segment(7)
    entries = [
        Entry(one, name, slot)
        for name, text in truth.items()
        for slot, one in enumerate(split_digests(text))
        if draw.random() < 0.8
    ]
    for _ in range(30):
        where = draw.choice([*truth, *bad, gone])
        entries.append(Entry(draw.choice(digests), where, draw.randint(0, 20)))
    entries += draw.choices(entries, k=10)
    draw.shuffle(entries)
    hidden, astray, elsewhere = expected(entries, truth, bad)
    for at_once in ROOMS:
        found = told(entries, truth, bad, at_once)
        assert {name: sorted(split_digests(bytes(text))) for name, text in found.hidden.items()} == hidden, (
            at_once
        )
        assert sorted(found.astray, key=repr) == astray
        assert found.elsewhere == elsewhere


@pytest.mark.parametrize("at_once", ROOMS)
def test_nothing_is_different_from_nothing(at_once: int) -> None:
    assert told([], {}, [], at_once) == Differences()
    entry = Entry(Digest(bytes(DIGEST_BYTES)), segment(0), 0)
    assert told([entry], {}, [], at_once).elsewhere == 1
    assert told([entry], {}, [segment(0)], at_once).elsewhere == 0
    assert told([entry], {segment(0): bytes(DIGEST_BYTES)}, [], at_once) == Differences()


def test_memory_holds_no_more_than_it_may() -> None:
    with Blocks(100) as blocks:
        for number in range(50):
            blocks.add_segment(segment(number), random.Random(number).randbytes(16 * 30))
            assert len(blocks._slots) < 100 and len(blocks._digests) < 100 * DIGEST_BYTES
        assert sum(len(part) for part in blocks.parts()) == len(blocks) == 1500


def test_a_check_by_way_of_a_file_finds_the_same(empty_world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = chain("a", 12)
    for depth in (0, 4, 8):
        written = empty_world.write(KV, keys[depth : depth + 4], depth)
    with empty_world.cache() as cache:
        index = cache.made_index()
        [name] = index.namespaces()
        entries = [entry for entry in index.entries(name) if entry.segment == written.segment]
        index.unlink(name, entries[:3])
        found = fsck(cache)
        monkeypatch.setattr(entries_module, "AT_ONCE", 2)
        again = fsck(cache)
    assert [fault.kind for fault in found.faults] == ["hidden"] and found.faults[0].blocks == 3
    assert (again.faults, again.namespaces) == (found.faults, found.namespaces)


def test_no_room_for_the_file_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    with Blocks(1) as blocks, pytest.raises(KVStoreError, match=r"52 bytes for each block.*TMPDIR"):
        blocks.add_segment(segment(1), bytes(DIGEST_BYTES))
