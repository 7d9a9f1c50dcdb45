"""advise as text and as a page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.text import Text

from kvstore.admin.advise.page import Table, html
from kvstore.admin.advise.reports import AdviceReport
from kvstore.cli.tables import Column, Renderables, TableRows, count, pair, plain, span
from kvstore.rules.units import size

_WIDTH = 13
STYLES = {"yes": "bold green", "no": "bold red", "unclear": "bold yellow"}


def headline(report: AdviceReport) -> str:
    """Returns the verdict in a sentence."""
    best = report.best
    if report.verdict == "no":
        return "Don't"
    if report.verdict == "unclear" or best is None or best.net_month is None:
        return f"Perhaps, with {size(best.capacity_bytes)}" if best is not None else "Perhaps"
    return f"Yes: {size(best.capacity_bytes)} save {money(best.net_month)} a month"


def advise(report: AdviceReport) -> Renderables:
    """Yields the verdict and why, what capacities, models and namespaces amount to, and what to set."""
    why = "" if report.verdict != "no" else ", because:"
    yield Text(f"{headline(report)}{why}", style=STYLES[report.verdict])
    for one in report.because:
        yield pair("-", plain(sentence(one)), width=3)
    yield ""
    for label, fact in facts(report):
        yield pair(label, plain(fact), width=_WIDTH)
    for heading, columns in tables(report):
        yield ""
        yield Text(heading, style="bold")
        yield TableRows(
            *(
                Column(head, cells, right=number > 0, wraps=number == 0)
                for number, (head, cells) in enumerate(columns)
            )
        )
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


def facts(report: AdviceReport) -> Iterator[tuple[str, str]]:
    """Yields what was asked for, at which prices it is weighed, and how large Redis must be."""
    yield "source", ", ".join(report.sources)
    if report.used_bytes is not None:
        present = report.curves[0].points[0].capacity_bytes
        yield "used", f"{size(report.used_bytes)} of {size(present)}"
        yield "asked for", f"{count(report.asked_blocks, 'block')}"
    if (recorded := report.recorded) is not None:
        yield "recorded", f"{recorded.requests:,} requests in {span(recorded.seconds)}"
        yield (
            "asked for",
            f"{report.asked_blocks:,} blocks ({recorded.asked_tokens:,} tokens), "
            f"{recorded.distinct_blocks:,} different ones, {size(recorded.distinct_bytes)}",
        )
        if recorded.skipped_lines:
            yield "skipped", f"{count(recorded.skipped_lines, 'line')} that make no sense"
    if report.ceiling_ratio is not None:
        own = (
            f", {report.local_ratio:.1%} in the engines' own caches" if report.local_ratio is not None else ""
        )
        yield "ceiling", f"{report.ceiling_ratio:.1%} with endless capacity{own}"
    if (prices := report.prices) is not None:
        yield (
            "prices",
            f"${prices.gpu_hour:g} a GPU hour, ${prices.gb_month:g} a GB and month, ${prices.put_1000:g} and "
            f"${prices.get_1000:g} a thousand PUTs and GETs, ${prices.upload_gb:g} and "
            f"${prices.download_gb:g} a GB up and down",
        )
    if (redis := report.redis) is not None:
        yield (
            "Redis",
            f"{redis.index_bytes / 1e6:,.0f} MB of index for {redis.blocks:,} blocks in {redis.segments:,} "
            f"segments: maxmemory {redis.maxmemory_bytes / 1e6:,.0f}mb",
        )
    if report.bandwidth_bytes_s is not None:
        yield "reads", _speed(report.bandwidth_bytes_s)


def page(report: AdviceReport) -> str:
    """Returns the report as a page."""
    why = [sentence(one) for one in report.because]
    why += [f"{sentence(label)}: {fact}" for label, fact in facts(report)]
    notes = [sentence(one) for one in report.caveats]
    return html(report, f"Would it pay? {headline(report)}", why, tables(report), notes)


def tables(report: AdviceReport) -> Sequence[tuple[str, Table]]:
    """Returns the tables that have rows, with their titles, and the columns that say something."""
    best = size(report.best.capacity_bytes) if report.best is not None else ""
    points = report.curves[0].points
    curves = [
        (
            size(one.capacity_bytes),
            *(f"{curve.points[number].hit_ratio:.1%}" for curve in report.curves),
            f"{one.hit_blocks:,}",
            "-" if one.hit_tokens is None else f"{one.hit_tokens:,}",
            "-" if one.stored_bytes is None else size(one.stored_bytes),
            "-" if one.evicted_bytes is None else size(one.evicted_bytes),
        )
        for number, one in enumerate(points)
    ]
    capacities = [
        (
            f"{size(one.capacity_bytes)}{' *' if one == report.best else ''}",
            "second use" if one.second_use else "all",
            f"{one.hit_ratio:.1%}",
            f"{one.gained_ratio:.1%}",
            hours(one.gpu_seconds_month),
            *map(money, (one.saved_month, one.cost_month, one.net_month)),
        )
        for one in report.capacities
    ]
    models = [
        (
            f"{one.model or 'all'} ({one.kind}, {one.tenant})" if one.tenant else one.model or "all",
            f"{one.requests:,}",
            "-" if one.local_ratio is None else f"{one.local_ratio:.1%}",
            f"{one.hit_ratio:.1%}",
            f"{one.ceiling_ratio:.1%}",
            hours(one.gpu_seconds_month),
            *map(money, (one.saved_month, one.cost_month, one.net_month)),
            "-" if one.break_even_bytes_s is None else _speed(one.break_even_bytes_s),
        )
        for one in report.by_model
    ]
    prompts = [
        (f"{one.tokens:,} tokens", size(one.nbytes), span(one.compute_s), _speed(one.break_even_bytes_s))
        for one in report.prompts
    ]
    namespaces = [
        (
            one.namespace,
            one.model or "-",
            f"{one.asked_blocks:,}",
            f"{one.served_blocks:,}",
            size(one.evicted_bytes),
            f"{one.share:.0%}",
            f"{one.gained_blocks[-1]:,}",
        )
        for one in report.namespaces
    ]
    months = ("GPU hours", "saved", "costs", "net")
    ours = ("blocks", "tokens", "written", "evicted")
    found: list[tuple[str, Table]] = [
        (
            "Hits by capacity, and blocks, tokens and bytes of kvstore",
            _columns(("capacity", *(curve.policy for curve in report.curves), *ours), curves),
        ),
        ("By capacity, a month", _columns(("capacity", "saves", "hits", "gained", *months), capacities)),
        (
            f"By model with {best}, a month",
            _columns(("model", "requests", "own", "hits", "ceiling", *months, "break-even"), models),
        ),
        (
            "Where loading is as fast as computing",
            _columns(("prompt", "bytes", "computed in", "break-even bandwidth"), prompts),
        ),
        (
            f"By namespace, with blocks that {size(points[-1].capacity_bytes)} would have added",
            _columns(("namespace", "model", "asked", "found", "evicted", "its share", "added"), namespaces),
        ),
    ]
    return [(heading, table) for heading, table in found if table]


def _columns(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Returns the columns in which some row says something."""
    return [
        (head, cells)
        for head, cells in zip(heads, zip(*rows, strict=True), strict=False)
        if set(cells) != {"-"}
    ]


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
