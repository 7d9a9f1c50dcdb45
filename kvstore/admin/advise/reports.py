"""The report of advise. The rules are those of kvstore.admin.reports.

Money is in the currency of the prices that were given; a month has 730 hours, a GB of the bill 2^30 bytes.
What is of a month is the recording's, times as many as a month has of its length. A hit ratio is the number
of blocks found over the number asked for.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from schemas.base import StrictModel

#: `unclear`: neither the source nor the options say what computing costs.
Verdict = Literal["yes", "no", "unclear"]
#: This store's own, on segments: `kvstore`, `second-use` (with admission.second_use), `told` (what the trace
#: says of sessions), `told-ends` (which request is a session's last). On single blocks: `lru`, `fifo`, and
#: `optimum`, which knows what will be asked for.
Policy = Literal["kvstore", "second-use", "told", "told-ends", "lru", "fifo", "optimum"]
_Price = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class PriceList(StrictModel):
    """Prices. Defaults are list prices of S3 Standard in us-east-1, and a GPU hour of nobody in
    particular (docs/production.md)."""

    #: One GPU, for an hour.
    gpu_hour: _Price = 3.0
    #: Storage, per GB and month.
    gb_month: _Price = 0.023
    put_1000: _Price = 0.005
    get_1000: _Price = 0.0004
    #: Transfer, per GB.
    upload_gb: _Price = 0.0
    download_gb: _Price = 0.0
    #: Names of the prices that nobody gave.
    assumed: tuple[str, ...] = ()


class Recorded(StrictModel):
    """Totals of a recording."""

    requests: int
    #: Time from the first request to the last.
    seconds: float
    asked_tokens: int
    distinct_blocks: int
    distinct_bytes: int
    #: The number of lines that made no sense.
    skipped_lines: int


class CapacityPoint(StrictModel):
    """The result of one policy at one capacity. The index doesn't know the fields that may be None."""

    capacity_bytes: int
    hit_ratio: float
    hit_blocks: int
    hit_tokens: int | None = None
    stored_bytes: int | None = None
    #: The number of segments or blocks that were evicted, whichever the policy evicts.
    evictions: int | None = None
    evicted_bytes: int | None = None


class Curve(StrictModel):
    """The results of one policy, by capacity, ascending. The index's begins with the present capacity."""

    policy: Policy
    points: tuple[CapacityPoint, ...]


class CapacityAdvice(StrictModel):
    """What a store of some capacity would bring and cost."""

    capacity_bytes: int
    #: Whether it saves only what is asked for twice (admission.second_use).
    second_use: bool
    #: Blocks found, of those asked for, what engines have themselves included.
    hit_ratio: float
    #: Blocks found that no engine had itself, of those asked for.
    gained_ratio: float
    #: None: it isn't known what computing costs.
    gpu_seconds_month: float | None
    saved_month: float | None
    storage_month: float
    requests_month: float
    transfer_month: float
    #: Storage, requests and transfer.
    cost_month: float
    #: The money that is saved, less the cost.
    net_month: float | None


class NamespaceAdvice(StrictModel):
    """The gain of the recommended capacity for a model and tenant, with blocks of one size."""

    model: str
    tenant: str
    kind: str
    #: Their ids; one may be "", if the trace names none.
    namespaces: tuple[str, ...]
    block_tokens: int
    block_bytes: int
    #: The number of blocks of a segment, as the connectors cut them.
    segment_blocks: int
    #: GPUs of an engine.
    gpus: int
    requests: int
    asked_blocks: int
    distinct_blocks: int
    hit_ratio: float
    #: Hits of a store that forgets nothing, and of the engines' own caches; None: those weren't recorded.
    ceiling_ratio: float
    local_ratio: float | None
    #: What computing a token took, in the mean of its prompts.
    token_us: float | None
    gpu_seconds_month: float | None
    saved_month: float | None
    cost_month: float
    net_month: float | None
    #: Where reads are slower than this, computing is faster than loading.
    break_even_bytes_s: float | None


class NamespaceGain(StrictModel):
    """One namespace's part of what more capacity would have brought, as the index remembers it."""

    namespace: str
    kind: str
    model: str
    asked_blocks: int
    served_blocks: int
    #: Bytes evicted to keep quotas, since the namespace was made.
    evicted_bytes: int
    #: The share of additional capacity that this namespace would use.
    share: float
    #: Blocks that would have been served in addition, by capacity, from the first beyond the present one on.
    gained_blocks: tuple[int, ...]


class PromptLoad(StrictModel):
    """What computing the first tokens of a prompt takes, and what loading them may take at most."""

    tokens: int
    nbytes: int
    compute_s: float
    break_even_bytes_s: float


class RedisSize(StrictModel):
    """How large Redis must be."""

    blocks: int
    segments: int
    index_bytes: int
    #: What to set `maxmemory` to.
    maxmemory_bytes: int


class AdviceReport(StrictModel):
    """`cache-admin advise`, of recordings or of the index, which leaves what only a recording says empty."""

    version: str
    #: The files of the recording, or the URL of the index.
    sources: tuple[str, ...]
    verdict: Verdict
    #: Sentences that say why, the weightiest first.
    because: tuple[str, ...]
    asked_blocks: int
    curves: tuple[Curve, ...]
    caveats: tuple[str, ...]
    recorded: Recorded | None = None
    prices: PriceList | None = None
    #: The hit ratio of a store that forgets nothing, and of the engines' own caches; None: not recorded.
    ceiling_ratio: float | None = None
    local_ratio: float | None = None
    #: The better of both ways to admit, by capacity, ascending.
    capacities: tuple[CapacityAdvice, ...] = ()
    best: CapacityAdvice | None = None
    by_model: tuple[NamespaceAdvice, ...] = ()
    #: What loads are worth to the model that asks for most.
    prompts: tuple[PromptLoad, ...] = ()
    #: Bytes that a node reads in a second, if somebody said it.
    bandwidth_bytes_s: int | None = None
    redis: RedisSize | None = None
    #: Settings, as YAML; "" if a store doesn't pay.
    settings: str = ""
    #: (Of the index) Bytes stored now, and what each namespace would have gained.
    used_bytes: int | None = None
    namespaces: tuple[NamespaceGain, ...] = ()
