"""What `cache-admin serve` sees of a cache. Two threads look at it, one at the index, one at the payloads;
whoever asks is answered from what they saw last: a request to the server never waits for a backend, and ten
scrapers cost no more than none.

A look at the index is a few round trips, and two or three for each of its largest namespaces; one that takes
too long is broken off, so that the loop turns whatever the index does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from kvstore import __version__
from kvstore.admin.cache import Cache
from kvstore.admin.history import History
from kvstore.admin.noticing import Noticed, readable
from kvstore.admin.surveying import Look, Survey
from kvstore.errors import KVStoreError
from kvstore.index.redis import RedisIndex
from kvstore.index.sqlite import SqliteIndex
from schemas.base import redact
from schemas.janitor import JanitorState
from schemas.reports import FastBackend
from schemas.serving import Answering, FaultLine, Held, ServingReport

LOOK_S = 5.0
#: A GET of a payload that isn't there: a bucket bills for it, so not as often.
ASK_PAYLOADS_S = 10.0
#: A backend that has not answered for so long is not ready.
READY_S = 30.0
#: A loop that has not turned for so long hangs.
HANGS_S = 60.0
_OWN_FAULTS = 20


@dataclass(frozen=True, slots=True)
class Readiness:
    """An answer to a probe, with a sentence."""

    ok: bool
    why: str


class Watch:
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
        self._noticed = Noticed(now)
        self._survey = Survey(cache.settings, self._history, self._noticed, clock=clock, monotonic=monotonic)
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

    def index(self) -> RedisIndex | SqliteIndex | None:
        """The index; None while it is a file that nobody has made. Raises what opening it raises."""
        with self._opening:
            return None if self._cache.index_absent else self._cache.made_index()

    # What the two threads do. A failure of a backend is what was found, not an exception.

    def look(self) -> None:
        """Look at the index once."""
        try:
            index = self.index()
            if index is not None:
                look = self._survey.take(index)
                with self._lock:
                    self._look = look
                self._survey.notice(index)
            self._found("index", "absent" if index is None else "ok", "")
        except KVStoreError as exc:
            self._found("index", "unreachable", readable(exc))
        fast = self._cache.fast_state()
        with self._lock:
            self._fast = fast
            self._turned = self._monotonic()

    def ask_payloads(self) -> None:
        """Ask the payload store once."""
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

    # What others ask. None of it does I/O.

    def last_look(self) -> Look | None:
        """None: the index has not answered yet."""
        with self._lock:
            return self._look

    def evictions_by_rule(self) -> Mapping[str, int]:
        """How many the journal told of since this server began."""
        return self._noticed.by_rule

    def backends(self) -> tuple[Answering, Answering, FastBackend | None]:
        """The index, the payloads, and this node's fast tier."""
        with self._lock:
            return self._answering["index"], self._answering["payloads"], self._fast

    def turning(self) -> Readiness:
        """Whether the loop that looks at the index turns."""
        with self._lock:
            idle_s = self._monotonic() - self._turned
        if idle_s > HANGS_S:
            return Readiness(False, f"the loop that looks at the index has not turned for {idle_s:.0f} s")
        return Readiness(True, "ok")

    def ready(self) -> Readiness:
        """Whether index and payloads have answered lately. What nobody has made yet counts as an answer:
        there is nothing to do for a janitor, and the first engine that saves makes it."""
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
        """All of it, with the last `window_s` of history."""
        now = self._clock()
        look, (index, payloads, fast) = self.last_look(), self.backends()
        noticed = self._noticed
        with self._lock:
            faults = [*self._faults, *noticed.faults]
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
            hottest=noticed.hottest,
            coldest=noticed.coldest,
            evictions=noticed.evictions,
            evictions_by_rule=noticed.by_rule,
            faults=tuple(faults),
            gains=noticed.gains,
            asked_blocks=sum(line.blocks.asked for line in lines),
            janitor=janitor,
        )
