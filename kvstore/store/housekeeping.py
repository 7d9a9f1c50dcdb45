"""Housekeeping keeps a store in bounds: evicts to the quotas, deletes what was evicted, sweeps what dangles.

Every store that saves does it in its own process, so that one machine needs no daemon, and so does the
janitor of `cache-admin serve`. Several processes may do every step at once, and be cut off anywhere.

Order of an eviction, so that a crash after any step is harmless (invariants 4 and 7 of docs/format.md):
    1. evict   out of sight, into the trash        crash: done; reapable after the grace time
    2. delete  payloads whose grace time is over   crash: deleted once more, which changes nothing
    3. reap    forget that they were in the trash  crash: done
Entries that pointed there dangle. Everybody ignores them until they are swept.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kvstore.errors import DamagedIndex, KVStoreError, NamespaceUnknown, TransientError
from kvstore.index.ageing import Ageing
from kvstore.index.eviction import Holder, Scope, plan, shift_s, watermarks
from kvstore.index.maintenance import Account, Candidate, FullIndex
from kvstore.keys import NamespaceId, SegmentId, payload_name
from kvstore.metrics import Counters
from kvstore.payloads.port import PayloadStore
from kvstore.store.salts import SaltQuotas, evict_down_to
from schemas.records import EvictionRule
from schemas.settings import Settings

log = logging.getLogger(__name__)

#: Segments evicted by one call of the index.
_CULL_STEP = 256
#: Most segments per namespace that a plan for several namespaces lists.
_LOOK = 512
#: Segments deleted with one call, so that a bucket gets one request for hundreds.
_DELETE_STEP = 256
#: Entries removed by one sweep.
SWEEP_STEP = 512
#: Most steps for one quota in one go: a bound on the work if another process writes faster than this one
#: evicts.
_STEPS = 256


#: The first segments of namespaces' orders, and whether there are more.
_Orders = Mapping[NamespaceId, tuple[Sequence[Candidate], bool]]


@dataclass(frozen=True, slots=True)
class Quota:
    """A bound on the bytes that some namespaces hold together."""

    scope: str
    rule: EvictionRule
    nbytes: int
    members: tuple[Account, ...]

    @property
    def used(self) -> int:
        """Bytes that the namespaces hold."""
        return sum(account.usage.nbytes for account in self.members)

    @property
    def high(self) -> int:
        """Bytes above which eviction begins."""
        return watermarks(self.nbytes)[0]

    @property
    def low(self) -> int:
        """Bytes that eviction leaves."""
        return watermarks(self.nbytes)[1]


def quotas(accounts: Sequence[Account], settings: Settings, given: Mapping[str, int]) -> list[Quota]:
    """Returns all quotas, those of the smallest scopes first. Quotas in `given` outrank the settings'."""
    eviction = settings.eviction
    found: list[Quota] = []
    for account in accounts:
        scope = Scope.namespace(account.namespace)
        nbytes = given.get(scope, eviction.namespace_bytes)
        if nbytes is not None:
            found.append(Quota(scope, "namespace_quota", nbytes, (account,)))
    for tenant in sorted({account.tenant for account in accounts}):
        scope = Scope.tenant(tenant)
        nbytes = given.get(scope, eviction.tenant_bytes)
        if nbytes is not None:
            members = tuple(account for account in accounts if account.tenant == tenant)
            found.append(Quota(scope, "tenant_quota", nbytes, members))
    store = given.get(Scope.STORE, settings.capacity_bytes)
    return [*found, Quota(Scope.STORE, "capacity", store, tuple(accounts))]


def _look(account: Account, excess: int) -> int:
    """Returns how many segments of a namespace a plan looks at that frees `excess` bytes in all.

    Listing them takes most of a round. So a plan looks at about as many chain segments as the namespace can
    have to give. If those are smaller than others, a second plan sees the rest. Encoder items don't lie in
    the order of their use, and all the first items may be fresh.
    """
    usage = account.usage
    if account.kind != "kv" or not usage.nbytes:
        return _LOOK
    return min(_LOOK, 8 + 2 * excess * usage.segments // usage.nbytes)


def _warn(problem: KVStoreError) -> None:
    log.warning("evicted segments could not all be deleted: %s", problem)


class Housekeeping:
    """Keeps one index and its payloads in bounds. Safe for threads.

    `proceed` is called before every batch of changes; if it raises, the step ends there. `failed` gets the
    error if payloads could not be deleted.
    """

    def __init__(
        self,
        index: FullIndex,
        payloads: PayloadStore,
        settings: Settings,
        counters: Counters,
        clock: Callable[[], float],
        *,
        proceed: Callable[[], None] = lambda: None,
        failed: Callable[[KVStoreError], None] = _warn,
    ) -> None:
        self._index = index
        self._payloads = payloads
        self._settings = settings
        self._counters = counters
        self._clock = clock
        self._proceed = proceed
        self._failed = failed
        #: Why the last eviction left some namespaces out, such as a node of the index that doesn't answer.
        #: Their bytes count in no quota meanwhile, so eviction removes too little rather than too much.
        self.unreachable: KVStoreError | None = None
        #: Namespaces that the last eviction left alone because their index is damaged -> what is wrong there.
        #: `reconcile` repairs it.
        self.damaged: dict[NamespaceId, str] = {}
        self._ageing = Ageing(index, settings, clock)
        #: Entries that this object's evictions have left dangling and that no sweep has made up for yet.
        self._unswept: dict[NamespaceId, int] = {}

    def quotas(self) -> list[Quota]:
        """Returns every quota with its present use, as far as the index's nodes answer. Raises what the index
        raises.
        """
        accounts, self.unreachable = self._index.reachable()
        self.damaged |= {account.namespace: account.problem for account in accounts if account.problem}
        return quotas(accounts, self._settings, self._index.quotas())

    def evict(self) -> tuple[int, int]:
        """Evicts until every quota is met. Returns how many segments that took, and how many bytes may be
        added before the first quota is full again. Raises what the index raises.
        """
        self.damaged = {}
        salts = SaltQuotas.of(self._settings, self._index.quotas())
        evicted = self._evict_salts(salts) if salts else 0
        found = self.quotas()
        for quota in found:
            if quota.used > quota.high:
                evicted += self._make_room(quota)
        if evicted:
            self._counters.add("evicted_segments", evicted)
            found = self.quotas()
        room = min(quota.high - quota.used for quota in found)
        if salts:
            # The next look at the salts comes when one can have filled a part of its quota.
            room = min(room, salts.smallest)
        return evicted, max(0, room)

    def _evict_salts(self, salts: SaltQuotas) -> int:
        """Evicts until every salt's quota is met in each namespace; returns how many segments that took."""
        gone, least = 0, watermarks(salts.smallest)[0]
        accounts, _ = self._index.reachable()
        for name in [one.namespace for one in accounts if one.usage.nbytes > least]:
            with self._noting_damage(name):
                for salt, quota in salts.exceeded(self._index, name):
                    gone += evict_down_to(
                        self._index,
                        name,
                        salt,
                        watermarks(quota)[1],
                        delete_after_s=self._delete_after_s(),
                        proceed=self._proceed,
                    )
        return gone

    def _make_room(self, quota: Quota) -> int:
        """Evicts what exceeds one quota, in steps, as far as that is possible; returns how many segments.

        If two processes do this at once, the second finds it done. A step reads the orders first and the
        accounts after that. If the other's eviction falls in between, nothing exceeds the quota any more; if
        it falls after both, the two have made the same plan, and namespaces keep what it says.
        """
        evicted = 0
        self._expire(quota)
        fresh_from = self._clock() - self._settings.eviction.fresh_s
        for spare_from_s in (fresh_from, None):
            for _ in range(_STEPS):
                orders = self._orders(quota)
                quota = self._again(quota)
                excess = quota.used - quota.low
                if excess <= 0:
                    return evicted
                shares = self._shares(quota, orders, excess, spare_from_s)
                gone = sum(
                    self._take(member, share, quota.rule, spare_from_s)
                    for member in quota.members
                    if (share := shares.get(member.namespace))
                )
                evicted += gone
                if not gone:
                    break
                # Or the next step would list the orders once more to find that nothing is too much.
                quota = self._again(quota)
                if quota.used <= quota.low:
                    return evicted
        return evicted

    def _expire(self, quota: Quota) -> None:
        """Ends retentions whose time is over, where orders are compared: a cull does that in its own."""
        members = [member for member in quota.members if self._movable(member)]
        for member in members if len(members) > 1 else ():
            self._proceed()
            with self._noting_damage(member.namespace):
                self._index.expire(member.namespace)

    def _again(self, quota: Quota) -> Quota:
        """Returns a quota with its use by now."""
        return next((each for each in self.quotas() if each.scope == quota.scope), quota)

    def _movable(self, account: Account) -> bool:
        """Tells whether anything in the namespace may be evicted."""
        return account.usage.nbytes > account.usage.pinned_bytes and account.namespace not in self.damaged

    @contextmanager
    def _noting_damage(self, namespace: NamespaceId) -> Iterator[None]:
        """Goes on without a namespace in which something makes no sense, or that takes no changes: the quotas
        hold for all others."""
        try:
            yield
        except DamagedIndex as exc:
            self.damaged[namespace] = str(exc)
        except NamespaceUnknown as exc:
            # Erased meanwhile, or being brought into other shards: nothing is added there either.
            log.info("%s", exc)

    def _orders(self, quota: Quota) -> _Orders:
        """Returns what goes first in each member, and whether there may be more; nothing for a single one,
        whose order the index follows.
        """
        members = [member for member in quota.members if self._movable(member)]
        orders = {}
        for member in members if len(members) > 1 else ():
            with self._noting_damage(member.namespace):
                look = _look(member, quota.used - quota.low)
                first = self._index.order(member.namespace, look)
                orders[member.namespace] = first, len(first) == look
        return orders

    def _shares(
        self,
        quota: Quota,
        orders: _Orders,
        excess: int,
        spare_from_s: float | None,
    ) -> Mapping[NamespaceId, int]:
        """Returns how many bytes of the excess each namespace gives, as far as the orders tell."""
        members = [member for member in quota.members if self._movable(member)]
        if len(members) == 1:
            return {members[0].namespace: excess}
        cost_aware = self._settings.eviction.cost_aware
        holders = [
            Holder(
                member.namespace,
                shift_s(member.kind, member.usage) if cost_aware else 0.0,
                *orders[member.namespace],
            )
            for member in members
            if member.namespace in orders
        ]
        return plan(holders, excess, spare_from_s=spare_from_s)

    def _take(self, member: Account, share: int, rule: EvictionRule, spare_from_s: float | None) -> int:
        """Evicts until `member` holds `share` bytes less than its account says; returns how many segments.

        Sweeps as many entries as that leaves dangling, so that dangling entries don't pile up however fast
        segments come and go: a sweep looks at eight entries for each that it removes, which keeps the
        dangling ones at about a seventh of the others.
        """
        usage, name, gone = member.usage, member.namespace, 0
        with self._noting_damage(name):
            gone = self._cull(member, usage.nbytes - share, rule, spare_from_s)
        # Two threads may lose a count here; the next round of housekeeping sweeps anyway.
        unswept = self._unswept.get(name, 0) + gone * usage.blocks // max(1, usage.segments)
        self._unswept[name] = unswept if unswept < SWEEP_STEP else 0
        if unswept >= SWEEP_STEP:
            self._proceed()
            with self._noting_damage(name):
                self._index.sweep(name, unswept)
        return gone

    def _cull(self, member: Account, keep_bytes: int, rule: EvictionRule, spare_from_s: float | None) -> int:
        evicted = 0
        while True:
            self._proceed()
            gone = self._index.cull(
                member.namespace,
                keep_bytes=max(0, keep_bytes),
                delete_after_s=self._delete_after_s(),
                limit=_CULL_STEP,
                rule=rule,
                spare_from_s=spare_from_s,
                among=member.summed,
            )
            evicted += len(gone)
            if len(gone) < _CULL_STEP:
                return evicted

    def _delete_after_s(self) -> float:
        return self._clock() + self._settings.grace_s

    def age_out(self, in_time: Callable[[], bool] = lambda: True) -> int:
        """Evicts some of what is older than its time to live (kvstore.index.ageing), while `in_time` says so;
        returns how many segments. Raises what the index raises, but for single namespaces.
        """
        accounts, unreachable = self._index.reachable()
        evicted = self._ageing.round(accounts, in_time, self._proceed)
        self.damaged |= self._ageing.damaged
        self.unreachable = unreachable or self._ageing.failure
        self._counters.add("evicted_segments", evicted)
        return evicted

    def reap(self, namespace: NamespaceId, most: int = 1024) -> int:
        """Deletes payloads whose grace time is over, of up to `most` segments; returns how many payloads.

        A payload that can't be deleted stays in the trash for the next time; `failed` gets the error instead
        of the caller. Raises what the index raises.
        """
        due = self._index.reapable(namespace, None, most)
        deleted = 0
        for at in range(0, len(due), _DELETE_STEP):
            self._proceed()
            deleted += self._reap_batch(namespace, due[at : at + _DELETE_STEP])
        return deleted

    def drain(self, namespace: NamespaceId, *, delete_after_s: float | None = None) -> int:
        """Moves invalidated segments into the trash; returns how many. Raises what the index raises."""
        after = self._delete_after_s() if delete_after_s is None else delete_after_s
        moved = 0
        while True:
            self._proceed()
            step = self._index.drain(namespace, delete_after_s=after, limit=_CULL_STEP)
            moved += step
            if not step:
                return moved

    def sweep(self, namespace: NamespaceId) -> int:
        """Removes some dangling entries; returns how many. Raises what the index raises."""
        return self._index.sweep(namespace, SWEEP_STEP)

    def forget(self, namespace: NamespaceId) -> int:
        """Evicts all that a namespace holds and deletes it at once, without the grace time that a load of
        another engine would need: for a namespace that no other engine uses. Returns how many segments it
        evicted. Raises what the backends raise.
        """
        gone = self._index.invalidate(namespace)
        self.drain(namespace, delete_after_s=0)
        while due := self._index.reapable(namespace, None, _DELETE_STEP):
            self._delete(namespace, due)
        while self.sweep(namespace):
            pass
        self._counters.add("evicted_segments", gone)
        return gone

    def _reap_batch(self, namespace: NamespaceId, due: Sequence[tuple[SegmentId, int]]) -> int:
        """Deletes payloads of evicted segments in one call; if that fails, segment by segment.

        So a payload that can't be deleted does not keep the others. After three failures in a row nothing is
        likely to succeed, and the rest is left for the next time.
        """
        try:
            return self._delete(namespace, due)
        except TransientError as exc:
            self._failed(exc)
            return 0
        except KVStoreError as exc:
            failure, failures = exc, 0
        deleted = 0
        for one in due:
            try:
                deleted += self._delete(namespace, [one])
                failures = 0
            except KVStoreError as exc:
                failure, failures = exc, failures + 1
                if failures == 3:
                    break
        self._failed(failure)
        return deleted

    def _delete(self, namespace: NamespaceId, due: Sequence[tuple[SegmentId, int]]) -> int:
        names = [payload_name(namespace, segment, rank) for segment, ranks in due for rank in range(ranks)]
        deleted = self._payloads.delete(names)
        self._counters.add("deleted_payloads", deleted)
        self._index.reaped(namespace, [segment for segment, _ in due])
        return deleted
