"""Reports of simulate and whatif. The rules are those of kvstore.admin.reports.

A hit ratio is the number of blocks found over the number asked for.
"""

from __future__ import annotations

from typing import Literal

from schemas.base import StrictModel

#: `kvstore`: this store's own, on segments. `second-use`: the same with admission.second_use. `told`: the
#: same, with what the trace says of sessions. `told-ends`: the same, told which request is a session's last.
#: `lru`, `fifo`: on single blocks. `optimum`: knows what will be asked for. `endless`: evicts nothing.
Policy = Literal["kvstore", "second-use", "told", "told-ends", "lru", "fifo", "optimum", "endless"]


class SpaceTotals(StrictModel):
    """What a trace asks of one namespace; `namespace` is "" if the trace names none."""

    namespace: str
    kind: str
    block_tokens: int
    block_bytes: int
    #: The number of blocks of a segment, as the connectors cut them.
    segment_blocks: int
    requests: int
    asked_blocks: int
    distinct_blocks: int


class TraceTotals(StrictModel):
    """Totals of the trace that was replayed."""

    files: tuple[str, ...]
    requests: int
    #: Time from the first request to the last.
    seconds: float
    asked_blocks: int
    asked_tokens: int
    distinct_blocks: int
    distinct_bytes: int
    #: The number of lines that made no sense.
    skipped_lines: int
    spaces: tuple[SpaceTotals, ...]


class SimulatedPoint(StrictModel):
    """The result of one policy at one capacity."""

    capacity_bytes: int
    hit_ratio: float
    hit_blocks: int
    hit_tokens: int
    stored_bytes: int
    #: The number of segments or blocks that were evicted, whichever the policy evicts.
    evictions: int
    evicted_bytes: int


class Curve(StrictModel):
    """The results of one policy, by capacity, ascending."""

    policy: Policy
    #: (Policies on segments) The blocks of a segment, if that was given; None: as the connectors cut them.
    segment_blocks: int | None
    points: tuple[SimulatedPoint, ...]


class SimulationReport(StrictModel):
    """`cache-admin simulate`."""

    version: str
    trace: TraceTotals
    #: The window of second-use, in seconds.
    window_s: float
    curves: tuple[Curve, ...]
    findings: tuple[str, ...]


class Gain(StrictModel):
    """The gain from `more_bytes` of additional capacity."""

    more_bytes: int
    #: Blocks that would have been served in addition.
    blocks: int
    #: Their share of all blocks that were asked for.
    added_ratio: float


class WhatIfNamespace(StrictModel):
    """One namespace's part of the gains."""

    namespace: str
    kind: str
    model: str
    asked_blocks: int
    served_blocks: int
    #: Bytes evicted to keep quotas, since the namespace was made.
    evicted_bytes: int
    #: The share of additional capacity that this namespace would use.
    share: float
    gains: tuple[Gain, ...]


class WhatIfReport(StrictModel):
    """`cache-admin whatif`."""

    index: str
    capacity_bytes: int
    used_bytes: int
    asked_blocks: int
    served_blocks: int
    hit_ratio: float
    gains: tuple[Gain, ...]
    namespaces: tuple[WhatIfNamespace, ...]
    #: Sentences about what the numbers can't say.
    caveats: tuple[str, ...]
