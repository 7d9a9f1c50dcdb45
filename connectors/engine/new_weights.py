"""Tells the EC connector of new weights under a running engine.

vLLM has a hook that tells a KV connector of a reset of the engine's caches. Such a reset comes with a change
of weights in place. It has no such hook for an EC connector. On an engine with both, the KV connector's
scheduler half passes the name of the weights on, in the same process.
"""

from __future__ import annotations

import logging
import weakref
from typing import Protocol

from kvstore.errors import KVStoreError
from kvstore.store.space import Space

log = logging.getLogger(__name__)


class Follower(Protocol):
    """A scheduler half that changes its namespace with the engine's weights."""

    def enter(self, weights: str | None) -> None:
        """Use the namespace of the weights of this name from now on. Without a name (None), leave the store
        alone."""


_followers: weakref.WeakSet[Follower] = weakref.WeakSet()


def follow(one: Follower) -> None:
    """Register `one` for every later change, for as long as it lives."""
    _followers.add(one)


def weights_are(name: str | None) -> None:
    """Tell all followers the name of the engine's weights, or None if they have none. Runs on the scheduler's
    thread."""
    for one in list(_followers):
        one.enter(name)


def empty(space: Space) -> None:
    """Empty the namespace of unnamed weights, which the engine has left. Blocks on the index."""
    try:
        space.forget()
    except KVStoreError as exc:
        log.warning("namespace %s of unnamed weights could not be emptied: %s", space.id, exc)
