"""Renders the chart under docs/kubernetes/vllm."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.helm.chart import KUBE_VERSION, ROOT, Manifest, run

EXAMPLE = ROOT / "docs" / "kubernetes" / "vllm"


@cache
def _rendered(values: str, pod: str, kube: str, name: str, chart: str) -> tuple[int, str, str]:
    options = ["--namespace", "inference", "--kube-version", kube, *(["-f", pod] if pod else [])]
    done = run("template", name, chart, *options, "-f", "-", stdin=values)
    return done.returncode, done.stdout, done.stderr


def _text(values: Mapping[str, Any] | Path) -> str:
    return values.read_text() if isinstance(values, Path) else json.dumps(dict(values))


def render_example(
    values: Mapping[str, Any] | Path,
    *,
    pod: Path | None = None,
    kube: str = KUBE_VERSION,
    name: str = "llm",
    chart: Path = EXAMPLE,
) -> list[Manifest]:
    """What would be installed as `name`. `pod`: the file of that name in the store's ConfigMap."""
    code, out, err = _rendered(_text(values), str(pod or ""), kube, name, str(chart))
    assert code == 0, err
    return [one for one in yaml.safe_load_all(out) if one]


def example_fails(values: Mapping[str, Any] | Path, pod: Path | None = None, *, name: str = "llm") -> str:
    """What helm says when it refuses these values. Fails the test if it doesn't."""
    code, _, err = _rendered(_text(values), str(pod or ""), KUBE_VERSION, name, str(EXAMPLE))
    assert code != 0, "rendered"
    return err
