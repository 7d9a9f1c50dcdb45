"""Compares blocks that this rank has just computed with what the store has under their names.

Two computations of one block differ: batches are cut otherwise, and floating-point sums are made in another
order. The distance of a block is the largest, over its layers and heads, of the median over its tokens of

    |computed - stored| / (|stored| + a tenth of the head's mean |stored|)

with |x| as the Euclidean norm over the content. The second summand keeps tokens whose state is almost nothing
from deciding. The median does so for single tokens: in a model with experts rounding can send one to another
expert, and its state is then far off and right all the same. So a single wrong token isn't seen, and a wrong
head of a single layer is. Blocks of other tokens are about 1 to 1.4 apart, rounding a few thousandths (bf16)
or millionths (float32), so that the bounds by dtype leave room on either side. Within them the tolerance is
learned: once enough blocks of a group have been compared, `_MARGIN` times the largest distance among those
that were alike is the tolerance, if that is less.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from connectors.engine.guard import guarded, otherwise
from connectors.engine.shards import Place, read_part
from connectors.engine.tensors import TORCH_DTYPES, Chunk, Copied
from connectors.kv.messages import GroupLoad, KVStoreWorkerMetadata, Load, Wrong
from connectors.kv.worker.memory import KVMemory
from connectors.planning import split_run
from connectors.telemetry.metrics import Tally
from kvstore.errors import KVStoreError
from kvstore.format.segment import Slot
from kvstore.index.port import Run
from kvstore.keys import ContentKey, SegmentId, block_key
from kvstore.store.space import Space
from kvstore.store.store import Store

log = logging.getLogger(__name__)

#: Distances by dtype, in safetensors' names: what is always tolerated, and what never is. Dtypes without a
#: line are opaque bytes in a format of the engine's own; their distance is that of the bytes as numbers.
_BOUNDS = {
    "F64": (1e-6, 0.01),
    "F32": (1e-4, 0.05),
    "F16": (5e-3, 0.15),
    "BF16": (2e-2, 0.2),
    "F8_E4M3": (8e-2, 0.35),
    "F8_E5M2": (0.15, 0.4),
}
_OPAQUE_BOUNDS = (0.1, 0.35)
#: Number of blocks of a group that must have been alike before their distances set the tolerance, and how far
#: above the largest of them it lies.
_ENOUGH = 64
_MARGIN = 16.0


class Tolerance:
    """The distance of blocks of one group that is taken for rounding. For one thread at a time."""

    def __init__(self, dtype: str) -> None:
        self._least, self._most = _BOUNDS.get(dtype, _OPAQUE_BOUNDS)
        self._alike = 0
        self._largest = 0.0

    @property
    def limit(self) -> float:
        """Returns the largest distance that is tolerated now."""
        if self._alike < _ENOUGH:
            return self._most
        return min(self._most, max(self._least, _MARGIN * self._largest))

    def judge(self, distances: Sequence[float]) -> bool:
        """Returns whether blocks at these distances are alike, and learns from them if they are."""
        largest = max(distances)
        # A distance that isn't a number is not within any limit.
        if not largest <= self.limit:
            return False
        self._alike += len(distances)
        self._largest = max(self._largest, largest)
        return True


def distances(
    computed: torch.Tensor, stored: torch.Tensor, dtype: str, shape: tuple[int, int, int, int]
) -> list[float]:
    """Returns the distance of each block.

    Both are uint8 [blocks, slot bytes], each slot [layers, heads, tokens, content] of `dtype`, a safetensors
    name. A distance is infinite where a number of one side only isn't one.
    """
    kind = TORCH_DTYPES.get(dtype, torch.uint8) if dtype in _BOUNDS else torch.uint8
    layers, heads, tokens, _ = shape
    worst = []
    # A block at a time: all of a segment as float32 would take more memory than staging has.
    for mine, theirs in zip(computed, stored, strict=True):
        one, other = (side.view(kind).view(layers, heads, tokens, -1).float() for side in (mine, theirs))
        if not torch.equal(one.isnan(), other.isnan()):
            worst.append(math.inf)
            continue
        gap, size = (one - other).norm(dim=3), other.norm(dim=3)
        apart = gap / (size + 0.1 * size.mean(dim=2, keepdim=True)).clamp_min(torch.finfo(torch.float32).tiny)
        # The same bits are the same, whatever they stand for.
        same = (mine == theirs).view(layers, heads, tokens, -1).all(dim=3)
        apart = torch.where(same, 0.0, apart).nan_to_num(nan=math.inf)
        worst.append(float(apart.median(dim=2).values.max()))
    return worst


@dataclass(frozen=True, slots=True)
class _Piece:
    """Blocks of one run that fit into one chunk of staging, beside what is stored of them."""

    request_id: str
    group: int
    run: Run
    hashes: list[bytes]

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

    @property
    @otherwise(bool)
    def has_news(self) -> bool:
        """Returns whether there is something to report."""
        return bool(self._wrong)

    def use(self, space: Space) -> None:
        """Compare with this namespace from now on, and learn its tolerances anew."""
        with self._lock:
            self._space = space
            self._tolerances.clear()

    def start(self, audits: Sequence[Load]) -> None:
        """Copy these blocks to staging and queue their comparison; what finds no room is not compared.

        Called at the end of a step, when they are computed."""
        for audit in audits:
            for group in audit.groups:
                # Half of a chunk each for what was computed and what is stored.
                half = self._memory.piece_bytes // 2
                most = half // self._memory.caches[group.group].slot_bytes
                for run in group.runs:
                    for part in split_run(run, most) if most else (run,):
                        if not most or not self._start(audit.request_id, group, part):
                            self._tally.add("audits{dropped}")

    @guarded(False)
    def _start(self, request_id: str, audit: GroupLoad, run: Run) -> bool:
        space = self._space
        assert space is not None, "audits before a namespace"
        cut = slice(run.start - audit.first, run.start - audit.first + run.count)
        piece = _Piece(request_id, audit.group, run, audit.hashes[cut])
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

    def _compare(self, space: Space, piece: _Piece, chunk: Chunk, copied: Copied) -> None:
        """Compare one piece. Runs on a transfer thread."""
        run, outcome = piece.run, "unread"
        try:
            copied.wait()
            if self._store.health.reads_are_scarce:
                log.debug("%d blocks are not compared: others wait to be read", run.count)
            elif not self._is_alike(space, piece, chunk):
                outcome = "wrong"
                self._condemn(space, piece, chunk)
            else:
                outcome = "alike"
        except KVStoreError as exc:
            log.info("%d blocks could not be compared: %s", run.count, exc)
        except Exception:
            log.exception("%d blocks could not be compared", run.count)
        finally:
            self._memory.saves.release(chunk)
            self._tally.add(f"audits{{{outcome}}}")
        if outcome == "wrong":
            with self._lock:
                self._wrong[run.segment] = Wrong(piece.request_id, piece.group, run.start, piece.hashes)

    def _is_alike(self, space: Space, piece: _Piece, chunk: Chunk) -> bool:
        run, group = piece.run, self._memory.groups[piece.group]
        size = self._memory.caches[piece.group].slot_bytes
        views = chunk.views(2 * run.count, size)
        end = time.monotonic() + self._store.settings.kv.load_deadline_s
        read_part(space, group, self._place, run, piece.keys, views[run.count :], end)
        both = chunk.tensor[: 2 * run.count * size].view(2, run.count, size)
        apart = distances(both[0], both[1], group.page.dtype, group.shape)
        with self._lock:
            tolerance = self._tolerances.setdefault(piece.group, Tolerance(group.page.dtype))
            limit, alike = tolerance.limit, tolerance.judge(apart)
        if not alike:
            worst = max(range(run.count), key=lambda i: apart[i])
            log.error(
                "block %d of group %d in segment %s is not what this engine computes: distance %.3g, "
                "tolerance %.3g. Either the one or the other is wrong: `cache-admin explain` has more",
                run.start + worst, piece.group, run.segment.hex(), apart[worst], limit,
            )  # fmt: skip
        return alike

    def _condemn(self, space: Space, piece: _Piece, chunk: Chunk) -> None:
        """Delete the segment, and keep its payload and what was computed here for whoever looks into it."""
        run, group = piece.run, self._memory.groups[piece.group]
        views = chunk.views(run.count, self._memory.caches[piece.group].slot_bytes)
        slots = [
            Slot(key, view, group.page.dtype, group.shape)
            for key, view in zip(piece.keys, views, strict=True)
        ]
        part = self._place.part(group)
        kept = space.condemn(run.segment, run.record, rank=part, computed=slots, depth=run.start)
        log.error(
            "segment %s is deleted. Kept for a week, for whoever looks into it: %s",
            run.segment.hex(), ", and as it was computed here ".join(kept) or "nothing",
        )  # fmt: skip
