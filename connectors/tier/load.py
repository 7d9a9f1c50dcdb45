"""Loads of the offloading tier: from the store, through staging, into vLLM's CPU tier.

A read fetches adjacent slots of one segment. They are verified in staging, and copied to the CPU tier's rows
only if their job is still live (connectors.tier.memory). A hung read keeps its staging and nothing else.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence

from connectors.engine.tensors import Chunk, Staging
from connectors.tier.memory import Job, Jobs, Primary
from connectors.tier.planning import Read, content_key, reads
from kvstore.errors import KVStoreError
from kvstore.index.port import Run
from kvstore.rules.segments import staging_bytes
from kvstore.store.space import Space

log = logging.getLogger(__name__)


class Loads:
    """Loads one engine's chunks. `submit` runs on the scheduler's thread."""

    def __init__(self, space: Space, primary: Primary, jobs: Jobs, segment_chunks: int) -> None:
        self._space = space
        self._backends = space.backends
        self._primary = primary
        self._jobs = jobs
        self._rows = segment_chunks
        size = staging_bytes(self._backends.settings.kv)
        self._staging = Staging(size, segment_chunks * primary.row_bytes, pin=False)

    def submit(
        self,
        number: int,
        keys: Collection[bytes],
        chunks: Sequence[int],
        runs: Sequence[Run | None],
    ) -> None:
        """Fill the row `chunks[i]` with the i-th key's bytes, which are where `runs[i]` says, if anywhere.

        A key that can't be read fails without the others.
        """
        job = self._jobs.start(number, keys, is_load=True)
        wanted = []
        for key, chunk, run in zip(keys, chunks, runs, strict=True):
            if run is None:
                self._jobs.report(job, [key], done=False)
            else:
                wanted.append((key, int(chunk), run))
        for read in reads(wanted, self._rows):
            if not self._backends.transfers.read(lambda r=read: self._load(job, r)):  # type: ignore[misc]
                self._backends.counters.miss("capacity", len(read.keys))
                self._jobs.report(job, read.keys, done=False)

    def _load(self, job: Job, read: Read) -> None:
        """Does one read. Runs on a transfer thread."""
        done = False
        held: Chunk | None = None
        try:
            held = self._staging.acquire(len(read.keys) * self._primary.row_bytes, job.end)
            left = max(0.001, job.end - time.monotonic())
            keys = [content_key(key) for key in read.keys]
            views = held.views(len(keys), self._primary.row_bytes)
            self._space.load(read.run, keys, views, deadline_s=left)
            if self._jobs.enter([job]):
                try:
                    self._primary.write(read.chunks, views)
                    done = True
                finally:
                    self._jobs.leave([job])
        except KVStoreError as exc:
            self._space.not_loaded.note(len(read.keys), exc, read.run.segment)
        except Exception:
            log.exception("%d chunks are computed", len(read.keys))
        finally:
            if held is not None:
                self._staging.release(held)
            self._jobs.report(job, read.keys, done=done)
        if done:
            self._backends.transfers.call(lambda: self._space.touch([read.run.segment]))
