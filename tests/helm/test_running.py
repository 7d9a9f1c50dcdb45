"""The chart's pods, as rendered, at work: processes of this machine, a real Redis, a real S3 server."""

from __future__ import annotations

import json
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.admin.conftest import kv_slots, kv_space
from tests.helm.chart import pick
from tests.helm.kubelet import Pod
from tests.helm.prometheus import Prometheus, job
from tests.helm.release import KEYS, NAMESPACE, Release
from tests.helm.running import fetch, secret
from tests.servers.s3.servers import S3Server
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.servers, pytest.mark.slow]

#: Writes where it may not and where it may, and says who it is.
_LOOK = """
import json, os, sys
def writes(path):
    try:
        with open(path, "w"): return True
    except OSError as exc:
        return exc.strerror
status = dict(line.split(":\\t") for line in open("/proc/self/status").read().splitlines() if ":\\t" in line)
print(json.dumps({
    "ids": [os.getuid(), os.getgid(), os.getgroups()],
    "first": open("/proc/1/cmdline").read().split("\\0"),
    "capabilities": [int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")],
    "no_new_privileges": status["NoNewPrivs"],
    "root": writes("/written"), "etc": writes("/etc/written"), "tmp": writes("/tmp/written"),
    "settings": writes("/etc/kvstore/settings.yaml"),
    "environment": sorted(name for name in os.environ if name.startswith("KVSTORE")),
}))
"""
_GET = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=60).read().decode())"


@pytest.fixture(scope="module")
def _release(pods: None, s3_server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Release]:
    """`helm install kvstore` with a bucket, and nothing else; eight blocks."""
    with Release(tmp_path_factory.mktemp("release") / "cluster", s3_server) as release:
        took = release.start()
        print(f"\nready after {took:.1f} s")
        release.save(kv_space(), kv_slots(8))
        yield release


@pytest.fixture
def release(_release: Release) -> Release:
    """All of it ready, as after the installation."""
    _release.cluster.until_ready()
    return _release


def inside(pod: Pod, *command: str) -> str:
    done = pod.container.sandbox.execute(command, PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def found_in(text: str, release: Release) -> list[str]:
    """Which of the release's secrets stand in a text, in any usual spelling."""
    known = [release.password(), release.keys["secret-access-key"]]
    return [one for one in known if one in text or urllib.parse.quote(one, safe="") in text]


def blocks(release: Release, pod: Pod) -> float:
    """How many are stored, as this janitor shows it."""
    return sum(value for name, value in release.metrics(pod).items() if name.startswith("kvstore_blocks{"))


def test_the_janitor_is_ready(release: Release) -> None:
    assert len(release.janitors) == 1
    for pod in release.cluster.pods:
        assert pod.restarts == 0, pod.describe()
        # What the first probes come too early for.
        early = ("Startup probe failed", "Readiness probe failed: HTTP probe failed with statuscode: 503")
        assert [event for event in pod.container.events if not event.startswith(early)] == []
        assert found_in(pod.container.log(), release) == []
    for pod in release.janitors:
        seen = release.metrics(pod)
        assert seen['kvstore_up{backend="index"}'] == 1
        assert seen['kvstore_up{backend="payloads"}'] == 1


def test_the_service_is_found_by_its_names(release: Release) -> None:
    pod = release.janitors[0]
    for host in ("kvstore", f"kvstore.{NAMESPACE}.svc", f"kvstore.{NAMESPACE}.svc.cluster.local"):
        assert inside(pod, "python", "-c", _GET, f"http://{host}:9464/readyz") == "ok\n\n"
    status, text = release.get("/metrics")
    assert status == 200
    assert 'kvstore_up{backend="index"} 1.0' in text


def test_a_real_prometheus_finds_it_by_the_rendered_monitor(release: Release, tmp_path: Path) -> None:
    made = release.render({"monitoring": {"serviceMonitor": {"enabled": True}}})
    monitor = pick(made, "ServiceMonitor")
    targets = release.cluster.targets(monitor)
    assert sorted(targets) == sorted(f"{pod.address}:9464" for pod in release.janitors)
    scrape = job("kvstore", targets, monitor["spec"]["endpoints"][0], {"namespace": NAMESPACE})
    with Prometheus(tmp_path / "prometheus", [scrape], {"groups": []}) as prometheus:

        def asked(expr: str) -> list[float]:
            return [sample.value for sample in prometheus.query(expr)]

        release.redis.wait(lambda _: asked("sum(up)") == [1.0])
        assert (
            asked('min(kvstore_up{backend="index"})') == asked('min(kvstore_up{backend="payloads"})') == [1.0]
        )


def test_a_pod_may_do_no_more_than_it_says(release: Release) -> None:
    for pod, program in ((release.janitors[0], "cache-admin"), (release.redis, "valkey-server")):
        text = pod.container.sandbox.execute(("/usr/bin/python3", "-c", _LOOK), PATIENCE_S).stdout
        seen = json.loads(text)
        assert seen["ids"] == [65532, 65532, [65532]]
        assert any(program in word for word in seen["first"]), seen["first"]
        assert seen["capabilities"] == [0, 0, 0, 0, 0]
        assert seen["no_new_privileges"] == "1"
        assert {seen["root"], seen["etc"]} == {"Read-only file system"}
    seen = json.loads(inside(release.janitors[0], "python", "-c", _LOOK))
    assert seen["settings"] == "Read-only file system"
    assert seen["tmp"] is True
    assert "KVSTORE_PORT" not in seen["environment"], "what Kubernetes tells of Services looks like settings"


def test_jobs_pass_on_a_healthy_cache_and_fsck_fails_on_a_damaged_one(release: Release) -> None:
    names = ("kvstore-fsck", "kvstore-gc", "kvstore-test")
    begun = {name: release.cluster.job(name) for name in names}
    for pod in begun.values():
        assert pod.until_ended() == 0, pod.describe()
        assert found_in(pod.describe(), release) == []
    report = json.loads(begun["kvstore-fsck"].container.log())
    assert report["namespaces"] and not report["counts"]

    [key] = [key for key in release.bucket.keys() if key.count("/") == 2]
    kept = release.bucket.get(key)
    release.bucket.put(key, kept[:-100])
    try:
        pod = release.cluster.job("kvstore-fsck")
        assert pod.until_ended() == 3, pod.describe()
        assert key.split("/")[-1].split(".")[0] in pod.container.log()
    finally:
        release.bucket.put(key, kept)


def test_without_redis_helm_test_fails_and_no_janitor_is_restarted(release: Release) -> None:
    redis, lives = release.redis, [pod.name for pod in release.janitors]
    took = redis.delete()
    assert took < redis.grace_s
    assert redis.container.exits == [0], redis.describe()
    pod = release.cluster.job("kvstore-test")
    assert pod.until_ended() != 0
    [doctor] = pod.init
    assert "problem" in doctor.log(), pod.describe()
    assert "redis" in doctor.log()
    release.cluster.start("kvstore-redis")
    release.cluster.until_ready()
    assert [pod.name for pod in release.janitors] == lives
    for pod in release.janitors:
        assert pod.restarts == 0, pod.describe()
        pod.wait(lambda pod: release.metrics(pod)['kvstore_up{backend="index"}'] == 1)
    # What was stored is still known: the volume holds what Redis wrote.
    assert any(
        value == 8 for name, value in release.metrics(pod).items() if name.startswith("kvstore_blocks{")
    )


def test_a_rollout_with_a_wrong_secret_leaves_the_old_pods_at_work(release: Release) -> None:
    cluster, old = release.cluster, release.janitors
    cluster.remove("Secret", KEYS)
    pod = cluster.another("kvstore")
    pod.wait(
        lambda pod: pod.container.waiting == ("CreateContainerConfigError", f'secret "{KEYS}" not found')
    )

    wrong = release.keys | {"secret-access-key": "wr0ng/" + release.keys["secret-access-key"][6:]}
    cluster.add(secret(KEYS, wrong))
    pod.wait(lambda pod: any("Readiness probe failed" in event for event in pod.container.events))
    assert not pod.ready and pod.restarts == 0
    text = pod.describe()
    assert "payloads" in text and f"s3://{release.bucket.bucket}" in text, text
    assert found_in(text, release) == [] and wrong["secret-access-key"] not in text
    for one in old:
        assert one.ready and fetch(f"http://{one.address}:9464/readyz") == (200, "ok\n")

    pod.delete()
    cluster.add(secret(KEYS, release.keys))
    cluster.another("kvstore").until_ready()
    took = [one.delete() for one in old[:1]]
    assert max(took) < old[0].grace_s
    assert old[0].container.exits == [0], old[0].describe()
    assert "stopped" in old[0].container.log()


def test_settings_that_cannot_be_say_so_in_the_log(release: Release) -> None:
    """What helm can't know to be wrong."""
    late = [{"name": "KVSTORE_KV__MATCH_TTL_S", "value": "1000"}]
    made = release.render({"extraEnv": late}, "bad")
    release.cluster.add(
        *(one for one in made if one["kind"] in ("ConfigMap", "Deployment", "Secret")),
        secret(KEYS, release.keys),
    )
    pod = release.cluster.another("bad-kvstore")
    try:
        pod.wait(lambda pod: pod.container.exits)
        assert pod.container.exits[0] == 2, pod.describe()
        assert "kv.match_ttl_s = 1000" in pod.container.log()
        assert "grace_s" in pod.container.log()
    finally:
        pod.delete()


@pytest.mark.usefixtures("pods")
def test_payloads_on_a_claim_and_redis_with_tls(s3_server: S3Server, tmp_path: Path) -> None:
    """One node: a ReadWriteOnce claim, a janitor that is replaced by ending the old one first."""
    values: dict[str, Any] = {
        "payloads": {"type": "pvc", "s3": {}, "pvc": {"accessModes": ["ReadWriteOnce"]}},
        "janitor": {"readinessProbe": {"periodSeconds": 2}},
        "redis": {"builtIn": {"tls": {"enabled": True, "selfSigned": True}}},
    }
    with Release(tmp_path / "cluster", s3_server, values, name="one") as release:
        config = pick(release.manifests, "ConfigMap", "one-kvstore")["data"]["settings.yaml"]
        assert "rediss://" in config and "file:///var/lib/kvstore" in config
        release.start()
        jobs = [release.cluster.job(f"one-kvstore-{name}") for name in ("test", "fsck")]
        for pod in jobs:
            assert pod.until_ended() == 0, pod.describe()
        [old] = release.cluster.of("one-kvstore")
        inside(old, "touch", "/var/lib/kvstore/written")
        release.cluster.rollout("one-kvstore")
        [new] = release.cluster.of("one-kvstore")
        assert inside(new, "ls", "/var/lib/kvstore/written")
        assert old.container.exits == [0], old.describe()
