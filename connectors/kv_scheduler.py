"""The KV connector in the scheduler: what to promise, what to load, what to save.

Everything here runs on the scheduler's thread and never waits for a backend: a match is asked on
the store's call threads when its request arrives and picked up when the scheduler comes to it. The
only wait is `_PATIENCE_S` per step, which spares the engine idle steps for an answer that is
microseconds away.

A request, as this module sees it:

    matching   the index has been asked; get_num_new_matched_tokens answers "later" until the
               answer or kv.match_deadline_s
    matched    so many leading blocks are stored; the promise is loaded from that very match
    loading    blocks are allocated and the workers are loading
    computing  prefill; full blocks from the match's end on are saved, a segment's worth at a time

With `admission.second_use` a prompt is noted once, on the same call thread and after the match, so that
no match waits for it. Until the answer is there the request saves nothing; what it owes is saved at a
later step, or at its end, and if the answer never comes, not at all.

A request whose load failed once computes the rest itself: asking again could promise the same
unreadable bytes for ever.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from connectors.guard import guarded
from connectors.identity import CONTENT_HASH
from connectors.kv_admission import Admission, Note
from connectors.kv_types import KVStoreMetadata, KVStoreWorkerMetadata, Load, Save
from connectors.planning import external_tokens, savable_blocks, saves_due, slice_runs
from kvstore.keys import SegmentId, canonical_json, digests, new_segment_id
from kvstore.store import Match, Space, Store

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

log = logging.getLogger(__name__)

#: Total time per scheduler step that may be spent waiting for matches that are under way.
_PATIENCE_S = 0.001
_NO_MATCH = Match([], 0, "deadline")


class PendingMatch:
    """A match under way on a call thread."""

    def __init__(self, blocks: int, end: float) -> None:
        self.blocks = blocks
        self.end = end
        self.asked_at = time.monotonic()
        self._done = threading.Event()
        self._result: Match | None = None

    def finish(self, result: Match) -> None:
        """Call thread: here is the answer."""
        self._result = result
        self._done.set()

    def poll(self, patience_s: float) -> Match | None:
        """The answer, or None if it is still out after `patience_s`."""
        if not self._done.is_set() and patience_s > 0:
            self._done.wait(patience_s)
        return self._result if self._done.is_set() else None


@dataclass(slots=True)
class Tracked:
    """What the scheduler's half knows of one request. Owned by the scheduler's thread."""

    request: Request
    match: PendingMatch | None = None
    note: Note | None = None
    #: Leading blocks that are in the store or on their way: saving starts here.
    saved: int = 0
    #: Leading blocks that are counted, if they weren't saved, as not worth it.
    passed_over: int = 0
    #: The prompt is computed, and what its last segment lacks isn't saved yet.
    prompt_ended: bool = False
    #: When it was last looked at, it wasn't known what is worth saving.
    undecided: bool = False
    #: Block-aligned local hit of the last promise, in tokens.
    local_tokens: int = 0
    #: Tokens that were scheduled since blocks were allocated last: what is surely computed.
    seen_tokens: int = 0
    #: The request whose load brings what this one waits for.
    waits_for: str | None = None
    loading: bool = False
    load_failed: bool = False


class KVScheduler:
    """One per engine."""

    def __init__(
        self,
        store: Store,
        space: Space,
        *,
        block_tokens: int,
        segment_blocks: int,
        prefix_caching: bool,
        can_load: bool,
        can_save: bool,
    ) -> None:
        self._store = store
        self._space = space
        self._settings = store.settings.kv
        self._admission = Admission(store, space, block_tokens)
        self._block_tokens = block_tokens
        self._segment_blocks = segment_blocks
        self._prefix_caching = prefix_caching
        self._can_load = can_load
        self._can_save = can_save
        self._namespace_json = canonical_json(space.namespace)
        self._requests: dict[str, Tracked] = {}
        #: Those that may have something to save.
        self._unsaved: dict[str, Tracked] = {}
        self._loads: list[Load] = []
        self._flushes: list[Save] = []
        #: Block hashes being saved by this engine -> their segment, so that requests of one batch
        #: that share a prefix save it once. Emptied as the workers report.
        self._saving: dict[bytes, SegmentId] = {}
        self._segments: dict[SegmentId, list[bytes]] = {}
        #: Block hashes being loaded -> request; others wait for them in the GPU's prefix cache.
        self._arriving: dict[bytes, str] = {}
        self._arriving_of: dict[str, list[bytes]] = {}
        self._patience = _PATIENCE_S
        self._retired = False
        self._abandon_loads = False
        space.register_soon()

    # ---- matching -------------------------------------------------------------------------------

    @guarded(None)
    def on_new_request(self, request: Request) -> None:
        """Ask the index right away: the answer is usually there when the scheduler asks for it."""
        tracked = self._track(request)
        note = self._begin_note(tracked) if self._cacheable(request) and not self._retired else None
        if self._wants_match(tracked):
            self._ask(tracked, note)
        elif note is not None:
            self._admission.send(note)

    @guarded((0, False))
    def get_num_new_matched_tokens(self, request: Request, computed: int) -> tuple[int | None, bool]:
        """(tokens to load beyond `computed`, True), (0, False), or (None, False) for "ask later"."""
        tracked = self._track(request)
        self._unsaved[request.request_id] = tracked  # starts, or starts over after a preemption
        tracked.prompt_ended = tracked.undecided = False
        if not self._wants_match(tracked):
            return 0, False
        match = self._matched(tracked)
        if match is None:
            return None, False
        tokens = external_tokens(
            match.blocks, computed, request.num_tokens, self._block_tokens, self._settings.min_load_blocks
        )
        # What this engine is saving, or another has saved since, is left out again when it is planned.
        tracked.saved = match.blocks
        tracked.local_tokens = computed
        tracked.seen_tokens = 0
        if not tokens:
            missed = match.blocks - computed // self._block_tokens
            if missed > 0:
                self._store.counters.miss("below_threshold", missed)
            return 0, False
        if self._arriving:
            first = request.block_hashes[computed // self._block_tokens]
            tracked.waits_for = self._arriving.get(first)
            if tracked.waits_for is not None:
                # Another request is loading this very block; in a moment it is a local hit for both.
                return None, False
        return tokens, True

    def _wants_match(self, tracked: Tracked) -> bool:
        request = tracked.request
        return (
            self._can_load
            and not self._retired
            and not tracked.load_failed
            and not getattr(request, "skip_reading_prefix_cache", False)
            and len(request.block_hashes) > 0
            and self._cacheable(request)
        )

    def _cacheable(self, request: Request) -> bool:
        """Whether the request's block hashes name its blocks' content for sure (schemas.settings)."""
        identity = self._store.settings.identity
        if identity.lora == "skip" and getattr(request, "lora_request", None) is not None:
            return False
        return identity.client_uuids == "trust" or all(
            CONTENT_HASH.fullmatch(feature.identifier)
            for feature in getattr(request, "mm_features", None) or ()
        )

    def _matched(self, tracked: Tracked) -> Match | None:
        """The request's match, asking for it if need be; None while it is out."""
        pending = tracked.match
        now = time.monotonic()
        stale = pending is not None and (
            now - pending.asked_at > self._settings.match_ttl_s
            or pending.blocks != len(tracked.request.block_hashes)
        )
        if pending is None or stale:
            pending = self._ask(tracked)
        before = time.monotonic()
        match = pending.poll(self._patience)
        self._patience = max(0.0, self._patience - (time.monotonic() - before))
        if match is None and time.monotonic() >= pending.end:
            self._store.counters.miss("deadline", pending.blocks)
            pending.finish(_NO_MATCH)
            return _NO_MATCH
        return match

    def _ask(self, tracked: Tracked, note: Note | None = None) -> PendingMatch:
        hashes = list(tracked.request.block_hashes)
        pending = PendingMatch(len(hashes), time.monotonic() + self._settings.match_deadline_s)
        tracked.match = pending
        packed = note.digests if note is not None and note.blocks == len(hashes) else digests(hashes)

        def job() -> None:
            pending.finish(self._space.match(packed))
            if note is not None:
                note.run(self._space)

        if not self._store.transfers.call(job):
            self._store.counters.miss("capacity", len(hashes))
            pending.finish(Match([], 0, "capacity"))
            if note is not None:
                note.noted = 0
        return pending

    # ---- loading --------------------------------------------------------------------------------

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, external: int) -> None:
        """The scheduler took the promise: plan the load into the blocks it allocated."""
        if not external:
            return
        tracked = self._track(request)
        match = tracked.match.poll(0.0) if tracked.match else None
        first = tracked.local_tokens // self._block_tokens
        wanted = range(first, first + -(-external // self._block_tokens))
        assert match is not None and wanted.stop <= match.blocks, "blocks were allocated for no match"
        block_ids = blocks.get_block_ids()[0]
        hashes = list(request.block_hashes[first : wanted.stop])
        runs = slice_runs(match.runs, wanted)
        self._loads.append(Load(request.request_id, first, runs, hashes, block_ids[first : wanted.stop]))
        tracked.loading = True
        tracked.match = None  # consumed: after a preemption the index is asked again
        if self._prefix_caching:
            self._arriving.update(dict.fromkeys(hashes, request.request_id))
            self._arriving_of[request.request_id] = hashes

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """Workers' report: loads that ended, loads that failed, saves that ended."""
        meta = output.kv_connector_worker_meta
        if isinstance(meta, KVStoreWorkerMetadata):
            self._store.mark_bad(meta.bad_segments)
            if meta.payloads_down is not None:
                # This half reads no payloads, so nothing else tells it what not to promise.
                self._store.payloads_down = meta.payloads_down
            for request_id, block in meta.failed_loads.items():
                self._load_failed(request_id, block)
            for segment in meta.ended_saves:
                for block_hash in self._segments.pop(segment, ()):
                    self._saving.pop(block_hash, None)
        for request_id in output.finished_recving or ():
            self._load_ended(request_id)

    def _load_failed(self, request_id: str, block: int) -> None:
        tracked = self._requests.get(request_id)
        if tracked is not None:
            tracked.load_failed = True
            tracked.saved = min(tracked.saved, block)
        for other in self._requests.values():
            if other.waits_for == request_id:
                # Has waited for this load once; another may fail the same way, so it computes.
                other.load_failed = True
            if not other.loading:
                other.match = None  # may name the same bad segment: ask again

    def _load_ended(self, request_id: str) -> None:
        if (tracked := self._requests.get(request_id)) is not None:
            tracked.loading = False
        for block_hash in self._arriving_of.pop(request_id, ()):
            if self._arriving.get(block_hash) == request_id:
                del self._arriving[block_hash]

    # ---- saving ---------------------------------------------------------------------------------

    def build_connector_meta(self, output: SchedulerOutput) -> KVStoreMetadata:
        """This step's work for the workers."""
        self._patience = _PATIENCE_S
        saves: list[Save] = []
        if self._can_save and self._unsaved and not self._retired:
            for request_id, tokens in output.num_scheduled_tokens.items():
                tracked = self._unsaved.get(request_id)
                if tracked is not None:
                    saves += self._saves_of(tracked, tokens, output)
        loads, self._loads = self._loads, []
        flushes, self._flushes = self._flushes, []
        abandon, self._abandon_loads = self._abandon_loads, False
        busy = loads or saves or flushes
        return KVStoreMetadata(self._namespace_json if busy else None, loads, saves, flushes, abandon)

    @guarded(())
    def _saves_of(self, tracked: Tracked, scheduled: int, output: SchedulerOutput) -> Sequence[Save]:
        request = tracked.request
        if not self._cacheable(request):
            del self._unsaved[request.request_id]
            return ()
        # The scheduler advances num_computed_tokens after this call.
        done_tokens = tracked.seen_tokens = request.num_computed_tokens + scheduled
        if done_tokens - scheduled < request.num_prompt_tokens <= done_tokens:
            tracked.prompt_ended = True
        if (note := self._begin_note(tracked)) is not None:
            self._admission.send(note)
        admitted = self._admission.admitted(request, tracked.note)
        tracked.undecided = admitted is None
        if admitted is None:
            return ()
        finished = done_tokens >= request.num_prompt_tokens and not self._settings.save_decode
        if finished and not getattr(request, "resumable", False):
            # All of the prompt is computed with this step; a running batch costs no more looks at it.
            del self._unsaved[request.request_id]
        final, tracked.prompt_ended = tracked.prompt_ended, False
        done = self._done(tracked)
        if done <= tracked.saved:
            return ()
        due = self._worth_saving(tracked, done, admitted, final=final)
        if not due:
            return ()
        state = output.kv_connector_block_state
        table = state.get_block_ids(request.request_id) if state is not None else None
        return self._plan(tracked, due, table[0]) if table is not None else ()

    def _done(self, tracked: Tracked) -> int:
        """Leading blocks that are full, final and wanted, as of what was scheduled."""
        request = tracked.request
        return savable_blocks(
            tracked.seen_tokens,
            request.num_prompt_tokens,
            len(request.block_hashes),
            self._block_tokens,
            save_decode=self._settings.save_decode,
        )

    def _begin_note(self, tracked: Tracked) -> Note | None:
        """The note to be sent, if any: a use of what the prompt has and that wasn't noted yet."""
        note = self._admission.begin(tracked.request, tracked.note)
        tracked.note = note or tracked.note
        return note

    def _worth_saving(self, tracked: Tracked, done: int, admitted: int, *, final: bool) -> list[range]:
        """Segments to save of `done` blocks, of which the first `admitted` are worth it.

        The last of those ends a segment: nothing comes after it that could fill one up.
        """
        final = final or admitted < done
        due, tracked.saved = saves_due(tracked.saved, min(done, admitted), self._segment_blocks, final=final)
        if admitted < done:
            over = done - max(tracked.saved, tracked.passed_over)
            self._store.counters.saved("not_admitted", max(0, over))
            tracked.passed_over = max(done, tracked.passed_over)
        return due

    def _plan(self, tracked: Tracked, due: list[range], block_ids: list[int]) -> list[Save]:
        saves = []
        for blocks in due:
            hashes = list(tracked.request.block_hashes[blocks.start : blocks.stop])
            # Blocks that another request of this engine is saving right now lead the chain, if any.
            busy = next((i for i, one in enumerate(hashes) if one not in self._saving), len(hashes))
            first, hashes = blocks.start + busy, hashes[busy:]
            if not hashes:
                continue
            segment = new_segment_id()
            self._saving.update(dict.fromkeys(hashes, segment))
            self._segments[segment] = hashes
            saves.append(Save(segment, first, hashes, block_ids[first : blocks.stop]))
        return saves

    # ---- the end --------------------------------------------------------------------------------

    @guarded((False, None))
    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Forget the request; save what its last segment lacks, if decoded or undecided until now.

        Blocks are never held back: those to be saved are read at the start of the next step, before
        anything can overwrite them.
        """
        tracked = self._requests.pop(request.request_id, None)
        self._unsaved.pop(request.request_id, None)
        if tracked is not None and self._flushable(tracked):
            # Not num_computed_tokens: it counts tokens that a load only promised.
            done = min(self._done(tracked), len(block_ids))
            # An answer that comes too late for the last step is too late: nothing of it is saved.
            admitted = self._admission.admitted(request, tracked.note) or 0
            due = self._worth_saving(tracked, done, admitted, final=True)
            self._flushes += self._plan(tracked, due, block_ids)
        return False, None

    def reset_cache(self) -> bool:
        """The engine forgets its KV blocks, perhaps because its weights have changed in place.

        What the store holds under this namespace may then be wrong for this engine, and what the
        engine computes from now on would be wrong for others, so the store is left alone until the
        engine is started anew. Loads under way are abandoned.
        """
        log.warning("reset: this engine uses the store no more, since its weights may have changed in place")
        self._retired = self._abandon_loads = True
        self._flushes.clear()
        return True

    def shutdown(self) -> None:
        """Close the store of this half."""
        self._store.close()

    def _flushable(self, tracked: Tracked) -> bool:
        return (
            self._can_save
            and (self._settings.save_decode or tracked.undecided)
            and not (tracked.loading or self._retired)
            and self._cacheable(tracked.request)
        )

    def _track(self, request: Request) -> Tracked:
        tracked = self._requests.get(request.request_id)
        if tracked is None or tracked.request is not request:
            tracked = self._requests[request.request_id] = Tracked(request)
        return tracked
