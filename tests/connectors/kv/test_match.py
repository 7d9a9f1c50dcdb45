"""What of a request can be loaded when its groups hold different blocks, on a real store."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the connectors' tests need the full set-up: make setup")

from connectors.engine.layout import Group
from connectors.kv.match import _MOST_CALLS, Found, Matcher
from kvstore.errors import TransientError
from kvstore.format.segment import Slot
from kvstore.index.port import Run
from kvstore.keys import block_key, digests
from kvstore.rules.prefix import PrefixRule, alignment, most_tokens
from kvstore.store.space import Space
from kvstore.store.store import Store
from schemas.namespace import GroupSpec
from tests.store.world import chain, make_store, open_space
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.engine

HASH = 8
SHAPE = (1, 1, 8, 2)
#: Full attention, a window of 20 tokens, states every 16 tokens.
SPECS = (
    GroupSpec(kind="full", block_tokens=8, dtype="BF16", shape=SHAPE),
    GroupSpec(kind="sliding_window", block_tokens=8, dtype="BF16", shape=SHAPE, window=20),
    GroupSpec(kind="mamba", block_tokens=16, dtype="BF16", shape=SHAPE),
)
RULES = [PrefixRule("prefix", 8), PrefixRule("window", 8, 20), PrefixRule("state", 16)]
GROUPS = [
    Group(spec, rule, (i,), offered=False, writers=1, part_bytes=spec.slot_bytes)
    for i, (spec, rule) in enumerate(zip(SPECS, RULES, strict=True))
]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = make_store(tmp_path)
    yield made
    made.close()


@pytest.fixture
def space(store: Store) -> Space:
    return open_space(store, groups=SPECS, block_tokens=HASH)


def save(space: Space, hashes: Sequence[bytes], group: int, blocks: range) -> None:
    """Save blocks of one group of a chain of hashes, as one segment."""
    ratio = SPECS[group].block_tokens // HASH
    names = [hashes[(block + 1) * ratio - 1] for block in blocks]
    data = memoryview(bytes(SPECS[group].slot_bytes))
    space.save(
        [Slot(block_key(name, group), data, "BF16", SHAPE) for name in names],
        depth=blocks.start,
        chain=digests(hashes[ratio - 1 : ratio], group),
    )


def find(
    space: Space, hashes: Sequence[bytes], total: int | None = None, groups: Sequence[Group] = GROUPS
) -> Found:
    matcher = Matcher(space, groups, HASH, lambda group, parts: parts == 1)
    return matcher.find(hashes, total or len(hashes) * HASH + 3, time.monotonic() + PATIENCE_S)


def covered(runs: Sequence[Run]) -> list[int]:
    return [run.start + i for run in runs for i in range(run.count)]


def test_all_that_was_saved_together_is_found_with_one_lookup_per_group(space: Space, store: Store) -> None:
    hashes = chain(*range(10))
    for group, count in enumerate((10, 10, 5)):
        save(space, hashes, group, range(count))
    found = find(space, hashes)
    assert (found.tokens, found.stored, found.reason) == (80, (10, 10, 5), "complete")
    assert found.tiers == {run.segment: "disk" for runs in found.runs for run in runs}
    # Of the window the last 19 tokens, of the states the last; of full attention everything.
    assert [covered(runs) for runs in found.runs] == [list(range(10)), [7, 8, 9], [4]]
    assert [len(runs) for runs in found.runs] == [1, 1, 1]
    assert not any(name.startswith("miss") and value for name, value in store.counters.snapshot().items())


def test_the_last_token_is_left_to_windows_and_states(space: Space) -> None:
    hashes = chain(*range(10))
    for group, count in enumerate((10, 10, 5)):
        save(space, hashes, group, range(count))
    assert find(space, hashes, total=80).tokens == 64
    assert find(space, hashes, total=81).tokens == 80
    assert find(space, hashes, total=80, groups=GROUPS[:1]).tokens == 80


def test_the_match_ends_where_the_groups_agree_and_says_why(space: Space, store: Store) -> None:
    hashes = chain(*range(12))
    save(space, hashes, 0, range(12))
    save(space, hashes, 1, range(8))
    save(space, hashes, 2, range(3, 4))
    found = find(space, hashes)
    assert (found.tokens, found.reason) == (64, "window")
    # Full attention is stored to the end, of the others what came before the boundary counts as stored.
    assert found.stored == (12, 8, 4)
    assert store.counters.snapshot()["miss_blocks{window}"] == 4
    assert find(space, chain(97, 98, 99)).reason == "absent"


@pytest.mark.parametrize("seed", range(12))
def test_any_store_gives_the_oracles_boundary(seed: int, space: Space) -> None:
    source = random.Random(seed)
    blocks = source.choice([6, 40, 300])
    hashes = chain(*range(blocks))
    there: list[set[int]] = []
    for group, rule in enumerate(RULES):
        count, at = blocks * HASH // rule.block_tokens, 0
        kept: set[int] = set()
        while at < count:
            run = range(at, min(count, at + source.randint(1, 30)))
            if source.random() < (0.95 if group == 0 else 0.6):
                save(space, hashes, group, run)
                kept.update(run)
            at = run.stop
        there.append(kept)
    total = blocks * HASH + source.choice([0, 1, 7])
    reach = next(i for i in range(blocks + 1) if i not in there[0]) * HASH
    oracle = max(
        tokens
        for tokens in range(0, min(reach, most_tokens(RULES, total)) + 1, alignment(RULES))
        if all(kept.issuperset(rule.needed(tokens)) for rule, kept in zip(RULES, there, strict=True))
    )
    found = find(space, hashes, total)
    assert found.tokens == oracle
    for rule, runs in zip(RULES[1:], found.runs[1:], strict=True):
        assert covered(runs) == list(rule.needed(oracle))
    assert covered(found.runs[0])[: oracle // HASH] == list(range(oracle // HASH))


def test_segments_that_this_engine_cannot_read_end_the_match(space: Space) -> None:
    hashes = chain(*range(6))
    save(space, hashes, 0, range(6))
    matcher = Matcher(space, GROUPS[:1], HASH, lambda group, parts: False)
    found = matcher.find(hashes, 100, time.monotonic() + PATIENCE_S)
    assert (found.tokens, found.reason) == (0, "namespace_mismatch")


def failing(space: Space, monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    def find(namespace: str, digests: bytes, chain: bytes = b"", **_: Any) -> list[Run | None]:
        act()
        raise TransientError("no answer")

    monkeypatch.setattr(space.backends.index, "find", find)


def test_lookups_that_fail_are_counted_and_a_miss(
    space: Space, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashes = chain(*range(10))
    for group, count in enumerate((10, 10, 5)):
        save(space, hashes, group, range(count))
    calls: list[int] = []
    failing(space, monkeypatch, lambda: calls.append(1))
    found = find(space, hashes)
    assert (found.tokens, len(calls)) == (0, 1)
    assert found.reason == "unavailable"
    assert store.counters.snapshot()["miss_blocks{unavailable}"] > 0


def test_lookups_of_one_request_are_bounded(space: Space, store: Store) -> None:
    """Thousands of blocks of full attention, and no window of any: the search gives up."""
    blocks = 3 * 128 * _MOST_CALLS
    hashes = chain(*range(blocks))
    for first in range(0, blocks, 1024):
        save(space, hashes, 0, range(first, min(blocks, first + 1024)))
    for first in range(2, blocks, 400):
        save(space, hashes, 1, range(first, first + 1))
    calls: list[int] = []
    inner = store.index.find

    def counted(namespace: str, digests: bytes, chain: bytes = b"", **_: Any) -> list[Run | None]:
        calls.append(len(digests) // 16)
        return inner(namespace, digests)  # type: ignore[arg-type]

    store.index.find = counted  # type: ignore[method-assign]
    found = find(space, hashes, groups=GROUPS[:2])
    assert (found.tokens, found.reason) == (0, "deadline")
    assert len(calls) <= _MOST_CALLS
