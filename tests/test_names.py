"""Names that others have too: the distribution's on PyPI, and those of its top-level packages."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
#: Files that nobody installs anything by: what is generated for locks, and data.
_NOT_TEXT = {".lock", ".svg", ".safetensors", ".json"}
#: An installer told to install something of ours by name: not a path, a file or a URL.
_BY_NAME = re.compile(
    r"\b(?:pip3?|pipx|uv)\b[^\n`]*\b(?:install|add)\b[^\n`]*?[\s'\"](kvstore(?:[-_.]vllm)?)(?![\w./-])"
)


def misleads(line: str) -> bool:
    """Whether who obeys this line may get a stranger's package: `kvstore` is one, and `kvstore-vllm` is on no
    index until somebody has registered it, so it has to come from a folder of wheels."""
    return any(name == "kvstore" or "--no-index" not in line for name in _BY_NAME.findall(line))


def texts() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True)
    names = listed.stdout.decode().split("\0") if listed.returncode == 0 else []
    return [
        ROOT / name
        for name in names
        if name and Path(name).suffix not in _NOT_TEXT and (ROOT / name).is_file()
    ]


def test_nothing_tells_to_install_a_strangers_package() -> None:
    """`kvstore` on PyPI is somebody else's, and `kvstore-vllm` might become it."""
    found = texts()
    if not found:
        pytest.skip("no git here: which files are the project's is not known")
    wrong = []
    for file in found:
        text = file.read_text(encoding="utf-8", errors="replace").replace("\\\n", " ")
        for line in text.splitlines():
            if misleads(line) and file != Path(__file__):
                wrong.append(f"{file.relative_to(ROOT)}: {line.strip()}")
    assert not wrong, "\n".join(["name a checkout, a wheel or an image:", *wrong])


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("pip install kvstore", True),
        ("pip install 'kvstore[cli]'", True),
        ("uv pip install --upgrade kvstore==0.1.0", True),
        ("pip install --no-index --find-links /wheels kvstore", True),
        ("pip install kvstore-vllm", True),
        ("pip install 'kvstore_vllm[cli]==0.1.0'", True),
        ("uv add kvstore-vllm", True),
        ("pipx install 'kvstore-vllm[cli]'", True),
        ("pip install --no-index --find-links /wheels 'kvstore-vllm[cli]==0.1.0'", False),
        ("pip install '.[cli]'", False),
        ("pip install ./kvstore_vllm-0.1.0-py3-none-any.whl", False),
        ("pip install '/wheels/kvstore_vllm-0.1.0-py3-none-any.whl[cli]'", False),
        ("helm install kvstore ./helm", False),
    ],
)
def test_what_counts_as_telling_so(line: str, wrong: bool) -> None:
    assert misleads(line) == wrong


def test_the_distribution_has_a_name_of_its_own() -> None:
    """Its packages, its command and vLLM's plug-in are called as they always were."""
    about = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert about["name"] == "kvstore-vllm"
    assert about["scripts"] == {"cache-admin": "kvstore.cli:main"}
    assert about["entry-points"] == {"vllm.general_plugins": {"kvstore": "connectors.plugin:register"}}
    needed = [*about["dependencies"], *chain(*about["optional-dependencies"].values())]
    ours = [one for one in needed if one.startswith("kvstore")]
    assert ours and all(re.match(r"kvstore-vllm(?![\w-])", one) for one in ours), ours
    assert "/wheels/kvstore_vllm-*.whl" in (ROOT / "Dockerfile").read_text()


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


def test_the_doctor_sees_two_in_one_place(tmp_path: Path) -> None:
    """The stranger's, or ours by its old name: it stands where ours stands, and taking it away takes both."""
    info = tmp_path / "site" / "kvstore-0.1.1.dist-info"
    code = (
        "from kvstore.admin.doctor.machine import check_versions\n"
        "print(*[f'{one.state} {one.found} {one.advice}' for one in check_versions()], sep='\\n')"
    )
    alone = run(code, info.parent).stdout.splitlines()
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvstore\nVersion: 0.1.1\n")
    versions, warning = run(code, info.parent).stdout.splitlines()
    assert [versions] == alone
    assert warning.startswith("warning the distribution kvstore 0.1.1 is installed")
    assert "pip uninstall kvstore kvstore-vllm" in warning
