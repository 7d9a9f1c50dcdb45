"""bench: what this index and this payload store can do."""

from __future__ import annotations

from typing import Annotated

import typer

from kvstore.admin.bench.bench import bench
from kvstore.admin.bench.material import shape_of
from kvstore.admin.bench.reports import BenchReport
from kvstore.cli import progress
from kvstore.cli.call import Call, say
from kvstore.cli.exits import ENDS, ExitCode, of_report
from kvstore.cli.text import bench as bench_text
from kvstore.cli.verbs import verb


@verb(
    "bench",
    section="Set up",
    examples=("cache-admin bench", "cache-admin bench --seconds 20 --kv-bytes-per-token 98304"),
    see_also=("doctor", "advise"),
)
def _bench(
    call: Call,
    seconds: Annotated[
        float, typer.Option(min=1, max=3600, metavar="SECONDS", help="For about so long.")
    ] = 60,
    kv_bytes_per_token: Annotated[
        int | None,
        typer.Option(
            min=2,
            max=64 << 20,
            metavar="N",
            help="Bytes of KV cache per token, all layers and ranks. Default: of the fullest namespace of KV "
            "blocks, or else 131072 (Llama-3-8B in bf16).",
        ),
    ] = None,
) -> None:
    """Measure from here how fast segments are put, matched and got, verified, from each tier.

    Writes up to 4 GiB of data like KV blocks into a namespace of its own and removes it again, also after
    Ctrl-C. Run it where an engine runs, while little else does. Each get has the prefill speed below which
    loading is faster than computing. The MB/s of gets are what `advise --bandwidth` asks for.
    """
    with call.cache() as cache, progress.shown() as shows:
        shape = shape_of(cache, kv_bytes_per_token)
        report = bench(cache, shape, seconds=seconds, progress=shows)
    call.print(report, bench_text.bench)
    if report.left_behind:
        say(f"left behind: {report.left_behind}; a later run removes it, an hour from now or later")
    call.end(report)


@of_report.register
def _of_bench(report: BenchReport) -> ExitCode:
    return ENDS[report.ended]
