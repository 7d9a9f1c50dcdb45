"""One step computes far more than staging holds, and none of it can be written before the step has run."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the connectors' tests need the full set-up: make setup")

from vllm.v1.request import RequestStatus

from connectors.kv.requests import Keeper
from kvstore.rules.reasons import SAVE_OUTCOMES
from kvstore.store.space import Space
from tests.connectors.kv.bed import BLOCK_BYTES, TOKENS, Bed
from tests.store.world import match
from tests.waiting import PATIENCE_S, until

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


def written(bed: Bed, *goes_on: Any) -> None:
    """Step until the engine is idle, or these requests have nothing left to save; before each step all writes
    that have begun end, as they do where decoding takes longer than writing."""

    def over() -> bool:
        bed.drain()
        bed.step()
        if goes_on:
            return all(bed.stored(one) >= one.num_prompt_tokens // TOKENS for one in goes_on)
        return not bed.busy

    until(over, say=lambda: [bed.stored(one) for one in goes_on])


def no_room(bed: Bed) -> list[Any]:
    """Take all staging of saves away from all ranks: with `free` it is there again."""
    stagings = [rank.worker.memory.saves for rank in bed.ranks]
    return [(one, one.try_acquire(STAGING // 4)) for one in stagings for _ in range(4)]


def free(taken: list[Any]) -> None:
    for staging, chunk in taken:
        staging.release(chunk)


# ---- while its request runs, a save waits -----------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("batch", [8192, 20 * TOKENS])
def test_a_step_that_computes_four_times_what_staging_holds_is_stored_while_its_request_runs(
    tmp_path: Path, batch: int, ranks: int
) -> None:
    with Bed(tmp_path, blocks=400, batch_tokens=batch, ranks=ranks, **SETTINGS) as bed:
        request = bed.request(prompt(64), 4000)
        written(bed, request)
        bed.abort(request)
        bed.run()
        bed.drain()
        assert whole(bed, request)
        assert bed.counted("save_blocks{dropped}") == 0
        assert 0 < bed.most_held <= STAGING
        assert bed.held == 0


def test_sixteen_short_prompts_in_one_step_are_stored_whole(tmp_path: Path) -> None:
    with Bed(tmp_path, blocks=400, **SETTINGS) as bed:
        requests = [bed.request(prompt(4, seed), 60) for seed in range(16)]
        written(bed)
        assert whole(bed, *requests) and bed.counted("save_blocks{dropped}") == 0


def test_a_prompt_is_cached_whole_after_one_computation(tmp_path: Path) -> None:
    """With staging for four blocks, 25 of them took seven computations by fresh engines."""
    settings = {"segment": {"max_blocks": 1}, "kv": {"staging_bytes": 4 * BLOCK_BYTES}}
    computed = []
    for _ in range(2):
        with Bed(tmp_path, **settings) as bed:
            bed.request(prompt(25), 40)
            written(bed)
            computed.append(bed.computed_tokens)
    assert computed == [25 * TOKENS + 3 + 39, 3 + 39]


def test_a_rank_with_less_room_than_the_other_is_waited_for(tmp_path: Path) -> None:
    with Bed(tmp_path, blocks=400, ranks=2, **SETTINGS) as bed:
        staging = bed.ranks[1].worker.memory.saves
        taken = [staging.try_acquire(STAGING // 4) for _ in range(3)]
        request = bed.request(prompt(64), 90)
        written(bed)
        assert whole(bed, request) and bed.held == 0
        assert all(taken)


def test_a_preempted_request_saves_again_what_it_could_not(tmp_path: Path) -> None:
    with Bed(tmp_path, blocks=100, **SETTINGS) as bed:
        first, second = bed.request(prompt(40, 1), 400), bed.request(prompt(40, 2), 400)
        written(bed)
        assert first.num_preemptions + second.num_preemptions > 0
        assert whole(bed, first, second) and bed.held == 0


def test_who_counts_on_anothers_save_saves_what_that_one_drops(tmp_path: Path) -> None:
    """Two prompts begin alike; the first request saves that part, and loses its blocks before it could."""
    with Bed(tmp_path, blocks=200, **SETTINGS) as bed:
        taken = no_room(bed)
        first = bed.request(prompt(32), 100)
        second = bed.request([*prompt(32), *prompt(8, 9)], 100)
        until(lambda: bed.step() or bed.ranks[0].worker.writes.waiting_blocks >= 40)
        bed.abort(first)
        bed.step()
        free(taken)
        written(bed)
        assert whole(bed, first, second)


# ---- when it ends, its blocks are free --------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("how", ["finished", "aborted"])
def test_what_has_not_begun_at_the_end_is_dropped_from_the_tail_and_the_next_request_saves_it(
    tmp_path: Path, how: str, ranks: int
) -> None:
    with Bed(tmp_path, blocks=400, ranks=ranks, **SETTINGS) as bed:
        request = bed.request(prompt(64), 1 if how == "finished" else 4000)
        if how == "aborted":
            until(lambda: bed.step() or bed.ranks[0].worker.writes.waiting_blocks > 0)
            bed.abort(request)
        bed.run()
        assert bed.held == 0
        bed.drain()
        first = bed.stored(request)
        assert bed.holes(request) == bed.wrong(request) == []
        assert 0 < first < 64 and first % 4 == 0
        assert bed.counted("save_blocks{dropped}") >= ranks * (64 - first)
        # The engine's own cache has all of it, and the store the head alone.
        before = bed.computed_tokens
        again = bed.request(prompt(64), 90)
        written(bed)
        assert whole(bed, request, again) and bed.held == 0
        assert bed.computed_tokens - before == 3 + 89, "nothing was computed for that"


def test_what_the_store_has_lost_before_and_after_what_is_left_is_saved_by_the_next_request(
    tmp_path: Path,
) -> None:
    """A hit in the engine's own cache reaches beyond the store's match, whatever lies behind it."""
    with Bed(tmp_path, blocks=400, **SETTINGS) as bed:
        request = bed.request(prompt(24), 40)
        written(bed)
        assert bed.stored(request) == 24
        runs = match(bed.space, list(request.block_hashes)).runs
        for lost in (0, 3):
            gone = [runs[lost].segment]
            bed.space.backends.index.evict(bed.space.id, gone, delete_after_s=0.0, rule="admin")
        assert bed.stored(request) == 0
        before = bed.computed_tokens
        bed.request(prompt(24), 40)
        written(bed)
        assert whole(bed, request) and bed.computed_tokens - before == 3 + 39


@pytest.mark.parametrize("room", [True, False])
def test_a_waiting_request_never_waits_for_a_save(tmp_path: Path, room: bool) -> None:
    """An idle engine, whose pool has room for the second prompt or for the first one's blocks, not both."""
    with Bed(tmp_path, blocks=121, **SETTINGS) as bed:
        taken = [] if room else no_room(bed)
        bed.request(prompt(25))
        until(lambda: bed.step() or bed.finished)
        second = bed.request(prompt(100, 1))
        tracked = bed.half._scheduler.requests.get(second.request_id)
        assert tracked.match.poll(PATIENCE_S) is not None
        # Nobody else wants anything, so the very next step computes it.
        before = bed.computed_tokens
        bed.launch()
        assert bed.computed_tokens - before == 100 * TOKENS + 3
        bed.run()
        free(taken)
        assert bed.held == 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_reset_after_requests_whose_saves_wait_works_at_once(tmp_path: Path, ranks: int) -> None:
    """As trainers call it: many requests have just ended together, with the largest backlog."""
    with Bed(tmp_path, blocks=400, ranks=ranks, **SETTINGS) as bed:
        taken = no_room(bed)
        for seed in range(3):
            bed.request(prompt(25, seed), 2)
        until(lambda: bed.step() or len(bed.finished) == 3)
        before = bed.space.id
        assert bed.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        assert bed.space.id != before, "its weights are others from here on"
        free(taken)
        bed.run()
        after = bed.request(prompt(25), 40)
        written(bed)
        assert whole(bed, after) and bed.held == 0


def test_a_request_that_is_aborted_while_it_loads_is_freed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks: one writes a part slowly, the other has dropped its own; the request starts over, loads from
    the store, and its client goes away. A second report for it would end the engine."""
    with Bed(tmp_path, blocks=200, ranks=2, **SETTINGS) as bed:
        bed.request(prompt(16), 40)
        written(bed)
        go, save, read = threading.Event(), Space.save, Space.load

        def later(call: Any) -> Any:
            return lambda *args, **kwargs: (go.wait(PATIENCE_S), call(*args, **kwargs))[1]

        monkeypatch.setattr(Space, "save", later(save))
        staging = bed.ranks[1].worker.memory.saves
        taken = [(staging, staging.try_acquire(STAGING // 4)) for _ in range(4)]
        request = bed.request([*prompt(16, more=0), *prompt(16, 1)], 4000)
        until(lambda: bed.step() or bed.ranks[1].worker.writes.waiting_blocks > 0)
        until(lambda: bed.step() or bed.ranks[0].worker.memory.used_bytes["save"] > 0)
        monkeypatch.setattr(Space, "load", later(read))
        # No load is under way, so all blocks are free; the request starts over.
        bed.settle()
        assert bed.scheduler.reset_prefix_cache(reset_running_requests=True)
        until(lambda: bed.step() or request.status is RequestStatus.WAITING_FOR_REMOTE_KVS)
        keepers = bed.half._scheduler.requests.keepers
        assert keepers.of(request.request_id) is Keeper.LOAD
        bed.abort(request)
        for _ in range(4):
            bed.step()
        go.set()
        bed.drain()
        # With steps of something else the workers' last reports come in.
        bed.request(prompt(4, 7), 40)
        written(bed)
        free(taken)
        assert bed.held == 0 and not bed.scheduler.requests and not len(keepers)


# ---- what fails -------------------------------------------------------------------------------------


@pytest.mark.parametrize("times", [1, 1000])
def test_a_copy_that_fails_is_tried_again_and_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int, faults: object
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
        request = bed.request(prompt(64), 90)
        written(bed)
        assert whole(bed, request) == (times == 1)
        assert len(failures) <= 64 and bed.held == 0


def test_a_full_queue_of_writes_is_waited_for(tmp_path: Path) -> None:
    settings = {**SETTINGS, "transfers": {"queue_jobs": 2}}
    with Bed(tmp_path, blocks=400, **settings) as bed:
        request = bed.request(prompt(64), 90)
        written(bed)
        assert whole(bed, request) and bed.counted("save_blocks{dropped}") == 0


def test_by_default_staging_holds_what_the_steps_under_way_compute(tmp_path: Path) -> None:
    """Without waiting: two steps' worth begins before the first can be written."""
    with Bed(tmp_path, blocks=400, batch_tokens=64 * TOKENS, segment={"max_blocks": 4}) as bed:
        requests = [bed.request(prompt(64, seed, 0), 1) for seed in range(2)]
        # The store's answer about a prompt may take some steps; none of them may end here.
        until(lambda: bed.launch() or bed.computed_tokens == 128 * TOKENS)
        assert bed.ranks[0].worker.writes.waiting_blocks == 0
        assert bed.most_held == 128 * BLOCK_BYTES
        bed.run()
        bed.drain()
        assert whole(bed, *requests)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [*range(10), 17])
def test_whatever_comes_nothing_stored_is_wrong_and_no_hole_stays(tmp_path: Path, seed: int) -> None:
    """Small pools, prompts that share their beginnings, aborts and preemptions, one rank or two; and then all
    of it once more, one by one."""
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
        for one in requests:
            bed.request(list(one.prompt_token_ids), 90)
            written(bed)
        assert whole(bed, *requests) and bed.held == 0, outcomes
