"""What `cache-admin stats`, `top`, `du` and `events` found. Rules as in schemas.reports."""

from __future__ import annotations

from typing import Literal

from schemas.base import Closed
from schemas.records import EvictionRule
from schemas.reports import Amount


class Traffic(Closed):
    """What became of blocks that engines asked for and offered; an encoder item counts as one block."""

    requests: int
    asked: int
    served: int
    #: Blocks by why they were not served, of kvstore.metrics.MISS_REASONS.
    misses: dict[str, int]
    offered: int
    stored: int
    #: Blocks by why they were not stored, of kvstore.metrics.SAVE_OUTCOMES.
    unsaved: dict[str, int]
    #: To keep a quota.
    evicted_bytes: int
    #: served / asked; None: nothing was asked for.
    hit_ratio: float | None


class NamespaceTraffic(Traffic):
    """Of one namespace."""

    id: str
    kind: str
    model: str
    tenant: str


class StatsReport(Closed):
    """`cache-admin stats`: totals since the index was made, or of the last `seconds` while watching."""

    at_s: float
    #: None: since ever.
    seconds: float | None
    total: Traffic
    namespaces: tuple[NamespaceTraffic, ...]


class TopLine(Closed):
    """A segment by which loads begin, or one that would go soon."""

    namespace: str
    model: str
    kind: str
    segment: str
    #: Blocks of its chain before it, and in it.
    depth: int
    blocks: int
    stored_bytes: int
    last_use_s: float
    pinned: bool
    cost_us: int
    #: In how many minutes a load began with it lately, older ones counted for less; None: not watched.
    minutes: float | None


class TopReport(Closed):
    """`cache-admin top`: where most loads begin, and what would be evicted next."""

    at_s: float
    #: None: of every namespace.
    namespace: str | None
    limit: int
    hottest: tuple[TopLine, ...]
    coldest: tuple[TopLine, ...]


#: `visible`, `incomplete`, `bygone`, `trash`: as the index says. `orphan`: a payload that the index knows
#: nothing of. `foreign`: no payload of this store.
PayloadState = Literal["visible", "incomplete", "bygone", "trash", "orphan", "foreign"]


class DuLine(Closed):
    """Payloads of one namespace in one state."""

    #: Empty: foreign.
    namespace: str
    #: Empty: the index doesn't know the namespace.
    model: str
    state: PayloadState
    payloads: int
    stored_bytes: int
    oldest_s: float
    newest_s: float


class DuReport(Closed):
    """`cache-admin du`: what the payload store itself lists, whatever the index says."""

    at_s: float
    payloads: int
    stored_bytes: int
    lines: tuple[DuLine, ...]
    #: By the index: what is visible.
    indexed: Amount
    seconds: float


class EventLine(Closed):
    """Something that changed what can be matched."""

    namespace: str
    position: str
    at_s: float
    #: `gap`: events before this position are lost, because the ring has moved on.
    op: Literal["commit", "evict", "invalidate", "gap"]
    #: None: all of the namespace's.
    segment: str | None = None
    #: Digests in hex: of the first block, and (commit) of the last one, which stands for the prefix that
    #: ends there.
    first: str | None = None
    last: str | None = None
    depth: int = 0
    blocks: int = 0
    stored_bytes: int = 0
    #: Why it went.
    rule: EvictionRule | None = None


class EventsReport(Closed):
    """`cache-admin events`: oldest first. With --follow every line is an EventLine of its own."""

    at_s: float
    events: tuple[EventLine, ...]
