"""An engine without a model: vLLM's own AsyncScheduler over both halves of the KV connector.

A step is launched and runs later, as on a GPU: what it gathers can't be written before it has run, and the
next step is launched before that. Every block holds numbers of its own that follow from its tokens, so that
what is stored can be compared with what was computed.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ObservabilityConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from connectors.engine import tensors
from connectors.engine.shards import Place
from connectors.kv import connector as facade
from connectors.kv.worker.worker import KVWorker
from kvstore.keys import block_key, digests
from kvstore.store.space import Space
from tests.store.world import match
from tests.waiting import PATIENCE_S, until

TOKENS, HEADS, SIZE = 16, 2, 8
LAYERS = ("model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn")
#: Bytes of one block: two layers, keys and values in float32.
BLOCK_BYTES = len(LAYERS) * HEADS * TOKENS * 2 * SIZE * 4

#: The token that every step samples.
_SAMPLED = 7
_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "float32",
    "head_dim": SIZE,
    "hidden_size": 2 * HEADS * SIZE,
    "intermediate_size": 16,
    "num_attention_heads": 2 * HEADS,
    "num_key_value_heads": HEADS,
    "num_hidden_layers": len(LAYERS),
    "vocab_size": 1000,
    "max_position_embeddings": 1 << 20,
}


@dataclass
class Rank:
    """One worker: its half of the connector, its paged cache and its own device."""

    number: int
    half: Any
    caches: dict[str, torch.Tensor]
    #: Whether what is gathered can be written, by step; guarded by nothing: set on the engine's thread.
    ran: deque[threading.Event] = field(default_factory=deque)

    @property
    def worker(self) -> KVWorker:
        return self.half._worker


class Bed:
    """One engine. Use as a context manager."""

    def __init__(
        self,
        folder: Path,
        *,
        blocks: int = 200,
        batch_tokens: int = 8192,
        ranks: int = 1,
        in_flight: int = 2,
        size: int = SIZE,
        traces: str | None = None,
        **settings: Any,
    ) -> None:
        """`blocks` are the pool's, null block included; `batch_tokens` is the most that a step computes,
        `size` a head's, and `traces` where vLLM would send its traces."""
        model = folder / "model"
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text(json.dumps(_MODEL))
        extra = {
            "payloads": f"file://{folder / 'payloads'}",
            "index": f"sqlite://{folder / 'index.db'}",
            "identity": {"weights": "w"},
            # A busy machine is no reason to miss, nor for a save to fail, behind which there is a hole.
            "sqlite": {"busy_timeout_s": PATIENCE_S},
            **settings,
        }
        # There is no model, so that computing takes no time.
        extra["kv"] = {"load": "always", "match_deadline_s": 60.0, **settings.get("kv", {})}
        config = VllmConfig(
            model_config=ModelConfig(
                model=str(model), skip_tokenizer_init=True, max_model_len=1 << 16, seed=0
            ),
            cache_config=CacheConfig(block_size=TOKENS, enable_prefix_caching=True),
            parallel_config=ParallelConfig(
                tensor_parallel_size=ranks, distributed_executor_backend="mp" if ranks > 1 else None
            ),
            scheduler_config=SchedulerConfig(
                max_num_batched_tokens=batch_tokens,
                max_num_seqs=64,
                max_model_len=1 << 16,
                is_encoder_decoder=False,
                enable_chunked_prefill=True,
                async_scheduling=True,
            ),
            device_config=DeviceConfig("cpu"),
            observability_config=ObservabilityConfig(otlp_traces_endpoint=traces),
            kv_transfer_config=KVTransferConfig(
                kv_connector="KVStoreConnector",
                kv_role="kv_both",
                kv_load_failure_policy="recompute",
                kv_connector_extra_config=extra,
                kv_connector_module_path="connectors.kv",
            ),
        )
        config.cache_config.num_gpu_blocks = blocks
        # The CPU platform turns it off.
        config.scheduler_config.async_scheduling = True
        spec = FullAttentionSpec(block_size=TOKENS, num_kv_heads=HEADS, head_size=size, dtype=torch.float32)
        cache = KVCacheConfig(
            num_blocks=blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(list(LAYERS), spec)],
        )
        hash_function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_function)
        self._hasher = get_request_block_hasher(TOKENS, hash_function)
        self.scheduler = AsyncScheduler(
            vllm_config=config,
            kv_cache_config=cache,
            structured_output_manager=StructuredOutputManager(config),
            block_size=TOKENS,
            hash_block_size=TOKENS,
            log_stats=False,
        )
        self.half: Any = self.scheduler.connector
        self.ranks: list[Rank] = []
        for number in range(ranks):
            with mock.patch.object(facade, "_place", lambda _, n=number: Place(n, ranks)):
                half = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, cache)
            caches = {name: torch.zeros(blocks, HEADS, TOKENS, 2 * size) for name in LAYERS}
            half.register_kv_caches(caches)
            self.ranks.append(Rank(number, half, caches))
        handshake = {
            (0, number): rank.half.get_handshake_metadata() for number, rank in enumerate(self.ranks)
        }
        self.half.set_xfer_handshake_metadata_pp_aware(handshake)
        self._aggregator = KVOutputAggregator(ranks)
        self._in_flight = in_flight
        self._launched: deque[tuple[Any, dict[str, list[int]], list[KVConnectorOutput]]] = deque()
        self.computed_tokens = 0
        self.steps = 0
        #: Most bytes of staging that saves have held at once, over all ranks.
        self.most_held = 0
        self.finished: set[str] = set()
        self._count = 0

    def __enter__(self) -> Bed:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self.ranks:
            for event in rank.ran:
                event.set()
            rank.half.shutdown()
        self.half.shutdown()

    @property
    def space(self) -> Space:
        return self.half._scheduler.space

    def request(
        self, tokens: Sequence[int], answers: int = 1, name: str | None = None, **more: Any
    ) -> Request:
        """A request arrives; `more` is what else it has."""
        self._count += 1
        params = SamplingParams(max_tokens=answers, ignore_eos=True)
        request = Request(
            name or f"r{self._count}", list(tokens), params, None, block_hasher=self._hasher, **more
        )
        self.scheduler.add_request(request)
        return request

    def step(self) -> None:
        """Launch a step, and let the oldest one end if enough are under way."""
        if self.scheduler.has_requests():
            self.launch()
        if len(self._launched) >= self._in_flight or not self.scheduler.has_requests():
            self._end()

    @property
    def busy(self) -> bool:
        """Whether the engine has anything to do."""
        return bool(self._launched) or self.scheduler.has_requests()

    def run(self) -> None:
        """Step until the engine has nothing to do."""
        until(lambda: self.step() or not self.busy, say=lambda: self.scheduler.requests)

    def settle(self) -> None:
        """Let all steps end that were launched."""
        while self._launched:
            self._end()

    def abort(self, request: Request) -> None:
        """A client goes away."""
        self.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)

    def launch(self) -> None:
        """Launch a step."""
        output = self.scheduler.schedule()
        self.steps += 1
        self.computed_tokens += output.total_num_scheduled_tokens
        outputs = []
        for rank in self.ranks:
            rank.ran.append(ran := threading.Event())
            outputs.append(self._execute(rank, output, ran))
        # One that only observes has no worker.
        workers = [rank.half._worker for rank in self.ranks if hasattr(rank.half, "_worker")]
        self.most_held = max([self.most_held, *(one.memory.used_bytes["save"] for one in workers)])
        sampled = {
            name: [] if self.scheduler.requests[name].is_prefill_chunk else [_SAMPLED]
            for name in output.num_scheduled_tokens
        }
        self._launched.append((output, sampled, outputs))

    def _execute(self, rank: Rank, output: Any, ran: threading.Event) -> KVConnectorOutput:
        """What a model runner does of a step."""
        half, metadata = rank.half, output.kv_connector_metadata
        gather = tensors.PagedCache.gather

        def gated(cache: Any, blocks: Any, *where: Any) -> Any:
            copied = gather(cache, blocks, *where)
            wait = copied.wait

            class Gated:
                under_way = True

                def wait(self) -> None:
                    assert ran.wait(PATIENCE_S)
                    wait()

            return Gated()

        with mock.patch.object(tensors.PagedCache, "gather", gated):
            half.bind_connector_metadata(metadata)
            half.handle_preemptions(metadata)
            self._forward(rank, output)
            half.start_load_kv(None)
            half.wait_for_save()
        results = half.get_transfer_results(output.finished_req_ids)
        made = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving or set(),
            invalid_block_ids=half.get_block_ids_with_load_errors(),
            kv_connector_worker_meta=half.build_connector_worker_meta(),
        )
        half.clear_connector_metadata()
        return made

    def _forward(self, rank: Rank, output: Any) -> None:
        """Write what the tokens of this step say into their blocks."""
        for name, count in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[name]
            # AsyncScheduler has advanced num_computed_tokens already.
            end = request.num_computed_tokens
            [table] = self.scheduler.kv_cache_manager.get_block_ids(name)
            for block in range((end - count) // TOKENS, min(-(-end // TOKENS), len(table))):
                number = page(request, block)
                for cache in rank.caches.values():
                    cache[table[block]] = number + rank.number

    def _end(self) -> None:
        if not self._launched:
            return
        output, sampled, outputs = self._launched.popleft()
        for rank in self.ranks:
            rank.ran.popleft().set()
        result = ModelRunnerOutput(
            req_ids=list(sampled),
            req_id_to_index={name: i for i, name in enumerate(sampled)},
            sampled_token_ids=list(sampled.values()),
            kv_connector_output=None,
        )
        whole = [ModelRunnerOutput([], {}, kv_connector_output=one) for one in outputs]
        result.kv_connector_output = self._aggregator.aggregate(whole).kv_connector_output
        for batch in self.scheduler.update_from_output(output, result).values():
            self.finished |= {one.request_id for one in batch.outputs if one.finish_reason is not None}

    def drain(self) -> None:
        """Let all writes end that have begun."""
        for rank in self.ranks:
            for event in rank.ran:
                event.set()
            assert rank.worker._store.transfers.drain(PATIENCE_S)

    def stored(self, request: Request) -> int:
        """How many leading blocks of a request are stored, by the hashes that vLLM gave them."""
        return match(self.space, list(request.block_hashes)).blocks

    def holes(self, request: Request) -> list[int]:
        """Which blocks of a request are stored behind one that isn't."""
        found = self.space.find(digests(list(request.block_hashes)))
        assert found is not None
        there = [run is not None for run in found]
        first = there.index(False) if False in there else len(there)
        return [block for block in range(first, len(there)) if there[block]]

    def wrong(self, request: Request) -> list[int]:
        """Which stored blocks of a request are not what its tokens say, on some rank."""
        bad = []
        for run in match(self.space, list(request.block_hashes)).runs:
            blocks = range(run.start, run.start + run.count)
            keys = [block_key(request.block_hashes[block]) for block in blocks]
            for rank in self.ranks:
                into = [memoryview(bytearray(BLOCK_BYTES)) for _ in blocks]
                self.space.load(run, keys, into, rank=rank.number)
                for block, data in zip(blocks, into, strict=True):
                    values = torch.frombuffer(data, dtype=torch.float32)
                    if not bool((values == page(request, block) + rank.number).all()):
                        bad.append(block)
        return bad

    @property
    def held(self) -> int:
        """How many blocks of the pool somebody has, the null block aside."""
        pool = self.scheduler.kv_cache_manager.block_pool
        return pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()

    def counted(self, name: str) -> int:
        """A counter of the ranks' stores."""
        return sum(rank.worker._store.counters.snapshot().get(name, 0) for rank in self.ranks)


def page(request: Request, block: int) -> float:
    """The number in every place of a block of a request, once it is full."""
    tokens = list(request.all_token_ids[block * TOKENS : (block + 1) * TOKENS])
    # What is being sampled has no number yet.
    tokens += [_SAMPLED] * (TOKENS - len(tokens))
    return float(sum((i + 1) * token for i, token in enumerate(tokens)) % 65521)
