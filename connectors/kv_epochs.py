"""To which namespace an engine's KV blocks belong, from reset to reset.

vLLM resets a connector's cache when the weights change in place, before or after: an update by a trainer, a
sleep that drops them, a reload. What the store holds under the engine's namespace is then not the engine's
any more, nor may what it computes from now on be stored there. So after a reset

    if no block of the engine's own cache is left
        the engine goes on under a namespace of which the weights have a name that nobody else has, or, with
        identity.after_reset = "nothing", without the store. Whoever changed the weights may name them; then
        it goes on under that name's (connectors.weights)
    if some are left (vLLM's own reset has failed, and says so to its caller)
        they, and all that is computed from them, belong to no weights at all: the store is left alone until a
        reset finds none

vLLM's reset succeeds only if no request holds a block, so after a clean one there is no request of which
something was computed before it. That is the proof that nothing old gets a new name (docs/adr/0017).

Nobody else reads a namespace that nobody has named, so it is emptied when the engine leaves it. On the
scheduler's thread.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

from connectors.weights import UNNAMED, Naming, unnamed
from kvstore.errors import KVStoreError
from kvstore.store import Space, Store

log = logging.getLogger(__name__)

#: Namespaces that this engine has left and may have to empty once more: of what was being saved just then.
_LEFT = 4


class Epochs:
    """Of one engine."""

    def __init__(
        self,
        store: Store,
        space: Space,
        *,
        holds_blocks: Callable[[], bool] | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`holds_blocks`: whether anything is left in the engine's own cache; None if that can't be known."""
        self._store = store
        self._holds_blocks = holds_blocks
        self._wall = wall
        self._first = space.namespace
        self._space: Space | None = space
        #: When the last reset was, if it was a clean one.
        self._clean_at: float | None = None
        #: When something was first computed since then.
        self._ran_at: float | None = None
        self._left: deque[Space] = deque(maxlen=_LEFT)

    @property
    def space(self) -> Space | None:
        """Where to look and to save now; None: nowhere."""
        return self._space

    def reset(self) -> None:
        """The engine forgets its KV blocks; its weights may have changed, or are about to."""
        clean = self._holds_blocks is not None and not self._holds_blocks()
        self._clean_at = self._wall() if clean else None
        self._ran_at = None
        if clean and self._store.settings.identity.after_reset == "unnamed":
            self._enter(unnamed())
            return
        self._leave()
        if clean:
            log.warning("reset: the store is left alone until the engine's weights are named")
        else:
            log.warning("reset: blocks are in use, so the store is left alone until a reset finds none")

    def name(self, naming: Naming) -> bool:
        """All ranks say what the weights are called now; whether that is to be believed.

        Once after every clean reset, and not if it was said before that, nor if something was computed since:
        the one or the other may be of older weights.
        """
        weights = naming.name or self._first.weights
        if self._space is not None and self._space.namespace.weights == weights:
            return True
        if self._clean_at is None:
            log.error("weights were named %r without a clean reset before; ignored", naming.name)
            return False
        if naming.at_s <= self._clean_at:
            log.error("weights were named %r before the last reset; name them after it", naming.name)
            return False
        if self._ran_at is not None and self._ran_at <= naming.at_s:
            # Perhaps with the weights that were there before these.
            log.error("requests ran before weights were named %r; reset, then name them", naming.name)
            return False
        self._clean_at = None
        self._enter(weights)
        return True

    def ran(self) -> None:
        """Something is computed with this step."""
        if self._clean_at is not None and self._ran_at is None:
            self._ran_at = self._wall()

    def _enter(self, weights: str) -> None:
        namespace = self._first.model_copy(update={"weights": weights})
        self._leave()
        block_bytes = max(spec.slot_bytes for spec in namespace.groups)
        self._space = self._store.open(namespace, block_bytes=block_bytes)
        self._space.register_soon()
        log.info("the engine's weights are now called %s: namespace %s", weights, self._space.id)

    def _leave(self) -> None:
        space, self._space = self._space, None
        if space is not None and space.namespace.weights.startswith(UNNAMED):
            self._left.append(space)
        # Those left earlier, too: something that was being saved then may have arrived since.
        self.empty_left()

    def close(self) -> None:
        """The engine ends, and with it the use of what nobody has named."""
        self._leave()

    def empty_left(self) -> None:
        """Empty what was left, on a thread that nobody waits for."""
        for space in self._left:
            if not self._store.transfers.errand(0, lambda s=space: _empty(s)):  # type: ignore[misc]
                return


def _empty(space: Space) -> None:
    try:
        space.store.forget(space.id)
    except KVStoreError as exc:
        log.warning("namespace %s of unnamed weights could not be emptied: %s", space.id, exc)
