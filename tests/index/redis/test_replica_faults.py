"""Replicas that fail, lag, restart, are far away or become masters: whom is asked, and what is believed."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import redis

from kvstore.breaker import Breaker
from kvstore.errors import TransientError
from kvstore.index.breaking import BreakingIndex
from kvstore.index.redis.index import RedisIndex
from kvstore.index.redis.replication.replicas import Replicas, _Master
from kvstore.index.scripted.values import key
from kvstore.index.sharding.breakers import ShardBreakers
from kvstore.index.sharding.index import ShardedIndex
from kvstore.index.sharding.names import of_chain, shard_names
from kvstore.index.sharding.requests import ShardedRequests
from kvstore.keys import NamespaceId
from schemas.settings import BreakerSettings
from tests.index.contract.chains import LATER_S, chain, namespace, put_all, served
from tests.index.redis.cluster import RedisClusterServers
from tests.index.redis.pair import Pair, filled, follow, is_read, paired
from tests.servers.redis import RedisServer, patient
from tests.servers.wire import Wire
from tests.waiting import PATIENCE_S, done, until

pytestmark = pytest.mark.servers


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with paired(tmp_path) as pair:
        yield pair


def known(index: RedisIndex) -> tuple[Replicas, _Master]:
    """What an index knows of replicas, all of one master."""
    replicas = index._client._replicas
    assert replicas is not None
    (master,) = replicas._masters.values()
    return replicas, master


def test_a_replica_that_is_cut_off_is_read_until_it_lags_too_far(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    with pair.open(max_lag_s=1.0) as index, caplog.at_level(logging.INFO):
        name = filled(index)
        until(lambda: is_read(pair, index, name))
        pair.cut()
        put_all(index, name, chain(9), [4, 2, 3])
        # Nobody waits for anything: what a match is answered is of the replica, and then of the master.
        until(lambda: served(index.match(name, chain(9))) == 9)
        until(lambda: index.match(name, chain(9)) and "lags by more than redis.max_lag_s = 1" in caplog.text)
        before = pair.counts.copy()
        assert served(index.match(name, chain(9))) == 9
        assert pair.counts["replica_lags"] == before["replica_lags"] + 1
        assert pair.counts["replica_reads"] == before["replica_reads"]
        pair.wire.mend()
        until(lambda: is_read(pair, index, name))
        assert "is read again" in caplog.text and not pair.counts["replica_failures"]


@pytest.mark.parametrize("fault", ["killed", "hangs", "loading"])
def test_a_replica_that_fails_costs_no_answer(pair: Pair, fault: str) -> None:
    with pair.open(timeout_s=PATIENCE_S / 4) as index:
        name = filled(index)
        until(lambda: is_read(pair, index, name))
        _, master = known(index)
        master.look_s = float("inf")  # nobody looks meanwhile
        if fault == "killed":
            pair.replica.kill()
        elif fault == "hangs":
            index._client._timeout_s = 4.0
            pair.replica.pause()
        else:
            # It says so to every script, as one that loads does.
            pair.replica.command("CONFIG", "SET", "replica-serve-stale-data", "no")
            pair.replica.command("REPLICAOF", "127.0.0.1", "1")
        assert served(index.match(name, chain(6))) == 6
        assert pair.counts["replica_failures"] == 1
        assert served(index.match(name, chain(6))) == 6
        assert pair.counts["replica_failures"] == 1, "it is not asked again before it has answered a look"


def test_without_its_master_a_replica_is_read_for_as_long_as_it_may_lag(pair: Pair) -> None:
    with pair.open(max_lag_s=PATIENCE_S) as index:
        name = filled(index)
        until(lambda: is_read(pair, index, name))
        pair.master.kill()
        assert is_read(pair, index, name)
        replicas, _ = known(index)
        replicas._monotonic = lambda: time.monotonic() + 2 * PATIENCE_S
        with pytest.raises(TransientError):
            index.match(name, chain(6))


def test_who_looks_for_the_first_time_is_told_what_hears_its_master_no_more(pair: Pair) -> None:
    """As the doctor does, who knows nothing from before."""
    with pair.open() as index:
        name = filled(index)
        until(lambda: is_read(pair, index, name))
        here = f"127.0.0.1:{pair.replica.port}"
        with pair.open() as doctor:
            until(lambda: doctor._client.replicas() == {here: ""})
        pair.cut()
        put_all(index, name, chain(9), [4, 2, 3])
    with pair.open() as doctor:
        assert "behind its master" in doctor._client.replicas()[here]


def test_who_finds_out_if_a_master_is_back_asks_the_master(pair: Pair) -> None:
    """A replica's answer says nothing of it, and another probe would end the same way."""
    now = [0.0]
    with pair.open(max_lag_s=PATIENCE_S) as leaf:
        name = filled(leaf)
        until(lambda: is_read(pair, leaf, name))
        settings = BreakerSettings(failures=3, backoff_s=1, max_backoff_s=1)
        breaker = Breaker("index", settings, lambda: now[0])
        index = BreakingIndex(leaf, breaker)
        for _ in range(3):
            breaker.blame()
        assert not breaker.is_closed
        now[0] += 2.0
        before = pair.counts["replica_reads"]
        assert None not in index.find(name, chain(6))
        assert breaker.is_closed and pair.counts["replica_reads"] == before
        assert None not in index.find(name, chain(6))
        assert pair.counts["replica_reads"] == before + 1


def test_a_replica_that_leaves_ends_no_read_that_is_under_way(pair: Pair) -> None:
    """Such a read would fail in ways that nobody knows, and say that the namespace is damaged."""
    with pair.open(max_lag_s=PATIENCE_S) as index:
        name = filled(index)
        until(lambda: is_read(pair, index, name))
        replicas, master = known(index)
        (replica,) = master.readable
        reading = replica.client.connection_pool.get_connection()
        socket = reading._sock
        assert socket is not None
        pair.replica.command("REPLICAOF", "NO", "ONE")

        def left() -> bool:
            replicas.look(master, index._client._client(), [])
            return not master.clients

        until(left)
        assert reading._sock is socket and not master.readable
        reading.disconnect()
        assert served(index.match(name, chain(6))) == 6


def test_a_look_that_outlives_its_index_leaves_nothing_behind(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    index = pair.open(max_lag_s=PATIENCE_S)
    name = filled(index)
    until(lambda: is_read(pair, index, name))
    replicas, master = known(index)
    master.look_s = float("inf")
    until(lambda: master.looking is None or master.looking.done())
    client, history = index._client._client(), master.history

    def ends() -> float:
        index.close()
        return time.monotonic()

    replicas._monotonic = ends
    for asked in replicas.look(master, client, []):
        asked.result(PATIENCE_S)
    (address,) = master.clients
    # One that had begun before.
    master.history = history
    replicas._ask(master, address, history, time.monotonic())
    for server in (pair.master, pair.replica):
        until(lambda server=server: engines(server) == 0)
    assert "is not read" not in caplog.text and not master.excluded


def engines(server: RedisServer) -> int:
    """How many connections have asked a server for its part in replication last."""
    with redis.Redis(port=server.port, protocol=2) as client:
        return sum(one["cmd"] == "info" for one in client.client_list())


def test_a_replicas_answer_closes_no_breaker(pair: Pair) -> None:
    """While it answers matches, what fails at the master is still counted."""
    with pair.open(max_lag_s=80.0) as leaf:
        name = filled(leaf)
        until(lambda: is_read(pair, leaf, name))
        breaker = Breaker("index", BreakerSettings(failures=3, backoff_s=3600, max_backoff_s=3600))
        index = BreakingIndex(leaf, breaker)
        pair.master.kill()
        for _ in range(3):
            assert breaker.is_closed and served(index.match(name, chain(6))) == 6
            with pytest.raises(TransientError):
                index.register(namespace(), expected_blocks=100)
        assert not breaker.is_closed


def test_a_replica_that_was_restarted_shows_what_it_has_before_it_is_read(pair: Pair) -> None:
    with pair.open(max_lag_s=80.0) as index:
        name = filled(index)
        until(lambda: is_read(pair, index, name))
        _, master = known(index)
        master.look_s = float("inf")  # nobody looks meanwhile
        (replica,) = master.readable
        assert replica.has > 0
        pair.cut()
        # What a restart from an old snapshot is like: the address answers, and has less than it had.
        master.readable = (dataclasses.replace(replica, has=replica.has + 1_000_000),)
        replica.client.connection_pool.disconnect()
        assert served(index.match(name, chain(6))) == 6
        assert pair.counts["replica_failures"] == 1 and not master.readable


def test_a_master_that_is_none_any_more_has_no_replicas(pair: Pair) -> None:
    with pair.open() as index:
        name = filled(index)
        until(lambda: is_read(pair, index, name))
        replicas, master = known(index)
        master.look_s = float("inf")
        assert master.readable
        replicas.look(master, redis.Redis(port=pair.replica.port, protocol=2), [])
        assert not master.readable


def test_a_replica_that_hangs_takes_no_other_away(pair: Pair, tmp_path: Path) -> None:
    with RedisServer(tmp_path / "second") as second:
        second.command("REPLICAOF", "127.0.0.1", str(pair.master.port))
        until(lambda: b"master_link_status:up" in second.command("INFO", "replication"))
        with pair.open(max_lag_s=80.0, timeout_s=4 * PATIENCE_S) as index:
            name = filled(index)
            index.match(name, chain(6))
            _, master = known(index)

            def readable() -> set[int]:
                master.look_s = 0.0
                assert served(index.match(name, chain(6))) == 6
                return {port for _, port in (one.address for one in master.readable)}

            until(lambda: len(readable()) == 2)
            index._client._timeout_s = 8.0
            pair.replica.pause()
            as_of_s = max(one.as_of_s for one in master.readable)

            def goes_on() -> bool:
                readable()
                return any(one.as_of_s > as_of_s for one in master.readable)

            until(goes_on)


def test_a_child_of_this_process_knows_nothing(pair: Pair) -> None:
    """It has none of the threads that look, and maybe locks that these have held."""
    with pair.open(max_lag_s=80.0) as index:
        name = filled(index)
        until(lambda: is_read(pair, index, name))
        replicas, master = known(index)
        replicas._pid -= 1
        assert served(index.match(name, chain(6))) == 6 and known(index)[1] is not master
        until(lambda: is_read(pair, index, name))


def test_one_has_no_connection_left_which_is_not_the_replicas_fault(pair: Pair) -> None:
    with pair.open(max_lag_s=PATIENCE_S, max_connections=1) as index:
        name = filled(index)
        until(lambda: is_read(pair, index, name))
        _, master = known(index)
        master.look_s = float("inf")
        (replica,) = master.readable
        pool, before = replica.client.connection_pool, pair.counts.copy()
        mine, pool.timeout = pool.get_connection(), 0.1
        try:
            assert served(index.match(name, chain(6))) == 6
        finally:
            pool.release(mine)
            pool.timeout = PATIENCE_S
        assert pair.counts == before and master.readable
        assert is_read(pair, index, name)


class Long(Wire):
    """A wire on which everything takes its time."""

    delay_s = 0.0

    def _hold(self, gate: threading.Event) -> None:
        time.sleep(self.delay_s)
        super()._hold(gate)


def test_a_replica_that_is_far_away_is_not_read(pair: Pair, tmp_path: Path) -> None:
    """It would make every other match slow."""
    with RedisServer(tmp_path / "far") as far, Long(far.port) as way:
        far.command("CONFIG", "SET", "replica-announce-ip", "127.0.0.1")
        far.command("CONFIG", "SET", "replica-announce-port", str(way.port))
        far.command("CONFIG", "SET", "repl-diskless-sync-delay", "0")
        follow(far, pair.master.port)
        with pair.open(max_lag_s=80.0) as index:
            name = filled(index)
            there, here = f"127.0.0.1:{way.port}", f"127.0.0.1:{pair.replica.port}"
            asked = index._client.replicas
            until(lambda: asked() == {there: "", here: ""})
            way.delay_s = 0.2
            until(lambda: "its master in" in asked()[there], say=asked)
            _, master = known(index)
            until(lambda: not asked()[here], say=asked)
            assert [one.address[1] for one in master.readable] == [pair.replica.port]
            assert is_read(pair, index, name) and is_read(pair, index, name)
            # That it is read again takes one quick answer.
            way.delay_s = 0.0
            until(lambda: asked() == {there: "", here: ""}, say=asked)


def test_after_a_failover_nothing_is_believed_that_was_known_before(pair: Pair, tmp_path: Path) -> None:
    """One replica becomes the master; the other one goes on answering what the former master had."""
    with RedisServer(tmp_path / "second", "--repl-diskless-sync-delay", "0") as second:
        follow(second, pair.master.port)
        with pair.open(max_lag_s=80.0) as index:
            name = filled(index)
            until(lambda: is_read(pair, index, name))
            _, master = known(index)
            until(lambda: set(index._client.replicas().values()) == {""} and len(master.readable) == 2)
            history = master.history
            pair.cut()
            pair.master.kill()
            second.command("REPLICAOF", "NO", "ONE")
            pair.sentinel.master = second.port
            with RedisIndex.from_settings(second.url, patient()) as tool:
                segments = [run.segment for run in tool.match(name, chain(6))]
                assert tool.evict(name, segments, delete_after_s=LATER_S, rule="admin") == 2

            def hears() -> bool:
                master.look_s = 0.0
                done(lambda: index.match(name, chain(6)))
                return master.history not in ("", history)

            # Until then, which without a look is max_lag_s, a match may be told either.
            until(hears)
            before = pair.counts.copy()
            for _ in range(10):
                assert not index.match(name, chain(6)), "evicted at the master that there is"
                master.look_s = 0.0
            assert pair.counts["replica_reads"] == before["replica_reads"]
            # The other one follows, and is read.
            pair.replica.command("REPLICAOF", "127.0.0.1", str(second.port))
            put_all(index, name, chain(6), [4, 2])
            until(lambda: index._client.replicas() and is_read(pair, index, name))


def test_another_master_is_not_followed_by_the_replicas_of_the_former(pair: Pair) -> None:
    """Offsets of two histories can't be compared."""
    with pair.open() as index:
        name = filled(index)
        until(lambda: is_read(pair, index, name))
        replicas, master = known(index)
        master.look_s, master.history = float("inf"), "another's"
        (replica,) = master.readable
        replicas._ask(master, replica.address, "another's", 0.0)
        assert not master.readable and "follows another master" in str(master.excluded)


def of_each_shard(names: Sequence[NamespaceId]) -> dict[NamespaceId, bytes]:
    """A chain for each shard."""
    chains: dict[NamespaceId, bytes] = {}
    for seed in itertools.count():
        if len(chains) == len(names):
            return chains
        chains.setdefault(of_chain(names, one := chain(6, seed=str(seed))), one)
    raise AssertionError


def test_of_a_namespace_in_shards_one_master_is_dead_and_then_replaced(tmp_path: Path) -> None:
    """Its replica answers matches for max_lag_s; then it is the breaker's, until there is another master. No
    other shard notices."""
    ahead, counts = [0.0], Counter[str]()
    settings = BreakerSettings(failures=3, backoff_s=0.05, max_backoff_s=0.05)
    with RedisClusterServers(tmp_path / "cluster", replicas=True) as cluster:
        cluster.set("cluster-require-full-coverage", "no")
        cluster.set("cluster-replica-no-failover", "yes")
        leaf = RedisIndex.from_settings(
            cluster.urls[0],
            patient(max_lag_s=80.0, read_from="replicas"),
            count=lambda name: counts.update([name]),
        )
        with ShardedIndex(leaf, shards=8) as whole:
            name = whole.register(namespace(), expected_blocks=1000)
            chains = of_each_shard(shard_names(name, 8))
            for one in chains.values():
                put_all(whole, name, one, [4, 2])
            breakers = ShardBreakers(lambda name: Breaker(name, settings))
            index = ShardedRequests(leaf, shards=8, guard=breakers.guard)
            replicas = leaf._client._replicas
            assert replicas is not None
            replicas._monotonic = lambda: time.monotonic() + ahead[0]

            def from_a_replica(one: bytes) -> bool:
                before = counts["replica_reads"]
                return served(index.match(name, one)) == 6 and counts["replica_reads"] > before

            for one in chains.values():
                until(lambda one=one: from_a_replica(one))
            ports = {shard: _port(leaf, shard) for shard in chains}
            lost = next(iter(ports.values()))
            dead = [one for shard, one in chains.items() if ports[shard] == lost]
            alive = [one for shard, one in chains.items() if ports[shard] != lost]
            assert dead and alive
            cluster.kill(lost)
            assert all(from_a_replica(one) for one in chains.values())

            ahead[0] += 100.0
            for one in dead:
                with pytest.raises(TransientError):
                    index.match(name, one)
            assert all(served(index.match(name, one)) == 6 for one in alive)

            cluster.take_over(cluster.ports[3 + cluster.ports.index(lost)])

            def back(one: bytes) -> bool:
                """As an engine finds out."""
                with suppress(TransientError):
                    index.register(namespace(), expected_blocks=1000)
                    return served(index.match(name, one)) == 6
                return False

            for one in dead:
                until(lambda one=one: back(one))
                segments = [run.segment for run in index.match(name, one)]
                assert index.evict(name, segments, delete_after_s=LATER_S, rule="admin") == 2
            assert not any(index.match(name, one) for one in dead for _ in range(4))
            assert all(served(index.match(name, one)) == 6 for one in alive)


def _port(leaf: RedisIndex, shard: NamespaceId) -> int:
    client: Any = leaf._client._current
    return int(client.get_node_from_key(key(shard, "meta")).port)
