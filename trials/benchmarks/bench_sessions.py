"""What sessions cost the index in Redis: bytes of each of a million, and the time of a call.

    python -m trials.benchmarks.bench_sessions [--json FILE] [--sessions N] [--segments N]

A million sessions in one Redis, first told to end and owning nothing, then with segments of their own, and
what of its memory is theirs. Then the time of a call for one session of 64 segments, as the server counts it,
beside a touch of the same segments.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import redis

from kvstore.index.redis.client import RedisClient
from kvstore.index.redis.index import RedisIndex
from kvstore.index.scripted.scripts import Script
from kvstore.index.sessions import Allowance, Hint
from kvstore.keys import NO_SALT, SegmentId, new_segment_id, session_id
from schemas.settings import RedisSettings
from tests.index.contract.chains import chain, namespace, record
from tests.servers.redis import RedisServer

_BATCH = 500
_CALLS = 200
_ALL = Allowance(1 << 60, 1 << 60, 1 << 60)


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    what: str
    value: float
    unit: str


class _Piped:
    """A client that sends scripts in batches and answers what a success answers."""

    where = "pipe"

    def __init__(self, client: redis.Redis) -> None:
        self._pipe: Any = client.pipeline(transaction=False)
        self._client = client

    def run(self, script: Script, key: str, *args: Any) -> Any:
        if not len(self._pipe):
            self._client.script_load(script.source)
        self._pipe.evalsha(script.sha, 1, key, *args)
        if len(self._pipe) == _BATCH:
            self.flush()
        return 1 if script.name == "commit" else [2, 0, 0, b"0", b"0"]

    def flush(self) -> None:
        self._pipe.execute()


def _memory(client: redis.Redis, *keys: str) -> int:
    """Returns how many bytes some keys of Redis take, all of their entries counted; without keys all do."""
    if not keys:
        return int(cast(Any, client.info("memory"))["used_memory"])
    return sum(int(cast(Any, client.memory_usage(key, samples=0)) or 0) for key in keys)


def _bytes(sessions: int, segments: int) -> Iterator[Row]:
    """Yields what so many sessions take in one Redis: told to end, and then with segments of their own."""
    made, mine = record(1), chain(1)
    with (
        tempfile.TemporaryDirectory() as folder,
        RedisServer(Path(folder)).start() as server,
        redis.Redis.from_url(server.url, protocol=2, socket_timeout=600) as client,
        RedisIndex.from_settings(server.url, RedisSettings(timeout_s=10)) as index,
    ):
        name = index.register(namespace(), expected_blocks=1_000_000)
        before, pipe = _memory(client), _Piped(client)
        piped, all_of_them = RedisIndex(cast(RedisClient, pipe)), range(sessions)
        ids = [session_id(NO_SALT, str(number)) for number in all_of_them]
        for session in ids:
            piped.session(name, session, [], time.time(), Hint(end=True))
        pipe.flush()
        bare = _memory(client) - before
        yield Row("a session that was told to end and owns nothing", bare / sessions, "bytes")
        yield Row(f"all {sessions:,} of them", bare, "bytes")
        for number in all_of_them:
            for at in range(segments):
                segment = SegmentId((number * segments + at + 1).to_bytes(8, "little"))
                piped.commit(name, segment, mine, made, rank=0, ranks=1, session=ids[number])
        pipe.flush()
        parts = ("owner", "sessions:0", "sessions:1")
        owned = _memory(client, *(f"kvs:{{{name}}}:{part}" for part in parts))
        rest = _memory(client) - before - owned
        yield Row(f"a session with {segments} own segments", owned / sessions, "bytes")
        yield Row(f"all {sessions:,} of them", owned, "bytes")
        yield Row(f"{segments} of its segments themselves, a block each", rest / sessions, "bytes")


def _times() -> list[Row]:
    rows = []
    session = session_id(NO_SALT, "chat")
    with (
        tempfile.TemporaryDirectory() as folder,
        RedisServer(Path(folder)).start() as server,
        redis.Redis.from_url(server.url, protocol=2) as client,
        RedisIndex.from_settings(server.url, RedisSettings(timeout_s=10)) as index,
    ):
        name = index.register(namespace(), expected_blocks=100_000)
        segments = []
        for number in range(64):
            segments.append(new_segment_id())
            made, mine = record(1, depth=number), chain(1, seed=str(number))
            index.commit(name, segments[-1], mine, made, rank=0, ranks=1, session=session)
        seconds = [600]

        def later() -> Hint:
            seconds[0] += 1
            return Hint(retain_s=seconds[0])

        at = [time.time()]

        def minute() -> float:
            at[0] += 60
            return at[0]

        steps: dict[str, Callable[[], object]] = {
            "use": lambda: index.session(name, session, segments, minute()),
            "use, in the same minute": lambda: index.session(name, session, segments, at[0]),
            "retain": lambda: index.session(name, session, segments, minute(), later(), allowance=_ALL),
            "retained, and used": lambda: index.session(name, session, segments, minute(), allowance=_ALL),
            "end": lambda: index.session(name, session, segments, minute(), Hint(end=True)),
            "touch, without a session": lambda: index.touch(name, segments, minute()),
        }
        for what, step in steps.items():
            inside, took = [], []
            for _ in range(_CALLS):
                client.config_resetstat()
                began = time.perf_counter()
                step()
                took.append(time.perf_counter() - began)
                inside.append(cast(Any, client.info("commandstats"))["cmdstat_evalsha"]["usec"])
            rows.append(Row(f"{what}: in the server", statistics.median(inside), "us"))
            rows.append(Row(f"{what}: as the caller sees it", statistics.median(took) * 1e6, "us"))
    return rows


def main(argv: list[str] | None = None) -> int:
    """Runs it; see the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--sessions", type=int, default=1_000_000)
    parser.add_argument("--segments", type=int, default=1)
    options = parser.parse_args(argv)
    rows = []
    for row in itertools.chain(_bytes(options.sessions, options.segments), _times()):
        rows.append(row)
        print(f"{row.what:60} {row.value:14,.0f} {row.unit}", flush=True)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
