"""What is saved of groups that vLLM keeps only a part of: windows that move on, states that are offered."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

import pytest

pytest.importorskip("vllm", reason="the connectors' tests need the full set-up: make setup")

from connectors.engine.layout import Group
from connectors.kv.messages import Save
from connectors.kv.save import NULL_BLOCK, Saving
from connectors.planning import EVERY_BLOCK
from kvstore.metrics import Counters
from kvstore.rules.prefix import PrefixRule
from schemas.namespace import GroupSpec
from tests.store.world import chain

pytestmark = pytest.mark.engine

HASH = 8
SHAPE = (1, 1, 8, 2)
FULL = Group(
    GroupSpec(kind="full", block_tokens=8, dtype="BF16", shape=SHAPE),
    PrefixRule("prefix", 8),
    (0,),
    False,
    1,
    32,
)
#: Over two of vLLM's block tables, of larger blocks.
WINDOW = Group(
    GroupSpec(kind="sliding_window", block_tokens=16, dtype="BF16", shape=SHAPE, window=20),
    PrefixRule("window", 16, 20),
    (1, 2),
    False,
    1,
    32,
)
STATE = Group(
    GroupSpec(kind="mamba", block_tokens=16, dtype="I8", shape=SHAPE),
    PrefixRule("state", 16),
    (3, 4),
    True,
    1,
    32,
)


def saving(*groups: Group, blocks: int = 4) -> Saving:
    return Saving(groups, HASH, [blocks] * len(groups), Counters(), lambda segment: None, clock=lambda: 1.5)


def covered(saves: Sequence[Save], group: int) -> list[int]:
    return [save.first + i for save in saves if save.group == group for i in range(len(save.hashes))]


@pytest.mark.parametrize("seed", range(20))
def test_every_block_is_saved_before_its_window_leaves_it_behind(seed: int) -> None:
    """A prefill in any chunks, its tables kept as vLLM keeps them: nulls below what the next step needs."""
    source = random.Random(seed)
    total = source.randint(40, 600)
    hashes = chain(*range(total // HASH))
    made, progress, done = saving(FULL, WINDOW), None, 0
    progress = made.start()
    saves: list[Save] = []
    names = {0: FULL, 1: WINDOW, 2: WINDOW}
    while done < total:
        # Blocks are left behind when the next step is scheduled, as of what is computed by then.
        gone = {
            table: group.rule.skipped_tokens(done) // group.rule.block_tokens
            for table, group in names.items()
        }
        done = min(total, done + source.choice([1, 7, 16, 30, 64, 200]))
        tables = [
            [
                NULL_BLOCK if i < gone[table] else 1000 * (table + 1) + i
                for i in range(-(-done // names[table].rule.block_tokens))
            ]
            for table in range(3)
        ]
        step = made.plan(
            progress,
            hashes,
            done // HASH * HASH,
            EVERY_BLOCK,
            partial(list, tables),
            computed=done,
            final=done == total,
        )
        saves += step
        for save in step:
            assert save.created_s == 1
            assert len(save.hashes) <= 4
            for table, ids in save.tables.items():
                assert ids == [1000 * (table + 1) + save.first + i for i in range(len(ids))]
            ratio = names[next(iter(save.tables))].rule.block_tokens // HASH
            assert save.hashes == hashes[(save.first + 1) * ratio - 1 :: ratio][: len(save.hashes)]
            assert set(save.tables) == set(made.groups[save.group].tables)
    assert covered(saves, 0) == list(range(total // 8))
    assert covered(saves, 1) == list(range(total // HASH * HASH // 16))


@pytest.mark.parametrize("seed", range(10))
def test_windows_at_intervals_let_a_prompt_be_resumed_there_and_at_its_ends(seed: int) -> None:
    source = random.Random(seed)
    total = source.randint(100, 900)
    hashes = chain(*range(total // HASH))
    made = saving(FULL, WINDOW, blocks=64)
    made.window_interval = source.choice([1, 50, 128, 400])
    progress, done, saves = made.start(), 0, []
    while done < total:
        done = min(total, done + source.choice([16, 64, 300]))
        tables = [
            list(range(1, 2 + done // 8)),
            list(range(1, 2 + done // 16)),
            list(range(1, 2 + done // 16)),
        ]
        progress.ends = made.ends(total)
        saves += made.plan(
            progress,
            hashes,
            done // HASH * HASH,
            EVERY_BLOCK,
            partial(list, tables),
            computed=done,
            final=done == total,
        )
    assert covered(saves, 0) == list(range(total // 8))
    interval = -(-made.window_interval // 16) * 16
    places = [*range(interval, total + 1, interval), (total - 1) // 16 * 16, total // 16 * 16]
    needed = {block for place in places for block in WINDOW.rule.needed(place)}
    # A regular place that lies beyond the prompt's end may have been prepared, and costs a block or two.
    assert needed <= set(covered(saves, 1))
    beyond = set(WINDOW.rule.needed(-(-total // interval) * interval))
    ending = set(range(WINDOW.rule.skipped_tokens(total) // 16, total // 16))
    assert set(covered(saves, 1)) <= needed | beyond | ending


def test_what_is_left_behind_is_not_saved_and_what_is_there_is() -> None:
    """After a hit in vLLM's own cache, the blocks before its window were never this request's."""
    made = saving(FULL, WINDOW, blocks=16)
    tables = [list(range(100, 116)), [0, 0, 0, 0, 7, 8, 9, 10], [0, 0, 0, 0, 17, 18, 19, 0]]
    saves = made.plan(made.start(), chain(*range(16)), 128, EVERY_BLOCK, lambda: tables, final=True)
    assert covered(saves, 0) == list(range(16))
    [window] = [save for save in saves if save.group == 1]
    assert (window.first, window.tables) == (4, {1: [7, 8, 9], 2: [17, 18, 19]})


def test_offered_states_are_saved_once_and_only_at_whole_blocks() -> None:
    made, hashes = saving(FULL, STATE), chain(*range(16))
    progress = made.start()
    # (table, block, tokens): a state within a block, one at 64, one at 96 of which a table is missing.
    offers = [(3, 50, 40), (4, 51, 40), (3, 60, 64), (4, 61, 64), (3, 70, 96)]
    [save] = made.take_offers(progress, hashes, offers, EVERY_BLOCK, 128)
    assert (save.group, save.first, save.tables) == (1, 3, {3: [60], 4: [61]})
    assert save.hashes == [hashes[7]]
    assert made.take_offers(progress, hashes, offers, EVERY_BLOCK, 128) == []
    later = [(3, 80, 96), (4, 81, 96)]
    assert made.take_offers(progress, hashes, later, EVERY_BLOCK, 80) == [], "beyond what is wanted"
    assert [one.first for one in made.take_offers(progress, hashes, later, EVERY_BLOCK, 96)] == [5]
    # Nothing of such a group is taken from its tables, which hold states of other moments.
    tables = [list(range(100, 116)), [], [], [1] * 8, [2] * 8]
    assert covered(made.plan(progress, hashes, 128, EVERY_BLOCK, lambda: tables, final=True), 1) == []


def test_states_that_are_not_worth_it_are_counted() -> None:
    made, hashes = saving(STATE), chain(*range(16))
    offers = [(3, 60, 64), (4, 61, 64)]
    assert made.take_offers(made.start(), hashes, offers, 7, 128) == []
    assert made.counters.snapshot()["save_blocks{not_admitted}"] == 1
    assert len(made.take_offers(made.start(), hashes, offers, 8, 128)) == 1


def test_two_requests_with_one_prefix_save_it_once_per_group() -> None:
    made, hashes = saving(FULL, WINDOW, blocks=64), chain(*range(8))
    tables = [list(range(100, 108)), list(range(1, 5)), list(range(11, 15))]
    first = made.plan(made.start(), hashes, 64, EVERY_BLOCK, lambda: tables, final=True)
    assert [(save.group, len(save.hashes)) for save in first] == [(0, 8), (1, 4)]
    assert made.plan(made.start(), hashes, 64, EVERY_BLOCK, lambda: tables, final=True) == []
    for save in first:
        made.ended(save.segment, 1, written=True)
    assert made.under_way == 0
    assert len(made.plan(made.start(), hashes, 64, EVERY_BLOCK, lambda: tables, final=True)) == 2
