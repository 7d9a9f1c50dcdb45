"""Segments that failed verification: never matched again here, and evicted in the index."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable

from kvstore.errors import KVStoreError
from kvstore.keys import NamespaceId, SegmentId
from kvstore.store.backends import Backends

log = logging.getLogger(__name__)

#: Segments remembered as bad in this process, for times when the index doesn't answer.
_REMEMBERED = 4096
#: Segments that one process may evict as bad within an hour.
MOST_AN_HOUR = 256
_HOUR_S = 3600.0
#: Seconds between two tries to put evidence that the store refuses.
_DENY_AGAIN_S = 60.0


class HourlyBound:
    """Bounds how many segments one process evicts as bad within any hour. For one thread at a time.

    A process that finds everything bad is hardly right: a share may not be mounted, a prefix may be wrong, or
    memory may be bad. It must not empty the cache for all other processes.
    """

    def __init__(self, most: int = MOST_AN_HOUR, clock: Callable[[], float] = time.monotonic) -> None:
        self.most = most
        self._clock = clock
        self._evicted_at: deque[float] = deque(maxlen=most)

    @property
    def reached(self) -> bool:
        """Tells whether no further segment may be evicted now."""
        full = len(self._evicted_at) == self.most
        return full and self._clock() < self._evicted_at[0] + _HOUR_S

    def note(self) -> None:
        """Counts one eviction."""
        self._evicted_at.append(self._clock())

    def give_back(self) -> None:
        """Takes back the latest counted eviction: it evicted nothing."""
        if self._evicted_at:
            self._evicted_at.pop()


class Quarantine:
    """The segments that this process knows to be bad. Safe for threads.

    `bound` limits how many of them it evicts in the index.
    """

    def __init__(self, backends: Backends, bound: HourlyBound | None = None) -> None:
        self._backends = backends
        self._lock = threading.Lock()
        # The lock guards the fields below it.
        self._bad: OrderedDict[SegmentId, None] = OrderedDict()
        #: Segments that the index is still to evict -> whether their payloads go at once, and how often this
        #: process has tried.
        self._untold: dict[NamespaceId, dict[SegmentId, tuple[bool, int]]] = {}
        #: Names that are still to be put beside the payloads: what they name may not come back.
        self._undenied: OrderedDict[str, None] = OrderedDict()
        #: When they are put again at the earliest, by time.monotonic.
        self._deny_at = 0.0
        self._bound = bound or HourlyBound()
        self._silenced = False

    def __contains__(self, segment: SegmentId) -> bool:
        with self._lock:
            return segment in self._bad

    @property
    def is_full(self) -> bool:
        """Tells whether the bound lets no further segment be evicted now."""
        with self._lock:
            return self._bound.reached

    def mark(self, segments: Iterable[SegmentId]) -> None:
        """Keeps these segments from being matched again in this process. No I/O."""
        with self._lock:
            self._bad.update(dict.fromkeys(segments))
            while len(self._bad) > _REMEMBERED:
                self._bad.popitem(last=False)

    def add(
        self, namespace: NamespaceId, segment: SegmentId, *, condemned: Callable[[], object] | None = None
    ) -> bool:
        """Evicts a segment that failed verification, here at once, and in the index. Never raises.

        Its payload is deleted after the grace time, or at once if `condemned` is given. `condemned` is called
        before the eviction in the index, and must not raise. If the index doesn't answer, this process evicts
        the segment there before its next save, which would otherwise find the blocks "present". It evicts no
        more segments there than the bound allows; beyond that this returns False. A segment that the index
        had evicted already doesn't count: the match came before the eviction.
        """
        if segment not in self:
            self._backends.counters.add("quarantined_segments")
        self.mark([segment])
        with self._lock:
            refused = self._bound.reached
            if not refused:
                self._bound.note()
                self._silenced = False
            elif not self._silenced:
                self._silenced = True
                log.error(
                    "more than %d segments failed verification within an hour: further ones are left "
                    "alone by this process only; `cache-admin doctor` here may say why",
                    self._bound.most,
                )
        if not refused:
            if condemned is not None:
                condemned()
            with self._lock:
                untold = self._untold.setdefault(namespace, {})
                at_once, times = untold.get(segment, (False, 0))
                untold[segment] = at_once or condemned is not None, times
        self.tell(namespace)
        return not refused

    def deny(self, name: str) -> bool:
        """Keeps the payload of this name from coming back, by evidence (kvstore.payloads.evidence).

        Returns False if that fails; `deny_again` tries it again. Never raises.
        """
        try:
            self._backends.evidence.deny(name)
            return True
        except KVStoreError as exc:
            log.warning("a bad payload may still come back, for now: %s", exc)
        except Exception:
            log.exception("evidence could not be put: an unexpected failure")
        with self._lock:
            self._undenied[name] = None
            while len(self._undenied) > _REMEMBERED:
                self._undenied.popitem(last=False)
        return False

    def tell(self, namespace: NamespaceId) -> None:
        """Evicts segments in the index that could not be evicted there before. Never raises."""
        alike: defaultdict[tuple[bool, int], list[SegmentId]] = defaultdict(list)
        with self._lock:
            untold = self._untold.get(namespace, {})
            for segment, (at_once, times) in untold.items():
                untold[segment] = at_once, times + 1
                alike[untold[segment]].append(segment)
        for (at_once, _), segments in alike.items():
            self._tell(namespace, segments, at_once=at_once)

    def deny_again(self) -> None:
        """Puts the evidence that could not be put before. Never raises."""
        with self._lock:
            if time.monotonic() < self._deny_at:
                return
            undenied, self._undenied = self._undenied, OrderedDict()
        while undenied:
            if not self.deny(undenied.popitem(last=False)[0]):
                # A store that refuses one name gets no other, and is left alone for a while.
                with self._lock:
                    self._undenied.update(undenied)
                    self._deny_at = time.monotonic() + _DENY_AGAIN_S
                break

    def _tell(self, namespace: NamespaceId, segments: list[SegmentId], *, at_once: bool) -> None:
        after = 0.0 if at_once else self._backends.clock() + self._backends.settings.grace_s
        try:
            evicted = self._backends.index.evict(namespace, segments, delete_after_s=after, rule="bad")
        except KVStoreError as exc:
            log.warning("%d bad segments could not be evicted yet: %s", len(segments), exc)
            return
        except Exception:
            log.exception("bad segments could not be evicted: an unexpected failure")
            return
        with self._lock:
            told = [self._untold[namespace].pop(segment, None) for segment in segments]
            # An earlier try, or another thread's, may have evicted them in the index without an answer.
            if all(one == (at_once, 1) for one in told):
                for _ in range(len(segments) - evicted):
                    self._bound.give_back()
