"""One namespace of a store: match, load, save, touch.

The verbs are synchronous and may take as long as their backends' deadlines; callers that must not
wait run them on `backends.transfers`. They raise only what their docstrings name.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvstore.errors import (
    BreakerOpen,
    CorruptPayload,
    KVStoreError,
    NamespaceUnknown,
    PayloadMissing,
    PermissionDenied,
    UnreadablePayload,
)
from kvstore.format.segment import Slot
from kvstore.index.contract import BadArgument
from kvstore.index.port import MOST_RUNS, Outcome, Run
from kvstore.index.sessions import USE, Hint, HintEffect
from kvstore.index.verdicts import Opinion
from kvstore.jitter import jittered
from kvstore.keys import (
    NO_SALT,
    NO_SESSION,
    ContentKey,
    SaltId,
    SegmentId,
    SessionId,
    WriterId,
    digest,
    namespace_id,
    new_segment_id,
    payload_name,
    tag_of,
)
from kvstore.rules.lateness import is_late
from kvstore.rules.tiers import Tier
from kvstore.store.backends import Backends
from kvstore.store.failures import Failures, miss_reason
from kvstore.store.health import Health
from kvstore.store.quarantine import Quarantine
from kvstore.store.reading import PayloadLate, item_room, read_header_of, read_run
from kvstore.store.rounds import Rounds
from kvstore.store.saving import NOTHING_JOINED, Joins, Part, Saved, SegmentWriter
from kvstore.store.sessions import SpaceSessions
from kvstore.store.writers.known import KnownWriters
from schemas.namespace import Namespace
from schemas.records import SegmentRecord
from schemas.segment import SlotMeta

log = logging.getLogger(__name__)

#: Condemned payloads of which one process keeps a copy, in a namespace; of others it keeps that they are bad.
_MOST_COPIES = 32
#: And the largest one that it copies.
_MOST_COPIED_BYTES = 256 << 20

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Match:
    """The stored prefix of a chain: runs that follow each other from block 0 on, and their blocks."""

    runs: list[Run]
    blocks: int
    #: Why the prefix ends where it does: "complete", or a reason of kvstore.rules.reasons.MISS_REASONS.
    reason: str


class Space:
    """One namespace of a store; made by kvstore.store.Store.open. Safe for threads."""

    def __init__(
        self,
        backends: Backends,
        quarantine: Quarantine,
        health: Health,
        rounds: Rounds,
        namespace: Namespace,
        expected_blocks: int,
    ) -> None:
        self.backends = backends
        self._quarantine = quarantine
        self._health = health
        self._rounds = rounds
        self.namespace = namespace
        self.id = namespace_id(namespace)
        self._expected_blocks = expected_blocks
        #: When it may be registered again on a thread, by time.monotonic.
        self._register_from = 0.0
        #: Copies of condemned payloads that this process may still make. A race on it makes one too many.
        self._copies_left = _MOST_COPIES
        self.writers = KnownWriters(backends, self.id, quarantine)
        self._sessions = SpaceSessions(backends, namespace, self.registered)
        self._writer = SegmentWriter(backends, namespace, self.registered, self._sessions.allowance)
        #: Log of failed loads, one line per reason and minute; the loading code reports to it.
        self.not_loaded = Failures("are computed", backends.clock)
        self._not_saved = Failures("are not cached", backends.clock)

    def __repr__(self) -> str:
        return f"Space({self.id}, {self.namespace.kind}, {self.namespace.model!r})"

    def register(self) -> None:
        """Makes the namespace known to the index. Raises what the index raises."""
        self.backends.index.register(self.namespace, expected_blocks=self._expected_blocks)

    def register_soon(self) -> None:
        """Registers on a thread for calls: before anything is saved, and to find out if the index is back.

        At most once in about a breaker's shortest backoff: a namespace in many shards takes many calls, and
        while one of them is down every match in it asks for this.
        """
        now = time.monotonic()
        if now >= self._register_from:
            self._register_from = now + jittered(self.backends.settings.breaker.backoff_s)
            self.backends.transfers.call(self._register_quietly)

    def _register_quietly(self) -> None:
        try:
            self.register()
        except BreakerOpen:
            pass
        except PermissionDenied as exc:
            log.warning(
                "the index refuses this engine (%s); running without the cache until it doesn't. "
                "`cache-admin doctor` says what to do",
                exc,
            )
        except KVStoreError as exc:
            log.warning("index not reachable (%s); running without the cache until it is", exc)
        except Exception:
            log.exception("the namespace could not be registered: an unexpected failure")
        else:
            self._quarantine.tell(self.id)
            self._quarantine.deny_again()

    def match(self, digests: bytes, *, session: bytes = b"") -> Match:
        """Returns the longest stored prefix of a chain of packed digests. Never raises.

        `session` is the id of the session that asks, if there is one, for the trace.
        """
        counters = self.backends.counters
        asked = len(digests) // 16
        if self.backends.trace is not None:
            self.backends.trace.record(self.id, digests, self.backends.clock(), session)
        counters.add("match_calls")
        counters.add("match_blocks_asked", asked)
        if not self._health.payloads_answer():
            # Don't promise what can't be read.
            counters.miss("breaker_open", asked)
            return Match([], 0, "breaker_open")
        try:
            runs = self.backends.index.match(self.id, digests)
            reason = "absent" if len(runs) < MOST_RUNS else "in_pieces"
        except KVStoreError as exc:
            log.debug("match failed: %s", exc)
            runs, reason = [], miss_reason(exc)
            if isinstance(exc, BreakerOpen):
                # A background thread finds out whether the index is back.
                self.register_soon()
        except Exception:
            log.exception("match failed unexpectedly")
            runs, reason = [], "error"
        for i, run in enumerate(runs):
            if run.segment in self._quarantine:
                runs, reason = runs[:i], "quarantined"
                break
        there = self.writers.present(runs)
        if None in there:
            runs, reason = runs[: there.index(None)], "writer_failed"
        blocks = runs[-1].start + runs[-1].count if runs else 0
        counters.add("match_blocks_found", blocks)
        counters.miss(reason, asked - blocks)
        return Match(runs, blocks, "complete" if blocks == asked else reason)

    def find(self, digests: bytes, chain: bytes = b"") -> list[Run | None] | None:
        """Looks up each packed digest by itself: a run of one slot (`start` = its position), None if absent.

        `chain` begins with the first digest of the chain that all are of, if it is known and they are blocks.

        Returns None instead of a list, and counts misses, if the index or the payloads don't answer. Never
        raises.
        """
        counters = self.backends.counters
        asked = len(digests) // 16
        reason = "error"
        if not self._health.payloads_answer():
            reason = "breaker_open"
        else:
            try:
                found = self.backends.index.find(self.id, digests, chain)
                bad = self._quarantine
                return self.writers.present(
                    [None if run is None or run.segment in bad else run for run in found]
                )
            except KVStoreError as exc:
                log.debug("find failed: %s", exc)
                reason = miss_reason(exc)
                if isinstance(exc, BreakerOpen):
                    self.register_soon()
            except Exception:
                log.exception("find failed unexpectedly")
        counters.miss(reason, asked)
        return None

    def tiers(self, runs: Iterable[Run], end: float = math.inf) -> dict[SegmentId, Tier]:
        """Returns where the segments of `runs` lie now, for this process. Segments for which the time ran out
        at `end` (`time.monotonic`) are left out. No network; never raises.

        A segment's first part stands for all of them: the ranks of an engine fetch theirs at the same times.
        """
        payloads, found = self.backends.payloads, dict[SegmentId, Tier]()
        for run in runs:
            if time.monotonic() >= end:
                break
            if run.record.parts and run.segment not in found:
                name = payload_name(self.id, run.segment, 0)
                found[run.segment] = payloads.tier(name, run.record.parts[0].nbytes)
        return found

    def load(
        self,
        run: Run,
        keys: Sequence[ContentKey],
        into: Sequence[memoryview],
        *,
        rank: int = 0,
        deadline_s: float | None = None,
        arrived: Callable[[], None] | None = None,
        probe: bool = False,
    ) -> tuple[SlotMeta, ...]:
        """Reads one run of a match into the caller's buffers and verifies it; see reading.read_run.

        Counts the outcome; of a `probe`, for which no request waits, apart and no miss. A segment that fails
        verification is quarantined; one that can't be judged here is not asked for again by this process, and
        nothing else happens to it. Raises KVStoreError, and nothing else; the buffers are then not to be
        used.
        """
        end = time.monotonic() + (deadline_s or self.backends.settings.kv.load_deadline_s)
        payloads, keyring, gap_bytes = self.backends.payloads, self.backends.keyring, self.backends.gap_bytes
        slots = self._read(
            run,
            rank,
            lambda: read_run(
                payloads,
                keyring,
                self.id,
                run,
                keys,
                into,
                rank=rank,
                end=end,
                gap_bytes=gap_bytes,
                arrived=arrived,
            ),
            probe=probe,
        )
        counters, kind = self.backends.counters, "probe" if probe else "load"
        if not probe:
            counters.add("load_runs")
        counters.add(f"{kind}_blocks", run.count)
        counters.add(f"{kind}_bytes", sum(view.nbytes for view in into))
        return slots

    def load_item(
        self, run: Run, key: ContentKey, *, most: int, deadline_s: float
    ) -> tuple[SlotMeta, memoryview]:
        """Reads an item, as `load` does, into memory of its size: returns its slot and its bytes.

        Memory is not taken on the index's word (reading.item_room). Raises CapacityExceeded for an item of
        more than `most` bytes, which stays where it is, and what `load` raises.
        """
        payloads, keyring, end = self.backends.payloads, self.backends.keyring, time.monotonic() + deadline_s
        room = self._read(run, 0, lambda: item_room(payloads, keyring, self.id, run, key, most=most, end=end))
        (slot,) = self.load(run, [key], [room], deadline_s=max(1e-3, end - time.monotonic()))
        return slot, room

    def _read(self, run: Run, rank: int, read: Callable[[], _T], *, probe: bool = False) -> _T:
        """Runs a read of a run; counts its failure, and quarantines what failed verification."""
        blocks = 0 if probe else run.count
        counters = self.backends.counters
        try:
            return self._read_twice(run, rank, read)
        except CorruptPayload as exc:
            log.debug("segment %s is unusable and is evicted: %s", run.segment.hex(), exc)
            self._quarantine.add(self.id, run.segment)
            counters.miss(miss_reason(exc), blocks)
            raise
        except UnreadablePayload as exc:
            # It may be good: another process can tell. This one doesn't try again.
            log.debug("segment %s can't be used here and is left alone: %s", run.segment.hex(), exc)
            self._quarantine.mark([run.segment])
            counters.miss(miss_reason(exc), blocks)
            raise
        except KVStoreError as exc:
            counters.miss(miss_reason(exc), blocks)
            if isinstance(exc, BreakerOpen):
                self._health.probe_payloads()
            raise
        except Exception as exc:
            counters.miss("error", blocks)
            raise KVStoreError(f"load failed: {exc!r}") from exc

    def _read_twice(self, run: Run, rank: int, read: Callable[[], _T]) -> _T:
        """Runs a read, and once more if verification fails, before everybody loses the segment for that.

        The bytes may have been a bad copy, which is dropped, or damaged by the network.
        """
        try:
            return self._read_once(run, read)
        except PayloadMissing:
            raise
        except CorruptPayload as exc:
            log.debug("segment %s is read once more: %s", run.segment.hex(), exc)
            drop_copy = self.backends.drop_copy
            if drop_copy is not None and drop_copy(payload_name(self.id, run.segment, rank)):
                self.backends.counters.add("dropped_copies")
        return self._read_once(run, read)

    def _read_once(self, run: Run, read: Callable[[], _T]) -> _T:
        try:
            return read()
        except PayloadMissing as exc:
            index = self.backends.maintenance
            if is_late(run.record, self.backends.settings, lambda: index.now(self.id)):
                raise PayloadLate(f"{exc}; it may still be on its way") from exc
            raise

    def settle(self, run: Run, opinion: Opinion) -> None:
        """Records this engine's opinion of the writer of a segment: here at once, and in the index on a
        background thread. Never raises."""
        writer = WriterId(run.record.writer)
        self.writers.believe(writer, "proven" if opinion == "alike" else "refused")

        def tell() -> None:
            self.writers.settle(writer, opinion, self.written_by(run))

        if not self.backends.transfers.call(tell):
            log.warning("the queue is full, so the verdict about writer %s is not reported", writer.hex())
        log.log(
            logging.INFO if opinion == "alike" else logging.ERROR,
            "writer %s of namespace %s: what it has stored is %s this engine computes",
            writer.hex(), self.id, "what" if opinion == "alike" else "not what",
        )  # fmt: skip

    def was_refused(self) -> None:
        """Finds out, on a background thread, whether a commit was refused because this engine's writer has
        failed. Never raises."""
        self.backends.transfers.call(self.writers.look_up_own)

    def written_by(self, run: Run) -> str:
        """Returns the name of the writer of a segment, as its header has it; "" if that can't be read. Never
        raises."""
        backends, end = self.backends, time.monotonic() + self.backends.settings.kv.load_deadline_s
        try:
            return read_header_of(backends.payloads, backends.keyring, self.id, run, end=end).meta.writer
        except KVStoreError as exc:
            log.debug("segment %s does not say who wrote it: %s", run.segment.hex(), exc)
        except Exception:
            log.exception("a header could not be read: an unexpected failure")
        return ""

    def touch(self, segments: Sequence[SegmentId]) -> None:
        """Tells the index that segments were used by a request without a session. Never raises: recency is
        advisory."""
        try:
            self.backends.index.touch(self.id, segments)
        except KVStoreError as exc:
            log.debug("touch failed: %s", exc)
        except Exception:
            log.exception("touch failed unexpectedly")

    def session(
        self,
        session: SessionId,
        segments: Sequence[SegmentId],
        hint: Hint = USE,
        *,
        salt: SaltId = NO_SALT,
    ) -> HintEffect | None:
        """Reports to the index that a session's request uses segments, heads first, and the hint on the
        session: in place of `touch`, in one round trip. See kvstore.index.sessions.

        `salt` is the id of the request's. Returns None, and counts a failure, if the index doesn't take the
        report. Never raises.
        """
        if self.backends.trace is not None:
            self.backends.trace.record_hints(
                self.id,
                session,
                self.backends.clock(),
                end=hint.end,
                retain_s=hint.retain_s,
                priority=hint.priority,
            )
        told = self._sessions.tell(session, segments, hint, salt)
        if told is None:
            self.backends.counters.add("session_failures")
        return told

    def owned(self, session: SessionId) -> list[Run]:
        """Returns the segments that only a session has used, heads first: each as a run of all of its blocks,
        which starts at its depth. In one round trip.

        Returns none, and counts a failure, if the index can't say. Never raises.
        """
        owned = self._sessions.owned(session)
        if owned is None:
            self.backends.counters.add("session_failures")
        return [run for run in owned or () if run.segment not in self._quarantine]

    def note(self, digests: bytes) -> int:
        """Counts one use of a chain; returns how many leading blocks an earlier request has asked for.

        Must be called once per request, which would otherwise count itself. Returns 0, and counts a failure,
        if the index can't say. Never raises.
        """
        backends, admission = self.backends, self.backends.settings.admission
        try:
            return self.registered(
                lambda: backends.index.note(
                    self.id,
                    digests,
                    now_s=backends.clock(),
                    window_s=admission.window_s,
                    sketch_bytes=admission.sketch_bytes,
                )
            )
        except KVStoreError as exc:
            log.debug("note failed: %s", exc)
        except Exception:
            log.exception("note failed unexpectedly")
        backends.counters.add("note_failures")
        return 0

    def tell(self, outcomes: Sequence[Outcome]) -> bool:
        """Puts outcomes of requests into the index's journal; returns False if that fails. Never raises."""
        try:
            self.backends.index.tell(self.id, outcomes)
            return True
        except KVStoreError as exc:
            log.debug("tell failed: %s", exc)
        except Exception:
            log.exception("tell failed unexpectedly")
        return False

    def save(
        self,
        slots: Sequence[Slot],
        *,
        depth: int = 0,
        chain: bytes = b"",
        segment: SegmentId | None = None,
        created_s: int | None = None,
        rank: int = 0,
        ranks: int = 1,
        cost_us: float = 0,
        salt: SaltId = NO_SALT,
        session: SessionId = NO_SESSION,
        insist: bool = False,
        joins: Joins = NOTHING_JOINED,
    ) -> Saved:
        """Stores a run of consecutive blocks of one chain (or one item) as one segment.

        `depth` is the chain position of `slots[0]`. Blocks that don't begin their chain require `chain`,
        which begins with the chain's first digest: that decides which shard has them. Raises BadArgument
        without it, and then also if `segment` has another tag than that digest.

        Blocks at the start that are stored already are left out, unless there are several ranks, which need
        not find the same. All ranks of one segment give the same `segment`, keys, `created_s` (unix time;
        now, if left out), `cost_us` (what computing all of it took, in microseconds; 0: unknown), `salt`,
        `session` (the ids of their requests') and `joins`.

        With `insist` the blocks are stored even if another writer has claimed them: for a caller that another
        engine waits for. `joins` names segments that this one replaces (Index.commit); their blocks count as
        stored already. The buffers may be reused when the call returns. Every failure but BadArgument is a
        KVStoreError, is counted and is logged.
        """
        if depth and not chain:
            raise BadArgument(f"blocks from block {depth} of a chain on, and no chain: give its first digest")
        if depth and segment is not None and segment[-1] != tag_of(chain):
            raise BadArgument("a segment id of another chain: give keys.new_segment_id(its first digest)")
        counters = self.backends.counters
        if self.writers.own_failed:
            # Each commit would be refused, after its payload was put.
            counters.saved("refused", len(slots) - joins.blocks)
            return Saved("refused", 0, 0, 0)
        try:
            created = int(self.backends.clock()) if created_s is None else created_s
            segment = segment or new_segment_id(chain if depth else digest(slots[0].key))
            part = Part(segment, depth, created, rank, ranks, cost_us, salt, session, joins)
            self._quarantine.tell(self.id)
            self._quarantine.deny_again()
            saved = self._writer.save(slots, part, insist=insist)
        except Exception as exc:
            counters.saved("failed", len(slots) - joins.blocks)
            counters.add(f"save_failures{{{self._not_saved.note(len(slots), exc)}}}")
            if isinstance(exc, KVStoreError):
                raise
            raise KVStoreError(f"save failed: {exc!r}") from exc
        counters.saved("present", saved.present)
        if saved.outcome == "refused":
            self.was_refused()
        rest = "stored" if saved.outcome == "waiting" else saved.outcome
        counters.saved(rest, len(slots) - saved.present)
        if saved.nbytes:
            counters.add("save_segments")
            counters.add("save_bytes", saved.nbytes)
            self._rounds.committed(saved.nbytes)
        return saved

    def condemn(
        self, segment: SegmentId, record: SegmentRecord, *, rank: int, computed: Sequence[Slot], depth: int
    ) -> list[str]:
        """Quarantines a segment whose bytes are intact and wrong, and deletes its payloads at once: a load
        that has matched them must find nothing.

        Before that it is denied: it may not come back. Then this rank's payload, and the slots from place
        `depth` of the chain as they were `computed` here, become evidence, which no engine loads. Returns the
        names under which people find both; fewer if they can't be kept. Never raises.
        """
        kept: list[str] = []

        def keep() -> None:
            kept.extend(self._evidence(segment, record, rank, computed, depth))

        if self._quarantine.add(self.id, segment, condemned=keep):
            try:
                self.backends.payloads.delete(
                    [payload_name(self.id, segment, one) for one in range(len(record.parts))]
                )
            except KVStoreError as exc:
                # The trash has them as well, and the evidence keeps them from coming back.
                log.warning("condemned segment %s could not be deleted yet: %s", segment.hex(), exc)
            except Exception:
                log.exception("condemned segment %s could not be deleted", segment.hex())
        return kept

    def _evidence(
        self, segment: SegmentId, record: SegmentRecord, rank: int, computed: Sequence[Slot], depth: int
    ) -> Iterable[str]:
        evidence = self.backends.evidence
        # The name says it, and first: that the payload can be copied, or read at all, is another matter.
        if not self._quarantine.deny(payload_name(self.id, segment, rank)):
            return
        try:
            nbytes = record.parts[rank].nbytes
            if self._copies_left <= 0 or nbytes > _MOST_COPIED_BYTES:
                return
            stored = bytearray(nbytes)
            self._copies_left -= 1
            size = self.backends.payloads.read(payload_name(self.id, segment, rank), 0, [memoryview(stored)])
            if size:
                yield evidence.put(self.id, segment, rank, [memoryview(stored)[:size]])
                part = Part(
                    new_segment_id(digest(computed[0].key)), depth, record.created_s, salt=SaltId(record.salt)
                )
                encoded = self._writer.encoded(computed, part)
                yield evidence.put(self.id, part.segment, part.rank, encoded.buffers)
        except KVStoreError as exc:
            log.warning("no copy of segment %s could be kept: %s", segment.hex(), exc)
        except Exception:
            log.exception("no copy of segment %s could be kept", segment.hex())

    def abandon(self, segment: SegmentId) -> None:
        """Deletes what the other ranks have written of a segment of which one rank has not. Never raises.

        To be called when all ranks have ended: a part that is committed later would wait for the missing one
        until it expires.
        """
        backends = self.backends
        after = backends.clock() + backends.settings.grace_s
        try:
            backends.index.evict(self.id, [segment], delete_after_s=after, rule="abandoned")
        except KVStoreError as exc:
            log.debug("segment %s could not be abandoned: %s", segment.hex(), exc)
        except Exception:
            log.exception("segment %s could not be abandoned: an unexpected failure", segment.hex())

    def forget(self) -> int:
        """Evicts all that is in the namespace and deletes it at once; see Housekeeping.forget."""
        return self._rounds.housekeeping.forget(self.id)

    def registered(self, call: Callable[[], _T]) -> _T:
        """Runs an index call; if the index has lost the namespace, registers it and runs the call again."""
        try:
            return call()
        except NamespaceUnknown:
            self.register()
        return call()
