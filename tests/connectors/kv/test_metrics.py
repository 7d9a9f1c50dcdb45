"""Statistics: from counters in several processes to vLLM's log and Prometheus, each thing once."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the connectors' tests need the full set-up: make setup")

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.config import KVTransferConfig

from connectors.ec.metrics import COUNTERS as EC_COUNTERS
from connectors.ec.metrics import GAUGES as EC_GAUGES
from connectors.ec.metrics import RENAMED as EC_RENAMED
from connectors.ec.metrics import SECONDS as EC_SECONDS
from connectors.ec.metrics import ECStorePromMetrics
from connectors.kv.metrics import (
    COUNTERS,
    RANK_GAUGES,
    RENAMED,
    SCHEDULER_GAUGES,
    SECONDS,
    KVStorePromMetrics,
    KVStoreStats,
)
from connectors.telemetry.metrics import (
    EVENTS,
    MOST,
    NAMESPACE,
    TIER_EVENTS,
    Tally,
    TierStates,
    empty,
    is_empty,
)
from kvstore import __version__
from kvstore.build import load_settings, open_store
from kvstore.metrics import Counters
from kvstore.rules.reasons import MISS_REASONS, SAVE_OUTCOMES
from schemas.settings import Settings

pytestmark = pytest.mark.engine


def take(
    tally: Tally, gauges: dict[str, float] | None = None, *, busy: bool = False
) -> dict[str, Any] | None:
    return tally.take(busy, lambda: gauges or {})


def test_a_tally_reports_increases_once() -> None:
    counters = Counters()
    counters.miss("absent", 3)  # before anybody looked: opened for this connector, so it counts
    tally = Tally(counters, RENAMED)
    tally.add("matches")
    report = take(tally)
    assert report == {"counts": {"matches": 1, "misses{absent}": 3}, "seconds": {}, "gauges": {}}
    assert take(tally) is None
    counters.saved("stored", 2)
    counters.add("save_bytes", 100)
    tally.timed("save_seconds", 0.5)
    report = take(tally)
    assert report is not None
    assert report["counts"] == {"saves{stored}": 2, "saved_bytes": 100}
    assert report["seconds"] == {"save_seconds": [0.5]}
    assert take(tally) is None


def test_a_step_without_anything_looks_at_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    counters = Counters()
    tally = Tally(counters, RENAMED)
    take(tally)
    monkeypatch.setattr(counters, "snapshot", lambda: pytest.fail("looked"))
    assert tally.take(False, lambda: pytest.fail("looked")) is None


def test_states_are_told_when_they_change_and_once_they_are_over() -> None:
    tally = Tally(Counters(), RENAMED)
    assert take(tally, {"queued": 4, "down": 0}, busy=True) == empty() | {"gauges": {"queued": 4}}
    assert take(tally, {"queued": 4, "down": 0}, busy=True) is None
    # Not busy any more, but the last word was 4.
    assert take(tally, {"queued": 0, "down": 0}) == empty() | {"gauges": {"queued": 0}}
    assert take(tally, {"queued": 7, "down": 0}) is None


def test_ranks_and_steps_add_up_and_states_do_not() -> None:
    one = KVStoreStats(
        {"counts": {"saved_bytes": 5}, "seconds": {"load_seconds": [1.0]}, "gauges": {"q{0}": 3}}
    )
    other = KVStoreStats({"counts": {"saved_bytes": 7}, "seconds": {}, "gauges": {"q{1}": 4}})
    later = KVStoreStats({"counts": {}, "seconds": {"load_seconds": [3.0]}, "gauges": {"q{0}": 1}})
    travelled = pickle.loads(pickle.dumps(one)).aggregate(other)
    total = KVStoreStats(travelled.to_dict()).aggregate(later)
    assert total.data == {
        "counts": {"saved_bytes": 12},
        "seconds": {"load_seconds": [1.0, 3.0]},
        "gauges": {"q{0}": 1, "q{1}": 4},
    }
    assert total.reduce() == {
        "saved_bytes": 12, "q{0}": 1, "q{1}": 4, "mean load ms": 2000.0, "max load ms": 3000.0,
    }  # fmt: skip
    total.reset()
    assert total.is_empty() and KVStoreStats().is_empty()


def test_nothing_grows_while_nobody_logs() -> None:
    tally = Tally(Counters(), RENAMED)
    for _ in range(3 * MOST):
        tally.timed("match_seconds", 0.1)
        tally.add("matches")
    report = take(tally)
    assert report is not None and len(report["seconds"]["match_seconds"]) == MOST
    assert report["counts"]["matches"] == 3 * MOST
    interval = KVStoreStats()
    for _ in range(5):
        interval.aggregate(KVStoreStats(report))
    assert len(interval.data["seconds"]["match_seconds"]) == MOST
    assert interval.data["counts"]["matches"] == 15 * MOST
    assert not is_empty(report)


class Parallel:
    world_size = 2


class Config:
    kv_transfer_config = KVTransferConfig(kv_connector="KVStoreConnector", kv_role="kv_both")
    ec_transfer_config = None
    parallel_config = Parallel()


def exported(metrics: Any = KVStorePromMetrics) -> tuple[CollectorRegistry, Any]:
    registry = CollectorRegistry()

    def made(kind: Any) -> Any:
        return lambda **options: kind(**options, registry=registry)

    types = {kind: made(kind) for kind in (Counter, Gauge, Histogram)}
    engines: dict[int, list[object]] = {0: ["m", "0"], 1: ["m", "1"]}
    return registry, metrics(Config(), types, ["model_name", "engine"], engines)


#: Counters of the store that a connector does not report, and its own metric that says the same in what the
#: connector deals in: requests and tokens, encoder inputs.
OWN = {
    "match_calls": "matches", "match_blocks_asked": "asked_tokens", "match_blocks_found": "matched_tokens",
    "load_runs": "loaded_blocks",
}  # fmt: skip
EC_OWN = {
    "match_calls": "items", "match_blocks_asked": "items", "match_blocks_found": "items",
    "load_runs": "items", "load_blocks": "items", "load_bytes": "loaded_bytes", "save_segments": "saves",
    **{f"miss_blocks{{{one}}}": f"misses{{{one}}}" for one in MISS_REASONS},
}  # fmt: skip
#: Nothing measures how fast items are read.
EC_NONE = ("probe_blocks", "probe_bytes")

LABELS = {metric.label for metric in (*COUNTERS, *EC_COUNTERS)}


@pytest.mark.parametrize(
    ("prefix", "kind", "renamed", "own"),
    [("kv", KVStorePromMetrics, RENAMED, OWN), ("ec", ECStorePromMetrics, EC_RENAMED, EC_OWN)],
    ids=["kv", "ec"],
)
def test_nothing_that_the_store_counts_is_lost(
    prefix: str, kind: Any, renamed: dict[str, str], own: dict[str, str]
) -> None:
    counters = Counters()
    tally = Tally(counters, renamed)
    assert sorted([*renamed, *own, *(EC_NONE if prefix == "ec" else ())]) == sorted(counters.snapshot())
    for number, name in enumerate(renamed, 1):
        counters.add(name, number)
    registry, metrics = exported(kind)
    metrics.observe(take(tally), 0)
    values = {}
    for sample in (sample for family in registry.collect() for sample in family.samples):
        if sample.labels["engine"] == "0" and sample.name.endswith("_total"):
            base = sample.name.removeprefix(f"vllm:kvstore_{prefix}_").removesuffix("_total")
            children = [f"{{{value}}}" for name, value in sample.labels.items() if name in LABELS]
            values["".join([base, *children])] = sample.value
    assert {name: value for name, value in values.items() if value} == {
        reported_as: number for number, reported_as in enumerate(renamed.values(), 1)
    }
    assert set(own.values()) <= values.keys() | {name.partition("{")[0] for name in values}


def test_every_child_is_there_from_the_start() -> None:
    registry, _ = exported()
    samples = [s for metric in registry.collect() for s in metric.samples if not s.name.endswith("_created")]
    assert {s.value for s in samples if s.name != "vllm:kvstore_kv_info"} == {0.0}
    assert [s.labels["version"] for s in samples if s.name == "vllm:kvstore_kv_info"] == [__version__] * 2
    assert {s.labels["engine"] for s in samples} == {"0", "1"}
    names = {s.name for s in samples}
    for metric in COUNTERS:
        assert f"vllm:kvstore_kv_{metric.name}_total" in names
    for gauge in SCHEDULER_GAUGES + RANK_GAUGES:
        # Which namespace it is nobody knows yet.
        assert (f"vllm:kvstore_kv_{gauge.name}" in names) == (gauge is not NAMESPACE), gauge.name
    for histogram in SECONDS:
        assert f"vllm:kvstore_kv_{histogram}_count" in names


def test_a_report_is_added_to_its_engine() -> None:
    registry, metrics = exported()
    report = {
        "counts": {"misses{absent}": 3, "saved_bytes": 10, "of_a_newer_version": 1},
        "seconds": {"load_seconds": [0.2, 0.4], "of_a_newer_version": [1.0]},
        "gauges": {"queued_reads{1}": 4, "index_down": 1, "queued_reads{9}": 1},
    }
    for _ in range(2):
        metrics.observe(report, 1)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"vllm:kvstore_kv_{name}", {"model_name": "m", **labels})

    assert value("misses_total", engine="1", reason="absent") == 6
    assert value("misses_total", engine="0", reason="absent") == 0
    assert value("saved_bytes_total", engine="1") == 20
    assert value("load_seconds_count", engine="1") == 4
    assert value("queued_reads", engine="1", rank="1") == 4
    assert value("index_down", engine="1") == 1


def test_an_engine_has_one_namespace_at_a_time() -> None:
    registry, metrics = exported()

    def now(engine: str) -> dict[str, float]:
        [family] = [f for f in registry.collect() if f.name == "vllm:kvstore_kv_namespace"]
        ours = [s for s in family.samples if s.labels["engine"] == engine]
        return {s.labels["cache_namespace"]: s.value for s in ours}

    def say(*names: str, engine: int = 0) -> None:
        tally = Tally(Counters(), RENAMED)
        for name in names:
            tally.state(f"namespace{{{name}}}", 1)
        metrics.observe(take(tally), engine)  # type: ignore[arg-type]

    say("a")
    say("b", engine=1)
    assert (now("0"), now("1")) == ({"a": 1}, {"b": 1})
    say("c")
    assert now("0") == {"a": 0, "c": 1}
    # Twice within one step, and back again: what came last counts.
    say("a", "d", "a")
    assert now("0") == {"a": 1, "c": 0, "d": 0}
    say("")
    assert sum(now("0").values()) == 0
    for number in range(100):
        say(f"n{number}")
        assert sum(now("0").values()) == 1
    assert len(now("0")) == 17
    assert now("0")["other"] == 1
    say("c")
    assert {name for name, value in now("0").items() if value} == {"c"}
    assert now("1") == {"b": 1}
    say("of an engine that is not of this front end", engine=9)


def test_a_state_is_told_once_and_costs_no_step() -> None:
    tally = Tally(Counters(), RENAMED)
    tally.state("namespace{a}", 1)
    assert take(tally, {"queued": 2}) == empty() | {"gauges": {"namespace{a}": 1, "queued": 2}}
    assert take(tally, {"queued": 0}) == empty() | {"gauges": {"queued": 0}}
    assert tally.take(False, lambda: pytest.fail("looked")) is None


def test_a_local_tier_is_told_of_when_it_was_looked_at(tmp_path: Path) -> None:
    tiers = {"fast": f"file://{tmp_path}/fast", "slow": f"file://{tmp_path}/slow", "fast_capacity": "64MiB"}
    settings = {"payloads": tiers, "index": f"sqlite://{tmp_path}/index.sqlite"}
    with open_store(load_settings(settings, {})) as store:
        tally = Tally(store.counters, RENAMED)
        states = TierStates(store, tally, "{3}")
        states.tell()
        assert take(tally) is None
        tier = store.backends.tier
        assert tier is not None
        tier.put(f"{'a' * 16}/00/{'0' * 16}.0", [memoryview(bytes(1000))])
        tier.housekeeping()
        states.tell()
        states.tell()
        report = take(tally)
        assert report is not None and report["gauges"] == {
            "tier_capacity_bytes{3}": 64 << 20, "tier_used_bytes{3}": 1000, "tier_dirty_bytes{3}": 0,
        }  # fmt: skip
        states.tell()
        assert take(tally) is None


def test_buckets_reach_from_what_is_usual_to_the_deadlines() -> None:
    defaults = Settings(payloads="file:///x")
    deadlines = {"match_seconds": defaults.kv.match_deadline_s, "load_seconds": defaults.kv.load_deadline_s}
    for name, deadline in deadlines.items():
        buckets = SECONDS[name].buckets
        assert deadline in buckets and buckets[-1] > deadline, name
        assert any(0.5 * deadline < bucket < deadline for bucket in buckets), name
    assert SECONDS["match_seconds"].buckets[0] < 0.0005
    assert defaults.ec.fetch_deadline_s in EC_SECONDS["fetch_seconds"].buckets


def test_the_table_in_the_documentation_is_complete() -> None:
    text = (Path(__file__).resolve().parents[3] / "docs" / "metrics.md").read_text()
    for metric in (*COUNTERS, *SCHEDULER_GAUGES, *RANK_GAUGES):
        assert f"`vllm:kvstore_kv_{metric.name}" in text, metric.name
    for name in SECONDS:
        assert f"`vllm:kvstore_kv_{name}`" in text
    for metric in (*EC_COUNTERS, *EC_GAUGES):
        assert f"`vllm:kvstore_ec_{metric.name}" in text, metric.name
    for name in EC_SECONDS:
        assert f"`vllm:kvstore_ec_{name}`" in text
    for one in (*MISS_REASONS, *SAVE_OUTCOMES, *TIER_EVENTS, *EVENTS):
        assert f"`{one}`" in text, one
