"""The KV connector in a worker: moves blocks between the paged cache and the store.

Threads, and who owns what:
    engine thread     everything public; it waits for nothing but the CPU's own copies
    transfer threads  one job per piece of a load (read, verify, copy to the paged cache), one per
                      segment saved (wait for the copy, write, commit)
    `_lock`           guards the tickets of loads and the reports for the scheduler

A load that fails in part reports the blocks that are not there; vLLM recomputes from the first of
them. Every load ends by its deadline, even if a read hangs for ever: its ticket expires, and what the
hung read brings later is thrown away, because by then its blocks may belong to another request.
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
from kvstore.errors import ConfigError, CorruptPayload, KVStoreError
from kvstore.keys import SegmentId, block_key
from kvstore.ports import Run
from kvstore.store import Space, Store
from schemas.namespace import GroupSpec, Namespace

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Ticket:
    """A load under way. Everything but the first three fields is guarded by the worker's lock."""

    load: Load
    end: float
    #: Event on the engine's stream after which the blocks are ours to write.
    after: Any
    #: Pieces that have not ended.
    pending: list[Run]
    failed: list[Run] = field(default_factory=list)
    #: Pieces that are being copied to the paged cache at this moment.
    writing: int = 0
    expired: bool = False


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
        self._lock = threading.Lock()
        self._live: list[Ticket] = []
        self._failed_blocks: set[int] = set()
        self._failed_loads: dict[str, int] = {}
        self._ended_saves: set[SegmentId] = set()
        self._bad_segments: set[SegmentId] = set()
        self._said_down = False

    def register(self, caches: Sequence[torch.Tensor], num_blocks: int) -> None:
        """The layers' paged tensors in slot order. Raises ConfigError if they aren't what the
        namespace says, before anything could be stored under it."""
        try:
            cache = PagedCache(caches, num_blocks)
        except ValueError as exc:
            raise ConfigError(f"kvstore: {exc}") from None
        if (cache.shape, cache.dtype_name) != (self._spec.shape, self._spec.dtype):
            raise ConfigError(
                f"kvstore: the engine's KV blocks are {cache.dtype_name}{list(cache.shape)}, its "
                f"configuration says {self._spec.dtype}{list(self._spec.shape)}; layout not understood"
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

    @property
    def device_type(self) -> str:
        """`cpu` or `cuda`, once registered."""
        return self._ready()[0].device.type

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
            end = time.monotonic() + self._settings.load_deadline_s
            ticket = Ticket(load, end, after, list(pieces))
            with self._lock:
                self._live.append(ticket)
            for piece in pieces:
                if not self._store.transfers.read(lambda t=ticket, p=piece: self._load(t, p)):  # type: ignore[misc]
                    self._store.counters.miss("capacity", piece.count)
                    self._ended(ticket, piece, failed=True)

    def abandon_loads(self) -> None:
        """What is being loaded now must not be used: all of it counts as failed."""
        with self._lock:
            for ticket in self._live:
                ticket.end = 0.0
                ticket.failed = list(ticket.load.runs)

    def _load(self, ticket: Ticket, run: Run) -> None:
        """Transfer thread: one piece of a load."""
        assert self._cache is not None and self._load_staging is not None and self._space is not None
        failed = True
        chunk: Chunk | None = None
        at = run.start - ticket.load.first
        part = slice(at, at + run.count)
        try:
            chunk = self._load_staging.acquire(ticket.end)
            keys = [block_key(one) for one in ticket.load.hashes[part]]
            left = max(0.001, ticket.end - time.monotonic())
            self._space.load(run, keys, chunk.views(run.count), rank=self._rank, deadline_s=left)
            if self._may_write(ticket):
                try:
                    self._cache.scatter(ticket.load.block_ids[part], chunk, ticket.after)
                    failed = False
                finally:
                    with self._lock:
                        ticket.writing -= 1
        except KVStoreError as exc:
            log.warning("request %s: %d blocks are recomputed: %s", ticket.load.request_id, run.count, exc)
            if isinstance(exc, CorruptPayload):
                with self._lock:
                    self._bad_segments.add(run.segment)
        except Exception:
            log.exception("request %s: %d blocks are recomputed", ticket.load.request_id, run.count)
        finally:
            if chunk is not None:
                self._load_staging.release(chunk)
            self._ended(ticket, run, failed=failed)

    def _may_write(self, ticket: Ticket) -> bool:
        with self._lock:
            if ticket.expired:
                return False
            ticket.writing += 1
            return True

    def _ended(self, ticket: Ticket, run: Run, *, failed: bool) -> None:
        with self._lock:
            ticket.pending.remove(run)
            if failed:
                ticket.failed.append(run)

    def take_finished(self) -> set[str]:
        """Requests whose loads have ended since the last call; failures go to the two calls below."""
        if not self._live:
            return set()
        now = time.monotonic()
        with self._lock:
            done = [ticket for ticket in self._live if self._over(ticket, now)]
            for ticket in done:
                self._live.remove(ticket)
                for run in ticket.failed:
                    at = run.start - ticket.load.first
                    self._failed_blocks.update(ticket.load.block_ids[at : at + run.count])
                if ticket.failed:
                    self._failed_loads[ticket.load.request_id] = min(run.start for run in ticket.failed)
        for ticket in done:
            if not ticket.failed and self._space is not None:
                space, segments = self._space, [run.segment for run in ticket.load.runs]
                self._store.transfers.call(lambda s=space, g=segments: s.touch(g))  # type: ignore[misc]
        return {ticket.load.request_id for ticket in done}

    def _over(self, ticket: Ticket, now: float) -> bool:
        """Whether a load has ended, by itself or by its deadline. Holds the lock."""
        if not ticket.pending:
            return True
        # A copy under way takes a moment, and its blocks are not to be given back before it ends.
        if now < ticket.end or ticket.writing:
            return False
        ticket.expired = True
        ticket.failed += ticket.pending
        self._store.counters.miss("deadline", sum(run.count for run in ticket.pending))
        return True

    def take_failed_blocks(self) -> set[int]:
        """Paged block ids of the loads taken last that hold nothing."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_report(self) -> KVStoreWorkerMetadata | None:
        """What the scheduler's half must know; None if nothing happened."""
        down = not self._store.payloads_answer()
        with self._lock:
            changed = None if down == self._said_down else down
            if changed is None and not (self._ended_saves or self._failed_loads or self._bad_segments):
                return None
            self._said_down = down
            report = KVStoreWorkerMetadata(self._ended_saves, self._failed_loads, self._bad_segments, changed)
            self._ended_saves, self._failed_loads, self._bad_segments = set(), {}, set()
        return report

    # ---- saves ----------------------------------------------------------------------------------

    def start_saves(self, saves: Sequence[Save]) -> None:
        """Copy the blocks to staging and queue their writes; what doesn't fit is dropped, counted."""
        for save in saves:
            if not self._start_save(save):
                self._store.counters.saved("dropped", len(save.hashes))
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
        nbytes = len(save.hashes) * self._spec.slot_bytes
        if self._store.transfers.write(nbytes, lambda: self._save(save, chunk, copied)):
            return True
        # The copy may still be under way on a side stream, and the chunk is free when it is done.
        if not self._store.transfers.call(lambda: self._discard(chunk, copied)):
            self._discard(chunk, copied)
        return False

    def _discard(self, chunk: Chunk, copied: Copied) -> None:
        assert self._save_staging is not None
        copied.wait()
        self._save_staging.release(chunk)

    def _save(self, save: Save, chunk: Chunk, copied: Copied) -> None:
        """Transfer thread: one segment."""
        assert self._space is not None and self._save_staging is not None
        try:
            copied.wait()
            views = chunk.views(len(save.hashes))
            slots = [
                Slot(block_key(one), view, self._spec.dtype, self._spec.shape)
                for one, view in zip(save.hashes, views, strict=True)
            ]
            self._space.save(
                slots, depth=save.first, segment=save.segment, rank=self._rank, ranks=self._ranks
            )
        except KVStoreError as exc:
            log.warning("%d blocks are not cached: %s", len(save.hashes), exc)
        except Exception:
            log.exception("%d blocks are not cached", len(save.hashes))
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
        """Write a pattern to block 0, read it back, and compare each layer's own tensor with it.

        Block 0 is vLLM's null block, which no request owns. Tells whether the strides are understood;
        that the dimensions are what they are taken for is `register`'s comparison, and what fills a
        page is in the namespace.
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
