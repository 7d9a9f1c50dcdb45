"""The benchmark of the match runs and says what it promises; how fast is not a test's business."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trials.benchmarks.bench_match import SIZES, main


@pytest.mark.servers
def test_it_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--blocks", "8192", "--repeat", "2", "--json", str(tmp_path / "found.json")]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    pairs = [(row["what"].split(",")[0], row["blocks"]) for row in found["rows"] if row["ratio"]]
    assert pairs == [(index, size) for index in ("redis", "sqlite") for size in SIZES]
    assert found["redis"]["blocks"] == found["sqlite"]["blocks"] == 8192
    table = capsys.readouterr().out
    assert all(row["what"] in table for row in found["rows"])
