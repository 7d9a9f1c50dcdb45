"""The KV connector's scheduler half: it decides what to promise, what to load and what to save.

Everything here runs on the scheduler's thread and never waits for a backend: a match runs on one of
the store's call threads when its request arrives, and is picked up when the scheduler comes to the request.
connectors.kv.load matches and loads, connectors.kv.planner decides what to save when, and
connectors.kv.requests keeps the state of each request. This module has vLLM's hooks, and the namespace that
blocks belong to.

A request passes through these states:

    matching   the index has been asked; get_num_new_matched_tokens answers "later" until the
               answer or kv.match_deadline_s
    matched    a number of leading tokens is stored; what is promised is loaded from that very match
    loading    blocks are allocated and the workers are loading
    arriving   its prompt was handed over by another engine (connectors.kv.handoff): "later" until it is
               there or kv.handoff_wait_s has passed
    computing  prefill; full blocks from the match's end on are saved (connectors.kv.save)

While a request waits for its turn, the payloads that it is to load are fetched to the node's folder. If a
hint asks for it, a session's payloads are fetched, too (connectors.ahead).

With `admission.second_use` a prompt is noted once, on the same call thread and after the match, so that
no match waits for the note.

A request whose load failed once computes the rest itself: asking again could promise the same
unreadable bytes for ever.

Followers (connectors.engine.guard) do all else beside matches and loads, and a fault costs only the work of
its follower. Two steps stand bare. `update_state_after_alloc` and `build_connector_meta` send a promised
load. `update_connector_output` takes note of a load that has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import methodcaller
from typing import TYPE_CHECKING, Any

from connectors.ahead.prefetch import NoPrefetch, open_prefetch
from connectors.ahead.queued import QueuedItems
from connectors.ahead.sessions import HintedSessions
from connectors.choice.cost import TokenCost, mean_depth
from connectors.choice.decision import WAIT
from connectors.choice.regret import Regrets
from connectors.engine.contents import Contents, listen
from connectors.engine.guard import Followers, guarded
from connectors.engine.new_weights import weights_are
from connectors.engine.provenance import Provenance
from connectors.engine.sessions.telling import SessionTeller
from connectors.engine.step import RequestView, StepView
from connectors.kv.admission import Admission
from connectors.kv.audit import Audits
from connectors.kv.choosing import Choosing
from connectors.kv.events import NoEvents
from connectors.kv.handoff.handoffs import NoHandoffs
from connectors.kv.load import Loading
from connectors.kv.messages import KVStoreMetadata, KVStoreWorkerMetadata, Load, Save, Wrong
from connectors.kv.metrics import KVStoreStats
from connectors.kv.namespace import CurrentNamespace
from connectors.kv.observer import Observer
from connectors.kv.planner import SavePlanner
from connectors.kv.proving.proofs import Proofs
from connectors.kv.requests import Keeper, KVEngine, Requests
from connectors.kv.save import Saving
from connectors.observing.recording import CostTeller
from connectors.telemetry.spans import OpenSpans, no_spans
from connectors.weights import Naming
from kvstore.keys import SegmentId, canonical_json
from kvstore.rules.tiers import Tier
from kvstore.store.space import Space
from kvstore.store.store import Store

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class KVScheduler:
    """The scheduler half of one engine's KV connector."""

    def __init__(
        self,
        store: Store,
        space: Space,
        engine: KVEngine,
        *,
        handoffs: NoHandoffs | None = None,
        events: NoEvents | None = None,
        spans: OpenSpans = no_spans,
    ) -> None:
        """`handoffs` is None if prompts aren't handed over, `events` if the engine sends no KV events."""
        self.store = store
        #: The followers that each hook guards one by one.
        self.followers = followers = Followers(store.counters)
        self.handoffs = followers.guard(handoffs or NoHandoffs())
        self.cost = followers.guard(TokenCost(), TokenCost.restart)
        self._costs = followers.guard(CostTeller(store.backends.trace, self.cost))
        self._engine = engine
        self._observer = followers.guard(
            Observer(store, engine.groups, engine.hash_tokens, events or NoEvents(), spans, followers)
        )
        self._namespace = CurrentNamespace(store, space, ranks=engine.ranks, holds_blocks=engine.holds_blocks)
        self.saving = Saving(
            engine.groups,
            engine.hash_tokens,
            engine.segment_blocks,
            store.counters,
            _abandon_in(space),
            clock=store.clock,
            window_interval=store.settings.kv.window_interval_tokens,
        )
        refuses = store.settings.identity.client_uuids == "refuse"
        self._provenance = followers.guard(Provenance(engine.hash_tokens), Provenance.clear)
        self.requests = Requests(
            engine, store.settings, self.saving.start, Contents(engine.media) if refuses else None
        )
        self._audits = followers.guard(
            Audits(engine.groups, engine.hash_tokens, store.settings.kv.audit_every), Audits.drop
        )
        # No follower: where a proof fails, nothing is loaded.
        self._proofs = Proofs(engine.groups, engine.hash_tokens, engine.ranks, self._audits)
        self.prefetch = followers.guard(
            open_prefetch(store) if engine.can_load and engine.one_node else NoPrefetch(),
            methodcaller("restart"),
        )
        self._choosing = followers.guard(Choosing(store.settings.kv, engine, self.cost), Choosing.forget)
        self._regrets = followers.guard(
            Regrets(self._observer.regretted, WAIT[store.settings.kv.objective]), Regrets.restart
        )
        self._sessions = followers.guard(SessionTeller(store))
        self.loading = Loading(
            store,
            engine,
            self.requests,
            handoffs=self.handoffs,
            audits=self._audits,
            proofs=self._proofs,
            observer=self._observer,
            prefetch=self.prefetch,
            choosing=self._choosing,
            regrets=self._regrets,
            sessions=self._sessions,
        )
        #: Parts of the next step's message to the workers: KVStoreMetadata's `lost_blocks` and `handed_over`.
        self._lost_blocks: set[str] = set()
        self._handed_over: dict[str, float] = {}
        self._admission = followers.guard(Admission(store, engine.hash_tokens))
        self.save_planner = followers.guard(
            SavePlanner(
                engine,
                store.settings,
                self.requests,
                admission=self._admission,
                saving=self.saving,
                handoffs=self.handoffs,
                observer=self._observer,
                provenance=self._provenance,
            ),
            self._forget_saves,
        )
        self._queued_items = followers.guard(QueuedItems(), QueuedItems.restart)
        self._hinted = followers.guard(HintedSessions(store, self.prefetch), HintedSessions.restart)
        #: Ranks that can't read payloads now, and those that are asked for fewer reads.
        self._down: set[int] = set()
        self._scarce: set[int] = set()
        self._abandon_loads = False
        self._enter(space)
        space.register_soon()
        listen(self)

    def loaded(self, identifier: str, content: bytes) -> None:
        """Record that the EC connector loads the output of an item with this step."""
        self._provenance.comes(identifier, content)

    def _enter(self, space: Space | None) -> None:
        """Make all blocks belong to this namespace from now on, or with None to no namespace.

        This informs everything that depends on the namespace."""
        self.requests.retired = space is None
        self._observer.entered(space)
        self._audits.restart()
        self._regrets.restart()
        if space is not None:
            self.space = space
            self._namespace_json = canonical_json(space.namespace)
            self._proofs.use(space)
            self.loading.use(space)
            self._admission.use(space)
            self._sessions.use(space)
            self._hinted.use(space)
            self.handoffs.use(space)

    # ---- matching and loading -------------------------------------------------------------------

    @guarded(None)
    def on_new_request(self, request: Request) -> None:
        """Ask the index right away, so that the answer is usually there when the scheduler needs it."""
        tracked = self.requests.track(request)
        self._observer.arrived(tracked.request)
        self._costs.tell(self.space.id, self.store.clock())
        self._queued_items.arrived(tracked.request, tracked.promises)
        self._sessions.arrives(tracked.hints)
        if self.requests.retired or not self.requests.cacheable(tracked.request):
            return
        tracked.sending, tracked.receiving = self.handoffs.begin(
            tracked.request, tracked.names, sends=self._engine.can_save, receives=self._engine.can_load
        )
        note = self.save_planner.note(tracked)
        if tracked.receiving is None and self.requests.wants_match(tracked):
            self.prefetch.arrived(tracked.request.request_id)
            self.loading.ask(tracked, note)
        elif note is not None:
            self._admission.send(note)
        self._hinted.arrived(tracked.request.request_id, tracked.hints, tracked.matched)

    @guarded((0, False))
    def get_num_new_matched_tokens(self, request: Request, computed: int) -> tuple[int | None, bool]:
        """Returns (tokens to load beyond `computed`, True), (0, False), or (None, False) for "ask later"."""
        tracked = self.requests.come_to(request, computed)
        self._audits.forget(tracked.request.request_id)
        self._differ(self._proofs.forget(tracked.request.request_id))
        self._regrets.forget(tracked.request.request_id)
        tokens = self.loading.promise(tracked, computed)
        if tokens is None:
            self.prefetch.come_to(tracked.request.request_id)
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, external: int) -> None:
        """Plan the load of what was promised, into the blocks that the scheduler has allocated for it.

        `external` is 0 if nothing was, or another connector's promise counts."""
        name = RequestView(request).request_id
        self._queued_items.gone(name)
        if external:
            self.loading.plan(self.requests.track(request), blocks, external)
            return
        self.prefetch.gone(name)
        if self.save_planner.flushes:
            self.save_planner.hand_out(blocks.get_block_ids())

    def planned(self, request: Request) -> dict[Tier, int]:
        """Returns by tier the tokens of the load that was planned for a request last."""
        return self.requests.track(request).way.loading()

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """Take the workers' report: loads that ended, loads that failed, saves that ended."""
        meta = output.kv_connector_worker_meta
        if isinstance(meta, KVStoreWorkerMetadata):
            self._reported(meta)
        for request_id in output.finished_recving or ():
            self.loading.ended(request_id)
        self.requests.keepers.release(Keeper.HANDOFF, output.finished_sending or ())

    def _reported(self, meta: KVStoreWorkerMetadata) -> None:
        for follow in (
            self._bad_reported, self._health_reported, self._loads_reported, self._saves_reported,
            self._weights_reported,
        ):  # fmt: skip
            follow(meta)

    @guarded(None)
    def _bad_reported(self, meta: KVStoreWorkerMetadata) -> None:
        if meta.bad_segments:
            self.store.quarantine.mark(meta.bad_segments)
            self._observer.bad(meta.bad_segments)

    @guarded(None)
    def _health_reported(self, meta: KVStoreWorkerMetadata) -> None:
        for rank, down in meta.payloads_down.items():
            (self._down.add if down else self._down.discard)(rank)
        # This half reads no payloads itself, so only the ranks can tell it that promises would fail.
        self.store.health.readers_down = bool(self._down)
        for rank, scarce in meta.reads_scarce.items():
            (self._scarce.add if scarce else self._scarce.discard)(rank)
        self.store.health.readers_scarce = bool(self._scarce)

    @guarded(None)
    def _loads_reported(self, meta: KVStoreWorkerMetadata) -> None:
        self._observer.load_times(meta.load_times)
        self.loading.reported(meta)

    @guarded(None)
    def _saves_reported(self, meta: KVStoreWorkerMetadata) -> None:
        for request_id in meta.failed_handoffs:
            if (tracked := self.requests.get(request_id)) is not None and tracked.sending is not None:
                tracked.sending.failed = True
        for segment, reason in meta.save_reasons.items():
            self._observer.not_saved(segment, reason)
            if reason == "dropped":
                self.save_planner.lost(segment)
        if "refused" in meta.save_reasons.values():
            self.space.was_refused()
        for segment, (count, written) in meta.ended_saves.items():
            self.save_planner.ended(segment, count, written=written)

    @guarded(None)
    def _weights_reported(self, meta: KVStoreWorkerMetadata) -> None:
        if meta.weights:
            self._weights_named(meta.weights)
        if meta.compared:
            self._differ(self._proofs.reported(meta.compared))
        if meta.wrong:
            self._found_wrong(meta.wrong)

    def _found_wrong(self, wrong: dict[SegmentId, Wrong]) -> None:
        """Follow an audit that found segments wrong: see connectors.kv.audit."""
        self.store.quarantine.mark(wrong)
        self._observer.bad(set(wrong))
        for one in wrong.values():
            self._observer.wrong(one)
        if self._audits.found_wrong(wrong):
            self._distrust()

    def _differ(self, wrong: Sequence[Wrong]) -> None:
        """Follow proofs that found out that writers write what this engine does not compute."""
        if not wrong:
            return
        for one in wrong:
            self._observer.wrong(one)
        if self._proofs.distrusts_itself():
            self._distrust()

    def _distrust(self) -> None:
        if not self.requests.retired:
            self._namespace.distrust()
            self._abandon_loads = True
            self._start_over()

    # ---- saving ---------------------------------------------------------------------------------

    def build_connector_meta(self, output: SchedulerOutput) -> KVStoreMetadata:
        """Returns this step's work for the workers."""
        loads = self.loading.take()
        handed_over, self._handed_over = self._handed_over, {}
        planned: list[Save] = []
        if (made := self._plan_step(StepView(output), loads, handed_over, planned)) is None:
            self._unsent(planned, loads)
            # They may have saves before them of blocks that a request has lost.
            return KVStoreMetadata(
                self._namespace_json,
                loads,
                abandon_loads=True,
                handed_over=handed_over,
                writer=self.store.backends.writer.name,
            )
        return made

    @guarded(None)
    def _plan_step(
        self, step: StepView, loads: list[Load], handed_over: dict[str, float], planned: list[Save]
    ) -> KVStoreMetadata | None:
        """Returns this step's work, or None if planning it fails. `planned` gets its saves at once."""
        if self.space.writers.own_failed:
            self._distrust()
        scheduled = step.num_scheduled_tokens
        self.cost.sent(
            sum(scheduled.values()), len(scheduled), lambda: mean_depth(scheduled, self.requests.computed)
        )
        self._observer.tick()
        if scheduled:
            self._namespace.ran()
        if self._regrets.computing:
            self._regrets.step(scheduled, self.cost.under_way)
        self.saving.token_us = self.cost.token_us
        self._provenance.encodes(step, self.requests.items)
        for request_id in step.begun:
            if (tracked := self.requests.get(request_id)) is not None:
                self._observer.begun(tracked.request, tracked.way)
        lost_blocks, self._lost_blocks = self._lost_blocks.union(step.preempted), set()
        # Flushes come first: those that are dropped here lose blocks, which `plan_step` saves again.
        flushes = self.save_planner.take_flushes(step, handed_over) if self.save_planner.flushes else []
        planned += flushes
        saves = list(self.save_planner.plan_step(step)) if self.requests.unsaved else []
        planned += saves
        probes = self._choosing.take_probes()
        self.prefetch.step()
        self._queued_items.step()
        if self._hinted:
            self._hinted.step()
        # After the saves, which have followed where the step's blocks come from.
        audits = self._audits.plan_step(step) if self._audits else []
        if self._proofs:
            self._differ(self._proofs.planned(audits))
        if self.requests.retired and (loads or planned):
            # The namespace was left during this step: void loads and saves do not begin.
            self.save_planner.drop(planned)
            flushes, saves = [], []
            _void(loads)
        abandon, self._abandon_loads = self._abandon_loads, False
        namespace = self._namespace_json if loads or saves or flushes or audits or probes else None
        return KVStoreMetadata(
            namespace,
            loads,
            saves,
            flushes,
            probes,
            audits,
            abandon_loads=abandon,
            lost_blocks=lost_blocks,
            handed_over=handed_over,
            writer=self.store.backends.writer.name if namespace is not None else "",
        )

    @guarded((False, None))
    def request_finished(
        self, request: Request, tables: Sequence[Sequence[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget the request, and save its last blocks if they were decoded or undecided until now.

        `tables` has its block ids in every KV cache group of vLLM's. Returns whether this half frees the
        blocks, and the parameters for the decode engine, if any. It frees them if the request hands over its
        prompt and some rank may not have read all of it. Blocks that a load writes to are vLLM's own matter.
        """
        # Taken back below. It comes first: vLLM frees the blocks, whatever fails here.
        self._lost_blocks.add(RequestView(request).request_id)
        tracked = self.requests.forget(request)
        if tracked is None:
            self._observer.tick(idle=not self.requests)
            return False, None
        self._observer.finished(tracked.request)
        name, sending = tracked.request.request_id, tracked.sending
        self._audits.forget(name)
        self._differ(self._proofs.forget(name))
        self.prefetch.gone(name)
        self._queued_items.gone(name)
        self._hinted.gone(name)
        self._regrets.forget(name)
        self.save_planner.plan_end(tracked, tables)
        if not self.requests.retired:
            self._sessions.ends(tracked.hints, tracked.progress.salt, tracked.uses)
        self._observer.tick(idle=not self.requests)
        if sending is None or self.requests.retired:
            return False, None
        if (handle := self.handoffs.hand_over(tracked.request, sending)) is None:
            return False, None
        self.requests.keepers.give(name, Keeper.HANDOFF)
        self._lost_blocks.discard(name)
        self._handed_over[name] = self.store.settings.kv.handoff_wait_s
        return True, handle

    # ---- resets and new weights -----------------------------------------------------------------

    def reset_cache(self) -> bool:
        """Follow a reset of the engine's KV cache, perhaps around new weights in place: see CurrentNamespace.

        Blocks that were stored before the reset are not loaded after it, and loads under way are abandoned.
        Returns True.
        """
        self._namespace.reset()
        self._provenance.clear()
        self._observer.reset(renamed=self._namespace.space is not None)
        self._abandon_loads = True
        self._start_over()
        self._tell_weights()
        return True

    def give_up(self, why: str) -> None:
        """Leave the store alone as long as this engine lives."""
        self._namespace.give_up(why)
        self._abandon_loads = True
        self._start_over()

    def _weights_named(self, namings: dict[int, Naming]) -> None:
        taken = self._namespace.told(namings)
        if taken is None:
            return
        self._observer.named(taken=taken)
        if taken and (self.requests.retired or self._namespace.space is not self.space):
            self._start_over()
            self._tell_weights()

    def _forget_saves(self, planner: SavePlanner) -> None:
        """Follow a fault of the planner's: what it has begun may have been sent to the workers, or not."""
        planner.restart(_abandon_in(self.space))
        self.requests.forget_saves()

    @guarded(None)
    def _unsent(self, saves: Iterable[Save], loads: Iterable[Load]) -> None:
        """Follow a step whose loads reach the workers, but whose saves don't."""
        if self.requests.retired:
            _void(loads)
        self.save_planner.drop(saves)
        self._forget_saves(self.save_planner)

    def _start_over(self) -> None:
        space = self._namespace.space
        self._enter(space)
        self.prefetch.restart()
        self._hinted.restart()
        self.save_planner.restart(_abandon_in(self.space))
        self.requests.start_over()

    def _tell_weights(self) -> None:
        """Tell this process's other connectors which weights the engine has now; None: that isn't known."""
        space = self._namespace.space
        weights_are(None if space is None else space.namespace.weights)

    # ---- statistics, events, end ----------------------------------------------------------------

    @guarded(None)
    def take_stats(self) -> KVStoreStats | None:
        """Returns the statistics since the last call, or None without any."""
        return self._observer.take_stats(self.saving.under_way > 0, self._gauges)

    def _gauges(self) -> dict[str, float]:
        return {
            "queued_calls": self.store.transfers.queued["calls"],
            "pending_segments": self.saving.under_way,
            "index_down": int(self.store.health.index_down),
            "failed_writers": len(self.space.writers.failed()),
        }

    @guarded(())
    def take_events(self) -> Sequence[Any]:
        """Returns the KV events since the last call, in order. vLLM calls it at the end of each step."""
        self.cost.ended()
        self._regrets.step_ended()
        return self._observer.take_events()

    def shutdown(self) -> None:
        """Close the store of this half."""
        self._namespace.close()
        self._observer.tick(idle=True)
        self._observer.close()
        self.store.close()


def _void(loads: Iterable[Load]) -> None:
    """Make these loads bring nothing: without runs they fail at the workers, and are computed."""
    for load in loads:
        for group in load.groups:
            group.runs, group.tiers = [], {}


def _abandon_in(space: Space) -> Callable[[SegmentId], None]:
    def abandon(segment: SegmentId) -> None:
        space.backends.transfers.call(lambda: space.abandon(segment))

    return abandon
