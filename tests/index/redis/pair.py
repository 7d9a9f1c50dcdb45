"""A master and its replica, for tests of reads from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from kvstore.index.redis.index import RedisIndex
from kvstore.keys import NamespaceId
from tests.index.contract.chains import chain, namespace, put_all, served
from tests.index.redis.scripted_sentinel import MASTER, ScriptedSentinel
from tests.servers.redis import RedisServer, patient
from tests.servers.wire import Wire
from tests.waiting import until


class Pair:
    """A master, its replica behind a wire, and a Sentinel that names the master."""

    def __init__(
        self, master: RedisServer, replica: RedisServer, wire: Wire, sentinel: ScriptedSentinel
    ) -> None:
        self.master, self.replica, self.wire, self.sentinel = master, replica, wire, sentinel
        self.url = f"redis+sentinel://127.0.0.1:{sentinel.port}/{MASTER}/0"
        self.counts: Counter[str] = Counter()

    def open(self, **settings: Any) -> RedisIndex:
        """As an engine has it."""
        return RedisIndex.from_settings(
            self.url,
            patient(**{"read_from": "replicas", "max_lag_s": 10.0} | settings),
            count=lambda name: self.counts.update([name]),
        )

    def cut(self) -> None:
        """From now on the replica learns of nothing, and goes on answering."""
        self.replica.command("CONFIG", "SET", "repl-timeout", "1000000")
        self.master.command("CONFIG", "SET", "repl-timeout", "1000000")
        self.wire.cut()


@contextmanager
def paired(folder: Path) -> Iterator[Pair]:
    with ExitStack() as stack:
        options = ("--repl-diskless-sync-delay", "0")
        master, replica = (
            stack.enter_context(RedisServer(folder / name, *options)) for name in ("master", "replica")
        )
        wire = stack.enter_context(Wire(master.port))
        sentinel = stack.enter_context(ScriptedSentinel(master.port))
        replica.command("REPLICAOF", "127.0.0.1", str(wire.port))
        until(lambda: b"master_link_status:up" in replica.command("INFO", "replication"))
        yield Pair(master, replica, wire, sentinel)
        # First, or a replica that connects anew keeps the wire from ending.
        replica.kill()
        master.kill()


def follow(replica: RedisServer, port: int) -> None:
    """Makes a server a replica, and waits until it has all."""
    replica.command("REPLICAOF", "127.0.0.1", str(port))
    until(lambda: b"master_link_status:up" in replica.command("INFO", "replication"))


def filled(index: RedisIndex) -> NamespaceId:
    name = index.register(namespace(), expected_blocks=100)
    put_all(index, name, chain(6), [4, 2])
    return name


def is_read(pair: Pair, index: RedisIndex, name: NamespaceId) -> bool:
    """Whether a replica answers a match, which finds all."""
    before = pair.counts["replica_reads"]
    return served(index.match(name, chain(6))) == 6 and pair.counts["replica_reads"] > before
