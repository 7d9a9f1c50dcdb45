"""Counters: what the store did, and why it didn't.

Names are fixed here and pre-set to zero, so that a reader sees "no failures" as 0 and not as an
absence. Labelled counters are spelled `name{label}`. Cumulative since the store was opened.
"""

from __future__ import annotations

import threading
from typing import Final

#: Why a block that was asked for did not come from the store.
MISS_REASONS: Final = (
    "absent",  # never stored, or evicted: the index has no entry
    "deadline",  # the index or a read took too long
    "breaker_open",  # the backend failed repeatedly a moment ago
    "unavailable",  # the backend failed
    "throttled",  # the backend asked for fewer calls
    "closed",  # the store is shutting down
    "corrupt",  # the payload failed verification
    "namespace_mismatch",  # the payload belongs to another namespace
    "missing",  # the index names a payload that isn't there
    "quarantined",  # this process has seen that segment fail before
    "permission",  # the backend refuses
    "capacity",  # no staging memory or queue space for the load
    "window",  # stored, but without the window or the state that goes with it, which other groups need
    "below_threshold",  # fewer blocks than kv.min_load_blocks
    "error",  # an unexpected error; see the log
)

#: What became of blocks that were offered for saving.
SAVE_OUTCOMES: Final = (
    "stored",
    "present",  # already in the store
    "held",  # another writer has claimed them
    "dropped",  # queue or staging full
    "failed",  # a backend failed; the reason is counted in save_failures
    "refused",  # commit refused: the ranks disagree, or the segment was evicted meanwhile
    "not_admitted",  # seen for the first time, or of a prompt with fewer blocks than admission.min_blocks
)

_PLAIN: Final = (
    "match_calls",
    "match_blocks_asked",
    "match_blocks_found",
    "load_runs",
    "load_blocks",
    "load_bytes",
    "save_segments",
    "save_bytes",
    "note_failures",
    "trace_lost",  # requests that could not be recorded
    "outcomes_lost",  # requests of which the index was not told what became of them
    "evicted_segments",
    "deleted_payloads",
    "quarantined_segments",
    "dropped_copies",
    # Of the local tier, if there is one:
    "tier_hits_fast",  # reads that the folder answered
    "tier_hits_slow",  # reads of the shared store, whole or in part, that found the payload
    "tier_fills",  # fetched payloads that were written to the folder
    "tier_fills_skipped",  # payloads not kept there: queue or memory full, no room, failing disk
    "tier_waits",  # reads that waited for another thread or process to fetch the same payload
    "tier_evictions",  # payloads evicted from the folder
    "tier_fast_errors",  # failures of the folder or its ledger, each a miss or a skipped fill
    "tier_uploads",  # dirty payloads uploaded
    "tier_upload_failures",  # uploads that failed and are tried again, and dirty payloads that were lost
)


class Counters:
    """Thread-safe named counters."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: Raised with every count, so that a reader who asks often sees at a glance that nothing happened.
        self.changes = 0
        self._values: dict[str, int] = dict.fromkeys(_PLAIN, 0)
        for reason in MISS_REASONS:
            self._values[f"miss_blocks{{{reason}}}"] = 0
            self._values[f"save_failures{{{reason}}}"] = 0
        for outcome in SAVE_OUTCOMES:
            self._values[f"save_blocks{{{outcome}}}"] = 0

    def add(self, name: str, amount: int = 1) -> None:
        """Count `amount` more of `name`, one of the names set up here."""
        with self._lock:
            self._values[name] += amount
            self.changes += 1

    def miss(self, reason: str, blocks: int) -> None:
        """Count `blocks` asked for and not served, for `reason`."""
        if blocks:
            self.add(f"miss_blocks{{{reason}}}", blocks)

    def saved(self, outcome: str, blocks: int) -> None:
        """Count `blocks` offered for saving that ended as `outcome`."""
        if blocks:
            self.add(f"save_blocks{{{outcome}}}", blocks)

    def snapshot(self) -> dict[str, int]:
        """All values at one moment."""
        with self._lock:
            return dict(self._values)
