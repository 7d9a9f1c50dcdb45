"""Reports what the KV connector did through vLLM's own statistics: its log line and its Prometheus metrics.

Each half has a store with counters of its own, and reports those. The scheduler half reports requested, found
and missing blocks. A rank reports reads and writes of its part. So nothing is counted twice, and each rank
counts its part of blocks that several ranks share. docs/metrics.md is the table of what is reported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from connectors.telemetry.metrics import (
    COMMON,
    EVENTS,
    NAMESPACE,
    PREFETCHED,
    QUICK,
    SHARES,
    SLOW,
    TIER_EVENTS,
    TIER_GAUGES,
    Exports,
    Mergeable,
    Metric,
    Timed,
    empty,
)
from connectors.telemetry.ways import SOURCES
from kvstore.rules.reasons import MISS_REASONS, SAVE_OUTCOMES, VERDICTS

if TYPE_CHECKING:
    from vllm.config import VllmConfig

PREFIX: Final = "vllm:kvstore_kv_"

#: Ways in which a request's load ends.
LOADS: Final = ("complete", "failed", "cut")
#: Outcomes of comparing stored blocks with computed blocks; "declined" counts loads declined for that
#: purpose.
AUDITS: Final = ("declined", "alike", "wrong", "differs", "unsure", "unread", "dropped")
#: Results of a reset of the engine's caches, or of a name for its weights (connectors.kv.namespace).
RESETS: Final = ("renamed", "left_alone", "named", "refused_name")

COUNTERS: Final = (
    Metric("matches", "Times the index was asked for a request"),
    Metric("asked_tokens", "Tokens in full blocks of the requests that the index was asked for"),
    Metric("matched_tokens", "Leading tokens of them that were found in the store"),
    Metric("promised_tokens", "Tokens that were to be loaded instead of computed"),
    Metric("loaded_tokens", "Tokens that were loaded, of loads that were complete or cut"),
    Metric(
        "saved_compute_seconds",
        "Time in which the engines that saved the tokens of complete loads computed them, by their estimate",
    ),
    Metric("prompt_tokens", "Tokens of prompts, by where their KV came from", "tier", SOURCES),
    Metric("saved_tokens", "Tokens whose blocks were saved, of the first KV cache group"),
    Metric("loads", "Loads of requests, by how they ended", "outcome", LOADS),
    Metric("misses", "Blocks asked for or promised that did not come, by reason", "reason", MISS_REASONS),
    Metric("loaded_blocks", "Blocks, or a rank's parts of blocks, read and verified"),
    Metric("loaded_bytes", "Bytes of them"),
    Metric(
        "probed_blocks",
        "Blocks, or a rank's parts of blocks, read to measure a tier, beside requests that compute",
    ),
    Metric("probed_bytes", "Bytes of them"),
    Metric("saves", "Blocks, or a rank's parts of blocks, offered for saving", "outcome", SAVE_OUTCOMES),
    Metric("save_failures", "Segments that could not be saved, by reason", "reason", MISS_REASONS),
    Metric("saved_segments", "Segments, or a rank's parts of segments, written"),
    Metric("saved_bytes", "Bytes of them"),
    Metric("tier", "Events of the local tier", "event", TIER_EVENTS),
    *PREFETCHED,
    Metric("events", "Other events of the store", "event", (*EVENTS, "outcomes_lost", "spans_lost")),
    Metric(
        "audits",
        "Loads declined to compare what is stored with what is computed, and runs compared on a rank",
        "outcome",
        AUDITS,
    ),
    Metric(
        "verdicts", "Writers that this engine has compared, by what holds of them now", "verdict", VERDICTS
    ),
    Metric("resets", "Resets of the cache and names for new weights", "outcome", RESETS),
)
SECONDS: Final = {
    "match_seconds": Timed("From the question to the index's answer", QUICK),
    "load_seconds": Timed("From a request's load being planned to its last block, on one rank", SLOW),
    "save_seconds": Timed("From the copy of a segment's blocks to its commit, on one rank", SLOW),
    "regret_seconds": Timed(
        "How much longer a request's stored blocks took than computing all or loading all, as was expected",
        SLOW,
    ),
    "regret_ratio": Timed("Regret as a share of the time to compute all stored blocks", SHARES),
    "measured_regret_ratio": Timed(
        "The same share, of requests that did the other thing than was decided, so that it was measured",
        SHARES,
    ),
}
#: Gauges of the scheduler half.
SCHEDULER_GAUGES: Final = (
    Metric("queued_calls", "Calls of the index waiting for a thread"),
    Metric("pending_segments", "Segments that some rank has not ended"),
    Metric("failed_writers", "Writers whose segments this engine takes as absent"),
    Metric("index_down", "1 while calls of the index are refused because it failed"),
    NAMESPACE,
)
#: Gauges of each rank; they get the label `rank`.
RANK_GAUGES: Final = (
    Metric("queued_reads", "Reads waiting for a thread"),
    Metric("queued_writes", "Segments waiting to be written"),
    Metric("queued_write_bytes", "Bytes of segments waiting or being written"),
    Metric("load_staging_used_bytes", "Staging memory in use by loads"),
    Metric("save_staging_used_bytes", "Staging memory in use by saves"),
    Metric("waiting_blocks", "Blocks that wait for staging memory to be saved"),
    Metric("payloads_down", "1 while reads of payloads are refused because they failed"),
    *TIER_GAUGES,
)

#: The store's counters that are reported -> the names they are reported under.
RENAMED: Final = {
    **COMMON,
    **{f"miss_blocks{{{one}}}": f"misses{{{one}}}" for one in MISS_REASONS},
    "outcomes_lost": "events{outcomes_lost}",
    **{f"verdicts{{{one}}}": f"verdicts{{{one}}}" for one in VERDICTS},
    "load_blocks": "loaded_blocks",
    "load_bytes": "loaded_bytes",
    "probe_blocks": "probed_blocks",
    "probe_bytes": "probed_bytes",
    "save_segments": "saved_segments",
}


class KVStoreStats(Mergeable, KVConnectorStats):
    """A report (connectors.telemetry.metrics) of one half, or the sum of several."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data or empty())


class KVStorePromMetrics(KVConnectorPromMetrics):
    """The Prometheus metrics `vllm:kvstore_kv_*`."""

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
