"""fsck, gc, rebuild, invalidate, drop: what is wrong or waste, and what goes as a whole."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from kvstore.admin.checking import Depth
from kvstore.admin.drop import drop as drop_
from kvstore.admin.drop import invalidate as invalidate_
from kvstore.admin.fsck import fsck as fsck_
from kvstore.admin.gc import LEAST_AGE_S
from kvstore.admin.gc import gc as gc_
from kvstore.admin.rebuild import rebuild as rebuild_
from kvstore.cli import progress, render_repairs
from kvstore.cli.call import Call, say, verb
from schemas.repairs import FsckReport, GcReport, RebuildReport

_AGE = re.compile(r"(\d+(?:\.\d+)?)(s|m|h|d)")
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}

Namespaces = Annotated[
    list[str] | None,
    typer.Argument(metavar="NAMESPACE...", help="Starts of namespaces' ids. Default: all of them."),
]
Namespace = Annotated[str, typer.Argument(metavar="NAMESPACE", help="The start of a namespace's id.")]
Jobs = Annotated[int, typer.Option(min=1, max=64, metavar="N", help="Read so many payloads side by side.")]
Apply = Annotated[bool, typer.Option("--apply", help="Do it. Default: only say what would be done.")]


def add_to(app: typer.Typer) -> None:
    """Register these commands."""
    verb(app.command())(fsck)
    verb(app.command())(gc)
    verb(app.command())(rebuild)
    verb(app.command())(invalidate)
    verb(app.command())(drop)


def fsck(
    call: Call,
    namespaces: Namespaces = None,
    read_data: Annotated[
        str,
        typer.Option(metavar="PERCENT%", help="Read and verify every byte of so many of all segments: 5%."),
    ] = "0%",
    quick: Annotated[
        bool, typer.Option("--quick", help="Compare sizes alone: read no headers, look at no entries.")
    ] = False,
    repair: Annotated[bool, typer.Option("--repair", help="Mend what can be mended.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Repair although most of the payloads are missing.")
    ] = False,
    jobs: Jobs = 8,
) -> None:
    """Check that what the index names is there, is what it says, and is found.

    Reads the header of every segment, and holds every entry of the index against them; an engine may go on
    working meanwhile. With --repair, damaged segments are evicted, records and entries that disagree with
    valid payloads are written anew, segments that the index does not know are listed again, and the accounts
    are corrected; then everything is checked once more. Nothing valid is deleted, and nothing at all when a
    store does not answer: run it again then. `gc` looks for the reverse, payloads that nobody needs.
    """
    percent = _percent(read_data)
    if quick and percent:
        raise typer.BadParameter("--quick reads no data; leave one of the two out", param_hint="--quick")
    if force and not repair:
        raise typer.BadParameter("--force goes with --repair", param_hint="--force")
    with call.cache() as cache, progress.shown() as shows:
        report = fsck_(
            cache,
            namespaces or [],
            depth=Depth(quick=quick, percent=percent, jobs=jobs),
            repair=repair,
            force=force,
            progress=shows,
        )
    call.print(report, render_repairs.fsck)
    _end(call, report)


def gc(
    call: Call,
    delete: Annotated[bool, typer.Option("--delete", help="Delete it. Default: only say how much.")] = False,
    older_than: Annotated[
        str, typer.Option(metavar="AGE", help="Only what is at least so old: 30m, 1h, 7d.")
    ] = "1h",
    force: Annotated[
        bool, typer.Option("--force", help="Delete although the index looks as if it had been lost.")
    ] = False,
) -> None:
    """Find what is stored and nobody needs, and delete it with --delete.

    That is: payloads that the index does not know, of writers that died before their commit; what such
    writers left beside the payloads; evicted segments whose grace time has passed; entries that lead to
    nothing. The accounts are counted anew. Objects that are not kvstore's are listed and left alone. After
    the index was lost, run `rebuild` first: gc would take everything for waste, and refuses.
    """
    older_than_s = _age("--older-than", older_than)
    if older_than_s < LEAST_AGE_S:
        raise typer.BadParameter(
            f"{older_than!r} is less than {LEAST_AGE_S / 60:g}m: what is younger may still be committed",
            param_hint="--older-than",
        )
    if force and not delete:
        raise typer.BadParameter("--force goes with --delete", param_hint="--force")
    with call.cache() as cache, progress.shown() as shows:
        report = gc_(cache, delete=delete, older_than_s=older_than_s, force=force, progress=shows)
    call.print(report, render_repairs.gc)
    _end(call, report)


def rebuild(
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
        report = rebuild_(cache, namespaces or [], dry_run=dry_run, jobs=jobs, progress=shows)
    call.print(report, render_repairs.rebuild)
    _end(call, report)


def invalidate(call: Call, namespace: Namespace, apply: Apply = False) -> None:
    """Forget what a namespace holds, from one moment to the next.

    For weights that changed under the same name, or bytes that are not to be trusted. Pinned segments go as
    well. Engines compute everything anew and save into the namespace as before; the old payloads are deleted
    after the grace time by whoever tends the cache: the janitor, an embedded store, or `gc --delete`.
    """
    with call.cache() as cache:
        report = invalidate_(cache, namespace, apply=apply)
    call.print(report, render_repairs.invalidate)


def drop(
    call: Call,
    namespace: Namespace,
    now: Annotated[
        bool,
        typer.Option("--now", help="Delete the payloads at once: for a namespace that no engine uses."),
    ] = False,
    apply: Apply = False,
) -> None:
    """Remove a namespace with all that it holds.

    What it holds can't be matched from then on. Its payloads are deleted when the grace time has passed, in
    which a load that is under way may still read them: by whoever tends the cache, or by running drop again,
    which then forgets the namespace as well. The janitor does that too, but only when no engine has
    registered the namespace for janitor.forget_after_s. An engine that still uses it registers it anew.
    """
    with call.cache() as cache, progress.shown() as shows:
        report = drop_(cache, namespace, apply=apply, now=now, progress=shows)
    call.print(report, render_repairs.drop)
    call.exit_by(report)


def _percent(text: str) -> float:
    try:
        percent = float(text.removesuffix("%"))
    except ValueError:
        percent = -1.0
    if not 0 <= percent <= 100:
        raise typer.BadParameter(f"{text!r} is no percentage from 0% to 100%", param_hint="--read-data")
    return percent


def _age(option: str, text: str) -> float:
    match = _AGE.fullmatch(text.strip().lower())
    if match is None:
        raise typer.BadParameter(f"{text!r} is no age such as 30m, 1h or 7d", param_hint=option)
    return float(match[1]) * _UNITS[match[2]]


def _end(call: Call, report: FsckReport | GcReport | RebuildReport) -> None:
    if report.problem:
        say(report.problem)
    if report.ended == "failed":
        say("`cache-admin doctor` says what to do")
    call.exit_by(report)
