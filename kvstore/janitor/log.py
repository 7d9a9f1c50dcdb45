"""A janitor's record of what it has done and what went wrong: written by its thread, read by any."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from kvstore.janitor.reports import STEPS, JanitorFault, JanitorState, ScrubState, Step, StepState

log = logging.getLogger(__name__)

#: How many faults are remembered.
_FAULTS = 50


@dataclass
class _Line:
    """The fields of a StepState, to be written."""

    runs: int = 0
    failures: int = 0
    done: int = 0
    seconds: float = 0.0
    last_run_s: float | None = None
    failing: bool = False
    problem: str = ""
    problem_s: float | None = None


class Logbook:
    """Counts runs, failures and faults of a janitor's steps.

    Safe for many threads: one lock guards all of it.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._lines: dict[Step, _Line] = {step: _Line() for step in STEPS}
        #: The oldest first. The key is all of a fault but when it was seen and how often.
        self._faults: OrderedDict[tuple[str, str, str, str], JanitorFault] = OrderedDict()
        self._problems: dict[Step, int] = dict.fromkeys(STEPS, 0)
        self._ended_s: float | None = None
        self._seconds: float | None = None
        self.rounds = 0

    def round_ended(self, seconds: float) -> None:
        """Notes that a round is over, complete or not."""
        with self._lock:
            self.rounds += 1
            self._ended_s, self._seconds = self._clock(), seconds

    def begin(self, step: Step) -> None:
        """Notes that a run of the step begins."""
        with self._lock:
            line = self._lines[step]
            line.runs += 1
            line.last_run_s = self._clock()
            self._problems[step] = 0

    def did(self, step: Step, count: int) -> None:
        """Adds to what the step counts (kvstore.janitor.reports.DONE)."""
        with self._lock:
            self._lines[step].done += count

    def failed(self, step: Step, problem: str, *, namespace: str = "") -> None:
        """Notes that something failed in this run of the step."""
        with self._lock:
            line = self._lines[step]
            is_news = not line.failing or line.problem != problem
            self._problems[step] += 1
            line.failing, line.problem, line.problem_s = True, problem, self._clock()
        if is_news:
            log.warning("janitor: %s%s: %s", step, f" of {namespace}" if namespace else "", problem)
        self.fault(step, problem, namespace=namespace)

    def end(self, step: Step, seconds: float) -> bool:
        """Notes that the run is over, and returns whether anything in it failed."""
        with self._lock:
            line, failed = self._lines[step], self._problems[step] > 0
            line.seconds += seconds
            line.failures += failed
            recovered = line.failing and not failed
            line.failing = failed
        if recovered:
            log.info("janitor: %s works again", step)
        return failed

    def is_failing(self, step: Step) -> bool:
        """Whether anything in the present run failed."""
        with self._lock:
            return self._problems[step] > 0

    def fault(self, step: Step, problem: str, *, namespace: str = "", segment: str = "") -> None:
        """Remembers a fault; one that is known already is counted as seen once more."""
        key = (step, namespace, segment, problem)
        with self._lock:
            known = self._faults.pop(key, None)
            self._faults[key] = JanitorFault(
                at_s=self._clock(),
                step=step,
                namespace=namespace,
                segment=segment,
                problem=problem,
                times=known.times + 1 if known else 1,
            )
            while len(self._faults) > _FAULTS:
                self._faults.popitem(last=False)

    def state(self, scrub: ScrubState) -> JanitorState:
        """Returns all of it as of one moment."""
        with self._lock:
            return JanitorState(
                at_s=self._clock(),
                rounds=self.rounds,
                last_round_s=self._ended_s,
                last_round_seconds=self._seconds,
                steps=tuple(StepState(step=step, **vars(line)) for step, line in self._lines.items()),
                scrub=scrub,
                faults=tuple(reversed(self._faults.values())),
            )
