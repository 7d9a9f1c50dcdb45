"""The chart's templates of Redis, built-in and external, and the sentences about what can't work."""

from __future__ import annotations

import base64
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from schemas.settings import Settings
from tests.helm.chart import ROOT, Manifest, fails, pick, render, run

NAME = "cache-kvstore-redis"
S3 = {"s3": {"bucket": "my-bucket"}}


def built_in(**values: Any) -> dict[str, Any]:
    return {"payloads": S3, "redis": {"builtIn": values}}


def external(url: str, **values: Any) -> dict[str, Any]:
    return {"payloads": S3, "redis": {"builtIn": {"enabled": False}, "external": {"url": url, **values}}}


def settings_of(manifests: list[Manifest]) -> dict[str, Any]:
    text = pick(manifests, "ConfigMap", "cache-kvstore")["data"]["settings.yaml"]
    tree: dict[str, Any] = yaml.safe_load(text)
    redis = dict(tree.get("redis", {}))
    for variable in environment(manifests):
        section, _, key = variable.removeprefix("KVSTORE_").lower().partition("__")
        if section == "redis":
            redis[key] = "from a Secret"
    Settings.model_validate(tree | {"redis": redis})
    return tree


def directives(manifests: list[Manifest]) -> dict[str, list[str]]:
    """redis.conf, name -> values in their order."""
    found: dict[str, list[str]] = {}
    for line in pick(manifests, "ConfigMap", NAME)["data"]["redis.conf"].splitlines():
        if line.strip() and not line.startswith("#"):
            name, _, value = line.strip().partition(" ")
            found.setdefault(name, []).append(value)
    return found


def janitor(manifests: list[Manifest]) -> dict[str, Any]:
    spec: dict[str, Any] = pick(manifests, "Deployment")["spec"]["template"]["spec"]
    return spec


def environment(manifests: list[Manifest]) -> dict[str, tuple[str, str]]:
    """Variables that come from a Secret: its name and key."""
    found = {}
    for entry in janitor(manifests)["containers"][0]["env"]:
        if reference := entry.get("valueFrom", {}).get("secretKeyRef"):
            found[entry["name"]] = (reference["name"], reference["key"])
    return found


# The built-in Redis


def test_by_default_one_valkey_keeps_the_index() -> None:
    manifests = render(built_in())
    made = pick(manifests, "StatefulSet")["spec"]
    [container] = made["template"]["spec"]["containers"]
    assert made["replicas"] == 1
    assert re.fullmatch(r"docker\.io/valkey/valkey:\d+\.\d+\.\d+", container["image"])
    [claim] = made["volumeClaimTemplates"]
    assert claim["metadata"]["name"] in {mount["name"] for mount in container["volumeMounts"]}
    assert "storageClassName" not in claim["spec"]
    assert settings_of(manifests)["index"] == f"redis://{NAME}.inference.svc:6379/0"
    assert settings_of(manifests)["redis"] == {"username": "kvstore"}
    assert environment(manifests)["KVSTORE_REDIS__PASSWORD"] == (NAME, "password")
    said = directives(manifests)
    assert said["maxmemory-policy"] == ["noeviction"]
    assert int(said["hash-max-listpack-entries"][0]) >= 128
    assert said["appendonly"] == ["yes"]
    # A second directive of a name would silently win over the first.
    assert {name for name, values in said.items() if len(values) > 1} == set()


def test_a_mistake_can_be_taken_back() -> None:
    """A pod that never got ready is replaced by a rollback alone; GitOps tools see no difference."""
    made = pick(render(built_in()), "StatefulSet")["spec"]
    assert made["podManagementPolicy"] == "Parallel"
    (claim,) = made["volumeClaimTemplates"]
    assert (claim["apiVersion"], claim["kind"]) == ("v1", "PersistentVolumeClaim")


def test_a_change_of_the_configuration_restarts_it() -> None:
    def checksum(**values: Any) -> str:
        made = pick(render(built_in(**values)), "StatefulSet")["spec"]["template"]
        return str(made["metadata"]["annotations"]["checksum/config"])

    assert checksum() == checksum()
    different = {checksum(), checksum(maxmemory="600Mi"), checksum(auth={"reader": {"enabled": True}})}
    assert len(different) == 3


@pytest.mark.parametrize(
    ("limit", "values", "expected"),
    [
        ("2Gi", {}, 2 * 1024**3 * 35 // 100),
        ("1500M", {}, 1_500_000_000 * 35 // 100),
        (2147483648, {"maxmemoryPercent": 50}, 1 << 30),
        ("2Gi", {"maxmemory": "1200Mi"}, 1200 << 20),
        ("2Gi", {"maxmemory": "1.5Gi"}, 3 << 29),
        (None, {"maxmemory": "1Gi"}, 1 << 30),
    ],
)
def test_maxmemory_leaves_room(limit: Any, values: dict[str, Any], expected: int) -> None:
    limits = {} if limit is None else {"memory": limit}
    if limit is None:
        # Null takes the default away.
        limits = {"memory": None}
    said = directives(render(built_in(resources={"limits": limits}, **values)))
    assert said["maxmemory"] == [str(expected)]


def test_further_directives_come_last() -> None:
    config = {"activedefrag": True, "maxclients": 20000, "io-threads": "2", "oom-score-adj": False}
    config["notify-keyspace-events"] = ""
    said = directives(render(built_in(config={**config, "client-output-buffer-limit": ["normal 1mb 1mb 1"]})))
    assert said["activedefrag"] == ["yes"]
    assert said["maxclients"] == ["20000"]
    assert said["io-threads"] == ["2"]
    # Nothing at all would be a wrong number of arguments, and Redis wouldn't start.
    assert said["notify-keyspace-events"] == ['""']
    assert said["oom-score-adj"] == ["no"]
    assert said["client-output-buffer-limit"][-1] == "normal 1mb 1mb 1"


def test_without_a_volume_nothing_is_written() -> None:
    manifests = render(built_in(persistence={"enabled": False}))
    made = pick(manifests, "StatefulSet")["spec"]
    assert "volumeClaimTemplates" not in made
    assert {"name": "data", "emptyDir": {}} in made["template"]["spec"]["volumes"]
    assert directives(manifests)["appendonly"] == ["no"]


def test_a_secret_of_ones_own() -> None:
    auth = {"existingSecret": "mine", "passwordKey": "p", "previousPasswordKey": "q"}
    manifests = render(built_in(auth=auth))
    assert NAME not in {one["metadata"]["name"] for one in manifests if one["kind"] == "Secret"}
    assert environment(manifests)["KVSTORE_REDIS__PASSWORD"] == ("mine", "p")
    volumes = pick(manifests, "StatefulSet")["spec"]["template"]["spec"]["volumes"]
    [passwords] = [volume["projected"] for volume in volumes if volume["name"] == "passwords"]
    first, second = (source["secret"] for source in passwords["sources"])
    assert (first["name"], first["items"]) == ("mine", [{"key": "p", "path": "kvstore"}])
    assert (second["items"], second["optional"]) == ([{"key": "q", "path": "kvstore-previous"}], True)


def test_the_users_may_do_what_the_store_asks_for() -> None:
    """Every command of the sources is granted, and nothing else; and the reader can't change anything."""
    rules = {
        line.split()[1]: line.split()[2:]
        for line in pick(render(built_in(auth={"reader": {"enabled": True}})), "ConfigMap", NAME)["data"][
            "users"
        ].splitlines()
    }
    granted = {user: {word[1:] for word in words if word.startswith("+")} for user, words in rules.items()}
    folder = ROOT / "kvstore"
    scripts = "".join(path.read_text() for path in (folder / "index/scripted/lua").glob("*.lua"))
    asked = {word.lower() for word in re.findall(r"call\('([A-Z]+)'", scripts)}
    sources = ("index/redis/**/*.py", "index/scripted/*.py", "admin/**/*.py")
    for path in (path for one in sources for path in folder.glob(one)):
        text = path.read_text()
        asked |= {word.lower() for word in re.findall(r'(?:command|_asked|\[|, )\(\s*"([A-Z]+)"', text)}
        asked |= {word.lower() for word in re.findall(r'_asked\(client, "([A-Z]+)"', text)}
    asked = {{"object": "object|encoding"}.get(word, word) for word in asked}
    asked |= {"eval", "evalsha"}
    page = (ROOT / "docs" / "security.md").read_text()
    [added] = re.findall(r"In a Cluster add `(.*?)`", page)
    # redis-py asks a Cluster, which this one is not.
    assert {word[1:].partition("|")[0] for word in added.split()} == {"cluster", "command"}
    assert granted["kvstore"] == asked
    # tests/index/redis/test_acl.py tries these rules, as the page has them, on a server.
    for user, name in (("kvstore", "kvstore"), ("reader", "kvstore-reader")):
        [rule] = re.findall(rf"^user {name} on >PASSWORD (.+)$", page, re.M)
        assert set(rule.split()) == set(rules[user][1:])
    writes = {"set", "setrange", "bitfield", "del", "unlink", "rename", "expire", "hset", "hdel", "hincrby"}
    writes |= {"sadd", "srem", "zadd", "zincrby", "zrem", "zremrangebyrank", "zremrangebyscore"}
    writes |= {"zunionstore", "xadd"}
    assert granted["kvstore"] - granted["reader"] == writes
    assert granted["reader"] < granted["kvstore"]
    assert granted["keeper"] == {"ping", "acl|load"}
    assert all(
        "-@all" in words and not [w for w in words if w.startswith("+@")]
        for user, words in rules.items()
        if user != "default"
    )
    assert rules["kvstore"][:2] == rules["reader"][:2] == ["on", "~kvs:*"]
    # Off; its rights are those of the file's replay.
    assert rules["default"] == ["off", "resetpass", "~*", "&*", "+@all"]


def test_tls_of_the_releases_own(tmp_path: Path) -> None:
    manifests = render(built_in(tls={"enabled": True, "selfSigned": True, "selfSignedDays": 30}))
    assert settings_of(manifests)["index"] == f"rediss://{NAME}.inference.svc:6379/0"
    assert settings_of(manifests)["redis"]["tls_ca"] == "/etc/kvstore/tls/redis/ca.crt"
    said = directives(manifests)
    assert (said["port"], said["tls-port"]) == (["0"], ["6379"])
    held = pick(manifests, "Secret", f"{NAME}-tls")
    for key in ("ca.crt", "tls.crt"):
        (tmp_path / key).write_bytes(base64.b64decode(held["data"][key]))
    host = f"{NAME}.inference.svc"
    assert "OK" in _openssl(tmp_path, "verify", "-CAfile", "ca.crt", "-verify_hostname", host, "tls.crt")
    days = ["x509", "-in", "tls.crt", "-noout", "-checkend"]
    assert "will not expire" in _openssl(tmp_path, *days, str(29 * 86400))
    assert "will expire" in _openssl(tmp_path, *days, str(31 * 86400))


def _openssl(folder: Path, *words: str) -> str:
    done = subprocess.run(["openssl", *words], cwd=folder, capture_output=True, text=True, timeout=20)
    return done.stdout + done.stderr


def test_clients_get_the_authority_and_not_the_servers_key() -> None:
    manifests = render(built_in(tls={"enabled": True, "existingSecret": "mine"}))
    server = pick(manifests, "StatefulSet")["spec"]["template"]["spec"]["volumes"]
    assert [v["secret"]["secretName"] for v in server if v["name"] == "tls"] == ["mine"]
    keys = [
        item["key"]
        for volume in janitor(manifests)["volumes"]
        for source in volume.get("projected", {}).get("sources", [])
        if source.get("secret", {}).get("name") == "mine"
        for item in source["secret"]["items"]
    ]
    assert keys == ["ca.crt"]


def test_what_the_pod_says_of_itself_is_said_once() -> None:
    """A key that stands twice is the last one to Helm, and an error to Kustomize and Argo CD."""
    own = {"checksum/config": "mine", "a": "b"}
    done = run(
        "template", "cache", str(ROOT / "helm"), "-f", "-", stdin=json.dumps(built_in(podAnnotations=own))
    )
    assert done.stdout.count("checksum/config") == 1
    annotations = pick(render(built_in(podAnnotations=own)), "StatefulSet")["spec"]["template"]["metadata"]
    assert annotations["annotations"]["a"] == "b" and annotations["annotations"]["checksum/config"] != "mine"


# An external one


def test_an_external_redis_leaves_nothing_of_the_built_in_one() -> None:
    manifests = render(external("redis://cache:6379/0"))
    assert not [one for one in manifests if one["kind"] == "StatefulSet" or NAME in one["metadata"]["name"]]
    assert settings_of(manifests)["index"] == "redis://cache:6379/0"
    assert "redis" not in settings_of(manifests)
    assert environment(manifests) == {}


def test_its_credentials_and_certificates() -> None:
    manifests = render(
        external(
            "rediss+sentinel://a:26379,b:26379/mymaster/0",
            username="me",
            existingSecret="mine",
            passwordKey="p",
            sentinel={"username": "watcher", "passwordKey": "s"},
            tls={"caSecret": "authority", "caKey": "root.pem", "clientSecret": "client", "verify": False},
        )
    )
    folder = "/etc/kvstore/tls/redis"
    assert settings_of(manifests)["redis"] == {
        "username": "me",
        "sentinel_username": "watcher",
        "tls_ca": f"{folder}/ca.crt",
        "tls_cert": f"{folder}/tls.crt",
        "tls_key": f"{folder}/tls.key",
        "tls_verify": False,
    }
    assert environment(manifests) == {
        "KVSTORE_REDIS__PASSWORD": ("mine", "p"),
        "KVSTORE_REDIS__SENTINEL_PASSWORD": ("mine", "s"),
    }
    files = {
        f"/etc/kvstore/{item['path']}": (source["secret"]["name"], item["key"])
        for volume in janitor(manifests)["volumes"]
        for source in volume.get("projected", {}).get("sources", [])
        for item in source.get("secret", {}).get("items", [])
    }
    assert {path.rpartition("/")[2]: source for path, source in files.items()} == {
        "ca.crt": ("authority", "root.pem"),
        "tls.crt": ("client", "tls.crt"),
        "tls.key": ("client", "tls.key"),
    }


@pytest.mark.parametrize(
    "url",
    [
        "redis://cache",
        "redis://cache/",
        "redis://cache:6379/15",
        "rediss://[fd00::1]:6379/0",
        "redis://a:1,b:2,c/0",
        "redis+sentinel://a/mymaster",
        "rediss+sentinel://a:1,[::1]:2/my-master.1/3",
    ],
)
def test_urls_that_work(url: str) -> None:
    assert settings_of(render(external(url)))["index"] == url


# What can't work

REFUSED = [
    ({"redis": {"external": {"url": "redis://h"}}}, "two Redis servers"),
    ({"redis": {"builtIn": {"enabled": False}}}, "engines share an index in Redis"),
    ({"networkPolicy": {"enabled": False, "egress": {"enabled": True}}}, "does nothing while"),
    ({"redis": {"external": {"existingSecret": "s"}}}, "redis.external has values but no url"),
    ({"redis": {"external": {"tls": {"verify": False}}}}, "redis.external has values but no url"),
    (built_in(tls={"enabled": True}), "wants a certificate"),
    (built_in(tls={"enabled": True, "existingSecret": "s", "selfSigned": True}), "are two certificates"),
    (built_in(tls={"selfSigned": True}), "a certificate but is not enabled"),
    (built_in(auth={"passwordKey": "x", "previousPasswordKey": "x"}), "one key of the Secret twice"),
    (built_in(auth={"reader": {"enabled": True, "passwordKey": "password"}}), "one key of the Secret twice"),
    (built_in(resources={"limits": {"memory": None}}), "no memory limit"),
    (built_in(resources={"limits": {"memory": "64Mi"}}), "needs 32Mi to hold anything"),
    (built_in(maxmemory="2Gi"), "more than nine tenths"),
    (built_in(persistence={"size": "1Gi"}), "less than twice maxmemory"),
    (built_in(config={"maxmemory": "1gb"}), "config.maxmemory: see redis.builtIn.maxmemory"),
    (built_in(config={"aclfile": "/x"}), "config.aclfile: see redis.builtIn.auth"),
    (built_in(config={"TLS-Port": 1}), "config.TLS-Port: see redis.builtIn.tls"),
    (built_in(config={"maxmemory-policy": "allkeys-lru"}), "kvstore needs it as the chart has it"),
    (built_in(config={"bind": "1.2.3.4"}), "config.bind: see networkPolicy"),
    (built_in(config={"x\nport": "1"}), "no directive of redis.conf"),
    (built_in(config={"save": "\nmaxmemory-policy allkeys-lru"}), "a value of several lines"),
    (built_in(config={"save": ["1 1", "1 1\nport 1"]}), "a value of several lines"),
    (
        built_in(podLabels={"app.kubernetes.io/name": "x"}),
        "redis.builtIn.podLabels has app.kubernetes.io/name",
    ),
    (external("redis://u:geheim@h/0"), "holds a user or a password"),
    (external("redis://:geheim@h/0"), "holds a user or a password"),
    (external("http://h"), "begins with none of"),
    (external("cache:6379"), "begins with none of"),
    (external("redis://h/0?db=1"), "takes no options"),
    (external("redis://"), "names no host"),
    (external("redis://a,,b/0"), "names no host"),
    (external("redis://h:x/0"), "names no host"),
    (external("redis://h/name"), "something else than a database's number"),
    (external("redis://a,b/1"), "a Cluster has no database but 0"),
    (external("redis+sentinel://a,b"), "doesn't name the master"),
    (external("redis+sentinel://a,b/0"), "doesn't name the master"),
    (external("redis+sentinel://a/m/x"), "something else than MASTER/DB"),
    (external("redis://h", tls={"caSecret": "c"}), "has no TLS"),
    (external("redis://h", tls={"verify": False}), "has no TLS"),
    (external("redis://h", existingSecret="s", sentinel={"passwordKey": "k"}), "names no Sentinels"),
    (external("redis://h", username="u"), "redis.external.username has no password"),
    (external("redis+sentinel://a/m/0", sentinel={"passwordKey": "k"}), "which is empty"),
    (
        external("redis+sentinel://a/m/0", existingSecret="s", sentinel={"username": "u"}),
        "redis.external.sentinel.username has no password",
    ),
    (external("redis://h", existingSecret="s", passwordKey=""), "none of its keys"),
]


@pytest.mark.parametrize(("values", "sentence"), REFUSED, ids=[f"{i}" for i in range(len(REFUSED))])
def test_what_cant_work_is_refused_with_a_sentence(values: dict[str, Any], sentence: str) -> None:
    said = fails({"payloads": S3, **values})
    lines = [line for line in said.splitlines() if line.startswith("  - ")]
    # One thing is wrong, so one thing is said.
    assert len(lines) == 1, said
    assert sentence in lines[0]
    assert "geheim" not in said
