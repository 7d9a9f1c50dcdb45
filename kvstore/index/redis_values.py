"""Keys and values of the schema in Redis as Python spells and reads them. The schema stands in
kvstore.index.redis."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeVar

from kvstore.eviction import MINUTE_S, WORTH_MINUTES
from kvstore.index.contract import QUOTA_RULES, whole_seconds
from kvstore.index.redis_client import RedisClient
from kvstore.keys import NamespaceId
from schemas.records import EvictionRule, SegmentRecord, unpack_record
from schemas.settings import JournalSettings

#: Raised with every change that an older release would misread (golden test: tests/index/test_redis.py).
SCHEMA = 2
NAMESPACES = "kvs:ns"
QUOTAS = "kvs:quotas"
JOURNAL = JournalSettings()
#: Of a segment's value, before the record: the first digest and a checksum.
AGREED_BYTES = 16 + 8
_WORTHS = 16
_UNIT = 1 << 26

_T = TypeVar("_T")


class RedisPart:
    """What every part of the index in Redis works with."""

    def __init__(
        self,
        client: RedisClient,
        *,
        journal: JournalSettings = JOURNAL,
        cost_aware: bool = True,
        grace_s: float = 0.0,
        clock: Callable[[], float],
    ) -> None:
        """`grace_s`: see Index.evict. The other times of an eviction are the server's, not the clock's."""
        self._client = client
        self._grace_s = grace_s
        self._journal = journal
        self._cost_aware = cost_aware
        self._clock = clock

    def deletion(self, delete_after_s: float) -> str:
        """How grace.lua is told when payloads may be deleted."""
        return f"{max(0, whole_seconds(delete_after_s))}:{whole_seconds(self._grace_s)}"

    def recorded(self, rule: EvictionRule) -> tuple[str, int, int]:
        """How drop.lua is told what to remember of an eviction."""
        return rule, self._journal.events, self._journal.ghosts if rule in QUOTA_RULES else -1


class Use(NamedTuple):
    """What a score of `lru` or `pins` says, in unix seconds."""

    keep_s: float
    used_s: float

    @classmethod
    def of(cls, score: bytes | str | float) -> Use:
        exact = float(score)
        keep = math.ceil(exact)
        worth = int((keep - exact) * _UNIT) % _WORTHS
        return cls(keep * float(MINUTE_S), (keep - worth * WORTH_MINUTES) * float(MINUTE_S))


def key(namespace: NamespaceId, part: str) -> str:
    """A key of one namespace; the braces make a Cluster keep all of them on one node."""
    return f"kvs:{{{namespace}}}:{part}"


@lru_cache(maxsize=8192)
def record_of(value: bytes) -> SegmentRecord | None:
    """The record in a value of the `segs` hash: `<bytes>:<slots>:`, what AGREED_BYTES says, the record.

    Cached because the same prefixes are matched again and again, and unpacking 128 records takes
    longer than Redis takes to find them.
    """
    fields = value.split(b":", 2)
    return unpack_record(fields[2][AGREED_BYTES:]) if len(fields) == 3 else None


def pieces(items: Sequence[_T], size: int) -> Iterator[Sequence[_T]]:
    """`items` in runs of at most `size`."""
    return (items[first : first + size] for first in range(0, len(items), size))
