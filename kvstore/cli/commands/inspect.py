"""status, ls, show, namespaces, events: what there is, and what becomes of it."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Annotated, cast

import typer
from rich.console import Console, Group
from rich.live import Live

from kvstore.admin.inspect import events, namespaces, operations, show, stats, status
from kvstore.admin.inspect.reports import SegmentReport, SortKey, StatsReport, StatusReport
from kvstore.cli.call import Call, say
from kvstore.cli.exits import ExitCode, of_report
from kvstore.cli.options import Namespace, one_of
from kvstore.cli.tables import Renderables
from kvstore.cli.text import inspect as inspect_text
from kvstore.cli.verbs import verb
from kvstore.errors import KVStoreError


@verb(
    "status",
    section="See",
    examples=(
        "cache-admin status --payloads file:///var/lib/kvstore",
        "cache-admin status 8a74e0fa --hits",
        "cache-admin status --top 30 --json | jq -r '.top.hottest[].segment'",
        "cache-admin status --hits --watch --json | jq -c '[.at_s, .total.hit_ratio, .total.misses]'",
    ),
    see_also=("explain", "doctor", "quota", "advise"),
)
def _status(
    call: Call,
    namespace: Namespace = None,
    hits: Annotated[
        bool,
        typer.Option(
            "--hits",
            help="Also the hit ratio, and why blocks were missed or not stored, as engines have told the "
            "index.",
        ),
    ] = False,
    top: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1000,
            metavar="N",
            help="Also the N segments where most loads begin, and the N that would be evicted next.",
        ),
    ] = None,
    watch: Annotated[
        bool,
        typer.Option("--watch", help="With --hits: go on, and show only what was added since the last time."),
    ] = False,
    every: Annotated[
        float,
        typer.Option(min=0.1, max=86400, metavar="SECONDS", help="With --watch: from one look to the next."),
    ] = 5.0,
    count: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="With --watch: stop after so many looks.")
    ] = None,
) -> None:
    """Show what is opened, whether it answers, how much it holds of what it may, and hits and misses.

    Costs a few round trips, however much is stored. `opened` is when an engine opened the namespace last,
    `oldest` the last use of what would be evicted first, `cost` how long computing all of it again would
    take. With NAMESPACE the lines are of that one, the totals of all.

    --hits counts since the index was made; with --watch what was added since the last look, as a table that
    is renewed on a terminal, and with --json as one object per line. Ends with Ctrl-C.

    In --top a segment stands for the prefix that begins with it. `minutes` is in how many minutes a load
    began there, older ones counted for less. What would be evicted next is in that order, across namespaces;
    what was used in the last eviction.fresh_s is passed over while there is anything else.
    """
    if watch and (not hits or top is not None):
        raise typer.BadParameter("it goes with --hits, and without --top", param_hint="--watch")
    if count is not None and not watch:
        raise typer.BadParameter("it goes with --watch", param_hint="--count")
    with call.cache() as cache:
        if watch:
            _watch(call, stats.watch(cache, namespace, every_s=every, trouble=_trouble, rounds=count))
            return
        report = status.status(cache, time.time(), namespace, hits=hits, top=top)
    call.print(report, inspect_text.status)
    if "unreachable" in (report.index.state, report.payloads.state):
        say("unreachable; `cache-admin doctor` says what to do")
    call.end(report)


def _watch(call: Call, reports: Iterator[StatsReport]) -> None:
    if call.json or not sys.stdout.isatty():
        for report in reports:
            call.line(report, _paragraph)
        return
    with Live(console=Console(markup=False, highlight=False), auto_refresh=False) as table:
        for report in reports:
            table.update(Group(*inspect_text.stats(report)), refresh=True)


def _paragraph(report: StatsReport) -> Renderables:
    yield from inspect_text.stats(report)
    yield ""


def _trouble(exc: KVStoreError) -> None:
    say(f"{exc}; trying again")


@verb(
    "ls",
    section="See",
    examples=("cache-admin ls --sort bytes --limit 10", "cache-admin ls 8a74e0fa"),
    see_also=("show", "status", "fsck"),
)
def _ls(
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
        report = show.ls(cache, namespace, limit=limit, sort=key, now_s=time.time())
    call.print(report, inspect_text.ls)
    if report.found > len(report.segments):
        say(f"{len(report.segments):,} of {report.found:,} segments; --limit 0 lists all")


@verb(
    "show",
    section="See",
    examples=("cache-admin show 8a74e0fa", "cache-admin show cdf5c6c46cc04768 --verify"),
    see_also=("ls", "fsck", "namespaces diff"),
    exits=(ExitCode.PROBLEMS,),
)
def _show(
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
        report = show.show(cache, name, verify=verify, now_s=time.time())
    call.print(report, inspect_text.show)
    call.end(report)


@verb(
    "namespaces",
    section="See",
    examples=("cache-admin namespaces",),
    see_also=("namespaces diff", "status", "drop"),
)
def _namespaces(call: Call) -> None:
    """List namespaces: each holds what one set of interchangeable engines shares."""
    with call.cache() as cache:
        report = namespaces.namespaces(cache)
    call.print(report, inspect_text.namespaces)


@verb(
    "namespaces diff",
    section="See",
    examples=("cache-admin namespaces diff 8a74e0fa 340661d9",),
    see_also=("namespaces", "doctor", "explain"),
)
def _namespaces_diff(
    call: Call,
    a: Annotated[str, typer.Argument(metavar="A", help="A namespace's id, or the start of it.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Another one's.")],
) -> None:
    """Explain, field by field, why two namespaces don't share."""
    with call.cache() as cache:
        report = namespaces.diff(cache, a, b)
    call.print(report, inspect_text.diff)


@verb(
    "events",
    section="See",
    examples=(
        "cache-admin events --limit 20",
        "cache-admin events --follow --json | jq -c 'select(.op == \"evict\")'",
        "cache-admin events 8a74e0fa --after 1763756138211-0",
        "cache-admin events --operators --json | jq '.operations[] | select(.verb == \"drop\")'",
    ),
    see_also=("explain", "status"),
)
def _events(
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
    operators: Annotated[
        bool, typer.Option("--operators", help="What operators did: who, when, and what it was to do.")
    ] = False,
) -> None:
    """Show commits and evictions, oldest first: what changed what can be loaded.

    The index keeps the latest journal.events of each namespace. A line `gap` says that some were lost before
    the next one. With --follow and --json one object per line; kvstore.events is the same for programs.

    Every command that changes something writes a line before it begins, with the name in KVSTORE_OPERATOR or
    else USER@HOST, and changes nothing if it can't. The index keeps about 1000 of these lines, which
    --operators shows; events have the same name. It is a record for those who trust each other: who may write
    to the index may write any name.
    """
    if operators:
        if namespace is not None or after is not None or follow:
            raise typer.BadParameter("it goes with --limit alone", param_hint="--operators")
        with call.cache() as cache:
            done = operations.operations(cache, limit=50 if limit is None else limit, now_s=time.time())
        call.print(done, inspect_text.operations)
        return
    if after is not None and namespace is None:
        raise typer.BadParameter("positions are a namespace's own: give NAMESPACE too", param_hint="--after")
    if follow and limit is not None:
        raise typer.BadParameter("--follow shows all that comes", param_hint="--limit")
    with call.cache() as cache:
        if follow:
            for lines in events.follow_events(cache, namespace, after=after, every_s=every, trouble=_trouble):
                for line in lines:
                    call.line(line, inspect_text.event)
            return
        newest = (50 if after is None else None) if limit is None else limit or None
        report = events.events(cache, namespace, after=after, limit=newest, now_s=time.time())
    call.print(report, inspect_text.events)


@of_report.register
def _of_status(report: StatusReport) -> ExitCode:
    down = "unreachable" in (report.index.state, report.payloads.state)
    return ExitCode.UNREACHABLE if down else ExitCode.OK


@of_report.register
def _of_segment(report: SegmentReport) -> ExitCode:
    if report.damaged:
        return ExitCode.PROBLEMS
    return ExitCode.UNREACHABLE if report.index.state == "unreachable" else ExitCode.OK
