"""The report of advise on the live store. The rules are those of kvstore.admin.reports, and of
kvstore.admin.advise.reports for money and months."""

from __future__ import annotations

from kvstore.admin.advise.reports import AdviceReport, PriceList, Verdict
from schemas.base import StrictModel


class LivePeriod(StrictModel):
    """What one window of time was worth, and has cost; money as if a month were like it."""

    window_s: int
    #: The part of it of which anything is known: from the first request in it on.
    seconds: float
    asked_blocks: int
    served_blocks: int
    #: An estimate, with a standard error of 1.6 %.
    distinct_blocks: int
    hit_ratio: float
    #: The most that a cache of what was asked for in this window could serve.
    ceiling_ratio: float
    #: None: it isn't known what computing costs.
    gpu_seconds_month: float | None
    saved_month: float | None
    storage_month: float
    requests_month: float
    transfer_month: float
    net_month: float | None


class LiveCapacity(StrictModel):
    """The present capacity, and what a larger one would add to it."""

    capacity_bytes: int
    added_ratio: float
    hit_ratio: float
    saved_month: float | None
    storage_month: float
    net_month: float | None


class LiveNamespace(StrictModel):
    """The namespaces of one model and tenant."""

    model: str
    tenant: str
    kind: str
    namespaces: int
    asked_blocks: int
    hit_ratio: float
    ceiling_ratio: float
    stored_bytes: int
    saved_month: float | None


class MissedFor(StrictModel):
    """Blocks that were missed for one reason, of those that the ring of outcomes still knows."""

    reason: str
    blocks: int


class LiveAdviceReport(StrictModel):
    """`cache-admin advise --since` without a recording."""

    version: str
    at_s: float
    since_s: float
    index: str
    #: Whether the store pays.
    verdict: Verdict
    because: tuple[str, ...]
    prices: PriceList
    capacity_bytes: int
    used_bytes: int
    #: The window that is weighed: the shortest that reaches back to `since_s`, or the longest there is.
    period: LivePeriod
    periods: tuple[LivePeriod, ...]
    #: The present capacity first.
    capacities: tuple[LiveCapacity, ...]
    best: LiveCapacity
    by_model: tuple[LiveNamespace, ...]
    missed: tuple[MissedFor, ...]
    #: What to change, as YAML; "" if nothing.
    settings: str
    #: What the engines' recordings on this machine say of the time since then; None: there are none.
    recorded: AdviceReport | None
    #: Sentences that say where the numbers come from.
    basis: tuple[str, ...]
    caveats: tuple[str, ...]
