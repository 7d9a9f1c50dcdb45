"""export, import: segments in one file."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from kvstore.admin.archive import asked, export, import_, place
from kvstore.admin.archive.prompts import read_prompts
from kvstore.admin.archive.reports import ExportReport, ImportReport
from kvstore.admin.archive.wanted import Wanted
from kvstore.admin.backends import Cache
from kvstore.admin.curate.plan import plan
from kvstore.admin.curate.reports import WarmReport
from kvstore.cli import progress
from kvstore.cli.call import Call
from kvstore.cli.exits import ENDS, ExitCode, of_report
from kvstore.cli.options import MaxBytes, Namespaces, byte_count
from kvstore.cli.text import archive as archive_text
from kvstore.cli.verbs import verb
from schemas.base import redact

_PIPE = "-"
_NOWHERE = "memory://nowhere"


@verb(
    "export",
    section="Move",
    examples=(
        "cache-admin export --to hot.tar --max-bytes 50GiB",
        "cache-admin export 8a74e0fa --depth 64 --to prompts.tar",
        "cache-admin export --prompts prompts.json --engine http://localhost:8000 --to base.tar",
        "cache-admin export --to - | ssh other-site cache-admin import -",
    ),
    see_also=("import", "ls"),
    exits=(ExitCode.PROBLEMS, ExitCode.PARTIAL),
)
def _export(
    call: Call,
    namespaces: Namespaces = None,
    to: Annotated[
        str,
        typer.Option(
            metavar="FILE",
            help="Where the archive goes: a path, or s3://BUCKET/FOLDER/NAME.tar?endpoint=URL; - is stdout.",
            show_default=False,
        ),
    ] = "",
    prompts: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="What engines would load of the prompts that this JSON file names: --engine, which saves "
            "into this cache, computes them first.",
        ),
    ] = None,
    engine: Annotated[
        str, typer.Option(metavar="URL", help="With --prompts: the engine that computes them.")
    ] = "http://localhost:8000",
    seed: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="With --prompts: the engine's PYTHONHASHSEED, if it has one."),
    ] = None,
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
    if prompts is not None and (segment or depth or max_bytes or dry_run):
        raise typer.BadParameter("--prompts goes without --segment, --depth, --max-bytes and --dry-run")
    pipe = to == _PIPE
    if pipe and not dry_run and sys.stdout.isatty():
        raise typer.BadParameter("stdout is a terminal; write to a file or a pipe", param_hint="--to")
    limit = None if max_bytes is None else byte_count("--max-bytes", max_bytes)
    made = None if prompts is None else read_prompts(Path(prompts))
    with call.cache() as cache, progress.shown() as shows, _target(to, cache, force, dry_run) as target:
        if made is not None:
            pack, planned = asked.ask(cache, engine, made, namespaces or [], seed=seed, progress=shows)
        else:
            pack = None
            planned = plan(cache, namespaces or [], segments=segment or [], depth=depth, max_bytes=limit)
        report = export.export(
            cache, planned, target, overwrite=force, dry_run=dry_run, progress=shows, pack=pack
        )
    report = report.model_copy(update={"to": redact(to or _PIPE)})
    call.print(report, archive_text.export, to_stderr=pipe and not dry_run)
    call.end(report)


def _target(to: str, cache: Cache, force: bool, dry_run: bool) -> AbstractContextManager[Path | BinaryIO]:
    """Returns what the archive is written to."""
    if to == _PIPE:
        return nullcontext(sys.stdout.buffer)
    if dry_run:
        return nullcontext(Path(to))
    return place.writable(to, cache.settings, overwrite=force)


@verb(
    "import",
    section="Move",
    examples=(
        "cache-admin import hot.tar --dry-run",
        "cache-admin import hot.tar",
        "cache-admin import hot.tar --new-namespaces",
        "cache-admin import hot.tar --tenant search",
        "cache-admin import s3://my-bucket/packs/base.tar --weights 9f86d081",
    ),
    see_also=("export", "fsck"),
    exits=(ExitCode.PROBLEMS, ExitCode.PARTIAL),
)
def _import(
    call: Call,
    archive: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="An archive: a path, or s3://BUCKET/FOLDER/NAME.tar?endpoint=URL; - is stdin.",
        ),
    ],
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
    weights: Annotated[
        str,
        typer.Option(
            metavar="DIGEST", help="Only namespaces of these weights, by the start of their digest."
        ),
    ] = "",
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

    Namespaces that this store doesn't know are refused, unless they, their tenants or their weights are
    named, or --new-namespaces lets all of them in. An archive of prompts (`export --prompts`) is let in, but
    not if engines here have its model with other weights, or its weights as another model or tenant. What is
    stored already is skipped, so an import that was cut short is continued by running it again. What is
    damaged is refused and reported, and the exit code is 4, or 3 if nothing was good; with prompts 4 if
    another try brings the rest, and 3 if that can't. An archive proves that its bytes are whole. Who wrote
    them only signatures prove: without `signing.keys` import only what comes from those who may write to this
    cache.
    """
    prefixes = tuple(prefix.lower() for prefix in namespaces or [])
    wanted = Wanted(prefixes, frozenset(tenant or []), weights, new=new_namespaces)
    # A dry run has settings as well, such as those of the keys and of the bucket; it opens no cache.
    sources = replace(call.sources, index=_NOWHERE, payloads=_NOWHERE) if dry_run else call.sources
    with replace(call, sources=sources).cache() as cache, progress.shown() as shows:
        from_pipe = nullcontext((sys.stdin.buffer, None))
        with from_pipe if archive == _PIPE else place.opened(archive, cache.settings) as (stream, nbytes):
            report = import_.import_archive(
                stream,
                None if dry_run else cache,
                source=redact(archive),
                wanted=wanted,
                settings=cache.settings,
                keyring=cache.keyring,
                total_bytes=nbytes,
                progress=shows,
            )
    call.print(report, archive_text.import_)
    call.end(report)


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
    code = ENDS[report.ended]
    if report.pack is None:
        return of_moved(report, report.imported.segments + report.present.segments)
    if code is not ExitCode.OK or report.pack.whole:
        return code
    # Whoever tries again after 4, as the chart does, brings what was being saved, or deleted, just now.
    passes = report.left_out == report.later > 0 and report.found_segments == report.announced_segments
    return ExitCode.PARTIAL if passes and not report.unwanted else ExitCode.PROBLEMS
