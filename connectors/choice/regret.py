"""Says by how much what was done with a request was worse than what could have been done: its regret.

A request of which the store has blocks that its engine lacks loads them, computes them, or both.

    took     from the plan of the load until it has ended, and what computing the rest is expected to take;
             or, where nothing is loaded, from the decision until the step with the last one has ended
    regret   what it took, less the better of computing all and loading all: the one that was done is known,
             the other is what was expected of it when it was decided. Never less than 0

So a slow network shows at once: a load takes longer than computing would have. A network that has become fast
does not show: while nothing is loaded, only estimates say so. That is why a few requests go the other way
(connectors.kv.audit). One load in `kv.audit_every` is declined, and one in as many loads that don't seem to
pay is made. The measured time of such a request is held against the decision:

    measured regret   what was expected of the decided way, less what the other one took

With `kv.objective: throughput` a second of waiting for a load counts less, here as in the decision. Measured
times are wall-clock times, so they include a batch's other requests. Expected times come from recent
measurements. Everything here belongs to the scheduler's thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from connectors.engine.guard import otherwise
from kvstore.rules.weighed import Weighed

#: Is told of a regret in seconds, what computing all takes in seconds, and whether it was measured.
Regretted = Callable[[float, float, bool], None]


class Followed(Protocol):
    """The properties of a request that regret depends on; some are read step after step."""

    @property
    def request_id(self) -> str: ...

    @property
    def num_computed_tokens(self) -> int: ...


@dataclass(slots=True)
class _Computing:
    """A request that computes what the store has."""

    request: Followed
    weighed: Weighed
    #: Whether loading was decided.
    to_load: bool
    #: All tokens up to here are in the store.
    stop_tokens: int
    began: float
    #: Steps that must end before the last block is there; 0: it isn't scheduled yet.
    steps: int = 0


@dataclass(slots=True)
class _Loading:
    """A request whose load is under way."""

    weighed: Weighed
    #: Whether loading was decided.
    to_load: bool
    began: float


class Regrets:
    """Follows the requests of one engine that had a choice."""

    def __init__(
        self, tell: Regretted, wait: float = 1.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`wait` is what a second of waiting for a load counts: one of connectors.choice.decision.WAIT."""
        self._tell = tell
        self._wait = wait
        self._clock = clock
        self._computing: dict[str, _Computing] = {}
        self._loading: dict[str, _Loading] = {}
        #: Requests whose last block is computed by steps under way.
        self._ending: dict[str, _Computing] = {}

    @property
    @otherwise(bool)
    def computing(self) -> bool:
        """Whether some request computes what the store has: only then steps need to be reported."""
        return bool(self._computing)

    @property
    def held(self) -> int:
        """Returns how many requests are followed."""
        return len(self._computing) + len(self._loading) + len(self._ending)

    def computes(self, request: Followed, weighed: Weighed, stop_tokens: int, *, to_load: bool) -> None:
        """A request computes all `stop_tokens` that the store has; `to_load`: though it should load."""
        self._computing[request.request_id] = _Computing(
            request, weighed, to_load, stop_tokens, self._clock()
        )

    def loads(self, request_id: str, weighed: Weighed, *, to_load: bool) -> None:
        """A request loads; `to_load` is False if it should compute."""
        self._loading[request_id] = _Loading(weighed, to_load, self._clock())

    def loaded(self, request_id: str, tokens: int) -> None:
        """A load has ended, and brought so many tokens."""
        if (one := self._loading.pop(request_id, None)) is None:
            return
        weighed, took = one.weighed, self._wait * (self._clock() - one.began)
        took += weighed.compute_s * max(0, weighed.tokens - tokens) / weighed.tokens
        if one.to_load:
            self._tell(max(0.0, took - weighed.compute_s), weighed.compute_s, False)
        else:
            self._tell(max(0.0, weighed.compute_s - took), weighed.compute_s, True)

    def step(self, scheduled: Mapping[str, int], under_way: int) -> None:
        """A step is sent that computes `scheduled` tokens by request, the last of `under_way` steps."""
        for request_id in self._computing.keys() & scheduled.keys():
            one = self._computing[request_id]
            if one.request.num_computed_tokens + scheduled[request_id] >= one.stop_tokens:
                one.steps = under_way
                self._ending[request_id] = self._computing.pop(request_id)

    def step_ended(self) -> None:
        """The oldest step under way has ended."""
        if not self._ending:
            return
        for request_id, one in list(self._ending.items()):
            one.steps -= 1
            if one.steps <= 0:
                del self._ending[request_id]
                self._computed(one)

    def _computed(self, one: _Computing) -> None:
        weighed, took = one.weighed, self._clock() - one.began
        if one.to_load:
            self._tell(max(0.0, self._wait * weighed.load_s - took), took, True)
        else:
            self._tell(max(0.0, took - self._wait * weighed.load_s), took, False)

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended or starts over."""
        for followed in (self._computing, self._loading, self._ending):
            followed.pop(request_id, None)

    def restart(self) -> None:
        """Forget all: what they compute or load belongs to a namespace that the engine has left."""
        for followed in (self._computing, self._loading, self._ending):
            followed.clear()
