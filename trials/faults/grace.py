"""Segments are evicted and deleted under a reader that had matched them, while clocks are wrong or jump.

Clocks that differ make nobody delete early: the grace time goes by the index's own clock. If that one jumps
ahead it is over early, and the reader misses and computes. Never is a byte wrong.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvstore.build import open_evidence, open_index, open_payloads
from kvstore.errors import KVStoreError
from kvstore.index.maintenance import FullIndex
from kvstore.janitor.janitor import Janitor
from kvstore.keys import NamespaceId
from kvstore.rules.lateness import SETTLED_S
from tests.servers.redis import RedisServer
from tests.store.ground import CHAINS, Ground, hashes, ids, loaded, open_space, segment_of
from tests.store.world import content, match
from trials.faults.clocks import HOURS_S, Clock, preloaded
from trials.faults.row import Result, Row

#: Longer than a round of this takes on any machine.
GRACE_S = 60.0
_READ = {"grace_s": GRACE_S, "kv": {"match_ttl_s": 20.0, "load_deadline_s": 20.0}}
#: Chains that are evicted under the reader, one after the other; the others stay.
_GOING = [("one", 1), ("one", 2), ("two", 1)]
Set = Callable[[int], None]


def _janitor_round(index: FullIndex, ground: Ground, clock: Callable[[], float]) -> None:
    settings = ground.made(**_READ)
    with open_payloads(settings) as payloads:
        janitor = Janitor(index, payloads, open_evidence(settings), settings, clock=clock)
        janitor.round()


def _evicted_under_a_reader(
    ground: Ground, wrong_s: int, jump: Set, index_clock: Callable[[], float]
) -> Result:
    """`wrong_s`: how far ahead the clock of the process that evicts and deletes is. `jump` sets the clock of
    the index, after the eviction, and back."""
    result, early = Result(), 0
    ground.fill()

    def clock() -> float:
        return index_clock() + wrong_s

    with (
        ground.store(**_READ) as store,
        contextlib.closing(open_index(ground.made(**_READ), clock=index_clock)) as index,
    ):
        for which, number in _GOING:
            space, blocks, name = open_space(store, which), hashes(which, number), ids()[which]
            found = match(space, blocks)
            assert found.blocks == len(blocks)
            _evict(index, name, which, number, clock() + GRACE_S)
            jump(HOURS_S)
            result.faults += 1
            _janitor_round(index, ground, clock)
            # What was matched before is loaded now, well within the grace time.
            result.requests += 1
            try:
                got = loaded(space, blocks, found, 0)
            except KVStoreError:
                early += 1
            else:
                result.wrong_tokens += sum(a != content(b) for a, b in zip(got, blocks, strict=True))
            jump(0)
    seen = ground.look()
    stay = [f"{which} {number}" for which, number in CHAINS if (which, number) not in _GOING]
    result.requests += len(stay)
    result.wrong_tokens += seen["wrong"]
    result.lost_blocks += seen["unreadable"] + sum(4 - seen["blocks"][name] for name in stay)
    result.remark = f"{early} of {len(_GOING)} evicted chains were deleted under a reader"
    return result


def _evict(index: FullIndex, name: NamespaceId, which: str, number: int, due_s: float) -> None:
    segments = [segment_of(which, number, first) for first in (0, 2)]
    assert index.evict(name, segments, delete_after_s=due_s, rule="admin") == len(segments)


def _all_freed(ground: Ground, result: Result, index: FullIndex, clock: Callable[[], float]) -> None:
    """When all clocks are right and all times over, nothing is left of what was evicted."""
    with open_payloads(ground.made(**_READ)) as payloads:
        far = clock() + 2 * HOURS_S + GRACE_S + SETTLED_S
        due = sum(len(index.reapable(name, far, 1000)) for name in ids().values())
        trashed = sum(account.trashed for account in index.accounts())
        result.leaked += trashed - due
        named = {one.name for one in payloads.list()}
    held = sum(len(list(index.segments(name))) for name in ids().values())
    result.leaked += len(named) == 0 and held > 0


@contextmanager
def _redis(folder: Path) -> Iterator[tuple[Ground, Clock]]:
    clock = Clock(folder, "index")
    with preloaded(clock):
        server = RedisServer(folder / "redis")
        server.start()
    with server:
        yield Ground({"payloads": f"file://{folder}/payloads", "index": server.url}), clock


def _differ(folder: Path, wrong_s: int) -> Result:
    """The clock of the process that evicts is wrong; Redis' is right."""
    with _redis(folder) as (ground, _):
        result = _evicted_under_a_reader(ground, wrong_s, lambda seconds: None, time.time)
        early = int(result.remark.split()[0])
        # Nothing may be deleted early for that.
        result.lost_blocks += 4 * early
        with contextlib.closing(open_index(ground.made(**_READ))) as index:
            _all_freed(ground, result, index, time.time)
    return result


def _redis_jumps(folder: Path, sign: int) -> Result:
    with _redis(folder) as (ground, clock):
        result = _evicted_under_a_reader(ground, 0, lambda seconds: clock.set(sign * seconds), time.time)
        with contextlib.closing(open_index(ground.made(**_READ))) as index:
            _all_freed(ground, result, index, time.time)
    return result


def _sqlite_jumps(folder: Path, sign: int) -> Result:
    """All processes of a machine have one clock, and it jumps."""
    ground, ahead = Ground({"payloads": f"file://{folder}/payloads"}), [0]

    def clock() -> float:
        return time.time() + ahead[0]

    def jump(seconds: int) -> None:
        ahead[0] = sign * seconds

    result = _evicted_under_a_reader(ground, 0, jump, clock)
    with contextlib.closing(open_index(ground.made(**_READ), clock=clock)) as index:
        _all_freed(ground, result, index, clock)
    return result


def _row(fault: str, run: Callable[[Path], Result]) -> Row:
    return Row("processes", fault, "store", run)


ROWS = [
    _row("who evicts and deletes is 6 h ahead of Redis", lambda folder: _differ(folder, HOURS_S)),
    _row("who evicts and deletes is 6 h behind Redis", lambda folder: _differ(folder, -HOURS_S)),
    _row("Redis' clock jumps 6 h ahead in a grace time", lambda folder: _redis_jumps(folder, 1)),
    _row("Redis' clock jumps 6 h back in a grace time", lambda folder: _redis_jumps(folder, -1)),
    _row(
        "a machine's clock jumps 6 h ahead in a grace time: SQLite", lambda folder: _sqlite_jumps(folder, 1)
    ),
    _row(
        "a machine's clock jumps 6 h back in a grace time: SQLite", lambda folder: _sqlite_jumps(folder, -1)
    ),
]
