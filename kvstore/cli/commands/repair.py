"""fsck, rebuild: what is held, wrong and waste, and the index from the payloads and in other shards."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from kvstore.admin.repair import fsck, rebuild, reshard
from kvstore.admin.repair.check import Depth
from kvstore.admin.repair.follow import PayloadFollower, metrics_of
from kvstore.admin.repair.reports import FsckReport, RebuildReport, ReshardReport
from kvstore.admin.serve.exposed import exposed
from kvstore.cli import progress
from kvstore.cli.call import Call, remind, say
from kvstore.cli.exits import ENDS, ExitCode, of_report
from kvstore.cli.options import Apply, Namespaces, seconds_of
from kvstore.cli.running import PipedLines, logged, place, until_told
from kvstore.cli.text import repair as repair_text
from kvstore.cli.verbs import verb
from kvstore.rules.lateness import SETTLED_S

_PORT = 9466
#: Longest wait for a notification before it is seen that somebody has stopped the command, in seconds.
_LOOK_S = 0.2
Jobs = Annotated[int, typer.Option(min=1, max=64, metavar="N", help="Read so many payloads side by side.")]


@verb(
    "fsck",
    section="Repair",
    examples=(
        "cache-admin fsck",
        "cache-admin fsck --read-data 5%",
        "cache-admin fsck 8a74e0fa --apply",
        "cache-admin fsck --list --json | jq '.held.lines[] | select(.state == \"orphan\")'",
        "cache-admin fsck --list --apply --older-than 7d",
    ),
    see_also=("rebuild", "show", "status"),
    exits=(ExitCode.PROBLEMS, ExitCode.PARTIAL),
)
def _fsck(
    call: Call,
    namespaces: Namespaces = None,
    only_list: Annotated[
        bool,
        typer.Option("--list", help="Only list payloads, and delete what nobody needs: read and check none."),
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Compare sizes alone: read no headers, look at no entries.")
    ] = False,
    read_data: Annotated[
        str,
        typer.Option(metavar="PERCENT%", help="Read and verify every byte of so many of all segments: 5%."),
    ] = "0%",
    apply: Apply = False,
    older_than: Annotated[
        str | None,
        typer.Option(
            metavar="AGE", help="With --list: delete only what is at least so old: 30m, 7d. Default: 1h."
        ),
    ] = None,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Repair although most of the payloads are missing; with --list delete although the index "
            "looks lost.",
        ),
    ] = False,
    jobs: Jobs = 8,
) -> None:
    """Check the payloads that are held against what the index says.

    Lists the payload store and shows what it holds, by namespace and state: visible; incomplete (some rank
    has not committed); bygone (invalidated); trash (evicted, to be deleted); orphan (the index knows nothing
    of it; what is being saved this moment is one); unknown (the index can't say). Then reads the header of
    every segment, and holds every entry of the index against them; an engine may go on working meanwhile.
    --list leaves that out.

    With --apply, damaged segments are evicted, records and entries that disagree with valid payloads are
    written anew, segments that the index does not know are listed again, and the accounts are corrected;
    then everything is checked once more. No valid payload is deleted.

    With --list --apply it deletes what nobody needs: payloads that the index does not know, and it reads
    none of them; what writers that died left beside the payloads; evicted segments whose grace time has
    passed; entries that lead to nothing. Objects that are not kvstore's stay, and are named. After the index
    was lost, run `rebuild --apply` first: all would be waste, and fsck refuses to delete it.
    """
    percent = _percent(read_data)
    if only_list + quick + bool(percent) > 1:
        raise typer.BadParameter("got several of --list, --quick and --read-data: give one")
    if older_than is not None and not only_list:
        raise typer.BadParameter("goes with --list, which finds waste", param_hint="--older-than")
    older_than_s = seconds_of("--older-than", older_than or "1h")
    if older_than_s < SETTLED_S:
        raise typer.BadParameter(
            f"{older_than!r} is less than {SETTLED_S / 60:g}m: what is younger may still be committed",
            param_hint="--older-than",
        )
    if force and not apply:
        raise typer.BadParameter("--force goes with --apply", param_hint="--force")
    with call.cache() as cache, progress.shown() as shows:
        report = fsck.fsck(
            cache,
            namespaces or [],
            depth=Depth(only_list=only_list, quick=quick, percent=percent, jobs=jobs),
            apply=apply,
            older_than_s=older_than_s,
            force=force,
            progress=shows,
        )
    call.print(report, repair_text.fsck)
    call.end(report)


@verb(
    "rebuild",
    section="Repair",
    examples=(
        "cache-admin rebuild",
        "cache-admin rebuild --apply --jobs 32",
        "cache-admin rebuild --apply --follow --every 60 --listen 0.0.0.0:9466",
        "cache-admin rebuild 8a74e0fa --shards 8 --apply",
    ),
    see_also=("fsck", "doctor", "namespaces"),
    exits=(ExitCode.PROBLEMS, ExitCode.PARTIAL),
)
def _rebuild(
    call: Call,
    namespaces: Namespaces = None,
    apply: Apply = False,
    jobs: Jobs = 8,
    follow: Annotated[
        bool,
        typer.Option("--follow", help="With --apply: go on, and keep up with what others bring and delete."),
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
    shards: Annotated[
        int | None,
        typer.Option(
            min=1, max=256, metavar="N", help="Bring one namespace into so many shards, and do nothing else."
        ),
    ] = None,
) -> None:
    """Restore the index from the headers of the payloads.

    Commits every segment that has all its payloads and that the index does not know; what it knows is
    skipped, so a rebuild that was cut short is continued by running it again. Engines may go on working.
    Records, entries and usage come back as they were; last uses begin with the time of writing, pins and
    quotas are to be set again. What had made room for others and was not deleted yet comes back too; what was
    erased, invalidated, dropped or condemned by an audit does not. Without --apply it reads the headers and
    says what it would commit.

    With --follow it goes on until it is stopped, for an index whose payloads come from elsewhere, such as the
    replication of a bucket from another region: it commits what has come, and evicts what is gone. It prints
    a report a turn.

    With --shards it reads no payloads. The index of one namespace is copied into new shards beside those
    that it has, which takes Redis's memory for both. Then one step turns to these, and half a minute later
    the old ones are dropped. Matches, loads and saves go on all the while. Pins, what is retained, times to
    live and what was erased come along, and last uses until the copy; sessions and the journal begin anew.
    What is saved in the last seconds before the turn is a miss later: `fsck` finds its payload, and `rebuild`
    lists it. One that was cut short is run again, which begins the copy anew, or drops what is left; with the
    present number it is undone, as long as it has not turned. Of two at a time the one that began later goes
    on. Set redis.shards to the same number, for namespaces that come later.
    """
    if shards is not None:
        if follow:
            raise typer.BadParameter("leave one of --follow and --shards out", param_hint="--follow")
        if not namespaces or len(namespaces) > 1:
            raise typer.BadParameter("takes one NAMESPACE", param_hint="--shards")
        _reshard(call, namespaces[0], shards, apply=apply)
        return
    if follow:
        if not apply:
            raise typer.BadParameter("it commits what comes: add --apply", param_hint="--follow")
        _follow(call, namespaces or [], jobs, every, notices, listen)
        return
    if notices or listen:
        raise typer.BadParameter("goes with --follow", param_hint="--notices" if notices else "--listen")
    with call.cache() as cache, progress.shown() as shows:
        report = rebuild.rebuild(cache, namespaces or [], apply=apply, jobs=jobs, progress=shows)
    call.print(report, repair_text.rebuild)
    remind(applied=apply, anything=any(space.listed.segments for space in report.namespaces))
    call.end(report)


def _reshard(call: Call, namespace: str, shards: int, *, apply: bool) -> None:
    with call.cache() as cache, progress.shown() as shows:
        report = reshard.reshard(cache, namespace, shards, apply=apply, progress=shows)
    call.print(report)
    remind(applied=apply, anything=report.before != report.after)
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


def _percent(text: str) -> float:
    try:
        percent = float(text.removesuffix("%"))
    except ValueError:
        percent = -1.0
    if not 0 <= percent <= 100:
        raise typer.BadParameter(f"{text!r} is no percentage from 0% to 100%", param_hint="--read-data")
    return percent


@of_report.register
def _of_fsck(report: FsckReport) -> ExitCode:
    left = report.found if report.remaining is None else report.remaining
    code = ENDS[report.ended] or (ExitCode.PROBLEMS if left else ExitCode.OK)
    is_partial = report.mended if left else report.problem
    return ExitCode.PARTIAL if is_partial and report.ended == "complete" else code


@of_report.register
def _of_reshard(report: ReshardReport) -> ExitCode:
    return ENDS[report.ended]


@of_report.register
def _of_rebuild(report: RebuildReport) -> ExitCode:
    listed = any(space.listed.segments for space in report.namespaces) and report.applied
    left = (ExitCode.PARTIAL if listed else ExitCode.PROBLEMS) if report.left_out else ExitCode.OK
    return ENDS[report.ended] or left
