"""Decides with every step, and at a request's end, which blocks of it are saved.

A request's full blocks are saved as they are computed (connectors.kv.save cuts them into segments), as far as
they are worth it (connectors.kv.admission). With `admission.second_use` that is unknown at first: until the
index has answered, the request saves nothing. Its blocks are saved at a later step or at its end. If the
answer never comes, they are not saved.

No block is kept for a save. When a request ends, saves that no rank has begun are dropped
(connectors.kv.worker.writes). A later request that needs those blocks saves them. Only a prompt that is
handed over keeps its blocks until it is saved.

Everything here belongs to the scheduler's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence

from connectors.engine.guard import guarded, otherwise
from connectors.engine.provenance import Provenance
from connectors.engine.step import StepView
from connectors.kv.admission import Admission, Note
from connectors.kv.handoff.handoffs import NoHandoffs
from connectors.kv.messages import Save
from connectors.kv.observer import Observer
from connectors.kv.requests import KVEngine, Requests, Tracked
from connectors.kv.save import Saving
from connectors.planning import EVERY_BLOCK, savable_tokens
from kvstore.keys import SegmentId
from schemas.settings import Settings


class SavePlanner:
    """Decides with every step, and at a request's end, which of its blocks are saved now."""

    def __init__(
        self,
        engine: KVEngine,
        settings: Settings,
        requests: Requests,
        *,
        admission: Admission,
        saving: Saving,
        handoffs: NoHandoffs,
        observer: Observer,
        provenance: Provenance,
    ) -> None:
        self._engine = engine
        self._settings = settings.kv
        self._requests = requests
        self._admission = admission
        self._saving = saving
        self._handoffs = handoffs
        self._observer = observer
        self._provenance = provenance
        #: Saves that were left at the end of requests, for the next step.
        self.flushes: list[Save] = []
        #: Blocks that this step hands out to requests which it may not compute: others load into them.
        self._handed_out: set[int] = set()

    def note(self, tracked: Tracked) -> Note | None:
        """Returns the note to be sent, if some blocks of the prompt haven't been noted yet."""
        note = self._admission.begin(tracked.request, tracked.names.all(), tracked.note)
        tracked.note = note or tracked.note
        return note

    @otherwise(tuple)
    def plan_step(self, step: StepView) -> Sequence[Save]:
        """Returns the saves of blocks that this step's forward pass completes."""
        saves: list[Save] = []
        if self._engine.can_save and not self._requests.retired:
            unsaved, offers = self._requests.unsaved, step.boundary_offers
            for request_id, tokens in step.num_scheduled_tokens.items():
                if (tracked := unsaved.get(request_id)) is None:
                    continue
                done_tokens = tracked.request.num_computed_tokens + tokens
                if done_tokens < tracked.idle_tokens and request_id not in offers:
                    tracked.seen_tokens = done_tokens
                elif (planned := self._plan_request(tracked, tokens, step)) is not None:
                    saves += planned
                else:
                    # Segments may be planned that no worker hears of, and it would fail in each step.
                    self._saving.forget(tracked.progress)
                    unsaved.pop(request_id, None)
            for segment, writers in self._saving.surplus():
                self.lost(segment)
                self.ended(segment, writers, written=False)
        return saves

    @guarded(None)
    def _plan_request(self, tracked: Tracked, scheduled: int, step: StepView) -> Sequence[Save] | None:
        request = tracked.request
        if not self._requests.cacheable(request):
            del self._requests.unsaved[request.request_id]
            return ()
        computed, prompt = request.num_computed_tokens, request.num_prompt_tokens
        brought = not tracked.seen_tokens and computed > tracked.local_tokens
        # The scheduler advances num_computed_tokens after this call.
        done_tokens = tracked.seen_tokens = computed + scheduled
        if tracked.names.items:
            self._provenance.follow(
                tracked.origin, tracked.names, request.block_hashes, computed, done_tokens, foreign=brought
            )
        names = tracked.names.all()
        if computed < prompt <= done_tokens:
            tracked.prompt_ended = True
        if (note := self.note(tracked)) is not None:
            self._admission.send(note)
        sending = tracked.sending
        admitted = (
            EVERY_BLOCK if sending is not None else self._admission.admitted(request, names, tracked.note)
        )
        # Tokens that another connector loads within this step may not arrive: then nothing after them holds.
        unsure = brought and step.has_sync_kv_loads
        tracked.undecided = admitted is None or unsure
        if admitted is None or unsure:
            return ()
        if done_tokens >= prompt and not self._settings.save_decode and not request.resumable:
            # All of the prompt is computed with this step, so later steps needn't look at the request again.
            del self._requests.unsaved[request.request_id]
        final, tracked.prompt_ended = tracked.prompt_ended, False
        if not step.has_block_ids:
            return ()
        name, progress = request.request_id, tracked.progress
        hashes = tracked.savable_names(self._engine.hash_tokens)
        done = self._done(done_tokens, prompt, hashes)
        progress.ends = self._saving.ends(prompt)
        if sending is not None and final and sending.tokens <= tracked.origin.sound_tokens:
            tables = step.block_ids(name)
            saves = self._handoffs.last_saves(sending, self._saving, progress, tables, done_tokens)
        else:
            saves = self._saving.plan(
                progress,
                hashes,
                done,
                admitted,
                lambda: step.block_ids(name),
                computed=done_tokens,
                final=final,
            )
        if offers := step.boundary_offers.get(name):
            saves += self._saving.take_offers(progress, hashes, offers, admitted, done)
        if sending is not None:
            self._handoffs.mark(sending, saves)
        if saves:
            self._observer.saves_planned(request, saves)
        if done_tokens >= prompt and not request.resumable and sending is None:
            tracked.idle_tokens = self._idle(tracked, done_tokens)
        return saves

    def _idle(self, tracked: Tracked, done_tokens: int) -> int:
        """Returns how many tokens a request that decodes has when there may be something to save of it again:
        when its next block is full, or a window leaves one behind."""
        tokens = self._engine.hash_tokens
        # Names may come later than their blocks are full, and after a preemption they are there before.
        next_block = (min(done_tokens // tokens, len(tracked.request.block_hashes)) + 1) * tokens
        left = (
            group.rule.leaves_at(saved)
            for group, saved in zip(self._engine.groups, tracked.progress.saved, strict=True)
        )
        return min([next_block, *(at for at in left if at is not None and at > done_tokens)])

    def plan_end(self, tracked: Tracked, tables: Sequence[Sequence[int]]) -> None:
        """Plan to save the last blocks of a request, if they were decoded or undecided until now.

        `tables` has its block ids in every KV cache group of vLLM's. The blocks are read at the start of the
        next step, except for saves of which that step hands out a block again.
        """
        request, answered = tracked.request, True
        if self._requests.flushable(tracked):
            # Not num_computed_tokens alone: it counts tokens that a load only promised.
            sizes = [
                len(tables[table]) * group.rule.block_tokens
                for group in self._engine.groups
                if not group.offered
                for table in group.tables
            ]
            # If the index hasn't answered by now, it is too late, and nothing is saved.
            answer = self._admission.admitted(request, tracked.names.all(), tracked.note)
            admitted, answered = answer or 0, answer is not None
            # The token that was sampled last has no KV of its own yet; in its place there may be that of a
            # rejected draft, or of a token which a session has taken back.
            computed = min(request.num_computed_tokens, request.num_tokens - 1)
            prompt = request.num_prompt_tokens
            hashes = tracked.savable_names(self._engine.hash_tokens)
            done = min([self._done(tracked.seen_tokens, prompt, hashes), computed, *sizes])
            # The window that decoding has reached is saved whole, too.
            tracked.progress.ends = (*self._saving.ends(prompt), done)
            flushes = self._saving.plan(tracked.progress, hashes, done, admitted, lambda: tables, final=True)
            self._observer.saves_planned(request, flushes)
            self.flushes += flushes
        names = tracked.names.all()
        self._observer.refused(request, names, tracked.progress, "not_admitted" if answered else "deadline")

    def _done(self, seen: int, prompt: int, hashes: Sequence[bytes]) -> int:
        """Returns how many leading tokens are final, hashed and wanted when `seen` are computed."""
        hashed = len(hashes) * self._engine.hash_tokens
        return savable_tokens(seen, prompt, hashed, save_decode=self._settings.save_decode)

    def hand_out(self, tables: Iterable[Iterable[int]]) -> None:
        """Record blocks that a request has got for which this connector loads nothing. Another one of
        MultiConnector may, and by RDMA, which nothing on a device's stream holds back."""
        self._handed_out.update(block for blocks in tables for block in blocks)

    @otherwise(list)
    def take_flushes(self, step: StepView, handed_over: Container[str]) -> list[Save]:
        """Returns the saves that were left at the end of requests, each once. Those of requests that are
        `handed_over` may wait for room: the others' blocks are free."""
        flushes, self.flushes = self.flushes, []
        for save in flushes:
            save.blocks_stay &= save.request_id in handed_over
        return list(self._still_there(flushes, step))

    def _still_there(self, flushes: Sequence[Save], step: StepView) -> Sequence[Save]:
        """Returns those of `flushes` of which no block is handed out again with this step, and drops the
        rest: a model runner may zero such blocks, or copy into them, before a worker can read them."""
        given, self._handed_out = step.given_blocks() | self._handed_out, set()
        rest = []
        for save in flushes:
            if given.isdisjoint(block for blocks in save.tables.values() for block in blocks):
                rest.append(save)
            else:
                self._drop(save)
        return rest

    def drop(self, saves: Iterable[Save]) -> None:
        """Give up planned saves that no rank gets."""
        for save in saves:
            self._drop(save)

    def _drop(self, save: Save) -> None:
        self.lost(save.segment)
        self._saving.drop(save)
        self._observer.save_dropped(save)

    def lost(self, segment: SegmentId) -> None:
        """Follow a segment that some rank has dropped, or will: requests that count on it and still have
        their blocks save those again."""
        for progress in self._saving.lost(segment):
            tracked = self._requests.get(progress.request_id)
            if tracked is not None and tracked.progress is progress:
                self._requests.look_again(tracked)

    def ended(self, segment: SegmentId, count: int, *, written: bool) -> None:
        """Follow a segment of which `count` more ranks ended their parts; `written`: all wrote theirs."""
        blocks = self._saving.ended(segment, count, written=written)
        if blocks is None:
            return
        if not blocks:
            for tracked in self._requests:
                if tracked.sending is not None and segment in tracked.sending.others:
                    tracked.sending.failed = True
        self._observer.save_ended(segment, blocks)

    def restart(self, abandon: Callable[[SegmentId], None]) -> None:
        """Make all blocks belong to another namespace from now on: see Saving.restart."""
        self._saving.restart(self.flushes, abandon)
        self.flushes.clear()
