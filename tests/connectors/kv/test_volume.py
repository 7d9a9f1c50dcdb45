"""One step computes far more than staging holds, and none of it can be written before the step has run."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the connectors' tests need the full set-up: make setup")

from vllm.v1.request import RequestStatus

from connectors.kv import planner
from kvstore.rules.reasons import SAVE_OUTCOMES
from tests.connectors.kv.bed import BLOCK_BYTES, TOKENS, Bed
from tests.waiting import until

pytestmark = pytest.mark.engine

#: Segments of four blocks, and staging for four of them.
STAGING = 16 * BLOCK_BYTES
SETTINGS: dict[str, Any] = {"segment": {"max_blocks": 4}, "kv": {"staging_bytes": STAGING}}


def prompt(blocks: int, seed: int = 0, more: int = 3) -> list[int]:
    return [(seed * 977 + i * 31) % 990 + 5 for i in range(blocks * TOKENS + more)]


def whole(bed: Bed, *requests: Any) -> bool:
    """Whether all full blocks of these prompts are stored as they were computed."""
    assert all(bed.wrong(one) == [] and bed.holes(one) == [] for one in requests)
    return all(bed.stored(one) >= one.num_prompt_tokens // TOKENS for one in requests)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("answers", [1, 2, 40])
@pytest.mark.parametrize("batch", [8192, 20 * TOKENS])
def test_a_step_that_computes_four_times_what_staging_holds_is_stored_whole(
    tmp_path: Path, answers: int, batch: int, ranks: int
) -> None:
    with Bed(tmp_path, blocks=400, batch_tokens=batch, ranks=ranks, **SETTINGS) as bed:
        request = bed.request(prompt(64), answers)
        bed.run()
        bed.drain()
        assert whole(bed, request)
        assert bed.counted("save_blocks{dropped}") == 0
        assert 0 < bed.most_held <= STAGING
        assert bed.held == 0


def test_sixteen_short_prompts_in_one_step_are_stored_whole(tmp_path: Path) -> None:
    with Bed(tmp_path, blocks=400, **SETTINGS) as bed:
        requests = [bed.request(prompt(4, seed), 3) for seed in range(16)]
        bed.run()
        bed.drain()
        assert whole(bed, *requests) and bed.counted("save_blocks{dropped}") == 0


def test_a_prompt_is_cached_whole_after_one_computation(tmp_path: Path) -> None:
    """With staging for four blocks, 25 of them took seven computations by fresh engines."""
    settings = {"segment": {"max_blocks": 1}, "kv": {"staging_bytes": 4 * BLOCK_BYTES}}
    computed = []
    for _ in range(2):
        with Bed(tmp_path, **settings) as bed:
            bed.request(prompt(25))
            bed.run()
            bed.drain()
            computed.append(bed.computed_tokens)
    assert computed == [25 * TOKENS + 3, 3]


def test_a_rank_with_less_room_than_the_other_is_waited_for(tmp_path: Path) -> None:
    with Bed(tmp_path, blocks=400, ranks=2, **SETTINGS) as bed:
        staging = bed.ranks[1].worker.memory.saves
        taken = [staging.try_acquire(STAGING // 4) for _ in range(3)]
        request = bed.request(prompt(64))
        bed.run()
        bed.drain()
        assert whole(bed, request) and bed.held == 0
        assert all(taken)


# ---- what loses its blocks --------------------------------------------------------------------------


def test_what_an_aborted_request_has_computed_is_stored(tmp_path: Path) -> None:
    with Bed(tmp_path, blocks=400, **SETTINGS) as bed:
        request = bed.request(prompt(64), 100)
        until(lambda: bed.step() or bed.ranks[0].worker.writes.kept.blocks > 0)
        bed.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
        bed.run()
        bed.drain()
        assert whole(bed, request) and bed.held == 0


def test_blocks_are_not_kept_beyond_a_share_of_the_pool(tmp_path: Path) -> None:
    with Bed(tmp_path, blocks=100, **SETTINGS) as bed:
        request = bed.request(prompt(64))
        bed.run()
        bed.drain()
        # What had begun is stored, and nothing behind what was dropped.
        assert bed.holes(request) == bed.wrong(request) == []
        assert bed.stored(request) == 16 and bed.counted("save_blocks{dropped}") == 48
        assert bed.held == 0
        again = bed.request(prompt(64), 9)
        bed.run()
        bed.drain()
        assert whole(bed, again), "a running request's blocks are its own"


def test_blocks_are_not_kept_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "HOLD_S", 0.0)
    with Bed(tmp_path, blocks=400, **SETTINGS) as bed:
        staging = bed.ranks[0].worker.memory.saves
        taken = [staging.try_acquire(STAGING // 4) for _ in range(4)]
        request = bed.request(prompt(64))
        bed.run()
        assert bed.held == 0 and bed.counted("save_blocks{dropped}") == 64
        assert bed.stored(request) == 0 and all(taken)


def test_a_running_request_that_lacks_blocks_gets_those_that_wait(tmp_path: Path) -> None:
    with Bed(tmp_path, blocks=121, **SETTINGS) as bed:
        staging = bed.ranks[0].worker.memory.saves
        taken = [staging.try_acquire(STAGING // 4) for _ in range(4)]
        bed.request(prompt(25), 1)
        until(lambda: bed.step() or bed.finished)
        assert bed.held == 26
        other = bed.request(prompt(80, 1), 30 * TOKENS)
        bed.run()
        assert len(bed.finished) == 2 and bed.held == 0
        assert other.num_preemptions == 0
        assert bed.counted("save_blocks{dropped}") >= 25 and all(taken)


def test_a_preempted_request_saves_again_what_it_could_not(tmp_path: Path) -> None:
    with Bed(tmp_path, blocks=100, **SETTINGS) as bed:
        first, second = bed.request(prompt(40, 1), 400), bed.request(prompt(40, 2), 400)
        bed.run()
        bed.drain()
        assert first.num_preemptions + second.num_preemptions > 0
        assert whole(bed, first, second) and bed.held == 0


def test_who_counts_on_anothers_save_saves_what_that_one_drops(tmp_path: Path) -> None:
    """Two prompts begin alike; the first request saves that part, and loses its blocks before it could."""
    with Bed(tmp_path, blocks=200, **SETTINGS) as bed:
        staging = bed.ranks[0].worker.memory.saves
        taken = [staging.try_acquire(STAGING // 4) for _ in range(4)]
        bed.half._scheduler.holds._most = 0
        first = bed.request(prompt(32), 100)
        second = bed.request([*prompt(32), *prompt(8, 9)], 100)
        until(lambda: bed.step() or bed.ranks[0].worker.writes.kept.blocks >= 40)
        bed.scheduler.finish_requests(first.request_id, RequestStatus.FINISHED_ABORTED)
        bed.step()
        for chunk in taken:
            staging.release(chunk)
        bed.run()
        bed.drain()
        assert whole(bed, first, second)


# ---- what fails -------------------------------------------------------------------------------------


@pytest.mark.parametrize("times", [1, 1000])
def test_a_copy_that_fails_is_tried_again_and_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    with Bed(tmp_path, blocks=400, **SETTINGS) as bed:
        cache, failures = bed.ranks[0].worker.memory.caches[0], []
        real = cache.gather

        def gather(*args: Any) -> Any:
            if len(failures) < times:
                failures.append(args)
                raise MemoryError("no room on the device")
            return real(*args)

        monkeypatch.setattr(cache, "gather", gather)
        request = bed.request(prompt(64), 40)
        bed.run()
        bed.drain()
        assert whole(bed, request) == (times == 1)
        assert len(failures) <= 64 and bed.held == 0


def test_a_full_queue_of_writes_is_waited_for(tmp_path: Path) -> None:
    settings = {**SETTINGS, "transfers": {"queue_jobs": 2}}
    with Bed(tmp_path, blocks=400, **settings) as bed:
        request = bed.request(prompt(64), 2)
        bed.run()
        bed.drain()
        assert whole(bed, request) and bed.counted("save_blocks{dropped}") == 0


def test_by_default_staging_holds_what_the_steps_under_way_compute(tmp_path: Path) -> None:
    """Without waiting: two steps' worth begins before the first can be written."""
    with Bed(tmp_path, blocks=400, batch_tokens=64 * TOKENS, segment={"max_blocks": 4}) as bed:
        requests = [bed.request(prompt(64, seed, 0), 1) for seed in range(2)]
        # The store's answer about a prompt may take some steps; none of them may end here.
        until(lambda: bed.launch() or bed.computed_tokens == 128 * TOKENS)
        assert bed.ranks[0].worker.writes.kept.blocks == 0
        assert bed.most_held == 128 * BLOCK_BYTES
        bed.run()
        bed.drain()
        assert whole(bed, *requests)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [*range(10), 17])
def test_whatever_comes_nothing_stored_is_wrong_or_behind_a_hole(tmp_path: Path, seed: int) -> None:
    """Small pools, prompts that share their beginnings, aborts and preemptions, one rank or two."""
    chance = random.Random(seed)
    kv = {**SETTINGS["kv"], "save_decode": chance.random() < 0.5}
    with Bed(
        tmp_path,
        blocks=chance.choice([60, 120, 300]),
        batch_tokens=chance.choice([64, 512, 8192]),
        ranks=chance.choice([1, 2]),
        in_flight=chance.choice([1, 2, 3]),
        segment=SETTINGS["segment"],
        kv=kv,
    ) as bed:
        requests: list[Any] = []
        for _ in range(60):
            if chance.random() < 0.5:
                base = prompt(chance.randrange(1, 20), chance.randrange(3), 0)
                tokens = base + prompt(chance.randrange(0, 20), 10 + len(requests), chance.randrange(1, 9))
                requests.append(bed.request(tokens, chance.choice([1, 2, 30, 90])))
            for _ in range(chance.randrange(4)):
                bed.step()
            if requests and chance.random() < 0.1:
                name = chance.choice(requests).request_id
                bed.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        bed.run()
        bed.drain()
        assert bed.held == 0
        assert all(bed.wrong(one) == [] for one in requests)
        outcomes = {name: bed.counted(f"save_blocks{{{name}}}") for name in SAVE_OUTCOMES}
        assert outcomes["failed"] == 0, "the index or the disk failed: that is another test"
        assert [one.request_id for one in requests if bed.holes(one)] == [], outcomes
