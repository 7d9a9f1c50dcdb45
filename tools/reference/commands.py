"""docs/cache-admin.md, generated from the commands themselves.

    python -m tools.reference.commands > docs/cache-admin.md

A test compares the two, so a verb or an option that isn't documented fails it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import typer.main

from kvstore.cli import exits
from kvstore.cli.app import VERBS, app
from kvstore.cli.call import PRECEDENCE
from kvstore.cli.verbs import SECTIONS, Verb

_INTRO = """\
# cache-admin

<!-- Generated: python -m tools.reference.commands > docs/cache-admin.md -->

Looks after a kvstore cache. It reads the same settings as the connectors, so where an engine runs with
`KVSTORE_PAYLOADS` and `KVSTORE_INDEX` in its environment, `cache-admin status` needs no options.

It comes with the extra `cli`: `pip install '.[cli]'` in a checkout. Where its script is not on the
path, as in an engine's pod, `python -m kvstore.cli` is the same.

Data goes to stdout, everything else to stderr. Commands that take something away say first what they would
do, and do it with `--apply`. Of the others, `doctor` writes one probe to the index and one to the payloads,
and deletes them; `import` saves, `warm` fills this node's fast tier, `rebuild` writes the
index, and `bench` works in a namespace of its own that it empties again. No command prints a password.
"""

_SETTINGS = """\
## Settings

Each source overrides the ones before it:
"""

_JSON = """\
`--json` prints what the text shows, in raw numbers: sizes in bytes (`_bytes`), times in unix seconds
(`_s`). The shapes are the models in `kvstore/admin/*/reports.py`, and a change of one is in the changelog.
"""

_COMPLETION = """\
## Completion

`cache-admin --install-completion` teaches the shell that it is run from (bash, zsh, fish or PowerShell) to
complete commands and options; `cache-admin --show-completion` prints what that would add, for an image or a
dotfile of your own.
"""

_FILES = """\
## Files and environment

| | |
| --- | --- |
| `KVSTORE_SETTINGS` | the settings file, unless `--settings` names one |
| `KVSTORE_<KEY>` | one setting, `__` between levels: `KVSTORE_REDIS__PASSWORD`, `KVSTORE_CAPACITY_BYTES` |
| `DIR/index.sqlite` | the index, where payloads are `file:///DIR` and no index is given |
| `DIR/.tier` | the fast tier's ledger, inside its folder |
| `COLUMNS`, `NO_COLOR` | width and colour of the text; without a terminal it is 200 columns and plain |

An index file or a payload folder that isn't there is not made by a command that only looks.
"""

#: Exit codes of every verb.
ALWAYS = {
    exits.ExitCode.OK,
    exits.ExitCode.ERROR,
    exits.ExitCode.USAGE,
    exits.ExitCode.UNREACHABLE,
    exits.ExitCode.CANCELLED,
}

#: Options that Typer adds; their effect depends on the shell.
_TYPERS = {"--help", "--install-completion", "--show-completion"}


def reference() -> str:
    """Returns the whole page."""
    root = typer.main.get_command(app)
    commands = dict(commands_of(root, ""))
    common = [option for option in _options(next(iter(commands.values()))) if _is_common(option, commands)]
    parts = [_INTRO, *_contents(commands), _SETTINGS]
    parts.append("\n".join(f"{number}. {source}" for number, source in enumerate(PRECEDENCE, start=1)) + "\n")
    parts += ["## Options of every command\n", _option_table(common), _JSON]
    parts += ["Before the command:\n", _option_table(_options(root))]
    parts += ["## Exit codes\n", _table(("code", "meaning"), [(str(c), text) for c, text in exits.table()])]
    parts += [_FILES, _COMPLETION]
    for verb in VERBS:
        parts += _page(verb, commands[verb.name], {_spelling(option) for option in common})
    return "\n".join(parts)


def _contents(commands: dict[str, Any]) -> Iterator[str]:
    for section in SECTIONS:
        yield f"**{section}**\n"
        names = [verb.name for verb in VERBS if verb.section == section]
        yield _table(("command", ""), [(_link(name), _summary(commands[name])) for name in names])


def _page(verb: Verb, command: Any, common: set[str]) -> Iterator[str]:
    """Yields one verb's page, with the sections of a manual page."""
    yield f"## cache-admin {verb.name}\n"
    yield f"{_summary(command)}\n"
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    own = [option for option in _options(command) if _spelling(option) not in common]
    yield "**Synopsis**\n"
    yield "\n".join(f"    {line}" for line in _synopsis(verb.name, arguments, own)) + "\n"
    if described := _paragraphs(command.help).partition("\n\n")[2]:
        yield "**Description**\n"
        yield f"{described}\n"
    if arguments or own:
        yield "**Arguments and options**\n" if arguments else "**Options**\n"
    if arguments:
        yield _table(("argument", ""), [(f"`{p.metavar}`", p.help) for p in arguments])
    if own:
        yield _option_table(own)
    yield "**Exit status**\n"
    yield ", ".join(f"{code} {_SHORT[code]}" for code in codes_of(verb)) + ".\n"
    yield "**Examples**\n"
    yield "\n".join(f"    {line}" for line in verb.examples) + "\n"
    if verb.see_also:
        yield f"**See also**: {', '.join(map(_link, verb.see_also))}\n"


def codes_of(verb: Verb) -> list[exits.ExitCode]:
    """Returns the exit codes of a verb."""
    return sorted(ALWAYS | set(verb.exits))


#: Names of the exit codes, in a line.
_SHORT = {
    exits.ExitCode.OK: "ok",
    exits.ExitCode.ERROR: "error",
    exits.ExitCode.USAGE: "usage",
    exits.ExitCode.PROBLEMS: "problems found",
    exits.ExitCode.PARTIAL: "partial",
    exits.ExitCode.UNREACHABLE: "unreachable",
    exits.ExitCode.CANCELLED: "cancelled",
}


def _synopsis(name: str, arguments: list[Any], own: list[Any]) -> list[str]:
    """Returns the command with all that is its own, in lines of bearable length."""
    words = [*map(_metavar, arguments), *(f"[{_spelling(option)}]" for option in own), "[COMMON OPTIONS]"]
    lines, indent = [f"cache-admin {name}"], " " * (len(f"cache-admin {name}") + 1)
    for word in words:
        if len(lines[-1]) + len(word) >= 100:
            lines.append(indent + word)
        else:
            lines[-1] += f" {word}"
    return lines


def _summary(command: Any) -> str:
    return _paragraphs(command.help).partition("\n\n")[0]


def _link(name: str) -> str:
    return f"[{name}](#cache-admin-{name.replace(' ', '-')})"


def commands_of(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yields every command that does something by itself, with its full name."""
    if path and (not hasattr(command, "commands") or command.invoke_without_command):
        yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands_of(inner, f"{path} {name}".strip())


def _metavar(argument: Any) -> str:
    return str(argument.metavar if argument.required else f"[{argument.metavar}]")


def _options(command: Any) -> list[Any]:
    """Returns the options that are shown: an option's old name works unseen."""
    options = [p for p in command.params if p.param_type_name == "option"]
    return [option for option in options if not option.hidden and not _TYPERS & set(option.opts)]


def _is_common(option: Any, commands: dict[str, Any]) -> bool:
    return all(_spelling(option) in map(_spelling, _options(command)) for command in commands.values())


def _spelling(option: Any) -> str:
    """Returns how the option is written, with its value's name."""
    names = "/".join([*option.opts, *option.secondary_opts])
    return f"{names} {option.metavar}" if option.metavar and not option.is_flag else names


def _option_table(options: list[Any]) -> str:
    return _table(("option", "default", ""), [(f"`{_spelling(o)}`", _default(o), o.help) for o in options])


def _default(option: Any) -> str:
    if option.default is None or (option.is_flag and not option.default and not option.secondary_opts):
        return ""
    if option.secondary_opts:
        return f"`{(option.opts if option.default else option.secondary_opts)[0]}`"
    return f"`{option.default}`"


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return (
        "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
        + "\n"
    )


def _paragraphs(text: str) -> str:
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


if __name__ == "__main__":
    sys.stdout.write(reference())
