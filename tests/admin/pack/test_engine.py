"""The process that computes a pack: what it runs, and how it ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.admin.pack.engine import EngineFailed, compute
from kvstore.admin.progress import Silent
from schemas.settings import Settings

SETTINGS = Settings(payloads="memory://pack", index="memory://pack")

#: A vLLM that starts a process, as vLLM does, and can't be imported.
VLLM = """
import subprocess, sys
subprocess.run([sys.executable, "-c", "import json"], check=True)
raise ImportError("none")
"""


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module in the place of vLLM."""
    (modules := tmp_path / "modules").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(modules))
    return modules / "vllm.py"


def test_the_working_folder_holds_no_modules(
    tmp_path: Path, vllm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (prompts := tmp_path / "prompts").mkdir()
    monkeypatch.chdir(prompts)
    vllm.write_text(VLLM)
    (prompts / "json.py").write_text("open('ran', 'w')")
    with pytest.raises(EngineFailed, match=r"vLLM, which can't be imported here \(none\)"):
        compute([], ["model"], SETTINGS, tmp_path / "engine.log", Silent())
    assert not (prompts / "ran").exists()
