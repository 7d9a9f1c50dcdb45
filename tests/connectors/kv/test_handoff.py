"""Disaggregated prefill: names of partial blocks, what is handed over, the wait for it, and both ends.

Requests are vLLM's own, so that hashes, extra keys and cut-off prompts are what an engine has.
"""

from __future__ import annotations

import json
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis

pytest.importorskip("vllm", reason="the connectors' tests need the full set-up: make setup")

from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, hash_block_tokens, init_none_hash
from vllm.v1.request import Request, RequestStatus

from connectors.engine.layout import Group
from connectors.engine.step import RequestView
from connectors.kv.handoff.handoffs import Handoffs, open_handoffs
from connectors.kv.messages import KVStoreMetadata, Save
from connectors.kv.requests import Keeper
from connectors.kv.save import Saving
from connectors.kv.scheduler import KVScheduler
from kvstore.errors import TransientError
from kvstore.index.redis.index import RedisIndex
from kvstore.keys import SegmentId, block_key, digest, digests, new_segment_id, salt_id, writer_id
from kvstore.rules.prefix import PrefixRule
from kvstore.store.space import Space
from kvstore.store.store import Store
from schemas.settings import AdmissionSettings
from tests.connectors.groups import SCHEDULERS, TOKENS
from tests.connectors.kv.world import block_names, half, tell, views
from tests.fake_vllm import FakeBlocks, FakeReport, step
from tests.servers.redis import PATIENT, RedisServer
from tests.store.world import GROUP, SLOT_BYTES, chain, make_store, open_space, slots
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.engine

HASH = get_hash_fn_by_name("sha256")
#: What a client may call a request: C0, C1, overrides of direction, and much of it.
HOSTILE = "\x1b[2J\x9b31m\u202e\u2066\n" + "x" * 10_000
SEND = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None}


@pytest.fixture(autouse=True)
def _root() -> None:
    init_none_hash(HASH)


def group(reach: Any, size: int = TOKENS, window: int = 0, table: int = 0) -> Group:
    rule = PrefixRule(reach, size, window)
    return Group(GROUP, rule, (table,), offered=reach == "state", writers=1, part_bytes=SLOT_BYTES)


def image(name: str, offset: int, length: int) -> Any:
    where = PlaceholderRange(offset=offset, length=length)
    return MultiModalFeatureSpec(data=None, modality="image", identifier=name, mm_position=where)


def made(tokens: list[int], params: Any = None, max_tokens: int = 1, **more: Any) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, extra_args={"kv_transfer_params": params})
    sampling.skip_reading_prefix_cache = more.pop("skip", False)
    hasher = get_request_block_hasher(TOKENS, HASH)
    name = more.pop("name", "r")
    return Request(name, tokens, sampling, None, block_hasher=hasher, **more)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = make_store(tmp_path, kv={"match_deadline_s": 60.0, "handoff_wait_s": 60.0})
    yield opened
    opened.close()


@pytest.fixture
def space(store: Store) -> Space:
    return open_space(store)


def handoffs(space: Space, groups: list[Group] | None = None, **more: Any) -> Handoffs:
    return Handoffs(
        space,
        groups or SCHEDULERS,
        hash_tokens=TOKENS,
        hash_function=HASH,
        fits=lambda group, parts: True,
        **more,
    )


def name_of_tail(request: Request, tokens: int) -> bytes:
    return RequestView(request).name_of_tail(tokens, TOKENS, HASH)


# ---- names ------------------------------------------------------------------------------------------


def test_a_partial_block_is_named_by_all_that_is_in_it_and_before_it() -> None:
    name, base = name_of_tail, list(range(20))
    lora = LoRARequest("adapter", 1, "/adapter")
    names = [
        name(made(base), 20),
        name(made(base), 19),
        name(made(base), 16),
        name(made(base[:4]), 4),
        name(made([*base[:19], 99]), 20),
        name(made([99, *base[1:]]), 20),
        name(made(base, cache_salt="s"), 20),
        name(made(base[:4], cache_salt="s"), 4),
        name(made(base, lora_request=lora), 20),
        name(made(base, mm_features=[image("a", 17, 2)]), 20),
        name(made(base, mm_features=[image("b", 17, 2)]), 20),
        name(made(base, mm_features=[image("a", 16, 2)]), 20),
    ]
    full = [one for request in (made(base), made(list(range(24)))) for one in request.block_hashes]
    assert len({*names, *full}) == len(names) + 3
    assert names[0] != hash_block_tokens(HASH, full[1], base[16:], None), "marked"
    assert {len(one) for one in names} == {len(full[0])}
    assert name(made([*base, 21, 22], name="other"), 20) == names[0], "what follows is no part of it"


def test_every_group_finds_the_partial_block_at_its_own_place(space: Space) -> None:
    groups = [group("prefix"), group("window", 2 * TOKENS, 12, 1)]
    handing, base = handoffs(space, groups), list(range(64))
    request = made(base)
    for tokens in range(1, 50):
        names = handing.names.of(block_names(request), tokens)
        assert len(names) * TOKENS == -(-tokens // 16) * 16
        for number, size in ((0, 8), (1, 16)):
            last = -(-tokens // size) - 1
            [packed] = [handing.names.packed(names, number, range(last, last + 1))]
            whole = tokens % size == 0
            expected = request.block_hashes[tokens // 8 - 1] if whole else name_of_tail(request, tokens)
            assert packed == digest(block_key(expected, number)), (tokens, size)
            if last:
                before = handing.names.packed(names, number, range(last))
                ratio = size // 8
                assert before[-16:] == digest(block_key(request.block_hashes[last * ratio - 1], number))


# ---- what is handed over ----------------------------------------------------------------------------


def test_a_prompt_is_handed_over_whole_or_as_far_as_a_state_allows(space: Space) -> None:
    base = list(range(20))
    whole = handoffs(space).sending(*views(made(base, SEND)))
    assert whole is not None and (whole.tokens, whole.keeps_blocks) == (20, True)
    several = handoffs(space).sending(*views(made(base, SEND, max_tokens=9)))
    assert several is not None and not several.keeps_blocks
    assert handoffs(space).sending(*views(made(base))) is None
    assert handoffs(space).sending(*views(made(base, {"do_remote_decode": False}))) is None
    assert handoffs(space).sending(*views(made(base, SEND, resumable=True))) is None

    states = handoffs(space, [group("prefix"), group("state", table=1)])
    request = made(base, SEND, max_tokens=9)
    cut = states.sending(*views(request))
    assert cut is not None and cut.tokens == request.num_prompt_tokens == 19
    assert request.prompt_token_ids == list(request.all_token_ids) == base[:19]
    assert (request.num_tokens, request.max_tokens) == (19, 1)
    assert cut.names == states.names.of(block_names(made(base)), 19)
    for refused in (
        made([1], SEND),
        made(base, SEND, skip=True),
        made(base, SEND, mm_features=[image("a", 16, 4)]),
    ):
        before = list(refused.all_token_ids)
        assert states.sending(*views(refused)) is None
        assert list(refused.all_token_ids) == before
    assert states.sending(*views(made(base, SEND, mm_features=[image("a", 15, 4)]))) is not None
    full = made(list(range(24)), SEND)
    assert states.sending(*views(full)) is not None and len(full.block_hashes) == 2
    ahead = handoffs(space, lookahead=4).sending(*views(made(base, SEND)))
    assert ahead is not None and ahead.tokens == 17


@pytest.mark.parametrize(
    ("groups", "tokens"),
    [
        ([group("prefix")], 20),
        ([group("prefix"), group("window", TOKENS, 12, 1)], 19),
        ([group("prefix"), group("state", table=1)], 19),
    ],
)
def test_a_handle_fits_what_it_was_made_for(space: Space, groups: list[Group], tokens: int) -> None:
    here, base = handoffs(space, groups), list(range(20))
    request = made(base, SEND)
    sending = here.sending(*views(request))
    assert sending is not None
    handle = here.handle(RequestView(request), sending)
    assert handle["do_remote_prefill"] and not handle["do_remote_decode"] and handle["remote_block_ids"]
    there = here.receiver.begin(*views(made(base, handle, max_tokens=9)))
    assert there is not None and (there.tokens, there.names) == (tokens, sending.names)
    # Proxies that pass on less: the prompt says it all.
    assert here.receiver.begin(*views(made(base, {"do_remote_prefill": True}))) is not None

    assert here.receiver.begin(*views(made(base))) is None
    assert here.receiver.begin(*views(made(base, {**handle, "do_remote_prefill": False}))) is None
    assert here.receiver.begin(*views(made(base, {**handle, "remote_engine_id": "another's"}))) is None
    assert here.receiver.begin(*views(made([*base, 21], handle))) is None, "another prompt than was prefilled"
    assert here.receiver.begin(*views(made(base, {**handle, "remote_num_tokens": 1 << 62}))) is None
    assert here.receiver.begin(*views(made(base, "text"))) is None


def opened_by_settings(store: Store, space: Space, *, handoff: bool) -> Handoffs | None:
    object.__setattr__(store.settings.kv, "handoff", handoff)
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(
            tensor_parallel_size=2, pipeline_parallel_size=1, decode_context_parallel_size=1
        ),
        cache_config=SimpleNamespace(prefix_caching_hash_algo="sha256"),
        num_prefill_lookahead_tokens=0,
    )
    return open_handoffs(config, space, SCHEDULERS, hash_tokens=TOKENS, fits=lambda group, parts: True)


def test_an_engine_hands_over_what_its_settings_say(store: Store, space: Space) -> None:
    assert not type(store.settings.kv)().handoff
    assert opened_by_settings(store, space, handoff=False) is None
    opened = opened_by_settings(store, space, handoff=True)
    assert opened is not None
    request = made(list(range(20)), SEND)
    sending = opened.sending(*views(request))
    assert sending is not None
    assert opened.handle(RequestView(request), sending)["tp_size"] == 2
    assert sending.names == handoffs(space).names.of(block_names(made(list(range(20)))), 20)


def test_a_clients_name_of_its_request_does_not_steer_a_terminal(
    space: Space, caplog: pytest.LogCaptureFixture
) -> None:
    named = made(list(range(20)), {"do_remote_prefill": True, "remote_engine_id": "other\x9b"}, name=HOSTILE)
    assert handoffs(space).receiver.begin(*views(named)) is None
    [record] = caplog.records
    assert record.getMessage().isprintable() and len(record.getMessage()) < 400


def test_a_handle_does_not_name_the_host(space: Space) -> None:
    handing, request = handoffs(space), made(list(range(20)), SEND)
    sending = handing.sending(*views(request))
    assert sending is not None
    told = json.dumps(handing.handle(RequestView(request), sending))
    assert socket.gethostname() not in told and socket.getfqdn() not in told
    # Routers of other connectors look whether there is one.
    assert json.loads(told)["remote_host"]


# ---- the decode engine ------------------------------------------------------------------------------


@pytest.fixture
def scheduler(store: Store, space: Space) -> Callable[..., KVScheduler]:
    def build(groups: list[Group] | None = None, **changes: Any) -> KVScheduler:
        return half(store, space, handoffs=handoffs(space, groups), groups=groups or SCHEDULERS, **changes)

    return build


def ask(scheduler: KVScheduler, request: Request, computed: int = 0, within_s: float = PATIENCE_S) -> Any:
    """The answer, or None if it is still "later"."""
    end = time.monotonic() + within_s
    while (got := scheduler.get_num_new_matched_tokens(request, computed))[0] is None:
        if time.monotonic() > end:
            return None
        step(scheduler)
        time.sleep(0.001)
    return got


def given(base: list[int], **more: Any) -> Request:
    return made(base, {"do_remote_prefill": True}, max_tokens=9, **more)


@pytest.mark.parametrize("forgers", [16, 512])
def test_forged_hand_offs_keep_no_victim_waiting_and_cost_so_many_scripts(
    tmp_path: Path, redis_server: RedisServer, forgers: int
) -> None:
    """The attack: clients say of prompts that nobody has prefilled that they were handed over."""
    index = RedisIndex.from_settings(redis_server.url, PATIENT)
    settings = {"match_deadline_s": 60.0, "handoff_wait_s": PATIENCE_S}
    with closing(index), make_store(tmp_path, index=index, kv=settings) as store:
        space = open_space(store)
        space.register()
        engine = half(store, space, handoffs=handoffs(space), groups=SCHEDULERS)
        forged = [given([10 * number] * 20, name=f"forged-{number}") for number in range(1, forgers + 1)]
        victims = [made([3] * 20, name="plain"), given([5] * 20, name="handed over")]
        space.save(slots(victims[0].block_hashes))
        space.save(slots(handoffs(space).names.of(block_names(victims[1]), 20)))
        before, began = scripts(redis_server), time.monotonic()
        for request in [*forged, *victims]:
            engine.on_new_request(request)
        answers: dict[str, Any] = {}

        def answered() -> set[str]:
            for request in [*forged, *victims]:
                if request.request_id not in answers:
                    answer = engine.get_num_new_matched_tokens(request, 0)
                    if answer[0] is not None:
                        answers[request.request_id] = answer
            step(engine)
            return set(answers)

        until(lambda: answered() == {"plain", "handed over"})
        until(lambda: answered() and time.monotonic() - began > 2.0)
        assert len(answers) == 2, "whoever said that it was handed over waits for it"
        for request in forged:
            engine.requests.get(request.request_id).receiving.end = 0.0  # type: ignore[union-attr]
        until(lambda: len(answered()) == forgers + len(victims))
        waited_s = time.monotonic() - began
        assert (answers.pop("plain"), answers.pop("handed over")) == ((16, True), (20, True))
        assert set(answers.values()) == {(0, False)}
        # One question at a time, with pauses that double from 2 to 50 ms.
        each = 7 + waited_s / 0.05
        assert scripts(redis_server) - before <= each * forgers + 20


def scripts(server: RedisServer) -> int:
    """How many scripts a Redis has run."""
    with redis.Redis(port=server.port, protocol=2) as client:
        stats = client.info("commandstats")
    return sum(stats[one]["calls"] for one in ("cmdstat_evalsha", "cmdstat_eval") if one in stats)


def test_a_decode_engine_waits_for_all_of_the_prompt(scheduler: Any, space: Space) -> None:
    engine, base = scheduler(), list(range(20))
    request = given(base)
    names = handoffs(space).names.of(block_names(request), 20)
    engine.on_new_request(request)
    assert ask(engine, request, within_s=0.1) is None
    space.save(slots(names[:2]))
    assert ask(engine, request, within_s=0.1) is None, "the partial block is missing"
    space.save(slots(names[2:]), depth=2, chain=digests(names[:1]))
    assert ask(engine, request) == (20, True)
    engine.update_state_after_alloc(request, FakeBlocks([7, 8, 9]), 20)
    [load] = step(engine).loads
    assert (load.groups[0].hashes, load.groups[0].tables) == (names, {0: [7, 8, 9]})
    assert sum(run.count for run in load.groups[0].runs) == 3
    # It was handed over once: preempted later, the request is one like any other.
    engine.update_connector_output(FakeReport(finished_recving={"r"}))
    assert ask(engine, request) == (16, True)
    assert engine.request_finished(request, ([7, 8, 9],)) == (False, None)
    assert not engine.requests


@pytest.mark.parametrize(("prompt", "computed", "expected"), [(20, 16, 4), (17, 16, 0), (16, 8, 8)])
def test_what_the_engine_has_itself_is_not_loaded(
    scheduler: Any, space: Space, prompt: int, computed: int, expected: int
) -> None:
    base = list(range(prompt))
    request = given(base)
    space.save(slots(handoffs(space).names.of(block_names(request), prompt)))
    engine = scheduler()
    engine.on_new_request(request)
    assert ask(engine, request, computed) == (expected, expected > 0)


def test_windows_and_states_take_their_last_blocks(scheduler: Any, store: Store) -> None:
    groups = [group("prefix"), group("window", TOKENS, 12, 1), group("state", table=2)]
    for one, needed in ((PrefixRule("window", 8, 12), [1, 2]), (PrefixRule("state", 8), [2])):
        assert list(one.needed(19)) == needed
    space = open_space(store, groups=(GROUP, GROUP, GROUP))
    handing, base = handoffs(space, groups), list(range(20))
    request = given(base)
    receiving = handing.receiver.begin(*views(request))
    assert receiving is not None and receiving.tokens == 19

    def put(number: int, blocks: range) -> None:
        from kvstore.format.segment import Slot

        shape, data = GROUP.shape, memoryview(bytes(SLOT_BYTES))
        keys = [block_key(receiving.names[block], number) for block in blocks]
        space.save([Slot(key, data, "BF16", shape) for key in keys], depth=blocks.start, chain=bytes(16))

    put(0, range(3))
    put(2, range(2, 3))
    assert handing.receiver.look(receiving.names, 19) == "missing"
    put(1, range(2, 3))
    assert handing.receiver.look(receiving.names, 19) == "missing", "the window needs a block before the last"
    put(1, range(1, 2))
    found = handing.receiver.look(receiving.names, 19)
    assert not isinstance(found, str)
    assert [[(run.start, run.count) for run in runs] for runs in found.runs] == [
        [(0, 3)], [(1, 1), (2, 1)], [(2, 1)]
    ]  # fmt: skip
    assert (found.tokens, found.stored) == (19, (2, 2, 2))


def test_what_does_not_come_in_time_is_computed(scheduler: Any, store: Store, space: Space) -> None:
    object.__setattr__(store.settings.kv, "handoff_wait_s", 0.2)
    engine, base = scheduler(), list(range(20))
    request = given(base)
    space.save(slots(handoffs(space).names.of(block_names(request), 20)[:1]))
    began = time.monotonic()
    engine.on_new_request(request)
    # What is there is loaded all the same.
    assert ask(engine, request) == (8, True)
    assert 0.2 <= time.monotonic() - began < 30.0


def test_nobody_waits_for_an_index_that_fails(scheduler: Any, store: Store, space: Space) -> None:
    def failing(*args: Any, **options: Any) -> Any:
        raise TransientError("down")

    store.index.find = store.index.match = failing  # type: ignore[method-assign]
    engine, request = scheduler(), given(list(range(20)))
    began = time.monotonic()
    engine.on_new_request(request)
    assert ask(engine, request) == (0, False)
    assert time.monotonic() - began < 30.0


@pytest.mark.parametrize("standing", ["failed", "refused"])
def test_nobody_waits_for_a_writer_that_is_not_loaded_from(
    scheduler: Any, store: Store, space: Space, standing: Any
) -> None:
    object.__setattr__(store.settings.kv, "handoff_wait_s", 60.0)
    engine, request = scheduler(), given(list(range(20)))
    own, writer = store.backends.writer.name, "the prefill engine"
    store.backends.writer.adopt(writer)
    space.save(slots(handoffs(space).names.of(block_names(request), 20)))
    store.backends.writer.adopt(own)
    space.writers.believe(writer_id(writer), standing)
    began = time.monotonic()
    engine.on_new_request(request)
    assert ask(engine, request) == (0, False)
    assert time.monotonic() - began < 30.0


def test_last_saves_that_fail_leave_no_block_busy(
    scheduler: Any, monkeypatch: pytest.MonkeyPatch, faults: Counter[str]
) -> None:
    plan = Saving.plan

    def fails(self: Saving, *given: Any, **more: Any) -> Any:
        plan(self, *given, **more)
        raise RuntimeError("its segments are planned, and nobody hears of them")

    engine, request = scheduler(), made(list(range(20)), {"do_remote_decode": True})
    monkeypatch.setattr(Saving, "plan", fails)
    assert prefilled(engine, request, 20) == []
    assert engine.saving.under_way == 0 and not engine.saving._busy
    assert faults["SavePlanner._plan_request"] == 1
    assert finish(engine, request) == (False, None)


def test_an_aborted_wait_leaves_nothing(scheduler: Any) -> None:
    engine, request = scheduler(), given(list(range(20)))
    engine.on_new_request(request)
    assert ask(engine, request, within_s=0.05) is None
    request.status = RequestStatus.FINISHED_ABORTED
    assert engine.request_finished(request, ([],)) == (False, None)
    assert not engine.requests and not engine.requests.unsaved
    assert step(engine) == KVStoreMetadata(lost_blocks={"r"})


def test_a_load_of_it_that_failed_is_not_tried_again(scheduler: Any, space: Space) -> None:
    engine, request = scheduler(), given(list(range(20)))
    space.save(slots(handoffs(space).names.of(block_names(request), 20)))
    engine.on_new_request(request)
    assert ask(engine, request) == (20, True)
    engine.update_state_after_alloc(request, FakeBlocks([7, 8, 9]), 20)
    tell(engine, finished={"r"}, failed_loads={"r": {0: 2}})
    assert ask(engine, request, 16) == (0, False)


# ---- the prefill engine -----------------------------------------------------------------------------


def prefilled(engine: KVScheduler, request: Request, *chunks: int, **more: Any) -> list[Save]:
    engine.on_new_request(request)
    assert ask(engine, request) == (0, False)
    return [save for tokens in chunks for save in step(engine, (request, tokens), **more).saves]


def finish(engine: KVScheduler, request: Request, status: Any = RequestStatus.FINISHED_LENGTH_CAPPED) -> Any:
    request.status = status
    return engine.request_finished(request, ([], []))


def reported(engine: KVScheduler, saves: list[Save], *, failed: set[str] | None = None) -> None:
    ended: dict[SegmentId, tuple[int, bool]] = {save.segment: (1, not failed) for save in saves}
    tell(engine, ended_saves=ended, failed_handoffs=failed or set())


def test_a_prefill_engine_saves_the_partial_block_with_the_rest(scheduler: Any, store: Store) -> None:
    # Admission is about what might be of use; this will be.
    admission = AdmissionSettings(second_use=True, min_blocks=50)
    object.__setattr__(store.settings, "admission", admission)
    engine, request = scheduler(), made(list(range(20)), SEND, cache_salt="hers")
    saves = prefilled(engine, request, 16, 4)
    assert [save.tables for save in saves] == [{0: [100, 101, 102]}], "one segment, at the end"
    assert saves[0].salt == salt_id("hers")
    [save] = saves
    assert save.hashes[:2] == request.block_hashes[:2]
    assert save.hashes[2] == name_of_tail(request, 20)
    assert (save.request_id, save.handed_over, save.blocks_stay) == ("r", True, True)

    kept, handle = finish(engine, request)
    assert kept and handle["remote_num_tokens"] == 20
    assert engine.requests.keepers.of("r") is Keeper.HANDOFF
    sent = step(engine)
    assert (sent.handed_over, sent.lost_blocks) == ({"r": 60.0}, set())
    assert step(engine).handed_over == {}
    reported(engine, saves)
    assert engine.saving.under_way == 0 and not engine.requests
    report: Any = FakeReport(finished_sending={"r", "another connector's"})
    engine.update_connector_output(report)
    assert engine.requests.keepers.of("r") is Keeper.NOBODY


def test_windows_and_states_are_saved_with_the_partial_block(scheduler: Any, store: Store) -> None:
    groups = [group("prefix"), group("window", TOKENS, 12, 1), group("state", table=2)]
    engine, request = scheduler(groups), made(list(range(21)), SEND)
    tables = (list(range(100, 150)), [0, *range(201, 250)], [0, 0, 302])
    saves = prefilled(engine, request, 16, 4, tables=tables, offers={})
    assert request.num_prompt_tokens == 20
    got = {save.group: (save.first, next(iter(save.tables.values())), save.blocks_stay) for save in saves}
    assert got == {
        0: (0, [100, 101, 102], True),
        1: (1, [201, 202], True),
        2: (2, [302], True),
    }
    assert len({save.hashes[-1] for save in saves}) == 1
    assert finish(engine, request)[1]["remote_num_tokens"] == 20


def test_a_state_past_the_prompt_is_not_handed_over(scheduler: Any) -> None:
    engine = scheduler([group("prefix"), group("state", table=1)])
    request = made(list(range(21)), SEND)
    assert prefilled(engine, request, 23) == [], "drafts were computed with the last token"
    assert finish(engine, request) == (False, None)


@pytest.mark.parametrize("how", ["aborted", "partial", "failed", "reset"])
def test_what_is_not_all_there_is_not_promised(scheduler: Any, how: str) -> None:
    engine, request = scheduler(), made(list(range(20)), SEND)
    saves = prefilled(engine, request, *((8,) if how == "partial" else (20,)))
    if how == "failed":
        reported(engine, saves, failed={"r"})
    if how == "reset":
        engine.reset_cache()
    ended = how in ("failed", "reset")
    status = RequestStatus.FINISHED_STOPPED if ended else RequestStatus.FINISHED_ABORTED
    assert finish(engine, request, status) == (False, None)
    sent = step(engine)
    assert (sent.lost_blocks, sent.handed_over) == ({"r"}, {})
    assert step(engine).lost_blocks == set()


def test_a_preempted_prefill_starts_over(scheduler: Any) -> None:
    engine, request = scheduler(), made(list(range(20)), SEND)
    prefilled(engine, request, 20)
    request.num_computed_tokens = 0
    assert step(engine, preempted={"r", "other"}).lost_blocks == {"r", "other"}
    reported(engine, [], failed={"r"})
    assert ask(engine, request) == (0, False)
    assert finish(engine, request) == (False, None), "nothing is computed any more"


def test_one_engine_that_is_both(scheduler: Any, space: Space) -> None:
    """Handed over to it, and by it to the next."""
    engine = scheduler()
    request = made(list(range(20)), {**SEND, "do_remote_prefill": True})
    space.save(slots(handoffs(space).names.of(block_names(request), 20)))
    engine.on_new_request(request)
    assert ask(engine, request) == (20, True)


def test_a_copy_of_its_own_while_another_writer_is_at_it(space: Space, store: Store) -> None:
    one = chain(1, 2, 3)
    packed = b"".join(digest(block_key(name)) for name in one)
    space.register()
    store.index.claim(space.id, packed, new_segment_id(), 60.0)
    assert space.save(slots(one)).outcome == "held"
    assert space.save(slots(one), insist=True).outcome == "stored"
    assert space.save(slots(one), insist=True).outcome == "present"
    assert space.match(packed).blocks == 3
