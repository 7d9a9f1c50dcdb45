"""Reports of the verbs that choose what is kept. The rules are those of kvstore.admin.reports."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from kvstore.admin.reports import Amount, Ended, EndedEarly, Left, QuotaState, SegmentSummary
from schemas.base import StrictModel


class PinsReport(StrictModel):
    """`cache-admin pin` without segments: what is pinned."""

    at_s: float
    pinned: Amount = Field(description="{}; at most {most_bytes} of the store's quota may be")
    #: How much of the store's quota may be pinned.
    most_bytes: int = Field(title="")
    segments: tuple[SegmentSummary, ...]


class PinReport(StrictModel):
    """`cache-admin pin` of segments, or with --remove; without `applied` it is only a plan."""

    at_s: float
    action: Literal["pin", "unpin"] = Field(title="")
    applied: bool
    ended: EndedEarly
    problem: str
    planned: Amount = Field(description="{action} {}")
    #: The chosen amount that is pinned (or not pinned) already.
    already: Amount = Field(Amount(), title="done before")
    #: The number of segments that were changed.
    changed: int = Field(0, title="done", description="{:segment}")
    segments: tuple[SegmentSummary, ...]
    #: The number of segments that were chosen and left out.
    left_out: int
    left: tuple[Left, ...]


class PolicyLine(StrictModel):
    """How much may be stored in a scope, how much is, and for how long it may stay."""

    #: `store`, `tenant/NAME`, `namespace/ID` or `salt/ID`, which holds in every namespace by itself.
    scope: str
    #: None: age alone bounds it.
    quota_bytes: int | None
    used_bytes: int
    pinned_bytes: int
    #: `settings`, or `set` by `cache-admin quota`, which outranks them.
    source: Literal["settings", "set"]
    state: QuotaState
    #: False if no tenant or namespace of this name is registered.
    known: bool = True
    #: None: age does not matter. The shortest that a namespace is under holds.
    ttl_s: int | None = None
    ttl_source: Literal["settings", "set"] | None = None


class QuotasReport(StrictModel):
    """`cache-admin quota`: every quota with its use and time to live, the store's last."""

    at_s: float
    quotas: tuple[PolicyLine, ...]


class QuotaReport(StrictModel):
    """`cache-admin quota SCOPE`; without `applied` it is only a plan."""

    at_s: float
    applied: bool
    scope: str = Field(title="quota")
    known: bool = Field(True, title="in use", description="no: nothing belongs to it yet")
    #: The quota that holds now; None: the scope has none.
    before_bytes: int | None = Field(title="")
    #: The quota that holds afterwards.
    after_bytes: int | None = Field(title="size", description="{}; before: {before_bytes}")
    used_bytes: int = Field(description="{}, {pinned_bytes} of it pinned")
    pinned_bytes: int = Field(title="")
    #: Bytes that will be evicted because of it.
    excess_bytes: int = Field(
        0, title="evicted", description="{}, when an engine saves or a janitor comes by"
    )
    problem: str = ""
    #: The times to live that are set for the scope; None: none was set, or is.
    before_ttl_s: int | None = Field(title="")
    after_ttl_s: int | None = Field(title="to live", description="{}; before: {before_ttl_s}")
    #: Segments of its namespaces that are older than the new time to live.
    older: Amount = Field(Amount(), description="{}: not served any more once it holds, and evicted soon")


class PromptFound(StrictModel):
    """How much of a prompt a namespace has."""

    namespace: str
    #: Tokens in the prompt's full blocks, and how many leading ones an engine would load.
    tokens: int
    stored: int


class SessionLine(StrictModel):
    """A client's session in one namespace."""

    namespace: str
    session: str
    #: `ended`: what only it has used goes first. `retained`: what it has used goes last, until `until_s`.
    state: Literal["live", "retained", "ended"]
    until_s: float | None = Field(None, title="for")
    priority: Literal["low", "normal", "high"] = "normal"
    #: Time of its last use, to the minute.
    last_use_s: float
    #: What only it has used.
    segments: int
    stored_bytes: int = Field(title="only its own")


class SessionsReport(StrictModel):
    """`cache-admin sessions`: how many there are, and those that own most."""

    at_s: float
    live: int = Field(title="sessions", description="{} live, {retained} retained, {ended} ended")
    retained: int = Field(title="")
    ended: int = Field(title="")
    #: Bytes that are retained in all.
    retained_bytes: int
    sessions: tuple[SessionLine, ...]


class ToldSession(StrictModel):
    """A session in one namespace, after it was told something."""

    session: SessionLine
    #: The number of its segments that go first now.
    moved: int
    #: Bytes that are retained because of it, and bytes for which `sessions.retain_share` had no room.
    retained_bytes: int
    refused_bytes: int


class SessionReport(StrictModel):
    """`cache-admin sessions` with --end or --retain; without `applied` it is only a plan."""

    at_s: float
    action: Literal["end", "retain"]
    applied: bool
    until_s: float | None
    sessions: tuple[ToldSession, ...]


class WarmReport(StrictModel):
    """`cache-admin warm`; with `dry_run` nothing was fetched."""

    dry_run: bool
    ended: Ended
    problem: str
    #: URL of the fast tier.
    fast: str = Field(title="fast tier")
    capacity_bytes: int = Field(title="")
    #: Bytes of all namespaces in the tier, before and after.
    used_before_bytes: int = Field(title="")
    used_bytes: int = Field(description="{} of {capacity_bytes}, {used_before_bytes} before")
    namespaces: tuple[str, ...] = Field(title="")
    #: If a prompt is warmed: how much of it each namespace has.
    prompts: tuple[PromptFound, ...] = ()
    #: If a session is warmed: what each namespace remembers of it.
    sessions: tuple[SessionLine, ...] = ()
    planned: Amount
    #: The amount left out because of the tier's capacity or `--max-bytes`.
    beyond: Amount = Field(Amount(), description="{}: more than the tier or --max-bytes")
    #: The amount that is in the fast tier now, including what was there before.
    warm: Amount = Amount()
    left_out: int
    left: tuple[Left, ...]
    seconds: float
