"""Tells the EC connector of new weights under a running engine.

vLLM tells a KV connector when the engine's caches are reset, which is what happens around a change of
weights in place; it has no such hook for an EC connector. On an engine that has both, the KV connector's
scheduler half passes the name of the weights on to the EC connector's, in the same process.
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
        """Use the namespace of the weights of this name from now on; None: unnamed, leave the store alone."""


_followers: weakref.WeakSet[Follower] = weakref.WeakSet()


def follow(one: Follower) -> None:
    """Register `one` to be told of every later change, for as long as it lives."""
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
