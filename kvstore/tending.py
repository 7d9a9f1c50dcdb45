"""What keeps a store in bounds: evict to the quotas, delete what was evicted, sweep what dangles.

Done by every store that saves, in its own process, so that one machine needs no daemon, and by the janitor
of `cache-admin serve`. Every step may be done by several processes at once and cut off anywhere.

Order of an eviction, so that a crash after any step is harmless (invariants 4 and 7 of the design):
    1. evict   out of sight, into the trash        crash: done; the payloads are due after the grace time
    2. delete  payloads whose grace has passed     crash: deleted once more, which nothing notices
    3. bury    forget that they were in the trash  crash: done
Entries that pointed there dangle, are ignored by everybody, and are swept.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvstore.catalogue import Account, Maintenance
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
_SWEEP_STEP = 1024
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


def _warn(problem: KVStoreError) -> None:
    log.warning("evicted segments could not all be deleted: %s", problem)


class Tending:
    """Upkeep of one index and its payloads. Holds nothing between calls; safe for threads.

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

    def quotas(self) -> list[Quota]:
        """Every quota with what is used of it now. Raises what the index raises."""
        return quotas(self._index.accounts(), self._settings, self._index.quotas())

    def evict(self) -> tuple[int, int]:
        """Meet every quota. Returns how many segments that took, and how many bytes may be added until the
        first quota is to be met again. Raises what the index raises.
        """
        high, low = self._settings.eviction.high, self._settings.eviction.low
        found = self.quotas()
        evicted = 0
        for number in range(len(found)):
            quota = found[number]
            if quota.used > high * quota.nbytes:
                evicted += self._make_room(quota, quota.used - int(low * quota.nbytes))
                found = self.quotas()
                if len(found) <= number:
                    break
        if evicted:
            self._counters.add("evicted_segments", evicted)
        return evicted, max(0, min(int(high * quota.nbytes) - quota.used for quota in found))

    def _make_room(self, quota: Quota, excess: int) -> int:
        """Evict `excess` bytes of a quota's members; fewer if there aren't as many to evict.

        Every step says what a namespace is to keep, counted from the one look that this began with: of two
        processes that found the same excess, the second finds it gone.
        """
        members = {m.namespace: m for m in quota.members if m.usage.nbytes > m.usage.pinned_bytes}
        held = {name: account.usage.nbytes for name, account in members.items()}
        fresh_from = self._clock() - self._settings.eviction.fresh_s
        evicted = 0
        for spare_from_s in (fresh_from, None):
            for _ in range(_STEPS):
                if excess <= 0:
                    break
                gone, freed = 0, 0
                for name, share in self._shares(members, excess, spare_from_s).items():
                    keep = max(0, held[name] - share)
                    gone += self._cull(name, keep, quota.rule, spare_from_s)
                    # What others commit meanwhile is not held against this quota's excess.
                    left = max(keep, min(held[name], self._index.usage(name).nbytes))
                    freed += held[name] - left
                    held[name] = left
                evicted += gone
                excess -= freed
                if not gone and not freed:
                    break
        return evicted

    def _shares(
        self, members: Mapping[NamespaceId, Account], excess: int, spare_from_s: float | None
    ) -> Mapping[NamespaceId, int]:
        """How much of the excess each namespace gives, or as much of it as can be told now."""
        if len(members) == 1:
            return dict.fromkeys(members, excess)
        holders = [self._holder(account) for account in members.values()]
        return plan(holders, excess, spare_from_s=spare_from_s)

    def _cull(
        self, namespace: NamespaceId, keep_bytes: int, rule: EvictionRule, spare_from_s: float | None
    ) -> int:
        evicted = 0
        while True:
            self._proceed()
            gone = self._index.cull(
                namespace,
                keep_bytes=keep_bytes,
                delete_after_s=self._delete_after_s(),
                limit=_CULL_STEP,
                rule=rule,
                spare_from_s=spare_from_s,
            )
            evicted += len(gone)
            if len(gone) < _CULL_STEP:
                return evicted

    def _holder(self, account: Account) -> Holder:
        first = self._index.order(account.namespace, _LOOK)
        usage = account.usage
        shift = shift_s(account.kind, usage) if self._settings.eviction.cost_aware else 0.0
        return Holder(account.namespace, usage.nbytes, shift, first, len(first) == _LOOK)

    def _delete_after_s(self) -> float:
        return self._clock() + self._settings.grace_s

    def reap(self, namespace: NamespaceId, most: int = 1024) -> int:
        """Delete payloads whose grace has passed, of up to `most` segments; returns how many payloads.

        What can't be deleted stays in the trash for the next time, and is no error but told to `failed`.
        Raises what the index raises.
        """
        due = self._index.due(namespace, self._clock(), most)
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
        return self._index.sweep(namespace, _SWEEP_STEP)

    def forget(self, namespace: NamespaceId) -> int:
        """Evict all that a namespace holds and delete it at once, without the grace that a load of another
        engine would need: for one that nobody else uses. Returns how many segments that were. Raises what
        the backends raise.
        """
        gone = self._index.invalidate(namespace)
        now = self._clock()
        # An index keeps these times to the second.
        self.drain(namespace, delete_after_s=now - 2.0)
        while due := self._index.due(namespace, now, _DELETE_STEP):
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
