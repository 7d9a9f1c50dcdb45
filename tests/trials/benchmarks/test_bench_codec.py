"""The benchmark of the codecs runs and says what it promises; how fast is not a test's business."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the tensors come from networks")

from schemas.records import CODECS
from trials.benchmarks.bench_codec import main


@pytest.mark.slow
def test_it_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--train-s", "0.1", "--slots", "1", "--rounds", "1", "--json", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())
    tensors = {row["tensor"] for row in found["results"]}
    assert [row["codec"] for row in found["results"]] == [*CODECS] * len(tensors)
    rows = {(row["tensor"], row["codec"]): row for row in found["results"]}
    assert rows["KV, bf16", "planes-lz4"]["used"] == "planes-lz4"
    assert rows["KV, bf16", "planes-lz4"]["ratio"] > 1.2
    assert rows["KV, fp8 e4m3", "none"]["pays_below_gb_s"] is None
    table = capsys.readouterr().out
    assert all(tensor in table for tensor in tensors)
