"""The connectors on a vLLM of which no CPU build is published yet: its Python files over the compiled parts
of the CPU build that there is. The contract, the connectors' own tests, and an engine.

tools/setup.sh unpacks the files. The test here runs others in a process that imports them.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from connectors.engine.version import NEWEST
from tests.waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
#: In one process, since each imports vLLM anew.
TESTS = [
    "tests/connectors/test_vllm_contract.py",
    "tests/connectors/test_vllm_facts.py",
    "tests/connectors/engine",
    "tests/connectors/kv",
    "tests/connectors/ec",
    "tests/connectors/tier",
    "tests/e2e/test_sleep.py",
]
#: What takes long among them and is about no vLLM: arithmetic of ours, torch and Triton.
APART = [
    "tests/connectors/engine/paging",
    "tests/connectors/engine/test_shards.py",
    "tests/connectors/kv/test_simulated.py",
    "tests/connectors/tier/test_planning.py",
]
VERSION = re.findall(r"^VLLM_NEXT=(\S+)", (ROOT / "tools/setup.sh").read_text(), re.MULTILINE)[0]
TREE = ROOT / ".cache" / "vllm" / VERSION / "vllm"


def test_it_is_the_newest_that_is_supported() -> None:
    assert tuple(map(int, VERSION.split(".")[:2])) == NEWEST


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """The environment of a process that imports the next vLLM."""
    installed = importlib.util.find_spec("vllm")
    if installed is None or installed.origin is None:
        pytest.skip("the connectors' tests need the full set-up: make setup")
    if not TREE.exists():
        pytest.skip(f"NOT TESTED WITH VLLM {VERSION}: no {TREE}. tools/setup.sh full says why")
    laid = tmp_path / "vllm"
    laid.mkdir()
    for one in [*TREE.iterdir(), *Path(installed.origin).parent.glob("*.so")]:
        (laid / one.name).symlink_to(one)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return kept | {"PYTHONPATH": str(tmp_path), "VLLM_TARGET_DEVICE": "cpu"}


@pytest.mark.engine
@pytest.mark.timeout(1800)
def test_on_the_next_vllm(environment: dict[str, str]) -> None:
    where = "from importlib.util import find_spec; print(find_spec('vllm').origin)"
    found = subprocess.run(
        [sys.executable, "-c", where], env=environment, capture_output=True, text=True, check=True
    )
    assert Path(found.stdout.strip()).is_relative_to(environment["PYTHONPATH"])
    assert all((ROOT / one).exists() for one in [*TESTS, *APART])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", *TESTS]
    ran = subprocess.run(
        [*command, *(f"--ignore={one}" for one in APART)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=14 * PATIENCE_S,
    )
    assert ran.returncode == 0, ran.stdout[-8000:] + ran.stderr[-2000:]
