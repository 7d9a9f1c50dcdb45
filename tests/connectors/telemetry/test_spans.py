"""Spans: recorded in microseconds, sent by a thread that may hang, and counted where they are lost."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the connectors' tests need the full set-up: make setup")

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from connectors.choice.decision import Decision
from connectors.telemetry import tracing
from connectors.telemetry.spans import MOST_SPANS, LoadTimes, NoSpans, RequestSpans, Sent, Spans
from connectors.telemetry.tracing import MOST, SpanSender
from kvstore.keys import NamespaceId, SegmentId
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.engine

NAMESPACE = NamespaceId("0123456789abcdef")
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Kept:
    """A sender that keeps everything, or refuses it."""

    def __init__(self, *, full: bool = False) -> None:
        self.full = full
        self.sent: list[Sent] = []

    def put(self, sent: Sent) -> bool:
        if not self.full:
            self.sent.append(sent)
        return not self.full

    def close(self) -> None:
        return


class Lost:
    """Counts lost spans."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, count: int) -> None:
        self.count += count


def segment(number: int) -> SegmentId:
    return SegmentId(number.to_bytes(16, "big"))


def recorded(sender: Any, lost: Lost) -> Spans:
    spans = Spans(sender, lost)
    spans.use(NAMESPACE)
    return spans


def request(spans: Spans, name: str = "r", headers: dict[str, str] | None = None, saves: int = 1) -> None:
    """All that happens to a request, but for the ends of its saves."""
    spans.arrived(name, headers)
    now = time.monotonic()
    spans.matched(name, now, now + 0.001, 64, "absent")
    spans.decided(name, Decision(64, 64, "faster", 0.5, 0.5, 2.0))
    spans.load_planned(name, 64, {"folder": 48, "bucket": 16})
    for _ in range(2):
        times = LoadTimes()
        times.piece("folder", 100, {"began": 1_000, "read": 2_000, "verify": 2_500, "copy": 4_000})
        spans.load_times(name, times)
    spans.load_ended(name)
    spans.begun(name, {"folder": 48, "bucket": 16, "computed": 6})
    for number in range(saves):
        spans.save_planned(segment(number), name, 0, 4)
    spans.finished(name)


def test_a_request_is_sent_once_with_all_its_parts() -> None:
    sender, lost = Kept(), Lost()
    spans = recorded(sender, lost)
    request(spans)
    [trace] = sender.sent
    assert isinstance(trace, RequestSpans) and not lost.count
    assert [span.name for span in trace.spans] == [
        "kvstore.match",
        "kvstore.wait",
        "kvstore.load",
        "kvstore.wait",
    ]
    load = trace.spans[2]
    assert load.attributes == {
        "kvstore.tokens": 64,
        "kvstore.tokens.folder": 48,
        "kvstore.tokens.bucket": 16,
        "kvstore.pieces": 2,
        "kvstore.bytes.folder": 200,
    }
    read, verify, copy = load.parts
    assert (read.began_ns, read.ended_ns, copy.ended_ns) == (1_000, 2_000, 4_000)
    assert verify.attributes == {"kvstore.busy_seconds": 1e-6}, "of two ranks together"
    spans.save_ended(segment(0), "present")
    late = sender.sent[1]
    assert isinstance(late, tuple) and late[0] is trace and late[1].attributes["kvstore.outcome"] == "present"
    spans.save_ended(segment(0), "stored")
    spans.finished("r")
    assert len(sender.sent) == 2, "nothing is told twice"


def test_an_aborted_load_is_told() -> None:
    sender = Kept()
    spans = recorded(sender, Lost())
    spans.arrived("r", None)
    spans.load_planned("r", 64, {"disk": 64})
    spans.finished("r")
    spans.load_ended("r")
    [trace] = sender.sent
    assert isinstance(trace, RequestSpans)
    assert {span.name: span.attributes for span in trace.spans}["kvstore.load"] == {
        "kvstore.tokens": 64,
        "kvstore.tokens.disk": 64,
        "kvstore.reason": "aborted",
    }


def test_saves_to_a_former_namespace_are_not_followed() -> None:
    sender = Kept()
    spans = recorded(sender, Lost())
    request(spans)
    spans.use(NAMESPACE)
    spans.save_ended(segment(0), "stored")
    assert len(sender.sent) == 1


def test_a_request_holds_few_spans_and_what_is_lost_is_counted() -> None:
    sender, lost = Kept(), Lost()
    spans = recorded(sender, lost)
    spans.arrived("r", None)
    for number in range(MOST_SPANS + 10):
        spans.save_planned(segment(number), "r", 0, 4)
        spans.save_ended(segment(number), "stored")
    spans.finished("r")
    [trace] = sender.sent
    # The wait before its end is one too many as well.
    assert isinstance(trace, RequestSpans) and len(trace.spans) == MOST_SPANS and lost.count == 11
    full = Kept(full=True)
    spans = recorded(full, lost := Lost())
    request(spans)
    spans.save_ended(segment(0), "stored")
    assert lost.count == 1 + 4 + 3 + 1 and not full.sent


def test_without_tracing_nothing_is_opened() -> None:
    class Config:
        class observability_config:
            otlp_traces_endpoint = None

    before = threading.active_count()
    spans = tracing.open_spans(Config, Lost())
    assert type(spans) is NoSpans and not spans.on and threading.active_count() == before


# ---- what is sent -----------------------------------------------------------------------------------


def test_spans_are_sent_as_children_of_the_clients() -> None:
    kept, lost = InMemorySpanExporter(), Lost()
    exporter = SpanSender(kept, lost)
    spans = recorded(exporter, lost)
    request(spans, "mine", {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"})
    request(spans, "not\x1bsampled", {"traceparent": f"00-{TRACE}-{PARENT}-00"})
    request(spans, "forged", {"traceparent": "00-nonsense"})
    request(spans, "alone\x1b[2J", None)
    spans.save_ended(segment(0), "stored")
    spans.close()
    sent = kept.get_finished_spans()
    roots = {
        str((one.attributes or {})["kvstore.request.id"]): one
        for one in sent
        if one.name == "kvstore.request"
    }
    assert set(roots) == {"mine", "forged", "alone\\x1b[2J"}, (
        "a client's sampling counts, and ids are readable"
    )
    mine, alone = roots["mine"], roots["alone\\x1b[2J"]
    assert mine.context and mine.parent and alone.context and alone.parent is None
    assert f"{mine.context.trace_id:032x}" == TRACE and f"{mine.parent.span_id:016x}" == PARENT
    assert roots["forged"].parent is None
    assert mine.attributes and dict(mine.attributes) == {
        "kvstore.request.id": "mine",
        "kvstore.namespace": NAMESPACE,
        "kvstore.tokens.folder": 48,
        "kvstore.tokens.bucket": 16,
        "kvstore.tokens.computed": 6,
        "kvstore.decision": "faster",
        "kvstore.expected.load_seconds": 0.5,
        "kvstore.expected.compute_seconds": 2.0,
    }
    # Four requests, of which the last one's save ended: the same segment.
    of = Counter(one.context.trace_id for one in sent if one.context)
    assert of[alone.context.trace_id] == 1 + 4 + 3 + 1 and of[mine.context.trace_id] == 1 + 4 + 3
    ids = {one.context.span_id for one in sent if one.context}
    assert all(one.parent is None or one.parent.span_id in ids or one is mine for one in sent)
    assert not lost.count


class Hangs(SpanExporter):
    """A collector that doesn't answer."""

    def __init__(self) -> None:
        self.begun, self.goes_on = threading.Event(), threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.begun.set()
        self.goes_on.wait(PATIENCE_S)
        return SpanExportResult.FAILURE


def test_a_collector_that_hangs_costs_spans_and_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "_LAST_S", 0.01)
    monkeypatch.setattr(tracing, "_PERIOD_S", 0.001)
    hangs, lost = Hangs(), Lost()
    spans = recorded(SpanSender(hangs, lost), lost)
    request(spans)
    assert hangs.begun.wait(PATIENCE_S)
    slowest = 0.0
    for number in range(MOST + 100):
        before = time.perf_counter()
        request(spans, f"r{number}", saves=0)
        slowest = max(slowest, time.perf_counter() - before)
    assert lost.count == 100 * 8
    assert slowest < PATIENCE_S / 2, "a request waited for the collector"
    spans.close()
    assert lost.count == (100 + MOST) * 8
    hangs.goes_on.set()
    until(lambda: lost.count == (100 + MOST) * 8 + 8)
