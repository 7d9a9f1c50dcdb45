"""simulate, whatif: what other capacities and policies would bring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, cast, get_args

import typer

from kvstore.admin.simulate import simulate, whatif
from kvstore.admin.simulate.reports import Policy
from kvstore.admin.simulate.simulate import POLICIES
from kvstore.admin.simulate.traces import Assumed
from kvstore.cli import progress
from kvstore.cli.call import Call
from kvstore.cli.options import byte_count
from kvstore.cli.text import simulate as simulate_text
from kvstore.cli.verbs import verb
from schemas.settings import Settings

_MOST_POINTS = 200


@verb(
    "simulate",
    section="Understand",
    examples=(
        "cache-admin simulate /var/log/kvstore-trace",
        "cache-admin simulate conversation_trace.jsonl --block-bytes 64MiB --capacity 1TiB,2TiB,4TiB",
        "cache-admin simulate trace.jsonl --policy kvstore,lru --segment-blocks 16,64 --json",
    ),
    see_also=("whatif", "stats"),
)
def _simulate(
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
            "admission.second_use), told (the same, with what the trace says of sessions), told-ends (the "
            "same, told which request is a session's last), lru and fifo (of single blocks), optimum "
            "(knows what will be asked for), endless (evicts nothing).",
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
) -> None:
    """Replay a trace of requests: the hit ratio by capacity, for this store and for other policies.

    Says how large a cache is worth having before one is bought, and what cutting blocks into segments, or
    saving only what is asked for twice, costs and brings; what could be served if the future were known, and
    what if only the ends of sessions were. Needs no cache; of settings, those of segments and of admission
    count for `kvstore`.
    """
    setup = simulate.Setup(
        settings=_settings(call),
        policies=_policies(policy),
        capacities=_sizes("--capacity", capacity),
        points=points,
        segment_blocks=_numbers(segment_blocks),
    )
    assumed = Assumed(None if block_bytes is None else byte_count("--block-bytes", block_bytes), block_tokens)
    with progress.shown() as shows:
        report = simulate.simulate([Path(trace) for trace in traces], assumed, setup, shows)
    call.print(report, simulate_text.simulate)


@verb(
    "whatif",
    section="Understand",
    examples=("cache-admin whatif", "cache-admin whatif --more 100GiB,1TiB"),
    see_also=("simulate", "quota set"),
)
def _whatif(
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
    sizes = _sizes("--more", more)
    with call.cache() as cache:
        report = whatif.whatif(cache, sizes)
    call.print(report, simulate_text.whatif)


def _settings(call: Call) -> Settings:
    """Returns those that were given, whatever store they name, if any: a simulation opens none."""
    return replace(call.sources, index="memory://simulation", payloads="memory://simulation").settings()


def _policies(text: str) -> Sequence[Policy]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in get_args(Policy):
            raise typer.BadParameter(f"{name!r} is none of {', '.join(POLICIES)}", param_hint="--policy")
    return cast("Sequence[Policy]", list(dict.fromkeys(names)))


def _sizes(option: str, texts: Sequence[str] | None) -> list[int]:
    return [byte_count(option, one) for text in texts or () for one in text.split(",")]


def _numbers(text: str | None) -> list[int]:
    words = text.split(",") if text is not None else []
    if not all(word.strip().isdecimal() and 0 < int(word) <= 1024 for word in words):
        raise typer.BadParameter(f"{text!r} is no list of numbers up to 1024", param_hint="--segment-blocks")
    return [int(word) for word in words]
