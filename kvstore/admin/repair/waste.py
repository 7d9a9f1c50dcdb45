"""The first part of fsck: the payloads that are held, what the index knows of them, and which are waste.

    orphans          payloads that the index does not know in any state, from a certain age on: a save died
                     before its commit, a commit was never completed, or the index was emptied
    stray objects    that our writers left beside the payloads when they died (kvstore.payloads.strays)
    evidence         that is older than a week, or more than is kept (kvstore.payloads.evidence)
    housekeeping     as the janitor does it: invalidated segments go into the trash, payloads out of it,
                     dangling entries are swept, the accounts are counted anew
Foreign objects are listed and left alone. No payload is read.

Order, per batch, so that nothing is lost that a writer commits at the same moment:
    1. ask      the index for each segment's state       only unknown ones go on
    2. delete   their payloads                           crash: the rest is found the next time
    3. ask      again: a segment that has become visible meanwhile has lost its payloads, and is evicted
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvstore.admin.backends import Cache
from kvstore.admin.counting import amount_of, paged
from kvstore.admin.described import described
from kvstore.admin.progress import ProgressListener
from kvstore.admin.repair.reports import (
    Counted,
    Held,
    HeldLine,
    PayloadState,
    StrayCount,
    StrayKind,
    WastedNamespace,
    WasteReport,
)
from kvstore.admin.repair.survey import Stock, StoredSegment, surveyed
from kvstore.admin.reports import NAMED
from kvstore.build import open_strays
from kvstore.errors import DamagedIndex, KVStoreError
from kvstore.index.contract import SWEEP_MIN
from kvstore.index.maintenance import Account, FullIndex
from kvstore.keys import NamespaceId, payload_name
from kvstore.metrics import Counters
from kvstore.payloads.strays import Stray
from kvstore.store.housekeeping import SWEEP_STEP, Housekeeping

#: The most segments in the trash that are looked at to count those that are due.
_MOST_DUE = 10_000
#: More stray payloads than this make an index look lost: the first number if it knows nothing, or only some
#: namespaces are looked at, the second if it knows less than half.
_FEW, _MANY = 16, 256
_KINDS: tuple[StrayKind, ...] = ("probe", "temporary", "upload", "foreign")
_ORDER: tuple[PayloadState, ...] = ("visible", "incomplete", "bygone", "trash", "orphan", "unknown")


@dataclass
class _Count:
    """Objects counted one by one."""

    objects: int = 0
    nbytes: int = 0

    def add(self, objects: int, nbytes: int) -> None:
        self.objects += objects
        self.nbytes += nbytes

    @property
    def counted(self) -> Counted:
        return Counted(objects=self.objects, stored_bytes=self.nbytes)


@dataclass
class _Sum:
    """Payloads of one namespace in one state."""

    payloads: int = 0
    stored_bytes: int = 0
    oldest_s: float = float("inf")
    newest_s: float = float("-inf")

    def add(self, stored: StoredSegment) -> None:
        self.payloads += len(stored.sizes)
        self.stored_bytes += stored.nbytes
        self.oldest_s = min(self.oldest_s, stored.oldest_s)
        self.newest_s = max(self.newest_s, stored.modified_s)


@dataclass
class _Space:
    """The waste of one namespace."""

    account: Account | None
    orphans: list[StoredSegment] = field(default_factory=list)
    young: _Count = field(default_factory=_Count)
    due: int = 0
    #: Results of housekeeping, by their names in the report.
    done: dict[str, Any] = field(default_factory=lambda: defaultdict(int))


@dataclass
class Waste:
    """The payloads that are held, and those that nobody needs. Raises what the backends raise."""

    cache: Cache
    #: None: nobody has made one yet, and all payloads are orphans.
    index: FullIndex | None
    older_than_s: float
    progress: ProgressListener
    clock: Callable[[], float]
    #: Whether all namespaces are looked at, and what is beside the payloads too.
    everything: bool
    #: Why namespaces were left alone, or segments in the trash.
    problem: str = ""
    _texts: Mapping[NamespaceId, str] = field(default_factory=dict)
    _accounts: dict[NamespaceId, Account] = field(default_factory=dict)
    _held: dict[tuple[NamespaceId, PayloadState], _Sum] = field(default_factory=lambda: defaultdict(_Sum))
    _spaces: dict[NamespaceId, _Space] = field(default_factory=dict)
    _strays: list[Stray] = field(default_factory=list)
    _deleted: _Count = field(default_factory=_Count)
    _left_out: int = 0
    _payloads: int = 0
    #: Segments that the index knows in all namespaces.
    _known: int = 0

    def look(
        self,
        names: Collection[NamespaceId],
        texts: Mapping[NamespaceId, str],
        accounts: Sequence[Account],
        stocks: Mapping[NamespaceId, Stock],
    ) -> None:
        """Sums what these namespaces hold and finds all waste; changes nothing.

        The index was asked for `texts` and `accounts` before `stocks` were listed.
        """
        self._texts, empty = texts, Stock()
        self._known = sum(one.usage.segments for one in accounts)
        empty.settle()
        self._accounts = {one.namespace: one for one in accounts if one.namespace in names}
        self.progress.begin("ask the index")
        for name in names:
            stock = stocks.get(name, empty)
            if name in texts and name not in self._accounts:
                # A newer release's schema, or just dropped: the index can't say which payloads are needed.
                self._leave(name, stock)
                continue
            space = _Space(self._accounts.get(name))
            try:
                self._find(name, space, stock)
                if self.index is not None:
                    space.due = len(self.index.reapable(name, self.clock(), _MOST_DUE))
            except DamagedIndex as exc:
                # It can't be told which payloads are needed there. What is elsewhere is not to wait for that.
                self.problem = f"{name} is left alone: {exc}"
                self._leave(name, stock)
                continue
            self._payloads += len(stock)
            self._spaces[name] = space
        if self.everything:
            self.progress.begin("look beside the payloads")
            strays = open_strays(self.cache.settings)
            try:
                self._strays = list(strays.list())
            finally:
                strays.close()

    def _find(self, name: NamespaceId, space: _Space, stock: Stock) -> None:
        before = self.clock() - self.older_than_s
        for stored, state in surveyed(self.index, name, stock.segments()):
            self._held[name, state or "orphan"].add(stored)
            if state is not None:
                continue
            # The youngest of its ranks decides: the others may wait for it to be committed.
            if stored.modified_s <= before:
                space.orphans.append(stored)
            else:
                space.young.add(len(stored.sizes), stored.nbytes)

    def _leave(self, name: NamespaceId, stock: Stock) -> None:
        for state in _ORDER:
            self._held.pop((name, state), None)
        for stored in stock.segments():
            self._held[name, "unknown"].add(stored)

    def doubt(self) -> str:
        """Returns why the index, and not the payloads, may be what is wrong, or ""."""
        strays = sum(len(stored.sizes) for space in self._spaces.values() for stored in space.orphans)
        known = sum(space.account.usage.segments for space in self._spaces.values() if space.account)
        if self.everything:
            fine = (known or strays <= _FEW) and (strays <= _MANY or strays * 2 <= self._payloads)
        else:
            # A part of the store convinces by itself, or by few payloads under an index that knows others.
            fine = strays * 2 <= self._payloads or (self._known and strays <= _FEW)
        if fine:
            return ""
        return (
            f"the index knows {known} segments, and {strays} of {self._payloads} payloads are unknown "
            "to it: it may have been lost. Run `cache-admin rebuild --apply` first, which restores it from "
            "the payloads; --force deletes them all the same"
        )

    def delete(self) -> None:
        """Deletes the waste, in batches."""
        assert self.index is not None, "fsck refuses to delete without an index"
        settings = self.cache.settings
        housekeeping = Housekeeping(
            self.index, self.cache.payloads, settings, Counters(), self.clock, failed=self._failed
        )
        for name, space in self._spaces.items():
            self.progress.begin(f"collect {name}", sum(stored.nbytes for stored in space.orphans))
            if space.account is not None:
                self._maintain(self.index, housekeeping, name, space, space.account)
            for page in paged(space.orphans):
                self._delete(self.index, name, page)
        if self.everything:
            old = list(self.cache.evidence.trim(self.cache.payloads, self.clock()))
            self._deleted.add(len(old), sum(one.nbytes for one in old))
            self._remove()

    def _failed(self, exc: KVStoreError) -> None:
        self.problem = f"evicted segments could not all be deleted: {exc}"

    @staticmethod
    def _maintain(
        index: FullIndex, housekeeping: Housekeeping, name: NamespaceId, space: _Space, account: Account
    ) -> None:
        space.done["drained"] = housekeeping.drain(name)
        while reaped := housekeeping.reap(name):
            space.done["reaped"] += reaped
        # A sweep that drops less than it may has looked at SWEEP_MIN entries or buckets at least. Only these
        # sweeps are counted, so that each is looked at about once: on a busy store, where evictions leave
        # more dangling entries all the time, there is always one to drop.
        rounds = 2 + 2 * account.usage.blocks // SWEEP_MIN
        while rounds:
            swept = housekeeping.sweep(name)
            space.done["swept"] += swept
            rounds -= swept < SWEEP_STEP
        done = index.reconcile(name)
        is_wrong = done.mended > 0 or (done.counted is not None and done.counted != done.recorded)
        space.done["corrected"] = is_wrong

    def _delete(self, index: FullIndex, name: NamespaceId, page: Sequence[StoredSegment]) -> None:
        still = [stored for stored, state in surveyed(index, name, page) if state is None]
        self._left_out += sum(len(stored.sizes) for stored in page) - sum(len(s.sizes) for s in still)
        names = [payload_name(name, stored.segment, rank) for stored in still for rank in stored.sizes]
        self.cache.payloads.delete(names)
        nbytes = sum(stored.nbytes for stored in still)
        self._deleted.add(len(names), nbytes)
        self.progress.advance(nbytes)
        revived = [stored.segment for stored, state in surveyed(index, name, still) if state is not None]
        if revived:
            due = self.clock() + self.cache.settings.grace_s
            index.evict(name, revived, delete_after_s=due, rule="repair")

    def _remove(self) -> None:
        old = [stray for stray in self._strays if stray.kind != "foreign" and self._is_old(stray)]
        if not old:
            return
        strays = open_strays(self.cache.settings)
        try:
            removed = strays.remove(old, now_s=self.clock(), older_than_s=self.older_than_s)
        finally:
            strays.close()
        self._deleted.add(len(removed), sum(stray.nbytes for stray in removed))
        self._left_out += len(old) - len(removed)

    def _is_old(self, stray: Stray) -> bool:
        return self.clock() - stray.modified_s >= self.older_than_s

    @property
    def held(self) -> Held:
        """Returns what was listed, the largest namespace first."""
        lines = [
            HeldLine(namespace=name, model=self._model(name), state=state, **vars(held))
            for (name, state), held in self._held.items()
        ]
        largest: dict[str, int] = defaultdict(int)
        for line in lines:
            largest[line.namespace] += line.stored_bytes
        lines.sort(key=lambda line: (-largest[line.namespace], line.namespace, _ORDER.index(line.state)))
        return Held(
            payloads=sum(line.payloads for line in lines),
            stored_bytes=sum(line.stored_bytes for line in lines),
            lines=tuple(lines),
            indexed=amount_of(self._accounts.values()),
        )

    @property
    def report(self) -> WasteReport:
        """Returns the waste, and what became of it."""
        return WasteReport(
            older_than_s=self.older_than_s,
            namespaces=tuple(self._wasted(name, space) for name, space in self._spaces.items()),
            strays=tuple(self._counts()),
            foreign=tuple(stray.name for stray in self._strays if stray.kind == "foreign")[:NAMED],
            deleted=self._deleted.counted,
            left_out=self._left_out,
        )

    def _wasted(self, name: NamespaceId, space: _Space) -> WastedNamespace:
        orphans = _Count()
        for stored in space.orphans:
            orphans.add(len(stored.sizes), stored.nbytes)
        return WastedNamespace(
            id=name,
            model=self._model(name),
            orphans=orphans.counted,
            young=space.young.counted,
            trashed=space.account.trashed if space.account else 0,
            due=space.due,
            bygone=space.account.bygone if space.account else 0,
            **space.done,
        )

    def _model(self, name: NamespaceId) -> str:
        return described(self._texts.get(name))[1]

    def _counts(self) -> list[StrayCount]:
        counts = []
        for kind in _KINDS:
            old, young = _Count(), _Count()
            for stray in self._strays:
                if stray.kind == kind:
                    (old if self._is_old(stray) else young).add(1, stray.nbytes)
            if old.objects or young.objects:
                counts.append(StrayCount(kind=kind, old=old.counted, young=young.counted))
        return counts
