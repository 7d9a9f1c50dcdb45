"""vLLM's own scheduler, a real store, requests of all kinds: each prompt's tokens by tier, and its spans."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the connectors' tests need the full set-up: make setup")

from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from vllm.tracing import otel
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import RequestStatus

from connectors.telemetry.ways import SOURCES
from kvstore.keys import SegmentId
from tests.connectors.kv.bed import BLOCK_BYTES, TOKENS, Bed
from tests.connectors.kv.test_volume import prompt
from tests.store.world import match
from tests.waiting import until

pytestmark = pytest.mark.engine

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """Gets the spans of engines, in the place of what vLLM would make for its endpoint."""
    exporter = InMemorySpanExporter()
    monkeypatch.setattr(otel, "get_span_exporter", lambda endpoint: exporter)
    # The exporter forgets nothing when it ends.
    yield exporter


class Reports:
    """Adds up what the scheduler half reports, whoever takes it."""

    def __init__(self, bed: Bed) -> None:
        self._take, self._counts = bed.half.get_kv_connector_stats, Counter[str]()
        bed.half.get_kv_connector_stats = self._taken

    def _taken(self) -> Any:
        if (stats := self._take()) is not None:
            self._counts.update(stats.data["counts"])
        return stats

    def take(self) -> dict[str, int]:
        """Returns the tokens by source since the last call, those that aren't 0."""
        self._taken()
        counts, self._counts = self._counts, Counter()
        return by_source(counts)


def by_source(counts: Any) -> dict[str, int]:
    """The sources of a report, those that aren't 0."""
    named = {source: int(counts.get(f"prompt_tokens{{{source}}}", 0)) for source in SOURCES}
    return {source: count for source, count in named.items() if count}


def told(span: ReadableSpan) -> dict[str, int]:
    """The tokens by source in a request's span."""
    attributes = dict(span.attributes or {})
    return {
        source: n for source in SOURCES if isinstance(n := attributes.get(f"kvstore.tokens.{source}"), int)
    }


def tree(spans: Any) -> dict[str, list[ReadableSpan]]:
    """Spans by name."""
    found: dict[str, list[ReadableSpan]] = {}
    for span in spans:
        found.setdefault(span.name, []).append(span)
    return found


def payloads(folder: Path, segment: SegmentId) -> list[Path]:
    """The files of a segment."""
    return [path for path in (folder / "payloads").rglob("*") if segment.hex() in path.name]


def forget(bed: Bed) -> None:
    """The engine loses its own prefix cache."""
    assert bed.scheduler.kv_cache_manager.reset_prefix_cache()


def test_tokens_are_counted_by_tier(tmp_path: Path) -> None:
    with Bed(tmp_path, blocks=400) as bed:
        reports = Reports(bed)
        bed.request(prompt(10))
        bed.run()
        bed.drain()
        assert reports.take() == {"computed": 163}
        bed.request(prompt(10))
        bed.run()
        assert reports.take() == {"engine": 160, "computed": 3}
        forget(bed)
        bed.request(prompt(10, more=0) + prompt(2, 7))
        bed.run()
        assert reports.take() == {"disk": 160, "computed": 35}
        forget(bed)
        for blocks, expected in (
            (4, {"disk": 64, "computed": 3}),
            (10, {"engine": 64, "disk": 96, "computed": 3}),
        ):
            bed.request(prompt(blocks))
            bed.run()
            assert reports.take() == expected


def test_what_a_failed_load_did_not_bring_is_computed(
    tmp_path: Path, collector: InMemorySpanExporter
) -> None:
    with Bed(tmp_path, blocks=400, segment={"max_blocks": 4}, traces="http://nowhere:1") as bed:
        reports = Reports(bed)
        first = bed.request(prompt(10))
        bed.run()
        bed.drain()
        forget(bed)
        reports.take()
        [payload] = payloads(tmp_path, match(bed.space, list(first.block_hashes)).runs[1].segment)
        payload.unlink()
        bed.request(prompt(10))
        bed.run()
        assert reports.take() == {"disk": 4 * TOKENS, "computed": 163 - 4 * TOKENS}
    [load] = tree(collector.get_finished_spans())["kvstore.load"]
    attributes = dict(load.attributes or {})
    assert attributes["kvstore.reason"] == "missing" and attributes["kvstore.tokens.disk"] == 160
    # Of three pieces two came, though one of them was of no use.
    assert attributes["kvstore.pieces"] == 2 and attributes["kvstore.bytes.disk"] == 6 * BLOCK_BYTES


def test_spans_of_a_load_and_of_a_save(tmp_path: Path, collector: InMemorySpanExporter) -> None:
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    with Bed(tmp_path, blocks=400, ranks=2, traces="http://nowhere:1") as bed:
        bed.request(prompt(10), name="cold")
        bed.run()
        bed.drain()
        # What a rank has saved is reported with the next step.
        bed.request(prompt(1, 5), name="next")
        bed.run()
        forget(bed)
        bed.request(prompt(10), name="warm", trace_headers=headers)
        bed.run()
    spans = tree(collector.get_finished_spans())
    requests = {dict(span.attributes or {})["kvstore.request.id"]: span for span in spans["kvstore.request"]}
    warm, cold = requests["warm"], requests["cold"]
    assert told(cold) == {"computed": 163} and told(warm) == {"disk": 160, "computed": 3}
    # The client's trace goes on; a request without one begins its own.
    assert warm.context is not None and warm.parent is not None
    assert f"{warm.context.trace_id:032x}" == TRACE and f"{warm.parent.span_id:016x}" == PARENT
    assert cold.parent is None and cold.context is not None

    def of(request: ReadableSpan, name: str) -> list[ReadableSpan]:
        assert request.context is not None
        return [one for one in spans[name] if one.parent and one.parent.span_id == request.context.span_id]

    [load], [match], waits = of(warm, "kvstore.load"), of(warm, "kvstore.match"), of(warm, "kvstore.wait")
    assert dict(match.attributes or {}) == {"kvstore.tokens": 160, "kvstore.reason": "complete"}
    assert len(waits) == 2, "for its load, and after it"
    attributes = dict(load.attributes or {})
    assert attributes.pop("kvstore.pieces") == 2, "one a rank"
    assert attributes == {
        "kvstore.tokens": 160,
        "kvstore.tokens.disk": 160,
        "kvstore.bytes.disk": 2 * 10 * BLOCK_BYTES,
    }
    [read], [verify], [copy] = (of(load, f"kvstore.{name}") for name in ("read", "verify", "copy"))
    order = [warm.start_time, match.start_time, match.end_time, load.start_time, load.end_time, warm.end_time]
    assert order == sorted(order)
    assert load.start_time <= read.start_time <= verify.start_time <= copy.start_time
    assert read.end_time <= copy.end_time <= load.end_time
    [save] = of(cold, "kvstore.save")
    assert (save.attributes or {})["kvstore.outcome"] == "stored" and (save.attributes or {})[
        "kvstore.blocks"
    ] == 10


def test_no_span_says_what_a_prompt_says(tmp_path: Path, collector: InMemorySpanExporter) -> None:
    with Bed(tmp_path, blocks=400, traces="http://nowhere:1") as bed:
        for _ in range(2):
            bed.request(prompt(10), 3, cache_salt="the salt of a tenant")
            bed.run()
            bed.drain()
            forget(bed)
    spans = collector.get_finished_spans()
    assert {span.name for span in spans} >= {"kvstore.load", "kvstore.save", "kvstore.match"}
    for span in spans:
        for name, value in (span.attributes or {}).items():
            assert name.startswith("kvstore.") and isinstance(value, str | int | float), name
            assert "salt" not in str(value)
            # Numbers, short words, and ids in hexadecimal: nothing that has room for a prompt.
            assert not isinstance(value, str) or len(value) <= 64


@pytest.mark.slow
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 1 << 30))
def test_tokens_by_tier_add_up_to_every_prompt(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    """Small pools, preemptions, aborts, lost payloads, two ranks: by what vLLM's scheduler says of each."""
    chance, folder = random.Random(seed), tmp_path_factory.mktemp("bed")
    exporter = InMemorySpanExporter()
    began: dict[str, int] = {}
    hits: dict[str, int] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(otel, "get_span_exporter", lambda endpoint: exporter)
        with Bed(
            folder,
            blocks=chance.choice([60, 120]),
            batch_tokens=chance.choice([64, 512, 8192]),
            ranks=chance.choice([1, 2]),
            in_flight=chance.choice([1, 2, 3]),
            traces="http://nowhere:1",
            segment={"max_blocks": chance.choice([2, 4])},
        ) as bed:
            reports, build = Reports(bed), bed.half.build_connector_meta

            def observed(output: Any) -> Any:
                for one in output.scheduled_new_reqs:
                    if one.req_id not in began:
                        began[one.req_id] = one.num_computed_tokens
                        local = bed.scheduler.requests[one.req_id].prefill_stats.num_local_cached_tokens
                        hits[one.req_id] = local
                return build(output)

            patch.setattr(bed.half, "build_connector_meta", observed)
            requests: list[Any] = []
            for _ in range(60):
                if chance.random() < 0.5:
                    base = prompt(chance.randrange(1, 20), chance.randrange(3), 0)
                    rest = prompt(chance.randrange(0, 10), 10 + len(requests), chance.randrange(1, 9))
                    requests.append(bed.request(base + rest, chance.choice([1, 2, 30, 90])))
                for _ in range(chance.randrange(4)):
                    bed.step()
                if requests and chance.random() < 0.1:
                    name = chance.choice(requests).request_id
                    bed.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
                if chance.random() < 0.1:
                    for path in (folder / "payloads").rglob("*"):
                        if path.is_file() and chance.random() < 0.3:
                            path.unlink(missing_ok=True)
            bed.run()
            counts = reports.take()
    roots = {
        dict(span.attributes or {})["kvstore.request.id"]: told(span)
        for span in exporter.get_finished_spans()
        if span.name == "kvstore.request"
    }
    for request in requests:
        name, ways = request.request_id, roots[request.request_id]
        if name in began:
            assert sum(ways.values()) == request.num_prompt_tokens
            assert ways.get("computed", 0) == request.num_prompt_tokens - began[name]
            assert ways.get("engine", 0) == hits[name]
        else:
            assert ways == {}, "it never ran"
    event(f"preempted: {any(one.num_preemptions for one in requests)}")
    event(f"never ran: {len(began) < len(requests)}")
    total = Counter[str]()
    for ways in roots.values():
        total.update(ways)
    assert counts == {source: total[source] for source in SOURCES if total[source]}
    event(f"sources: {sorted(counts)}")


def test_tokens_of_one_prompt_come_from_several_tiers(tmp_path: Path) -> None:
    """A folder before a share: what the node has evicted comes from farther."""
    tiers = {
        "fast": f"file://{tmp_path}/fast",
        "slow": f"file://{tmp_path}/payloads",
        "fast_capacity": "64MiB",
    }
    with Bed(tmp_path, blocks=400, segment={"max_blocks": 4}, payloads=tiers) as bed:
        reports = Reports(bed)
        first = bed.request(prompt(12))
        bed.run()
        bed.drain()
        runs = match(bed.space, list(first.block_hashes)).runs
        until(lambda: all(payloads(tmp_path, run.segment) for run in runs))
        forget(bed)
        reports.take()
        for path in (tmp_path / "fast").rglob("*"):
            if runs[1].segment.hex() in path.name:
                path.unlink()
        sources, allocated = [], bed.half.update_state_after_alloc

        def asked(request: Any, blocks: Any, external: int) -> None:
            """vLLM asks for its own statistics when a load is planned."""
            allocated(request, blocks, external)
            if external:
                sources.append(bed.half.get_external_cache_hit_sources(request, external))

        bed.half.update_state_after_alloc = asked
        bed.request(prompt(12))
        bed.run()
        assert reports.take() == {"folder": 8 * TOKENS, "disk": 4 * TOKENS, "computed": 3}
        assert sources == [{CacheHitSource.DISK: 12 * TOKENS}]
