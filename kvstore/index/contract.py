"""What all indexes share so that they agree: checks of arguments, what is derived from them, bounds.

A wrong argument is the caller's mistake, not a failure of the index: ValueError.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import xxhash

from kvstore.keys import DIGEST_BYTES, SEGMENT_ID_BYTES, SegmentId
from kvstore.ports import Outcome
from schemas.records import EvictionRule, SegmentRecord, pack_head

#: An incomplete commit is forgotten after this.
INCOMPLETE_TTL_S = 3600
#: A sweep looks at this many entries per entry that it may drop, and at no fewer than the minimum, so
#: that a call's time is bounded by its limit also where nothing dangles.
SWEEP_FACTOR = 8
SWEEP_MIN = 4096
#: A namespace's number of ranks is one byte of the packed record.
MAX_RANKS = 255
MAX_SLOTS = 0xFFFF
#: Segments that one cull looks at: those that it evicts, and those that were used too lately.
CULL_LOOKS = 4096
#: When more segments than HOT_MOST are watched for how often they begin a load, the HOT_KEPT most used stay.
HOT_MOST = 2048
HOT_KEPT = 1024
#: What `cool` leaves less of than this is forgotten.
HOT_LEAST = 0.1
#: Evictions that make room: more capacity would have prevented them.
QUOTA_RULES: frozenset[EvictionRule] = frozenset({"capacity", "tenant_quota", "namespace_quota"})


def count_digests(digests: bytes) -> int:
    """How many digests a packed blob holds."""
    count, rest = divmod(len(digests), DIGEST_BYTES)
    if rest:
        raise ValueError(f"packed digests of {len(digests)} bytes; a multiple of {DIGEST_BYTES} is needed")
    return count


def check_segments(segments: Sequence[SegmentId]) -> None:
    """Segment ids of the one right length."""
    for segment in segments:
        if len(segment) != SEGMENT_ID_BYTES:
            raise ValueError(f"segment id of {len(segment)} bytes; it has {SEGMENT_ID_BYTES}")


def check_commit(segment: SegmentId, digests: bytes, record: SegmentRecord, rank: int, ranks: int) -> None:
    """One rank's commit fits together."""
    check_segments([segment])
    if not 1 <= record.slots <= MAX_SLOTS or count_digests(digests) != record.slots:
        raise ValueError(f"{record.slots} slots for {count_digests(digests)} digests; they are one to one")
    if not 1 <= ranks <= MAX_RANKS or not 0 <= rank < ranks:
        raise ValueError(f"rank {rank} of {ranks}; there are 1 to {MAX_RANKS} ranks, counted from 0")
    if len(record.parts) != 1 or len(record.parts[0].slot_sizes) != record.slots:
        raise ValueError("a commit carries exactly one part, with a size for each slot")


def agreement(digests: bytes, record: SegmentRecord, ranks: int) -> bytes:
    """What all ranks' commits of a segment must share: which blocks they are, and the record's head."""
    return xxhash.xxh3_64_digest(digests) + pack_head(record, ranks)


def totals(outcome: Outcome) -> dict[str, int]:
    """What an outcome adds to the totals of `Journal.seen`.

    What a match found and a load then did not bring was a miss after all, so that
    asked = served + the sum of all misses.
    """
    lost = outcome.asked - outcome.served if outcome.reason else 0
    if outcome.op == "save":
        return {"offered": outcome.asked, "stored": outcome.served, f"unsaved:{outcome.reason}": lost}
    missed = {f"miss:{outcome.reason}": lost}
    if outcome.op == "load":
        return {"served": -lost, **missed}
    return {"requests": 1, "asked": outcome.asked, "served": outcome.served, **missed}


def minute(now_s: float) -> int:
    """The minute that a time falls into: the resolution of recency."""
    return int(now_s // 60)


def whole_seconds(when_s: float) -> int:
    """A deletion time on the safe side."""
    return ceil(when_s)
