"""Exit codes of cache-admin: what a script may rely on. Printed in --help and in the reference."""

from __future__ import annotations

from enum import IntEnum

from kvstore.errors import ConfigError, CorruptPayload, KVStoreError, PermissionDenied, TransientError
from schemas.reports import DoctorReport, SegmentReport, StatusReport


class ExitCode(IntEnum):
    """4 is left for verbs that change something and find that they may not."""

    OK = 0
    ERROR = 1
    USAGE = 2
    PROBLEMS = 3
    UNREACHABLE = 5
    CANCELLED = 130


MEANINGS = {
    ExitCode.OK: "ok",
    ExitCode.ERROR: "error, such as an unknown id",
    ExitCode.USAGE: "wrong usage or wrong settings",
    ExitCode.PROBLEMS: "the command ran and found problems",
    ExitCode.UNREACHABLE: "index or payloads unreachable",
    ExitCode.CANCELLED: "cancelled (Ctrl-C)",
}


def of_error(exc: KVStoreError) -> ExitCode:
    """The code for an error that ended a command."""
    if isinstance(exc, ConfigError):
        return ExitCode.USAGE
    if isinstance(exc, CorruptPayload):
        return ExitCode.PROBLEMS
    if isinstance(exc, (TransientError, PermissionDenied)):
        return ExitCode.UNREACHABLE
    return ExitCode.ERROR


def of_report(report: object) -> ExitCode:
    """The code for what a command has found."""
    if isinstance(report, StatusReport):
        down = "unreachable" in (report.index.state, report.payloads.state)
        return ExitCode.UNREACHABLE if down else ExitCode.OK
    if isinstance(report, DoctorReport):
        return ExitCode.PROBLEMS if report.state == "problem" else ExitCode.OK
    if isinstance(report, SegmentReport):
        if report.damaged:
            return ExitCode.PROBLEMS
        return ExitCode.UNREACHABLE if report.index.state == "unreachable" else ExitCode.OK
    return ExitCode.OK


def table() -> list[tuple[int, str]]:
    """Every code with its meaning."""
    return [(int(code), MEANINGS[code]) for code in ExitCode]
