"""Exit codes of cache-admin: what a script may rely on. Printed in --help and in the reference."""

from __future__ import annotations

from enum import IntEnum
from functools import singledispatch

from kvstore.errors import ConfigError, CorruptPayload, KVStoreError, PermissionDenied, TransientError
from schemas.bench import BenchReport
from schemas.explain import ExplainReport
from schemas.repairs import DropReport, FsckReport, GcReport, RebuildReport
from schemas.reports import DoctorReport, SegmentReport, StatusReport
from schemas.serving import ProbeReport, ServingReport
from schemas.transfers import Ended, ExportReport, ImportReport, WarmReport
from schemas.upkeep import EvictReport, PinReport


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

_ENDS: dict[Ended, ExitCode] = {
    "complete": ExitCode.OK,
    "cancelled": ExitCode.CANCELLED,
    "broken": ExitCode.PROBLEMS,
    "failed": ExitCode.UNREACHABLE,
}
_UPKEEP_ENDS = {
    "complete": ExitCode.OK,
    "cancelled": ExitCode.CANCELLED,
    "failed": ExitCode.UNREACHABLE,
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


@singledispatch
def of_report(report: object) -> ExitCode:
    """The code for what a command has found. A report that has no rule below is ok."""
    return ExitCode.OK


@of_report.register
def _of_status(report: StatusReport) -> ExitCode:
    down = "unreachable" in (report.index.state, report.payloads.state)
    return ExitCode.UNREACHABLE if down else ExitCode.OK


@of_report.register
def _of_serving(report: ServingReport) -> ExitCode:
    if "unreachable" in (report.index.state, report.payloads.state):
        return ExitCode.UNREACHABLE
    failing = report.janitor is not None and any(step.failing for step in report.janitor.steps)
    return ExitCode.PARTIAL if failing else ExitCode.OK


@of_report.register
def _of_probe(report: ProbeReport) -> ExitCode:
    return ExitCode.OK if report.ready else ExitCode.UNREACHABLE


@of_report.register
def _of_doctor(report: DoctorReport) -> ExitCode:
    return ExitCode.PROBLEMS if report.state == "problem" else ExitCode.OK


@of_report.register
def _of_segment(report: SegmentReport) -> ExitCode:
    if report.damaged:
        return ExitCode.PROBLEMS
    return ExitCode.UNREACHABLE if report.index.state == "unreachable" else ExitCode.OK


@of_report.register
def _of_explain(report: ExplainReport) -> ExitCode:
    return ExitCode.PROBLEMS if report.damaged else ExitCode.OK


@of_report.register
def _of_bench(report: BenchReport) -> ExitCode:
    failed = any(speed.latency is None and speed.errors for speed in report.transfers)
    return _ENDS[report.ended] or (ExitCode.PARTIAL if failed else ExitCode.OK)


@of_report.register
def _of_export(report: ExportReport) -> ExitCode:
    return _of_transfer(report, report.exported.segments)


@of_report.register
def _of_import(report: ImportReport) -> ExitCode:
    return _of_transfer(report, report.imported.segments + report.present.segments)


@of_report.register
def _of_warm(report: WarmReport) -> ExitCode:
    return _of_transfer(report, report.warm.segments)


def _of_transfer(report: ExportReport | ImportReport | WarmReport, done: int) -> ExitCode:
    """Left out, or cut short by a damaged archive: partial if anything at all was done."""
    code = _ENDS[report.ended]
    if report.left_out and code is ExitCode.OK:
        code = ExitCode.PROBLEMS
    return ExitCode.PARTIAL if code is ExitCode.PROBLEMS and done and not report.dry_run else code


@of_report.register
def _of_fsck(report: FsckReport) -> ExitCode:
    left = report.found if report.remaining is None else report.remaining
    code = _ENDS[report.ended] or (ExitCode.PROBLEMS if left else ExitCode.OK)
    return ExitCode.PARTIAL if code is ExitCode.PROBLEMS and report.mended else code


@of_report.register
def _of_gc(report: GcReport) -> ExitCode:
    return _ENDS[report.ended] or (ExitCode.PARTIAL if report.problem else ExitCode.OK)


@of_report.register
def _of_rebuild(report: RebuildReport) -> ExitCode:
    listed = any(space.listed.segments for space in report.namespaces) and not report.dry_run
    left = (ExitCode.PARTIAL if listed else ExitCode.PROBLEMS) if report.left_out else ExitCode.OK
    return _ENDS[report.ended] or left


@of_report.register
def _of_drop(report: DropReport) -> ExitCode:
    return ExitCode.PARTIAL if report.state == "in_use" else ExitCode.OK


@of_report.register
def _of_evict(report: EvictReport) -> ExitCode:
    return _UPKEEP_ENDS[report.ended]


@of_report.register
def _of_pin(report: PinReport) -> ExitCode:
    if report.ended != "complete" or not report.left_out:
        return _UPKEEP_ENDS[report.ended]
    return ExitCode.PARTIAL if report.changed else ExitCode.PROBLEMS


def table() -> list[tuple[int, str]]:
    """Every code with its meaning."""
    return [(int(code), MEANINGS[code]) for code in ExitCode]
