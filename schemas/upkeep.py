"""What `cache-admin evict`, `pin`, `unpin` and `quota` would do and did. Rules as in schemas.reports."""

from __future__ import annotations

from typing import Literal

from schemas.base import Closed
from schemas.reports import Amount, QuotaLine, SegmentSummary
from schemas.transfers import Left

#: `cancelled`: Ctrl-C. `failed`: the index did not do what it was asked; `problem` says what. What was done
#: until then stays done.
Ended = Literal["complete", "cancelled", "failed"]


class EvictLine(Closed):
    """What goes of one namespace."""

    namespace: str
    model: str
    planned: Amount


class EvictReport(Closed):
    """`cache-admin evict`; without `applied` it is only a plan."""

    at_s: float
    applied: bool
    ended: Ended
    problem: str
    #: What was asked for, in words.
    why: str
    held: Amount
    planned: Amount
    #: Of the plan, pinned segments that are left alone.
    pinned: Amount
    lines: tuple[EvictLine, ...]
    evicted_segments: int
    #: Of the plan, what was used or evicted by somebody else meanwhile.
    spared_segments: int
    #: When the payloads may be deleted, by whoever does the upkeep; None: nothing was evicted.
    delete_after_s: float | None


class PinsReport(Closed):
    """`cache-admin pin` without arguments: what is pinned."""

    at_s: float
    pinned: Amount
    #: Of the store's quota, how much may be.
    most_bytes: int
    segments: tuple[SegmentSummary, ...]


class PinReport(Closed):
    """`cache-admin pin` and `unpin`; without `applied` it is only a plan."""

    at_s: float
    action: Literal["pin", "unpin"]
    applied: bool
    ended: Ended
    problem: str
    planned: Amount
    #: Of those chosen, what is pinned (or not pinned) already.
    already: Amount
    #: How many were changed.
    changed: int
    segments: tuple[SegmentSummary, ...]
    #: Chosen, but not done.
    left_out: int
    left: tuple[Left, ...]


class QuotasReport(Closed):
    """`cache-admin quota`: every quota with what is used of it, the store's last."""

    at_s: float
    #: Eviction begins above the first share of a quota and goes on down to the second.
    high: float
    low: float
    quotas: tuple[QuotaLine, ...]


class QuotaReport(Closed):
    """`cache-admin quota set` and `clear`; without `applied` it is only a plan."""

    at_s: float
    applied: bool
    scope: str
    known: bool
    #: What holds now; None: no quota of this scope.
    before_bytes: int | None
    #: What holds afterwards.
    after_bytes: int | None
    used_bytes: int
    pinned_bytes: int
    #: What will be evicted because of it.
    excess_bytes: int
    problem: str
