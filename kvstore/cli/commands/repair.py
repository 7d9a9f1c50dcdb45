"""gc, fsck, rebuild: what is waste, what is wrong, and the index from the payloads."""

from __future__ import annotations

from typing import Annotated

import typer

from kvstore.admin.repair import fsck, gc, rebuild
from kvstore.admin.repair.check import Depth
from kvstore.admin.repair.reports import FsckReport, GcReport, RebuildReport
from kvstore.cli import progress
from kvstore.cli.call import Call
from kvstore.cli.exits import ENDS, ExitCode, of_report
from kvstore.cli.options import Apply, Namespaces, formerly, seconds_of
from kvstore.cli.text import repair as repair_text
from kvstore.cli.verbs import verb
from kvstore.rules.lateness import SETTLED_S

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
    examples=("cache-admin rebuild --dry-run", "cache-admin rebuild --jobs 32"),
    see_also=("fsck", "doctor"),
    exits=(ExitCode.PROBLEMS, ExitCode.PARTIAL),
)
def _rebuild(
    call: Call,
    namespaces: Namespaces = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be committed.")] = False,
    jobs: Jobs = 8,
) -> None:
    """Restore the index from the headers of the payloads.

    Commits every segment that has all its payloads and that the index does not know; what it knows is
    skipped, so a rebuild that was cut short is continued by running it again. Engines may go on working.
    Records, entries and usage come back as they were; last uses begin with the time of writing, pins and
    quotas are to be set again. What had been evicted or invalidated and was not deleted yet comes back too.
    """
    with call.cache() as cache, progress.shown() as shows:
        report = rebuild.rebuild(cache, namespaces or [], dry_run=dry_run, jobs=jobs, progress=shows)
    call.print(report, repair_text.rebuild)
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
def _of_rebuild(report: RebuildReport) -> ExitCode:
    listed = any(space.listed.segments for space in report.namespaces) and not report.dry_run
    left = (ExitCode.PARTIAL if listed else ExitCode.PROBLEMS) if report.left_out else ExitCode.OK
    return ENDS[report.ended] or left
