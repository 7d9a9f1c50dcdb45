"""Reports of the verbs that take something away. The rules are those of kvstore.admin.reports."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from kvstore.admin.reports import Amount, EndedEarly
from schemas.base import StrictModel


class EvictLine(StrictModel):
    """The amount that is evicted from one namespace."""

    namespace: str
    model: str
    planned: Amount


class EvictReport(StrictModel):
    """`cache-admin evict`; without `applied` it is only a plan."""

    at_s: float
    applied: bool
    ended: EndedEarly
    problem: str
    #: The request in words.
    why: str = Field(title="evict")
    held: Amount
    planned: Amount
    #: Pinned segments that the plan leaves alone.
    pinned: Amount = Field(Amount(), title="left alone", description="{}: pinned")
    #: (A prompt, a request) What others may use as well, and is left alone for that.
    shared: Amount = Field(Amount(), description="{}: left alone")
    #: What the plan can't reach, a sentence each.
    remarks: tuple[str, ...] = ()
    lines: tuple[EvictLine, ...]
    evicted_segments: int = Field(0, title="evicted", description="{:segment}")
    #: Segments of the plan that were used meanwhile, or evicted by another process.
    spared_segments: int = Field(0, title="spared", description="{:segment} used or gone meanwhile")
    #: When the payloads may be deleted, by the janitor or by an engine; None: nothing was evicted.
    delete_after_s: float | None = Field(None, title="payloads", description="deleted in {} or later")


class TtlLine(StrictModel):
    """A time to live."""

    #: `store`, `tenant/NAME` or `namespace/ID`.
    scope: str
    ttl_s: int = Field(title="time to live")
    #: How many namespaces are under it.
    namespaces: int
    #: `settings` (eviction.ttl_s), or `set` by `cache-admin ttl`. Of those that a namespace is under the
    #: shortest holds.
    source: Literal["settings", "set"]


class TtlsReport(StrictModel):
    """`cache-admin ttl`."""

    at_s: float
    ttls: tuple[TtlLine, ...] = Field(
        description="No time to live is set: what is stored stays until a quota evicts it."
    )


class TtlReport(StrictModel):
    """`cache-admin ttl set` and `cache-admin ttl clear`; without `applied` nothing was changed."""

    at_s: float
    applied: bool
    scope: str = Field(description="{}, {namespaces:namespace}")
    #: None: none was set, or is.
    before_s: int | None
    after_s: int | None
    namespaces: int = Field(title="")
    #: What the namespaces under it held that is older than the time to live that is to hold there.
    older: Amount = Field(Amount(), description="{}: not served any more once it holds, and evicted soon")


class InvalidateReport(StrictModel):
    """`cache-admin invalidate`; without `applied` nothing was changed."""

    applied: bool
    namespace: str
    model: str
    #: The amount that can be matched, or could be before this was applied.
    visible: Amount


#: `kept`: nothing was changed. `waiting`: it is invisible; payloads that a load may still read are deleted
#: after the grace time, and the next drop removes the namespace. `in_use`: an engine has stored something
#: since. `erased`: it is removed.
DropState = Literal["kept", "waiting", "in_use", "erased"]


class DropReport(StrictModel):
    """`cache-admin drop`; without `applied` nothing was changed."""

    at_s: float
    applied: bool
    #: Whether payloads were deleted without a grace time.
    now: bool = Field(title="")
    namespace: str
    kind: str
    model: str
    tenant: str
    visible: Amount
    trashed: int = Field(title="in trash", description="{:segment}")
    bygone: int = Field(0, title="invalidated", description="{:segment} before")
    #: When an engine registered it last; None: not since the index records that.
    seen_s: float | None = Field(None, title="registered", description="{} ago")
    state: DropState = Field(title="")
    #: Segments that this run invalidated, and payloads that it deleted.
    invalidated: int = Field(0, title="hidden", description="{:segment}")
    deleted_payloads: int = Field(0, title="deleted", description="{:payload}")
    #: When the last payload may be deleted, if some still wait.
    due_s: float | None = Field(None, title="waiting", description="the last payload can go in {}")


#: `kept`: nothing was changed. `erased`: nothing is left of what was to go. `in_use`: nothing is left of it,
#: but an engine has stored something since, and so the index still knows the tenant's namespace and has its
#: journal. `remains`: something of it is still there. `former_versions`: nothing can be found of it, but the
#: bucket keeps former versions of its payloads, or may.
EraseState = Literal["kept", "erased", "in_use", "remains", "former_versions"]


class ErasedNamespace(StrictModel):
    """The part of one namespace in an erasure."""

    id: str
    kind: str
    model: str
    tenant: str
    #: The amount of what is to go that can be matched, or could be before this was applied.
    found: Amount
    #: Segments of the namespace in the trash, of any salt, and invalidated ones that are not in it yet.
    trashed: int = Field(title="in trash")
    bygone: int = Field(0, title="invalidated")
    #: (Applied) Commits of what was created up to then are refused for ever.
    forbidden_until_s: float | None = Field(None, title="")
    #: Segments that this run made invisible, and payloads that it deleted.
    hidden_segments: int = Field(0, title="hidden")
    deleted_payloads: int = Field(0, title="deleted")
    #: What the last look found: segments and payloads that should be gone, and payloads that nobody can load
    #: and that may be of this salt, because their headers can't be read.
    remaining: int = Field(0, title="left")
    unreadable: int = 0
    state: EraseState = "kept"


#: `none`: the bucket never kept any, or the store is a folder. `kept`: it does, or did once. `unknown`: it
#: does not say which, and `problem` says why; without one it was not asked, since the run ended before that.
VersionsState = Literal["none", "kept", "unknown"]


class VersionsReport(StrictModel):
    """Former versions of deleted payloads, as a bucket with versioning keeps them."""

    state: VersionsState
    #: The bucket; "" if the store is a folder.
    bucket: str = ""
    #: The lifecycle rule that deletes them, as JSON of S3's; "" if there are none or nobody asked.
    rule: str = ""
    problem: str = ""


class EraseReport(StrictModel):
    """`cache-admin erase`; without `applied` nothing was changed."""

    at_s: float
    applied: bool
    ended: EndedEarly
    problem: str
    #: What goes: all of a tenant, or what was saved under the salt with that id, in hex. The other is "".
    tenant: str = Field("", title="erase", description="tenant {}")
    salt: str = Field("", title="erase", description="salt {} (its id)")
    namespaces: tuple[ErasedNamespace, ...]
    #: All that goes, together.
    found: Amount
    hidden_segments: int = Field(0, title="hidden", description="{:segment}")
    deleted_payloads: int = Field(0, title="deleted", description="{:payload}")
    #: Looks at all that is stored, the last of which is the proof.
    looks: int = 0
    state: EraseState = Field(title="")
    versions: VersionsReport = Field(title="")
    #: What no command can reach from here, a sentence each.
    unreached: tuple[str, ...] = Field(title="not reached")
    seconds: float
