"""How a bucket is asked: calls are made again, wait for their turn, and longer reads are several.

Engines and tools differ in how long they wait: a request computes what doesn't come soon, and whoever runs a
tool wants its work done.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from kvstore.breaker import Breaker
from kvstore.payloads.breaking import BreakingPayloads
from kvstore.payloads.port import PayloadStore
from kvstore.payloads.ranged import RangedPayloads, Together
from kvstore.payloads.retrying import RetryingPayloads
from kvstore.payloads.throttle import Throttle
from kvstore.threads.each import pause
from schemas.settings import S3Settings

#: How many times a tool is asked for fewer requests, with one call or with all in a row, before that is an
#: answer.
_TOOLS_REFUSALS: Final = 20


def for_engines(
    bucket: PayloadStore,
    s3: S3Settings,
    breaker: Breaker,
    throttle: Throttle,
    *,
    together: Together,
    count: Callable[[str], object],
) -> PayloadStore:
    """Returns a bucket as engines use it. `count` is RetryingPayloads'."""
    return RangedPayloads(
        RetryingPayloads(
            # A request waits for a read, and should not pay for finding out that the bucket is still down.
            BreakingPayloads(bucket, breaker, reads_probe=False),
            attempts=s3.attempts,
            backoff_s=s3.backoff_s,
            max_backoff_s=s3.max_backoff_s,
            throttle=throttle,
            breaker=breaker,
            count=count,
        ),
        range_bytes=s3.range_bytes,
        concurrency=s3.concurrency,
        together=together,
    )


def for_tools(bucket: PayloadStore, s3: S3Settings, *, patient: bool = True) -> PayloadStore:
    """Returns a bucket that is waited for as long as that takes while it serves: a payload that nobody has
    asked for must not pass for one that can't be read. Without `patient`, for as long as engines wait."""
    return RetryingPayloads(
        bucket,
        attempts=s3.attempts,
        backoff_s=s3.backoff_s,
        max_backoff_s=s3.max_backoff_s,
        patience_s=math.inf if patient else None,
        refusals=max(_TOOLS_REFUSALS, s3.attempts) if patient else None,
        sleep=pause,
    )
