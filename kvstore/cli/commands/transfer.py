"""export, import, warm: moving segments."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from kvstore import admin
from kvstore.cli import progress, render_transfers
from kvstore.cli.call import Call, say, verb
from schemas.settings import parse_bytes
from schemas.transfers import ExportReport, ImportReport, WarmReport

_PIPE = "-"

Namespaces = Annotated[
    list[str] | None,
    typer.Argument(metavar="NAMESPACE...", help="Starts of namespaces' ids. Default: all of them."),
]
MaxBytes = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="At most so much, such as 50GiB: the most recently used."),
]


def add_to(app: typer.Typer) -> None:
    """Register these commands."""
    verb(app.command())(export)
    verb(app.command("import"))(import_)
    verb(app.command())(warm)


def export(
    call: Call,
    namespaces: Namespaces = None,
    to: Annotated[
        str, typer.Option(metavar="FILE", help="Where the archive goes; - is stdout.", show_default=False)
    ] = "",
    segment: Annotated[
        list[str] | None,
        typer.Option(metavar="ID", help="Only this segment, by the start of its id; may be repeated."),
    ] = None,
    depth: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Only segments that begin within the first N blocks of their chains, where shared prompts "
            "are.",
        ),
    ] = None,
    max_bytes: MaxBytes = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite FILE.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be exported.")] = False,
) -> None:
    """Write segments into one archive: a tar of safetensors files, for `cache-admin import`.

    The most recently used come first. Everything is verified on the way; what is damaged or gone is left
    out and reported, and the exit code is 4, or 3 if nothing remains. FILE appears when it is complete. KV
    blocks tell what prompts said: keep an archive as you keep the prompts.
    """
    if not to and not dry_run:
        raise typer.BadParameter("--to FILE is missing (or - for stdout)")
    pipe = to == _PIPE
    if pipe and not dry_run and sys.stdout.isatty():
        raise typer.BadParameter("stdout is a terminal; write to a file or a pipe", param_hint="--to")
    limit = _size(max_bytes)
    with call.cache() as cache, progress.shown() as shows:
        if not pipe and not dry_run:
            admin.ArchiveFile.check(Path(to), overwrite=force)
        plan = admin.plan(cache, namespaces or [], segments=segment or [], depth=depth, max_bytes=limit)
        report = admin.export(
            cache,
            plan,
            sys.stdout.buffer if pipe else Path(to or _PIPE),
            overwrite=force,
            dry_run=dry_run,
            progress=shows,
        )
    call.print(report, render_transfers.export, to_stderr=pipe and not dry_run)
    _end(call, report)


def import_(
    call: Call,
    archive: Annotated[str, typer.Argument(metavar="FILE", help="An archive; - is stdin.")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only verify the archive; needs no cache.")
    ] = False,
) -> None:
    """Verify an archive and commit its segments, as a save does.

    What is stored already is skipped, so an import that was cut short is continued by running it again.
    What is damaged is refused and reported, and the exit code is 4, or 3 if nothing was good. An archive
    proves that its bytes are whole, not who wrote them: import only what comes from those who may write to
    this cache.
    """
    with _opened(archive) as (stream, total_bytes), progress.shown() as shows:
        if dry_run:
            report = admin.import_archive(
                stream, None, source=archive, total_bytes=total_bytes, progress=shows
            )
        else:
            with call.cache() as cache:
                report = admin.import_archive(
                    stream, cache.saving(), source=archive, total_bytes=total_bytes, progress=shows
                )
    call.print(report, render_transfers.imported)
    _end(call, report)


def warm(
    call: Call,
    namespaces: Namespaces = None,
    jobs: Annotated[int, typer.Option(min=1, max=64, metavar="N", help="Fetch so many side by side.")] = 4,
    max_bytes: MaxBytes = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be fetched.")] = False,
) -> None:
    """Fetch segments into this node's fast tier, the most recently used first.

    Stops when the tier is full. Run it where an engine runs, as the engine's user: before the engine
    starts, or beside it. What was fetched stays, also after Ctrl-C.
    """
    limit = _size(max_bytes)
    with call.cache() as cache, progress.shown() as shows:
        plan = admin.plan(cache, namespaces or [], max_bytes=admin.warming_bytes(cache.settings, limit))
        report = admin.warm(cache, plan, cache.fast, jobs=jobs, dry_run=dry_run, progress=shows)
    call.print(report, render_transfers.warm)
    _end(call, report)


@contextmanager
def _opened(archive: str) -> Iterator[tuple[BinaryIO, int | None]]:
    """The archive to read, and its size if that is known."""
    if archive == _PIPE:
        yield sys.stdin.buffer, None
        return
    path = Path(archive)
    try:
        file = path.open("rb")
    except OSError as exc:
        raise typer.BadParameter(f"can't read {path}: {exc.strerror}", param_hint="FILE") from exc
    with file:
        yield file, path.stat().st_size if path.is_file() else None


def _size(text: str | None) -> int | None:
    if text is None:
        return None
    try:
        nbytes = parse_bytes(text)
    except ValueError as exc:
        raise typer.BadParameter(f"{text!r} is {exc}", param_hint="--max-bytes") from exc
    assert isinstance(nbytes, int), "of a string it makes a number"
    return nbytes


def _end(call: Call, report: ExportReport | ImportReport | WarmReport) -> None:
    if report.problem:
        say(report.problem)
    call.exit_by(report)
