"""Renders that are kept: what a change of the chart changes for whom, to be read in a diff.

    python -m tests.helm.golden     # writes tests/helm/golden/*.yaml again

Each template is in one of them at least; what the others render as `minimal` does is not kept again. Left out
are generated passwords and certificates, and dashboards and rules of alerts, which have their own tests.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml

from tests.helm.chart import CHART, Manifest, Values, render

FOLDER = Path(__file__).parent / "golden"


def _with(name: str, **more: Any) -> Values:
    """Returns the values of a file under helm/ci, with `more` in the groups it has not."""
    values: dict[str, Any] = yaml.safe_load((CHART / "ci" / f"{name}-values.yaml").read_text())
    assert not values.keys() & more.keys()
    return values | more


#: A first try, with a key to a bucket; a claim that is followed, scraped pod by pod; a bucket and a Redis of
#: the cloud's, with all of the monitoring that scrapes Services.
CASES: dict[str, Values] = {
    "minimal": {"payloads": {"s3": {"bucket": "my-bucket", "accessKeyId": "id", "secretAccessKey": "key"}}},
    "small": _with(
        "small",
        monitoring={"podMonitor": {"enabled": True}, "engines": {"enabled": True}},
        follow={"enabled": True},
    ),
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
    """Returns what is kept of the render of that name, in the order of kinds and names."""
    manifests = sorted(render(CASES[name]), key=lambda one: (one["kind"], one["metadata"]["name"]))
    if name != "minimal":
        manifests = [one for one in manifests if _known(one) not in map(_known, render(CASES["minimal"]))]
    return "---\n".join(
        yaml.dump(_known(one), Dumper=_Dumper, sort_keys=True, width=120) for one in manifests
    )


def _known(manifest: Manifest) -> Manifest:
    if manifest["kind"] == "Secret":
        data = {key: "(left out)" for group in ("data", "stringData") for key in manifest.get(group, {})}
        manifest = {key: value for key, value in manifest.items() if key != "stringData"} | {"data": data}
    if manifest["kind"] == "PrometheusRule":
        groups = [group | {"rules": "(left out)"} for group in manifest["spec"]["groups"]]
        manifest = manifest | {"spec": {"groups": groups}}
    if manifest["kind"] == "ConfigMap":
        manifest = manifest | {"data": {key: _short(value) for key, value in manifest["data"].items()}}
    return manifest


def _short(value: Any) -> Any:
    return "(a file)" if len(value) > _LONG else value


def main() -> int:
    """Writes them all."""
    FOLDER.mkdir(exist_ok=True)
    for name in CASES:
        (FOLDER / f"{name}.yaml").write_text(text(name))
        print(f"wrote {name}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
