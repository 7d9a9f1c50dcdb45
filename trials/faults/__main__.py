"""The fault matrix: every fault that a row stands for is made, and what became of the requests is counted.

    python -m trials.faults [--rows PATTERN] [--quick] [--json FILE] [--from FILE ...] [--write]

Ends with 1 if a row doesn't hold. Progress goes to stderr, the table to stdout.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from trials.faults import kept, matrix, page
from trials.faults.row import Row


def main(arguments: Sequence[str] | None = None, rows: Sequence[Row] | None = None) -> int:
    """Returns the exit status. `rows` stand in for those of the modules."""
    parser = argparse.ArgumentParser(prog="python -m trials.faults", description="The fault matrix.")
    parser.add_argument("--rows", default="", metavar="PATTERN", help='only rows with it in "family: fault"')
    parser.add_argument("--quick", action="store_true", help="only the rows that the test suite runs")
    parser.add_argument("--list", action="store_true", help="name the rows and run nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what came of the rows")
    parser.add_argument(
        "--from", type=Path, nargs="+", metavar="FILE", dest="files", help="read what --json wrote: no run"
    )
    parser.add_argument("--write", action="store_true", help=f"write {page.PAGE.relative_to(page.ROOT)}")
    given = parser.parse_args(arguments)
    every = matrix.gathered() if rows is None else list(rows)
    chosen = matrix.chosen(every, given.rows, quick=given.quick)
    if given.list:
        print("\n".join(f"{row.family}: {row.fault}{' (quick)' if row.quick else ''}" for row in chosen))
        return 0
    if given.files:
        outcomes, told = _read(given.files, every)
        _keep(given.json, told)
    else:
        if not chosen:
            parser.error("no such row")
        outcomes, where = [], matrix.machine()
        try:
            for one in matrix.run(chosen):
                outcomes.append(one)
                print(page.line(one), file=sys.stderr, flush=True)
                # After each row: a run that is cut short has told what it has seen.
                told = matrix.as_json(outcomes, where)
                _keep(given.json, told)
        finally:
            kept.let_go()
        outcomes.sort(key=lambda one: every.index(one.row))
        told = matrix.as_json(outcomes, where)
    print(page.table(outcomes))
    if given.write:
        names = {(one.row.family, one.row.fault) for one in outcomes}
        families = {family for family, _ in names}
        missing = [
            f"{row.family}: {row.fault}"
            for row in every
            if row.family in families and (row.family, row.fault) not in names
        ]
        if missing:
            parser.error(f"the page is of all rows of a family; missing: {', '.join(missing)}")
        page.PAGE.write_text(page.written(page.PAGE.read_text(), outcomes, told))
    return 0 if all(one.holds for one in outcomes) else 1


def _keep(path: Path | None, told: Mapping[str, object]) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(told, indent=1) + "\n")


def _read(files: Sequence[Path], rows: Sequence[Row]) -> tuple[list[matrix.Outcome], dict[str, object]]:
    """What stands in the files of these rows, in their order; of a row that is in several, the last."""
    found: dict[tuple[str, str], matrix.Outcome] = {}
    told: dict[str, object] = {}
    for path in files:
        outcomes, told = matrix.from_json(path)
        found |= {(one.row.family, one.row.fault): one for one in outcomes}
    ordered = [found[name] for row in rows if (name := (row.family, row.fault)) in found]
    return ordered, matrix.as_json(ordered, str(told["machine"])) | {"date": told["date"]}


if __name__ == "__main__":
    sys.exit(main())
