"""What NOTES.txt says is so: every name in it is rendered, every config is accepted, every command is one."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from kvstore.cli.app import app
from tests.helm.chart import CHART, ROOT, Manifest, notes, pick, render
from tests.helm.test_vllm import ALL, BUCKET, SECURED, config_map, merged, pod_of

CASES: dict[str, Any] = {
    "default": BUCKET,
    "all": ALL,
    "secured": SECURED,
    **{path.name.removesuffix("-values.yaml"): path for path in sorted((CHART / "ci").glob("*-values.yaml"))},
}
each_case = pytest.mark.parametrize("values", CASES.values(), ids=CASES.keys())


def commands(text: str, program: str) -> list[list[str]]:
    """Lines that run a program, as words, up to a pipe."""
    lines = [line.strip() for line in text.splitlines() if line.strip().startswith(f"{program} ")]
    return [shlex.split(line, comments=True) for line in lines]


def names(manifests: list[Manifest], *kinds: str) -> set[str]:
    return {one["metadata"]["name"] for one in manifests if one["kind"] in kinds}


@each_case
def test_every_object_exists(values: Any) -> None:
    text, manifests = notes(values), render(values)
    pod = pod_of(values)
    referred = {
        f"secret/{one['valueFrom']['secretKeyRef']['name']}" for one in pod["env"] if "valueFrom" in one
    }
    for volume in pod["volumes"]:
        for source in volume.get("projected", {}).get("sources", []):
            referred |= {f"{kind.lower()}/{object_['name']}" for kind, object_ in source.items()}
    seen = 0
    for words in commands(text, "kubectl"):
        assert words[1] == "-n" and words[2] == "inference", words
        if words[3] == "port-forward":
            assert words[4].removeprefix("svc/") in names(manifests, "Service")
            local, port = words[5].split(":")
            service = pick(manifests, "Service", words[4].removeprefix("svc/"))
            assert int(port) in {one["port"] for one in service["spec"]["ports"]}
            assert f"http://localhost:{local}/" in text
        elif words[3] == "exec":
            assert words[4].removeprefix("deploy/") in names(manifests, "Deployment")
            assert words[5:7] == ["--", "cache-admin"]
            assert parses(words[7:]), words
        else:
            # Copied to another namespace: what an engine's pod refers to, and nothing that isn't.
            assert words[3] == "get" and words[4] in referred, words
            referred.discard(words[4])
            assert words[-5:-1] == ["-n", words[-4], "apply", "-f"]
        seen += 1
    assert seen >= 3
    for words in commands(text, "helm"):
        assert words == ["helm", "test", "cache", "--namespace", "inference"]
        assert [one for one in manifests if "test" in str(one["metadata"].get("annotations", {}))]


def parses(words: list[str]) -> bool:
    """Whether cache-admin knows the command and its options."""
    group: Any = typer.main.get_command(app)
    command = group.commands.get(words[0])
    if command is None:
        return False
    try:
        command.make_context(words[0], words[1:])
    except Exception:
        return False
    return True


def test_a_command_that_is_none_is_found() -> None:
    assert parses(["status", "--json"])
    assert not parses(["statuss"]) and not parses(["status", "--nope"])


@each_case
def test_the_flags_are_the_config_maps(values: Any) -> None:
    text, files = notes(values), config_map(values)
    printed = re.findall(r"# (\S+)\n    --(kv|ec)-transfer-config '(.+)'", text)
    assert {name for name, _, _ in printed} == {
        name.removesuffix(".json") for name in files if name.endswith(".json")
    }
    for name, kind, argument in printed:
        assert json.loads(argument) == json.loads(files[f"{name}.json"])
        assert name.startswith("ec") == (kind == "ec")
    served = [words[words.index("--config") + 1] for words in commands(text, "vllm")]
    assert served == [f"/etc/kvstore/{kind}.yaml" for kind in kinds(values)]
    assert {Path(path).name for path in served} <= files.keys()


def kinds(values: Any) -> list[str]:
    given = yaml.safe_load(values.read_text()) if isinstance(values, Path) else values
    every = yaml.safe_load((CHART / "values.yaml").read_text())["vllm"]["kinds"]
    return list(given.get("vllm", {}).get("kinds", every))


@each_case
def test_no_secret_is_said(values: Any) -> None:
    text = notes(values)
    for one in render(values):
        if one["kind"] == "Secret":
            for hidden in {**(one.get("data") or {}), **(one.get("stringData") or {})}.values():
                assert hidden not in text


WARNINGS: list[tuple[dict[str, Any], str]] = [
    ({"redis": {"builtIn": {"persistence": {"enabled": False}}}}, "a restart of Redis empties the index"),
    ({"redis": {"builtIn": {"tls": {"enabled": False}}}}, "redis.builtIn.tls.enabled is false"),
    ({"redis": {"builtIn": {"auth": {"existingSecret": ""}}}}, "the password was made by helm"),
    (
        {"redis": {"builtIn": {"enabled": False}, "external": {"url": "redis://h:6379/0"}}},
        "redis.external.url is without TLS",
    ),
    (
        {"redis": {"builtIn": {"enabled": False}, "external": {"url": "rediss://h:6379/0"}}},
        "no password is sent to Redis",
    ),
    (
        {
            "redis": {
                "builtIn": {"enabled": False},
                "external": {"url": "rediss://h:6379/0", "tls": {"verify": False}},
            }
        },
        "whoever answers in Redis' place is believed",
    ),
    ({"payloads": {"s3": {"prefix": "kv"}}}, "payloads.s3.region is empty"),
    ({"payloads": {"s3": {"endpoint": "http://minio:9000"}}}, "payloads.s3.endpoint is without TLS"),
    ({"settings": {"s3": {"tls_verify": False}}}, "whoever answers in the bucket's place is believed"),
    ({"payloads": {"s3": {"accessKeyId": "a", "secretAccessKey": "b"}}}, "use payloads.s3.existingSecret"),
    (
        {"payloads": {"type": "hostPath", "hostPath": {"path": "/srv", "sameOnAllNodes": True}}},
        "payloads.type is hostPath",
    ),
    ({"payloads": {"nodeCache": {"enabled": True}}}, "payloads.nodeCache is a hostPath in engines' pods"),
    ({"payloads": {"nodeCache": {"enabled": True, "write": "back"}}}, "is lost with its disk"),
    (
        {"networkPolicy": {"enabled": False}},
        "every pod of the cluster can connect to the janitor and to Redis",
    ),
    ({"service": {"type": "LoadBalancer"}}, "can be reached from outside the cluster"),
    ({"gc": {"enabled": False}}, "gc.enabled is false"),
    ({"gc": {"delete": False}}, "deletes none of it"),
    ({"fsck": {"enabled": False}}, "fsck.enabled is false"),
]


@pytest.mark.parametrize(("values", "sentence"), WARNINGS, ids=[sentence for _, sentence in WARNINGS])
def test_warnings(values: dict[str, Any], sentence: str) -> None:
    base = BUCKET if "payloads" in values else BASE
    assert sentence in notes(values if "type" in values.get("payloads", {}) else merged(base, values))


BASE = merged(BUCKET, {"payloads": {"s3": {"existingSecret": "keys", "region": "eu-central-1"}}})


def test_nothing_to_mind() -> None:
    values = merged(
        BASE,
        {
            "redis": {
                "builtIn": {
                    "auth": {"existingSecret": "login"},
                    "tls": {"enabled": True, "existingSecret": "tls"},
                }
            }
        },
    )
    text = notes(values)
    assert "MIND" not in text and "There is no key for the bucket" not in text


@pytest.mark.parametrize(
    "place", [{"region": "eu-central-1"}, {"endpoint": "https://rgw.example.com"}], ids=str
)
def test_a_place_that_is_known(place: dict[str, str]) -> None:
    assert "payloads.s3.region" not in notes(merged(BUCKET, {"payloads": {"s3": place}}))


@pytest.mark.parametrize("path", ["README.md", "docs/vllm-on-kubernetes.md", "helm/README.md"])
def test_what_is_to_be_copied_says_where_the_bucket_is(path: str) -> None:
    """A region that isn't said is us-east-1, and the bucket elsewhere not found."""
    blocks = re.findall(r"^```sh\n(.*?)^```", (ROOT / path).read_text(), re.M | re.S)
    installs = re.findall(r"^helm install (?:[^\n]*\\\n)*[^\n]*", "".join(blocks), re.M)
    buckets = [command for command in installs if "payloads.s3.bucket=" in command]
    assert buckets
    for command in buckets:
        assert re.search(r"payloads\.s3\.(region|endpoint)=", command), command


def test_a_bucket_without_a_key() -> None:
    assert "engines' pods need a role that may use it" in notes(BUCKET)


COPIED: dict[str, Any] = {
    "secured": SECURED,
    # One Secret with more than the engines' password, one with the server's key.
    "built-in": merged(
        BUCKET,
        {
            "redis": {
                "builtIn": {
                    "tls": {"enabled": True, "selfSigned": True},
                    "auth": {"reader": {"enabled": True}},
                }
            }
        },
    ),
    "one secret": merged(
        BUCKET,
        {
            "payloads": {"s3": {"existingSecret": "all", "ca": {"secret": "all", "key": "s3.pem"}}},
            "redis": {"builtIn": {"auth": {"existingSecret": "all", "passwordKey": "login"}}},
        },
    ),
    "keys in values": merged(BUCKET, {"payloads": {"s3": {"accessKeyId": "a", "secretAccessKey": "b"}}}),
}


def used(values: Any) -> dict[str, set[str]]:
    """Object -> the keys that an engine's pod takes from it; without the chart's own ConfigMap."""
    pod, found = pod_of(values), dict[str, set[str]]()
    for one in pod["env"]:
        if "valueFrom" in one:
            [(kind, reference)] = one["valueFrom"].items()
            assert kind == "secretKeyRef"
            found.setdefault(f"secret/{reference['name']}", set()).add(reference["key"])
    sources = [one for volume in pod["volumes"] for one in volume.get("projected", {}).get("sources", [])]
    for source in sources:
        for kind, object_ in source.items():
            if kind in ("secret", "configMap") and not object_["name"].endswith("-vllm"):
                keys = {item["key"] for item in object_["items"]}
                found.setdefault(f"{kind.lower()}/{object_['name']}", set()).update(keys)
    return found


def copies(values: Any) -> dict[str, str]:
    """Object -> the program for jq that makes its copy for another namespace."""
    text = notes(merged(values, {"vllm": {"namespaces": ["team-a"]}}))
    found = {}
    for words in commands(text, "kubectl"):
        if "jq" in words:
            assert words[3:9] == ["get", words[4], "-o", "json", "|", "jq"]
            assert words[10:] == ["|", "kubectl", "-n", "team-a", "apply", "-f", "-"]
            found[words[4]] = words[9]
    return found


@pytest.mark.skipif(shutil.which("jq") is None, reason="no jq")
@pytest.mark.parametrize("values", COPIED.values(), ids=COPIED.keys())
def test_what_is_copied(values: Any) -> None:
    """The printed programs, run: engines there are given what they use, and nothing else that is in a Secret,
    such as the key of Redis' certificate and the passwords of other users."""
    assert copies(values).keys() == used(values).keys()
    rendered = {f"{one['kind'].lower()}/{one['metadata']['name']}": one for one in render(values)}
    for what, program in copies(values).items():
        keys = used(values)[what]
        kind = "Secret" if what.startswith("secret/") else "ConfigMap"
        own = {"apiVersion": "v1", "kind": kind, "data": dict.fromkeys(keys, "eA==")}
        there = rendered.get(what, own | {"type": "kubernetes.io/tls"})
        data = {"tls.key": "eA==", "previous-password": "eA=="}
        data |= there.get("data") or dict.fromkeys(there["stringData"], "eA==")
        metadata = {"name": what.split("/")[1], "namespace": "inference", "uid": "1", "labels": {"a": "b"}}
        given = json.dumps(there | {"metadata": metadata, "data": data})
        done = subprocess.run(["jq", program], input=given, capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, done.stderr
        copied = {"apiVersion": "v1", "kind": kind, "metadata": {"name": metadata["name"]}}
        copied |= {"data": {key: data[key] for key in keys}}
        assert json.loads(done.stdout) == copied | ({"type": "Opaque"} if kind == "Secret" else {})


def test_engines_have_the_keys_that_sign() -> None:
    """In a folder of their own, and all of them: which ones there are the chart doesn't know."""
    values = merged(BUCKET, {"signing": {"existingSecret": "kvstore-keys", "key": "2026-11"}})
    [config] = [one for one in render(values) if one["metadata"]["name"].endswith("-vllm")]
    signing = yaml.safe_load(config["data"]["settings.yaml"])["signing"]
    assert signing == {
        "keys": "/etc/kvstore-keys", "key": "2026-11", "unsigned": "refuse", "encrypt": False,
    }  # fmt: skip
    pod = pod_of(values)
    [volume] = [one for one in pod["volumes"] if "secret" in one]
    assert volume["secret"] == {"secretName": "kvstore-keys", "defaultMode": 0o440}
    [mount] = [one for one in pod["volumeMounts"] if one["name"] == volume["name"]]
    assert mount == {"name": volume["name"], "mountPath": signing["keys"], "readOnly": True}
    program = copies(values)["secret/kvstore-keys"]
    assert program == ('{apiVersion, kind, type: "Opaque", metadata: {name: .metadata.name}, data: .data}')


def test_without_a_janitor_and_configs() -> None:
    text = notes(merged(BUCKET, {"janitor": {"replicas": 0}, "vllm": {"enabled": False}}))
    assert "nothing shows the cache" in text and "no configs for engines were rendered" in text
    assert "kubectl" not in text and "helm test" not in text
