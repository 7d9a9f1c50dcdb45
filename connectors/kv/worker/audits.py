"""Compares blocks that this rank has just computed with what the store has under their names.

How far apart two computations may be says connectors.distance.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from connectors.distance import Tolerance, distances
from connectors.engine.guard import guarded, otherwise
from connectors.engine.shards import Place, read_part
from connectors.engine.tensors import Chunk, Copied
from connectors.kv.messages import Compared, GroupLoad, KVStoreWorkerMetadata, Load, Wrong
from connectors.kv.worker.memory import KVMemory
from connectors.planning import split_run
from connectors.telemetry.metrics import Tally
from kvstore.errors import KVStoreError
from kvstore.format.segment import Slot
from kvstore.index.port import Run
from kvstore.keys import ContentKey, SegmentId, WriterId, block_key
from kvstore.store.space import Space
from kvstore.store.store import Store

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Proof:
    """The comparisons of one request in one step, for a proof of writers. The lock of KVAudits guards it."""

    request_id: str
    #: Pieces that have not ended, and one more while they are being started.
    left: int = 1
    alike: set[WriterId] = field(default_factory=set)
    wrong: dict[WriterId, tuple[Run, Wrong]] = field(default_factory=dict)
    unsure: set[WriterId] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Blocks of one run that fit into one chunk of staging, beside what is stored of them."""

    request_id: str
    group: int
    run: Run
    hashes: list[bytes]
    #: The proof that it belongs to, if the outcome proves its writer.
    proof: _Proof | None = None

    @property
    def keys(self) -> list[ContentKey]:
        """Returns the content keys of its blocks."""
        return [block_key(one, self.group) for one in self.hashes]


class KVAudits:
    """Carries out the comparisons of one rank. Public methods run on the engine's thread; transfer threads
    run one job per piece: wait for the copy, read what is stored, compare."""

    def __init__(self, store: Store, memory: KVMemory, place: Place, tally: Tally) -> None:
        self._store = store
        self._memory = memory
        self._place = place
        self._tally = tally
        self._space: Space | None = None
        # The lock guards the fields below it.
        self._lock = threading.Lock()
        self._tolerances: dict[int, Tolerance] = {}
        self._wrong: dict[SegmentId, Wrong] = {}
        self._compared: dict[str, Compared] = {}

    @property
    @otherwise(bool)
    def has_news(self) -> bool:
        """Returns whether there is something to report."""
        return bool(self._wrong or self._compared)

    def use(self, space: Space) -> None:
        """Compare with this namespace from now on, and learn its tolerances anew."""
        with self._lock:
            self._space = space
            self._tolerances.clear()

    def start(self, audits: Sequence[Load]) -> None:
        """Copy these blocks to staging and queue their comparison; what finds no room is not compared.

        Called at the end of a step, when they are computed."""
        for audit in audits:
            proof = _Proof(audit.request_id) if audit.proof else None
            for group in audit.groups:
                # Half of a chunk each for what was computed and what is stored.
                half = self._memory.piece_bytes // 2
                most = half // self._memory.caches[group.group].slot_bytes
                for run in group.runs:
                    for part in split_run(run, most) if most else (run,):
                        if proof is not None:
                            with self._lock:
                                proof.left += 1
                        if not most or not self._start(audit.request_id, group, part, proof):
                            self._tally.add("audits{dropped}")
                            if proof is not None:
                                self._ended(proof)
            if proof is not None:
                self._ended(proof)

    @guarded(False)
    def _start(self, request_id: str, audit: GroupLoad, run: Run, proof: _Proof | None) -> bool:
        space = self._space
        assert space is not None, "audits before a namespace"
        cut = slice(run.start - audit.first, run.start - audit.first + run.count)
        piece = _Piece(request_id, audit.group, run, audit.hashes[cut], proof)
        return self._memory.gather(
            self._store.transfers,
            audit.group,
            {table: ids[cut] for table, ids in audit.tables.items()},
            2 * run.count,
            lambda chunk, copied: self._compare(space, piece, chunk, copied),
        )

    def tell(self, report: KVStoreWorkerMetadata) -> None:
        """Move to a report what the scheduler half must know."""
        with self._lock:
            report.wrong, self._wrong = self._wrong, {}
            report.compared, self._compared = self._compared, {}

    def _compare(self, space: Space, piece: _Piece, chunk: Chunk, copied: Copied) -> None:
        """Compare one piece. Runs on a transfer thread."""
        run, outcome = piece.run, "unread"
        try:
            copied.wait()
            # A proof reads in the place of a load.
            if piece.proof is None and self._store.health.reads_are_scarce:
                log.debug("%d blocks are not compared: others wait to be read", run.count)
            else:
                outcome = self._outcome(space, piece, chunk)
                if outcome == "wrong" and piece.proof is None:
                    self._condemn(space, piece, chunk)
        except KVStoreError as exc:
            log.info("%d blocks could not be compared: %s", run.count, exc)
        except Exception:
            log.exception("%d blocks could not be compared", run.count)
        finally:
            self._memory.saves.release(chunk)
            told = "differs" if outcome == "wrong" and piece.proof is not None else outcome
            self._tally.add(f"audits{{{told}}}")
        differs = Wrong(piece.request_id, piece.group, run.start, piece.hashes)
        if piece.proof is not None:
            self._ended(piece.proof, run, outcome, differs)
        elif outcome == "wrong":
            with self._lock:
                self._wrong[run.segment] = differs

    def _ended(
        self, proof: _Proof, run: Run | None = None, outcome: str = "", differs: Wrong | None = None
    ) -> None:
        """Record that a piece of a proof has ended, or that all are started; reports the last one's end."""
        with self._lock:
            if run is not None and differs is not None:
                writer = WriterId(run.record.writer)
                if outcome == "wrong":
                    proof.wrong[writer] = run, differs
                elif outcome == "alike":
                    proof.alike.add(writer)
                elif outcome == "unsure":
                    proof.unsure.add(writer)
            proof.left -= 1
            if not proof.left:
                ranks = {writer: {self._place.number} for writer in proof.alike}
                compared = Compared(1, ranks, proof.wrong, proof.unsure)
                self._compared.setdefault(proof.request_id, Compared()).add(compared)

    def _outcome(self, space: Space, piece: _Piece, chunk: Chunk) -> str:
        """Returns "alike", "wrong", or of a proof "unsure": tolerated, and not near enough to prove it."""
        run, group = piece.run, self._memory.groups[piece.group]
        size = self._memory.caches[piece.group].slot_bytes
        views = chunk.views(2 * run.count, size)
        end = time.monotonic() + self._store.settings.kv.load_deadline_s
        read_part(space, group, self._place, run, piece.keys, views[run.count :], end)
        both = chunk.tensor[: 2 * run.count * size].view(2, run.count, size)
        apart = distances(both[0], both[1], group.page.dtype, group.shape)
        with self._lock:
            tolerance = self._tolerances.setdefault(piece.group, Tolerance(group.page.dtype))
            if piece.proof is not None:
                # Verdicts are for all engines, whatever one of them has learned.
                tolerance = Tolerance(group.page.dtype)
            limit, alike = tolerance.limit, tolerance.judge(apart)
            proves = alike and tolerance.proves(apart)
        if not alike:
            worst = max(range(run.count), key=lambda i: apart[i])
            log.error(
                "block %d of group %d in segment %s is not what this engine computes: distance %.3g, "
                "tolerance %.3g. One of both is wrong: `cache-admin explain` has more",
                run.start + worst, piece.group, run.segment.hex(), apart[worst], limit,
            )  # fmt: skip
        if piece.proof is not None and alike and not proves:
            log.warning(
                "segment %s is near what this engine computes (distance %.3g), but not near enough to prove "
                "its writer: it is not loaded",
                run.segment.hex(), max(apart),
            )  # fmt: skip
            return "unsure"
        return "alike" if alike else "wrong"

    def _condemn(self, space: Space, piece: _Piece, chunk: Chunk) -> None:
        """Delete the segment, and keep its payload and the blocks computed here for people who look into
        it."""
        run, group = piece.run, self._memory.groups[piece.group]
        views = chunk.views(run.count, self._memory.caches[piece.group].slot_bytes)
        slots = [
            Slot(key, view, group.page.dtype, group.shape)
            for key, view in zip(piece.keys, views, strict=True)
        ]
        part = self._place.part(group)
        kept = space.condemn(run.segment, run.record, rank=part, computed=slots, depth=run.start)
        log.error(
            "segment %s is deleted. Kept for a week as evidence: %s",
            run.segment.hex(), ", and as it was computed here ".join(kept) or "nothing",
        )  # fmt: skip
