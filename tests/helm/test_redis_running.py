"""The chart's Redis as rendered, in a process: its users may do what the store does and nothing else, it
keeps the index over a crash, changes passwords and certificates while it runs, and says when it is full."""

from __future__ import annotations

import base64
import contextlib
import os
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from kvstore.errors import CapacityExceeded, PermissionDenied, TransientError
from kvstore.index.redis.index import RedisIndex
from kvstore.keys import NamespaceId
from schemas.settings import JournalSettings, RedisSettings
from tests.admin.conftest import Admin, fill
from tests.admin.conftest import admin as admin
from tests.helm.chart import Manifest, pick, render
from tests.helm.redis_release import NAME, RedisRelease
from tests.helm.running import missing
from tests.index.contract.chains import chain, namespace, put, put_all, served
from tests.index.contract.whole import FullIndexConformance
from tests.waiting import PATIENCE_S, until

pytestmark = [pytest.mark.servers, pytest.mark.skipif(missing() is not None, reason=missing() or "")]

#: One test of the contract in so many runs here; 1 is all of it.
CONFORMANCE_EVERY = int(os.environ.get("CHART_CONFORMANCE_EVERY", "6"))
_PLAIN = {"redis": {"builtIn": {"auth": {"reader": {"enabled": True}}}}}
_TLS = {
    "redis": {
        "builtIn": {
            "tls": {"enabled": True, "selfSigned": True},
            # So little that a test can fill it.
            "resources": {"limits": {"memory": "100Mi"}},
            # So slow that a test can look at it loading, for as long as it takes.
            "config": {"loading-process-events-interval-bytes": 1024, "key-load-delay": 20_000},
        }
    }
}


def _reachable(folder: Path) -> Path:
    """pytest's folders are their owner's alone, and the pods' user has to pass."""
    for one in (folder, *folder.parents[:2]):
        one.chmod(0o711)
    return folder


@pytest.fixture(scope="module")
def _plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisRelease]:
    with RedisRelease(_reachable(tmp_path_factory.mktemp("plain")), _PLAIN, "plain") as release:
        yield release


@pytest.fixture(scope="module")
def _tls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisRelease]:
    with RedisRelease(_reachable(tmp_path_factory.mktemp("tls")), _TLS, "tls") as release:
        yield release


@pytest.fixture
def plain(_plain: RedisRelease) -> RedisRelease:
    """Without TLS, with a reader; empty."""
    return _emptied(_plain)


@pytest.fixture
def tls(_tls: RedisRelease) -> RedisRelease:
    """With TLS, and little memory; empty."""
    return _emptied(_tls)


def _emptied(release: RedisRelease) -> RedisRelease:
    with release.raw() as client:
        client.flushall()
    release.denied()
    return release


# What users may do


class TestConformance(FullIndexConformance):
    """The contract as the chart's user, who is denied nothing that it takes."""

    @pytest.fixture
    def index(self, plain: RedisRelease) -> Iterator[RedisIndex]:
        self.release = plain
        with self.reopen() as index:
            yield index
        assert plain.denied() == []

    def reopen(self) -> RedisIndex:
        return self.configured()

    def configured(
        self, *, journal: JournalSettings | None = None, cost_aware: bool = True, by: str = ""
    ) -> RedisIndex:
        return self.release.index(journal=journal or JournalSettings(), cost_aware=cost_aware, by=by)

    def miscount(self, name: NamespaceId, nbytes: int) -> None:
        with self.release.raw() as client:
            client.hincrby(f"kvs:{{{name}}}:meta", "bytes", nbytes)


for _name in dir(TestConformance):
    if _name.startswith("test_") and crc32(_name.encode()) % CONFORMANCE_EVERY:
        setattr(TestConformance, _name, None)


_LOOKING = (
    "status",
    "stats",
    "top",
    "ls",
    "show KV",
    "namespaces",
    "namespaces diff KV EC",
    "du",
    "events",
    "operations",
    "quota",
    "pin",
    "advise",
    "explain --digest 00112233445566778899aabbccddeeff",
    "evict --keep 1KiB",
    "invalidate KV",
    "drop KV",
    "gc",
    "rebuild --dry-run",
)
_CHANGING = (
    "doctor",
    "pin --namespace KV --depth 1 --apply",
    "unpin SEGMENT --apply",
    "quota set store 1GiB --apply",
    "quota clear store --apply",
    "export --to ARCHIVE KV",
    "import ARCHIVE",
    "evict --keep 1KiB --apply",
    "gc --apply",
    "fsck --apply",
    "rebuild",
    "invalidate KV --apply",
    "drop EC --now --apply",
)


def test_every_verb_works_as_the_charts_user(
    plain: RedisRelease, admin: Admin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled, settings = _filled(plain, tmp_path, monkeypatch)
    for line in (*_LOOKING, *_CHANGING):
        ran = admin(*(filled.get(word, word) for word in line.split()), "--settings", str(settings))
        assert ran.code == 0, f"{line}: {ran.out}{ran.err}"
        assert plain.denied() == [], line


def test_the_reader_looks_and_changes_nothing(
    plain: RedisRelease, admin: Admin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled, settings = _filled(plain, tmp_path, monkeypatch)
    monkeypatch.setenv("KVSTORE_REDIS__USERNAME", "reader")
    monkeypatch.setenv("KVSTORE_REDIS__PASSWORD", plain.secret("reader-password"))
    for line in _LOOKING:
        ran = admin(*(filled.get(word, word) for word in line.split()), "--settings", str(settings))
        assert ran.code == 0, f"{line}: {ran.out}{ran.err}"
        assert plain.denied() == [], line
    with plain.raw() as client:
        before = {key: client.dump(key) for key in client.scan_iter()}
    for line in ("evict --keep 1KiB --apply", "quota set store 1GiB --apply", "invalidate KV --apply"):
        ran = admin(*(filled.get(word, word) for word in line.split()), "--settings", str(settings))
        assert ran.code != 0, line
        assert plain.denied(), line
    with plain.raw() as client:
        assert {key: client.dump(key) for key in client.scan_iter()} == before


def _filled(
    release: RedisRelease, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[str, str], Path]:
    """A cache with something in it: what its parts are called, and the file with its settings."""
    monkeypatch.setenv("KVSTORE_REDIS__USERNAME", "kvstore")
    monkeypatch.setenv("KVSTORE_REDIS__PASSWORD", release.secret("password"))
    if ca := release.settings().redis.tls_ca:
        monkeypatch.setenv("KVSTORE_REDIS__TLS_CA", ca)
    filled = fill(folder / "cache", release.settings().index_url)
    settings = release.settings_file(folder, f"file://{folder / 'cache'}")
    places = {"KV": filled.kv_id, "EC": filled.ec_id, "ARCHIVE": str(folder / "archive.tar")}
    return places | {"SEGMENT": filled.payload_files()[0].name.partition(".")[0]}, settings


_FORBIDDEN = (
    "FLUSHALL",
    "FLUSHDB",
    "KEYS *",
    "SCAN 0",
    "RANDOMKEY",
    "DBSIZE",
    "CONFIG SET maxmemory 0",
    "CONFIG REWRITE",
    "ACL LIST",
    "ACL SETUSER kvstore allkeys",
    "CLIENT LIST",
    "CLIENT KILL TYPE normal",
    "MONITOR",
    "SHUTDOWN NOSAVE",
    "SCRIPT FLUSH",
    "FUNCTION LIST",
    "DEBUG SLEEP 0",
    "BGREWRITEAOF",
    "REPLICAOF NO ONE",
    "MODULE LIST",
    "SUBSCRIBE a",
    "PUBLISH a b",
    "MIGRATE h 1 kvs:ns 0 1",
    "DUMP kvs:ns",
    "GET other",
    "SET other 1",
    "RENAME kvs:ns other",
    "EVAL return(redis.call('FLUSHALL')) 0",
    "EVAL return(redis.call('SET','other','1')) 0",
)
_DENIAL = r"permission|NOPERM|ACL|can't run|can't access|not allowed"


@pytest.mark.parametrize("user", ["kvstore", "reader"])
def test_nothing_else_may_be_done(plain: RedisRelease, user: str) -> None:
    password = {"kvstore": "password", "reader": "reader-password"}[user]
    with plain.raw(plain.user(user, plain.secret(password))) as client:
        for line in _FORBIDDEN:
            with pytest.raises(redis.ResponseError, match=_DENIAL):
                client.execute_command(*line.split())  # type: ignore[no-untyped-call]


def test_strangers_are_not_answered(plain: RedisRelease) -> None:
    stranger = redis.Redis(host=plain.host, socket_timeout=PATIENCE_S, retry=Retry(NoBackoff(), 0))
    with stranger, pytest.raises(redis.AuthenticationError):
        stranger.ping()
    for user in (plain.user("kvstore", "wrong"), plain.user("default", ""), plain.user("keeper", "")):
        with plain.index(user) as index, pytest.raises(PermissionDenied):
            index.ping()


# What it keeps, and in how much room


def test_buckets_have_the_compact_encoding(plain: RedisRelease) -> None:
    """With as many blocks as the namespace was made for, where chance fills some buckets beyond the mean."""
    with plain.index() as index, plain.raw() as client:
        name = index.register(namespace(), expected_blocks=8192)
        put_all(index, name, chain(8192), [1024] * 8)
        buckets = list(client.scan_iter(f"kvs:{{{name}}}:b:*", count=1000))
        assert max(client.hlen(key) for key in buckets) > 64
        assert {client.object("encoding", key) for key in buckets} == {b"listpack"}
        assert index.warnings() == []


def test_a_crash_keeps_the_index(plain: RedisRelease) -> None:
    with plain.index() as index:
        name = index.register(namespace(), expected_blocks=1000)
        segments = put_all(index, name, chain(400), [100] * 4)
        index.pin(name, segments[:1], most_bytes=1 << 30)
        before = index.match(name, chain(400)), index.usage(name), index.order(name, 10)
        with plain.raw() as client:
            # A crash may lose what a slow disk has not taken yet, by default: so this waits for the disk.
            client.config_set("appendfsync", "always")
            client.set("last", "")
        plain.kill()
        assert (index.match(name, chain(400)), index.usage(name), index.order(name, 10)) == before
        assert plain.pod.restarts == 1


def test_a_full_redis_refuses_and_serves(
    tls: RedisRelease, admin: Admin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, settings = _filled(tls, tmp_path, monkeypatch)
    with tls.index() as index:
        name = index.register(namespace(), expected_blocks=1000)
        put(index, name, chain(100), 0, 50)
        for size in (1 << 20, 1 << 14, 1 << 10):
            with tls.raw() as client, pytest.raises(redis.OutOfMemoryError):
                for number in range(1000):
                    client.set(f"filler {size} {number}", bytes(size))
        # What connections have buffered counts as well, and is free again.
        with pytest.raises(CapacityExceeded):
            for number in range(1000):
                put(index, name, chain(50, seed=str(number)))
        assert served(index.match(name, chain(100))) == 50
        ran = admin("doctor", "--settings", str(settings))
        assert ran.code != 0
        assert "Redis is full" in ran.out, ran.out
        with tls.raw() as client:
            client.delete(*client.scan_iter("filler *", count=1000))
            assert client.info("memory")["maxmemory"] == (100 << 20) * 35 // 100
        put(index, name, chain(100), 50, 50)
        assert served(index.match(name, chain(100))) == 100


def test_loading_is_alive_and_not_ready(tls: RedisRelease) -> None:
    with tls.raw() as client:
        client.mset({f"key {i}": os.urandom(200) for i in range(2500)} | {"key": bytes(200)})
        client.bgrewriteaof()
        until(lambda: not client.info("persistence")["aof_rewrite_in_progress"])
    tls.cluster.replace(tls.pod)

    def is_loading() -> bool:
        with contextlib.suppress(AssertionError):
            return "LOADING" in tls.execute("sh", "/etc/redis/cli.sh", "PING").stdout
        return False

    until(is_loading)
    alive, ready = (tls.execute("sh", f"/etc/redis/{name}.sh") for name in ("alive", "ready"))
    assert is_loading()
    assert (alive.returncode, ready.returncode) == (0, 1)
    assert not tls.pod.ready
    with tls.raw() as client:
        client.config_set("key-load-delay", 0)
    tls.pod.until_ready()
    assert tls.pod.restarts == 0
    assert tls.execute("sh", "/etc/redis/ready.sh").returncode == 0
    with tls.raw() as client:
        assert client.get("key") == bytes(200)


# Passwords and certificates


def test_a_password_changes_while_engines_run(plain: RedisRelease) -> None:
    old, new = plain.secret("password"), "with a space, a ü and a\n newline"
    running, late = plain.index(), plain.user("kvstore", old)
    with running:
        running.ping()
        plain.patch({"password": new, "previous-password": old})
        assert _reloaded(plain) == "users: OK\n"
        running.ping()
        for user in (late, plain.user("kvstore", new)):
            with plain.index(user) as index:
                index.ping()
        plain.patch({"previous-password": None})
        assert _reloaded(plain) == "users: OK\n"
        with plain.index(late) as index, pytest.raises(PermissionDenied):
            index.ping()
        with plain.index() as index:
            index.ping()
        # An empty password would let everybody in who knows that it is empty.
        plain.patch({"password": ""})
        done = plain.execute("sh", "/etc/redis/reload.sh")
        assert (done.returncode, "no password for user kvstore" in done.stderr) == (1, True)
        plain.patch({"password": new})
        assert plain.execute("sh", "/etc/redis/ready.sh").returncode == 0


def _reloaded(release: RedisRelease) -> str:
    done = release.execute("sh", "/etc/redis/reload.sh")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_no_password_stands_where_it_can_be_seen(plain: RedisRelease) -> None:
    seen = plain.execute(
        "sh", "-c", "cat /run/redis/users.acl; cat /proc/[0-9]*/cmdline /proc/1/environ"
    ).stdout
    seen += "".join(str(one) for one in plain.manifests if one["kind"] != "Secret")
    for key in ("password", "reader-password"):
        assert plain.secret(key) not in seen
    assert "aclfile" in seen


def test_tls_is_all_that_is_spoken(tls: RedisRelease, tmp_path: Path) -> None:
    with tls.index() as index:
        assert index.warnings() == []
        name = index.register(namespace(), expected_blocks=1000)
        put_all(index, name, chain(400), [100] * 4)
        assert served(index.match(name, chain(400))) == 400
    plain = RedisIndex.from_settings(f"redis://{tls.host}:6379/0", tls.settings().redis)
    with plain, pytest.raises(TransientError):
        plain.ping()
    # Another authority's word is worth nothing.
    other = tmp_path / "other.crt"
    made = render({"payloads": {"s3": {"bucket": "my-bucket"}}, **_TLS}, name="other")
    other.write_bytes(_decoded(made, "other-kvstore-redis-tls", "ca.crt"))
    with tls.index(_trusting(tls.settings().redis, other)) as index, pytest.raises(TransientError):
        index.ping()


def test_a_certificate_changes_while_it_runs(tls: RedisRelease, tmp_path: Path) -> None:
    before = tls.settings().redis
    first = _served_certificate(tls)
    made = render({"payloads": {"s3": {"bucket": "my-bucket"}}, **_TLS}, namespace="tls", kube="1.33.0")
    fresh = {key: _decoded(made, f"{NAME}-tls", key).decode() for key in ("tls.crt", "tls.key", "ca.crt")}
    with tls.index(before) as running:
        running.ping()
        tls.patch(fresh, f"{NAME}-tls")
        assert _reloaded(tls) == "users: OK\ncertificate: OK\n"
        # The kubelet brings the authority to engines as well, in the file that each connection reads.
        tls.settings()
        running.ping()
    assert _served_certificate(tls) != first
    with tls.index() as index:
        index.ping()
    assert tls.execute("sh", "/etc/redis/ready.sh").returncode == 0


def test_a_renewed_certificate_is_taken_over_by_itself(tls: RedisRelease) -> None:
    """By the probe of liveness, which a certificate that can't be read doesn't fail."""
    name, values = f"{NAME}-tls", {"payloads": {"s3": {"bucket": "my-bucket"}}, **_TLS}
    first, made = _served_certificate(tls), render(values, namespace="tls", kube="1.32.0")
    fresh = {key: _decoded(made, name, key).decode() for key in ("tls.crt", "tls.key", "ca.crt")}
    before = {key: tls.secret(key, name) for key in fresh}
    tls.patch(fresh | {"tls.key": before["tls.key"]}, name)
    assert tls.execute("sh", "/etc/redis/alive.sh").returncode == 0
    tls.patch(before, name)
    assert _served_certificate(tls) == first
    tls.patch(fresh, name)
    assert tls.execute("sh", "/etc/redis/alive.sh").returncode == 0
    assert _served_certificate(tls) not in (None, first)
    with tls.index() as index:
        index.ping()


def _served_certificate(release: RedisRelease) -> bytes | None:
    context = ssl.create_default_context(cafile=release.settings().redis.tls_ca)
    with socket.create_connection((release.host, 6379), 5) as plain:
        with context.wrap_socket(plain, server_hostname=release.host) as connection:
            return connection.getpeercert(binary_form=True)


def _trusting(settings: RedisSettings, authority: Path) -> RedisSettings:
    return settings.model_copy(update={"tls_ca": str(authority)})


def _decoded(manifests: list[Manifest], name: str, key: str) -> bytes:
    return base64.b64decode(pick(manifests, "Secret", name)["data"][key])


def test_it_ends_in_order(_tls: RedisRelease) -> None:
    """SIGTERM reaches the server, which syncs its file, long before the kubelet would lose patience."""
    pod = _tls.pod
    with _tls.raw() as client:
        client.set("last", "words")
    assert pod.delete() < pod.grace_s
    assert pod.container.exits == [0]
    assert "fsync" in pod.container.log()


def test_another_user_goes_on_with_the_same_volume(tmp_path: Path) -> None:
    """Engines' user is another one, and so is the pods': what the old one wrote is the volume's group's."""
    with RedisRelease(_reachable(tmp_path), {}, namespace="another") as release:
        with release.raw() as client:
            client.set("kvs:x", "kept")
        values = {"payloads": {"s3": {"bucket": "my-bucket"}}, "podSecurityContext": {"runAsUser": 2000}}
        release.cluster.add(pick(render(values, namespace="another"), "StatefulSet"))
        release.cluster.replace(release.pod).until_ready()
        with release.raw() as client:
            assert client.get("kvs:x") == b"kept"
            client.set("kvs:y", "written")
