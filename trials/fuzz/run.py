"""Fuzzes every target, guided by coverage: `make fuzz`, or

    python -m trials.fuzz.run [TARGET ...] [--seconds 30] [--jobs 2] [--json] [--keep]

Each target runs in a process of its own under atheris (libFuzzer for Python), from its seeds and the corpus
in the tree, until its time is over or something is found. The report tells executions, lines reached and
findings. An input that is a finding is left in build/fuzz. Exits with 1 for findings, with 3 without atheris.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from trials.fuzz.targets import BY_NAME, CORPUS, TARGETS, Target, corpus

ROOT = Path(__file__).parents[2]
WORK = ROOT / "build" / "fuzz"
#: Longest that one input may take; a process that needs more is ended, and the input is a finding.
_TIMEOUT_S = 10
_RSS_MIB = 2048


@dataclass(frozen=True)
class Row:
    """What became of one target."""

    target: str
    seconds: float
    executions: int
    #: Edges of the instrumented code that libFuzzer has seen, and inputs that brought new ones.
    edges: int
    inputs: int
    lines: int
    lines_of: int
    #: Files with inputs that are findings, and what each was.
    findings: tuple[str, ...]


def fuzz(target: Target, seconds: int) -> Row:
    """Runs one target for so long, or until it finds something."""
    work = WORK / target.name
    shutil.rmtree(work, ignore_errors=True)
    seeds, found, words = work / "seeds", work / "found", work / "words"
    for folder in (seeds, found):
        folder.mkdir(parents=True)
    for number, data in enumerate(corpus(target)):
        (seeds / f"{number:03}").write_bytes(data)
    words.write_text(
        "".join(f'"{"".join(f"{chr(92)}x{byte:02x}" for byte in word)}"\n' for word in target.words)
    )
    command = [
        sys.executable, "-m", "trials.fuzz.child", target.name, f"-max_total_time={seconds}",
        f"-timeout={_TIMEOUT_S}", f"-rss_limit_mb={_RSS_MIB}", f"-max_len={target.most_bytes}",
        f"-artifact_prefix={work}/", "-print_final_stats=1", str(found), str(seeds),
        *([f"-dict={words}"] if target.words else []),
    ]  # fmt: skip
    began = time.monotonic()
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path[1:])])}
    run = subprocess.run(
        command, cwd=ROOT, env=environ, stdin=subprocess.DEVNULL, capture_output=True, check=False
    )
    took = time.monotonic() - began
    said = run.stderr.decode(errors="replace") + run.stdout.decode(errors="replace")
    (work / "log").write_text(said)
    findings = [str(file.relative_to(ROOT)) for file in sorted(work.glob("*-*")) if file.is_file()]
    if run.returncode and not findings:
        findings.append(f"exit code {run.returncode}, see {(work / 'log').relative_to(ROOT)}")
    kept, lines, lines_of = _lines(target, environ)
    return Row(
        target.name,
        round(took, 1),
        max(map(int, re.findall(r"(?:number_of_executed_units: |^#)(\d+)", said, re.M)), default=0),
        max(map(int, re.findall(r"\bcov: (\d+)", said)), default=0),
        kept,
        lines,
        lines_of,
        tuple(findings),
    )


def _escaped(word: bytes) -> str:
    return "".join(f"\\x{byte:02x}" for byte in word)


def _lines(target: Target, environ: dict[str, str]) -> tuple[int, int, int]:
    """How many inputs are worth keeping, how many lines all of them reach, and of how many; also writes those
    inputs into the work folder. In a process of its own: tracing would slow this one's threads."""
    command = [sys.executable, "-m", "trials.fuzz.lines", target.name, str(WORK / target.name)]
    run = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, check=True)
    kept, lines, lines_of = map(int, run.stdout.split())
    return kept, lines, lines_of


def keep(target: Target) -> None:
    """Makes the inputs that are worth it the corpus in the tree; those that once were findings stay."""
    folder = CORPUS / target.name
    folder.mkdir(parents=True, exist_ok=True)
    for file in folder.glob("[0-9a-f]*"):
        file.unlink()
    for file in (WORK / target.name / "kept").iterdir():
        shutil.copy(file, folder / hashlib.sha256(file.read_bytes()).hexdigest()[:12])


def table(rows: list[Row]) -> str:
    """The report as text."""
    lines = [f"{'target':<12}{'seconds':>9}{'executions':>13}{'edges':>8}{'lines':>12}  findings"]
    for row in rows:
        reached = f"{row.lines}/{row.lines_of}"
        lines.append(
            f"{row.target:<12}{row.seconds:>9.0f}{row.executions:>13,}{row.edges:>8}{reached:>12}  "
            + (", ".join(row.findings) or "none")
        )
    total = sum(row.executions for row in rows)
    return "\n".join([*lines, f"{'all':<12}{sum(row.seconds for row in rows):>9.0f}{total:>13,}"])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m trials.fuzz.run")
    parser.add_argument("targets", nargs="*", metavar="TARGET", choices=[[], *BY_NAME], default=[])
    parser.add_argument("--seconds", type=int, default=30, help="for each target (30)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="targets at a time")
    parser.add_argument("--json", action="store_true", help="the report as JSON")
    parser.add_argument(
        "--keep", action="store_true", help="renew the corpus in the tree from what was found"
    )
    said = parser.parse_args()
    if importlib.util.find_spec("atheris") is None:
        print("fuzz: atheris is not installed; `make fuzz` installs it", file=sys.stderr)
        return 3
    targets = [BY_NAME[name] for name in said.targets] or list(TARGETS)
    with ThreadPoolExecutor(said.jobs) as pool:
        rows = list(pool.map(lambda target: fuzz(target, said.seconds), targets))
    if said.keep:
        for target in targets:
            keep(target)
    if said.json:
        where = {"python": platform.python_version(), "atheris": _atheris()}
        print(json.dumps({**where, "targets": [asdict(row) for row in rows]}, indent=1))
    else:
        print(table(rows))
    return 1 if any(row.findings for row in rows) else 0


def _atheris() -> str:
    try:
        return version("atheris")
    except PackageNotFoundError:
        return "unknown"


if __name__ == "__main__":
    raise SystemExit(main())
