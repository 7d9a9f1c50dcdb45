"""A process that writes to a SQLite index: `python -m tests.index.writer PATH SEED [forever|hang]`.

Commits, touches, pins, evicts and sweeps as fast as it can, 60 steps or until it is killed. `hang` stops
inside a write transaction. Prints a line when it is under way.
"""

from __future__ import annotations

import sys
import time
from itertools import count

from kvstore.conformance.chains import CREATED_S, chain, namespace, put
from kvstore.index.sqlite import SqliteIndex

STEPS = 60


def main(path: str, seed: str, mode: str = "") -> None:
    with SqliteIndex(path, busy_timeout_s=30.0) as index:
        name = index.register(namespace(), expected_blocks=1000)
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
                print("under way", flush=True)
                if mode == "hang":
                    with index._database.writing("hang") as db:
                        db.execute("DELETE FROM segments")
                        time.sleep(600)
            if step == STEPS and mode != "forever":
                return


if __name__ == "__main__":
    main(*sys.argv[1:])
