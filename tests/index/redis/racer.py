"""A process that races others for one Redis:

    python -m tests.index.redis.racer URL NAMESPACE

Prints a line when it is ready, begins when it is told a line, and prints what it got as JSON.
"""

from __future__ import annotations

import json
import sys

from kvstore.index.redis.index import RedisIndex
from kvstore.keys import NamespaceId
from schemas.settings import RedisSettings
from tests.index.contract.chains import CREATED_S

KEEP_BYTES = 1_000_000


def main(url: str, namespace: str) -> None:
    got = []
    with RedisIndex.from_settings(url, RedisSettings(timeout_s=10.0)) as index:
        index.ping()
        print("ready", flush=True)
        sys.stdin.readline()
        while gone := index.cull(
            NamespaceId(namespace), keep_bytes=KEEP_BYTES, delete_after_s=CREATED_S, limit=7, rule="capacity"
        ):
            got += [segment.hex() for segment in gone]
    print(json.dumps(got))


if __name__ == "__main__":
    main(*sys.argv[1:])
