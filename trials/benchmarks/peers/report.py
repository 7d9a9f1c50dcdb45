"""The table, the words and the plot of a run, from its JSON.

    python -m trials.benchmarks.peers.report FILE [--write]

Prints the table; `--write` puts it into docs/comparison.md, and the plot beside it.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from trials.benchmarks.plot import Bars, bar_plot

_ROOT: Final = Path(__file__).resolve().parents[3]
_PAGE: Final = _ROOT / "docs" / "comparison.md"
_PLOT: Final = _ROOT / "docs" / "peers.svg"
PHASES: Final = ("cold", "warm", "restart")
_BEGIN, _END = "<!-- begin: side by side -->", "<!-- end: side by side -->"


@dataclass(frozen=True)
class Outcome:
    """What became of one request under a fault."""

    answered: bool
    right: bool
    #: Whether its prompt came from the cache.
    loaded: bool
    #: Seconds beyond what computing takes.
    added_s: float = 0.0
    #: Whether it was given up after a minute.
    hung: bool = False


def verdict(outcomes: Sequence[Outcome], end: str = "") -> str:
    """A few words for what became of all, worst first. `end` is how the engine ended, if it did."""
    if end:
        return end
    words = []
    hung = sum(one.hung for one in outcomes)
    failed = sum(not one.answered for one in outcomes) - hung
    wrong = sum(one.answered and not one.right for one in outcomes)
    if hung:
        words.append(f"{hung} of {len(outcomes)} requests hang")
    if failed:
        words.append(f"{failed} of {len(outcomes)} requests failed")
    if wrong:
        words.append(f"WRONG TOKENS, {wrong} of {len(outcomes)}")
    if not words:
        loaded = sum(one.loaded for one in outcomes)
        words.append("same tokens, " + (f"{loaded} of {len(outcomes)} loaded" if loaded else "recomputed"))
    added = max((one.added_s for one in outcomes), default=0.0)
    if added > 1:
        words.append(f"+{added:.1f} s")
    return ", ".join(words)


def numbers(rows: Sequence[dict[str, Any]], phase: str, what: str) -> list[float]:
    """All of one kind, of every round."""
    return [number for row in rows for number in row["phases"].get(phase, {}).get(what, ())]


def table(report: dict[str, Any]) -> str:
    """As Markdown: what requests take, and what becomes of them under faults."""
    nothing = report["variants"]["no cache"]["rounds"]
    computing = [
        median(numbers([row], "cold", "ttft_s") + numbers([row], "warm", "ttft_s")) for row in nothing
    ]
    head = ["", "cold, ms", "warm", "to computing", "after a restart", "to computing"]
    head += ["look-up, ms", "CPU, ms", "of servers", "network, MB", "stored, MB"]
    lines = [_row(head), _row(["---"] * len(head))]
    for name, one in report["variants"].items():
        if "skipped" in one:
            why = one["skipped"].replace("|", "/")
            lines.append(_row([name, f"not run: {why}", *[""] * (len(head) - 2)]))
            continue
        lines.append(_row([name, *_numbers(one["rounds"], computing, loads=name != "no cache")]))
    lines += ["", _row(["", *report["faults"]]), _row(["---"] * (1 + len(report["faults"])))]
    for name, one in report["variants"].items():
        if one.get("faults") and name not in _WITHOUT:
            lines.append(_row([name, *(one["faults"].get(fault, "not run") for fault in report["faults"])]))
    return "\n".join(lines)


_WITHOUT: Final = ("no cache", "vLLM's prefix cache")


def _numbers(rows: Sequence[dict[str, Any]], computing: Sequence[float], *, loads: bool) -> list[str]:
    def cell(phase: str, what: str, scale: float, digits: int = 0) -> str:
        found = numbers(rows, phase, what)
        return f"{median(found) * scale:.{digits}f}" if found else ""

    words = [cell("cold", "ttft_s", 1e3)]
    for phase in PHASES[1:]:
        # Of each round by itself: a machine may be busier in one than in the next.
        found = [numbers([row], phase, "ttft_s") for row in rows]
        ratios = [median(one) / cold for one, cold in zip(found, computing, strict=False) if one]
        words += [cell(phase, "ttft_s", 1e3), f"{median(ratios):.2f}" if ratios else ""]
    # A load is that after a restart, where there is one: what was warm may not have left the process.
    phase = "restart" if numbers(rows, "restart", "ttft_s") else "warm"
    words.append(cell(phase, "lookup_s", 1e3, 1) if loads else "")
    words.append(cell(phase, "engine_cpu_s", 1e3))
    words += [cell(phase, "servers_cpu_s", 1e3), cell(phase, "network_bytes", 1e-6, 1)] if loads else ["", ""]
    stored = [row["stored_bytes"] for row in rows if row.get("stored_bytes")]
    return [*words, f"{median(stored) / 1e6:.1f}" if stored else ""]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def remarks(report: dict[str, Any]) -> list[str]:
    """What is not as it should be: wrong tokens without a fault, and loads that were none."""
    found = []
    for name, one in report["variants"].items():
        rows = one.get("rounds", ())
        right = [answer for phase in PHASES for answer in numbers(rows, phase, "right")]
        if not all(right):
            found.append(f"{name}: other tokens than without a cache in {right.count(False)} of {len(right)}")
        for phase in PHASES[1:]:
            cached = numbers(rows, phase, "cached")
            if name != "no cache" and cached and min(cached) < 0.9:
                few = sum(share < 0.9 for share in cached)
                found.append(f"{name}, {phase}: {few} of {len(cached)} prompts not loaded")
    return found


def text(report: dict[str, Any]) -> str:
    """The whole part of the page."""
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    said = [
        f"Prompts of {report['tokens']} tokens, {report['prompts']} in each of {report['rounds']} rounds; "
        f"{report['machine']['cpu']}, load {report['machine']['load']} when it began and "
        f"{report['load after']} when it ended, {report['minutes']:.0f} minutes later. {versions}.",
        "\n".join(f"- {name}: {one['what']}." for name, one in report["variants"].items()),
        table(report),
        "\n".join(f"- {one}" for one in remarks(report))
        or "All answers without a fault had the same tokens as without a cache, and every load was one.",
    ]
    return "\n\n".join(said)


def drawn(report: dict[str, Any]) -> str:
    """Times to the first token, as SVG."""
    groups = []
    for name, one in report["variants"].items():
        times = {phase: numbers(one.get("rounds", ()), phase, "ttft_s") for phase in PHASES}
        groups.append(Bars(name, [median(times[phase]) * 1e3 if times[phase] else None for phase in PHASES]))
    return bar_plot(
        "Time to the first token, ms",
        f"prompts of {report['tokens']} tokens; {report['machine']['cpu']}; medians",
        ("cold", "warm", "after a restart"),
        groups,
    )


def write(report: dict[str, Any]) -> None:
    """Puts text and plot into the documentation."""
    found: Callable[[re.Match[str]], str] = lambda match: f"{_BEGIN}\n\n{text(report)}\n\n{_END}"  # noqa: E731
    page, count = re.subn(f"{_BEGIN}.*{_END}", found, _PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert count == 1, f"{_PAGE.name} has no place for it"
    _PAGE.write_text(page, encoding="utf-8")
    _PLOT.write_text(drawn(report), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m trials.benchmarks.peers.report")
    parser.add_argument("file", type=Path)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    report = json.loads(given.file.read_text())
    print(text(report))
    if given.write:
        write(report)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
