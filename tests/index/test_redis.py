"""RedisIndex on a real redis-server: the contract, the schema, and what becomes of failures."""

from __future__ import annotations

import os
import random
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from pydantic import SecretStr

from kvstore.conformance.chains import CREATED_S, chain, namespace, part_of, put, put_all, record, served
from kvstore.errors import (
    CapacityExceeded,
    Closed,
    ConfigError,
    DeadlineExceeded,
    KVStoreError,
    NamespaceUnknown,
    PermissionDenied,
    TransientError,
)
from kvstore.index.redis import RedisIndex, bucket_bits
from kvstore.keys import NamespaceId, SegmentId, canonical_json, namespace_id, new_segment_id
from kvstore.ports import CommitState, Index, Usage
from kvstore.testing import CatalogueConformance, IndexConformance
from schemas.settings import RedisSettings
from tests.index.proxy import LossyProxy
from tests.index.test_walk import Block, World, worlds
from tests.servers import START_TIMEOUT_S, RedisServer, find_redis_server

pytestmark = pytest.mark.servers

LATER_S = CREATED_S + 3600.0
SHORT = RedisSettings(timeout_s=0.3, connect_timeout_s=0.3)
GOLDEN = Path(__file__).parent / "golden" / "redis_schema.txt"


class TestRedisIndex(IndexConformance, CatalogueConformance):
    @pytest.fixture
    def index(self, redis_url: str) -> Iterator[RedisIndex]:
        self.url = redis_url
        with self.reopen() as index:
            yield index

    def reopen(self) -> RedisIndex:
        return RedisIndex.from_settings(self.url, RedisSettings())


@pytest.fixture
def index(redis_url: str) -> Iterator[RedisIndex]:
    with RedisIndex.from_settings(redis_url, RedisSettings(), clock=lambda: CREATED_S) as index:
        yield index


@pytest.fixture
def name(index: RedisIndex) -> NamespaceId:
    return index.register(namespace(), expected_blocks=1000)


@pytest.fixture
def raw(redis_server: RedisServer) -> Iterator[redis.Redis]:
    """The server around the index."""
    with redis.Redis(port=redis_server.port, protocol=2) as client:
        yield client


# The schema


def test_keys_and_encodings_are_pinned(index: RedisIndex, raw: redis.Redis) -> None:
    """A change of the schema is a decision: old entries would become misses, or worse."""
    name = index.register(namespace(), expected_blocks=10_000)
    digests = chain(6)
    one, two, incomplete, gone = (SegmentId(bytes([i]) * 8) for i in (1, 2, 3, 4))
    put(index, name, digests, 0, 4, segment=one)
    for rank in (1, 0):
        both = record(2, depth=4, sizes=[100, 200 + rank], codec="lz4", data_start=8192)
        index.commit(name, two, part_of(digests, 4), both, rank=rank, ranks=2)
    index.commit(name, incomplete, chain(1, seed="i"), record(1), rank=1, ranks=2)
    put(index, name, chain(1, seed="g"), segment=gone)
    index.evict(name, [gone], delete_after_s=LATER_S + 0.5)
    index.touch(name, [two], LATER_S)
    assert index.claim(name, chain(1, seed="c"), incomplete, 60.0).granted
    # How a namespace spells itself is pinned elsewhere (tests/test_keys.py).
    text = "".join(f"{line}\n" for line in _dump(raw))
    dump = text.replace(canonical_json(namespace()), "JSON").replace(name, "NAMESPACE")
    assert dump == GOLDEN.read_text(), f"the schema is now:\n{dump}"


def _dump(raw: redis.Redis) -> Iterator[str]:
    """Every key with its type, encoding, whether it expires, and contents."""
    for key in sorted(raw.keys()):
        kind = raw.type(key).decode()
        expires = ", expires" if raw.ttl(key) != -1 else ""
        # How Redis keeps the others is its own business and differs between its versions.
        encoding = f" as {raw.object('encoding', key).decode()}" if b":b:" in key else ""
        yield f"{key.decode()}  {kind}{encoding}{expires}"
        contents: Any
        if kind == "hash":
            contents = sorted(raw.hgetall(key).items())
        elif kind == "zset":
            contents = [(member, score.hex()) for member, score in raw.zrange(key, 0, -1, withscores=True)]
        elif kind == "set":
            contents = [(member, "") for member in sorted(raw.smembers(key))]
        else:
            contents = [("", raw.get(key))]
        for field, value in contents:
            yield f"    {field!r}: {value!r}"


@pytest.mark.parametrize(
    ("expected", "bits"),
    [
        (0, 0),
        (1, 0),
        (64, 0),
        (65, 1),
        (128, 1),
        (129, 2),
        (100_000, 11),
        (10**6, 14),
        (10**9, 24),
        (10**15, 24),
    ],
)
def test_buckets_hold_32_to_64_entries_when_full(expected: int, bits: int) -> None:
    assert bucket_bits(expected) == bits
    if 64 < expected <= 64 << 24:
        assert 32 < expected / 2**bits <= 64


def test_a_block_costs_at_most_45_bytes(index: RedisIndex, raw: redis.Redis) -> None:
    blocks, per_chain = 100_000, 10_000
    before = raw.info("memory")["used_memory"]
    name = index.register(namespace(), expected_blocks=blocks)
    source = random.Random(7)
    for _ in range(blocks // per_chain):
        # Not chained, since nothing is matched: hashing takes longer than storing.
        put_all(index, name, source.randbytes(16 * per_chain), [64] * (per_chain // 64) + [per_chain % 64])
    spent = raw.info("memory")["used_memory"] - before
    assert index.usage(name).blocks == blocks
    assert spent / blocks <= 45
    buckets = list(raw.scan_iter(match=f"kvs:{{{name}}}:b:*", count=1000))
    assert len(buckets) == 2 ** bucket_bits(blocks)
    assert {raw.object("encoding", key) for key in source.sample(buckets, 200)} == {b"listpack"}
    assert index.warnings() == []


def test_registration_counts_segments_from_zero_if_only_meta_was_lost(
    index: RedisIndex, raw: redis.Redis, name: NamespaceId
) -> None:
    digests = chain(5)
    segment = put(index, name, digests)
    raw.delete(f"kvs:{{{name}}}:meta")
    assert index.match(name, digests) == []
    assert index.namespaces() == {}
    with pytest.raises(NamespaceUnknown):
        put(index, name, digests)
    index.register(namespace(), expected_blocks=1000)
    assert index.usage(name) == Usage(0, 0, 0)
    assert index.match(name, digests) == []
    assert index.evict(name, [segment], delete_after_s=LATER_S) == 0
    assert index.sweep(name, 100) == 5


def test_an_id_without_meta_is_no_namespace(index: RedisIndex, raw: redis.Redis) -> None:
    raw.sadd("kvs:ns", "00112233445566ff")
    assert index.namespaces() == {}


def test_an_incomplete_commit_expires_within_an_hour(
    index: RedisIndex, raw: redis.Redis, name: NamespaceId
) -> None:
    segment = new_segment_id()
    index.commit(name, segment, chain(1), record(1), rank=0, ranks=2)
    assert 3590 < raw.ttl(f"kvs:{{{name}}}:part:{segment.hex()}") <= 3600


# The walk inside Redis


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(made=worlds())
def test_lua_keeps_the_promise_of_the_walk(
    made: tuple[World, list[list[Block]]], index: RedisIndex, raw: redis.Redis
) -> None:
    raw.flushall()
    name = index.register(namespace(), expected_blocks=5)
    world, chains = made
    digest = {block: i.to_bytes(16, "big") for i, block in enumerate({b for c in chains for b in c})}
    for segment, blocks in world.contents.items():
        put(index, name, b"".join(digest[block] for block in blocks), segment=segment)
    for segment in world.contents.keys() - world.records.keys():
        index.evict(name, [segment], delete_after_s=LATER_S)
    for block in {block for blocks in world.contents.values() for block in blocks} - world.entries.keys():
        raw.hdel(f"kvs:{{{name}}}:b:0", digest[block])
    for blocks in chains:
        runs = index.match(name, b"".join(digest[block] for block in blocks))
        position = 0
        for run in runs:
            held = world.contents[run.segment][run.slot : run.slot + run.count]
            assert list(held) == blocks[position : position + run.count]
            assert run.segment in world.records
            position += run.count
        same, _ = world.check(blocks)
        assert position >= next(
            (i for i, block in enumerate(blocks) if not world.present(block)), len(blocks)
        )
        if world.contents.keys() == world.records.keys():
            assert [(r.segment, r.slot, r.count) for r in runs] == [
                (r.segment, r.slot, r.count) for r in same
            ]


def test_a_repeated_block_is_no_run(index: RedisIndex, name: NamespaceId) -> None:
    digests = chain(2)
    segment = put(index, name, digests)
    runs = index.match(name, part_of(digests, 0, 1) + digests)
    # From the far end: slot 1, which proves slot 0 before it, then the stray one.
    assert [(run.start, run.segment, run.slot, run.count) for run in runs] == [
        (0, segment, 0, 1),
        (1, segment, 0, 2),
    ]


def test_more_segments_than_luas_stack_holds(index: RedisIndex, name: NamespaceId) -> None:
    count = 8500
    digests = chain(count)
    segments = put_all(index, name, digests, [1] * count)
    assert [run.segment for run in index.match(name, digests)] == segments
    assert [run and run.segment for run in index.find(name, digests)] == segments
    index.touch(name, segments, LATER_S)
    assert {one.last_use_s for one in index.segments(name)} == {LATER_S // 60 * 60}
    assert index.evict(name, segments, delete_after_s=1000.0) == count
    assert sum(index.sweep(name, count) for _ in range(3)) == count
    assert len(index.due(name, 1000.0, 10_000)) == count
    index.bury(name, segments)


def test_a_match_costs_a_call_per_segment(index: RedisIndex, raw: redis.Redis) -> None:
    name = index.register(namespace(), expected_blocks=10_000)
    digests = chain(8192)
    put_all(index, name, digests, [64] * 128)
    index.match(name, digests)
    raw.config_resetstat()
    index.match(name, digests)
    stats = raw.info("commandstats")
    calls = {key: stats[key]["calls"] for key in stats if not key.startswith("cmdstat_config")}
    # One for the bucket bits; INFO counts itself only afterwards.
    assert calls == {"cmdstat_evalsha": 1, "cmdstat_hget": 128 + 1, "cmdstat_hmget": 1}


# Failures


def test_opening_is_no_io(private_redis: RedisServer) -> None:
    private_redis.kill()
    index = RedisIndex.from_settings(private_redis.url, SHORT)
    with pytest.raises(TransientError) as caught:
        index.match(namespace_id(namespace()), chain(3))
    assert not isinstance(caught.value, DeadlineExceeded)
    private_redis.start()
    assert index.match(namespace_id(namespace()), chain(3)) == []
    index.close()


def test_a_restarted_server_costs_no_error(private_redis: RedisServer) -> None:
    with RedisIndex.from_settings(private_redis.url, SHORT) as index:
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


def test_one_lost_request_costs_no_error_and_two_cost_one(
    redis_server: RedisServer, index: RedisIndex, name: NamespaceId
) -> None:
    """The server may close a connection between our look at it and our request."""
    digests = chain(3)
    put(index, name, digests)
    with LossyProxy(redis_server.port) as proxy:
        url = f"redis://127.0.0.1:{proxy.port}/0"
        with RedisIndex.from_settings(url, RedisSettings()) as behind:
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
            # Lost late, when a second try would overrun the deadline.
            proxy.losses, proxy.delay_s = 1, 0.3
            with pytest.raises(TransientError):
                behind.match(name, digests)
            assert served(behind.match(name, digests)) == 3


def test_forgotten_scripts_cost_no_error(index: RedisIndex, raw: redis.Redis, name: NamespaceId) -> None:
    digests = chain(3)
    for _ in range(2):
        raw.script_flush()
        segment = put(index, name, digests)
        raw.script_flush()
        assert served(index.match(name, digests)) == 3
        raw.script_flush()
        assert index.evict(name, [segment], delete_after_s=LATER_S) == 1


@pytest.mark.parametrize("verb", ["match", "commit", "ping", "usage"])
def test_a_hanging_server_ends_at_the_deadline(private_redis: RedisServer, verb: str) -> None:
    with RedisIndex.from_settings(private_redis.url, SHORT) as index:
        name = index.register(namespace(), expected_blocks=10)
        calls: dict[str, Callable[[], object]] = {
            "match": lambda: index.match(name, chain(3)),
            "commit": lambda: put(index, name, chain(3)),
            "ping": index.ping,
            "usage": lambda: index.usage(name),
        }
        private_redis.pause()
        for _ in range(2):
            began = time.monotonic()
            with pytest.raises(DeadlineExceeded):
                calls[verb]()
            assert time.monotonic() - began < 1.0
        private_redis.resume()
        calls[verb]()


def test_waiting_for_a_connection_ends_at_the_deadline(private_redis: RedisServer) -> None:
    narrow = RedisSettings(timeout_s=0.4, max_connections=1)
    with RedisIndex.from_settings(private_redis.url, narrow) as index:
        index.ping()
        private_redis.pause()
        began = time.monotonic()
        with ThreadPoolExecutor(3) as pool:
            for call in [pool.submit(index.ping) for _ in range(3)]:
                with pytest.raises(DeadlineExceeded):
                    call.result()
        assert time.monotonic() - began < 1.5
        private_redis.resume()
        index.ping()


def test_an_answer_after_the_deadline_is_not_taken_for_the_next_one(private_redis: RedisServer) -> None:
    narrow = RedisSettings(timeout_s=0.3, max_connections=1)
    with RedisIndex.from_settings(private_redis.url, narrow) as index:
        name = index.register(namespace(), expected_blocks=10)
        digests = chain(3)
        put(index, name, digests)
        private_redis.pause()
        with pytest.raises(DeadlineExceeded):
            index.usage(name)
        private_redis.resume()
        assert served(index.match(name, digests)) == 3
        assert index.usage(name).blocks == 3


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
            index.ping,
        ):
            with pytest.raises(CapacityExceeded):
                call()
        assert (index.usage(name), sorted(raw.keys())) == (usage, keys)
        assert served(index.match(name, digests)) == 200
        assert index.find(name, digests)[199] is not None
        # Making room works.
        assert index.evict(name, segments[3:], delete_after_s=1000.0) == 1
        assert index.cull(name, keep_bytes=0, delete_after_s=1000.0, limit=1) == [segments[2]]
        assert set(index.due(name, 1000.0, 10)) == {(segments[2], 1), (segments[3], 1)}
        index.bury(name, segments)
        assert sum(index.sweep(name, 1000) for _ in range(3)) == 100
        assert index.usage(name) == Usage(usage.nbytes // 2, 2, 100)
    finally:
        raw.config_set("maxmemory", 0)


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
        return RedisIndex.from_settings(url, RedisSettings(username=user, password=secret))

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
    url = "rediss://x:y@example.org:7000/5?socket_timeout=99&protocol=3&decode_responses=true"
    index = RedisIndex.from_settings(url, given_)
    pool = index._client._client.connection_pool
    assert pool.connection_class is redis.SSLConnection
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
    "url", ["redis://user:hidden@host:port/0", "redis://user:hid/den@host:1/0", "http://hidden@host"]
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
                with RedisIndex.from_settings(f"unix://{path}?db=2", RedisSettings()) as index:
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
    with pytest.raises(Closed):
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


# Warnings


def test_warnings_name_what_is_wrong(index: RedisIndex, raw: redis.Redis, name: NamespaceId) -> None:
    assert index.warnings() == []
    usual = {key: raw.config_get(key)[key] for key in ("maxmemory-policy", "hash-max-listpack-entries")}
    try:
        raw.config_set("maxmemory-policy", "allkeys-lru")
        raw.config_set("hash-max-listpack-entries", 32)
        put(index, name, chain(1000))
        texts = index.warnings()
        assert len(texts) == 3
        for text, word in zip(texts, ["allkeys-lru", "hash-max-listpack-entries is 32", name], strict=True):
            assert word in text
    finally:
        for key, value in usual.items():
            raw.config_set(key, value)


def test_warnings_do_without_config(index: RedisIndex, raw: redis.Redis, name: NamespaceId) -> None:
    raw.execute_command("ACL", "SETUSER", "default", "-config")
    try:
        assert index.warnings() == []
    finally:
        raw.execute_command("ACL", "SETUSER", "default", "+config")


def test_every_error_is_of_the_tree(private_redis: RedisServer) -> None:
    """Whatever a server answers, callers meet KVStoreError only."""
    with RedisIndex.from_settings(private_redis.url, SHORT) as index:
        name = index.register(namespace(), expected_blocks=10)
        with redis.Redis(port=private_redis.port, protocol=2) as raw:
            for part in ("meta", "segs", "lru", "trash", "b:0"):
                raw.flushall()
                index.register(namespace(), expected_blocks=10)
                raw.delete(f"kvs:{{{name}}}:{part}")
                raw.lpush(f"kvs:{{{name}}}:{part}", "not what it should be")
                outcomes = [_outcome(index, name, verb) for verb in VERBS]
                assert all(o is None or issubclass(o, KVStoreError) for o in outcomes)
                assert any(outcomes)


VERBS: list[Callable[[RedisIndex, NamespaceId], object]] = [
    lambda index, name: index.match(name, chain(3)),
    lambda index, name: index.find(name, chain(3)),
    lambda index, name: index.claim(name, chain(3), new_segment_id(), 1.0),
    lambda index, name: put(index, name, chain(3)),
    lambda index, name: index.touch(name, [new_segment_id()], LATER_S),
    lambda index, name: index.evict(name, [new_segment_id()], delete_after_s=LATER_S),
    lambda index, name: index.cull(name, keep_bytes=0, delete_after_s=LATER_S, limit=5),
    lambda index, name: index.due(name, LATER_S, 5),
    lambda index, name: index.sweep(name, 5),
    lambda index, name: list(index.segments(name)),
    lambda index, name: index.usage(name),
]


def _outcome(
    index: RedisIndex, name: NamespaceId, verb: Callable[[RedisIndex, NamespaceId], object]
) -> type[BaseException] | None:
    try:
        verb(index, name)
    except Exception as exc:
        return type(exc)
    return None


def test_commit_states_match_the_script() -> None:
    source = (Path(__file__).parents[2] / "kvstore" / "index" / "commit.lua").read_text()
    assert "WAITING, VISIBLE, REFUSED = 0, 1, 2" in source
    assert issubclass(RedisIndex, Index)
    assert [state.name for state in (CommitState.WAITING, CommitState.VISIBLE, CommitState.REFUSED)]
