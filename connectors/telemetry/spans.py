"""Records where the time of each request goes, as spans of OpenTelemetry beside vLLM's own.

    kvstore.request    from the request's arrival at the scheduler to its end, with its tokens by tier
      kvstore.match    from the question to the index's answer
      kvstore.wait     from the answer until its load is planned, and from that one's end until it gets its
                       turn to compute: in the engine's queue, or for another's load of the same blocks
      kvstore.load     from the plan until all ranks have reported its end; as ranks report them,
        kvstore.read      from the first byte asked for to the last one there,
        kvstore.verify    checksums, and what unpacks and decrypts, from the first to the last,
        kvstore.copy      from staging to the paged cache
      kvstore.save     of one segment: from the plan until all ranks have reported its end

The engine's thread notes times in a `RequestSpans` and appends it to a queue when the request ends; what ends
later, a save, follows by itself. connectors.telemetry.tracing makes spans of them, on a thread of its own. No
span has tokens, prompts or salts: numbers, reasons, hashes and the ids of requests.

Off, there is one call that returns for each thing that happens to a request, and nothing per step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol

from connectors.choice.decision import Decision
from connectors.telemetry.ways import Source
from kvstore.keys import NamespaceId, SegmentId
from kvstore.rules.tiers import Tier

#: Most spans of one request that wait for its end. A long one that saves what it decodes has more.
MOST_SPANS: Final = 64

Attributes = dict[str, str | int | float | bool]
#: Stages of each piece of a load on its ranks, in order.
StageName = Literal["read", "verify", "copy"]
Mark = Literal["began"] | StageName


@dataclass(slots=True)
class StageTimes:
    """One stage of a load's pieces: when the first began and the last ended, in ns since the epoch, and what
    all of them took together, in ns."""

    began_ns: int
    ended_ns: int
    busy_ns: int

    def add(self, other: StageTimes) -> None:
        """Adds other pieces, which may be another rank's."""
        self.began_ns = min(self.began_ns, other.began_ns)
        self.ended_ns = max(self.ended_ns, other.ended_ns)
        self.busy_ns += other.busy_ns


@dataclass(slots=True)
class LoadTimes:
    """One load on its ranks: the pieces that came, their bytes in pages by tier, and the stages' times."""

    stages: dict[StageName, StageTimes] = field(default_factory=dict)
    nbytes: dict[Tier, int] = field(default_factory=dict)
    pieces: int = 0

    def piece(self, tier: Tier, nbytes: int, marks_ns: Mapping[Mark, int]) -> None:
        """Adds a piece of `nbytes`; `marks_ns` has in order when it began and when each stage of it ended."""
        self.pieces += 1
        self.nbytes[tier] = self.nbytes.get(tier, 0) + nbytes
        began_ns = 0
        for name, end_ns in marks_ns.items():
            if name != "began":
                self._stage(name, StageTimes(began_ns, end_ns, end_ns - began_ns))
            began_ns = end_ns

    def add(self, other: LoadTimes) -> None:
        """Adds another rank's."""
        self.pieces += other.pieces
        for tier, nbytes in other.nbytes.items():
            self.nbytes[tier] = self.nbytes.get(tier, 0) + nbytes
        for name, stage in other.stages.items():
            self._stage(name, stage)

    def _stage(self, name: StageName, stage: StageTimes) -> None:
        if (mine := self.stages.get(name)) is None:
            self.stages[name] = StageTimes(stage.began_ns, stage.ended_ns, stage.busy_ns)
        else:
            mine.add(stage)


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a request's time, in ns since the epoch."""

    name: str
    began_ns: int
    ended_ns: int
    attributes: Attributes
    #: Those within it.
    parts: tuple[Span, ...] = ()


@dataclass(slots=True, eq=False)
class RequestSpans:
    """The spans of one request; the first one holds all others. Belongs to the scheduler's thread until it is
    handed over whole, and to the thread that sends it from then on."""

    request_id: str
    #: The trace that a client has put the request into, as W3C's headers.
    headers: Mapping[str, str] | None
    #: Nanoseconds since the epoch at 0 of `time.monotonic`, as of the request's arrival: all its times are
    #: told by the same clock, whatever happens to that of the machine meanwhile.
    epoch_ns: int
    began: float
    attributes: Attributes
    spans: list[Span] = field(default_factory=list)
    ended: float = 0.0
    #: When what it waits for began; 0: it waits for nothing.
    waits: float = 0.0
    #: When its load was planned; 0: none is under way.
    load_began: float = 0.0
    load_attributes: Attributes = field(default_factory=dict)
    load_times: LoadTimes | None = None
    #: Spans that were one too many.
    lost: int = 0
    #: Parent context of its spans; belongs to the sender.
    context: object = None

    def __len__(self) -> int:
        return 1 + sum(1 + len(span.parts) for span in self.spans)

    def at(self, seconds: float) -> int:
        """Returns a `time.monotonic` time as ns since the epoch."""
        return self.epoch_ns + int(seconds * 1e9)

    def span(self, name: str, began: float, ended: float, attributes: Attributes, *parts: Span) -> Span:
        """Returns a span between two `time.monotonic` times."""
        return Span(f"kvstore.{name}", self.at(began), self.at(ended), attributes, parts)

    def keep(self, span: Span) -> None:
        """Adds a span, or counts it as lost if there are too many."""
        if len(self.spans) < MOST_SPANS:
            self.spans.append(span)
        else:
            self.lost += 1

    def waited(self, now: float) -> None:
        """Ends the wait, if there is one."""
        if self.waits:
            self.keep(self.span("wait", self.waits, now, {}))
            self.waits = 0.0


#: Spans to send: those of a request, or a single span of a request that was sent before.
Sent = RequestSpans | tuple[RequestSpans, Span]


class Sender(Protocol):
    """Takes what is to be sent."""

    def put(self, sent: Sent) -> bool:
        """Queues it without waiting for anything. Returns False if it is lost."""

    def close(self) -> None:
        """Sends what is queued, if that is quick, and ends."""


class NoSpans:
    """Records nothing: vLLM doesn't trace."""

    #: Whether workers are to report the times of loads.
    on: bool = False

    def use(self, namespace: NamespaceId) -> None:
        """Requests belong to this namespace from now on. Saves to the former one aren't followed any more."""

    def arrived(self, request_id: str, headers: Mapping[str, str] | None) -> None:
        """Begin a request's spans; `headers` are the client's."""

    def matched(self, request_id: str, asked_at: float, answered_at: float, tokens: int, reason: str) -> None:
        """The engine asked the index, which has answered, at these `time.monotonic` times: `tokens` can be
        loaded, and `reason` says why no more. Both times are 0 without a question."""

    def decided(self, request_id: str, decision: Decision) -> None:
        """This was decided upon that answer."""

    def load_planned(self, request_id: str, tokens: int, loads: Mapping[Tier, int]) -> None:
        """A load of `tokens` tokens begins, of which there are so many by tier."""

    def load_times(self, request_id: str, times: LoadTimes) -> None:
        """Some ranks have said what they did for a load; it may not have ended."""

    def load_failed(self, request_id: str, reason: str) -> None:
        """The load under way did not bring all: `load_ended` follows."""

    def load_ended(self, request_id: str) -> None:
        """The load under way has ended on all ranks."""

    def begun(self, request_id: str, tokens: Mapping[Source, int]) -> None:
        """The request gets its turn to compute, and has so many more tokens of each source."""

    def finished(self, request_id: str) -> None:
        """The request has ended."""

    def save_planned(self, segment: SegmentId, request_id: str, group: int, blocks: int) -> None:
        """A segment of these many blocks of the request is on its way to the store."""

    def save_ended(self, segment: SegmentId, outcome: str) -> None:
        """All ranks have ended a segment: "stored", or the reason why not."""

    def restart(self) -> None:
        """Forget all requests and saves."""

    def close(self) -> None:
        """Send what is queued, if that is quick, and end."""


#: Opens a recorder of spans. Its argument is called with the number of lost spans, on any thread.
OpenSpans = Callable[[Callable[[int], None]], NoSpans]


def no_spans(lost: Callable[[int], None]) -> NoSpans:
    """Opens what records nothing."""
    return NoSpans()


class Spans(NoSpans):
    """Records the spans of one engine's requests, on the scheduler's thread."""

    on = True

    def __init__(self, sender: Sender, lost: Callable[[int], None]) -> None:
        """`lost` gets the number of spans that are not sent; any thread may call it."""
        self._sender = sender
        self._lost = lost
        self._namespace = ""
        self._open: dict[str, RequestSpans] = {}
        self._saving: dict[SegmentId, tuple[RequestSpans, float, Attributes]] = {}

    def use(self, namespace: NamespaceId) -> None:
        self._namespace = namespace
        self._saving.clear()

    def arrived(self, request_id: str, headers: Mapping[str, str] | None) -> None:
        now = time.monotonic()
        epoch_ns, told = time.time_ns() - int(now * 1e9), Attributes({"kvstore.namespace": self._namespace})
        self._open[request_id] = RequestSpans(request_id, headers, epoch_ns, now, told, waits=now)

    def matched(self, request_id: str, asked_at: float, answered_at: float, tokens: int, reason: str) -> None:
        if (trace := self._open.get(request_id)) is None or not answered_at:
            return
        trace.waits = answered_at
        told: Attributes = {"kvstore.tokens": tokens, "kvstore.reason": reason}
        trace.keep(trace.span("match", asked_at, answered_at, told))

    def decided(self, request_id: str, decision: Decision) -> None:
        if (trace := self._open.get(request_id)) is not None:
            trace.attributes["kvstore.decision"] = decision.why
            if decision.compute_s is not None:
                trace.attributes["kvstore.expected.load_seconds"] = decision.load_all_s
                trace.attributes["kvstore.expected.compute_seconds"] = decision.compute_s

    def load_planned(self, request_id: str, tokens: int, loads: Mapping[Tier, int]) -> None:
        if (trace := self._open.get(request_id)) is not None:
            trace.waited(now := time.monotonic())
            trace.load_began, trace.load_times = now, None
            trace.load_attributes = {"kvstore.tokens": tokens}
            trace.load_attributes |= {f"kvstore.tokens.{tier}": count for tier, count in loads.items()}

    def load_times(self, request_id: str, times: LoadTimes) -> None:
        if (trace := self._open.get(request_id)) is not None and trace.load_began:
            if trace.load_times is None:
                trace.load_times = LoadTimes()
            trace.load_times.add(times)

    def load_failed(self, request_id: str, reason: str) -> None:
        if (trace := self._open.get(request_id)) is not None:
            trace.load_attributes["kvstore.reason"] = reason

    def load_ended(self, request_id: str) -> None:
        if (trace := self._open.get(request_id)) is not None and trace.load_began:
            now = time.monotonic()
            self._end_load(trace, now)
            trace.waits = now

    def begun(self, request_id: str, tokens: Mapping[Source, int]) -> None:
        if (trace := self._open.get(request_id)) is not None:
            trace.waited(time.monotonic())
            for source, count in tokens.items():
                name = f"kvstore.tokens.{source}"
                trace.attributes[name] = int(trace.attributes.get(name, 0)) + count

    def finished(self, request_id: str) -> None:
        if (trace := self._open.pop(request_id, None)) is None:
            return
        trace.ended = now = time.monotonic()
        trace.waited(now)
        if trace.load_began:
            trace.load_attributes.setdefault("kvstore.reason", "aborted")
            self._end_load(trace, now)
        if trace.lost:
            self._lost(trace.lost)
        if not self._sender.put(trace):
            self._lost(len(trace))

    def save_planned(self, segment: SegmentId, request_id: str, group: int, blocks: int) -> None:
        if (trace := self._open.get(request_id)) is not None:
            told: Attributes = {"kvstore.segment": segment.hex(), "kvstore.group": group}
            self._saving[segment] = trace, time.monotonic(), told | {"kvstore.blocks": blocks}

    def save_ended(self, segment: SegmentId, outcome: str) -> None:
        if (saving := self._saving.pop(segment, None)) is None:
            return
        trace, began, told = saving
        span = trace.span("save", began, time.monotonic(), told | {"kvstore.outcome": outcome})
        if not trace.ended:
            trace.keep(span)
        elif not self._sender.put((trace, span)):
            self._lost(1)

    def restart(self) -> None:
        self._open.clear()
        self._saving.clear()

    def close(self) -> None:
        self._sender.close()

    def _end_load(self, trace: RequestSpans, now: float) -> None:
        parts: list[Span] = []
        if (times := trace.load_times) is not None:
            trace.load_attributes["kvstore.pieces"] = times.pieces
            trace.load_attributes |= {f"kvstore.bytes.{tier}": size for tier, size in times.nbytes.items()}
            for name, stage in times.stages.items():
                told: Attributes = {"kvstore.busy_seconds": stage.busy_ns / 1e9}
                parts.append(Span(f"kvstore.{name}", stage.began_ns, stage.ended_ns, told))
        trace.keep(trace.span("load", trace.load_began, now, trace.load_attributes, *parts))
        trace.load_began, trace.load_times = 0.0, None
