"""Engines without a model: vLLM's own manager of tiers, its CPU tier in shared memory, and a KVStoreTier.

What a chunk holds follows from its key, so whatever comes out of the CPU tier can be judged. Tests play the
GPU and the scheduler's half of the OffloadingConnector, whose calls these are, in its order.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingKVEventsConfig,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager

from connectors.tier.connector import KVStoreTier
from tests.store.world import chain
from tests.waiting import PATIENCE_S

ROW = 8192
TOKENS = 64  # per chunk
FULL, WINDOW = 0, 1

_engines = itertools.count()


def content(key: bytes) -> bytes:
    """The one right content of a chunk."""
    return hashlib.shake_128(key).digest(ROW)


def keys(hashes: Sequence[bytes], group: int = FULL) -> list[OffloadKey]:
    return [make_offload_key(one, group) for one in hashes]


def model_folder(root: Path) -> Path:
    folder = root / "model"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text('{"hidden_size": 64}')
    (folder / "model.bin").write_bytes(bytes(64))
    return folder


def vllm_config(model: Path) -> Any:
    """What of a VllmConfig the tier looks at."""
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model=str(model),
            revision=None,
            dtype=torch.bfloat16,
            quantization=None,
            multimodal_config=None,
            hf_overrides={},
            max_model_len=4096,
        ),
        cache_config=SimpleNamespace(
            block_size=16,
            cache_dtype="auto",
            prefix_caching_hash_algo="sha256",
            enable_prefix_caching=True,
            kv_cache_layout="LBHNC",
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            nnodes_within_dp=1,
            distributed_executor_backend="uni",
        ),
        attention_config="AttentionConfig(backend=None)",
        lora_config=None,
        speculative_config=None,
    )


def kv_cache_config() -> Any:
    common = {"block_size": 16, "num_kv_heads": 2, "head_size": 16, "dtype": torch.bfloat16}
    specs = [FullAttentionSpec(**common), SlidingWindowSpec(**common, sliding_window=100)]
    return SimpleNamespace(
        kv_cache_groups=[
            SimpleNamespace(kv_cache_spec=spec, layer_names=[f"model.layers.{at}.attn"])
            for at, spec in enumerate(specs)
        ]
    )


def offloading_spec() -> Any:
    config = OffloadingConfig(
        groups=tuple(
            OffloadingGroupConfig(16, (f"model.layers.{group}.attn",), group) for group in (FULL, WINDOW)
        ),
        worker_kv_bytes_per_block=ROW // 4,
        enable_kv_cache_events=True,
        extra_config={},
        engine_id="test",
        model=OffloadingModelConfig("model", "bfloat16"),
        cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=4),
        parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, True),
        kv_cache_layout="LBHNC",
    )
    return SimpleNamespace(config=config, kv_events_config=OffloadingKVEventsConfig(True, False))


def changed(spec: Any, **changes: Any) -> Any:
    return SimpleNamespace(config=replace(spec.config, **changes), kv_events_config=spec.kv_events_config)


class Tiers:
    """What vLLM's spec does: make the tiers, its caller's arguments on the stack."""

    def __init__(self, spec: Any, vllm_config: Any, kv_cache_config: Any, view: Any, tier: Any) -> None:
        self.tier = SecondaryTierFactory.create_secondary_tier(tier, view, spec)


class Engine:
    """One engine with `chunks` rows of CPU tier."""

    def __init__(self, root: Path, *, chunks: int = 32, **tier: Any) -> None:
        self.region = SharedOffloadRegion(f"kvstore-test-{next(_engines)}-{id(self)}", chunks, None, ROW, ROW)
        self.primary = CPUPrimaryTierOffloadingManager(num_chunks=chunks, mmap_region=self.region)
        self.view = self.primary.get_kv_memoryview()
        entry = {
            "type": "KVStoreTier",
            "module_path": "connectors.tier",
            "payloads": f"file://{root}/payloads",
            **tier,
        }
        # A busy machine is no reason to miss: what a deadline does has tests of its own.
        entry["kv"] = {"match_deadline_s": 20.0, "match_ttl_s": 30.0, **tier.get("kv", {})}
        config = vllm_config(model_folder(root))
        try:
            self.tier: KVStoreTier = Tiers(
                offloading_spec(), config, kv_cache_config(), self.view, entry
            ).tier
        except BaseException:
            self.primary.shutdown()
            raise
        self.manager = TieringOffloadingManager(self.primary, [self.tier])
        self.closed = False

    # What the connector's scheduler calls.

    def arrive(self, name: str, *chains: Sequence[OffloadKey]) -> ReqContext:
        request = ReqContext(name)
        for one in chains:
            for at, key in enumerate(one, 1):
                request.set_offload_key_position(key, at * TOKENS)
        self.manager.on_new_request(request)
        return request

    def step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext((), ()))

    def compute(self, request: ReqContext, wanted: Sequence[OffloadKey]) -> int:
        """The GPU has computed these: they go to the CPU tier, and vLLM offers them to the store."""
        out = self.manager.prepare_store(wanted, request)
        assert out is not None, "the CPU tier has no room"
        for key, row in zip(out.keys_to_store, out.store_spec.block_ids, strict=True):
            self.rows()[row] = np.frombuffer(content(key), dtype=np.int8)
        # vLLM keeps a job's keys in a set.
        self.manager.complete_store(set(out.keys_to_store), request)
        return len(out.keys_to_store)

    def lookup(self, request: ReqContext, wanted: Sequence[OffloadKey], within_s: float = PATIENCE_S) -> int:
        """Leading chunks that are in the CPU tier in the end; what the store has is fetched."""
        until = time.monotonic() + within_s
        while (hits := self.look(request, wanted)) is None:
            assert time.monotonic() < until, "the tier keeps saying later"
            self.step()
            time.sleep(0.002)
        return hits

    def look(self, request: ReqContext, wanted: Sequence[OffloadKey]) -> int | None:
        """One pass over a prefix, as `_maximal_prefix_lookup` does it."""
        hits, later = 0, False
        for key in wanted:
            match self.manager.lookup(key, request):
                case LookupResult.HIT:
                    hits += 1
                case LookupResult.HIT_PENDING:
                    hits, later = hits + 1, True
                case LookupResult.RETRY:
                    later = True
                case LookupResult.MISS:
                    break
        return None if later else hits

    def load(self, request: ReqContext, wanted: Sequence[OffloadKey]) -> None:
        """To the GPU: what is in the CPU tier must be right."""
        spec = self.manager.prepare_load(wanted, request)
        for key, row in zip(wanted, spec.block_ids, strict=True):
            assert self.rows()[row].tobytes() == content(key), "wrong bytes in the CPU tier"
        self.manager.complete_load(wanted, request)

    def finish(self, request: ReqContext) -> None:
        self.manager.on_request_finished(request)

    # What tests ask.

    def rows(self) -> Any:
        return np.asarray(self.view)

    def settle(self, within_s: float = PATIENCE_S) -> None:
        """Steps until nothing is under way."""
        until = time.monotonic() + within_s
        while self.manager.has_pending_work():
            assert time.monotonic() < until, "jobs that don't end"
            self.step()
            time.sleep(0.002)

    def serve(self, name: str, wanted: Sequence[OffloadKey]) -> int:
        """A whole request for a prefix: what it finds is loaded, the rest computed. Returns the hits."""
        request = self.arrive(name, wanted)
        hits = self.lookup(request, wanted)
        self.load(request, wanted[:hits])
        if wanted[hits:]:
            self.compute(request, wanted[hits:])
        self.finish(request)
        self.step()
        return hits

    def forget(self) -> None:
        """The CPU tier loses all that isn't pinned, as if others had needed the room."""
        room = self.primary._num_chunks
        filler = self.arrive("filler")
        out = self.primary.prepare_store(keys(chain(*range(10**6, 10**6 + room))), filler)
        assert out is not None, "the CPU tier's chunks are pinned"
        self.primary.complete_store(out.keys_to_store, filler, False)
        self.finish(filler)

    def pinned(self) -> int:
        primary = self.primary
        return primary._num_allocated_chunks - len(primary._free_list) - primary._num_evictable_cache_chunks

    def counts(self) -> dict[str, int]:
        return {name: value for name, value in self.tier._store.counters.snapshot().items() if value}

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.manager.shutdown()


@contextlib.contextmanager
def engine(root: Path, **options: Any) -> Iterator[Engine]:
    made = Engine(root, **options)
    try:
        yield made
    finally:
        made.close()
