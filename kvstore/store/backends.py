"""The parts of a store. kvstore.build puts them together."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvstore.breaker import Breaker
from kvstore.format.keyring import NO_KEYS, Keyring
from kvstore.index.maintenance import FullIndex
from kvstore.index.port import EngineIndex
from kvstore.index.sharding.breakers import ShardBreakers
from kvstore.metrics import Counters
from kvstore.payloads.evidence import Evidence
from kvstore.payloads.port import PayloadStore
from kvstore.payloads.throttle import Throttle
from kvstore.store.trace import TraceRecorder
from kvstore.store.writers.own import Writer
from kvstore.threads.transfers import Crew, Transfers
from schemas.settings import Settings

if TYPE_CHECKING:
    from kvstore.payloads.tiered.store import TieredPayloads


@dataclass(frozen=True)
class Backends:
    """The index, the payloads, the threads and the counters of one store, which never change."""

    settings: Settings
    payloads: PayloadStore
    index: EngineIndex
    #: The same index for maintenance; not behind the breaker.
    maintenance: FullIndex
    transfers: Transfers
    counters: Counters
    #: Payloads that may not be served and are kept for people, and the refusals beside them.
    evidence: Evidence
    #: The keys by which payloads are signed, encrypted and believed.
    keyring: Keyring = NO_KEYS
    clock: Callable[[], float] = time.time
    #: Largest gap to read through, in bytes: so many more bytes cost no more than another read.
    gap_bytes: int = 0
    #: Drops the local copy of a payload whose bytes failed verification. Returns True if reading again may
    #: give other bytes. The field is None if the payload store keeps no copies.
    drop_copy: Callable[[str], bool] | None = None
    #: The same payloads, if they are in two tiers, for metrics of what the fast tier holds.
    tier: TieredPayloads | None = None
    #: Threads for the parts of long reads, or None if the payload store has none.
    crew: Crew | None = None
    #: The payloads' breaker, or None if some payloads can be read while it is open.
    breaker: Breaker | None = None
    #: Rate limit of requests to the bucket that all nodes share; without a bucket it holds nothing back.
    throttle: Throttle | None = None
    #: The index's breaker, or those of its shards.
    index_breaker: Breaker | ShardBreakers | None = None
    #: The recorder of what requests ask for, or None if recording is off.
    trace: TraceRecorder | None = None
    #: The writer of what is saved here.
    writer: Writer = field(default_factory=Writer)
