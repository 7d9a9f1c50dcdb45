"""gc: finds and deletes what is stored and not needed. `fsck` is about the reverse.

    stray payloads   that the index does not know in any state, from a certain age on: a save died before its
                     commit, a commit was never completed, or the index was emptied (reported as `orphans`)
    stray objects    that our writers left beside the payloads when they died (kvstore.payloads.strays)
    evidence         that is older than a week, or more than is kept (kvstore.payloads.evidence)
    housekeeping     as the janitor does it: invalidated segments go into the trash, payloads out of it,
                     dangling entries are swept, the accounts are counted anew
Foreign objects are listed and left alone.

Order, per batch, so that nothing is lost that a writer commits at the same moment:
    1. ask      the index for each segment's state       only unknown ones go on
    2. delete   their payloads                           crash: the rest is found the next time
    3. ask      again: a segment that has become visible meanwhile has lost its payloads, and is evicted
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvstore.admin.backends import Cache, Refused
from kvstore.admin.counting import paged
from kvstore.admin.described import described
from kvstore.admin.progress import ProgressListener, Silent
from kvstore.admin.repair.survey import Stock, StoredSegment, take_stock
from kvstore.admin.repair.reports import CollectedNamespace, Counted, GcReport, StrayCount, StrayKind
from kvstore.admin.reports import NAMED, Ended
from kvstore.admin.selection import needed_index
from kvstore.build import open_strays
from kvstore.errors import DamagedIndex, KVStoreError
from kvstore.index.contract import SWEEP_MIN
from kvstore.index.maintenance import Account, FullIndex
from kvstore.keys import NamespaceId, payload_name
from kvstore.metrics import Counters
from kvstore.payloads.strays import Stray
from kvstore.rules.lateness import SETTLED_S
from kvstore.store.housekeeping import SWEEP_STEP, Housekeeping

#: The most segments in the trash that are looked at to count those that are due.
_MOST_DUE = 10_000
#: More stray payloads than this make an index look lost: the first number if it knows nothing, the second if
#: it knows less than half.
_FEW, _MANY = 16, 256
_KINDS: tuple[StrayKind, ...] = ("probe", "temporary", "upload", "foreign")


def gc(
    cache: Cache,
    *,
    delete: bool = False,
    older_than_s: float = 3600.0,
    force: bool = False,
    progress: ProgressListener | None = None,
    clock: Callable[[], float] = time.time,
) -> GcReport:
    """Finds waste of at least the age `older_than_s`, and with `delete` deletes it.

    Ctrl-C and a backend that does not answer end it: the report says so, and what was deleted until then is
    deleted. Raises Refused without an index, and, with `delete` and without `force`, if the index looks as if
    it had been lost: then it would be rebuilt from the payloads. Raises ValueError if `older_than_s` is too
    short.
    """
    if older_than_s < SETTLED_S:
        raise ValueError(
            f"older_than_s = {older_than_s:g}: what is younger than {SETTLED_S:g} s may still be saved"
        )
    run = _Gc(cache, needed_index(cache), older_than_s, progress or Silent(), clock)
    began = time.monotonic()
    try:
        run.look()
        if delete:
            run.doubt(force=force)
            cache.record("gc", f"waste older than {older_than_s:.0f} s{', by force' if force else ''}")
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
    """The waste of one namespace."""

    account: Account | None
    strays: list[StoredSegment] = field(default_factory=list)
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
        """Adds to the count."""
        self.objects += objects
        self.nbytes += nbytes

    @property
    def counted(self) -> Counted:
        """The count as a report has it."""
        return Counted(objects=self.objects, stored_bytes=self.nbytes)


@dataclass
class _Gc:
    cache: Cache
    index: FullIndex
    older_than_s: float
    progress: ProgressListener
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
        """Finds all waste; changes nothing."""
        self._texts = self.index.namespaces()
        accounts = {account.namespace: account for account in self.index.accounts()}
        stocks = take_stock(self.cache.payloads, self.progress)
        self.progress.begin("ask the index")
        for name in sorted({*accounts, *stocks}):
            if name in self._texts and name not in accounts:
                # A newer release's schema, or just dropped: the index can't say which payloads are needed.
                self.progress.begin(f"leave {name} alone")
                stocks.pop(name, None)
                continue
            space = _Space(accounts.get(name))
            stock = stocks.pop(name, None)
            try:
                if stock is not None:
                    self._find_strays(name, space, stock)
                space.due = len(self.index.reapable(name, self.clock(), _MOST_DUE))
            except DamagedIndex as exc:
                # It can't be told which payloads are needed there. What is elsewhere is not to wait for that.
                self.problem = f"{name} is left alone: {exc}"
                continue
            self._payloads += len(stock or ())
            self.spaces[name] = space
        self.progress.begin("look beside the payloads")
        strays = open_strays(self.cache.settings)
        try:
            self.strays = list(strays.list())
        finally:
            strays.close()

    def _find_strays(self, name: NamespaceId, space: _Space, stock: Stock) -> None:
        before = self.clock() - self.older_than_s
        for page in paged(stock.segments()):
            states = self.index.states(name, [stored.segment for stored in page])
            for stored, state in zip(page, states, strict=True):
                if state is not None:
                    continue
                # The youngest of its ranks decides: the others may wait for it to be committed.
                if stored.modified_s <= before:
                    space.strays.append(stored)
                else:
                    space.young.add(len(stored.sizes), stored.nbytes)

    def doubt(self, *, force: bool) -> None:
        """Raises Refused if the index, and not the payloads, may be what is wrong."""
        strays = sum(len(stored.sizes) for space in self.spaces.values() for stored in space.strays)
        known = sum(space.account.usage.segments for space in self.spaces.values() if space.account)
        lost = (not known and strays > _FEW) or (strays > _MANY and strays * 2 > self._payloads)
        if lost and not force:
            raise Refused(
                f"the index knows {known} segments, and {strays} of {self._payloads} payloads are unknown "
                "to it: it may have been lost. Run `cache-admin rebuild` first, which restores it from the "
                "payloads; --force deletes them all the same"
            )

    def delete(self) -> None:
        """Deletes the waste, in batches."""
        settings = self.cache.settings
        housekeeping = Housekeeping(
            self.index, self.cache.payloads, settings, Counters(), self.clock, failed=self._failed
        )
        for name, space in self.spaces.items():
            self.progress.begin(f"collect {name}", sum(stored.nbytes for stored in space.strays))
            if space.account is not None:
                self._maintain(housekeeping, name, space, space.account)
            for page in paged(space.strays):
                self._delete(name, page)
        old = list(self.cache.evidence.trim(self.cache.payloads, self.clock()))
        self.deleted.add(len(old), sum(one.nbytes for one in old))
        self._remove()

    def _failed(self, exc: KVStoreError) -> None:
        self.problem = f"evicted segments could not all be deleted: {exc}"

    def _maintain(
        self, housekeeping: Housekeeping, name: NamespaceId, space: _Space, account: Account
    ) -> None:
        space.drained = housekeeping.drain(name)
        while reaped := housekeeping.reap(name):
            space.reaped += reaped
        # A sweep that drops less than it may has looked at SWEEP_MIN entries or buckets at least. Only these
        # sweeps are counted, so that each is looked at about once: on a busy store, where evictions leave
        # more dangling entries all the time, there is always one to drop.
        rounds = 2 + 2 * account.usage.blocks // SWEEP_MIN
        while rounds:
            swept = housekeeping.sweep(name)
            space.swept += swept
            rounds -= swept < SWEEP_STEP
        done = self.index.reconcile(name)
        space.corrected = done.mended > 0 or (done.counted is not None and done.counted != done.recorded)

    def _delete(self, name: NamespaceId, page: Sequence[StoredSegment]) -> None:
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
        strays = Count()
        for stored in space.strays:
            strays.add(len(stored.sizes), stored.nbytes)
        return CollectedNamespace(
            id=name,
            model=described(self._texts.get(name))[1],
            orphans=strays.counted,
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
