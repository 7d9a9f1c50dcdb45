"""The command line as a whole: the options before a verb, and the verbs of kvstore.cli.commands."""

from __future__ import annotations

from typing import Annotated

import typer

from kvstore import __version__
from kvstore.cli import exits
from kvstore.cli.call import PRECEDENCE
from kvstore.cli.commands import (
    advise,
    archive,
    bench,
    curate,
    doctor,
    explain,
    feed,
    inspect,
    remove,
    repair,
    serve,
)
from kvstore.cli.verbs import add_to, verbs_of

#: In the order of the reference and of --help.
VERBS = verbs_of((inspect, archive, curate, remove, repair, serve, feed, explain, advise, doctor, bench))

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
    """Remembers what concerns every command."""
    context.obj = debug


add_to(app, VERBS)
