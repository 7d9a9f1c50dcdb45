"""One run of a command: the cache that it is about, what it prints, and how it ends.

stdout is data, stderr is everything else. `--json` prints the report's model as it is.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import typer
from pydantic import BaseModel
from rich.console import Console
from rich.text import Text

from kvstore.admin.backends import Cache, Sources
from kvstore.admin.operators import operator
from kvstore.cli import exits
from kvstore.cli.shown import shown
from kvstore.cli.tables import Renderables, plain
from kvstore.errors import ConfigError, KVStoreError, PermissionDenied, TransientError

_Report = TypeVar("_Report", bound=BaseModel)

#: Where there is no terminal nothing should be cut to the width of one.
_WIDE = 200

#: What to do where a backend failed.
_ASK_DOCTOR = "`cache-admin doctor` says what to do"

#: Where a setting comes from (kvstore.admin.backends says why in this order).
PRECEDENCE = (
    "`--settings FILE`, or else the file that `KVSTORE_SETTINGS` names",
    "`KVSTORE_<KEY>` in the environment, as for the connectors",
    "`--index` and `--payloads`",
)


@dataclass(frozen=True, slots=True)
class Call:
    """What a command is given: one run of it."""

    sources: Sources
    json: bool
    #: The command below this one that was asked for, if any.
    subcommand: str | None

    def cache(self, by: str | None = None) -> Cache:
        """Returns the cache that the options and the environment describe. Raises ConfigError.

        `by` names whoever changes something; None is the operator.
        """
        return Cache(self.sources.settings(), operator(self.sources.environ) if by is None else by)

    def print(
        self, report: _Report, text: Callable[[_Report], Renderables] = shown, *, to_stderr: bool = False
    ) -> None:
        """Prints the report as JSON or text, on stdout, or on stderr where stdout has other data."""
        if self.json:
            typer.echo(_json(report, indent=2), err=to_stderr)
            return
        stream = sys.stderr if to_stderr else sys.stdout
        wide = _WIDE if not stream.isatty() and "COLUMNS" not in os.environ else None
        console = Console(width=wide, markup=False, highlight=False, emoji=False, stderr=to_stderr)
        for renderable in text(report):
            # A text's own wish, which a console forgets.
            whole = isinstance(renderable, Text) and bool(renderable.no_wrap)
            console.print(renderable, soft_wrap=whole)

    def line(self, report: _Report, text: Callable[[_Report], Renderables]) -> None:
        """Writes out one of many reports at once: as JSON on one line, or as text."""
        if self.json:
            typer.echo(_json(report))
        else:
            self.print(report, text)
        sys.stdout.flush()

    def end(self, report: BaseModel) -> None:
        """Says what went wrong, where the report has that in words, and ends with its exit code, if not 0."""
        if problem := getattr(report, "problem", ""):
            say(problem)
        if getattr(report, "ended", "") == "failed":
            say(_ASK_DOCTOR)
        if code := exits.of_report(report):
            raise typer.Exit(code)


@contextmanager
def guarded(*, debug: bool) -> Iterator[None]:
    """Turns errors into messages and exit codes: the one place that does."""
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
            say(_ASK_DOCTOR)
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
    """Says a line to the person at the terminal."""
    typer.echo(f"cache-admin: {plain(message)}", err=True)


def remind(*, applied: bool, anything: bool) -> None:
    """Says that a verb has only planned, if there was something to do."""
    if not applied and anything:
        say("nothing was changed; --apply does it")


def _json(report: BaseModel, indent: int | None = None) -> str:
    """Returns a report as JSON in ASCII: somebody looks at it in a terminal, and names are strangers'."""
    # DEL is the one control character that JSON lets stand.
    return report.model_dump_json(indent=indent, ensure_ascii=True).replace("\x7f", "\\u007f")
