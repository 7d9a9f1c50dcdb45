"""The rows on what engines store besides the KV connector's blocks: encoder outputs, vLLM's offloading."""

from __future__ import annotations

from tools.dashboards.fleet import by, percentiles
from tools.dashboards.grafana import Panel, Query, Row
from tools.dashboards.queries import ENGINE

_FAILED = (
    "sum by (model_name) ("
    f"increase(vllm:kvstore_ec_unavailable_requests_total{{{ENGINE}}}[$__rate_interval]))"
)

ENCODERS = Row(
    "Encoder outputs",
    (
        Panel(
            "Items, by source",
            "timeseries",
            "short",
            (Query(by("ec_items_total", "source"), "{{source}}"),),
            "Encoder inputs per second, by where the output came from: the store, this node's staging, or "
            "the encoder. skipped: a producer found it stored.",
            stack=True,
        ),
        Panel(
            "Missed, by reason",
            "timeseries",
            "short",
            (Query(by("ec_misses_total", "reason"), "{{reason}}"),),
            "Items per second that were encoded though the store was asked. absent: never seen before, or "
            "evicted. mismatch: an identifier that was used for something of another size.",
            stack=True,
            alerts=("KVStoreCorruptLoads",),
        ),
        Panel(
            "Requests failed",
            "timeseries",
            "short",
            (Query(_FAILED, "{{model_name}}"),),
            "Of engines without an encoder, for an item that could be neither had nor computed. These reach "
            "a user: the runbook says what to do.",
            limits=((1, "red"),),
            alerts=("KVStoreRequestsFailed",),
        ),
        Panel(
            "Fetch",
            "timeseries",
            "s",
            percentiles("vllm:kvstore_ec_fetch_seconds"),
            "From the look-up of an item to its verified bytes on this node. Past ec.fetch_deadline_s (2 s) "
            "it is encoded.",
        ),
        Panel(
            "Save",
            "timeseries",
            "s",
            percentiles("vllm:kvstore_ec_save_seconds"),
            "From the end of the encoder to the commit. In a disaggregated deployment the other engine "
            "waits for it.",
            alerts=("KVStoreRequestsFailed",),
        ),
        Panel(
            "Offered, by outcome",
            "timeseries",
            "short",
            (
                Query(by("ec_saves_total", "outcome"), "{{outcome}}"),
                Query(by("ec_save_failures_total", "reason"), "failed: {{reason}}"),
            ),
            "Items per second, and the reasons of those that failed.",
            alerts=("KVStoreSavesFailing",),
        ),
    ),
)

OFFLOADING = Row(
    "Under vLLM's offloading",
    (
        Panel(
            "Chunks missed, by reason",
            "timeseries",
            "short",
            (Query(by("tier_miss_chunks_total", "reason"), "{{reason}}"),),
            "Per second, of the KVStoreTier (docs/tier.md). Empty where it is not used.",
            stack=True,
        ),
        Panel(
            "Chunks offered, by outcome",
            "timeseries",
            "short",
            (Query(by("tier_save_chunks_total", "outcome"), "{{outcome}}"),),
            "Per second, of the KVStoreTier.",
            stack=True,
        ),
        Panel(
            "What else it did",
            "timeseries",
            "short",
            (Query(by("tier_events_total", "name"), "{{name}}"),),
            "The store's other counters, per second.",
        ),
    ),
)
