"""Serve on the fake accelerator, over all layouts and many seeds, and find what was planted.

    python -m trials.accelerator [--seeds 20] [--layouts "gqa LBNHC" items ...] [--no-faults] [--json]

Prints a table and ends with 1 if a byte was wrong or a planted fault was not found. 20 seeds take some 15
minutes; the rows come as they are done.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from dataclasses import asdict
from typing import Any

from trials.accelerator.engine import serve
from trials.accelerator.faults import FAULTS
from trials.accelerator.layouts import LAYOUTS
from trials.accelerator.plan import Found, Plan

#: The columns of the table, as the fields of a row are called.
_COLUMNS = ("layout", "runs", "loads", "blocks_loaded", "blocks_saved", "items_loaded", "items_saved",
            "blocks_dropped", "handed_over", "rejected", "reads_checked", "preemptions", "aborts",
            "aborts_loading", "resets", "cuts", "wrong_bytes", "deaths", "seconds")  # fmt: skip


def sweep(name: str, seeds: int) -> dict[str, Any]:
    """All seeds on one layout; "items" is a plain one with pictures."""
    total, began = Found(), time.monotonic()
    for seed in range(seeds):
        plan = Plan.of(seed, items=name == "items", refused=0.05 if seed % 6 == 5 else 0.0)
        total += serve(plan, LAYOUTS["gqa LBNHC" if name == "items" else name])[0]
    return {"layout": name, "runs": seeds, "seconds": round(time.monotonic() - began, 1), **asdict(total)}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m trials.accelerator", description=__doc__.splitlines()[0])
    names = [*LAYOUTS, "items"]
    parser.add_argument("--seeds", type=int, default=20, help="runs per layout (default 20)")
    parser.add_argument(
        "--layouts", nargs="*", default=names, choices=names, metavar="NAME", help="default all"
    )
    parser.add_argument("--no-faults", action="store_true", help="plant nothing")
    parser.add_argument("--json", action="store_true", help="print one object instead of a table")
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)
    rows, planted = [], {}
    if not given.json:
        print(" | ".join(_COLUMNS).replace("_", " "), flush=True)
    for name in given.layouts:
        rows.append(row := sweep(name, given.seeds))
        if not given.json:
            print(" | ".join(str(row[one]) for one in _COLUMNS), *row["reports"][:3], flush=True)
    for name, fault in {} if given.no_faults else FAULTS.items():
        runs, said = fault.found()
        planted[name] = {"found_in_run": runs, "said": said}
        if not given.json:
            print(f"planted: {name}: " + (f"found in run {runs}" if runs else said), flush=True)
    clean = not any(row["reports"] for row in rows)
    found = all(one["found_in_run"] for one in planted.values())
    if given.json:
        print(json.dumps({"layouts": rows, "planted": planted, "clean": clean, "found": found}, indent=2))
    return 0 if clean and found else 1


if __name__ == "__main__":
    sys.exit(main())
