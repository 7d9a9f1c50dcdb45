"""What every command has in common: the options that say where the cache is, errors, printing.

A command is a function of a `Call` and of its own parameters; `verb` makes of it what typer registers,
with the common options behind its own:

    @verb(app.command())
    def ls(call: Call, limit: Annotated[int, typer.Option(...)] = 50) -> None:

stdout is data, stderr is everything else. `--json` prints the report's model as it is.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import typer
from pydantic import BaseModel
from rich.console import Console
from rich.text import Text

from kvstore.admin import Cache, Sources
from kvstore.cli import exits
from kvstore.cli.tables import Renderables, plain
from kvstore.errors import ConfigError, KVStoreError, PermissionDenied, TransientError
from schemas.settings import parse_bytes

_Report = TypeVar("_Report", bound=BaseModel)
#: Its parameters are read by reflection, here and in typer.
_Command = Callable[..., None]

#: Where there is no terminal nothing should be cut to the width of one.
_WIDE = 200

#: Where a setting comes from (kvstore.admin.cache says why in this order).
PRECEDENCE = (
    "`--settings FILE`, or else the file that `KVSTORE_SETTINGS` names",
    "`KVSTORE_<KEY>` in the environment, as for the connectors",
    "`--index` and `--payloads`",
)


def _common(
    settings: Annotated[
        str | None,
        typer.Option("--settings", metavar="FILE", help="YAML file with the whole settings tree."),
    ] = None,
    index: Annotated[
        str | None,
        typer.Option(
            "--index",
            metavar="URL",
            help="redis://HOST:PORT/DB, rediss://, redis+sentinel://HOST:PORT,HOST:PORT/MASTER/DB, unix:// "
            "or sqlite:///PATH. Default: SQLite inside the payload folder.",
        ),
    ] = None,
    payloads: Annotated[
        str | None,
        typer.Option(
            "--payloads",
            metavar="URL",
            help="Where the payloads are: file:///DIR or s3://BUCKET/PREFIX?endpoint=URL&region=NAME. Two "
            "tiers are described in a settings file.",
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """The signature that `verb` appends."""


@dataclass(frozen=True, slots=True)
class Call:
    """One run of a command."""

    sources: Sources
    json: bool
    #: The command below this one that was asked for, if any.
    subcommand: str | None

    def cache(self) -> Cache:
        """The cache that the options and the environment describe. Raises ConfigError."""
        return Cache(self.sources.settings())

    def print(
        self, report: _Report, text: Callable[[_Report], Renderables], *, to_stderr: bool = False
    ) -> None:
        """The report as JSON or text, on stdout, or on stderr where stdout has other data."""
        if self.json:
            typer.echo(report.model_dump_json(indent=2), err=to_stderr)
            return
        stream = sys.stderr if to_stderr else sys.stdout
        wide = _WIDE if not stream.isatty() and "COLUMNS" not in os.environ else None
        console = Console(width=wide, markup=False, highlight=False, emoji=False, stderr=to_stderr)
        for renderable in text(report):
            # A text's own wish, which a console forgets.
            whole = isinstance(renderable, Text) and bool(renderable.no_wrap)
            console.print(renderable, soft_wrap=whole)

    def line(self, report: _Report, text: Callable[[_Report], Renderables]) -> None:
        """One of many reports, written out at once: as JSON on one line, or as text."""
        if self.json:
            typer.echo(report.model_dump_json())
        else:
            self.print(report, text)
        sys.stdout.flush()

    def exit_by(self, report: BaseModel) -> None:
        """End with the report's exit code, unless all is well."""
        if code := exits.of_report(report):
            raise typer.Exit(code)


def verb(register: Callable[[_Command], object]) -> Callable[[_Command], _Command]:
    """Make a command of a function of a Call; `register` is typer's decorator."""

    def decorate(function: _Command) -> _Command:
        def run(context: typer.Context, **given: Any) -> None:
            where = {name: given.pop(name) for name in ("settings", "index", "payloads")}
            sources = Sources(where["settings"], where["index"], where["payloads"])
            call = Call(sources, given.pop("json"), context.invoked_subcommand)
            if call.subcommand is not None:
                # A group with a command of its own: what was said to it would be lost.
                if call.json or any(value is not None for value in (*where.values(), *given.values())):
                    raise typer.BadParameter(f"put the options after '{call.subcommand}'")
                return
            with _guarded(debug=bool(context.find_root().obj)):
                function(call, **given)

        # What typer reads. Keyword-only, because parameters without a default may stand behind others.
        parameters = [
            inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context),
            *list(inspect.signature(function, eval_str=True).parameters.values())[1:],
            *inspect.signature(_common, eval_str=True).parameters.values(),
        ]
        run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters]
        )
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        run.__name__, run.__doc__ = function.__name__, function.__doc__
        register(run)
        return function

    return decorate


@contextmanager
def _guarded(*, debug: bool) -> Iterator[None]:
    """The one place where errors become messages and exit codes."""
    try:
        yield
    except (typer.Exit, typer.BadParameter, BrokenPipeError):
        raise
    except KVStoreError as exc:
        _trace(debug)
        say(str(exc))
        if isinstance(exc, ConfigError):
            say("settings come from --settings, KVSTORE_* variables, --index and --payloads")
        elif isinstance(exc, (TransientError, PermissionDenied)):
            say("`cache-admin doctor` says what to do")
        raise typer.Exit(exits.of_error(exc)) from exc
    except KeyboardInterrupt:
        say("cancelled")
        raise typer.Exit(exits.ExitCode.CANCELLED) from None
    except Exception as exc:
        _trace(debug)
        say(f"unexpected {type(exc).__name__}: {exc}; `cache-admin --debug ...` shows where")
        raise typer.Exit(exits.ExitCode.ERROR) from exc


def _trace(debug: bool) -> None:
    if debug:
        traceback.print_exc()


def say(message: str) -> None:
    """A line to the person at the terminal."""
    typer.echo(f"cache-admin: {plain(message)}", err=True)


def one_of(option: str, value: str, allowed: tuple[str, ...]) -> str:
    """`value`, which must be one of those. Raises BadParameter."""
    if value not in allowed:
        raise typer.BadParameter(f"{value!r} is none of {', '.join(allowed)}", param_hint=option)
    return value


def byte_count(option: str, text: str) -> int:
    """A size such as 50GiB in bytes, at least 1. Raises BadParameter."""
    try:
        nbytes = parse_bytes(text)
    except ValueError as exc:
        raise typer.BadParameter(f"{text!r} is {exc}", param_hint=option) from exc
    assert isinstance(nbytes, int), "of a string it makes a number"
    if nbytes < 1:
        raise typer.BadParameter(f"{text!r} is less than one byte", param_hint=option)
    return nbytes


_TIME = re.compile(r"(\d{1,12}(?:\.\d{1,6})?)\s*([smhdw]?)")
_UNITS_S = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def seconds_of(option: str, text: str) -> float:
    """A time such as 90s, 12h or 7d in seconds. Raises BadParameter."""
    match = _TIME.fullmatch(text.strip())
    if match is None:
        raise typer.BadParameter(f"{text!r} is no time such as 90s, 30m, 12h or 7d", param_hint=option)
    return float(match[1]) * _UNITS_S[match[2]]
