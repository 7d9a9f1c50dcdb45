"""What happened lately: differences of the index's totals, in a ring that lives as long as the process."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from kvstore.keys import NamespaceId
from schemas.serving import HistoryReport, Point

SAMPLE_S = 10
KEPT_S = 86_400
#: More points than this are not worth drawing.
_MOST_POINTS = 180

_MISS = "miss:"


class Tally:
    """Totals that only grow, of totals that begin anew when an index is emptied. One thread's."""

    def __init__(self) -> None:
        self._last: dict[NamespaceId, Mapping[str, int]] = {}

    def advance(
        self, namespace: NamespaceId, totals: Mapping[str, int], *, is_new: bool = False
    ) -> dict[str, int]:
        """How much was added since the last call; of a namespace that is seen for the first time nothing,
        unless it `is_new`: then all of it."""
        last = self._last.get(namespace)
        self._last[namespace] = dict(totals)
        if last is None:
            return {name: count for name, count in totals.items() if count > 0} if is_new else {}
        added = {}
        for name, count in totals.items():
            before = last.get(name, 0)
            difference = count - before if count >= before else count
            if difference > 0:
                added[name] = difference
        return added

    def last(self, namespace: NamespaceId) -> Mapping[str, int]:
        """What the last call was told."""
        return self._last.get(namespace, {})

    def knows(self, namespace: NamespaceId) -> bool:
        """Whether there was a call."""
        return namespace in self._last

    def forget(self, namespace: NamespaceId) -> None:
        """It is gone; if it comes again it is new."""
        self._last.pop(namespace, None)


@dataclass(frozen=True, slots=True)
class Sample:
    """What was stored at a moment, and what was added to the totals since the sample before."""

    at_s: float
    stored_bytes: int
    added: Mapping[str, int]


class History:
    """Samples of the last day, about one in SAMPLE_S. Safe for threads."""

    def __init__(self, began_s: float) -> None:
        self._lock = threading.Lock()
        self._began_s = began_s
        self._samples: deque[Sample] = deque(maxlen=KEPT_S // SAMPLE_S)
        self._pending: dict[str, int] = {}

    def count(self, added: Mapping[str, int]) -> None:
        """Add to what the next sample says."""
        with self._lock:
            for name, count in added.items():
                self._pending[name] = self._pending.get(name, 0) + count

    def sample(self, at_s: float, stored_bytes: int) -> None:
        """End a sample, unless the last one has only just ended."""
        with self._lock:
            # A look may come a little early, as clocks go. One that goes back is a sample of its own.
            if self._samples and 0 <= at_s - self._samples[-1].at_s < SAMPLE_S - 1:
                return
            self._samples.append(Sample(at_s, stored_bytes, self._pending))
            self._pending = {}

    def report(self, now_s: float, window_s: int) -> HistoryReport:
        """The last `window_s`, in steps that are multiples of SAMPLE_S and begin at multiples of themselves,
        so that a chart doesn't jitter as time goes on."""
        window_s = min(max(window_s, SAMPLE_S), KEPT_S)
        step_s = -(-window_s // (_MOST_POINTS * SAMPLE_S)) * SAMPLE_S
        first = (now_s - window_s) // step_s * step_s
        with self._lock:
            samples = [sample for sample in self._samples if first <= sample.at_s <= now_s]
            since_s = self._samples[0].at_s if self._samples else self._began_s
        steps: dict[float, list[Sample]] = {}
        for sample in samples:
            steps.setdefault(sample.at_s // step_s * step_s, []).append(sample)
        points = tuple(_point(at_s, steps[at_s]) for at_s in sorted(steps))
        return HistoryReport(window_s=window_s, step_s=step_s, since_s=since_s, points=points)


def _point(at_s: float, samples: list[Sample]) -> Point:
    added: dict[str, int] = {}
    for sample in samples:
        for name, count in sample.added.items():
            added[name] = added.get(name, 0) + count
    return Point(
        at_s=at_s,
        stored_bytes=samples[-1].stored_bytes,
        asked=added.get("asked", 0),
        served=added.get("served", 0),
        missed={
            name.removeprefix(_MISS): count
            for name, count in sorted(added.items())
            if name.startswith(_MISS) and count
        },
        evicted_bytes=added.get("evicted", 0),
    )
