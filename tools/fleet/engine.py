"""Light engines: for each request what a connector asks of the store, and no model.

A request is a chain of blocks. The engine has some of them in a prefix cache of its own; it matches the
chain, tells the index what it uses, loads what it lacks, and saves what nobody has in segments, as the
connectors do. Each engine is a thread with a store of its own, so with its own connections.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvstore.build import open_store
from kvstore.errors import KVStoreError
from kvstore.format.segment import Slot
from kvstore.index.port import Outcome
from kvstore.keys import block_key, digests
from kvstore.store.space import Match, Space
from schemas.namespace import GroupSpec, Namespace

#: A block is small: requests are what is counted, not bytes.
SHAPE = (1, 1, 8, 8)
GROUP = GroupSpec(kind="full", block_tokens=8, dtype="BF16", shape=SHAPE)
NAMESPACE = Namespace(
    kind="kv", model="light", weights="none", dtype="bfloat16", block_tokens=8, hash_algo="sha256",
    hash_root="r", kv_dtype="auto", page_order="LHNC", groups=(GROUP,),
)  # fmt: skip
#: Outcomes are told once in so many seconds.
_TOLD_S = 1.0


@dataclass(frozen=True, slots=True)
class Request:
    """When it comes, in seconds after the start, and the hashes of its blocks."""

    at_s: float
    hashes: tuple[bytes, ...]


@dataclass
class Done:
    """What engines did."""

    counts: Counter[str] = field(default_factory=Counter)
    #: Seconds of each match, and by how much each request began after its time.
    matches_s: list[float] = field(default_factory=list)
    late_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def add(self, other: Done) -> None:
        """Adds what another engine did."""
        self.counts += other.counts
        self.matches_s += other.matches_s
        self.late_s += other.late_s
        self.failures += other.failures


@dataclass
class Engine:
    """One replica. For one thread."""

    space: Space
    own_blocks: int
    done: Done = field(default_factory=Done)
    _own: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    _outcomes: list[Outcome] = field(default_factory=list)
    _told_s: float = field(default_factory=time.monotonic)

    def serve(self, hashes: Sequence[bytes]) -> None:
        """Serves one request. Raises what a load or a save raises."""
        counts = self.done.counts
        local = next((at for at, one in enumerate(hashes) if one not in self._own), len(hashes))
        packed = digests(hashes)
        began = time.monotonic()
        match = self.space.match(packed)
        self.done.matches_s.append(time.monotonic() - began)
        counts.update(requests=1, matches=1, asked=len(hashes), local=local)
        counts["found"] += max(0, match.blocks - local)
        if match.blocks > local:
            self._load(match, hashes, local)
        have = max(local, match.blocks)
        size = self.space.backends.settings.segment.max_blocks
        for first in range(have, len(hashes), size):
            self._save(hashes, range(first, min(first + size, len(hashes))))
        self._keep(hashes)
        self._tell(packed, match)

    def _load(self, match: Match, hashes: Sequence[bytes], local: int) -> None:
        self.space.touch([run.segment for run in match.runs])
        self.done.counts["touches"] += 1
        for run in match.runs:
            skip = max(0, local - run.start)
            if skip < run.count:
                some = replace(run, start=run.start + skip, slot=run.slot + skip, count=run.count - skip)
                keys = [block_key(one) for one in hashes[some.start : some.start + some.count]]
                into = [memoryview(bytearray(GROUP.slot_bytes)) for _ in keys]
                self.space.load(some, keys, into)
                if bytes(into[0]) != _content(keys[0][:-2]):
                    raise AssertionError("the bytes of another block")
                self.done.counts["loads"] += 1

    def _save(self, hashes: Sequence[bytes], blocks: range) -> None:
        own = hashes[blocks.start : blocks.stop]
        slots = [Slot(block_key(one), memoryview(_content(one)), "BF16", SHAPE) for one in own]
        saved = self.space.save(slots, depth=blocks.start, chain=digests(hashes[:1]))
        self.done.counts.update(claims=1, commits=saved.outcome == "stored", stored=saved.stored)

    def _keep(self, hashes: Sequence[bytes]) -> None:
        # Heads are used last, so that tails go first.
        for one in reversed(hashes):
            self._own[one] = None
            self._own.move_to_end(one)
        while len(self._own) > self.own_blocks:
            self._own.popitem(last=False)

    def _tell(self, packed: bytes, match: Match) -> None:
        asked = len(packed) // 16
        at = match.blocks * 16
        reason = "" if match.blocks == asked else match.reason
        self._outcomes.append(
            Outcome(
                time.time(), "r", "match", asked, match.blocks, reason, match.blocks, packed[at : at + 4096]
            )
        )
        if time.monotonic() - self._told_s > _TOLD_S:
            self._told_s = time.monotonic()
            self.space.tell(self._outcomes)
            self._outcomes = []
            self.done.counts["tells"] += 1


def _content(block_hash: bytes) -> bytes:
    return hashlib.shake_128(block_hash).digest(GROUP.slot_bytes)


def run(settings: dict[str, Any], engines: Sequence[Sequence[Request]], own_blocks: int, turn: Any) -> Done:
    """Runs engines, each of which serves its requests, in a process of its own.

    All processes wait for each other at the barrier `turn`, twice before the first request and twice after
    the last one: whoever runs them looks at the servers in between.
    """
    done, lock = Done(), threading.Lock()
    mine = threading.Barrier(len(engines) + 1)

    def live(requests: Sequence[Request]) -> None:
        try:
            lived(requests)
        except BaseException:
            # Nobody is to wait for it.
            mine.abort()
            raise

    def lived(requests: Sequence[Request]) -> None:
        with open_store(settings) as store:
            space = store.open(NAMESPACE, block_bytes=GROUP.slot_bytes)
            space.register()
            engine = Engine(space, own_blocks)
            mine.wait()
            mine.wait()
            began = time.monotonic()
            for request in requests:
                pause = began + request.at_s - time.monotonic()
                time.sleep(max(0.0, pause))
                engine.done.late_s.append(max(0.0, -pause))
                try:
                    engine.serve(request.hashes)
                except KVStoreError as exc:
                    engine.done.failures.append(str(exc))
            mine.wait()
            mine.wait()
        with lock:
            done.add(engine.done)

    threads = [threading.Thread(target=live, args=(requests,)) for requests in engines]
    for thread in threads:
        thread.start()
    try:
        for _ in range(2):
            mine.wait()
            turn.wait()
            turn.wait()
            mine.wait()
    except threading.BrokenBarrierError:
        turn.abort()
        raise
    for thread in threads:
        thread.join()
    return done
