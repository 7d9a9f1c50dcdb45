"""Recent history: differences of the index's totals, in a ring that lives as long as the process."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass

from kvstore.admin.inspect.stats import traffic
from kvstore.admin.serve.reports import HistoryReport, Point

SAMPLE_S = 10
KEPT_S = 86_400
#: The most points that are worth drawing.
_MOST_POINTS = 180


@dataclass(frozen=True, slots=True)
class Sample:
    """The bytes stored at a moment, and what was added to the totals since the sample before."""

    at_s: float
    stored_bytes: int
    added: Mapping[str, int]


class History:
    """Samples of the last day, one in about SAMPLE_S. Safe for many threads."""

    def __init__(self, began_s: float) -> None:
        self._lock = threading.Lock()
        self._began_s = began_s
        self._samples: deque[Sample] = deque(maxlen=KEPT_S // SAMPLE_S)
        self._pending: Counter[str] = Counter()

    def count(self, added: Mapping[str, int]) -> None:
        """Adds to the totals of the next sample."""
        with self._lock:
            self._pending.update(added)

    def sample(self, at_s: float, stored_bytes: int) -> None:
        """Ends a sample, unless the last one has only just ended."""
        with self._lock:
            # A look may come up to a second early. If the clock went back, it is a sample of its own.
            if self._samples and 0 <= at_s - self._samples[-1].at_s < SAMPLE_S - 1:
                return
            self._samples.append(Sample(at_s, stored_bytes, self._pending))
            self._pending = Counter()

    def report(self, now_s: float, window_s: int) -> HistoryReport:
        """Returns the last `window_s` seconds in steps.

        A step is a multiple of SAMPLE_S and begins at a multiple of itself, so that a chart doesn't jitter as
        time goes on.
        """
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
    added: Counter[str] = Counter()
    for sample in samples:
        added.update(sample.added)
    return Point(at_s=at_s, stored_bytes=samples[-1].stored_bytes, **traffic(added))
