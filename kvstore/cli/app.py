"""The commands of cache-admin. Each one parses, calls kvstore.admin, prints, and exits by the table.

stdout is data, stderr is everything else. `--json` prints the report's model as it is.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, TypeVar, cast

import typer
from pydantic import BaseModel
from rich.console import Console

from kvstore import __version__, admin
from kvstore.admin import Cache, Sources
from kvstore.admin.engine import Role
from kvstore.cli import exits, render
from kvstore.errors import ConfigError, KVStoreError, PermissionDenied, TransientError
from schemas.reports import SortKey

_Report = TypeVar("_Report", bound=BaseModel)

#: Where there is no terminal nothing should be cut to the width of one.
_WIDE = 200

SettingsFile = Annotated[
    str | None,
    typer.Option("--settings", metavar="FILE", help="YAML file with the whole settings tree."),
]
IndexUrl = Annotated[
    str | None,
    typer.Option(
        "--index",
        metavar="URL",
        help="redis://HOST:PORT/DB, rediss://, unix:// or sqlite:///PATH. Default: SQLite inside the "
        "payload folder.",
    ),
]
PayloadsUrl = Annotated[
    str | None, typer.Option("--payloads", metavar="URL", help="file:///DIR, where the payloads are.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]

#: Where a setting comes from (kvstore.admin.cache says why in this order).
PRECEDENCE = (
    "`--settings FILE`, or else the file that `KVSTORE_SETTINGS` names",
    "`KVSTORE_<KEY>` in the environment, as for the connectors",
    "`--index` and `--payloads`",
)
_EPILOG = (
    f"Exit codes: {'; '.join(f'{code} {meaning}' for code, meaning in exits.table())}.\n\n"
    f"Settings, later ones winning: {'; '.join(PRECEDENCE).replace('`', '')}."
)

app = typer.Typer(
    name="cache-admin",
    help="Look after a kvstore cache: what it holds, whether it is well, and how vLLM connects to it.",
    epilog=_EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
namespaces_app = typer.Typer(
    help="List namespaces: each holds what one set of interchangeable engines shares."
)
app.add_typer(namespaces_app, name="namespaces")


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"cache-admin {__version__}")
        raise typer.Exit


@app.callback()
def root(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Remember what concerns every command."""
    context.obj = debug


@app.command()
def status(
    context: typer.Context,
    settings: SettingsFile = None,
    index: IndexUrl = None,
    payloads: PayloadsUrl = None,
    json: AsJson = False,
) -> None:
    """Show what is opened, whether it answers, and how much it holds."""
    with _guarded(context):
        with Cache(Sources(settings, index, payloads).settings()) as cache:
            report = admin.status(cache, time.time())
        _print(report, render.status, json)
        if "unreachable" in (report.index.state, report.payloads.state):
            _say("unreachable; `cache-admin doctor` says what to do")
        _exit_by(report)


@app.command()
def ls(
    context: typer.Context,
    namespace: Annotated[
        str | None,
        typer.Argument(metavar="NAMESPACE", help="Start of a namespace's id. Default: all of them."),
    ] = None,
    limit: Annotated[
        int, typer.Option(min=0, metavar="N", help="List at most so many segments; 0 lists all.")
    ] = 50,
    sort: Annotated[
        str, typer.Option(metavar="KEY", help="last-use, created or bytes; the greatest comes first.")
    ] = "last-use",
    settings: SettingsFile = None,
    index: IndexUrl = None,
    payloads: PayloadsUrl = None,
    json: AsJson = False,
) -> None:
    """List segments: their size, age, last use and place in their chain."""
    key = cast("SortKey", _one_of("--sort", sort, ("last-use", "created", "bytes")))
    with _guarded(context):
        with Cache(Sources(settings, index, payloads).settings()) as cache:
            report = admin.ls(cache, namespace, limit=limit, sort=key, now_s=time.time())
        _print(report, render.ls, json)
        if report.found > len(report.segments):
            _say(f"{len(report.segments):,} of {report.found:,} segments; --limit 0 lists all")


@app.command()
def show(
    context: typer.Context,
    name: Annotated[
        str,
        typer.Argument(
            metavar="ID",
            help="A namespace's or segment's id or the start of one, or a payload's name or path.",
        ),
    ],
    verify: Annotated[bool, typer.Option("--verify", help="Read every slot and check its checksum.")] = False,
    settings: SettingsFile = None,
    index: IndexUrl = None,
    payloads: PayloadsUrl = None,
    json: AsJson = False,
) -> None:
    """Show one namespace, or one segment and whether its payload agrees with the index.

    Exits with 3 if a payload is missing or damaged.
    """
    with _guarded(context):
        with Cache(Sources(settings, index, payloads).settings()) as cache:
            report = admin.show(cache, name, verify=verify, now_s=time.time())
        _print(report, render.show, json)
        _exit_by(report)


@namespaces_app.callback(invoke_without_command=True)
def namespaces(
    context: typer.Context,
    settings: SettingsFile = None,
    index: IndexUrl = None,
    payloads: PayloadsUrl = None,
    json: AsJson = False,
) -> None:
    """List namespaces: each holds what one set of interchangeable engines shares."""
    if context.invoked_subcommand is not None:
        if json or any(option is not None for option in (settings, index, payloads)):
            raise typer.BadParameter(f"put the options after '{context.invoked_subcommand}'")
        return
    with _guarded(context):
        with Cache(Sources(settings, index, payloads).settings()) as cache:
            report = admin.namespaces(cache)
        _print(report, render.namespaces, json)


@namespaces_app.command("diff")
def namespaces_diff(
    context: typer.Context,
    a: Annotated[str, typer.Argument(metavar="A", help="A namespace's id, or the start of it.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Another one's.")],
    settings: SettingsFile = None,
    index: IndexUrl = None,
    payloads: PayloadsUrl = None,
    json: AsJson = False,
) -> None:
    """Explain, field by field, why two namespaces don't share."""
    with _guarded(context):
        with Cache(Sources(settings, index, payloads).settings()) as cache:
            report = admin.diff(cache, a, b)
        _print(report, render.diff, json)


@app.command()
def doctor(
    context: typer.Context,
    settings: SettingsFile = None,
    index: IndexUrl = None,
    payloads: PayloadsUrl = None,
    json: AsJson = False,
) -> None:
    """Check settings, index, payloads, permissions, disk and clocks, and say what to do.

    Writes one probe to the index and one to the payloads, and deletes them. Run it where an engine
    runs, as the user that the engine runs as. Exits with 3 if there is a problem.
    """
    with _guarded(context):
        sources = Sources(settings, index, payloads)
        with Cache(sources.settings()) as cache:
            report = admin.doctor(cache, sources)
        _print(report, render.doctor, json)
        _exit_by(report)


@app.command("vllm-config")
def vllm_config(
    context: typer.Context,
    kv: Annotated[bool, typer.Option("--kv/--no-kv", help="The flag for KV blocks.")] = True,
    ec: Annotated[bool, typer.Option("--ec/--no-ec", help="The flag for encoder outputs.")] = True,
    role: Annotated[
        str,
        typer.Option(metavar="ROLE", help="both, producer (only saves) or consumer (only loads)."),
    ] = "both",
    settings: SettingsFile = None,
    index: IndexUrl = None,
    payloads: PayloadsUrl = None,
    json: AsJson = False,
) -> None:
    """Print the flags of `vllm serve` for this cache, quoted for a shell.

    With --json, an object whose values are the arguments of `vllm.LLM`. Passwords are never printed:
    a note on stderr says which environment variable takes them.
    """
    chosen = cast("Role", _one_of("--role", role, ("both", "producer", "consumer")))
    if not (kv or ec):
        raise typer.BadParameter("--no-kv and --no-ec together leave nothing to print")
    with _guarded(context):
        report = admin.vllm_config(Sources(settings, index, payloads).settings(), kv=kv, ec=ec, role=chosen)
        typer.echo(report.model_dump_json(indent=2) if json else "\n".join(render.vllm_flags(report)))
        for note in report.notes:
            _say(note)


@contextmanager
def _guarded(context: typer.Context) -> Iterator[None]:
    """The one place where errors become messages and exit codes."""
    try:
        yield
    except (typer.Exit, BrokenPipeError):
        raise
    except KVStoreError as exc:
        _trace(context)
        _say(str(exc))
        if isinstance(exc, ConfigError):
            _say("settings come from --settings, KVSTORE_* variables, --index and --payloads")
        elif isinstance(exc, (TransientError, PermissionDenied)):
            _say("`cache-admin doctor` says what to do")
        raise typer.Exit(exits.of_error(exc)) from exc
    except KeyboardInterrupt:
        _say("cancelled")
        raise typer.Exit(exits.ExitCode.CANCELLED) from None
    except Exception as exc:
        _trace(context)
        _say(f"unexpected {type(exc).__name__}: {exc}; `cache-admin --debug ...` shows where")
        raise typer.Exit(exits.ExitCode.ERROR) from exc


def _trace(context: typer.Context) -> None:
    if context.find_root().obj:
        traceback.print_exc()


def _print(report: _Report, text: Callable[[_Report], render.Renderables], json: bool) -> None:
    if json:
        typer.echo(report.model_dump_json(indent=2))
        return
    wide = _WIDE if not sys.stdout.isatty() and "COLUMNS" not in os.environ else None
    console = Console(width=wide, markup=False, highlight=False, emoji=False)
    for renderable in text(report):
        console.print(renderable)


def _exit_by(report: BaseModel) -> None:
    if code := exits.of_report(report):
        raise typer.Exit(code)


def _say(message: str) -> None:
    typer.echo(f"cache-admin: {render.plain(message)}", err=True)


def _one_of(option: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise typer.BadParameter(f"{value!r} is none of {', '.join(allowed)}", param_hint=option)
    return value
