"""The chart's pods, as rendered, at work: what neither rendering nor a schema shows."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.helm.chart import pick, render
from tests.helm.running import GET, Pods
from tests.waiting import until

pytestmark = [pytest.mark.servers, pytest.mark.slow]

NAME, REDIS = "cache-kvstore", "cache-kvstore-redis"
VALUES: dict[str, Any] = {
    "payloads": {"type": "pvc"},
    "redis": {
        "builtIn": {"auth": {"reader": {"enabled": True}}, "tls": {"enabled": True, "selfSigned": True}}
    },
}


class Release:
    """`helm install cache`: a Redis with TLS and a janitor."""

    def __init__(self, pods: Pods) -> None:
        self.pods = pods
        self.redis = pods.start("StatefulSet", REDIS).until_ready()
        self.janitor = pods.start("Deployment", NAME).until_ready()

    def ask(self, *command: str, user: str = "kvstore", password: str = "") -> str:
        """What Redis answers to a client that checks its certificate and host."""
        password = password or self.pods.secret(REDIS, "password")
        words = [
            "redis-cli",
            "--tls",
            "--cacert",
            "/run/secrets/redis-tls/ca.crt",
            "-h",
            f"{REDIS}.inference.svc",
        ]
        done = self.redis.execute(*words, "--no-auth-warning", "--user", user, "--pass", password, *command)
        return (done.stdout + done.stderr).strip()

    def reload(self) -> str:
        done = self.redis.execute("sh", "/etc/redis/reload.sh")
        return done.stdout + done.stderr


@pytest.fixture(scope="module")
def release(pods: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Release]:
    with Pods(tmp_path_factory.mktemp("release") / "pods", render(VALUES)) as made:
        yield Release(made)


def test_the_janitor_is_ready_and_tells_no_secret(release: Release) -> None:
    for host in (NAME, f"{NAME}.inference.svc"):
        metrics = release.janitor.execute("python", "-c", GET, f"http://{host}:9464/metrics").stdout
        assert 'kvstore_up{backend="index"} 1.0' in metrics
        assert 'kvstore_up{backend="payloads"} 1.0' in metrics
    logs = release.janitor.log() + release.redis.log()
    looked = "cat /run/redis/users.acl; cat /proc/[0-9]*/cmdline /proc/1/environ"
    logs += release.redis.execute("sh", "-c", looked).stdout
    assert "user kvstore on #" in logs
    for key in ("password", "reader-password"):
        assert release.pods.secret(REDIS, key) not in logs


@pytest.mark.parametrize(
    ("kind", "name"), [("Pod", "test"), ("CronJob", "fsck"), ("CronJob", "gc")], ids=["test", "fsck", "gc"]
)
def test_jobs_pass(release: Release, kind: str, name: str) -> None:
    code, log = release.pods.run(kind, f"{NAME}-{name}")
    assert code == 0, log
    assert release.pods.secret(REDIS, "password") not in log
    if name == "fsck":
        assert json.loads(log)["counts"] == []


def test_users_are_those_of_the_secret(release: Release) -> None:
    assert release.ask("PING") == "PONG"
    reader = release.pods.secret(REDIS, "reader-password")
    assert "NOPERM" in release.ask("SET", "kvs:x", "1", user="reader", password=reader)
    for line in ("FLUSHALL", "CONFIG SET maxmemory 0", "ACL LIST", "GET other"):
        assert "NOPERM" in release.ask(*line.split()), line
    for user in ("kvstore", "default", "keeper"):
        assert "WRONGPASS" in release.ask("PING", user=user, password="wrong")
    plain = release.redis.execute("redis-cli", "-h", "127.0.0.1", "PING")
    assert "PONG" not in plain.stdout, "it speaks without TLS"


def test_a_password_changes_while_engines_run(release: Release) -> None:
    old, new = release.pods.secret(REDIS, "password"), "with a space, a ü and a\n newline"
    release.pods.patch(REDIS, {"password": new, "previous-password": old})
    assert release.reload() == "users: OK\ncertificate: OK\n"
    assert release.ask("PING", password=old) == release.ask("PING", password=new) == "PONG"
    release.pods.patch(REDIS, {"previous-password": None})
    assert "users: OK" in release.reload()
    assert "WRONGPASS" in release.ask("PING", password=old) and release.ask("PING", password=new) == "PONG"
    # An empty password would let everybody in who knows that it is empty.
    release.pods.patch(REDIS, {"password": ""})
    assert "no password for user kvstore" in release.reload()
    release.pods.patch(REDIS, {"password": old})
    assert "users: OK" in release.reload()
    assert release.redis.passes("readiness")


def test_a_renewed_certificate_is_taken_over_by_itself(release: Release) -> None:
    """By the probe of liveness, which a certificate that can't be read doesn't fail."""
    name = f"{REDIS}-tls"
    # Another render makes another one.
    held = pick(render(VALUES, kube="1.33.0"), "Secret", name)["data"]
    made = {key: base64.b64decode(text).decode() for key, text in held.items()}
    before = {key: release.pods.secret(name, key) for key in made}
    served = "openssl s_client -connect 127.0.0.1:6379 < /dev/null 2> /dev/null | openssl x509 -noout -serial"

    def serial() -> str:
        return release.redis.execute("sh", "-c", served).stdout

    first = serial()
    release.pods.patch(name, made | {"tls.key": before["tls.key"]})
    assert release.redis.passes("liveness") and serial() == first != ""
    release.pods.patch(name, made)
    assert release.redis.passes("liveness") and serial() != first
    assert release.ask("PING") == "PONG"


def test_what_loads_is_alive_and_not_ready(release: Release) -> None:
    """And a server that says nothing is neither."""
    files = release.pods.objects["ConfigMap", REDIS]["data"]
    kept = files["cli.sh"]
    for said, alive in (("LOADING Redis is loading", True), ("BUSY running a script", True), ("", False)):
        files["cli.sh"] = f"echo '{said}'"
        release.redis.refresh()
        assert (release.redis.passes("liveness"), release.redis.passes("readiness")) == (alive, False)
    files["cli.sh"] = kept
    release.redis.refresh()
    assert release.redis.passes("liveness") and release.redis.passes("readiness")


def test_a_crash_keeps_the_index(release: Release) -> None:
    assert release.ask("SET", "kvs:x", "kept") == "OK"
    until(lambda: "aof_buffer_length:0" in release.ask("INFO", "persistence"))
    release.redis.kill()
    release.redis = release.pods.start("StatefulSet", REDIS).until_ready()
    assert release.ask("GET", "kvs:x") == "kept"


def test_without_redis_helm_test_fails_and_the_janitor_lives(release: Release) -> None:
    assert release.redis.end() == 0, release.redis.log()
    code, log = release.pods.run("Pod", f"{NAME}-test")
    assert code != 0 and "problem" in log and "redis" in log
    assert release.janitor.passes("liveness")
    assert release.janitor.end() == 0 and "stopped" in release.janitor.log()
