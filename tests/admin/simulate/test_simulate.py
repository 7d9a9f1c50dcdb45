"""Traces read, and replayed under each policy, against models that do the same in the plainest way."""

from __future__ import annotations

import base64
import json
import random
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.admin.progress import Silent
from kvstore.admin.simulate import store
from kvstore.admin.simulate.replay import endless, fifo, lru
from kvstore.admin.simulate.simulate import POLICIES, Setup, cuts, simulate, sweep
from kvstore.admin.simulate.store import Rules, StoreReplay, noted
from kvstore.admin.simulate.traces import Assumed, BadTrace, Request, Trace, TracedSpace, read_traces
from kvstore.errors import ConfigError
from kvstore.index.eviction import watermarks
from kvstore.keys import SegmentId
from schemas.records import PartRecord, SegmentRecord
from schemas.settings import Settings
from tests.admin.simulate import workloads
from tests.admin.simulate.walk import walk

SETTINGS = Settings(payloads="memory://simulation", index="memory://simulation")
OURS = '{"kvstore_trace": 1, "began_s": 1000.0}\n'
SPACE = (
    '{"space": 0, "namespace": "0123456789abcdef", "kind": "kv", "block_tokens": 16, "block_bytes": 100, '
    '"parts": 2}\n'
)
#: Eight bytes each.
ONE, TWO = "AAAAAAAAAAE=", "AAAAAAAAAAEAAAAAAAAAAg=="


def mooncake(*chains: Sequence[int | str], gap_ms: int = 1000, tokens: int = 512) -> str:
    lines = [
        {"timestamp": gap_ms * number, "input_length": tokens * len(chain), "output_length": 1,
         "hash_ids": list(chain)}
        for number, chain in enumerate(chains)
    ]  # fmt: skip
    return "".join(json.dumps(line) + "\n" for line in lines)


def read(path: Path, text: str, assumed: Assumed = Assumed(block_bytes=10)) -> Trace:
    path = path / "trace.jsonl"
    path.write_text(text, encoding="utf-8")
    return read_traces([path], assumed, Silent())


def chains(trace: Trace) -> list[list[int]]:
    return [request.chain for request in trace.requests]


def test_mooncakes_form(tmp_path: Path) -> None:
    text = (
        '{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48]}\n'
        '{"timestamp": 30535, "input_length": 1500, "output_length": 1, "hash_ids": [46, 47, 99]}\n'
        '{"timestamp": 30536, "input_length": 511, "output_length": 1, "hash_ids": [7]}\n'
    )
    trace = read(tmp_path, text, Assumed())
    # The last block of 1500 tokens isn't full; a prompt of 511 has none.
    assert [(request.at_s, request.chain) for request in trace.requests] == [
        (27.482, [0, 1, 2]),
        (30.535, [0, 1]),
    ]
    assert (trace.references, trace.blocks, trace.skipped) == (5, 3, 0)
    assert trace.spaces[0].block_bytes == 512 * 131072
    assert trace.distinct_bytes == 3 * 512 * 131072


def test_a_block_is_its_name_and_all_that_precedes_it(tmp_path: Path) -> None:
    """Whatever a file says, what is replayed are chains that share prefixes."""
    trace = read(tmp_path, mooncake([1, 2, 3], [9, 2, 3], [1, 2, 2], [9, 2], ["1", 2]))
    assert chains(trace) == [[0, 1, 2], [3, 4, 5], [0, 1, 6], [3, 4], [7, 8]]


def test_requests_of_several_files_are_in_the_order_of_time(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(mooncake([1], [2], [3], gap_ms=2000))
    (tmp_path / "b.jsonl").write_text(mooncake([1, 5], [2, 6], gap_ms=3000))
    (tmp_path / "note.txt").write_text("not read")
    trace = read_traces([tmp_path], Assumed(), Silent())
    assert [request.at_s for request in trace.requests] == [0, 0, 2, 3, 4]
    assert chains(trace) == [[0], [0, 3], [1], [1, 4], [2]]


def test_engines_of_one_store_share_blocks_across_files(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text(OURS + SPACE + f'{{"t": 1, "n": 0, "d": "{TWO}"}}\n')
    trace = read_traces([tmp_path], Assumed(), Silent())
    assert chains(trace) == [[0, 1], [0, 1]]
    (space,) = trace.spaces
    assert (space.block_tokens, space.block_bytes, space.parts) == (16, 100, 2)


def test_namespaces_share_no_blocks(tmp_path: Path) -> None:
    """Whatever their requests have in common, and whatever a line of one says of the other."""
    other = SPACE.replace('"space": 0', '"space": 1').replace("0123", "4567")

    def line(space: int, *words: int, more: str = "") -> str:
        data = base64.b64encode(np.array(words, dtype="<u8").tobytes()).decode()
        return f'{{"t": 1, "n": {space}, {more}"d": "{data}"}}\n'

    text = OURS + SPACE + other + line(0, 1, 2) + line(1, 1, 2) + line(0, 2, 1) + line(1, 2, 1)
    trace = read(tmp_path, text + line(1, 9, more='"like": [3, 2], ') + line(1, 9, more='"like": [4, 2], '))
    assert chains(trace) == [[0, 1], [2, 3], [4, 5], [6, 7], [2, 3, 8]]
    assert trace.space_of == [0, 0, 1, 1, 0, 0, 1, 1, 1]
    assert trace.skipped == 1


@pytest.mark.parametrize(
    "line",
    [
        "nonsense",
        "[1]",
        "7",
        "{}",
        "[" * 100_000,
        '{"t": 1}',
        '{"t": 1, "n": 3, "d": "AAAAAAAAAAE="}',
        '{"t": NaN, "n": 0, "d": "AAAAAAAAAAE="}',
        '{"t": true, "n": 0, "d": "AAAAAAAAAAE="}',
        '{"t": 1' + "0" * 400 + ', "n": 0, "d": "AAAAAAAAAAE="}',
        '{"t": 1, "n": [], "d": "AAAAAAAAAAE="}',
        '{"t": 1, "n": 0, "d": "AAA="}',
        '{"t": 1, "n": 0, "d": "no base64!"}',
        '{"t": 1, "n": 0, "d": "\u00e9"}',
        '{"t": 1, "n": 0, "d": 5}',
        '{"t": 1, "n": 0, "d": ""}',
        '{"t": 1, "n": 0, "like": [2, 9], "d": ""}',
        '{"t": 1, "n": 0, "like": [2, -1], "d": ""}',
        '{"t": 1, "n": 0, "like": [1, 1], "d": ""}',
        '{"t": 1, "n": 0, "like": 2, "d": ""}',
        '{"t": 1, "n": 0, "like": [[], 1], "d": ""}',
        '{"t": 1, "n": 0, "like": [2], "d": ""}',
        '{"space": 1, "namespace": "../etc", "kind": "kv", "block_tokens": 1, "block_bytes": 1, "parts": 1}',
        '{"space": 1, "namespace": "0123456789abcdef", "kind": "kv", "block_tokens": 1, "block_bytes": 0}',
        '{"space": [], "namespace": "0123456789abcdef", "kind": "kv", "block_tokens": 1, "block_bytes": 1}',
        '{"timestamp": 1, "hash_ids": {"a": 1}}',
        '{"timestamp": 1, "hash_ids": [1.5]}',
        '{"timestamp": 1, "hash_ids": [true]}',
        '{"timestamp": 1, "input_length": "9", "hash_ids": [1]}',
        '{"timestamp": 1, "input_length": -600, "hash_ids": [1, 2]}',
        '{"timestamp": "now", "hash_ids": [1]}',
    ],
)
def test_a_line_that_makes_no_sense_is_skipped_and_counted(tmp_path: Path, line: str) -> None:
    good = f'{{"t": 1, "n": 0, "d": "{TWO}"}}\n'
    trace = read(tmp_path, f'{OURS}{SPACE}{good}{line}\n{{"t": 2, "n": 0, "like": [2, 1], "d": ""}}\n')
    assert chains(trace) == [[0, 1], [0]]
    assert trace.skipped == 1


def test_a_line_that_is_too_long_is_never_held_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.admin.simulate.traces.MAX_LINE", 1000)
    good = f'{{"t": 1, "n": 0, "d": "{TWO}"}}\n'
    later = '{"t": 2, "n": 0, "like": [2, 1], "d": ""}'
    trace = read(tmp_path, f"{OURS}{SPACE}{good}{'x' * 5000}\n{later}\n{later}{' ' * 3000}\n{later}")
    assert chains(trace) == [[0, 1], [0], [0]]
    assert trace.skipped == 2


def test_references_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line of a few bytes may stand for millions of blocks."""
    monkeypatch.setattr("kvstore.admin.simulate.traces.MAX_REFERENCES", 100)
    more = '{"t": 1, "n": 0, "like": [2, 2], "d": ""}\n' * 60
    with pytest.raises(BadTrace, match="more than 100 references"):
        read(tmp_path, f'{OURS}{SPACE}{{"t": 1, "n": 0, "d": "{TWO}"}}\n{more}')


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no request in"),
        ("not a trace\n", "is no trace"),
        (OURS + SPACE, "no request in"),
        ('{"kvstore_trace": 2, "began_s": 0}\n', "version 2"),
        (f'{{"t": 1, "n": 0, "d": "{ONE}"}}\n', "is no trace"),
    ],
)
def test_what_is_no_trace_is_refused_with_a_sentence(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read(tmp_path, text)


def test_what_is_not_there_is_refused_with_a_sentence(tmp_path: Path) -> None:
    for path, says in ((tmp_path / "none.jsonl", "No such file"), (tmp_path, r"no file \*\.jsonl in")):
        with pytest.raises(BadTrace, match=says):
            read_traces([path], Assumed(), Silent())


# ---- policies


def random_trace(tmp_path: Path, seed: int, *, spaces: int = 1) -> Trace:
    """Parts of a few long chains, which go on in their own ways, with blocks of one or of two sizes."""
    draw = random.Random(seed)
    lines = [OURS]
    for number in range(spaces):
        about = {"space": number, "namespace": f"{number:016x}", "kind": "kv", "block_tokens": 16}
        lines.append(json.dumps({**about, "block_bytes": 10 + 15 * number, "parts": 1}) + "\n")
    known = [[draw.randrange(3) for _ in range(16)] for _ in range(6)]
    for at_s in range(300):
        chain = draw.choice(known)[: draw.randrange(1, 17)]
        chain += [draw.randrange(3) for _ in range(draw.randrange(3))]
        data = base64.b64encode(np.array(chain, dtype="<u8").tobytes()).decode()
        lines.append(json.dumps({"t": 7 * at_s, "n": draw.randrange(spaces), "d": data}) + "\n")
    return read(tmp_path, "".join(lines), Assumed())


def plain_lru(trace: Trace, capacity: int) -> tuple[int, int, int]:
    """Hits, bytes stored and evictions of a cache that is a dictionary."""
    weights = trace.weights().tolist()
    held: OrderedDict[int, None] = OrderedDict()
    hits = stored = evictions = 0
    for request in trace.requests:
        leading = True
        for block in request.chain:
            leading = leading and block in held
            hits += leading
        for block in reversed(request.chain):
            if block not in held:
                stored += weights[block]
            held[block] = None
            held.move_to_end(block)
        # All of the request at once, so that its tail doesn't push out its own head before that is used.
        while sum(weights[block] for block in held) > capacity:
            held.popitem(last=False)
            evictions += 1
    return hits, stored, evictions


@pytest.mark.parametrize(("seed", "spaces"), [(1, 1), (2, 1), (3, 2), (4, 2)])
def test_lru_for_all_capacities_in_one_pass(tmp_path: Path, seed: int, spaces: int) -> None:
    trace = random_trace(tmp_path, seed, spaces=spaces)
    whole = trace.distinct_bytes
    capacities = [0, 5, 10, 25, 60, 111, 300, whole // 2, whole - 1, whole, 10 * whole]
    for capacity, tally in zip(capacities, lru(trace, capacities), strict=True):
        assert (tally.hit_blocks, tally.stored_bytes, tally.evictions) == plain_lru(trace, capacity), capacity
        assert tally.hit_tokens == 16 * tally.hit_blocks
    first, last = lru(trace, [0, whole])
    assert first.hit_blocks == 0
    assert last.hit_blocks == endless(trace).hit_blocks > 300
    assert last.evicted_bytes == 0


def plain_fifo(trace: Trace, capacity: int) -> tuple[int, int, int]:
    weights = trace.weights().tolist()
    held: OrderedDict[int, None] = OrderedDict()
    hits = stored = evictions = 0
    for request in trace.requests:
        missing = [block for block in request.chain if block not in held]
        hits += request.chain.index(missing[0]) if missing else len(request.chain)
        for block in reversed(missing):
            held[block] = None
            stored += weights[block]
        while sum(weights[block] for block in held) > capacity:
            held.popitem(last=False)
            evictions += 1
    return hits, stored, evictions


@pytest.mark.parametrize("spaces", [1, 2])
def test_fifo(tmp_path: Path, spaces: int) -> None:
    trace = random_trace(tmp_path, 5, spaces=spaces)
    for capacity in (0, 40, 200, 1000, trace.distinct_bytes):
        tally = fifo(trace, capacity)
        assert (tally.hit_blocks, tally.stored_bytes, tally.evictions) == plain_fifo(trace, capacity), (
            capacity
        )


def test_nothing_serves_more_than_endless(tmp_path: Path) -> None:
    trace = random_trace(tmp_path, 6)
    seen: set[int] = set()
    hits = 0
    for request in trace.requests:
        known = [block in seen for block in request.chain]
        hits += known.index(False) if False in known else len(known)
        seen.update(request.chain)
    most = endless(trace)
    assert (most.hit_blocks, most.stored_bytes) == (hits, 10 * len(seen))
    for capacity in (100, 1000, 10_000):
        assert StoreReplay(trace, plain_rules(3), capacity).run().hit_blocks <= most.hit_blocks


def plain_rules(cut: int, spaces: int = 1) -> Rules:
    return Rules([cut] * spaces, lambda slots: 3)


class Walks(StoreReplay):
    """Every look-up is the walk of the index."""

    overlaps = 0

    def _match(self, chain: Sequence[int], begin: int, end: int) -> Any:
        named: dict[SegmentId, Any] = {}

        def lookup(position: int) -> tuple[SegmentId, int] | None:
            segment = self._entries[chain[begin + position]]
            if segment is None or not segment.living:
                return None
            name = SegmentId(segment.number.to_bytes(8, "big"))
            named[name] = segment
            return name, begin + position - segment.begin

        runs = walk(end - begin, lookup, lambda name: LIVING)
        return [named[run.segment] for run in runs], [begin + run.start + run.count for run in runs]

    def _save(self, request: Request, *where: int) -> None:
        before = {block: self._entries[block] for block in request.chain}
        lived = {block for block, segment in before.items() if segment is not None and segment.living}
        super()._save(request, *where)
        self.overlaps += sum(self._entries[block] is not before[block] for block in lived)


LIVING = SegmentRecord((PartRecord(0, (0,)),), 1, "none", 0)


@pytest.mark.parametrize("marks", [None, (0.95, 0.90), (1.0, 0.7)])
@pytest.mark.parametrize("cut", [1, 2, 3, 64])
@pytest.mark.parametrize("capacity", [12, 60, 150, 300, 600, 3000])
def test_entries_alone_find_what_the_walk_finds(
    tmp_path: Path,
    cut: int,
    capacity: int,
    marks: tuple[float, float] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if marks is not None:
        monkeypatch.setattr(
            store, "watermarks", lambda capacity: tuple(int(mark * capacity) for mark in marks)
        )
    trace = random_trace(tmp_path, 7, spaces=2)
    rules = Rules([cut] * 2, lambda slots: 3)
    quick, exact = StoreReplay(trace, rules, capacity), Walks(trace, rules, capacity)
    for request in trace.requests:
        assert quick.serve(request, len(request.chain)) == exact.serve(request, len(request.chain))
    assert (quick.stored_bytes, quick.evictions) == (exact.stored_bytes, exact.evictions)
    assert quick.used_bytes <= (watermarks(capacity)[0] if marks is None else marks[0] * capacity)
    assert quick.stored_bytes == quick.used_bytes + quick.evicted_bytes


@pytest.mark.parametrize("gap_ms", [0, 1000, 40_000])
def test_entries_alone_find_it_where_segments_overlap(
    tmp_path: Path, gap_ms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of a request finds room that its middle has been evicted for, and is then stored once more by
    requests that are cut in other places."""
    draw = random.Random(3)
    lengths = [draw.randrange(1, 14) for _ in range(2000)]
    trace = read(tmp_path, mooncake(*[list(range(length)) for length in lengths], gap_ms=gap_ms))
    monkeypatch.setattr(store, "watermarks", lambda capacity: (0.75 * capacity, int(0.45 * capacity)))
    overlaps = 0
    for capacity in (70, 80, 90, 100, 110):
        rules = Rules([4], lambda slots: 0)
        quick, exact = StoreReplay(trace, rules, capacity), Walks(trace, rules, capacity)
        for request in trace.requests:
            assert quick.serve(request, len(request.chain)) == exact.serve(request, len(request.chain))
        assert (quick.stored_bytes, quick.evictions) == (exact.stored_bytes, exact.evictions)
        overlaps += exact.overlaps
    assert overlaps > 100


def test_second_use_forgets_after_two_windows(tmp_path: Path) -> None:
    trace = read(tmp_path, mooncake([1, 2], [1, 2, 3], [1, 9], [1, 2, 3], gap_ms=60_000))
    assert noted(trace, 3600.0) == [0, 2, 1, 3]
    assert noted(trace, 60.0) == [0, 2, 1, 1]
    assert noted(trace, 20.0) == [0, 0, 0, 0]
    replay = StoreReplay(trace, plain_rules(4), 10_000)
    assert replay.run(noted(trace, 3600.0)).hit_blocks == 0 + 0 + 1 + 2


# ---- the report


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    path = tmp_path / "chats.jsonl"
    workloads.write(path, workloads.requests(9, 500))
    return path


def test_the_report_adds_up(chats: Path) -> None:
    setup = Setup(SETTINGS, points=6, segment_blocks=(1, 8))
    report = simulate([chats], Assumed(1 << 20, 16), setup, Silent())
    assert [(curve.policy, curve.segment_blocks) for curve in report.curves] == [
        ("kvstore", 1), ("kvstore", 8), ("second-use", 1), ("second-use", 8),
        ("told-ends", 1), ("told-ends", 8), ("lru", None), ("fifo", None), ("optimum", None),
        ("endless", None),
    ]  # fmt: skip
    trace = report.trace
    assert (trace.requests, trace.skipped_lines) == (500, 0)
    assert trace.asked_tokens == 16 * trace.asked_blocks
    assert trace.distinct_bytes == trace.distinct_blocks << 20
    capacities = sweep(trace.distinct_bytes, 6)
    assert capacities[0] == pytest.approx(0.01 * trace.distinct_bytes, rel=1e-6)
    assert capacities[-1] == trace.distinct_bytes
    most = report.curves[-1].points[0].hit_ratio
    for curve in report.curves:
        assert [point.capacity_bytes for point in curve.points] == capacities
        for point in curve.points:
            assert point.hit_ratio == point.hit_blocks / trace.asked_blocks <= most
            assert point.hit_tokens == 16 * point.hit_blocks
            assert point.evicted_bytes <= point.stored_bytes
    by_block = {curve.policy: curve.points for curve in report.curves if curve.segment_blocks in (1, None)}
    # With as many bytes as there are blocks LRU forgets nothing; a store keeps below its watermark.
    assert by_block["lru"][-1].hit_ratio == most
    assert by_block["lru"][-1].evictions == 0
    assert by_block["kvstore"][-1].evictions > 0
    assert by_block["second-use"][-1].stored_bytes < by_block["kvstore"][-1].stored_bytes
    assert (
        report.findings[0]
        == f"No capacity serves more than {most:.1%}: the rest is asked for for the first time"
    )


def test_segments_are_cut_as_the_connectors_cut_them() -> None:
    spaces = [TracedSpace("", "kv", 16, nbytes) for nbytes in (1000, 1 << 20, 5 << 20, 64 << 20)]
    assert cuts(Trace(spaces=spaces), SETTINGS) == [64, 32, 6, 1]
    two, item = TracedSpace("", "kv", 16, 2 << 20, parts=2), TracedSpace("", "ec", 0, 1000)
    assert cuts(Trace(spaces=[two, item]), SETTINGS) == [32, 1]


def test_every_policy_can_be_asked_for_by_itself(chats: Path) -> None:
    with chats.open("a") as out:
        out.write(json.dumps({"timestamp": 0, "hash_ids": [], "session_id": "a", "end": True}) + "\n")
    for policy in POLICIES:
        report = simulate([chats], Assumed(), Setup(SETTINGS, policies=[policy], points=2), Silent())
        assert [curve.policy for curve in report.curves] == [policy]
