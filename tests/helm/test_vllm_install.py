"""docs/kubernetes/vllm/files/install.sh: kvstore beside what an image has, whatever that is."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.helm.example import EXAMPLE
from tests.helm.vllm_image import closure

pytestmark = pytest.mark.slow


def wheel(folder: Path, name: str, version: str, *requires: str) -> None:
    stem = name.replace("-", "_")
    info = f"{stem}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += "".join(f"Requires-Dist: {one}\n" for one in requires)
    with zipfile.ZipFile(folder / f"{stem}-{version}-py3-none-any.whl", "w") as made:
        made.writestr(f"{stem}/__init__.py", f"version = '{version}'\n")
        made.writestr(f"{info}/METADATA", metadata)
        made.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        made.writestr(
            f"{info}/RECORD", f"{stem}/__init__.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n"
        )


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    folder = tmp_path / "wheels"
    folder.mkdir()
    wheel(folder, "kvstore-vllm", "0.1.0", "redis>=6", "numpy>=1.26")
    wheel(folder, "redis", "8.1.0", "leaf")
    wheel(folder, "leaf", "1.0")
    wheel(folder, "numpy", "2.9.0")
    return folder


class Image:
    """A Python with pip and what a test puts there."""

    def __init__(self, folder: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
        self._bin = folder / "bin"
        [self.site] = folder.glob("lib/python*/site-packages")
        for file in closure("pip")["pip"].files or ():
            top = file.parts[0]
            if top != ".." and not (self.site / top).exists():
                source = Path(str(closure("pip")["pip"].locate_file(top)))
                (self.site / top).symlink_to(source)

    def has(self, name: str, version: str) -> None:
        info = self.site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")

    def install(self, wheels: Path, target: Path) -> subprocess.CompletedProcess[str]:
        script = EXAMPLE / "files" / "install.sh"
        command = ["sh", str(script), str(wheels), str(target), "kvstore-vllm==0.1.0"]
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))
        }
        environment["PATH"] = f"{self._bin}:{environment['PATH']}"
        return subprocess.run(command, capture_output=True, text=True, env=environment)


@pytest.fixture
def image(tmp_path: Path) -> Image:
    return Image(tmp_path / "image")


def installed(target: Path) -> set[str]:
    return {path.name.removesuffix(".dist-info") for path in target.glob("*.dist-info")}


def test_what_the_image_has_is_left_alone(image: Image, wheels: Path, tmp_path: Path) -> None:
    image.has("numpy", "2.3.5")
    done = image.install(wheels, tmp_path / "target")
    assert done.returncode == 0, done.stderr
    assert installed(tmp_path / "target") == {"kvstore_vllm-0.1.0", "redis-8.1.0", "leaf-1.0"}
    # A container of the pod that is restarted does it again.
    assert image.install(wheels, tmp_path / "target").returncode == 0


def test_versions_that_do_not_agree_end_it(image: Image, wheels: Path, tmp_path: Path) -> None:
    image.has("numpy", "2.3.5")
    image.has("redis", "5.0.1")
    done = image.install(wheels, tmp_path / "target")
    assert done.returncode != 0
    assert "kvstore-vllm 0.1.0 depends on redis>=6" in done.stderr and "redis==5.0.1" in done.stderr
    assert not installed(tmp_path / "target")


def test_an_image_that_has_it(image: Image, wheels: Path, tmp_path: Path) -> None:
    for name, version in {"numpy": "2.3.5", "redis": "8.1.0", "leaf": "1.0", "kvstore-vllm": "0.1.0"}.items():
        image.has(name, version)
    done = image.install(wheels, tmp_path / "target")
    assert done.returncode == 0 and "has kvstore-vllm==0.1.0 already" in done.stdout
    assert not installed(tmp_path / "target")


def test_a_wheel_that_is_missing_ends_it(image: Image, wheels: Path, tmp_path: Path) -> None:
    (wheels / "leaf-1.0-py3-none-any.whl").unlink()
    done = image.install(wheels, tmp_path / "target")
    assert done.returncode != 0 and "leaf" in done.stderr
