"""Processes that are killed or stopped in what they do, or whose clocks are wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from pathlib import Path

from tests.payloads.tiered import test_crashes
from tests.servers.redis import RedisServer
from tests.servers.s3.ceph import CephServer
from tests.servers.s3.servers import MotoServer
from trials.faults import clocks, ends, grace
from trials.faults.crashing import crash
from trials.faults.row import Result, Row
from trials.faults.verbs import ON_BUCKETS, SAVE_TWO, VERBS, Verb

FAMILY = "processes"
#: Each killed process has a database of its own.
_DATABASES = "4096"


def _sqlite(verb: Verb, folder: Path, *, every: int = 1) -> Result:
    return crash(verb, folder, lambda number, own: {"payloads": f"file://{own}/payloads"}, every=every)


def _redis(verb: Verb, folder: Path) -> Result:
    with RedisServer(folder / "redis", "--databases", _DATABASES) as server:

        def place(number: int, own: Path) -> dict[str, object]:
            return {
                "payloads": f"file://{own}/payloads",
                "index": f"redis://127.0.0.1:{server.port}/{number}",
            }

        return crash(verb, folder, place)


def _bucket(verb: Verb, folder: Path) -> Result:
    with (
        RedisServer(folder / "redis", "--databases", _DATABASES) as server,
        MotoServer() if CephServer.missing() else CephServer() as s3,
    ):

        def place(number: int, own: Path) -> dict[str, object]:
            bucket = s3.new_bucket()
            index = f"redis://127.0.0.1:{server.port}/{number}"
            return {"payloads": bucket.url, "index": index, **bucket.settings}

        # What only Redis sees is the same as over a folder.
        result = crash(verb, folder, place, of_buckets=True)
        result.remark += f"; the bucket is {s3.kind}'s"
        return result


def _tier(folder: Path) -> Result:
    """A fast tier's folder and ledger, by the tests that they have."""
    result = Result()
    for kind, (write, work) in test_crashes.WORK.items():
        for at in count():
            root = folder / f"{kind} {at}"
            test_crashes.prepare(root, kind)
            status = test_crashes.crash(root, write, work, at)
            test_crashes.inspect(root, kind)
            result.requests += 7
            if status == 0:
                break
            result.faults += 1
    result.remark = f"{', '.join(test_crashes.WORK)}; killed at each of {result.faults} steps"
    return result


def _row(fault: str, run: Callable[[Path], Result], *, quick: bool = False) -> Row:
    return Row(FAMILY, f"kill -9 {fault}", "store", run, quick)


def _each(where: str, run: Callable[[Verb, Path], Result], verbs: Sequence[Verb] = VERBS) -> list[Row]:
    return [_row(f"{where}: {verb.name}", partial(run, verb)) for verb in verbs]


_KILLED = [
    *_each("at every step, on SQLite and a folder", _sqlite),
    *_each("at every step, on Redis and a folder", _redis),
    *_each("around every change of a bucket", _bucket, ON_BUCKETS),
    _row("at every step of a fast tier, write-back included", _tier),
    _row(
        f"at one step in sixteen, on SQLite and a folder: {SAVE_TWO.name}",
        partial(_sqlite, SAVE_TWO, every=16),
        quick=True,
    ),
]

ROWS = [*_KILLED, *ends.ROWS, *clocks.ROWS, *grace.ROWS]
