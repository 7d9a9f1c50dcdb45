"""Names that others have too: the package's on PyPI, and those of its top-level packages."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
#: Files that nobody installs anything by: what is generated for locks, and data.
_NOT_TEXT = {".lock", ".svg", ".safetensors", ".json"}
#: pip (or uv pip) told to install `kvstore` by name: not a path, a file or a URL.
_BY_NAME = re.compile(r"pip3?\b[^\n`]*\binstall\b[^\n`]*?[\s'\"]kvstore(?![\w./-])")


def texts() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True)
    names = listed.stdout.decode().split("\0") if listed.returncode == 0 else []
    return [
        ROOT / name
        for name in names
        if name and Path(name).suffix not in _NOT_TEXT and (ROOT / name).is_file()
    ]


def test_nothing_tells_to_install_a_strangers_package() -> None:
    """`kvstore` on PyPI is somebody else's."""
    found = texts()
    if not found:
        pytest.skip("no git here: which files are the project's is not known")
    wrong = []
    for file in found:
        text = file.read_text(encoding="utf-8", errors="replace").replace("\\\n", " ")
        for line in text.splitlines():
            if _BY_NAME.search(line) and "--no-index" not in line and file != Path(__file__):
                wrong.append(f"{file.relative_to(ROOT)}: {line.strip()}")
    assert not wrong, "\n".join(["name a checkout, a wheel or an image:", *wrong])


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("pip install kvstore", True),
        ("pip install 'kvstore[cli]'", True),
        ("uv pip install --upgrade kvstore==0.1.0", True),
        ("pip install '.[cli]'", False),
        ("pip install ./kvstore-0.1.0-py3-none-any.whl", False),
        ("pip install /wheels/kvstore-0.1.0-py3-none-any.whl", False),
        ("helm install kvstore ./helm", False),
    ],
)
def test_what_counts_as_telling_so(line: str, wrong: bool) -> None:
    assert bool(_BY_NAME.search(line)) == wrong


def run(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(folder), str(ROOT)])
    environ = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(
        [sys.executable, "-c", code], env=environ, cwd=folder.parent, capture_output=True, text=True
    )


def test_a_strangers_schemas_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "schemas").mkdir()
    (tmp_path / "schemas" / "__init__.py").touch()
    ran = run("from kvstore.cli import main; main()", tmp_path)
    assert ran.returncode != 0
    assert ran.stderr.splitlines()[-1].startswith("ImportError: kvstore: the package `schemas`")
    assert str(tmp_path) in ran.stderr


def test_the_doctor_sees_a_strangers_connectors(tmp_path: Path) -> None:
    (tmp_path / "connectors").mkdir()
    (tmp_path / "connectors" / "__init__.py").touch()
    code = (
        "from kvstore.admin.doctor.machine import check_versions\n"
        "print(*[f'{one.state} {one.found}' for one in check_versions()], sep='\\n')"
    )
    versions, *problems = run(code, tmp_path).stdout.splitlines()
    assert versions.startswith("ok kvstore") and len(problems) == 1
    assert problems[0].startswith("problem the package `connectors`") and str(tmp_path) in problems[0]
    elsewhere = tmp_path / "elsewhere" / "empty"
    elsewhere.mkdir(parents=True)
    assert run(code, elsewhere).stdout.splitlines() == [versions]
