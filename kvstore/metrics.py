"""Counters: what the store did, and why it did not do more.

Names are fixed here and start at zero, so that a reader sees "no failures" as 0 and not as an
absence. Labelled counters are spelled `name{label}`. All of them add up from the opening of the store on.
"""

from __future__ import annotations

import threading
from typing import Final

from kvstore.rules.reasons import MISS_REASONS, PREFETCH_OUTCOMES, SAVE_OUTCOMES, VERDICTS

_PLAIN: Final = (
    "match_calls",
    "match_blocks_asked",
    "match_blocks_found",
    "load_runs",
    "load_blocks",
    "load_bytes",
    "probe_blocks",  # read for the sake of measuring, and for no request
    "probe_bytes",
    "save_segments",
    "save_bytes",
    "note_failures",
    "session_failures",  # requests whose session the index was not told of
    "hints_ignored",  # hints of requests that make no sense
    "trace_lost",  # requests that could not be recorded
    "follower_failures",  # unexpected failures of what a connector does beside loads, which it did without
    "outcomes_lost",  # requests whose outcome could not be put into the journal
    "evicted_segments",
    "deleted_payloads",
    "quarantined_segments",
    "dropped_copies",
    "slow_downs",  # requests that the bucket refused because there were too many
    "held_back",  # requests that were not made, since their turn would have come too late
    # The fast tier's, if there is one:
    "tier_hits_fast",  # reads that the folder answered
    "tier_hits_slow",  # reads of the shared store, whole or in part, that found the payload
    "tier_fills",  # fetched payloads that were written to the folder
    "tier_fills_skipped",  # payloads not kept there: queue or memory full, no room, failing disk
    "tier_waits",  # reads that waited for another thread or process that fetched the same payload
    "tier_evictions",  # payloads evicted from the folder
    "tier_fast_errors",  # failures of the folder or its ledger, each a miss or a skipped fill
    "tier_uploads",  # dirty payloads uploaded
    "tier_upload_failures",  # uploads that failed and are tried again, and dirty payloads that were lost
)


class Counters:
    """Thread-safe named counters."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: Grows with every count, so that a reader that asks often sees at a glance that nothing happened.
        self.changes = 0
        self._values: dict[str, int] = dict.fromkeys(_PLAIN, 0)
        for reason in MISS_REASONS:
            self._values[f"miss_blocks{{{reason}}}"] = 0
            self._values[f"save_failures{{{reason}}}"] = 0
        for outcome in PREFETCH_OUTCOMES:
            self._values[f"prefetch_segments{{{outcome}}}"] = 0
            self._values[f"prefetch_bytes{{{outcome}}}"] = 0
        for verdict in VERDICTS:
            self._values[f"verdicts{{{verdict}}}"] = 0
        for outcome in SAVE_OUTCOMES:
            self._values[f"save_blocks{{{outcome}}}"] = 0

    def add(self, name: str, amount: int = 1) -> None:
        """Adds `amount` to `name`, one of the names set up here. Raises KeyError for any other."""
        with self._lock:
            self._values[name] += amount
            self.changes += 1

    def miss(self, reason: str, blocks: int) -> None:
        """Counts `blocks` that were asked for and not served, for `reason`."""
        if blocks:
            self.add(f"miss_blocks{{{reason}}}", blocks)

    def saved(self, outcome: str, blocks: int) -> None:
        """Counts `blocks` that were offered for saving and ended as `outcome`."""
        if blocks:
            self.add(f"save_blocks{{{outcome}}}", blocks)

    def snapshot(self) -> dict[str, int]:
        """Returns all values of one moment."""
        with self._lock:
            return dict(self._values)
