"""Carries out saves in a worker: from the paged cache, through staging, into the store.

A save that finds no room waits while its blocks stay (connectors.kv.worker.backlog). One whose blocks don't
goes first, and is dropped if it finds none.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from connectors.engine.guard import guarded
from connectors.engine.shards import Place
from connectors.engine.tensors import Chunk, Copied
from connectors.kv.messages import KVStoreWorkerMetadata, Save
from connectors.kv.worker.backlog import KeptSaves
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
        #: Saves that found no room yet.
        self.kept = KeptSaves(self._start, self._drop)
        # The lock guards the fields below it.
        self._lock = threading.Lock()
        self._ended_saves: dict[SegmentId, tuple[int, bool]] = {}
        self._begun: dict[SegmentId, int] = {}
        self._reasons: dict[SegmentId, str] = {}
        self._failed_handoffs: set[str] = set()

    @property
    def has_news(self) -> bool:
        """Returns whether there is something to report."""
        return bool(self._ended_saves or self._begun)

    def use(self, space: Space) -> None:
        """Save to this namespace from now on; kept saves were meant for the last one and are given up."""
        self.kept.give_up()
        self._space = space

    def start(self, saves: Sequence[Save]) -> None:
        """Copy the blocks to staging and queue their writes, as far as there is room. For every step."""
        mine = [save for save in saves if self._place.writes(self._memory.groups[save.group])]
        for save in mine:
            if not save.blocks_stay and (self.kept.is_behind_a_hole(save) or not self._start(save)):
                self.kept.drop(save)
        self.kept.add(save for save in mine if save.blocks_stay)

    def tell(self, report: KVStoreWorkerMetadata) -> None:
        """Move to a report what the scheduler half must know of saves that ended."""
        with self._lock:
            report.ended_saves, self._ended_saves = self._ended_saves, {}
            report.begun_saves, self._begun = self._begun, {}
            report.save_reasons, self._reasons = self._reasons, {}
            report.failed_handoffs, self._failed_handoffs = self._failed_handoffs, set()

    @guarded(None)
    def _start(self, save: Save) -> bool | None:
        """Returns whether there was room for a save, which has begun then; None if there never will be."""
        # The job keeps `space`: when it writes, the scheduler half may have named another namespace.
        space, began = self._space, time.monotonic()
        assert space is not None, "saves before a namespace"
        nbytes = len(save.hashes) * self._memory.caches[save.group].slot_bytes
        if nbytes > self._memory.saves.size_bytes:
            return None
        if not self._memory.gather(
            self._store.transfers,
            save.group,
            save.tables,
            len(save.hashes),
            lambda chunk, copied: self._save(space, save, chunk, copied, began),
        ):
            return False
        with self._lock:
            self._begun[save.segment] = 1
        return True

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
                segment=save.segment,
                created_s=save.created_s,
                rank=self._place.part(group),
                ranks=self._place.parts(group),
                cost_us=save.cost_us,
                salt=save.salt,
                session=save.session,
                insist=save.insist,
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
        self._store.counters.saved("dropped", len(save.hashes))
        self._ended(save, "dropped")

    def _ended(self, save: Save, outcome: str) -> None:
        """End a save; `outcome` is one of kvstore.rules.reasons.SAVE_OUTCOMES."""
        with self._lock:
            self._ended_saves[save.segment] = (1, outcome == "stored")
            if outcome != "stored":
                self._reasons[save.segment] = outcome
            if outcome not in ("stored", "present") and save.handed_over:
                self._failed_handoffs.add(save.request_id)
