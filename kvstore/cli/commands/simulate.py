"""simulate, whatif: what other capacities and policies would bring."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, cast, get_args

import typer

from kvstore import admin
from kvstore.admin.plot import svg
from kvstore.admin.simulate import POLICIES, Setup
from kvstore.admin.traces import Assumed
from kvstore.build import PREFIX
from kvstore.cli import progress, render_simulation
from kvstore.cli.call import Call, say, verb
from schemas.settings import Settings, parse_bytes
from schemas.simulation import Policy

#: Where there is no terminal.
_COLUMNS = 100
_MOST_POINTS = 200


def add_to(app: typer.Typer) -> None:
    """Register these commands."""
    verb(app.command())(simulate)
    verb(app.command())(whatif)


def simulate(
    call: Call,
    traces: Annotated[
        list[str],
        typer.Argument(
            metavar="TRACE...",
            help="Files that engines have recorded (settings: trace), or of Mooncake's form; or folders of "
            "*.jsonl.",
        ),
    ],
    capacity: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SIZE,...",
            help="Capacities, such as 50GiB,200GiB; may be repeated. Default: a sweep, from 1% of all "
            "different blocks' bytes to all of them.",
        ),
    ] = None,
    points: Annotated[
        int, typer.Option(min=2, max=_MOST_POINTS, metavar="N", help="Capacities of the sweep.")
    ] = 12,
    policy: Annotated[
        str,
        typer.Option(
            metavar="NAME,...",
            help="Of: kvstore (this store, as it is configured), second-use (the same with "
            "admission.second_use), lru and fifo (of single blocks), endless (nothing is ever evicted).",
        ),
    ] = ",".join(POLICIES),
    segment_blocks: Annotated[
        str | None,
        typer.Option(
            metavar="N,...",
            help="Blocks of a segment; a curve for each. Default: as the connectors cut segments.",
        ),
    ] = None,
    block_bytes: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Bytes of a block, of all ranks together. Default: what the trace says; where it doesn't, "
            "128 KiB a token (Llama-3-8B in bf16).",
        ),
    ] = None,
    block_tokens: Annotated[
        int,
        typer.Option(min=1, max=1 << 20, metavar="N", help="Tokens of a block in traces of Mooncake's form."),
    ] = 512,
    plot: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write the plot as SVG.", show_default=False)
    ] = None,
) -> None:
    """Replay a trace of requests: the hit ratio by capacity, for this store and for other policies.

    Says how large a cache is worth having before one is bought, and what cutting blocks into segments, or
    saving only what is asked for twice, costs and brings. Needs no cache; where the settings describe one,
    its watermarks and segment sizes count for `kvstore`.
    """
    setup = Setup(
        settings=_settings(call),
        policies=_policies(policy),
        capacities=[_size(one, "--capacity") for text in capacity or () for one in text.split(",")],
        points=points,
        segment_blocks=_numbers(segment_blocks),
    )
    assumed = Assumed(_size(block_bytes, "--block-bytes") if block_bytes is not None else None, block_tokens)
    with progress.shown() as shows:
        report = admin.simulate([Path(trace) for trace in traces], assumed, setup, shows)
    if plot is not None:
        _write(plot, svg(render_simulation.plot_of(report)))
    call.print(report, lambda report: render_simulation.simulation(report, _columns()))


def whatif(
    call: Call,
    more: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SIZE,...",
            help="So much more, such as 100GiB; may be repeated. Default: from a tenth of the capacity to "
            "twice as much.",
        ),
    ] = None,
) -> None:
    """Estimate what more capacity would bring, from what the index remembers of evicted segments.

    Of blocks that engines have asked for and that were gone, it knows how much more capacity would have kept
    them. No trace is needed; `simulate` says more if there is one.
    """
    sizes = [_size(one, "--more") for text in more or () for one in text.split(",")]
    with call.cache() as cache:
        report = admin.whatif(cache, sizes)
    call.print(report, render_simulation.whatif)


def _settings(call: Call) -> Settings:
    """Those that were given, over the defaults; a simulation needs no store."""
    sources = call.sources
    named = (f"{PREFIX}SETTINGS", f"{PREFIX}PAYLOADS")
    if sources.file or sources.payloads or any(name.startswith(named) for name in sources.environ):
        return sources.settings()
    return replace(sources, index="memory://simulation", payloads="memory://simulation").settings()


def _policies(text: str) -> Sequence[Policy]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in get_args(Policy):
            raise typer.BadParameter(f"{name!r} is none of {', '.join(POLICIES)}", param_hint="--policy")
    return cast("Sequence[Policy]", list(dict.fromkeys(names)))


def _size(text: str, option: str) -> int:
    try:
        nbytes = int(parse_bytes(text.strip()))
    except ValueError as exc:
        raise typer.BadParameter(f"{text!r}: {exc}", param_hint=option) from None
    if not 0 < nbytes <= 1 << 60:
        raise typer.BadParameter(f"{text!r} is no size from one byte to 1 EiB", param_hint=option)
    return nbytes


def _numbers(text: str | None) -> list[int]:
    words = text.split(",") if text is not None else []
    if not all(word.strip().isdecimal() and 0 < int(word) <= 1024 for word in words):
        raise typer.BadParameter(f"{text!r} is no list of numbers up to 1024", param_hint="--segment-blocks")
    return [int(word) for word in words]


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as exc:
        raise typer.BadParameter(f"{path}: {exc.strerror}", param_hint="--plot") from exc
    say(f"plot written to {path}")


def _columns() -> int:
    if sys.stdout.isatty() or "COLUMNS" in os.environ:
        return min(140, shutil.get_terminal_size().columns)
    return _COLUMNS
