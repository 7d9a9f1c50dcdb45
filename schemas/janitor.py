"""What one janitor is doing, for the status page and the exporter. Rules as in schemas.reports.

Totals are those of this process since it began: another janitor's are its own.
"""

from __future__ import annotations

from typing import Final, Literal, get_args

from schemas.base import Closed

#: In the order of a round.
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


class StepState(Closed):
    """One step of the round."""

    step: Step
    #: How often it was begun, and how often it did not do all that it should have. Steps that are not due
    #: in a round are not begun.
    runs: int = 0
    failures: int = 0
    #: See DONE.
    done: int = 0
    #: Spent in it, of all runs.
    seconds: float = 0.0
    #: When it was begun last; None: never.
    last_run_s: float | None = None
    #: Whether the last run failed.
    failing: bool = False
    #: The last failure, in words, and when that was; it stays when later runs succeed.
    problem: str = ""
    problem_s: float | None = None


class ScrubState(Closed):
    """Payloads that were read to find out whether they still are what they should be."""

    payloads: int = 0
    read_bytes: int = 0
    #: Segments with a payload that was bad twice, and those of them that were evicted for it. The others were
    #: too many within an hour, or there was nothing but bad ones.
    bad: int = 0
    evicted: int = 0
    #: Segments of which a payload could not be read because the store didn't answer: no evidence.
    unanswered: int = 0
    #: Segments whose turn has come and that are not read yet.
    behind: int = 0


class Fault(Closed):
    """Something that should not have been."""

    #: When it was seen last, and how often.
    at_s: float
    times: int = 1
    #: `lease`: the index didn't answer, or another janitor took over while this one was at work.
    step: Step | Literal["lease"]
    #: "": of none in particular.
    namespace: str = ""
    segment: str = ""
    problem: str


class JanitorState(Closed):
    """One janitor. Of several one is the leader, and only that one works."""

    at_s: float
    #: Who this is, and who has the lease as far as this one knows: "" if nobody, or not asked yet.
    holder: str
    leaseholder: str = ""
    leader: bool = False
    leader_since_s: float | None = None
    #: How often this one became the leader, and how often it found that it no longer was.
    elections: int = 0
    losses: int = 0
    #: Of the index, when it was last asked for the lease: "" if it answered.
    lease_problem: str = ""
    #: Rounds ended, when the last one did, and how long it took.
    rounds: int = 0
    last_round_s: float | None = None
    last_round_seconds: float | None = None
    #: One for each of STEPS, in that order.
    steps: tuple[StepState, ...]
    scrub: ScrubState = ScrubState()
    #: The newest first; the last few dozen.
    faults: tuple[Fault, ...] = ()
