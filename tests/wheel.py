"""The wheel as users install it, for tests of what an editable install hides."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("kvstore", "connectors", "schemas")


def build_wheel(folder: Path) -> Path:
    """Build kvstore's wheel into `folder`, of a copy of this tree. Needs the full set-up's setuptools."""
    folder.mkdir(parents=True, exist_ok=True)
    source = folder.parent / "source"
    source.mkdir()
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    options = ["--no-deps", "--no-build-isolation", "--quiet", "--disable-pip-version-check"]
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", *options, "-w", str(folder), str(source)], check=True
    )
    [wheel] = folder.glob("kvstore_vllm-*.whl")
    return wheel
