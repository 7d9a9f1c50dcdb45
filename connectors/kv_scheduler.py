"""The KV connector in the scheduler: what to promise, what to load, what to save.

Everything here runs on the scheduler's thread and never waits for a backend: a match is asked on
the store's call threads when its request arrives and picked up when the scheduler comes to it.
Matching and loading are in connectors.kv_loading, what to save of a request in connectors.kv_saving; here
is the life of requests, and of the namespace they belong to.

A request, as this module sees it:

    matching   the index has been asked; get_num_new_matched_tokens answers "later" until the
               answer or kv.match_deadline_s
    matched    so many leading tokens are stored; the promise is loaded from that very match
    loading    blocks are allocated and the workers are loading
    arriving   its prompt was handed over by another engine (connectors.kv_handoff): "later" until it is
               there or kv.handoff_wait_s
    computing  prefill; full blocks from the match's end on are saved (connectors.kv_saving)

With `admission.second_use` a prompt is noted once, on the same call thread and after the match, so that
no match waits for it. Until the answer is there the request saves nothing; what it owes is saved at a
later step, or at its end, and if the answer never comes, not at all.

A request whose load failed once computes the rest itself: asking again could promise the same
unreadable bytes for ever.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from connectors.ec_epochs import weights_are
from connectors.guard import guarded
from connectors.identity import CONTENT_HASH
from connectors.kv_admission import Admission, Note
from connectors.kv_epochs import Epochs
from connectors.kv_events import NoEvents
from connectors.kv_handoff import Handoffs, Sending, finished_well
from connectors.kv_loading import Loading, Tracked
from connectors.kv_match import Found
from connectors.kv_outcomes import KVOutcomes
from connectors.kv_saving import Saving
from connectors.kv_stats import RENAMED, KVStoreStats
from connectors.kv_types import KVStoreMetadata, KVStoreWorkerMetadata, Save
from connectors.layout import Group
from connectors.pace import Pace
from connectors.planning import EVERY_BLOCK, external_tokens, savable_tokens
from connectors.stats import Tally
from connectors.weights import Naming, agreed
from kvstore.keys import SegmentId, canonical_json
from kvstore.store import Space, Store

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

log = logging.getLogger(__name__)

#: Ends of a match that say that the next block is not in the store, or of no use.
_GONE = ("absent", "quarantined")


class KVScheduler:
    """One per engine."""

    def __init__(
        self,
        store: Store,
        space: Space,
        groups: Sequence[Group],
        *,
        hash_tokens: int,
        segment_blocks: Sequence[int],
        prefix_caching: bool,
        can_load: bool,
        can_save: bool,
        fits: Callable[[int, int], bool] = lambda group, parts: True,
        ranks: int = 1,
        holds_blocks: Callable[[], bool] | None = None,
        handoffs: Handoffs | None = None,
        events: NoEvents | None = None,
    ) -> None:
        """`segment_blocks`: blocks per segment, of each group. `fits`: see kv_match.Matcher. `ranks`: how
        many workers report. `holds_blocks`: see kv_epochs.Epochs. `events`: if somebody listens."""
        self._store = store
        self._events = events or NoEvents()
        self._tally = Tally(store.counters, RENAMED)
        self._groups = groups
        self._settings = store.settings.kv
        self._hash_tokens = hash_tokens
        self._handoffs = handoffs
        self._ranks = ranks
        self._epochs = Epochs(store, space, holds_blocks=holds_blocks)
        self._namings: dict[int, Naming] = {}
        self._outcomes = KVOutcomes(store, groups, hash_tokens)
        self._pace = Pace()
        self._saving = Saving(
            groups,
            hash_tokens,
            segment_blocks,
            store.counters,
            _abandon_in(space),
            clock=store.clock,
            window_interval=store.settings.kv.window_interval_tokens,
        )
        self._loading = Loading(
            store,
            groups,
            hash_tokens,
            fits,
            prefix_caching=prefix_caching,
            events=self._events,
            tally=self._tally,
        )
        self._enter(space)
        self._can_load = can_load
        self._can_save = can_save
        self._requests: dict[str, Tracked] = {}
        #: Those that may have something to save.
        self._unsaved: dict[str, Tracked] = {}
        self._flushes: list[Save] = []
        #: For the workers: see kv_types.KVStoreMetadata.
        self._kept: dict[str, float] = {}
        self._released: set[str] = set()
        #: Ranks at which payloads can't be read.
        self._down: set[int] = set()
        self._abandon_loads = False
        space.register_soon()

    def _enter(self, space: Space | None) -> None:
        """All blocks belong to this namespace from now on; None: to none.

        All that depends on the namespace is made here."""
        self._retired = space is None
        self._tally.state(f"namespace{{{'' if space is None else space.id}}}", 1)
        if space is not None:
            self._space = space
            self._loading.use(space)
            self._outcomes.use(space)
            self._admission = Admission(self._store, space, self._hash_tokens)
            self._namespace_json = canonical_json(space.namespace)
            if self._handoffs is not None:
                self._handoffs.use(space)

    # ---- matching -------------------------------------------------------------------------------

    @guarded(None)
    def on_new_request(self, request: Request) -> None:
        """Ask the index right away: the answer is usually there when the scheduler asks for it."""
        tracked = self._track(request)
        self._begin_handoff(tracked)
        note = self._begin_note(tracked) if self._cacheable(request) and not self._retired else None
        if tracked.receiving is None and self._wants_match(tracked):
            self._loading.ask(tracked, note)
        elif note is not None:
            self._admission.send(note)

    def _begin_handoff(self, tracked: Tracked) -> None:
        request = tracked.request
        if self._handoffs is None or self._retired or not self._cacheable(request):
            return
        if self._can_save:
            tracked.sending = self._handoffs.sending(request)
        if self._can_load and not getattr(request, "skip_reading_prefix_cache", False):
            tracked.receiving = self._handoffs.receiving(request)
        if tracked.receiving is not None:
            self._handoffs.poll(tracked.receiving)

    @guarded((0, False))
    def get_num_new_matched_tokens(self, request: Request, computed: int) -> tuple[int | None, bool]:
        """(tokens to load beyond `computed`, True), (0, False), or (None, False) for "ask later"."""
        tracked = self._track(request)
        self._unsaved[request.request_id] = tracked  # starts, or starts over after a preemption
        tracked.prompt_ended = tracked.undecided = False
        tracked.seen_tokens, tracked.local_tokens = 0, computed
        if tracked.sending is not None:
            tracked.sending.restart()
            tracked.progress = self._saving.start()
        if not self._wants_match(tracked) and tracked.receiving is None:
            return 0, False
        match = self._matched(tracked)
        if match is None:
            return None, False
        tokens = self._worth_loading(tracked, match.tokens, computed)
        if not tracked.told:
            tracked.told = True
            limit = match.limit or self._loading.limit(request)
            self._outcomes.match(request, match, limit, computed, tokens)
        # What this engine is saving, or another has saved since, is left out again when it is planned.
        tracked.progress.saved = list(match.stored)
        if tracked.match is not None and match.reason in _GONE:
            self._events.missing(request.block_hashes, match.stored, tracked.match.asked_at)
        if not tokens:
            missed = (match.tokens - computed) // self._hash_tokens
            if missed > 0 and tracked.receiving is None:
                self._store.counters.miss("below_threshold", missed)
            return 0, False
        tracked.waits_for = self._loading.brought_by(request, computed)
        if tracked.waits_for is not None:
            # In a moment it is a local hit for both.
            return None, False
        return tokens, True

    def _worth_loading(self, tracked: Tracked, matched: int, computed: int) -> int:
        if tracked.receiving is None:
            return external_tokens(matched, computed, self._settings.min_load_blocks * self._hash_tokens)
        # Also the partial block alone; but the last token is computed here anyway.
        return matched - computed if min(matched, tracked.request.num_tokens - 1) > computed else 0

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

    def _matched(self, tracked: Tracked) -> Found | None:
        """The request's match, asking for it if need be; None while it is out."""
        if self._handoffs is not None and tracked.receiving is not None:
            found = self._handoffs.poll(tracked.receiving)
            given_up = tracked.load_failed or self._retired or self._handoffs.over(tracked.receiving)
            if found is not None or not given_up:
                return found
            # It doesn't come, or not in time: load what is there, and compute the rest.
            tracked.receiving = None
            if not self._wants_match(tracked):
                return self._loading.nothing("absent")
        return self._loading.matched(tracked)

    # ---- loading --------------------------------------------------------------------------------

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, external: int) -> None:
        """The scheduler took the promise: plan the load into the blocks it allocated."""
        if not external:
            return
        self._loading.plan(self._track(request), blocks, external)

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """Workers' report: loads that ended, loads that failed, saves that ended."""
        meta = output.kv_connector_worker_meta
        if isinstance(meta, KVStoreWorkerMetadata):
            self._store.mark_bad(meta.bad_segments)
            if meta.bad_segments:
                self._events.bad(meta.bad_segments)
            for rank, down in meta.payloads_down.items():
                (self._down.add if down else self._down.discard)(rank)
            # This half reads no payloads, so nothing else tells it what not to promise.
            self._store.payloads_down = bool(self._down)
            for request_id, groups in meta.failed_loads.items():
                self._load_failed(request_id, groups, meta.load_reasons.get(request_id, "error"))
            for request_id in meta.failed_handoffs:
                if (tracked := self._requests.get(request_id)) is not None and tracked.sending is not None:
                    tracked.sending.failed = True
            for segment, reason in meta.save_reasons.items():
                self._outcomes.not_saved(segment, reason)
            for segment, (count, written) in meta.ended_saves.items():
                self._save_ended(segment, count, written=written)
            if meta.weights:
                self._weights_named(meta.weights)
        for request_id in output.finished_recving or ():
            self._load_ended(request_id)

    def _save_ended(self, segment: SegmentId, count: int, *, written: bool) -> None:
        blocks = self._saving.ended(segment, count, written=written)
        if blocks is None:
            return
        if not blocks:
            for tracked in self._requests.values():
                if tracked.sending is not None and segment in tracked.sending.others:
                    tracked.sending.failed = True
        if blocks and blocks[0][0] == 0:
            self._tally.add("saved_tokens", len(blocks) * self._groups[0].rule.block_tokens)
        self._events.ended(segment, written=bool(blocks))
        self._outcomes.save_ended(segment, stored=bool(blocks))

    def _load_failed(self, request_id: str, groups: dict[int, int], reason: str) -> None:
        tracked = self._requests.get(request_id)
        if tracked is not None:
            if tracked.load_tokens:
                self._tally.add("loads{failed}")
                began = tracked.local_tokens - tracked.load_tokens
                self._outcomes.load_failed(tracked.request, began, tracked.load_tokens, groups, reason)
            tracked.load_failed, tracked.load_tokens = True, 0
            saved = tracked.progress.saved
            for group, block in groups.items():
                saved[group] = min(saved[group], block)
        for other in self._requests.values():
            if other.waits_for == request_id:
                # Has waited for this load once; another may fail the same way, so it computes.
                other.load_failed = True
            if not other.loading:
                other.match = None  # may name the same bad segment: ask again
                if other.receiving is not None:
                    other.receiving.forget()

    def _load_ended(self, request_id: str) -> None:
        if (tracked := self._requests.get(request_id)) is not None:
            tracked.loading = False
            if tracked.load_tokens:
                self._tally.add("loads{complete}")
                self._tally.add("loaded_tokens", tracked.load_tokens)
                self._tally.add("saved_compute_seconds", tracked.load_cost_us / 1e6)
                tracked.load_tokens = 0
        self._events.load_ended(request_id)
        self._loading.ended(request_id)

    # ---- saving ---------------------------------------------------------------------------------

    def build_connector_meta(self, output: SchedulerOutput) -> KVStoreMetadata:
        """This step's work for the workers."""
        scheduled = output.num_scheduled_tokens
        self._pace.sent(sum(scheduled.values()), len(scheduled))
        self._outcomes.tick()
        if scheduled:
            self._epochs.ran()
        saves: list[Save] = []
        if self._handoffs is not None:
            # What they hand over and nobody has read yet is about to be overwritten.
            self._released.update(output.preempted_req_ids or ())
        if self._can_save and self._unsaved and not self._retired:
            self._saving.token_us = self._pace.token_us
            for request_id, tokens in scheduled.items():
                tracked = self._unsaved.get(request_id)
                if tracked is not None:
                    saves += self._saves_of(tracked, tokens, output)
        loads = self._loading.take()
        flushes, self._flushes = list(self._still_there(self._flushes, output)), []
        abandon, self._abandon_loads = self._abandon_loads, False
        kept, self._kept = self._kept, {}
        released, self._released = self._released, set()
        namespace = self._namespace_json if loads or saves or flushes else None
        return KVStoreMetadata(namespace, loads, saves, flushes, abandon, kept, released)

    @guarded(())
    def _still_there(self, flushes: Sequence[Save], output: SchedulerOutput) -> Sequence[Save]:
        """Those of which no block is handed out again with this step: before a worker can read them, a model
        runner may have zeroed such blocks or copied something into them."""
        if not flushes:
            return ()
        tables = [one.block_ids for one in output.scheduled_new_reqs]
        tables += [one for one in output.scheduled_cached_reqs.new_block_ids if one is not None]
        taken = {block for one in tables for blocks in one for block in blocks}
        taken.update(output.new_block_ids_to_zero or ())
        rest = []
        for save in flushes:
            if taken.isdisjoint(block for blocks in save.tables.values() for block in blocks):
                rest.append(save)
            else:
                self._saving.drop(save)
                self._events.ended(save.segment, written=False)
                self._outcomes.not_saved(save.segment, "dropped")
                self._outcomes.save_ended(save.segment, stored=False)
        return rest

    @guarded(())
    def _saves_of(self, tracked: Tracked, scheduled: int, output: SchedulerOutput) -> Sequence[Save]:
        request = tracked.request
        if not self._cacheable(request):
            del self._unsaved[request.request_id]
            return ()
        brought = not tracked.seen_tokens and request.num_computed_tokens > tracked.local_tokens
        # The scheduler advances num_computed_tokens after this call.
        done_tokens = tracked.seen_tokens = request.num_computed_tokens + scheduled
        if done_tokens - scheduled < request.num_prompt_tokens <= done_tokens:
            tracked.prompt_ended = True
        if (note := self._begin_note(tracked)) is not None:
            self._admission.send(note)
        sending = tracked.sending
        admitted = EVERY_BLOCK if sending is not None else self._admission.admitted(request, tracked.note)
        # What another connector loads within this step may not arrive, and then nothing of it holds.
        unsure = brought and getattr(output, "has_sync_kv_loads", True)
        tracked.undecided = admitted is None or unsure
        if admitted is None or unsure:
            return ()
        finished = done_tokens >= request.num_prompt_tokens and not self._settings.save_decode
        if finished and not getattr(request, "resumable", False):
            # All of the prompt is computed with this step; a running batch costs no more looks at it.
            del self._unsaved[request.request_id]
        final, tracked.prompt_ended = tracked.prompt_ended, False
        state, name, done = output.kv_connector_block_state, request.request_id, self._done(tracked)
        if state is None:
            return ()
        hashes, progress = request.block_hashes, tracked.progress
        progress.ends = self._saving.ends(request.num_prompt_tokens)
        if sending is not None and self._handoffs is not None and final:
            saves = self._handoffs.last_saves(
                sending, self._saving, progress, state.get_block_ids(name), done_tokens
            )
        else:
            saves = self._saving.plan(
                progress,
                hashes,
                done,
                admitted,
                lambda: state.get_block_ids(name),
                computed=done_tokens,
                final=final,
            )
        if offers := state.boundary_state_offloads.get(name):
            saves += self._saving.take_offers(progress, hashes, offers, admitted, done)
        if sending is not None and self._handoffs is not None:
            self._handoffs.mark(name, sending, saves)
        if saves:
            self._planned(request, saves)
        return saves

    def _planned(self, request: Request, saves: Sequence[Save]) -> None:
        self._events.planned(request, saves)
        self._outcomes.saves_planned(request, saves)

    def _done(self, tracked: Tracked) -> int:
        """Leading tokens that are final, hashed and wanted, as of what was scheduled."""
        request = tracked.request
        return savable_tokens(
            tracked.seen_tokens,
            request.num_prompt_tokens,
            len(request.block_hashes) * self._hash_tokens,
            save_decode=self._settings.save_decode,
        )

    def _begin_note(self, tracked: Tracked) -> Note | None:
        """The note to be sent, if any: a use of what the prompt has and that wasn't noted yet."""
        note = self._admission.begin(tracked.request, tracked.note)
        tracked.note = note or tracked.note
        return note

    # ---- the end --------------------------------------------------------------------------------

    @guarded((False, None))
    def request_finished(
        self, request: Request, tables: Sequence[list[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget the request; save what its last segment lacks, if decoded or undecided until now.

        `tables`: its block ids in every KV cache group of vLLM's. Blocks to be saved are read at the start of
        the next step, but for those that it hands out again. They are held back only for a hand-off.
        """
        tracked = self._requests.pop(request.request_id, None)
        self._unsaved.pop(request.request_id, None)
        if tracked is not None and tracked.sending is not None:
            # Unless it is handed over, and also if something below fails.
            self._released.add(request.request_id)
        answered = True
        if tracked is not None and self._flushable(tracked):
            # Not num_computed_tokens alone: it counts tokens that a load only promised.
            sizes = [
                len(tables[table]) * group.rule.block_tokens
                for group in self._groups
                if not group.offered
                for table in group.tables
            ]
            # An answer that comes too late for the last step is too late: nothing of it is saved.
            answer = self._admission.admitted(request, tracked.note)
            admitted, answered = answer or 0, answer is not None
            # The token that was sampled last has no KV of its own yet; there may be a rejected draft's, or
            # that of one which a session has taken back.
            computed = min(request.num_computed_tokens, request.num_tokens - 1)
            done = min([self._done(tracked), computed, *sizes])
            # A window that decoding has reached is left whole.
            tracked.progress.ends = (*self._saving.ends(request.num_prompt_tokens), done)
            flushes = self._saving.plan(
                tracked.progress, request.block_hashes, done, admitted, lambda: tables, final=True
            )
            self._planned(request, flushes)
            self._flushes += flushes
        if tracked is not None:
            self._outcomes.refused(request, tracked.progress, "not_admitted" if answered else "deadline")
        self._outcomes.tick(idle=not self._requests)
        if tracked is not None and tracked.sending is not None and self._handoffs is not None:
            return self._hand_over(request, tracked.sending, self._handoffs)
        return False, None

    def _hand_over(
        self, request: Request, sending: Sending, handoffs: Handoffs
    ) -> tuple[bool, dict[str, Any] | None]:
        if not sending.complete or sending.failed or self._retired or not finished_well(request):
            # The decode engine, told nothing, computes the prompt at once.
            return False, None
        handle = handoffs.handle(request, sending)
        self._released.discard(request.request_id)
        unread = any(self._saving.is_under_way(segment) for segment in sending.segments)
        if unread:
            self._kept[request.request_id] = self._settings.handoff_wait_s
        return unread, handle

    def reset_cache(self) -> bool:
        """The engine forgets its KV blocks, perhaps because its weights change in place: see kv_epochs.

        Nothing that was stored before is loaded after it, and loads under way are abandoned. Always True.
        """
        self._epochs.reset()
        self._tally.add("resets{left_alone}" if self._epochs.space is None else "resets{renamed}")
        self._namings.clear()
        self._abandon_loads = True
        self._start_over()
        return True

    def _weights_named(self, namings: dict[int, Naming]) -> None:
        """Some ranks were told what their weights are called. When all were, that is what they are."""
        self._namings.update(namings)
        naming = agreed(self._namings, self._ranks)
        if naming is None:
            return
        self._namings.clear()
        taken = self._epochs.name(naming)
        self._tally.add("resets{named}" if taken else "resets{refused_name}")
        if taken and (self._retired or self._epochs.space is not self._space):
            self._start_over()

    def _start_over(self) -> None:
        """The namespace has changed: what was matched and planned in the former one is void."""
        space = self._epochs.space
        self._enter(space)
        self._saving.restart(self._flushes, _abandon_in(space or self._space))
        self._flushes.clear()
        self._events.restart((space or self._space).id)
        weights_are(None if space is None else space.namespace.weights)
        for tracked in self._requests.values():
            # Of a load under way the match has been consumed; its end is reported in any case.
            tracked.match = tracked.note = None
            tracked.progress = self._saving.start()
            # What was handed over is of the former weights, and so is what is stored of what is to be.
            tracked.receiving = None
            if tracked.sending is not None:
                tracked.sending.restart()

    # ---- what vLLM asks of its doings -----------------------------------------------------------

    @guarded(None)
    def take_stats(self) -> KVStoreStats | None:
        """What happened since the last call; None if nothing has."""
        report = self._tally.take(self._saving.under_way > 0, self._gauges)
        return None if report is None else KVStoreStats(report)

    def _gauges(self) -> dict[str, float]:
        breaker = self._store.index_breaker
        return {
            "queued_calls": self._store.transfers.queued["calls"],
            "pending_segments": self._saving.under_way,
            "index_down": int(breaker is not None and not breaker.is_closed),
        }

    @guarded(())
    def take_events(self) -> Sequence[Any]:
        """KV events since the last call, in order. vLLM asks at the end of each step."""
        self._pace.ended()
        return self._events.take()

    def shutdown(self) -> None:
        """Close the store of this half."""
        self._epochs.close()
        self._outcomes.tick(idle=True)
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
            tracked = Tracked(request, self._saving.start())
            self._requests[request.request_id] = tracked
        return tracked


def _abandon_in(space: Space) -> Callable[[SegmentId], None]:
    def abandon(segment: SegmentId) -> None:
        space.store.transfers.call(lambda: space.abandon(segment))

    return abandon
