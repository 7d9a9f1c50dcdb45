"""ShardBreakers: a breaker for each shard, so that one whose node is down costs no other's hits."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from kvstore.breaker import Breaker
from kvstore.index.sharding.names import place_of
from kvstore.keys import NamespaceId


class ShardBreakers:
    """The breakers in front of an index in shards. Safe for threads.

    Shards with one number among equally many have one breaker, whatever namespace they are of: they have one
    range of slots, and so, as a rule, one node. What lies in one shard has a breaker for all of it.
    """

    def __init__(self, make: Callable[[str], Breaker]) -> None:
        """`make` makes a breaker of a name for messages."""
        self._make = make
        self._known = {(1, 0): make("index")}

    @property
    def is_closed(self) -> bool:
        """Tells whether some calls pass, not only probes."""
        return any(breaker.is_closed for breaker in list(self._known.values()))

    def guard(self, name: NamespaceId, *, may_probe: bool = True) -> AbstractContextManager[None]:
        """Guards one call to a shard, as Breaker.guard does."""
        place = place_of(name)
        breaker = self._known.get(place)
        if breaker is None:
            shards, number = place
            # Of two threads that come first at a time, both use the one that is put there first.
            breaker = self._known.setdefault(place, self._make(f"index shard {number} of {shards}"))
        return breaker.guard(may_probe=may_probe)
