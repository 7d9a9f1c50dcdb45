"""Metrics of the router feed for Prometheus: what its report says, as docs/router-feed.md explains it."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvstore.admin.feed.reports import FeedReport

_GAUGES = {
    "segments": "Segments that routers are told are stored",
    "blocks": "Their blocks",
    "bare_blocks": "Of these, those announced by their hashes alone",
    "told_blocks": "Blocks that engines told of",
    "kept_batches": "Batches kept for replays",
    "kept_bytes": "Bytes of them",
    "lag_seconds": "How old the newest event was when it was published",
    "up": "1 if the index and the payloads could be read the last time",
}
_COUNTERS = {
    "batches": "Batches published",
    "sent_bytes": "Bytes of them",
    "events": "Events of the index that were read",
    "holes": "Holes in the index's rings, after which all was read again",
    "snapshots": "Snapshots sent, to everybody and as answers",
    "replays": "Replays that routers asked for",
    "heard": "Batches of engines that were read",
    "unheard": "Batches of engines that could not be read",
    "unreadable_segments": "Segments that could not be announced",
    "crowded_out_segments": "Segments taken back for want of room",
}


def metrics_of(report: FeedReport) -> Iterator[Metric]:
    """Yields the metrics of a report."""
    values = {
        **{name: value for name, value in report if isinstance(value, int)},
        "lag_seconds": report.lag_s or 0.0,
        "up": not report.problem,
        "unreadable_segments": report.unreadable,
        "crowded_out_segments": report.crowded_out,
    }
    for name, text in _GAUGES.items():
        yield GaugeMetricFamily(f"kvstore_feed_{name}", text, values[name])
    for name, text in _COUNTERS.items():
        yield CounterMetricFamily(f"kvstore_feed_{name}", text, values[name])
