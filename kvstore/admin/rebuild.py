"""rebuild: the index from the headers of the payloads, when it was lost or emptied.

Every field of a record stands in the headers (kvstore.admin.records), so what comes back is what was there:
records, entries, usage. What does not stand there begins anew: a segment was used last when it was
written, nothing is pinned, quotas are the settings'. What had been evicted or invalidated and not yet deleted
is in the payload store like anything else, and comes back.

What the index knows is skipped, so that a rebuild that was cut short is continued by running it again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvstore.admin.cache import Cache, UnknownName
from kvstore.admin.checking import paged
from kvstore.admin.parallel import for_each
from kvstore.admin.plans import LeftOut, Tally
from kvstore.admin.progress import Progress, Silent
from kvstore.admin.recommit import AnyIndex, Incomplete, Patience, commit_whole, read_whole
from kvstore.admin.stock import Stock, Stored, take_stock
from kvstore.admin.targets import chosen, described
from kvstore.errors import CorruptPayload, KVStoreError, PermissionDenied, TransientError
from kvstore.keys import NamespaceId
from kvstore.ports import CommitState
from schemas.repairs import RebuildReport, RebuiltNamespace
from schemas.transfers import Ended


def rebuild(
    cache: Cache,
    prefixes: Sequence[str] = (),
    *,
    dry_run: bool = False,
    jobs: int = 8,
    progress: Progress | None = None,
    clock: Callable[[], float] = time.time,
) -> RebuildReport:
    """Commit every segment that has all its payloads and that the index does not know, of the namespaces
    whose ids start so (none: all).

    Makes the index if there is none. Ctrl-C and a backend that does not answer end it: the report says so,
    and what was committed until then stays. Raises UnknownName.
    """
    index = cache.index if dry_run else cache.made_index()
    run = _Rebuild(cache, index, jobs, dry_run, progress or Silent(), clock)
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
        dry_run=dry_run,
        ended=run.ended,
        problem=run.problem,
        namespaces=tuple(space.report(name) for name, space in run.spaces.items()),
        left_out=run.left.count,
        left=tuple(run.left.named),
        seconds=time.monotonic() - began,
    )


@dataclass
class _Space:
    """What became of one namespace's segments."""

    model: str = ""
    stored: int = 0
    known: int = 0
    listed: Tally = field(default_factory=Tally)
    incomplete: int = 0
    unusable: int = 0
    refused: int = 0

    def report(self, name: NamespaceId) -> RebuiltNamespace:
        return RebuiltNamespace(
            id=name,
            model=self.model,
            stored=self.stored,
            known=self.known,
            listed=self.listed.amount,
            incomplete=self.incomplete,
            unusable=self.unusable,
            refused=self.refused,
        )


@dataclass
class _Rebuild:
    """`_lock` guards the counts and the progress."""

    cache: Cache
    index: AnyIndex | None
    jobs: int
    dry_run: bool
    progress: Progress
    clock: Callable[[], float]
    ended: Ended = "complete"
    problem: str = ""
    spaces: dict[NamespaceId, _Space] = field(default_factory=dict)
    left: LeftOut = field(default_factory=LeftOut)
    _patience: Patience = field(default_factory=Patience)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def all(self, prefixes: Sequence[str]) -> None:
        """Every namespace that has payloads."""
        texts = self.index.namespaces() if self.index is not None else {}
        stocks = take_stock(self.cache.payloads, self.progress)
        names = chosen(prefixes, stocks)
        self.progress.begin("rebuild", sum(stocks[name].nbytes for name in names))
        for name in names:
            self.spaces[name] = _Space(described(texts.get(name))[1])
            for_each(partial(self._segment, name), self._unknown(name, stocks[name]), self.jobs)
            del stocks[name]

    def _unknown(self, name: NamespaceId, stock: Stock) -> Iterator[Stored]:
        """Segments that the index does not know; one that is incomplete there is committed once more."""
        space = self.spaces[name]
        for page in paged(stock.segments()):
            segments = [stored.segment for stored in page]
            states = self.index.states(name, segments) if self.index is not None else [None] * len(page)
            for stored, state in zip(page, states, strict=True):
                with self._lock:
                    space.stored += 1
                    if state is not None and state != "incomplete":
                        space.known += 1
                        self.progress.advance(stored.nbytes)
                        continue
                yield stored

    def _segment(self, name: NamespaceId, stored: Stored) -> None:
        space = self.spaces[name]
        try:
            whole = read_whole(self.cache.payloads, name, stored.segment, stored.sizes)
            self._patience.answered()
            state = CommitState.VISIBLE
            if not self.dry_run:
                assert self.index is not None, "made before"
                state = commit_whole(
                    self.index, self.cache.payloads, self.cache.settings, stored.segment, whole, self.clock()
                )
        except Incomplete as exc:
            self._leave(name, stored, exc)
            with self._lock:
                space.incomplete += 1
        except CorruptPayload as exc:
            self._leave(name, stored, exc)
            with self._lock:
                space.unusable += 1
        except (TransientError, PermissionDenied) as exc:
            self._leave(name, stored, exc)
            self._patience.unanswered(exc)
        else:
            with self._lock:
                space.model = space.model or described(whole.headers[0].meta.namespace)[1]
                if state is CommitState.VISIBLE:
                    space.listed.add(whole.record.slots, whole.record.nbytes)
                else:
                    space.refused += 1
            if state is not CommitState.VISIBLE:
                self._leave(name, stored, "the index does not take it: it was evicted or deleted meanwhile")
        with self._lock:
            self.progress.advance(stored.nbytes)

    def _leave(self, name: NamespaceId, stored: Stored, reason: KVStoreError | str) -> None:
        with self._lock:
            self.left.add(name, stored.segment, reason)
