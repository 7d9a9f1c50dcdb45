"""The report of advise. The rules are those of kvstore.admin.reports.

Money is in the currency of the prices that were given; a month has 730 hours, a GB of the bill 2^30 bytes.
What is of a month is the recording's, times as many as a month has of its length.
"""

from __future__ import annotations

from typing import Literal

from kvstore.admin.simulate.reports import Curve, TraceTotals
from schemas.base import StrictModel

#: `unclear`: the recording doesn't say what computing costs, and nobody else does.
Verdict = Literal["yes", "no", "unclear"]


class PriceList(StrictModel):
    """What things cost."""

    #: One GPU, for an hour.
    gpu_hour: float
    #: Storage, per GB and month.
    gb_month: float
    put_1000: float
    get_1000: float
    #: Transfer, per GB.
    upload_gb: float
    download_gb: float
    #: Names of the prices that nobody gave.
    assumed: tuple[str, ...]


class CapacityAdvice(StrictModel):
    """What a store of some capacity would bring and cost."""

    capacity_bytes: int
    #: Whether it saves only what is asked for twice (admission.second_use).
    second_use: bool
    #: Blocks found, of those asked for, what engines have themselves included.
    hit_ratio: float
    #: Blocks found that no engine had itself, of those asked for.
    gained_ratio: float
    gained_tokens_month: int
    #: None: it isn't known what computing costs.
    gpu_seconds_month: float | None
    saved_month: float | None
    storage_month: float
    requests_month: float
    transfer_month: float
    #: What is saved, less what it costs.
    net_month: float | None


class NamespaceAdvice(StrictModel):
    """What the recommended capacity brings to the namespaces of one model and tenant."""

    model: str
    tenant: str
    kind: str
    namespaces: int
    #: GPUs of an engine.
    gpus: int
    requests: int
    asked_blocks: int
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


class PromptLoad(StrictModel):
    """What computing the first tokens of a prompt takes, and what loading them may take at most."""

    tokens: int
    nbytes: int
    compute_s: float
    break_even_bytes_s: float


class ReadSpeed(StrictModel):
    """What reads of a tier bring here."""

    tier: str
    bytes_s: float


class RedisSize(StrictModel):
    """How large Redis must be."""

    blocks: int
    segments: int
    index_bytes: int
    #: What to set `maxmemory` to.
    maxmemory_bytes: int


class AdviceReport(StrictModel):
    """`cache-admin advise`."""

    version: str
    verdict: Verdict
    #: Sentences that say why, the weightiest first.
    because: tuple[str, ...]
    trace: TraceTotals
    prices: PriceList
    #: The hit ratio of a store that forgets nothing, and of the engines' own caches; None: not recorded.
    ceiling_ratio: float
    local_ratio: float | None
    curves: tuple[Curve, ...]
    #: The better of both ways to admit, by capacity, ascending.
    capacities: tuple[CapacityAdvice, ...]
    best: CapacityAdvice
    by_model: tuple[NamespaceAdvice, ...]
    #: What loads are worth to the model that asks for most.
    prompts: tuple[PromptLoad, ...]
    reads: tuple[ReadSpeed, ...]
    redis: RedisSize
    #: Settings, as YAML; "" if a store doesn't pay.
    settings: str
    caveats: tuple[str, ...]
