"""What keeps a store in bounds: evict to the quotas, delete what was evicted, sweep what dangles.

Done by every store that saves, in its own process, so that one machine needs no daemon, and by the janitor
of `cache-admin serve`. Every step may be done by several processes at once and cut off anywhere.

Order of an eviction, so that a crash after any step is harmless (invariants 4 and 7 of docs/format.md):
    1. evict   out of sight, into the trash        crash: done; the payloads are due after the grace time
    2. delete  payloads whose grace has passed     crash: deleted once more, which nothing notices
    3. bury    forget that they were in the trash  crash: done
Entries that pointed there dangle, are ignored by everybody, and are swept.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvstore.catalogue import Account, Candidate, Maintenance
from kvstore.errors import KVStoreError, TransientError
from kvstore.eviction import Holder, Scope, plan, shift_s
from kvstore.keys import NamespaceId, SegmentId, payload_name
from kvstore.metrics import Counters
from kvstore.ports import PayloadStore
from schemas.records import EvictionRule
from schemas.settings import Settings

log = logging.getLogger(__name__)

#: Segments evicted by one call of the index, and looked at per namespace to plan for several.
_CULL_STEP = 256
_LOOK = 512
#: Segments deleted with one call, so that a bucket is asked once for hundreds.
_DELETE_STEP = 256
#: Entries dropped by one sweep.
SWEEP_STEP = 512
#: Of one quota, in one go: what a process that writes faster than this one evicts can make it do.
_STEPS = 256


@dataclass(frozen=True, slots=True)
class Quota:
    """Bytes that some namespaces may hold together."""

    scope: str
    rule: EvictionRule
    nbytes: int
    members: tuple[Account, ...]

    @property
    def used(self) -> int:
        """What they hold."""
        return sum(account.usage.nbytes for account in self.members)


def quotas(accounts: Sequence[Account], settings: Settings, given: Mapping[str, int]) -> list[Quota]:
    """Every quota that there is, the smallest scopes first. `given` outranks the settings."""
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


def _movable(account: Account) -> bool:
    """Whether anything of it may be evicted."""
    return account.usage.nbytes > account.usage.pinned_bytes


def _warn(problem: KVStoreError) -> None:
    log.warning("evicted segments could not all be deleted: %s", problem)


class Tending:
    """Upkeep of one index and its payloads. Safe for threads.

    `proceed` is asked before every batch of changes, and what it raises ends the step there. `failed` is told
    why payloads could not be deleted.
    """

    def __init__(
        self,
        index: Maintenance,
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
        #: Why the last eviction left some namespaces out: a node of the index doesn't answer. What they hold
        #: counts in no quota meanwhile, so that less is evicted than should be, and never more.
        self.unreachable: KVStoreError | None = None
        #: Entries that dangle since an eviction of ours and have not been swept for.
        self._owed: dict[NamespaceId, int] = {}

    def quotas(self) -> list[Quota]:
        """Every quota with what is used of it now, as far as can be told. Raises what the index raises."""
        accounts, self.unreachable = self._index.reachable()
        return quotas(accounts, self._settings, self._index.quotas())

    def evict(self) -> tuple[int, int]:
        """Meet every quota. Returns how many segments that took, and how many bytes may be added until the
        first quota is to be met again. Raises what the index raises.
        """
        high = self._settings.eviction.high
        found = self.quotas()
        evicted = 0
        for quota in found:
            if quota.used > high * quota.nbytes:
                evicted += self._make_room(quota)
        if evicted:
            self._counters.add("evicted_segments", evicted)
            found = self.quotas()
        return evicted, max(0, min(int(high * quota.nbytes) - quota.used for quota in found))

    def _make_room(self, quota: Quota) -> int:
        """Evict what is too much of one quota, in steps; less if there isn't as much to evict.

        Of two processes that do this at once, the second finds it done. A step looks at the orders first and
        at the accounts after that. If the other one's eviction falls in between, nothing is too much any
        more; if it falls behind both, the two have made the same plan, and namespaces keep what it says.
        """
        evicted = 0
        fresh_from = self._clock() - self._settings.eviction.fresh_s
        for spare_from_s in (fresh_from, None):
            for _ in range(_STEPS):
                orders = self._orders(quota)
                quota = next((each for each in self.quotas() if each.scope == quota.scope), quota)
                excess = quota.used - int(self._settings.eviction.low * quota.nbytes)
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
        return evicted

    def _orders(self, quota: Quota) -> Mapping[NamespaceId, Sequence[Candidate]]:
        """What goes first in each member; nothing if there is only one, whose order the index follows."""
        members = [member.namespace for member in quota.members if _movable(member)]
        return {} if len(members) < 2 else {name: self._index.order(name, _LOOK) for name in members}

    def _shares(
        self,
        quota: Quota,
        orders: Mapping[NamespaceId, Sequence[Candidate]],
        excess: int,
        spare_from_s: float | None,
    ) -> Mapping[NamespaceId, int]:
        """How much of the excess each namespace gives, or as much of it as can be told now."""
        members = [member for member in quota.members if _movable(member)]
        if len(members) == 1:
            return {members[0].namespace: excess}
        cost_aware = self._settings.eviction.cost_aware
        holders = [
            Holder(
                member.namespace,
                shift_s(member.kind, member.usage) if cost_aware else 0.0,
                first,
                len(first) == _LOOK,
            )
            for member in members
            if (first := orders.get(member.namespace))
        ]
        return plan(holders, excess, spare_from_s=spare_from_s)

    def _take(self, member: Account, share: int, rule: EvictionRule, spare_from_s: float | None) -> int:
        """Evict until `member` holds `share` less than its account says; returns how many segments.

        Sweeps as many entries as that leaves dangling, so that those that dangle don't add up however fast
        segments come and go: a sweep looks at eight entries for each that it drops, which keeps the
        dangling ones at about a seventh of the others.
        """
        usage, name = member.usage, member.namespace
        gone = self._cull(name, usage.nbytes - share, rule, spare_from_s)
        # Two threads may lose a count here; the next round of tidying sweeps anyway.
        owed = self._owed.get(name, 0) + gone * usage.blocks // max(1, usage.segments)
        self._owed[name] = owed if owed < SWEEP_STEP else 0
        if owed >= SWEEP_STEP:
            self._proceed()
            self._index.sweep(name, owed)
        return gone

    def _cull(
        self, namespace: NamespaceId, keep_bytes: int, rule: EvictionRule, spare_from_s: float | None
    ) -> int:
        evicted = 0
        while True:
            self._proceed()
            gone = self._index.cull(
                namespace,
                keep_bytes=max(0, keep_bytes),
                delete_after_s=self._delete_after_s(),
                limit=_CULL_STEP,
                rule=rule,
                spare_from_s=spare_from_s,
            )
            evicted += len(gone)
            if len(gone) < _CULL_STEP:
                return evicted

    def _delete_after_s(self) -> float:
        return self._clock() + self._settings.grace_s

    def reap(self, namespace: NamespaceId, most: int = 1024) -> int:
        """Delete payloads whose grace has passed, of up to `most` segments; returns how many payloads.

        What can't be deleted stays in the trash for the next time, and is no error but told to `failed`.
        Raises what the index raises.
        """
        due = self._index.due(namespace, None, most)
        deleted = 0
        for at in range(0, len(due), _DELETE_STEP):
            self._proceed()
            deleted += self._bury(namespace, due[at : at + _DELETE_STEP])
        return deleted

    def drain(self, namespace: NamespaceId, *, delete_after_s: float | None = None) -> int:
        """Put what was invalidated into the trash; returns how many segments. Raises what it raises."""
        after = self._delete_after_s() if delete_after_s is None else delete_after_s
        moved = 0
        while True:
            self._proceed()
            step = self._index.drain(namespace, delete_after_s=after, limit=_CULL_STEP)
            moved += step
            if not step:
                return moved

    def sweep(self, namespace: NamespaceId) -> int:
        """Drop some of the entries that dangle; returns how many. Raises what the index raises."""
        return self._index.sweep(namespace, SWEEP_STEP)

    def forget(self, namespace: NamespaceId) -> int:
        """Evict all that a namespace holds and delete it at once, without the grace that a load of another
        engine would need: for one that nobody else uses. Returns how many segments that were. Raises what
        the backends raise.
        """
        gone = self._index.invalidate(namespace)
        self.drain(namespace, delete_after_s=0)
        while due := self._index.due(namespace, None, _DELETE_STEP):
            self._delete(namespace, due)
        while self.sweep(namespace):
            pass
        self._counters.add("evicted_segments", gone)
        return gone

    def _bury(self, namespace: NamespaceId, due: Sequence[tuple[SegmentId, int]]) -> int:
        """Delete payloads of evicted segments in one call; if that fails, those that can be, one by one.

        The others need not wait for one that can't be. Several failures in a row are one: nothing can.
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
        self._index.bury(namespace, [segment for segment, _ in due])
        return deleted
