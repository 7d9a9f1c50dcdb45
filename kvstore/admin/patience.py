"""Tolerance for a payload store that fails on single payloads, until it fails on several in a row."""

from __future__ import annotations

import threading

from kvstore.errors import KVStoreError

#: Failures in a row after which the store as a whole is taken to fail.
MOST = 5


class Patience:
    """Counts failures in a row. Safe for many threads."""

    def __init__(self) -> None:
        self._failures = 0
        self._lock = threading.Lock()

    def answered(self) -> None:
        """Notes that the store answered: a payload could be read, or is not there."""
        with self._lock:
            self._failures = 0

    def unanswered(self, exc: KVStoreError) -> None:
        """Notes that a payload could not be read. Raises `exc` if that was once too often in a row."""
        with self._lock:
            self._failures += 1
            if self._failures >= MOST:
                raise exc
