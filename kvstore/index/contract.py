"""What all indexes share so that they agree: checks of arguments, values derived from them, bounds.

A wrong argument is the caller's mistake, not a failure of the index, and raises BadArgument, a ValueError.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, wraps
from math import ceil, inf

import xxhash

from kvstore.index.port import DETAIL_CHARS, MISSING_DIGESTS, REQUEST_CHARS, Outcome, Replaced
from kvstore.keys import (
    DIGEST_BYTES,
    NO_SALT,
    SEGMENT_ID_BYTES,
    SESSION_ID_BYTES,
    SaltId,
    SegmentId,
    SessionId,
    WriterId,
)
from kvstore.rules.reasons import FAULTS
from schemas.records import (
    HEAD_BYTES,
    SALT_ID_BYTES,
    WRITER_ID_BYTES,
    EvictionRule,
    SegmentRecord,
    pack_head,
)

#: Seconds by which the clocks of an index's servers may differ, and of those that take over from each other.
CLOCKS_DIFFER_S = 60
#: Seconds after which an incomplete commit is forgotten.
INCOMPLETE_TTL_S = 3600
#: A sweep looks at SWEEP_FACTOR entries for each one that it may drop, and at SWEEP_MIN at least, so that
#: its limit bounds the time of a call also where nothing dangles.
SWEEP_FACTOR = 8
SWEEP_MIN = 4096
#: The packed record has one byte for the number of ranks.
MAX_RANKS = 255
MAX_SLOTS = 0xFFFF
#: Most segments that one cull looks at: those that it evicts, and those that it spares for their last use.
CULL_LOOKS = 4096
#: Seconds to which the last use is known.
QUARTER_S = 15
#: Seconds before it was saved at which a segment counts as used, until it is used.
UNUSED_S = 30
#: When more than HOT_MOST segments are watched for how often they begin a load, the HOT_KEPT most used stay.
HOT_MOST = 2048
HOT_KEPT = 1024
#: A segment of which `cool` leaves fewer minutes than this is forgotten.
HOT_LEAST = 0.1
#: Evictions that make room: more capacity would have prevented them.
QUOTA_RULES: frozenset[EvictionRule] = frozenset(
    {"capacity", "tenant_quota", "namespace_quota", "salt_quota"}
)

#: Operations that are kept, at least.
OPERATIONS_KEPT = 1000
#: Unpacked records that a process keeps, and the longest packed one that it keeps: 22 MiB of them, at most.
_RECORDS_KEPT = 8192
_RECORD_KEPT_BYTES = 1 << 10


class BadArgument(ValueError):
    """A verb was called with what it does not take."""


def count_digests(digests: bytes) -> int:
    """Returns how many digests a packed string holds. Raises BadArgument if it ends inside one."""
    count, rest = divmod(len(digests), DIGEST_BYTES)
    if rest:
        raise BadArgument(f"packed digests of {len(digests)} bytes; a multiple of {DIGEST_BYTES} is needed")
    return count


_CHECKSUM_BYTES = 8


def check_segments(segments: Sequence[SegmentId]) -> None:
    """Raises BadArgument if a segment id has the wrong length."""
    for segment in segments:
        if len(segment) != SEGMENT_ID_BYTES:
            raise BadArgument(f"segment id of {len(segment)} bytes; it has {SEGMENT_ID_BYTES}")


def check_salt(salt: SaltId) -> None:
    """Raises BadArgument if the id of a salt has the wrong length."""
    if len(salt) != SALT_ID_BYTES:
        raise BadArgument(f"salt id of {len(salt)} bytes; it has {SALT_ID_BYTES}")


def check_writers(writers: Sequence[WriterId]) -> None:
    """Raises BadArgument if the id of a writer has the wrong length."""
    for writer in writers:
        if len(writer) != WRITER_ID_BYTES:
            raise BadArgument(f"writer id of {len(writer)} bytes; it has {WRITER_ID_BYTES}")


def check_session(session: SessionId, *, none: bool = False) -> None:
    """Raises BadArgument if the id of a session has the wrong length; an empty one has, unless `none`."""
    if len(session) != SESSION_ID_BYTES and not (none and not session):
        raise BadArgument(f"session id of {len(session)} bytes; it has {SESSION_ID_BYTES}")


def check_commit(segment: SegmentId, digests: bytes, record: SegmentRecord, rank: int, ranks: int) -> None:
    """Raises BadArgument if the arguments of one rank's commit don't fit together."""
    check_segments([segment])
    if record.salt:
        check_salt(SaltId(record.salt))
    if not 1 <= record.slots <= MAX_SLOTS or count_digests(digests) != record.slots:
        raise BadArgument(f"{record.slots} slots for {count_digests(digests)} digests; they are one to one")
    if not 1 <= ranks <= MAX_RANKS or not 0 <= rank < ranks:
        raise BadArgument(f"rank {rank} of {ranks}; there are 1 to {MAX_RANKS} ranks, counted from 0")
    if len(record.parts) != 1 or len(record.parts[0].slot_sizes) != record.slots:
        raise BadArgument("a commit carries exactly one part, with a size for each slot")


def check_replaced(replaces: Sequence[Replaced]) -> None:
    """Raises BadArgument if what a commit replaces can't be segments of a chain."""
    check_segments([old.segment for old in replaces])
    for old in replaces:
        if not 1 <= (blocks := count_digests(old.digests)) <= MAX_SLOTS:
            raise BadArgument(f"a segment of {blocks} blocks is replaced; one has 1 to {MAX_SLOTS}")


def agreement(digests: bytes, record: SegmentRecord, ranks: int) -> bytes:
    """Returns what all ranks' commits of a segment must share, but for when it was created: a checksum of its
    digests, and its record's head."""
    return xxhash.xxh3_64_digest(digests) + pack_head(record, ranks)


def salt_of(agreed: bytes) -> SaltId:
    """Returns the id of the salt that ranks have agreed on."""
    return SaltId(agreed[_CHECKSUM_BYTES + HEAD_BYTES :])


def cached(unpack: Callable[[bytes], SegmentRecord | None]) -> Callable[[bytes], SegmentRecord | None]:
    """Wraps what unpacks an index's records so that those of usual size are unpacked once.

    The same prefixes are matched again and again, and unpacking 128 records takes as long as finding them.
    """
    known = lru_cache(maxsize=_RECORDS_KEPT)(unpack)

    @wraps(unpack)
    def record_of(value: bytes) -> SegmentRecord | None:
        return known(value) if len(value) <= _RECORD_KEPT_BYTES else unpack(value)

    return record_of


def totals(outcome: Outcome) -> dict[str, int]:
    """Returns what an outcome adds to the totals of `Journal.seen`.

    A block that a match found and the load then did not bring is a miss after all, so that
    asked = served + the sum of all misses.
    """
    lost = outcome.asked - outcome.served if outcome.reason else 0
    if outcome.op == "save":
        return {"offered": outcome.asked, "stored": outcome.served, f"unsaved:{outcome.reason}": lost}
    missed = {f"miss:{outcome.reason}": lost}
    if outcome.op == "load":
        return {"served": -lost, **missed}
    return {"requests": 1, "asked": outcome.asked, "served": outcome.served, **missed}


def remembered(outcome: Outcome) -> tuple[bytes, bytes]:
    """Returns what the ring of outcomes keeps of a request's name and of its missing digests."""
    # A client's text may hold lone surrogates, which UTF-8 has no bytes for.
    request = outcome.request[:REQUEST_CHARS].encode("utf-8", "surrogatepass")
    return request, outcome.missing[:DIGEST_BYTES]


def reason_kept(outcome: Outcome) -> str:
    """Returns what the ring of outcomes keeps of a reason and what goes with it: one word, or more. A fault's
    is one, by which it is found."""
    if not outcome.detail or is_fault(outcome):
        return outcome.reason
    return f"{outcome.reason} {outcome.detail[:DETAIL_CHARS]}"


def reason_read(kept: str) -> tuple[str, str]:
    """Returns the reason and the detail of what `reason_kept` returned."""
    reason, _, detail = kept.partition(" ")
    return reason, detail


def is_fault(outcome: Outcome) -> bool:
    """Returns whether an outcome tells that something doesn't work, which no number of misses may hide."""
    return outcome.reason in FAULTS


def faults_kept(outcomes: int) -> int:
    """Returns how many faults are kept at least, where so many outcomes are."""
    return -(-outcomes // 4)


def missed(outcome: Outcome) -> bytes:
    """Returns the digests to look for among the ghosts: those that a match found absent."""
    absent = outcome.op == "match" and outcome.reason == "absent"
    return outcome.missing[: MISSING_DIGESTS * DIGEST_BYTES] if absent else b""


def is_forbidden(
    forbidden: Mapping[SaltId, float], salt: SaltId, created_s: float, now_s: float = inf
) -> bool:
    """Tells whether `Salts.forbidden` of a namespace covers what was created under a salt at that time.

    A time that is yet to come at `now_s`, by more than servers' clocks differ, proves nothing: it is
    forbidden if anything is under that salt.
    """
    until_s = max(forbidden.get(NO_SALT, -1.0), forbidden.get(salt, -1.0))
    return min(created_s, now_s) <= until_s or (until_s >= 0 and created_s > now_s + CLOCKS_DIFFER_S)


def minute(now_s: float) -> float:
    """Returns the unix minute of a time, down to the quarter: the resolution of recency."""
    return now_s // QUARTER_S / 4


def saved_minute(created_s: float) -> float:
    """Returns the minute that counts as the last use of what was saved then and not used since."""
    return max(0.0, minute(created_s - UNUSED_S))


def whole_seconds(when_s: float) -> int:
    """Rounds the time of a deletion up: a payload may be deleted later than promised, not earlier."""
    return ceil(when_s)
