"""Tests of other things than proofs: every writer counts as proven there, so that a first hit is one.

`tests.conftest` makes it so for each test without the marker `proves`, and the processes of engines do unless
the environment says TESTS_PROVE_WRITERS.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from kvstore.index.port import Run
from kvstore.keys import WriterId
from kvstore.store.writers.known import KnownWriters
from kvstore.store.writers.own import Writer

#: Set in the environment of engines to where they compute: those of this machine would all be at one place.
PLACE = "TESTS_PLACE"
#: Set in the environment of engines whose writers have to prove themselves, as everywhere but in tests.
PROVE = "TESTS_PROVE_WRITERS"


def nobody(writers: KnownWriters, runs: Iterable[Run]) -> set[WriterId]:
    """Stands in the place of `KnownWriters.unproven`."""
    return set()


def believe_writers() -> None:
    """Makes every writer count as proven in this process, unless the environment says otherwise, and its own
    compute where that says."""
    if not os.environ.get(PROVE):
        KnownWriters.unproven = nobody  # type: ignore[method-assign]
    if place := os.environ.get(PLACE):
        computes_on = Writer.computes_on
        Writer.computes_on = lambda self, _: computes_on(self, [place])  # type: ignore[method-assign]
