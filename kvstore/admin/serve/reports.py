"""The state of a cache as `cache-admin serve` knows it: its page reads it as JSON, `--once` prints it.

It is composed of the reports of the verbs that look. The rules are those of kvstore.admin.reports.
"""

from __future__ import annotations

from kvstore.admin.curate.reports import SessionsReport
from kvstore.admin.inspect.reports import EventsReport, StatsReport, StatusReport, TopReport, Traffic
from kvstore.janitor.reports import JanitorState
from schemas.base import StrictModel


class Answering(StrictModel):
    """Since when the index, or the payload store, is in its state, as this server finds it."""

    #: None: it was not asked yet, and counts as unreachable.
    since_s: float | None = None
    #: When it answered last; None: not since this server began.
    answered_s: float | None = None


class Point(Traffic):
    """The traffic of one step of the history, and how much was stored at its end."""

    #: The beginning of the step.
    at_s: float
    stored_bytes: int


class HistoryReport(StrictModel):
    """The last `window_s` seconds in steps of `step_s`.

    Steps in which the index never answered are left out.
    """

    window_s: int
    step_s: int
    #: The beginning of what this server remembers.
    since_s: float
    points: tuple[Point, ...]


class FaultLine(StrictModel):
    """Something that went wrong.

    `where` is `janitor: STEP`, `index`, `payloads`, or what a request was doing: `match`, `load`, `save`.
    """

    at_s: float
    where: str
    problem: str
    namespace: str = ""
    #: The segment or request that is concerned, if there is one.
    subject: str = ""


class ServingReport(StrictModel):
    """All that the server knows. The index's part is as of `looked_s`.

    `status`, `stats`, `top`, `events` and `sessions` are the reports of these verbs, on the namespaces that
    are told apart: the first come.
    """

    version: str
    at_s: float
    started_s: float
    #: None: the index has not answered yet, and what comes from it is empty, which means unknown and not
    #: zero.
    looked_s: float | None
    #: Its states and the fast tier's are those of now.
    status: StatusReport
    index: Answering
    payloads: Answering
    #: How many namespaces are not told apart: the totals of `status` have them.
    others: int
    #: Seconds that computing all that is stored would take.
    cost_s: float
    stats: StatsReport
    history: HistoryReport
    top: TopReport
    #: The last evictions; and the number of all by rule since this server began.
    events: EventsReport
    evictions_by_rule: dict[str, int]
    #: States and the largest are of `sessions_read_s`, when all were read last; None: of those met so far.
    sessions: SessionsReport
    sessions_read_s: float | None
    #: How much may be retained: `sessions.retain_share` of the store's quota. Smaller quotas bound a
    #: namespace, a tenant and a salt besides.
    retainable_bytes: int
    #: The last faults, the newest first.
    faults: tuple[FaultLine, ...]
    #: None: this server runs no janitor.
    janitor: JanitorState | None


class ProbeReport(StrictModel):
    """The answer of a running server to /readyz."""

    url: str
    ready: bool
    #: The server's own sentence, or why there is none.
    found: str
