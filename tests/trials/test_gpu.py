"""The trial of a GPU runs without one, as far as it can, and finds what is planted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the connectors' tests need the full set-up: make setup")

from trials.gpu.order import FAULTS, PLANTED, SCENARIOS
from trials.gpu.pools import geometry, vllm_layouts, vllm_pools

pytestmark = pytest.mark.engine  # the full set-up, not an engine

ROOT = Path(__file__).parents[2]
#: What a machine with a GPU need not have: packages of the project's and of vLLM's.
ABSENT = """
import importlib.abc, runpy, sys
class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in {refused}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Refuse())
sys.argv = ["trials.gpu", *sys.argv[1:]]
runpy.run_module("trials.gpu", run_name="__main__", alter_sys=True)
"""
REFUSED = {
    "vllm", "redis", "hiredis", "obstore", "boto3", "msgspec", "pydantic", "pydantic_core", "yaml", "xxhash",
    "lz4", "blake3", "cryptography", "zmq", "typer", "rich", "prometheus_client", "pytest", "hypothesis",
}  # fmt: skip


def rows(*arguments: str, file: Path) -> list[dict[str, Any]]:
    """The rows of a trial on the fake accelerator, without what such a machine need not have."""
    code = ABSENT.replace("{refused}", repr(REFUSED))
    command = [sys.executable, "-c", code, "--fake", "--json", str(file), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found: list[dict[str, Any]] = json.loads(file.read_text())["rows"]
    assert all(row["name"] in done.stdout for row in found)
    return found


def test_everything_is_right_and_what_is_planted_is_found(tmp_path: Path) -> None:
    found = rows(file=tmp_path / "rows.json")
    results = {row["name"]: row["result"] for row in found if row["section"] != "launches for a segment"}
    assert set(results.values()) == {"ok"}, results
    assert (
        SCENARIOS.keys() <= results.keys() and {f"vLLM: {name}" for name in vllm_layouts()} <= results.keys()
    )
    planted = {row["name"]: row["text"] for row in found if row["section"] == PLANTED}
    assert planted.keys() == FAULTS.keys() and len(planted) > 20
    assert all(text.startswith("found in run") for text in planted.values()), planted


def test_vllm_lays_caches_out_as_it_did() -> None:
    """Write trials/gpu/layouts.json again if this fails: `json.dumps` of what is on the left."""
    pytest.importorskip("vllm", reason="the connectors' tests need the full set-up: make setup")
    from tests.trials.accelerator.test_operations import pools
    from trials.accelerator.layouts import LAYOUTS

    assert {name: [geometry(pool) for pool in pools(name)] for name in LAYOUTS} == vllm_layouts()
    assert all(geometry(pool) in vllm_layouts()[name] for name in LAYOUTS for pool in vllm_pools(name))


def test_a_fault_that_does_not_show_is_a_row_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    from trials.gpu import order
    from trials.gpu.machine import Fake
    from trials.gpu.report import Report

    name = "nobody waits for a copy"
    harmless = order._without("query", "Copied.wait", order.FAULTS[name].scenario)
    monkeypatch.setattr(order, "FAULTS", {name: harmless})
    monkeypatch.setattr(order, "SCENARIOS", {harmless.scenario: order.SCENARIOS[harmless.scenario]})
    report = Report({}, None)
    order.try_all(Fake(), report)
    assert report.failed == [name]
    assert "NOT FOUND" in report.table() and "not come to" in report.table()
