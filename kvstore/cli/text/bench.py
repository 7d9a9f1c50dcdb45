"""bench as text."""

from __future__ import annotations

from rich.text import Text

from kvstore.admin.bench.reports import BenchReport
from kvstore.cli.tables import Column, Renderables, TableRows, pair
from kvstore.rules.units import size

_WIDTH = 13


def bench(report: BenchReport) -> Renderables:
    """Yields what was measured, and with what."""
    yield pair("index", report.index, width=_WIDTH)
    yield pair("payloads", report.payloads, width=_WIDTH)
    if report.fast:
        yield pair("fast tier", report.fast, width=_WIDTH)
    yield pair("KV per token", f"{report.kv_bytes_per_token:,} bytes: {report.kv_source}", width=_WIDTH)
    segment = f"{report.segment_blocks} blocks of {report.block_tokens} tokens, {size(report.segment_bytes)}"
    yield pair("segment", f"{segment}, codec {report.codec}", width=_WIDTH)
    if speeds := report.speeds:
        # Where prefill is slower than this, loading is faster.
        even = [one.bytes_s / report.kv_bytes_per_token if one.operation == "get" else 0 for one in speeds]
        rates = [f"{one.bytes_s / 1e6:,.0f}" if one.bytes_s else "-" for one in speeds]
        yield ""
        yield TableRows(
            Column("", [one.operation for one in speeds]),
            Column("tier", [one.tier for one in speeds], plain="shared"),
            Column("at a time", [one.at_a_time for one in speeds], right=True),
            Column("calls", [f"{one.calls:,}" for one in speeds], right=True),
            Column("blocks", [f"{one.blocks:,}" for one in speeds], right=True),
            Column("p50 ms", [f"{one.p50_s * 1e3:,.2f}" for one in speeds], right=True),
            Column("p99 ms", [f"{one.p99_s * 1e3:,.2f}" for one in speeds], right=True),
            Column("MB/s", rates, right=True),
            Column("break-even tokens/s", [f"{one:,.0f}" if one else "-" for one in even], right=True),
        )
    yield ""
    yield pair("took", f"{report.seconds:.0f} s", width=_WIDTH)
    if report.ended != "complete":
        yield pair("ended", Text(f"{report.ended}: {report.problem}", style="bold red"), width=_WIDTH)
    if report.left_behind:
        yield pair("left behind", report.left_behind, width=_WIDTH)
