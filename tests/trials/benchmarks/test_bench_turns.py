"""The benchmark of growing conversations runs; how fast that is is not a test's business."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trials.benchmarks.bench_turns import main


@pytest.mark.servers
def test_it_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--turns", "20", "--long", "2400", "--matches", "20", "--json", str(tmp_path / "found.json")]
    assert main(given) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    apart, joined, at_once = found["rows"][3:]
    assert apart["blocks"] == joined["blocks"] == at_once["blocks"] == 150
    assert (apart["segments"], at_once["segments"]) == (48, 3)
    assert joined["segments"] <= 6
    assert all(1.0 <= one["segments"] < 1.35 and one["written"] < 5 for one in found["rule"])
    table = capsys.readouterr().out
    assert all(row["what"] in table for row in found["rows"])
