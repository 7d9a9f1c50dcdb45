"""Sessions in Redis: how many there may be, and how they are forgotten."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from kvstore.build import load_settings, open_store
from kvstore.errors import CapacityExceeded
from kvstore.index.redis.index import RedisIndex
from kvstore.index.scripted import sessions as redis_sessions
from kvstore.index.scripted.scripts import Script
from kvstore.index.sessions import MOST_SEGMENTS, MOST_SESSIONS, WINDOW_S, Hint
from kvstore.index.sharding.index import ShardedIndex
from kvstore.index.sharding.names import shard_names
from kvstore.keys import NO_SALT, NO_SESSION, NamespaceId, SegmentId, SessionId, new_segment_id, session_id
from tests.index.contract.chains import CREATED_S, chain, namespace, put, record
from tests.index.contract.sessions import ALL, END, later, save
from tests.servers.redis import PATIENT, RedisServer

pytestmark = pytest.mark.servers

ALICE, BOB = session_id(NO_SALT, "alice"), session_id(NO_SALT, "bob")


@pytest.fixture
def index(redis_url: str) -> Iterator[RedisIndex]:
    with RedisIndex.from_settings(redis_url, PATIENT) as index:
        yield index


@pytest.fixture
def name(index: RedisIndex) -> NamespaceId:
    return index.register(namespace(), expected_blocks=1000)


@pytest.fixture
def raw(redis_server: RedisServer) -> Iterator[redis.Redis]:
    with redis.Redis(port=redis_server.port, protocol=2) as client:
        yield client


def key(name: NamespaceId, part: str) -> str:
    return f"kvs:{{{name}}}:{part}"


def other_day(raw: redis.Redis, name: NamespaceId, days: int) -> None:
    """As if it had been so many days earlier when sessions were used last."""
    window = int(raw.hget(key(name, "meta"), "window") or 0)
    found: dict[int, Any] = {part: raw.hgetall(key(name, f"sessions:{part}")) for part in (0, 1)}
    raw.hset(key(name, "meta"), "window", window - days)
    if days % 2:
        raw.delete(key(name, "sessions:0"), key(name, "sessions:1"))
        for part, records in found.items():
            if records:
                raw.hset(key(name, f"sessions:{1 - part}"), mapping=records)


def smaller(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Sessions are bounded to fewer."""
    script: Any = redis_sessions._SESSION
    source = script.source.replace("2 ^ 20, 1024", f"{most}, 1024")
    assert source != script.source
    monkeypatch.setattr(redis_sessions, "_SESSION", Script("session", source, "0" * 40))


def test_the_scripts_say_what_python_says() -> None:
    source = redis_sessions._SESSION.source
    assert f"{WINDOW_S}, 2 ^ 20, {MOST_SEGMENTS}" in source
    assert MOST_SESSIONS == 2**20


def test_a_million_names_are_bounded(
    index: RedisIndex, raw: redis.Redis, name: NamespaceId, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In small: who sends more names than there may be forgets his own; what costs nothing is not bounded."""
    smaller(monkeypatch, 100)
    index.session(name, ALICE, [], time.time() + 86_400, END)
    segment = put(index, name, chain(2))
    before = raw.info("memory")["used_memory"]
    for number in range(1000):
        index.session(name, session_id(NO_SALT, f"idle {number}"), [segment], CREATED_S)
    assert raw.info("memory")["used_memory"] - before < 50_000
    for number in range(1000):
        index.session(name, session_id(NO_SALT, str(number)), [], CREATED_S + number, END)
        assert raw.hlen(key(name, "sessions:0")) + raw.hlen(key(name, "sessions:1")) <= 100
    # Of those that chance draws the one goes that was used longest ago.
    assert index.find_sessions(name, [ALICE])[0] is not None
    assert len(list(index.sessions(name))) == 100


def test_a_name_that_costs_a_record_in_each_shard_counts_in_each(
    redis_url: str, raw: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight shards remember no more in all than one does."""
    smaller(monkeypatch, 80)
    with ShardedIndex(RedisIndex.from_settings(redis_url, PATIENT), shards=8) as index:
        name = index.register(namespace(), expected_blocks=1000)
        for number in range(200):
            index.session(name, session_id(NO_SALT, str(number)), [], CREATED_S + number, END)
    hashes = [key(shard, f"sessions:{part}") for shard in shard_names(name, 8) for part in (0, 1)]
    assert sum(raw.hlen(one) for one in hashes) == 80


def test_a_bounded_session_comes_back_with_what_it_uses(
    index: RedisIndex, name: NamespaceId, monkeypatch: pytest.MonkeyPatch
) -> None:
    smaller(monkeypatch, 1)
    own = save(index, name, chain(6), ALICE)
    index.session(name, BOB, [], CREATED_S, END)
    assert [one.session for one in index.sessions(name)] == [BOB]
    assert index.session(name, ALICE, own[:2], CREATED_S).segments == 2
    assert index.session(name, ALICE, [], CREATED_S, END).demoted == 2
    assert index.owners(name, own) == [ALICE] * 3


@pytest.mark.parametrize(("days", "left"), [(0, 2), (1, 2), (2, 0), (3, 0), (-1, 2), (-2, 0)])
def test_idle_sessions_are_forgotten(
    index: RedisIndex, raw: redis.Redis, name: NamespaceId, days: int, left: int
) -> None:
    for session in (ALICE, BOB):
        save(index, name, chain(2, seed=session.hex()), session)
    other_day(raw, name, days)
    # Somebody else's use begins the window, and nothing else has to be done.
    index.session(name, session_id(NO_SALT, "carol"), [], CREATED_S, END)
    assert len(list(index.sessions(name))) == left + 1
    assert raw.ttl(key(name, "sessions:0")) in (-1, -2)


def test_a_session_that_is_used_every_day_stays(
    index: RedisIndex, raw: redis.Redis, name: NamespaceId
) -> None:
    own = save(index, name, chain(4), ALICE)
    for _ in range(5):
        other_day(raw, name, 1)
        assert index.session(name, ALICE, [], CREATED_S).segments == 2
        assert len(list(index.sessions(name))) == 1
    assert index.owners(name, own) == [ALICE] * 2


def test_what_an_idle_session_owned_is_as_all_else(
    index: RedisIndex, raw: redis.Redis, name: NamespaceId
) -> None:
    own = save(index, name, chain(4), ALICE)
    other_day(raw, name, 3)
    # An end finds nothing to move; a use takes up again what nobody else has used.
    assert index.session(name, ALICE, [], CREATED_S, END).demoted == 0
    assert index.session(name, ALICE, own[:1], CREATED_S).segments == 1


def test_a_full_redis_takes_no_hint_and_loses_none(private_redis: RedisServer) -> None:
    with (
        RedisIndex.from_settings(private_redis.url, PATIENT) as index,
        redis.Redis(port=private_redis.port, protocol=2) as raw,
    ):
        name = index.register(namespace(), expected_blocks=1000)
        own = save(index, name, chain(4), ALICE)
        index.session(name, ALICE, own, CREATED_S, later(600), allowance=ALL)
        raw.config_set("maxmemory", 1)
        with pytest.raises(CapacityExceeded):
            index.session(name, ALICE, own, CREATED_S, later(900), allowance=ALL)
        assert index.owners(name, own) == [ALICE] * 2
        # Evicting is how room is made.
        gone = index.cull(name, keep_bytes=0, delete_after_s=0, limit=9, rule="capacity")
        assert gone == own[::-1]
        raw.config_set("maxmemory", 0)
        assert index.retained(name) == {}
        assert index.owners(name, own) == [NO_SESSION] * 2


def test_what_nobody_can_have_written_is_passed_over(
    index: RedisIndex, raw: redis.Redis, name: NamespaceId
) -> None:
    own = save(index, name, chain(4), ALICE)
    (part,) = [one for one in (0, 1) if raw.exists(key(name, f"sessions:{one}"))]
    where = key(name, f"sessions:{part}")
    raw.hset(where, mapping={b"short": b"x", bytes(BOB): b"\xff" * 8, bytes(16): b"\xff" * 13})
    raw.hset(key(name, "owner"), new_segment_id(), b"short")
    raw.zadd(key(name, "kept"), {own[0]: float("inf"), b"no segment": 1.0})
    assert {one.session for one in index.sessions(name)} == {ALICE, BOB}
    assert index.session(name, BOB, own, CREATED_S, Hint(priority="normal")).segments == 0
    assert index.session(name, ALICE, own, CREATED_S, END).segments == 0
    index.reconcile(name)
    assert index.retained(name) == {}
    segment = SegmentId(put(index, name, chain(1, seed="x")))
    index.session(name, ALICE, [segment], CREATED_S, later(600), allowance=ALL)
    assert index.retained(name) == {NO_SALT: record(1).nbytes}


def trips(raw: redis.Redis, step: Callable[[], object]) -> int:
    """How often the server has something to read for the second of two such steps: it knows scripts then."""
    step()
    before = raw.info("stats")["total_reads_processed"]
    step()
    return int(raw.info("stats")["total_reads_processed"]) - int(before) - 1


def test_telling_costs_no_round_trip_of_its_own(
    index: RedisIndex, raw: redis.Redis, name: NamespaceId
) -> None:
    """What is told of a session goes in place of a touch, and with a commit."""
    own = save(index, name, chain(8), ALICE)
    minute = CREATED_S + 60

    def commit(session: SessionId, seed: str) -> None:
        made = record(2)
        index.commit(
            name, new_segment_id(), chain(2, seed=seed), made, rank=0, ranks=1, session=session, allowance=ALL
        )

    touch = trips(raw, lambda: index.touch(name, own[:2], minute))
    assert touch == 1
    assert trips(raw, lambda: index.session(name, ALICE, own, minute)) == touch
    hint = Hint(retain_s=600, priority="high")
    assert trips(raw, lambda: index.session(name, ALICE, own, minute, hint, allowance=ALL)) == touch
    assert trips(raw, lambda: index.session(name, ALICE, own, minute, END)) == touch
    assert (
        trips(raw, lambda: commit(ALICE, "hers")) == trips(raw, lambda: commit(NO_SESSION, "nobody's")) == 1
    )


def test_a_store_tells_of_a_session_in_one_round_trip(
    redis_url: str, raw: redis.Redis, tmp_path: Path
) -> None:
    """What may be retained is asked for once a minute, and not by each request."""
    with open_store(load_settings({"payloads": f"file://{tmp_path}", "index": redis_url}, {})) as store:
        space = store.open(namespace())
        space.register()
        segment = put(store.index, space.id, chain(2))
        hint = Hint(retain_s=600)

        touched = trips(raw, lambda: space.touch([segment]))
        assert trips(raw, lambda: space.session(ALICE, [segment])) == touched == 1
        assert trips(raw, lambda: space.session(ALICE, [segment], hint)) == 1
