"""How much there is, counted by tools.size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools import size

SAMPLE = '''"""What a module is for.

More of it."""

# Nobody reads this comment,
# nor its second line.
import os


def add(one: int) -> int:
    """Returns the sum. Of two numbers."""
    text = """two
    lines"""
    raise ValueError("None of these: " + text + str(other._private))
'''


@pytest.fixture
def sample(tmp_path: Path) -> size.Source:
    path = tmp_path / "sample.py"
    path.write_text(SAMPLE)
    return size.Source(str(path))


def test_a_line_counts_if_there_is_code_on_it(sample: size.Source) -> None:
    assert sample.lines() == 5


def test_sentences_without_a_subject_are_counted(sample: size.Source) -> None:
    assert size._riddles([sample], ["Whoever reads. `What is code` isn't.\n\nNothing else is."]) == 6


def test_private_attributes_are_counted(sample: size.Source) -> None:
    assert sample.private() == 1


def test_a_row_above_its_bound_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(size, "BOUNDS", tmp_path / "bounds.json")
    monkeypatch.setattr(size, "measure", lambda: {"verbs": 45, "settings": 113})
    size.BOUNDS.write_text(json.dumps({"verbs": 45, "settings": 112}))
    assert size.main(["--check"]) == 1
    assert "settings: got 113, expected 112 at most" in capsys.readouterr().err
    assert size.main(["--write"]) == 0
    assert json.loads(size.BOUNDS.read_text()) == {"verbs": 45, "settings": 112}, "bounds only fall"
