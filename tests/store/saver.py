"""A process that saves: `python -m tests.store.saver SETTINGS_JSON SEED`, until its standard input ends.

Chains of all lengths with created times over the last hours, as if they had been saved then, so that the
order of eviction has something to say. A segment's id begins with the quarter of a minute that counts as its
last use, so that whoever sees it go knows its place in that order.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from itertools import count

from kvstore.build import open_store
from kvstore.errors import KVStoreError
from kvstore.index.contract import saved_minute
from kvstore.keys import SegmentId, chain_like
from kvstore.store import saving
from tests.store.world import SLOT_BYTES, chain, namespace, slots

#: Created between these ages, in seconds: none is fresh.
YOUNGEST_S, OLDEST_S = 600, 18_000


def main(settings: str, seed: str) -> None:
    saving.MOST_WAITED_S = OLDEST_S * 10
    source = random.Random(seed)
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    stored = failed = 0
    with open_store(json.loads(settings)) as store:
        space = store.open(namespace(), block_bytes=SLOT_BYTES)
        space.register()
        print("saving", flush=True)
        for number in count():
            if ended.is_set():
                break
            hashes = chain(int(seed), number, *range(source.randrange(1, 12)))
            created = int(time.time()) - source.randrange(YOUNGEST_S, OLDEST_S)
            first = 0
            while first < len(hashes):
                some = hashes[first : first + 4]
                segment = SegmentId(round(saved_minute(created) * 4).to_bytes(4, "big") + source.randbytes(4))
                try:
                    saved = space.save(
                        slots(some),
                        depth=first,
                        chain=chain_like(segment),
                        segment=segment,
                        created_s=created,
                    )
                    stored += saved.stored > 0
                except KVStoreError:
                    failed += 1
                first += 4
    print(json.dumps({"stored": stored, "failed": failed, **store.counters.snapshot()}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
