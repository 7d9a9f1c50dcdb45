"""The EC connector's part of vLLM's own statistics: of its log line and of its Prometheus metrics.

The workers' share travels with their metadata rather than through `get_ec_connector_stats`, which only one of
vLLM's two model runners calls on them. (That one also drops the metadata of encoder-only producers: then only
the producer's log tells of their saves.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from vllm.distributed.ec_transfer.ec_connector.metrics import ECConnectorPromMetrics, ECConnectorStats

from connectors.telemetry.metrics import (
    COMMON,
    EVENTS,
    NAMESPACE,
    PREFETCHED,
    SLOW,
    TIER_EVENTS,
    TIER_GAUGES,
    Exports,
    Mergeable,
    Metric,
    Timed,
    empty,
)
from kvstore.rules.reasons import MISS_REASONS, SAVE_OUTCOMES, TOLD_MISSES, VERDICTS
from kvstore.rules.tiers import TIERS

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

COUNTERS: Final = (
    Metric("items", "Encoder inputs scheduled, by where the output came from", "source", SOURCES),
    Metric(
        "misses",
        "Encoder inputs computed though the store was asked, by reason",
        "reason",
        tuple(TOLD_MISSES),
    ),
    Metric("fetched_items", "Encoder outputs fetched, by where their payload lay", "tier", TIERS),
    Metric("unavailable_requests", "Requests failed for an item that could be neither had nor computed"),
    Metric("loaded_bytes", "Bytes of encoder outputs handed to the workers"),
    Metric("saved_compute_seconds", "Time that it took to encode the outputs handed to the workers"),
    Metric("saves", "Encoder outputs offered to the store", "outcome", SAVE_OUTCOMES),
    Metric("save_failures", "Saves that failed, by reason", "reason", MISS_REASONS),
    Metric("saved_bytes", "Bytes of segments written"),
    Metric("outcomes_lost", "Outcomes of items that did not reach the journal"),
    Metric("tier", "Events of the local tier", "event", TIER_EVENTS),
    *PREFETCHED,
    Metric("events", "Other events of the store", "event", EVENTS),
    Metric(
        "verdicts", "Writers that this engine has compared, by what holds of them now", "verdict", VERDICTS
    ),
)
SECONDS: Final = {
    "fetch_seconds": Timed("From the look-up of an item to its verified bytes on this node", SLOW),
    "save_seconds": Timed("From the end of the encoder to the commit", SLOW),
}
#: States of the scheduler's half, which asks the index and reads payloads.
GAUGES: Final = (
    Metric("index_down", "1 while calls of the index are refused because it failed"),
    Metric("payloads_down", "1 while reads of payloads are refused because they failed"),
    NAMESPACE,
    *TIER_GAUGES,
)

#: The store's counters that are reported, and their names in a report.
RENAMED: Final = {
    **COMMON,
    "outcomes_lost": "outcomes_lost",
    **{f"verdicts{{{one}}}": f"verdicts{{{one}}}" for one in VERDICTS},
}


def no_gauges() -> dict[str, float]:
    """Returns no states: the workers' half has only events to report."""
    return {}


class ECStoreStats(Mergeable, ECConnectorStats):
    """A report (connectors.telemetry.metrics) of one half or of several together."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data or empty())


class ECStorePromMetrics(ECConnectorPromMetrics):
    """Exports the reports as Prometheus metrics, `vllm:kvstore_ec_*`."""

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
