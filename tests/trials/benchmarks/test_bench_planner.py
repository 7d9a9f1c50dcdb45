"""The benchmark of the planner runs and says what it promises; how good it is is not a test's business."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from trials.benchmarks.bench_planner import MODES, QUICK, main


@pytest.mark.engine
@pytest.mark.servers
def test_it_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = {"--json": tmp_path / "found.json", "--svg": tmp_path / "found.svg"}
    assert main(["--quick", "--paced", *(str(word) for pair in out.items() for word in pair)]) == 0
    found = json.loads(out["--json"].read_text())
    assert [(row["mb_s"], row["latency_ms"]) for row in found["steady"]] == [
        (network.mb_s, network.latency_ms) for network in QUICK.networks
    ]
    for row in found["steady"]:
        assert set(row["seconds"]) == set(MODES)
        assert row["ratios"]["adaptive"]["p50"] > 0
        assert 0 <= row["loaded"] <= 1
    [change] = found["changes"]
    assert len(change["under_way"]) == QUICK.repeats
    assert len(found["stall"]["loads_again_s"]) == QUICK.repeats
    texts = [element.text for element in ElementTree.fromstring(out["--svg"].read_text()).iter()]
    assert {"adaptive, p50", "always, p50", "never, p50"} <= set(texts)
    table = capsys.readouterr().out
    assert all(str(network) in table for network in QUICK.networks)
