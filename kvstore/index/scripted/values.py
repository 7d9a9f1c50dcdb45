"""Writes and reads keys and values of the schema in Redis, which stands in kvstore.index.scripted.index."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from kvstore.errors import DamagedIndex
from kvstore.index.contract import QUOTA_RULES, BadArgument, cached, whole_seconds
from kvstore.index.eviction import MINUTE_S, WORTH_MINUTES
from kvstore.index.numbers import real, whole
from kvstore.index.scripted.scripts import Client, Script, Word
from kvstore.index.sharding.names import base_of, is_name
from kvstore.keys import SEGMENT_ID_BYTES, NamespaceId, SegmentId
from kvstore.rules.units import batches
from schemas.records import EvictionRule, SegmentRecord, unpack_record
from schemas.settings import JournalSettings

#: Raised with every change that an older release would misread (golden: tests/index/redis/test_index.py).
SCHEMA = 2
#: That of the meta of a namespace which lies in shards, and not under its id.
SHARDED_SCHEMA = 3
NAMESPACES = "kvs:ns"
#: Namespaces that one round trip asks for.
NAMESPACES_PAGE = 256
QUOTAS = "kvs:quotas"
OPERATIONS = "kvs:operations"
#: A full bucket has between half of this and this many entries on average.
_BUCKET_ENTRIES = 64
#: Most bits of a bucket's number.
MOST_BITS = 24
JOURNAL = JournalSettings()
#: Bytes before the record in a segment's value: the first digest and a checksum.
AGREED_BYTES = 16 + 8
_WORTHS = 16
_UNIT = 1 << 26
#: What Python raises when an answer is taken apart that none of the schema's values explains.
_SENSELESS = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
_TEXT_CHARS = 200
#: Most digits of a segment's bytes that scripts believe (lua/keys.lua).
_SIZE_DIGITS = 15

_Part = TypeVar("_Part", bound="ScriptedPart")
_P = ParamSpec("_P")
_T = TypeVar("_T")


def understood(verb: Callable[Concatenate[_Part, _P], _T]) -> Callable[Concatenate[_Part, _P], _T]:
    """Wraps a verb of the index so that an answer which it can't take apart raises DamagedIndex."""

    @wraps(verb)
    def wrapped(part: _Part, /, *args: _P.args, **options: _P.kwargs) -> _T:
        try:
            return verb(part, *args, **options)
        except BadArgument:
            raise
        except DamagedIndex as exc:
            if "namespace" in str(exc):
                raise
            raise part.damaged(verb.__name__, str(exc.__cause__ or exc), *map(str, args[:1])) from exc
        except _SENSELESS as exc:
            raise part.damaged(verb.__name__, exc, *map(str, args[:1])) from exc

    return wrapped


class ScriptedPart:
    """The base of every part of the index in Redis."""

    def __init__(
        self,
        client: Client,
        *,
        journal: JournalSettings = JOURNAL,
        cost_aware: bool = True,
        grace_s: float = 0.0,
        by: str = "",
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`grace_s`: see Index.evict; `by`: see Event.

        `clock` dates registrations; evictions go by the clock of what runs the scripts.
        """
        self._client = client
        self._grace_s = grace_s
        self._by = by
        self._journal = journal
        self._cost_aware = cost_aware
        self._clock = clock

    def damaged(self, verb: str, why: object, where: str = "") -> DamagedIndex:
        """Returns the error that says what could not be read; `where` is the namespace, if it is in one."""
        found = why if isinstance(why, str) else repr(why)
        named = is_name(where)
        name = base_of(NamespaceId(where))
        mend = f"; `cache-admin fsck {name} --apply` mends it" if named else ""
        of = f"namespace {name} is damaged" if named else "what it holds can't be read"
        return DamagedIndex(f"{self._client.name}: {verb}: {of} ({found[:_TEXT_CHARS]}){mend}")

    def _run(self, script: Script, namespace: NamespaceId, *args: Word) -> Any:
        """Runs a script on one namespace."""
        return self._client.run(script, key(namespace, "meta"), *args)

    def _registered(self) -> list[NamespaceId]:
        return [NamespaceId(name.decode("ascii")) for name in self._members() if is_namespace(name)]

    def _members(self) -> list[bytes]:
        return sorted(self._client.command("SMEMBERS", NAMESPACES))

    def _run_all(
        self,
        script: Script,
        namespace: NamespaceId,
        packed: Sequence[bytes],
        most: int,
        *args: Word,
    ) -> int:
        """Runs a script on `packed`, at most `most` of them at a time. Returns the sum of its answers, each a
        number of those that it was given."""
        return sum(
            whole(self._run(script, namespace, b"".join(some), *args), most=len(some))
            for some in batches(packed, most)
        )

    def deletion(self, delete_after_s: float) -> str:
        """Returns the argument that tells grace.lua when payloads may be deleted."""
        return f"{max(0, whole_seconds(delete_after_s))}:{whole_seconds(self._grace_s)}"

    def recorded(self, rule: EvictionRule) -> tuple[str, int, int]:
        """Returns the arguments that tell drop.lua what to remember of an eviction."""
        return rule, self._journal.events, self._journal.ghosts if rule in QUOTA_RULES else -1


class Use(NamedTuple):
    """The times in a score of `lru` or `pins`, in unix seconds; 0 for one that is no time."""

    keep_s: float
    used_s: float
    #: The depth of the segment, which stands in its score as well.
    depth: int = 0

    @classmethod
    def of(cls, score: bytes | str | float) -> Use:
        exact = real(score)
        if not 0 <= exact < _UNIT * 2.0:
            return cls(0.0, 0.0)
        keep = math.ceil(exact * 4) / 4
        depth, worth = divmod(math.floor((keep - exact) * _UNIT), _WORTHS)
        return cls(keep * MINUTE_S, (keep - worth * WORTH_MINUTES) * MINUTE_S, depth)


def number(value: bytes | None) -> int:
    """Returns a number of `meta`, 0 if there is none. Raises ValueError for one that nobody has counted."""
    return whole(value or 0)


def size_of(value: bytes) -> int:
    """Returns the bytes of the segment with this value; of a damaged one 0, as scripts do: it must be
    possible to count past it and to evict it."""
    digits = value.split(b":", 1)[0]
    return whole(digits) if digits.isdigit() and len(digits) <= _SIZE_DIGITS else 0


def is_namespace(name: bytes) -> bool:
    """Tells whether a member of `kvs:ns` has the form of a namespace's id or of a shard's name."""
    return is_name(name.decode("ascii", "replace"))


def segment_ids(found: Sequence[bytes]) -> list[SegmentId]:
    """Returns those of `found` that have the length of a segment's id."""
    return [SegmentId(one) for one in found if len(one) == SEGMENT_ID_BYTES]


def key(namespace: NamespaceId, part: str) -> str:
    """Returns a key of one namespace; the braces make a Cluster keep all of its keys on one node."""
    return f"kvs:{{{namespace}}}:{part}"


@cached
def record_of(value: bytes) -> SegmentRecord | None:
    """Returns the record in a value of the `segs` hash: `<bytes>:<slots>:`, AGREED_BYTES, the record."""
    fields = value.split(b":", 2)
    return unpack_record(fields[2][AGREED_BYTES:]) if len(fields) == 3 else None


def bucket_bits(expected_blocks: int) -> int:
    """Returns the bits of a bucket's number: with `expected_blocks` buckets hold 32 to 64 entries."""
    buckets = max(1, -(-expected_blocks // _BUCKET_ENTRIES))
    return min(MOST_BITS, (buckets - 1).bit_length())
