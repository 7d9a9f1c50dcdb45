"""Tells to which namespace an engine's KV blocks belong, from reset to reset.

vLLM resets a connector's cache when the weights change in place, before it or after: at an update by a
trainer, a sleep that drops them, a reload. Stored blocks of the engine's namespace then don't fit the engine
any more. Blocks that it computes from now on must not be stored there. So after a reset

    if no block of the engine's own cache is left
        the engine goes on in a namespace whose weights have a name that no other engine uses, or, with
        identity.after_reset = "nothing", without the store. The trainer that changed the weights may name
        them; then the engine goes on in the namespace of that name (connectors.weights)
    if some are left (vLLM's own reset has failed, and its caller is told)
        they, and all that is computed from them, belong to no weights at all: the store is left alone until a
        reset finds none

vLLM's reset succeeds only if no request holds a block, so after a clean one no request has anything that was
computed before it. That is the proof that nothing old gets a new name (docs/adr/0017).

No other engine reads the namespace of unnamed weights, so this engine empties it on leaving. Everything here
belongs to the scheduler's thread.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping

from connectors.engine.new_weights import empty
from connectors.weights import UNNAMED, AgreedName, Naming, agreed, unnamed
from kvstore.store.space import Space
from kvstore.store.store import Store

log = logging.getLogger(__name__)

#: Most namespaces that this engine has left and may have to empty once more: saves under way may have arrived
#: there since.
_LEFT = 4


class CurrentNamespace:
    """Follows one engine's namespace through resets and new weights."""

    def __init__(
        self,
        store: Store,
        space: Space,
        *,
        ranks: int = 1,
        holds_blocks: Callable[[], bool] | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """`ranks` is how many workers tell the name of their weights; `holds_blocks` returns whether anything
        is left in the engine's own cache, and is None if that can't be known."""
        self._store = store
        self._ranks = ranks
        self._namings: dict[int, Naming] = {}
        self._holds_blocks = holds_blocks
        self._clock = clock
        self._given_up = False
        self._first = space.namespace
        self._space: Space | None = space
        #: Weights whose namespaces this engine leaves alone for good.
        self._distrusted: set[str] = set()
        #: When the last reset was, if it was a clean one and its weights have not been named yet.
        self._clean_ns: int | None = None
        #: When something was first computed since then.
        self._ran_ns: int | None = None
        self._left: deque[Space] = deque(maxlen=_LEFT)

    @property
    def space(self) -> Space | None:
        """Returns the namespace to load from and save to now; None: the store is left alone."""
        return self._space

    def reset(self) -> None:
        """Follow a reset: the engine forgets its KV blocks; its weights may have changed, or are about to."""
        if self._given_up:
            return
        self._namings.clear()
        clean = self._holds_blocks is not None and not self._holds_blocks()
        self._clean_ns = self._clock() if clean else None
        self._ran_ns = None
        if clean and self._store.settings.identity.after_reset == "unnamed":
            self._enter(unnamed())
            return
        self._leave()
        if clean:
            log.warning("reset: the store is left alone until the engine's weights are named")
        else:
            log.warning("reset: blocks are in use, so the store is left alone until a reset finds none")

    def distrust(self) -> None:
        """Leave the namespace alone as long as this engine lives: what it holds isn't what the engine
        computes, and which of both is wrong can't be known here."""
        assert self._space is not None
        self._distrusted.add(self._space.namespace.weights)
        log.error(
            "namespace %s holds blocks that are not what this engine computes: the engine neither loads from "
            "it nor saves to it any more. Restart the engine once the cause is found",
            self._space.id,
        )
        self._leave()

    def give_up(self, why: str) -> None:
        """Leave the store alone as long as this engine lives, whatever is reset or named: `why` says why."""
        log.error("%s: the engine leaves the store alone. Restart it", why)
        self._given_up, self._clean_ns = True, None
        self._leave()

    def told(self, namings: Mapping[int, Naming]) -> bool | None:
        """Take the names that some ranks got for their weights, until all ranks agree on one.

        Returns the result of `name` then, or None before that."""
        self._namings.update(namings)
        naming = agreed(self._namings, self._ranks)
        if naming is None:
            return None
        self._namings.clear()
        return self.name(naming)

    def name(self, naming: AgreedName) -> bool:
        """Take the name on which all ranks agree. Returns whether it is believed.

        A name is believed once after every clean reset, but not if it was given before the reset, nor if
        something was computed since: the name, or what was computed, may belong to older weights.
        """
        weights = naming.name or self._first.weights
        if not naming.name and weights.startswith(UNNAMED):
            # It had no name at the start either, and what was under that one is emptied.
            weights = unnamed()
        if self._space is not None and self._space.namespace.weights == weights:
            return True
        if weights in self._distrusted:
            log.error("weights were named %r, whose namespace this engine leaves alone; ignored", naming.name)
            return False
        if self._clean_ns is None:
            log.error("weights were named %r without a clean reset before; ignored", naming.name)
            return False
        if naming.at_ns is None:
            log.error(
                "weights were named %r on other machines only, whose clocks can't tell whether that came "
                "after the last reset; ignored. Run a worker beside the scheduler",
                naming.name,
            )
            return False
        if naming.at_ns <= self._clean_ns:
            log.error("weights were named %r before the last reset; name them after it", naming.name)
            return False
        if self._ran_ns is not None and self._ran_ns <= naming.at_ns:
            # They may have run with the weights that were there before these.
            log.error("requests ran before weights were named %r; reset, then name them", naming.name)
            return False
        self._clean_ns = None
        self._enter(weights)
        return True

    def ran(self) -> None:
        """Record that something is computed with this step."""
        if self._clean_ns is not None and self._ran_ns is None:
            self._ran_ns = self._clock()

    def _enter(self, weights: str) -> None:
        namespace = self._first.model_copy(update={"weights": weights})
        self._leave()
        self._space = self._store.open(namespace)
        self._space.register_soon()
        log.info("the engine's weights are now called %s: namespace %s", weights, self._space.id)

    def _leave(self) -> None:
        space, self._space = self._space, None
        if space is not None and space.namespace.weights.startswith(UNNAMED):
            self._left.append(space)
        # Namespaces that were left earlier are emptied too: saves that were under way may have arrived since.
        self.empty_left()

    def close(self) -> None:
        """Leave the namespace for good: the engine ends, and with it the use of unnamed weights."""
        self._leave()

    def empty_left(self) -> None:
        """Empty the namespaces that were left, on a thread for errands."""
        for space in self._left:
            if not self._store.transfers.errand(0, lambda s=space: empty(s)):  # type: ignore[misc]
                return
