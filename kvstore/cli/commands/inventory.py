"""status, stats, top, ls, show, du, events, namespaces: what there is, and what becomes of it."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Annotated, cast

import typer
from rich.console import Console, Group
from rich.live import Live

from kvstore import admin
from kvstore.cli import progress, render, render_usage
from kvstore.cli.call import Call, one_of, say, verb
from kvstore.cli.tables import Renderables
from kvstore.errors import KVStoreError
from schemas.reports import SortKey
from schemas.usage import StatsReport

Namespace = Annotated[
    str | None,
    typer.Argument(metavar="NAMESPACE", help="Start of a namespace's id. Default: all of them."),
]


def add_to(app: typer.Typer) -> None:
    """Register these commands."""
    for command in (status, stats, top, ls, show, du, events):
        verb(app.command())(command)
    below = typer.Typer(help="List namespaces: each holds what one set of interchangeable engines shares.")
    verb(below.callback(invoke_without_command=True))(namespaces)
    verb(below.command("diff"))(namespaces_diff)
    app.add_typer(below, name="namespaces")


def status(call: Call) -> None:
    """Show what is opened, whether it answers, and how much it holds of what it may.

    Costs a few round trips, however much is stored. `opened` is when an engine opened the namespace last,
    `oldest` the last use of what would be evicted first, `cost` how long computing all of it again would
    take.
    """
    with call.cache() as cache:
        report = admin.status(cache, time.time())
    call.print(report, render.status)
    if "unreachable" in (report.index.state, report.payloads.state):
        say("unreachable; `cache-admin doctor` says what to do")
    call.exit_by(report)


def stats(
    call: Call,
    namespace: Namespace = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Go on, and show what was added since the last time.")
    ] = False,
    every: Annotated[
        float,
        typer.Option(min=0.1, max=86400, metavar="SECONDS", help="With --watch: from one look to the next."),
    ] = 5.0,
    count: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="With --watch: stop after so many looks.")
    ] = None,
) -> None:
    """Show the hit ratio, and why blocks were missed or not stored, as engines have told the index.

    Totals since the index was made; with --watch what was added since the last look, as a table that is
    renewed on a terminal, and with --json as one object per line. Ends with Ctrl-C.
    """
    if count is not None and not watch:
        raise typer.BadParameter("it goes with --watch", param_hint="--count")
    with call.cache() as cache:
        if watch:
            _watch(call, admin.watch(cache, namespace, every_s=every, trouble=_trouble, rounds=count))
        else:
            call.print(admin.stats(cache, namespace, time.time()), render_usage.stats)


def _watch(call: Call, reports: Iterator[StatsReport]) -> None:
    if call.json or not sys.stdout.isatty():
        for report in reports:
            call.line(report, _paragraph)
        return
    with Live(console=Console(markup=False, highlight=False), auto_refresh=False) as table:
        for report in reports:
            table.update(Group(*render_usage.stats(report)), refresh=True)


def _paragraph(report: StatsReport) -> Renderables:
    yield from render_usage.stats(report)
    yield ""


def _trouble(exc: KVStoreError) -> None:
    say(f"{exc}; trying again")


def top(
    call: Call,
    namespace: Namespace = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, metavar="N", help="Show so many of either.")] = 10,
) -> None:
    """Show where most loads begin, and what would be evicted next.

    A segment stands for the prefix that begins with it. `minutes` is in how many minutes a load began there,
    older ones counted for less. What would be evicted next is in that order, across namespaces; what was
    used in the last eviction.fresh_s is passed over while there is anything else.
    """
    with call.cache() as cache:
        report = admin.top(cache, namespace, limit=limit, now_s=time.time())
    call.print(report, render_usage.top)


def ls(
    call: Call,
    namespace: Namespace = None,
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


def du(call: Call, namespace: Namespace = None) -> None:
    """Show what the payload store holds, by listing it, beside what the index says.

    By namespace and state: visible; incomplete (some rank has not committed); bygone (invalidated); trash
    (evicted, to be deleted); orphan (the index knows nothing of it; what is being saved this moment is one);
    foreign (no payload of this store). A listing of a large bucket takes a while and costs requests.
    """
    with call.cache() as cache, progress.shown() as shows:
        report = admin.du(cache, namespace, time.time(), shows)
    call.print(report, render_usage.du)


def events(
    call: Call,
    namespace: Namespace = None,
    after: Annotated[
        str | None,
        typer.Option(metavar="POSITION", help="Only what came after this position; needs NAMESPACE."),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="The newest so many; 0 is all. Default: 50, with --after all."),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Go on with what comes, until Ctrl-C.")] = False,
    every: Annotated[
        float, typer.Option(min=0.05, max=3600, metavar="SECONDS", help="With --follow: look so often.")
    ] = 1.0,
) -> None:
    """Show commits and evictions, oldest first: what changed what can be loaded.

    The index keeps the latest journal.events of each namespace. A line `gap` says that some were lost before
    the next one. With --follow and --json one object per line; kvstore.events is the same for programs.
    """
    if after is not None and namespace is None:
        raise typer.BadParameter("positions are a namespace's own: give NAMESPACE too", param_hint="--after")
    if follow and limit is not None:
        raise typer.BadParameter("--follow shows all that comes", param_hint="--limit")
    with call.cache() as cache:
        if follow:
            for lines in admin.follow_events(cache, namespace, after=after, every_s=every, trouble=_trouble):
                for line in lines:
                    call.line(line, render_usage.event)
            return
        newest = (50 if after is None else None) if limit is None else limit or None
        report = admin.events(cache, namespace, after=after, limit=newest, now_s=time.time())
    call.print(report, render_usage.events)


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
