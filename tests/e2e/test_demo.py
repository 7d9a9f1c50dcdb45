"""The demonstration that the README begins with, as `make demo` runs it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.e2e.engine import ROOT

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def test_the_second_engine_answers_from_the_store() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tools.demo", "--json"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert [row["loaded"] for row in report["rows"]] == [row["expected"] for row in report["rows"]]
    assert len(report["rows"]) == 2 and all(row["loaded"] > 2900 for row in report["rows"])
    assert report["encoded"]["engine 2"] < report["encoded"]["engine 1"]
    assert not report["failures"]
