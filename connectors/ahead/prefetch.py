"""Brings payloads that waiting requests are to load to the node's folder, where the requests find them when
they start.

A request is matched when it arrives. If the engine is full, the scheduler passes the request over. Segments
of the match that are not yet in the folder of a tiered payload store are then fetched into it, heads first
and request by request. When the request starts, or ends before that, it is forgotten here.

Segments that a client's hint names (connectors.ahead.sessions) come after those. They are forgotten when a
request has loaded them, or after HINT_S. Hints may fill half of the budget; segments without room are left
out.

Four rules keep prefetching free of cost:

    requests under way   nothing is begun while a load of this engine reads from beyond the folder, and no
                         more than AHEAD_THREADS payloads are on their way when one begins: Transfers.ahead,
                         which also lets reads of this process go first
    the folder           what was fetched and not loaded yet is at most payloads.prefetch_bytes, and at most
                         a quarter of the folder: a long queue doesn't push out what its head waits for
    the network          what was fetched for nothing counts against that for `_WASTE_S` more: clients that
                         send requests and abort them don't make an engine fetch without an end
    a store that fails   nothing is begun for `_PAUSE_S` after a failure, nor while the ranks can't read,
                         or they or this process are asked for fewer reads; a segment that fails twice
                         is given up

The folder also keeps blocks that this engine has computed, saved or loaded lately, and is larger than the
engine's own cache. So a fetched block is hardly ever one that the engine has itself.

Any thread may call, and no call waits. Only `_bring` does I/O, on threads of Transfers.ahead. `_lock` guards
all fields from there on, and those of requests and segments.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import chain
from typing import Final, Protocol

from connectors.ahead.segments import Hinted, Segment, WaitingRequest
from kvstore.errors import BreakerOpen, KVStoreError
from kvstore.index.port import Run
from kvstore.keys import SegmentId
from kvstore.rules.tiers import Tier
from kvstore.store.space import Space
from kvstore.store.store import Store
from kvstore.threads.transfers import AHEAD_THREADS
from schemas.settings import Tiers

log = logging.getLogger(__name__)

#: Places from which nothing is brought nearer.
NEAR: Final[tuple[Tier, ...]] = ("memory", "folder")
#: Largest share of the folder that may hold what waits to be loaded.
_FOLDER_SHARE: Final = 0.25
#: How long what was fetched for nothing counts against the budget, in seconds.
_WASTE_S: Final = 60.0
#: How long nothing is begun after a failure, in seconds.
_PAUSE_S: Final = 2.0
_NOTHING: Final[Mapping[SegmentId, Tier]] = {}


class Tiered(Protocol):
    """A payload store with the node's folder in front of it. Safe for threads."""

    def tier(self, name: str, nbytes: int) -> Tier:
        """Returns where a read of the payload would find it. No network."""

    def fill(self, name: str, size: int) -> bool:
        """Brings the payload to the folder. Returns whether it is there. Raises KVStoreError."""


class NoPrefetch:
    """Fetches nothing ahead: there is no folder to fetch to, or the budget is 0."""

    def arrived(self, request_id: str) -> None:
        """A request has come and is being looked up."""

    def answered(
        self, request_id: str, space: Space, runs: Iterable[Run], tiers: dict[SegmentId, Tier]
    ) -> None:
        """Records the runs that were found for a request. `tiers` says where they lie, and is overwritten as
        segments arrive."""

    def come_to(self, request_id: str) -> None:
        """The scheduler has come to a request in this step, got the answer "later", and will ask again."""

    def step(self) -> None:
        """The scheduler has decided a step: it has passed over all requests that have not started yet."""

    def gone(self, request_id: str, loads: Mapping[SegmentId, Tier] = _NOTHING) -> None:
        """A request ends its wait: it starts, loading these segments from where they lie, or has ended."""

    def taken(self, request_id: str) -> None:
        """A request ends its wait: all segments that were fetched for it are being read from the folder."""

    def load_ended(self, request_id: str) -> None:
        """A request's load has ended, one way or the other."""

    def hinted(self, space: Space, runs: Iterable[Run], tiers: Mapping[SegmentId, Tier]) -> None:
        """A client says that requests will need these runs, which lie where `tiers` says: heads first."""

    def restart(self) -> None:
        """Forget all requests and hints: what was found is void."""


class Prefetch(NoPrefetch):
    """Fetches ahead for the requests of one engine."""

    def __init__(
        self,
        store: Store,
        tier: Tiered,
        budget_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._health = store.health
        self._transfers = store.transfers
        self._counters = store.counters
        self._tier = tier
        self._budget = budget_bytes
        self._clock = clock
        #: Requests that no step has passed over yet, and those that this step has come to. The scheduler
        #: thread's.
        self._fresh: dict[str, WaitingRequest] = {}
        self._come: set[str] = set()
        self._lock = threading.Lock()
        self._requests: dict[str, WaitingRequest] = {}
        self._segments: dict[SegmentId, Segment] = {}
        #: Segments whose fetch has not begun, in the order of the requests' arrival.
        self._queue: dict[SegmentId, Segment] = {}
        #: Likewise segments that only hints name; they come after `_queue`.
        self._later: dict[SegmentId, Segment] = {}
        self._hinted = Hinted(budget_bytes)
        #: Segments of which some payloads are there and others were not asked for yet.
        self._parted: deque[Segment] = deque()
        #: Number of payloads that are being fetched.
        self._running = 0
        #: Bytes that `_segments` count in the budget.
        self._held = 0
        #: Bytes that were fetched for nothing, and when they cease to count.
        self._waste: deque[tuple[float, int]] = deque()
        self._wasted = 0
        #: Requests whose loads read from beyond the folder.
        self._loads: set[str] = set()
        self._paused_until = float("-inf")

    @property
    def held(self) -> int:
        """Returns a number that is 0 when no request waits or loads and no fetch is on its way. Payloads that
        hints have brought no longer count."""
        with self._lock:
            coming = sum(one.under_way for one in self._segments.values())
            return len(self._requests) + coming + len(self._loads) + self._running

    def arrived(self, request_id: str) -> None:
        with self._lock:
            self._forget(request_id)
            self._requests[request_id] = self._fresh[request_id] = WaitingRequest(request_id)

    def answered(
        self, request_id: str, space: Space, runs: Iterable[Run], tiers: dict[SegmentId, Tier]
    ) -> None:
        with self._lock:
            waiting = self._requests.get(request_id)
            # A request with a second match, because the first was old, was served here before.
            if waiting is None or waiting.found is not None:
                return
            waiting.found = space, runs, tiers
            passed = waiting.passed
        if passed:
            self._offer(waiting)

    def come_to(self, request_id: str) -> None:
        self._come.add(request_id)

    def step(self) -> None:
        if self._fresh:
            for waiting in [one for name, one in self._fresh.items() if name not in self._come]:
                del self._fresh[waiting.request_id]
                with self._lock:
                    waiting.passed = True
                    known = waiting.found is not None
                if known:
                    self._transfers.call(partial(self._offer, waiting))
        self._come.clear()
        if self._queue or self._parted or self._later:
            with self._lock:
                self._go_on()

    def gone(self, request_id: str, loads: Mapping[SegmentId, Tier] = _NOTHING) -> None:
        with self._lock:
            for segment in loads:
                if (one := self._segments.get(segment)) is not None and one.held:
                    one.used = True
                    one.rest.clear()
                    self._settle(one)
            self._forget(request_id)
            if any(tier not in NEAR for tier in loads.values()):
                self._loads.add(request_id)
            self._go_on()

    def taken(self, request_id: str) -> None:
        with self._lock:
            waiting = self._requests.get(request_id)
            loads: dict[SegmentId, Tier] = {}
            if waiting is not None:
                loads = dict.fromkeys((one.segment for one in waiting.segments), "folder")
        self.gone(request_id, loads)

    def load_ended(self, request_id: str) -> None:
        with self._lock:
            self._loads.discard(request_id)
            self._go_on()

    def hinted(self, space: Space, runs: Iterable[Run], tiers: Mapping[SegmentId, Tier]) -> None:
        for segment, record in {run.segment: run.record for run in runs}.items():
            near = tiers.get(segment, NEAR[0]) in NEAR
            with self._lock:
                known = self._segments.get(segment)
                if known is None and near:
                    continue
                one = known or Segment.of(space, segment, record)
                if not self._hinted.add(one, self._clock(), self._wasted):
                    break
                if known is None:
                    self._segments[segment] = self._later[segment] = one
        with self._lock:
            self._go_on()

    def restart(self) -> None:
        with self._lock:
            for request_id in list(self._requests):
                self._forget(request_id)
            for one in self._hinted:
                self._hinted.discard(one)
                self._let_go(one)
            self._loads.clear()

    # ---- the steps of the above, which hold the lock --------------------------------------------

    def _forget(self, request_id: str) -> None:
        """Lets go of a request, and of the segments that no other request waits for."""
        self._fresh.pop(request_id, None)
        if (waiting := self._requests.pop(request_id, None)) is None:
            return
        for one in waiting.segments:
            if one.waiting.pop(request_id, None) is not None:
                self._let_go(one)

    def _let_go(self, one: Segment) -> None:
        """Fetches no more of a segment, and takes it off the table, once it is unwanted."""
        if not one.wanted:
            one.rest.clear()
            self._settle(one)
        elif not one.waiting and self._queue.pop(one.segment, None) is not None:
            self._later[one.segment] = one

    def _settle(self, one: Segment) -> None:
        """Takes a segment off the table, and counts it, once it is loaded or unwanted."""
        if one.running or (one.wanted and not one.used) or self._segments.get(one.segment) is not one:
            return
        del self._segments[one.segment]
        self._queue.pop(one.segment, None)
        self._later.pop(one.segment, None)
        self._hinted.discard(one)
        self._held -= one.held
        if one.brought:
            self._count("used" if one.used else "wasted", one.brought)
            if not one.used:
                self._waste.append((self._clock() + _WASTE_S, one.brought))
                self._wasted += one.brought

    def _count(self, outcome: str, nbytes: int) -> None:
        self._counters.add(f"prefetch_segments{{{outcome}}}")
        self._counters.add(f"prefetch_bytes{{{outcome}}}", nbytes)

    def _go_on(self) -> None:
        """Begins what may begin now."""
        now = self._clock()
        while self._waste and self._waste[0][0] <= now:
            self._wasted -= self._waste.popleft()[1]
        for hinted in self._hinted.over(now):
            self._let_go(hinted)
        health = self._health
        if (
            now < self._paused_until
            or health.readers_down
            or health.readers_scarce
            or health.reads_are_scarce
        ):
            return
        while self._running < AHEAD_THREADS and not self._loads and (one := self._next()) is not None:
            name, nbytes = one.rest.popleft()
            one.running = True
            self._running += 1
            if not self._transfers.ahead(partial(self._bring, one, name, nbytes)):
                self._ended(one, name, nbytes, there=False, brought=False)
                return

    def _next(self) -> Segment | None:
        """Returns the segment whose payload is fetched next, or None without such a segment or without
        room."""
        while self._parted:
            if (one := self._parted.popleft()).rest:
                return one
        first = next(chain(self._queue.values(), self._later.values()), None)
        if first is None or self._held + self._wasted + first.nbytes > self._budget:
            return None
        self._queue.pop(first.segment, None)
        self._later.pop(first.segment, None)
        first.held = first.nbytes
        self._held += first.held
        return first

    def _ended(self, one: Segment, name: str, nbytes: int, *, there: bool, brought: bool) -> None:
        """A payload of a segment is there now, fetched or not, or did not come."""
        one.running = False
        self._running -= 1
        if there:
            one.missing -= 1
            one.brought += nbytes if brought else 0
        else:
            self._paused_until = self._clock() + _PAUSE_S
            if one.failed:
                self._count("failed", one.nbytes - one.brought)
                one.rest.clear()
                self._give_up(one)
            elif one.wanted and not one.used:
                # The folder or the store may have been busy.
                one.failed = True
                one.rest.appendleft((name, nbytes))
        if one.rest:
            self._parted.append(one)
            return
        self._held -= one.held - one.brought
        one.held = one.brought
        if one.brought:
            self._count("brought", one.brought)
            if one.hinted_until:
                self._count("hinted", one.brought)
        self._tell(one)
        if not one.brought:
            self._give_up(one)
        self._settle(one)

    def _give_up(self, one: Segment) -> None:
        one.waiting.clear()
        self._hinted.discard(one)

    def _tell(self, one: Segment) -> None:
        """Notes for all requests that a segment is in the folder, if all of it is."""
        if not one.missing:
            for tiers in one.waiting.values():
                tiers[one.segment] = "folder"

    # ---- on other threads, without the lock ----------------------------------------------------------

    def _offer(self, waiting: WaitingRequest) -> None:
        """Queues the segments of a request that was passed over, on a call thread: there may be many, and the
        scheduler waits for the lock."""
        assert waiting.found is not None
        space, runs, tiers = waiting.found
        for segment, record in {run.segment: run.record for run in runs}.items():
            near = tiers.get(segment, NEAR[0]) in NEAR
            if record.nbytes > self._budget:
                continue
            with self._lock:
                if self._requests.get(waiting.request_id) is not waiting:
                    return
                if (one := self._segments.get(segment)) is None:
                    if near:
                        continue
                    self._segments[segment] = self._queue[segment] = one = Segment.of(space, segment, record)
                elif self._later.pop(segment, None) is not None:
                    self._queue[segment] = one
                one.waiting[waiting.request_id] = tiers
                waiting.segments.append(one)
                self._tell(one)
        with self._lock:
            self._go_on()

    def _bring(self, one: Segment, name: str, nbytes: int) -> None:
        """Fetches a payload, unless it is there by now."""
        brought = there = False
        try:
            there = self._tier.tier(name, nbytes) in NEAR
            if not there:
                brought = there = self._tier.fill(name, nbytes)
        except KVStoreError as exc:
            log.debug("%s could not be prefetched: %s", name, exc)
            if isinstance(exc, BreakerOpen):
                self._health.probe_payloads()
        except Exception:
            log.exception("%s could not be prefetched: an unexpected failure", name)
        with self._lock:
            self._ended(one, name, nbytes, there=there, brought=brought)
            self._go_on()


def open_prefetch(store: Store) -> NoPrefetch:
    """Returns what fetches ahead for an engine with this store."""
    tier, tiers = store.backends.tier, store.settings.tiers
    budget = _budget(tiers) if tiers is not None else 0
    return Prefetch(store, tier, budget) if tier is not None and budget else NoPrefetch()


def _budget(tiers: Tiers) -> int:
    return min(tiers.prefetch_bytes, int(tiers.fast_capacity * _FOLDER_SHARE))
