"""The KV connector's worker half: one object over its memory, its reads, its writes and its audits.

Two kinds of threads run it:
    engine thread     calls everything public; it waits for nothing but the CPU's own copies
    transfer threads  run one job per piece of a load or an audit, and one per segment saved; two of them wait
                      for a device's copies, one for each direction, and no other does
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from connectors.engine.guard import Followers, guarded
from connectors.engine.layout import LocalGroup
from connectors.engine.opening import close
from connectors.engine.shards import Place
from connectors.kv.messages import KVStoreWorkerMetadata
from connectors.kv.metrics import RENAMED, KVStoreStats
from connectors.kv.worker.audits import KVAudits
from connectors.kv.worker.memory import KVMemory
from connectors.kv.worker.reads import KVReads
from connectors.kv.worker.room import Room
from connectors.kv.worker.writes import KVWrites
from connectors.telemetry.metrics import Tally, TierStates
from connectors.weights import Naming
from kvstore.errors import ConfigError
from kvstore.rules.segments import STAGING_BYTES
from kvstore.store.store import Store
from schemas.namespace import Namespace


class KVWorker:
    """One rank's half of the KV connector."""

    def __init__(
        self,
        store: Store,
        groups: Sequence[LocalGroup],
        *,
        segment_blocks: Sequence[int],
        place: Place | None = None,
        by_request: bool = False,
        room: Room | None = None,
    ) -> None:
        """`groups` are this rank's, and `segment_blocks` is how many blocks a segment of each has at most.
        `place` says which rank this is, by default the only one; `by_request` has failed requests reported
        instead of failed blocks; `room` sizes staging where the settings don't."""
        place = place or Place()
        self._store = store
        self._number = place.number
        self._namespace: Namespace | None = None
        self._said_down = self._said_scarce = False
        self._naming: Naming | None = None
        self._tally = Tally(store.counters, RENAMED)
        self._tier_states = TierStates(store, self._tally, f"{{{place.number}}}")
        asked = store.settings.kv.staging_bytes
        self.memory = KVMemory(groups, segment_blocks, asked or room or STAGING_BYTES)
        #: The followers that each hook guards one by one. A load that was sent is started, and its end
        #: reported, bare.
        self.followers = Followers(store.counters)
        self.reads = KVReads(
            store, self.memory, place, self._tally, by_request=by_request, followers=self.followers
        )
        self.writes = self.followers.guard(KVWrites(store, self.memory, place, self._tally), KVWrites.give_up)
        self.audits = self.followers.guard(KVAudits(store, self.memory, place, self._tally))

    def register(self, caches: Mapping[str, torch.Tensor], num_blocks: int) -> None:
        """Take the layers' paged tensors. Raises ConfigError if they aren't what the configuration says."""
        self.memory.register(caches, num_blocks)

    def unregister(self) -> None:
        """Leave the layers' paged tensors alone until `restore`: their memory is about to be unmapped."""
        self.reads.halt()
        self.writes.give_up()

    def restore(self) -> None:
        """Use the layers' paged tensors again: their memory is back, with none of its contents."""
        self.reads.resume()

    def use(self, namespace: Namespace, writer: str = "") -> None:
        """Enter the namespace that the scheduler half has named; all that follows belongs to it, and what is
        saved is written by `writer`. Raises ConfigError if its groups are not this rank's."""
        if writer and writer != self._store.backends.writer.name:
            self._store.backends.writer.adopt(writer)
        if self._namespace == namespace:
            return
        mine = [(group.page.kind, group.page.block_tokens, group.page.dtype) for group in self.memory.groups]
        if mine != [(spec.kind, spec.block_tokens, spec.dtype) for spec in namespace.groups]:
            raise ConfigError("kvstore: scheduler and worker disagree on the KV cache's layout")
        space = self._store.open(namespace)
        self.reads.use(space)
        self.writes.use(space)
        self.audits.use(space)
        self._namespace = namespace

    def name_weights(self, name: str) -> None:
        """Name this rank's weights, with the next report. Raises ValueError if `name` can't be one."""
        self._naming = Naming.now(name)

    def take_report(self) -> KVStoreWorkerMetadata | None:
        """Returns the news for the scheduler half, or None without news."""
        down, scarce = self._troubles()
        named, self._naming = self._naming, None
        parts = (self.reads, self.writes, self.audits)
        said = (down, scarce) == (self._said_down, self._said_scarce)
        if said and named is None and not any(part.has_news for part in parts):
            return None
        report = KVStoreWorkerMetadata()
        for part in parts:
            part.tell(report)
        if down != self._said_down:
            report.payloads_down[self._number] = self._said_down = down
        if scarce != self._said_scarce:
            report.reads_scarce[self._number] = self._said_scarce = scarce
        if named is not None:
            report.weights[self._number] = named
        return report

    @guarded((False, False))
    def _troubles(self) -> tuple[bool, bool]:
        """Returns whether payloads can't be read now, and whether the store asks for fewer reads."""
        health = self._store.health
        return not health.payloads_answer(), health.reads_are_scarce

    @guarded(None)
    def take_stats(self) -> KVStoreStats | None:
        """Returns the statistics since the last call, or None without any."""
        self._tier_states.tell()
        report = self._tally.take(
            self.reads.under_way > 0 or self.memory.saving or self.writes.waiting_blocks > 0, self._gauges
        )
        return None if report is None else KVStoreStats(report)

    def _gauges(self) -> dict[str, float]:
        queued = self._store.transfers.queued
        values: dict[str, float] = {
            "queued_reads": queued["reads"],
            "queued_writes": queued["writes"],
            "queued_write_bytes": queued["write_bytes"],
            "payloads_down": int(self._said_down),
            "waiting_blocks": self.writes.waiting_blocks,
        }
        values |= {f"{name}_staging_used_bytes": used for name, used in self.memory.used_bytes.items()}
        return {f"{name}{{{self._number}}}": value for name, value in values.items()}

    def shutdown(self) -> None:
        """Let queued saves finish (bounded), then close the store of this half."""
        close(self._store, "worker")
