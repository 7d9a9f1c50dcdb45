"""Carries out loads in a worker: from the store, through staging, into the paged cache.

A load that fails in part reports the missing blocks, and vLLM recomputes from the first of them. If that
isn't possible, vLLM recomputes the whole request (connectors.engine.layout.fails_by_request). Every load ends
by its deadline, even if a read hangs for ever: its ticket expires. The bytes of the hung read are thrown away
when they come, because by then the blocks may belong to another request. The thread that reports the load
waits for copies under way: they may stand on the device behind a whole step.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from connectors.choice.decision import WAIT
from connectors.engine.guard import Followers, guarded
from connectors.engine.shards import Place, read_part
from connectors.engine.tensors import Chunk, Copied
from connectors.kv.messages import CUT, GroupLoad, KVStoreWorkerMetadata, Load
from connectors.kv.worker.memory import KVMemory
from connectors.kv.worker.pace import Pace
from connectors.kv.worker.tickets import Piece, Ticket, wanted
from connectors.planning import gaps, piece_blocks, split_run
from connectors.telemetry.metrics import Tally
from connectors.telemetry.spans import LoadTimes
from connectors.telemetry.ways import FARTHEST
from kvstore.errors import CorruptPayload, KVStoreError, Throttled, UnreadablePayload
from kvstore.keys import SegmentId, block_key
from kvstore.rules.text import readable
from kvstore.rules.tiers import Tier
from kvstore.store.reading import requests_of
from kvstore.store.space import Space
from kvstore.store.store import Store

log = logging.getLogger(__name__)

#: Seconds from one look for late loads to the next.
_LOOK_S = 0.005


class KVReads:
    """Carries out the loads of one rank. Public methods run on the engine's thread; transfer threads run one
    job per piece of a load: read, verify, begin the copy to the paged cache. Where copies take their time,
    one thread waits for all of them."""

    def __init__(
        self,
        store: Store,
        memory: KVMemory,
        place: Place,
        tally: Tally,
        *,
        by_request: bool,
        followers: Followers,
    ) -> None:
        """`by_request`: report failed requests instead of failed blocks. The meters (Pace) are one of the
        `followers`."""
        self._store = store
        self._memory = memory
        self._place = place
        self._tally = tally
        self._by_request = by_request
        self._pace = followers.guard(
            Pace(WAIT[store.settings.kv.objective], store.settings.transfers.read_threads), Pace.restart
        )
        self._space: Space | None = None
        self._failed_blocks: set[int] = set()
        self._failed_requests: set[str] = set()
        # The lock guards the tickets and the fields below it.
        self._lock = threading.Lock()
        self._copied = threading.Condition(self._lock)
        self._live: list[Ticket] = []
        self._halted = False
        self._failed_loads: dict[str, dict[int, int]] = {}
        self._reasons: dict[str, str] = {}
        self._bad_segments: set[SegmentId] = set()
        self._seconds: dict[str, float] = {}
        self._times: dict[str, LoadTimes] = {}

    @property
    def under_way(self) -> int:
        """Returns how many loads have not ended."""
        return len(self._live)

    @property
    def has_news(self) -> bool:
        """Returns whether there is something to report."""
        news = self._failed_loads or self._bad_segments or self._seconds or self._times
        return bool(news) or self._pace.has_news

    def use(self, space: Space) -> None:
        """Load from this namespace from now on."""
        self._space = space

    def start(self, loads: Sequence[Load]) -> None:
        """Queue the loads of this step."""
        if not loads:
            return
        space, caches = self._space, self._memory.caches
        assert space is not None, "loads before a namespace"
        after = caches[0].mark()
        for load in loads:
            if (ticket := self._ticket(load, space, after)) is None:
                lost = [(group, wanted(group)) for group in load.groups]
                ticket = Ticket(load, 0.0, space, after, [], {}, lost, reason="error")
            pieces = list(ticket.pending)
            with self._lock:
                self._live.append(ticket)
            for piece in pieces:
                if not self._store.transfers.read(lambda t=ticket, p=piece: self._load(t, p)):  # type: ignore[misc]
                    self._store.counters.miss("capacity", piece.run.count)
                    self._ended(ticket, piece, "capacity")

    @guarded(None)
    def _ticket(self, load: Load, space: Space, after: Any) -> Ticket | None:
        """Returns the ticket of a load, with all its pieces pending."""
        pieces, missing = [], []
        for group in load.groups:
            pieces += self._pieces(group, may_be_cut=load.prefill is not None and not self._by_request)
            missing += [(group, gap) for gap in gaps(wanted(group), group.runs)]
        end = time.monotonic() + self._store.settings.kv.load_deadline_s
        left: dict[Tier, int] = {}
        for piece in pieces:
            if piece.tier is not None:
                left[piece.tier] = left.get(piece.tier, 0) + piece.nbytes
                self._pace.ask(piece, piece.tier, piece.nbytes, self._requests(piece))
        return Ticket(load, end, space, after, pieces, left, missing, reason="error" if missing else "")

    def _pieces(self, group: GroupLoad, *, may_be_cut: bool = False) -> list[Piece]:
        self._pace.most_bytes = self._memory.piece_bytes
        fits = self._memory.piece_bytes // self._memory.caches[group.group].slot_bytes
        tiers = [group.tiers.get(run.segment) for run in group.runs]
        #: Most blocks of a piece, by tier.
        most: dict[Tier | None, int] = {}
        # A cache would fetch the whole payload beside each part of it, and vLLM may keep no part.
        if may_be_cut and self._store.backends.tier is None:
            for tier in {tier for tier in tiers if tier is not None}:
                counts = [run.count for run, one in zip(group.runs, tiers, strict=True) if one == tier]
                pieces = self._pace.pieces(tier, sum(counts) * group.block_bytes)
                # A smaller one's gap to its segment's header would be read as well, by several of them.
                least = self._store.backends.gap_bytes // group.block_bytes + 1
                most[tier] = min(fits, max(least, piece_blocks(counts, pieces)))
        return [
            Piece(group, part, tier)
            for run, tier in zip(group.runs, tiers, strict=True)
            for part in split_run(run, most.get(tier, fits))
        ]

    def _requests(self, piece: Piece) -> int:
        return requests_of(piece.run, self._place.number, self._store.backends.gap_bytes)

    @guarded(None)
    def probe(self, groups: Sequence[GroupLoad]) -> None:
        """Read blocks for the sake of measuring, beside everything else, which goes first."""
        space = self._space
        assert space is not None, "reads before a namespace"
        end = time.monotonic() + self._store.settings.kv.load_deadline_s
        for group in groups:
            for piece in self._pieces(group):
                self._store.transfers.ahead(lambda p=piece: self._probe(space, p, end))  # type: ignore[misc]

    def _probe(self, space: Space, piece: Piece, end: float) -> None:
        """Read one piece and drop it. Runs on a transfer thread. Failures are found out by loads."""
        number, tier = piece.group.group, piece.tier
        assert tier is not None
        if self._store.health.reads_are_scarce:
            return
        chunk = self._memory.loads.try_acquire(piece.run.count * self._memory.caches[number].slot_bytes)
        if chunk is None:
            return
        arrived = False
        self._pace.begin_probe(piece, tier, piece.nbytes, self._requests(piece))
        try:
            self._read(space, piece, chunk, end, probe=True)
            arrived = True
        except KVStoreError as exc:
            log.debug("a read for the sake of measuring failed: %s", exc)
        except Exception:
            log.exception("a read for the sake of measuring failed unexpectedly")
        finally:
            self._memory.loads.release(chunk)
            self._pace.end_probe(piece, tier, arrived=arrived)

    def _read(
        self,
        space: Space,
        piece: Piece,
        chunk: Chunk,
        end: float,
        arrived: Callable[[], None] | None = None,
        *,
        probe: bool = False,
    ) -> None:
        """Fill a chunk with a piece's verified blocks. `arrived` and `probe` are read_part's. Raises
        KVStoreError."""
        run, number = piece.run, piece.group.group
        keys = [block_key(one, number) for one in piece.group.hashes[piece.cut()]]
        into = chunk.views(run.count, self._memory.caches[number].slot_bytes)
        group = self._memory.groups[number]
        read_part(space, group, self._place, run, keys, into, end, arrived, probe=probe)

    def abandon(self) -> None:
        """Make all loads that are under way fail: what they bring must not be used."""
        with self._lock:
            for ticket in self._live:
                ticket.end = 0.0
                # They read blocks of the former weights.
                ticket.reason = ticket.reason or "namespace_mismatch"
                ticket.failed = [(group, wanted(group)) for group in ticket.load.groups]

    def halt(self) -> None:
        """Make loads under way fail, and write to no paged block until `resume`. Waits for copies under way,
        which end with the steps that were launched. Raises TimeoutError, with nothing halted, if they don't
        end by the deadline of a load."""
        self.abandon()
        within_s = self._store.settings.kv.load_deadline_s
        with self._lock:
            self._halted = True
            idle = self._copied.wait_for(lambda: not any(one.writing for one in self._live), within_s)
            self._halted = idle
        if not idle:
            raise TimeoutError(
                f"kvstore: copies to the KV cache have not ended within {within_s:g} s, so its memory must "
                "stay where it is; is the device hanging?"
            )

    def resume(self) -> None:
        """Write to paged blocks again."""
        with self._lock:
            self._halted = False

    def take_finished(self) -> tuple[set[str], set[str]]:
        """Returns requests whose loads have ended since the last call, and which of them failed if failures
        are reported by request. Failed blocks go to `take_failed_blocks` and to the report."""
        if not self._live:
            return set(), set()
        now = time.monotonic()
        left: dict[Tier, int] = {}
        done = []
        with self._lock:
            for ticket in self._live:
                # Threads take reads in the order in which they were queued.
                for tier, nbytes in ticket.left.items():
                    left[tier] = left.get(tier, 0) + nbytes
                if self._over(ticket, now, left):
                    done.append(ticket)
            for ticket in done:
                self._live.remove(ticket)
                self._note_failed(ticket)
                if ticket.load.timed:
                    # Pieces of one that was cut may still come.
                    self._times[ticket.load.request_id], ticket.times = ticket.times, LoadTimes()
            failed, self._failed_requests = self._failed_requests, set()
        for ticket in done:
            if not ticket.failed:
                self._tally.timed("load_seconds", now - ticket.began)
                self._seconds[ticket.load.request_id] = ticket.ended - ticket.began
            if (not ticket.failed or ticket.cut) and ticket.load.touch:
                segments = [run.segment for group in ticket.load.groups for run in group.runs]
                space = ticket.space
                self._store.transfers.call(lambda s=space, g=segments: s.touch(g))  # type: ignore[misc]
        return {ticket.load.request_id for ticket in done}, failed

    def take_failed_blocks(self) -> set[int]:
        """Returns the ids of paged blocks that were not filled by the loads that were taken last."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def tell(self, report: KVStoreWorkerMetadata) -> None:
        """Move to a report what the scheduler half must know of loads that failed, and what took its time."""
        with self._lock:
            report.failed_loads, self._failed_loads = self._failed_loads, {}
            report.load_reasons, self._reasons = self._reasons, {}
            report.bad_segments, self._bad_segments = self._bad_segments, set()
            report.load_times, self._times = self._times, {}
            report.load_seconds, self._seconds = self._seconds, {}
        self._pace.tell(report, self._place.number)

    def _load(self, ticket: Ticket, piece: Piece) -> None:
        """Read one piece and begin its copy. Runs on a transfer thread."""
        failed, arrived = "deadline", False
        chunk: Chunk | None = None
        copied: Copied | None = None
        run, cache = piece.run, self._memory.caches[piece.group.group]
        if ticket.expired:
            self._ended(ticket, piece, failed)
            return
        try:
            chunk = self._memory.loads.acquire(run.count * cache.slot_bytes, ticket.end)
            ticket.mark(piece, "began")
            if piece.tier is not None:
                self._pace.begin(piece, piece.tier)
            self._read(ticket.space, piece, chunk, ticket.end, partial(ticket.mark, piece, "read"))
            ticket.mark(piece, "verify")
            arrived = True
            if self._may_write(ticket, piece):
                copied = cache.scatter(piece.blocks, chunk, ticket.after)
                failed = ""
        except KVStoreError as exc:
            failed = ticket.space.not_loaded.note(run.count, exc, run.segment)
            if isinstance(exc, Throttled) and piece.tier is not None:
                self._pace.held(piece, piece.tier, exc.wait_s)
            if isinstance(exc, CorruptPayload | UnreadablePayload):
                with self._lock:
                    self._bad_segments.add(run.segment)
        except Exception:
            failed = "error"
            request = readable(ticket.load.request_id)
            log.exception("request %s: %d blocks are computed", request, run.count)
        if copied is not None and copied.under_way:
            wait = partial(self._await_copy, ticket, piece, chunk, copied)
            if not self._store.transfers.in_turn(wait):
                wait()
        else:
            self._ended(ticket, piece, failed, chunk, arrived=arrived)

    def _await_copy(self, ticket: Ticket, piece: Piece, chunk: Chunk | None, copied: Copied) -> None:
        """End a piece when its copy has ended. Runs on the thread that waits for these."""
        failed = ""
        try:
            copied.wait()
        except Exception:
            failed = "error"
            request = readable(ticket.load.request_id)
            log.exception("request %s: %d blocks are computed", request, piece.run.count)
        self._ended(ticket, piece, failed, chunk, arrived=True)

    def _may_write(self, ticket: Ticket, piece: Piece) -> bool:
        with self._lock:
            if ticket.expired or self._halted:
                return False
            ticket.writing.add(piece)
            return True

    def _ended(
        self,
        ticket: Ticket,
        piece: Piece,
        failed: str,
        chunk: Chunk | None = None,
        *,
        arrived: bool = False,
    ) -> None:
        """End a piece and give its chunk back; `failed` is "" or why it failed, as one of
        kvstore.rules.reasons.MISS_REASONS."""
        if chunk is not None:
            self._memory.loads.release(chunk)
        ticket.mark(piece, "copy")
        with self._lock:
            ticket.ended = time.monotonic()
            if piece.tier is not None:
                ticket.left[piece.tier] -= piece.nbytes
            ticket.pending.remove(piece)
            ticket.writing.discard(piece)
            if (ends := ticket.marks.pop(piece, None)) is not None and not failed:
                nbytes = piece.run.count * self._memory.caches[piece.group.group].slot_bytes
                ticket.times.piece(piece.tier or FARTHEST, nbytes, ends)
            if failed:
                ticket.reason = ticket.reason or failed
                ticket.failed.append((piece.group, piece.range))
            self._copied.notify_all()
        if piece.tier is not None:
            self._pace.end(piece, piece.tier, arrived=arrived)

    def _over(self, ticket: Ticket, now: float, left: Mapping[Tier, int]) -> bool:
        """Returns whether a load has ended: by itself, by its deadline, or because computing the rest is
        faster than the bytes `left` of it and of what is before it. The caller holds the lock."""
        if not ticket.pending:
            return True
        # The device can't cancel a copy, and the copy's blocks must not be given back before it ends.
        if ticket.writing or (now < ticket.end and not self._late(ticket, now, left)):
            return False
        ticket.expired = True
        ticket.cut = now < ticket.end and not ticket.failed
        why = CUT if ticket.cut else "deadline"
        ticket.reason = ticket.reason or why
        ticket.failed += [(piece.group, piece.range) for piece in ticket.pending]
        self._store.counters.miss(why, sum(piece.run.count for piece in ticket.pending))
        if now >= ticket.end:
            self._store.health.read_hangs()
        elif self._by_request:
            # vLLM computes all of it.
            ticket.failed = [(group, wanted(group)) for group in ticket.load.groups]
        return True

    def _late(self, ticket: Ticket, now: float, left: Mapping[Tier, int]) -> bool:
        """Returns whether computing what is missing of a load is faster than waiting for it. The caller holds
        the lock."""
        prefill = ticket.load.prefill
        if prefill is None or now < ticket.look_at:
            return False
        ticket.look_at = now + _LOOK_S
        piece = ticket.pending[0]
        # vLLM would compute all of it, or what comes from the first block on that is missing.
        first = ticket.load.first if self._by_request else piece.run.start * self._block_tokens(piece.group)
        return self._pace.late(left, prefill.seconds(first, ticket.load.stop))

    def _block_tokens(self, group: GroupLoad) -> int:
        return self._memory.groups[group.group].page.block_tokens

    def _note_failed(self, ticket: Ticket) -> None:
        """Record what a load that has ended did not bring. The caller holds the lock."""
        if not ticket.failed:
            return
        name = ticket.load.request_id
        first = self._failed_loads.setdefault(name, {})
        self._reasons[name] = ticket.reason
        for group, blocks in ticket.failed:
            # Where vLLM computes all of a request, it uses nothing of a load that is cut.
            begins = 0 if ticket.cut and self._by_request else blocks.start
            first[group.group] = min(begins, first.get(group.group, begins))
            cut = slice(blocks.start - group.first, blocks.stop - group.first)
            if not self._by_request:
                self._failed_blocks.update(*(ids[cut] for ids in group.tables.values()))
        if self._by_request:
            self._failed_requests.add(name)
