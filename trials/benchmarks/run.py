"""All benchmarks, one after the other: tables on the terminal, JSON under .benchmarks/.

    python -m trials.benchmarks.run [NAME ...]

Ratios within one run are what counts; absolute numbers say as much about the machine. Nothing here fails for
being slow.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    here = Path(__file__).parent
    names = sys.argv[1:] or sorted(path.stem.removeprefix("bench_") for path in here.glob("bench_*.py"))
    out = ROOT / ".benchmarks"
    out.mkdir(exist_ok=True)
    failed = []
    for name in names:
        print(f"== {name}", flush=True)
        command = [
            sys.executable,
            "-m",
            f"trials.benchmarks.bench_{name}",
            "--json",
            str(out / f"{name}.json"),
        ]
        if subprocess.run(command, cwd=ROOT, check=False).returncode:
            failed.append(name)
    print(f"JSON in {out.relative_to(ROOT)}/" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
