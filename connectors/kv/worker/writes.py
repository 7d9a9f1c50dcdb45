"""Carries out saves in a worker: from the paged cache, through staging, into the store.

A save that finds no room waits as long as its request has its blocks. It is tried again with every step, in
order, so that what waits is always the last of what its request has to save; when the request ends or is
preempted, that is dropped, and a later request saves it. A save whose blocks don't stay goes first, and is
dropped if it finds no room.

Only a request that hands over its prompt has its blocks beyond its end, until all of them are read or
`kv.handoff_wait_s` has passed. This half reports it then, once, and vLLM frees them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Container, Iterable, Mapping

from connectors.engine.guard import guarded, otherwise
from connectors.engine.shards import Place
from connectors.engine.tensors import Chunk, Copied
from connectors.kv.messages import KVStoreWorkerMetadata, Save
from connectors.kv.worker.memory import KVMemory
from connectors.telemetry.metrics import Tally
from kvstore.errors import KVStoreError
from kvstore.format.segment import Slot
from kvstore.keys import SegmentId, block_key
from kvstore.store.space import Space
from kvstore.store.store import Store

log = logging.getLogger(__name__)


class KVWrites:
    """Carries out the saves of one rank. Public methods run on the engine's thread; transfer threads run one
    job per segment, once its copy is there: write, commit."""

    def __init__(self, store: Store, memory: KVMemory, place: Place, tally: Tally) -> None:
        self._store = store
        self._memory = memory
        self._place = place
        self._tally = tally
        self._space: Space | None = None
        #: Saves that found no room yet, in order.
        self._waiting: deque[Save] = deque()
        #: Saves that are started now or dropped.
        self._going: deque[Save] = deque()
        #: Requests that hand over their prompts and have ended -> the monotonic time until which their blocks
        #: stay.
        self._handed_over: dict[str, float] = {}
        # The lock guards the fields below it.
        self._lock = threading.Lock()
        self._ended_saves: dict[SegmentId, tuple[int, bool]] = {}
        self._reasons: dict[SegmentId, str] = {}
        self._failed_handoffs: set[str] = set()

    @property
    @otherwise(bool)
    def has_news(self) -> bool:
        """Returns whether there is something to report."""
        return bool(self._ended_saves)

    @property
    @otherwise(int)
    def waiting_blocks(self) -> int:
        """Returns how many blocks wait for room."""
        return sum(len(save.hashes) for save in self._waiting)

    def use(self, space: Space) -> None:
        """Save to this namespace from now on; what waits was meant for the last one and is given up."""
        self._space = space
        self.give_up()

    def begin_step(
        self,
        lost_blocks: Container[str],
        handed_over: Mapping[str, float],
        flushes: Iterable[Save],
        *,
        hold: bool = False,
    ) -> None:
        """Follow requests that have lost their blocks or hand over their prompts, and start the last saves of
        those that have ended. See KVStoreMetadata. `hold`: saves that can wait are tried again by this step's
        `start` only, after its comparisons, which need room, too."""
        now = time.monotonic()
        self._handed_over.update({name: now + seconds for name, seconds in handed_over.items()})
        # Before anything is tried again: a model runner may have written to blocks that were handed out.
        behind = self._drop_those_of(lost_blocks)
        rest = []
        for save in self._mine(flushes):
            # A save behind blocks that its own request has just lost is dropped.
            if save.request_id in behind:
                self._drop(save)
            else:
                rest.append(save)
        self._take(rest)
        if not hold:
            self._retry()

    def start(self, saves: Iterable[Save]) -> None:
        """Copy the blocks to staging and queue their writes, as far as there is room. For every step."""
        self._take(self._mine(saves))
        self._retry()

    def _take(self, saves: Iterable[Save]) -> None:
        for save in saves:
            (self._waiting if save.blocks_stay else self._going).append(save)
        while self._going:
            if not self._start(save := self._going.popleft()):
                self._drop(save)

    def _retry(self) -> None:
        while self._waiting:
            if (began := self._start(self._waiting[0])) is False:
                break
            save = self._waiting.popleft()
            if began is None:
                self._drop(save)

    def give_up(self) -> None:
        """Drop all that waits: the namespace that it was meant for no longer holds."""
        self._waiting.extendleft(self._going)
        self._going.clear()
        self._drop_those_of({save.request_id for save in self._waiting})

    @otherwise(set)
    def take_read(self) -> set[str]:
        """Returns requests that have handed over their prompts and needn't keep their blocks, each once."""
        if not self._handed_over:
            return set()
        now = time.monotonic()
        self._drop_those_of({name for name, end in self._handed_over.items() if now >= end})
        waiting = {save.request_id for save in self._waiting}
        read = self._handed_over.keys() - waiting
        for name in read:
            del self._handed_over[name]
        return read

    def _mine(self, saves: Iterable[Save]) -> list[Save]:
        """Returns those of `saves` of which this rank writes a part."""
        return [save for save in saves if self._place.writes(self._memory.groups[save.group])]

    def _drop_those_of(self, requests: Container[str]) -> set[str]:
        """Drop what waits of these requests; returns those of which something did."""
        rest: deque[Save] = deque()
        dropped = set()
        for save in self._waiting:
            if save.request_id in requests:
                self._drop(save)
                dropped.add(save.request_id)
            else:
                rest.append(save)
        self._waiting = rest
        return dropped

    def tell(self, report: KVStoreWorkerMetadata) -> None:
        """Move to a report what the scheduler half must know of saves that ended."""
        with self._lock:
            report.ended_saves, self._ended_saves = self._ended_saves, {}
            report.save_reasons, self._reasons = self._reasons, {}
            report.failed_handoffs, self._failed_handoffs = self._failed_handoffs, set()

    @guarded(None)
    def _start(self, save: Save) -> bool | None:
        """Returns whether there was room for a save, which has begun then, or None if there never will be."""
        # The job keeps `space`: when it writes, the scheduler half may have named another namespace.
        space, began = self._space, time.monotonic()
        assert space is not None, "saves before a namespace"
        nbytes = len(save.hashes) * self._memory.caches[save.group].slot_bytes
        if nbytes > self._memory.saves.size_bytes:
            return None
        return self._memory.gather(
            self._store.transfers,
            save.group,
            save.tables,
            len(save.hashes),
            lambda chunk, copied: self._save(space, save, chunk, copied, began),
        )

    def _save(self, space: Space, save: Save, chunk: Chunk, copied: Copied, began: float) -> None:
        """Save one segment. Runs on a transfer thread."""
        group, outcome = self._memory.groups[save.group], "failed"
        try:
            copied.wait()
            views = chunk.views(len(save.hashes), self._memory.caches[save.group].slot_bytes)
            slots = [
                Slot(block_key(one, save.group), view, group.page.dtype, group.shape)
                for one, view in zip(save.hashes, views, strict=True)
            ]
            saved = space.save(
                slots,
                depth=save.first,
                chain=save.chain,
                segment=save.segment,
                created_s=save.created_s,
                rank=self._place.part(group),
                ranks=self._place.parts(group),
                cost_us=save.cost_us,
                salt=save.salt,
                session=save.session,
                insist=save.insist,
                joins=save.joins,
            )
            outcome = "stored" if saved.outcome == "waiting" else saved.outcome
            if outcome == "stored":
                self._tally.timed("save_seconds", time.monotonic() - began)
        except KVStoreError as exc:
            log.debug("%d blocks are not cached: %s", len(save.hashes), exc)
        except Exception:
            log.exception("%d blocks are not cached", len(save.hashes))
        finally:
            self._memory.saves.release(chunk)
            self._ended(save, outcome)

    def _drop(self, save: Save) -> None:
        self._store.counters.saved("dropped", len(save.added))
        self._ended(save, "dropped")

    def _ended(self, save: Save, outcome: str) -> None:
        """End a save; `outcome` is one of kvstore.rules.reasons.SAVE_OUTCOMES."""
        with self._lock:
            self._ended_saves[save.segment] = (1, outcome == "stored")
            if outcome != "stored":
                self._reasons[save.segment] = outcome
            if outcome not in ("stored", "present") and save.handed_over:
                self._failed_handoffs.add(save.request_id)
