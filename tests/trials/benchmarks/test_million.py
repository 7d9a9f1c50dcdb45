"""What looking after a large store costs is a benchmark (trials/benchmarks/bench_million.py). That
it is exact is tested with a twentieth of it: the benchmark ends if it is not.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trials.benchmarks.bench_million import main

pytestmark = [pytest.mark.servers, pytest.mark.slow]


def test_fifty_thousand_blocks(tmp_path: Path) -> None:
    assert main(["--blocks", "50048", "--json", str(tmp_path / "found.json")]) == 0
    rows = {row["what"]: row for row in json.loads((tmp_path / "found.json").read_text())["rows"]}
    assert rows["rebuild"]["note"].startswith("782 segments, 50048 blocks")
    assert rows["evict 1%"]["note"] == "8 segments"
    assert rows["reap and sweep"]["note"] == "8 payloads, 512 entries"
    assert rows["rebuild after FLUSHALL"]["note"].startswith("774 segments, 49536 blocks")
    assert rows["fsck"]["note"] == "clean: 774 segments, 49536 entries"
