"""Loads of whole prompts: match, read and verify into memory that is mapped already, as a connector does
it."""

from __future__ import annotations

import queue
import time
from dataclasses import dataclass

from kvstore.admin.bench.material import BenchSegment, Material
from kvstore.admin.bench.reports import LoadTime, Tier
from kvstore.admin.bench.stages import touched
from kvstore.errors import KVStoreError
from kvstore.index.port import Run
from kvstore.keys import ContentKey
from kvstore.rules.segments import staging_bytes
from kvstore.store.space import Space
from kvstore.store.store import Store


@dataclass(frozen=True, slots=True)
class Loaded:
    """The times of one prompt's load."""

    tokens: int
    nbytes: int
    match_s: float
    load_s: float


class Loader:
    """Loads prefixes of the chain that the bench has stored, through a store as an engine opens it."""

    def __init__(self, store: Store, material: Material) -> None:
        self._store = store
        self._material = material
        shape = material.shape
        self._space: Space = store.open(material.namespace, block_bytes=shape.block_bytes)
        self._stored: list[BenchSegment] = list(material.stored)
        self._keys: list[ContentKey] = [key for stored in self._stored for key in stored.keys]
        # As many runs may be under way as there is staging memory for.
        self._staging: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        most = max(1, staging_bytes(store.settings.kv) // shape.segment_bytes)
        for _ in range(min(most, len(self._stored))):
            self._staging.put(touched(shape.segment_bytes))

    @property
    def longest(self) -> int:
        """The number of tokens of the whole chain."""
        return len(self._keys) * self._material.shape.block_tokens

    def commit(self) -> None:
        """Makes the chain visible. Raises what the index raises."""
        for stored in self._stored:
            self._store.index.commit(
                self._space.id, stored.segment, stored.digests, stored.record, rank=0, ranks=1
            )

    def forget_copies(self, tokens: int) -> None:
        """Drops the copies that a fast tier has of a prompt's payloads."""
        if (drop_copy := self._store.backends.drop_copy) is not None:
            for stored in self._segments(tokens):
                drop_copy(self._material.name(stored))

    def names(self, tokens: int) -> list[tuple[str, int]]:
        """Returns the names of a prompt's payloads, and their sizes in bytes."""
        return [(self._material.name(stored), stored.nbytes) for stored in self._segments(tokens)]

    def load(self, tokens: int) -> Loaded:
        """Loads a prompt of `tokens` tokens, at most `longest`. Raises the first error of any of its runs."""
        shape = self._material.shape
        blocks = min(shape.blocks(tokens), len(self._keys))
        digests = b"".join(stored.digests for stored in self._stored)[: 16 * blocks]
        began = time.perf_counter()
        found = self._space.match(digests)
        matched = time.perf_counter()
        if found.blocks != blocks:
            raise KVStoreError(f"a match found {found.blocks} of {blocks} blocks ({found.reason})")
        self._load(found.runs)
        loaded = time.perf_counter()
        return Loaded(tokens, blocks * shape.block_bytes, matched - began, loaded - matched)

    def _load(self, runs: list[Run]) -> None:
        ended: queue.SimpleQueue[KVStoreError | None] = queue.SimpleQueue()
        for run in runs:
            memory = self._staging.get()
            if not self._store.transfers.read(lambda run=run, memory=memory: self._run(run, memory, ended)):  # type: ignore[misc]
                raise KVStoreError("the queue of reads is full")
        errors = [error for _ in runs if (error := ended.get())]
        if errors:
            raise errors[0]

    def _run(self, run: Run, memory: memoryview, ended: queue.SimpleQueue[KVStoreError | None]) -> None:
        size = self._material.shape.block_bytes
        views = [memory[i * size : (i + 1) * size] for i in range(run.count)]
        error = None
        try:
            self._space.load(run, self._keys[run.start : run.start + run.count], views)
        except KVStoreError as exc:
            error = exc
        self._staging.put(memory)
        ended.put(error)

    def _segments(self, tokens: int) -> list[BenchSegment]:
        shape = self._material.shape
        return self._stored[: -(-shape.blocks(tokens) // shape.segment_blocks)]


def report(loaded: Loaded, tier: Tier) -> LoadTime:
    """Returns a load as measured."""
    total = loaded.match_s + loaded.load_s
    return LoadTime(
        tier=tier,
        tokens=loaded.tokens,
        nbytes=loaded.nbytes,
        measured=True,
        match_s=loaded.match_s,
        load_s=loaded.load_s,
        bytes_s=loaded.nbytes / loaded.load_s,
        break_even_tokens_s=loaded.tokens / total,
    )


def extrapolated(longest: LoadTime, tokens: int, nbytes: int) -> LoadTime:
    """Returns what a longer load would take at the speed of one that was measured."""
    match_s = longest.match_s * nbytes / longest.nbytes
    load_s = nbytes / longest.bytes_s
    return longest.model_copy(
        update={
            "tokens": tokens,
            "nbytes": nbytes,
            "measured": False,
            "match_s": match_s,
            "load_s": load_s,
            "break_even_tokens_s": tokens / (match_s + load_s),
        }
    )
