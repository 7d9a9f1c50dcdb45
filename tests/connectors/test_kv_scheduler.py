"""The scheduler's half alone: what it promises and plans, request by request, on a real store.

Requests are stand-ins with the attributes that it reads; vLLM's own scheduler drives it in tests/e2e.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the connectors' tests need the full set-up: make setup")

from connectors.kv_scheduler import KVScheduler
from connectors.kv_types import KVStoreMetadata, KVStoreWorkerMetadata
from kvstore.store import Match, Space, Store
from tests.connectors.groups import SCHEDULERS, TOKENS
from tests.store.world import chain, make_store, open_space, slots

pytestmark = pytest.mark.engine


@dataclass
class FakeRequest:
    """`steps` names its chain; equal steps are equal prefixes."""

    request_id: str
    steps: list[int]
    num_computed_tokens: int = 0
    block_hashes: list[bytes] = field(init=False)
    num_prompt_tokens: int = field(init=False)
    num_tokens: int = field(init=False)
    skip_reading_prefix_cache: bool = False

    def __post_init__(self) -> None:
        self.block_hashes = chain(*self.steps)
        self.num_prompt_tokens = self.num_tokens = len(self.steps) * TOKENS + 3


class FakeBlocks:
    def __init__(self, ids: list[int]) -> None:
        self._ids = ids

    def get_block_ids(self) -> tuple[list[int], ...]:
        return (self._ids,)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = make_store(tmp_path, kv={"match_deadline_s": 5.0})
    yield made
    made.close()


@pytest.fixture
def space(store: Store) -> Space:
    return open_space(store)


@pytest.fixture
def make(store: Store, space: Space) -> Callable[..., KVScheduler]:
    def scheduler(**changes: Any) -> KVScheduler:
        options: dict[str, Any] = {
            "hash_tokens": TOKENS,
            "segment_blocks": [4],
            "prefix_caching": True,
            "can_load": True,
            "can_save": True,
        }
        return KVScheduler(store, space, SCHEDULERS, **options | changes)

    return scheduler


def answer(scheduler: KVScheduler, request: FakeRequest, computed: int = 0) -> tuple[int | None, bool]:
    """Ask like the scheduler does, step after step, until the answer isn't "later"."""
    for _ in range(2000):
        got = scheduler.get_num_new_matched_tokens(request, computed)  # type: ignore[arg-type]
        if got[0] is not None:
            return got
        step(scheduler)
        time.sleep(0.001)
    raise AssertionError("no answer")


def step(scheduler: KVScheduler, *scheduled: tuple[FakeRequest, int]) -> KVStoreMetadata:
    """One step: `scheduled` requests with their numbers of tokens."""
    tables = {request.request_id: list(range(100, 200)) for request, _ in scheduled}
    output = SimpleNamespace(
        num_scheduled_tokens={request.request_id: tokens for request, tokens in scheduled},
        scheduled_new_reqs=[],
        scheduled_cached_reqs=SimpleNamespace(new_block_ids=[]),
        new_block_ids_to_zero=None,
        has_sync_kv_loads=False,
        kv_connector_block_state=SimpleNamespace(
            get_block_ids=lambda name: (tables[name],), boundary_state_offloads={}
        ),
    )
    metadata = scheduler.build_connector_meta(output)  # type: ignore[arg-type]
    for request, tokens in scheduled:
        request.num_computed_tokens += tokens
    return metadata


def report(
    scheduler: KVScheduler,
    *,
    finished: set[str] | None = None,
    failed: dict[str, int] | None = None,
    ended: set[Any] | None = None,
) -> None:
    scheduler.update_connector_output(
        SimpleNamespace(
            finished_recving=finished,
            kv_connector_worker_meta=KVStoreWorkerMetadata(
                dict.fromkeys(ended or (), (1, True)),
                {name: {0: block} for name, block in (failed or {}).items()},
            ),
        )  # type: ignore[arg-type]
    )


def allocate(scheduler: KVScheduler, request: FakeRequest, external: int) -> None:
    scheduler.update_state_after_alloc(request, FakeBlocks(list(range(50, 90))), external)  # type: ignore[arg-type]


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

    def slow(packed: bytes) -> Match:
        late.wait(30)
        return Match([], 0, "absent")

    space.match = slow  # type: ignore[method-assign]
    object.__setattr__(store.settings.kv, "match_deadline_s", 0.05)
    scheduler, request = make(), FakeRequest("r", [1, 2, 3])
    scheduler.on_new_request(request)
    began = time.monotonic()
    assert scheduler.get_num_new_matched_tokens(request, 0) == (None, False)
    assert time.monotonic() - began < 0.04, "the engine's thread waited"
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
    for _ in range(100):
        if scheduler.get_num_new_matched_tokens(request, 0)[0]:
            break
        step(scheduler)
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
    assert scheduler._requests["o"].match is None


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


def test_what_another_request_is_saving_is_not_saved_twice(make: Any) -> None:
    scheduler = make(segment_blocks=[16])
    first, second = FakeRequest("a", [*range(6), 1]), FakeRequest("b", [*range(6), 2, 3])
    for request in (first, second):
        assert answer(scheduler, request) == (0, False)
    saves = step(scheduler, (first, first.num_prompt_tokens), (second, second.num_prompt_tokens)).saves
    assert [(save.first, len(save.hashes)) for save in saves] == [(0, 7), (6, 2)]
    report(scheduler, ended={save.segment for save in saves})
    assert not scheduler._saving._busy and not scheduler._saving.under_way
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
    assert not scheduler._requests
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
    assert not scheduler._requests and not scheduler._unsaved
    assert scheduler._loading.held == 0
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


def test_bad_segments_are_not_promised_again(make: Any, space: Space) -> None:
    space.save(slots(chain(*range(6))))
    scheduler = make()
    [run] = space.match(b"".join(one[:16] for one in chain(*range(6)))).runs
    scheduler.update_connector_output(
        SimpleNamespace(
            finished_recving=None,
            kv_connector_worker_meta=KVStoreWorkerMetadata(bad_segments={run.segment}),
        )
    )
    assert answer(scheduler, FakeRequest("r", list(range(6)))) == (0, False)


def test_nothing_is_promised_while_the_workers_can_read_nothing(
    make: Any, store: Store, space: Space
) -> None:
    space.save(slots(chain(*range(6))))
    scheduler = make()

    def told(down: bool) -> None:
        meta = KVStoreWorkerMetadata(payloads_down={0: down})
        scheduler.update_connector_output(
            SimpleNamespace(finished_recving=None, kv_connector_worker_meta=meta)
        )

    told(True)
    assert answer(scheduler, FakeRequest("down", list(range(6)))) == (0, False)
    assert store.counters.snapshot()["miss_blocks{breaker_open}"] == 6
    told(False)
    tokens, later = answer(scheduler, FakeRequest("up", list(range(6))))
    assert tokens and later


def test_adapters_and_clients_names_are_cached_only_if_trusted(make: Any, store: Store, space: Space) -> None:
    space.save(slots(chain(*range(4))))
    lora, named = FakeRequest("l", list(range(4))), FakeRequest("n", list(range(4)))
    lora.lora_request = object()  # type: ignore[attr-defined]
    named.mm_features = [SimpleNamespace(identifier="mine")]  # type: ignore[attr-defined]
    scheduler = make()
    assert answer(scheduler, lora) == (0, False)
    assert step(scheduler, (lora, lora.num_prompt_tokens)).saves == []
    assert answer(scheduler, named) == (32, True)
    object.__setattr__(store.settings.identity, "client_uuids", "refuse")
    object.__setattr__(store.settings.identity, "lora", "trust")
    other = FakeRequest("o", list(range(4)))
    other.mm_features = named.mm_features  # type: ignore[attr-defined]
    assert answer(scheduler, other) == (0, False)
    again = FakeRequest("again", list(range(4)))
    again.lora_request = object()  # type: ignore[attr-defined]
    assert answer(scheduler, again) == (32, True)
    object.__setattr__(store.settings.identity, "client_uuids", "trust")
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
    assert not scheduler._unsaved
    # After a preemption it starts over, and is looked at again.
    request.num_computed_tokens = 0
    assert answer(scheduler, request) == (0, False)
    assert scheduler._unsaved


def test_a_bug_costs_a_miss_and_not_the_engine(
    make: Any, space: Space, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler, request = make(), FakeRequest("r", [1, 2])
    scheduler._wants_match = None
    scheduler.on_new_request(request)
    assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    scheduler._cacheable = None
    assert step(scheduler, (request, 16)).saves == []
    assert "the engine goes on without" in caplog.text
