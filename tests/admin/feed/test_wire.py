"""Events on the wire: what vLLM would send, and what each router's decoder asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm", reason="routers decode with vLLM's types: make setup")

from vllm.distributed.kv_events import (
    MEDIUM_STORAGE,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
)
from vllm.v1.kv_cache_interface import KVCacheSpecKind

from kvstore.admin.feed.wire import _KINDS, CLEARED, MEDIUM, BlockTokens, Owner, encode, removed, stored
from schemas.namespace import GroupSpec

FULL = GroupSpec(kind="full", block_tokens=2, dtype="BF16", shape=(1, 1, 2, 1))
WINDOW = GroupSpec(kind="sliding_window", block_tokens=2, dtype="BF16", shape=(1, 1, 2, 1), window=8)
TOLD = {
    1: BlockTokens(None, (7).to_bytes(4, "little") + (8).to_bytes(4, "little"), "tuned", ["tuned"]),
    2: BlockTokens(1, (9).to_bytes(4, "little") + (10).to_bytes(4, "little"), "tuned", None),
}


def plain(event: Any) -> Any:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(event))


def test_an_event_is_what_vllm_would_send() -> None:
    [event] = stored(Owner("ns", 3, WINDOW), [1, 2], TOLD)
    theirs = BlockStored(
        block_hashes=[1, 2],
        parent_block_hash=None,
        token_ids=[7, 8, 9, 10],
        block_size=2,
        lora_id=None,
        medium=MEDIUM_STORAGE,
        lora_name="tuned",
        extra_keys=[("tuned",), None],
        group_idx=3,
        kv_cache_spec_kind=KVCacheSpecKind.SLIDING_WINDOW.value,
        kv_cache_spec_sliding_window=8,
        ownership="ns",
    )
    assert plain(event) == plain(theirs)
    [gone] = removed(Owner("ns", 3, WINDOW), [1, 2])
    assert plain(gone) == plain(BlockRemoved(block_hashes=[1, 2], medium=MEDIUM, group_idx=3, ownership="ns"))
    assert plain(CLEARED) == plain(AllBlocksCleared())
    batch = encode(1.5, [event, gone, CLEARED])
    assert batch == msgspec.msgpack.encode([1.5, [event, gone, CLEARED], 0])
    decoded = msgspec.msgpack.decode(batch, type=KVEventBatch)
    assert decoded.events == [theirs, BlockRemoved([1, 2], MEDIUM, 3, ownership="ns"), AllBlocksCleared()]


def test_kinds_are_vllms() -> None:
    assert set(_KINDS.values()) <= {kind.value for kind in KVCacheSpecKind}


def test_blocks_that_do_not_follow_each_other_are_told_apart() -> None:
    told = {**TOLD, 3: BlockTokens(99, bytes(8), "tuned", None), 4: BlockTokens(3, bytes(4), None, None)}
    events = list(stored(Owner(None, 0, FULL), [1, 2, 3, 4, 5], told))
    shape = [(event["block_hashes"], event["parent_block_hash"], len(event["token_ids"])) for event in events]
    # 4 is of another block size, and of 5 nobody told.
    assert shape == [([1, 2], None, 4), ([3], 99, 2), ([4, 5], None, 0)]
    assert all("ownership" not in event and "extra_keys" not in event for event in events[1:])


def test_many_removals_are_several_events() -> None:
    sizes = [len(event["block_hashes"]) for event in removed(Owner(None, 0, FULL), list(range(2500)))]
    assert sizes == [1024, 1024, 452]


#: What the decoders of routers ask of a map event: the fields that must be there, and what all may be.
#: vllm-project/router, src/kv_index/wire.rs (at 0e7a5e1): serde, so an absent Option is none.
#: llm-d, pkg/kvevents/engineadapter/vllm_adapter.go: maps are read by vLLM's names of fields.
#: ai-dynamo/dynamo, lib/kv-router/src/zmq_wire (1.6.1): README.md, "Map Events".
INTS, TEXT = (int,), (str, type(None))
FIELDS: Mapping[str, Mapping[str, tuple[type, ...]]] = {
    "BlockStored": {
        "type": (str,), "block_hashes": (list,), "parent_block_hash": (int, bytes, type(None)),
        "token_ids": (list,), "block_size": INTS, "lora_id": (int, type(None)), "medium": TEXT,
        "lora_name": TEXT, "extra_keys": (list, type(None)), "group_idx": INTS, "kv_cache_spec_kind": TEXT,
        "kv_cache_spec_sliding_window": INTS, "ownership": TEXT,
    },
    "BlockRemoved": {
        "type": (str,), "block_hashes": (list,), "medium": TEXT, "group_idx": INTS, "ownership": TEXT,
    },
    "AllBlocksCleared": {"type": (str,)},
}  # fmt: skip
REQUIRED = {
    "vllm-router": {"block_hashes", "token_ids", "block_size"},
    "llm-d": {"block_hashes", "parent_block_hash", "token_ids", "block_size"},
    "dynamo": {"block_hashes", "token_ids", "block_size"},
}


@pytest.mark.parametrize("router", REQUIRED)
@pytest.mark.parametrize("told", [TOLD, {}], ids=["tokens", "bare"])
def test_a_routers_decoder_finds_what_it_asks_for(router: str, told: dict[Any, BlockTokens]) -> None:
    owner = Owner("ns", 0, WINDOW)
    events = [*stored(owner, [1, 2**64 - 1], told), *removed(owner, [1]), CLEARED]
    batch = msgspec.msgpack.decode(encode(1.0, events))
    at_s, decoded, rank = batch
    assert isinstance(at_s, float) and rank == 0, "Dynamo 1.6.1 drops a batch of two"
    for event in decoded:
        fields = FIELDS[event["type"]]
        assert set(event) <= set(fields)
        assert all(isinstance(value, fields[name]) for name, value in event.items())
        # vllm-project/router refuses a hash that is no unsigned number.
        assert all(0 <= one < 1 << 64 for one in event.get("block_hashes", ()))
        if event["type"] == "BlockStored":
            assert set(event) >= REQUIRED[router]
            # llm-d looks for the parent, and leaves out an event whose parent it doesn't know.
            assert event["token_ids"] or event["parent_block_hash"] is None
            assert len(event["token_ids"]) in (0, len(event["block_hashes"]) * event["block_size"])
