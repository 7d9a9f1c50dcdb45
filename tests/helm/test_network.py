"""The chart's NetworkPolicies: whom they select, whom they let in, and what they let out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helm.chart import CHART, render
from tests.helm.pods import pod_templates
from tests.helm.test_vllm import BUCKET, merged

CI = sorted((CHART / "ci").glob("*-values.yaml"))
#: Every pod that there can be.
EVERYTHING = {
    "fsck": {"enabled": True},
    "gc": {"enabled": True},
    "follow": {"enabled": True},
    "packs": {"apply": [{"pack": "/a.tar"}]},
}
EGRESS = {"networkPolicy": {"egress": {"enabled": True}}}
OWN_KEYS = {"payloads": {"s3": {"existingSecret": "keys"}}}


def policies(values: Any) -> dict[str, Any]:
    """The specs of a release's policies, by the end of their names."""
    found = [one for one in render(values) if one["kind"] == "NetworkPolicy"]
    return {one["metadata"]["name"].removeprefix("cache-kvstore").lstrip("-"): one["spec"] for one in found}


def chosen(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    listed = selector.get("matchExpressions", ())
    assert all(one["operator"] == "In" for one in listed)
    return selector["matchLabels"].items() <= labels.items() and all(
        labels.get(one["key"]) in one["values"] for one in listed
    )


@pytest.mark.parametrize("path", CI, ids=lambda path: path.stem)
def test_policies_know_every_pod_of_the_chart(path: Path) -> None:
    """A new component that opens the store must be let in, and out."""
    manifests = render(merged(merged(yaml.safe_load(path.read_text()), EVERYTHING), EGRESS))
    pods = [template["metadata"]["labels"] for _, template in pod_templates(manifests)]
    components = {labels["app.kubernetes.io/component"]: labels for labels in pods}
    servers = {"redis"} & components.keys()
    assert components.keys() - servers == {"janitor", "follow", "fsck", "gc", "pack", "test"}
    found = policies(merged(merged(yaml.safe_load(path.read_text()), EVERYTHING), EGRESS))
    selected = {"": {"janitor"}, "follow": {"follow"}, "egress": components.keys() - servers}
    selected |= {"redis": {"redis"}} if servers else {}
    assert found.keys() == selected.keys()
    for name, spec in found.items():
        assert {one for one in components if chosen(spec["podSelector"], components[one])} == selected[name]
    for name in ("", *servers):
        ours, *_ = found[name]["ingress"][0]["from"]
        assert {one for one in components if chosen(ours["podSelector"], components[one])} == selected[
            "egress"
        ]


def test_by_default_nothing_that_works_is_cut_off() -> None:
    found = policies(merged(BUCKET, EVERYTHING))
    for name, port, key, value in (
        ("redis", 6379, "kvstore/client", "true"),
        ("", 9464, "app.kubernetes.io/name", "prometheus"),
        ("follow", 9466, "app.kubernetes.io/name", "prometheus"),
    ):
        [rule] = found[name]["ingress"]
        labelled = {"namespaceSelector": {}, "podSelector": {"matchLabels": {key: value}}}
        assert rule["from"][-2:] == [{"podSelector": {}}, labelled]
        assert rule["ports"] == [{"protocol": "TCP", "port": port}]
        assert found[name]["policyTypes"] == ["Ingress"]
    assert "egress" not in found
    assert not policies(merged(BUCKET, {"networkPolicy": {"enabled": False}}))
    everybody = policies(merged(BUCKET, {"networkPolicy": {"janitor": {"from": []}}}))
    assert "from" not in everybody[""]["ingress"][0]


@pytest.mark.parametrize(
    ("values", "ports"),
    [
        ({}, [[443]]),
        ({"payloads": {"s3": {"endpoint": "https://s3.example.com"}}}, [[443]]),
        ({"payloads": {"s3": {"endpoint": "http://rgw"}}}, [[80]]),
        ({"payloads": {"s3": {"endpoint": "https://a:8443/"}}}, [[8443]]),
        ({"networkPolicy": {"egress": {"s3Ports": [9000]}}}, [[443, 9000]]),
        ({"redis": {"external": {"url": "rediss://a:6380/0"}}}, [[6380], [443]]),
        ({"redis": {"external": {"url": "redis+sentinel://a,b:5000/m/0"}}}, [[26379, 5000, 6379], [443]]),
        (
            {
                "redis": {"external": {"url": "redis://a,b/0"}},
                "networkPolicy": {"egress": {"redisPorts": [7]}},
            },
            [[6379, 7], [443]],
        ),
    ],
)
def test_what_goes_out_with_egress(values: dict[str, Any], ports: list[list[int]]) -> None:
    """Redis' ports and S3's; behind them what every pod needs."""
    external = {"redis": {"builtIn": {"enabled": False}}} if "redis" in values else {}
    given = merged(merged(merged(merged(BUCKET, OWN_KEYS), EGRESS), external), values)
    spec = policies(given)["egress"]
    names, janitor, *rest = [[one["port"] for one in rule["ports"]] for rule in spec["egress"]]
    built_in = [] if external else [[6379]]
    assert (names, janitor, rest) == ([53, 53, 5353, 5353], [9464], [*built_in, *ports])
    # Redis connects to nobody.
    if not external:
        redis = policies(given)["redis"]
        assert redis["policyTypes"] == ["Ingress", "Egress"] and "egress" not in redis


def test_without_keys_they_are_asked_for() -> None:
    *_, tokens, metadata = policies(merged(BUCKET, EGRESS))["egress"]["egress"]
    assert "to" not in tokens and tokens["ports"] == [{"protocol": "TCP", "port": 443}]
    assert {"ipBlock": {"cidr": "169.254.169.254/32"}} in metadata["to"]
    for values in (OWN_KEYS, {"networkPolicy": {"egress": {"metadata": False}}}):
        rules = policies(merged(merged(BUCKET, EGRESS), values))["egress"]["egress"]
        assert "ipBlock" not in str(rules)


def test_further_rules_and_peers_are_values() -> None:
    mesh = [{"ports": [{"protocol": "TCP", "port": 15008}]}]
    peers = [{"podSelector": {"matchLabels": {"app": "vllm"}}}]
    more = {"redis": {"from": peers}, "janitor": {"from": peers}, "extraRedisIngress": mesh}
    more |= {"extraJanitorIngress": mesh, "extraEgress": mesh, "egress": {"enabled": True, "s3To": peers}}
    found = policies(merged(merged(BUCKET, OWN_KEYS), {"networkPolicy": more}))
    for name in ("redis", ""):
        assert found[name]["ingress"][0]["from"][1:] == peers and found[name]["ingress"][1:] == mesh
    assert found["egress"]["egress"][-1:] == mesh and found["egress"]["egress"][-2]["to"] == peers
