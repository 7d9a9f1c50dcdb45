"""Writes helm/files/dashboards/*.json from the YAML files beside this one.

python -m tools.dashboards            # writes them
python -m tools.dashboards --check    # says which aren't in step, and writes nothing
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import yaml

from tools.dashboards.grafana import made

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "helm" / "files" / "dashboards"


def files() -> dict[Path, str]:
    """Returns every dashboard's file and what belongs into it."""
    values = yaml.safe_load((ROOT / "helm" / "values.yaml").read_text(encoding="utf-8"))
    # templates/monitoring/dashboards.yaml puts a release's own address in its place.
    runbooks = str(values["monitoring"]["prometheusRule"]["runbooks"])
    found: dict[Path, str] = {}
    for path in sorted(Path(__file__).parent.glob("*.yaml")):
        described = yaml.safe_load(path.read_text(encoding="utf-8"))
        page = made(path.stem, runbooks, **described)
        found[FOLDER / f"{path.stem}.json"] = json.dumps(page, indent=1, ensure_ascii=False) + "\n"
    return found


def main() -> int:
    """Returns 0, or 1 with --check if a file is not in step."""
    options = argparse.ArgumentParser(prog="tools.dashboards", description="Writes the chart's dashboards.")
    options.add_argument("--check", action="store_true", help="write nothing")
    check = options.parse_args().check
    stale = [
        path
        for path, text in files().items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    for path in stale:
        if check:
            print(f"{path.relative_to(ROOT)} is not what its description says: python -m tools.dashboards")
        else:
            path.write_text(files()[path], encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
