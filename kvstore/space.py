"""One namespace of a store: match, load, save, touch.

Order of a save, so that a crash after any step is harmless (invariants 1, 4 and 8 of docs/format.md):
    1. claim      another engine's copy would be a waste        crash: the claim expires
    2. put        the payload is complete and durable           crash: an unreferenced payload
    3. commit     the index names it, all ranks at once         crash: done

The verbs are synchronous and may take as long as their backends' deadlines; callers that must not
wait run them on `store.transfers`. They raise nothing but what their docstrings name.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar

from kvstore import __version__, codec
from kvstore.errors import (
    BreakerOpen,
    CapacityExceeded,
    CorruptPayload,
    KVStoreError,
    NamespaceUnknown,
)
from kvstore.keys import (
    ContentKey,
    SegmentId,
    canonical_json,
    digest,
    namespace_id,
    new_segment_id,
    payload_name,
)
from kvstore.metrics import MISS_REASONS
from kvstore.ports import CommitState, Outcome, Run
from kvstore.reader import PayloadLate, PayloadMissing, read_run
from schemas.namespace import Namespace
from schemas.records import SegmentRecord, rounded_cost
from schemas.segment import SlotMeta

if TYPE_CHECKING:
    from kvstore.store import Store

log = logging.getLogger(__name__)

_T = TypeVar("_T")

#: Of a claim that is given back: the shortest that an index knows.
_AT_ONCE_S = 0.001


@dataclass(frozen=True, slots=True)
class Match:
    """What the store can serve of a chain: runs that follow each other from block 0 on."""

    runs: list[Run]
    blocks: int
    #: Why it ends where it ends: "complete", or a reason of kvstore.metrics.MISS_REASONS.
    reason: str


SaveOutcome = Literal["stored", "present", "held", "refused", "waiting"]


@dataclass(frozen=True, slots=True)
class Saved:
    """What became of a save: `present` leading blocks were stored already, `stored` are new."""

    outcome: SaveOutcome
    present: int
    stored: int
    nbytes: int


class Space:
    """One namespace in one store."""

    def __init__(self, store: Store, namespace: Namespace, expected_blocks: int) -> None:
        self.store = store
        self.namespace = namespace
        self.id = namespace_id(namespace)
        self._json = canonical_json(namespace)
        self._expected_blocks = expected_blocks
        self._writer = f"kvstore/{__version__} {socket.gethostname()}"[:128]

    def __repr__(self) -> str:
        return f"Space({self.id}, {self.namespace.kind}, {self.namespace.model!r})"

    def register(self) -> None:
        """Make the namespace known to the index. Raises what the index raises."""
        self.store.index.register(self.namespace, expected_blocks=self._expected_blocks)

    def register_soon(self) -> None:
        """Register on a call thread: before anything is saved, and to find out if the index is back."""
        self.store.transfers.call(self._register_quietly)

    def _register_quietly(self) -> None:
        try:
            self.register()
        except BreakerOpen:
            pass
        except KVStoreError as exc:
            log.warning("index not reachable (%s); running without the cache until it is", exc)
        else:
            self.store.tell_index(self.id)

    def match(self, digests: bytes) -> Match:
        """The longest stored prefix of a hash chain of packed digests. Never raises."""
        counters = self.store.counters
        asked = len(digests) // 16
        if self.store.trace is not None:
            self.store.trace.record(self.id, digests, self.store.clock())
        counters.add("match_calls")
        counters.add("match_blocks_asked", asked)
        if not self.store.payloads_answer():
            # Don't promise what can't be read.
            counters.miss("breaker_open", asked)
            return Match([], 0, "breaker_open")
        try:
            runs = self.store.index.match(self.id, digests)
            reason = "absent"
        except KVStoreError as exc:
            log.debug("match failed: %s", exc)
            runs, reason = [], miss_reason(exc)
            if isinstance(exc, BreakerOpen):
                # Find out whether the index is back, on a thread that nobody waits for.
                self.register_soon()
        except Exception:
            log.exception("match failed unexpectedly")
            runs, reason = [], "error"
        for i, run in enumerate(runs):
            if self.store.is_quarantined(run.segment):
                runs, reason = runs[:i], "quarantined"
                break
        blocks = runs[-1].start + runs[-1].count if runs else 0
        counters.add("match_blocks_found", blocks)
        counters.miss(reason, asked - blocks)
        return Match(runs, blocks, "complete" if blocks == asked else reason)

    def find(self, digests: bytes) -> list[Run | None] | None:
        """Each packed digest by itself: a run of one slot (`start` = its position), None if it isn't there.

        None instead of a list, and counted, if the index or the payloads don't answer. Never raises.
        """
        counters = self.store.counters
        asked = len(digests) // 16
        reason = "error"
        if not self.store.payloads_answer():
            reason = "breaker_open"
        else:
            try:
                found = self.store.index.find(self.id, digests)
                bad = self.store.is_quarantined
                return [None if run is None or bad(run.segment) else run for run in found]
            except KVStoreError as exc:
                log.debug("find failed: %s", exc)
                reason = miss_reason(exc)
                if isinstance(exc, BreakerOpen):
                    self.register_soon()
            except Exception:
                log.exception("find failed unexpectedly")
        counters.miss(reason, asked)
        return None

    def load(
        self,
        run: Run,
        keys: Sequence[ContentKey],
        into: Sequence[memoryview],
        *,
        rank: int = 0,
        deadline_s: float | None = None,
    ) -> tuple[SlotMeta, ...]:
        """Read one run of a match into the caller's buffers, verified; see reader.read_run.

        Counts the outcome. A segment that fails verification is quarantined. Raises KVStoreError,
        and nothing else; the buffers are then not to be used.
        """
        counters = self.store.counters
        end = time.monotonic() + (deadline_s or self.store.settings.kv.load_deadline_s)
        try:
            slots = self._read(run, keys, into, rank, end)
        except CorruptPayload as exc:
            log.warning("segment %s is unusable and is evicted: %s", run.segment.hex(), exc)
            self.store.quarantine(self.id, run.segment)
            counters.miss(miss_reason(exc), run.count)
            raise
        except KVStoreError as exc:
            counters.miss(miss_reason(exc), run.count)
            if isinstance(exc, BreakerOpen):
                self.store.probe_payloads()
            raise
        except Exception as exc:
            log.exception("load failed unexpectedly")
            counters.miss("error", run.count)
            raise KVStoreError(f"load failed: {exc!r}") from exc
        counters.add("load_runs")
        counters.add("load_blocks", run.count)
        counters.add("load_bytes", sum(view.nbytes for view in into))
        return slots

    def _read(
        self, run: Run, keys: Sequence[ContentKey], into: Sequence[memoryview], rank: int, end: float
    ) -> tuple[SlotMeta, ...]:
        """Read a run; once more if it failed verification, before everybody loses it for that.

        It may have been a bad copy, which is dropped, or come badly over the network.
        """
        payloads = self.store.payloads
        try:
            return self._read_once(run, keys, into, rank, end)
        except PayloadMissing:
            raise
        except CorruptPayload as exc:
            log.warning("segment %s is read once more: %s", run.segment.hex(), exc)
            if payloads.distrust(payload_name(self.id, run.segment, rank)):
                self.store.counters.add("dropped_copies")
        return self._read_once(run, keys, into, rank, end)

    def _read_once(
        self, run: Run, keys: Sequence[ContentKey], into: Sequence[memoryview], rank: int, end: float
    ) -> tuple[SlotMeta, ...]:
        try:
            return read_run(self.store.payloads, self.id, run, keys, into, rank=rank, end=end)
        except PayloadMissing as exc:
            if self.store.may_be_late(run.record):
                raise PayloadLate(f"{exc}; it may still be on its way") from exc
            raise

    def load_all(
        self,
        found: Match,
        keys: Sequence[ContentKey],
        into: Sequence[memoryview],
        *,
        rank: int = 0,
        deadline_s: float | None = None,
    ) -> int:
        """Load everything that a match promised, its runs in parallel on the store's threads.

        `keys[i]` and `into[i]` belong to block i of the chain; the buffers of blocks that could not be
        loaded may hold anything, and after a deadline may still be written to. Returns how many leading
        blocks are there. Never raises.
        """
        results = [False] * len(found.runs)
        left = threading.Semaphore(0)

        def one(number: int, run: Run) -> None:
            blocks = slice(run.start, run.start + run.count)
            try:
                self.load(run, keys[blocks], into[blocks], rank=rank, deadline_s=deadline_s)
                results[number] = True
            except KVStoreError as exc:
                log.debug("load failed: %s", exc)
            finally:
                left.release()

        for number, run in enumerate(found.runs):
            if not self.store.transfers.read(lambda n=number, r=run: one(n, r)):  # type: ignore[misc]
                self.store.counters.miss("capacity", run.count)
                left.release()
        end = time.monotonic() + (deadline_s or self.store.settings.kv.load_deadline_s) + 1.0
        for _ in found.runs:
            # A store that is being closed abandons what is queued.
            if not left.acquire(timeout=max(0.0, end - time.monotonic())):
                break
        good = next((i for i, ok in enumerate(results) if not ok), len(results))
        return found.runs[good - 1].start + found.runs[good - 1].count if good else 0

    def touch(self, segments: Sequence[SegmentId]) -> None:
        """Note that segments were used. Never raises: recency is advisory."""
        try:
            self.store.index.touch(self.id, segments, self.store.clock())
        except KVStoreError as exc:
            log.debug("touch failed: %s", exc)

    def note(self, digests: bytes) -> int:
        """Count one use of a chain; how many leading blocks an earlier request has asked for. Never raises.

        Once per request, which would otherwise count itself. 0, and counted, if the index can't say.
        """
        store, admission = self.store, self.store.settings.admission
        try:
            return self._known(
                lambda: store.index.note(
                    self.id,
                    digests,
                    now_s=store.clock(),
                    window_s=admission.window_s,
                    sketch_bytes=admission.sketch_bytes,
                )
            )
        except KVStoreError as exc:
            log.debug("note failed: %s", exc)
        except Exception:
            log.exception("note failed unexpectedly")
        store.counters.add("note_failures")
        return 0

    def tell(self, outcomes: Sequence[Outcome]) -> bool:
        """Have the index remember what became of requests. False if it can't. Never raises."""
        try:
            self.store.index.tell(self.id, outcomes)
            return True
        except KVStoreError as exc:
            log.debug("tell failed: %s", exc)
        except Exception:
            log.exception("tell failed unexpectedly")
        return False

    def save(
        self,
        slots: Sequence[codec.Slot],
        *,
        depth: int = 0,
        segment: SegmentId | None = None,
        created_s: int | None = None,
        rank: int = 0,
        ranks: int = 1,
        cost_us: float = 0,
        insist: bool = False,
    ) -> Saved:
        """Store a run of consecutive blocks of one chain (or one item) as one segment.

        `depth` is the chain position of `slots[0]`. Blocks at the start that are stored already are
        left out, unless there are several ranks, which need not find the same. All ranks of one segment
        give the same `segment`, keys, `created_s` (unix time; now, if left out) and `cost_us` (what computing
        all of it took, in microseconds; 0: unknown). `insist`: also while
        another writer is at it, for callers that somebody waits for. The buffers may be reused when the call
        returns. Raises KVStoreError, and nothing else, after counting it.
        """
        counters = self.store.counters
        try:
            created = int(self.store.clock()) if created_s is None else created_s
            saved = self._save(
                slots, depth, segment or new_segment_id(), created, rank, ranks, cost_us, insist
            )
        except KVStoreError as exc:
            counters.saved("failed", len(slots))
            counters.add(f"save_failures{{{miss_reason(exc)}}}")
            raise
        except Exception as exc:
            log.exception("save failed unexpectedly")
            counters.saved("failed", len(slots))
            counters.add("save_failures{error}")
            raise KVStoreError(f"save failed: {exc!r}") from exc
        counters.saved("present", saved.present)
        rest = "stored" if saved.outcome == "waiting" else saved.outcome
        counters.saved(rest, len(slots) - saved.present)
        if saved.stored:
            counters.add("save_segments")
            counters.add("save_bytes", saved.nbytes)
        return saved

    def _save(
        self,
        slots: Sequence[codec.Slot],
        depth: int,
        segment: SegmentId,
        created: int,
        rank: int,
        ranks: int,
        cost_us: float,
        insist: bool,
    ) -> Saved:
        store, settings = self.store, self.store.settings
        store.tell_index(self.id)
        digests = b"".join(digest(slot.key) for slot in slots)
        claim = self._known(lambda: store.index.claim(self.id, digests, segment, settings.claim_ttl_s))
        if not claim.granted and not (insist and claim.present < len(slots)):
            outcome: SaveOutcome = "held" if claim.present < len(slots) else "present"
            return Saved(outcome, claim.present, 0, 0)
        # Another engine's segment may become visible between two ranks' claims. A few blocks twice are a
        # waste; ranks that leave out different ones would make the whole segment one that can't be committed.
        present = claim.present if ranks == 1 else 0
        rest = slots[present:]
        cost = rounded_cost(cost_us * len(rest) / len(slots))
        encoded = codec.encode(
            rest,
            namespace_json=self._json,
            kind=self.namespace.kind,
            segment=segment,
            rank=rank,
            ranks=ranks,
            codec=self.namespace.codec,
            depth=depth + present,
            created_s=created,
            writer=self._writer,
            cost_us=cost,
        )
        name = payload_name(self.id, segment, rank)
        try:
            store.payloads.put(name, encoded.buffers)
        except KVStoreError:
            # Whoever comes next need not wait for the claim to expire. That of several ranks is all theirs.
            if ranks == 1:
                with contextlib.suppress(KVStoreError):
                    store.index.claim(self.id, digests, segment, _AT_ONCE_S)
            raise
        record = SegmentRecord(
            parts=(encoded.part,),
            slots=len(rest),
            codec=self.namespace.codec,
            created_s=created,
            depth=depth + present,
            raw_bytes=sum(slot.data.nbytes for slot in rest) if ranks == 1 else 0,
            cost_us=cost,
        )
        new = digests[16 * present :]
        try:
            state = self._known(
                lambda: store.index.commit(self.id, segment, new, record, rank=rank, ranks=ranks)
            )
        except (BreakerOpen, CapacityExceeded):
            # Certainly not committed. After any other error it may have been (a right that is missing in the
            # middle of a script), and what the index names must stay; what it doesn't name is found by gc.
            with contextlib.suppress(KVStoreError):
                store.payloads.delete([name])
            raise
        if state is CommitState.REFUSED:
            store.payloads.delete([name])
            return Saved("refused", present, 0, 0)
        store.committed(encoded.part.nbytes)
        outcome = "stored" if state is CommitState.VISIBLE else "waiting"
        return Saved(outcome, present, len(rest), encoded.part.nbytes)

    def abandon(self, segment: SegmentId) -> None:
        """A rank has not written its part: what the others have written is deleted. Never raises.

        For after all ranks have ended: a part that is committed later would wait for the missing one until it
        expires.
        """
        store = self.store
        try:
            after = store.clock() + store.settings.grace_s
            store.index.evict(self.id, [segment], delete_after_s=after, rule="abandoned")
        except KVStoreError as exc:
            log.debug("segment %s could not be abandoned: %s", segment.hex(), exc)

    def _known(self, call: Callable[[], _T]) -> _T:
        """Run an index call; if the index has lost the namespace, register it and run it again."""
        try:
            return call()
        except NamespaceUnknown:
            self.register()
            return call()


def miss_reason(error: BaseException) -> str:
    """The counters' label of an error."""
    reason = getattr(error, "reason", "error")
    return reason if reason in MISS_REASONS else "error"
