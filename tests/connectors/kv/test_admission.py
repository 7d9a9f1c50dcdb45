"""What the scheduler's half saves when not everything is worth it: admission, request by request."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the connectors' tests need the full set-up: make setup")

from connectors.kv.messages import Save
from connectors.kv.scheduler import KVScheduler
from kvstore.errors import TransientError
from kvstore.keys import digests
from kvstore.store.store import Store
from tests.connectors.groups import TOKENS
from tests.connectors.kv.world import allocate, answer, half, report
from tests.fake_vllm import FakeRequest, step
from tests.store.world import chain, make_store, open_space, slots
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.engine

SECOND_USE = {"second_use": True}


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., Store]]:
    """`opened(admission, **settings)`: a store; all of them share one index."""
    made: list[Store] = []

    def store(admission: dict[str, Any], **settings: Any) -> Store:
        settings = {"kv": {"match_deadline_s": 60.0}} | settings
        made.append(make_store(tmp_path, admission=admission, **settings))
        return made[-1]

    yield store
    for one in made:
        one.close()


def engine(store: Store, **changes: Any) -> KVScheduler:
    return half(store, changes.pop("space", None) or open_space(store), **changes)


def arrive(scheduler: KVScheduler, *requests: FakeRequest) -> None:
    """New requests, and the answers to their notes."""
    for request in requests:
        scheduler.on_new_request(request)
        settle(scheduler, request)


def settle(scheduler: KVScheduler, request: FakeRequest) -> int | None:
    """Wait for the answer to a note, if there is one."""
    note = scheduler.requests.get(request.request_id).note
    if note is None:
        return None
    until(lambda: note.noted is not None)
    return note.noted


def spans(saves: list[Save]) -> list[tuple[int, int]]:
    return [(save.first, save.first + len(save.hashes)) for save in saves]


def prefill(scheduler: KVScheduler, request: FakeRequest) -> list[tuple[int, int]]:
    """A request from its arrival to the end of its prefill, in one step: what is saved."""
    arrive(scheduler, request)
    assert answer(scheduler, request) == (0, False)
    return spans(step(scheduler, (request, request.num_prompt_tokens)).saves)


def not_admitted(store: Store) -> int:
    return store.counters.snapshot()["save_blocks{not_admitted}"]


def test_a_prompt_is_saved_on_its_second_use_as_far_as_it_was_used(opened: Any) -> None:
    store, other = opened(SECOND_USE), opened(SECOND_USE)
    here, there = engine(store), engine(other)
    assert prefill(here, FakeRequest("a", list(range(10)))) == []
    assert not_admitted(store) == 10
    # On another engine; six blocks are common, the seventh is new.
    assert prefill(there, FakeRequest("b", [*range(6), 90, 91])) == [(0, 4), (4, 6)]
    assert not_admitted(other) == 2
    assert prefill(here, FakeRequest("c", [*range(6), 90, 92])) == [(0, 4), (4, 7)]
    assert prefill(here, FakeRequest("d", [7, 8, 9])) == []
    assert not_admitted(store) == 10 + 1 + 3


def test_what_is_stored_is_loaded_and_only_what_was_used_is_added(opened: Any) -> None:
    store = opened(SECOND_USE)
    scheduler, space = engine(store), open_space(store)
    space.save(slots(chain(*range(4))))
    assert space.note(digests(chain(*range(7)))) == 0
    request = FakeRequest("r", list(range(10)))
    arrive(scheduler, request)
    assert answer(scheduler, request) == (32, True)
    allocate(scheduler, request, 32)
    report(scheduler, finished={"r"})
    request.num_computed_tokens = 32
    assert spans(step(scheduler, (request, request.num_prompt_tokens - 32)).saves) == [(4, 7)]
    assert not_admitted(store) == 3


def test_what_was_stored_before_without_ever_being_used_is_not_counted(opened: Any) -> None:
    store = opened(SECOND_USE)
    open_space(store).save(slots(chain(*range(6))))
    scheduler, request = engine(store), FakeRequest("r", list(range(8)))
    arrive(scheduler, request)
    assert answer(scheduler, request) == (48, True)
    request.num_computed_tokens = 48
    assert step(scheduler, (request, request.num_prompt_tokens - 48)).saves == []
    assert not_admitted(store) == 2


@pytest.mark.parametrize("least", [1, 4, 5, 6])
def test_short_prompts_are_not_saved(opened: Any, least: int) -> None:
    store = opened({"min_blocks": least})
    saved = prefill(engine(store), FakeRequest("r", list(range(5))))
    assert saved == ([(0, 4), (4, 5)] if least <= 5 else [])
    assert not_admitted(store) == (0 if least <= 5 else 5)


def test_short_prompts_are_uses_all_the_same(opened: Any) -> None:
    store = opened(SECOND_USE | {"min_blocks": 4})
    scheduler = engine(store)
    for name in "ab":
        assert prefill(scheduler, FakeRequest(name, [0, 1, 2])) == []
    assert not_admitted(store) == 6
    assert prefill(scheduler, FakeRequest("c", [0, 1, 2, 3, 4])) == [(0, 3)]


@pytest.mark.parametrize("role", ["producer", "consumer"])
def test_every_role_notes_and_hits_in_the_engines_own_cache_are_uses(opened: Any, role: str) -> None:
    store, other = opened(SECOND_USE), opened(SECOND_USE)
    roles = {"can_load": role == "consumer", "can_save": role == "producer"}
    first = engine(store, **roles)
    assert prefill(first, FakeRequest("a", list(range(5)))) == []
    assert prefill(engine(other), FakeRequest("b", list(range(5)))) == [(0, 4), (4, 5)]
    if role == "producer":
        # All but the last block lies in the engine's own cache; it is saved from there.
        again = FakeRequest("c", list(range(5)))
        arrive(first, again)
        assert answer(first, again, computed=4 * TOKENS) == (0, False)
        again.num_computed_tokens = 4 * TOKENS
        assert spans(step(first, (again, TOKENS + 3)).saves) == [(0, 4), (4, 5)]


def test_a_preempted_request_is_not_its_own_first_use(opened: Any) -> None:
    store = opened(SECOND_USE)
    scheduler, request = engine(store), FakeRequest("r", list(range(6)))
    assert prefill(scheduler, request) == []
    for _ in range(3):
        # Some tokens were decoded, so its chain is longer when it comes back.
        request.block_hashes = chain(*range(7))
        request.num_computed_tokens = 0
        request.num_tokens += TOKENS
        assert answer(scheduler, request) == (0, False)
        assert step(scheduler, (request, request.num_prompt_tokens)).saves == []
    assert not_admitted(store) == 6, "counted once"
    assert open_space(store).note(digests(chain(*range(7)))) == 6


def test_a_session_is_not_its_own_first_use_either(opened: Any) -> None:
    store = opened(SECOND_USE)
    scheduler, request = engine(store), FakeRequest("r", [0, 1, 2])
    request.resumable = True
    open_space(store).note(digests(chain(0, 1, 2, 3)))
    saved = prefill(scheduler, request)
    for grown in (5, 8, 12):
        request.block_hashes = chain(*range(grown))
        request.num_prompt_tokens = request.num_tokens = grown * TOKENS + 3
        saved += spans(
            step(scheduler, (request, request.num_prompt_tokens - request.num_computed_tokens)).saves
        )
        settle(scheduler, request)
        saved += spans(step(scheduler, (request, 1)).saves)
        request.num_computed_tokens -= 1
    # Blocks 0 to 2 were known when it came, 3 when it grew; what it adds itself, nobody has asked for.
    assert saved == [(0, 3), (3, 4)]
    # But it counts for others.
    assert open_space(store).note(digests(chain(*range(12)))) == 12


def test_a_session_that_outgrows_min_blocks_is_saved_whole(opened: Any) -> None:
    store = opened({"min_blocks": 4})
    scheduler, request = engine(store), FakeRequest("r", [0, 1])
    request.resumable = True
    assert prefill(scheduler, request) == []
    request.block_hashes = chain(*range(6))
    request.num_prompt_tokens = 6 * TOKENS + 3
    assert spans(step(scheduler, (request, 4 * TOKENS)).saves) == [(0, 4), (4, 6)]


@pytest.mark.parametrize(("known", "saved"), [(3, [(0, 3), (3, 5)]), (2, [(0, 2)]), (0, [])])
def test_decoded_blocks_follow_the_prompt(opened: Any, known: int, saved: list[tuple[int, int]]) -> None:
    store = opened(SECOND_USE, kv={"save_decode": True})
    scheduler, request = engine(store), FakeRequest("r", [0, 1, 2])
    if known:
        open_space(store).note(digests(chain(*range(known))))
    found = prefill(scheduler, request)
    request.block_hashes = chain(0, 1, 2, 50, 51)
    request.num_tokens = 5 * TOKENS + 1
    found += spans(step(scheduler, (request, 5 * TOKENS - request.num_computed_tokens)).saves)
    scheduler.request_finished(request, [list(range(100, 105))])
    found += spans(step(scheduler).flushes)
    assert found == saved
    assert not_admitted(store) == 5 - (saved[-1][1] if saved else 0)


def test_decoding_after_a_prompt_shorter_than_a_block(opened: Any) -> None:
    for admission, kept in (({}, True), (SECOND_USE, False), ({"min_blocks": 2}, False)):
        scheduler = engine(opened(admission, kv={"save_decode": True}))
        request = FakeRequest("r", [])
        scheduler.on_new_request(request)
        assert answer(scheduler, request) == (0, False)
        assert step(scheduler, (request, 3)).saves == []
        request.block_hashes, request.num_tokens = chain(50, 51), 2 * TOKENS + 4
        assert step(scheduler, (request, 2 * TOKENS)).saves == []
        scheduler.request_finished(request, [[100, 101]])
        assert spans(step(scheduler).flushes) == ([(0, 2)] if kept else [])


class Slow:
    """A space whose notes wait until they are let go, and then answer as they are told."""

    def __init__(self, store: Store) -> None:
        self.space = open_space(store)
        self.calls = 0
        self.noted = 0
        self.go = threading.Event()
        self.space.note = self._note  # type: ignore[method-assign]

    def _note(self, packed: bytes) -> int:
        self.calls += 1
        self.go.wait(PATIENCE_S)
        return min(self.noted, len(packed) // 16)


def begun(slow: Slow, scheduler: KVScheduler, request: FakeRequest) -> None:
    scheduler.on_new_request(request)
    assert answer(scheduler, request) == (0, False)


def test_a_late_answer_delays_the_save_and_nothing_else(opened: Any) -> None:
    store = opened(SECOND_USE)
    slow = Slow(store)
    scheduler, request = engine(store, space=slow.space), FakeRequest("r", list(range(10)))
    began = time.monotonic()
    begun(slow, scheduler, request)
    for tokens in (4 * TOKENS, 5 * TOKENS, TOKENS + 3, 1, 1):
        assert step(scheduler, (request, tokens)).saves == []
    assert time.monotonic() - began < PATIENCE_S / 2, "the engine's thread waited"
    slow.noted = 10
    slow.go.set()
    settle(scheduler, request)
    # Everything, the remainder of the prompt included, a step of decoding later.
    assert spans(step(scheduler, (request, 1)).saves) == [(0, 4), (4, 8), (8, 10)]
    assert step(scheduler, (request, 1)).saves == []
    assert (slow.calls, not_admitted(store)) == (1, 0)
    assert not scheduler.requests.unsaved


def test_a_late_answer_while_decoded_blocks_are_saved_too(opened: Any) -> None:
    store = opened(SECOND_USE, kv={"save_decode": True})
    slow = Slow(store)
    scheduler, request = engine(store, space=slow.space), FakeRequest("r", [0, 1])
    begun(slow, scheduler, request)
    assert step(scheduler, (request, request.num_prompt_tokens)).saves == []
    slow.noted = 2
    slow.go.set()
    settle(scheduler, request)
    # The prompt's end closes a segment, once.
    assert spans(step(scheduler, (request, 1)).saves) == [(0, 2)]
    request.block_hashes = chain(0, 1, 50)
    assert step(scheduler, (request, TOKENS)).saves == []


@pytest.mark.parametrize("save_decode", [False, True])
def test_a_request_that_ends_before_the_answer_is_saved_at_the_next_step(
    opened: Any, save_decode: bool
) -> None:
    store = opened(SECOND_USE, kv={"save_decode": save_decode})
    slow = Slow(store)
    scheduler, request = engine(store, space=slow.space), FakeRequest("r", list(range(6)))
    begun(slow, scheduler, request)
    assert step(scheduler, (request, request.num_prompt_tokens)).saves == []
    slow.noted = 5
    slow.go.set()
    settle(scheduler, request)
    scheduler.request_finished(request, [list(range(100, 107))])
    flushes = step(scheduler).flushes
    assert spans(flushes) == [(0, 4), (4, 5)]
    assert flushes[1].tables == {0: [104]}
    assert not_admitted(store) == 1
    assert not scheduler.requests and not scheduler.requests.unsaved


def test_an_answer_that_never_comes_saves_nothing_and_is_counted(opened: Any) -> None:
    store = opened(SECOND_USE)
    slow = Slow(store)
    scheduler, request = engine(store, space=slow.space), FakeRequest("r", list(range(6)))
    begun(slow, scheduler, request)
    step(scheduler, (request, request.num_prompt_tokens))
    scheduler.request_finished(request, [list(range(100, 107))])
    assert step(scheduler).flushes == []
    assert not_admitted(store) == 6
    slow.go.set()


def test_a_request_decided_in_time_is_not_flushed_at_its_end(opened: Any) -> None:
    scheduler, request = engine(opened(SECOND_USE)), FakeRequest("r", list(range(6)))
    prefill(scheduler, request)
    again = FakeRequest("s", list(range(6)))
    assert prefill(scheduler, again) == [(0, 4), (4, 6)]
    for one in (request, again):
        scheduler.request_finished(one, [list(range(100, 107))])
    assert step(scheduler).flushes == []


def test_an_index_that_fails_admits_nothing(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(SECOND_USE)
    space = open_space(store)
    space.note(digests(chain(*range(5))))

    def broken(*_: Any, **__: Any) -> int:
        raise TransientError("gone")

    monkeypatch.setattr(store.index, "note", broken)
    assert prefill(engine(store, space=space), FakeRequest("r", list(range(5)))) == []
    counts = store.counters.snapshot()
    assert (counts["note_failures"], counts["save_blocks{not_admitted}"]) == (1, 5)


def test_an_index_that_has_lost_the_namespace_learns_it_again(opened: Any) -> None:
    store = opened(SECOND_USE)
    space = open_space(store, model="never registered")
    assert space.note(digests(chain(1, 2))) == 0
    assert space.note(digests(chain(1, 2))) == 2
    assert store.counters.snapshot()["note_failures"] == 0


def test_a_full_queue_admits_nothing(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for can_load in (True, False):
        store = opened(SECOND_USE)
        scheduler = engine(store, can_load=can_load)
        store.transfers.drain(PATIENCE_S)
        monkeypatch.setattr(store.transfers, "call", lambda job: False)
        assert prefill(scheduler, FakeRequest("r", list(range(5)))) == []
        assert not_admitted(store) == 5


def test_what_is_never_saved_is_not_noted(opened: Any) -> None:
    store = opened(SECOND_USE)
    scheduler = engine(store)
    lora = FakeRequest("l", list(range(4)))
    lora.lora_request = object()
    assert prefill(scheduler, lora) == []
    scheduler.reset_cache()
    late = FakeRequest("t", list(range(4)))
    arrive(scheduler, late)
    assert open_space(store).note(digests(chain(*range(4)))) == 0
    assert not_admitted(store) == 0


def test_without_second_use_nobody_notes_anything(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened({})
    space = open_space(store)
    monkeypatch.setattr(space, "note", lambda packed: pytest.fail("noted"))
    assert prefill(engine(store, space=space), FakeRequest("r", list(range(5)))) == [(0, 4), (4, 5)]


@pytest.mark.parametrize("seed", range(40))
def test_whenever_the_answer_comes_each_block_worth_it_is_saved_once(opened: Any, seed: int) -> None:
    """Chunks of any size, an answer at any step, a preemption or two: no block lost, none saved twice."""
    source = random.Random(seed)
    store = opened(SECOND_USE, kv={"save_decode": False, "match_deadline_s": 60.0})
    slow = Slow(store)
    scheduler = engine(store, space=slow.space, segment_blocks=[source.randint(1, 6)])
    blocks = source.randint(0, 20)
    request = FakeRequest("r", list(range(blocks)))
    slow.noted = source.randint(0, blocks)
    comes = source.randint(0, 12)
    begun(slow, scheduler, request)
    saved: list[int] = []
    for number in range(14):
        if number == comes:
            slow.go.set()
            settle(scheduler, request)
        left = request.num_prompt_tokens - request.num_computed_tokens
        tokens = min(left, source.randint(1, 5 * TOKENS)) if left > 0 else 1
        for save in step(scheduler, (request, tokens)).saves:
            saved += range(save.first, save.first + len(save.hashes))
            report(scheduler, ended={save.segment})
    # A request of few steps may have all that it needs only at its end.
    scheduler.request_finished(request, [list(range(100, 130))])
    for save in step(scheduler).flushes:
        saved += range(save.first, save.first + len(save.hashes))
    computed = min(request.num_computed_tokens, request.num_prompt_tokens) // TOKENS
    worth = slow.noted if blocks else 0
    if computed == blocks:
        assert saved == list(range(worth))
        assert not_admitted(store) == blocks - worth
    else:
        assert saved == list(range(len(saved))) and len(saved) <= min(worth, computed)
