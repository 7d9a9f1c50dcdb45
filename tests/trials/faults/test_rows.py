"""The quick rows of the fault matrix, one round each, on engines that they share. `make faults` runs all of
them, and two rounds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from trials.faults import kept, matrix, trial
from trials.faults.row import Row

pytestmark = [pytest.mark.engine, pytest.mark.servers, pytest.mark.slow]

ROWS = matrix.chosen(matrix.gathered(), quick=True)


@pytest.fixture(scope="module", autouse=True)
def _ended() -> Iterator[None]:
    yield
    kept.let_go()


def test_there_are_rows_for_the_suite() -> None:
    assert {row.family for row in ROWS} >= {"index", "payloads"}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.family}: {row.fault}")
def test_a_row_holds(row: Row, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "ROUNDS", 1)
    # How long requests take is the command's to say, on a machine that does nothing else.
    monkeypatch.setattr(trial, "ALLOWANCE_S", 10.0)
    result = row.run(tmp_path)
    assert result.holds, result
