"""Two real servers over a real Redis, the connectors' metrics, and a real Prometheus that scrapes them as the
chart says: every rule and every query of a dashboard is evaluated, and finds what it asks for."""

from __future__ import annotations

import math
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the connectors' metrics need the full set-up: make setup")

import yaml
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server
from vllm.config import KVTransferConfig

from connectors.ec.metrics import ECStorePromMetrics
from connectors.kv.metrics import KVStorePromMetrics
from connectors.tier import metrics as tier_metrics
from kvstore.admin.backends import Cache
from kvstore.admin.repair.follow import PayloadFollower, metrics_of
from kvstore.admin.serve.exposed import exposed
from kvstore.build import load_settings, open_index
from kvstore.index.port import Outcome
from kvstore.index.sharding.index import ShardedIndex
from kvstore.keys import NamespaceId
from kvstore.rules.reasons import MISS_REASONS, SAVE_OUTCOMES
from tests.admin.conftest import Filled, fill
from tests.admin.serve.process import ServeProcess
from tests.helm.monitoring import RELEASE, alerts, dashboards, every_rule, filled_in, monitor, queries, rules
from tests.helm.prometheus import Prometheus, binary, grouped, job, metrics, selectors
from tests.servers.redis import RedisServer
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.servers, pytest.mark.engine, pytest.mark.slow]

#: As the operator labels what it scrapes.
JANITORS = {"namespace": "inference", "service": "cache-kvstore", "container": "janitor", "endpoint": "http"}
ENGINES = {"namespace": "inference", "container": "vllm", "endpoint": "http"}
FOLLOWERS = {"namespace": "inference", "container": "follow", "endpoint": "http"}
WINDOW = "30s"


class Config:
    """What the metrics ask vLLM's configuration for."""

    kv_transfer_config = KVTransferConfig(kv_connector="KVStoreConnector", kv_role="kv_both")
    ec_transfer_config = None
    parallel_config = type("Parallel", (), {"world_size": 2})


class Engine:
    """The metrics of an engine that is well, at an address of its own."""

    def __init__(self, namespace: str) -> None:
        registry = CollectorRegistry()

        def made(kind: Any) -> Any:
            return lambda **options: kind(**options, registry=registry)

        types = {kind: made(kind) for kind in (Counter, Gauge, Histogram)}
        labels, engines = ["model_name", "engine"], {0: ["served", "0"]}
        self._kv = KVStorePromMetrics(Config(), types, labels, engines)  # type: ignore[arg-type]
        self._ec = ECStorePromMetrics(Config(), types, labels, engines)  # type: ignore[arg-type]
        self._tier = {
            name: Counter(name, one.documentation, [*labels, *one.labelnames], registry=registry)
            for name, one in tier_metrics.definitions().items()
        }
        self._namespace = namespace
        self._server, self._thread = start_http_server(0, addr="127.0.0.1", registry=registry)
        self.target = f"127.0.0.1:{self._server.server_port}"

    def work(self) -> None:
        """What an engine reports with some steps."""
        kv = {
            "matches": 2, "asked_tokens": 640, "matched_tokens": 512, "promised_tokens": 512,
            "loaded_tokens": 512, "saved_compute_seconds": 0.5, "loads{complete}": 2, "misses{absent}": 8,
            "loaded_bytes": 1e6, "saves{stored}": 4, "saved_bytes": 1e6, "tier{hits_fast}": 3,
            "tier{hits_slow}": 1,
        }  # fmt: skip
        seconds = {
            "match_seconds": [0.001, 0.002], "load_seconds": [0.05], "save_seconds": [0.2],
            "regret_seconds": [0.0], "regret_ratio": [0.0], "measured_regret_ratio": [0.01],
        }  # fmt: skip
        gauges = {
            f"namespace{{{self._namespace}}}": 1, "queued_reads{1}": 2, "tier_capacity_bytes{0}": 1000,
            "tier_used_bytes{0}": 900, "tier_dirty_bytes{0}": 10, "load_staging_used_bytes{1}": 5,
        }  # fmt: skip
        self._kv.observe({"counts": kv, "seconds": seconds, "gauges": gauges}, 0)
        ec = {"items{store}": 1, "items{encoder}": 1, "misses{absent}": 1, "saved_compute_seconds": 0.1}
        ec |= {"saves{stored}": 1}
        seconds = {"fetch_seconds": [0.01], "save_seconds": [0.1]}
        gauges = {f"namespace{{{self._namespace}}}": 1, "tier_capacity_bytes": 1000, "tier_used_bytes": 10}
        self._ec.observe({"counts": ec, "seconds": seconds, "gauges": gauges}, 0)
        self._tier[tier_metrics.MISSES].labels("served", "0", "absent").inc()
        self._tier[tier_metrics.SAVES].labels("served", "0", "stored").inc()
        self._tier[tier_metrics.OTHERS].labels("served", "0", "load_blocks").inc()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(PATIENCE_S)


class KubeState:
    """What kube-state-metrics says of two CronJobs that are well."""

    def __init__(self) -> None:
        registry = CollectorRegistry()
        for what, ago_s in (("schedule", 100), ("successful", 50)):
            gauge = Gauge(
                f"kube_cronjob_status_last_{what}_time", what, ["namespace", "cronjob"], registry=registry
            )
            for name in ("fsck", "gc"):
                gauge.labels("inference", f"cache-kvstore-{name}").set(time.time() - ago_s)
        self._server, self._thread = start_http_server(0, addr="127.0.0.1", registry=registry)
        self.target = f"127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(PATIENCE_S)


class Follower:
    """The metrics of what follows the payloads."""

    def __init__(self, settings: dict[str, Any]) -> None:
        with Cache(load_settings(settings, {})) as cache:
            told = PayloadFollower(cache).turn()
        self._server = exposed("127.0.0.1", 0, lambda: metrics_of(told), lambda: True)
        self.target = self._server.url.removeprefix("http://").rstrip("/")

    def close(self) -> None:
        self._server.close()


@dataclass
class World:
    prometheus: Prometheus
    servers: tuple[ServeProcess, ServeProcess]
    filled: Filled

    @property
    def chosen(self) -> dict[str, str]:
        """Grafana's variables, one of each chosen; the engines' dashboard calls a model as it is served."""
        chosen = {"release": RELEASE, "namespace": self.filled.kv_id, "tenant": "default", "instance": ".*"}
        return self.everything | chosen | {"model": "tiny-random|served", "gpus": "8"}

    @property
    def everything(self) -> dict[str, str]:
        every = dict.fromkeys(("release", "namespace", "model", "tenant", "instance"), ".*")
        return every | {"gpus": "1", "most": "20", "__rate_interval": WINDOW}


def serving(folder: Path, redis: RedisServer) -> tuple[Filled, list[str]]:
    """A cache in two tiers with something in it, and the options of its servers."""
    filled = fill(folder / "slow", redis.url)
    (folder / "fast").mkdir()
    tiers = {"fast": f"file://{folder}/fast", "slow": f"file://{folder}/slow", "fast_capacity": "64MiB"}
    tree = {"payloads": tiers, "index": redis.url, "janitor": {"interval_s": 0.3, "scrub_percent": 100}}
    (folder / "settings.yaml").write_text(yaml.safe_dump(tree))
    return filled, ["--settings", str(folder / "settings.yaml")]


def told(index: ShardedIndex, filled: Filled) -> None:
    """What became of some requests, with each reason and each outcome."""
    for reason in MISS_REASONS:
        index.tell(NamespaceId(filled.kv_id), [Outcome(time.time(), "r", "match", 20, 10, reason, 10, b"")])
    for outcome in SAVE_OUTCOMES:
        index.tell(NamespaceId(filled.kv_id), [Outcome(time.time(), "r", "save", 4, 2, outcome, 0, b"")])


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    binary("prometheus")
    folder = tmp_path_factory.mktemp("monitoring")
    with RedisServer(folder / "redis") as redis:
        redis.command("CONFIG", "SET", "maxmemory", "100mb")
        filled, options = serving(folder, redis)
        engines, kube = (Engine(filled.kv_id), Engine(filled.kv_id)), KubeState()
        follower = Follower(filled.settings)
        stop = threading.Event()

        def work() -> None:
            while not stop.wait(0.3):
                for engine in engines:
                    engine.work()

        janitors = monitor("ServiceMonitor", "cache-kvstore")["spec"]["endpoints"][0]
        vllm = monitor("PodMonitor", "cache-kvstore-vllm")["spec"]["podMetricsEndpoints"][0]
        follow = monitor("PodMonitor", "cache-kvstore-follow")["spec"]["podMetricsEndpoints"][0]
        index = open_index(load_settings(filled.settings, {}))
        assert isinstance(index, ShardedIndex)
        with (
            index,
            ServeProcess(folder / "a", options) as first,
            ServeProcess(folder / "b", options) as second,
        ):
            for server in (first, second):
                server.until(lambda server=server: server.get("/readyz")[0] == 200)
            at = [server.url.removeprefix("http://").rstrip("/") for server in (first, second)]
            jobs = [
                job("cache-kvstore", at, janitors, JANITORS),
                job("cache-kvstore-vllm", [engine.target for engine in engines], vllm, ENGINES),
                job("cache-kvstore-follow", [follower.target], follow, FOLLOWERS),
                job("kube-state-metrics", [kube.target], {"path": "/metrics"}, {}, honor_labels=True),
            ]
            worker = threading.Thread(target=work, daemon=True)
            worker.start()
            try:
                with Prometheus(folder / "prometheus", jobs, rules()) as prometheus:
                    made = World(prometheus, (first, second), filled)
                    ready(made, index)
                    yield made
            finally:
                stop.set()
                worker.join(PATIENCE_S)
                for one in (*engines, kube, follower):
                    one.close()


def ready(world: World, index: ShardedIndex) -> None:
    """Until everything was scraped, and traffic was seen between two scrapes."""
    ask, serve = world.prometheus.query, world.servers[0]
    serve.until(lambda: [s.value for s in ask("up")] == [1.0] * 6)
    serve.until(lambda: ask("kvstore_janitor_round_timestamp_seconds"))
    told(index, world.filled)
    serve.until(lambda: sum(s.value for s in ask("sum(increase(kvstore_asked_blocks_total[30s]))")) > 0)
    serve.until(lambda: min(s.value for s in ask("count_over_time(kvstore_asked_blocks_total[1m])")) >= 3)
    serve.until(lambda: ask("kvstore:hit_ratio:rate1h"))
    serve.until(lambda: ask("kvstore:engine_cut_off:bool5m"))


def test_every_rule_is_evaluated_and_a_world_that_is_well_alerts_nobody(world: World) -> None:
    found = [rule for group in world.prometheus.api("/api/v1/rules")["groups"] for rule in group["rules"]]
    assert len(found) == len(list(every_rule())) == len(alerts()) + 3
    world.servers[0].until(
        lambda: all(
            rule["health"] == "ok"
            for group in world.prometheus.api("/api/v1/rules")["groups"]
            for rule in group["rules"]
        )
    )
    assert [alert["labels"] for alert in world.prometheus.api("/api/v1/alerts")["alerts"]] == []


def test_every_selector_of_every_rule_selects_something(world: World) -> None:
    wanted = {selector for rule in every_rule() for selector in selectors(rule["expr"])}
    assert len(wanted) > 30
    # The local tier's own gauges are the janitor's only where it has a node's tier, as here.
    assert [one for one in sorted(wanted) if not world.prometheus.query(one)] == []


@pytest.mark.parametrize("which", ["everything", "chosen"])
def test_every_query_of_every_dashboard_has_data(world: World, which: str) -> None:
    without = {}
    for panel, expr, _ in queries():
        sent = filled_in(expr, getattr(world, which))
        if all(math.isnan(sample.value) for sample in world.prometheus.query(sent)):
            without[panel] = sent
    assert without == {}


def test_every_label_in_an_expression_and_in_a_legend_exists(world: World) -> None:
    variables = world.everything
    for rule in every_rule():
        check_labels(world, rule.get("alert") or rule["record"], rule["expr"], set())
    for panel, expr, legend in queries():
        named = {part.split("}}")[0].strip() for part in legend.split("{{")[1:]}
        sent = filled_in(expr, variables)
        check_labels(world, panel, sent, named)
        for sample in world.prometheus.query(sent):
            # The sum of what isn't told apart is nobody's.
            other = sample.labels.get("cache_namespace") == "other"
            assert other or named <= sample.labels.keys(), f"{panel}: {legend}"


def check_labels(world: World, where: str, expr: str, named: set[str]) -> None:
    assert metrics(expr), where
    there: set[str] = set()
    for one in selectors(expr):
        for sample in world.prometheus.query(one):
            there |= sample.labels.keys()
    assert grouped(expr) | named <= there | {"le"}, f"{where}: {(grouped(expr) | named) - there}"


def test_every_metric_is_exported_and_most_of_what_is_exported_is_looked_at(world: World) -> None:
    exported = set(world.prometheus.api("/api/v1/label/__name__/values"))
    asked = {name for rule in every_rule() for name in metrics(rule["expr"])}
    asked |= {name for _, expr, _ in queries() for name in metrics(filled_in(expr, world.everything))}
    assert asked <= exported, asked - exported
    ours = {name for name in exported if name.startswith(("kvstore_", "vllm:kvstore_"))}
    ours = {name for name in ours if not name.endswith(("_created", "_sum", "_count"))}
    unseen = ours - asked
    assert unseen == UNSEEN, unseen ^ UNSEEN


#: What nobody looks at in passing: it is there for those who ask.
UNSEEN = {
    "kvstore_answered_timestamp_seconds",
    "kvstore_blocks",
    "kvstore_damaged_namespaces",
    "kvstore_follow_gone_segments_total",
    "kvstore_follow_incomplete_segments",
    "kvstore_follow_listed_bytes_total",
    "kvstore_follow_listed_segments_total",
    "kvstore_follow_notified_total",
    "kvstore_follow_turns_total",
    "kvstore_journal_unreadable_entries_total",
    "kvstore_serve_refused_total",
    "kvstore_janitor_scrubbed_unreadable_segments_total",
    "kvstore_look_seconds",
    "kvstore_look_timestamp_seconds",
    "kvstore_namespaces",
    "kvstore_offered_blocks_total",
    "kvstore_pinned_bytes",
    "kvstore_saved_blocks_total",
    "kvstore_tier_used_bytes",
    "kvstore_janitor_scrubbed_evicted_segments_total",
    "kvstore_janitor_scrubbed_payloads_total",
    "kvstore_janitor_step_done_total",
    "vllm:kvstore_kv_failed_writers",
    "vllm:kvstore_ec_fetched_items_total",
    "vllm:kvstore_ec_prefetched_segments_total",
    "vllm:kvstore_kv_loaded_blocks_total",
    "vllm:kvstore_kv_prefetched_segments_total",
    "vllm:kvstore_kv_probed_blocks_total",
    "vllm:kvstore_kv_probed_bytes_total",
    "vllm:kvstore_kv_regret_seconds_bucket",
    "vllm:kvstore_kv_saved_segments_total",
}


def test_prometheus_renames_no_label_of_ours(world: World) -> None:
    assert [name for name in world.prometheus.api("/api/v1/labels") if name.startswith("exported_")] == []
    for sample in world.prometheus.query('{__name__=~"kvstore_.*|vllm:kvstore_.*"}'):
        assert (sample.labels["namespace"], sample.labels["release"]) == ("inference", RELEASE)


def test_variables_offer_what_there_is(world: World) -> None:
    offered: dict[tuple[str, str], set[str]] = {}
    for name, dashboard in dashboards().items():
        for variable in dashboard["templating"]["list"]:
            if variable["type"] != "query":
                continue
            text = variable["query"]["query"].removeprefix("label_values(").removesuffix(")")
            selector, _, label = text.rpartition(", ")
            found = world.prometheus.query(f"count by ({label}) ({filled_in(selector, world.everything)})")
            offered[name, variable["name"]] = {sample.labels.get(label, "") for sample in found}
    overview, engines = "kvstore-overview.json", "kvstore-engines.json"
    assert offered[overview, "release"] == offered[engines, "release"] == {RELEASE}
    assert offered[overview, "namespace"] == {world.filled.kv_id, world.filled.ec_id}
    assert offered[overview, "model"] == {"tiny-random", "tiny-vision"}
    assert offered[overview, "tenant"] == {"default"}
    assert offered[engines, "model"] == {"served"}
    assert len(offered[engines, "instance"]) == 2


def test_two_servers_are_not_counted_twice(world: World) -> None:
    def value(title: str) -> float:
        [expr] = [expr for panel, expr, _ in queries() if panel == f"kvstore-overview.json: {title}"]
        [sample] = world.prometheus.query(filled_in(expr, world.everything))
        return sample.value

    status = world.servers[0].report().status
    assert status.total is not None
    held = world.prometheus.query(f'sum(kvstore_stored_bytes{{release="{RELEASE}"}})')[0].value
    assert held == 2 * status.total.stored_bytes
    assert value("Stored, of the capacity") == pytest.approx(
        status.total.stored_bytes / status.capacity_bytes
    )
    assert value("Hit ratio") == pytest.approx(0.5)
    assert value("Engines cut off") == 0


def test_promtool_has_nothing_against_what_is_served(world: World) -> None:
    for server in world.servers:
        checked = subprocess.run(
            [binary("promtool"), "check", "metrics"],
            input=server.get("/metrics")[1],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert checked.returncode == 0, checked.stdout + checked.stderr
