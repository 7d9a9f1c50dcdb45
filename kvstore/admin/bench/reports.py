"""The report of bench.

The rules are those of kvstore.admin.reports; rates (`_bytes_s`) are bytes per second.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from schemas.base import StrictModel

Tier = Literal["shared", "fast"]
#: `put` writes a segment's payload, `get` reads and verifies it, `match` looks a chain up in the index.
Operation = Literal["put", "match", "get"]


class BenchSpeed(StrictModel):
    """The speed of one operation, `at_a_time` side by side. If there are fewer than 100 calls `p99_s` is the
    slowest."""

    operation: Operation
    tier: Tier = "shared"
    at_a_time: int
    calls: int
    #: Blocks of one call.
    blocks: int
    p50_s: float = Field(title="p50")
    p99_s: float = Field(title="p99")
    #: 0 of a match, which moves no blocks.
    bytes_s: float = Field(title="rate")


Ended = Literal["complete", "cancelled", "failed"]


class BenchReport(StrictModel):
    """`cache-admin bench`. Operations that a cancelled or failed run did not reach have no speed."""

    version: str
    ended: Ended
    problem: str
    index: str
    payloads: str
    fast: str | None = Field(None, title="fast tier")
    seconds: float
    kv_bytes_per_token: int = Field(title="KV per token", description="{} bytes: {kv_source}")
    #: Where that number comes from.
    kv_source: str = Field(title="")
    block_tokens: int = Field(title="")
    segment_blocks: int = Field(
        title="segment", description="{} blocks of {block_tokens} tokens, {segment_bytes}, codec {codec}"
    )
    #: Raw bytes of a segment.
    segment_bytes: int = Field(title="")
    codec: str = Field(title="")
    speeds: tuple[BenchSpeed, ...]
    #: Payloads that could not be removed from the store; "" if there are none.
    left_behind: str = ""
