"""vLLM's tiered offloading on a machine without a GPU.

vLLM's own worker half copies between GPU and CPU tier with CUDA streams, and refuses any other device. This
one stands in for it, and for nothing else: the "GPU" is the CPU backend's KV cache, copies are synchronous.
The spec, the scheduler's half, the manager of the tiers and the shared memory are vLLM's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class HostTieringSpec(TieringOffloadingSpec):
    """`"spec_name": "HostTieringSpec", "spec_module_path": "tests.e2e.host_offloading"`."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=0 if self.replicated_layout else self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = HostWorker(kv_caches, self.blocks_per_chunk, region)
        return self._worker


class HostWorker(OffloadingWorker):
    def __init__(
        self, kv_caches: CanonicalKVCaches, blocks_per_chunk: int, region: SharedOffloadRegion
    ) -> None:
        self._region = region
        self._per_chunk = blocks_per_chunk
        self._refs = kv_caches.group_data_refs
        self._blocks = [one.tensor.view(torch.int8) for one in kv_caches.tensors]
        self._chunks = [
            region.create_next_worker_view(one.page_size_bytes * blocks_per_chunk)
            for one in kv_caches.tensors
        ]
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        for block, row in self._pairs(src_spec, dst_spec):
            row.copy_(block)
        return self._done(job_id)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        for block, row in self._pairs(dst_spec, src_spec):
            block.copy_(row)
        return self._done(job_id)

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        return

    def shutdown(self) -> None:
        self._blocks.clear()
        self._chunks.clear()
        self._region.cleanup()

    def _done(self, job_id: int) -> bool:
        self._finished.append(TransferResult(job_id, True, 0, 0.0))
        return True

    def _pairs(self, blocks: GPULoadStoreSpec, chunks: LoadStoreSpec) -> Any:
        """(page of a block, its place in a chunk) for every block and tensor of a transfer."""
        assert isinstance(chunks, BlockIDsLoadStoreSpec)
        rest, rows = list(blocks.block_ids), list(chunks.block_ids)
        for refs, count, first in zip(self._refs, blocks.group_sizes, blocks.block_indices, strict=True):
            mine, rest = rest[:count], rest[count:]
            skip = first % self._per_chunk
            used = -(-(count + skip) // self._per_chunk) if count else 0
            own, rows = rows[:used], rows[used:]
            for at, block in enumerate(mine, skip):
                row, part = own[at // self._per_chunk], at % self._per_chunk
                for ref in refs:
                    size = self._blocks[ref.tensor_idx].shape[1]
                    place = self._chunks[ref.tensor_idx][np.int64(row), part * size : (part + 1) * size]
                    yield (
                        self._blocks[ref.tensor_idx][np.int64(block), : ref.page_size_bytes],
                        place[: ref.page_size_bytes],
                    )
        assert not rest and not rows
