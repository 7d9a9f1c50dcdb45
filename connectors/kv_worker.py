"""The KV connector in a worker: moves blocks between the paged cache and the store.

Threads, and who owns what:
    engine thread     everything public; it waits for nothing but the CPU's own copies
    transfer threads  one job per piece of a load (read, verify, copy to the paged cache), one per
                      segment saved (wait for the copy, write, commit)
    `_lock`           guards the tickets of loads and the reports for the scheduler

A load that fails in part reports the blocks that are not there, and vLLM recomputes from the first of
them, or where that can't be, its request (connectors.layout.fails_by_request). Every load ends by its
deadline, even if a read hangs for ever: its ticket expires, and what the hung read brings later is thrown
away, because by then its blocks may belong to another request.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from connectors.guard import guarded
from connectors.kv_handoff_saves import KeptSaves
from connectors.kv_stats import RENAMED, KVStoreStats
from connectors.kv_types import GroupLoad, KVStoreWorkerMetadata, Load, Save
from connectors.layout import LocalGroup
from connectors.planning import gaps, split_run
from connectors.shards import Place, read_part
from connectors.stats import Tally, TierStates
from connectors.tensors import Blocks, Chunk, Copied, PagedCache, Staging
from connectors.weights import Naming
from kvstore.codec import Slot
from kvstore.errors import ConfigError, CorruptPayload, KVStoreError
from kvstore.keys import SegmentId, block_key
from kvstore.ports import Run
from kvstore.store import Space, Store, miss_reason
from schemas.namespace import Namespace

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """What one read brings: a run of one group's blocks that fits into one chunk of staging."""

    group: GroupLoad
    run: Run

    def cut(self) -> slice:
        """Where its blocks are in the group's lists."""
        at = self.run.start - self.group.first
        return slice(at, at + self.run.count)

    @property
    def blocks(self) -> Blocks:
        """Its paged blocks."""
        return {table: ids[self.cut()] for table, ids in self.group.tables.items()}


@dataclass(slots=True, eq=False)
class Ticket:
    """A load under way. Everything but the first four fields is guarded by the worker's lock."""

    load: Load
    end: float
    #: The namespace that the scheduler's half had named by then.
    space: Space
    #: Event on the engine's stream after which the blocks are ours to write.
    after: Any
    #: Pieces that have not ended.
    pending: list[Piece]
    #: Blocks that could not be loaded, or that nothing was promised for.
    failed: list[tuple[GroupLoad, range]] = field(default_factory=list)
    #: Pieces that are being copied to the paged cache at this moment.
    writing: int = 0
    expired: bool = False
    #: Why the first of those that failed did: of kvstore.metrics.MISS_REASONS.
    reason: str = ""
    began: float = field(default_factory=time.monotonic)


class KVWorker:
    """One per rank."""

    def __init__(
        self,
        store: Store,
        groups: Sequence[LocalGroup],
        *,
        segment_blocks: Sequence[int],
        place: Place | None = None,
        by_request: bool = False,
    ) -> None:
        """`groups`: this rank's; `segment_blocks`: blocks per segment, of each, at most. `place`: which rank
        this is; the only one, if left out. `by_request`: report failed requests instead of failed blocks."""
        self._store = store
        self._settings = store.settings.kv
        self._groups = groups
        self._segment_blocks = segment_blocks
        self._place = place or Place()
        self._by_request = by_request
        self._caches: list[PagedCache] = []
        self._load_staging: Staging | None = None
        self._save_staging: Staging | None = None
        self._space: Space | None = None
        self._lock = threading.Lock()
        self._live: list[Ticket] = []
        self._failed_blocks: set[int] = set()
        self._failed_requests: set[str] = set()
        self._failed_loads: dict[str, dict[int, int]] = {}
        self._load_reasons: dict[str, str] = {}
        self._save_reasons: dict[SegmentId, str] = {}
        self._ended_saves: dict[SegmentId, tuple[int, bool]] = {}
        self._bad_segments: set[SegmentId] = set()
        self._failed_handoffs: set[str] = set()
        self._said_down = False
        self._naming: Naming | None = None
        self._tally = Tally(store.counters, RENAMED)
        self._tier_states = TierStates(store, self._tally, f"{{{self._place.number}}}")
        #: Saves of hand-offs that found no room.
        self.kept = KeptSaves(self._start_save, self._drop_save)

    def register(self, caches: Mapping[str, torch.Tensor], num_blocks: int) -> None:
        """The layers' paged tensors. Raises ConfigError if they aren't what the configuration says, before
        anything could be stored."""
        made = []
        for group in self._groups:
            tables = {table: [caches[name] for name in names] for table, names in group.tables}
            try:
                cache = PagedCache(tables, num_blocks)
            except ValueError as exc:
                raise ConfigError(f"kvstore: {exc}") from None
            if (cache.shape, cache.dtype_name) != (group.shape, group.page.dtype):
                raise ConfigError(
                    f"kvstore: the engine's KV blocks are {cache.dtype_name}{list(cache.shape)}, its "
                    f"configuration says {group.page.dtype}{list(group.shape)}; layout not understood"
                )
            made.append(cache)
        pin = made[0].device.type == "cuda"
        size = self._settings.staging_bytes
        wanted = zip(made, self._segment_blocks, strict=True)
        # Of one size, so that any chunk serves any group; a multiple of every dtype's size.
        chunk = -(-max(min(blocks * cache.slot_bytes, size) for cache, blocks in wanted) // 64) * 64
        chunk = max([chunk, *(cache.slot_bytes for cache in made)])
        try:
            self._load_staging = Staging(size, chunk, pin=pin)
            self._save_staging = Staging(size, chunk, pin=pin)
        except ValueError as exc:
            raise ConfigError(f"kvstore: kv.{exc}") from None
        self._caches = made
        for cache in made:
            self._canary(cache)

    @property
    def device_type(self) -> str:
        """`cpu` or `cuda`, once registered."""
        self._ready()
        return self._caches[0].device.type

    def use(self, namespace: Namespace) -> None:
        """The scheduler's half has named the namespace; all that follows belongs to it."""
        if self._space is not None and self._space.namespace == namespace:
            return
        mine = [(group.page.kind, group.page.block_tokens, group.page.dtype) for group in self._groups]
        if mine != [(spec.kind, spec.block_tokens, spec.dtype) for spec in namespace.groups]:
            raise ConfigError("kvstore: scheduler and worker disagree on the KV cache's layout")
        self.kept.give_up()
        block_bytes = max(spec.slot_bytes for spec in namespace.groups)
        self._space = self._store.open(namespace, block_bytes=block_bytes)

    # ---- loads ----------------------------------------------------------------------------------

    def start_loads(self, loads: Sequence[Load]) -> None:
        """Queue the loads of this step."""
        if not loads:
            return
        staging, space = self._ready(), self._space
        assert space is not None, "loads before a namespace"
        after = self._caches[0].mark()
        for load in loads:
            pieces, missing = [], []
            for group in load.groups:
                most = staging.chunk_bytes // self._caches[group.group].slot_bytes
                pieces += [Piece(group, part) for run in group.runs for part in split_run(run, most)]
                wanted = range(group.first, group.first + len(group.hashes))
                missing += [(group, gap) for gap in gaps(wanted, group.runs)]
            end = time.monotonic() + self._settings.load_deadline_s
            ticket = Ticket(load, end, space, after, list(pieces), missing, reason="error" if missing else "")
            with self._lock:
                self._live.append(ticket)
            for piece in pieces:
                if not self._store.transfers.read(lambda t=ticket, p=piece: self._load(t, p)):  # type: ignore[misc]
                    self._store.counters.miss("capacity", piece.run.count)
                    self._ended(ticket, piece, "capacity")

    def abandon_loads(self) -> None:
        """What is being loaded now must not be used: all of it counts as failed."""
        with self._lock:
            for ticket in self._live:
                ticket.end = 0.0
                # What is being read is of the weights that were.
                ticket.reason = ticket.reason or "namespace_mismatch"
                ticket.failed = [
                    (group, range(group.first, group.first + len(group.hashes)))
                    for group in ticket.load.groups
                ]

    def _load(self, ticket: Ticket, piece: Piece) -> None:
        """Transfer thread: one piece of a load."""
        assert self._load_staging is not None
        failed = "deadline"
        chunk: Chunk | None = None
        run, number = piece.run, piece.group.group
        group, cache = self._groups[number], self._caches[number]
        try:
            chunk = self._load_staging.acquire(ticket.end)
            keys = [block_key(one, number) for one in piece.group.hashes[piece.cut()]]
            into = chunk.views(run.count, cache.slot_bytes)
            read_part(ticket.space, group, self._place, run, keys, into, ticket.end)
            if self._may_write(ticket):
                try:
                    cache.scatter(piece.blocks, chunk, ticket.after)
                    failed = ""
                finally:
                    with self._lock:
                        ticket.writing -= 1
        except KVStoreError as exc:
            failed = miss_reason(exc)
            log.warning("request %s: %d blocks are recomputed: %s", ticket.load.request_id, run.count, exc)
            if isinstance(exc, CorruptPayload):
                with self._lock:
                    self._bad_segments.add(run.segment)
        except Exception:
            failed = "error"
            log.exception("request %s: %d blocks are recomputed", ticket.load.request_id, run.count)
        finally:
            if chunk is not None:
                self._load_staging.release(chunk)
            self._ended(ticket, piece, failed)

    def _may_write(self, ticket: Ticket) -> bool:
        with self._lock:
            if ticket.expired:
                return False
            ticket.writing += 1
            return True

    def _ended(self, ticket: Ticket, piece: Piece, failed: str) -> None:
        """`failed`: why, of kvstore.metrics.MISS_REASONS; "": it did not."""
        with self._lock:
            ticket.pending.remove(piece)
            if failed:
                ticket.reason = ticket.reason or failed
                ticket.failed.append((piece.group, range(piece.run.start, piece.run.start + piece.run.count)))

    def take_finished(self) -> tuple[set[str], set[str]]:
        """Requests whose loads have ended since the last call; those of them that failed, if asked to be
        reported so. Failed blocks go to the two calls below."""
        if not self._live:
            return set(), set()
        now = time.monotonic()
        with self._lock:
            done = [ticket for ticket in self._live if self._over(ticket, now)]
            for ticket in done:
                self._live.remove(ticket)
                self._report(ticket)
            failed, self._failed_requests = self._failed_requests, set()
        for ticket in done:
            if not ticket.failed:
                self._tally.timed("load_seconds", now - ticket.began)
                segments = [run.segment for group in ticket.load.groups for run in group.runs]
                space = ticket.space
                self._store.transfers.call(lambda s=space, g=segments: s.touch(g))  # type: ignore[misc]
        return {ticket.load.request_id for ticket in done}, failed

    def _report(self, ticket: Ticket) -> None:
        """Take down what a load that has ended did not bring. Holds the lock."""
        if not ticket.failed:
            return
        name, first = ticket.load.request_id, self._failed_loads.setdefault(ticket.load.request_id, {})
        self._load_reasons[name] = ticket.reason
        for group, blocks in ticket.failed:
            first[group.group] = min(blocks.start, first.get(group.group, blocks.start))
            cut = slice(blocks.start - group.first, blocks.stop - group.first)
            if not self._by_request:
                self._failed_blocks.update(*(ids[cut] for ids in group.tables.values()))
        if self._by_request:
            self._failed_requests.add(name)

    def _over(self, ticket: Ticket, now: float) -> bool:
        """Whether a load has ended, by itself or by its deadline. Holds the lock."""
        if not ticket.pending:
            return True
        # A copy under way takes a moment, and its blocks are not to be given back before it ends.
        if now < ticket.end or ticket.writing:
            return False
        ticket.expired = True
        ticket.reason = ticket.reason or "deadline"
        for piece in ticket.pending:
            ticket.failed.append((piece.group, range(piece.run.start, piece.run.start + piece.run.count)))
        self._store.counters.miss("deadline", sum(piece.run.count for piece in ticket.pending))
        return True

    def take_failed_blocks(self) -> set[int]:
        """Paged block ids of the loads taken last that hold nothing."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_report(self) -> KVStoreWorkerMetadata | None:
        """What the scheduler's half must know; None if nothing happened."""
        down = not self._store.payloads_answer()
        with self._lock:
            changed = {} if down == self._said_down else {self._place.number: down}
            named, self._naming = self._naming, None
            if not (changed or self._ended_saves or self._failed_loads or self._bad_segments or named):
                return None
            self._said_down = down
            report = KVStoreWorkerMetadata(
                self._ended_saves, self._failed_loads, self._bad_segments, changed, self._failed_handoffs
            )
            report.load_reasons, self._load_reasons = self._load_reasons, {}
            report.save_reasons, self._save_reasons = self._save_reasons, {}
            self._ended_saves, self._failed_loads, self._bad_segments = {}, {}, set()
            self._failed_handoffs = set()
            if named is not None:
                report.weights[self._place.number] = named
        return report

    def name_weights(self, name: str) -> None:
        """The weights that this rank has now are called so. Raises ValueError for what can't be a name."""
        naming = Naming.now(name)
        with self._lock:
            self._naming = naming

    # ---- saves ----------------------------------------------------------------------------------

    def start_saves(self, saves: Sequence[Save]) -> None:
        """Copy the blocks to staging and queue their writes; what doesn't fit is dropped, counted.

        Of a hand-off it is kept, if its blocks are. Called with every step.
        """
        self.kept.retry()
        for save in saves:
            if not self._place.writes(self._groups[save.group]):
                continue
            if not self._start_save(save) and not self.kept.keep(save):
                self._drop_save(save)

    def _drop_save(self, save: Save) -> None:
        self._store.counters.saved("dropped", len(save.hashes))
        self._save_ended(save, "dropped")

    def _save_ended(self, save: Save, outcome: str) -> None:
        """`outcome`: of kvstore.metrics.SAVE_OUTCOMES."""
        with self._lock:
            self._ended_saves[save.segment] = (1, outcome == "stored")
            if outcome != "stored":
                self._save_reasons[save.segment] = outcome
            if outcome not in ("stored", "present") and save.handed_over is not None:
                self._failed_handoffs.add(save.handed_over)

    @guarded(False)
    def _start_save(self, save: Save) -> bool:
        # Kept for when it is written: by then the scheduler's half may have named another namespace.
        space, began = self._space, time.monotonic()
        assert self._save_staging is not None and space is not None
        cache = self._caches[save.group]
        nbytes = len(save.hashes) * cache.slot_bytes
        if nbytes > self._save_staging.chunk_bytes or (chunk := self._save_staging.try_acquire()) is None:
            return False
        try:
            copied = cache.gather(save.tables, chunk)
        except Exception:
            self._save_staging.release(chunk)
            raise
        if self._store.transfers.write(nbytes, lambda: self._save(space, save, chunk, copied, began)):
            return True
        # The copy may still be under way on a side stream, and the chunk is free when it is done.
        if not self._store.transfers.call(lambda: self._discard(chunk, copied)):
            self._discard(chunk, copied)
        return False

    def _discard(self, chunk: Chunk, copied: Copied) -> None:
        assert self._save_staging is not None
        copied.wait()
        self._save_staging.release(chunk)

    def _save(self, space: Space, save: Save, chunk: Chunk, copied: Copied, began: float) -> None:
        """Transfer thread: one segment."""
        assert self._save_staging is not None
        group, outcome = self._groups[save.group], "failed"
        try:
            copied.wait()
            views = chunk.views(len(save.hashes), self._caches[save.group].slot_bytes)
            slots = [
                Slot(block_key(one, save.group), view, group.page.dtype, group.shape)
                for one, view in zip(save.hashes, views, strict=True)
            ]
            saved = space.save(
                slots,
                depth=save.first,
                segment=save.segment,
                created_s=save.created_s,
                rank=self._place.part(group),
                ranks=self._place.parts(group),
                cost_us=save.cost_us,
                insist=save.handed_over is not None,
            )
            outcome = "stored" if saved.outcome == "waiting" else saved.outcome
            if outcome == "stored":
                self._tally.timed("save_seconds", time.monotonic() - began)
        except KVStoreError as exc:
            log.warning("%d blocks are not cached: %s", len(save.hashes), exc)
        except Exception:
            log.exception("%d blocks are not cached", len(save.hashes))
        finally:
            self._save_staging.release(chunk)
            self._save_ended(save, outcome)

    # ---- the rest -------------------------------------------------------------------------------

    def _ready(self) -> Staging:
        assert self._load_staging is not None, "register_kv_caches has not been called"
        return self._load_staging

    def _canary(self, cache: PagedCache) -> None:
        """Write a pattern to one slot's blocks, read it back, and compare each layer's own tensor with it.

        No request owns a block yet. Tells whether the strides are understood; that the dimensions are what
        they are taken for is `register`'s comparison, and what fills a page is in the namespace.
        """
        chunk = self._ready().acquire(time.monotonic() + 1.0)
        blocks = cache.first_blocks()
        try:
            slot = chunk.tensor[: cache.slot_bytes]
            cache.gather(blocks, chunk).wait()
            before = slot.clone()
            pattern = torch.arange(slot.numel(), dtype=torch.int64).remainder_(251).to(torch.uint8)
            slot.copy_(pattern)
            cache.scatter(blocks, chunk, cache.mark())
            slot.zero_()
            cache.gather(blocks, chunk).wait()
            if not torch.equal(slot, pattern) or not cache.layers_hold(blocks, pattern):
                raise ConfigError(
                    "kvstore: a block written to the KV cache reads back differently; layout not understood"
                )
            slot.copy_(before)
            cache.scatter(blocks, chunk, cache.mark())
        finally:
            self._ready().release(chunk)

    @guarded(None)
    def take_stats(self) -> KVStoreStats | None:
        """What happened since the last call; None if nothing has."""
        staging = self._save_staging
        busy = bool(self._live) or (staging is not None and staging.free < staging.chunks)
        self._tier_states.tell()
        report = self._tally.take(busy, self._gauges)
        return None if report is None else KVStoreStats(report)

    def _gauges(self) -> dict[str, float]:
        queued = self._store.transfers.queued
        values: dict[str, float] = {
            "queued_reads": queued["reads"],
            "queued_writes": queued["writes"],
            "queued_write_bytes": queued["write_bytes"],
            "payloads_down": int(self._said_down),
        }
        for name, staging in (("load", self._load_staging), ("save", self._save_staging)):
            used = (staging.chunks - staging.free) * staging.chunk_bytes if staging is not None else 0
            values[f"{name}_staging_used_bytes"] = used
        return {f"{name}{{{self._place.number}}}": value for name, value in values.items()}

    def shutdown(self) -> None:
        """Let queued saves finish (bounded), then close the store of this half."""
        self._store.close()
        snapshot = {name: value for name, value in self._store.counters.snapshot().items() if value}
        log.info("kvstore worker closed: %s", snapshot)
