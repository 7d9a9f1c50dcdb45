"""What the engine's thread pays for counting tokens by tier, and for spans: microseconds a request.

    python -m trials.benchmarks.bench_spans [--requests 20000] [--json FILE]

The calls that a request makes of what counts and records, from its arrival to its end: one match, one load
from two tiers, the report of one rank, its turn, four saves. "tokens by tier" is counted always; spans are
recorded where vLLM traces, ten for each request, while the thread that makes OpenTelemetry's of them does so
beside, with an exporter that takes everything. "sent" is how many requests it gets through alone.
Each number is the median of its rounds.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

from connectors.telemetry.spans import LoadTimes, NoSpans, Spans
from connectors.telemetry.tracing import SpanSender
from connectors.telemetry.ways import Way
from kvstore.keys import NamespaceId, SegmentId
from kvstore.rules.tiers import Tier

ROUNDS = 5
LOADS: list[tuple[int, Tier]] = [(4096, "folder"), (8192, "bucket")]
SEGMENTS = [SegmentId(number.to_bytes(16, "big")) for number in range(4)]
HEADERS = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}


class Takes:
    """An exporter that takes everything at once."""

    def export(self, spans: Any) -> Any:
        from opentelemetry.sdk.trace.export import SpanExportResult

        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        return


def counted(way: Way) -> None:
    """What is counted of one request."""
    way.begin(32)
    way.loads = LOADS
    way.runs(8192, 8200)


def recorded(spans: NoSpans, name: str) -> None:
    """What is recorded of one request."""
    spans.arrived(name, HEADERS)
    spans.matched(name, 1.0, 2.0, 8192, "complete")
    spans.load_planned(name, 8160, {"folder": 4064, "bucket": 4096})
    if spans.on:
        times = LoadTimes()
        times.piece("folder", 1 << 20, {"began": 1, "read": 2, "verify": 3, "copy": 4})
        spans.load_times(name, times)
    spans.load_ended(name)
    spans.begun(name, {"engine": 32, "folder": 4064, "bucket": 4096, "computed": 8})
    for segment in SEGMENTS:
        spans.save_planned(segment, name, 0, 16)
        spans.save_ended(segment, "stored")
    spans.finished(name)


def microseconds(work: Any, requests: int) -> float:
    """Returns what one call of `work(number)` takes, in microseconds."""
    before = time.perf_counter()
    for number in range(requests):
        work(number)
    return (time.perf_counter() - before) / requests * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--requests", type=int, default=20000)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    taken: dict[str, list[float]] = {}
    lost = 0

    def loses(count: int) -> None:
        nonlocal lost
        lost += count

    for _ in range(ROUNDS):
        sender = SpanSender(Takes(), loses)
        on, off = Spans(sender, loses), NoSpans()
        on.use(NamespaceId("0" * 16))
        names = [f"cmpl-{number}" for number in range(asked.requests)]
        taken.setdefault("tokens by tier", []).append(microseconds(lambda _: counted(Way()), asked.requests))
        taken.setdefault("spans, off", []).append(
            microseconds(lambda n, s=off: recorded(s, names[n]), asked.requests)
        )
        taken.setdefault("spans, on", []).append(
            microseconds(lambda n, s=on: recorded(s, names[n]), asked.requests)
        )
        sender.close()
        # By itself: what fits into the queue, from its first to its last.
        sender = SpanSender(Takes(), loses)
        alone = Spans(sender, loses)
        for name in names[:2000]:
            recorded(alone, name)
        before = time.perf_counter()
        sender.close()
        taken.setdefault("sent", []).append(2000 / (time.perf_counter() - before))
    rows = {name: statistics.median(values) for name, values in taken.items()}
    for name, value in rows.items():
        print(f"{name:16} {value:10.2f} {'requests/s' if name == 'sent' else 'us a request'}")
    if asked.json:
        machine = {"python": platform.python_version(), "machine": platform.machine()}
        asked.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
