"""The report of bench.

The rules are those of kvstore.admin.reports; rates (`_bytes_s`) are bytes per second.
"""

from __future__ import annotations

from typing import Literal

from schemas.base import StrictModel


class Latency(StrictModel):
    """Times of `count` calls. If there are fewer than 100 of them `p99_s` is the slowest."""

    count: int
    p50_s: float
    p99_s: float


class MachineSpeed(StrictModel):
    """The speed of one core of this machine."""

    copy_bytes_s: float
    checksum_bytes_s: float


class CodecSpeed(StrictModel):
    """The speed of one codec on one core, in raw bytes of data like bf16 KV."""

    codec: str
    #: Raw bytes per stored byte.
    ratio: float
    encode_bytes_s: float
    decode_bytes_s: float


class MatchTime(StrictModel):
    """The time of a match of a chain of `blocks` blocks, all of them present."""

    blocks: int
    latency: Latency


class IndexSpeed(StrictModel):
    """The speed of the index, as seen from this machine."""

    #: A match of one block that isn't there.
    round_trip: Latency
    matches: tuple[MatchTime, ...]
    #: A commit of a segment of 64 blocks.
    commit: Latency


Tier = Literal["shared", "fast"]


class TransferSpeed(StrictModel):
    """The speed of whole payloads of one segment each, `concurrency` at a time."""

    tier: Tier
    operation: Literal["put", "get"]
    concurrency: int
    object_bytes: int
    bytes_s: float
    #: None: none succeeded, or it was skipped.
    latency: Latency | None
    #: The number of errors by kind.
    errors: dict[str, int]
    #: Why it was not measured; "" if it was.
    skipped: str


class LoadTime(StrictModel):
    """The time to match, read and verify a prompt of `tokens` tokens."""

    tier: Tier
    tokens: int
    nbytes: int
    #: False: extrapolated from the longest load that was measured.
    measured: bool
    match_s: float
    load_s: float
    bytes_s: float
    #: Tokens per second: where prefill is slower than this, loading is faster.
    break_even_tokens_s: float


Ended = Literal["complete", "cancelled", "failed"]


class BenchReport(StrictModel):
    """`cache-admin bench`.

    Stages that were not reached, because it was cancelled or failed, are None or empty.
    """

    version: str
    ended: Ended
    problem: str
    index: str
    payloads: str
    fast: str | None
    seconds: float
    kv_bytes_per_token: int
    #: Where that number comes from.
    kv_source: str
    block_tokens: int
    segment_blocks: int
    #: Raw bytes of a segment.
    segment_bytes: int
    codec: str
    read_threads: int
    machine: MachineSpeed | None
    codecs: tuple[CodecSpeed, ...]
    index_speed: IndexSpeed | None
    transfers: tuple[TransferSpeed, ...]
    #: Reads of a payload's header, one after the other.
    small_reads: Latency | None
    loads: tuple[LoadTime, ...]
    #: Sentences about what bounds loading, and what may be done about it.
    findings: tuple[str, ...]
    #: What was left in the store, because it was to be kept or could not be removed; "" if nothing.
    left_behind: str
