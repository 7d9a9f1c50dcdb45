"""The tier's counters as vLLM's offloading statistics, which become Prometheus metrics."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import OffloadingCounterMetadata

from kvstore.metrics import Counters

MISSES = "vllm:kvstore_tier_miss_chunks"
SAVES = "vllm:kvstore_tier_save_chunks"
OTHERS = "vllm:kvstore_tier_events"

#: The metrics of the store's labelled counters, by counter.
_LABELLED = {"miss_blocks": MISSES, "save_blocks": SAVES}


def definitions() -> dict[str, Any]:
    """Returns the definitions of all metrics that `Observed` reports."""
    return {
        MISSES: OffloadingCounterMetadata(
            documentation="Chunks that the KVStoreTier was asked for and did not serve, by reason.",
            labelnames=("reason",),
        ),
        SAVES: OffloadingCounterMetadata(
            documentation="Chunks that were offered to the KVStoreTier for saving, by outcome.",
            labelnames=("outcome",),
        ),
        OTHERS: OffloadingCounterMetadata(
            documentation="Other events in the KVStoreTier's store, by name (kvstore/metrics.py).",
            labelnames=("name",),
        ),
    }


class Observed:
    """Reports what the store has counted since the last call. Runs on the scheduler's thread."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._last: dict[str, int] = {}

    def take(self) -> Any | None:
        """Returns the changes as vLLM's statistics, None if there are none."""
        now = self._counters.snapshot()
        if now == self._last:
            return None
        stats = OffloadingConnectorStats()
        for name, value in now.items():
            change = value - self._last.get(name, 0)
            if change:
                base, _, label = name.partition("{")
                metric = _LABELLED.get(base)
                labels = (name,) if metric is None else (label.rstrip("}"),)
                stats.increase_counter(metric or OTHERS, change, labels)
        self._last = now
        return stats
