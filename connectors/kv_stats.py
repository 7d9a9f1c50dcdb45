"""What the KV connector did, through vLLM's own statistics: its log line and its Prometheus metrics.

Both halves have a store with counters of its own, and each reports its own: the scheduler's what was asked
for, found and not found; a rank's what was to be read and written of its part. So nothing is counted twice,
and of what several ranks share each counts its part. docs/metrics.md is the table of what is reported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from connectors.stats import (
    NAMESPACE,
    QUICK,
    SLOW,
    TIER_EVENTS,
    TIER_GAUGES,
    Exports,
    Mergeable,
    Metric,
    Timed,
    empty,
)
from kvstore.metrics import MISS_REASONS, SAVE_OUTCOMES

if TYPE_CHECKING:
    from vllm.config import VllmConfig

PREFIX: Final = "vllm:kvstore_kv_"

#: How a request's load ended.
LOADS: Final = ("complete", "failed")
#: What a reset of the engine's caches led to (connectors.kv_epochs).
RESETS: Final = ("renamed", "left_alone", "named", "refused_name")
_EVENTS: Final = (
    "evicted_segments", "deleted_payloads", "quarantined_segments", "dropped_copies", "note_failures",
    "outcomes_lost", "trace_lost",
)  # fmt: skip

COUNTERS: Final = (
    Metric("matches", "Times the index was asked for a request"),
    Metric("asked_tokens", "Tokens in full blocks of the requests that the index was asked for"),
    Metric("matched_tokens", "Leading tokens of them that were found in the store"),
    Metric("promised_tokens", "Tokens that were to be loaded instead of computed"),
    Metric("loaded_tokens", "Tokens that were loaded, of loads that were complete"),
    Metric(
        "saved_compute_seconds",
        "What computing the tokens of complete loads took the engines that saved them, as they estimate it",
    ),
    Metric("saved_tokens", "Tokens whose blocks were saved, of the first KV cache group"),
    Metric("loads", "Loads of requests, by how they ended", "outcome", LOADS),
    Metric("misses", "Blocks asked for or promised that did not come, by reason", "reason", MISS_REASONS),
    Metric("loaded_blocks", "Blocks, or a rank's parts of blocks, read and verified"),
    Metric("loaded_bytes", "Bytes of them"),
    Metric("saves", "Blocks, or a rank's parts of blocks, offered for saving", "outcome", SAVE_OUTCOMES),
    Metric("save_failures", "Segments that could not be saved, by reason", "reason", MISS_REASONS),
    Metric("saved_segments", "Segments, or a rank's parts of segments, written"),
    Metric("saved_bytes", "Bytes of them"),
    Metric("tier", "Events of the local tier", "event", TIER_EVENTS),
    Metric("events", "What else the store did", "event", _EVENTS),
    Metric("resets", "Resets of the cache and names for new weights", "outcome", RESETS),
)
SECONDS: Final = {
    "match_seconds": Timed("From the question to the index's answer", QUICK),
    "load_seconds": Timed("From a request's load being planned to its last block, on one rank", SLOW),
    "save_seconds": Timed("From the copy of a segment's blocks to its commit, on one rank", SLOW),
}
#: Of the scheduler's half.
SCHEDULER_GAUGES: Final = (
    Metric("queued_calls", "Calls of the index waiting for a thread"),
    Metric("pending_segments", "Segments that some rank has not ended"),
    Metric("index_down", "1 while calls of the index are refused because it failed"),
    NAMESPACE,
)
#: Of each rank; the values of their label are its ranks.
RANK_GAUGES: Final = (
    Metric("queued_reads", "Reads waiting for a thread"),
    Metric("queued_writes", "Segments waiting to be written"),
    Metric("queued_write_bytes", "Bytes of segments waiting or being written"),
    Metric("load_staging_used_bytes", "Staging memory in use by loads"),
    Metric("save_staging_used_bytes", "Staging memory in use by saves"),
    Metric("payloads_down", "1 while reads of payloads are refused because they failed"),
    *TIER_GAUGES,
)

#: The store's counters that are reported, and as what.
RENAMED: Final = {
    **{f"miss_blocks{{{one}}}": f"misses{{{one}}}" for one in MISS_REASONS},
    **{f"save_blocks{{{one}}}": f"saves{{{one}}}" for one in SAVE_OUTCOMES},
    **{f"save_failures{{{one}}}": f"save_failures{{{one}}}" for one in MISS_REASONS},
    **{f"tier_{one}": f"tier{{{one}}}" for one in TIER_EVENTS},
    **{one: f"events{{{one}}}" for one in _EVENTS},
    "load_blocks": "loaded_blocks",
    "load_bytes": "loaded_bytes",
    "save_segments": "saved_segments",
    "save_bytes": "saved_bytes",
}


class KVStoreStats(Mergeable, KVConnectorStats):
    """A report (connectors.stats), of one half or of several together."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data or empty())


class KVStorePromMetrics(KVConnectorPromMetrics):
    """`vllm:kvstore_kv_*`."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        ranks = tuple(map(str, range(vllm_config.parallel_config.world_size)))
        self._exports = Exports(
            PREFIX,
            metric_types,
            labelnames,
            per_engine_labelvalues,
            counters=COUNTERS,
            gauges=SCHEDULER_GAUGES + tuple(Metric(one.name, one.help, "rank", ranks) for one in RANK_GAUGES),
            seconds=SECONDS,
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        self._exports.observe(transfer_stats_data, engine_idx)
