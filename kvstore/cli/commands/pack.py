"""pack build, inspect, verify, apply: prompts that are stored before anybody asks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from kvstore.admin.pack import build, pack
from kvstore.admin.pack.prompts import read_prompts
from kvstore.admin.pack.reports import PackApplyReport, PackBuildReport, PackVerifyReport
from kvstore.cli import progress
from kvstore.cli.call import Call
from kvstore.cli.commands.archive import of_moved
from kvstore.cli.exits import ENDS, ExitCode, of_report
from kvstore.cli.text import pack as pack_text
from kvstore.cli.verbs import verb
from kvstore.keyfiles import open_keyring
from schemas.settings import Settings

Where = Annotated[
    str, typer.Argument(metavar="PACK", help="A pack: a path, or s3://BUCKET/FOLDER/NAME.tar?endpoint=URL.")
]


@verb(
    "pack build",
    section="Move",
    examples=(
        "cache-admin pack build prompts.yaml --to base.tar -- my-org/my-model --tensor-parallel-size 2",
        "cache-admin pack build prompts.yaml --to s3://my-bucket/packs/base.tar -- my-org/my-model",
    ),
    see_also=("pack apply", "export"),
    exits=(ExitCode.PROBLEMS,),
)
def _build(
    call: Call,
    prompts: Annotated[
        str, typer.Argument(metavar="PROMPTS", help="A file that names prompts, YAML or JSON.")
    ],
    engine: Annotated[
        list[str],
        typer.Argument(
            metavar="ENGINE...",
            help="What follows `vllm serve` where the engines are started: the model, and the engine's "
            "arguments.",
        ),
    ],
    to: Annotated[
        str,
        typer.Option(metavar="PACK", help="Where the pack goes: a path, or s3://BUCKET/FOLDER/NAME.tar."),
    ],
    force: Annotated[bool, typer.Option("--force", help="Overwrite PACK.")] = False,
) -> None:
    """Compute prompts with an engine here, and write a pack of them.

    Run it with the engines' image, on their kind of machine, with their words behind `--`, less those that
    are the server's: what an engine loads depends on its weights, release, layout and dtype, as in a cache.
    Needs no cache and no server. Of the settings count identity, segment, kv and signing, which signs the
    pack, and s3. KV blocks tell what prompts said: keep a pack as you keep the prompts.
    """
    made = read_prompts(Path(prompts))
    with progress.shown() as shows:
        report = build.build(made, engine, _settings(call), to, overwrite=force, progress=shows)
    call.print(report, pack_text.build)
    call.end(report)


@verb(
    "pack inspect",
    section="Move",
    examples=("cache-admin pack inspect base.tar", "cache-admin pack inspect base.tar --json"),
    see_also=("pack verify",),
)
def _inspect(call: Call, pack_: Where) -> None:
    """Show what a pack says of itself: model, weights, engine, prompts.

    Verifies nothing, and needs no cache.
    """
    call.print(pack.inspect(pack_, _settings(call)), pack_text.inspect)


@verb(
    "pack verify",
    section="Move",
    examples=("cache-admin pack verify base.tar",),
    see_also=("pack apply",),
    exits=(ExitCode.PROBLEMS,),
)
def _verify(call: Call, pack_: Where) -> None:
    """Read a pack to its end: whether all of it is there, good to the last byte, and signed. Needs no cache.

    Without `signing.keys` a signature is not looked at, and without one anybody may have made the pack.
    """
    settings = _settings(call)
    with progress.shown() as shows:
        report = pack.verify(pack_, settings, open_keyring(settings.signing), shows)
    call.print(report, pack_text.verify)
    call.end(report)


@verb(
    "pack apply",
    section="Move",
    examples=(
        "cache-admin pack apply s3://my-bucket/packs/base.tar",
        "cache-admin pack apply base.tar --model my-org/my-model --weights 9f86d081",
    ),
    see_also=("pack build", "pack verify", "import"),
    exits=(ExitCode.PROBLEMS, ExitCode.PARTIAL),
)
def _apply(
    call: Call,
    pack_: Where,
    model: Annotated[str, typer.Option(metavar="NAME", help="Refuse it if it is of another model.")] = "",
    weights: Annotated[
        str,
        typer.Option(
            metavar="DIGEST",
            help="Refuse it if it is of other weights, given by the start of their digest. Default: if "
            "engines here have its model with other weights alone.",
        ),
    ] = "",
    namespace: Annotated[
        str,
        typer.Option(metavar="ID", help="Refuse it if it is of another namespace, by the start of its id."),
    ] = "",
) -> None:
    """Verify a pack and commit what is in it, as a save does, so that engines start warm.

    What is stored already is left, so applying a pack twice is harmless. Ends with 4 if some of it is being
    saved or deleted just now, so that applying it again brings the rest, and with 3 if that can't. A pack
    that isn't for engines that are known here is refused if its model has other weights here, or its weights
    are another model's or tenant's; in what else it differs, the report says.
    """
    with call.cache() as cache, progress.shown() as shows:
        report = pack.apply(pack_, cache, pack.Intended(model, weights, namespace), shows)
    call.print(report, pack_text.apply)
    call.end(report)


def _settings(call: Call) -> Settings:
    """Returns the settings of a verb that needs no cache."""
    return replace(call.sources, index="memory://pack", payloads="memory://pack").settings()


@of_report.register
def _of_build(report: PackBuildReport) -> ExitCode:
    return of_moved(report.export, 0)


@of_report.register
def _of_verify(report: PackVerifyReport) -> ExitCode:
    return ExitCode.OK if report.good else ExitCode.PROBLEMS


@of_report.register
def _of_apply(report: PackApplyReport) -> ExitCode:
    archive = report.archive
    code = ENDS[archive.ended]
    if code is not ExitCode.OK or report.whole:
        return code
    # Whoever tries again after 4, as the chart does, brings what was being saved, or deleted, just now.
    passes = archive.left_out == archive.later and archive.found_segments == report.pack.segments
    return ExitCode.PARTIAL if archive.later and passes and not archive.unwanted else ExitCode.PROBLEMS
