"""Several janitors at once, in processes that are killed and stopped where it hurts, over a real Redis,
beside an engine that saves and loads all the time. What is deleted, and when, is held against what the index
has evicted, and when.
"""

from __future__ import annotations

import heapq
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvstore.build import load_settings, open_index, open_store
from kvstore.errors import KVStoreError
from kvstore.index.maintenance import Account, Listing
from kvstore.janitor.reports import JanitorState
from kvstore.keys import NamespaceId, SegmentId, digests, parse_payload_name, payload_name
from kvstore.store.space import Match, Space
from tests.janitor.child import Plan, plan_json
from tests.servers.redis import RedisServer, spawn_tied
from tests.store.world import SLOT_BYTES, buffers, chain, content, keys, namespace, slots
from tests.waiting import PATIENCE_S, done, until

pytestmark = pytest.mark.slow

INTERVAL_S, GRACE_S, FORGET_S = 0.2, 2.0, 8.0
#: A load that begins so long before the end of the grace time is over before it.
MARGIN_S = 0.2
#: Where one is killed, in the order of a round, and where it is stopped.
POINTS = (
    "after cull", "after drain", "before delete", "in delete", "after delete", "after reaped", "after sweep",
    "after cool", "after reconcile", "read", "after evict", "after erase",
)  # fmt: skip
STOPS = (
    "before reachable",
    "before cull",
    "before drain",
    "before evict",
    "before delete",
    "in delete",
    "before reaped",
    "before sweep",
    "read",
)
#: Two blocks and a header.
SEGMENT_BYTES = 4096 + 2 * SLOT_BYTES


class Engine:
    """One engine's half: saves steadily, loads what it was promised until the last moment of its grace, and
    leaves all tidying to the janitors. Besides, what a careless operator and a failing disk do."""

    def __init__(self, settings: dict[str, Any], folder: Path) -> None:
        self.store = open_store(settings)
        self.store.rounds.committed = lambda nbytes: None  # type: ignore[method-assign]
        self.index: Any = self.store.maintenance
        self.folder = folder
        self.main = self._space("main")
        self.doomed = self._space("doomed")
        self.rotten = self._space("rotten")
        self.problems: list[str] = []
        self.saved = self.loads = self.late_loads = self.flipped = 0
        self._recent: deque[int] = deque(maxlen=250)
        self._stop = threading.Event()
        loops = (self._write, self._read)
        self._threads = [threading.Thread(target=self._guarded, args=(loop,)) for loop in loops]

    def _space(self, model: str) -> Space:
        space = self.store.open(namespace(model=model), block_bytes=SLOT_BYTES)
        space.register()
        return space

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
        for space in (self.main, self.doomed, self.rotten):
            until(lambda space=space: done(lambda: self._keeps(space)))  # type: ignore[misc]

    def close(self) -> None:
        self._stop.set()
        self.store.close()

    def _guarded(self, loop: Callable[[], None]) -> None:
        try:
            loop()
        except Exception as exc:
            self.problems.append(f"{loop.__name__}: {exc!r}")

    def _write(self) -> None:
        for number in range(10**9):
            if self._stop.wait(0.015):
                return
            try:
                self._save(self.main, number)
                self._recent.append(number)
                if number % 4 == 0:
                    self._save(self.doomed, number)
                if number % 20 == 10:
                    # As engines do that start. The janitor forgets what is empty, with its journal.
                    self.doomed.register()
                    self.rotten.register()
                if number % 40 == 20:
                    self.index.invalidate(self.doomed.id)
                    self._space(f"forgotten {number}")
                if number % 30 == 10:
                    self._flip(number)
            except KVStoreError:
                # While Redis is away. What was told to it may have been done.
                pass

    def _save(self, space: Space, number: int) -> None:
        space.save(slots(chain(number, number)))
        self.saved += 1

    def _keeps(self, space: Space) -> bool:
        """Save one that stays: an empty namespace is forgotten, with the journal that the checks read."""
        self._save(space, 10**9)
        [run] = space.match(digests(chain(10**9, 10**9))).runs or [None]
        return run is not None and self.index.pin(space.id, [run.segment], most_bytes=1 << 30) == 1

    def _flip(self, number: int) -> None:
        """Save one, and let the disk lose a bit of it."""
        self._save(self.rotten, number)
        [run] = self.rotten.match(digests(chain(number, number))).runs
        path = self.folder / payload_name(self.rotten.id, run.segment, 0)
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        self.flipped += 1

    def _read(self) -> None:
        source = random.Random(3)
        #: Loads to come: when, when the match began, the chain, the match.
        waiting: list[tuple[float, float, int, Match]] = []
        while not self._stop.wait(0.01):
            while waiting and waiting[0][0] <= time.time():
                self._load(*heapq.heappop(waiting)[1:])
            # The promise holds from before the index gave it.
            began, number = time.time(), source.choice(list(self._recent) or [0])
            found = self.main.match(digests(chain(number, number)))
            if found.blocks:
                for share in (0.5, 0.97):
                    when = began + share * (GRACE_S - MARGIN_S)
                    heapq.heappush(waiting, (when, began, number, found))

    def _load(self, began: float, number: int, found: Match) -> None:
        if time.time() > began + GRACE_S - MARGIN_S:
            return
        hashes = chain(number, number)
        try:
            for run in found.runs:
                into = buffers(run.count)
                blocks = slice(run.start, run.start + run.count)
                self.main.load(run, keys(hashes)[blocks], into)
                if [bytes(view) for view in into] != [content(one) for one in hashes[blocks]]:
                    self.problems.append(f"wrong bytes of {number}")
        except KVStoreError as exc:
            age = time.time() - began
            if age < GRACE_S:
                self.problems.append(f"{number} could not be loaded {age:.2f} s after its match: {exc!r}")
        self.loads += 1
        self.late_loads += time.time() > began + 0.9 * (GRACE_S - MARGIN_S)


@dataclass
class House:
    """The janitors, and what they have written down."""

    folder: Path
    settings: dict[str, Any]
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, count: int = 1) -> None:
        for _ in range(count):
            holder = f"j{len(self.processes)}"
            env = {**os.environ, "JANITOR_CHILD": plan_json(Plan(str(self.folder), holder, self.settings))}
            command = [sys.executable, "-m", "tests.janitor.child"]
            self.processes[holder] = spawn_tied(command, self.folder / f"{holder}.log", env)

    def ready(self) -> list[str]:
        """Those that work."""
        return [
            holder
            for holder, process in self.processes.items()
            if process.poll() is None and holder not in self.died() and self.state(holder)
        ]

    def arm(self, at: str, by: str) -> None:
        fresh = self.folder / "arming"
        fresh.write_text(json.dumps([at, by]))
        fresh.rename(self.folder / "armed")

    def died(self) -> dict[str, str]:
        """Who got a signal, and where."""
        return dict(self.lines("died"))

    def state(self, holder: str) -> JanitorState | None:
        path = self.folder / f"{holder}.state"
        return JanitorState.model_validate_json(path.read_text()) if path.exists() else None

    def lines(self, what: str) -> Iterator[tuple[str, Any]]:
        for path in sorted(self.folder.glob(f"*.{what}")):
            for line in path.read_text().splitlines():
                yield path.stem, json.loads(line)

    def log(self) -> str:
        """What they have said that nobody expected."""
        return "\n".join(path.read_text()[-2000:] for path in sorted(self.folder.glob("*.log")))

    def end(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.terminate()
        for process in self.processes.values():
            try:
                process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(PATIENCE_S)


@dataclass
class Scene:
    engine: Engine
    house: House
    index: Any
    server: RedisServer


@pytest.fixture
def scene(tmp_path: Path, private_redis: RedisServer) -> Iterator[Scene]:
    payloads, notes = tmp_path / "payloads", tmp_path / "notes"
    notes.mkdir()
    settings = {
        "payloads": f"file://{payloads}",
        "index": private_redis.url,
        "grace_s": GRACE_S,
        "kv": {"match_ttl_s": 0.5, "load_deadline_s": 1.0},
        "capacity_bytes": 220 * SEGMENT_BYTES,
        "eviction": {"fresh_s": 0.1},
        "journal": {"events": 1_000_000},
        "janitor": {
            "interval_s": INTERVAL_S,
            "reconcile_s": 0.5,
            "scrub_percent": 100,
            "forget_after_s": FORGET_S,
        },
    }
    engine, house = Engine(settings, payloads), House(notes, settings)
    patient = {"timeout_s": PATIENCE_S, "connect_timeout_s": PATIENCE_S}
    index = open_index(load_settings(settings | {"redis": patient}, environ={}))
    try:
        yield Scene(engine, house, index, private_redis)
    finally:
        house.end()
        engine.close()
        index.close()


def check_deletions(scene: Scene) -> Counter[str]:
    """Every deletion was of something that was evicted or invalidated at least the grace time before. Several
    may have deleted the same. Returns how many of them were of each namespace."""
    house, engine, index = scene.house, scene.engine, scene.index
    assert list(house.lines("visible")) == []
    committed: dict[tuple[NamespaceId, SegmentId], float] = {}
    evicted: dict[tuple[NamespaceId, SegmentId], float] = {}
    invalidated: dict[NamespaceId, list[float]] = defaultdict(list)
    for space in (engine.main, engine.doomed, engine.rotten):
        position = ""
        while events := index.events(space.id, after=position):
            for event in events:
                if event.op == "commit":
                    committed[space.id, event.segment] = event.at_s
                elif event.op == "evict":
                    assert (space.id, event.segment) not in evicted
                    evicted[space.id, event.segment] = event.at_s
                else:
                    invalidated[space.id].append(event.at_s)
            position = events[-1].position
    by_namespace: Counter[str] = Counter()
    deleted = set()
    for _, (at_s, name) in house.lines("deletes"):
        parsed = parse_payload_name(name)
        assert parsed is not None
        known = parsed[:2]
        out_of_sight = evicted.get(known) or min(
            when for when in invalidated[known[0]] if when >= committed[known]
        )
        # Redis tells the time to the millisecond.
        assert at_s >= out_of_sight + GRACE_S - 0.002, f"{name} was deleted {at_s - out_of_sight:.3f} s after"
        deleted.add(name)
        by_namespace[known[0]] += 1
    buried = Counter(segment for _, (_, segment) in house.lines("buried"))
    for name in deleted:
        segment = name.split("/")[-1].split(".")[0]
        assert buried[segment] >= 1, f"{name} was deleted and is on record for ever"
    return by_namespace


def check_peace(scene: Scene) -> None:
    """When nothing is written any more, all is tidied up, and the accounts are right."""
    index, engine = scene.index, scene.engine

    def standing() -> tuple[dict[NamespaceId, tuple[Account, list[Listing]]], set[str]] | None:
        """What is listed under each account, and the payloads, once all is tidied up. None as long as a
        janitor goes on, such as with scrubbing away what the disk has damaged last: nobody writes, so that
        accounts which are the same before and after have not moved between."""
        before = index.accounts()
        if len(before) != 3 or any(one.trashed or one.bygone for one in before):
            return None
        listed = {one.namespace: (one, list(index.segments(one.namespace))) for one in before}
        there = {one.name for one in engine.store.payloads.list()}
        same = [one.usage for one in before] == [one.usage for one in index.accounts()]
        return (listed, there) if same else None

    listed, there = until(standing, say=index.accounts)
    named: set[str] = set()
    for name, (account, listings) in listed.items():
        assert account.usage.segments == len(listings)
        assert account.usage.nbytes == sum(one.record.nbytes for one in listings)
        assert account.usage.blocks == sum(one.record.slots for one in listings)
        counted = index.reconcile(name)
        assert counted.recorded == counted.counted and counted.mended == 0
        named |= {payload_name(name, one.segment, 0) for one in listings}
        visible = {one.segment for one in listings}
        until(
            lambda: {one.segment for one in index.entries(name)} <= visible,
            say=lambda: "entries dangle",
        )
    assert there == named
    assert 0 < index.usage(engine.main.id).nbytes <= 0.99 * scene.engine.store.settings.capacity_bytes


def test_one_of_two_is_killed_in_every_step(scene: Scene) -> None:
    house, index, engine = scene.house, scene.index, scene.engine
    engine.start()
    house.start(2)

    def at_work() -> bool:
        """Evicted, invalidated and rotten segments were deleted while promises were kept."""
        names = (parse_payload_name(name) for _, (_, name) in house.lines("deletes"))
        deleted = Counter(name[0] for name in names if name)
        spaces = (engine.main, engine.doomed, engine.rotten)
        return min(deleted[space.id] for space in spaces) >= 5 and engine.late_loads > 100

    for point in POINTS:
        house.start()
        until(lambda: len(house.ready()) >= 2, say=house.log)
        before = house.died()
        house.arm(point, "SIGKILL")
        [holder] = until(lambda: house.died().keys() - before, say=lambda: f"nobody came to {point!r}")
        house.processes[holder].wait(PATIENCE_S)
    assert sorted(house.died().values()) == sorted(POINTS)
    assert {house.processes[holder].returncode for holder in house.died()} == {-signal.SIGKILL}
    time.sleep(GRACE_S + 1)
    until(at_work)
    engine.stop()
    check_peace(scene)
    for holder in house.ready():
        state = house.state(holder)
        assert state and not any(one.problem for one in state.steps), state
    house.end()
    deleted = check_deletions(scene)
    assert engine.problems == []
    assert min(deleted[space.id] for space in (engine.main, engine.doomed, engine.rotten)) >= 5, deleted
    assert not [text for text in index.namespaces().values() if "forgotten" in text]
    print(f"deleted {sum(deleted.values())}, saved {engine.saved}, loads {engine.loads}, "
          f"of them late {engine.late_loads}")  # fmt: skip


def test_those_that_were_stopped_for_long_do_no_harm(scene: Scene) -> None:
    house, engine = scene.house, scene.engine
    engine.start()
    house.start(len(STOPS) + 1)
    until(lambda: len(house.ready()) == len(STOPS) + 1, say=house.log)
    for point in STOPS:
        before = house.died()
        house.arm(point, "SIGSTOP")
        until(lambda: house.died().keys() - before, say=lambda: f"nobody came to {point!r}")
    # Until what the last one evicts is deleted as well.
    time.sleep(GRACE_S + 1)
    rounds = {holder: state.rounds for holder in house.died() if (state := house.state(holder))}
    assert len(rounds) == len(STOPS)
    for holder in rounds:
        house.processes[holder].send_signal(signal.SIGCONT)
    for holder, before_it in rounds.items():
        until(lambda: (state := house.state(holder)) and state.rounds > before_it, say=house.log)
    until(lambda: engine.late_loads > 100)
    engine.stop()
    check_peace(scene)
    house.end()
    check_deletions(scene)
    assert engine.problems == []


def test_it_goes_on_when_redis_comes_back(scene: Scene) -> None:
    house, engine = scene.house, scene.engine
    engine.start()
    house.start()
    until(lambda: (state := house.state("j0")) and state.rounds >= 3, say=house.log)
    scene.server.pause()
    away = until(
        lambda: (state := house.state("j0")) and any(one.failing for one in state.steps) and state,
        say=house.log,
    )
    scene.server.resume()
    until(lambda: (state := house.state("j0")) and state.rounds >= away.rounds + 10, say=house.log)
    engine.stop()
    check_peace(scene)
    until(
        lambda: (state := house.state("j0")) and not any(one.failing for one in state.steps),
        say=lambda: house.state("j0"),
    )
    house.end()
    assert list(house.lines("visible")) == [] and engine.problems == []
