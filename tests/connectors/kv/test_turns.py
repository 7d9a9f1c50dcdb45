"""Conversations that grow turn by turn, through vLLM's own scheduler: few segments, and the right bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the connectors' tests need the full set-up: make setup")

from connectors.kv.save import Saving
from kvstore.admin.backends import Cache
from kvstore.admin.repair.check import Depth
from kvstore.admin.repair.fsck import fsck
from kvstore.build import load_settings
from kvstore.index.port import Run
from kvstore.keys import SegmentId, salt_id
from kvstore.metrics import Counters
from schemas.records import SegmentRecord
from tests.connectors.kv.bed import BLOCK_BYTES, TOKENS, Bed
from tests.connectors.kv.test_decode import FULL, STATE, WINDOW
from tests.store.world import match

pytestmark = pytest.mark.engine

SETTINGS: dict[str, Any] = {"segment": {"max_blocks": 16}, "grace_s": 60.0}


def tokens(count: int, seed: int = 0) -> list[int]:
    return [(seed * 977 + i * 31) % 990 + 5 for i in range(count)]


def turn(bed: Bed, prompt: Sequence[int], answers: int = 1, **more: Any) -> Any:
    """One request, and all that it saves."""
    request = bed.request(prompt, answers, **more)
    bed.run()
    bed.drain()
    # The report of what was written comes with the next steps.
    bed.request(tokens(3, 999))
    bed.run()
    assert bed.wrong(request) == [] and bed.holes(request) == []
    return request


def sizes(bed: Bed, request: Any) -> list[int]:
    return [run.count for run in match(bed.space, list(request.block_hashes)).runs]


def is_clean(folder: Path) -> bool:
    settings = {"payloads": f"file://{folder / 'payloads'}", "index": f"sqlite://{folder / 'index.db'}"}
    with Cache(load_settings(settings, environ={})) as cache:
        return not fsck(cache, depth=Depth(percent=100.0, settled_s=0.0)).faults


@pytest.mark.parametrize(("ranks", "fresh"), [(1, 0), (1, 5), (2, 7)])
def test_a_conversation_lies_in_few_segments(tmp_path: Path, ranks: int, fresh: int) -> None:
    """`fresh`: each so many turns another engine goes on, which loads what it has not computed."""
    prompt, end = tokens(40 * 20), 0
    bed = Bed(tmp_path, ranks=ranks, **SETTINGS)
    try:
        for number in range(1, 41):
            if fresh and number % fresh == 0:
                bed.__exit__()
                bed = Bed(tmp_path, ranks=ranks, **SETTINGS)
            end = 20 * number
            request = turn(bed, prompt[:end])
            assert bed.stored(request) == end // TOKENS
        found = sizes(bed, request)
        # 50 blocks: at once they are 16, 16, 16 and 2.
        assert sum(found) == 50 and len(found) <= 8, found
        assert all(one >= 12 for one in found[:2])
        assert bed.counted("save_blocks{dropped}") == 0
    finally:
        bed.__exit__()
    assert is_clean(tmp_path)


def test_decoded_blocks_join_what_the_next_turn_brings(tmp_path: Path) -> None:
    with Bed(tmp_path, **SETTINGS, kv={"save_decode": True}) as bed:
        prompt = tokens(20)
        for _ in range(12):
            request = turn(bed, prompt, answers=30)
            prompt = [*request.all_token_ids, *tokens(20, len(prompt))]
        found = sizes(bed, request)
        assert sum(found) == (request.num_tokens - 1) // TOKENS
        assert len(found) <= 2 * -(-sum(found) // 16) + 2, found


@pytest.mark.parametrize("names", [[], ["a"], ["a", "b", "c", "d"]])
def test_what_two_conversations_begin_with_is_written_anew_once(tmp_path: Path, names: list[str]) -> None:
    def more(number: int) -> dict[str, str]:
        return {"session_id": names[number % len(names)]} if names else {}

    with Bed(tmp_path, **SETTINGS) as bed:
        shared = tokens(6 * TOKENS)
        turn(bed, shared, **more(0))
        first, second, third = (
            turn(bed, shared + tokens(8 * TOKENS, seed), **more(seed)) for seed in (1, 2, 3)
        )
        # The first one replaces it. The others find a segment with another chain's blocks, and leave it.
        assert sizes(bed, first) == [14]
        assert sizes(bed, second) == sizes(bed, third) == [6, 8]
        kept = match(bed.space, list(first.block_hashes)).runs[0].segment
        assert match(bed.space, list(second.block_hashes)).runs[0].segment == kept


@pytest.mark.parametrize("names", [["", ""], ["a", ""], ["a", "a"], ["a", "b"]])
def test_a_conversation_of_any_sessions_lies_in_few_segments(tmp_path: Path, names: list[str]) -> None:
    with Bed(tmp_path, **SETTINGS) as bed:
        prompt = tokens(20 * 20)
        for number in range(1, 21):
            name = names[number % 2]
            request = turn(bed, prompt[: 20 * number], **({"session_id": name} if name else {}))
        assert len(sizes(bed, request)) <= 4
        assert bed.half._scheduler.store.maintenance.usage(bed.space.id).blocks == 25


def test_what_stays_is_written_anew_once(tmp_path: Path) -> None:
    with Bed(tmp_path, **SETTINGS) as bed:
        maintenance = bed.half._scheduler.store.maintenance
        shared = tokens(6 * TOKENS)
        (pinned,) = match(bed.space, list(turn(bed, shared).block_hashes)).runs
        maintenance.pin(bed.space.id, [pinned.segment], most_bytes=1 << 30)
        for seed in (1, 2, 3):
            request = turn(bed, shared + tokens(8 * TOKENS, seed))
            assert bed.stored(request) == 14
        # Only the first of them has a copy of the prompt.
        assert maintenance.usage(bed.space.id).blocks == 6 + (6 + 8) + 8 + 8


def test_what_other_salts_have_saved_is_not_joined(tmp_path: Path) -> None:
    with Bed(tmp_path, **SETTINGS) as bed:
        turn(bed, tokens(4 * TOKENS), cache_salt="a")
        same = turn(bed, tokens(9 * TOKENS), cache_salt="a")
        assert sizes(bed, same) == [9]
        # A name that covers no salt, as under a hash that leaves it out.
        (run,) = match(bed.space, list(same.block_hashes)).runs
        assert run.record.salt == salt_id("a")
        progress = bed.half._scheduler.saving.start("other")
        progress.found([9], [[run]])
        assert bed.half._scheduler.saving._olds(progress, 0, 30) == []
        progress.salt = salt_id("a")
        assert bed.half._scheduler.saving._olds(progress, 0, 30) == [run]


def test_two_requests_at_a_time_join_the_same_once(tmp_path: Path) -> None:
    with Bed(tmp_path, **SETTINGS) as bed:
        shared = tokens(6 * TOKENS)
        turn(bed, shared)
        both = [bed.request(shared + tokens(8 * TOKENS, seed)) for seed in (1, 2)]
        bed.run()
        bed.drain()
        bed.run()
        assert all(bed.stored(one) == 14 and bed.wrong(one) == [] for one in both)
        assert sorted(len(sizes(bed, one)) for one in both) == [1, 2]


def test_a_join_that_finds_no_room_leaves_what_was_there(tmp_path: Path) -> None:
    settings = SETTINGS | {"kv": {"staging_bytes": 16 * BLOCK_BYTES}}
    with Bed(tmp_path, **settings) as bed:
        before = turn(bed, tokens(4 * TOKENS))
        staging = bed.ranks[0].worker.memory.saves
        taken = staging.try_acquire(16 * BLOCK_BYTES)
        request = bed.request(tokens(9 * TOKENS))
        bed.run()
        staging.release(taken)
        assert (bed.stored(request), sizes(bed, before)) == (4, [4])
        assert bed.counted("save_blocks{dropped}") == 5
        assert sizes(bed, turn(bed, tokens(9 * TOKENS))) == [9]


@pytest.mark.parametrize("group", [FULL, WINDOW, STATE])
def test_only_segments_of_whole_prefixes_are_joined(group: Any) -> None:
    """What a window or a state is found by is not what precedes it."""
    record = SegmentRecord((), 2, "none", 0)
    run = Run(0, SegmentId(bytes(8)), 0, 2, record)
    saving = Saving([group], 8, [8], Counters(), lambda segment: None)
    progress = saving.start()
    progress.found([2], [[run]])
    assert saving._olds(progress, 0, 4) == ([run] if group is FULL else [])


def test_what_is_stored_joins_whichever_ends_first() -> None:
    def run(start: int, count: int) -> Run:
        return Run(start, SegmentId(bytes([start]) * 8), 0, count, SegmentRecord((), count, "none", 0))

    for order in ((0, 1), (1, 0)):
        progress = Saving([FULL], 8, [8], Counters(), lambda segment: None).start()
        progress.found([9], [[run(0, 6), run(6, 3)]])
        # Two that replace both, of which the second one has the last block of the old ones.
        made = [run(0, 8), run(8, 4)]
        for which in order:
            progress.stored(0, made[which], 16)
        assert progress.runs == [made]
