"""export, import: segments in one file."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from kvstore.admin.archive import export, import_
from kvstore.admin.archive.reports import ExportReport, ImportReport
from kvstore.admin.archive.wanted import Wanted
from kvstore.admin.curate.plan import plan
from kvstore.admin.curate.reports import WarmReport
from kvstore.cli import progress
from kvstore.cli.call import Call
from kvstore.cli.exits import ENDS, ExitCode, of_report
from kvstore.cli.options import MaxBytes, Namespaces, byte_count
from kvstore.cli.text import archive as archive_text
from kvstore.cli.verbs import verb
from kvstore.errors import ConfigError
from kvstore.format.keyring import NO_KEYS
from kvstore.keyfiles import open_keyring
from kvstore.rules.text import readable
from schemas.settings import Settings

_PIPE = "-"


@verb(
    "export",
    section="Move",
    examples=(
        "cache-admin export --to hot.tar --max-bytes 50GiB",
        "cache-admin export 8a74e0fa --depth 64 --to prompts.tar",
        "cache-admin export --to - | ssh other-site cache-admin import -",
    ),
    see_also=("import", "ls"),
    exits=(ExitCode.PROBLEMS, ExitCode.PARTIAL),
)
def _export(
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
    limit = None if max_bytes is None else byte_count("--max-bytes", max_bytes)
    with call.cache() as cache, progress.shown() as shows:
        if not pipe and not dry_run:
            export.ArchiveFile.check(Path(to), overwrite=force)
        planned = plan(cache, namespaces or [], segments=segment or [], depth=depth, max_bytes=limit)
        report = export.export(
            cache,
            planned,
            sys.stdout.buffer if pipe else Path(to or _PIPE),
            overwrite=force,
            dry_run=dry_run,
            progress=shows,
        )
    call.print(report, archive_text.export, to_stderr=pipe and not dry_run)
    call.end(report)


@verb(
    "import",
    section="Move",
    examples=(
        "cache-admin import hot.tar --dry-run",
        "cache-admin import hot.tar",
        "cache-admin import hot.tar --new-namespaces",
        "cache-admin import hot.tar --tenant search",
    ),
    see_also=("export", "fsck"),
    exits=(ExitCode.PROBLEMS, ExitCode.PARTIAL),
)
def _import(
    call: Call,
    archive: Annotated[str, typer.Argument(metavar="FILE", help="An archive; - is stdin.")],
    namespaces: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAMESPACE...",
            help="Starts of the ids of namespaces that may come in. Default: those that the store knows.",
        ),
    ] = None,
    tenant: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Only this tenant's namespaces; may be repeated."),
    ] = None,
    new_namespaces: Annotated[
        bool,
        typer.Option(
            "--new-namespaces", help="Let in namespaces that the store doesn't know: to fill an empty store."
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only verify the archive; needs no cache.")
    ] = False,
) -> None:
    """Verify an archive and commit its segments, as a save does.

    Namespaces that this store doesn't know are refused, unless they or their tenants are named, or
    --new-namespaces lets all of them in. What is stored already is skipped, so an import that was cut short
    is continued by running it again. What is damaged is refused and reported, and the exit code is 4, or 3 if
    nothing was good. An archive proves that its bytes are whole. Who wrote them only signatures prove:
    without `signing.keys` import only what comes from those who may write to this cache.
    """
    prefixes = tuple(prefix.lower() for prefix in namespaces or [])
    wanted = Wanted(prefixes, frozenset(tenant or []), new=new_namespaces)
    with _opened(archive) as (stream, total_bytes), progress.shown() as shows:
        if dry_run:
            settings = _settings(call)
            report = import_.import_archive(
                stream,
                None,
                source=archive,
                wanted=wanted,
                settings=settings,
                keyring=open_keyring(settings.signing) if settings else NO_KEYS,
                total_bytes=total_bytes,
                progress=shows,
            )
        else:
            with call.cache() as cache:
                cache.record("import", archive)
                report = import_.import_archive(
                    stream,
                    cache.saving(),
                    source=archive,
                    wanted=wanted,
                    total_bytes=total_bytes,
                    progress=shows,
                )
    call.print(report, archive_text.import_)
    call.end(report)


def _settings(call: Call) -> Settings | None:
    """Returns the settings that a dry run goes by; None where there are none, as it needs no cache."""
    try:
        return call.sources.settings()
    except ConfigError:
        return None


@contextmanager
def _opened(archive: str) -> Iterator[tuple[BinaryIO, int | None]]:
    """Yields the archive to read, and its size if that is known."""
    if archive == _PIPE:
        yield sys.stdin.buffer, None
        return
    path = Path(archive)
    try:
        file = path.open("rb")
    except OSError as exc:
        raise typer.BadParameter(f"can't read {readable(path)}: {exc.strerror}", param_hint="FILE") from exc
    with file:
        yield file, path.stat().st_size if path.is_file() else None


def of_moved(report: ExportReport | ImportReport | WarmReport, done: int) -> ExitCode:
    """Returns partial where something was left out, or cut short, and anything at all was done."""
    code = ENDS[report.ended]
    if report.left_out and code is ExitCode.OK:
        code = ExitCode.PROBLEMS
    return ExitCode.PARTIAL if code is ExitCode.PROBLEMS and done and not report.dry_run else code


@of_report.register
def _of_export(report: ExportReport) -> ExitCode:
    return of_moved(report, report.exported.segments)


@of_report.register
def _of_import(report: ImportReport) -> ExitCode:
    return of_moved(report, report.imported.segments + report.present.segments)
