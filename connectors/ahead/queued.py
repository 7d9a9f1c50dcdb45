"""Tells the EC connector of requests that wait for their turn, so that it can fetch their items meanwhile.

vLLM tells a KV connector of every request that arrives; an EC connector hears of one only when the scheduler
comes to it. On an engine that has both, the KV connector's scheduler half passes it on in the same process,
once the length of the load is known: an item in that part is not needed at all.

Everything here belongs to the scheduler's thread.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Protocol

from connectors.engine.step import RequestView


class QueueListener(Protocol):
    """A scheduler half that wants to know which requests with items wait."""

    def queued(self, request: RequestView, tokens: int) -> None:
        """A request waits, of whose prompt the first `tokens` tokens are going to be loaded."""


_listeners: weakref.WeakSet[QueueListener] = weakref.WeakSet()


def listen(one: QueueListener) -> None:
    """Register `one` for every later request, for as long as it lives."""
    _listeners.add(one)


class QueuedItems:
    """The requests with items that are still to be reported."""

    def __init__(self) -> None:
        self._requests: dict[str, tuple[RequestView, Callable[[], int | None]]] = {}

    def arrived(self, request: RequestView, tokens: Callable[[], int | None]) -> None:
        """A request has come. `tokens` returns how many will be loaded, None as long as that isn't known."""
        if request.mm_features and len(_listeners):
            self._requests[request.request_id] = request, tokens

    def gone(self, request_id: str) -> None:
        """A request waits no more: it starts or has ended."""
        self._requests.pop(request_id, None)

    def restart(self) -> None:
        """Tell of none of the requests that wait now."""
        self._requests.clear()

    def step(self) -> None:
        """Report the requests that this step has passed over, as soon as they have their match."""
        for request, tokens in list(self._requests.values()):
            if (count := tokens()) is not None:
                self.gone(request.request_id)
                for one in list(_listeners):
                    one.queued(request, count)
