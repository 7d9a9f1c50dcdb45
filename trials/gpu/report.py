"""Rows of a trial: each is tried, said on stderr at once, and kept for the table and the JSON."""

from __future__ import annotations

import faulthandler
import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: A row that takes longer hangs: the trial says where, and ends.
_LIMIT_S = 280.0


class Wrong(Exception):
    """A row has failed; the message says what differs."""


class NotRun(Exception):
    """A row can't be tried here; the message says why."""


class Report:
    """All rows so far. `head` says what machine they are of."""

    def __init__(self, head: dict[str, Any], path: Path | None) -> None:
        """`path` is where the JSON goes, after every row, so that a trial that ends early leaves its rows."""
        self.head, self._path = head, path
        self.rows: list[dict[str, Any]] = []

    @property
    def failed(self) -> list[str]:
        """Returns the names of rows that have failed."""
        return [row["name"] for row in self.rows if row["result"] == "FAILED"]

    def row(self, section: str, name: str, check: Callable[[], Any]) -> None:
        """Try one row. `check` returns a text, or a text and figures; it raises Wrong, NotRun or anything."""
        faulthandler.dump_traceback_later(_LIMIT_S, exit=True)
        began, figures = time.perf_counter(), {}
        try:
            said = check()
            text, figures = said if isinstance(said, tuple) else (said or "", {})
            result = "ok"
        except Wrong as exc:
            result, text = "FAILED", str(exc)
        except NotRun as exc:
            result, text = "NOT RUN", str(exc)
        except Exception as exc:  # a row that can't be tried must not cost the others
            traceback.print_exc()
            result, text = "FAILED", f"{type(exc).__name__}: {exc}".splitlines()[0]
        faulthandler.cancel_dump_traceback_later()
        seconds = round(time.perf_counter() - began, 2)
        self.rows.append(
            {"section": section, "name": name, "result": result, "text": text, "figures": figures,
             "seconds": seconds}
        )  # fmt: skip
        print(f"{result:8}{seconds:7.2f} s  {section}: {name}: {text}", file=sys.stderr, flush=True)
        if self._path is not None:
            self._path.write_text(json.dumps({"head": self.head, "rows": self.rows}, indent=1) + "\n")

    def table(self) -> str:
        """Returns all rows as one table."""
        lines = [f"{name}: {value}" for name, value in self.head.items()]
        width = max((len(row["name"]) for row in self.rows), default=0)
        for section in dict.fromkeys(row["section"] for row in self.rows):
            lines += ["", section]
            for row in self.rows:
                if row["section"] == section:
                    lines.append(f"  {row['name']:{width}}  {row['result']:8}{row['text']}".rstrip())
        failed = self.failed
        lines += ["", f"{len(self.rows)} rows, {len(failed)} failed", *failed]
        return "\n".join(lines)
