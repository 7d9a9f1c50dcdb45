"""rebuild: makes the index again from the headers of the payloads, when it was lost or emptied.

Every field of a record stands in the headers (kvstore.verify.headers), so records, entries and usage come
back as they were. The rest begins anew: the last use of a segment is when it was written, nothing is pinned,
and quotas are those of the settings. A segment that made room for others and is not yet deleted comes back,
too: its payloads look like any others. What may not be served does not (kvstore.verify.returning).

Segments that the index knows are skipped, so a rebuild that was cut short is continued by running it again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf

from kvstore.admin.backends import Cache, UnknownName
from kvstore.admin.counting import AmountSum, LeftOut
from kvstore.admin.described import described
from kvstore.admin.operators import among
from kvstore.admin.patience import Patience
from kvstore.admin.progress import ProgressListener, Silent
from kvstore.admin.repair.recommit import recommit
from kvstore.admin.repair.reports import RebuildReport, RebuiltNamespace
from kvstore.admin.repair.survey import Stock, StoredSegment, surveyed, take_stock
from kvstore.admin.reports import Ended
from kvstore.admin.selection import chosen
from kvstore.errors import (
    CorruptPayload,
    KVStoreError,
    PayloadMissing,
    PermissionDenied,
    TransientError,
    UnreadablePayload,
    UnsignedPayload,
)
from kvstore.index.maintenance import FullIndex
from kvstore.index.port import CommitState
from kvstore.keys import NamespaceId
from kvstore.threads.each import for_each
from kvstore.verify.returning import WHY, Returns
from kvstore.verify.segments import read_whole


def rebuild(
    cache: Cache,
    prefixes: Sequence[str] = (),
    *,
    apply: bool = False,
    jobs: int = 8,
    progress: ProgressListener | None = None,
    clock: Callable[[], float] = time.time,
) -> RebuildReport:
    """Commits every segment that has all its payloads and that the index does not know; without `apply`
    reads their headers and only says so.

    These are segments of the namespaces whose ids start with one of `prefixes`, or of all. Creates the index
    if there is none. Ctrl-C and a backend that does not answer end it: the report says so, and what was
    committed until then stays. Raises UnknownName.
    """
    index = cache.made_index() if apply else cache.index
    run = Rebuild(cache, index, jobs, apply, progress or Silent(), clock)
    began = time.monotonic()
    try:
        run.all(prefixes)
    except KeyboardInterrupt:
        run.ended, run.problem = "cancelled", "cancelled; run it again to go on"
    except UnknownName:
        raise
    except KVStoreError as exc:
        run.ended, run.problem = "failed", str(exc)
    return RebuildReport(
        at_s=clock(),
        applied=apply,
        ended=run.ended,
        problem=run.problem,
        namespaces=tuple(space.report(name) for name, space in run.spaces.items()),
        left_out=run.left.count,
        left=tuple(run.left.named),
        seconds=time.monotonic() - began,
    )


@dataclass
class _Space:
    """Counts of what became of one namespace's segments."""

    model: str = ""
    stored: int = 0
    known: int = 0
    listed: AmountSum = field(default_factory=AmountSum)
    incomplete: int = 0
    unusable: int = 0
    refused: int = 0
    erased: int = 0
    unsigned: int = 0
    unreadable: int = 0

    def report(self, name: NamespaceId) -> RebuiltNamespace:
        return RebuiltNamespace(id=name, **(vars(self) | {"listed": self.listed.amount}))


@dataclass
class Rebuild:
    """A run of `rebuild`. `_lock` guards the counts and the progress."""

    cache: Cache
    index: FullIndex | None
    jobs: int
    apply: bool
    progress: ProgressListener
    clock: Callable[[], float]
    ended: Ended = "complete"
    problem: str = ""
    spaces: dict[NamespaceId, _Space] = field(default_factory=dict)
    left: LeftOut = field(default_factory=LeftOut)
    #: Unix seconds at which the youngest and the oldest segment were made that were committed; none: 0, inf.
    newest_s: float = 0.0
    oldest_s: float = inf
    _patience: Patience = field(default_factory=Patience)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        #: What may come back, as it was when it was asked about first.
        self.returns = Returns(self.index, self.cache.evidence)

    def all(self, prefixes: Sequence[str]) -> None:
        """Rebuilds every namespace that has payloads."""
        stocks = take_stock(self.cache.payloads, self.progress, [prefix.lower() for prefix in prefixes])
        names = chosen(prefixes, stocks)
        if names and self.apply:
            self.cache.record("rebuild", f"from the payloads of {among(names)}")
        self.commit(stocks, names)

    def commit(self, stocks: dict[NamespaceId, Stock], names: Sequence[NamespaceId]) -> None:
        """Commits what the index does not know of these namespaces' payloads. Empties `stocks` on its way."""
        texts = self.index.namespaces() if self.index is not None else {}
        self.progress.begin("rebuild", sum(stocks[name].nbytes for name in names))
        for name in names:
            self.spaces.setdefault(name, _Space(described(texts.get(name))[1]))
            for_each(partial(self._segment, name), self._unknown(name, stocks[name]), self.jobs)
            del stocks[name]

    def _unknown(self, name: NamespaceId, stock: Stock) -> Iterator[StoredSegment]:
        """Yields segments that the index does not know, or knows as incomplete."""
        space = self.spaces[name]
        for stored, state in surveyed(self.index, name, stock.segments()):
            with self._lock:
                space.stored += 1
                if state is not None and state != "incomplete":
                    space.known += 1
                    self.progress.advance(stored.nbytes)
                    continue
            yield stored

    def _segment(self, name: NamespaceId, stored: StoredSegment) -> None:
        space = self.spaces[name]
        try:
            whole = read_whole(self.cache.payloads, self.cache.keyring, name, stored.segment, stored.sizes)
            self._patience.answered()
            state, barred = CommitState.VISIBLE, self.returns.barred(name, stored.segment, whole.record)
            if self.apply and barred is None:
                state = recommit(self.cache, stored.segment, whole, self.returns, self.clock())
        except PayloadMissing as exc:
            self._leave(name, stored, exc)
            with self._lock:
                space.incomplete += 1
        except CorruptPayload as exc:
            self._leave(name, stored, exc)
            with self._lock:
                space.unusable += 1
                space.unsigned += isinstance(exc, UnsignedPayload)
        except UnreadablePayload as exc:
            self._leave(name, stored, exc)
            with self._lock:
                space.unreadable += 1
        except (TransientError, PermissionDenied) as exc:
            self._leave(name, stored, exc)
            self._patience.unanswered(exc)
        else:
            with self._lock:
                space.model = space.model or described(whole.headers[0].meta.namespace)[1]
                if state is CommitState.VISIBLE and barred is None:
                    space.listed.add(whole.record.slots, whole.record.nbytes)
                    self.newest_s = max(self.newest_s, whole.record.created_s)
                    self.oldest_s = min(self.oldest_s, whole.record.created_s)
                else:
                    space.refused += 1
                    space.erased += barred == "erased"
            if barred is not None:
                self._leave(name, stored, WHY[barred])
            elif state is not CommitState.VISIBLE:
                self._leave(name, stored, "the index does not take it: it was evicted or deleted meanwhile")
        with self._lock:
            self.progress.advance(stored.nbytes)

    def _leave(self, name: NamespaceId, stored: StoredSegment, reason: KVStoreError | str) -> None:
        with self._lock:
            self.left.add(name, stored.segment, reason)
