"""What `cache-admin bench` measured. Rules as in schemas.reports; rates are bytes per second (`_bytes_s`)."""

from __future__ import annotations

from typing import Literal

from schemas.base import Closed


class Latency(Closed):
    """Times of `count` calls. With fewer than 100 of them `p99_s` is the slowest."""

    count: int
    p50_s: float
    p99_s: float


class MachineSpeed(Closed):
    """One core of this machine."""

    copy_bytes_s: float
    checksum_bytes_s: float


class CodecSpeed(Closed):
    """One codec on one core, of data like bf16 KV, in raw bytes."""

    codec: str
    #: Raw bytes per stored byte.
    ratio: float
    encode_bytes_s: float
    decode_bytes_s: float


class MatchTime(Closed):
    """A match of a chain of so many blocks, all of them present."""

    blocks: int
    latency: Latency


class IndexSpeed(Closed):
    """The index, from this machine."""

    #: A match of one block that isn't there.
    round_trip: Latency
    matches: tuple[MatchTime, ...]
    #: Of a segment of 64 blocks.
    commit: Latency


Tier = Literal["shared", "fast"]


class TransferSpeed(Closed):
    """Payloads of one segment each, put or read whole, so many side by side."""

    tier: Tier
    operation: Literal["put", "get"]
    concurrency: int
    object_bytes: int
    bytes_s: float
    #: None: not one succeeded, or it was skipped.
    latency: Latency | None
    #: Kind of error -> how many.
    errors: dict[str, int]
    #: Why it was not measured.
    skipped: str


class LoadTime(Closed):
    """A prompt of so many tokens matched, read and verified."""

    tier: Tier
    tokens: int
    nbytes: int
    #: False: worked out from the longest load that was measured.
    measured: bool
    match_s: float
    load_s: float
    bytes_s: float
    #: Prefill slower than this (tokens per second) loses to loading.
    break_even_tokens_s: float


Ended = Literal["complete", "cancelled", "failed"]


class BenchReport(Closed):
    """`cache-admin bench`. What was not reached, because it was cancelled or failed, is None or empty."""

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
    #: Raw.
    segment_bytes: int
    codec: str
    read_threads: int
    machine: MachineSpeed | None
    codecs: tuple[CodecSpeed, ...]
    index_speed: IndexSpeed | None
    transfers: tuple[TransferSpeed, ...]
    #: A payload's header, one after the other.
    small_reads: Latency | None
    loads: tuple[LoadTime, ...]
    #: What bounds it, and what may be done about it.
    findings: tuple[str, ...]
    #: What is left behind, if it was to be kept or could not be removed.
    left_behind: str
