"""What the EC connector did, through vLLM's own statistics: its log line and its Prometheus metrics.

The workers' share travels with their metadata rather than by `get_ec_connector_stats`, which only one of
vLLM's two model runners asks them for. (That one drops the metadata of encoder-only producers, too: their
saves are then seen by nobody but the producer's log.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from vllm.distributed.ec_transfer.ec_connector.metrics import ECConnectorPromMetrics, ECConnectorStats

from connectors.stats import (
    NAMESPACE,
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

PREFIX: Final = "vllm:kvstore_ec_"

#: Where the output of an encoder input that was scheduled came from.
SOURCES: Final = (
    "store",  # fetched from the store
    "staging",  # fetched earlier and still on this node
    "encoder",  # computed here
    "skipped",  # (producer) the store has it: neither computed nor loaded
)
#: Why an item that was looked for was computed all the same; "mismatch": it is not of the expected size.
REASONS: Final = (*MISS_REASONS, "mismatch")

COUNTERS: Final = (
    Metric("items", "Encoder inputs scheduled, by where the output came from", "source", SOURCES),
    Metric("misses", "Encoder inputs computed though the store was asked, by reason", "reason", REASONS),
    Metric("unavailable_requests", "Requests failed for an item that could be neither had nor computed"),
    Metric("loaded_bytes", "Bytes of encoder outputs handed to the workers"),
    Metric("saved_compute_seconds", "What encoding the outputs that were handed to the workers took"),
    Metric("saves", "Encoder outputs offered to the store", "outcome", SAVE_OUTCOMES),
    Metric("save_failures", "Saves that failed, by reason", "reason", MISS_REASONS),
    Metric("saved_bytes", "Bytes of segments written"),
    Metric("outcomes_lost", "Outcomes of items that the journal could not be told"),
    Metric("tier", "Events of the local tier", "event", TIER_EVENTS),
)
SECONDS: Final = {
    "fetch_seconds": Timed("From the look-up of an item to its verified bytes on this node", SLOW),
    "save_seconds": Timed("From the end of the encoder to the commit", SLOW),
}
#: Of the scheduler's half, which asks the index and reads payloads.
GAUGES: Final = (
    Metric("index_down", "1 while calls of the index are refused because it failed"),
    Metric("payloads_down", "1 while reads of payloads are refused because they failed"),
    NAMESPACE,
    *TIER_GAUGES,
)

#: The store's counters that are reported, and as what.
RENAMED: Final = {
    **{f"save_blocks{{{one}}}": f"saves{{{one}}}" for one in SAVE_OUTCOMES},
    **{f"save_failures{{{one}}}": f"save_failures{{{one}}}" for one in MISS_REASONS},
    **{f"tier_{one}": f"tier{{{one}}}" for one in TIER_EVENTS},
    "save_bytes": "saved_bytes",
    "outcomes_lost": "outcomes_lost",
}


def no_gauges() -> dict[str, float]:
    """The workers' half has no states to report, only events."""
    return {}


class ECStoreStats(Mergeable, ECConnectorStats):
    """A report (connectors.stats), of one half or of several together."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data or empty())


class ECStorePromMetrics(ECConnectorPromMetrics):
    """`vllm:kvstore_ec_*`."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._exports = Exports(
            PREFIX,
            metric_types,
            labelnames,
            per_engine_labelvalues,
            counters=COUNTERS,
            gauges=GAUGES,
            seconds=SECONDS,
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        self._exports.observe(transfer_stats_data, engine_idx)
