"""Shards: how many a namespace has, what each is called, and which one a chain or a segment is in. Pure code.

A shard is, for the index that keeps it, a namespace of its own, under a name of its own. In Redis that name
is a hash tag, and a Cluster gives it one of 16,384 slots. Names are chosen so that shard k of N is in the
k-th of N equal ranges of slots: masters with equal ranges have equally many shards.

    <id>                   the only shard of a namespace that was registered with one
    <id>.<N>.<k>.<s>       of a namespace that was registered with several; s is the smallest whole number
                           that brings the name into its range
    <id>.<N>.<k>.<s>.<f>   of one that was brought into another number; f is drawn for it

A layout is a number of shards, and, once there was another, what was drawn for it: "1", "8", "8.20260712".
No layout comes back, nor any name of its shards: so what is late for one can't change what a later one holds.

All that belongs to one chain is in one shard, that of the tag which the ids of its segments end with
(kvstore.keys.tag_of). Tags are bytes of hashes, and so spread evenly.
"""

from __future__ import annotations

import re
import secrets
from binascii import crc_hqx
from collections.abc import Sequence
from functools import lru_cache
from itertools import count

from kvstore.keys import DIGEST_BYTES, NamespaceId, SegmentId, tag_of

#: A tag has a byte.
MOST_SHARDS = 256
#: The number of slots of every Redis Cluster.
SLOTS = 1 << 14

#: How a namespace lies that was registered with one shard: under its own id.
ONE = "1"

_NAME = re.compile(r"([0-9a-f]{16})(?:\.(\d{1,3})\.(\d{1,3})\.\d{1,9}(?:\.(\d{1,9}))?)?")
_LAYOUT = re.compile(r"(\d{1,3})(?:\.\d{1,9})?")


def new_layout(shards: int) -> str:
    """Returns a layout that never was."""
    return f"{shards}.{secrets.randbelow(10**9)}"


def shards_in(layout: str) -> int:
    """Returns how many shards a layout has. Raises ValueError for what is no layout."""
    found = _LAYOUT.fullmatch(layout)
    if found is None or not 1 <= int(found[1]) <= MOST_SHARDS:
        raise ValueError(f"{layout[:20]!r} is no layout")
    return int(found[1])


@lru_cache(maxsize=1024)
def shard_names(namespace: NamespaceId, layout: str | int) -> tuple[NamespaceId, ...]:
    """Returns the names of a namespace's shards, in the order of their ranges of slots."""
    shards, _, drawn = str(layout).partition(".")
    if str(layout) == ONE:
        return (namespace,)
    return tuple(_name(namespace, int(shards), number, drawn) for number in range(int(shards)))


def _name(namespace: NamespaceId, shards: int, number: int, drawn: str) -> NamespaceId:
    slots = range(number * SLOTS // shards, (number + 1) * SLOTS // shards)
    end = f".{drawn}" if drawn else ""
    names = (f"{namespace}.{shards}.{number}.{extra}{end}" for extra in count())
    return NamespaceId(next(name for name in names if slot_of(name) in slots))


def slot_of(tag: str) -> int:
    """Returns the slot that a Redis Cluster gives to keys with a hash tag."""
    return crc_hqx(tag.encode("ascii"), 0) % SLOTS


def is_name(text: str) -> bool:
    """Tells whether a text has the form of a namespace's id, or of the name of a shard of one."""
    found = _NAME.fullmatch(text)
    return found is not None and (found[2] is None or int(found[3]) < int(found[2]) <= MOST_SHARDS)


def base_of(name: NamespaceId) -> NamespaceId:
    """Returns the id of the namespace that a shard is of; an id is its own."""
    return NamespaceId(name[:16])


def layout_of(name: NamespaceId) -> str:
    """Returns the layout that a shard is of."""
    found = _NAME.fullmatch(name)
    if found is None or found[2] is None:
        return ONE
    return found[2] if found[4] is None else f"{found[2]}.{found[4]}"


def place_of(name: NamespaceId) -> tuple[int, int]:
    """Returns of how many shards one is, and its number among them: (1, 0) of a namespace's id."""
    found = _NAME.fullmatch(name)
    return (1, 0) if found is None or found[2] is None else (int(found[2]), int(found[3]))


def of_chain(shards: Sequence[NamespaceId], chain: bytes) -> NamespaceId:
    """Returns the shard of a chain, from packed digests that begin with its first."""
    return shards[tag_of(chain[:DIGEST_BYTES]) * len(shards) // MOST_SHARDS]


def of_segment(shards: Sequence[NamespaceId], segment: SegmentId) -> NamespaceId:
    """Returns the shard of a segment."""
    return shards[segment[-1] * len(shards) // MOST_SHARDS]
