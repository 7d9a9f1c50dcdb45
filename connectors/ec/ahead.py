"""Fetches the stored items of requests that wait for their turn to the node's folder.

From there they are read, verified and staged as always when the scheduler comes to the request: what is
fetched ahead takes no room in the staging folder, and nothing is promised for it. The engine's KV connector
tells which requests wait (connectors.ahead.queued); without one nothing is fetched ahead.
"""

from __future__ import annotations

from collections.abc import Sequence

from connectors.ahead.prefetch import NoPrefetch, open_prefetch
from kvstore.keys import ContentKey, digest
from kvstore.store.space import Space
from kvstore.store.store import Store


class Ahead:
    """The requests that wait, as far as something is fetched for them. Belongs to the scheduler's thread."""

    def __init__(self, store: Store, *, consumer: bool) -> None:
        self._transfers = store.transfers
        self._prefetch = open_prefetch(store) if consumer else NoPrefetch()
        self._requests: set[str] = set()

    def step(self) -> None:
        """The scheduler has decided a step."""
        self._prefetch.step()

    def bring(self, request_id: str, space: Space, keys: Sequence[ContentKey]) -> None:
        """Have items fetched for a request that the scheduler has passed over, as far as they are stored."""
        self._requests.add(request_id)
        self._prefetch.arrived(request_id)
        self._prefetch.step()

        def look() -> None:
            found = space.find(b"".join(map(digest, keys))) or []
            runs = [run for run in found if run is not None]
            self._prefetch.answered(request_id, space, runs, space.tiers(runs))

        self._transfers.call(look)

    def __bool__(self) -> bool:
        """Returns whether there are any."""
        return bool(self._requests)

    def come_to(self, request_id: str, *, needs: bool) -> None:
        """The scheduler has come to a request: its items are looked up and staged now, if it `needs` any."""
        if request_id in self._requests:
            self._requests.discard(request_id)
            (self._prefetch.taken if needs else self._prefetch.gone)(request_id)

    def gone(self, request_id: str) -> None:
        """A request has ended."""
        self.come_to(request_id, needs=False)

    def restart(self) -> None:
        """Forget all requests: their items belong to former weights."""
        self._requests.clear()
        self._prefetch.restart()
