"""Sends recorded spans to where vLLM sends its own: the endpoint that `--otlp-traces-endpoint` names.

vLLM has an exporter in its front end and in some workers, not in the process where its scheduler runs. So
this is one more, made by vLLM's own function, with a thread of its own: a collector that hangs delays nothing
but the queue before it, which is bounded. Spans that don't fit into the queue, or can't be sent by the
exporter's deadline, are counted and lost.

A request's spans have the parent that vLLM's own span of the request has, which is the client's; without one
they are a trace of their own. Samplers are OpenTelemetry's, as the environment names them for vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from connectors.telemetry.spans import NoSpans, RequestSpans, Sent, Span, Spans
from kvstore import __version__
from kvstore.rules.text import readable
from kvstore.threads.outbox import Outbox

#: Most requests, or single spans of requests that have ended, that wait to be sent.
MOST: Final = 2048
#: Most spans that are sent at once.
BATCH: Final = 512
_PERIOD_S: Final = 1.0
#: How long the end of an engine waits for the last spans, in seconds.
_LAST_S: Final = 2.0


def open_spans(vllm_config: Any, lost: Callable[[int], None]) -> NoSpans:
    """Returns what records the spans of an engine's requests, or nothing if vLLM isn't told to trace.

    `lost` gets the number of spans that are not sent; any thread may call it.
    """
    endpoint = vllm_config.observability_config.otlp_traces_endpoint
    if endpoint is None:
        return NoSpans()
    from vllm.tracing.otel import get_span_exporter

    return Spans(SpanSender(get_span_exporter(endpoint), lost), lost)


class SpanSender:
    """Makes OpenTelemetry's spans of those recorded, and exports them on a thread of its own."""

    def __init__(self, exporter: Any, lost: Callable[[int], None]) -> None:
        """`exporter` is OpenTelemetry's SpanExporter, which has deadlines of its own."""
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
        from opentelemetry.sdk.trace.export import SpanExportResult

        self._ended: list[ReadableSpan] = []
        ended = self._ended

        class Collect(SpanProcessor):
            def on_end(self, span: ReadableSpan) -> None:
                ended.append(span)

        resource = Resource.create({"vllm.instrumenting_module_name": "kvstore"})
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(Collect())
        self._tracer = provider.get_tracer("kvstore", __version__)
        self._success = SpanExportResult.SUCCESS
        self._exporter = exporter
        self._lost = lost
        self._outbox: Outbox[Sent] = Outbox(self._send, most=MOST, period_s=_PERIOD_S, name="kvstore-spans")

    def put(self, sent: Sent) -> bool:
        """Queues spans without waiting for anything. Returns False if they are lost."""
        return self._outbox.put(sent)

    def close(self) -> None:
        """Sends what is queued, if that is quick, and ends."""
        for sent in self._outbox.close(_LAST_S):
            self._lost(len(sent) if isinstance(sent, RequestSpans) else 1)
        self._exporter.shutdown()

    def _send(self, batch: Sequence[Sent]) -> None:
        for sent in batch:
            if isinstance(sent, RequestSpans):
                self._request(sent)
            else:
                trace, span = sent
                self._span(span, trace.context)
            if len(self._ended) >= BATCH:
                self._export()
        self._export()

    def _request(self, trace: RequestSpans) -> None:
        """Makes a request's span, and those that have ended with it."""
        from opentelemetry.context import Context
        from opentelemetry.trace import set_span_in_context
        from vllm.tracing import extract_trace_context

        # An empty context means no parent; none at all would mean whatever is this thread's.
        parent = extract_trace_context(trace.headers) or Context()
        told = {"kvstore.request.id": readable(trace.request_id), **trace.attributes}
        root = self._tracer.start_span(
            "kvstore.request", parent, attributes=told, start_time=trace.at(trace.began)
        )
        trace.context = set_span_in_context(root, Context())
        for span in trace.spans:
            self._span(span, trace.context)
        trace.spans.clear()
        root.end(trace.at(trace.ended))

    def _span(self, span: Span, context: Any) -> None:
        from opentelemetry.trace import set_span_in_context

        made = self._tracer.start_span(
            span.name, context, attributes=span.attributes, start_time=span.began_ns
        )
        for part in span.parts:
            self._span(part, set_span_in_context(made, context))
        made.end(span.ended_ns)

    def _export(self) -> None:
        spans = self._ended[:]
        self._ended.clear()
        if spans and self._exporter.export(spans) is not self._success:
            self._lost(len(spans))
