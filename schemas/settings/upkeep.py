"""Settings of eviction, sessions, the journal, recordings and the janitor."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from schemas.base import StrictModel
from schemas.settings.quantities import Bytes, Seconds


class EvictionSettings(StrictModel):
    """Bounds of eviction, besides `capacity_bytes`. Quotas set with `cache-admin quota` outrank these."""

    #: Bytes of payload that one namespace may hold: one model, layout and set of settings. Left out: no bound
    #: but the store's.
    namespace_bytes: Bytes | None = Field(default=None, ge=1)
    #: Bytes that all namespaces of one tenant may hold.
    tenant_bytes: Bytes | None = Field(default=None, ge=1)
    #: Bytes that requests with one `cache_salt` may hold in one namespace.
    salt_bytes: Bytes | None = Field(default=None, ge=1)
    #: Segments made longer ago are not served, and are evicted, pinned or not. A shorter time that
    #: `cache-admin ttl` has set wins. Left out: age does not matter.
    ttl_s: Seconds | None = Field(default=None, ge=600)
    #: Segments used within this time are evicted only if there are no others.
    fresh_s: Seconds = 120.0
    #: Keep what takes long to compute, for its size, somewhat longer.
    cost_aware: bool = True
    #: Share of a namespace's quota that may be pinned.
    pinned_share: float = Field(default=0.5, ge=0, le=1)

    @model_validator(mode="before")
    @classmethod
    def _without_watermarks(cls, tree: Any) -> Any:
        if isinstance(tree, dict) and (found := sorted({"high", "low"} & tree.keys())):
            raise ValueError(
                f"{' and '.join(found)}: no settings any more. Eviction begins when a hundredth of a quota, "
                "at most 1 GiB, is left. Leave them out; to keep more free, lower the quota"
            )
        return tree


class SessionSettings(StrictModel):
    """How far clients may change the order of eviction by hints on their sessions."""

    #: Share of every quota that bounds a namespace that clients may retain for their sessions. 0: none.
    retain_share: float = Field(default=0.1, ge=0, le=0.5)


class JournalSettings(StrictModel):
    """Rings in the index, per namespace, which explain misses and which routers and warmers read. 0: none.

    The bytes of an entry were measured in Redis 7.0.
    """

    #: Commits and evictions, about 80 bytes each.
    events: int = Field(default=4096, ge=0, le=1_000_000)
    #: Requests that were not served or saved in full, about 130 bytes each.
    outcomes: int = Field(default=4096, ge=0, le=1_000_000)
    #: Evicted segments that are remembered to say what more capacity would bring, about 120 bytes each.
    ghosts: int = Field(default=8192, ge=0, le=1_000_000)


class JanitorSettings(StrictModel):
    """`cache-admin serve`."""

    #: Time from one round of eviction, reaping and sweeping to the next.
    interval_s: Seconds = 5.0
    #: Share of all segments, in percent, whose bytes are read and verified in a day.
    scrub_percent: float = Field(default=3.0, ge=0, le=100)
    #: Time from one comparison of the accounts with what there is to the next.
    reconcile_s: Seconds = 3600.0
    #: An empty namespace that no engine has registered for so long is forgotten.
    forget_after_s: Seconds = 7 * 86400.0


class TraceSettings(StrictModel):
    """A record of which blocks requests ask for, for `cache-admin advise`."""

    #: Folder for the files, one per process; left out: nothing is recorded.
    folder: str | None = None
    #: Most bytes of one process's files; past it the older half is deleted.
    most_bytes: Bytes = Field(default=256 << 20, ge=1 << 16)
