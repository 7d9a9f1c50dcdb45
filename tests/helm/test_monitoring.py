"""What the chart renders for Prometheus and Grafana, and what it refuses to."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helm.chart import CHART, ROOT, Manifest, fails, pick, render
from tests.helm.monitoring import DASHBOARDS, NAMED, RELEASE, RUNBOOKS, VALUES, alerts, every_rule, monitor

RUNBOOKS_URL = "https://github.com/kvstore/kvstore/blob/main/docs/runbooks.md"
MONITORS = {"ServiceMonitor", "PodMonitor", "PrometheusRule"}


def values(**monitoring: Any) -> dict[str, Any]:
    return {"payloads": {"s3": {"bucket": "cache"}}, "monitoring": monitoring}


def on(**more: Any) -> dict[str, Any]:
    return {"enabled": True} | more


def thresholds() -> dict[str, float]:
    """Those of values.yaml."""
    tree = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    return dict(tree["monitoring"]["prometheusRule"]["thresholds"])


def of_kinds(manifests: list[Manifest], *kinds: str) -> list[tuple[str, str]]:
    return [(m["kind"], m["metadata"]["name"]) for m in manifests if m["kind"] in kinds]


def rendered_alerts(**rule: Any) -> dict[str, dict[str, Any]]:
    manifest = pick(render(values(serviceMonitor=on(), prometheusRule=on(**rule))), "PrometheusRule")
    return {r["alert"]: r for group in manifest["spec"]["groups"] for r in group["rules"] if "alert" in r}


# -- monitors ------------------------------------------------------------------------------------------------


def test_nothing_is_rendered_that_a_cluster_may_not_know() -> None:
    manifests = render(values())
    assert of_kinds(manifests, *MONITORS) == []
    assert [m for m in manifests if "grafana_dashboard" in m["metadata"].get("labels", {})] == []


@pytest.mark.parametrize(
    ("kind", "key"), [("ServiceMonitor", "serviceMonitor"), ("PodMonitor", "podMonitor")]
)
def test_janitors_are_scraped_by_their_labels_and_port(kind: str, key: str) -> None:
    own = {"labels": {"release": "prometheus"}, "namespace": "monitoring", "interval": "15s"}
    manifests = render(values(**{key: on(**own)}))
    found = pick(manifests, kind)
    deployment = pick(manifests, "Deployment")
    assert found["metadata"]["namespace"] == "monitoring"
    assert found["metadata"]["labels"]["release"] == "prometheus"
    spec = found["spec"]
    assert spec["namespaceSelector"] == {"matchNames": ["inference"]}
    selected = spec["selector"]["matchLabels"].items()
    assert selected <= deployment["spec"]["template"]["metadata"]["labels"].items()
    target = pick(manifests, "Service", deployment["metadata"]["name"])
    if kind == "ServiceMonitor":
        assert selected <= target["metadata"]["labels"].items()
        # Not the Redis' Service, nor another release's.
        others = [m for m in manifests if m["kind"] == "Service" and m is not target]
        assert not [m for m in others if selected <= m["metadata"]["labels"].items()]
        ports = {port["name"]: port["targetPort"] for port in target["spec"]["ports"]}
    else:
        containers = deployment["spec"]["template"]["spec"]["containers"]
        ports = {port["name"]: port["containerPort"] for one in containers for port in one["ports"]}
    [endpoint] = spec["endpoints" if kind == "ServiceMonitor" else "podMetricsEndpoints"]
    assert endpoint["port"] in ports
    assert (endpoint["path"], endpoint["interval"], endpoint["scrapeTimeout"]) == ("/metrics", "15s", "10s")
    assert endpoint["relabelings"] == [{"targetLabel": "release", "replacement": RELEASE}]
    assert "metricRelabelings" not in endpoint
    assert "honorLabels" not in endpoint


@pytest.mark.parametrize("key", ["serviceMonitor", "podMonitor"])
def test_what_follows_is_scraped_as_janitors_are(key: str) -> None:
    own = {"labels": {"release": "prometheus"}, "namespace": "monitoring", "interval": "15s"}
    manifests = render(values(**{key: on(**own)}) | {"follow": on()})
    found = pick(manifests, "PodMonitor", "cache-kvstore-follow")
    template = pick(manifests, "Deployment", "cache-kvstore-follow")["spec"]["template"]
    assert found["metadata"]["labels"]["release"] == "prometheus"
    assert found["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    [endpoint] = found["spec"]["podMetricsEndpoints"]
    assert (endpoint["interval"], endpoint["path"]) == ("15s", "/metrics")
    [port] = template["spec"]["containers"][0]["ports"]
    assert port["name"] == endpoint["port"]


@pytest.mark.parametrize(
    ("kind", "key"), [("ServiceMonitor", "serviceMonitor"), ("PodMonitor", "podMonitor")]
)
def test_prometheus_is_told_how_to_ask_where_not_everybody_may(kind: str, key: str) -> None:
    def endpoint(janitor: dict[str, Any], **more: Any) -> dict[str, Any]:
        spec = pick(render({**values(**{key: on(**more)}), "janitor": janitor}), kind)["spec"]
        [found] = spec["endpoints" if kind == "ServiceMonitor" else "podMetricsEndpoints"]
        return dict(found)

    tls, password = {"tls": {"existingSecret": "own"}}, {"password": {"existingSecret": "word"}}
    found = endpoint({**tls, **password})
    assert found["scheme"] == "https"
    assert found["tlsConfig"] == {
        "serverName": "cache-kvstore.inference.svc",
        "ca": {"secret": {"name": "own", "key": "ca.crt"}},
    }
    assert found["authorization"] == {"credentials": {"name": "word", "key": "password"}}
    # Prometheus' own certificate.
    shown = {"cert": {"secret": {"name": "prometheus", "key": "tls.crt"}}}
    found = endpoint({"tls": {"existingSecret": "own", "clientCASecret": "clients"}}, tlsConfig=shown)
    assert (found["tlsConfig"], "authorization" in found) == (shown, False)
    assert not {"scheme", "tlsConfig", "authorization"} & set(endpoint({}))


def test_engines_are_those_that_use_the_store_and_are_not_the_charts() -> None:
    spec = monitor("PodMonitor", "cache-kvstore-vllm")["spec"]
    assert spec["selector"]["matchLabels"] == {"kvstore/client": "true"}
    [rule] = spec["selector"]["matchExpressions"]
    for name in ("cache-kvstore", "cache-kvstore-follow"):
        pods = pick(render(VALUES), "Deployment", name)["spec"]["template"]["metadata"]["labels"]
        assert pods["kvstore/client"] == "true"
        assert (rule["operator"], pods[rule["key"]] in rule["values"]) == ("NotIn", True)
    [endpoint] = spec["podMetricsEndpoints"]
    assert endpoint["relabelings"][0] == {"targetLabel": "release", "replacement": RELEASE}
    [colon] = endpoint["metricRelabelings"]
    assert (
        re.sub(f"^{colon['regex']}$", r"vllm:\1", "vllm_kvstore_kv_loads_total")
        == "vllm:kvstore_kv_loads_total"
    )
    assert re.fullmatch(colon["regex"], "vllm:kvstore_kv_loads_total") is None


def test_engines_may_be_anywhere_and_called_otherwise() -> None:
    selector = {"matchLabels": {"app": "vllm"}}
    more = {"sourceLabels": ["__name__"], "regex": "python_.*", "action": "drop"}
    own = on(selector=selector, namespaces=["*"], port="api", path="/m", metricRelabelings=[more])
    spec = pick(render(values(engines=own)), "PodMonitor")["spec"]
    assert spec["selector"] == selector
    assert spec["namespaceSelector"] == {"any": True}
    [endpoint] = spec["podMetricsEndpoints"]
    assert (endpoint["port"], endpoint["path"]) == ("api", "/m")
    assert endpoint["metricRelabelings"][1:] == [more]
    named = pick(render(values(engines=on(namespaces=["a", "b"]))), "PodMonitor")["spec"]
    assert named["namespaceSelector"] == {"matchNames": ["a", "b"]}


# -- rules ---------------------------------------------------------------------------------------------------


def test_rules_are_about_this_release_alone() -> None:
    for rule in every_rule():
        assert "@" not in json.dumps(rule)
        selected = re.findall(r"((?:kvstore|vllm:|kube_)[\w:]*)\{([^}]*)\}", rule["expr"])
        assert selected, rule
        for name, matchers in selected:
            wanted = 'namespace="inference"' if name.startswith("kube_") else f'release="{RELEASE}"'
            assert wanted in matchers, (name, matchers)
        assert rule["labels"]["release"] == RELEASE


def test_a_cache_can_be_told_from_one_of_the_same_name_in_another_cluster() -> None:
    manifests = render(
        values(release="east/inference/cache", serviceMonitor=on(), engines=on(), prometheusRule=on())
    )
    for kind, endpoints in (("ServiceMonitor", "endpoints"), ("PodMonitor", "podMetricsEndpoints")):
        [endpoint] = pick(manifests, kind)["spec"][endpoints]
        assert endpoint["relabelings"][0] == {"targetLabel": "release", "replacement": "east/inference/cache"}
    text = json.dumps(pick(manifests, "PrometheusRule")["spec"])
    assert RELEASE not in text.replace("east/inference/cache", "")


def test_matchers_can_be_ones_own() -> None:
    own = {"serverMatcher": 'job="mine"', "engineMatcher": 'job=~"vllm-.*", env="prod"'}
    manifest = pick(render(values(prometheusRule=on(**own))), "PrometheusRule")
    texts = [rule["expr"] for group in manifest["spec"]["groups"] for rule in group["rules"]]
    for text in texts:
        for name, matchers in re.findall(r"((?:kvstore|vllm)[\w:]*)\{([^}]*)\}", text):
            if name.startswith("vllm:"):
                assert own["engineMatcher"] in matchers
            else:
                # What was recorded bears the release's name, whatever it was made of.
                recorded = name.startswith("kvstore:")
                assert (f'release="{RELEASE}"' if recorded else own["serverMatcher"]) in matchers


def test_without_a_monitor_of_engines_every_engine_is_meant() -> None:
    manifest = pick(render(values(serviceMonitor=on(), prometheusRule=on())), "PrometheusRule")
    text = json.dumps(manifest["spec"])
    assert re.search(r"vllm:kvstore_kv_loads_total\{\}", text)
    assert RELEASE in text


def test_every_alert_says_what_it_is_and_where_to_read_on() -> None:
    assert set(alerts()) == set(NAMED)
    for name, alert in alerts().items():
        said = alert["annotations"]
        assert set(said) == {"summary", "description", "runbook_url"}
        assert said["runbook_url"] == f"{RUNBOOKS_URL}#{name.lower()}"
        assert alert["labels"]["severity"] in ("critical", "warning")
        assert alert["labels"]["team"] == "inference"
        assert len(said["summary"]) < 90 and not said["summary"].endswith(".")
        assert said["description"].endswith(".")
        # Which one, and how much: by labels that the expression keeps.
        assert RELEASE in json.dumps(said) or "$labels" in json.dumps(said)
        assert "for" in alert or name in AT_ONCE, name
    critical = {name for name, severity in NAMED.items() if severity == "critical"}
    assert critical == {
        "KVStoreIndexDown", "KVStorePayloadsDown", "KVStoreEnginesCutOff", "KVStoreRequestsFailed",
        "KVStoreWrongBlocks",
    }  # fmt: skip


#: They count what has happened within hours: a moment is enough.
AT_ONCE = {"KVStoreDamagedPayloads", "KVStoreCorruptLoads", "KVStoreWrongBlocks", "KVStoreWriterFailed"}


def test_alerts_can_be_left_out_and_their_thresholds_set() -> None:
    found = rendered_alerts(
        disabled=["KVStoreVersionMix"], thresholds={"matchSeconds": 0.05, "janitorSeconds": 90}
    )
    unasked = {"KVStoreCronJobFailing", "KVStoreFollowLate", "KVStoreCopyLate"}
    assert set(NAMED) - set(found) == {"KVStoreVersionMix"} | unasked
    assert "> 0.05" in found["KVStoreMatchSlow"]["expr"]
    assert "> 90" in found["KVStoreJanitorStuck"]["expr"]
    assert found["KVStoreIndexDown"]["labels"] == {"severity": "critical", "release": RELEASE}


def test_every_threshold_is_used() -> None:
    text = (CHART / "files" / "alerts.yaml").read_text()
    known = yaml.safe_load((CHART / "values.yaml").read_text())["monitoring"]["prometheusRule"]["thresholds"]
    used = set(re.findall(r"@(\w+)@", text)) - {
        "servers",
        "engines",
        "release",
        "namespace",
        "fullname",
        "NAME",
    }
    assert used == set(known)


def test_cron_jobs_are_called_as_they_are() -> None:
    manifests = render(VALUES)
    [expr] = [rule["expr"] for rule in every_rule() if rule.get("alert") == "KVStoreCronJobFailing"]
    pattern = re.search(r'cronjob=~"([^"]+)"', expr)
    jobs = [name for _, name in of_kinds(manifests, "CronJob")]
    assert jobs
    assert pattern is not None
    assert all(re.fullmatch(pattern[1], name) for name in jobs)


# -- what is refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tree", "sentence"),
    [
        (
            values(serviceMonitor=on(), podMonitor=on()),
            "monitoring.serviceMonitor and monitoring.podMonitor are both enabled: every janitor would be "
            "scraped twice; enable one of them.",
        ),
        (
            values(podMonitor=on()) | {"janitor": {"replicas": 0}},
            "monitoring.podMonitor is enabled, but janitor.replicas is 0: there is nothing to scrape",
        ),
        (
            values(serviceMonitor=on(interval="5s")),
            "monitoring.serviceMonitor.scrapeTimeout (10s) is longer than "
            "monitoring.serviceMonitor.interval (5s)",
        ),
        (
            values(engines=on(interval="1m", scrapeTimeout="90s")),
            "monitoring.engines.scrapeTimeout (90s) is longer than monitoring.engines.interval (1m)",
        ),
        (
            values(serviceMonitor=on(), engines=on(interval="3m"), prometheusRule=on()),
            "monitoring.engines.interval (3m) is longer than 2m, but monitoring.prometheusRule is enabled",
        ),
        (
            values(prometheusRule=on()),
            "monitoring.prometheusRule is enabled, but neither monitoring.serviceMonitor nor "
            "monitoring.podMonitor",
        ),
        (
            values(serviceMonitor=on(), prometheusRule=on(cronJobs=True))
            | {"fsck": {"enabled": False}, "gc": {"enabled": False}},
            "monitoring.prometheusRule.cronJobs is true, but fsck and gc are both disabled",
        ),
        (
            values(serviceMonitor=on(), prometheusRule=on()) | {"follow": on(every=450)},
            "monitoring.prometheusRule.thresholds.followSeconds (900) is not above twice follow.every (450)",
        ),
        (
            values(serviceMonitor=on(), prometheusRule=on(disabled=["KVStoreNothing"])),
            'monitoring.prometheusRule.disabled names "KVStoreNothing", which is no alert of this chart; its '
            "alerts are KVStoreIndexDown, ",
        ),
    ],
)
def test_what_cannot_work_is_a_sentence(tree: dict[str, Any], sentence: str) -> None:
    assert sentence in fails(tree)


@pytest.mark.parametrize(
    "tree",
    [
        values(serviceMonitor=on(interval="soon")),
        values(serviceMonitor={"on": True}),
        values(release='a"b'),
        values(release="a$1"),
        values(prometheusRule=on(thresholds={"matchSeconds": 0})),
        values(prometheusRule=on(thresholds={"patience": 1})),
        values(prometheusRule=on(serverMatcher="job=@x@")),
        values(dashboards=on(labels={"grafana_dashboard": 1})),
    ],
)
def test_what_is_not_a_value_is_refused_by_the_schema(tree: dict[str, Any]) -> None:
    assert "schema" in fails(tree)


# -- dashboards ----------------------------------------------------------------------------------------------


def test_each_dashboard_is_a_config_map_for_the_sidecar() -> None:
    own = values(dashboards=on(namespace="grafana"), prometheusRule={"runbooks": "https://wiki.example/kv"})
    found = [m for m in render(own) if "grafana_dashboard" in m["metadata"].get("labels", {})]
    assert len(found) == len(DASHBOARDS) == 2
    for one in found:
        assert one["metadata"]["namespace"] == "grafana"
        assert one["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert one["metadata"]["annotations"]["grafana_folder"] == "kvstore"
        [(name, text)] = one["data"].items()
        assert len(text) < 900_000
        committed = (CHART / "files" / "dashboards" / name).read_text(encoding="utf-8")
        assert RUNBOOKS_URL not in text and "https://wiki.example/kv#" in text
        assert json.loads(text) == json.loads(committed.replace(RUNBOOKS_URL, "https://wiki.example/kv"))
    assert len({one["metadata"]["name"] for one in found}) == len(found)


def test_the_dashboards_are_what_their_description_says() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "tools.dashboards", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ran.returncode, ran.stdout) == (0, ""), ran.stdout + ran.stderr


# -- runbooks ------------------------------------------------------------------------------------------------


def sections(path: Path) -> dict[str, str]:
    parts = re.split(r"^## (\w+)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_every_alert_has_its_runbook_and_the_reverse() -> None:
    found = sections(RUNBOOKS)
    headings = re.findall(r"^## (\w+)$", RUNBOOKS.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert sorted(headings) == sorted(NAMED)
    for name, text in found.items():
        for part in ("**Means**", "**Affects**", "**Check**", "**Do**", "**Over**"):
            assert part in text, f"{name}: {part}"


def test_runbooks_know_which_alerts_are_urgent() -> None:
    for name, text in sections(RUNBOOKS).items():
        means = text.split("**Affects**")[0]
        assert ("Critical." in means) == (NAMED[name] == "critical"), name


def test_thresholds_in_runbooks_are_the_values() -> None:
    known = thresholds()
    named = set(re.findall(r"`thresholds\.(\w+)`", RUNBOOKS.read_text(encoding="utf-8")))
    assert named <= set(known)
    assert len(named) >= 8
