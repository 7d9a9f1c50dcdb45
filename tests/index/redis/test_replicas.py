"""What is read from replicas: the contract where they are in step, and whom is asked where they are not."""

from __future__ import annotations

import logging
import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from pydantic import SecretStr

from kvstore.build import load_settings, open_index, open_store
from kvstore.errors import ConfigError, PayloadMissing
from kvstore.index.redis.index import RedisIndex
from kvstore.index.redis.replication.replicas import Replicas
from kvstore.index.sharding.index import ShardedIndex
from kvstore.store.housekeeping import Housekeeping
from kvstore.store.space import Space
from kvstore.store.store import Store
from schemas.settings import Settings
from tests.index.contract.admission import NoteConformance
from tests.index.contract.chains import LATER_S, chain, put, put_all, served
from tests.index.contract.index import IndexConformance
from tests.index.redis.cluster import RedisClusterServers
from tests.index.redis.in_step import in_step
from tests.index.redis.pair import Pair, filled, is_read, paired
from tests.index.redis.scripted_sentinel import MASTER, ScriptedSentinel
from tests.index.test_state_machine import IndexMachine, ShardedMachine, run
from tests.servers.redis import PATIENT, RedisServer, patient
from tests.store.world import SLOT_BYTES, content, fetch, match, slots
from tests.store.world import chain as hashes_of
from tests.store.world import namespace as space_of
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.servers


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with paired(tmp_path) as pair:
        yield pair


@pytest.fixture(scope="module")
def _asked() -> Iterator[Counter[str]]:
    """What all tests of replicas in step have counted."""
    asked = Counter[str]()
    yield asked
    assert asked["replica_reads"], "no replica was ever asked"


@pytest.fixture
def replicated(
    replicated_cluster: RedisClusterServers, _asked: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[RedisClusterServers]:
    """Three masters with a replica each, empty; what is read is read from these."""
    with in_step(monkeypatch) as counts:
        yield replicated_cluster
        _asked.update(counts)


class TestEightShardsReadFromReplicas(IndexConformance, NoteConformance):
    """The rest of the contract asks no replica."""

    @pytest.fixture
    def index(self, replicated: RedisClusterServers) -> Iterator[ShardedIndex]:
        self.url = replicated.urls[0]
        with self.reopen() as index:
            yield index

    def reopen(self) -> ShardedIndex:
        return ShardedIndex(RedisIndex.from_settings(self.url, PATIENT), shards=8)


@pytest.mark.parametrize("shards", [1, 8])
def test_any_sequence_of_calls(replicated: RedisClusterServers, shards: int) -> None:
    class Machine(IndexMachine if shards == 1 else ShardedMachine):  # type: ignore[misc]
        def open(self) -> Any:
            leaf = RedisIndex.from_settings(replicated.urls[0], PATIENT)
            return leaf if shards == 1 else ShardedIndex(leaf, shards=shards)

        def empty(self) -> None:
            replicated.flush()

    run(Machine, 6)


def evals(server: RedisServer) -> int:
    with redis.Redis(port=server.port, protocol=2) as client:
        told = client.info("commandstats")
    return sum(told.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("eval", "evalsha"))


def test_what_only_reads_is_asked_of_a_replica_and_all_else_of_the_master(pair: Pair) -> None:
    with pair.open() as index:
        name = filled(index)
        until(lambda: is_read(pair, index, name))
        masters, replicas = evals(pair.master), evals(pair.replica)
        for _ in range(5):
            assert served(index.match(name, chain(6))) == 6
            assert None not in index.find(name, chain(6))
        assert evals(pair.master) == masters and evals(pair.replica) >= replicas + 10
        put(index, name, chain(2, seed="other"))
        index.touch(name, [], LATER_S)
        assert evals(pair.master) > masters
    assert not pair.counts["replica_failures"]


def test_tools_and_those_who_are_told_to_read_masters_alone(pair: Pair) -> None:
    tree = {"payloads": "file:///nowhere", "index": pair.url, "redis": {"read_from": "replicas"}}
    with open_index(load_settings(tree, {})) as index:
        assert index.leaf._client._replicas is None  # type: ignore[attr-defined]
    with pair.open(read_from="master") as index:
        assert index._client._replicas is None
    # Who names one server means that one.
    settings = patient(read_from="replicas")
    with RedisIndex.from_settings(pair.master.url, settings, count=lambda name: None) as index:
        name = filled(index)
        before = evals(pair.replica)
        for _ in range(5):
            assert served(index.match(name, chain(6))) == 6
        assert not index._client._replicas._masters  # type: ignore[union-attr]
        assert evals(pair.replica) == before


def test_a_fresh_answer_is_the_masters(pair: Pair) -> None:
    with pair.open(max_lag_s=80.0) as index:
        name = filled(index)
        until(lambda: is_read(pair, index, name))
        pair.cut()
        put_all(index, name, chain(8, seed="later"), [4, 4])
        digests = chain(8, seed="later")
        assert not served(index.match(name, digests)) and set(index.find(name, digests)) == {None}
        assert served(index.match(name, digests, fresh=True)) == 8
        assert None not in index.find(name, digests, fresh=True)


def test_a_replica_that_came_later_is_found(replicated_cluster: RedisClusterServers) -> None:
    """A Cluster's client asks for its nodes when something fails, and nothing does."""
    counts: Counter[str] = Counter()
    with RedisIndex.from_settings(
        replicated_cluster.urls[0],
        patient(max_lag_s=1.0, read_from="replicas"),
        count=lambda name: counts.update([name]),
    ) as index:
        name = filled(index)
        index.match(name, chain(6))
        nodes = index._client._current.nodes_manager.slots_cache  # type: ignore[union-attr]
        for slot, those in list(nodes.items()):
            nodes[slot] = those[:1]  # as it was before there were any
        until(lambda: served(index.match(name, chain(6))) == 6 and counts["replica_reads"] > 0)


def test_what_is_evicted_unseen_is_loaded_within_grace_and_then_a_miss(pair: Pair, tmp_path: Path) -> None:
    """A replica's answer after an eviction leads to the right bytes, or to none."""
    tree = {
        "payloads": f"file://{tmp_path}/payloads",
        "index": pair.url,
        "redis": {"timeout_s": PATIENCE_S, "max_lag_s": 80.0, "read_from": "replicas"},
    }
    hashes = hashes_of(*range(6))
    with open_store(tree) as store:
        space = store.open(space_of(), block_bytes=SLOT_BYTES)
        space.register()
        saved = space.save(slots(hashes))
        assert saved.stored == 6
        reads = lambda: store.counters.snapshot()["replica_reads"]  # noqa: E731
        until(lambda: match(space, hashes).blocks == 6 and reads() > 0)
        pair.cut()
        (run,) = match(space, hashes).runs
        evicted = store.maintenance.evict(space.id, [run.segment], delete_after_s=0, rule="admin")
        assert evicted == 1
        before = reads()
        stale = match(space, hashes)
        assert stale.blocks == 6 and reads() > before, "the replica has not heard of it"
        assert fetch(space, hashes, stale) == [content(one) for one in hashes]

        # The grace time is over.
        with redis.Redis(port=pair.master.port, protocol=2) as raw:
            trash = f"kvs:{{{space.id}}}:trash"
            for one, score in raw.zrange(trash, 0, -1, withscores=True):
                raw.zadd(trash, {one: score - 1000})
        index, payloads = store.maintenance, store.payloads
        assert Housekeeping(index, payloads, store.settings, store.counters, store.clock).reap(space.id) == 1
        stale = match(space, hashes)
        assert stale.blocks == 6
        with pytest.raises(PayloadMissing):
            fetch(space, hashes, stale)
        assert match(space, hashes).blocks == 0, "it is quarantined here, whatever the replica says"


def test_what_lags_and_what_is_remembered_end_within_grace() -> None:
    tree: dict[str, Any] = {"payloads": "file:///nowhere", "index": "redis+sentinel://h:1/m/0"}
    wrong = r"must not add up to more than grace_s = 120, or a run that was"
    lagging = {"max_lag_s": 100, "read_from": "replicas"}
    with pytest.raises(ConfigError, match=wrong):
        load_settings({**tree, "redis": lagging}, {})
    for url in ("redis://h:6379/0", "unix:///run/redis.sock"):
        with pytest.raises(ConfigError, match="near_s = 90"):
            load_settings({**tree, "index": url, "redis": {"near_s": 90}}, {})
    # It counts where it is used alone.
    load_settings({**tree, "redis": {"max_lag_s": 100}}, {})
    load_settings({"payloads": "file:///nowhere", "redis": {**lagging, "near_s": 90}}, {})
    load_settings({**tree, "index": "unix:///run/redis.sock", "redis": lagging}, {})


def test_by_default_replicas_are_read_where_grace_has_room() -> None:
    """What was valid stays valid, and then all of the grace time is for loads, as ever."""
    tree: dict[str, Any] = {"payloads": "file:///nowhere", "grace_s": 120}

    def made(url: str, match_ttl_s: float, load_deadline_s: float, **more: Any) -> Settings:
        kv = {"match_ttl_s": match_ttl_s, "load_deadline_s": load_deadline_s}
        return load_settings({**tree, "index": url, "kv": kv, "redis": more}, {})

    for url in ("redis+sentinel://h:1/m/0", "redis://a,b,c", "rediss://h:6379/0"):
        given = made(url, 58, 60)
        assert given.redis.read_from == "auto" and given.redis.near_s == 0 and given.reads_replicas
        assert not made(url, 58, 60, read_from="master").reads_replicas
        for tight in (made(url, 58.1, 60), made(url, 60, 60), made(url, 58, 60, near_s=0.1)):
            assert not tight.reads_replicas
        assert made(url, 55, 60, near_s=3.0).reads_replicas
        with pytest.raises(ConfigError, match="if replicas are read"):
            made(url, 58.1, 60, read_from="replicas")
    for url in ("unix:///run/redis.sock", "sqlite:///index"):
        assert (
            not made(url, 10, 30).reads_replicas
            and not made(url, 10, 30, read_from="replicas").reads_replicas
        )
    # A sum that is exact, and a difference that would not be.
    exact = {
        "payloads": "file:///nowhere",
        "grace_s": 0.5,
        "kv": {"match_ttl_s": 0.4, "load_deadline_s": 0.1},
    }
    load_settings({**exact, "index": "redis://h:6379/0"}, {})


def stored(url: str, folder: Path, **more: Any) -> Store:
    """As an engine opens it whose settings say little."""
    redis_s = {"timeout_s": PATIENCE_S, "connect_timeout_s": PATIENCE_S, **more.pop("redis", {})}
    return open_store({"payloads": f"file://{folder}/payloads", "index": url, "redis": redis_s, **more})


def saved(store: Store) -> tuple[Space, list[bytes]]:
    hashes = hashes_of(*range(6))
    space = store.open(space_of(), block_bytes=SLOT_BYTES)
    space.register()
    assert space.save(slots(hashes)).stored == 6
    return space, hashes


@pytest.mark.parametrize("who", ["sentinels", "one node", "all nodes"])
def test_replicas_are_read_by_default_where_they_are_known(
    who: str, pair: Pair, replicated_cluster: RedisClusterServers, tmp_path: Path
) -> None:
    hosts = ",".join(f"127.0.0.1:{port}" for port in replicated_cluster.ports)
    urls = {
        "sentinels": pair.url,
        "one node": replicated_cluster.urls[0],
        "all nodes": f"redis://{hosts}/0",
    }
    with stored(urls[who], tmp_path) as store:
        space, hashes = saved(store)
        until(lambda: match(space, hashes).blocks == 6 and store.counters.snapshot()["replica_reads"])
        assert fetch(space, hashes, match(space, hashes)) == [content(one) for one in hashes]
    with stored(urls[who], tmp_path, kv={"match_ttl_s": 60, "load_deadline_s": 60}) as store:
        assert store.maintenance.leaf._client._replicas is None  # type: ignore[attr-defined]
        assert match(store.open(space_of(), block_bytes=SLOT_BYTES), hashes).blocks == 6


def test_a_server_that_nobody_names_replicas_of_is_asked_as_ever(
    private_redis: RedisServer, tmp_path: Path
) -> None:
    """It costs it no call, and an engine no thread."""
    with stored(private_redis.url, tmp_path) as store:
        space, hashes = saved(store)
        assert match(space, hashes).blocks == 6
        replicas = store.maintenance.leaf._client._replicas  # type: ignore[attr-defined]
        before = calls(private_redis)
        for _ in range(5):
            assert match(space, hashes).blocks == 6
        asked = calls(private_redis) - before
        # The question itself, and what was asked, with what the script does.
        assert (asked["info"], asked["evalsha"]) == (1, 5)
        assert set(asked) == {"info", "evalsha", "hget", "hmget"}
        assert not replicas._masters and not store.counters.snapshot()["replica_lags"]


def calls(server: RedisServer) -> Counter[str]:
    """What was asked of a server but by engines that tell what became of requests."""
    with redis.Redis(port=server.port, protocol=2) as client:
        told = client.info("commandstats")
    return Counter({name.removeprefix("cmdstat_"): one["calls"] for name, one in told.items()})


def test_a_user_who_may_not_read_replicas_goes_on_by_the_masters(
    replicated_cluster: RedisClusterServers, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as one of releases that read none. Its log says so once, and the servers' hardly more often."""
    page = (Path(__file__).parents[3] / "docs" / "security.md").read_text(encoding="utf-8")
    [rule] = re.findall(r"^user kvstore on >PASSWORD (.*)$", page, re.MULTILINE)
    user = ("ACL", "SETUSER", "before")
    replicated_cluster.everywhere(*user, "on", ">secret", *rule.split(), "+command", "+cluster|slots")
    login = {"username": "before", "password": "secret", "shards": 8}
    try:
        with stored(replicated_cluster.urls[0], tmp_path, redis=login) as store:
            space, hashes = saved(store)
            replicas = store.maintenance.leaf._client._replicas  # type: ignore[attr-defined]

            def all_rest() -> bool:
                assert match(space, hashes).blocks == 6
                return all(one.look_s > time.monotonic() + 60 for one in replicas._masters.values())

            until(all_rest)
            found = match(space, hashes)
            assert fetch(space, hashes, found) == [content(one) for one in hashes]
            assert (
                store.maintenance.evict(space.id, [found.runs[0].segment], delete_after_s=0, rule="admin")
                == 1
            )
            assert match(space, hashes).blocks == 0
            assert space.save(slots(hashes)).stored == 6 and match(space, hashes).blocks == 6
            told = store.counters.snapshot()
            assert told["replica_lags"] and not told["replica_reads"] and not told["replica_failures"]
        warned = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
        assert len(warned) == len(replicas._masters) == 1 and "chapter on security" in warned[0]
    finally:
        replicated_cluster.everywhere("ACL", "DELUSER", "before")


def test_masters_without_replicas_are_hardly_asked_for_them(private_redis: RedisServer) -> None:
    """A Cluster's, a lone one's that Sentinels watch, or one that doesn't tell."""
    with ScriptedSentinel(private_redis.port) as sentinel, redis.Redis(port=private_redis.port) as raw:
        raw.execute_command("ACL", "SETUSER", "mute", "on", ">secret", "~*", "+@all", "-info")
        for login, rest_s in ({}, 5), ({"username": "mute", "password": SecretStr("secret")}, 60):
            url = f"redis+sentinel://127.0.0.1:{sentinel.port}/{MASTER}/0"
            with RedisIndex.from_settings(url, patient(**login), count=lambda name: None) as index:
                name, replicas = filled(index), index._client._replicas
                assert replicas is not None

                def rests(replicas: Replicas = replicas, rest_s: int = rest_s) -> bool:
                    assert served(index.match(name, chain(6))) == 6
                    return replicas._masters[("", 0)].look_s > time.monotonic() + rest_s

                until(rests)
