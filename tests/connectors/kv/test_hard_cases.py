"""The scheduler's half where the engine knows other things of a request: drafts that were rejected, loads of
somebody else, blocks that are handed out again, resets while a prompt that was handed over waits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the connectors' tests need the full set-up: make setup")

from vllm.v1.core.kv_cache_utils import init_none_hash

from connectors.kv.scheduler import KVScheduler
from kvstore.keys import salt_id
from kvstore.store.store import Store
from tests.connectors.groups import TOKENS
from tests.connectors.kv.test_handoff import HASH, SEND, ask, finish, given, handoffs, made, reported
from tests.connectors.kv.world import block_names, half
from tests.fake_vllm import FakeBlocks, FakeCachedRequests, FakeNewRequest, FakeStep, scheduled, step
from tests.store.world import make_store, open_space, slots

pytestmark = pytest.mark.engine

IDS = list(range(100, 150))


@pytest.fixture(autouse=True)
def _root() -> None:
    init_none_hash(HASH)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with make_store(tmp_path, kv={"match_deadline_s": 60.0, "handoff_wait_s": 30.0}) as opened:
        yield opened


@pytest.fixture
def saving(tmp_path: Path) -> Iterator[Store]:
    """What is decoded is saved, too."""
    with make_store(tmp_path, kv={"match_deadline_s": 60.0, "save_decode": True}) as opened:
        yield opened


@pytest.fixture
def decoding(saving: Store) -> KVScheduler:
    return whole(saving)


def whole(store: Store, **changes: Any) -> KVScheduler:
    """One that hands prompts over, too."""
    return half(store, open_space(store), handoffs=handoffs(open_space(store)), **changes)


def plain(base: list[int]) -> Any:
    return made(base, None)


# ---- what is surely computed ------------------------------------------------------------------------


def test_the_place_of_a_rejected_draft_is_not_flushed(decoding: KVScheduler) -> None:
    request = plain(list(range(TOKENS + 4)))
    decoding.on_new_request(request)
    assert ask(decoding, request) == (0, False)
    step(decoding, (request, TOKENS + 4))
    request.append_output_token_ids([70])
    # One token and three drafts, which would fill the second block; the last one is rejected, and what was
    # sampled in its place fills the block's name, but nobody has computed it.
    step(decoding, (request, 4))
    request.append_output_token_ids([71, 72, 73])
    request.num_computed_tokens -= 1
    assert len(request.block_hashes) == 2 and request.num_computed_tokens == 2 * TOKENS - 1
    decoding.request_finished(request, ([100, 101],))
    assert step(decoding).flushes == []


@pytest.mark.parametrize("why", ["producer", "load failed"])
def test_what_somebody_else_only_promised_after_a_preemption_is_not_flushed(saving: Store, why: str) -> None:
    decoding, request = whole(saving, can_load=why != "producer"), plain(list(range(4 * TOKENS + 3)))
    decoding.on_new_request(request)
    assert ask(decoding, request) == (0, False)
    decoding.requests.get("r").load_failed = why == "load failed"
    step(decoding, (request, 2 * TOKENS))
    # It loses its blocks, and another connector of MultiConnector promises to load all of them.
    request.num_computed_tokens = 0
    step(decoding, preempted={"r"})
    assert ask(decoding, request) == (0, False)
    decoding.requests.get("r").progress.saved = [0]
    request.num_computed_tokens = 4 * TOKENS
    decoding.request_finished(request, (IDS[:4],))
    assert step(decoding).flushes == []


# ---- resets -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("clean", [True, False])
def test_a_reset_voids_a_prompt_that_was_handed_over(store: Store, clean: bool) -> None:
    space = open_space(store)
    one = whole(store, holds_blocks=lambda: not clean)
    request = given(list(range(20)))
    space.save(slots(handoffs(space).names.of(block_names(request), 20)))
    one.on_new_request(request)
    assert ask(one, request) == (20, True)
    one.reset_cache()
    assert ask(one, request) == (0, False)
    assert one.requests.get("r").receiving is None


def test_a_hand_over_of_former_weights_is_not_promised_under_new_ones(store: Store) -> None:
    one = whole(store, holds_blocks=lambda: False)
    request = made(list(range(20)), SEND)
    one.on_new_request(request)
    assert ask(one, request) == (0, False)
    assert step(one, (request, 20)).saves
    one.reset_cache()
    request.num_computed_tokens = 20
    assert finish(one, request) == (False, None)


def test_what_a_session_takes_back_is_not_flushed_under_what_comes_instead(decoding: KVScheduler) -> None:
    """Asynchronous scheduling computes the last token while its turn ends; the next turn overwrites it."""
    request = plain(list(range(2 * TOKENS - 1)))
    decoding.on_new_request(request)
    assert ask(decoding, request) == (0, False)
    step(decoding, (request, 2 * TOKENS - 1))
    step(decoding, (request, 1))
    # As vLLM's scheduler does: back to what was computed of the turn, and its last token makes room.
    request.num_computed_tokens = 2 * TOKENS - 1
    request.append_output_token_ids(list(range(80, 90)))
    request.num_prompt_tokens = request.num_tokens
    decoding.request_finished(request, ([100, 101],))
    assert step(decoding).flushes == []


def test_a_match_of_other_content_is_void(store: Store) -> None:
    one, request = whole(store), plain(list(range(2 * TOKENS)))
    open_space(store).save(slots(request.block_hashes))
    one.on_new_request(request)
    assert ask(one, request) == (2 * TOKENS, True)
    request.block_hashes = plain(list(range(1, 2 * TOKENS + 1))).block_hashes
    assert ask(one, request) == (0, False)


# ---- blocks that are handed out again ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({}, True),
        ({"scheduled_new_reqs": [FakeNewRequest(([7, 8],))]}, True),
        ({"scheduled_new_reqs": [FakeNewRequest(([7, 101],))]}, False),
        ({"scheduled_cached_reqs": FakeCachedRequests([None, ([101],)])}, False),
        ({"new_block_ids_to_zero": [101]}, False),
    ],
    ids=["none", "others", "to a new request", "to a running one", "to be zeroed"],
)
def test_a_block_that_is_handed_out_again_is_not_flushed(
    decoding: KVScheduler, fields: dict[str, Any], kept: bool
) -> None:
    """vLLM's second model runner zeroes and fills new blocks before a connector may read old ones."""
    one = decoded(decoding)
    metadata = decoding.build_connector_meta(FakeStep(**fields))
    assert [save.tables for save in metadata.flushes] == ([{0: [101]}] if kept else [])
    assert decoding.saving.under_way == (2 if kept else 1), "the prompt's, and this one"
    # What wasn't saved may be saved by the next one.
    decoding.request_finished(again := decoded(decoding, finish=False), ([100, 101],))
    assert bool(decoding.build_connector_meta(FakeStep()).flushes) == (not kept)
    assert again.block_hashes == one.block_hashes


@pytest.mark.parametrize("block", [101, 102])
def test_a_block_that_another_connector_loads_into_is_not_flushed(decoding: KVScheduler, block: int) -> None:
    """MultiConnector: such a request isn't scheduled, so that no step names its blocks; and a writer by RDMA
    waits for no gather that is queued."""
    request = plain(list(range(200, 200 + 3 * TOKENS)))
    decoding.on_new_request(request)
    assert ask(decoding, request) == (0, False)
    decoded(decoding)
    decoding.update_state_after_alloc(request, FakeBlocks([7, block]), 0)
    assert len(step(decoding).flushes) == (block == 102)
    # It holds for that step alone.
    decoding.request_finished(decoded(decoding, finish=False), ([100, 101],))
    assert len(step(decoding).flushes) == (block == 101)


def decoded(engine: KVScheduler, *, finish: bool = True) -> Any:
    request = plain(list(range(TOKENS)))
    engine.on_new_request(request)
    assert ask(engine, request) == (0, False)
    step(engine, (request, TOKENS))
    request.append_output_token_ids(list(range(70, 71 + TOKENS)))
    step(engine, (request, TOKENS))
    if finish:
        engine.request_finished(request, ([100, 101],))
    return request


def test_the_workers_hear_of_a_prompts_end_whatever_happens(
    store: Store, monkeypatch: Any, faults: object
) -> None:
    one, request = whole(store), made(list(range(20)), SEND)
    one.on_new_request(request)
    assert ask(one, request) == (0, False)
    step(one, (request, 20))
    monkeypatch.setattr(one.handoffs, "handle", lambda *_: 1 / 0)
    assert finish(one, request) == (False, None)
    metadata = step(one)
    assert metadata.lost_blocks == {"r"} and not metadata.handed_over
    assert not len(one.requests.keepers)


def test_a_hand_over_that_starts_over_saves_again_what_was_lost(store: Store) -> None:
    """An engine that only prefills never asks the index what is there."""
    one, request = whole(store, can_load=False), made(list(range(6 * TOKENS)), SEND, cache_salt="hers")
    one.on_new_request(request)
    assert ask(one, request) == (0, False)
    lost = step(one, (request, 4 * TOKENS)).saves
    assert [save.salt for save in lost] == [salt_id("hers")]
    request.num_computed_tokens = 0
    step(one, preempted={"r"})
    reported(one, lost, failed={"r"})
    assert ask(one, request) == (0, False)
    saves = step(one, (request, 6 * TOKENS)).saves
    assert [(save.first, len(save.hashes)) for save in saves] == [(0, 4), (4, 2)]
    assert {save.salt for save in saves} == {salt_id("hers")}
    assert finish(one, request)[1] is not None


@pytest.mark.parametrize("lost", [True, False])
def test_what_another_request_was_to_save_of_a_hand_over(store: Store, lost: bool) -> None:
    one = whole(store)
    first, second = made(list(range(32)), SEND), made(list(range(32)), SEND, name="second")
    saves = []
    for request in (first, second):
        one.on_new_request(request)
        assert ask(one, request) == (0, False)
        saves.append(step(one, (request, 32)).saves)
    assert saves[0] and not saves[1]
    reported(one, saves[0], failed={"r"} if lost else None)
    assert (finish(one, second)[1] is None) == lost


# ---- somebody else's loads --------------------------------------------------------------------------


@pytest.mark.parametrize("arrives", [True, False])
def test_what_somebody_else_loads_within_a_step_is_saved_when_it_has_arrived(
    store: Store, arrives: bool
) -> None:
    """MultiConnector: it is known after the step, and a failure voids what was computed with it."""
    one, request = whole(store), plain(list(range(6 * TOKENS)))
    one.on_new_request(request)
    assert ask(one, request) == (0, False)
    one.update_state_after_alloc(request, FakeBlocks(IDS), 0)
    request.num_computed_tokens = 2 * TOKENS
    assert one.build_connector_meta(scheduled([(request, 4 * TOKENS)], has_sync_kv_loads=True)).saves == []
    request.num_computed_tokens = 6 * TOKENS if arrives else TOKENS
    if arrives:
        request.append_output_token_ids([9])
        one.request_finished(request, (IDS[:6],))
        saved = step(one).flushes
    else:
        # vLLM takes it back to the last block that is there.
        assert step(one).saves == []
        saved = one.build_connector_meta(scheduled([(request, 5 * TOKENS)])).saves
    assert [(save.first, len(save.hashes)) for save in saved] == [(0, 4), (4, 2)]
