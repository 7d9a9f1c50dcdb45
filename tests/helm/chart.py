"""Renders the chart with the real helm. Renders are kept: the same values cost one run per process."""

from __future__ import annotations

import atexit
import json
import os
import pickle
import re
import shutil
import subprocess
import tempfile
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
#: What the chart promises, a version of today, and the newest.
KUBES = ("1.25", "1.31", "1.34")

#: In C if there is one: dashboards are long.
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

Manifest = dict[str, Any]
Values = Mapping[str, Any] | Path | None


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
    environment |= {
        "KUBECONFIG": str(ROOT / ".cache" / "no-cluster"),
        "HELM_CACHE_HOME": str(ROOT / ".cache" / "helm"),
    }
    return subprocess.run(
        [helm(), *args], input=stdin, capture_output=True, text=True, timeout=60, env=environment
    )


@cache
def _rendered(
    text: str, chart: str, name: str, namespace: str, kube: str, apis: tuple[str, ...]
) -> subprocess.CompletedProcess[str]:
    options = ["--namespace", namespace, "--kube-version", kube, "-f", "-"]
    for api in apis:
        options += ["--api-versions", api]
    return run("template", name, chart, *options, stdin=text)


@cache
def _parsed(text: str) -> bytes:
    """The documents, pickled: a caller may change what it is given."""
    return pickle.dumps([one for one in yaml.load_all(text, Loader=_Loader) if one])


def _text(values: Values) -> str:
    return values.read_text() if isinstance(values, Path) else json.dumps(dict(values or {}))


@cache
def _chart_of_notes() -> str:
    """The chart, its notes a manifest: `helm template` leaves them out, and `install` wants a cluster."""
    copy = Path(tempfile.mkdtemp(prefix="chart-")) / "kvstore"
    atexit.register(shutil.rmtree, copy.parent, ignore_errors=True)
    shutil.copytree(CHART, copy, ignore=shutil.ignore_patterns("NOTES.txt"))
    shutil.copy(CHART / "templates" / "NOTES.txt", copy / "notes.txt")
    (copy / "templates" / "notes.yaml").write_text(
        'kind: Notes\ntext: {{ tpl (.Files.Get "notes.txt") . | toJson }}\n'
    )
    return str(copy)


def render(
    values: Values = None,
    *,
    name: str = "cache",
    namespace: str = "inference",
    kube: str = KUBE_VERSION,
    apis: tuple[str, ...] = (),
) -> list[Manifest]:
    """What would be installed, in helm's order. Fails the test with helm's words if it can't be rendered."""
    done = _rendered(_text(values), str(CHART), name, namespace, kube, apis)
    assert done.returncode == 0, done.stderr
    manifests: list[Manifest] = pickle.loads(_parsed(done.stdout))
    return manifests


def sources(values: Values = None) -> set[str]:
    """Returns the templates that have something to say to these values, by their paths in the chart."""
    done = _rendered(_text(values), str(CHART), "cache", "inference", KUBE_VERSION, ())
    assert done.returncode == 0, done.stderr
    return set(re.findall(r"(?m)^# Source: \w+/(\S+)$", done.stdout))


def fails(values: Values) -> str:
    """What helm says when it refuses these values. Fails the test if it doesn't."""
    done = _rendered(_text(values), str(CHART), "cache", "inference", KUBE_VERSION, ())
    assert done.returncode != 0, "rendered"
    return done.stderr


def pick(manifests: list[Manifest], kind: str, name: str | None = None) -> Manifest:
    """The one manifest of that kind, and name if several are of it."""
    found = [m for m in manifests if m["kind"] == kind and name in (None, m["metadata"]["name"])]
    assert len(found) == 1, f"{len(found)} of {kind} {name or ''}"
    return found[0]


def notes(values: Values = None, *, name: str = "cache", namespace: str = "inference") -> str:
    """What `helm install` says at its end."""
    done = _rendered(_text(values), _chart_of_notes(), name, namespace, KUBE_VERSION, ())
    assert done.returncode == 0, done.stderr
    found = [m for m in yaml.load_all(done.stdout, Loader=_Loader) if m and m["kind"] == "Notes"]
    return str(found[0]["text"])
