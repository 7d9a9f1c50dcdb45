"""What `cache-admin` found: one model per verb, printed by `--json` as it is and rendered as text.

Here: status, namespaces, ls, show, doctor, vllm-config. schemas.usage has stats, top, du and events,
schemas.upkeep evict, pin and quota.

Numbers are raw: sizes in bytes (`_bytes`), times in unix seconds (`_s`). Never a credential: URLs are
redacted before they come here.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from schemas.base import Closed


class Backend(Closed):
    """The index or the payload store, as it was found."""

    url: str
    #: `absent`: a local file or folder that nobody has made yet; nothing is stored.
    state: Literal["ok", "absent", "unreachable"]
    problem: str = ""


class FastBackend(Backend):
    """The fast tier on this node. What it holds is None where that is unknown."""

    capacity_bytes: int
    used_bytes: int | None = None
    payloads: int | None = None
    #: Of them, not in the shared store yet.
    dirty_bytes: int | None = None


class Amount(Closed):
    """How much is stored and visible. A block is a slot: an encoder item counts as one."""

    segments: int = 0
    blocks: int = 0
    stored_bytes: int = 0


class NamespaceSummary(Closed):
    """One namespace in a line. Fields that its kind lacks are empty."""

    id: str
    kind: str
    model: str
    revision: str
    tenant: str
    dtype: str
    kv_dtype: str
    block_tokens: int
    tp: int
    pp: int
    codec: str
    epoch: int
    usage: Amount


class Upkeep(Closed):
    """What is done and waits to be done to some namespaces' segments."""

    pinned_bytes: int = 0
    #: Evicted segments whose payloads are not deleted yet.
    trashed: int = 0
    #: Invalidated segments that are not in the trash yet.
    bygone: int = 0


#: `ok`: below the mark at which eviction begins. `high`: above it. `over`: above the quota itself.
QuotaState = Literal["ok", "high", "over"]


class QuotaLine(Closed):
    """A quota and what is used of it."""

    #: `store`, `tenant/NAME` or `namespace/ID`.
    scope: str
    quota_bytes: int
    used_bytes: int
    pinned_bytes: int
    #: `settings`, or `set` by `cache-admin quota`, which outranks them.
    source: Literal["settings", "set"]
    state: QuotaState
    #: False: nothing of this name is registered.
    known: bool = True


class TenantStatus(Closed):
    """All namespaces of one tenant."""

    tenant: str
    namespaces: int
    usage: Amount
    upkeep: Upkeep
    #: None: no quota but the store's.
    quota_bytes: int | None


class NamespaceStatus(NamespaceSummary):
    """A namespace, what waits in it, and when it was used."""

    upkeep: Upkeep
    #: Of its own; None: none but the store's and its tenant's.
    quota_bytes: int | None
    #: What computing all of it again would take.
    cost_s: float
    #: When an engine opened it last; None: unknown.
    seen_s: float | None
    #: Last use of what would be evicted first; None: nothing would, or the namespace is not among the
    #: largest, which are the ones that are asked.
    oldest_use_s: float | None


class StatusReport(Closed):
    """`cache-admin status`. Without an index `total` is None: unknown is not zero."""

    at_s: float
    index: Backend
    #: The store that all nodes share.
    payloads: Backend
    #: None: there is one tier.
    fast: FastBackend | None = None
    #: Of the whole store, all namespaces together.
    capacity_bytes: int
    total: Amount | None
    upkeep: Upkeep
    #: Who does the upkeep (`cache-admin serve`); None: nobody, and engines evict when they save.
    janitor: str | None
    #: Every quota, the store's last.
    quotas: tuple[QuotaLine, ...]
    tenants: tuple[TenantStatus, ...]
    namespaces: tuple[NamespaceStatus, ...]


class SegmentSummary(Closed):
    """One segment in a line."""

    namespace: str
    segment: str
    slots: int
    #: All ranks' payloads, headers included.
    stored_bytes: int
    created_s: int
    #: To the minute.
    last_use_s: float
    #: Index in its chain of the first slot.
    depth: int
    codec: str
    ranks: int
    pinned: bool
    #: What computing it took, in microseconds; 0: unknown.
    cost_us: int


SortKey = Literal["last-use", "created", "bytes"]


class ListReport(Closed):
    """`cache-admin ls`: the first `limit` of `found` segments; `limit` 0 is all of them."""

    at_s: float
    #: None: of every namespace.
    namespace: str | None
    sort: SortKey
    limit: int
    found: int
    segments: tuple[SegmentSummary, ...]


class NamespaceReport(Closed):
    """`cache-admin show` of a namespace."""

    what: Literal["namespace"] = "namespace"
    at_s: float
    id: str
    usage: Amount
    upkeep: Upkeep
    cost_s: float
    seen_s: float | None
    #: Those that bound it, the smallest scope first.
    quotas: tuple[QuotaLine, ...]
    #: Its canonical JSON, parsed.
    namespace: dict[str, Any]


class SlotReport(Closed):
    """One slot of a payload. `check` is `unchecked` unless its bytes were read."""

    slot: int
    key: str
    dtype: str
    shape: tuple[int, ...]
    raw_bytes: int
    stored_bytes: int
    codec: str
    checksum: str
    check: Literal["unchecked", "ok", "bad", "missing"]


class PartReport(Closed):
    """One rank's payload: what its own header says, and how that agrees with the index."""

    rank: int
    payload: str
    #: Where to open it, with any safetensors reader.
    location: str
    state: Literal["ok", "missing", "damaged"]
    problems: tuple[str, ...]
    #: None: there is no payload.
    stored_bytes: int | None
    modified_s: float | None
    data_start: int | None
    writer: str
    slots: tuple[SlotReport, ...]


class SegmentReport(Closed):
    """`cache-admin show` of a segment or a payload."""

    what: Literal["segment"] = "segment"
    at_s: float
    segment: str
    namespace: str
    model: str
    kind: str
    #: The index's record; None: the index doesn't name this segment, so nothing serves it.
    record: SegmentSummary | None
    #: Whether the index could be asked at all; without it `record` is None.
    index: Backend
    #: Whether the slots' bytes were read and checked.
    verified: bool
    parts: tuple[PartReport, ...]

    @property
    def damaged(self) -> bool:
        """Whether anything about it is not as it should be."""
        return any(part.state != "ok" for part in self.parts)


ShowReport = Annotated[NamespaceReport | SegmentReport, Field(discriminator="what")]


class NamespacesReport(Closed):
    """`cache-admin namespaces`."""

    namespaces: tuple[NamespaceSummary, ...]


class Difference(Closed):
    """One field in which two namespaces differ; None where one lacks it."""

    path: str
    a: Any
    b: Any
    #: What the field is, and what would make the two agree.
    meaning: str


class DiffReport(Closed):
    """`cache-admin namespaces diff`."""

    a: str
    b: str
    same: bool
    differences: tuple[Difference, ...]


CheckState = Literal["ok", "warning", "problem"]


class Check(Closed):
    """One thing that `doctor` looked at."""

    name: str
    state: CheckState
    found: str
    #: What to do about it; empty if nothing is to be done.
    advice: str = ""


class DoctorReport(Closed):
    """`cache-admin doctor`; `state` is the worst of the checks'."""

    version: str
    index: str
    payloads: str
    fast: str | None = None
    state: CheckState
    checks: tuple[Check, ...]


class VllmConfigReport(Closed):
    """`cache-admin vllm-config`: arguments of `vllm.LLM` and, as JSON, values of `vllm serve` flags."""

    kv_transfer_config: dict[str, Any] | None
    ec_transfer_config: dict[str, Any] | None
    #: What must be done besides, such as a password's environment variable.
    notes: tuple[str, ...]
