"""Promises and plans what is loaded, request by request: the reading side of the scheduler half.

Everything runs on the scheduler's thread, except for the match itself, which runs on one of the store's call
threads. The only wait is `_PATIENCE_S` per step, which spares the engine idle steps for an answer that is
microseconds away.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

from connectors.ahead.prefetch import NoPrefetch
from connectors.choice.decision import Decision
from connectors.choice.regret import Regrets
from connectors.engine.layout import Group
from connectors.engine.sessions.telling import SessionTeller
from connectors.kv.admission import Note
from connectors.kv.audit import Audits
from connectors.kv.choosing import DECLINED, Choosing
from connectors.kv.handoff.handoffs import NoHandoffs
from connectors.kv.match import Found, Matcher, PendingMatch
from connectors.kv.messages import CUT, GroupLoad, KVStoreWorkerMetadata, Load
from connectors.kv.observer import Observer
from connectors.kv.proving.proofs import Proofs
from connectors.kv.requests import Keeper, KVEngine, Requests, Tracked
from connectors.kv.save import NULL_BLOCK
from connectors.planning import slice_runs
from kvstore.index.port import Run
from kvstore.keys import SegmentId
from kvstore.rules.tiers import Tier
from kvstore.store.space import Space
from kvstore.store.store import Store

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks

log = logging.getLogger(__name__)

#: Longest total time per scheduler step spent waiting for matches that are under way, in seconds.
_PATIENCE_S = 0.001


class Loading:
    """Promises, plans and follows the loads of one engine's requests. Call `use` before anything else."""

    def __init__(
        self,
        store: Store,
        engine: KVEngine,
        requests: Requests,
        *,
        handoffs: NoHandoffs,
        audits: Audits,
        proofs: Proofs,
        observer: Observer,
        prefetch: NoPrefetch,
        choosing: Choosing,
        regrets: Regrets,
        sessions: SessionTeller,
    ) -> None:
        self._store = store
        self._settings = store.settings.kv
        self._engine = engine
        self._groups = engine.groups
        self._hash_tokens = engine.hash_tokens
        self._requests = requests
        self._handoffs = handoffs
        self._audits = audits
        self._proofs = proofs
        self._observer = observer
        self._prefetch = prefetch
        self._choosing = choosing
        self._regrets = regrets
        self._sessions = sessions
        self._loads: list[Load] = []
        #: Names of blocks that are being loaded -> the request that loads them; others wait until the blocks
        #: are in the engine's own prefix cache.
        self._arriving: dict[bytes, str] = {}
        self._arriving_of: dict[str, list[bytes]] = {}
        self._patience = _PATIENCE_S

    def use(self, space: Space) -> None:
        """Match in this namespace from now on."""
        self._space = space
        self._choosing.forget()  # what was declined is of the former one
        self._matcher = Matcher(space, self._groups, self._hash_tokens, self._engine.fits)

    @property
    def held(self) -> int:
        """Returns a number that is 0 when no load is planned or under way."""
        return len(self._loads) + len(self._arriving) + len(self._arriving_of)

    # ---- promises -------------------------------------------------------------------------------

    def promise(self, tracked: Tracked, computed: int) -> int | None:
        """Returns how many tokens beyond the `computed` ones can be loaded; None: ask later. Raises
        AssertionError if a load of it is under way: before `plan`, where that would end the engine."""
        assert not self._requests.keepers.loads(tracked.request.request_id), "a load of it is under way"
        if not self._requests.wants_match(tracked) and tracked.receiving is None:
            return 0
        match = self._found(tracked)
        if match is None:
            return None
        request, names = tracked.request, tracked.names.all()
        brings = self._brought_by(names, computed) if tracked.receiving is None else None
        decision = self._choosing.decide(tracked, match, computed, comes=brings is not None)
        if not decision.tokens and self._tries(tracked, decision):
            # Not to be cut either.
            decision = replace(decision, tokens=decision.found, why="tried", prefill=None)
            tracked.decision = decision
        tokens = decision.tokens
        believed = self._proofs.believed(tracked, match, computed, tokens) if tokens > 0 else tokens
        if unproven := believed < tokens:
            if not tracked.doubted:
                tracked.doubted = True
                self._store.counters.miss("unproven", (tokens - believed) // self._hash_tokens)
            tokens = believed
        if audited := tokens > 0 and not unproven and self._declines(tracked, match, computed):
            self._store.counters.miss("audited", tokens // self._hash_tokens)
            tokens = 0
        if not tracked.told:
            tracked.told = True
            limit = match.limit or self._matcher.limit(len(names), request.num_tokens)
            if unnamed := self._matcher.limit(len(request.block_hashes), request.num_tokens) - limit:
                self._store.counters.miss("unnamed", unnamed // self._hash_tokens)
            if unnamed and match.reason == "complete":
                match, limit = replace(match, reason="unnamed"), limit + unnamed
            declined = "unproven" if unproven else "audited" if audited else DECLINED.get(decision.why, "")
            if tracked.receiving is None and tracked.match is not None:
                self._observer.answered(request, match, tracked.match, decision)
            self._observer.matched(request, names, match, limit, computed, tokens, declined, decision.weighed)
        if tracked.uses_of is not match.runs:
            tracked.uses_of = match.runs
            tracked.uses = self._sessions.matched(tracked.hints, tracked.progress.salt, match.runs)
        # Blocks that this engine is saving, or another has saved since, are left out when saves are planned.
        # A segment of an unproven writer is not replaced, whether its load pays or not.
        joinable = tracked.sending is None and not (unproven or audited)
        joinable = joinable and not self._space.writers.unproven(chain.from_iterable(match.runs))
        tracked.progress.found(match.stored, match.runs if joinable else ())
        if tracked.match is not None:
            self._observer.missing(request.block_hashes, match, tracked.match.asked_at)
        if not tracked.declined and not audited and (reason := DECLINED.get(decision.why)):
            tracked.declined = True
            self._store.counters.miss(reason, (decision.found - tokens) // self._hash_tokens)
        if not tokens:
            if decision.weighed is not None:
                stop = computed + decision.found
                self._regrets.computes(request, decision.weighed, stop, to_load=audited or unproven)
            return 0
        tracked.waits_for = self._brought_by(names, computed)
        # If another request loads the next block, it will be a local hit for both in a moment.
        return None if tracked.waits_for is not None else tokens

    def _declines(self, tracked: Tracked, match: Found, computed: int) -> bool:
        """Returns whether the load is declined for an audit. That is decided once per request, and never so
        for one that waits for another's load or was handed over."""
        if tracked.audit_decided:
            return False
        tracked.audit_decided = True
        if tracked.receiving is not None or self._brought_by(tracked.names.all(), computed) is not None:
            return False
        return self._audits.declines(tracked.request, tracked.names, tracked.origin, match, computed)

    def _tries(self, tracked: Tracked, decision: Decision) -> bool:
        """Returns whether a load is made though computing seems to be faster: as seldom as a load is declined
        for an audit."""
        weighed = decision.weighed
        if tracked.audit_decided or decision.why != "computing_is_faster" or weighed is None:
            return False
        tracked.audit_decided = True
        return self._audits.tries(weighed)

    def _found(self, tracked: Tracked) -> Found | None:
        """Returns what can be loaded of the request, or None while the answer is out. Asks for it if need
        be."""
        if tracked.receiving is not None:
            found = self._handoffs.poll(tracked.receiving)
            given_up = tracked.load_failed or self._requests.retired or tracked.receiving.over()
            if found is not None or not given_up:
                return found
            # The hand-off doesn't come, or not in time: load what is there, and compute the rest.
            tracked.receiving = None
            if not self._requests.wants_match(tracked):
                return self._matcher.nothing("absent")
        return self._matched(tracked)

    def ask(self, tracked: Tracked, note: Note | None = None) -> PendingMatch:
        """Start a match on a call thread, which counts `note` after it."""
        request = tracked.request
        hashes, tokens = list(tracked.names.all()), request.num_tokens
        pending = PendingMatch(hashes, time.monotonic() + self._settings.match_deadline_s)
        tracked.match = pending
        same = self._groups[0].spec.block_tokens == self._hash_tokens
        first = note.digests if note is not None and note.blocks == len(hashes) and same else None
        matcher, space, session = self._matcher, self._space, tracked.hints.session

        def job() -> None:
            found = self._answered(
                len(hashes),
                lambda: matcher.find(hashes, tokens, pending.end, first, session),
            )
            pending.finish(found)
            if self._choosing.pays_near(found, tokens):
                runs = list(chain(*found.runs))
                self._prefetch.answered(request.request_id, space, runs, found.tiers)
            self._observer.asked(len(hashes), found, time.monotonic() - pending.asked_at)
            if note is not None:
                note.run(space)

        if not self._store.transfers.call(job):
            self._store.counters.miss("capacity", len(hashes))
            pending.finish(self._matcher.nothing("capacity"))
            if note is not None:
                note.noted = 0
        return pending

    def _answered(self, hashes: int, find: Callable[[], Found]) -> Found:
        """Returns the match, on a call thread. Whatever happens, the request that waits gets an answer."""
        try:
            return find()
        except Exception:
            log.exception("match failed unexpectedly")
            self._store.counters.miss("error", hashes)
            return self._matcher.nothing("error")

    def _matched(self, tracked: Tracked) -> Found | None:
        """Returns the request's match, or None while the answer is out. Asks for it if need be."""
        pending = tracked.match
        now = time.monotonic()
        stale = pending is not None and (
            now - pending.asked_at > self._settings.match_ttl_s or not pending.is_of(tracked.names.all())
        )
        if pending is None or stale:
            pending = self.ask(tracked)
        before = time.monotonic()
        match = pending.poll(self._patience)
        self._patience = max(0.0, self._patience - (time.monotonic() - before))
        if match is None and time.monotonic() >= pending.end:
            self._store.counters.miss("deadline", pending.hashes)
            match = self._matcher.nothing("deadline")
            pending.finish(match)
        return match

    def _brought_by(self, names: Sequence[bytes], computed: int) -> str | None:
        """Returns the request that is loading the very block that this one needs next, or None."""
        number = computed // self._hash_tokens
        if not self._arriving or number >= len(names):
            return None
        return self._arriving.get(names[number])

    # ---- loads ----------------------------------------------------------------------------------

    def plan(self, tracked: Tracked, blocks: KVCacheBlocks, external: int) -> None:
        """Plan the load of `external` promised tokens into the blocks that the scheduler has allocated."""
        request = tracked.request
        self._requests.keepers.give(request.request_id, Keeper.LOAD)
        match, hashes = _promised(tracked)
        runs = match.runs if match is not None else tuple([] for _ in self._groups)
        tiers = match.tiers if match is not None else {}
        tables = blocks.get_block_ids()
        first, stop = tracked.local_tokens, tracked.local_tokens + external
        groups = [
            load
            for number, group in enumerate(self._groups)
            if (load := self._group_load(number, group, hashes, runs[number], tiers, tables, first, stop))
        ]
        lie = {segment: tier for load in groups for segment, tier in load.tiers.items()}
        self._prefetch.gone(request.request_id, lie)
        prefill, timed = self._choosing.planned(tracked, groups), self._observer.wants_times
        self._loads.append(
            Load(
                request.request_id, groups, prefill, first, stop, timed=timed, touch=not tracked.hints.session
            )
        )
        tracked.load_tokens, tracked.local_tokens = external, stop
        tracked.load_cost_us = sum(
            run.record.cost_us * run.count / run.record.slots for load in groups for run in load.runs
        )
        self._observer.load_planned(request, tracked.way, groups, external)
        if (decision := tracked.decision) is not None and decision.weighed is not None:
            self._regrets.loads(request.request_id, decision.weighed, to_load=decision.why != "tried")
        # The match is used up: after a preemption the request needs another.
        tracked.match = tracked.receiving = None
        # Requests don't wait for a load that is made to measure it.
        if self._engine.prefix_caching and (decision is None or decision.why != "tried"):
            full = list(tracked.names.all()[first // self._hash_tokens : stop // self._hash_tokens])
            self._arriving.update(dict.fromkeys(full, request.request_id))
            self._arriving_of[request.request_id] = full

    def _group_load(
        self,
        number: int,
        group: Group,
        hashes: Sequence[bytes],
        runs: list[Run],
        tiers: Mapping[SegmentId, Tier],
        tables: Sequence[Sequence[int]],
        first_token: int,
        stop_token: int,
    ) -> GroupLoad | None:
        """Returns the load of the blocks that vLLM has allocated in one group from `first_token` up to
        `stop_token`, or None without such blocks.

        Every block that isn't null is to be filled. If vLLM and kvstore.rules.prefix disagreed, the match
        would not cover a block. Such a block fails at the worker, and the request is computed.
        """
        size, ratio = group.rule.block_tokens, group.rule.block_tokens // self._hash_tokens
        wanted = range(-(-first_token // size), -(-stop_token // size))
        own = {table: tables[table] for table in group.tables}
        start = next((i for i in wanted if any(ids[i] != NULL_BLOCK for ids in own.values())), wanted.stop)
        wanted = range(start, wanted.stop)
        if not wanted:
            return None
        if any(block == NULL_BLOCK for ids in own.values() for block in ids[wanted.start : wanted.stop]):
            runs = []
        names = list(hashes[(wanted.start + 1) * ratio - 1 : wanted.stop * ratio : ratio])
        ids = {table: list(ids[wanted.start : wanted.stop]) for table, ids in own.items()}
        runs = slice_runs(runs, wanted)
        lie = {run.segment: tiers[run.segment] for run in runs if run.segment in tiers}
        return GroupLoad(number, wanted.start, runs, names, ids, lie, group.part_bytes)

    def take(self) -> list[Load]:
        """Returns the loads that this step starts, and renews the patience for the next step."""
        self._patience = _PATIENCE_S
        loads, self._loads = self._loads, []
        return loads

    def reported(self, meta: KVStoreWorkerMetadata) -> None:
        """Take what the workers report about reads."""
        for request_id, seconds in meta.load_seconds.items():
            if (tracked := self._requests.get(request_id)) is not None:
                tracked.load_read_s = max(tracked.load_read_s, seconds)
        self._choosing.reported(meta)
        for request_id, groups in meta.failed_loads.items():
            reason = meta.load_reasons.get(request_id, "error")
            if reason == CUT:
                self._cut(request_id, groups)
            else:
                self._failed(request_id, groups, reason)

    def _cut(self, request_id: str, groups: Mapping[int, int]) -> None:
        """Follow a load that was cut: what it brought is used, and the request computes the rest at once."""
        tracked = self._requests.get(request_id)
        if tracked is not None and tracked.load_tokens:
            began, size = tracked.local_tokens - tracked.load_tokens, self._hash_tokens
            stop = min(block * self._groups[group].rule.block_tokens for group, block in groups.items())
            brought = max(0, stop - began) // size * size
            cost_us = tracked.load_cost_us * brought / tracked.load_tokens
            names = tracked.names.all()
            self._observer.load_cut(
                tracked.request,
                names,
                began,
                tracked.load_tokens,
                brought,
                cost_us,
                tracked.decision.weighed if tracked.decision is not None else None,
            )
            self._regrets.loaded(request_id, brought)
            tracked.load_failed, tracked.load_tokens = True, 0
        self._waited_in_vain(request_id)

    def _waited_in_vain(self, request_id: str) -> None:
        for other in self._requests:
            if other.waits_for == request_id:
                # It has waited for this load once; another load may end the same way, so it computes.
                other.load_failed = True

    def _failed(self, request_id: str, groups: Mapping[int, int], reason: str) -> None:
        """Follow a load that failed: `groups` has the first block that it did not bring, by group."""
        tracked = self._requests.get(request_id)
        if tracked is not None:
            if tracked.load_tokens:
                began = tracked.local_tokens - tracked.load_tokens
                names = tracked.names.all()
                self._observer.load_failed(tracked.request, names, began, tracked.load_tokens, groups, reason)
                stop = min(block * self._groups[group].rule.block_tokens for group, block in groups.items())
                self._regrets.loaded(request_id, max(0, stop - began))
            tracked.load_failed, tracked.load_tokens = True, 0
            saved = tracked.progress.saved
            for group, block in groups.items():
                saved[group] = min(saved[group], block)
        self._waited_in_vain(request_id)
        for other in self._requests:
            if not self._requests.keepers.loads(other.request.request_id):
                other.match = None  # it may name the same bad segment
                if other.receiving is not None:
                    other.receiving.forget()

    def ended(self, request_id: str) -> None:
        """Follow a load that has ended, one way or the other, and end all waits for it."""
        self._requests.keepers.release(Keeper.LOAD, (request_id,))
        if (tracked := self._requests.get(request_id)) is not None and tracked.load_tokens:
            self._observer.loaded(tracked.load_tokens, tracked.load_cost_us)
            self._regrets.loaded(request_id, tracked.load_tokens)
            self._choosing.loaded(tracked)
            tracked.load_tokens = 0
        self._prefetch.load_ended(request_id)
        self._observer.load_ended(request_id)
        for block_hash in self._arriving_of.pop(request_id, ()):
            if self._arriving.get(block_hash) == request_id:
                del self._arriving[block_hash]


def _promised(tracked: Tracked) -> tuple[Found | None, Sequence[bytes]]:
    """Returns what the scheduler was promised, and the names of the request's blocks."""
    if tracked.receiving is not None:
        return tracked.receiving.found, tracked.receiving.names
    return tracked.match.poll(0.0) if tracked.match else None, tracked.names.all()
