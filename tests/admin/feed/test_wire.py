"""Events on the wire: what vLLM would send, and what each router's decoder asks for."""

from __future__ import annotations

from array import array
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

from kvstore.admin.feed.wire import (
    _KINDS,
    CLEARED,
    MEDIUM,
    BlockTokens,
    Owner,
    encode,
    removed,
    stored,
    told_by,
)
from schemas.namespace import GroupSpec

FULL = GroupSpec(kind="full", block_tokens=2, dtype="BF16", shape=(1, 1, 2, 1))
WINDOW = GroupSpec(kind="sliding_window", block_tokens=2, dtype="BF16", shape=(1, 1, 2, 1), window=8)
TOLD = [
    BlockTokens(None, (7).to_bytes(4, "little") + (8).to_bytes(4, "little"), "tuned", ["tuned"]),
    BlockTokens(1, (9).to_bytes(4, "little") + (10).to_bytes(4, "little"), "tuned", None),
]


def plain(event: Any) -> Any:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(event))


def test_an_event_is_what_vllm_would_send() -> None:
    event = stored(Owner("ns", 3, WINDOW), [1, 2], TOLD)
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
@pytest.mark.parametrize("told", [TOLD, []], ids=["tokens", "bare"])
def test_a_routers_decoder_finds_what_it_asks_for(router: str, told: list[BlockTokens]) -> None:
    owner = Owner("ns", 0, WINDOW)
    events = [stored(owner, [1, 2**64 - 1], told), *removed(owner, [1]), CLEARED]
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


def batch(*events: Mapping[str, Any]) -> bytes:
    return msgspec.msgpack.encode([1.0, list(events), 0])


def said(hashes: list[int], tokens: int, **changes: Any) -> dict[str, Any]:
    """An engine's event of these blocks, with so many tokens."""
    fields = {"block_hashes": hashes, "parent_block_hash": 9, "token_ids": list(range(tokens))}
    return {"type": "BlockStored", **fields, "block_size": 2, **changes}


def test_what_an_engine_says_of_a_chain_is_tokens_and_parents() -> None:
    keys = [["tuned", 5], None]
    first, second = told_by(batch(said([1, 2], 4, lora_name="tuned", extra_keys=keys)))
    assert first[0] == (1, 2) and first[1][:3] == (9, array("I", [0, 1]).tobytes(), "tuned")
    assert second == ((2, 2), (1, array("I", [2, 3]).tobytes(), "tuned", None))
    event = stored(Owner(None, 0, FULL), [1, 2], [first[1], second[1]])
    assert plain(event)["extra_keys"] == keys


@pytest.mark.parametrize("tokens", [6, 3, 0])
@pytest.mark.parametrize("changes", [{}, {"block_size": 0}, {"block_size": -1}])
def test_tokens_that_are_not_those_of_the_blocks_named_tell_nothing(tokens: int, changes: Any) -> None:
    # 6 tokens: vLLM's event of a group with a window, or of Mamba, that leaves out one block of three.
    assert list(told_by(batch(said([1, 2], tokens, **changes)))) == []


def test_blocks_of_two_sizes_that_are_named_alike_are_two() -> None:
    told = dict(told_by(batch(said([2], 2), said([2], 4, block_size=4))))
    assert {name: len(one.tokens) // 4 for name, one in told.items()} == {(2, 2): 2, (2, 4): 4}


def test_what_is_nested_too_deep_is_no_batch() -> None:
    at = batch(said([1], 2, extra_keys=[None]))
    assert at.count(b"\x91\xc0") == 1
    with pytest.raises(ValueError, match="nested too deep"):
        list(told_by(at.replace(b"\x91\xc0", b"\x91" * 100_000 + b"\xc0")))
