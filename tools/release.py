"""Checks whether a tag may be released: package, chart and changelog must say the same version.

    python -m tools.release v0.2.0 --notes notes.md

Writes the changelog's section to the file. Ends with 1 and a sentence for each thing that disagrees.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def chart_field(name: str, text: str) -> str | None:
    """Returns a top-level field of Chart.yaml, without a YAML parser: nothing is installed yet."""
    match = re.search(rf'^{name}: *"?([^"\s#]+)', text, re.M)
    return match[1] if match else None


def section(version: str, changelog: str) -> str | None:
    """Returns the changelog's section on a version; None if there is none, or it says unreleased."""
    match = re.search(rf"^## {re.escape(version)} *\(([^)\n]*)\)\n(.*?)(?=^## |\Z)", changelog, re.M | re.S)
    return None if match is None or match[1] == "unreleased" else match[2].strip() + "\n"


def wrong(tag: str, root: Path = ROOT) -> list[str]:
    """Returns a sentence for each thing that has to be done before this tag can be released."""
    version = tag.removeprefix("v")
    if not re.fullmatch(r"v\d+\.\d+\.\d+(rc\d+)?", tag):
        return [f"{tag} is not a version's tag; it looks like v1.2.3 or v1.2.3rc1"]
    found = []
    package = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    if package != version:
        found.append(f"pyproject.toml says version {package}, the tag {version}")
    chart = (root / "helm" / "Chart.yaml").read_text()
    if chart_field("appVersion", chart) != version:
        found.append(f"helm/Chart.yaml says appVersion {chart_field('appVersion', chart)}, the tag {version}")
    if section(version, (root / "CHANGELOG.md").read_text()) is None:
        found.append(f"CHANGELOG.md has no section `## {version} (DATE)`")
    return found


def main() -> int:
    """Prints what is wrong, or writes the notes."""
    parser = argparse.ArgumentParser(description="Check a tag against package, chart and changelog.")
    parser.add_argument("tag")
    parser.add_argument("--notes", type=Path, help="file for the changelog's section")
    asked = parser.parse_args()
    if found := wrong(asked.tag):
        print("\n".join(found), file=sys.stderr)
        return 1
    if asked.notes is not None:
        asked.notes.write_text(
            section(asked.tag.removeprefix("v"), (ROOT / "CHANGELOG.md").read_text()) or ""
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
