"""evict: makes chosen segments invisible, now.

Their payloads are deleted after the grace time, by the janitor or by an engine's housekeeping. A plan names
segments. One that was used since then is spared when the plan is carried out, unless it was named by its id.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Self

from kvstore.admin.backends import Cache
from kvstore.admin.counting import AmountSum, amount_of
from kvstore.admin.described import models
from kvstore.admin.inspect.show import find_segment
from kvstore.admin.operators import among
from kvstore.admin.progress import ProgressListener, Silent
from kvstore.admin.remove.removal import NamespaceRemoval
from kvstore.admin.remove.reports import EvictLine, EvictReport
from kvstore.admin.reports import Amount, EndedEarly
from kvstore.admin.selection import needed_index
from kvstore.errors import KVStoreError
from kvstore.index.eviction import MINUTE_S, WORTH_MINUTES, shift_s, worth
from kvstore.index.maintenance import Account, Listing
from kvstore.index.sessions import ENDED_MINUTE, Hint
from kvstore.keys import NamespaceId, SegmentId, SessionId
from kvstore.rules.units import size
from schemas.records import EvictionRule

_STEP = 256


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A segment that may be evicted; small, because there may be a million."""

    #: Its place in the order in which several namespaces are evicted together.
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
        """The key that sorts candidates: tails before heads."""
        return self.keep_s, -self.depth, self.used_s, self.segment


@dataclass
class EvictPlan:
    """The segments to evict, in that order."""

    why: str
    #: Whether a segment that is used after the plan was made stays.
    spare: bool
    accounts: Sequence[Account]
    models: dict[NamespaceId, str]
    segments: list[_Candidate] = field(default_factory=list)
    pinned: AmountSum = field(default_factory=AmountSum)
    rule: EvictionRule = "admin"
    #: What is left alone because others use it as well.
    shared: AmountSum = field(default_factory=AmountSum)
    #: Sessions that are to be forgotten.
    sessions: list[tuple[NamespaceId, SessionId]] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def in_order(self) -> Self:
        """Sorts the segments into the order in which they go: tails before heads."""
        self.segments.sort(key=lambda candidate: candidate.order)
        return self


def plan_segments(cache: Cache, segments: Sequence[str], prefix: str | None, *, pinned: bool) -> EvictPlan:
    """Plans to evict the segments whose ids start so, pinned ones only with `pinned`. Raises UnknownName."""
    plan = empty_plan(cache, prefix, f"{len(set(segments))} named", spare=False)
    names = [account.namespace for account in plan.accounts]
    filler = PlanFiller(cache, plan)
    for each in dict.fromkeys(segments):
        namespace, listing = find_segment(cache, each, names)
        filler.add(namespace, listing, pinned=pinned)
    return plan.in_order()


def plan_unused(
    cache: Cache, prefix: str | None, *, unused_for_s: float, pinned: bool, now_s: float
) -> EvictPlan:
    """Plans to evict all segments that were not used for `unused_for_s`.

    Nobody knows when those of an ended session were used last: they count as used when they were made.
    Raises UnknownName and what the index raises.
    """
    plan = empty_plan(cache, prefix, f"not used for {unused_for_s:.0f} s", spare=True)
    filler = PlanFiller(cache, plan)
    for account in plan.accounts:
        for listing in cache.segments(account.namespace):
            ended = listing.last_use_s <= ENDED_MINUTE * MINUTE_S
            used_s = listing.record.created_s if ended else listing.last_use_s
            if used_s < now_s - unused_for_s:
                filler.add(account.namespace, listing, pinned=pinned)
    return plan.in_order()


def plan_keep(cache: Cache, prefix: str | None, *, keep_bytes: int, now_s: float) -> EvictPlan:
    """Plans to evict until one namespace, or all together, hold at most `keep_bytes`.

    It takes them in the order of eviction; pinned segments stay. Raises UnknownName and what the index
    raises.
    """
    plan = empty_plan(cache, prefix, f"down to {size(keep_bytes)}", spare=True)
    filler = PlanFiller(cache, plan)
    for account in plan.accounts:
        for listing in cache.segments(account.namespace):
            filler.add(account.namespace, listing, pinned=False)
    excess = amount_of(plan.accounts).stored_bytes - keep_bytes
    # As in every eviction, segments that were used just now go only if there are no others.
    fresh_s = now_s - cache.settings.eviction.fresh_s
    plan.segments.sort(key=lambda candidate: (candidate.used_s >= fresh_s, candidate.order))
    for number, candidate in enumerate(plan.segments):
        if excess <= 0:
            del plan.segments[number:]
            break
        excess -= candidate.nbytes
    return plan


def evict(
    cache: Cache, plan: EvictPlan, *, applied: bool, now_s: float, progress: ProgressListener | None = None
) -> EvictReport:
    """Carries a plan out, or only reports it. If the index fails the report says how far it came."""
    run = _Run(cache, plan, now_s + cache.settings.grace_s)
    if applied:
        run.all(progress or Silent())
    planned: dict[NamespaceId, AmountSum] = defaultdict(AmountSum)
    for candidate in plan.segments:
        planned[candidate.namespace].add(candidate.blocks, candidate.nbytes)
    lines = [
        EvictLine(namespace=name, model=plan.models.get(name, ""), planned=tally.amount)
        for name, tally in planned.items()
    ]
    lines.sort(key=lambda line: (-line.planned.stored_bytes, line.namespace))
    everything = AmountSum()
    for candidate in plan.segments:
        everything.add(candidate.blocks, candidate.nbytes)
    return EvictReport(
        at_s=now_s,
        applied=applied,
        ended=run.ended,
        problem=run.problem,
        why=plan.why,
        held=amount_of(plan.accounts),
        planned=everything.amount,
        pinned=plan.pinned.amount,
        shared=plan.shared.amount,
        remarks=tuple(plan.remarks),
        lines=tuple(lines),
        evicted_segments=run.evicted,
        spared_segments=run.spared,
        delete_after_s=run.delete_after_s if run.evicted else None,
    )


def evict_all(cache: Cache, prefix: str, *, applied: bool, now_s: float) -> EvictReport:
    """Makes all that a namespace holds invisible in one step, pinned or not; only a plan unless `applied`.

    What is saved later is seen. No rebuild brings back what has gone. Raises UnknownName, Refused and what
    the backends raise.
    """
    index = needed_index(cache)
    name = cache.namespace(prefix)
    held = amount_of(cache.accounts(name))
    gone = 0
    if applied:
        cache.record("evict", f"all of {name}: {held.segments} segments")
        removal = NamespaceRemoval(cache, index, name, time.time)
        removal.hide()
        gone = removal.invalidated
    line = EvictLine(namespace=name, model=models(cache.namespaces()).get(name, ""), planned=held)
    return EvictReport(
        at_s=now_s,
        applied=applied,
        ended="complete",
        problem="",
        why="all",
        held=held,
        planned=held,
        pinned=Amount(),
        shared=Amount(),
        lines=(line,),
        evicted_segments=gone,
        spared_segments=0,
        delete_after_s=now_s + cache.settings.grace_s if gone else None,
    )


class PlanFiller:
    """Adds listings to a plan."""

    def __init__(self, cache: Cache, plan: EvictPlan) -> None:
        self._plan = plan
        self._aware = cache.settings.eviction.cost_aware
        self._kinds = {account.namespace: account.kind for account in plan.accounts}
        self._shifts = {
            account.namespace: shift_s(account.kind, account.usage) if self._aware else 0.0
            for account in plan.accounts
        }

    def add(self, namespace: NamespaceId, listing: Listing, *, pinned: bool) -> None:
        """Adds one segment; a pinned one is only counted, unless pinned segments are evicted as well."""
        record = listing.record
        if listing.pinned and not pinned:
            self._plan.pinned.add(record.slots, record.nbytes)
            return
        keep_s = listing.last_use_s + self._shifts[namespace]
        if self._aware and self._kinds[namespace] == "ec":
            keep_s += worth(record.cost_us, record.nbytes) * WORTH_MINUTES * MINUTE_S
        candidate = _Candidate(
            keep_s,
            record.depth,
            listing.last_use_s,
            listing.segment,
            namespace,
            record.slots,
            record.nbytes,
            listing.pinned,
        )
        self._plan.segments.append(candidate)


@dataclass
class _Run:
    cache: Cache
    plan: EvictPlan
    delete_after_s: float
    ended: EndedEarly = "complete"
    problem: str = ""
    evicted: int = 0
    spared: int = 0

    def all(self, progress: ProgressListener) -> None:
        """Evicts every segment of the plan, in its order."""
        progress.begin("evict", sum(candidate.nbytes for candidate in self.plan.segments))
        try:
            planned = self.plan.segments
            if planned or self.plan.sessions:
                spaces = among([one.namespace for one in planned] or [name for name, _ in self.plan.sessions])
                self.cache.record("evict", f"{len(planned)} segments of {spaces}: {self.plan.why}")
            for batch in _batches(planned):
                self._batch(batch)
                progress.advance(sum(candidate.nbytes for candidate in batch))
            for name, session in self.plan.sessions:
                self._forget(name, session)
        except KeyboardInterrupt:
            self.ended, self.problem = "cancelled", "cancelled"
        except KVStoreError as exc:
            self.ended, self.problem = "failed", str(exc)

    def _forget(self, name: NamespaceId, session: SessionId) -> None:
        """Takes back what was told of a session: without segments of its own, nothing is left to remember.
        One that has some is left as it was: they would count as used now, though it has ended.
        """
        assert self.cache.index is not None, "a session is known, so there is an index"
        if any(True for _ in self.cache.index.owned(name, session)):
            self.plan.remarks.append(
                f"the session is still remembered in namespace {name}, with the segments that it has there: "
                "pinned ones go with --pinned, and what it has saved since with another run"
            )
            return
        taken_back = Hint(retain_s=0.0, priority="normal")
        self.cache.index.session(name, session, [], time.time(), taken_back)

    def _batch(self, batch: Sequence[_Candidate]) -> None:
        index = self.cache.index
        assert index is not None, "something is planned, so there is an index"
        name = batch[0].namespace
        chosen = [candidate.segment for candidate in batch]
        if self.plan.spare:
            # Each is looked at again right before: one that was used or pinned since the plan is wanted.
            now = index.get(name, chosen)
            chosen = [
                candidate.segment
                for candidate, listing in zip(batch, now, strict=True)
                if listing and listing.last_use_s <= candidate.used_s and listing.pinned <= candidate.pinned
            ]
        gone = (
            index.evict(name, chosen, delete_after_s=self.delete_after_s, rule=self.plan.rule)
            if chosen
            else 0
        )
        self.evicted += gone
        self.spared += len(batch) - gone


def _batches(entries: Sequence[_Candidate]) -> Iterator[Sequence[_Candidate]]:
    """Yields slices of the plan in order, each of one namespace."""
    start = 0
    for end in range(1, len(entries) + 1):
        full = end - start == _STEP
        if end == len(entries) or full or entries[end].namespace != entries[start].namespace:
            yield entries[start:end]
            start = end


def empty_plan(
    cache: Cache, prefix: str | None, why: str, *, spare: bool, rule: EvictionRule = "admin"
) -> EvictPlan:
    """Returns a plan for one namespace or all that nothing is in yet. Raises UnknownName."""
    chosen = None if prefix is None else cache.namespace(prefix)
    return EvictPlan(why, spare, cache.accounts(chosen), models(cache.namespaces()), rule=rule)
