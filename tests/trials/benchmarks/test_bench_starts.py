"""Engines that start at once on one prefix put each segment once and ask nobody twice; how fast is not a
test's business."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trials.benchmarks.bench_starts import ALONE, SEGMENTS, main

CLIENTS = 8


@pytest.mark.servers
def test_a_prefix_that_all_compute_at_once_is_put_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = tmp_path / "found.json"
    main(["--clients", str(CLIENTS), "--processes", "2", "--server", "nginx", "--json", str(found)])
    rows = {row["what"]: row for row in json.loads(found.read_text())}
    alone, cold, warm = rows["cold, one at a time"], rows["cold, at once"], rows["warm, at once"]
    assert (alone["puts"], alone["outcomes"]) == (ALONE * SEGMENTS, {"stored": ALONE * SEGMENTS})
    assert cold["puts"] == cold["outcomes"]["stored"] == SEGMENTS
    # Whoever doesn't save is told so in one call, drops its copy and asks no more: besides the match, one
    # claim for each segment, and for each put a commit and what keeping house looks at.
    assert sum(cold["outcomes"].values()) == CLIENTS * SEGMENTS
    assert cold["scripts"] <= CLIENTS * (1 + SEGMENTS) + 10 * SEGMENTS
    assert warm["outcomes"] == {"loaded": CLIENTS * SEGMENTS}
    assert (warm["puts"], warm["gets"]) == (0, CLIENTS * SEGMENTS)
    # A match, a touch, and a look at the verdicts about the writers that it meets. A script that the server
    # does not have yet is sent once more.
    assert 2 * CLIENTS <= warm["scripts"] <= 4 * CLIENTS
    table = capsys.readouterr().out
    assert all(what in table for what in rows)
