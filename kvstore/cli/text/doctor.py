"""What doctor found, and the flags of vllm-config, as text."""

from __future__ import annotations

import json
import shlex

from rich.text import Text

from kvstore.admin.doctor.reports import DoctorReport, VllmConfigReport
from kvstore.cli.tables import STYLES, Renderables, count, empty_table, plain


def doctor(report: DoctorReport) -> Renderables:
    """Yields a line per check, and under it what to do."""
    table = empty_table()
    table.add_column("")
    table.add_column("check")
    table.add_column("found", overflow="fold")
    for check in report.checks:
        found = Text(plain(check.found))
        if check.advice:
            found.append(f"\n-> {plain(check.advice)}", style="bold")
        table.add_row(Text(check.state, style=STYLES[check.state]), check.name, found)
    yield table
    states = [check.state for check in report.checks]
    yield ""
    yield f"{count(states.count('problem'), 'problem')}, {count(states.count('warning'), 'warning')}"


def vllm_flags(report: VllmConfigReport) -> list[str]:
    """Returns the flags of `vllm serve`, quoted for a shell, one a line."""
    configs = {
        "--kv-transfer-config": report.kv_transfer_config,
        "--ec-transfer-config": report.ec_transfer_config,
    }
    return [
        f"{flag} {shlex.quote(json.dumps(config, separators=(',', ':')))}"
        for flag, config in configs.items()
        if config is not None
    ]
