"""What one janitor is doing, for the status page and the exporter. The rules are those of
kvstore.admin.reports.

Totals are those of this process since it began; every janitor counts its own.
"""

from __future__ import annotations

from typing import Final, Literal, get_args

from schemas.base import StrictModel

#: The steps in the order of a round.
Step = Literal["evict", "drain", "reap", "sweep", "cool", "reconcile", "scrub", "erase"]
STEPS: Final[tuple[Step, ...]] = get_args(Step)
#: What a step's `done` counts.
DONE: Final[dict[Step, str]] = {
    "evict": "segments evicted",
    "drain": "invalidated segments put into the trash",
    "reap": "payloads deleted",
    "sweep": "dangling entries dropped",
    "cool": "namespaces whose use counts were halved",
    "reconcile": "namespaces whose accounts were corrected",
    "scrub": "payloads read and verified",
    "erase": "empty namespaces forgotten",
}


class StepState(StrictModel):
    """One step of the round."""

    step: Step
    #: How often the step was begun, and how often it did not do all that it should have. Steps that are not
    #: due in a round are not begun.
    runs: int = 0
    failures: int = 0
    #: How many of what DONE names for this step.
    done: int = 0
    #: Time spent in all runs together.
    seconds: float = 0.0
    #: When the step was begun last; None: never.
    last_run_s: float | None = None
    #: Whether the last run failed.
    failing: bool = False
    #: The last failure, in words, and when that was; it stays when later runs succeed.
    problem: str = ""
    problem_s: float | None = None


class ScrubState(StrictModel):
    """How many payloads were read to find out whether they still are what they should be, and the outcome."""

    payloads: int = 0
    read_bytes: int = 0
    #: Segments with a payload that was bad twice, and those of them that were evicted for it. The others were
    #: left because too many were found within an hour, or nothing but bad ones.
    bad: int = 0
    evicted: int = 0
    #: Segments with a payload that could not be read because the store didn't answer: no evidence.
    unanswered: int = 0
    #: Segments that no key of the janitor can judge, or of a newer format: left alone.
    unreadable: int = 0
    #: Segments whose turn has come and that are not read yet.
    behind: int = 0


class JanitorFault(StrictModel):
    """Something that went wrong, or that was found wrong."""

    #: When it was seen last, and how often so far.
    at_s: float
    times: int = 1
    step: Step
    #: "" if the fault concerns none in particular.
    namespace: str = ""
    segment: str = ""
    problem: str


class JanitorState(StrictModel):
    """The state of one janitor."""

    at_s: float
    #: The number of rounds that have ended, when the last one did, and how long it took.
    rounds: int = 0
    last_round_s: float | None = None
    last_round_seconds: float | None = None
    #: One for each of STEPS, in that order.
    steps: tuple[StepState, ...]
    scrub: ScrubState = ScrubState()
    #: The last few dozen, the newest first.
    faults: tuple[JanitorFault, ...] = ()
