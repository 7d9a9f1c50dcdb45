"""What the sharing tests have in common: prompts, the store-less answers, and looks into a store."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from kvstore.build import load_settings, open_index, open_payloads
from kvstore.format import segment as codec
from kvstore.keys import payload_name
from tests.e2e.engine import Engine, random_tokens

BLOCK = 32

#: A worker's counters, from inside the engine's process (one-process engines only).
_COUNTERS = (
    "__import__('vllm.distributed.{kind}_transfer', fromlist=['x'])"
    ".{getter}()._worker._store.counters.snapshot()"
)


def prompt(length: int, seed: int, **more: Any) -> dict[str, Any]:
    """A prompt of random words."""
    return {"prompt_token_ids": random_tokens(length, seed), **more}


def extended(base: Mapping[str, Any], length: int, seed: int) -> dict[str, Any]:
    """`base` with `length` more random words."""
    return {**base, "prompt_token_ids": [*base["prompt_token_ids"], *random_tokens(length, seed)]}


def full_blocks(one: Mapping[str, Any]) -> int:
    """Tokens of the prompt that lie in full blocks."""
    return len(one["prompt_token_ids"]) // BLOCK * BLOCK


def worker_counters(engine: Engine, kind: str = "kv") -> dict[str, int]:
    """What the connector in the engine's worker has counted so far, without the zeros."""
    getter = {"kv": "get_kv_transfer_group", "ec": "get_ec_transfer"}[kind]
    counts = engine.evaluate(_COUNTERS.format(kind=kind, getter=getter))
    return {name: value for name, value in counts.items() if value}


def scheduler_counters(engine: Engine, kind: str = "kv") -> dict[str, int]:
    """The same of the connector in the engine's scheduler."""
    store = {"kv": "connector._scheduler.store", "ec": "ec_connector._scheduler._store"}[kind]
    counts = engine.evaluate(f"llm.llm_engine.engine_core.engine_core.scheduler.{store}.counters.snapshot()")
    return {name: value for name, value in counts.items() if value}


def segment_files(payloads: Path) -> list[Path]:
    """Every segment file in a payload folder."""
    return sorted(path for path in payloads.glob("*/??/*") if path.is_file())


def promised_blocks(settings: Mapping[str, Any]) -> int:
    """How many blocks the index names at the moment, there or not."""
    with open_index(load_settings(settings, environ={})) as index:
        return sum(index.usage(namespace).blocks for namespace in index.namespaces())


def check_store(settings: Mapping[str, Any], *, removed: Collection[str] = ()) -> dict[str, int]:
    """Everything the index names is there, whole and right: no promise that can't be kept.

    Reads every byte with the codec alone, not through the store. Of payloads that the test has `removed`, the
    index may go on naming those that nobody has asked for since. Returns segments and blocks seen.
    """
    made = load_settings(settings, environ={})
    index, payloads = open_index(made), open_payloads(made)
    seen = {"namespaces": 0, "segments": 0, "blocks": 0}
    try:
        for namespace in index.namespaces():
            seen["namespaces"] += 1
            usage = index.usage(namespace)
            nbytes = blocks = segments = 0
            for listing in index.segments(namespace):
                for rank, part in enumerate(listing.record.parts):
                    name = payload_name(namespace, listing.segment, rank)
                    data = memoryview(bytearray(part.nbytes))
                    nread = payloads.read(name, 0, [data])
                    if nread is None and name in removed:
                        continue
                    assert nread == part.nbytes, name
                    header = codec.parse_header(data, namespace=namespace)
                    assert header.part == part
                    for i, slot in enumerate(header.meta.slots):
                        start, length = part.slot_range(i, 1)
                        codec.decode_slot(data[start : start + length], slot, None)
                nbytes += listing.record.nbytes
                blocks += listing.record.slots
                segments += 1
            assert (usage.nbytes, usage.blocks, usage.segments) == (nbytes, blocks, segments)
            seen["segments"] += segments
            seen["blocks"] += blocks
    finally:
        index.close()
        payloads.close()
    return seen
