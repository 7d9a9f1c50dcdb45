"""The scheduler's half alone: what it promises and plans, request by request, on a real store.

Requests are stand-ins; vLLM's own scheduler drives it in tests/e2e.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the connectors' tests need the full set-up: make setup")

from connectors.kv.scheduler import KVScheduler
from kvstore.keys import salt_id
from kvstore.store.space import Match, Space
from kvstore.store.store import Store
from tests.connectors.groups import TOKENS
from tests.connectors.kv.world import allocate, answer, half, report, tell
from tests.fake_vllm import FakeRequest, step
from tests.store.world import chain, make_store, open_space, slots
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.engine


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = make_store(tmp_path, kv={"match_deadline_s": 60.0})
    yield made
    made.close()


@pytest.fixture
def space(store: Store) -> Space:
    return open_space(store)


@pytest.fixture
def make(store: Store, space: Space) -> Callable[..., KVScheduler]:
    return lambda **changes: half(store, space, **changes)


def test_a_stored_prefix_is_promised_and_its_load_planned(make: Any, space: Space) -> None:
    space.save(slots(chain(*range(6))))
    scheduler, request = make(), FakeRequest("r", [*range(6), 77, 78])
    scheduler.on_new_request(request)
    assert answer(scheduler, request, computed=16) == (32, True)
    allocate(scheduler, request, 32)
    [load] = step(scheduler).loads[0].groups
    assert (load.first, load.tables) == (2, {0: [52, 53, 54, 55]})
    assert load.hashes == request.block_hashes[2:6]
    assert [(run.start, run.slot, run.count) for run in load.runs] == [(2, 2, 4)]
    assert step(scheduler).loads == []
    assert step(scheduler).namespace is None


def test_an_answer_that_is_late_is_a_counted_miss(make: Any, store: Store, space: Space) -> None:
    late = threading.Event()

    def slow(packed: bytes, **more: Any) -> Match:
        late.wait(PATIENCE_S)
        return Match([], 0, "absent")

    space.match = slow  # type: ignore[method-assign]
    object.__setattr__(store.settings.kv, "match_deadline_s", PATIENCE_S)
    scheduler, request = make(), FakeRequest("r", [1, 2, 3])
    began = time.monotonic()
    scheduler.on_new_request(request)
    assert scheduler.get_num_new_matched_tokens(request, 0) == (None, False)
    assert time.monotonic() - began < PATIENCE_S / 2, "the engine's thread waited"
    tracked = scheduler.requests.get("r")
    assert tracked is not None and tracked.match is not None
    assert tracked.match.end >= began + PATIENCE_S
    tracked.match.end -= PATIENCE_S
    assert answer(scheduler, request) == (0, False)
    assert store.counters.snapshot()["miss_blocks{deadline}"] == 3
    late.set()


def test_an_old_answer_is_asked_for_again(make: Any, store: Store, space: Space) -> None:
    scheduler, request = make(), FakeRequest("r", [1, 2, 3])
    assert answer(scheduler, request) == (0, False)
    space.save(slots(chain(1, 2)))
    assert answer(scheduler, request) == (0, False)
    object.__setattr__(store.settings.kv, "match_ttl_s", 0.0)
    time.sleep(0.001)

    def asked_again() -> int | None:
        step(scheduler)
        return scheduler.get_num_new_matched_tokens(request, 0)[0]

    until(asked_again)
    object.__setattr__(store.settings.kv, "match_ttl_s", 10.0)
    assert answer(scheduler, request) == (16, True)


def test_requests_that_share_a_prefix_load_it_once(make: Any, space: Space) -> None:
    space.save(slots(chain(*range(6))))
    scheduler = make()
    first, second = FakeRequest("a", list(range(6))), FakeRequest("b", [*range(6), 9])
    assert answer(scheduler, first) == (48, True)
    allocate(scheduler, first, 48)
    step(scheduler)
    for _ in range(50):
        assert scheduler.get_num_new_matched_tokens(second, 0) == (None, False)
        step(scheduler)
        time.sleep(0.001)
    report(scheduler, finished={"a"})
    # Now they are local hits of the second request, and nothing is left to load.
    assert answer(scheduler, second, computed=48) == (0, False)
    # Without prefix caching nobody else could use them: both load.
    alone = make(prefix_caching=False)
    for request in (first, second):
        assert answer(alone, request) == (48, True)
        allocate(alone, request, 48)


def test_a_request_whose_load_failed_computes_and_saves_what_was_lost(make: Any, space: Space) -> None:
    space.save(slots(chain(*range(6))))
    scheduler = make()
    request, other = FakeRequest("r", list(range(6))), FakeRequest("o", [0, 1, 2])
    assert answer(scheduler, request) == (48, True)
    assert answer(scheduler, other) == (24, True)
    allocate(scheduler, request, 48)
    step(scheduler)
    report(scheduler, finished={"r"}, failed={"r": 2})
    assert answer(scheduler, request, computed=16) == (0, False)
    request.num_computed_tokens = 16
    saves = step(scheduler, (request, request.num_prompt_tokens - 16)).saves
    assert [(save.first, len(save.hashes)) for save in saves] == [(2, 4)]
    # Others ask the index again before they trust what they were told.
    assert scheduler.requests.get("o").match is None


def test_a_preempted_request_asks_again(make: Any, space: Space) -> None:
    space.save(slots(chain(*range(4))))
    scheduler, request = make(), FakeRequest("r", list(range(4)))
    assert answer(scheduler, request) == (32, True)
    allocate(scheduler, request, 32)
    report(scheduler, finished={"r"})
    request.num_computed_tokens = 0
    space.save(slots(chain(*range(4))))
    assert answer(scheduler, request) == (32, True)


def test_a_chunked_prefill_makes_full_segments(make: Any) -> None:
    scheduler, request = make(), FakeRequest("r", list(range(10)))
    assert answer(scheduler, request) == (0, False)
    spans = []
    while request.num_computed_tokens < request.num_prompt_tokens:
        tokens = min(20, request.num_prompt_tokens - request.num_computed_tokens)
        saves = step(scheduler, (request, tokens)).saves
        spans += [(save.first, len(save.hashes), save.tables[0][0]) for save in saves]
    assert spans == [(0, 4, 100), (4, 4, 104), (8, 2, 108)]
    assert step(scheduler, (request, 1)).saves == []


def test_saves_name_the_salt_of_their_own_request(make: Any, store: Store) -> None:
    object.__setattr__(store.settings.kv, "save_decode", True)
    scheduler = make()
    salts = {"a": "hers", "b": "his", "c": "", "d": None}
    requests = [
        FakeRequest(name, [10 * number + step_ for step_ in range(6)], cache_salt=salt)
        for number, (name, salt) in enumerate(salts.items())
    ]
    for request in requests:
        assert answer(scheduler, request) == (0, False)
    # In chunks, all of them in each step: no step's saves are of one salt.
    found: dict[str, list[int]] = {name: [] for name in salts}

    def collect(saves: list[Any]) -> None:
        for save in saves:
            [name] = {request.request_id for request in requests if save.hashes[0] in request.block_hashes}
            assert save.salt == salt_id(salts[name] or "")
            found[name] += range(save.first, save.first + len(save.hashes))

    for _ in range(2):
        collect(step(scheduler, *((request, 3 * TOKENS) for request in requests)).saves)
    # A preempted request starts over, and others come and go.
    requests[0].num_computed_tokens = 0
    step(scheduler, preempted={"a"})
    assert answer(scheduler, requests[0]) == (0, False)
    for number, request in enumerate(requests):
        request.block_hashes = [*request.block_hashes, *chain(1000 + number, 1)]
        request.num_tokens = 8 * TOKENS + 1
        collect(step(scheduler, (request, 8 * TOKENS - request.num_computed_tokens)).saves)
        scheduler.request_finished(request, [list(range(100, 108))])
        collect(step(scheduler).flushes)
    assert {name: sorted(set(blocks)) for name, blocks in found.items()} == {
        name: list(range(8)) for name in salts
    }
    object.__setattr__(store.settings.kv, "save_decode", False)


def test_what_another_request_is_saving_is_not_saved_twice(make: Any) -> None:
    scheduler = make(segment_blocks=[16])
    first, second = FakeRequest("a", [*range(6), 1]), FakeRequest("b", [*range(6), 2, 3])
    for request in (first, second):
        assert answer(scheduler, request) == (0, False)
    saves = step(scheduler, (first, first.num_prompt_tokens), (second, second.num_prompt_tokens)).saves
    assert [(save.first, len(save.hashes)) for save in saves] == [(0, 7), (6, 2)]
    report(scheduler, ended={save.segment for save in saves})
    assert not scheduler.saving._busy and not scheduler.saving.under_way
    third = FakeRequest("c", [*range(6), 1])
    assert answer(scheduler, third) == (0, False)
    assert [save.first for save in step(scheduler, (third, third.num_prompt_tokens)).saves] == [0]


def test_decoded_blocks_are_flushed_at_the_end_if_wanted(make: Any, store: Store) -> None:
    object.__setattr__(store.settings.kv, "save_decode", True)
    scheduler, request = make(), FakeRequest("r", list(range(3)))
    assert answer(scheduler, request) == (0, False)
    assert len(step(scheduler, (request, request.num_prompt_tokens)).saves) == 1
    request.block_hashes = chain(0, 1, 2, 50, 51)
    request.num_tokens = 5 * TOKENS + 1
    step(scheduler, (request, 5 * TOKENS - request.num_computed_tokens))
    assert scheduler.request_finished(request, [list(range(100, 105))]) == (False, None)
    [flush] = step(scheduler).flushes
    assert (flush.first, flush.tables) == (3, {0: [103, 104]})
    assert not scheduler.requests
    # The last token sampled has no KV of its own, though with drafts more than it may have been scheduled.
    drafted = FakeRequest("d", [7])
    assert answer(scheduler, drafted) == (0, False)
    step(scheduler, (drafted, drafted.num_prompt_tokens))
    drafted.block_hashes, drafted.num_tokens = chain(7, 60, 61), 3 * TOKENS
    step(scheduler, (drafted, 3 * TOKENS - drafted.num_computed_tokens))
    scheduler.request_finished(drafted, [list(range(100, 105))])
    [flush] = step(scheduler).flushes
    assert (flush.first, flush.tables) == (1, {0: [101]})
    object.__setattr__(store.settings.kv, "save_decode", False)


@pytest.mark.parametrize("when", ["matching", "promised", "loading"])
def test_an_abort_leaves_nothing_behind(when: str, make: Any, space: Space) -> None:
    space.save(slots(chain(*range(4))))
    scheduler, request = make(), FakeRequest("r", list(range(4)))
    scheduler.on_new_request(request)
    if when != "matching":
        assert answer(scheduler, request) == (32, True)
    if when == "loading":
        allocate(scheduler, request, 32)
        step(scheduler)
    scheduler.request_finished(request, [[]])
    report(scheduler, finished={"r"} if when == "loading" else None)
    assert not scheduler.requests and not scheduler.requests.unsaved
    assert scheduler.loading.held == 0
    again = FakeRequest("again", list(range(4)))
    assert answer(scheduler, again) == (32, True)


def test_what_another_connector_only_promised_is_not_flushed(make: Any, store: Store) -> None:
    """Under MultiConnector somebody else's load counts as computed before it has arrived."""
    object.__setattr__(store.settings.kv, "save_decode", True)
    scheduler, request = make(), FakeRequest("r", list(range(4)))
    assert answer(scheduler, request) == (0, False)
    allocate(scheduler, request, 0)
    request.num_computed_tokens = 4 * TOKENS
    scheduler.request_finished(request, [list(range(100, 104))])
    assert step(scheduler).flushes == []
    object.__setattr__(store.settings.kv, "save_decode", False)


def test_who_waited_for_a_failed_load_computes(make: Any, space: Space) -> None:
    space.save(slots(chain(*range(6))))
    scheduler = make()
    first, second = FakeRequest("a", list(range(6))), FakeRequest("b", [*range(6), 9])
    assert answer(scheduler, first) == (48, True)
    allocate(scheduler, first, 48)
    for _ in range(50):
        assert scheduler.get_num_new_matched_tokens(second, 0) == (None, False)
        step(scheduler)
        time.sleep(0.001)
    report(scheduler, finished={"a"}, failed={"a": 0})
    assert answer(scheduler, second) == (0, False)


def test_a_promise_of_which_vllm_takes_nothing_is_computed(make: Any, space: Space) -> None:
    """From 0.33 on another connector, of what a model puts out beside its tokens, may cap a hit."""
    space.save(slots(chain(*range(6))))
    scheduler, request = make(), FakeRequest("r", [*range(6), 77, 78])
    scheduler.on_new_request(request)
    assert answer(scheduler, request) == (48, True)
    allocate(scheduler, request, 0)
    [one] = step(scheduler, (request, request.num_prompt_tokens)).saves
    assert (one.first, len(one.hashes)) == (6, 2), "what is stored is not stored again"
    scheduler.request_finished(request, [list(range(50, 60))])
    assert scheduler.loading.held == 0 and not scheduler.requests


def test_a_promise_of_which_vllm_takes_a_part(make: Any, space: Space) -> None:
    space.save(slots(chain(*range(6))))
    scheduler, request = make(), FakeRequest("r", [*range(6), 77, 78])
    scheduler.on_new_request(request)
    assert answer(scheduler, request) == (48, True)
    allocate(scheduler, request, 24)
    [load] = step(scheduler).loads[0].groups
    assert (load.first, len(load.hashes), sum(run.count for run in load.runs)) == (0, 3, 3)
    report(scheduler, finished={"r"})
    request.num_computed_tokens = 24
    [one] = step(scheduler, (request, request.num_prompt_tokens - 24)).saves
    assert (one.first, len(one.hashes)) == (6, 2)


@pytest.mark.parametrize("then", ["loads", "reset", "aborted"])
def test_a_load_that_vllm_defers(then: str, make: Any, space: Space) -> None:
    """From 0.33 on blocks may be handed out, for a load, while steps under way still read them: vLLM then
    comes back with the promise steps later, or never."""
    space.save(slots(chain(*range(6))))
    scheduler, request, other = make(), FakeRequest("r", range(6)), FakeRequest("o", range(90, 99))
    for one in (request, other):
        scheduler.on_new_request(one)
    assert answer(scheduler, request) == (48, True)
    assert answer(scheduler, other) == (0, False)
    for _ in range(3):
        assert step(scheduler, (other, 8)).loads == []
    if then == "aborted":
        scheduler.request_finished(request, [list(range(50, 60))])
        assert step(scheduler, (other, 8)).loads == []
        assert scheduler.loading.held == 0
        return
    if then == "reset":
        scheduler.reset_cache()
    allocate(scheduler, request, 48)
    [load] = step(scheduler, (other, 8)).loads[0].groups
    assert len(load.hashes) == 6
    # Of former weights nothing is loaded, so the blocks fail at the worker, and the request is computed.
    assert sum(run.count for run in load.runs) == (6 if then == "loads" else 0)


def test_bad_segments_are_not_promised_again(make: Any, space: Space) -> None:
    space.save(slots(chain(*range(6))))
    scheduler = make()
    [run] = space.match(b"".join(one[:16] for one in chain(*range(6)))).runs
    tell(scheduler, bad_segments={run.segment})
    assert answer(scheduler, FakeRequest("r", list(range(6)))) == (0, False)


def test_nothing_is_promised_while_the_workers_can_read_nothing(
    make: Any, store: Store, space: Space
) -> None:
    space.save(slots(chain(*range(6))))
    scheduler = make()
    tell(scheduler, payloads_down={0: True})
    assert answer(scheduler, FakeRequest("down", list(range(6)))) == (0, False)
    assert store.counters.snapshot()["miss_blocks{breaker_open}"] == 6
    tell(scheduler, payloads_down={0: False})
    tokens, later = answer(scheduler, FakeRequest("up", list(range(6))))
    assert tokens and later


def test_adapters_are_cached_only_if_trusted(make: Any, store: Store, space: Space) -> None:
    space.save(slots(chain(*range(4))))
    lora = FakeRequest("l", list(range(4)))
    lora.lora_request = object()
    scheduler = make()
    assert answer(scheduler, lora) == (0, False)
    assert step(scheduler, (lora, lora.num_prompt_tokens)).saves == []
    object.__setattr__(store.settings.identity, "lora", "trust")
    again = FakeRequest("again", list(range(4)))
    again.lora_request = object()
    assert answer(scheduler, again) == (32, True)
    object.__setattr__(store.settings.identity, "lora", "skip")


def test_after_a_reset_nothing_is_loaded_or_saved(make: Any, space: Space) -> None:
    space.save(slots(chain(*range(4))))
    scheduler, request = make(), FakeRequest("r", list(range(4)))
    assert answer(scheduler, request) == (32, True)
    assert scheduler.reset_cache()
    assert step(scheduler).abandon_loads
    assert not step(scheduler).abandon_loads
    assert answer(scheduler, FakeRequest("s", list(range(4)))) == (0, False)
    other = FakeRequest("t", [9, 9])
    assert answer(scheduler, other) == (0, False)
    assert step(scheduler, (other, other.num_prompt_tokens)).saves == []


def test_a_running_batch_costs_no_look_at_each_request(make: Any) -> None:
    scheduler, request = make(), FakeRequest("r", list(range(3)))
    assert answer(scheduler, request) == (0, False)
    assert len(step(scheduler, (request, request.num_prompt_tokens)).saves) == 1
    assert not scheduler.requests.unsaved
    # After a preemption it starts over, and is looked at again.
    request.num_computed_tokens = 0
    assert answer(scheduler, request) == (0, False)
    assert scheduler.requests.unsaved


def test_a_bug_costs_a_miss_and_not_the_engine(
    make: Any, space: Space, caplog: pytest.LogCaptureFixture, faults: object
) -> None:
    scheduler, request = make(), FakeRequest("r", [1, 2])
    scheduler.requests.wants_match = None
    scheduler.on_new_request(request)
    assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    scheduler.requests.cacheable = None
    assert step(scheduler, (request, 16)).saves == []
    assert "the engine goes on without" in caplog.text
