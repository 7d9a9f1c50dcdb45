"""warm: bring segments into this node's fast tier before requests ask for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvstore.admin.cache import Cache
from kvstore.admin.parallel import for_each
from kvstore.admin.plans import LeftOut, Plan, Planned, Tally
from kvstore.admin.progress import Progress, Silent
from kvstore.admin.tier import FastTier, tiers_of
from kvstore.catalogue import Listing
from kvstore.errors import KVStoreError, TransientError
from kvstore.keys import payload_name
from schemas.base import redact
from schemas.settings import Settings
from schemas.transfers import Ended, WarmReport

#: Share of the tier's capacity that is filled: engines go on saving meanwhile, and what they save must not
#: push out what was fetched a moment ago.
_FILL_TO = 0.95
#: Fetches that fail in a row because the store does, before warming gives up.
_PATIENCE = 5


def warming_bytes(settings: Settings, max_bytes: int | None) -> int:
    """How much a plan to warm may hold. Raises ConfigError without tiers."""
    room = int(tiers_of(settings).fast_capacity * _FILL_TO)
    return room if max_bytes is None else min(room, max_bytes)


def warm(
    cache: Cache,
    plan: Plan,
    tier: FastTier,
    *,
    jobs: int = 4,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> WarmReport:
    """Fetch the planned segments, `jobs` at a time.

    Ctrl-C and a failing store end it, and the report says so; what was fetched stays. Raises ConfigError
    without tiers, and what asking for the tier's usage raises.
    """
    tiers = tiers_of(cache.settings)
    run = _Warm(cache, plan, tier, progress or Silent())
    before, began = tier.usage().nbytes, time.monotonic()
    if not dry_run:
        run.all(jobs)
    return WarmReport(
        dry_run=dry_run,
        ended=run.ended,
        problem=run.problem,
        fast=redact(tiers.fast),
        capacity_bytes=tiers.fast_capacity,
        used_before_bytes=before,
        used_bytes=tier.usage().nbytes,
        namespaces=tuple(plan.namespaces),
        planned=plan.amount,
        beyond=plan.beyond,
        warm=run.done.amount,
        left_out=run.left.count,
        left=tuple(run.left.named),
        seconds=time.monotonic() - began,
    )


@dataclass
class _Warm:
    """`_lock` guards the counts and the progress."""

    cache: Cache
    plan: Plan
    tier: FastTier
    progress: Progress
    done: Tally = field(default_factory=Tally)
    left: LeftOut = field(default_factory=LeftOut)
    ended: Ended = "complete"
    problem: str = ""
    #: Those that the tier did not take.
    _again: list[tuple[Planned, Listing]] = field(default_factory=list)
    _failures: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def all(self, jobs: int) -> None:
        """Every segment."""
        self.progress.begin("warm", self.plan.amount.stored_bytes)
        try:
            for_each(self._segment, self._there(), jobs)
            # A tier that was busy, or had no memory for so many at once, may have room for them now.
            again, self._again = self._again, []
            for_each(self._segment, again, 1)
            for entry, _ in self._again:
                self._leave(entry, "its payload is gone, or the fast tier has no room for it")
        except KeyboardInterrupt:
            self.ended, self.problem = "cancelled", "cancelled"
        except KVStoreError as exc:
            self.ended, self.problem = "failed", str(exc)

    def _there(self) -> Iterator[tuple[Planned, Listing]]:
        for entry, listing in self.plan.listings(self.cache):
            if listing is None:
                self._leave(entry, "it was evicted meanwhile")
            else:
                yield entry, listing

    def _segment(self, work: tuple[Planned, Listing]) -> None:
        entry, listing = work
        try:
            there = all(
                self.tier.fill(payload_name(entry.namespace, entry.segment, rank), part.nbytes)
                for rank, part in enumerate(listing.record.parts)
            )
        except TransientError as exc:
            self._leave(entry, str(exc))
            with self._lock:
                self._failures += 1
                if self._failures >= _PATIENCE:
                    raise
            return
        except KVStoreError as exc:
            self._leave(entry, str(exc))
            raise
        with self._lock:
            if not there:
                self._again.append(work)
                return
            self._failures = 0
            self.done.add(listing.record.slots, listing.record.nbytes)
            self.progress.advance(listing.record.nbytes)

    def _leave(self, entry: Planned, reason: str) -> None:
        with self._lock:
            self.left.add(entry.namespace, entry.segment, reason)
