"""tools/chart.py: what it makes of the comments in values.yaml, and what it says of those that are wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tools import chart


def test_what_is_generated_is_in_step() -> None:
    files, problems = chart.generate()
    assert not problems
    for path, text in files.items():
        assert path.read_text() == text, "python -m tools.chart"


def schema(text: str) -> dict[str, Any]:
    values, problems = chart.read(text)
    assert not problems
    found: dict[str, Any] = chart.schema(values)
    jsonschema.Draft7Validator.check_schema(found)
    return found


def test_types_follow_the_defaults() -> None:
    found = schema(
        "# -- One\n# of two lines\na: 1\n# -- Two\nb: text\n# -- Three\nc: true\n# -- Four\nd: 0.5\n"
    )["properties"]
    assert found["a"] == {"description": "One of two lines", "default": 1, "type": "integer"}
    assert [found[name]["type"] for name in "abcd"] == ["integer", "string", "boolean", "number"]


def test_a_group_is_closed_and_whole() -> None:
    check = jsonschema.Draft7Validator(schema("# -- G\ng:\n  # -- A\n  a: 1\n"))
    assert check.is_valid({"g": {"a": 2}}) and check.is_valid({"g": {"a": 2}, "global": {"x": 1}})
    refused: list[dict[str, Any]] = [{"g": {"a": 2, "b": 1}}, {"g": {}}, {}, {"g": {"a": "x"}}]
    for wrong in [*refused, {"g": {"a": 1}, "h": 1}]:
        assert not check.is_valid(wrong), wrong


def test_schema_lines_win() -> None:
    found = schema(
        '# -- A\n# @schema {"enum": ["x", "y"]}\na: x\n'
        '# -- B\n# @schema {"type": "integer", "nullable": true}\nb: null\n'
        '# -- C\n# @schema {"additionalProperties": {"type": "string"}}\nc: {}\n'
        '# -- D\n# @schema {"items": {"type": "integer"}}\nd: []\n'
    )
    check = jsonschema.Draft7Validator(found)
    assert check.is_valid({"a": "y", "b": None, "c": {"k": "v"}, "d": [1]})
    assert check.is_valid({"a": "x", "c": {}, "d": []}), "what may be null may be missing"
    for wrong in ({"a": "z"}, {"b": "1"}, {"c": {"k": 1}}, {"d": ["x"]}):
        assert not check.is_valid({"a": "x", "c": {}, "d": []} | wrong), wrong


def test_settings_are_defined_where_there_are_any() -> None:
    found = schema(
        '# -- A\n# @schema {"settings": true}\na: {}\n'
        '# -- G\ng:\n  # -- B\n  # @schema {"settings": true}\n  b: {}\n'
    )
    assert list(found["definitions"]) == ["settings"] and "definitions" not in schema("# -- A\na: 1\n")
    check = jsonschema.Draft7Validator(found)
    good, bad = {"grace_s": 300}, {"grace": 300}
    assert check.is_valid({"a": good, "g": {"b": good}})
    assert not check.is_valid({"a": bad, "g": {"b": good}})
    assert not check.is_valid({"a": good, "g": {"b": bad}})


def test_table() -> None:
    values, _ = chart.read('# -- A | b <c>\na: "x|y"\n# -- About g\ng:\n  # -- Inner\n  h: 1\n')
    assert chart.table(values) == (
        '### General\n\n| value | default | |\n| --- | --- | --- |\n| `a` | `"x\\|y"` | A \\| b &lt;c> |\n\n'
        "### g\n\nAbout g\n\n| value | default | |\n| --- | --- | --- |\n| `g.h` | `1` | Inner |\n"
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: 1\n", "values.yaml:1: a: no comment"),
        ("# -- G\ng:\n  h: 1\n", "values.yaml:3: g.h: no comment"),
        ("# A comment\na: 1\n", "values.yaml:2: a: no comment"),
        ("# -- Far away\n\na: 1\n", "values.yaml:3: a: no comment"),
        ("# -- A\n# @schema {enum: [1]}\na: 1\n", "values.yaml:2: a: # @schema is not JSON"),
        ("# -- A\n# @schema [1]\na: 1\n", "values.yaml:2: a: # @schema is an object"),
        ("# -- A\na: {}\n", "values.yaml:2: a: an empty map needs # @schema"),
        ("# -- A\na: []\n", "values.yaml:2: a: an empty list needs # @schema"),
        ("# -- A\na: null\n", "values.yaml:2: a: null says no type"),
        ("# -- A\na: {b: 1}\n", "values.yaml:2: a: write a group in lines of its own"),
        ("a: [\n", "values.yaml is not YAML: "),
        ("- a\n", "values.yaml is not a map"),
    ],
)
def test_problems_are_named(text: str, problem: str) -> None:
    _, problems = chart.read(text)
    assert len(problems) == 1 and problems[0].startswith(problem)


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "values.yaml").write_text("# -- A\na: 1\n")
    (tmp_path / "README.md.gotmpl").write_text("Chart {{ version }}\n\n{{ values }}\n")
    (tmp_path / "Chart.yaml").write_text("{version: 1.2.3, appVersion: 4.5.6, kubeVersion: '>=1'}")
    monkeypatch.setattr(chart, "ROOT", tmp_path)
    generate = chart.generate
    monkeypatch.setattr(chart, "generate", lambda _=None: generate(tmp_path))
    assert chart.main(["--check"]) == 1 and not (tmp_path / "README.md").exists()
    assert "README.md is not what values.yaml says: python -m tools.chart" in capsys.readouterr().err
    assert chart.main([]) == 0 and chart.main(["--check"]) == 0
    assert "Chart 1.2.3" in (tmp_path / "README.md").read_text()
    assert "a" in json.loads((tmp_path / "values.schema.json").read_text())["properties"]
    # What can be written is written, so that others can go on; and it is an error.
    (tmp_path / "values.yaml").write_text("# -- A\na: 1\nb: 2\n")
    assert chart.main([]) == 1 and "b: no comment" in capsys.readouterr().err
    assert "b" in json.loads((tmp_path / "values.schema.json").read_text())["properties"]
