"""The kernel without an accelerator: interpreted and compared with torch, and compiled for accelerators."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

torch = pytest.importorskip("torch", reason="the connectors' tests need the full set-up: make setup")
pytest.importorskip("triton", reason="vLLM's CPU build brings it; not every torch does")

from connectors.engine.tensors import PagedCache

pytestmark = pytest.mark.engine  # the full set-up, not an engine

ROOT = Path(__file__).parents[4]


def run(*what: str, **environment: str) -> Any:
    command = [sys.executable, "-W", "ignore", "-m", "tests.connectors.engine.paging.kernel_cases", *what]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_it_copies_what_torch_copies(tmp_path: Path) -> None:
    seen = run("interpret", str(tmp_path), TRITON_INTERPRET="1")
    assert seen["cases"] > 150
    assert {f"dimensions {n}" for n in (1, 2, 3)} | {f"aligned {n}" for n in (1, 2, 4, 8, 16)} <= set(seen)


def test_accelerators_move_16_bytes_at_once(tmp_path: Path) -> None:
    """On NVIDIA and AMD, both ways; where pages aren't aligned, what is on their side is narrower."""
    found = run("compile", TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0")
    assert len(found) == 12
    for name, widths in found.items():
        arch = name.split()[0]
        addresses = 0 if arch.startswith("gfx") else 1
        half = sum(widths.values()) - addresses
        if "aligned 16" in name:
            assert widths["16"] == half and widths.get("8", 0) == addresses, name
        else:
            assert widths["8"] - addresses == 2 * widths["16"], name


def test_where_it_cannot_be_compiled_torch_serves(caplog: pytest.LogCaptureFixture, faults: object) -> None:
    caplog.set_level(logging.ERROR)
    layers = [torch.zeros(6, 1, 2, 8) for _ in range(3)]
    pages = PagedCache({0: layers}, 6)._pages
    fails = mock.Mock(side_effect=RuntimeError("Failed to find C compiler"))
    name = "connectors.engine.paging.kernel"
    with mock.patch.dict(sys.modules, {name: SimpleNamespace(copy_pages=fails)}):  # type: ignore[dict-item]
        assert pages._launched() is None
    assert fails.call_count == 1 and "Failed to find C compiler" in caplog.text
    assert pages.operations == 3
    # Its numbers are blocks still, not addresses.
    assert pages.numbers({0: [5, 2]}).tolist() == [5, 5, 5, 2, 2, 2]
