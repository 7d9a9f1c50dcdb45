"""docs/cache-admin.md, generated from the commands themselves.

    python -m kvstore.cli.docs > docs/cache-admin.md

A test compares the two, so a verb or an option that isn't documented fails it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import typer.main

from kvstore.cli import exits
from kvstore.cli.app import app
from kvstore.cli.call import PRECEDENCE

_INTRO = """\
# cache-admin

<!-- Generated: python -m kvstore.cli.docs > docs/cache-admin.md -->

Looks after a kvstore cache. It reads the same settings as the connectors, so where an engine runs with
`KVSTORE_PAYLOADS` and `KVSTORE_INDEX` in its environment, `cache-admin status` needs no options.

It comes with the extra `cli`: `pip install 'kvstore[cli]'`.

Data goes to stdout, everything else to stderr. Most commands only read; `doctor` also writes one probe to
the index and one to the payloads, and deletes them. `import` saves, `warm` fills this node's fast tier, and
`bench` works in a namespace of its own that it empties again. No command prints a password.
"""

_SETTINGS = """\
## Settings

Each source overrides the ones before it:
"""

_JSON = """\
`--json` prints what the text shows, in raw numbers: sizes in bytes (`_bytes`), times in unix seconds
(`_s`). The shapes are the models of `schemas/reports.py`, `schemas/transfers.py` and `schemas/bench.py`.
"""

_EXAMPLES = {
    "status": ["cache-admin status --payloads file:///var/lib/kvstore", "cache-admin status --json"],
    "ls": ["cache-admin ls --sort bytes --limit 10", "cache-admin ls 8a74e0fa"],
    "show": ["cache-admin show 8a74e0fa", "cache-admin show cdf5c6c46cc04768 --verify"],
    "namespaces": ["cache-admin namespaces"],
    "namespaces diff": ["cache-admin namespaces diff 8a74e0fa 340661d9"],
    "export": [
        "cache-admin export --to hot.tar --max-bytes 50GiB",
        "cache-admin export 8a74e0fa --depth 64 --to prompts.tar",
        "cache-admin export --to - | ssh other-site cache-admin import -",
    ],
    "import": ["cache-admin import hot.tar --dry-run", "cache-admin import hot.tar"],
    "warm": ["cache-admin warm --dry-run", "cache-admin warm 8a74e0fa --jobs 8"],
    "bench": ["cache-admin bench", "cache-admin bench --seconds 20 --namespace 8a74e0fa --tokens 4096,65536"],
    "serve": [
        "cache-admin serve",
        "cache-admin serve --listen 0.0.0.0:9464 --no-janitor",
        "cache-admin serve --once --json | jq .janitor.steps",
    ],
    "simulate": [
        "cache-admin simulate /var/log/kvstore-trace --plot hits.svg",
        "cache-admin simulate conversation_trace.jsonl --block-bytes 64MiB --capacity 1TiB,2TiB,4TiB",
        "cache-admin simulate trace.jsonl --policy kvstore,lru --segment-blocks 16,64 --json",
    ],
    "whatif": ["cache-admin whatif", "cache-admin whatif --more 100GiB,1TiB"],
    "doctor": ["cache-admin doctor", "cache-admin doctor --json | jq '.checks[] | select(.state != \"ok\")'"],
    "vllm-config": [
        "cache-admin vllm-config --index redis://redis:6379/0 --payloads file:///mnt/kvstore",
        "eval \"vllm serve MODEL $(cache-admin vllm-config --no-ec | tr '\\n' ' ')\"",
    ],
}

#: Typer's own; what they do depends on the shell.
_TYPERS = {"--help", "--install-completion", "--show-completion"}


def reference() -> str:
    """The whole page."""
    root = typer.main.get_command(app)
    verbs = dict(_verbs(root, ""))
    common = [option for option in _options(next(iter(verbs.values()))) if _is_common(option, verbs)]
    parts = [_INTRO, _SETTINGS]
    parts.append("\n".join(f"{number}. {source}" for number, source in enumerate(PRECEDENCE, start=1)) + "\n")
    parts += ["## Options of every command\n", _option_table(common), _JSON]
    parts += ["Before the command:\n", _option_table(_options(root))]
    parts += ["## Exit codes\n", _table(("code", "meaning"), [(str(c), text) for c, text in exits.table()])]
    for name, verb in verbs.items():
        parts += _verb(name, verb, {_spelling(option) for option in common})
    return "\n".join(parts)


def _verb(name: str, verb: Any, common: set[str]) -> Iterator[str]:
    arguments = [p for p in verb.params if p.param_type_name == "argument"]
    usage = " ".join(["cache-admin", name, *map(_metavar, arguments), "[OPTIONS]"])
    yield f"## cache-admin {name}\n"
    yield f"    {usage}\n"
    yield f"{_paragraphs(verb.help)}\n"
    if arguments:
        yield _table(("argument", ""), [(f"`{p.metavar}`", p.help) for p in arguments])
    own = [option for option in _options(verb) if _spelling(option) not in common]
    if own:
        yield _option_table(own)
    yield "\n".join(f"    {line}" for line in _EXAMPLES[name]) + "\n"


def _verbs(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every command that does something by itself, with its full name."""
    if path and (not hasattr(command, "commands") or command.invoke_without_command):
        yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from _verbs(inner, f"{path} {name}".strip())


def _metavar(argument: Any) -> str:
    return str(argument.metavar if argument.required else f"[{argument.metavar}]")


def _options(command: Any) -> list[Any]:
    return [p for p in command.params if p.param_type_name == "option" and not _TYPERS & set(p.opts)]


def _is_common(option: Any, verbs: dict[str, Any]) -> bool:
    return all(_spelling(option) in map(_spelling, _options(verb)) for verb in verbs.values())


def _spelling(option: Any) -> str:
    """How the option is written, with its value's name."""
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
