"""Reports of the EC connector's half in the scheduler: each event once, to every place that it concerns.

    statistics   vLLM's: the workers' share is added to that of this half
    journal      what became of an item that was asked for, or saved, in the index (telemetry.outcomes)
    log          requests that fail

Everything here runs on the scheduler's thread.
"""

from __future__ import annotations

import logging
from functools import partial

from connectors.ec.items import Item
from connectors.ec.messages import ECStoreWorkerMetadata, StagedItem
from connectors.ec.metrics import RENAMED
from connectors.engine.guard import Followers
from connectors.telemetry.metrics import Report, Tally, TierStates, merge
from connectors.telemetry.outcomes import Outcomes, nothing_missing
from kvstore.keys import ContentKey, digest
from kvstore.rules.text import readable
from kvstore.store.space import Space
from kvstore.store.store import Store
from schemas.records import OutcomeOp

log = logging.getLogger(__name__)

#: Largest number of saves that are followed; beyond it, the oldest one's outcome is not reported. (One of
#: vLLM's model runners drops what the workers of an encoder-only producer report, so some never end.)
_MOST_SAVING = 4096


class ECObserver:
    """Turns the events of one engine into statistics, journal entries and log lines."""

    def __init__(self, store: Store, followers: Followers) -> None:
        """The journal is one of the `followers`, by itself."""
        self._store = store
        #: This half's own statistics.
        self.tally = Tally(store.counters, RENAMED)
        self._tier_states = TierStates(store, self.tally)
        self._outcomes = followers.guard(Outcomes(store))
        self._space: Space | None = None
        #: Requests whose items the workers are saving.
        self._saving: dict[ContentKey, str] = {}
        #: Statistics that the workers have reported since the last `take`.
        self._reported: Report | None = None

    def entered(self, space: Space | None) -> None:
        """The engine uses this namespace from now on, or none. Saves under way belong to the last one."""
        self._space = space
        self._saving.clear()
        self.tally.state(f"namespace{{{space.id if space is not None else ''}}}", 1)

    def restart(self) -> None:
        """Forget the saves under way."""
        self._saving.clear()

    # ---- requested items -----------------------------------------------------------------------

    def loaded(self, request_id: str, staged: StagedItem, *, again: bool) -> None:
        """The workers load the item; `again` says that they have loaded it before, from the same fetch."""
        self.tally.add("items{staging}" if again else "items{store}")
        self.tally.add("loaded_bytes", staged.nbytes)
        self.tally.add("saved_compute_seconds", staged.cost_us / 1e6)
        self.missed(request_id, staged.key, "")

    def skipped(self, request_id: str, key: ContentKey) -> None:
        """(producer) The store has the item: it is neither encoded nor loaded."""
        self.tally.add("items{skipped}")
        self.missed(request_id, key, "")

    def encoded(self, request_id: str, key: ContentKey, item: Item | None, reason: str = "") -> None:
        """The engine encodes the item in this step. The item's outcome says why, if there was a look-up."""
        self.tally.add("items{encoder}")
        if item is not None and item.outcome != "saving":
            reason = reason or ("mismatch" if item.outcome == "ready" else str(item.outcome))
            self.tally.add(f"misses{{{reason}}}")
            self.missed(request_id, key, reason)

    def encoded_unasked(self, request_id: str, *, unnamed: bool) -> None:
        """The engine encodes an item without asking the store; `unnamed`: the item's content is unknown."""
        self.tally.add("items{encoder}")
        if unnamed:
            self.tally.add("misses{unnamed}")
            self.missed(request_id, None, "unnamed")

    def missed(self, request_id: str, key: ContentKey | None, reason: str) -> None:
        """The item was not served, for `reason`; an empty reason says that it was served."""
        self._note(request_id, key, "match", reason, served=not reason)

    def failed(self, request_id: str, why: str) -> None:
        """A request fails."""
        self.tally.add("unavailable_requests")
        log.warning("request %s brings no media and %s: it fails", readable(request_id), why)

    # ---- saves ----------------------------------------------------------------------------------

    def not_admitted(self, request_id: str, key: ContentKey) -> None:
        """The item is not worth saving yet."""
        self._store.counters.saved("not_admitted", 1)
        self._note(request_id, key, "save", "not_admitted", served=False)

    def saving(self, request_id: str, key: ContentKey) -> None:
        """The workers are to save the item."""
        self._saving[key] = request_id
        while len(self._saving) > _MOST_SAVING:
            del self._saving[next(iter(self._saving))]

    def heard(self, meta: ECStoreWorkerMetadata) -> None:
        """The workers have reported."""
        for key, outcome in meta.saved.items():
            if (request_id := self._saving.pop(key, None)) is not None:
                self._note(request_id, key, "save", outcome, served=outcome in ("stored", "present"))
        if meta.stats is not None:
            if self._reported is None:
                self._reported = meta.stats
            else:
                merge(self._reported, meta.stats)

    # ---- the rest -------------------------------------------------------------------------------

    def tick(self, *, idle: bool = False) -> None:
        """Send due outcomes to the journal (see Outcomes.tick)."""
        self._outcomes.tick(idle=idle)

    def take(self) -> Report | None:
        """Returns the statistics of both halves since the last call, or None without any."""
        self._tier_states.tell()
        own = self.tally.take(False, self._gauges)
        reported, self._reported = self._reported, None
        if own is not None and reported is not None:
            merge(own, reported)
        return own or reported

    def _note(
        self, request_id: str, key: ContentKey | None, op: OutcomeOp, reason: str, *, served: bool
    ) -> None:
        if self._space is not None:
            self._outcomes.note(
                self._space,
                request_id,
                op,
                asked=1,
                served=int(served),
                reason=reason,
                missing=nothing_missing if key is None else partial(digest, key),
            )

    def _gauges(self) -> dict[str, float]:
        # 0 with a fast tier: much can be read while the origin is down, so no breaker watches the payloads.
        health = self._store.health
        return {"index_down": int(health.index_down), "payloads_down": int(health.payloads_down)}
