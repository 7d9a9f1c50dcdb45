"""Asks the index which chunks the store has, in batches off the scheduler's thread.

vLLM asks chunk by chunk, often for hundreds in one step, and asks again in the next step while the answer is
"later". One job takes all questions of a step to the index, at the end of the step.

Everything here belongs to the thread that holds vLLM's lock of the tiers (the scheduler's, unless another
tier is polled between steps) but `_answers`: call threads append to it, that thread takes from it (a deque:
both are atomic). An answer belongs to the batch that asked: if the chunk has been forgotten or given up
meanwhile, the answer is dropped.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from connectors.engine.guard import otherwise
from connectors.tier.planning import block_hash, group_of
from kvstore.index.port import Run
from kvstore.keys import digests
from kvstore.store.space import Space

#: Largest number of times that a chunk is fetched for one request, which finds it gone each time.
_FETCHES = 2
#: Digests in one call: so that no caller occupies a shared index for more than about a millisecond.
_CALL_DIGESTS = 1024

Found = Literal["hit", "miss", "later"]


@dataclass(slots=True)
class _Asked:
    """The state of one chunk."""

    #: The batch that asks for it, or None once the question is answered or given up.
    batch: int | None
    #: Monotonic time at which an open question is given up, or an answer is too old.
    until: float
    run: Run | None = None
    #: Requests that have asked for it.
    asking: set[str] = field(default_factory=set)
    #: Requests for which loading it has failed: they compute it.
    failed: set[str] = field(default_factory=set)
    #: How often it has been fetched, by request.
    fetched: dict[str, int] = field(default_factory=dict)


class Lookups:
    """Asks for one engine's chunks, and remembers the answers for its requests."""

    def __init__(self, space: Space, rows: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`rows` is how many chunks the CPU tier holds."""
        self._space = space
        self._rows = rows
        self._backends = space.backends
        settings = self._backends.settings.kv
        self._deadline_s = settings.match_deadline_s
        self._ttl_s = settings.match_ttl_s
        self._clock = clock
        self._asked: dict[bytes, _Asked] = {}
        #: Requested chunks, by request.
        self._keys_of: dict[str, set[bytes]] = {}
        #: How many different chunks have been fetched, by request.
        self._fetched: dict[str, int] = {}
        self._batch = 0
        self._unsent: list[bytes] = []
        self._answers: deque[tuple[int, Sequence[bytes], Sequence[Run | None]]] = deque()

    def __len__(self) -> int:
        """Returns the number of chunks about which something is known."""
        return len(self._asked)

    def restart(self) -> None:
        """Forget all chunks and requests: vLLM asks for them anew."""
        self._asked.clear()
        self._keys_of.clear()
        self._fetched.clear()
        self._unsent.clear()

    @otherwise(lambda: "miss")
    def look(self, key: bytes, request: str) -> Found:
        """Returns whether the store has a chunk: "later" for `match_deadline_s` at most."""
        if self._answers:
            self._take_answers()
        now = self._clock()
        asked = self._asked.get(key)
        if asked is None or (asked.batch is None and now >= asked.until):
            asked = self._ask(key, asked, now)
        if request not in asked.asking:
            asked.asking.add(request)
            self._keys_of.setdefault(request, set()).add(key)
        if request in asked.failed:
            return "miss"
        if asked.batch is None:
            return "hit" if asked.run is not None and self._may_fetch(asked, request) else "miss"
        if now < asked.until:
            return "later"
        self._backends.counters.miss("deadline", 1)
        self._answer(asked, None)
        return "miss"

    def fetch(self, key: bytes, request: str) -> Run | None:
        """Returns where a chunk is that was a hit a moment ago; counts that it is fetched for the request."""
        asked = self._asked.get(key)
        if asked is None or asked.run is None:
            return None
        if request in asked.asking:
            times = asked.fetched[request] = asked.fetched.get(request, 0) + 1
            self._fetched[request] = self._fetched.get(request, 0) + (times == 1)
        return asked.run

    def _may_fetch(self, asked: _Asked, request: str) -> bool:
        """Returns whether fetching the chunk once more would get the request on.

        vLLM fetches a prefix chunk by chunk, and makes room for the next by evicting what no request has
        begun to load yet. Where the CPU tier is too small for a prefix, or for all that is wanted at once,
        those are the request's own chunks: it would have them fetched and evicted in turn, for ever.
        """
        times = asked.fetched.get(request, 0)
        return times < _FETCHES and (times > 0 or self._fetched.get(request, 0) < self._rows)

    def send(self) -> None:
        """Ask the index for the chunks that were new in this step, which is over."""
        if self._answers:
            self._take_answers()
        if not self._unsent:
            return
        batch, keys = self._batch, self._unsent
        self._batch, self._unsent = batch + 1, []
        if not self._backends.transfers.call(lambda: self._find(batch, keys)):
            self._backends.counters.miss("capacity", len(keys))
            self._answers.append((batch, keys, [None] * len(keys)))

    def failed(self, keys: Collection[bytes]) -> None:
        """Have the requests that asked for these chunks compute them: loading has failed. Other requests may
        try again.

        Without this, a request would get the answer "hit" again and wait for the next failing load, for ever.
        """
        for key in keys:
            if (asked := self._asked.get(key)) is not None:
                asked.failed |= asked.asking
        self.changed(keys)

    def changed(self, keys: Iterable[bytes]) -> None:
        """Have the next request for these ask the index again: what is known about them may be wrong now."""
        for key in keys:
            asked = self._asked.get(key)
            if asked is not None and asked.batch is None:
                asked.until = float("-inf")

    def forget(self, request: str) -> None:
        """Forget the request, which is over."""
        self._fetched.pop(request, None)
        for key in self._keys_of.pop(request, ()):
            asked = self._asked[key]
            asked.fetched.pop(request, None)
            asked.asking.discard(request)
            asked.failed.discard(request)
            if not asked.asking:
                del self._asked[key]

    def _ask(self, key: bytes, asked: _Asked | None, now: float) -> _Asked:
        if asked is None:
            asked = self._asked[key] = _Asked(self._batch, 0.0)
        asked.batch, asked.until, asked.run = self._batch, now + self._deadline_s, None
        self._unsent.append(key)
        return asked

    def _answer(self, asked: _Asked, run: Run | None) -> None:
        asked.batch, asked.run, asked.until = None, run, self._clock() + self._ttl_s

    def _take_answers(self) -> None:
        while self._answers:
            batch, keys, runs = self._answers.popleft()
            for key, run in zip(keys, runs, strict=True):
                asked = self._asked.get(key)
                if asked is not None and asked.batch == batch:
                    self._answer(asked, run)

    def _find(self, batch: int, keys: Sequence[bytes]) -> None:
        """Asks the index for a batch, in several calls, and passes on each answer. Runs on a call thread."""
        counters = self._backends.counters
        for at in range(0, len(keys), _CALL_DIGESTS):
            # Sorted by group, because the digests of one group are packed without a loop.
            part = sorted(keys[at : at + _CALL_DIGESTS], key=group_of)
            runs = self._space.find(_packed(part))
            if runs is not None:
                hits = sum(run is not None for run in runs)
                counters.add("match_calls")
                counters.add("match_blocks_asked", len(part))
                counters.add("match_blocks_found", hits)
                counters.miss("absent", len(part) - hits)
            self._answers.append((batch, part, runs if runs is not None else [None] * len(part)))


def _packed(keys: Sequence[bytes]) -> bytes:
    """Returns the digests of keys, which are sorted by group."""
    out, first = b"", 0
    for at in range(1, len(keys) + 1):
        group = group_of(keys[first])
        if at == len(keys) or group_of(keys[at]) != group:
            out += digests([block_hash(key) for key in keys[first:at]], group)
            first = at
    return out
