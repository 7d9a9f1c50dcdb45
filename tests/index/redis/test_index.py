"""RedisIndex on a real redis-server: the contract, the schema, and what becomes of failures."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, given, settings

from kvstore.errors import (
    NamespaceUnknown,
)
from kvstore.index.eviction import Scope
from kvstore.index.maintenance import Usage
from kvstore.index.port import MOST_RUNS, CommitState, Index, Outcome
from kvstore.index.redis.index import RedisIndex
from kvstore.index.scripted.values import bucket_bits
from kvstore.index.sessions import Allowance, Hint
from kvstore.keys import (
    NO_SALT,
    NamespaceId,
    SegmentId,
    WriterId,
    canonical_json,
    namespace_id,
    new_segment_id,
    salt_id,
    session_id,
)
from schemas.records import rounded_cost
from schemas.settings import JournalSettings
from tests.index.contract.admission import DAY_S, NOON_S, use
from tests.index.contract.chains import CREATED_S, chain, namespace, part_of, put, put_all, record
from tests.index.contract.whole import FullIndexConformance
from tests.index.test_walk import Story, keep_the_promise, stories
from tests.servers.redis import PATIENT, RedisServer

pytestmark = pytest.mark.servers

LATER_S = CREATED_S + 3600.0
GOLDEN = Path(__file__).parent / "golden" / "redis_schema.txt"


class TestRedisIndex(FullIndexConformance):
    @pytest.fixture
    def index(self, redis_url: str) -> Iterator[RedisIndex]:
        self.url = redis_url
        with self.reopen() as index:
            yield index

    def reopen(self) -> RedisIndex:
        return self.configured()

    def configured(
        self, *, journal: JournalSettings | None = None, cost_aware: bool = True, by: str = ""
    ) -> RedisIndex:
        journal = journal or JournalSettings()
        return RedisIndex.from_settings(self.url, PATIENT, journal=journal, cost_aware=cost_aware, by=by)

    def miscount(self, name: NamespaceId, nbytes: int) -> None:
        with redis.Redis.from_url(self.url, protocol=2) as client:
            client.hincrby(f"kvs:{{{name}}}:meta", "bytes", nbytes)
            client.hincrby(f"kvs:{{{name}}}:retained", "", nbytes)
            # An older release evicts, and knows nothing of sessions.
            client.hset(f"kvs:{{{name}}}:owner", new_segment_id(), bytes(16))


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


# The schema


def test_keys_and_encodings_are_pinned(index: RedisIndex, raw: redis.Redis, redis_url: str) -> None:
    """A change of the schema is a decision: old entries would become misses, or worse."""
    name = index.register(namespace(), expected_blocks=10_000)
    digests = chain(6)
    one, two, incomplete, gone, bygone, pinned, bad, operated, salted, erased, owned, kept = (
        SegmentId(bytes([i]) * 8) for i in range(1, 13)
    )
    put(index, name, chain(2, seed="b"), segment=bygone)
    assert index.invalidate(name) == 1
    put(index, name, digests, 0, 4, segment=one)
    for rank in (1, 0):
        both = record(2, depth=4, sizes=[100, 200 + rank], codec="lz4", data_start=8192)
        costly = replace(both, cost_us=rounded_cost(1_000_000))
        index.commit(name, two, part_of(digests, 4), costly, rank=rank, ranks=2)
    index.commit(name, incomplete, chain(1, seed="i"), record(1), rank=1, ranks=2)
    put(index, name, chain(1, seed="g"), segment=gone)
    index.evict(name, [gone], delete_after_s=LATER_S + 0.5, rule="capacity")
    put(index, name, chain(1, seed="x"), segment=bad)
    index.evict(name, [bad], delete_after_s=LATER_S, rule="bad")
    index.touch(name, [two], LATER_S)
    put(index, name, chain(1, seed="p"), segment=pinned)
    index.pin(name, [pinned], most_bytes=10**6)
    assert index.claim(name, chain(1, seed="c"), incomplete, 60.0).granted
    use(index, name, chain(5), at_s=CREATED_S, sketch_bytes=1024)
    use(index, name, chain(4, seed="n", after=chain(2)), at_s=CREATED_S, sketch_bytes=1024)
    told = [Outcome(CREATED_S + 0.25, "r\udc80", "match", 9, 8, "absent", 8, chain(1, seed="g"))]
    index.tell(name, told)
    index.tell(name, [Outcome(CREATED_S + 0.5, "s", "load", 2, 1, "corrupt", 1, chain(1, seed="d"))])
    index.sweep(name, 1)
    index.set_quota("store", 10**12)
    index.set_quota(Scope.ttl(Scope.tenant("default")), 86_400)
    index.age_out(name, 10**9, delete_after_s=LATER_S)
    with RedisIndex.from_settings(redis_url, PATIENT, by="anna@desk") as anna:
        anna.record_operation("evict", "1 named")
        put(anna, name, chain(1, seed="o"), segment=operated)
        anna.evict(name, [operated], delete_after_s=LATER_S, rule="admin")
    put(index, name, chain(1, seed="s"), segment=salted, salt=salt_id("hers"))
    put(index, name, chain(1, seed="e"), segment=erased, salt=salt_id("his"))
    index.forbid(name, salt_id("his"))
    index.evict(name, [erased], delete_after_s=LATER_S, rule="erased")
    chat, other = session_id(NO_SALT, "chat"), session_id(NO_SALT, "other")
    for at, (segment, whose) in enumerate(((owned, chat), (kept, other))):
        made = record(1, depth=at)
        index.commit(name, segment, chain(1, seed=whose.hex()), made, rank=0, ranks=1, session=whose)
    index.session(name, chat, [], CREATED_S, Hint(end=True, priority="low"))
    allowance = Allowance(1 << 30, 1 << 30, 1 << 30)
    index.session(name, other, [salted], LATER_S, Hint(retain_s=9e9), allowance=allowance)
    index.judge(name, WriterId(bytes(range(8))), "differs", by=WriterId(b"\x07" * 8), stands=False, name="w")
    index.ping()
    # Erasing remembers how far it came.
    other = index.register(namespace("other"), expected_blocks=10**6)
    index.invalidate(other)
    assert index.erase(other, 1) == "more"
    # How a namespace spells itself is pinned elsewhere (tests/test_keys.py).
    text = "".join(f"{line}\n" for line in _dump(raw))
    for model, label in (("model", "NAMESPACE"), ("other", "OTHER")):
        text = text.replace(canonical_json(namespace(model)), "JSON")
        text = text.replace(namespace_id(namespace(model)), label)
    assert text == GOLDEN.read_text(), f"the schema is now:\n{text}"


def _dump(raw: redis.Redis) -> Iterator[str]:
    """Every key with its type, encoding, whether it expires, and contents."""
    retained = {one for key in raw.keys("*:kept") for one in raw.zrange(key, 0, -1)}
    for key in sorted(raw.keys()):
        kind = raw.type(key).decode()
        expires = ", expires" if raw.ttl(key) != -1 else ""
        # How Redis keeps the others is its own business and differs between its versions.
        encoding = f" as {raw.object('encoding', key).decode()}" if b":b:" in key else ""
        # The window of sessions is of the server's clock.
        label = re.sub("sessions:[01]$", "sessions:WINDOW", key.decode())
        yield f"{label}  {kind}{encoding}{expires}"
        contents: Any
        if kind == "hash":
            # This one is of the server's clock, and so are those of `parts`.
            clock = key.endswith(b":erased")
            contents = sorted(
                (k, "TIME" if clock or k == b"window" else v) for k, v in raw.hgetall(key).items()
            )
            if label.endswith(":writers"):
                contents = [(k, v[:1] + b"TIME" + v[5:]) for k, v in contents]
            if "sessions:WINDOW" in label:
                contents = [(k, v[:4] + b"TIME" + v[8:] if any(v[4:8]) else v) for k, v in contents]
        elif kind == "zset":
            scores = raw.zrange(key, 0, -1, withscores=True)
            clock = key.endswith((b":parts", b":kept"))
            contents = [
                (member, "TIME" if clock or (key.endswith(b":lru") and member in retained) else score.hex())
                for member, score in scores
            ]
        elif kind == "stream":
            contents = [("TIME", fields) for _, fields in raw.xrange(key)]
        elif kind == "set":
            contents = [(member, "") for member in sorted(raw.smembers(key))]
        else:
            value = raw.get(key)
            lines = {at: value[at : at + 64] for at in range(0, len(value), 64)}
            contents = [(at or "", line) for at, line in lines.items() if any(line)]
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
    assert index.evict(name, [segment], delete_after_s=LATER_S, rule="admin") == 0
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


@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(story=stories())
def test_lua_keeps_the_promise_of_the_walk(story: Story, index: RedisIndex) -> None:
    keep_the_promise(index, story)


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
    assert [run.segment for run in index.match(name, digests)] == segments[:MOST_RUNS]
    assert [run and run.segment for run in index.find(name, digests)] == segments
    index.touch(name, segments, LATER_S)
    assert {one.last_use_s for one in index.segments(name)} == {LATER_S // 60 * 60}
    assert index.evict(name, segments, delete_after_s=1000.0, rule="admin") == count
    assert sum(index.sweep(name, count) for _ in range(3)) == count
    assert len(index.reapable(name, 1000.0, 10_000)) == count
    index.reaped(name, segments)


def test_a_match_costs_a_call_per_segment(index: RedisIndex, raw: redis.Redis) -> None:
    name = index.register(namespace(), expected_blocks=10_000)
    digests = chain(8192)
    put_all(index, name, digests, [64] * 128)
    index.match(name, digests)
    raw.config_resetstat()
    index.match(name, digests)
    stats = raw.info("commandstats")
    calls = {key: stats[key]["calls"] for key in stats if not key.startswith("cmdstat_config")}
    # One for the bucket bits and the time to live; INFO counts itself only afterwards.
    assert calls == {"cmdstat_evalsha": 1, "cmdstat_hget": 128, "cmdstat_hmget": 1 + 1}
    index.age_out(name, 10**9, delete_after_s=0)
    raw.config_resetstat()
    assert sum(run.count for run in index.match(name, digests)) == 8192
    stats = raw.info("commandstats")
    assert {stats["cmdstat_hget"]["calls"], stats["cmdstat_time"]["calls"]} == {128, 1}


# The sketch of uses


def test_a_note_of_a_long_chain_costs_two_calls_per_group(
    index: RedisIndex, raw: redis.Redis, name: NamespaceId
) -> None:
    digests = chain(8192)

    def calls(at_s: float) -> dict[str, int]:
        raw.config_resetstat()
        use(index, name, digests, at_s=at_s, sketch_bytes=1 << 20)
        stats = raw.info("commandstats")
        return {key: one["calls"] for key, one in stats.items() if not key.startswith("cmdstat_config")}

    use(index, name, chain(1))  # the script is known from now on
    groups, looks = 8192 // 32, {"cmdstat_evalsha": 1, "cmdstat_hexists": 1, "cmdstat_exists": 2}
    first = calls(NOON_S)
    assert first.pop("cmdstat_getrange") < groups  # the sketch didn't exist when it was begun
    assert first == looks | {"cmdstat_setrange": groups + 1, "cmdstat_expire": 1}
    assert calls(NOON_S) == looks | {"cmdstat_getrange": groups}
    again = calls(NOON_S + DAY_S)
    assert again.pop("cmdstat_getrange") < 2 * groups
    assert again == looks | {"cmdstat_setrange": groups + 1, "cmdstat_expire": 1}


@pytest.mark.parametrize("size", [1024, 1 << 20, 3_000_000])
def test_a_sketch_takes_its_size_and_expires(
    index: RedisIndex, raw: redis.Redis, name: NamespaceId, size: int
) -> None:
    for i in range(100):
        use(index, name, chain(40, seed=f"{i}"), sketch_bytes=size)
    (key,) = raw.keys(f"kvs:{{{name}}}:use:*")
    assert key == f"kvs:{{{name}}}:use:{size}:86400:{NOON_S // DAY_S:.0f}".encode()
    assert raw.strlen(key) == size // 64 * 64
    assert raw.memory_usage(key) < 1.27 * size + 200  # the allocator's size classes
    # Until the next window is over: here a day and a half from now.
    assert 1.5 * DAY_S - 60 < raw.ttl(key) <= 1.5 * DAY_S


def test_a_lost_sketch_is_begun_anew(index: RedisIndex, raw: redis.Redis, name: NamespaceId) -> None:
    use(index, name, chain(40))
    raw.delete(*raw.keys(f"kvs:{{{name}}}:use:*"))
    assert use(index, name, chain(40)) == 0
    assert use(index, name, chain(40)) == 40


# Warnings


def test_warnings_name_what_is_wrong(index: RedisIndex, raw: redis.Redis, name: NamespaceId) -> None:
    assert index.warnings() == []
    usual = {key: raw.config_get(key)[key] for key in ("maxmemory-policy", "hash-max-listpack-entries")}
    try:
        raw.config_set("maxmemory-policy", "allkeys-lru")
        raw.config_set("hash-max-listpack-entries", 32)
        put(index, name, chain(1000))
        raw.sadd("kvs:ns", b"\xff", "stranger")
        texts = index.warnings()
        assert len(texts) == 3
        for text, word in zip(texts, ["allkeys-lru", "2 members", "hash-max-listpack-entries"], strict=True):
            assert word in text
        assert name in texts[2]
        raw.hset(f"kvs:{{{name}}}:meta", "bytes", "many")
        assert f"cache-admin fsck {name} --apply" in index.warnings()[2]
        put(index, name, chain(2000, seed="more"))
        assert "outgrown" in index.warnings()[3]
    finally:
        for key, value in usual.items():
            raw.config_set(key, value)


def test_what_the_server_does_not_tell_is_said(
    index: RedisIndex, raw: redis.Redis, name: NamespaceId
) -> None:
    raw.execute_command("ACL", "SETUSER", "default", "-config")
    try:
        assert index.warnings() == []
        raw.execute_command("ACL", "SETUSER", "default", "-info")
        [text] = index.warnings()
        assert "maxmemory-policy" in text
    finally:
        raw.execute_command("ACL", "SETUSER", "default", "+@all")


def test_the_scripts_have_the_same_numbers() -> None:
    lua = Path(__file__).parents[3] / "kvstore" / "index" / "scripted" / "lua"
    assert "WAITING, VISIBLE, REFUSED = 0, 1, 2" in (lua / "commit.lua").read_text()
    assert f"MOST_RUNS = {MOST_RUNS}\n" in (lua / "walk.lua").read_text()
    assert issubclass(RedisIndex, Index)
    assert [state.name for state in (CommitState.WAITING, CommitState.VISIBLE, CommitState.REFUSED)]
