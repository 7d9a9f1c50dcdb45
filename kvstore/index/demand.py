"""How many different blocks are asked for lately: what bounds the hits of any cache, kept in a few KiB.

Of the blocks that are asked for in a window of time, those that are asked for the first time in it can't be
hits of what was computed in it. So 1 - different / asked is the ceiling of a cache that keeps what was asked
for in that window, and nothing else. Blocks asked for are counted; different ones are estimated, by a
HyperLogLog (Flajolet et al., 2007; the estimator is Ertl's, 2017) of REGISTERS registers, whose standard
error is 1.6 %: at a ceiling of 60 % that is 0.7 points.

Digests are uniform hashes already, so nothing is hashed here. Of the last eight bytes of a digest, big-endian
(the first ones don't tell the groups of a hybrid model apart), the first 12 bits are a register's number, and
the rank is one more than the number of zero bits that the other 52 begin with, from 1 to 53. A register is
the highest rank of all digests with its number.

Time is cut into buckets, of five minutes and of an hour, each with its registers; a window is the union of
some buckets: register by register the higher one. It begins with a bucket, so it is up to a bucket longer
than its name says. Buckets are numbered from 1970 on, so that all engines agree on them.

An engine keeps the registers of the five minutes under way in memory and tells those that have risen, three
bytes each: a block that was asked for before in that time changes nothing, so however much is asked for, some
thousands of them in five minutes are all that travels, together with outcomes that travel anyway. What an
engine raises in an hour's registers it has raised in the five minutes' too, so one list is for both.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, log
from typing import Any, Final

import numpy as np

from kvstore.index.contract import BadArgument
from kvstore.keys import DIGEST_BYTES

REGISTERS: Final = 4096
#: Bytes of a raised register: its number, big-endian, and its rank.
RAISED_BYTES: Final = 3
_BITS = 12
_RANKS = 64 - _BITS
#: Lengths of buckets, in seconds; an engine's own registers are those of the first.
BUCKETS_S: Final = (300, 3600)
#: Windows in seconds, and the length of the buckets that each is made of.
WINDOWS: Final[Mapping[int, int]] = {900: 300, 3600: 300, 86400: 3600}

_Registers = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class Raised:
    """The registers that what was asked for at about `at_s` (unix time) has raised, RAISED_BYTES each."""

    at_s: float
    registers: bytes = b""

    def check(self) -> None:
        """Raises BadArgument for what can't be."""
        if len(self.registers) % RAISED_BYTES or len(self.registers) > REGISTERS * RAISED_BYTES:
            raise BadArgument(f"{len(self.registers)} bytes of raised registers")
        if not 0 <= self.at_s < inf:
            raise BadArgument(f"{self.at_s} is no time")

    def after(self) -> Raised:
        """Returns what goes with further outcomes of the same time."""
        return Raised(self.at_s)


@dataclass(frozen=True, slots=True)
class Bucket:
    """What one bucket counts. `registers` has REGISTERS bytes, or is empty."""

    asked: int
    served: int
    registers: bytes


@dataclass(frozen=True, slots=True)
class Demand:
    """What was asked for in a window: `asked` blocks, of which `served` came, and about `distinct` different
    ones."""

    window_s: int
    asked: int
    served: int
    distinct: int
    #: How much of it something is known of, in seconds: back to the first bucket with a request.
    seconds: float = 0.0

    @property
    def hit_ratio(self) -> float:
        """Returns the share that was served; 0 if nothing was asked for."""
        return self.served / self.asked if self.asked else 0.0

    @property
    def ceiling_ratio(self) -> float:
        """Returns the most that a cache of what was asked for in this window could serve."""
        return max(0.0, 1 - self.distinct / self.asked) if self.asked else 0.0


def buckets(at_s: float) -> list[tuple[int, int]]:
    """Returns the length and the number of the buckets that a time falls into."""
    return [(length, int(at_s // length)) for length in BUCKETS_S]


def kept_s(length: int) -> int:
    """Returns how long a bucket is still needed, in seconds, at its beginning."""
    return max(window for window, each in WINDOWS.items() if each == length) + 2 * length


def in_windows(now_s: float) -> list[tuple[int, int]]:
    """Returns the buckets of all windows that end now: their lengths and numbers, each once."""
    return sorted({one for window, length in WINDOWS.items() for one in _of(window, length, now_s)})


def _of(window: int, length: int, now_s: float) -> list[tuple[int, int]]:
    return [(length, number) for number in range(int((now_s - window) // length), int(now_s // length) + 1)]


def demands(found: Mapping[tuple[int, int], Bucket], now_s: float) -> tuple[Demand, ...]:
    """Returns what the buckets that are there say of each window that ends now, the shortest first."""
    lines = []
    for window, length in WINDOWS.items():
        there = [one for one in _of(window, length, now_s) if one in found]
        own = [found[one] for one in there]
        lines.append(
            Demand(
                window,
                sum(max(0, one.asked) for one in own),
                max(0, sum(one.served for one in own)),
                round(estimate(one.registers for one in own)),
                max((now_s - number * length for _, number in there), default=0.0),
            )
        )
    return tuple(lines)


def together(each: Iterable[Sequence[Demand]]) -> tuple[Demand, ...]:
    """Returns the demand for namespaces together, which have no block in common."""
    found: dict[int, list[Demand]] = {window: [] for window in WINDOWS}
    for one in (one for some in each for one in some):
        found[one.window_s].append(one)
    return tuple(
        Demand(
            window,
            sum(one.asked for one in own),
            sum(one.served for one in own),
            sum(one.distinct for one in own),
            max((one.seconds for one in own), default=0.0),
        )
        for window, own in found.items()
    )


def united(each: Sequence[Bucket]) -> Bucket:
    """Returns what several buckets of one time count together, which may have blocks in common."""
    union = np.zeros(REGISTERS, dtype=np.uint8)
    for one in each:
        np.maximum(union, _sound(one.registers), out=union)
    return Bucket(sum(one.asked for one in each), sum(one.served for one in each), union.tobytes())


def merged(registers: bytes, raised: bytes) -> bytes:
    """Returns registers with what was raised; those that make no sense count as empty."""
    now = _sound(registers).copy()
    triples = np.frombuffer(raised, dtype=np.uint8).reshape(-1, RAISED_BYTES).astype(np.int64)
    numbers = triples[:, 0] * 256 + triples[:, 1]
    known = (numbers < REGISTERS) & (triples[:, 2] <= _RANKS + 1)
    np.maximum.at(now, numbers[known], triples[known, 2].astype(np.uint8))
    return now.tobytes()


def _sound(registers: bytes) -> _Registers:
    if len(registers) != REGISTERS:
        return np.zeros(REGISTERS, dtype=np.uint8)
    return np.minimum(np.frombuffer(registers, dtype=np.uint8), np.uint8(_RANKS + 1))


def estimate(each: Iterable[bytes]) -> float:
    """Returns about how many different digests raised these registers together."""
    union = np.zeros(REGISTERS, dtype=np.uint8)
    for registers in each:
        np.maximum(union, _sound(registers), out=union)
    counts = np.bincount(union, minlength=_RANKS + 2) / REGISTERS
    if counts[0] == 1.0:
        return 0.0
    z = _tau(1 - counts[_RANKS + 1])
    for rank in range(_RANKS, 0, -1):
        z = (z + counts[rank]) / 2
    z += _sigma(counts[0])
    # Of no number of digests are all registers as high as they can be: somebody else wrote them.
    return float(REGISTERS / (2 * log(2) * z)) if z else 2.0**_RANKS


def _sigma(x: float) -> float:
    y, z = 1.0, x
    while True:
        x *= x
        before, z, y = z, z + x * y, 2 * y
        if z == before:
            return z


def _tau(x: float) -> float:
    if x in (0.0, 1.0):
        return 0.0
    y, z = 1.0, 1 - x
    while True:
        x **= 0.5
        before, y = z, y / 2
        z -= (1 - x) ** 2 * y
        if z == before:
            return z / 3


class OwnDemand:
    """The registers of one process and namespace, of the five minutes under way. Safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bucket = -1
        self._registers = np.zeros(REGISTERS, dtype=np.uint8)

    def add(self, digests: bytes, now_s: float) -> Raised:
        """Adds packed digests that were asked for, and returns what that has raised."""
        words = np.frombuffer(digests, dtype=">u8").reshape(-1, DIGEST_BYTES // 8)[:, 1].astype(np.uint64)
        numbers = (words >> np.uint64(_RANKS)).astype(np.int64)
        rest = words & np.uint64((1 << _RANKS) - 1)
        # A float of 52 bits is exact, and its exponent the number of bits.
        ranks = (_RANKS + 1 - np.frexp(rest.astype(np.float64))[1]).astype(np.uint8)
        with self._lock:
            if (bucket := int(now_s // BUCKETS_S[0])) != self._bucket:
                self._bucket = bucket
                self._registers = np.zeros(REGISTERS, dtype=np.uint8)
            before = self._registers
            after = before.copy()
            np.maximum.at(after, numbers, ranks)
            self._registers = after
        rose = np.flatnonzero(after > before)
        triples = np.stack([rose // 256, rose % 256, after[rose]], axis=1).astype(np.uint8)
        return Raised(now_s, triples.tobytes())

    def forget(self) -> None:
        """Forgets what was added: telling it has failed, so it is told again with what comes."""
        with self._lock:
            self._bucket = -1
