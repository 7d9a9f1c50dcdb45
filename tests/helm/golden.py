"""Renders that are kept: what a change of the chart changes for whom, to be read in a diff.

    python -m tests.helm.golden     # writes tests/helm/golden/*.yaml again

Generated passwords and certificates are left out, and files such as dashboards, which have their own tests.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml

from tests.helm.chart import CHART, Manifest, Values, render

FOLDER = Path(__file__).parent / "golden"
CASES: dict[str, Values] = {
    "minimal": {"payloads": {"s3": {"bucket": "my-bucket"}}},
    "small": CHART / "ci" / "small-values.yaml",
    "large": CHART / "ci" / "large-values.yaml",
}
#: Longer than this is a file.
_LONG = 4000


class _Dumper(yaml.SafeDumper):
    """Text of several lines as it is."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def text(name: str) -> str:
    """The render of that name, in the order of kinds and names."""
    manifests = sorted(render(CASES[name]), key=lambda one: (one["kind"], one["metadata"]["name"]))
    return "---\n".join(
        yaml.dump(_known(one), Dumper=_Dumper, sort_keys=True, width=120) for one in manifests
    )


def _known(manifest: Manifest) -> Manifest:
    if manifest["kind"] == "Secret":
        data = {key: "(left out)" for group in ("data", "stringData") for key in manifest.get(group, {})}
        manifest = {key: value for key, value in manifest.items() if key != "stringData"} | {"data": data}
    if manifest["kind"] == "ConfigMap":
        manifest = manifest | {"data": {key: _short(value) for key, value in manifest["data"].items()}}
    return manifest


def _short(value: Any) -> Any:
    return "(a file)" if len(value) > _LONG else value


def main() -> int:
    """Write them all."""
    FOLDER.mkdir(exist_ok=True)
    for name in CASES:
        (FOLDER / f"{name}.yaml").write_text(text(name))
        print(f"wrote {name}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
