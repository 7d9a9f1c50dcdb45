"""What `cache-admin serve` knows of a cache: its page reads it as JSON, `--once` prints it.

The rules are those of kvstore.admin.reports. Blocks that were asked for, served and missed are counted as
engines have reported them to the index; what they have not reported yet, or could not, is not in it.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from kvstore.admin.curate.reports import SessionLine
from kvstore.admin.reports import FastBackend
from kvstore.janitor.reports import JanitorState
from schemas.base import StrictModel


class Answering(StrictModel):
    """The state of the index or of the payloads, as this server finds it."""

    url: str
    #: `unknown`: not asked yet. `absent`: a local file or folder that nobody has made yet.
    state: Literal["unknown", "ok", "absent", "unreachable"]
    problem: str = ""
    #: When it came into this state, and when it answered last; None: not since this server began.
    since_s: float
    answered_s: float | None = None


class ServedQuota(StrictModel):
    """One quota. `scope` is `store`, `tenant/NAME` or `namespace/ID`."""

    scope: str
    quota_bytes: int
    used_bytes: int


class BlockTotals(StrictModel):
    """Counts of the blocks that requests asked for, and of those that were offered for saving, by outcome."""

    requests: int = 0
    asked: int = 0
    served: int = 0
    missed: dict[str, int] = Field(default_factory=dict)
    offered: int = 0
    stored: int = 0
    unsaved: dict[str, int] = Field(default_factory=dict)


class Held(StrictModel):
    """How much is stored; all but the last two fields count visible segments."""

    segments: int = 0
    blocks: int = 0
    stored_bytes: int = 0
    pinned_bytes: int = 0
    #: Microseconds that computing all of it again would take.
    cost_us: int = 0
    #: Segments in the trash, and invalidated ones that are not in the trash yet.
    trashed_segments: int = 0
    bygone_segments: int = 0


class ServedNamespace(StrictModel):
    """One namespace, with its totals since it was made."""

    id: str
    kind: str
    model: str
    tenant: str
    held: Held
    #: Its own quota; None if only its tenant's and the store's apply.
    quota_bytes: int | None
    #: When an engine registered it last.
    seen_s: float
    blocks: BlockTotals
    #: Bytes evicted to keep a quota, since it was made.
    evicted_bytes: int


class Point(StrictModel):
    """The counts of one step of the history, and how much was stored at its end."""

    #: The beginning of the step.
    at_s: float
    stored_bytes: int
    asked: int
    served: int
    missed: dict[str, int]
    evicted_bytes: int


class HistoryReport(StrictModel):
    """The last `window_s` seconds in steps of `step_s`.

    Steps in which the index never answered are left out.
    """

    window_s: int
    step_s: int
    #: The beginning of what this server remembers.
    since_s: float
    points: tuple[Point, ...]


class PrefixLine(StrictModel):
    """A segment, which stands for the prefix that ends with it."""

    namespace: str
    segment: str
    #: Blocks before it in its chain.
    depth: int
    slots: int
    stored_bytes: int
    #: Time of the last use, to the minute; 60.0 if a session has ended that alone used it.
    last_use_s: float
    #: Number of minutes in which it was used, recent ones counting more; 0: unknown.
    minutes: float = 0.0


class EvictionLine(StrictModel):
    """An eviction, or an invalidation of all that a namespace held (then there is no segment)."""

    at_s: float
    namespace: str
    segment: str | None
    depth: int
    slots: int
    stored_bytes: int
    #: One of schemas.records.EvictionRule, or a newer version's.
    rule: str


class FaultLine(StrictModel):
    """Something that went wrong.

    `where` is `janitor: STEP`, `index`, `payloads`, or what a request was doing: `match`, `load`, `save`.
    """

    at_s: float
    where: str
    namespace: str
    #: The segment or request that is concerned, if there is one.
    subject: str
    problem: str


class GainLine(StrictModel):
    """The number of blocks missed as absent that `extra_bytes` more capacity would have served."""

    extra_bytes: int
    blocks: int


class ServedSessions(StrictModel):
    """The sessions that the index remembers of the namespaces that are told apart.

    Reading all of them may take several looks, so states and the largest are of `read_s`: None, they are of
    those that were met so far. One that is used meanwhile may count twice.
    """

    live: int = 0
    retained: int = 0
    ended: int = 0
    #: Bytes that are retained, and that may be: `sessions.retain_share` of the store's quota. Smaller quotas
    #: bound a namespace, a tenant and a salt besides.
    retained_bytes: int = 0
    allowed_bytes: int = 0
    #: Those that own most, the largest first.
    largest: tuple[SessionLine, ...] = ()
    read_s: float | None = None


class ServingReport(StrictModel):
    """All that the server knows. What comes from the index is as of `looked_s`."""

    version: str
    at_s: float
    started_s: float
    #: None: the index has not answered yet, and what comes from it is empty, which means unknown and not
    #: zero.
    looked_s: float | None
    look_seconds: float | None
    index: Answering
    payloads: Answering
    #: This node's fast tier; None: there is one tier.
    fast: FastBackend | None
    capacity_bytes: int
    total: Held
    quotas: tuple[ServedQuota, ...]
    #: The largest namespaces; then the number of the others, and their sum.
    namespaces: tuple[ServedNamespace, ...]
    others: int
    others_held: Held
    history: HistoryReport
    hottest: tuple[PrefixLine, ...]
    coldest: tuple[PrefixLine, ...]
    #: The last evictions, the newest first; and the number by rule since this server began.
    evictions: tuple[EvictionLine, ...]
    evictions_by_rule: dict[str, int]
    sessions: ServedSessions
    #: The last faults, the newest first.
    faults: tuple[FaultLine, ...]
    #: Gains, ascending; each includes those before it. `asked_blocks` are all ever asked for, to compare them
    #: with.
    gains: tuple[GainLine, ...]
    asked_blocks: int
    #: None: this server runs no janitor.
    janitor: JanitorState | None


class ProbeReport(StrictModel):
    """The answer of a running server to /readyz."""

    url: str
    ready: bool
    #: The server's own sentence, or why there is none.
    found: str
