"""A process that saves and loads in another namespace: `python -m tests.e2e.tier_writer FILE SEED`.

FILE holds the settings as JSON. It ends when `FILE.stop` exists, prints what it counted, and exits with 3
if a byte that it loaded is wrong.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from kvstore.build import open_store
from kvstore.errors import KVStoreError
from tests.store.world import SLOT_BYTES, chain, content, fetch, match, namespace, slots

#: Blocks of one chain: sixteen segments.
_BLOCKS = 16


def main(path: str, seed: str) -> int:
    rng = random.Random(seed)
    stop = Path(path + ".stop")
    chains = [chain(*(1000 * number + i for i in range(_BLOCKS))) for number in range(50)]
    with open_store(json.loads(Path(path).read_text())) as store:
        space = store.open(namespace(model=f"writer {seed}"), block_bytes=SLOT_BYTES)
        while not stop.exists():
            one = rng.choice(chains)
            found = match(space, one)
            if found.blocks:
                try:
                    if fetch(space, one, found) != [content(block) for block in one[: found.blocks]]:
                        return 3
                except KVStoreError:
                    continue  # counted; evicted in between, perhaps
            elif rng.random() < 0.5:
                space.save(slots(one))
        counts = store.counters.snapshot()
    print(json.dumps({name: value for name, value in counts.items() if value}))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
