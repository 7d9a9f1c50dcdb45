"""Who may connect to whom under the chart's NetworkPolicies: nothing that works is cut off by default."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helm.chart import ROOT, Manifest, pick, render
from tests.helm.reach import End, Reach

HERE, ELSEWHERE = "inference", "team-b"
CI = sorted((ROOT / "helm" / "ci").glob("*-values.yaml"))
S3 = {"s3": {"bucket": "my-bucket"}}
INTERNET = End(address="52.218.1.2")
METADATA = End(address="169.254.169.254")
DNS = End(namespace="kube-system", labels={"k8s-app": "kube-dns"})
STRANGER = End(namespace=ELSEWHERE, labels={"app": "web"})
NEIGHBOUR = End(namespace=HERE, labels={"app": "vllm"})
ENGINE_ELSEWHERE = End(namespace=ELSEWHERE, labels={"app": "vllm", "kvstore/client": "true"})
PROMETHEUS = End(namespace="monitoring", labels={"app.kubernetes.io/name": "prometheus"})


def ours(manifests: list[Manifest]) -> dict[str, End]:
    """The release's pods by component, with the labels that they are rendered with."""
    found = {}
    for one in manifests:
        spec = one.get("spec", {})
        if one["kind"] == "CronJob":
            spec = spec["jobTemplate"]["spec"]
        metadata = one["metadata"] if one["kind"] == "Pod" else spec.get("template", {}).get("metadata")
        if metadata and one["kind"] in ("Deployment", "StatefulSet", "CronJob", "Pod"):
            labels = metadata["labels"]
            found[labels["app.kubernetes.io/component"]] = End(namespace=HERE, labels=labels)
    return found


def with_everything(values: dict[str, Any]) -> dict[str, Any]:
    """The same, with every pod that there can be."""
    switched = ("fsck", "gc", "follow")
    return {**values, **{name: {**values.get(name, {}), "enabled": True} for name in switched}}


@pytest.mark.parametrize("path", CI, ids=lambda path: path.stem)
def test_every_variant_lets_pass_what_it_needs(path: Path) -> None:
    values = with_everything(yaml.safe_load(path.read_text()) or {})
    manifests = render(values, namespace=HERE)
    reach, pods = Reach(manifests, HERE), ours(manifests)
    assert {"janitor", "follow", "fsck", "gc"} <= set(pods)
    servers = {name: pod for name, pod in pods.items() if name == "redis"}
    clients = [pod for name, pod in pods.items() if name != "redis"]
    settings = yaml.safe_load(pick(manifests, "ConfigMap", "cache-kvstore")["data"]["settings.yaml"])
    for client in clients:
        assert reach.may(client, DNS, 53, "UDP")
        assert reach.may(client, DNS, 53)
        for redis in servers.values():
            assert reach.may(client, redis, 6379)
        if not servers:
            for port in ports_of(settings["index"]):
                assert reach.may(client, INTERNET, port)
        if settings["payloads"].startswith("s3:"):
            endpoint = settings["payloads"].partition("endpoint=")[2].partition("&")[0]
            inside = endpoint.partition("//")[2].partition(":")[0].endswith(".svc")
            target = End(namespace="storage", labels={"app": "s3"}) if inside else INTERNET
            assert reach.may(client, target, port_of(endpoint))
    for redis in servers.values():
        for engine in (NEIGHBOUR, ENGINE_ELSEWHERE):
            assert reach.may(engine, redis, 6379)
        for source, port in ((STRANGER, 6379), (NEIGHBOUR, 22), (INTERNET, 6379), (PROMETHEUS, 6379)):
            assert not reach.may(source, redis, port)
    for source in (PROMETHEUS, NEIGHBOUR, pods["gc"]):
        assert reach.may(source, pods["janitor"], 9464)
    for source, port in ((PROMETHEUS, 22), (STRANGER, 9464), (ENGINE_ELSEWHERE, 9464), (INTERNET, 9464)):
        assert not reach.may(source, pods["janitor"], port)


def ports_of(url: str) -> list[int]:
    scheme, _, rest = url.partition("://")
    default = "26379" if "sentinel" in scheme else "6379"
    listed = rest.partition("/")[0].split(",")
    found = [int(one.rpartition(":")[2] if ":" in one else default) for one in listed]
    return [*found, 6379] if "sentinel" in scheme else found


def port_of(url: str) -> int:
    number = url.rstrip("/").rpartition(":")[2]
    if number.isdigit():
        return int(number)
    return 80 if url.startswith("http:") else 443


def test_by_default_nothing_is_said_of_what_pods_connect_to() -> None:
    manifests = render({"payloads": S3}, namespace=HERE)
    reach, pods = Reach(manifests, HERE), ours(manifests)
    for pod in pods.values():
        assert reach.may(pod, INTERNET, 12345)
    assert [one for one in manifests if one["kind"] == "NetworkPolicy"]


def test_everybody_may_ask_the_janitor_where_a_value_says_so() -> None:
    manifests = render({"payloads": S3, "networkPolicy": {"janitor": {"from": []}}}, namespace=HERE)
    reach, pods = Reach(manifests, HERE), ours(manifests)
    for source in (STRANGER, INTERNET):
        assert reach.may(source, pods["janitor"], 9464)


def egress(**values: Any) -> tuple[Reach, dict[str, End]]:
    policy = {
        "enabled": True,
        "egress": {"enabled": True, **values.pop("egress", {})},
        **values.pop("more", {}),
    }
    tree = {"payloads": {"s3": {"bucket": "my-bucket", **values.pop("s3", {})}}, **values}
    manifests = render(with_everything({**tree, "networkPolicy": policy}), namespace=HERE)
    return Reach(manifests, HERE), ours(manifests)


def test_with_egress_nothing_else_is_reached() -> None:
    reach, pods = egress()
    for name in ("janitor", "fsck", "gc"):
        pod = pods[name]
        assert reach.may(pod, INTERNET, 443)
        assert reach.may(pod, METADATA, 80)
        assert reach.may(pod, pods["redis"], 6379)
        for target, port in (
            (INTERNET, 80),
            (INTERNET, 6379),
            (METADATA, 8080),
            (NEIGHBOUR, 8000),
            (STRANGER, 6379),
            (pods["redis"], 22),
        ):
            assert not reach.may(pod, target, port)
    # Redis connects to nobody; engines aren't ours to restrict.
    for target, port in ((INTERNET, 443), (DNS, 53), (pods["janitor"], 9464)):
        assert not reach.may(pods["redis"], target, port)
    assert reach.may(NEIGHBOUR, INTERNET, 80)


def test_with_keys_of_ones_own_no_metadata_service_is_asked() -> None:
    keys = {"existingSecret": "keys", "endpoint": "http://minio.storage.svc:9000"}
    reach, pods = egress(s3=keys)
    assert reach.may(pods["janitor"], End(namespace="storage", labels={"app": "minio"}), 9000)
    assert not reach.may(pods["janitor"], METADATA, 80)
    assert not reach.may(pods["janitor"], INTERNET, 443)
    reach, pods = egress(egress={"metadata": False})
    assert not reach.may(pods["janitor"], METADATA, 80)
    assert reach.may(pods["janitor"], INTERNET, 443)


def test_an_endpoint_is_reached_by_its_port() -> None:
    for endpoint, port in (("https://s3.example.com", 443), ("http://rgw", 80), ("https://a:8443/", 8443)):
        reach, pods = egress(s3={"endpoint": endpoint, "existingSecret": "keys"})
        assert reach.may(pods["gc"], INTERNET, port), endpoint
        assert not reach.may(pods["gc"], INTERNET, 444)
    # Behind a Service the port is the pod's.
    reach, pods = egress(
        s3={"endpoint": "http://minio.storage.svc", "existingSecret": "keys"},
        egress={"s3Ports": [9000], "s3To": [{"namespaceSelector": {"matchLabels": {"store": "s3"}}}]},
    )
    minio = End(namespace="storage", namespace_labels={"store": "s3"})
    assert reach.may(pods["gc"], minio, 9000)
    assert not reach.may(pods["gc"], STRANGER, 9000)


def test_sentinels_and_what_they_point_at() -> None:
    redis = {"builtIn": {"enabled": False}, "external": {"url": "redis+sentinel://a,b:5000/m/0"}}
    reach, pods = egress(redis=redis, egress={"redisPorts": [7000]})
    for port in (26379, 5000, 6379, 7000):
        assert reach.may(pods["janitor"], STRANGER, port)
    assert not reach.may(pods["janitor"], STRANGER, 7001)
    redis = {"builtIn": {"enabled": False}, "external": {"url": "rediss://a:6380/0"}}
    reach, pods = egress(redis=redis)
    assert reach.may(pods["janitor"], INTERNET, 6380)
    assert not reach.may(pods["janitor"], INTERNET, 6379)


def test_who_may_is_a_value() -> None:
    only = {"from": [{"podSelector": {"matchLabels": {"app": "vllm"}}}]}
    monitoring = {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}
    mesh = [{"ports": [{"protocol": "TCP", "port": 15008}]}]
    manifests = render(
        {
            "payloads": S3,
            "follow": {"enabled": True},
            "networkPolicy": {
                "redis": only,
                "janitor": {"from": [{"namespaceSelector": monitoring}]},
                "extraRedisIngress": mesh,
                "extraJanitorIngress": mesh,
                "egress": {"enabled": True},
                "extraEgress": mesh,
            },
        },
        namespace=HERE,
    )
    reach, pods = Reach(manifests, HERE), ours(manifests)
    assert reach.may(NEIGHBOUR, pods["redis"], 6379)
    assert not reach.may(ENGINE_ELSEWHERE, pods["redis"], 6379)
    assert not reach.may(End(namespace=HERE, labels={"app": "web"}), pods["redis"], 6379)
    assert reach.may(pods["janitor"], pods["redis"], 6379)
    assert reach.may(STRANGER, pods["redis"], 15008)
    assert reach.may(STRANGER, pods["janitor"], 15008)
    assert reach.may(pods["janitor"], STRANGER, 15008)
    for name, port in (("janitor", 9464), ("follow", 9466)):
        assert reach.may(PROMETHEUS, pods[name], port)
        assert not reach.may(STRANGER, pods[name], port)


def test_without_policies_there_are_none() -> None:
    manifests = render({"payloads": S3, "networkPolicy": {"enabled": False}})
    assert not [one for one in manifests if one["kind"] == "NetworkPolicy"]


def test_every_pod_of_the_chart_is_known_to_the_policies() -> None:
    """A new component that opens the store must be let in."""
    manifests = render(with_everything({"payloads": S3}), namespace=HERE)
    assert set(ours(manifests)) - {"redis"} == {"janitor", "follow", "fsck", "gc", "test"}
