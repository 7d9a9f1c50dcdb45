"""status, ls, show, namespaces: what there is."""

from __future__ import annotations

import time
from typing import Annotated, cast

import typer

from kvstore import admin
from kvstore.cli import render
from kvstore.cli.call import Call, one_of, say, verb
from schemas.reports import SortKey


def add_to(app: typer.Typer) -> None:
    """Register these commands."""
    verb(app.command())(status)
    verb(app.command())(ls)
    verb(app.command())(show)
    below = typer.Typer(help="List namespaces: each holds what one set of interchangeable engines shares.")
    verb(below.callback(invoke_without_command=True))(namespaces)
    verb(below.command("diff"))(namespaces_diff)
    app.add_typer(below, name="namespaces")


def status(call: Call) -> None:
    """Show what is opened, whether it answers, and how much it holds."""
    with call.cache() as cache:
        report = admin.status(cache, time.time())
    call.print(report, render.status)
    if "unreachable" in (report.index.state, report.payloads.state):
        say("unreachable; `cache-admin doctor` says what to do")
    call.exit_by(report)


def ls(
    call: Call,
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
) -> None:
    """List segments: their size, age, last use and place in their chain."""
    key = cast("SortKey", one_of("--sort", sort, ("last-use", "created", "bytes")))
    with call.cache() as cache:
        report = admin.ls(cache, namespace, limit=limit, sort=key, now_s=time.time())
    call.print(report, render.ls)
    if report.found > len(report.segments):
        say(f"{len(report.segments):,} of {report.found:,} segments; --limit 0 lists all")


def show(
    call: Call,
    name: Annotated[
        str,
        typer.Argument(
            metavar="ID",
            help="A namespace's or segment's id or the start of one, or a payload's name or path.",
        ),
    ],
    verify: Annotated[bool, typer.Option("--verify", help="Read every slot and check its checksum.")] = False,
) -> None:
    """Show one namespace, or one segment and whether its payload agrees with the index.

    Exits with 3 if a payload is missing or damaged.
    """
    with call.cache() as cache:
        report = admin.show(cache, name, verify=verify, now_s=time.time())
    call.print(report, render.show)
    call.exit_by(report)


def namespaces(call: Call) -> None:
    """List namespaces: each holds what one set of interchangeable engines shares."""
    with call.cache() as cache:
        report = admin.namespaces(cache)
    call.print(report, render.namespaces)


def namespaces_diff(
    call: Call,
    a: Annotated[str, typer.Argument(metavar="A", help="A namespace's id, or the start of it.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Another one's.")],
) -> None:
    """Explain, field by field, why two namespaces don't share."""
    with call.cache() as cache:
        report = admin.diff(cache, a, b)
    call.print(report, render.diff)
