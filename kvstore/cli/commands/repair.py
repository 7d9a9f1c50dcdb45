"""gc, fsck, rebuild, reshard: what is waste, what is wrong, the index from the payloads, and in shards."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from kvstore.admin.repair import fsck, gc, rebuild, reshard
from kvstore.admin.repair.check import Depth
from kvstore.admin.repair.follow import PayloadFollower, metrics_of
from kvstore.admin.repair.reports import FsckReport, GcReport, RebuildReport, ReshardReport
from kvstore.admin.serve.exposed import exposed
from kvstore.cli import progress
from kvstore.cli.call import Call, remind, say
from kvstore.cli.exits import ENDS, ExitCode, of_report
from kvstore.cli.options import Apply, Namespaces, formerly, seconds_of
from kvstore.cli.running import PipedLines, logged, place, until_told
from kvstore.cli.text import repair as repair_text
from kvstore.cli.verbs import verb
from kvstore.rules.lateness import SETTLED_S

_PORT = 9466
#: Longest wait for a notification before it is seen that somebody has stopped the command, in seconds.
_LOOK_S = 0.2
Jobs = Annotated[int, typer.Option(min=1, max=64, metavar="N", help="Read so many payloads side by side.")]


@verb(
    "gc",
    section="Maintain",
    examples=("cache-admin gc", "cache-admin gc --apply --older-than 7d"),
    see_also=("du", "fsck", "serve"),
    exits=(ExitCode.PROBLEMS, ExitCode.PARTIAL),
)
def _gc(
    call: Call,
    apply: Apply = False,
    older_than: Annotated[
        str, typer.Option(metavar="AGE", help="Only what is at least so old: 30m, 1h, 7d.")
    ] = "1h",
    force: Annotated[
        bool, typer.Option("--force", help="Delete although the index looks as if it had been lost.")
    ] = False,
    delete: Annotated[bool, formerly("--delete")] = False,
) -> None:
    """Find what is stored and nobody needs, and delete it with --apply.

    That is: payloads that the index does not know, of writers that died before their commit; what such
    writers left beside the payloads; evicted segments whose grace time has passed; entries that lead to
    nothing. The accounts are counted anew. Objects that are not kvstore's are listed and left alone. After
    the index was lost, run `rebuild` first: gc would take everything for waste, and refuses.
    """
    older_than_s = seconds_of("--older-than", older_than)
    if older_than_s < SETTLED_S:
        raise typer.BadParameter(
            f"{older_than!r} is less than {SETTLED_S / 60:g}m: what is younger may still be committed",
            param_hint="--older-than",
        )
    apply = apply or delete
    if force and not apply:
        raise typer.BadParameter("--force goes with --apply", param_hint="--force")
    with call.cache() as cache, progress.shown() as shows:
        report = gc.gc(cache, delete=apply, older_than_s=older_than_s, force=force, progress=shows)
    call.print(report, repair_text.gc)
    call.end(report)


@verb(
    "fsck",
    section="Maintain",
    examples=("cache-admin fsck", "cache-admin fsck --read-data 5%", "cache-admin fsck --apply 8a74e0fa"),
    see_also=("gc", "rebuild", "show"),
    exits=(ExitCode.PROBLEMS, ExitCode.PARTIAL),
)
def _fsck(
    call: Call,
    namespaces: Namespaces = None,
    read_data: Annotated[
        str,
        typer.Option(metavar="PERCENT%", help="Read and verify every byte of so many of all segments: 5%."),
    ] = "0%",
    quick: Annotated[
        bool, typer.Option("--quick", help="Compare sizes alone: read no headers, look at no entries.")
    ] = False,
    apply: Apply = False,
    force: Annotated[
        bool, typer.Option("--force", help="Repair although most of the payloads are missing.")
    ] = False,
    jobs: Jobs = 8,
    repair: Annotated[bool, formerly("--repair")] = False,
) -> None:
    """Check that what the index names is there, is what it says, and is found.

    Reads the header of every segment, and holds every entry of the index against them; an engine may go on
    working meanwhile. With --apply, damaged segments are evicted, records and entries that disagree with
    valid payloads are written anew, segments that the index does not know are listed again, and the accounts
    are corrected; then everything is checked once more. Nothing valid is deleted, and nothing at all when a
    store does not answer: run it again then. `gc` looks for the reverse, payloads that nobody needs.
    """
    percent = _percent(read_data)
    if quick and percent:
        raise typer.BadParameter("--quick reads no data; leave one of the two out", param_hint="--quick")
    apply = apply or repair
    if force and not apply:
        raise typer.BadParameter("--force goes with --apply", param_hint="--force")
    with call.cache() as cache, progress.shown() as shows:
        report = fsck.fsck(
            cache,
            namespaces or [],
            depth=Depth(quick=quick, percent=percent, jobs=jobs),
            repair=apply,
            force=force,
            progress=shows,
        )
    call.print(report, repair_text.fsck)
    call.end(report)


@verb(
    "rebuild",
    section="Maintain",
    examples=(
        "cache-admin rebuild --dry-run",
        "cache-admin rebuild --jobs 32",
        "cache-admin rebuild --follow --every 60 --listen 0.0.0.0:9466",
    ),
    see_also=("fsck", "doctor"),
    exits=(ExitCode.PROBLEMS, ExitCode.PARTIAL),
)
def _rebuild(
    call: Call,
    namespaces: Namespaces = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be committed.")] = False,
    jobs: Jobs = 8,
    follow: Annotated[
        bool, typer.Option("--follow", help="Go on, and keep up with what others bring and delete.")
    ] = False,
    every: Annotated[
        float,
        typer.Option(min=0.1, metavar="SECONDS", help="(--follow) How often all payloads are listed."),
    ] = 60.0,
    notices: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="(--follow) Where the bucket's notifications come in, one JSON message a line; - is stdin.",
        ),
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="(--follow) Where /metrics and /healthz are served. Default: nowhere."
        ),
    ] = None,
) -> None:
    """Restore the index from the headers of the payloads.

    Commits every segment that has all its payloads and that the index does not know; what it knows is
    skipped, so a rebuild that was cut short is continued by running it again. Engines may go on working.
    Records, entries and usage come back as they were; last uses begin with the time of writing, pins and
    quotas are to be set again. What had made room for others and was not deleted yet comes back too; what was
    erased, invalidated, dropped or condemned by an audit does not.

    With --follow it goes on until it is stopped, for an index whose payloads come from elsewhere, such as the
    replication of a bucket from another region: it commits what has come, and evicts what is gone. It prints
    a report a turn.
    """
    if follow:
        if dry_run:
            raise typer.BadParameter("--follow commits; leave one of the two out", param_hint="--dry-run")
        _follow(call, namespaces or [], jobs, every, notices, listen)
        return
    if notices or listen:
        raise typer.BadParameter("goes with --follow", param_hint="--notices" if notices else "--listen")
    with call.cache() as cache, progress.shown() as shows:
        report = rebuild.rebuild(cache, namespaces or [], dry_run=dry_run, jobs=jobs, progress=shows)
    call.print(report, repair_text.rebuild)
    call.end(report)


def _follow(
    call: Call, namespaces: list[str], jobs: int, every: float, notices: Path | None, listen: str | None
) -> None:
    with call.cache() as cache, logged(), until_told() as stop, ExitStack() as open_:
        follower = PayloadFollower(cache, namespaces, jobs=jobs)
        if listen is not None:
            server = exposed(
                *place(listen, _PORT), lambda: metrics_of(follower.last), lambda: follower.is_turning(every)
            )
            open_.callback(server.close)
            say(f"metrics at {server.url}")
        lines = PipedLines(notices) if notices is not None else None
        while not stop.is_set():
            call.line(follower.turn(), repair_text.follow)
            end = time.monotonic() + every
            while not stop.is_set() and (left := end - time.monotonic()) > 0:
                if lines is None:
                    stop.wait(left)
                elif some := lines.take(min(left, _LOOK_S)):
                    call.line(follower.notice(some), repair_text.follow)


@verb(
    "reshard",
    section="Maintain",
    examples=("cache-admin reshard 8a74e0fa --shards 8", "cache-admin reshard 8a74e0fa --shards 8 --apply"),
    see_also=("rebuild", "namespaces", "status"),
    exits=(ExitCode.PARTIAL,),
)
def _reshard(
    call: Call,
    namespace: Annotated[str, typer.Argument(metavar="NAMESPACE", help="The start of a namespace's id.")],
    shards: Annotated[
        int, typer.Option(min=1, max=256, metavar="M", help="In how many shards it is to lie.")
    ],
    apply: Apply = False,
) -> None:
    """Bring a namespace into another number of shards, while engines use it.

    Its index is copied into new shards beside those that it has, which takes Redis's memory for both. Then
    one step turns to these, and half a minute later the old ones are dropped. Matches, loads and saves go on
    all the while. Pins, what is retained, times to live and what was erased come along, and last uses until
    the copy; sessions and the journal begin anew. What is saved in the last seconds before the turn is a
    miss later: `gc` finds its payload, and `rebuild` lists it. One that was cut short is run again, which
    begins the copy anew, or drops what is left; with the present number it is undone, as long as it has
    not turned. Of two at a time the one that began later goes on. Set redis.shards to the same number, for
    namespaces that come later.
    """
    with call.cache() as cache, progress.shown() as shows:
        report = reshard.reshard(cache, namespace, shards, apply=apply, progress=shows)
    call.print(report)
    remind(applied=apply, anything=report.before != report.after)
    call.end(report)


def _percent(text: str) -> float:
    try:
        percent = float(text.removesuffix("%"))
    except ValueError:
        percent = -1.0
    if not 0 <= percent <= 100:
        raise typer.BadParameter(f"{text!r} is no percentage from 0% to 100%", param_hint="--read-data")
    return percent


@of_report.register
def _of_gc(report: GcReport) -> ExitCode:
    return ENDS[report.ended] or (ExitCode.PARTIAL if report.problem else ExitCode.OK)


@of_report.register
def _of_fsck(report: FsckReport) -> ExitCode:
    left = report.found if report.remaining is None else report.remaining
    code = ENDS[report.ended] or (ExitCode.PROBLEMS if left else ExitCode.OK)
    return ExitCode.PARTIAL if code is ExitCode.PROBLEMS and report.mended else code


@of_report.register
def _of_reshard(report: ReshardReport) -> ExitCode:
    return ENDS[report.ended]


@of_report.register
def _of_rebuild(report: RebuildReport) -> ExitCode:
    listed = any(space.listed.segments for space in report.namespaces) and not report.dry_run
    left = (ExitCode.PARTIAL if listed else ExitCode.PROBLEMS) if report.left_out else ExitCode.OK
    return ENDS[report.ended] or left
