"""bench as text: the findings first, then the numbers that they rest on."""

from __future__ import annotations

from rich.text import Text

from kvstore.admin.bench.reports import BenchReport, Latency, TransferSpeed
from kvstore.cli.tables import Column, Renderables, TableRows, pair, plain
from kvstore.rules.units import size

_WIDTH = 13


def bench(report: BenchReport) -> Renderables:
    """Yields what it says, and what was measured."""
    yield pair("index", report.index, width=_WIDTH)
    yield pair("payloads", report.payloads, width=_WIDTH)
    if report.fast:
        yield pair("fast tier", report.fast, width=_WIDTH)
    yield pair("KV per token", f"{report.kv_bytes_per_token:,} bytes: {report.kv_source}", width=_WIDTH)
    segment = f"{report.segment_blocks} blocks of {report.block_tokens} tokens, {size(report.segment_bytes)}"
    yield pair("segment", f"{segment}, codec {report.codec}", width=_WIDTH)
    if report.findings:
        yield ""
        for finding in report.findings:
            text = plain(finding)
            yield pair("-", text[:1].upper() + text[1:], width=3)
    yield from _loads(report)
    yield from _index(report)
    yield from _payloads(report)
    yield from _machine(report)
    yield ""
    yield pair("took", f"{report.seconds:.0f} s", width=_WIDTH)
    if report.ended != "complete":
        yield pair("ended", Text(f"{report.ended}: {report.problem}", style="bold red"), width=_WIDTH)
    if report.left_behind:
        yield pair("left behind", report.left_behind, width=_WIDTH)


def _loads(report: BenchReport) -> Renderables:
    lines = report.loads
    if not lines:
        return
    yield ""
    yield Text("verified loads, match included", style="bold")
    yield TableRows(
        Column("from", [line.tier for line in lines], plain="shared"),
        Column("tokens", [f"{line.tokens:,}" for line in lines], right=True),
        Column("size", [size(line.nbytes) for line in lines], right=True),
        Column("match ms", [f"{line.match_s * 1e3:.2f}" for line in lines], right=True),
        Column("load ms", [f"{line.load_s * 1e3:,.0f}" for line in lines], right=True),
        Column("MB/s", [f"{line.bytes_s / 1e6:,.0f}" for line in lines], right=True),
        Column("break-even tokens/s", [f"{line.break_even_tokens_s:,.0f}" for line in lines], right=True),
        Column("", ["" if line.measured else "worked out" for line in lines], plain=""),
    )


def _index(report: BenchReport) -> Renderables:
    speed = report.index_speed
    if speed is None:
        return
    rows = [("round trip", speed.round_trip)]
    rows += [(f"match of {match.blocks:,} blocks", match.latency) for match in speed.matches]
    rows.append(("commit of 64 blocks", speed.commit))
    if report.small_reads is not None:
        rows.append(("read of a payload's header", report.small_reads))
    yield ""
    yield TableRows(
        Column("latency", [name for name, _ in rows]),
        Column("p50 ms", [f"{latency.p50_s * 1e3:.2f}" for _, latency in rows], right=True),
        Column("p99 ms", [f"{latency.p99_s * 1e3:.2f}" for _, latency in rows], right=True),
        Column("calls", [f"{latency.count:,}" for _, latency in rows], right=True),
    )


def _payloads(report: BenchReport) -> Renderables:
    lines = report.transfers
    if not lines:
        return
    yield ""
    yield TableRows(
        Column("payloads", [line.operation.upper() for line in lines]),
        Column("at a time", [line.concurrency for line in lines], right=True),
        Column("MB/s", [f"{line.bytes_s / 1e6:,.0f}" if line.latency else "-" for line in lines], right=True),
        Column("p50 ms", [_times(line.latency, 50) for line in lines], right=True),
        Column("p99 ms", [_times(line.latency, 99) for line in lines], right=True),
        Column("calls", [line.latency.count if line.latency else 0 for line in lines], right=True),
        Column("", [_remark(line) for line in lines], wraps=True, plain=""),
    )


def _machine(report: BenchReport) -> Renderables:
    rows = []
    if report.machine is not None:
        rows = [
            ("copy in memory", "-", "-", f"{report.machine.copy_bytes_s / 1e6:,.0f}"),
            ("checksum", "-", "-", f"{report.machine.checksum_bytes_s / 1e6:,.0f}"),
        ]
    rows += [
        (
            f"codec {speed.codec}",
            f"{speed.ratio:.2f}",
            f"{speed.encode_bytes_s / 1e6:,.0f}",
            f"{speed.decode_bytes_s / 1e6:,.0f}",
        )
        for speed in report.codecs
    ]
    if not rows:
        return
    yield ""
    yield TableRows(
        Column("one core", [row[0] for row in rows]),
        Column("ratio", [row[1] for row in rows], right=True),
        Column("save MB/s", [row[2] for row in rows], right=True),
        Column("load MB/s", [row[3] for row in rows], right=True),
    )


def _times(latency: Latency | None, which: int) -> str:
    if latency is None:
        return "-"
    return f"{(latency.p50_s if which == 50 else latency.p99_s) * 1e3:,.1f}"


def _remark(line: TransferSpeed) -> str:
    if line.skipped:
        return f"skipped: {line.skipped}"
    return ", ".join(f"{count} {kind}" for kind, count in sorted(line.errors.items()))
