"""advise on the live store as text and as a page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from rich.text import Text

from kvstore.admin.advise.live_reports import LiveAdviceReport
from kvstore.admin.advise.page import Table, html
from kvstore.admin.simulate.plot import Plot, Series, text
from kvstore.cli.tables import Renderables, pair, plain
from kvstore.cli.text.advise import (
    STYLES,
    advise,
    headline,
    hours,
    money,
    sentence,
    tables_of,
)
from kvstore.cli.text.inspect import window
from kvstore.rules.units import size

_WIDTH = 13


def title(report: LiveAdviceReport) -> str:
    """Returns the verdict in a sentence."""
    net = report.period.net_month
    if net is None or report.verdict == "unclear":
        return "What this store is worth is not known"
    return f"This store {'saves' if net > 0 else 'loses'} {money(abs(net))} a month"


def live(report: LiveAdviceReport, width: int) -> Renderables:
    """Yields the verdict and why, the plot, the tables, what to change, and what the numbers rest on."""
    yield Text(title(report), style=STYLES[report.verdict])
    for one in report.because:
        yield pair("-", plain(sentence(one)), width=3)
    yield ""
    for label, fact in _facts(report):
        yield pair(label, plain(fact), width=_WIDTH)
    yield ""
    for line in text(_plot(report), width):
        yield Text(line, no_wrap=True, overflow="crop")
    yield from tables_of(_tables(report))
    if report.settings:
        yield ""
        yield Text("Settings to change", style="bold")
        yield Text(report.settings.rstrip())
    yield ""
    yield Text("What these numbers rest on", style="bold")
    for one in (*report.basis, *report.caveats):
        yield pair("-", plain(sentence(one)), width=3)
    if report.recorded is not None:
        yield ""
        yield Text("What the recordings say", style="bold")
        yield from advise(report.recorded, width)


def page(report: LiveAdviceReport) -> str:
    """Returns the report as a page."""
    why = [sentence(one) for one in report.because]
    why += [f"{label[:1].upper()}{label[1:]}: {fact}" for label, fact in _facts(report)]
    if report.recorded is not None:
        why.append(f"Of the recordings alone: {headline(report.recorded)}")
    notes = [sentence(one) for one in (*report.basis, *report.caveats)]
    return html(title(report), report.verdict, why, _plot(report), _tables(report), report.settings, notes)


def _facts(report: LiveAdviceReport) -> Iterator[tuple[str, str]]:
    yield "index", report.index
    at = datetime.fromtimestamp(report.since_s, UTC)
    yield "since", f"{at:%Y-%m-%d %H:%M} UTC; weighed are {window(report.period.window_s)}"
    yield "stored", f"{size(report.used_bytes)} of {size(report.capacity_bytes)}"
    prices = report.prices
    yield "prices", f"${prices.gpu_hour:g} a GPU hour, ${prices.gb_month:g} a GB and month"


def _plot(report: LiveAdviceReport) -> Plot:
    points = [(max(1, one.capacity_bytes), min(1.0, one.hit_ratio)) for one in report.capacities]
    ceiling = [(at, report.period.ceiling_ratio) for at, _ in points]
    return Plot(
        title="Hit ratio by capacity",
        subtitle=f"{report.period.asked_blocks:,} blocks asked for in {window(report.period.window_s)}",
        x_label="capacity (logarithmic)",
        y_label="hit ratio (blocks found, of those asked for)",
        series=[Series("this store", points), Series("ceiling of that time", ceiling, bound=True)],
    )


def _tables(report: LiveAdviceReport) -> Sequence[tuple[str, Table]]:
    periods = [
        (
            window(one.window_s),
            f"{one.asked_blocks:,}",
            f"{one.hit_ratio:.1%}",
            f"{one.ceiling_ratio:.1%}",
            hours(one.gpu_seconds_month),
            money(one.saved_month),
            money(one.storage_month + one.requests_month + one.transfer_month),
            money(one.net_month),
        )
        for one in report.periods
    ]
    capacities = [
        (
            f"{size(one.capacity_bytes)}{' *' if one == report.best else ''}",
            f"{one.hit_ratio:.1%}",
            f"{one.added_ratio:+.1%}",
            money(one.saved_month),
            money(one.storage_month),
            money(one.net_month),
        )
        for one in report.capacities
    ]
    models = [
        (
            f"{one.model} ({one.kind}, {one.tenant})",
            f"{one.asked_blocks:,}",
            f"{one.hit_ratio:.1%}",
            f"{one.ceiling_ratio:.1%}",
            size(one.stored_bytes),
            money(one.saved_month),
        )
        for one in report.by_model
    ]
    missed = [(one.reason, f"{one.blocks:,}") for one in report.missed]
    found: list[tuple[str, Table]] = [
        (
            "What it is worth, a month",
            (("in", "asked", "hits", "ceiling", "GPU hours", "saved", "costs", "net"), periods),
        ),
        (
            "More room, a month",
            (("capacity", "hits", "added", "saves more", "costs more", "net"), capacities),
        ),
        ("By model", (("model", "asked", "hits", "ceiling", "stored", "saved"), models)),
        ("Why blocks were missed, lately", (("reason", "blocks"), missed)),
    ]
    return [(heading, table) for heading, table in found if table[1]]
