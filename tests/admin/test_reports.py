"""What scripts rely on: the shapes of `--json` and of archives, and the exit codes.

python -m tests.admin.test_reports    writes the file anew: a change of it is a decision
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel

import schemas.archive
import schemas.bench
import schemas.reports
import schemas.transfers
from kvstore.cli import exits

GOLDEN = Path(__file__).with_name("reports.json")


def shapes() -> dict[str, Any]:
    """Every field of every model, with its type."""
    found = {}
    for module in (schemas.reports, schemas.transfers, schemas.bench, schemas.archive):
        for name, value in vars(module).items():
            own = isinstance(value, type) and issubclass(value, BaseModel)
            if own and value.__module__ == module.__name__:
                found[name] = {field: str(info.annotation) for field, info in value.model_fields.items()}
    return found


def test_the_shapes_are_those_that_were_promised() -> None:
    assert shapes() == json.loads(GOLDEN.read_text(encoding="utf-8")), f"see {__file__}"


def test_exit_codes_are_a_table() -> None:
    assert exits.table() == [
        (0, "ok"),
        (1, "error, such as an unknown id"),
        (2, "wrong usage or wrong settings"),
        (3, "the command ran and found problems"),
        (4, "refused, because something is in the way; the message says what"),
        (5, "index or payloads unreachable, or the disk failed"),
        (130, "cancelled (Ctrl-C)"),
    ]


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(shapes(), indent=1) + "\n", encoding="utf-8")
