"""The store: opens namespaces over the backends, and closes them.

Order of an eviction: the record goes first and the payload after `grace_s`, so that a match that was given
out can still be read. A segment that fails verification is evicted at once, in the same way.
"""

from __future__ import annotations

import logging
from typing import Final, Self

from kvstore.rules.segments import typical_block_bytes
from kvstore.store.backends import Backends
from kvstore.store.copies import ErasedCopies
from kvstore.store.health import Health
from kvstore.store.quarantine import Quarantine
from kvstore.store.rounds import Rounds
from kvstore.store.space import Space
from schemas.namespace import Namespace

log = logging.getLogger(__name__)


class Store:
    """One process's view of the cache. Use kvstore.build.open_store. Safe for many threads."""

    def __init__(self, backends: Backends) -> None:
        self.backends: Final = backends
        self.settings: Final = backends.settings
        self.payloads: Final = backends.payloads
        self.index: Final = backends.index
        self.maintenance: Final = backends.maintenance
        self.transfers: Final = backends.transfers
        self.counters: Final = backends.counters
        self.clock: Final = backends.clock
        self.quarantine: Final = Quarantine(backends)
        self.health: Final = Health(backends)
        self.rounds: Final = Rounds(backends)
        if backends.tier is not None:
            copies = ErasedCopies(backends.tier, backends.maintenance, backends.keyring)
            backends.tier.chore = copies.go_on

    def open(self, namespace: Namespace, *, block_bytes: int | None = None) -> Space:
        """Opens one namespace. No I/O: the index learns of it when it can be reached.

        `block_bytes` is the raw size of a typical block of all ranks, by which the index is sized; None: as
        the namespace says.
        """
        block_bytes = typical_block_bytes(namespace) if block_bytes is None else block_bytes
        expected = max(1, self.settings.capacity_bytes // max(1, block_bytes))
        space = Space(self.backends, self.quarantine, self.health, self.rounds, namespace, expected)
        if self.backends.trace is not None:
            self.backends.trace.describe(space.id, namespace, block_bytes)
        return space

    def close(self) -> None:
        """Gives queued saves `transfers.drain_s` to finish, then releases everything. Idempotent."""
        if not self.transfers.close():
            log.warning("closed with saves still queued; they are lost from the cache")
        if self.backends.trace is not None:
            self.backends.trace.close()
        if self.backends.crew is not None:
            self.backends.crew.close()
        self.index.close()
        self.payloads.close()
        self.backends.evidence.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
