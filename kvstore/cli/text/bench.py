"""bench as text."""

from __future__ import annotations

from kvstore.admin.bench.reports import BenchReport
from kvstore.cli.shown import rows, shown
from kvstore.cli.tables import Column, Renderables


def bench(report: BenchReport) -> Renderables:
    """Yields what was measured, and with what."""
    yield from shown(report, width=13, leave=("speeds",))
    if speeds := report.speeds:
        # Where prefill is slower than this, loading is faster.
        even = [one.bytes_s / report.kv_bytes_per_token if one.operation == "get" else 0 for one in speeds]
        texts = [f"{one:,.0f}" if one else "-" for one in even]
        yield ""
        yield rows(speeds, 0, Column("break-even tokens/s", texts, right=True))
