"""The reference is generated, committed and complete; its examples parse; shells complete its commands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main

from kvstore.cli.app import VERBS, app
from kvstore.cli.verbs import SECTIONS, Verb
from tests.waiting import PATIENCE_S
from tools.reference import commands as docs

ROOT = Path(__file__).parents[2]
COMMANDS: dict[str, Any] = dict(docs.commands_of(typer.main.get_command(app), ""))
BY_NAME = {verb.name: verb for verb in VERBS}


def test_the_committed_reference_is_the_generated_one() -> None:
    committed = (ROOT / "docs" / "cache-admin.md").read_text(encoding="utf-8")
    assert committed == docs.reference(), "run: python -m tools.reference.commands > docs/cache-admin.md"


def test_every_verb_and_every_parameter_explains_itself() -> None:
    text = docs.reference()
    promised = {"status", "ls", "show", "namespaces", "namespaces diff", "events"}
    promised |= {"evict", "pin", "quota"}
    promised |= {"export", "import", "warm", "bench", "doctor", "vllm-config"}
    assert promised <= set(COMMANDS)
    for name, command in COMMANDS.items():
        page = page_of(text, name)
        assert command.help
        for section in ("**Synopsis**", "**Exit status**", "**Examples**"):
            assert section in page, f"{name}: {section}"
        assert f"    cache-admin {name}" in page
        for parameter in command.params:
            assert parameter.help, f"{name}: {parameter.name} has no help"
            if parameter.name != "help" and not getattr(parameter, "hidden", False):
                assert (parameter.metavar or parameter.opts[0]) in text


def test_no_secret_stands_on_a_command_line() -> None:
    """Other users of the machine can read it there."""
    secret = re.compile("salt|password|secret|key$")
    found = [one for command in COMMANDS.values() for one in command.params if secret.search(one.name)]
    assert {one.name for one in found} >= {"salt_file", "password_file"}
    assert {one.metavar for one in found} == {"FILE"}


def page_of(text: str, name: str) -> str:
    """What the reference says of one verb."""
    return text.partition(f"\n## cache-admin {name}\n")[2].partition("\n## ")[0]


def test_every_command_is_a_verb_and_links_lead_somewhere() -> None:
    text = docs.reference()
    assert len(BY_NAME) == len(VERBS), "two of one name"
    assert set(BY_NAME) == set(COMMANDS)
    assert {verb.section for verb in VERBS} == set(SECTIONS)
    titles = re.findall(r"^## (.*)$", text, flags=re.MULTILINE)
    headings = {"#" + title.replace(" ", "-") for title in titles}
    links = set(re.findall(r"\]\((#[^)]+)\)", text))
    assert links <= headings
    assert len(links) == len(VERBS)
    for verb in VERBS:
        assert verb.name not in verb.see_also
        assert set(verb.see_also) <= set(BY_NAME)


def test_the_help_has_few_words_in_groups() -> None:
    root: Any = typer.main.get_command(app)
    panels = [command.rich_help_panel for command in root.commands.values()]
    assert list(dict.fromkeys(panels)) == list(SECTIONS)
    assert len(root.commands) <= 23


def test_what_a_verb_says_of_its_exit_codes_is_in_its_list() -> None:
    text = docs.reference()
    for verb in VERBS:
        told = COMMANDS[verb.name].help
        said = {int(code) for code in re.findall(r"(?:[Ee]xits with|exit code is) (\d+)", told)}
        said |= {int(code) for code in re.findall(r"exit code is \d+, or (\d+)", told)}
        assert said <= set(docs.codes_of(verb)), verb.name
        for code in docs.codes_of(verb):
            assert f"{code} {docs._SHORT[code]}" in page_of(text, verb.name)


def commands(line: str) -> list[list[str]]:
    """The arguments of every cache-admin in a line of shell, as far as no other command's follow."""
    found = []
    for part in re.findall(r"cache-admin ((?:'[^']*'|\"[^\"]*\"|[^|)'\"])*)", line):
        found.append([word.strip("'\"") for word in part.split()])
    return found


def parse(arguments: list[str]) -> str:
    """The verb that these arguments are for, all of which it takes. Raises click's errors."""
    command: Any = typer.main.get_command(app)
    context, path = None, []
    while True:
        context = command.make_context(command.name, list(arguments), parent=context)
        rest = [*getattr(context, "_protected_args", ()), *context.args]
        if not hasattr(command, "commands") or not rest:
            return " ".join(path)
        name, command, arguments = command.resolve_command(context, rest)
        path.append(name)


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.name)
def test_every_verb_has_examples_that_parse(verb: Verb) -> None:
    parsed = [parse(arguments) for line in verb.examples for arguments in commands(line)]
    assert len(parsed) >= len(verb.examples)
    assert set(parsed) <= set(BY_NAME)
    assert verb.name in parsed
    assert all(f"cache-admin {verb.name}" in line for line in verb.examples)


def test_an_example_that_does_not_parse_is_noticed() -> None:
    for line in ("cache-admin status --jsn", "cache-admin namespaces diff a", "cache-admin nothing"):
        with pytest.raises(Exception, match=r"No such|Missing"):
            parse(commands(line)[0])
    assert parse(["namespaces", "diff", "a", "b"]) == "namespaces diff"


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("cache-admin ", {"status", "evict", "quota", "namespaces", "doctor"}),
        ("cache-admin st", {"status"}),
        ("cache-admin quota --", {"--size", "--ttl"}),
        ("cache-admin evict --un", {"--unused-for"}),
    ],
)
@pytest.mark.slow
def test_a_shell_completes_verbs_and_options(typed: str, expected: set[str]) -> None:
    words = typed.split(" ")
    ran = completing(_CACHE_ADMIN_COMPLETE="complete_bash", COMP_WORDS=typed, COMP_CWORD=str(len(words) - 1))
    offered = set(ran.split())
    assert expected <= offered
    assert all(word.startswith(words[-1]) for word in offered)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
@pytest.mark.slow
def test_completion_can_be_had_for_every_shell(shell: str) -> None:
    script = completing(_CACHE_ADMIN_COMPLETE=f"source_{shell}")
    assert "_CACHE_ADMIN_COMPLETE" in script
    assert "cache-admin" in script


def completing(**environ: str) -> str:
    """What the program prints when a shell asks it."""
    code = "import sys; sys.argv[0] = 'cache-admin'; from kvstore.cli import main; main()"
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert ran.stdout, ran.stderr
    return ran.stdout
