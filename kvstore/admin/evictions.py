"""evict: chosen segments out of sight, now. Their payloads are deleted after the grace time, by whoever does
the upkeep.

A plan names segments. What was used since is spared when it is carried out, unless it was named by its id.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvstore.admin.cache import Cache
from kvstore.admin.inventory import amount_of as held_by
from kvstore.admin.machine import size
from kvstore.admin.plans import Tally
from kvstore.admin.progress import Progress, Silent
from kvstore.admin.segments import find_segment
from kvstore.catalogue import Account, Listing
from kvstore.errors import KVStoreError
from kvstore.eviction import MINUTE_S, WORTH_MINUTES, shift_s, worth
from kvstore.keys import NamespaceId, SegmentId
from schemas.upkeep import Ended, EvictLine, EvictReport

_STEP = 256


@dataclass(frozen=True, slots=True)
class _Entry:
    """A segment that may go; small, because there may be a million."""

    #: Its place in the order of eviction, of several namespaces together.
    keep_s: float
    depth: int
    used_s: float
    segment: SegmentId
    namespace: NamespaceId
    blocks: int
    nbytes: int
    pinned: bool

    @property
    def order(self) -> tuple[float, int, float, SegmentId]:
        """What sorts them: tails before heads."""
        return self.keep_s, -self.depth, self.used_s, self.segment


@dataclass
class EvictPlan:
    """What is to go, in the order in which it goes."""

    why: str
    #: Whether what is used until then stays.
    spare: bool
    accounts: Sequence[Account]
    models: dict[NamespaceId, str]
    entries: list[_Entry] = field(default_factory=list)
    pinned: Tally = field(default_factory=Tally)


def plan_segments(cache: Cache, segments: Sequence[str], prefix: str | None, *, pinned: bool) -> EvictPlan:
    """These, by the start of their ids; pinned ones only with `pinned`. Raises UnknownName."""
    plan = _empty(cache, prefix, f"{len(set(segments))} named", spare=False)
    names = [account.namespace for account in plan.accounts]
    entries = _Entries(cache, plan)
    for each in dict.fromkeys(segments):
        namespace, listing = find_segment(cache, each, names)
        entries.add(namespace, listing, pinned=pinned)
    plan.entries.sort(key=lambda entry: entry.order)
    return plan


def plan_unused(
    cache: Cache, prefix: str | None, *, unused_for_s: float, pinned: bool, now_s: float
) -> EvictPlan:
    """All that was not used for so long. Raises UnknownName and what the index raises."""
    plan = _empty(cache, prefix, f"not used for {unused_for_s:.0f} s", spare=True)
    entries = _Entries(cache, plan)
    for account in plan.accounts:
        for listing in _listings(cache, account.namespace):
            if listing.last_use_s < now_s - unused_for_s:
                entries.add(account.namespace, listing, pinned=pinned)
    plan.entries.sort(key=lambda entry: entry.order)
    return plan


def plan_keep(cache: Cache, prefix: str | None, *, keep_bytes: int, now_s: float) -> EvictPlan:
    """The first in the order of eviction, until at most `keep_bytes` are left, of one namespace or of all
    together. Pinned segments stay. Raises UnknownName and what the index raises.
    """
    plan = _empty(cache, prefix, f"down to {size(keep_bytes)}", spare=True)
    entries = _Entries(cache, plan)
    for account in plan.accounts:
        for listing in _listings(cache, account.namespace):
            entries.add(account.namespace, listing, pinned=False)
    excess = held_by(plan.accounts).stored_bytes - keep_bytes
    # As everywhere: what was used just now goes if there is nothing else.
    fresh_s = now_s - cache.settings.eviction.fresh_s
    plan.entries.sort(key=lambda entry: (entry.used_s >= fresh_s, entry.order))
    for number, entry in enumerate(plan.entries):
        if excess <= 0:
            del plan.entries[number:]
            break
        excess -= entry.nbytes
    return plan


def evict(
    cache: Cache, plan: EvictPlan, *, applied: bool, now_s: float, progress: Progress | None = None
) -> EvictReport:
    """Carry a plan out, or only tell it. A failing index ends it there; the report says how far it came."""
    run = _Run(cache, plan, now_s + cache.settings.grace_s)
    if applied:
        run.all(progress or Silent())
    planned: dict[NamespaceId, Tally] = defaultdict(Tally)
    for entry in plan.entries:
        planned[entry.namespace].add(entry.blocks, entry.nbytes)
    lines = [
        EvictLine(namespace=name, model=plan.models.get(name, ""), planned=tally.amount)
        for name, tally in planned.items()
    ]
    lines.sort(key=lambda line: (-line.planned.stored_bytes, line.namespace))
    everything = Tally()
    for entry in plan.entries:
        everything.add(entry.blocks, entry.nbytes)
    return EvictReport(
        at_s=now_s,
        applied=applied,
        ended=run.ended,
        problem=run.problem,
        why=plan.why,
        held=held_by(plan.accounts),
        planned=everything.amount,
        pinned=plan.pinned.amount,
        lines=tuple(lines),
        evicted_segments=run.evicted,
        spared_segments=run.spared,
        delete_after_s=run.delete_after_s if run.evicted else None,
    )


class _Entries:
    """Fills a plan with listings."""

    def __init__(self, cache: Cache, plan: EvictPlan) -> None:
        self._plan = plan
        self._aware = cache.settings.eviction.cost_aware
        self._kinds = {account.namespace: account.kind for account in plan.accounts}
        self._shifts = {
            account.namespace: shift_s(account.kind, account.usage) if self._aware else 0.0
            for account in plan.accounts
        }

    def add(self, namespace: NamespaceId, listing: Listing, *, pinned: bool) -> None:
        """One more; a pinned one is only counted, unless pinned ones go as well."""
        record = listing.record
        if listing.pinned and not pinned:
            self._plan.pinned.add(record.slots, record.nbytes)
            return
        keep_s = listing.last_use_s + self._shifts[namespace]
        if self._aware and self._kinds[namespace] == "ec":
            keep_s += worth(record.cost_us, record.nbytes) * WORTH_MINUTES * MINUTE_S
        entry = _Entry(
            keep_s,
            record.depth,
            listing.last_use_s,
            listing.segment,
            namespace,
            record.slots,
            record.nbytes,
            listing.pinned,
        )
        self._plan.entries.append(entry)


@dataclass
class _Run:
    cache: Cache
    plan: EvictPlan
    delete_after_s: float
    ended: Ended = "complete"
    problem: str = ""
    evicted: int = 0
    spared: int = 0

    def all(self, progress: Progress) -> None:
        """Every entry, in the plan's order."""
        progress.begin("evict", sum(entry.nbytes for entry in self.plan.entries))
        try:
            for batch in _batches(self.plan.entries):
                self._batch(batch)
                progress.advance(sum(entry.nbytes for entry in batch))
        except KeyboardInterrupt:
            self.ended, self.problem = "cancelled", "cancelled"
        except KVStoreError as exc:
            self.ended, self.problem = "failed", str(exc)

    def _batch(self, batch: Sequence[_Entry]) -> None:
        index = self.cache.index
        assert index is not None, "something is planned, so there is an index"
        name = batch[0].namespace
        chosen = [entry.segment for entry in batch]
        if self.plan.spare:
            # Looked at again right before: what was used or pinned since the plan is wanted.
            now = index.get(name, chosen)
            chosen = [
                entry.segment
                for entry, listing in zip(batch, now, strict=True)
                if listing and listing.last_use_s <= entry.used_s and listing.pinned <= entry.pinned
            ]
        gone = index.evict(name, chosen, delete_after_s=self.delete_after_s, rule="admin") if chosen else 0
        self.evicted += gone
        self.spared += len(batch) - gone


def _batches(entries: Sequence[_Entry]) -> Iterator[Sequence[_Entry]]:
    """In order, of one namespace each."""
    start = 0
    for end in range(1, len(entries) + 1):
        full = end - start == _STEP
        if end == len(entries) or full or entries[end].namespace != entries[start].namespace:
            yield entries[start:end]
            start = end


def _empty(cache: Cache, prefix: str | None, why: str, *, spare: bool) -> EvictPlan:
    chosen = None if prefix is None else cache.namespace(prefix)
    if cache.index is None:
        return EvictPlan(why, spare, (), {})
    accounts = [each for each in cache.index.accounts() if chosen in (None, each.namespace)]
    models = {name: str(json.loads(text).get("model", "")) for name, text in cache.namespaces().items()}
    return EvictPlan(why, spare, accounts, models)


def _listings(cache: Cache, name: NamespaceId) -> Iterator[Listing]:
    return iter(()) if cache.index is None else cache.index.segments(name)
