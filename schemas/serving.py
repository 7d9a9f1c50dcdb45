"""What `cache-admin serve` knows of a cache: its page reads it as JSON, `--once` prints it. Rules as in
schemas.reports.

Blocks that were asked for, served and missed are those that engines have told the index about; what they have
not told yet, or could not, is not in it.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from schemas.base import Closed
from schemas.janitor import JanitorState
from schemas.reports import FastBackend


class Answering(Closed):
    """The index or the payloads, as this server finds them."""

    url: str
    #: `unknown`: not asked yet. `absent`: a local file or folder that nobody has made yet.
    state: Literal["unknown", "ok", "absent", "unreachable"]
    problem: str = ""
    #: When it came into this state, and when it answered last; None: never since this server began.
    since_s: float
    answered_s: float | None = None


class ServedQuota(Closed):
    """One quota. `scope` is `store`, `tenant/NAME` or `namespace/ID`."""

    scope: str
    quota_bytes: int
    used_bytes: int


class Blocks(Closed):
    """What became of blocks: asked for by requests, and offered for saving."""

    requests: int = 0
    asked: int = 0
    served: int = 0
    missed: dict[str, int] = Field(default_factory=dict)
    offered: int = 0
    stored: int = 0
    unsaved: dict[str, int] = Field(default_factory=dict)


class Held(Closed):
    """What is stored, and visible but for the last two."""

    segments: int = 0
    blocks: int = 0
    stored_bytes: int = 0
    pinned_bytes: int = 0
    #: What computing all of it again would take.
    cost_us: int = 0
    #: Evicted segments that are not deleted yet, and invalidated ones that are not in the trash yet.
    trashed_segments: int = 0
    bygone_segments: int = 0


class ServedNamespace(Closed):
    """One namespace, with its totals since it was made."""

    id: str
    kind: str
    model: str
    tenant: str
    held: Held
    #: Of its own quota; None: it has none but its tenant's and the store's.
    quota_bytes: int | None
    #: When an engine registered it last.
    seen_s: float
    blocks: Blocks
    #: Evicted to meet a quota, since it was made.
    evicted_bytes: int


class Point(Closed):
    """What happened in one step of the history, and how much was stored at its end."""

    #: Its beginning.
    at_s: float
    stored_bytes: int
    asked: int
    served: int
    missed: dict[str, int]
    evicted_bytes: int


class HistoryReport(Closed):
    """The last `window_s` in steps of `step_s`. Steps in which the index was never seen are left out."""

    window_s: int
    step_s: int
    #: What this server remembers begins here.
    since_s: float
    points: tuple[Point, ...]


class PrefixLine(Closed):
    """A segment that stands for the prefix that ends with it."""

    namespace: str
    segment: str
    #: Blocks before it in its chain.
    depth: int
    slots: int
    stored_bytes: int
    #: To the minute.
    last_use_s: float
    #: How many minutes it was used in, lately counting more; 0: unknown.
    minutes: float = 0.0


class EvictionLine(Closed):
    """Something that went. Without a segment: all that its namespace held."""

    at_s: float
    namespace: str
    segment: str | None
    depth: int
    slots: int
    stored_bytes: int
    #: Of schemas.records.EvictionRule, or a newer version's.
    rule: str


class FaultLine(Closed):
    """Something that should not have been. `where` is `janitor: STEP`, `index`, `payloads`, or what a request
    was at: `match`, `load`, `save`."""

    at_s: float
    where: str
    namespace: str
    #: A segment or a request, if one is to blame or concerned.
    subject: str
    problem: str


class Gain(Closed):
    """How many blocks that were missed as absent would have been served with so much more capacity."""

    extra_bytes: int
    blocks: int


class ServingReport(Closed):
    """The whole. What comes from the index is as of `looked_s`."""

    version: str
    at_s: float
    started_s: float
    #: None: the index has not answered yet, and what comes from it is empty: unknown, not zero.
    looked_s: float | None
    look_seconds: float | None
    index: Answering
    payloads: Answering
    #: This node's fast tier; None: there is one tier.
    fast: FastBackend | None
    capacity_bytes: int
    total: Held
    quotas: tuple[ServedQuota, ...]
    #: The largest; of the others the number and the sum.
    namespaces: tuple[ServedNamespace, ...]
    others: int
    others_held: Held
    history: HistoryReport
    hottest: tuple[PrefixLine, ...]
    coldest: tuple[PrefixLine, ...]
    #: The newest first; and how many there were by rule since this server began.
    evictions: tuple[EvictionLine, ...]
    evictions_by_rule: dict[str, int]
    #: The newest first.
    faults: tuple[FaultLine, ...]
    #: Ascending; each includes the ones before it. And all blocks ever asked for, to compare them with.
    gains: tuple[Gain, ...]
    asked_blocks: int
    #: None: this server has none.
    janitor: JanitorState | None


class ProbeReport(Closed):
    """What one that runs says at /readyz."""

    url: str
    ready: bool
    #: Its own sentence, or why there is none.
    found: str
