"""Many engines start at once on one prefix: what a bucket and a Redis are asked, and how long anybody waits.

    python -m trials.benchmarks.bench_starts [--json FILE] [--clients N] [--processes N] [--server ceph|nginx]

A client is a store of its own with all that an engine opens (index, bucket, breakers, throttle, pools),
driven by one thread in place of an engine's: a Redis and a bucket see one engine, its machine doesn't. So
hundreds fit on one machine, some to a process. Each round is one of these, for all clients at the same moment
and for one client alone, several times:

    cold    nothing is stored: match, compute each segment (a pause), save it
    warm    all is stored: match, load everything, touch

Requests are counted where they leave the process (S3) and by the server (Redis: scripts run). `held` are
segments that a client did not save because another one was doing so. With --per-second a proxy before the
bucket answers 503 SlowDown to what is more than that, and the table says how many requests that were.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import redis

from kvstore.build import load_settings, open_store
from kvstore.errors import KVStoreError
from kvstore.keys import chain_like, digest, new_segment_id, payload_name
from kvstore.store.space import Space
from tests.servers.redis import RedisServer
from tests.servers.s3.ceph import CephServer
from tests.servers.s3.nginx import NginxServer
from tests.servers.s3.proxy import S3Proxy
from tests.store.world import buffers, chain, keys, match, open_space, slots

SEGMENTS, BLOCKS = 8, 32
#: What computing a segment takes, in seconds.
COMPUTE_S = 0.25
ALONE = 10
#: Most time that a round may take.
ROUND_S = 300.0


@dataclass
class Told:
    """What one client has done in a round."""

    seconds: float = 0.0
    match_s: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)


@dataclass
class Row:
    """One line of the table: a round of so many clients, which asked for `segments` segments in all."""

    what: str
    clients: int
    segments: int
    puts: int = 0
    gets: int = 0
    refused: int = 0
    scripts: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)
    match_worst_s: float = 0.0
    middle_s: float = 0.0
    worst_s: float = 0.0


def prefix(number: int) -> list[bytes]:
    return chain(*(number * 10_000 + block for block in range(SEGMENTS * BLOCKS)))


class Client:
    """One engine's store."""

    def __init__(self, tree: dict[str, Any]) -> None:
        self._store = open_store(load_settings(tree, {}))
        self._space: Space = open_space(self._store)
        self._space.register()
        # Its clients are made before, as an engine's are when it has loaded something.
        match(self._space, chain(1))
        with suppress(KVStoreError):  # nginx, which knows no S3, has no code for what isn't there
            name = payload_name(self._space.id, new_segment_id(), 0)
            self._store.backends.payloads.read(name, 0, [memoryview(bytearray(1))])

    def cold(self, number: int) -> Told:
        hashes, told, began = prefix(number), Told(), time.monotonic()
        found = match(self._space, hashes)
        told.match_s = time.monotonic() - began
        for start in range(found.blocks, len(hashes), BLOCKS):
            time.sleep(COMPUTE_S)
            piece = slots(hashes[start : start + BLOCKS])
            segment = new_segment_id(digest(slots(hashes[:1])[0].key))
            try:
                saved = self._space.save(piece, depth=start, chain=chain_like(segment), segment=segment)
                told.outcomes[saved.outcome] += 1
            except KVStoreError as exc:
                told.outcomes[exc.reason] += 1
        told.seconds = time.monotonic() - began
        return told

    def warm(self, number: int) -> Told:
        hashes, told, began = prefix(number), Told(), time.monotonic()
        found = match(self._space, hashes)
        told.match_s = time.monotonic() - began
        told.outcomes["absent"] += SEGMENTS - found.blocks // BLOCKS
        for run in found.runs:
            wanted = keys(hashes[run.start : run.start + run.count])
            try:
                self._space.load(run, wanted, buffers(run.count))
                told.outcomes["loaded"] += 1
            except KVStoreError as exc:
                told.outcomes[exc.reason] += 1
        self._space.touch([run.segment for run in found.runs])
        told.seconds = time.monotonic() - began
        return told

    def close(self) -> None:
        self._store.close()


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Counts the requests for data that leave this process."""
    from kvstore.payloads.s3.transport import S3Data

    made: Counter[str] = Counter()
    plain = {verb: getattr(S3Data, verb) for verb in ("get", "put")}

    def counting(verb: str) -> Callable[..., Any]:
        def call(self: Any, *args: Any) -> Any:
            made[verb] += 1
            return plain[verb](self, *args)

        return call

    for verb in plain:
        setattr(S3Data, verb, counting(verb))
    try:
        yield made
    finally:
        for verb, call in plain.items():
            setattr(S3Data, verb, call)


def asked(pipe: Connection) -> tuple[str, int, bool] | None:
    """Returns what to do next; None if nothing, also when whoever asks has died."""
    try:
        told: tuple[str, int, bool] | None = pipe.recv()
    except EOFError:
        return None
    return told


def child(pipe: Connection, tree: dict[str, Any], count: int, together: Any) -> None:
    """Runs what it is told with some clients, each on a thread. Runs in a process of its own."""
    os.environ["AWS_EC2_METADATA_DISABLED"] = "true"
    with counted() as made:
        clients = [Client(tree) for _ in range(count)]
        pipe.send("ready")
        while (told := asked(pipe)) is not None:
            what, number, alone = told
            made.clear()
            results: list[Told] = []
            ready = threading.Barrier(count + 1)

            def run(verb: Callable[[int], Told], number: int, ready: Any, into: list[Told]) -> None:
                ready.wait()
                into.append(verb(number))

            if alone:
                results.append(getattr(clients[0], what)(number))
            else:
                threads = [
                    threading.Thread(target=run, args=(getattr(client, what), number, ready, results))
                    for client in clients
                ]
                for thread in threads:
                    thread.start()
                together.wait(ROUND_S)
                ready.wait(ROUND_S)
                for thread in threads:
                    thread.join()
            pipe.send((results, Counter(made)))
        for client in clients:
            client.close()


def scripts_run(url: str) -> int:
    with redis.Redis.from_url(url, protocol=2) as client:
        told: dict[str, Any] = client.info("commandstats")  # type: ignore[assignment]
    names = ("cmdstat_evalsha", "cmdstat_eval", "cmdstat_evalsha_ro", "cmdstat_fcall", "cmdstat_fcall_ro")
    return sum(told[name]["calls"] for name in names if name in told)


class Fleet:
    """The processes with the clients."""

    def __init__(self, tree: dict[str, Any], redis_url: str, clients: int, processes: int) -> None:
        self._redis_url = redis_url
        self._count = clients // processes
        context = multiprocessing.get_context("forkserver")
        # Imported once for all; obstore is used in the children alone, as it has to be.
        context.set_forkserver_preload(["tests.store.world", "kvstore.payloads.s3.store"])
        together = context.Barrier(processes)
        self._pipes: list[Connection] = []
        self._processes = []
        for _ in range(processes):
            ours, theirs = context.Pipe()
            process = context.Process(target=child, args=(theirs, tree, self._count, together), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)
        for pipe in self._pipes:
            assert pipe.recv() == "ready"

    def round(self, what: str, kind: str, number: int, *, alone: bool, proxy: S3Proxy | None) -> Row:
        pipes = self._pipes[:1] if alone else self._pipes
        before = scripts_run(self._redis_url)
        if proxy is not None:
            proxy.forget()
        for pipe in pipes:
            pipe.send((kind, number, alone))
        told: list[Told] = []
        made: Counter[str] = Counter()
        for pipe in pipes:
            results, some = pipe.recv()
            told += results
            made += some
        seconds = sorted(one.seconds for one in told)
        outcomes: Counter[str] = Counter()
        for one in told:
            outcomes += one.outcomes
        return Row(
            what,
            len(told),
            len(told) * SEGMENTS,
            puts=made["put"],
            gets=made["get"],
            refused=0 if proxy is None else proxy.injected["status503"],
            scripts=scripts_run(self._redis_url) - before,
            outcomes=dict(outcomes),
            match_worst_s=max(one.match_s for one in told),
            middle_s=seconds[len(seconds) // 2],
            worst_s=seconds[-1],
        )

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(60)


def added(rows: Sequence[Row], what: str) -> Row:
    """Returns rounds of one client each as one line."""
    outcomes: Counter[str] = Counter()
    for row in rows:
        outcomes.update(row.outcomes)
    seconds = sorted(row.worst_s for row in rows)
    return Row(
        what,
        len(rows),
        sum(row.segments for row in rows),
        puts=sum(row.puts for row in rows),
        gets=sum(row.gets for row in rows),
        refused=sum(row.refused for row in rows),
        scripts=sum(row.scripts for row in rows),
        outcomes=dict(outcomes),
        match_worst_s=max(row.match_worst_s for row in rows),
        middle_s=seconds[len(seconds) // 2],
        worst_s=seconds[-1],
    )


def measure(fleet: Fleet, proxy: S3Proxy | None, per_s: float) -> list[Row]:
    def alone(kind: str) -> list[Row]:
        return [fleet.round(kind, kind, number, alone=True, proxy=proxy) for number in range(ALONE)]

    rows = [added(alone("cold"), "cold, one at a time"), added(alone("warm"), "warm, one at a time")]
    rows.append(fleet.round("cold, at once", "cold", ALONE, alone=False, proxy=proxy))
    # What is on its way is committed, and claims are over.
    rows.append(fleet.round("warm, at once", "warm", ALONE, alone=False, proxy=proxy))
    if proxy is not None:
        proxy.inject("status503", methods=("GET", "PUT"), beyond_per_s=per_s)
        limit = f"at {per_s:.0f}/s"
        rows.append(fleet.round(f"warm, at once, {limit}", "warm", ALONE, alone=False, proxy=proxy))
        rows.append(fleet.round(f"again, {limit}", "warm", ALONE, alone=False, proxy=proxy))
        rows.append(fleet.round(f"cold, at once, {limit}", "cold", ALONE + 1, alone=False, proxy=proxy))
    return rows


def table(rows: Sequence[Row]) -> str:
    lines = [
        "| start | clients | PUTs | GETs | refused | scripts | for each client | outcomes of segments | "
        "worst match | middle | worst |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        outcomes = ", ".join(f"{count} {name}" for name, count in sorted(row.outcomes.items()) if count)
        lines.append(
            f"| {row.what} | {row.clients} | {row.puts} | {row.gets} | {row.refused} | {row.scripts} | "
            f"{row.scripts / row.clients:.1f} | {outcomes} | {row.match_worst_s * 1000:.0f} ms | "
            f"{row.middle_s:.2f} s | {row.worst_s:.2f} s |"
        )
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--clients", type=int, default=500)
    parser.add_argument("--processes", type=int, default=20)
    parser.add_argument("--per-second", type=float, default=0.0)
    parser.add_argument("--server", choices=("ceph", "nginx"), default="ceph")
    given = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as opened:
        single = opened.enter_context(RedisServer(Path(folder), "--maxclients", "10000"))
        if given.server == "ceph":
            server = opened.enter_context(CephServer())
            bucket = server.new_bucket()
            endpoint, place, s3 = server.endpoint, f"{bucket.bucket}/{bucket.prefix}", bucket.settings["s3"]
        else:
            nginx = opened.enter_context(NginxServer())
            (nginx.root / "bucket").mkdir()
            endpoint, place = nginx.endpoint, "bucket/starts"
            s3 = {"access_key_id": "nobody", "secret_access_key": "looks"}
        proxy = opened.enter_context(S3Proxy(endpoint)) if given.per_second else None
        # A machine that has a few cores for hundreds of engines is late; what counts is what is asked.
        patient = dict.fromkeys(("connect_timeout_s", "stall_timeout_s", "read_timeout_s"), 60.0)
        tree = {
            "payloads": f"s3://{place}?endpoint={proxy.endpoint if proxy else endpoint}&region=us-east-1",
            "index": single.url,
            "s3": {**s3, **patient, "write_timeout_s": 60.0},
            "redis": {"timeout_s": 30.0, "connect_timeout_s": 30.0},
        }
        fleet = Fleet(tree, single.url, given.clients, given.processes)
        opened.callback(fleet.close)
        rows = measure(fleet, proxy, given.per_second)
    print(table(rows))
    if given.json is not None:
        given.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
