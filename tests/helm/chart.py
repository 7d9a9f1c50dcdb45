"""Renders the chart with the real helm. Renders are kept: the same values cost one run per process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm"
#: A new enough cluster that every API version the chart may ask for is there.
KUBE_VERSION = "1.34.0"

Manifest = dict[str, Any]


def helm() -> str:
    """The binary that tools/setup.sh installs, or one on PATH; a test without either is skipped."""
    ours = ROOT / ".cache" / "tools" / "helm"
    found = str(ours) if ours.is_file() else shutil.which("helm")
    if found is None:
        pytest.skip("no helm: `make setup` installs it")
    return found


def run(*args: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run helm where it finds no settings of the user's, and no cluster."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("HELM_", "KUBE"))
    }
    environment |= {"KUBECONFIG": os.devnull, "HELM_CACHE_HOME": str(ROOT / ".cache" / "helm")}
    return subprocess.run(
        [helm(), *args], input=stdin, capture_output=True, text=True, timeout=60, env=environment
    )


def _template(
    values: Mapping[str, Any] | Path | None,
    name: str,
    namespace: str,
    kube: str,
    notes: bool,
    apis: tuple[str, ...],
) -> subprocess.CompletedProcess[str]:
    text = values.read_text() if isinstance(values, Path) else json.dumps(dict(values or {}))
    return _rendered(text, name, namespace, kube, notes, apis)


@cache
def _rendered(
    text: str, name: str, namespace: str, kube: str, notes: bool, apis: tuple[str, ...]
) -> subprocess.CompletedProcess[str]:
    verb = ["install", name, str(CHART), "--dry-run"] if notes else ["template", name, str(CHART)]
    options = ["--namespace", namespace, "-f", "-"]
    if not notes:
        options += ["--kube-version", kube]
        for api in apis:
            options += ["--api-versions", api]
    return run(*verb, *options, stdin=text)


def render(
    values: Mapping[str, Any] | Path | None = None,
    *,
    name: str = "cache",
    namespace: str = "inference",
    kube: str = KUBE_VERSION,
    apis: tuple[str, ...] = (),
) -> list[Manifest]:
    """What would be installed, in helm's order. Fails the test with helm's words if it can't be rendered."""
    done = _template(values, name, namespace, kube, False, apis)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def fails(values: Mapping[str, Any] | Path | None) -> str:
    """What helm says when it refuses these values. Fails the test if it doesn't."""
    done = _template(values, "cache", "inference", KUBE_VERSION, False, ())
    assert done.returncode != 0, "rendered"
    return done.stderr


def pick(manifests: list[Manifest], kind: str, name: str | None = None) -> Manifest:
    """The one manifest of that kind, and name if several are of it."""
    found = [m for m in manifests if m["kind"] == kind and name in (None, m["metadata"]["name"])]
    assert len(found) == 1, f"{len(found)} of {kind} {name or ''}"
    return found[0]
