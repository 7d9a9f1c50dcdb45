"""What a KV connector promises and loads, request by request: the half of it that is about reading.

On the scheduler's thread, but for the match itself, which runs on one of the store's call threads. The only
wait is `_PATIENCE_S` per step, which spares the engine idle steps for an answer that is microseconds away.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from connectors.kv_admission import Note
from connectors.kv_events import NoEvents
from connectors.kv_handoff import Receiving, Sending
from connectors.kv_match import Found, Matcher, PendingMatch
from connectors.kv_saving import NULL_BLOCK, Progress
from connectors.kv_types import GroupLoad, Load
from connectors.layout import Group
from connectors.planning import slice_runs
from connectors.stats import Tally
from kvstore.ports import Run
from kvstore.store import Space, Store

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request

log = logging.getLogger(__name__)

#: Total time per scheduler step that may be spent waiting for matches that are under way.
_PATIENCE_S = 0.001


@dataclass(slots=True)
class Tracked:
    """What the scheduler's half knows of one request. Owned by the scheduler's thread."""

    request: Request
    progress: Progress
    match: PendingMatch | None = None
    note: Note | None = None
    #: The prompt is computed, and what its last segment lacks isn't saved yet.
    prompt_ended: bool = False
    #: When it was last looked at, it wasn't known what is worth saving.
    undecided: bool = False
    #: Block-aligned local hit, in tokens, and what was planned to be loaded after it.
    local_tokens: int = 0
    #: Tokens that were scheduled since blocks were allocated last: what is surely computed.
    seen_tokens: int = 0
    #: The request whose load brings what this one waits for.
    waits_for: str | None = None
    loading: bool = False
    #: Tokens that its load brings, and what computing them would take, in microseconds.
    load_tokens: int = 0
    load_cost_us: float = 0.0
    load_failed: bool = False
    #: The journal has been told how much of it was found.
    told: bool = False
    #: Its prompt is handed over to another engine, or was by another one.
    sending: Sending | None = None
    receiving: Receiving | None = None


class Loading:
    """Of one engine."""

    def __init__(
        self,
        store: Store,
        groups: Sequence[Group],
        hash_tokens: int,
        fits: Callable[[int, int], bool],
        *,
        prefix_caching: bool,
        events: NoEvents,
        tally: Tally,
    ) -> None:
        """`fits`: see kv_match.Matcher. Call `use` before anything else."""
        self._store = store
        self._settings = store.settings.kv
        self._groups = groups
        self._hash_tokens = hash_tokens
        self._fits = fits
        self._prefix_caching = prefix_caching
        self._events = events
        self._tally = tally
        self._loads: list[Load] = []
        #: Block hashes being loaded -> request; others wait for them in the GPU's prefix cache.
        self._arriving: dict[bytes, str] = {}
        self._arriving_of: dict[str, list[bytes]] = {}
        self._patience = _PATIENCE_S

    def use(self, space: Space) -> None:
        """What is asked from now on is about this namespace."""
        self._space = space
        self._matcher = Matcher(space, self._groups, self._hash_tokens, self._fits)

    @property
    def held(self) -> int:
        """What is planned or under way, as a number that is 0 when nothing is."""
        return len(self._loads) + len(self._arriving) + len(self._arriving_of)

    def nothing(self, reason: str) -> Found:
        """A match of nothing."""
        return self._matcher.nothing(reason)

    def limit(self, request: Request) -> int:
        """How many tokens of it can be found, at most."""
        return self._matcher.limit(len(request.block_hashes), request.num_tokens)

    def ask(self, tracked: Tracked, note: Note | None = None) -> PendingMatch:
        """Start a match on a call thread, and after it count `note`."""
        request = tracked.request
        hashes, tokens = list(request.block_hashes), request.num_tokens
        pending = PendingMatch(hashes, time.monotonic() + self._settings.match_deadline_s)
        tracked.match = pending
        known = note is not None and note.blocks == len(hashes) and self._groups[0].spec.block_tokens
        first = note.digests if note is not None and known == self._hash_tokens else None
        matcher, space = self._matcher, self._space

        def job() -> None:
            found = self._find(matcher, hashes, tokens, pending.end, first)
            pending.finish(found)
            self._tally.add("matches")
            self._tally.add("asked_tokens", len(hashes) * self._hash_tokens)
            self._tally.add("matched_tokens", found.tokens)
            self._tally.timed("match_seconds", time.monotonic() - pending.asked_at)
            if note is not None:
                note.run(space)

        if not self._store.transfers.call(job):
            self._store.counters.miss("capacity", len(hashes))
            pending.finish(self._matcher.nothing("capacity"))
            if note is not None:
                note.noted = 0
        return pending

    def _find(
        self, matcher: Matcher, hashes: list[bytes], tokens: int, end: float, first: bytes | None
    ) -> Found:
        """Call thread. Whatever happens, the request that waits for it gets an answer."""
        try:
            return matcher.find(hashes, tokens, end, first)
        except Exception:
            log.exception("match failed unexpectedly")
            self._store.counters.miss("error", len(hashes))
            return matcher.nothing("error")

    def matched(self, tracked: Tracked) -> Found | None:
        """The request's match, asking for it if need be; None while it is out."""
        pending = tracked.match
        now = time.monotonic()
        stale = pending is not None and (
            now - pending.asked_at > self._settings.match_ttl_s
            or not pending.is_of(tracked.request.block_hashes)
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

    def brought_by(self, request: Request, computed: int) -> str | None:
        """The request that is loading the very block that this one needs next, if any."""
        number = computed // self._hash_tokens
        if not self._arriving or number >= len(request.block_hashes):
            return None
        return self._arriving.get(request.block_hashes[number])

    def plan(self, tracked: Tracked, blocks: KVCacheBlocks, external: int) -> None:
        """The scheduler took the promise: plan the load into the blocks it allocated."""
        request = tracked.request
        match, hashes = _promised(tracked)
        runs = match.runs if match is not None else tuple([] for _ in self._groups)
        tables = blocks.get_block_ids()
        first, stop = tracked.local_tokens, tracked.local_tokens + external
        groups = [
            load
            for number, group in enumerate(self._groups)
            if (load := self._group_load(number, group, hashes, runs[number], tables, first, stop))
        ]
        self._loads.append(Load(request.request_id, groups))
        tracked.loading, tracked.load_tokens, tracked.local_tokens = True, external, stop
        tracked.load_cost_us = sum(
            run.record.cost_us * run.count / run.record.slots for load in groups for run in load.runs
        )
        self._tally.add("promised_tokens", external)
        self._events.loading(request.request_id, groups)
        # Consumed: after a preemption the index is asked again.
        tracked.match = tracked.receiving = None
        if self._prefix_caching:
            full = list(request.block_hashes[first // self._hash_tokens : stop // self._hash_tokens])
            self._arriving.update(dict.fromkeys(full, request.request_id))
            self._arriving_of[request.request_id] = full

    def _group_load(
        self,
        number: int,
        group: Group,
        hashes: Sequence[bytes],
        runs: list[Run],
        tables: Sequence[Sequence[int]],
        first_token: int,
        stop_token: int,
    ) -> GroupLoad | None:
        """The blocks of one group that vLLM has allocated for tokens from `first_token` on; None if none.

        Every block that isn't null is to be filled. One that the match doesn't cover, which would mean that
        vLLM and connectors.boundary disagree, fails at the worker, and the request is computed.
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
        return GroupLoad(number, wanted.start, slice_runs(runs, wanted), names, ids)

    def take(self) -> list[Load]:
        """The loads that this step starts. The next step's patience is a new one."""
        self._patience = _PATIENCE_S
        loads, self._loads = self._loads, []
        return loads

    def ended(self, request_id: str) -> None:
        """Nobody waits for this request's load any more."""
        for block_hash in self._arriving_of.pop(request_id, ()):
            if self._arriving.get(block_hash) == request_id:
                del self._arriving[block_hash]


def _promised(tracked: Tracked) -> tuple[Found | None, Sequence[bytes]]:
    """What the scheduler was told can be loaded, and the names of the request's blocks."""
    if tracked.receiving is not None:
        return tracked.receiving.found, tracked.receiving.names
    return tracked.match.poll(0.0) if tracked.match else None, tracked.request.block_hashes
