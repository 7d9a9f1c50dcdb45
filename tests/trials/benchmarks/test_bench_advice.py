"""What advice foretells of a trace comes true on both indexes: hits, GPU money, and the bill of requests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.admin.advise import workloads
from trials.benchmarks.bench_advice import main


@pytest.mark.servers
def test_what_it_foretells_comes_true(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workloads.write(tmp_path / "trace.jsonl", workloads.requests(5, 250, gap_s=10.0))
    words = [str(tmp_path / "trace.jsonl"), "--block-tokens", "16", "--block-bytes", str(1 << 20)]
    words += ["--also", "6", "--json", str(tmp_path / "rows.json")]
    assert main(words) == 0
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["index"] for row in rows] == 2 * ["sqlite", "redis"]
    assert sum(row["recommended"] for row in rows) >= 2 and any(row["evicted_segments"] for row in rows)
    for row in rows:
        # A Redis orders uses by its own clock, in which the trace's hours are a few seconds. So it evicts
        # others than in those hours, and its rows say no more than that nothing is far off.
        points, part = (10, 0.3) if row["index"] == "redis" else (2, 0.05)
        assert abs(row["off"]["hit_ratio"]) <= points, row
        for what in ("saved", "net", "costs", "requests"):
            assert abs(row["off"][what]) <= part, (what, row)
    assert "trace.jsonl" in capsys.readouterr().out
