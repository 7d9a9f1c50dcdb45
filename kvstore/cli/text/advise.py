"""advise as text and as a page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.text import Text

from kvstore.admin.advise.page import Table, html
from kvstore.admin.advise.plot import Plot, Series
from kvstore.admin.advise.reports import AdviceReport, CapacityAdvice
from kvstore.cli.tables import Column, Renderables, TableRows, pair, plain, span
from kvstore.rules.units import size

_WIDTH = 13
STYLES = {"yes": "bold green", "no": "bold red", "unclear": "bold yellow"}
_NAMES = {"kvstore": "kvstore", "lru": "LRU of blocks", "optimum": "optimum", "endless": "ceiling"}


def headline(report: AdviceReport) -> str:
    """Returns the verdict in a sentence."""
    best = report.best
    if report.verdict == "no":
        return "Don't"
    if report.verdict == "unclear" or best.net_month is None:
        return f"Perhaps, with {size(best.capacity_bytes)}"
    return f"Yes: {size(best.capacity_bytes)} save {money(best.net_month)} a month"


def _plot(report: AdviceReport) -> Plot:
    """Returns the plot of the hit ratio by capacity."""
    trace = report.trace
    series = [
        Series(
            _NAMES.get(curve.policy, curve.policy),
            [(one.capacity_bytes, one.hit_ratio) for one in curve.points],
            bound=curve.policy == "endless",
        )
        for curve in report.curves
    ]
    local = report.local_ratio
    own = f"; engines had {local:.1%} of them themselves" if local is not None else ""
    return Plot(
        subtitle=f"{trace.requests:,} requests, {trace.asked_blocks:,} blocks asked for{own}",
        series=series,
    )


def advise(report: AdviceReport) -> Renderables:
    """Yields the verdict and why, what capacities and models amount to, and what to set."""
    why = "" if report.verdict != "no" else ", because:"
    yield Text(f"{headline(report)}{why}", style=STYLES[report.verdict])
    for one in report.because:
        yield pair("-", plain(sentence(one)), width=3)
    yield ""
    for label, fact in facts(report):
        yield pair(label, plain(fact), width=_WIDTH)
    yield from tables_of(tables(report))
    if report.settings:
        yield ""
        yield Text("Settings to paste", style="bold")
        yield Text(report.settings.rstrip())
    yield ""
    for caveat in report.caveats:
        yield pair("-", plain(sentence(caveat)), width=3)


def sentence(text: str) -> str:
    """Returns a sentence as one begins."""
    return text[:1].upper() + text[1:]


def tables_of(found: Sequence[tuple[str, Table]]) -> Renderables:
    """Yields tables with their titles."""
    for heading, (heads, rows) in found:
        yield ""
        yield Text(heading, style="bold")
        columns = list(zip(*rows, strict=True))
        yield TableRows(
            *(
                Column(head, values, right=number > 0, wraps=number == 0)
                for number, (head, values) in enumerate(zip(heads, columns, strict=True))
            )
        )


def facts(report: AdviceReport) -> Iterator[tuple[str, str]]:
    """Yields what was recorded, at which prices it is weighed, and how large Redis must be."""
    yield "recorded", f"{report.trace.requests:,} requests in {span(report.trace.seconds)}"
    own = f", {report.local_ratio:.1%} in the engines' own caches" if report.local_ratio is not None else ""
    yield "ceiling", f"{report.ceiling_ratio:.1%} with endless capacity{own}"
    prices = report.prices
    yield (
        "prices",
        f"${prices.gpu_hour:g} a GPU hour, ${prices.gb_month:g} a GB and month, ${prices.put_1000:g} and "
        f"${prices.get_1000:g} a thousand PUTs and GETs, ${prices.upload_gb:g} and ${prices.download_gb:g} a "
        "GB up and down",
    )
    redis = report.redis
    yield (
        "Redis",
        f"{redis.index_bytes / 1e6:,.0f} MB of index for {redis.blocks:,} blocks in {redis.segments:,} "
        f"segments: maxmemory {redis.maxmemory_bytes / 1e6:,.0f}mb",
    )
    for read in report.reads:
        yield "reads", f"{read.tier}: {_speed(read.bytes_s)}"


def page(report: AdviceReport) -> str:
    """Returns the report as a page."""
    title = f"Would a shared cache pay? {headline(report)}"
    why = [sentence(one) for one in report.because]
    why += [f"{label[:1].upper()}{label[1:]}: {fact}" for label, fact in facts(report)]
    notes = [sentence(one) for one in report.caveats]
    return html(title, report.verdict, why, _plot(report), tables(report), report.settings, notes)


def tables(report: AdviceReport) -> Sequence[tuple[str, Table]]:
    """Returns the tables of a report that have rows, with their titles."""
    best = report.best
    capacities = [
        (
            f"{size(one.capacity_bytes)}{' *' if one == best else ''}",
            "second use" if one.second_use else "all",
            f"{one.hit_ratio:.1%}",
            f"{one.gained_ratio:.1%}",
            hours(one.gpu_seconds_month),
            money(one.saved_month),
            money(_bill(one)),
            money(one.net_month),
        )
        for one in report.capacities
    ]
    models = [
        (
            f"{one.model or 'all'} ({one.kind}, {one.tenant})" if one.tenant else f"{one.model or 'all'}",
            f"{one.requests:,}",
            "-" if one.local_ratio is None else f"{one.local_ratio:.1%}",
            f"{one.hit_ratio:.1%}",
            f"{one.ceiling_ratio:.1%}",
            hours(one.gpu_seconds_month),
            money(one.saved_month),
            money(one.cost_month),
            money(one.net_month),
            "-" if one.break_even_bytes_s is None else _speed(one.break_even_bytes_s),
        )
        for one in report.by_model
    ]
    prompts = [
        (f"{one.tokens:,} tokens", size(one.nbytes), span(one.compute_s), _speed(one.break_even_bytes_s))
        for one in report.prompts
    ]
    months = ("GPU hours", "saved", "costs", "net")
    found: list[tuple[str, Table]] = [
        ("By capacity, a month", (("capacity", "saves", "hits", "gained", *months), capacities)),
        (
            f"By model with {size(best.capacity_bytes)}, a month",
            (("model", "requests", "own", "hits", "ceiling", *months, "break-even"), models),
        ),
        (
            "Where loading is as fast as computing",
            (("prompt", "bytes", "computed in", "break-even bandwidth"), prompts),
        ),
    ]
    return [(heading, table) for heading, table in found if table[1]]


def _bill(one: CapacityAdvice) -> float:
    return one.storage_month + one.requests_month + one.transfer_month


def money(amount: float | None) -> str:
    """Returns an amount of money; "-" if it isn't known."""
    if amount is None:
        return "-"
    sign = "-" if amount < 0 else ""
    return f"{sign}${abs(amount):,.2f}" if abs(amount) < 100 else f"{sign}${abs(amount):,.0f}"


def hours(seconds: float | None) -> str:
    """Returns seconds as hours; "-" if they aren't known."""
    return "-" if seconds is None else f"{seconds / 3600:,.1f}"


def _speed(bytes_s: float) -> str:
    return f"{bytes_s / 1e6:,.0f} MB/s"
