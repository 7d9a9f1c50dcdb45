"""KnownWriters: the knowledge of one process about the writers of one namespace, and which of them it may
load.

    own        this start of this engine: it computes the same as it wrote
    proven     somebody computes the same (kvstore.index.verdicts), or this engine has just found that out
    failed     its segments are absent, and are evicted where a match meets them. So are those without a
               writer, of an index that was brought up to date: nobody can judge them
    refused    this engine computes something else. It is not loaded from here, whatever the index says
    unproven   nobody has compared it, or it is disputed: a connector must compare before a token leaves

The thread that has matched asks for verdicts, and only on writers that are not settled. The verdict on this
engine's own writer is asked for when a commit was refused. An index that doesn't answer settles nothing:
unproven writers then stay unproven.

If an engine agrees with an earlier start at its own place, that proves little: a broken accelerator agrees
with itself. The engine loads the segments of that start, but does not report the agreement or stand by it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Literal

from kvstore.errors import KVStoreError
from kvstore.index.port import Run
from kvstore.index.verdicts import Opinion
from kvstore.keys import NamespaceId, PlaceId, WriterId, place_of
from kvstore.payloads.evidence import writer_denial
from kvstore.store.backends import Backends
from kvstore.store.quarantine import Quarantine
from schemas.records import NO_WRITER

log = logging.getLogger(__name__)

#: Writers that are remembered.
_REMEMBERED = 4096
#: Places with which an engine that agrees with none may differ before it leaves the namespace alone.
MOST_REFUSED = 3
#: Seconds for which an answer holds that settles nothing.
_AGAIN_S = 1.0

Standing = Literal["proven", "failed", "refused"]


class KnownWriters:
    """The writers of one namespace. Safe for threads."""

    def __init__(
        self,
        backends: Backends,
        namespace: NamespaceId,
        quarantine: Quarantine,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._backends = backends
        self._namespace = namespace
        self._quarantine = quarantine
        self._monotonic = monotonic
        self._lock = threading.Lock()
        # The lock guards the fields below it.
        self._settled: OrderedDict[WriterId, Standing] = OrderedDict()
        #: Writers that are not settled -> when this process last asked for their verdicts.
        self._open: OrderedDict[WriterId, float] = OrderedDict()
        #: Where writers that were refused here compute, as far as that is known.
        self._places: dict[WriterId, PlaceId] = {}
        #: Whether some writer at another place computes what this engine computes.
        self._stands = False

    def unproven(self, runs: Iterable[Run]) -> set[WriterId]:
        """Returns the writers of these runs from which nothing may be loaded before it is compared. No
        I/O."""
        writers = {WriterId(run.record.writer) for run in runs}
        with self._lock:
            return {one for one in writers if not self._is_believed(one)}

    def failed(self) -> set[WriterId]:
        """Returns the writers that have failed, as far as they were met here."""
        with self._lock:
            return {one for one, standing in self._settled.items() if standing != "proven"}

    def present(self, runs: Sequence[Run | None]) -> list[Run | None]:
        """Returns the runs, with None in place of those whose writer has failed; those are evicted. Asks the
        index for verdicts if it must; never raises."""
        writers = {WriterId(run.record.writer) for run in runs if run is not None}
        self._look_up(writers - {self._backends.writer.id, NO_WRITER})
        bad = self.failed() | {NO_WRITER}
        for run in runs:
            if run is None or not self._is_failed(WriterId(run.record.writer)):
                continue
            # One that was marked and not evicted would hide the blocks for as long as the index has them.
            if run.segment not in self._quarantine and not self._quarantine.is_full:
                self._quarantine.add(self._namespace, run.segment)
        return [None if run is None or run.record.writer in bad else run for run in runs]

    def look_up_own(self) -> None:
        """Asks the index for the verdict on this engine's own writer: a commit was refused. Never raises."""
        self._look_up([self._backends.writer.id])

    def settle(self, writer: WriterId, opinion: Opinion, name: str = "") -> None:
        """Records this engine's opinion of a writer, here at once and then in the index. Without its `name`
        the writer may be an earlier start at this very place. Never raises; for threads that may call the
        index."""
        place = place_of(name) if name else None
        alone = opinion == "alike" and place in (None, self._backends.writer.place)
        with self._lock:
            if opinion == "alike" and not alone:
                self._stands = True
            if opinion == "differs" and place is not None:
                self._places[writer] = place
            again = [one for one, standing in self._settled.items() if standing == "refused"]
            stands = self._stands
        self.believe(writer, "proven" if opinion == "alike" else "refused")
        if alone:
            return
        self._judge(writer, opinion, name, stands=stands)
        if opinion == "alike":
            # Those that it has disputed it now fails: some other engine computes what it computes.
            for one in again:
                self._judge(one, "differs", "", stands=True)

    def believe(self, writer: WriterId, standing: Standing) -> None:
        """Records what holds of a writer here. A writer that was refused here stays so."""
        with self._lock:
            self._open.pop(writer, None)
            before = self._settled.pop(writer, None)
            if before == "refused" and standing == "proven":
                standing = before
            self._settled[writer] = standing
            while len(self._settled) > _REMEMBERED:
                forgotten, _ = self._settled.popitem(last=False)
                self._places.pop(forgotten, None)

    @property
    def stands(self) -> bool:
        """Tells whether some writer at another place computes what this engine computes."""
        return self._stands

    @property
    def own_failed(self) -> bool:
        """Tells whether this engine's own writer has failed: its saves are then of no use to any engine."""
        return self._is_failed(self._backends.writer.id)

    def refusals(self) -> int:
        """Returns at how many places something else is computed than by this engine. A writer of which it is
        not known where it computes counts as a place."""
        with self._lock:
            refused = [one for one, standing in self._settled.items() if standing == "refused"]
            return len({self._places.get(one, one) for one in refused})

    def distrusts_itself(self) -> bool:
        """Returns whether this engine may be the one that is wrong: its own writer has failed, or it differs
        from so many places, and agrees with none."""
        return self.own_failed or (not self.stands and self.refusals() >= MOST_REFUSED)

    def _is_believed(self, writer: WriterId) -> bool:
        known = self._settled.get(writer)
        return known == "proven" or (known is None and writer == self._backends.writer.id)

    def _is_failed(self, writer: WriterId) -> bool:
        """Tells whether its segments are to go for everybody: a refusal is this engine's own."""
        with self._lock:
            return writer == NO_WRITER or self._settled.get(writer) == "failed"

    def _look_up(self, writers: Iterable[WriterId]) -> None:
        now, own = self._monotonic(), self._backends.writer.id
        with self._lock:
            asked = [
                one
                for one in writers
                if self._settled.get(one) in (None, "refused")
                and now - self._open.get(one, -_AGAIN_S) >= _AGAIN_S
            ]
            for one in asked:
                self._open[one] = now
            while len(self._open) > _REMEMBERED:
                self._open.popitem(last=False)
        if not asked:
            return
        try:
            known = self._backends.index.verdicts(self._namespace, asked)
        except KVStoreError as exc:
            log.debug("verdicts about %d writers come later: %s", len(asked), exc)
            return
        except Exception:
            log.exception("verdicts could not be read: an unexpected failure")
            return
        for writer, verdict in known.items():
            if verdict.state == "failed":
                # The engine that judged it may have ended before it could say so beside the payloads.
                self._backends.transfers.call(partial(self._deny, writer))
                log.error(
                    "%s %s (%s) of namespace %s has failed: its segments are taken as absent",
                    "this engine, which is writer" if writer == own else "writer",
                    writer.hex(), verdict.name or "not named", self._namespace,
                )  # fmt: skip
            if verdict.state != "disputed":
                self.believe(writer, verdict.state)

    def _deny(self, writer: WriterId) -> None:
        self._quarantine.deny(writer_denial(self._namespace, writer))

    def _judge(self, writer: WriterId, opinion: Opinion, name: str, *, stands: bool) -> None:
        try:
            state = self._backends.index.judge(
                self._namespace, writer, opinion, by=self._backends.writer.place, stands=stands, name=name
            )
        except KVStoreError as exc:
            log.warning("the verdict about writer %s could not be reported: %s", writer.hex(), exc)
            return
        except Exception:
            log.exception("a verdict could not be reported: an unexpected failure")
            return
        self._backends.counters.add(f"verdicts{{{state}}}")
        if state == "failed":
            self.believe(writer, "failed")
            # For an index that is made of the payloads, here and where they are copied to.
            self._deny(writer)
            log.error(
                "writer %s (%s) of namespace %s writes what other engines don't compute: its segments are "
                "taken as absent and evicted. Look at that engine: weights, accelerator, versions",
                writer.hex(), name or "not named", self._namespace,
            )  # fmt: skip
