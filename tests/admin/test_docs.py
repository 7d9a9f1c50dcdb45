"""The reference is generated, committed, and complete."""

from __future__ import annotations

from pathlib import Path

import typer.main

from kvstore.cli import docs
from kvstore.cli.app import app

ROOT = Path(__file__).parents[2]


def test_the_committed_reference_is_the_generated_one() -> None:
    committed = (ROOT / "docs" / "cache-admin.md").read_text(encoding="utf-8")
    assert committed == docs.reference(), "run: python -m kvstore.cli.docs > docs/cache-admin.md"


def test_every_verb_and_every_parameter_explains_itself() -> None:
    text = docs.reference()
    verbs = dict(docs._verbs(typer.main.get_command(app), ""))
    assert {"status", "ls", "show", "namespaces", "namespaces diff", "doctor", "vllm-config"} <= set(verbs)
    for name, verb in verbs.items():
        assert f"\n## cache-admin {name}\n" in text
        assert verb.help
        for parameter in verb.params:
            assert parameter.help, f"{name}: {parameter.name} has no help"
            if parameter.name != "help":
                assert (parameter.metavar or parameter.opts[0]) in text


def test_examples_name_real_commands() -> None:
    verbs = dict(docs._verbs(typer.main.get_command(app), ""))
    assert set(docs._EXAMPLES) == set(verbs)
    for name, lines in docs._EXAMPLES.items():
        assert all(f"cache-admin {name}" in line for line in lines)
