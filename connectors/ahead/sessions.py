"""Brings what sessions have stored to the node's folder, where a request's hint asks for it.

A gateway knows that a conversation goes on before its next request comes: a tool is about to return. It sends
a small request of that session, with the hint `prefetch`, to the engine that it is going to ask. The engine
then fetches (connectors.ahead.prefetch) the segments that the index lists as that session's alone. It also
fetches the match of the request itself, unless that is loaded already.

The request that carries the hint does not wait for the fetch. The index is asked only once the scheduler
knows what that request loads, and no fetch begins while the request loads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from connectors.ahead.prefetch import NoPrefetch, Prefetch
from connectors.engine.sessions.hints import Hints
from kvstore.index.port import Run
from kvstore.keys import SessionId
from kvstore.store.space import Space
from kvstore.store.store import Store

#: Returns the runs that a request was matched with, or None while the answer is out.
Matched = Callable[[], Iterable[Run] | None]


class HintedSessions:
    """Requests whose hints are still to be followed. Call `use` before anything else.

    Belongs to the scheduler's thread, but for the calls of the index."""

    def __init__(self, store: Store, prefetch: NoPrefetch) -> None:
        self._store = store
        self._prefetch = prefetch
        self._on = isinstance(prefetch, Prefetch) and store.settings.kv.load != "never"
        self._requests: dict[str, tuple[SessionId, Matched]] = {}

    def use(self, space: Space) -> None:
        """Bring what is in this namespace from now on."""
        self._space = space

    def __len__(self) -> int:
        return len(self._requests)

    def arrived(self, request_id: str, hints: Hints, matched: Matched) -> None:
        """A request has come, and is being looked up if it is to be loaded."""
        # A session that ends asks for nothing more, so a fetch would be wasted.
        if self._on and hints.prefetch and not hints.end:
            self._requests[request_id] = hints.session, matched

    def step(self) -> None:
        """Follow the hints of all requests that this step has started or passed over and that have their
        match."""
        for request_id, (_, matched) in list(self._requests.items()):
            if matched() is not None:
                self.gone(request_id)

    def gone(self, request_id: str) -> None:
        """A request has ended, perhaps before its match was there: follow its hint."""
        if (one := self._requests.pop(request_id, None)) is None:
            return
        session, matched = one
        bring = partial(self._bring, self._space, session, list(matched() or ()))
        if not self._store.transfers.errand(0, bring):
            self._store.counters.add("session_failures")

    def restart(self) -> None:
        """Forget all requests: their matches are void."""
        self._requests.clear()

    def _bring(self, space: Space, session: SessionId, matched: list[Run]) -> None:
        runs = [*matched, *space.owned(session)]
        if space is not self._space:
            return  # void since the caches were reset
        self._prefetch.hinted(space, runs, space.tiers(runs))
