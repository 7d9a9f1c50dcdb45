"""The benchmark of signing runs and says what it promises; how fast is not a test's business."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trials.benchmarks.bench_signing import MODES, main


@pytest.mark.slow
def test_it_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--rounds", "1", "--slots", "1", "--folder", str(tmp_path), "--json", str(tmp_path / "found.json")])
    rows = json.loads((tmp_path / "found.json").read_text())["results"]
    assert [row["mode"] for row in rows] == [*MODES]
    assert all(row["load_gb_s"] > 0 for row in rows)
    table = capsys.readouterr().out
    assert all(mode in table for mode in MODES)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["found.json"]
