"""gc: what is stored and nobody needs. `fsck` is about the reverse.

    orphans     payloads that the index does not know in any state, of a certain age: of a save that died
                before its commit, of a commit that was never completed, of an index that was emptied
    strays      what our writers left beside the payloads when they died (kvstore.blobs.strays)
    upkeep      what the janitor does as well: invalidated segments into the trash, payloads out of it,
                entries that lead to nothing swept, the accounts counted anew
Foreign objects are listed and left alone.

Order, per batch, so that nothing is lost that a writer commits at the same moment:
    1. ask      the index for each segment's state       only unknown ones go on
    2. delete   their payloads                           crash: the rest is found the next time
    3. ask      again: what has become visible meanwhile has lost its payloads, and is evicted
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvstore.admin.cache import Cache
from kvstore.admin.checking import paged
from kvstore.admin.exports import Refused
from kvstore.admin.progress import Progress, Silent
from kvstore.admin.recommit import AnyIndex
from kvstore.admin.stock import Stock, Stored, take_stock
from kvstore.admin.targets import described, needed_index
from kvstore.blobs.strays import Stray
from kvstore.build import open_strays
from kvstore.catalogue import Account
from kvstore.errors import KVStoreError
from kvstore.index.contract import SWEEP_MIN
from kvstore.keys import NamespaceId, payload_name
from kvstore.metrics import Counters
from kvstore.tending import SWEEP_STEP, Tending
from schemas.repairs import CollectedNamespace, Counted, GcReport, StrayCount, StrayKind
from schemas.transfers import NAMED, Ended

#: Younger than this a payload may still be about to be committed, whatever was asked for.
LEAST_AGE_S = 600.0
#: Trashed segments that are looked at to say how many are due.
_MOST_DUE = 10_000
#: Orphans from which an index that knows nothing, or less than half, looks like one that was lost.
_FEW, _MANY = 16, 256
_KINDS: tuple[StrayKind, ...] = ("probe", "temporary", "upload", "foreign")


def gc(
    cache: Cache,
    *,
    delete: bool = False,
    older_than_s: float = 3600.0,
    force: bool = False,
    progress: Progress | None = None,
    clock: Callable[[], float] = time.time,
) -> GcReport:
    """Find waste of at least that age, and remove it with `delete`.

    Ctrl-C and a backend that does not answer end it: the report says so, and what was deleted until then is
    deleted. Raises Refused without an index, and, with `delete` and without `force`, where the index looks as
    if it had been lost: then the payloads are what it would be rebuilt from.
    """
    if older_than_s < LEAST_AGE_S:
        raise ValueError(
            f"older_than_s = {older_than_s:g}: what is younger than {LEAST_AGE_S:g} s may still be saved"
        )
    run = _Gc(cache, needed_index(cache), older_than_s, progress or Silent(), clock)
    began = time.monotonic()
    try:
        run.look()
        if delete:
            run.doubt(force=force)
            run.delete()
    except KeyboardInterrupt:
        run.ended, run.problem = "cancelled", "cancelled"
    except Refused:
        raise
    except KVStoreError as exc:
        run.ended, run.problem = "failed", str(exc)
    return run.report(delete=delete, seconds=time.monotonic() - began)


@dataclass
class _Space:
    """What of one namespace is waste."""

    account: Account | None
    orphans: list[Stored] = field(default_factory=list)
    young: Count = field(default_factory=lambda: Count())
    due: int = 0
    reaped: int = 0
    drained: int = 0
    swept: int = 0
    corrected: bool = False


@dataclass
class Count:
    """Objects counted one by one."""

    objects: int = 0
    nbytes: int = 0

    def add(self, objects: int, nbytes: int) -> None:
        """So many more."""
        self.objects += objects
        self.nbytes += nbytes

    @property
    def counted(self) -> Counted:
        """As a report has it."""
        return Counted(objects=self.objects, stored_bytes=self.nbytes)


@dataclass
class _Gc:
    cache: Cache
    index: AnyIndex
    older_than_s: float
    progress: Progress
    clock: Callable[[], float]
    ended: Ended = "complete"
    problem: str = ""
    spaces: dict[NamespaceId, _Space] = field(default_factory=dict)
    strays: list[Stray] = field(default_factory=list)
    deleted: Count = field(default_factory=Count)
    left_out: int = 0
    _texts: dict[NamespaceId, str] = field(default_factory=dict)
    _payloads: int = 0

    def look(self) -> None:
        """Find all waste; changes nothing."""
        self._texts = self.index.namespaces()
        accounts = {account.namespace: account for account in self.index.accounts()}
        stocks = take_stock(self.cache.payloads, self.progress)
        self.progress.begin("ask the index")
        for name in sorted({*accounts, *stocks}):
            if name in self._texts and name not in accounts:
                # Of a newer release's schema, or just forgotten: what names its payloads can't be told.
                self.progress.begin(f"leave {name} alone")
                stocks.pop(name, None)
                continue
            self.spaces[name] = space = _Space(accounts.get(name))
            stock = stocks.pop(name, None)
            if stock is not None:
                self._payloads += len(stock)
                self._orphans(name, space, stock)
            space.due = len(self.index.due(name, self.clock(), _MOST_DUE))
        self.progress.begin("look beside the payloads")
        strays = open_strays(self.cache.settings)
        try:
            self.strays = list(strays.list())
        finally:
            strays.close()

    def _orphans(self, name: NamespaceId, space: _Space, stock: Stock) -> None:
        before = self.clock() - self.older_than_s
        for page in paged(stock.segments()):
            states = self.index.states(name, [stored.segment for stored in page])
            for stored, state in zip(page, states, strict=True):
                if state is not None:
                    continue
                # By the youngest of its ranks: the others may wait for it to be committed.
                if stored.modified_s <= before:
                    space.orphans.append(stored)
                else:
                    space.young.add(len(stored.sizes), stored.nbytes)

    def doubt(self, *, force: bool) -> None:
        """Raises Refused if the index, and not the payloads, may be what is wrong."""
        orphans = sum(len(stored.sizes) for space in self.spaces.values() for stored in space.orphans)
        known = sum(space.account.usage.segments for space in self.spaces.values() if space.account)
        lost = (not known and orphans > _FEW) or (orphans > _MANY and orphans * 2 > self._payloads)
        if lost and not force:
            raise Refused(
                f"the index knows {known} segments, and {orphans} of {self._payloads} payloads are unknown "
                "to it: it may have been lost. Run `cache-admin rebuild` first, which restores it from the "
                "payloads; --force deletes them all the same"
            )

    def delete(self) -> None:
        """Remove it, in batches."""
        settings = self.cache.settings
        tending = Tending(
            self.index, self.cache.payloads, settings, Counters(), self.clock, failed=self._failed
        )
        for name, space in self.spaces.items():
            self.progress.begin(f"collect {name}", sum(stored.nbytes for stored in space.orphans))
            if space.account is not None:
                self._upkeep(tending, name, space, space.account)
            for page in paged(space.orphans):
                self._delete(name, page)
        self._remove()

    def _failed(self, exc: KVStoreError) -> None:
        self.problem = f"evicted segments could not all be deleted: {exc}"

    def _upkeep(self, tending: Tending, name: NamespaceId, space: _Space, account: Account) -> None:
        space.drained = tending.drain(name)
        while reaped := tending.reap(name):
            space.reaped += reaped
        # A sweep that drops less than it may has looked at so many entries or buckets. They are counted once
        # each: on a busy store, where evictions leave more of them all the time, there is always one to drop.
        rounds = 2 + 2 * account.usage.blocks // SWEEP_MIN
        while rounds:
            swept = tending.sweep(name)
            space.swept += swept
            rounds -= swept < SWEEP_STEP
        done = self.index.reconcile(name)
        space.corrected = done.mended > 0 or (done.counted is not None and done.counted != done.recorded)

    def _delete(self, name: NamespaceId, page: Sequence[Stored]) -> None:
        segments = [stored.segment for stored in page]
        states = self.index.states(name, segments)
        still = [stored for stored, state in zip(page, states, strict=True) if state is None]
        self.left_out += sum(len(stored.sizes) for stored in page) - sum(len(s.sizes) for s in still)
        names = [payload_name(name, stored.segment, rank) for stored in still for rank in stored.sizes]
        self.cache.payloads.delete(names)
        nbytes = sum(stored.nbytes for stored in still)
        self.deleted.add(len(names), nbytes)
        self.progress.advance(nbytes)
        after = self.index.states(name, [stored.segment for stored in still])
        revived = [s.segment for s, state in zip(still, after, strict=True) if state is not None]
        if revived:
            due = self.clock() + self.cache.settings.grace_s
            self.index.evict(name, revived, delete_after_s=due, rule="repair")

    def _remove(self) -> None:
        old = [stray for stray in self.strays if stray.kind != "foreign" and self._is_old(stray)]
        if not old:
            return
        strays = open_strays(self.cache.settings)
        try:
            removed = strays.remove(old, now_s=self.clock(), older_than_s=self.older_than_s)
        finally:
            strays.close()
        self.deleted.add(len(removed), sum(stray.nbytes for stray in removed))
        self.left_out += len(old) - len(removed)

    def _is_old(self, stray: Stray) -> bool:
        return self.clock() - stray.modified_s >= self.older_than_s

    def report(self, *, delete: bool, seconds: float) -> GcReport:
        return GcReport(
            at_s=self.clock(),
            delete=delete,
            older_than_s=self.older_than_s,
            ended=self.ended,
            problem=self.problem,
            namespaces=tuple(self._collected(name, space) for name, space in self.spaces.items()),
            strays=tuple(self._counts()),
            foreign=tuple(stray.name for stray in self.strays if stray.kind == "foreign")[:NAMED],
            deleted=self.deleted.counted,
            left_out=self.left_out,
            seconds=seconds,
        )

    def _collected(self, name: NamespaceId, space: _Space) -> CollectedNamespace:
        orphans = Count()
        for stored in space.orphans:
            orphans.add(len(stored.sizes), stored.nbytes)
        return CollectedNamespace(
            id=name,
            model=described(self._texts.get(name))[1],
            orphans=orphans.counted,
            young=space.young.counted,
            trashed=space.account.trashed if space.account else 0,
            due=space.due,
            bygone=space.account.bygone if space.account else 0,
            reaped=space.reaped,
            drained=space.drained,
            swept=space.swept,
            corrected=space.corrected,
        )

    def _counts(self) -> list[StrayCount]:
        counts = []
        for kind in _KINDS:
            old, young = Count(), Count()
            for stray in self.strays:
                if stray.kind == kind:
                    (old if self._is_old(stray) else young).add(1, stray.nbytes)
            if old.objects or young.objects:
                counts.append(StrayCount(kind=kind, old=old.counted, young=young.counted))
        return counts
