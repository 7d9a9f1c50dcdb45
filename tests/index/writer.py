"""A process that writes to a SQLite index: `python -m tests.index.writer PATH SEED [forever|hang|upkeep]`.

Commits, touches, pins, evicts and sweeps as fast as it can, 60 steps or until it is killed. `hang` stops
inside a write transaction. `upkeep` is killed in the long verbs of maintenance. Prints a line when it is
under way.
"""

from __future__ import annotations

import sys
import time
from itertools import count

from kvstore.index.sqlite.index import SqliteIndex
from kvstore.keys import NamespaceId
from tests.index.contract.chains import CREATED_S, chain, namespace, put

STEPS = 60


def upkeep(index: SqliteIndex, name: NamespaceId, seed: str) -> None:
    """Everything that is done in slices, and all at once."""
    for step in count():
        segments = [put(index, name, chain(2, seed=f"{seed}/{step}/{i}"), cost_us=8) for i in range(200)]
        print("under way", flush=True)
        index.pin(name, segments[:40], most_bytes=1 << 40)
        keep = index.usage(name).nbytes // 2
        index.cull(name, keep_bytes=keep, delete_after_s=CREATED_S, limit=150, rule="capacity")
        index.unlist(name, segments[:70])
        index.unpin(name, segments)
        if step % 2:
            index.invalidate(name)
            index.drain(name, delete_after_s=CREATED_S, limit=1000)
            index.reaped(name, [segment for segment, _ in index.reapable(name, CREATED_S, 100)])
            index.sweep(name, 500)


def main(path: str, seed: str, mode: str = "") -> None:
    with SqliteIndex(path, busy_timeout_s=30.0) as index:
        name = index.register(namespace(), expected_blocks=1000)
        if mode == "upkeep":
            upkeep(index, name, seed)
        mine = []
        for step in count():
            digests = chain(20, seed=f"{seed}/{step}", after=chain(5))
            mine.append(put(index, name, digests, 0 if step % 2 else 5))
            index.touch(name, mine, CREATED_S + 60.0 * step)
            index.pin(name, mine[-1:], most_bytes=1 << 40)
            index.unpin(name, mine[-4:-3])
            if step % 3 == 2:
                index.evict(name, [mine.pop(0)], delete_after_s=CREATED_S, rule="admin")
                index.sweep(name, 10)
            if step == 3:
                if mode == "hang":
                    with index._database.writing("hang") as db:
                        db.execute("DELETE FROM fields")
                        print("under way", flush=True)
                        time.sleep(600)
                print("under way", flush=True)
            if step == STEPS and mode != "forever":
                return


if __name__ == "__main__":
    main(*sys.argv[1:])
