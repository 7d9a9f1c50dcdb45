"""What `cache-admin serve` knows of a cache.

Two threads look at it, one at the index, one at the payloads. Every request to the server is answered from
what they saw last: it never waits for a backend, and ten scrapers cost no more than none.

A look at the index is a few round trips, and two or three for each of its largest namespaces; half a second
of it goes to the sessions, if there are many. A look that
takes too long is broken off, so that the loop turns whatever the index does.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from kvstore import __version__
from kvstore.admin.backends import Cache
from kvstore.admin.reports import FastBackend
from kvstore.admin.serve.collector import IndexCollector, Look
from kvstore.admin.serve.highlights import Highlights
from kvstore.admin.serve.history import History
from kvstore.admin.serve.reports import Answering, FaultLine, Held, ServingReport
from kvstore.admin.serve.sessions import SessionRounds
from kvstore.errors import KVStoreError
from kvstore.index.maintenance import FullIndex
from kvstore.janitor.reports import JanitorState
from kvstore.rules.text import readable
from schemas.base import redact

log = logging.getLogger(__name__)

#: Seconds from one look at the index to the next.
LOOK_S = 5.0
#: Seconds between two GETs of a payload that isn't there: a bucket bills for them, so they are not as often.
ASK_PAYLOADS_S = 10.0
#: Seconds after which a backend that has not answered is not ready.
READY_S = 30.0
#: Seconds after which a loop that has not turned hangs.
HANGS_S = 60.0
_OWN_FAULTS = 20


@dataclass(frozen=True, slots=True)
class Readiness:
    """An answer to a probe, and a sentence that explains it."""

    ok: bool
    why: str


class Monitor:
    """Looks at one cache. `look` and `ask_payloads` are for one thread each, the rest for any."""

    def __init__(
        self,
        cache: Cache,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        now = clock()
        self._cache = cache
        self._clock = clock
        self._monotonic = monotonic
        self._started_s = now
        self._history = History(now)
        self._highlights = Highlights(now)
        self._sessions = SessionRounds(clock, monotonic)
        self._collector = IndexCollector(
            cache.settings, self._history, self._highlights, self._sessions, clock=clock, monotonic=monotonic
        )
        self._opening = threading.Lock()
        self._lock = threading.Lock()
        self._look: Look | None = None
        self._fast: FastBackend | None = None
        self._turned = monotonic()
        self._faults: tuple[FaultLine, ...] = ()
        self._answering = {
            "index": Answering(url=redact(cache.settings.index_url), state="unknown", since_s=now),
            "payloads": Answering(url=redact(cache.settings.origin), state="unknown", since_s=now),
        }
        self._answered: dict[str, float] = {}

    def index(self) -> FullIndex | None:
        """Returns the index; None while it is a file that nobody has made. Raises what opening it raises."""
        with self._opening:
            return None if self._cache.index_absent else self._cache.made_index()

    # The work of the two threads. They note a failure as the backend's state, and do not raise it.

    def look(self) -> None:
        """Looks at the index once."""
        try:
            index = self.index()
            if index is not None:
                look = self._collector.take(index)
                with self._lock:
                    self._look = look
                self._collector.highlight(index)
            self._found("index", "absent" if index is None else "ok", "")
        except KVStoreError as exc:
            self._found("index", "unreachable", readable(exc))
        except Exception as exc:
            # Not ready then; but the loop turns, and no restart would help.
            log.exception("a look at the index failed unexpectedly")
            self._found("index", "unreachable", f"a look at it failed: {readable(repr(exc))}")
        finally:
            with self._lock:
                self._turned = self._monotonic()
        fast = self._cache.fast_state()
        with self._lock:
            self._fast = fast

    def ask_payloads(self) -> None:
        """Asks the payload store once."""
        found = self._cache.payloads_state()
        self._found("payloads", found.state, readable(found.problem))

    def _found(self, name: str, state: Literal["ok", "absent", "unreachable"], problem: str) -> None:
        now = self._clock()
        with self._lock:
            before = self._answering[name]
            changed = before.state != state
            if state != "unreachable":
                self._answered[name] = self._monotonic()
            self._answering[name] = Answering(
                url=before.url,
                state=state,
                problem=problem,
                since_s=now if changed else before.since_s,
                answered_s=before.answered_s if state == "unreachable" else now,
            )
            if changed and state == "unreachable":
                fault = FaultLine(at_s=now, where=name, namespace="", subject="", problem=problem)
                self._faults = (fault, *self._faults)[:_OWN_FAULTS]

    # What other threads ask. None of it does I/O.

    def last_look(self) -> Look | None:
        """Returns the last look at the index; None if it has not answered yet."""
        with self._lock:
            return self._look

    def evictions_by_rule(self) -> Mapping[str, int]:
        """Returns by rule how many evictions the journal has told of since this server began."""
        return self._highlights.by_rule

    def backends(self) -> tuple[Answering, Answering, FastBackend | None]:
        """Returns the states of the index, the payloads, and this node's fast tier (None: there is none)."""
        with self._lock:
            return self._answering["index"], self._answering["payloads"], self._fast

    def turning(self) -> Readiness:
        """Returns whether the loop that looks at the index turns."""
        with self._lock:
            idle_s = self._monotonic() - self._turned
        if idle_s > HANGS_S:
            return Readiness(False, f"the loop that looks at the index has not turned for {idle_s:.0f} s")
        return Readiness(True, "ok")

    def ready(self) -> Readiness:
        """Returns whether index and payloads have answered lately.

        A backend that nobody has made yet counts as one that answers: a janitor has nothing to do, and the
        first engine that saves makes it.
        """
        with self._lock:
            now = self._monotonic()
            answering = dict(self._answering)
            silent = {
                name: now - self._answered[name] if name in self._answered else None for name in answering
            }
        for name, seconds in silent.items():
            if seconds is None or seconds > READY_S:
                long = "yet" if seconds is None else f"for {seconds:.0f} s"
                why = f": {problem}" if (problem := answering[name].problem) else ""
                return Readiness(False, f"no answer from {name} ({answering[name].url}) {long}{why}")
        return Readiness(True, "ok")

    def report(self, window_s: int, janitor: JanitorState | None) -> ServingReport:
        """Returns all that is known, with the last `window_s` seconds of history."""
        now = self._clock()
        look, (index, payloads, fast) = self.last_look(), self.backends()
        highlights = self._highlights
        with self._lock:
            faults = [*self._faults, *highlights.faults]
        faults += [
            FaultLine(
                at_s=fault.at_s,
                where=f"janitor: {fault.step}",
                namespace=fault.namespace,
                subject=fault.segment,
                problem=readable(fault.problem),
            )
            for fault in (() if janitor is None else janitor.faults)
        ]
        damaged = {} if look is None else {**highlights.damaged, **look.damaged}
        faults += [
            FaultLine(
                at_s=look.at_s if look is not None else now,
                where="index",
                namespace=name,
                subject="",
                problem=readable(problem),
            )
            for name, problem in damaged.items()
        ]
        faults.sort(key=lambda fault: -fault.at_s)
        lines = () if look is None else look.named
        return ServingReport(
            version=__version__,
            at_s=now,
            started_s=self._started_s,
            looked_s=None if look is None else look.at_s,
            look_seconds=None if look is None else look.seconds,
            index=index,
            payloads=payloads,
            fast=fast,
            capacity_bytes=self._cache.settings.capacity_bytes if look is None else look.capacity_bytes,
            total=Held() if look is None else look.total,
            quotas=() if look is None else look.quotas,
            namespaces=lines,
            others=0 if look is None else look.others,
            others_held=Held() if look is None else look.others_held,
            history=self._history.report(now, window_s),
            hottest=highlights.hottest,
            coldest=highlights.coldest,
            evictions=highlights.evictions,
            evictions_by_rule=highlights.by_rule,
            sessions=self._sessions.seen,
            faults=tuple(faults),
            gains=highlights.gains,
            asked_blocks=sum(line.blocks.asked for line in lines),
            janitor=janitor,
        )
