"""The sketch of uses: against its promise in plain Python, and both implementations bit by bit."""

from __future__ import annotations

import random
from itertools import count, pairwise
from pathlib import Path

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.index.redis.index import RedisIndex
from kvstore.index.sketch import LINE_BYTES, Window
from kvstore.index.sqlite.client import SqliteClient
from kvstore.index.sqlite.file import IndexFile
from kvstore.index.sqlite.index import SqliteIndex
from tests.index.contract.admission import DAY_S, NOON_S
from tests.index.contract.chains import blocks_of, chain, namespace, part_of
from tests.index.model import Space
from tests.index.sketching import Marks, note
from tests.servers.redis import PATIENT, RedisServer

_NUMBERS = count()


class Sketches:
    """Sketches of consecutive windows, in dictionaries."""

    def __init__(self, sketch_bytes: int) -> None:
        self.lines = sketch_bytes // LINE_BYTES
        self.windows: dict[int, dict[int, int]] = {}

    def note(self, digests: bytes, window: int = 0) -> int:
        now, before = self.windows.setdefault(window, {}), self.windows.get(window - 1, {})
        noted, changed = note(
            Marks.of(digests), self.lines, lambda line: now.get(line, 0), lambda line: before.get(line, 0)
        )
        for line, bits in changed.items():
            assert bits & now.get(line, 0) == now.get(line, 0), "a sketch only ever gains bits"
        now |= changed
        return noted

    def dump(self, window: int) -> bytes:
        """As Redis has it."""
        bits = self.windows.get(window, {})
        return b"".join(bits.get(line, 0).to_bytes(LINE_BYTES) for line in range(self.lines)) if bits else b""


def test_marks_are_pinned() -> None:
    """Engines of two releases share a sketch."""
    marks = Marks.of(bytes(range(16)) + bytes(range(100, 116)))
    assert len(marks) == 2
    assert [marks.line(block, 1000) for block in (0, 1)] == [0x00010203 % 1000, 0x64656667 % 1000]
    bits = 0x04050607
    positions = {bits % 512, bits // 512 % 512, bits // 512**2 % 512}
    assert marks.mark(0) == sum(1 << (511 - position) for position in positions)
    assert marks.mask(0) == marks.mark(0) | marks.mark(1)


def test_a_mask_is_the_marks_of_a_group() -> None:
    marks = Marks.of(chain(70))
    for group, blocks in enumerate([range(32), range(32, 64), range(64, 70)]):
        expected = 0
        for block in blocks:
            expected |= marks.mark(block)
        assert marks.mask(group) == expected


def test_windows_are_numbered_alike_everywhere() -> None:
    window = Window.at(NOON_S, DAY_S, 1 << 20)
    assert (window.now, window.before) == ("1048576:86400:19676", "1048576:86400:19675")
    assert (window.lines, window.keep_s) == (16384, 129_600)
    assert Window.at(NOON_S + DAY_S, DAY_S, 1 << 20).before == window.now
    assert Window.at(0.0, 0.5, 64).keep_s == 1


# What can follow a chain: the same chain cut, or another that leaves it.
STEPS = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 90), st.integers(0, 70), st.sampled_from([0, 0, 0, 0, 1, 3])),
    min_size=1,
    max_size=25,
)


def prompts(steps: list[tuple[int, int, int, int]]) -> list[tuple[int, bytes]]:
    """(window, chain) of every step: each takes an earlier chain, cuts it and adds to it."""
    made, window, chains = [], 0, [b""]
    for number, (parent, keep, more, later) in enumerate(steps):
        window += later
        base = part_of(chains[parent % len(chains)], 0, keep)
        chains.append(chain(more, seed=str(number % 3), after=base))
        made.append((window, chains[-1]))
    return made


@settings(max_examples=300)
@given(STEPS, st.sampled_from([64, 200, 1024, 1 << 16]))
def test_never_fewer_than_the_truth(steps: list[tuple[int, int, int, int]], size: int) -> None:
    sketches, truth = Sketches(size), Space()
    for window, digests in prompts(steps):
        assert truth.note(digests, window) <= sketches.note(digests, window) <= blocks_of(digests)


@pytest.mark.parametrize("blocks", [1, 8, 32, 100])
@pytest.mark.parametrize("fill", [0.25, 0.5, 1.0])
def test_false_positives_grow_with_the_fill(blocks: int, fill: float) -> None:
    """At the fill the port promises for, half a block per byte, about one fresh block in a hundred passes."""
    size, source = 1 << 16, random.Random(blocks)
    sketches = Sketches(size)
    for _ in range(int(fill * size / 2) // blocks):
        sketches.note(source.randbytes(16 * blocks))
    now = sketches.windows[0]
    fresh = [
        note(Marks.of(source.randbytes(16)), sketches.lines, lambda at: now.get(at, 0), lambda at: 0)
        for _ in range(8000)
    ]
    passed = sum(noted for noted, _ in fresh) / 8000
    assert passed <= {0.25: 0.004, 0.5: 0.008, 1.0: 0.02}[fill]


def test_a_long_new_prompt_passes_with_a_block_or_two_at_most() -> None:
    size, source = 1 << 16, random.Random(0)
    sketches = Sketches(size)
    for _ in range(size // 2 // 64):
        sketches.note(source.randbytes(16 * 64))
    counts = sorted(sketches.note(source.randbytes(16 * 16)) for _ in range(500))
    assert counts[-1] <= 3
    assert sum(counts) <= 15


def test_branches_of_one_short_prefix_do_not_fill_its_line() -> None:
    """A system prompt of three blocks, and 2000 prompts that begin with it."""
    source, system = random.Random(1), chain(3)
    sketches = Sketches(1 << 18)
    counts = [sketches.note(system + source.randbytes(16 * 40)) for _ in range(2000)]
    assert counts[0] == 0
    assert min(counts[1:]) == 3
    assert sum(count > 3 for count in counts) <= 60
    assert max(counts) <= 5


def test_a_conversation_is_known_turn_by_turn() -> None:
    digests = chain(1000)
    sketches = Sketches(1 << 18)
    early = 0
    for known, upto in pairwise(range(0, 1001, 10)):
        noted = sketches.note(part_of(digests, 0, upto))
        assert known <= noted <= known + 2
        early += noted > known
    assert early <= 4


@pytest.mark.servers
@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(steps=STEPS, size=st.sampled_from([64, 200, 1024, 1 << 14]))
def test_redis_keeps_the_very_same_sketch(
    steps: list[tuple[int, int, int, int]], size: int, redis_server: RedisServer
) -> None:
    redis_server.flush()
    sketches = Sketches(size)
    with (
        RedisIndex.from_settings(redis_server.url, PATIENT) as index,
        redis.Redis(port=redis_server.port, protocol=2) as raw,
    ):
        name = index.register(namespace(), expected_blocks=10)
        for window, digests in prompts(steps):
            at_s = NOON_S + window * DAY_S
            noted = index.note(name, digests, now_s=at_s, window_s=DAY_S, sketch_bytes=size)
            assert noted == sketches.note(digests, window)
            key = f"kvs:{{{name}}}:use:{Window.at(at_s, DAY_S, size).now}"
            assert (raw.get(key) or b"") == sketches.dump(window)


@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(steps=STEPS, size=st.sampled_from([64, 200, 1024, 1 << 14]))
def test_sqlite_keeps_the_very_same_sketch(
    steps: list[tuple[int, int, int, int]], size: int, fast_path: Path
) -> None:
    sketches, now = Sketches(size), [NOON_S]
    file = IndexFile(str(fast_path / f"{next(_NUMBERS)}.sqlite"), 2.0)
    with SqliteIndex(file, clock=lambda: now[0]) as index:
        raw = SqliteClient(file, clock=lambda: now[0])
        name = index.register(namespace(), expected_blocks=10)
        for window, digests in prompts(steps):
            now[0] = NOON_S + window * DAY_S
            noted = index.note(name, digests, now_s=now[0], window_s=DAY_S, sketch_bytes=size)
            assert noted == sketches.note(digests, window)
            key = f"kvs:{{{name}}}:use:{Window.at(now[0], DAY_S, size).now}"
            assert (raw.command("GET", key) or b"") == sketches.dump(window)
