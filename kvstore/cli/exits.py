"""Exit codes of cache-admin: what a script may rely on. Printed in --help and in the reference."""

from __future__ import annotations

from enum import IntEnum
from functools import singledispatch

from kvstore.admin.archive.tar import BadArchive
from kvstore.admin.reports import Ended
from kvstore.errors import ConfigError, CorruptPayload, KVStoreError, PermissionDenied, TransientError


class ExitCode(IntEnum):
    """What a command ended with."""

    OK = 0
    ERROR = 1
    USAGE = 2
    PROBLEMS = 3
    PARTIAL = 4
    UNREACHABLE = 5
    CANCELLED = 130


MEANINGS = {
    ExitCode.OK: "ok",
    ExitCode.ERROR: "error, such as an unknown id or something in the way; the message says what",
    ExitCode.USAGE: "wrong usage or wrong settings",
    ExitCode.PROBLEMS: "the command ran and found problems",
    ExitCode.PARTIAL: "partial: some of it was done, and the report says what was not",
    ExitCode.UNREACHABLE: "index or payloads unreachable, or the disk failed",
    ExitCode.CANCELLED: "cancelled (Ctrl-C)",
}

#: What a verb may end with wherever it ends as a whole, by `ended` of its report.
ENDS: dict[Ended, ExitCode] = {
    "complete": ExitCode.OK,
    "cancelled": ExitCode.CANCELLED,
    "broken": ExitCode.PROBLEMS,
    "failed": ExitCode.UNREACHABLE,
}


def of_error(exc: KVStoreError) -> ExitCode:
    """Returns the code for an error that ended a command."""
    if isinstance(exc, ConfigError):
        return ExitCode.USAGE
    if isinstance(exc, (CorruptPayload, BadArchive)):
        return ExitCode.PROBLEMS
    if isinstance(exc, (TransientError, PermissionDenied)):
        return ExitCode.UNREACHABLE
    return ExitCode.ERROR


@singledispatch
def of_report(report: object) -> ExitCode:
    """Returns the code for what a verb has found: 0, unless its group in kvstore.cli.commands has a rule."""
    return ExitCode.OK


def table() -> list[tuple[int, str]]:
    """Returns every code with its meaning."""
    return [(int(code), MEANINGS[code]) for code in ExitCode]
