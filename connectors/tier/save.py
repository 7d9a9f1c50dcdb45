"""Saves of the offloading tier: runs of consecutive chunks as segments.

vLLM hands chunks over as they are computed, step by step. Those of one request and group that follow each
other are gathered until they fill a segment, their request ends, or a moment has passed: many chunks, one
PUT. Until then, and until they have been copied to staging, vLLM keeps their rows for us, so that moment is
short.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from connectors.engine.guard import bare
from connectors.engine.tensors import Chunk, Staging
from connectors.tier.memory import Job, Jobs, Primary
from connectors.tier.planning import Row, content_key, follows, group_of, in_order
from kvstore.errors import CapacityExceeded, KVStoreError
from kvstore.format.segment import Slot
from kvstore.keys import digest
from kvstore.rules.segments import staging_bytes
from kvstore.store.space import Space

log = logging.getLogger(__name__)

#: Time that the first of some gathered chunks waits for more, in seconds: a few steps of a long prompt.
GATHER_S = 0.25


@dataclass(slots=True)
class _Gathered:
    """Chunks of one request and group that follow each other, to be saved together."""

    rows: list[Row[Job]]
    since: float


class Saves:
    """Saves one engine's chunks. Everything public runs on the scheduler's thread."""

    def __init__(
        self,
        space: Space,
        primary: Primary,
        jobs: Jobs,
        segment_chunks: int,
        spans: Mapping[int, int],
        *,
        gather_s: float = GATHER_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`spans` is tokens per chunk, by group; `gather_s` is how long chunks wait for more."""
        self._space = space
        self._backends = space.backends
        self._primary = primary
        self._jobs = jobs
        self._spans = spans
        self._gather_s = gather_s
        self._clock = clock
        self._rows = segment_chunks
        size = staging_bytes(self._backends.settings.kv)
        self._staging = Staging(size, segment_chunks * primary.row_bytes, pin=False)
        self._open: dict[tuple[str, int], _Gathered] = {}

    @bare
    def submit(
        self,
        number: int,
        keys: Collection[bytes],
        chunks: Sequence[int],
        request: str,
        position: Callable[[bytes], int | None],
    ) -> None:
        """Save the rows `chunks`, one for each key. `position` tells where a key's chunk ends (see Row)."""
        job = self._jobs.start(number, keys, is_load=False)
        rows = [Row(key, int(chunk), position(key), job) for key, chunk in zip(keys, chunks, strict=True)]
        for row in in_order(rows):
            place = request, group_of(row.key)
            gathered = self._open.get(place)
            if gathered is not None and not follows(gathered.rows[-1], row, self._spans.__getitem__):
                self._close(place)
                gathered = None
            if gathered is None:
                gathered = self._open[place] = _Gathered([], self._clock())
            gathered.rows.append(row)
            if len(gathered.rows) >= self._rows:
                self._close(place)

    def drop(self) -> None:
        """Give up everything that was gathered."""
        rows = [row for one in self._open.values() for row in one.rows]
        self._open.clear()
        for row in rows:
            self._jobs.report(row.owner, [row.key], done=False)

    def close_request(self, request: str) -> None:
        """Save what was gathered of a request: nothing more will come of it."""
        for place in [place for place in self._open if place[0] == request]:
            self._close(place)

    def close_old(self) -> None:
        """Save what was gathered for long enough."""
        if self._open:
            due = self._clock() - self._gather_s
            for place in [place for place, one in self._open.items() if one.since <= due]:
                self._close(place)

    def close_all(self) -> None:
        """Save everything that was gathered."""
        for place in list(self._open):
            self._close(place)

    def _close(self, place: tuple[str, int]) -> None:
        rows = self._open.pop(place).rows
        nbytes = len(rows) * self._primary.row_bytes
        if not self._backends.transfers.write(nbytes, lambda: self._save(rows)):
            self._backends.counters.saved("dropped", len(rows))
            for row in rows:
                self._jobs.report(row.owner, [row.key], done=False)

    def _save(self, rows: Sequence[Row[Job]]) -> None:
        """Saves one segment. Runs on a transfer thread."""
        done = stored = False
        try:
            held = self._copied(rows)
            if held is None:
                self._backends.counters.saved("dropped", len(rows))
                return
            # A slot is a whole row, whatever its group.
            spec = self._space.namespace.groups[0]
            slots = [
                Slot(content_key(row.key), view, spec.dtype, spec.shape)
                for row, view in zip(rows, self._views(held, rows), strict=True)
            ]
            try:
                # vLLM doesn't tell where its chain begins. Each chunk needs a look-up by itself, in every
                # shard.
                chain = digest(slots[0].key)
                saved = self._space.save(slots, depth=self._depth(rows[0]), chain=chain)
            finally:
                self._staging.release(held)
            stored = saved.outcome in ("stored", "present")
            # "held": another engine is saving it, which is as good as done, but not certain.
            done = stored or saved.outcome == "held"
        except KVStoreError as exc:
            log.debug("%d chunks are not stored: %s", len(rows), exc)
        except Exception:
            log.exception("%d chunks are not stored", len(rows))
        finally:
            for row in rows:
                self._jobs.report(row.owner, [row.key], done=done, stored=stored)

    def _copied(self, rows: Sequence[Row[Job]]) -> Chunk | None:
        """Returns staging with the rows copied to it, or None without room, or if a row is vLLM's again."""
        owners = list(dict.fromkeys(row.owner for row in rows))
        try:
            held = self._staging.acquire(len(rows) * self._primary.row_bytes, min(job.end for job in owners))
        except CapacityExceeded:
            return None
        if self._jobs.enter(owners):
            try:
                self._primary.read([row.chunk for row in rows], self._views(held, rows))
                return held
            finally:
                self._jobs.leave(owners)
        self._staging.release(held)
        return None

    def _views(self, held: Chunk, rows: Sequence[Row[Job]]) -> list[memoryview]:
        return held.views(len(rows), self._primary.row_bytes)

    def _depth(self, row: Row[Job]) -> int:
        """Returns how many chunks come before this one in its chain."""
        return max(0, (row.position or 0) // self._spans[group_of(row.key)] - 1)
