"""The benchmark of large stores runs and says what it promises; how fast is not a test's business."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trials.benchmarks.bench_scale import LARGE, line, main


@pytest.mark.servers
@pytest.mark.slow
def test_it_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["8192", "16384"]
    assert main(["--blocks", *sizes, "--json", str(tmp_path / "found.json")]) == 0
    small, large, extrapolated = json.loads((tmp_path / "found.json").read_text())
    assert [one["blocks"] for one in (small, large, extrapolated)] == [8192, 16384, LARGE]
    names = ["rebuild --apply", "status", "match", "fsck", "fsck --list", "evict a segment"]
    names += ["fsck --list --apply", "commit"]
    for one in (small, large, extrapolated):
        assert [row["what"] for row in one["rows"]] == names
    for one in (small, large):
        commands = [row for row in one["rows"] if row["peak_mib"] is not None]
        assert len(commands) == 5 and all(10 < row["peak_mib"] < 2000 for row in commands)
    assert "100,000,000 blocks" in capsys.readouterr().out


def test_a_line_goes_through_both_points() -> None:
    assert line((1.0, 5.0), (10.0, 14.0), 100.0) == pytest.approx(104.0)
    assert line((1.0, 5.0), (10.0, 5.0), 100.0) == 5.0


def test_what_is_compared_without_a_store_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--compare", "6400"]) == 0
    assert "6,400 blocks compared" in capsys.readouterr().out
