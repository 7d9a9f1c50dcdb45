"""The command of the matrix: what it counts, what it writes, and that it can fail."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trials.faults import page
from trials.faults.__main__ import main
from trials.faults.row import Result, Row

GOOD = Result(faults=3, requests=12, added_s=0.2, bound_s=0.7, remark="served from its own | cache")
TEMPLATE = "# Faults\n\n<!-- begin: index -->\nan earlier run\n<!-- end: index -->\n\nprose\n\n"
TEMPLATE += "<!-- begin: versions -->\nanother run\n<!-- end: versions -->\n\n"
TEMPLATE += "<!-- begin: peers -->\n<!-- end: peers -->\n"


def row(result: Result, fault: str = "hung", *, quick: bool = False) -> Row:
    return Row("index", fault, "engine", lambda place: result, quick)


def raising(place: Path) -> Result:
    raise RuntimeError("no server\nof this kind")


@pytest.fixture
def docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The page that the command writes."""
    path = tmp_path / "docs" / "faults.md"
    path.parent.mkdir()
    path.write_text(TEMPLATE)
    monkeypatch.setattr(page, "PAGE", path)
    monkeypatch.setattr(page, "ROOT", tmp_path)
    return path


@pytest.mark.parametrize(
    "broken",
    [
        {"wrong_tokens": 1},
        {"engines_lost": 1},
        {"lost_blocks": 1},
        {"leaked": 1},
        {"added_s": 0.8},
        {"faults": 0},
        {"requests": 0},
    ],
)
def test_a_row_that_does_not_hold_makes_it_fail(
    broken: dict[str, Any], docs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([], [row(GOOD)]) == 0
    assert "1 of 1 rows hold" in capsys.readouterr().out
    assert main([], [row(GOOD, "slow"), row(replace(GOOD, **broken))]) == 1
    said = capsys.readouterr().out
    assert "1 of 2 rows hold" in said and "DOES NOT HOLD" in said


def test_a_row_that_raises_does_not_hold_and_the_next_one_is_run(
    docs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--write"], [Row("index", "full", "engine", raising), row(GOOD)]) == 1
    assert "RuntimeError: no server" in capsys.readouterr().out
    assert "**does not hold** RuntimeError: no server" in docs.read_text()


def test_the_page_has_a_line_a_row_and_keeps_its_prose(docs: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept" / "faults.json"
    assert main(["--write", "--json", str(kept)], [row(GOOD), row(GOOD, "slow")]) == 0
    text = docs.read_text()
    cells = r"engine | 3 | 12 | 0 | 0 | 0 | 0 | 0.20 s | 0.70 s | served from its own \| cache |"
    assert f"| hung | {cells}\n| slow | {cells}\n" in text
    assert "earlier" not in text and text.count("prose") == 1
    assert "another run" in text, "of a family that was not run"
    # From what was kept the same page is made, without a run.
    docs.write_text(TEMPLATE)
    assert main(["--write", "--from", str(kept)], [row(Result()), row(Result(), "slow")]) == 0
    assert docs.read_text() == text
    assert [one["holds"] for one in json.loads(kept.read_text())["rows"]] == [True, True]


def test_the_page_is_of_all_rows_of_a_family(docs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row(GOOD, quick=True), row(GOOD, "slow")]
    for some in (["--quick"], ["--rows", "hung$"]):
        with pytest.raises(SystemExit):
            main(["--write", *some], rows)
        assert "missing: index: slow" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--rows", "nothing is called so"], rows)
    assert docs.read_text() == TEMPLATE


def test_the_comparison_stands_beside_it(docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {
        "rows": [{"fault": "hung", "kvstore": "0.5 s", "vllm": "no answer", "lmcache": "30 s"}],
        "versions": {"vllm": "0.31"},
        "machine": "2 cores",
    }
    peers = tmp_path / "peers.json"
    peers.write_text(json.dumps(found))
    monkeypatch.setattr(page, "PEERS", peers)
    assert main(["--write"], [row(GOOD)]) == 0
    assert "| fault | kvstore | vllm 0.31 | lmcache |" in docs.read_text()
    assert "| hung | 0.5 s | no answer | 30 s |" in docs.read_text()
