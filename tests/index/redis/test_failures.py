"""RedisIndex when something is wrong: the server, the network, the rights, the memory, the URL."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import redis
from pydantic import SecretStr

from kvstore.errors import (
    CapacityExceeded,
    ConfigError,
    DeadlineExceeded,
    KVStoreError,
    NamespaceUnknown,
    PermissionDenied,
    StoreClosed,
    TransientError,
)
from kvstore.index.maintenance import Entry, Usage
from kvstore.index.port import Outcome
from kvstore.index.redis.index import RedisIndex
from kvstore.index.sessions import Allowance, Hint
from kvstore.keys import NO_SALT, Digest, NamespaceId, WriterId, namespace_id, new_segment_id, session_id
from schemas.settings import RedisSettings
from tests.index.contract.admission import use
from tests.index.contract.chains import CREATED_S, chain, namespace, put, put_all, record, served
from tests.index.redis.proxy import LossyProxy
from tests.servers.redis import PATIENT, START_TIMEOUT_S, RedisServer, find_redis_server, patient
from tests.waiting import PATIENCE_S, done, until

pytestmark = pytest.mark.servers

LATER_S = CREATED_S + 3600.0
SHORT = RedisSettings(timeout_s=0.5, connect_timeout_s=0.5)


@pytest.fixture
def index(redis_url: str) -> Iterator[RedisIndex]:
    with RedisIndex.from_settings(redis_url, PATIENT, clock=lambda: CREATED_S) as index:
        yield index


@pytest.fixture
def name(index: RedisIndex) -> NamespaceId:
    return index.register(namespace(), expected_blocks=1000)


@pytest.fixture
def raw(redis_server: RedisServer) -> Iterator[redis.Redis]:
    """The server around the index."""
    with redis.Redis(port=redis_server.port, protocol=2) as client:
        yield client


def test_opening_is_no_io(private_redis: RedisServer) -> None:
    private_redis.kill()
    index = RedisIndex.from_settings(private_redis.url, PATIENT)
    with pytest.raises(TransientError) as caught:
        index.match(namespace_id(namespace()), chain(3))
    assert not isinstance(caught.value, DeadlineExceeded)
    private_redis.start()
    assert index.match(namespace_id(namespace()), chain(3)) == []
    index.close()


def test_a_restarted_server_costs_no_error(private_redis: RedisServer) -> None:
    with RedisIndex.from_settings(private_redis.url, PATIENT) as index:
        digests = chain(3)
        for _ in range(3):
            name = index.register(namespace(), expected_blocks=10)
            put(index, name, digests)
            assert served(index.match(name, digests)) == 3
            private_redis.restart_empty()
            assert index.match(name, digests) == []
            with pytest.raises(NamespaceUnknown):
                index.claim(name, digests, new_segment_id(), 1.0)


def test_a_connection_closed_by_the_server_costs_no_error(
    index: RedisIndex, raw: redis.Redis, name: NamespaceId
) -> None:
    digests = chain(3)
    put(index, name, digests)
    for _ in range(20):
        raw.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        assert served(index.match(name, digests)) == 3
        raw.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        assert [one.usage.blocks for one in index.accounts()] == [3]


def test_one_lost_request_costs_no_error_and_two_cost_one(
    redis_server: RedisServer, index: RedisIndex, name: NamespaceId
) -> None:
    """The server may close a connection between our look at it and our request."""
    digests = chain(3)
    put(index, name, digests)
    with LossyProxy(redis_server.port) as proxy:
        url = f"redis://127.0.0.1:{proxy.port}/0"
        with RedisIndex.from_settings(url, PATIENT) as behind:
            assert served(behind.match(name, digests)) == 3
            before = proxy.connections
            proxy.losses = 1
            assert served(behind.match(name, digests)) == 3
            assert proxy.connections == before + 1
            proxy.losses = 2
            with pytest.raises(TransientError):
                behind.match(name, digests)
            assert proxy.losses == 0
            assert served(behind.match(name, digests)) == 3
        with RedisIndex.from_settings(url, patient(timeout_s=5.0)) as behind:
            assert served(done(lambda: behind.match(name, digests))) == 3
            # Lost late, when a second try would overrun the deadline.
            proxy.losses, proxy.delay_s = 1, 1.0
            with pytest.raises(TransientError):
                behind.match(name, digests)
            assert served(done(lambda: behind.match(name, digests))) == 3


def test_forgotten_scripts_cost_no_error(index: RedisIndex, raw: redis.Redis, name: NamespaceId) -> None:
    digests = chain(3)
    for _ in range(2):
        raw.script_flush()
        segment = put(index, name, digests)
        raw.script_flush()
        assert served(index.match(name, digests)) == 3
        raw.script_flush()
        assert index.evict(name, [segment], delete_after_s=LATER_S, rule="admin") == 1


@pytest.mark.parametrize("verb", ["match", "commit", "ping", "usage", "accounts"])
def test_a_hanging_server_ends_at_the_deadline(private_redis: RedisServer, verb: str) -> None:
    with RedisIndex.from_settings(private_redis.url, SHORT) as index:
        name = done(lambda: index.register(namespace(), expected_blocks=10))
        calls: dict[str, Callable[[], object]] = {
            "match": lambda: index.match(name, chain(3)),
            "commit": lambda: put(index, name, chain(3)),
            "ping": index.ping,
            "usage": lambda: index.usage(name),
            "accounts": index.accounts,
        }
        private_redis.pause()
        for _ in range(2):
            began = time.monotonic()
            with pytest.raises(DeadlineExceeded):
                calls[verb]()
            assert time.monotonic() - began < PATIENCE_S / 2
        private_redis.resume()
        done(calls[verb])


def test_waiting_for_a_connection_ends_at_the_deadline(private_redis: RedisServer) -> None:
    narrow = RedisSettings(timeout_s=0.4, max_connections=1)
    with RedisIndex.from_settings(private_redis.url, narrow) as index:
        done(index.ping)
        private_redis.pause()
        began = time.monotonic()
        with ThreadPoolExecutor(3) as pool:
            for call in [pool.submit(index.ping) for _ in range(3)]:
                with pytest.raises(DeadlineExceeded):
                    call.result()
        assert time.monotonic() - began < PATIENCE_S / 2
        private_redis.resume()
        done(index.ping)


def test_an_answer_after_the_deadline_is_not_taken_for_the_next_one(private_redis: RedisServer) -> None:
    narrow = RedisSettings(timeout_s=0.3, max_connections=1)
    digests = chain(3)
    with RedisIndex.from_settings(private_redis.url, PATIENT) as index:
        name = index.register(namespace(), expected_blocks=10)
        put(index, name, digests)
    with RedisIndex.from_settings(private_redis.url, narrow) as index:
        assert done(lambda: index.usage(name)).blocks == 3
        private_redis.pause()
        with pytest.raises(DeadlineExceeded):
            index.usage(name)
        private_redis.resume()
        assert served(done(lambda: index.match(name, digests))) == 3
        assert done(lambda: index.usage(name)).blocks == 3


def test_a_full_redis_refuses_saves_whole_and_goes_on_serving(
    index: RedisIndex, raw: redis.Redis, name: NamespaceId
) -> None:
    digests = chain(300)
    segments = put_all(index, name, digests, [50] * 4)
    usage, keys = index.usage(name), sorted(raw.keys())
    raw.config_set("maxmemory", 1)
    try:
        for call in (
            lambda: put(index, name, digests, 200, 50),
            lambda: index.commit(name, new_segment_id(), chain(1), record(1), rank=0, ranks=2),
            lambda: index.claim(name, digests, new_segment_id(), 60.0),
            lambda: index.register(namespace("new"), expected_blocks=10),
            lambda: use(index, name, digests),
            index.ping,
        ):
            with pytest.raises(CapacityExceeded):
                call()
        assert (index.usage(name), sorted(raw.keys())) == (usage, keys)
        assert served(index.match(name, digests)) == 200
        assert index.find(name, digests)[199] is not None
        # Making room works.
        assert index.evict(name, segments[3:], delete_after_s=1000.0, rule="admin") == 1
        assert index.cull(name, keep_bytes=0, delete_after_s=1000.0, limit=1, rule="capacity") == [
            segments[2]
        ]
        assert set(index.reapable(name, 1000.0, 10)) == {(segments[2], 1), (segments[3], 1)}
        index.reaped(name, segments)
        assert sum(index.sweep(name, 1000) for _ in range(3)) == 100
        assert index.usage(name) == Usage(usage.nbytes // 2, 2, 100)
    finally:
        raw.config_set("maxmemory", 0)


def test_a_full_redis_is_maintained(index: RedisIndex, raw: redis.Redis, name: NamespaceId) -> None:
    """Whatever makes room or leads to it works; what would keep more is refused whole."""
    digests = chain(300)
    segments = put_all(index, name, digests, [30] * 10)
    index.pin(name, segments[:2], most_bytes=1 << 30)
    index.touch(name, segments[:1], LATER_S)
    index.evict(name, segments[9:], delete_after_s=LATER_S, rule="capacity")
    index.commit(name, new_segment_id(), chain(1, seed="i"), record(1), rank=0, ranks=2)
    told = Outcome(1.0, "r", "match", 300, 270, "absent", 270, digests[270 * 16 :])
    before = _contents(raw)
    raw.config_set("maxmemory", 1)
    try:
        for call in (
            lambda: index.pin(name, segments[2:3], most_bytes=1 << 30),
            lambda: index.tell(name, [told]),
            lambda: index.tell(name, [replace(told, op="load", reason="corrupt")]),
            lambda: index.touch(name, segments, LATER_S + 600),
            lambda: index.register(namespace(), expected_blocks=10),
        ):
            with pytest.raises(CapacityExceeded):
                call()
        assert _contents(raw) == before

        assert index.accounts()[0].usage == index.usage(name)
        # What an operator does to make room is recorded first.
        index.record_operation("quota", "store: 1 B")
        assert [one.verb for one in index.operations(9)] == ["quota"]
        index.set_quota("store", 1)
        assert index.quotas() == {"store": 1}
        raw.zrem(f"kvs:{{{name}}}:lru", segments[5])
        found = index.reconcile(name)
        assert (found.counted, found.mended) == (found.recorded, 1)
        index.cool(name)
        assert index.hottest(name, 5) == [(segments[0], 0.5)]
        assert index.unpin(name, segments[:1]) == 1
        assert index.unlist(name, segments[8:9]) == 1
        assert index.unlink(name, [next(index.entries(name))]) == 1
        gone = index.cull(name, keep_bytes=0, delete_after_s=LATER_S, limit=3, rule="capacity")
        assert len(gone) == 3
        assert len(index.events(name)) == 10 + 1 + 1 + 3
        assert index.invalidate(name) == 5
        assert index.drain(name, delete_after_s=LATER_S, limit=100) == 5
        assert index.drain(name, delete_after_s=LATER_S, limit=100) == 0
        due = [segment for segment, _ in index.reapable(name, LATER_S, 100)]
        assert len(due) == 1 + 3 + 5
        assert index.erase(name, 1000) == "in_use"
        index.reaped(name, due)
        raw.delete(*raw.keys("*:part*"))
        assert index.erase(name, 1000) == "erased"
        index.set_quota("store", None)
        assert raw.keys() == [b"kvs:operations"]
    finally:
        raw.config_set("maxmemory", 0)


def _contents(raw: redis.Redis) -> dict[bytes, bytes]:
    return {key: raw.dump(key) for key in raw.keys()}


def test_a_replica_is_read_and_not_written(index: RedisIndex, raw: redis.Redis, name: NamespaceId) -> None:
    digests = chain(3)
    put(index, name, digests)
    raw.replicaof("127.0.0.1", "1")
    try:
        assert served(index.match(name, digests)) == 3
        for call in (index.ping, lambda: put(index, name, digests, 1)):
            with pytest.raises(TransientError, match=r"(?i)read.?only"):
                call()
    finally:
        raw.replicaof("NO", "ONE")


def test_credentials_and_rights(private_redis: RedisServer) -> None:
    with redis.Redis(port=private_redis.port, protocol=2) as raw:
        raw.execute_command(
            "ACL", "SETUSER", "reader", "on", ">reader-secret", "~kvs:*", "+@read", "+@scripting"
        )
        raw.execute_command("ACL", "SETUSER", "outsider", "on", ">outsider-secret", "~other:*", "+@all")
        raw.config_set("requirepass", "owner-secret")
    name, digests = namespace_id(namespace()), chain(3)

    def opened(user: str | None, password: str | None, url: str = private_redis.url) -> RedisIndex:
        secret = SecretStr(password) if password else None
        return RedisIndex.from_settings(url, patient(username=user, password=secret))

    owner_url = private_redis.url.replace("redis://", "redis://:owner-secret@")
    with opened(None, "owner-secret") as index:
        index.register(namespace(), expected_blocks=10)
        put(index, name, digests)
        index.ping()
    with opened(None, None, owner_url) as index:
        assert served(index.match(name, digests)) == 3
    with opened("reader", "reader-secret") as index:
        assert served(index.match(name, digests)) == 3
    for user, password, url in [
        (None, None, private_redis.url),
        (None, "wrong-secret", private_redis.url),
        (None, "wrong-secret", owner_url),
        ("reader", "reader-secret", private_redis.url),
        ("outsider", "outsider-secret", private_redis.url),
        ("nobody", "nobody-secret", private_redis.url),
    ]:
        with opened(user, password, url) as index:
            with pytest.raises(PermissionDenied) as caught:
                index.ping()
            with pytest.raises(PermissionDenied):
                put(index, name, digests)
            error: BaseException | None = caught.value
            while error is not None:
                assert "secret" not in f"{error!r} {error}"
                error = error.__cause__
            assert "secret" not in repr(index)


def test_settings_win_over_the_url() -> None:
    given_ = RedisSettings(
        username="u", password=SecretStr("p"), timeout_s=0.25, connect_timeout_s=0.5, max_connections=3
    )
    index = RedisIndex.from_settings("rediss://x:y@example.org:7000/5", given_)
    pool = index._client._first.connection_pool
    assert issubclass(pool.connection_class, redis.SSLConnection)
    assert pool.max_connections == 3
    options = pool.connection_kwargs
    wanted = {
        "host": "example.org", "port": 7000, "db": 5, "username": "u", "password": "p",
        "socket_timeout": 0.25, "socket_connect_timeout": 0.5, "protocol": 2, "decode_responses": False,
        "ssl_cert_reqs": "required", "ssl_check_hostname": True,
    }  # fmt: skip
    assert {key: options[key] for key in wanted} == wanted
    assert repr(index) == "RedisIndex(example.org:7000/5)"
    index.close()


@pytest.mark.parametrize(
    "url",
    [
        "redis://user:hidden@host:port/0",
        "redis://user:hid/den@host:1/0",
        "http://hidden@host",
        "redis://host:1/0?password=hidden",
        "redis+sentinel://user:hidden@host:1/0",
        "redis+sentinel://user:hid@den@host:port/m/0",
    ],
)
def test_a_url_that_makes_no_sense_is_a_config_error(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RedisIndex.from_settings(url, RedisSettings())
    assert not any(part in str(caught.value) for part in ("hid", "den"))


def test_a_missing_ca_file_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"redis\.tls_ca"):
        RedisIndex.from_settings("rediss://localhost:1/0", RedisSettings(tls_ca="/nonexistent/ca.pem"))


def test_a_unix_socket() -> None:
    with tempfile.TemporaryDirectory(prefix="kvs") as folder:  # a socket's path is short, tmp_path may not be
        path = f"{folder}/s"
        command = [find_redis_server(), "--port", "0", "--unixsocket", path, "--save", "", "--dir", folder]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
            try:
                with RedisIndex.from_settings(f"unix://{path}?db=2", PATIENT) as index:
                    _until_it_answers(index)
                    assert repr(index) == f"RedisIndex({path}/2)"
            finally:
                server.kill()
            with pytest.raises(TransientError):
                index.ping()


def _until_it_answers(index: RedisIndex) -> None:
    until = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            return index.ping()
        except TransientError:
            if time.monotonic() > until:
                raise
            time.sleep(0.01)


def test_closed_is_closed(index: RedisIndex, name: NamespaceId) -> None:
    index.close()
    index.close()
    with pytest.raises(StoreClosed):
        index.match(name, chain(1))


def test_a_forked_child_has_connections_of_its_own(index: RedisIndex, name: NamespaceId) -> None:
    digests = chain(3)
    put(index, name, digests)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if all(served(index.match(name, digests)) == 3 for _ in range(200)) else 2
        finally:
            os._exit(code)
    assert all(served(index.match(name, digests)) == 3 for _ in range(200))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_every_error_is_of_the_tree(private_redis: RedisServer) -> None:
    """Whatever a server answers, callers meet KVStoreError only."""
    with RedisIndex.from_settings(private_redis.url, PATIENT) as index:
        name = index.register(namespace(), expected_blocks=10)
        with redis.Redis(port=private_redis.port, protocol=2) as raw:
            outcomes: list[Any] = []
            for part in PARTS:
                raw.flushall()
                index.register(namespace(), expected_blocks=10)
                raw.delete(f"kvs:{{{name}}}:{part}")
                raw.lpush(f"kvs:{{{name}}}:{part}", "not what it should be")
                outcomes += [_outcome(index, name, verb) for verb in VERBS]
            assert all(o is None or issubclass(o, KVStoreError) for o in outcomes)
            assert any(outcomes)


SESSION = session_id(NO_SALT, "chat")
PARTS = (
    *("meta", "segs", "lru", "pins", "trash", "b:0", "hot"),
    *("events", "outcomes", "seen", "ghosts", "ghost"),
    *("writers", "owner", "kept", "retained", "sessions:0", "sessions:1"),
)

VERBS: list[Callable[[RedisIndex, NamespaceId], object]] = [
    lambda index, name: index.match(name, chain(3)),
    lambda index, name: index.find(name, chain(3)),
    lambda index, name: index.claim(name, chain(3), new_segment_id(), 1.0),
    lambda index, name: put(index, name, chain(3)),
    lambda index, name: index.touch(name, [new_segment_id()], LATER_S),
    lambda index, name: index.session(
        name, SESSION, [new_segment_id()], LATER_S, Hint(retain_s=9e9), allowance=Allowance(9, 9, 9)
    ),
    lambda index, name: index.session(name, SESSION, [], LATER_S, Hint(end=True)),
    lambda index, name: index.owned(name, SESSION),
    lambda index, name: index.verdicts(name),
    lambda index, name: index.judge(name, WriterId(bytes(8)), "alike", by=WriterId(bytes(8)), stands=True),
    lambda index, name: list(index.sessions(name)),
    lambda index, name: index.find_sessions(name, [SESSION]),
    lambda index, name: index.owners(name, [new_segment_id()]),
    lambda index, name: index.retained(name),
    lambda index, name: index.expire(name),
    lambda index, name: index.evict(name, [new_segment_id()], delete_after_s=LATER_S, rule="admin"),
    lambda index, name: index.cull(name, keep_bytes=0, delete_after_s=LATER_S, limit=5, rule="capacity"),
    lambda index, name: index.reapable(name, LATER_S, 5),
    lambda index, name: index.sweep(name, 5),
    lambda index, name: list(index.segments(name)),
    lambda index, name: index.usage(name),
    lambda index, name: index.accounts(),
    lambda index, name: index.namespaces(),
    lambda index, name: index.get(name, [new_segment_id()]),
    lambda index, name: index.states(name, [new_segment_id()]),
    lambda index, name: index.sample(name, 3),
    lambda index, name: list(index.entries(name)),
    lambda index, name: index.order(name, 3),
    lambda index, name: index.hottest(name, 3),
    lambda index, name: index.reaped(name, [new_segment_id()]),
    lambda index, name: index.pin(name, [new_segment_id()], most_bytes=1),
    lambda index, name: index.unpin(name, [new_segment_id()]),
    lambda index, name: index.unlist(name, [new_segment_id()]),
    lambda index, name: index.unlink(name, [Entry(Digest(bytes(16)), new_segment_id(), 0)]),
    lambda index, name: index.cool(name),
    lambda index, name: index.events(name),
    lambda index, name: index.outcomes(name, 3),
    lambda index, name: index.seen(name),
    lambda index, name: index.ghosts(name),
    lambda index, name: index.tell(name, [Outcome(1.0, "r", "match", 1, 0, "absent", 0, bytes(16))]),
    lambda index, name: index.drain(name, delete_after_s=LATER_S, limit=5),
    lambda index, name: index.invalidate(name),
    lambda index, name: index.erase(name, 5),
    # It replaces what makes no sense, so that the others would find nothing to say.
    lambda index, name: index.reconcile(name),
]


def _outcome(
    index: RedisIndex, name: NamespaceId, verb: Callable[[RedisIndex, NamespaceId], object]
) -> type[BaseException] | None:
    try:
        verb(index, name)
    except Exception as exc:
        return type(exc)
    return None


def test_a_name_that_is_not_found_in_time(
    private_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is connected late is closed: nobody would ever use it."""
    real, found = socket.getaddrinfo, threading.Event()
    questions = 0

    def slowly(host: str, *args: Any, **options: Any) -> Any:
        if host == "redis.invalid":
            found.wait(PATIENCE_S)
            host = "127.0.0.1"
        return real(host, *args, **options)

    def accepted(kind: str) -> int:
        nonlocal questions
        questions += 1
        told = private_redis.command("INFO").decode()
        return int(re.search(rf"{kind}:(\d+)", told)[1])  # type: ignore[index]

    monkeypatch.setattr(socket, "getaddrinfo", slowly)
    before = accepted("total_connections_received") - questions
    url = f"redis://redis.invalid:{private_redis.port}/0"
    with RedisIndex.from_settings(url, RedisSettings(timeout_s=0.2, connect_timeout_s=0.2)) as index:
        began = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            index.ping()
        assert time.monotonic() - began < PATIENCE_S / 2
        found.set()
        # The late one comes, beside those of these questions, and goes.
        until(lambda: accepted("total_connections_received") - questions == before + 1)
        until(lambda: accepted("connected_clients") == 1)
