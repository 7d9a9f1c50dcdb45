"""KV events on the wire, as vLLM 0.32 publishes them and routers read them.

    batch    msgpack [time, [event, ...], rank]; routers want all three
    event    msgpack map: `type` and what the class of that name has in vllm/distributed/kv_events.py

A block's hash in an event is vLLM's own: the last 8 bytes as a number, or all of it (engines that run with
VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0). Pure code.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from schemas.namespace import GroupKind, GroupSpec

#: A block's hash as events carry it.
BlockHash = int | bytes
#: What events call the store: vLLM's word, and what engines say of it (connectors.kv.events).
MEDIUM: Final = "STORAGE"
#: vLLM's words for kinds of groups.
_KINDS: Final[Mapping[GroupKind, str]] = {
    "full": "full_attention",
    "mla": "mla_attention",
    "sliding_window": "sliding_window",
    "chunked_local": "chunked_local_attention",
    "mamba": "mamba",
}
CLEARED: Final[Mapping[str, Any]] = {"type": "AllBlocksCleared"}
#: Most hashes in one event that takes blocks back.
_TOGETHER = 1024

_encoder = msgspec.msgpack.Encoder()


class _Stored(msgspec.Struct, tag="BlockStored"):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_name: str | None = None
    #: As they came: nobody here reads them.
    extra_keys: list[msgspec.Raw] | None = None


class _Removed(msgspec.Struct, tag="BlockRemoved"):
    pass


class _Cleared(msgspec.Struct, tag="AllBlocksCleared"):
    pass


class _Batch(msgspec.Struct, array_like=True):
    at_s: float
    events: list[_Stored | _Removed | _Cleared]


_decoder = msgspec.msgpack.Decoder(_Batch)
_NIL = msgspec.Raw(_encoder.encode(None))


class SizedHash(NamedTuple):
    """What engines name a block by. Groups of several block sizes name the end of a prompt alike."""

    block_hash: BlockHash
    block_size: int


class BlockTokens(NamedTuple):
    """What an engine told of a block, and the index doesn't know."""

    parent: BlockHash | None
    #: 32-bit token ids, packed.
    tokens: bytes
    lora_name: str | None
    extra_keys: Any


class Owner(NamedTuple):
    """Blocks of one group of one namespace: what events say of all of them."""

    #: Whom routers are told that the blocks belong to; None: nobody.
    ownership: str | None
    group: int
    spec: GroupSpec


def hash_of(block_hash: bytes, *, whole: bool) -> BlockHash:
    """Returns a block's hash as events carry it."""
    return bytes(block_hash) if whole else int.from_bytes(block_hash[-8:], "big")


def stored(owner: Owner, hashes: Sequence[BlockHash], known: Sequence[BlockTokens]) -> dict[str, Any]:
    """Returns the event that blocks are stored: consecutive ones of a chain, with what engines told of each;
    or any, if `known` is empty: by their hashes alone, without tokens and parent."""
    tokens = array("I", b"".join(one.tokens for one in known))
    event = {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": known[0].parent if known else None,
        "token_ids": tokens.tolist(),
        "block_size": owner.spec.block_tokens,
        "lora_id": None,
        "medium": MEDIUM,
        "lora_name": known[0].lora_name if known else None,
        "group_idx": owner.group,
        "kv_cache_spec_kind": _KINDS[owner.spec.kind],
    }
    if owner.spec.window is not None:
        event["kv_cache_spec_sliding_window"] = owner.spec.window
    if any(one.extra_keys is not None for one in known):
        event["extra_keys"] = [one.extra_keys for one in known]
    return _owned(event, owner)


def removed(owner: Owner, hashes: Sequence[BlockHash]) -> Iterator[dict[str, Any]]:
    """Yields the events that blocks are gone."""
    for at in range(0, len(hashes), _TOGETHER):
        event = {
            "type": "BlockRemoved",
            "block_hashes": list(hashes[at : at + _TOGETHER]),
            "medium": MEDIUM,
            "group_idx": owner.group,
        }
        yield _owned(event, owner)


def _owned(event: dict[str, Any], owner: Owner) -> dict[str, Any]:
    if owner.ownership is not None:
        event["ownership"] = owner.ownership
    return event


def encode(at_s: float, events: Sequence[Mapping[str, Any]]) -> bytes:
    """Returns a batch. The rank is 0, as a vLLM without data parallelism has it."""
    return _encoder.encode([at_s, events, 0])


def told_by(payload: bytes) -> Iterator[tuple[SizedHash, BlockTokens]]:
    """Yields what a batch of an engine's tells of blocks. Raises ValueError for what is no such batch."""
    try:
        events = _decoder.decode(payload).events
    except RecursionError as exc:
        raise ValueError("nested too deep") from exc
    for event in events:
        if not isinstance(event, _Stored) or event.block_size <= 0:
            continue
        size, parent, extra = event.block_size, event.parent_block_hash, event.extra_keys or []
        # Of windows and of Mamba vLLM names the blocks that it keeps, beside the tokens of all: whose they
        # are can't be told then.
        if len(event.token_ids) != size * len(event.block_hashes):
            continue
        try:
            tokens = array("I", event.token_ids)
        except OverflowError as exc:
            raise ValueError("a token's id is no number of 32 bits") from exc
        for i, block_hash in enumerate(event.block_hashes):
            packed = tokens[i * size : (i + 1) * size].tobytes()
            keys = extra[i] if i < len(extra) else None
            yield (
                SizedHash(block_hash, size),
                BlockTokens(
                    parent, packed, event.lora_name, None if keys is None or keys == _NIL else keys.copy()
                ),
            )
            parent = block_hash
