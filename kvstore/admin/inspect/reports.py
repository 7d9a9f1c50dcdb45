"""Reports of the verbs that look. The rules are those of kvstore.admin.reports."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from kvstore.admin.reports import (
    Amount,
    BackendState,
    FastBackend,
    NamespaceSummary,
    QuotaLine,
    SegmentSummary,
)
from schemas.base import StrictModel


class Waiting(StrictModel):
    """How much of some namespaces is pinned, waits in the trash, or waits to be put there."""

    pinned_bytes: int = 0
    #: Evicted segments whose payloads are not deleted yet.
    trashed: int = Field(default=0, title="in trash", description="{:evicted segment} to be deleted")
    #: Invalidated segments that are not in the trash yet.
    bygone: int = Field(default=0, title="invalidated", description="{:invalidated segment} to be evicted")


class TenantStatus(StrictModel):
    """All namespaces of one tenant."""

    tenant: str
    namespaces: int
    usage: Amount
    upkeep: Waiting
    #: None if no quota but the store's applies.
    quota_bytes: int | None = None


class NamespaceStatus(NamespaceSummary):
    """A namespace, with what waits in it and when it was used."""

    upkeep: Waiting
    #: Its own quota; None if only the store's and its tenant's apply.
    quota_bytes: int | None = None
    #: What is older is not served, and is evicted; None: age does not matter.
    ttl_s: int | None = None
    #: Seconds that computing all of it again would take.
    cost_s: float = 0.0
    #: When an engine opened it last; None: unknown.
    seen_s: float | None = Field(title="opened")
    #: In how many shards it lies (redis.shards).
    shards: int = 1
    #: Last use of the segment that would be evicted first, a minute after 1970 began if a session has ended
    #: that alone used it; None: there is none, or the namespace is not among the largest, which are the only
    #: ones that are asked.
    oldest_use_s: float | None = Field(title="oldest")


class StatusReport(StrictModel):
    """`cache-admin status`. Without an index `total` is None: unknown is not zero."""

    at_s: float
    index: BackendState
    #: The store that all nodes share.
    payloads: BackendState
    #: None: there is one tier.
    fast: FastBackend | None = None
    #: The bound of the whole store, all namespaces together.
    capacity_bytes: int
    total: Amount | None
    upkeep: Waiting
    #: Whether a janitor works (`cache-admin serve`). Without one engines do its work when they save.
    janitor: bool
    #: Every quota, the store's last.
    quotas: tuple[QuotaLine, ...]
    tenants: tuple[TenantStatus, ...]
    namespaces: tuple[NamespaceStatus, ...]


SortKey = Literal["last-use", "created", "bytes"]


class ListReport(StrictModel):
    """`cache-admin ls`: the first `limit` of `found` segments; `limit` 0 means all of them."""

    at_s: float
    #: None: all namespaces.
    namespace: str | None = Field(title="")
    sort: SortKey = Field(title="")
    limit: int = Field(title="")
    found: int = Field(title="")
    segments: tuple[SegmentSummary, ...] = Field(description="no segments")


class NamespaceReport(StrictModel):
    """`cache-admin show` of a namespace."""

    what: Literal["namespace"] = "namespace"
    at_s: float
    id: str
    usage: Amount = Field(title="stored")
    upkeep: Waiting = Field(Waiting(), title="waiting")
    cost_s: float = Field(0.0, description="{} to compute it again")
    seen_s: float | None = Field(None, title="opened", description="{} ago, by an engine")
    shards: int = 1
    #: The quotas that bound it, the smallest scope first.
    quotas: tuple[QuotaLine, ...]
    #: Its canonical JSON, parsed.
    namespace: dict[str, Any] = Field(title="")


class SlotReport(StrictModel):
    """One slot of a payload. `check` is `unchecked` unless its bytes were read."""

    slot: int
    key: str
    dtype: str
    shape: tuple[int, ...]
    raw_bytes: int
    stored_bytes: int
    codec: str
    checksum: str = Field(title="xxh3")
    check: Literal["unchecked", "ok", "bad", "missing"] = "unchecked"


class PartReport(StrictModel):
    """One rank's payload: what its own header says, and whether that agrees with the index."""

    rank: int = Field(title="")
    payload: str = Field(title="")
    #: Path or URL at which any safetensors reader can open it.
    location: str = Field(title="payload")
    #: `unreadable`: of a key that is not here, or a newer format; it may be good.
    state: Literal["ok", "missing", "damaged", "unreadable"] = Field(title="")
    problems: tuple[str, ...]
    #: None: there is no payload.
    stored_bytes: int | None = Field(None, description="{exact} bytes")
    modified_s: float | None = Field(title="")
    data_start: int | None = Field(None, title="data", description="from byte {} on")
    writer: str = ""
    #: Id of the key that it is signed with, which vouches for it where that key is configured; None: none.
    key: str | None = Field(None, title="signed", description="with key {}")
    encrypted: bool = False
    slots: tuple[SlotReport, ...]


class SegmentReport(StrictModel):
    """`cache-admin show` of a segment or a payload."""

    what: Literal["segment"] = "segment"
    at_s: float
    segment: str
    namespace: str
    model: str
    kind: str
    #: Id of the salt that its requests came with, in hex; empty without one.
    salt: str
    #: The index's record; None: the index doesn't name this segment, so it is never loaded.
    record: SegmentSummary | None
    #: Whether the index could be asked at all; if not, `record` is None.
    index: BackendState
    #: Whether the slots' bytes were read and checked.
    verified: bool
    parts: tuple[PartReport, ...]

    @property
    def damaged(self) -> bool:
        """Whether any part is missing or damaged."""
        return any(part.state != "ok" for part in self.parts)


ShowReport = Annotated[NamespaceReport | SegmentReport, Field(discriminator="what")]


class NamespacesReport(StrictModel):
    """`cache-admin namespaces`."""

    namespaces: tuple[NamespaceSummary, ...]


class Difference(StrictModel):
    """A field in which two namespaces differ; `a` or `b` is None if that namespace lacks it."""

    path: str
    a: Any
    b: Any
    #: The meaning of the field, and what would make the two agree.
    meaning: str


class DiffReport(StrictModel):
    """`cache-admin namespaces diff`."""

    a: str
    b: str
    same: bool
    differences: tuple[Difference, ...]


class Traffic(StrictModel):
    """Counts of the blocks that engines asked for and offered; an encoder item counts as one block."""

    requests: int
    asked: int = Field(description="{:block}, {served} served ({hit_ratio})")
    served: int
    #: Blocks that were not served, by reason (kvstore.rules.reasons.MISS_REASONS).
    misses: dict[str, int] = Field(title="")
    offered: int = Field(description="{:block}, {stored} stored")
    stored: int
    #: Blocks that were not stored, by reason (kvstore.rules.reasons.SAVE_OUTCOMES).
    unsaved: dict[str, int] = Field(title="")
    #: Bytes that were evicted to keep a quota.
    evicted_bytes: int = Field(description="{} to keep a quota")
    #: served / asked; None if nothing was asked for.
    hit_ratio: float | None = Field(title="hits")


class NamespaceTraffic(Traffic):
    """The traffic of one namespace."""

    id: str
    kind: str
    model: str
    tenant: str = "default"


class StatsReport(StrictModel):
    """`cache-admin stats`: totals since the index was made, or over the last `seconds` while watching."""

    at_s: float
    #: None: since the index was made.
    seconds: float | None
    total: Traffic
    namespaces: tuple[NamespaceTraffic, ...]


class TopLine(StrictModel):
    """A segment that many loads begin with, or one that would be evicted soon."""

    namespace: str
    model: str
    kind: str
    segment: str
    #: Blocks of its chain before it; `blocks` are those in it.
    depth: int
    blocks: int
    stored_bytes: int
    last_use_s: float
    pinned: bool = False
    cost_us: int = 0
    #: Number of recent minutes in which a load began with it, older ones counted for less; None: not counted.
    minutes: float | None = None


class TopReport(StrictModel):
    """`cache-admin top`: where most loads begin, and what would be evicted next."""

    at_s: float
    #: None: all namespaces.
    namespace: str | None = Field(title="")
    limit: int = Field(title="")
    hottest: tuple[TopLine, ...] = Field(title="where most loads begin")
    coldest: tuple[TopLine, ...] = Field(title="what would be evicted next", description="no segments")


#: `visible`, `incomplete`, `bygone` (invalidated) and `trash` are states in the index. `orphan`: a stray
#: payload, which the index doesn't know. `foreign`: an object that is no payload of this store.
PayloadState = Literal["visible", "incomplete", "bygone", "trash", "orphan", "foreign"]


class DuLine(StrictModel):
    """Payloads of one namespace in one state."""

    #: Empty for foreign objects.
    namespace: str
    #: Empty if the index doesn't know the namespace.
    model: str
    state: PayloadState
    payloads: int
    stored_bytes: int
    oldest_s: float
    newest_s: float


class DuReport(StrictModel):
    """`cache-admin du`: the payloads that the payload store itself lists, whatever the index says."""

    at_s: float
    payloads: int = Field(description="{stored_bytes} in {:payload}")
    stored_bytes: int = Field(title="")
    lines: tuple[DuLine, ...]
    #: The amount that is visible according to the index.
    indexed: Amount = Field(title="index", description="{} visible")
    seconds: float


class EventLine(StrictModel):
    """Something that changed what can be matched."""

    namespace: str
    position: str
    at_s: float
    #: `gap`: events before this position are lost, because the ring has overwritten them.
    op: Literal["commit", "evict", "invalidate", "gap"]
    #: None: all segments of the namespace.
    segment: str | None = None
    #: Digests in hex of the first block and (commit only) of the last one, which stands for the prefix that
    #: ends there.
    first: str | None = None
    last: str | None = None
    depth: int = 0
    blocks: int = 0
    stored_bytes: int = 0
    #: Why it was evicted, an EvictionRule or a newer release's; None for the other events.
    rule: str | None = None
    #: The operator or janitor that did it; "" for an engine.
    by: str = ""


class EventsReport(StrictModel):
    """`cache-admin events`, the oldest first. With --follow every line is an EventLine of its own."""

    at_s: float
    events: tuple[EventLine, ...]


class OperationLine(StrictModel):
    """Something that an operator set out to do."""

    at_s: float
    by: str
    verb: str
    what: str


class OperationsReport(StrictModel):
    """`cache-admin operations`, the oldest first."""

    at_s: float
    operations: tuple[OperationLine, ...]
