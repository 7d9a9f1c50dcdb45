"""Loads of the offloading tier: from the store, through staging, into vLLM's CPU tier.

A piece is what one read fetches: adjacent slots of one segment. It is verified in staging, and copied to the
CPU tier's rows only if its job is still live (connectors.tier_memory). A hung read keeps its staging buffer
and nothing else.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence

from connectors.tier_memory import Job, Jobs, Primary, Staging, views
from connectors.tier_planning import Piece, content_key, pieces
from kvstore.errors import KVStoreError
from kvstore.ports import Run
from kvstore.store import Space

log = logging.getLogger(__name__)


class Loads:
    """Of one engine. `submit` runs on the scheduler's thread."""

    def __init__(self, space: Space, primary: Primary, jobs: Jobs, segment_chunks: int) -> None:
        self._space = space
        self._store = space.store
        self._primary = primary
        self._jobs = jobs
        size = self._store.settings.kv.staging_bytes
        self._staging = Staging(size, primary.row_bytes, segment_chunks)

    def submit(
        self,
        number: int,
        keys: Collection[bytes],
        chunks: Sequence[int],
        runs: Sequence[Run | None],
    ) -> None:
        """Fill the row `chunks[i]` with the i-th key's bytes, which are where `runs[i]` says.

        A key that can't be read fails by itself.
        """
        job = self._jobs.start(number, keys, is_load=True)
        wanted = []
        for key, chunk, run in zip(keys, chunks, runs, strict=True):
            if run is None:
                self._jobs.report(job, [key], done=False)
            else:
                wanted.append((key, int(chunk), run))
        for piece in pieces(wanted, self._staging.rows):
            if not self._store.transfers.read(lambda p=piece: self._load(job, p)):  # type: ignore[misc]
                self._store.counters.miss("capacity", len(piece.keys))
                self._jobs.report(job, piece.keys, done=False)

    def _load(self, job: Job, piece: Piece) -> None:
        """Transfer thread: one piece."""
        done = False
        buffer = None
        try:
            buffer = self._staging.acquire(job.end)
            left = max(0.001, job.end - time.monotonic())
            keys = [content_key(key) for key in piece.keys]
            self._space.load(piece.run, keys, views(buffer, len(keys)), deadline_s=left)
            if self._jobs.enter([job]):
                try:
                    self._primary.write(piece.chunks, buffer)
                    done = True
                finally:
                    self._jobs.leave([job])
        except KVStoreError as exc:
            log.warning("%d chunks are recomputed: %s", len(piece.keys), exc)
        except Exception:
            log.exception("%d chunks are recomputed", len(piece.keys))
        finally:
            if buffer is not None:
                self._staging.release(buffer)
            self._jobs.report(job, piece.keys, done=done)
        if done:
            self._store.transfers.call(lambda: self._space.touch([piece.run.segment]))
