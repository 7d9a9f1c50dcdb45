"""The matrix as a table, on a terminal and in docs/faults.md."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trials.faults.matrix import FAMILIES, Outcome

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "faults.md"
PEERS = Path(__file__).with_name("peers.json")
#: Between these lines the page is written by the command, the rest by people.
BEGIN, END = "<!-- begin: {} -->", "<!-- end: {} -->"


def table(outcomes: Sequence[Outcome]) -> str:
    """For a terminal: a line a row, and the sums."""
    lines = [_line("", "faults", "requests", "wrong", "lost", "blocks", "leaked", "added", "bound", "")]
    lines += [_row(one) for one in outcomes]
    held = sum(one.holds for one in outcomes)
    return "\n".join([*lines, f"{held} of {len(outcomes)} rows hold; {_sums(outcomes)}"])


def line(one: Outcome) -> str:
    """For the progress of a run."""
    return f"{_row(one)}  {one.seconds:.0f} s"


def _row(one: Outcome) -> str:
    result = one.result
    words = one.error or result.remark
    return _line(
        f"{one.row.family}: {one.row.fault}",
        *(result.faults, result.requests, result.wrong_tokens, result.engines_lost),
        *(result.lost_blocks, result.leaked, f"{result.added_s:.2f}", f"{result.bound_s:.2f}"),
        ("" if one.holds else "DOES NOT HOLD  ") + words,
    )


def _line(name: str, *cells: object) -> str:
    *numbers, words = cells
    return f"{name:58.58}" + "".join(f"{number:>9}" for number in numbers) + f"  {words}".rstrip()


def _sums(outcomes: Sequence[Outcome]) -> str:
    results = [one.result for one in outcomes]
    return (
        f"{sum(one.faults for one in results)} faults, {sum(one.requests for one in results)} requests, "
        f"{sum(one.wrong_tokens for one in results)} wrong answers, "
        f"{sum(one.engines_lost for one in results)} engines lost, "
        f"{sum(one.lost_blocks for one in results)} blocks lost, "
        f"{sum(one.leaked for one in results)} leaked"
    )


def markdown(rows: Sequence[Outcome], told: Mapping[str, Any]) -> str:
    """The generated part of the page for one family."""
    return (
        f"Run on {told['date']}: {told['machine']}. {len(rows)} rows, "
        f"of which {sum(one.holds for one in rows)} hold: {_sums(rows)}.\n\n"
        "| fault | on | faults | requests | wrong tokens | engines lost | blocks lost | leaked "
        "| added | bound | |\n"
        "|---|---|---|---|---|---|---|---|---|---|---|\n" + "\n".join(_markdown(one) for one in rows)
    )


def _markdown(one: Outcome) -> str:
    result = one.result
    cells = [
        one.row.fault,
        one.row.reach,
        *(result.faults, result.requests, result.wrong_tokens, result.engines_lost),
        *(result.lost_blocks, result.leaked, f"{result.added_s:.2f} s", f"{result.bound_s:.2f} s"),
        ("" if one.holds else "**does not hold** ") + (one.error or result.remark),
    ]
    return "| " + " | ".join(str(cell).replace("|", r"\|").replace("\n", " ") for cell in cells) + " |"


def peers(found: Mapping[str, Any]) -> str:
    """The comparison as trials/faults/peers.json has it."""
    names = ("kvstore", "vllm", "lmcache")
    versions = found.get("versions", {})
    heads = [f"{name} {versions[name]}" if name in versions else name for name in names]
    lines = [f"| fault | {' | '.join(heads)} |", "|---|---|---|---|"]
    lines += [f"| {one['fault']} | {' | '.join(str(one[name]) for name in names)} |" for one in found["rows"]]
    return f"Run on {found['machine']}.\n\n" + "\n".join(lines)


def written(page: str, outcomes: Sequence[Outcome], told: Mapping[str, Any]) -> str:
    """The page with the parts of these rows' families, and the comparison, made anew."""
    for family in FAMILIES:
        if rows := [one for one in outcomes if one.row.family == family]:
            page = _between(page, family, markdown(rows, told))
    if PEERS.exists():
        page = _between(page, "peers", peers(json.loads(PEERS.read_text())))
    return page


def _between(page: str, name: str, text: str) -> str:
    begin, end = BEGIN.format(name), END.format(name)
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    made, count = pattern.subn(lambda _: f"{begin}\n\n{text}\n\n{end}", page)
    if count != 1:
        raise ValueError(f"the page has {count} places for {name}, not one: {begin} ... {end}")
    return made
