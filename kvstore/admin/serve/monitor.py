"""The state of a cache, as `cache-admin serve` shows it.

Two threads look at it, one at the index, one at the payloads. Every request to the server is answered from
what they saw last: it never waits for a backend, and ten scrapers cost no more than none.

A look at the index is a few round trips, and three or four for each of its largest namespaces. Half a second
of it goes to the sessions, if there are many. A look that
takes too long is broken off, so that the loop turns whatever the index does.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvstore import __version__
from kvstore.admin.backends import Cache
from kvstore.admin.inspect.namespaces import Overview
from kvstore.admin.inspect.stats import stats_of
from kvstore.admin.inspect.status import status_of
from kvstore.admin.reports import BackendState, FastBackend
from kvstore.admin.serve.collector import IndexCollector, Look
from kvstore.admin.serve.reports import Answering, FaultLine, ServingReport
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


@dataclass(frozen=True, slots=True)
class Backend:
    """A backend as it was found last; unreachable before it was asked."""

    state: BackendState
    answering: Answering
    #: When it answered last, by the clock that only goes forward.
    answered_at: float | None = None


class Monitor:
    """Looks at one cache. `look` and `ask_payloads` are for one thread each, the rest for any."""

    def __init__(
        self,
        cache: Cache,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cache = cache
        self._clock = clock
        self._monotonic = monotonic
        self._started_s = clock()
        self._collector = IndexCollector(cache.settings, clock=clock, monotonic=monotonic)
        self._opening = threading.Lock()
        self._lock = threading.Lock()
        self._look: Look | None = None
        self._fast: FastBackend | None = None
        self._turned = monotonic()
        self._faults: tuple[FaultLine, ...] = ()
        self._backends = {
            "index": _unasked(cache.settings.index_url),
            "payloads": _unasked(cache.settings.origin),
        }

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
                self._collector.highlight(index, look)
            self._found("index", state="absent" if index is None else "ok", problem="")
        except KVStoreError as exc:
            self._found("index", state="unreachable", problem=readable(exc))
        except Exception as exc:
            # Not ready then; but the loop turns, and no restart would help.
            log.exception("a look at the index failed unexpectedly")
            self._found("index", state="unreachable", problem=f"a look at it failed: {readable(repr(exc))}")
        finally:
            with self._lock:
                self._turned = self._monotonic()
        fast = self._cache.fast_state()
        with self._lock:
            self._fast = fast

    def ask_payloads(self) -> None:
        """Asks the payload store once."""
        found = self._cache.payloads_state()
        self._found("payloads", state=found.state, problem=readable(found.problem))

    def _found(self, name: str, **found: str) -> None:
        now = self._clock()
        with self._lock:
            before = self._backends[name]
            state = BackendState.model_validate({"url": before.state.url, **found})
            answers = state.state != "unreachable"
            changed = before.answering.since_s is None or before.state.state != state.state
            self._backends[name] = Backend(
                state,
                Answering(
                    since_s=now if changed else before.answering.since_s,
                    answered_s=now if answers else before.answering.answered_s,
                ),
                self._monotonic() if answers else before.answered_at,
            )
            if changed and not answers:
                fault = FaultLine(at_s=now, where=name, problem=state.problem)
                self._faults = (fault, *self._faults)[:_OWN_FAULTS]

    # What other threads ask. None of it does I/O.

    def last_look(self) -> Look | None:
        """Returns the last look at the index; None if it has not answered yet."""
        with self._lock:
            return self._look

    def evictions_by_rule(self) -> Mapping[str, int]:
        """Returns by rule how many evictions the journal has told of since this server began."""
        return self._collector.highlights.by_rule

    def backends(self) -> tuple[Backend, Backend, FastBackend | None]:
        """Returns the states of the index, the payloads, and this node's fast tier (None: there is none)."""
        with self._lock:
            return self._backends["index"], self._backends["payloads"], self._fast

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
        index, payloads, _ = self.backends()
        now = self._monotonic()
        for name, found in (("index", index), ("payloads", payloads)):
            seconds = None if found.answered_at is None else now - found.answered_at
            if seconds is None or seconds > READY_S:
                long = "yet" if seconds is None else f"for {seconds:.0f} s"
                why = f": {found.state.problem}" if found.state.problem else ""
                return Readiness(False, f"no answer from {name} ({found.state.url}) {long}{why}")
        return Readiness(True, "ok")

    def report(self, window_s: int, janitor: JanitorState | None) -> ServingReport:
        """Returns all that is known, with the last `window_s` seconds of history."""
        now, settings, seen = self._clock(), self._cache.settings, self._collector
        look, (index, payloads, fast) = self.last_look(), self.backends()
        if look is None:
            unknown = BackendState(url="", state="unreachable")
            status = status_of(
                Overview(), (), settings, index=unknown, payloads=unknown, fast=None, now_s=now
            )
        else:
            status = look.status
        states = {"index": index.state, "payloads": payloads.state, "fast": fast}
        accounts = () if look is None else (*look.named, *look.others)
        return ServingReport(
            version=__version__,
            at_s=now,
            started_s=self._started_s,
            looked_s=None if look is None else look.at_s,
            status=status.model_copy(update=states),
            index=index.answering,
            payloads=payloads.answering,
            others=0 if look is None else len(look.others),
            cost_s=sum(account.usage.cost_us for account in accounts) / 1e6,
            stats=stats_of((), {}, {}, None, now) if look is None else look.stats,
            history=seen.history.report(now, window_s),
            top=seen.highlights.top,
            events=seen.highlights.events,
            evictions_by_rule=seen.highlights.by_rule,
            sessions=seen.sessions.seen,
            sessions_read_s=seen.sessions.read_s,
            retainable_bytes=int(settings.sessions.retain_share * status.capacity_bytes),
            faults=self._all_faults(look, janitor),
            janitor=janitor,
        )

    def _all_faults(self, look: Look | None, janitor: JanitorState | None) -> tuple[FaultLine, ...]:
        """Returns faults of this server, of requests and of the janitor, and damage; the newest first."""
        with self._lock:
            faults = [*self._faults, *self._collector.highlights.faults]
        for fault in () if janitor is None else janitor.faults:
            of, problem = {"namespace": fault.namespace, "subject": fault.segment}, readable(fault.problem)
            faults.append(FaultLine(at_s=fault.at_s, where=f"janitor: {fault.step}", problem=problem, **of))
        if look is not None:
            for name, problem in {**self._collector.damaged, **look.damaged}.items():
                faults.append(
                    FaultLine(at_s=look.at_s, where="index", namespace=name, problem=readable(problem))
                )
        return tuple(sorted(faults, key=lambda fault: -fault.at_s))


def _unasked(url: str) -> Backend:
    return Backend(BackendState(url=redact(url), state="unreachable"), Answering())
