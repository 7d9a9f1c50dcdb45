"""The index fails: a Redis, a master that Sentinels replace, and SQLite."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import redis

from tests.index.redis.proxy import LossyProxy
from tests.index.redis.sentinels import SentinelServers
from tests.servers.redis import RedisServer
from trials.faults.bed import BUSY_S, PATIENT, Bed, bed
from trials.faults.disks import disk, full
from trials.faults.row import Result, Row
from trials.faults.trial import AT_ONCE, DOWN, MATCH, Fault, mended, on, rebuilt

Made = Iterator[Callable[[], int]]


@contextmanager
def redis_bed() -> Iterator[Bed]:
    """A Redis that keeps what it has in a file, behind a proxy; payloads in a folder."""
    with ExitStack() as stack:
        top = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvs-bed-")))
        mounted = stack.enter_context(disk(top / "payloads"))
        server = stack.enter_context(RedisServer(top / "redis", "--appendonly", "yes"))
        proxy = stack.enter_context(LossyProxy(server.port))
        settings = {"index": f"redis://127.0.0.1:{proxy.port}/0", "payloads": f"file://{top}/payloads"}
        parts = {"redis": server, "proxy": proxy}
        direct = {"index": server.url, **PATIENT}
        yield stack.enter_context(bed(parts, settings, direct, top / "payloads", mounted=mounted))


@contextmanager
def sentinel_bed() -> Iterator[Bed]:
    """A master, a replica and three Sentinels; payloads in a folder."""
    with ExitStack() as stack:
        top = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvs-bed-")))
        servers = stack.enter_context(SentinelServers(top / "redis"))
        settings = {"index": servers.url, "payloads": f"file://{top}/payloads"}
        yield stack.enter_context(bed({"sentinels": servers}, settings, PATIENT, top / "payloads"))


@contextmanager
def sqlite_bed() -> Iterator[Bed]:
    """SQLite on a disk of its own; payloads in a folder."""
    with ExitStack() as stack:
        top = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvs-bed-")))
        mounted = stack.enter_context(disk(top / "index", 16 << 20))
        file = top / "index" / "index.sqlite"
        settings = {"index": f"sqlite://{file}", "payloads": f"file://{top}/payloads"}
        parts = {"file": file}
        yield stack.enter_context(bed(parts, settings, PATIENT, top / "payloads", mounted=mounted))


# ---- Redis ------------------------------------------------------------------------------------------


@contextmanager
def stopped(one: Bed, names: list[str]) -> Made:
    server: RedisServer = one.parts["redis"]
    server.stop()
    yield lambda: 1
    server.start()


@contextmanager
def killed(one: Bed, names: list[str]) -> Made:
    server: RedisServer = one.parts["redis"]
    server.kill()
    yield lambda: 1
    server.start()


@contextmanager
def hung(one: Bed, names: list[str]) -> Made:
    server: RedisServer = one.parts["redis"]
    server.pause()
    try:
        yield lambda: 1
    finally:
        server.resume()


@contextmanager
def flushed(one: Bed, names: list[str]) -> Made:
    one.parts["redis"].flush()
    yield lambda: 1


@contextmanager
def restarted_empty(one: Bed, names: list[str]) -> Made:
    server: RedisServer = one.parts["redis"]
    server.kill()
    shutil.rmtree(server._folder / "appendonlydir")
    server.start()
    yield lambda: 1


def proxied(**changes: Any) -> Fault:
    """The proxy does this to replies, or loses requests."""

    @contextmanager
    def fault(one: Bed, names: list[str]) -> Made:
        proxy: LossyProxy = one.parts["proxy"]
        before, spoiled = {name: getattr(proxy, name) for name in changes}, proxy.spoiled
        for name, value in changes.items():
            setattr(proxy, name, value)
        try:
            yield lambda: proxy.spoiled - spoiled
        finally:
            for name, value in before.items():
                setattr(proxy, name, value)

    return fault


def configured(put: list[str], back: list[str], *, drop: bool = False) -> Fault:
    """A command of an administrator, and another that takes it back. `drop`: connections end in between."""

    @contextmanager
    def fault(one: Bed, names: list[str]) -> Made:
        with redis.Redis(port=one.parts["redis"].port, protocol=2, single_connection_client=True) as client:
            client.execute_command(*put)
            if drop:
                client.client_kill_filter(_type="normal", skipme=True)
            yield lambda: 1
            client.execute_command(*back)

    return fault


@contextmanager
def repeatedly(act: Callable[[redis.Redis], Any], every_s: float, one: Bed) -> Made:
    """Does something to the server again and again, on a thread of its own."""
    over, done = threading.Event(), 0

    def work() -> None:
        nonlocal done
        with redis.Redis(port=one.parts["redis"].port, protocol=2) as client:
            while not over.wait(every_s):
                with contextlib.suppress(redis.RedisError):
                    act(client)
                    done += 1

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield lambda: done
    finally:
        over.set()
        thread.join()


@contextmanager
def connections_dropped(one: Bed, names: list[str]) -> Made:
    def act(client: redis.Redis) -> None:
        client.client_kill_filter(_type="normal", skipme=True)
        client.script_flush()

    with repeatedly(act, 0.03, one) as made:
        yield made


@contextmanager
def busy(one: Bed, names: list[str]) -> Made:
    """Somebody's script does not end; SCRIPT KILL ends it."""
    server: RedisServer = one.parts["redis"]
    server.command("CONFIG", "SET", "busy-reply-threshold", "10")
    # It is answered when it is killed.
    thread = threading.Thread(
        target=server.command,
        args=("EVAL", "while true do end", "0"),
        kwargs={"timeout_s": 600.0},
        daemon=True,
    )
    thread.start()
    try:
        yield lambda: 1
    finally:
        while thread.is_alive():
            server.command("SCRIPT", "KILL")
            thread.join(0.05)
        server.command("CONFIG", "SET", "busy-reply-threshold", "5000")


def _segments(names: list[str]) -> dict[str, list[bytes]]:
    """Takes payloads' names apart: the ids of their segments, by namespace."""
    found: dict[str, list[bytes]] = {}
    for name in names:
        namespace, _, leaf = name.split("/")
        found.setdefault(namespace, []).append(bytes.fromhex(leaf.partition(".")[0]))
    return found


def records(damage: Callable[[list[bytes]], list[bytes]]) -> Fault:
    """The records of the victims' segments are other ones."""

    @contextmanager
    def fault(one: Bed, names: list[str]) -> Made:
        made = 0
        with redis.Redis(port=one.parts["redis"].port, protocol=2) as client:
            for namespace, segments in _segments(names).items():
                key = f"kvs:{{{namespace}}}:segs"
                values = [value for value in client.hmget(key, segments) if value]
                for segment, value in zip(segments, damage(values), strict=True):
                    client.hset(key, segment, value)
                    made += 1
        yield lambda: made

    return fault


@contextmanager
def entries_elsewhere(one: Bed, names: list[str]) -> Made:
    """Entries of the victims' blocks name a slot of another victim's segment."""
    made = 0
    with redis.Redis(port=one.parts["redis"].port, protocol=2) as client:
        for namespace, segments in _segments(names).items():
            if len(segments) < 2:
                continue
            others = dict(zip(segments, [*segments[1:], segments[0]], strict=True))
            for key in client.keys(f"kvs:{{{namespace}}}:b:*"):
                for digest, entry in client.hgetall(key).items():
                    if entry[:8] in others:
                        client.hset(key, digest, others[entry[:8]] + entry[8:])
                        made += 1
    yield lambda: made


@contextmanager
def wrong_types(one: Bed, names: list[str]) -> Made:
    """Where the records were there is a list of somebody else's; afterwards nothing."""
    keys = [f"kvs:{{{namespace}}}:segs" for namespace in _segments(names)]
    with redis.Redis(port=one.parts["redis"].port, protocol=2) as client:
        for key in keys:
            client.delete(key)
            client.lpush(key, "what", "is", "this")
        yield lambda: len(keys)
        for key in keys:
            client.delete(key)


# ---- Sentinels --------------------------------------------------------------------------------------


@contextmanager
def failed_over(one: Bed, names: list[str]) -> Made:
    servers: SentinelServers = one.parts["sentinels"]
    master, replica = servers.master(), servers.replica()
    servers.wait(lambda: _offset(master) == _offset(replica))
    master.kill()
    yield lambda: 1
    servers.wait(lambda: servers.master() is replica)
    master.start()
    servers.settle()


def _offset(server: RedisServer) -> bytes:
    fields = dict(
        line.split(b":", 1) for line in server.command("INFO", "replication").split() if b":" in line
    )
    return fields.get(b"slave_repl_offset") or fields[b"master_repl_offset"]


# ---- SQLite -----------------------------------------------------------------------------------------


@contextmanager
def locked(one: Bed, names: list[str]) -> Made:
    """Another process hangs in a transaction that writes."""
    with contextlib.closing(sqlite3.connect(one.parts["file"], isolation_level=None)) as other:
        other.execute("PRAGMA busy_timeout = 20000")
        other.execute("BEGIN IMMEDIATE")
        began = time.monotonic()
        yield lambda: 1
        # Saves wait in the background for as long as they may: on a quick machine longer than all of this.
        time.sleep(max(0.0, began + 2 * BUSY_S - time.monotonic()))
        other.execute("ROLLBACK")


def _files(one: Bed) -> list[Path]:
    file: Path = one.parts["file"]
    return [path for path in file.parent.iterdir() if path.name.startswith(file.name)]


@contextmanager
def deleted(one: Bed, names: list[str]) -> Made:
    for path in _files(one):
        path.unlink(missing_ok=True)
    yield lambda: 1


@contextmanager
def scribbled(one: Bed, names: list[str]) -> Made:
    """Other bytes in all pages but the first; afterwards the operator removes the file."""
    size = one.parts["file"].stat().st_size
    for path in _files(one):
        if not path.name.endswith("-shm"):
            with path.open("r+b") as file:
                file.seek(4096)
                file.write(b"\xa5" * max(0, path.stat().st_size - 4096))
    yield lambda: size // 4096
    for path in _files(one):
        path.unlink(missing_ok=True)


@contextmanager
def disk_full(one: Bed, names: list[str]) -> Made:
    """Not even the log has room, which SQLite else writes again from its beginning."""
    with contextlib.closing(sqlite3.connect(one.parts["file"], isolation_level=None)) as other:
        other.execute("PRAGMA busy_timeout = 20000")
        other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    with full(one.parts["file"].parent, one.mounted) as made:
        yield made


OTHER_SERVER = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"
FULL = ["CONFIG", "SET", "maxmemory", "1"], ["CONFIG", "SET", "maxmemory", "0"]
READONLY = ["REPLICAOF", "127.0.0.1", "1"], ["REPLICAOF", "NO", "ONE"]
FORBIDDEN = ["ACL", "SETUSER", "default", "resetkeys"], ["ACL", "SETUSER", "default", "allkeys"]
CROWDED = ["CONFIG", "SET", "maxclients", "1"], ["CONFIG", "SET", "maxclients", "10000"]


def _row(fault: str, run: Callable[[Path], Result], *, quick: bool = False) -> Row:
    return Row("index", fault, "engine", run, quick)


ROWS: list[Row] = [
    _row("Redis stopped, and back with what it held", on(redis_bed, stopped, AT_ONCE, met=DOWN), quick=True),
    _row("Redis killed, and back with what it had on disk", on(redis_bed, killed, AT_ONCE, met=DOWN)),
    _row("Redis slow: every reply 0.1 s late", on(redis_bed, proxied(late_s=0.1), MATCH)),
    _row("Redis slow: every reply 0.8 s late", on(redis_bed, proxied(late_s=0.8), MATCH, met=DOWN)),
    _row("Redis hung", on(redis_bed, hung, MATCH, met=DOWN), quick=True),
    _row("Redis dripping: 20 bytes a second", on(redis_bed, proxied(drip_s=0.05), MATCH, met=DOWN)),
    _row("Redis flushed", rebuilt(redis_bed, flushed, AT_ONCE, met=("absent",))),
    _row("Redis restarted empty", rebuilt(redis_bed, restarted_empty, AT_ONCE, met=("absent",)), quick=True),
    _row("Redis failed over by Sentinels", on(sentinel_bed, failed_over, MATCH, met=DOWN)),
    _row("Redis full", on(redis_bed, configured(*FULL), AT_ONCE, met=("capacity",))),
    _row("Redis read-only", on(redis_bed, configured(*READONLY), AT_ONCE, met=(*DOWN, "permission"))),
    _row("Redis refuses the user", on(redis_bed, configured(*FORBIDDEN), AT_ONCE, met=("permission",))),
    _row("Redis out of connections", on(redis_bed, configured(*CROWDED, drop=True), AT_ONCE, met=DOWN)),
    _row("Redis busy with a script that does not end", on(redis_bed, busy, AT_ONCE, met=DOWN)),
    _row("Redis loses every request", on(redis_bed, proxied(losses=1 << 30), AT_ONCE, met=DOWN)),
    _row(
        "Redis drops connections and scripts, 30 times a second", on(redis_bed, connections_dropped, AT_ONCE)
    ),
    _row(
        "Redis' port answered by another server",
        on(redis_bed, proxied(garbage=OTHER_SERVER), AT_ONCE, met=DOWN),
    ),
    _row(
        "wrong data: records are garbage",
        mended(redis_bed, records(lambda values: [b"garbage"] * len(values)), AT_ONCE),
    ),
    _row(
        "wrong data: records of other segments",
        mended(redis_bed, records(lambda values: [*values[1:], values[0]]), AT_ONCE),
        quick=True,
    ),
    _row(
        "wrong data: entries name other segments",
        mended(redis_bed, entries_elsewhere, AT_ONCE),
    ),
    _row("wrong data: keys of another type", mended(redis_bed, wrong_types, AT_ONCE)),
    _row("SQLite: a process hangs in a transaction", on(sqlite_bed, locked, MATCH, met=DOWN)),
    _row("SQLite: the file is deleted", rebuilt(sqlite_bed, deleted, MATCH, met=("absent", *DOWN))),
    _row("SQLite: wrong data, all pages but one", rebuilt(sqlite_bed, scribbled, MATCH)),
    _row("SQLite: disk full", on(sqlite_bed, disk_full, MATCH, met=("capacity",))),
]
