"""What scripts rely on: the shapes of `--json` and of archives, and the exit codes.

python -m tests.admin.test_reports    writes the file anew: a change of it is a decision
"""

from __future__ import annotations

import io
import json
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, Field
from rich.console import Console

from kvstore.admin.archive.reports import ExportReport, ImportReport
from kvstore.admin.backends import Refused, UnknownName
from kvstore.admin.curate.reports import WarmReport
from kvstore.admin.remove.reports import EvictLine, EvictReport
from kvstore.admin.reports import Amount, Ended
from kvstore.cli import exits
from kvstore.cli.shown import shown
from kvstore.errors import CapacityExceeded, ConfigError, CorruptPayload, DeadlineExceeded, PermissionDenied

GOLDEN = Path(__file__).with_name("reports.json")


#: Groups of verbs in kvstore.admin, and what else is printed.
MODULES = (
    "kvstore.admin.reports",
    *(
        f"kvstore.admin.{group}.reports"
        for group in (
            "inspect",
            "curate",
            "remove",
            "archive",
            "doctor",
            "bench",
            "repair",
            "explain",
            "advise",
            "feed",
        )
    ),
    "schemas.archive",
    "schemas.pack",
    "kvstore.janitor.reports",
    "kvstore.admin.serve.reports",
)


def shapes() -> dict[str, Any]:
    """Every field of every model, with its type: by the names of models, each of which is used once."""
    found: dict[str, Any] = {}
    for module in map(import_module, MODULES):
        for name, value in vars(module).items():
            own = isinstance(value, type) and issubclass(value, BaseModel)
            if own and value.__module__ == module.__name__:
                assert name not in found, "one name, one shape"
                fields = {field: str(info.annotation) for field, info in value.model_fields.items()}
                found[name] = {
                    field: re.sub(r"([a-z_]+\.)+(?=[A-Z])", "", text) for field, text in fields.items()
                }
    return found


def test_the_shapes_are_those_that_were_promised() -> None:
    assert shapes() == json.loads(GOLDEN.read_text(encoding="utf-8")), f"see {__file__}"


def test_every_sentence_of_a_field_can_be_said() -> None:
    models = [value for module in map(import_module, MODULES) for value in vars(module).values()]
    for model in models:
        if isinstance(model, type) and issubclass(model, BaseModel):
            made: Any = model.model_construct(**dict.fromkeys(model.model_fields, 2))
            assert len(list(shown(made))) <= len(model.model_fields)


class Row(BaseModel):
    id: str
    stored_bytes: int
    made_us: int = 0
    pinned: bool = False


class Drawn(BaseModel):
    at_s: float = 1000.0
    seen_s: float | None = None
    hit_ratio: float = Field(title="hits", description="{}, of {asked:block}")
    asked: int = Field(title="")
    rows: tuple[Row, ...] = Field(description="no rows")
    ended: str = "complete"
    problem: str = ""


def test_a_report_is_drawn_from_its_model() -> None:
    def drawn(**fields: Any) -> list[list[str]]:
        console = Console(width=80, record=True, file=io.StringIO())
        for renderable in shown(Drawn(hit_ratio=0.5, asked=1, **fields)):
            console.print(renderable)
        return [line.split() for line in console.export_text().splitlines()]

    assert drawn(rows=()) == [["hits", "50.0%,", "of", "1", "block"], ["no", "rows"]]
    rows = (Row(id="a", stored_bytes=2048), Row(id="b\x1b", stored_bytes=0, pinned=True))
    assert drawn(rows=rows, seen_s=400.0, ended="failed", problem="full") == [
        ["seen", "10m"],
        ["hits", "50.0%,", "of", "1", "block"],
        [],
        ["namespace", "size"],
        ["a", "2.0", "KiB"],
        ["b\\x1b", "0", "B", "pinned"],
        [],
        ["ended", "failed:", "full"],
    ]


def test_results_of_a_run_are_shown_where_they_are_nothing() -> None:
    def lines(report: BaseModel) -> list[list[str]]:
        console = Console(width=80, record=True, file=io.StringIO())
        for renderable in shown(report):
            console.print(renderable)
        return [line.split() for line in console.export_text().splitlines()]

    def evict(*, applied: bool) -> EvictReport:
        line = EvictLine(namespace="d8a391acb8936bce", model="m", planned=Amount())
        nothing = {"held": Amount(), "planned": Amount(), "lines": (line,)}
        return EvictReport(at_s=1.0, applied=applied, ended="complete", problem="", why="all", **nothing)

    assert ["evicted", "0", "segments"] in lines(evict(applied=True))
    assert ["evicted", "0", "segments"] not in lines(evict(applied=False))
    # Columns of amounts stay, and the whole id can be given to another verb.
    assert ["d8a391acb8936bce", "m", "0", "0", "0", "B"] in lines(evict(applied=True))


def test_exit_codes_are_a_table() -> None:
    assert exits.table() == [
        (0, "ok"),
        (1, "error, such as an unknown id or something in the way; the message says what"),
        (2, "wrong usage or wrong settings"),
        (3, "the command ran and found problems"),
        (4, "partial: some of it was done, and the report says what was not"),
        (5, "index or payloads unreachable, or the disk failed"),
        (130, "cancelled (Ctrl-C)"),
    ]


@pytest.mark.parametrize(
    ("ended", "done", "left_out", "dry_run", "code"),
    [
        ("complete", 3, 0, False, 0),
        ("complete", 0, 0, False, 0),
        ("complete", 3, 1, False, 4),
        ("complete", 0, 1, False, 3),
        ("complete", 3, 1, True, 3),
        ("broken", 2, 0, False, 4),
        ("broken", 0, 0, False, 3),
        # Why it stopped says more than how far it came.
        ("failed", 2, 1, False, 5),
        ("cancelled", 2, 1, False, 130),
    ],
)
def test_partial_is_what_was_done_in_part(
    ended: Ended, done: int, left_out: int, dry_run: bool, code: int
) -> None:
    amount = Amount(segments=done, blocks=done, stored_bytes=done)
    common: dict[str, Any] = {
        "dry_run": dry_run,
        "ended": ended,
        "problem": "",
        "namespaces": (),
        "left_out": left_out,
        "left": (),
        "seconds": 1.0,
    }
    reports = (
        ExportReport(**common, to="-", planned=amount, beyond=Amount(), exported=amount, archive_bytes=1),
        ImportReport(
            **common,
            unwanted=0,
            source="-",
            announced_segments=4,
            found_segments=4,
            verified=amount,
            imported=amount,
            present=Amount(),
        ),
        # What was there before is there.
        ImportReport(
            **common,
            unwanted=0,
            source="-",
            announced_segments=4,
            found_segments=4,
            verified=amount,
            imported=Amount(),
            present=amount,
        ),
        WarmReport(
            **common,
            fast="file:///fast",
            capacity_bytes=1,
            used_before_bytes=0,
            used_bytes=0,
            planned=amount,
            beyond=Amount(),
            warm=amount,
        ),
    )
    assert [exits.of_report(report) for report in reports] == [code] * 4


def test_errors_have_codes_by_what_is_to_be_done() -> None:
    codes = {
        ConfigError("no such key"): 2,
        CorruptPayload("checksum"): 3,
        Refused("the file exists"): 1,
        UnknownName("no such id"): 1,
        CapacityExceeded("full"): 1,
        DeadlineExceeded("slow"): 5,
        PermissionDenied("no"): 5,
    }
    assert {error: exits.of_error(error) for error in codes} == codes


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(shapes(), indent=1) + "\n", encoding="utf-8")
