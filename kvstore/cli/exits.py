"""Exit codes of cache-admin: what a script may rely on. Printed in --help and in the reference."""

from __future__ import annotations

from enum import IntEnum

from kvstore.admin.exports import Refused
from kvstore.errors import ConfigError, CorruptPayload, KVStoreError, PermissionDenied, TransientError
from schemas.bench import BenchReport
from schemas.reports import DoctorReport, SegmentReport, StatusReport
from schemas.transfers import Ended, ExportReport, ImportReport, WarmReport


class ExitCode(IntEnum):
    """What a command ended with."""

    OK = 0
    ERROR = 1
    USAGE = 2
    PROBLEMS = 3
    REFUSED = 4
    UNREACHABLE = 5
    CANCELLED = 130


MEANINGS = {
    ExitCode.OK: "ok",
    ExitCode.ERROR: "error, such as an unknown id",
    ExitCode.USAGE: "wrong usage or wrong settings",
    ExitCode.PROBLEMS: "the command ran and found problems",
    ExitCode.REFUSED: "refused, because something is in the way; the message says what",
    ExitCode.UNREACHABLE: "index or payloads unreachable, or the disk failed",
    ExitCode.CANCELLED: "cancelled (Ctrl-C)",
}

_ENDS: dict[Ended, ExitCode] = {
    "complete": ExitCode.OK,
    "cancelled": ExitCode.CANCELLED,
    "broken": ExitCode.PROBLEMS,
    "failed": ExitCode.UNREACHABLE,
}


def of_error(exc: KVStoreError) -> ExitCode:
    """The code for an error that ended a command."""
    if isinstance(exc, ConfigError):
        return ExitCode.USAGE
    if isinstance(exc, CorruptPayload):
        return ExitCode.PROBLEMS
    if isinstance(exc, Refused):
        return ExitCode.REFUSED
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
    if isinstance(report, BenchReport):
        return _ENDS[report.ended]
    if isinstance(report, (ExportReport, ImportReport, WarmReport)):
        return _ENDS[report.ended] or (ExitCode.PROBLEMS if report.left_out else ExitCode.OK)
    return ExitCode.OK


def table() -> list[tuple[int, str]]:
    """Every code with its meaning."""
    return [(int(code), MEANINGS[code]) for code in ExitCode]
