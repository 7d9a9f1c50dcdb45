"""A store at its quota under a steady load of writes from four processes.

In the suite it takes some ten seconds an index; QUOTA_SECONDS=300 makes it minutes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

from kvstore.build import load_settings, open_index, open_store
from kvstore.index.maintenance import Event
from kvstore.keys import NamespaceId, SegmentId, digests
from tests.servers.redis import RedisServer
from tests.store.world import SLOT_BYTES, chain, content, fetch, match, namespace, slots
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.servers, pytest.mark.slow]

SECONDS = float(os.environ.get("QUOTA_SECONDS", "6"))
WRITERS = 4
CAPACITY = 24 << 20
#: One segment of a writer: header and four slots.
SEGMENT = 8192 + 4 * SLOT_BYTES


@contextmanager
def savers(settings: dict[str, Any]) -> Iterator[list[subprocess.Popen[str]]]:
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.store.saver", json.dumps(settings), str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in range(WRITERS)
    ]
    try:
        yield running
    finally:
        for one in running:
            one.kill()
            one.communicate()


class Replay:
    """The namespace as its events tell it, and whether every victim was the first in order.

    Of two processes' evictions the index serialises one before the other, so the order of the events is
    the order in which it chose.
    """

    def __init__(self) -> None:
        self.visible: dict[SegmentId, tuple[int, int, bytes]] = {}
        self.pinned: set[SegmentId] = set()
        self.nbytes: dict[SegmentId, int] = {}
        self.evicted = 0
        self.position = ""

    def follow(self, events: list[Event]) -> None:
        for event in events:
            self.position = event.position
            assert event.segment is not None
            if event.op == "commit":
                key = int.from_bytes(event.segment[:4]), -event.depth, event.segment
                self.visible[event.segment] = key
                self.nbytes[event.segment] = event.nbytes
                continue
            assert event.rule == "capacity"
            assert event.segment not in self.pinned
            mine = self.visible.pop(event.segment)
            self.evicted += 1
            if self.evicted % 16 == 0:
                # Looking at all for every one would take longer than the writers do.
                others = (key for one, key in self.visible.items() if one not in self.pinned)
                assert mine < min(others, default=(1 << 40, 0, b""))


@pytest.mark.parametrize("where", ["redis", "sqlite"])
@pytest.mark.timeout(int(900 + 2 * SECONDS))
def test_at_the_quota_under_load(where: str, redis_server: RedisServer, tmp_path: Path) -> None:
    url = redis_server.url if where == "redis" else f"sqlite://{tmp_path}/index.sqlite"
    settings = {
        "payloads": f"file://{tmp_path}/payloads",
        "index": url,
        "capacity_bytes": CAPACITY,
        "kv": {"match_ttl_s": 0.5, "load_deadline_s": 2.5, "match_deadline_s": 20.0},
        "grace_s": 3.0,
        "redis": {"timeout_s": 10.0},
        "sqlite": {"busy_timeout_s": 10.0},
    }
    hashes = chain(*range(900, 932))
    with open_store(settings) as store, open_index(load_settings(settings, environ={})) as index:
        space = store.open(namespace(), block_bytes=SLOT_BYTES)
        for first in range(0, 32, 4):
            # The oldest of all: without their pins they would be the first to go.
            space.save(
                slots(hashes[first : first + 4]),
                depth=first,
                chain=digests(hashes[:1]),
                created_s=60 * (1 << 20),
            )
        found = match(space, hashes)
        pinned = [run.segment for run in found.runs]
        assert index.pin(space.id, pinned, most_bytes=CAPACITY) == len(pinned) == 8
        replay = Replay()
        replay.pinned.update(pinned)
        most, memory = _watch(settings, replay, index, space.id, redis_server if where == "redis" else None)
        usage = index.usage(space.id)
        assert usage.nbytes == sum(replay.nbytes[one] for one in replay.visible)
        assert usage.segments == len(replay.visible) == len(list(index.segments(space.id)))
        found = match(space, hashes)
        assert found.blocks == 32
        assert fetch(space, hashes, found) == [content(one) for one in hashes]
    print(f"{where}: {replay.evicted} evicted, most {most / CAPACITY:.3f} of the capacity, memory {memory}")
    assert replay.evicted > 50 * SECONDS
    # The evicting writer may stand still for a moment while the others save.
    assert most <= 1.02 * CAPACITY
    if memory:
        # The rings of events and ghosts are full after some twenty seconds, and then it is flat.
        assert memory[-1] <= (1.15 * memory[len(memory) // 2] if SECONDS >= 40 else 8 << 20)


def _watch(
    settings: dict[str, Any], replay: Replay, index: Any, name: NamespaceId, server: RedisServer | None
) -> tuple[int, list[int]]:
    """The most bytes seen, and how much memory Redis used once a second, from a third of the time on."""
    most, memory, began = 0, [], 0.0
    with savers(settings) as running:
        for one in running:
            assert one.stdout is not None
            assert one.stdout.readline() == "saving\n"
        least = 50 * SECONDS
        end = time.monotonic() + 2 * PATIENCE_S
        while not began or time.monotonic() < began + SECONDS or replay.evicted <= least:
            assert time.monotonic() < end, replay.evicted
            most = max(most, index.usage(name).nbytes)
            while events := index.events(name, after=replay.position, limit=2000):
                replay.follow(events)
            if not began and replay.evicted:
                began = time.monotonic()
            if server and began and time.monotonic() > began + SECONDS / 3 + len(memory):
                with redis.Redis(port=server.port) as client:
                    memory.append(int(client.info("memory")["used_memory"]))
            time.sleep(0.01)
        for one in running:
            report = json.loads(one.communicate(timeout=PATIENCE_S)[0])
            assert report["failed"] == 0
            assert report["stored"] > 10
    while events := index.events(name, after=replay.position, limit=2000):
        replay.follow(events)
    return most, memory
