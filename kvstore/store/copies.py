"""Copies of erased payloads: each node's fast tier deletes them by itself.

An erasure (`cache-admin erase`) reaches the index and the shared payloads. A node's own folder may hold
copies, and payloads that it has yet to upload. So every process with such a folder looks from time to time
for forbidden times in the folder's namespaces. If there are any, it walks through the folder's payloads. It
deletes a payload, from the shared store as well, if its segment isn't visible and its own header names a
forbidden salt and time.

It walks again until a walk began after the last forbidden time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from kvstore.errors import KVStoreError
from kvstore.format.keyring import Keyring
from kvstore.index.contract import is_forbidden
from kvstore.index.maintenance import FullIndex
from kvstore.keys import NO_SALT, NamespaceId, SaltId, parse_payload_name
from kvstore.payloads.port import Listed
from kvstore.verify.payloads import read_header

if TYPE_CHECKING:
    from kvstore.payloads.tiered.store import TieredPayloads

log = logging.getLogger(__name__)

#: Payloads that one step looks at, and seconds that one call takes, but for its last step.
_STEP, _BUDGET_S = 256, 0.5


class ErasedCopies:
    """Goes through one node's fast tier. Safe for threads; one at a time goes on."""

    def __init__(self, tier: TieredPayloads, index: FullIndex, keyring: Keyring) -> None:
        self._tier = tier
        self._index = index
        self._keyring = keyring
        self._turn = threading.Lock()
        # The lock guards the fields below it.
        #: Namespace -> the forbidden times with which its last walk has dealt.
        self._done: dict[NamespaceId, Mapping[SaltId, float]] = {}
        self._steps: Iterator[None] | None = None

    def go_on(self) -> bool:
        """Goes on for about half a second. Returns whether there is more to do. Never raises."""
        if not self._turn.acquire(blocking=False):
            return False
        until = time.monotonic() + _BUDGET_S
        try:
            self._steps = self._steps or self._walk()
            for _ in self._steps:
                if time.monotonic() >= until:
                    return True
            self._steps = None
        except KVStoreError as exc:
            self._steps = None
            log.debug("the look for copies of erased payloads is put off: %s", exc)
        except Exception:
            self._steps = None
            log.exception("the look for copies of erased payloads failed")
        finally:
            self._turn.release()
        return False

    def _walk(self) -> Iterator[None]:
        for namespace in self._tier.namespaces():
            forbidden = self._index.forbidden(namespace)
            yield
            if not forbidden or self._done.get(namespace) == forbidden:
                continue
            began = self._index.now(namespace)
            files = self._tier.copies.list(f"{namespace}/")
            while some := list(islice(files, _STEP)):
                self._drop_erased(namespace, some, forbidden, began)
                yield
            if began > max(forbidden.values()):
                self._done[namespace] = forbidden

    def _drop_erased(
        self, namespace: NamespaceId, files: Sequence[Listed], forbidden: Mapping[SaltId, float], now_s: float
    ) -> None:
        named = [(one, place[1]) for one in files if (place := parse_payload_name(one.name))]
        states = self._index.states(namespace, [segment for _, segment in named])
        hidden = [one for (one, _), state in zip(named, states, strict=True) if state != "visible"]
        erased = [one.name for one in hidden if self._is_erased(one, forbidden, now_s)]
        if erased:
            self._tier.delete(erased)
            log.info("%d payloads that were erased elsewhere are deleted here", len(erased))

    def _is_erased(self, file: Listed, forbidden: Mapping[SaltId, float], now_s: float) -> bool:
        """Tells whether a payload's own header says that it was computed before its salt was forbidden."""
        try:
            header = read_header(self._tier.copies, self._keyring, file.name, file.nbytes)
        except KVStoreError:
            # A header that can't be read says nothing of its salt. Where all of the namespace is forbidden,
            # that says enough.
            return NO_SALT in forbidden
        return is_forbidden(forbidden, header.salt, header.meta.created_s, now_s)
