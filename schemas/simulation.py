"""What `cache-admin simulate` and `cache-admin whatif` report. Rules as in schemas.reports.

A hit ratio is of blocks: found, of those asked for.
"""

from __future__ import annotations

from typing import Literal

from schemas.base import Closed

#: `kvstore`: this store, on segments. `second-use`: it, with admission.second_use. `lru`, `fifo`: of single
#: blocks. `endless`: forgets nothing.
Policy = Literal["kvstore", "second-use", "lru", "fifo", "endless"]


class SpaceTotals(Closed):
    """What a trace asks of one namespace; `namespace` is "" where the trace knows of none."""

    namespace: str
    kind: str
    block_tokens: int
    block_bytes: int
    #: Blocks of a segment, as the connectors cut them.
    segment_blocks: int
    requests: int
    asked_blocks: int
    distinct_blocks: int


class TraceTotals(Closed):
    """What was replayed."""

    files: tuple[str, ...]
    requests: int
    #: From the first request to the last.
    seconds: float
    asked_blocks: int
    asked_tokens: int
    distinct_blocks: int
    distinct_bytes: int
    #: Lines that made no sense.
    skipped_lines: int
    spaces: tuple[SpaceTotals, ...]


class SimulatedPoint(Closed):
    """One policy at one capacity."""

    capacity_bytes: int
    hit_ratio: float
    hit_blocks: int
    hit_tokens: int
    stored_bytes: int
    #: Of what the policy evicts: segments, or blocks.
    evictions: int
    evicted_bytes: int


class Curve(Closed):
    """One policy, by capacity, ascending."""

    policy: Policy
    #: Of the policies on segments: blocks of a segment, if it was given; None: as the connectors cut them.
    segment_blocks: int | None
    points: tuple[SimulatedPoint, ...]


class SimulationReport(Closed):
    """`cache-admin simulate`."""

    version: str
    trace: TraceTotals
    high: float
    low: float
    #: Of second-use.
    window_s: float
    curves: tuple[Curve, ...]
    findings: tuple[str, ...]


class Gain(Closed):
    """What so much more capacity would have brought."""

    more_bytes: int
    blocks: int
    #: Of all blocks that were asked for.
    added_ratio: float


class WhatIfNamespace(Closed):
    """One namespace's part in it."""

    namespace: str
    kind: str
    model: str
    asked_blocks: int
    served_blocks: int
    #: By quotas, since the namespace was made.
    evicted_bytes: int
    #: Of additional capacity, how much would be this namespace's.
    share: float
    gains: tuple[Gain, ...]


class WhatIfReport(Closed):
    """`cache-admin whatif`."""

    index: str
    capacity_bytes: int
    used_bytes: int
    asked_blocks: int
    served_blocks: int
    hit_ratio: float
    gains: tuple[Gain, ...]
    namespaces: tuple[WhatIfNamespace, ...]
    #: What the numbers can't say.
    caveats: tuple[str, ...]
