"""Estimates of what reads of each tier take, as one rank measures them. Pure: the caller passes the time.

    seconds of a load = rounds x latency + bytes / bytes per second

where its reads, so many at a time, follow each other in rounds.

Reads overlap, so a single read says little of the tier. Each of eight reads that share a network looks eight
times too slow. If a disk serves eight reads in turn, the first looks right and the last too slow. So a meter
measures a burst: from the first read of an idle tier until no read is left. A burst includes all that a load
waits for: threads, staging and verification, too. A burst that departs from the prediction, or goes on for
long, is measured in windows. A window ends when much more has arrived than is under way.

Each measurement corrects the estimate so that it would have predicted it. The correction goes to latency and
to bandwidth by their shares in the prediction, as small as possible in logarithms (a normalised least mean
squares step): a load of a few blocks mostly tells the latency, a long one the bandwidth. If the last few
measurements differ in size, they tell both, and the estimate is their best fit by least squares. Two
measurements alone would mislead on a network that is not quite even. A measurement much slower than predicted
counts in full at once; so does the first one, and one after a while without any. Other measurements count by
half. Milliseconds are ignored, since anything may cause them: they are a large share of a short read, and
would distort the estimate of a long load.

Reads that are still under way are evidence too: at best all of them end now, and if even that is slower
than predicted, so is the tier.

A probe is read for the sake of measuring, beside all that. It is measured by itself, from its first request
on. If loads were read meanwhile, it only counts if it was faster than predicted: then the tier has become
better, and what had begun before tells nothing of it any more.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from operator import mul
from typing import Final

from kvstore.rules.tiers import TIERS, Tier

#: Shortest window of a burst that goes on, and the longest of one that is as expected, in seconds; and how
#: many times the bytes under way must have arrived in it, since the progress of bytes under way is unknown.
_WINDOW_S: Final = 0.25
_LONG_S: Final = 4.0
_MUCH: Final = 2
#: A measurement is off by about this share of it, and by so many seconds that are not the tier's: whose turn
#: it is on the processor, what a network lets through at once. For a small read that is much.
_NOISE: Final = 0.1
_BLUR_S: Final = 0.005
#: A measurement that is slower than predicted by `_SLOWER` counts in full. Such a measurement, or one that is
#: faster by `_CHANGED`, shows that earlier measurements are of another network.
_SLOWER: Final = 1.5
_CHANGED: Final = 4
#: A measurement after so many seconds without any counts in full, too.
_OLD_S: Final = 1.0
#: Measurements tell latency from bandwidth if one has so many times the bytes of another, by round. Only the
#: last few of the last seconds count. Each new measurement takes some weight from those before it, and more
#: if it shows that the tier has become faster. A measurement with little weight left is dropped.
_APART: Final = 4
_POINTS: Final = 8
_LATELY_S: Final = 10.0
_KEEPS: Final = 0.8
_FADES: Final = 0.3
_LEAST: Final = 0.05
#: A read that is overdue for longer than this has hung: it says how slow the tier is at most, and nothing
#: later on.
_HUNG_S: Final = 5.0
#: Most probes of a tier that are on their way at a time.
_MOST_PROBES: Final = 2
#: Largest factor by which one measurement differs from its prediction, for the sake of arithmetic.
_MOST: Final = 1e4


@dataclass(frozen=True, slots=True)
class Speed:
    """An estimate of one tier."""

    latency_s: float
    bytes_per_s: float
    #: How many reads are under way at a time, and how many bytes they have at most together.
    threads: float = math.inf
    round_bytes: float = math.inf
    #: How many requests follow each other to read a part of a segment that isn't near its beginning.
    part_requests: int = 1

    def seconds(self, nbytes: float, segments: float = 0, *, inside: bool = False) -> float:
        """Returns what `nbytes` take, of so many segments, which are read in parts if they are large;
        `inside`: of the first one not from its beginning on."""
        begun = segments / self.threads
        parts = nbytes / self.round_bytes - begun
        rounds = max(self.part_requests if inside else 1.0, begun, begun + self.part_requests * parts)
        return rounds * self.latency_s + nbytes / self.bytes_per_s


#: Speeds assumed before any measurement, rather too slow than too fast. A load that doesn't pay costs its
#: request more than a few blocks that are read beside it to measure. (A bucket's is that of one connection to
#: S3 and its first byte.)
FIRST: Final[Mapping[Tier, Speed]] = {
    "memory": Speed(0.0005, 1e9),
    "folder": Speed(0.001, 500e6),
    "disk": Speed(0.002, 200e6),
    "bucket": Speed(0.05, 50e6),
}

#: Requests that follow each other to read a part of a segment that isn't near its beginning: a bucket is
#: asked for the segment's header first (kvstore.store.reading); elsewhere that costs nothing to speak of.
PART_REQUESTS: Final[Mapping[Tier, int]] = {"memory": 1, "folder": 1, "disk": 1, "bucket": 2}


@dataclass(frozen=True, slots=True)
class Measured:
    """One rank's report about one tier."""

    speed: Speed
    #: Bytes of all reads that were ever asked for and have ended, whether they brought anything or not.
    done_bytes: int
    #: How many measurements there were, and whether the last one was much better than predicted: what it
    #: says has to be seen again soon, as it counts by half.
    count: int
    better: bool = False


def corrected(
    speed: Speed, nbytes: float, seconds: float, *, rounds: float = 1.0, gain: float = 1.0
) -> Speed:
    """Returns the speed nearest to `speed` by which `nbytes` take `seconds`, give or take _BLUR_S, with so
    many latencies, one after the other; with `gain` below 1 it goes part of the way."""
    lat, spb = speed.latency_s, 1 / speed.bytes_per_s
    predicted = rounds * lat + nbytes * spb
    ratio = min(max(_likely(seconds, predicted) / predicted, 1 / _MOST), _MOST)
    target = predicted * ratio**gain
    # The step is exact if one of both has all of the prediction; otherwise it converges quickly.
    for _ in range(6):
        share = rounds * lat / predicted
        step = math.log(target / predicted) / (share**2 + (1 - share) ** 2)
        lat *= math.exp(share * step)
        spb *= math.exp((1 - share) * step)
        predicted = rounds * lat + nbytes * spb
    return Speed(min(max(lat, 1e-6), 1e4), 1 / min(max(spb, 1e-13), 1e3))


def _likely(seconds: float, predicted: float) -> float:
    """Returns what of a measurement is believed: the less it differs from what was predicted by more than
    measurements are off, the less of the difference."""
    off = seconds - predicted
    return predicted + off * off**2 / (off**2 + _BLUR_S**2)


@dataclass(slots=True)
class _Point:
    """A measurement: so many bytes, and so many latencies one after the other, took so many seconds."""

    nbytes: int
    rounds: float
    seconds: float
    at: float
    weight: float = 1.0

    @property
    def round_bytes(self) -> float:
        return self.nbytes / self.rounds


class _Points:
    """The last few measurements of a tier, which tell latency from bandwidth if they differ in size."""

    def __init__(self) -> None:
        self._points: deque[_Point] = deque(maxlen=_POINTS)

    def clear(self) -> None:
        self._points.clear()

    def add(self, point: _Point, keep: float) -> None:
        """Adds the newest; the weight of those before it is multiplied by `keep`."""
        self._points.append(point)
        while point.at - self._points[0].at > _LATELY_S:
            self._points.popleft()
        for one in self._points:
            if one is not point:
                one.weight *= keep

    def speed(self) -> Speed | None:
        """Returns the best fit by weighted least squares of relative errors, or None if the points are too
        alike."""
        points = [one for one in self._points if one.weight > _LEAST]
        if not points:
            return None
        small, large = (at(points, key=lambda one: one.round_bytes) for at in (min, max))
        if large.round_bytes < _APART * small.round_bytes:
            return None
        # 1 = rounds / seconds x latency + bytes / seconds x seconds per byte, each by the root of its weight.
        ones = [one.weight**0.5 * one.seconds / (one.seconds + _BLUR_S / _NOISE) for one in points]
        rounds = [one.rounds / one.seconds * root for one, root in zip(points, ones, strict=True)]
        nbytes = [one.nbytes / one.seconds * root for one, root in zip(points, ones, strict=True)]
        rr, rb, bb = _dot(rounds, rounds), _dot(rounds, nbytes), _dot(nbytes, nbytes)
        r1, b1 = _dot(rounds, ones), _dot(nbytes, ones)
        det = rr * bb - rb * rb
        lat, spb = (r1 * bb - b1 * rb) / det, (b1 * rr - r1 * rb) / det
        # Noise may make the latency or the seconds per byte 0 or less: then the other explains everything.
        lat, spb = (lat if spb > 0 else r1 / rr), (spb if lat > 0 else b1 / bb)
        least_lat, least_spb = small.seconds / small.rounds / 100, large.seconds / large.nbytes / 100
        return Speed(max(lat, least_lat), 1 / max(spb, least_spb))


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(map(mul, left, right))


@dataclass(slots=True)
class _Read:
    """A read: its bytes, how many requests follow each other in it, and when it began; None: it waits."""

    nbytes: int
    requests: int
    began: float | None = None
    #: (a probe) Whether nothing else was read since it began that could have delayed it.
    alone: bool = True


class Meter:
    """Measures one tier, of which so many reads are under way at a time. Not safe for threads."""

    def __init__(self, first: Speed, threads: int) -> None:
        self._settled = first
        self._threads = threads
        self._learned_at = -math.inf
        self._points = _Points()
        #: Whether the last few measurements tell latency from bandwidth.
        self.tells_apart = False
        #: Queued reads that have not ended.
        self._reads: dict[Hashable, _Read] = {}
        #: Probes that have begun and have not ended.
        self._probes: dict[Hashable, _Read] = {}
        #: The burst's present window: when it began, bytes that have arrived in it, and the latencies of
        #: their reads. `_first`: it is the burst's first window, which begins with the latencies of a read.
        self._window_at = self._moved_at = 0.0
        self._arrived = self._ended = 0
        self._first = True
        #: Most latencies of one read that has begun in this window.
        self._deepest = 1
        #: Bytes of reads that have begun, and of all that have not ended.
        self._flying = 0
        #: Latencies of reads that have begun.
        self._under_way = 0
        self.left_bytes = 0
        self.done_bytes = 0
        self.count = 0
        self.better = False

    def ask(self, read: Hashable, nbytes: int, now: float, requests: int = 1) -> None:
        """Records that a read of `nbytes` was queued, which is so many requests, one after the other."""
        if not self._reads:
            self._begin_window(now, first=True)
        self._reads[read] = _Read(nbytes, requests)
        self.left_bytes += nbytes

    def begin(self, read: Hashable, now: float) -> None:
        """Records that a read has a thread. Does nothing if it was given up."""
        if one := self._reads.get(read):
            one.began = now
            if not self._flying:
                self._moved_at = now
            self._flying += one.nbytes
            self._under_way += one.requests
            self._deepest = max(self._deepest, one.requests)
            for probe in self._probes.values():
                probe.alone = False

    def begin_probe(self, read: Hashable, nbytes: int, now: float, requests: int = 1) -> None:
        """Records that a probe has begun, for which no request waits."""
        for other in self._probes.values():
            # A block beside much more delays that by little, and is delayed.
            other.alone &= _APART * nbytes <= other.nbytes
        self._probes[read] = _Read(nbytes, requests, now, alone=not self._flying and not self._probes)

    def end_probe(self, read: Hashable, now: float, *, arrived: bool) -> None:
        """Records that a probe has ended; `arrived`: with its bytes. Does nothing if it wasn't begun here."""
        ended = self._probes.pop(read, None)
        if ended is None or ended.began is None:
            return
        took, settled = max(now - ended.began, 1e-9), self._settled
        predicted = ended.requests * settled.latency_s + ended.nbytes / settled.bytes_per_s
        better = _likely(took, predicted) * _SLOWER < predicted
        if not arrived or not (ended.alone or better):
            return
        if better:
            for before in self._probes.values():
                before.alone = False
            if self._reads:
                self._begin_window(now, first=False)
        self._learn(_Point(ended.nbytes, ended.requests, took, now), predicted)

    def end(self, read: Hashable, now: float, *, arrived: bool) -> None:
        """Records that a read has ended; `arrived`: with its bytes. Does nothing if it was given up."""
        if read not in self._reads:
            return
        ended = self._remove(read)
        self._moved_at = now
        if arrived:
            self._arrived += ended.nbytes
            self._ended += ended.requests
        seconds = now - self._window_at
        if not self._reads:
            # The rest of a burst is too short to tell anything.
            if self._arrived and (self._first or seconds >= _WINDOW_S / 4):
                self._learn(self._window(seconds, now), self._predicted())
        elif seconds >= _WINDOW_S and self._tells(seconds):
            self._learn(self._window(seconds, now), self._predicted())
            self._begin_window(now, first=False)

    def held(self, read: Hashable, now: float, held_s: float) -> None:
        """Learns from a read that fails because the store asks for fewer: at best it would have arrived
        `held_s` from now. Does nothing if that is no later than predicted, or if the read was given up."""
        one, settled = self._reads.get(read), self._settled
        if one is None or one.began is None:
            return
        predicted = one.requests * settled.latency_s + one.nbytes / settled.bytes_per_s
        took = now - one.began + held_s
        if took > _SLOWER * predicted:
            # It shares the tier with all that is under way.
            self._settled = self.speed(now + held_s)
            self._learned_at, self.tells_apart, self.better = now, False, False
            self._points.clear()
            self.count += 1

    def speed(self, now: float) -> Speed:
        """Returns the present estimate, with what the reads under way tell."""
        if not self._flying:
            return self._settled
        waited, most = now - self._window_at, self._arrived + self._flying
        rounds = self._rounds(self._ended + self._under_way)
        if waited <= rounds * self._settled.latency_s + most / self._settled.bytes_per_s:
            return self._settled
        return corrected(self._settled, most, waited, rounds=rounds)

    def behind(self, now: float) -> float:
        """Returns for how many seconds the reads under way have been overdue; 0 or less: they are not."""
        if not self._flying:
            return 0.0
        settled = self._settled
        planned = self._depth() * settled.latency_s + self._flying / settled.bytes_per_s
        return now - self._moved_at - planned

    def give_up(self, now: float) -> None:
        """Forgets reads that hang: they have told what they can, and must not hide that the tier is back."""
        if self.behind(now) <= _HUNG_S:
            return
        begun = [(read, one.began) for read, one in self._reads.items() if one.began is not None]
        hung = [read for read, began in begun if now - began > _HUNG_S]
        if not hung:
            return
        self._settled, self._learned_at, self.tells_apart = self.speed(now), now, False
        self._points.clear()
        self.count += 1
        for read in hung:
            self._remove(read)
        # Reads that go on began earlier, so the new window begins with the oldest of them.
        rest = [began for read, began in begun if read in self._reads]
        self._begin_window(min(rest, default=now), first=True)

    def _begin_window(self, now: float, *, first: bool) -> None:
        self._window_at, self._arrived, self._ended, self._first = now, 0, 0, first
        self._deepest = self._depth()

    def _depth(self) -> int:
        """Returns the most latencies of one read that is under way."""
        return max((one.requests for one in self._reads.values() if one.began is not None), default=1)

    def _rounds(self, requests: int) -> float:
        """Returns how many latencies follow each other in the present window, if so many end in it."""
        return max(self._deepest if self._first else 0.0, requests / self._threads)

    def _tells(self, seconds: float) -> bool:
        """Returns whether this window should end, and the burst go on in another: its end is not near, it
        doesn't matter how far the reads under way are, and it isn't as expected, or long."""
        if not self._arrived or self.left_bytes == self._flying or self._arrived < _MUCH * self._flying:
            return False
        return not 1 / _SLOWER < seconds / self._predicted() < _SLOWER or seconds > _LONG_S

    def _window(self, seconds: float, now: float) -> _Point:
        """Returns the present window as a measurement."""
        return _Point(self._arrived, self._rounds(self._ended), max(seconds, 1e-9), now)

    def _predicted(self) -> float:
        settled = self._settled
        return self._rounds(self._ended) * settled.latency_s + self._arrived / settled.bytes_per_s

    def _remove(self, read: Hashable) -> _Read:
        one = self._reads.pop(read)
        self.left_bytes -= one.nbytes
        self.done_bytes += one.nbytes
        if one.began is not None:
            self._flying -= one.nbytes
            self._under_way -= one.requests
        return one

    def _learn(self, point: _Point, predicted: float) -> None:
        likely, now = _likely(point.seconds, predicted), point.at
        slower = likely > _SLOWER * predicted
        at_once = slower or now - self._learned_at > _OLD_S
        if slower or likely * _CHANGED < predicted:
            # Earlier points describe a network that has changed.
            self._points.clear()
        self.better = likely < predicted / _SLOWER
        self._points.add(point, _FADES if self.better else _KEEPS)
        fits = self._points.speed()
        self.tells_apart = fits is not None
        self._settled = fits or corrected(
            self._settled, point.nbytes, point.seconds, rounds=point.rounds, gain=1.0 if at_once else 0.5
        )
        self._learned_at = now
        self.count += 1


class Expected:
    """Speeds that an engine's scheduler half expects of each tier, by the slowest rank, and bytes queued
    there."""

    def __init__(self, ranks: int = 1) -> None:
        self._ranks = ranks
        self._reports: dict[Tier, dict[int, Measured]] = {tier: {} for tier in TIERS}
        self._speeds: dict[Tier, Speed] = dict(FIRST)
        self._planned = dict.fromkeys(TIERS, 0)
        self._fresh_at = dict.fromkeys(TIERS, -math.inf)
        #: Probes that were sent since the last measurement.
        self._asked = dict.fromkeys(TIERS, 0)

    def take(self, rank: int, measured: Mapping[Tier, Measured], now: float) -> None:
        """Takes a rank's report."""
        for tier, one in measured.items():
            reports = self._reports[tier]
            before = reports.get(rank)
            reports[rank] = one
            if before is None or before.count != one.count:
                began = max(self._fresh_at[tier], now - one.speed.latency_s)
                self._fresh_at[tier], self._asked[tier] = -math.inf if one.better else began, 0
            # Reads that hang may tell how slow a tier is before any has ended.
            speeds = [other.speed for other in reports.values() if other.count or other.speed != FIRST[tier]]
            if speeds:
                self._speeds[tier] = Speed(
                    max(speed.latency_s for speed in speeds),
                    min(speed.bytes_per_s for speed in speeds),
                    min(speed.threads for speed in speeds),
                    min(speed.round_bytes for speed in speeds),
                    max(speed.part_requests for speed in speeds),
                )

    def plan(self, tier: Tier, nbytes: int) -> None:
        """Records that each rank is sent a load of so many bytes."""
        self._planned[tier] += nbytes

    def speed(self, tier: Tier) -> Speed:
        """Returns the estimate of a tier."""
        return self._speeds[tier]

    def ahead(self, tier: Tier) -> int:
        """Returns how many bytes a new load of this tier would have before it."""
        reports = self._reports[tier]
        done = min(one.done_bytes for one in reports.values()) if len(reports) == self._ranks else 0
        return max(0, self._planned[tier] - done)

    def old(self, tier: Tier, now: float, seconds: float) -> bool:
        """Returns whether nothing was begun for so many seconds that has told how fast a tier is, or will.
        Probes that take long follow each other sooner than they end, evenly."""
        evenly_s = max(seconds, min(self._speeds[tier].latency_s / _MOST_PROBES, _HUNG_S))
        return not self.ahead(tier) and now - self._fresh_at[tier] >= (
            evenly_s if self._asked[tier] < _MOST_PROBES else _HUNG_S
        )

    def asked(self, tier: Tier, now: float) -> bool:
        """Records that a probe is on its way. Returns whether there is another one, of which nothing has been
        heard yet."""
        beside = self._asked[tier] > 0
        self._fresh_at[tier], self._asked[tier] = now, self._asked[tier] + 1
        return beside
