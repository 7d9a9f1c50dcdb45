"""The KV connector in a worker: moves blocks between the paged cache and the store.

Threads, and who owns what:
    engine thread     start_loads, start_saves, flush, take_finished; owns nothing that waits
    transfer threads  one job per piece of a load (read, verify, copy to the paged cache), one per
                      segment saved (wait for the copy, write, commit)
    `_lock`           guards the tickets of loads and the reports for the scheduler

A load that fails in part reports the blocks that are not there; vLLM recomputes from the first of
them. Every load ends by its deadline, whatever the store does, because every piece does.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from connectors.guard import guarded
from connectors.kv_types import KVStoreWorkerMetadata, Load, Save
from connectors.planning import split_run
from connectors.tensors import Chunk, Copied, PagedCache, Staging
from kvstore.codec import Slot
from kvstore.errors import ConfigError, KVStoreError
from kvstore.keys import SegmentId
from kvstore.ports import Run
from kvstore.store import Space, Store
from schemas.namespace import GroupSpec, Namespace

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Ticket:
    """A load under way."""

    load: Load
    pieces: int
    end: float
    #: Event on the engine's stream after which the blocks are ours to write.
    after: Any
    failed: list[Run] = field(default_factory=list)


class KVWorker:
    """One per rank."""

    def __init__(
        self, store: Store, spec: GroupSpec, *, segment_blocks: int, rank: int = 0, ranks: int = 1
    ) -> None:
        self._store = store
        self._settings = store.settings.kv
        self._spec = spec
        self._segment_blocks = segment_blocks
        self._rank = rank
        self._ranks = ranks
        self._cache: PagedCache | None = None
        self._load_staging: Staging | None = None
        self._save_staging: Staging | None = None
        self._space: Space | None = None
        self._unprotected: list[Copied] = []
        self._lock = threading.Lock()
        self._finished: list[Ticket] = []
        self._failed_blocks: set[int] = set()
        self._failed_loads: dict[str, int] = {}
        self._ended_saves: set[SegmentId] = set()

    def register(self, caches: Sequence[torch.Tensor], num_blocks: int) -> None:
        """The layers' paged tensors in slot order. Raises ConfigError if they aren't what the
        namespace says, before anything could be stored under it."""
        cache = PagedCache(caches, num_blocks)
        if cache.slot_bytes != self._spec.slot_bytes or len(caches) != self._spec.shape[0]:
            raise ConfigError(
                f"kvstore: the engine's KV blocks are {cache.slot_bytes} bytes in {len(caches)} layers, the "
                f"namespace says {self._spec.slot_bytes} in {self._spec.shape[0]}"
            )
        pin = cache.device.type == "cuda"
        size, rows = self._settings.staging_bytes, self._segment_blocks
        try:
            self._load_staging = Staging(size, cache.slot_bytes, rows, pin=pin)
            self._save_staging = Staging(size, cache.slot_bytes, rows, pin=pin)
        except ValueError as exc:
            raise ConfigError(f"kvstore: kv.{exc}") from None
        self._cache = cache
        self._canary()

    def use(self, namespace: Namespace) -> None:
        """The scheduler's half has named the namespace; all that follows belongs to it."""
        if self._space is not None and self._space.namespace == namespace:
            return
        if namespace.groups[0] != self._spec:
            raise ConfigError("kvstore: scheduler and worker disagree on the KV cache's layout")
        self._space = self._store.open(namespace, block_bytes=self._spec.slot_bytes * self._ranks)

    # ---- loads ----------------------------------------------------------------------------------

    def start_loads(self, loads: Sequence[Load]) -> None:
        """Queue the loads of this step."""
        if not loads:
            return
        cache, staging = self._ready()
        after = cache.mark()
        for load in loads:
            pieces = [piece for run in load.runs for piece in split_run(run, staging.rows)]
            ticket = Ticket(load, len(pieces), time.monotonic() + self._settings.load_deadline_s, after)
            for piece in pieces:
                if not self._store.transfers.read(lambda t=ticket, p=piece: self._load(t, p)):  # type: ignore[misc]
                    self._store.counters.miss("capacity", piece.count)
                    self._ended(ticket, piece, failed=True)

    def _load(self, ticket: Ticket, run: Run) -> None:
        """Transfer thread: one piece of a load."""
        assert self._cache is not None and self._load_staging is not None and self._space is not None
        failed = True
        chunk: Chunk | None = None
        at = run.start - ticket.load.first
        try:
            chunk = self._load_staging.acquire(ticket.end)
            self._space.load(
                run,
                ticket.load.keys[at : at + run.count],
                chunk.views(run.count),
                rank=self._rank,
                deadline_s=max(0.001, ticket.end - time.monotonic()),
            )
            self._cache.scatter(ticket.load.block_ids[at : at + run.count], chunk, ticket.after)
            failed = False
        except KVStoreError as exc:
            log.warning("request %s: %d blocks are recomputed: %s", ticket.load.request_id, run.count, exc)
        except Exception:
            log.exception("request %s: %d blocks are recomputed", ticket.load.request_id, run.count)
        finally:
            if chunk is not None:
                self._load_staging.release(chunk)
            self._ended(ticket, run, failed=failed)

    def _ended(self, ticket: Ticket, run: Run, *, failed: bool) -> None:
        with self._lock:
            if failed:
                ticket.failed.append(run)
            ticket.pieces -= 1
            done = ticket.pieces == 0
            if done:
                self._finished.append(ticket)
        if done and not ticket.failed and self._space is not None:
            space, segments = self._space, [run.segment for run in ticket.load.runs]
            self._store.transfers.call(lambda: space.touch(segments))

    def take_finished(self) -> set[str]:
        """Requests whose loads have ended since the last call; failures go to the two calls below."""
        with self._lock:
            tickets, self._finished = self._finished, []
            for ticket in tickets:
                for run in ticket.failed:
                    at = run.start - ticket.load.first
                    self._failed_blocks.update(ticket.load.block_ids[at : at + run.count])
                if ticket.failed:
                    self._failed_loads[ticket.load.request_id] = min(run.start for run in ticket.failed)
        return {ticket.load.request_id for ticket in tickets}

    def take_failed_blocks(self) -> set[int]:
        """Paged block ids of the loads taken last that hold nothing."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_report(self) -> KVStoreWorkerMetadata | None:
        """What the scheduler's half must know; None if nothing happened."""
        with self._lock:
            if not self._ended_saves and not self._failed_loads:
                return None
            report = KVStoreWorkerMetadata(self._ended_saves, self._failed_loads)
            self._ended_saves, self._failed_loads = set(), {}
        return report

    # ---- saves ----------------------------------------------------------------------------------

    def protect(self) -> None:
        """Before a step's forward pass: it may overwrite blocks that are still being gathered."""
        if self._unprotected:
            assert self._cache is not None
            for copied in self._unprotected:
                self._cache.protect(copied)
            self._unprotected.clear()

    def start_saves(self, saves: Sequence[Save]) -> None:
        """Copy the blocks to staging and queue their writes; what doesn't fit is dropped, counted."""
        for save in saves:
            if not self._start_save(save):
                self._store.counters.saved("dropped", len(save.keys))
                with self._lock:
                    self._ended_saves.add(save.segment)

    @guarded(False)
    def _start_save(self, save: Save) -> bool:
        assert self._cache is not None and self._save_staging is not None
        chunk = self._save_staging.try_acquire()
        if chunk is None:
            return False
        try:
            copied = self._cache.gather(save.block_ids, chunk)
        except Exception:
            self._save_staging.release(chunk)
            raise
        if copied.source_free is not None:
            self._unprotected.append(copied)
        nbytes = len(save.keys) * self._spec.slot_bytes
        if self._store.transfers.write(nbytes, lambda: self._save(save, chunk, copied)):
            return True
        # The copy may still be under way on a side stream; the chunk is free when it is done.
        copied.wait()
        self._save_staging.release(chunk)
        return False

    def _save(self, save: Save, chunk: Chunk, copied: Copied) -> None:
        """Transfer thread: one segment."""
        assert self._space is not None and self._save_staging is not None
        try:
            copied.wait()
            views = chunk.views(len(save.keys))
            slots = [
                Slot(key, view, self._spec.dtype, self._spec.shape)
                for key, view in zip(save.keys, views, strict=True)
            ]
            self._space.save(
                slots, depth=save.first, segment=save.segment, rank=self._rank, ranks=self._ranks
            )
        except KVStoreError as exc:
            log.warning("%d blocks are not cached: %s", len(save.keys), exc)
        except Exception:
            log.exception("%d blocks are not cached", len(save.keys))
        finally:
            self._save_staging.release(chunk)
            with self._lock:
                self._ended_saves.add(save.segment)

    # ---- the rest -------------------------------------------------------------------------------

    def _ready(self) -> tuple[PagedCache, Staging]:
        assert self._cache is not None and self._load_staging is not None, (
            "register_kv_caches has not been called"
        )
        return self._cache, self._load_staging

    def _canary(self) -> None:
        """Write a pattern to block 0, read it back as a slot and compare.

        Block 0 is vLLM's null block, which no request owns. A layout that this code misreads would
        otherwise be restored as garbage, silently.
        """
        cache, staging = self._ready()
        chunk = staging.acquire(time.monotonic() + 1.0)
        try:
            slot = chunk.tensor[0]
            cache.gather([0], chunk).wait()
            before = slot.clone()
            pattern = torch.arange(slot.numel(), dtype=torch.int64).remainder_(251).to(torch.uint8)
            slot.copy_(pattern)
            cache.scatter([0], chunk, cache.mark())
            slot.zero_()
            cache.gather([0], chunk).wait()
            if not torch.equal(slot, pattern) or not cache.layer_holds(0, pattern):
                raise ConfigError(
                    "kvstore: a block written to the KV cache reads back differently; layout not understood"
                )
            slot.copy_(before)
            cache.scatter([0], chunk, cache.mark())
        finally:
            staging.release(chunk)

    def shutdown(self) -> None:
        """Let queued saves finish (bounded), then close the store of this half."""
        self._store.close()
        snapshot = {name: value for name, value in self._store.counters.snapshot().items() if value}
        log.info("kvstore worker closed: %s", snapshot)
