"""bench: what this machine, this index and this payload store can do."""

from __future__ import annotations

from typing import Annotated

import typer

from kvstore.admin.bench import bench
from kvstore.admin.bench.reports import BenchReport
from kvstore.cli import progress
from kvstore.cli.call import Call, say
from kvstore.cli.exits import ENDS, ExitCode, of_report
from kvstore.cli.text import bench as bench_text
from kvstore.cli.verbs import verb


@verb(
    "bench",
    section="Set up",
    examples=("cache-admin bench", "cache-admin bench --seconds 20 --namespace 8a74e0fa --tokens 4096,65536"),
    see_also=("doctor",),
    exits=(ExitCode.PARTIAL,),
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
    namespace: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Take that number from this namespace, by the start of its id."),
    ] = None,
    tokens: Annotated[
        str, typer.Option(metavar="N,N,...", help="Lengths of the prompts that are loaded.")
    ] = ",".join(map(str, bench.DEFAULT_TOKENS)),
    keep: Annotated[
        bool, typer.Option("--keep", help="Leave the data there, such as for a look at it.")
    ] = False,
) -> None:
    """Measure memory, index, payload store and whole loads from here, and say what to expect of them.

    Writes up to 4 GiB of data like KV blocks into a namespace of its own and removes it again, also after
    Ctrl-C. Run it where an engine runs, while little else does. What it says about a prompt is the time
    to load it, and the prefill speed below which loading is faster than computing.
    """
    lengths = _lengths(tokens)
    if kv_bytes_per_token is not None and namespace is not None:
        raise typer.BadParameter("--kv-bytes-per-token and --namespace say the same thing; give one")
    with call.cache() as cache, progress.shown() as shows:
        shape = bench.shape_of(cache, kv_bytes_per_token, namespace)
        report = bench.bench(cache, shape, seconds=seconds, tokens=lengths, keep=keep, progress=shows)
    call.print(report, bench_text.bench)
    if report.left_behind:
        say(f"left behind: {report.left_behind}; a later run removes it, an hour from now or later")
    call.end(report)


def _lengths(text: str) -> list[int]:
    words = text.split(",")
    if not all(word.strip().isdecimal() and 0 < int(word) <= 10_000_000 for word in words):
        raise typer.BadParameter(f"{text!r} is no list of numbers of tokens", param_hint="--tokens")
    return [int(word) for word in words]


@of_report.register
def _of_bench(report: BenchReport) -> ExitCode:
    failed = any(speed.latency is None and speed.errors for speed in report.transfers)
    return ENDS[report.ended] or (ExitCode.PARTIAL if failed else ExitCode.OK)
