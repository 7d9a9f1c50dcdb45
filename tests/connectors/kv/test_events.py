"""KV events of the store: complete when stored, taken back when gone, bounded in between."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the connectors' tests need the full set-up: make setup")

import msgspec
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

import connectors.kv.events as kv_events
from connectors.engine.layout import Group
from connectors.engine.step import RequestView
from connectors.kv.events import Events, NoEvents, Table
from connectors.kv.messages import GroupLoad, Save
from kvstore.index.port import Run
from kvstore.rules.prefix import PrefixRule
from tests.connectors.groups import SCHEDULERS, TOKENS
from tests.fake_vllm import FakeAdapter, FakeRequest
from tests.store.world import chain

pytestmark = pytest.mark.engine

FULL, WINDOW = Table("full_attention", None), Table("sliding_window", 64)
#: Full attention in vLLM's table 1, and windows in tables 0 and 2, whose blocks are of two hashes each.
GROUPS: list[Group] = [
    replace(SCHEDULERS[0], tables=(1,)),
    replace(SCHEDULERS[0], tables=(0, 2), rule=PrefixRule("window", 2 * TOKENS, 64)),
]
HASHES = chain(*range(8))


def request(**more: Any) -> RequestView:
    made = FakeRequest("r", range(8), **more)
    made.all_token_ids = list(range(1000, 1000 + made.num_tokens))
    return RequestView(made)


def external(hashes: list[bytes]) -> list[Any]:
    return [maybe_convert_block_hash(one) for one in hashes]


def save(segment: bytes, group: int, first: int, hashes: list[bytes]) -> Save:
    return Save(group, segment.ljust(8), 1, first, hashes, {})


@pytest.fixture
def events() -> Events:
    return Events(GROUPS, [WINDOW, FULL, WINDOW], TOKENS, ownership="ns", remote=True)


def stored(events: Events, first: int = 2, last: int = 6) -> None:
    """Blocks of the first group, saved and announced."""
    events.planned(request(), [save(b"a", 0, first, HASHES[first:last])])
    events.ended(b"a".ljust(8), written=True)


def test_a_stored_segment_is_described_completely(events: Events) -> None:
    stored(events)
    [event] = events.take()
    assert event == BlockStored(
        block_hashes=external(HASHES[2:6]),
        parent_block_hash=external(HASHES)[1],
        token_ids=list(range(1000 + 2 * TOKENS, 1000 + 6 * TOKENS)),
        block_size=TOKENS,
        lora_id=None,
        lora_name=None,
        medium="STORAGE",
        group_idx=1,
        kv_cache_spec_kind="full_attention",
        kv_cache_spec_sliding_window=None,
        locality="REMOTE",
        ownership="ns",
    )
    assert events.take() == ()
    # As vLLM's publisher sends it.
    sent = msgspec.msgpack.encode(KVEventBatch(ts=1.0, events=[event]))
    assert msgspec.msgpack.decode(sent, type=KVEventBatch).events == [event]


def test_the_chain_starts_without_a_parent_and_names_its_adapter(events: Events) -> None:
    one = request(lora_request=FakeAdapter("poet", 3))
    events.planned(one, [save(b"a", 0, 0, HASHES[:1])])
    events.ended(b"a".ljust(8), written=True)
    [event] = events.take()
    assert isinstance(event, BlockStored)
    assert (event.parent_block_hash, event.lora_id, event.lora_name) == (None, 3, "poet")


def test_every_table_of_a_group_is_told_of_in_its_own_block_size(events: Events) -> None:
    events.planned(request(), [save(b"w", 1, 1, [HASHES[3], HASHES[5]])])
    events.ended(b"w".ljust(8), written=True)
    one, other = events.take()
    assert isinstance(one, BlockStored) and isinstance(other, BlockStored)
    assert (one.group_idx, other.group_idx) == (0, 2)
    assert one.block_size == 2 * TOKENS
    assert one.token_ids == list(range(1000 + 2 * TOKENS, 1000 + 6 * TOKENS))
    assert one.parent_block_hash == external(HASHES)[1]
    assert (one.kv_cache_spec_kind, one.kv_cache_spec_sliding_window) == ("sliding_window", 64)


def test_what_was_not_written_is_not_told_of(events: Events) -> None:
    events.planned(request(), [save(b"a", 0, 0, HASHES[:4])])
    events.ended(b"a".ljust(8), written=False)
    events.ended(b"b".ljust(8), written=True)
    assert events.take() == ()
    assert not events._saving


def test_a_partial_block_has_no_name_that_others_know(events: Events) -> None:
    events.planned(request(), [save(b"a", 0, 7, [HASHES[7], b"partial"]), save(b"b", 0, 8, [b"partial"])])
    for segment in (b"a", b"b"):
        events.ended(segment.ljust(8), written=True)
    [event] = events.take()
    assert event.block_hashes == external(HASHES[7:])


def test_a_bad_segment_of_a_load_is_taken_back(events: Events) -> None:
    runs = [Run(2, b"good....", 0, 2, None), Run(4, b"bad.....", 0, 3, None)]  # type: ignore[arg-type]
    events.loading(request(), [GroupLoad(0, 2, runs, HASHES[2:7], {})])
    events.bad({b"bad.....", b"unknown."})
    [event] = events.take()
    assert event == BlockRemoved(
        block_hashes=external(HASHES[4:7]), medium="STORAGE", group_idx=1, locality="REMOTE", ownership="ns"
    )
    events.load_ended("r")
    events.bad({b"bad....."})
    assert events.take() == ()


def test_what_was_announced_and_is_missed_is_taken_back_once(events: Events) -> None:
    stored(events, 0, 6)
    events.take()
    asked = time.monotonic()
    events.missing(HASHES, [3, 0], asked)
    [event] = events.take()
    assert isinstance(event, BlockRemoved)
    assert event.block_hashes == external(HASHES[3:6])
    events.missing(HASHES, [3, 0], asked)
    assert events.take() == ()


def test_an_answer_from_before_the_announcement_says_nothing(events: Events) -> None:
    asked = time.monotonic()
    stored(events, 0, 6)
    events.take()
    events.missing(HASHES, [0, 0], asked)
    assert events.take() == ()


def test_after_a_reset_nothing_is_served_that_was_announced(events: Events) -> None:
    stored(events)
    events.planned(request(), [save(b"b", 0, 6, HASHES[6:])])
    events.restart("other")
    [event] = events.take()
    assert isinstance(event, BlockRemoved) and event.block_hashes == external(HASHES[2:6])
    events.ended(b"b".ljust(8), written=True)
    assert events.take() == ()
    stored(events)
    [event] = events.take()
    assert event.ownership == "other"


def test_nothing_grows_while_nobody_listens(events: Events, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "MOST_ANNOUNCED", 100)
    for i in range(300):
        other = FakeRequest("r", [i])
        events.planned(RequestView(other), [save(b"%d" % i, 0, 0, other.block_hashes)])
        events.ended((b"%d" % i).ljust(8), written=True)
    assert len(events._announced) == 100
    assert events._events.maxlen == kv_events.MOST_EVENTS
    assert not events._saving


def test_nobody_listens() -> None:
    nothing = NoEvents()
    nothing.planned(request(), [save(b"a", 0, 0, HASHES)])
    nothing.ended(b"a".ljust(8), written=True)
    assert nothing.take() == ()
