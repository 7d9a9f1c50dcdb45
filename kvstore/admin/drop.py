"""drop and invalidate: a namespace goes, as a whole.

invalidate   what it holds can't be matched any more, from one moment to the next; engines save into it again
drop         that, and then its payloads and the namespace itself

Order of a drop, so that one that is cut off is finished by the next, or by the janitor:
    1. invalidate   out of sight                            crash: the janitor drains and reaps the rest
    2. drain        into the trash, with the grace time     crash: the same
    3. reap         payloads whose grace has passed         crash: deleted once more
    4. erase        the namespace, once it holds nothing    crash: an empty namespace
Without a grace time (`now`) a load of another engine that had matched before step 1 finds nothing and
computes: no wrong answer, but a slow one. Then orphans of the namespace go as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvstore.admin.cache import Cache
from kvstore.admin.checking import paged
from kvstore.admin.exports import Refused
from kvstore.admin.gc import LEAST_AGE_S
from kvstore.admin.inventory import amount_of
from kvstore.admin.progress import Progress, Silent
from kvstore.admin.recommit import AnyIndex
from kvstore.admin.targets import described, needed_index
from kvstore.catalogue import Account
from kvstore.errors import KVStoreError
from kvstore.keys import NamespaceId, parse_payload_name, payload_name
from kvstore.metrics import Counters
from kvstore.tending import Tending
from schemas.repairs import DropReport, DropState, InvalidateReport

#: Entries that one call of the index drops.
_ERASE_STEP = 4096


def invalidate(cache: Cache, prefix: str, *, apply: bool = False) -> InvalidateReport:
    """Make what a namespace holds invisible. Raises UnknownName, Refused and what the index raises."""
    index = needed_index(cache)
    name = cache.namespace(prefix)
    account = _account(index, name)
    if apply:
        index.invalidate(name)
    return InvalidateReport(
        applied=apply,
        namespace=name,
        model=described(cache.namespaces().get(name))[1],
        visible=amount_of([account]),
    )


def drop(
    cache: Cache,
    prefix: str,
    *,
    apply: bool = False,
    now: bool = False,
    progress: Progress | None = None,
    clock: Callable[[], float] = time.time,
) -> DropReport:
    """Remove a namespace and all that it holds, as far as the grace time allows it yet, or `now`.

    Raises UnknownName, Refused and what the backends raise; what was done until then stays done.
    """
    index = needed_index(cache)
    name = cache.namespace(prefix)
    account = _account(index, name)
    kind, model = described(cache.namespaces().get(name))
    run = _Drop(cache, index, name, now, progress or Silent(), clock)
    if apply:
        run.all()
    return DropReport(
        at_s=clock(),
        applied=apply,
        now=now,
        namespace=name,
        kind=kind,
        model=model,
        tenant=account.tenant,
        visible=amount_of([account]),
        trashed=account.trashed,
        bygone=account.bygone,
        seen_s=account.seen_s or None,
        state=run.state,
        invalidated=run.invalidated,
        deleted_payloads=run.deleted,
        due_s=clock() + cache.settings.grace_s if run.state == "waiting" else None,
    )


def _account(index: AnyIndex, name: NamespaceId) -> Account:
    found = [account for account in index.accounts() if account.namespace == name]
    if not found:
        raise Refused(f"namespace {name} has just been forgotten by somebody else")
    return found[0]


@dataclass
class _Drop:
    cache: Cache
    index: AnyIndex
    name: NamespaceId
    now: bool
    progress: Progress
    clock: Callable[[], float]
    state: DropState = "kept"
    invalidated: int = 0
    deleted: int = 0
    _failure: KVStoreError | None = None

    def all(self) -> None:
        """Every step that can be done now."""
        settings, index, name = self.cache.settings, self.index, self.name
        tending = Tending(index, self.cache.payloads, settings, Counters(), self.clock, failed=self._failed)
        self.progress.begin(f"drop {name}")
        if index.usage(name).segments:
            self.invalidated = index.invalidate(name)
        tending.drain(name, delete_after_s=0.0 if self.now else None)
        if self.now:
            self._hasten()
        while reaped := tending.reap(name):
            self.deleted += reaped
        if self._failure is not None:
            raise self._failure
        if self.now:
            self._orphans()
        self.state = self._erase()

    def _failed(self, exc: KVStoreError) -> None:
        self._failure = exc

    def _hasten(self) -> None:
        """Delete what was evicted before, and would still have had its grace."""
        far = self.clock() + 10 * self.cache.settings.grace_s + 86400.0
        while due := self.index.due(self.name, far, _ERASE_STEP):
            names = [
                payload_name(self.name, segment, rank) for segment, ranks in due for rank in range(ranks)
            ]
            self.deleted += self.cache.payloads.delete(names)
            self.index.bury(self.name, [segment for segment, _ in due])

    def _orphans(self) -> None:
        """What the index never knew, or has forgotten."""
        for page in paged(self._unnamed()):
            self.deleted += self.cache.payloads.delete(page)

    def _unnamed(self) -> Iterable[str]:
        for page in paged(self.cache.payloads.list(f"{self.name}/")):
            parsed = [
                (listed.name, parse_payload_name(listed.name))
                for listed in page
                # What is younger may be on its way to its commit; gc finds it if it isn't.
                if self.clock() - listed.modified_s >= LEAST_AGE_S
            ]
            pairs = [(name, parts[1]) for name, parts in parsed if parts is not None]
            states = self.index.states(self.name, [segment for _, segment in pairs])
            yield from (name for (name, _), state in zip(pairs, states, strict=True) if state is None)

    def _erase(self) -> DropState:
        while (done := self.index.erase(self.name, _ERASE_STEP)) == "more":
            pass
        if done == "erased":
            return "erased"
        return "in_use" if self.index.usage(self.name).segments else "waiting"
