"""The benchmark of copies runs, and both of its ways copy the same; how fast is not a test's business."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="the connectors' tests need the full set-up: make setup")

from trials.benchmarks.bench_copies import LAYOUTS, run

pytestmark = pytest.mark.engine  # the full set-up, not an engine


def test_it_runs() -> None:
    rows = run(segment_bytes=1, repeat=1)["layouts"]
    assert list(rows) == list(LAYOUTS)
    for name, row in rows.items():
        assert row["word_bytes"] == 8 and row["kernel"] == (name == "separate layers")
        for way in ("gather", "scatter"):
            operations = row[way]["operations"]
            assert operations["now"] == 1 or row["kernel"]
            assert operations["now"] <= operations["before"]
