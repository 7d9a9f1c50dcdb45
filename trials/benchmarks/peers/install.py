"""The peers in a venv of their own, beside .venv's vLLM and torch, which they share.

    .venv/bin/python -m trials.benchmarks.peers.install [FOLDER]

LMCache's wheel asks for CUDA packages, and for older ones of some that vLLM has newer: nothing is installed
but what is named here.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / ".cache" / "peers" / "venv"
#: The peers, and what they import that vLLM doesn't.
PINNED = (
    "lmcache==0.5.6",
    "mooncake-transfer-engine-non-cuda==0.3.13.post1",
    "aiofile==3.12.3",
    "caio==0.12.10",
    "aiofiles==25.1.0",
    "awscrt==0.38.1",
    "msgpack==1.2.4",
    "nvtx==0.2.17",
    "opentelemetry-exporter-prometheus==0.66b2",
)


def install(folder: Path) -> Path:
    """Returns the venv's Python; does nothing if all is there."""
    python, shared = folder / "bin" / "python", sysconfig.get_path("purelib")
    stamp, wanted = folder / "installed.txt", "\n".join([shared, *PINNED])
    if stamp.exists() and stamp.read_text() == wanted and python.exists():
        return python
    print(f"installing {PINNED[0]}, {PINNED[1]} and what they need", flush=True)
    venv.create(folder, with_pip=True, clear=True)
    inside = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    # After the venv's own packages, which so come first.
    (inside / "shared.pth").write_text(f"import site; site.addsitedir({shared!r})\n")
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", *PINNED], check=True)
    check = "import lmcache.lmcache_native, lmcache.cli.main, mooncake.store, vllm"
    subprocess.run([python, "-c", check], check=True, stdout=subprocess.DEVNULL)
    stamp.write_text(wanted)
    return python


if __name__ == "__main__":
    print(install(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER))
