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

It comes with the extra `cli`: `pip install '.[cli]'` in a checkout. Where its script is not on the
path, as in an engine's pod, `python -m kvstore.cli` is the same.

Data goes to stdout, everything else to stderr. Commands that take something away say first what they would
do, and do it with `--apply` (`gc`: `--delete`, `fsck`: `--repair`). Of the others, `doctor` writes one probe
to the index and one to the payloads, and deletes them; `import` saves, `warm` fills this node's fast tier,
`rebuild` writes the index, and `bench` works in a namespace of its own that it empties again. No command
prints a password.
"""

_SETTINGS = """\
## Settings

Each source overrides the ones before it:
"""

_JSON = """\
`--json` prints what the text shows, in raw numbers: sizes in bytes (`_bytes`), times in unix seconds
(`_s`). The shapes are the models in `schemas/`, and a change of one is in the changelog.
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

#: What a verb may end with, besides these.
_ALWAYS = {0, 1, 2, 5, 130}
_CODES: dict[str, set[int]] = {
    "show": {3},
    "fsck": {3, 4},
    "gc": {3, 4},
    "rebuild": {3, 4},
    "drop": {4},
    "export": {3, 4},
    "import": {3, 4},
    "warm": {3, 4},
    "bench": {4},
    "pin": {3, 4},
    "unpin": {3, 4},
    "serve": {4},
    "doctor": {3},
    "explain": {3},
}

_GROUPS = {
    "Inspect": ("status", "stats", "top", "ls", "show", "namespaces", "namespaces diff", "du", "events"),
    "Maintain": (
        "evict", "pin", "unpin", "quota", "quota set", "quota clear", "invalidate", "drop", "gc", "fsck",
        "rebuild", "serve",
    ),
    "Understand": ("explain", "simulate", "whatif"),
    "Move": ("export", "import", "warm"),
    "Set up": ("doctor", "bench", "vllm-config"),
}  # fmt: skip

#: Beside a verb's own group: what to run before or after it, and what to read.
_SEE_ALSO: dict[str, tuple[str, ...]] = {
    "status": ("quota", "doctor", "stats"),
    "stats": ("explain", "whatif", "top"),
    "top": ("ls", "pin", "evict"),
    "ls": ("show", "top", "du"),
    "show": ("ls", "fsck", "namespaces diff"),
    "namespaces": ("namespaces diff", "status", "drop"),
    "namespaces diff": ("namespaces", "doctor", "explain"),
    "du": ("gc", "status", "fsck"),
    "events": ("explain", "top"),
    "evict": ("top", "pin", "quota", "invalidate"),
    "pin": ("unpin", "top", "quota"),
    "unpin": ("pin", "evict"),
    "quota": ("quota set", "quota clear", "status"),
    "quota set": ("quota", "quota clear", "whatif"),
    "quota clear": ("quota", "quota set"),
    "invalidate": ("drop", "evict"),
    "drop": ("invalidate", "namespaces"),
    "gc": ("du", "fsck", "serve"),
    "fsck": ("gc", "rebuild", "show"),
    "rebuild": ("fsck", "doctor"),
    "serve": ("status", "doctor"),
    "explain": ("stats", "namespaces diff", "events"),
    "simulate": ("whatif", "stats"),
    "whatif": ("simulate", "quota set"),
    "export": ("import", "ls"),
    "import": ("export", "fsck"),
    "warm": ("top", "status"),
    "doctor": ("status", "bench"),
    "bench": ("doctor",),
    "vllm-config": ("doctor",),
}

_EXAMPLES = {
    "status": ["cache-admin status --payloads file:///var/lib/kvstore", "cache-admin status --json"],
    "stats": [
        "cache-admin stats",
        "cache-admin stats --watch --every 10",
        "cache-admin stats 8a74e0fa --watch --json | jq -c '[.at_s, .total.hit_ratio, .total.misses]'",
    ],
    "top": ["cache-admin top", "cache-admin top 8a74e0fa --limit 30 --json | jq -r '.hottest[].segment'"],
    "du": ["cache-admin du", "cache-admin du --json | jq '.lines[] | select(.state == \"orphan\")'"],
    "events": [
        "cache-admin events --limit 20",
        "cache-admin events --follow --json | jq -c 'select(.op == \"evict\")'",
        "cache-admin events 8a74e0fa --after 1763756138211-0",
    ],
    "evict": [
        "cache-admin evict --unused-for 7d",
        "cache-admin evict --keep 500GiB --apply",
        "cache-admin evict cdf5c6c46cc04768 --apply",
    ],
    "pin": [
        "cache-admin pin",
        "cache-admin pin --namespace 8a74e0fa --depth 64 --apply",
        "cache-admin pin --namespace 8a74e0fa --tokens system-prompt.json --apply",
        "cache-admin top --json | jq -r '.hottest[].segment' | xargs cache-admin pin --apply",
    ],
    "unpin": ["cache-admin unpin cdf5c6c46cc04768 --apply", "cache-admin unpin --all --namespace 8a74e0fa"],
    "quota": ["cache-admin quota", "cache-admin quota --json | jq '.quotas[] | select(.state != \"ok\")'"],
    "quota set": [
        "cache-admin quota set store 2TiB --apply",
        "cache-admin quota set tenant/search 200GiB",
        "cache-admin quota set namespace/8a74e0fa 50GiB --apply",
    ],
    "quota clear": ["cache-admin quota clear tenant/search --apply"],
    "ls": ["cache-admin ls --sort bytes --limit 10", "cache-admin ls 8a74e0fa"],
    "show": ["cache-admin show 8a74e0fa", "cache-admin show cdf5c6c46cc04768 --verify"],
    "namespaces": ["cache-admin namespaces"],
    "namespaces diff": ["cache-admin namespaces diff 8a74e0fa 340661d9"],
    "fsck": ["cache-admin fsck", "cache-admin fsck --read-data 5%", "cache-admin fsck --repair 8a74e0fa"],
    "gc": ["cache-admin gc", "cache-admin gc --delete --older-than 7d"],
    "rebuild": ["cache-admin rebuild --dry-run", "cache-admin rebuild --jobs 32"],
    "invalidate": ["cache-admin invalidate 8a74e0fa", "cache-admin invalidate 8a74e0fa --apply"],
    "drop": ["cache-admin drop 8a74e0fa", "cache-admin drop 8a74e0fa --now --apply"],
    "explain": [
        "cache-admin explain --tokens prompt.json",
        "cache-admin explain --request chatcmpl-8f0e2c --verify",
        "cache-admin explain --image 5f4dcc3b5aa765d61d8327deb882cf99 --json | jq '.blocks[].findings'",
    ],
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
    parts = [_INTRO, *_contents(verbs), _SETTINGS]
    parts.append("\n".join(f"{number}. {source}" for number, source in enumerate(PRECEDENCE, start=1)) + "\n")
    parts += ["## Options of every command\n", _option_table(common), _JSON]
    parts += ["Before the command:\n", _option_table(_options(root))]
    parts += ["## Exit codes\n", _table(("code", "meaning"), [(str(c), text) for c, text in exits.table()])]
    parts += [_FILES, _COMPLETION]
    for name in _in_order(verbs):
        parts += _verb(name, verbs, {_spelling(option) for option in common})
    return "\n".join(parts)


def _contents(verbs: dict[str, Any]) -> Iterator[str]:
    for group, names in _groups(verbs).items():
        yield f"**{group}**\n"
        yield _table(("command", ""), [(_link(name), _summary(verbs[name])) for name in names])


def _groups(verbs: dict[str, Any]) -> dict[str, list[str]]:
    """The verbs by group, as far as there are such verbs; what belongs to none at the end."""
    groups = {group: [name for name in names if name in verbs] for group, names in _GROUPS.items()}
    rest = [name for name in verbs if not any(name in names for names in groups.values())]
    return {group: names for group, names in {**groups, "Other": rest}.items() if names}


def _in_order(verbs: dict[str, Any]) -> list[str]:
    return [name for names in _groups(verbs).values() for name in names]


def _verb(name: str, verbs: dict[str, Any], common: set[str]) -> Iterator[str]:
    """One verb's page, with the sections of a manual page."""
    verb = verbs[name]
    yield f"## cache-admin {name}\n"
    yield f"{_summary(verb)}\n"
    arguments = [p for p in verb.params if p.param_type_name == "argument"]
    own = [option for option in _options(verb) if _spelling(option) not in common]
    yield "**Synopsis**\n"
    yield "\n".join(f"    {line}" for line in _synopsis(name, arguments, own)) + "\n"
    if described := _paragraphs(verb.help).partition("\n\n")[2]:
        yield "**Description**\n"
        yield f"{described}\n"
    if arguments or own:
        yield "**Arguments and options**\n" if arguments else "**Options**\n"
    if arguments:
        yield _table(("argument", ""), [(f"`{p.metavar}`", p.help) for p in arguments])
    if own:
        yield _option_table(own)
    codes = sorted(_ALWAYS | _CODES.get(name, set()))
    yield "**Exit status**\n"
    yield ", ".join(f"{code} {_SHORT[exits.ExitCode(code)]}" for code in codes) + ".\n"
    yield "**Examples**\n"
    yield "\n".join(f"    {line}" for line in _EXAMPLES[name]) + "\n"
    if others := [other for other in _SEE_ALSO.get(name, ()) if other in verbs]:
        yield f"**See also**: {', '.join(map(_link, others))}\n"


#: The exit codes' names, for a line.
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
    """The command with all that is its own, in lines of bearable length."""
    words = [*map(_metavar, arguments), *(f"[{_spelling(option)}]" for option in own), "[COMMON OPTIONS]"]
    lines, indent = [f"cache-admin {name}"], " " * (len(f"cache-admin {name}") + 1)
    for word in words:
        if len(lines[-1]) + len(word) >= 100:
            lines.append(indent + word)
        else:
            lines[-1] += f" {word}"
    return lines


def _summary(verb: Any) -> str:
    return _paragraphs(verb.help).partition("\n\n")[0]


def _link(name: str) -> str:
    return f"[{name}](#cache-admin-{name.replace(' ', '-')})"


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
