"""The connectors' configs, what an engine's pod needs, and the refusals; what vLLM makes of them is in
tests/e2e/test_chart_configs.py."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvstore.build import load_settings
from schemas.settings import Settings, Tiers
from tests.helm.chart import CHART, Manifest, fails, helm, notes, pick, render

BUCKET: dict[str, Any] = {"payloads": {"s3": {"bucket": "my-bucket"}}}
EVERY_KIND = (
    "kv ec kv-ec pd-prefill pd-decode ec-producer ec-consumer epd-language epd-prefill offloading-tier multi"
).split()
ALL: dict[str, Any] = {**BUCKET, "vllm": {"kinds": EVERY_KIND, "offloadingTier": {"cpuGiB": 16}}}
#: A Redis and a bucket with certificates of their own, and a cache on each node.
SECURED: dict[str, Any] = {
    "payloads": {
        "s3": {"bucket": "my-bucket", "existingSecret": "s3-keys", "ca": {"configMap": "s3-ca"}},
        "nodeCache": {"enabled": True, "capacity": "200GiB"},
    },
    "redis": {
        "builtIn": {"enabled": False},
        "external": {
            "url": "rediss://redis.example.com:6380/0",
            "username": "engines",
            "existingSecret": "redis-login",
            "tls": {"caSecret": "redis-ca", "clientSecret": "redis-client"},
        },
    },
}


def config_map(values: Any = None, namespace: str = "inference", **more: Any) -> dict[str, str]:
    """The ConfigMap's files."""
    found = [
        one
        for one in render(BUCKET if values is None else values, **more)
        if one["kind"] == "ConfigMap" and one["metadata"]["name"].endswith("-vllm")
    ]
    [wanted] = [one for one in found if one["metadata"]["namespace"] == namespace]
    return dict(wanted["data"])


def pod_of(values: Any = None, **more: Any) -> dict[str, Any]:
    """What the notes tell to paste into a pod, by the names of a pod's fields."""
    block = notes(BUCKET if values is None else values, **more).split("    # metadata.labels\n")[1]
    block = block.split("\n\n")[0].replace("    # its role opens the bucket\n", "")
    labels, *parts = re.split(r"    # (?:the container's )?(env|volumeMounts|volumes)\n", block)
    found = {"labels": yaml.safe_load(labels)}
    texts = dict(zip(parts[::2], parts[1::2], strict=True))
    texts["volumes"], _, account = texts["volumes"].partition("    serviceAccountName: ")
    found |= {name: yaml.safe_load(text) for name, text in texts.items()}
    return found | ({"serviceAccountName": yaml.safe_load(account)} if account else {})


# What is rendered.


def test_each_kind_is_a_file_for_vllm_and_each_config_one_for_a_flag() -> None:
    files = config_map(ALL)
    assert {name.removesuffix(".yaml") for name in files if name.endswith(".yaml")} == {
        *EVERY_KIND,
        "settings",
        "settings-prefill",
        "settings-decode",
    }
    for kind in EVERY_KIND:
        given = yaml.safe_load(files[f"{kind}.yaml"])
        assert given and set(given) <= {"kv-transfer-config", "ec-transfer-config"}, kind
        for text in given.values():
            # A string: it is a flag's argument.
            made = json.loads(text)
            [name] = [n for n in files if n.endswith(".json") and json.loads(files[n]) == made][:1]
            assert name


@pytest.mark.parametrize(
    ("kind", "kv", "ec"),
    [
        ("kv", "kv_both", None),
        ("ec", None, "ec_both"),
        ("kv-ec", "kv_both", "ec_both"),
        ("pd-prefill", "kv_both", None),
        ("pd-decode", "kv_consumer", None),
        ("ec-producer", None, "ec_producer"),
        ("ec-consumer", None, "ec_consumer"),
        ("epd-language", "kv_both", "ec_consumer"),
        ("epd-prefill", "kv_both", "ec_consumer"),
    ],
)
def test_roles(kind: str, kv: str | None, ec: str | None) -> None:
    given = {name: json.loads(text) for name, text in yaml.safe_load(config_map(ALL)[f"{kind}.yaml"]).items()}
    assert given.get("kv-transfer-config", {}).get("kv_role") == kv
    assert given.get("ec-transfer-config", {}).get("ec_role") == ec
    for one in given.values():
        [extra] = [one[name] for name in one if name.endswith("extra_config")]
        # Prompts are handed over by, and to, engines of these kinds and no others.
        group = {"pd-prefill": "-prefill", "epd-prefill": "-prefill", "pd-decode": "-decode"}.get(kind, "")
        own = group if "kv_role" in one else ""
        assert extra == {"settings": f"/etc/kvstore/settings{own}.yaml"}
        assert settings_of(config_map(ALL)[f"settings{own}.yaml"]).kv.handoff == bool(own)


def test_under_vllms_offloading() -> None:
    config = json.loads(config_map(ALL)["offloading-tier.json"])["kv_connector_extra_config"]
    assert config["spec_name"] == "TieringOffloadingSpec" and config["cpu_bytes_to_use"] == 16 << 30
    assert config["secondary_tiers"] == [
        {"type": "KVStoreTier", "module_path": "connectors.tier", "settings": "/etc/kvstore/settings.yaml"}
    ]
    children = json.loads(config_map(ALL)["multi.json"])["kv_connector_extra_config"]["connectors"]
    # The store first: it is told of every block, whoever else loads it.
    assert [one["kv_connector"] for one in children] == ["KVStoreConnector", "OffloadingConnector"]


def settings_of(text: str) -> Settings:
    return load_settings(yaml.safe_load(text), environ={})


@pytest.mark.parametrize("values", [BUCKET, ALL, SECURED, CHART / "ci" / "vllm-pd-values.yaml"], ids=str)
def test_the_store_takes_the_settings(values: Any) -> None:
    files = config_map(values)
    for name in files:
        if name.startswith("settings"):
            settings_of(files[name])


def test_the_nodes_cache_is_in_front_for_engines() -> None:
    settings = settings_of(config_map(SECURED)["settings.yaml"])
    assert settings.payloads == Tiers(
        fast="file:///var/cache/kvstore", slow="s3://my-bucket/kvstore", fast_capacity=200 << 30
    )
    assert settings.redis.tls_ca == "/etc/kvstore/tls/redis/ca.crt"
    assert settings.s3.tls_ca == "/etc/kvstore/tls/s3/ca.crt"


def test_settings_of_one_kind_go_over_those_of_all() -> None:
    values = {
        **BUCKET,
        "settings": {"kv": {"handoff_wait_s": 3, "save_decode": True}, "transfers": {"write_bytes": 10**11}},
        "vllm": {"settings": {"decode": {"kv": {"handoff_wait_s": 10}}}},
    }
    files = config_map(values)
    config = json.loads(files["pd-decode.json"])["kv_connector_extra_config"]
    assert config == {"settings": "/etc/kvstore/settings-decode.yaml"}
    common, decode = (settings_of(files[name]) for name in ("settings.yaml", "settings-decode.yaml"))
    assert (common.kv.handoff_wait_s, decode.kv.handoff_wait_s) == (3, 10)
    assert decode.kv.save_decode and decode.index == common.index
    # A large number is written out; 1e+11 would be a text.
    assert common.transfers.write_bytes == decode.transfers.write_bytes == 10**11
    assert decode.kv.handoff and not common.kv.handoff
    assert "settings-encoder.yaml" not in files


def test_an_extra_key_of_a_transfer_config() -> None:
    files = config_map(
        {**BUCKET, "vllm": {"extraConfig": {"pd-decode": {"kv_port": 14999, "engine_id": "d'1"}}}}
    )
    decode = json.loads(files["pd-decode.json"])
    assert decode["kv_port"] == 14999 and decode["kv_connector"] == "KVStoreConnector"
    assert json.loads(yaml.safe_load(files["pd-decode.yaml"])["kv-transfer-config"]) == decode
    assert "kv_port" not in json.loads(files["kv.json"])


# What an engine's pod needs.


def test_a_pod_by_default() -> None:
    pod = pod_of()
    assert pod["labels"] == {"kvstore/client": "true"}
    assert pod["volumes"] == [
        {"name": "kvstore", "projected": {"sources": [{"configMap": {"name": "cache-kvstore-vllm"}}]}}
    ]
    assert pod["volumeMounts"] == [{"name": "kvstore", "mountPath": "/etc/kvstore", "readOnly": True}]
    password = pick(render(BUCKET), "Secret", "cache-kvstore-redis")
    [entry] = [one for one in pod["env"] if "valueFrom" in one]
    reference = entry["valueFrom"]["secretKeyRef"]
    assert reference["name"] == "cache-kvstore-redis"
    assert reference["key"] in {**password.get("data", {}), **password.get("stringData", {})}


def mounted(pod: dict[str, Any]) -> dict[str, str]:
    """Path of each file that comes from a Secret or ConfigMap of its own -> where it is from."""
    places = {one["name"]: one["mountPath"] for one in pod["volumeMounts"]}
    found = {}
    for volume in pod["volumes"]:
        for source in volume.get("projected", {}).get("sources", []):
            for kind, object_ in source.items():
                for item in object_.get("items", []):
                    path = f"{places[volume['name']]}/{item['path']}"
                    found[path] = f"{kind}/{object_['name']}/{item['key']}"
    return found


def test_certificates_are_where_the_settings_say() -> None:
    settings, files = settings_of(config_map(SECURED)["settings.yaml"]), mounted(pod_of(SECURED))
    assert files == {
        "/etc/kvstore/tls/redis/ca.crt": "secret/redis-ca/ca.crt",
        "/etc/kvstore/tls/redis/tls.crt": "secret/redis-client/tls.crt",
        "/etc/kvstore/tls/redis/tls.key": "secret/redis-client/tls.key",
        "/etc/kvstore/tls/s3/ca.crt": "configMap/s3-ca/ca.crt",
    }
    said = {settings.redis.tls_ca, settings.s3.tls_ca, settings.redis.tls_cert, settings.redis.tls_key}
    assert said == set(files)


@pytest.mark.parametrize("values", sorted((CHART / "ci").glob("*.yaml")), ids=lambda path: path.stem)
def test_nothing_is_mounted_inside_a_volume_of_files(values: Path) -> None:
    """No folder can be made there to mount it on, and the container would not start."""
    pod = pod_of(values)
    volumes = {one["name"]: one for one in pod["volumes"]}
    mounts = {one["mountPath"]: volumes[one["name"]] for one in pod["volumeMounts"]}
    assert len(volumes) == len(mounts)
    for path in mounts:
        for other, volume in mounts.items():
            if {"projected", "configMap", "secret"} & set(volume):
                assert not path.startswith(f"{other}/"), (path, other)


def test_other_namespaces_get_the_same_files() -> None:
    values = {**BUCKET, "vllm": {"namespaces": ["team-a", "team-b"]}}
    here, there = config_map(values), config_map(values, "team-a")
    assert config_map(values, "team-b") == there == here
    # The index is found from anywhere.
    assert "cache-kvstore-redis.inference.svc:" in there["settings.yaml"]


def test_names_that_yaml_takes_for_numbers() -> None:
    account = {"annotations": {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/cache"}, "name": "11"}
    values = {**BUCKET, "fullnameOverride": "preview", "serviceAccount": account}
    rendered = pick(render(values, name="1e3", namespace="123"), "ConfigMap", "preview-vllm")
    assert rendered["metadata"]["namespace"] == "123"
    assert pod_of(values, name="1e3", namespace="123")["serviceAccountName"] == "11"


def test_none_where_none_is_wanted() -> None:
    values = {**BUCKET, "vllm": {"enabled": False}}
    names = [one["metadata"]["name"] for one in render(values) if one["kind"] == "ConfigMap"]
    assert not [name for name in names if name.endswith("-vllm")]


def test_a_chart_of_ones_own_takes_the_pieces(tmp_path: Path) -> None:
    """As docs/vllm-on-kubernetes.md says: this chart as a dependency."""
    (tmp_path / "charts").mkdir()
    (tmp_path / "charts" / "kvstore").symlink_to(CHART)
    (tmp_path / "templates").mkdir()
    dependency = {"name": "kvstore", "version": "0.1.0"}
    about = {"apiVersion": "v2", "name": "mine", "version": "1.0.0", "dependencies": [dependency]}
    (tmp_path / "Chart.yaml").write_text(yaml.safe_dump(about))
    (tmp_path / "templates" / "pod.yaml").write_text(
        "kind: Mine\nmetadata: {name: mine}\n"
        + "".join(
            f'{part}:\n  {{{{- include "kvstore.engine.{part}" .Subcharts.kvstore | nindent 2 }}}}\n'
            for part in ("labels", "env", "volumes", "volumeMounts")
        )
    )
    values = json.dumps({"kvstore": SECURED})
    done = subprocess.run(
        [helm(), "template", "cache", str(tmp_path), "-f", "-"], input=values, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    manifests: list[Manifest] = [one for one in yaml.safe_load_all(done.stdout) if one]
    mine, theirs = pick(manifests, "Mine"), pod_of(SECURED)
    for part in ("env", "volumes", "volumeMounts"):
        assert mine[part] == theirs[part]
    assert mine["labels"] == theirs["labels"]


# What is refused.


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"vllm": {"kinds": ["kv", "pd-prefill"]}}, "none that take over from them: add pd-decode"),
        ({"vllm": {"kinds": ["epd-prefill"]}}, "none that take over from them: add pd-decode"),
        ({"vllm": {"kinds": ["pd-decode"]}}, "add pd-prefill (or epd-prefill)"),
        ({"vllm": {"kinds": ["kv", "ec-producer"]}}, "no engines that use what encoders store"),
        (
            {"vllm": {"kinds": ["offloading-tier"]}},
            "offloading-tier, whose tier in the node's memory has no size",
        ),
        ({"vllm": {"kinds": ["kv", "multi"]}}, "multi, whose tier in the node's memory has no size"),
        (
            {"vllm": {"namespaces": ["team-a", "inference"]}},
            "the release's own, which has the configs anyway",
        ),
        (
            {"payloads": {"type": "pvc"}, "vllm": {"namespaces": ["team-a"]}},
            "a claim belongs to one namespace: engines in team-a can't mount it",
        ),
        (
            {"vllm": {"settings": {"decode": {"index": "redis://h:1/0"}}}},
            "vllm.settings.decode.index: all engines",
        ),
        (
            {"vllm": {"settings": {"tier": {"identity": {"epoch": 2}}}}},
            "engines with different identities share",
        ),
        (
            {"vllm": {"settings": {"encoder": {"redis": {"password": "x"}}}}},
            "vllm.settings.encoder.redis.password would stand in a ConfigMap",
        ),
        ({"vllm": {"extraConfig": {"offloading-tier": {"a": 1}}}}, "there is no such config among those"),
        (
            {"vllm": {"extraConfig": {"kv": {"kv_role": "kv_both"}}}},
            "vllm.extraConfig.kv.kv_role is the chart's own",
        ),
    ],
)
def test_refused(values: dict[str, Any], sentence: str) -> None:
    assert sentence in fails(merged(BUCKET, values))


TIER: dict[str, Any] = {"vllm": {"kinds": ["offloading-tier"], "offloadingTier": {"cpuGiB": 1}}}


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"admission": {"second_use": True}}, "admission.second_use doesn't work under vLLM's offloading"),
        ({"admission": {"min_blocks": 4}}, "admission.min_blocks doesn't work under vLLM's offloading"),
        ({"identity": {"any_tp": True}}, "identity.any_tp doesn't work under vLLM's offloading"),
        ({"kv": {"save_decode": True}}, "kv.save_decode doesn't work under vLLM's offloading"),
        ({"kv": {"min_load_blocks": 2}}, "kv.min_load_blocks doesn't work under vLLM's offloading"),
    ],
)
def test_what_a_tier_refuses_at_an_engines_start(settings: dict[str, Any], sentence: str) -> None:
    values = merged(merged(BUCKET, TIER), {"settings": settings})
    assert sentence in fails(values)
    # Where no engine has a tier it is fine.
    render(merged(BUCKET, {"settings": settings}))


def test_a_tier_may_have_settings_of_its_own_instead() -> None:
    own = {"admission": {"second_use": False, "min_blocks": 1}, "kv": {"save_decode": False}}
    values = merged(merged(BUCKET, TIER), {"settings": {"admission": {"second_use": True, "min_blocks": 4}}})
    files = config_map(merged(values, {"vllm": {"settings": {"tier": own}}}))
    assert settings_of(files["settings.yaml"]).admission.second_use
    assert settings_of(files["settings-tier.yaml"]).admission == Settings(payloads="file:///x").admission


@pytest.mark.parametrize(
    "values",
    [
        {"vllm": {"kinds": ["kv", "nope"]}},
        {"vllm": {"kinds": []}},
        {"vllm": {"namespaces": ["Team_A"]}},
        {"vllm": {"settings": {"decode": {"kv": {"handof_wait_s": 1}}}}},
        {"vllm": {"setings": {}}},
        {"vllm": {"offloadingTier": {"cpuGiB": "16Gi"}}},
    ],
)
def test_the_schema_refuses(values: dict[str, Any]) -> None:
    assert "values don't meet the specifications of the schema" in fails(merged(BUCKET, values))


def merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    found = dict(base)
    for key, value in over.items():
        there = found.get(key)
        found[key] = merged(there, value) if isinstance(there, dict) and isinstance(value, dict) else value
    return found
