"""New weights under a running engine: how the EC connector learns of them.

vLLM tells a KV connector when the engine's caches are reset, which is what happens around a change of
weights in place; it has no such hook for an EC connector. On an engine that has both, the KV connector's
half in the scheduler passes the word on to the EC connector's, in the same process.
"""

from __future__ import annotations

import weakref
from typing import Protocol


class Follower(Protocol):
    """A scheduler's half that changes its namespace with the engine's weights."""

    def enter(self, weights: str | None) -> None:
        """From now on the engine's weights are called so; None: nobody knows, leave the store alone."""


_followers: weakref.WeakSet[Follower] = weakref.WeakSet()


def follow(one: Follower) -> None:
    """Tell `one` of every later change, for as long as it lives."""
    _followers.add(one)


def weights_are(name: str | None) -> None:
    """The weights of this process's engine have this name now; None: an unknown one. Scheduler's thread."""
    for one in list(_followers):
        one.enter(name)
