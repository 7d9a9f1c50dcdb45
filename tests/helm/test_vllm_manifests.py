"""docs/kubernetes: valid, restricted, and what the chart's notes print; the guide names what there is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from connectors.engine import version as compat
from schemas.settings import TransferSettings
from tests.helm.chart import CHART, KUBES, ROOT, Manifest, pick
from tests.helm.pods import containers, violations
from tests.helm.test_vllm import ALL, BUCKET, config_map, pod_of

FOLDER = ROOT / "docs" / "kubernetes"
MANIFESTS: list[Manifest] = list(yaml.safe_load_all((FOLDER / "vllm.yaml").read_text()))
TEMPLATE: dict[str, Any] = pick(MANIFESTS, "Deployment")["spec"]["template"]
SPEC: dict[str, Any] = TEMPLATE["spec"]
[INSTALL] = [one for one in SPEC["initContainers"] if one["name"] == "install"]
[ENGINE] = SPEC["containers"]
GUIDE = (ROOT / "docs" / "vllm-on-kubernetes.md").read_text()


@pytest.mark.parametrize("kube", KUBES)
def test_kubernetes_accepts_every_manifest(kube: str) -> None:
    for manifest in MANIFESTS:
        assert kubernetes_validate.validate(manifest, kube, strict=True)
    assert kube in GUIDE.split("## What was tried")[1]


def test_pods_are_restricted() -> None:
    assert not violations(SPEC)
    assert SPEC["automountServiceAccountToken"] is SPEC["enableServiceLinks"] is False
    for one in containers(SPEC):
        assert (
            one["securityContext"]["readOnlyRootFilesystem"] is True
            and "memory" in one["resources"]["limits"]
        )
    mounted = {mount["name"] for one in containers(SPEC) for mount in one["volumeMounts"]}
    assert mounted == {volume["name"] for volume in SPEC["volumes"]}
    local = [
        one["name"]
        for one in SPEC["volumes"]
        if one.get("emptyDir", {"medium": "Memory"}).get("medium") is None
    ]
    [evictable] = TEMPLATE["metadata"]["annotations"].values()
    assert evictable.split(",") == local


def test_selectors_find_the_pods() -> None:
    labels = TEMPLATE["metadata"]["labels"].items()
    for kind in ("Deployment", "PodDisruptionBudget"):
        assert pick(MANIFESTS, kind)["spec"]["selector"]["matchLabels"].items() <= labels
    service = pick(MANIFESTS, "Service")["spec"]
    assert service["selector"].items() <= labels
    assert [one["targetPort"] for one in service["ports"]] == [one["name"] for one in ENGINE["ports"]]


def test_an_end_and_a_start_have_the_time_that_they_take() -> None:
    [given] = [
        int(word.partition("=")[2]) for word in ENGINE["args"] if word.startswith("--shutdown-timeout=")
    ]
    before = int(ENGINE["lifecycle"]["preStop"]["exec"]["command"][1])
    assert SPEC["terminationGracePeriodSeconds"] > given + before and given > TransferSettings().drain_s
    probe = ENGINE["startupProbe"]
    patience = pick(MANIFESTS, "Deployment")["spec"]["progressDeadlineSeconds"]
    assert patience > probe["periodSeconds"] * probe["failureThreshold"]


def test_a_pod_is_as_the_notes_of_a_default_release_say() -> None:
    pod = pod_of(BUCKET, name="kvstore")
    assert pod["labels"].items() <= TEMPLATE["metadata"]["labels"].items()
    for place, name in ((ENGINE, "env"), (ENGINE, "volumeMounts"), (SPEC, "volumes")):
        assert [one for one in place[name] if one in pod[name]] == pod[name]
    config = ENGINE["args"][ENGINE["args"].index("--config") + 1]
    assert config.removeprefix("/etc/kvstore/") in config_map(BUCKET)


def test_production_stack_is_given_the_same() -> None:
    pod = pod_of(BUCKET, name="kvstore")
    [model] = yaml.safe_load((FOLDER / "production-stack.yaml").read_text())["servingEngineSpec"]["modelSpec"]
    found = [model[name] for name in ("podLabels", "env", "extraVolumes", "extraVolumeMounts")]
    assert found == [pod[name] for name in ("labels", "env", "volumes", "volumeMounts")]
    assert model["vllmConfig"]["extraArgs"] == [
        word for word in ENGINE["args"] if word in model["vllmConfig"]["extraArgs"]
    ]


def test_versions() -> None:
    store = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    images = {one["name"]: one["image"] for one in containers(SPEC)}
    assert images["wheels"] == f"ghcr.io/kvstore/kvstore:{store}"
    assert f"kvstore-vllm[cli]=={store}" in INSTALL["args"][0]
    vllm = images["vllm"].partition(":v")[2]
    assert images["install"] == images["vllm"] == f"docker.io/vllm/vllm-openai:v{vllm}"
    # The newest whose engines the tests run, which may be older than the newest that is supported.
    assert compat.OLDEST <= tuple(map(int, vllm.split(".")))[:2] <= compat.NEWEST
    dockerfile = (FOLDER / "Dockerfile").read_text()
    assert f"ARG VLLM=v{vllm}\n" in dockerfile and f"ARG KVSTORE={store}\n" in dockerfile


def test_the_guide_names_what_there_is() -> None:
    table = GUIDE.split("## Kinds of engines")[1].split("## ")[0]
    assert set(re.findall(r"`([a-z-]+\.yaml)`", table)) == {
        name for name in config_map(ALL) if name.endswith(".yaml") and not name.startswith("settings")
    }
    apart = GUIDE.split("## Prefill and decode apart")[1].split("## Several models")[0]
    assert set(re.findall(r"([a-z]+-[a-z]+\.yaml)[`]", apart)) <= config_map(ALL).keys()
    for path in re.findall(r"docs/[\w/.-]+\.(?:yaml|py)", GUIDE):
        assert (ROOT / path).is_file(), path
    deployment = pick(MANIFESTS, "Deployment")["metadata"]["name"]
    assert set(re.findall(r"deploy(?:ment)?/(\w+)", GUIDE)) == {deployment, "kvstore"}
    assert f"get pods -l app={TEMPLATE['metadata']['labels']['app']} " in GUIDE


@pytest.mark.parametrize("name", ["pd", "epd"])
def test_the_proxies_take_what_the_pages_say(name: str) -> None:
    script = ROOT / "docs" / "examples" / f"{name}_proxy.py"
    done = subprocess.run([sys.executable, str(script), "--help"], capture_output=True, text=True)
    page = (ROOT / "docs" / f"{name}.md").read_text()
    [given] = re.findall(rf"^ *python docs/examples/{name}_proxy.py (.+)$", page, re.M)
    assert done.returncode == 0 and set(re.findall(r"--\w+", given)) <= set(re.findall(r"--\w+", done.stdout))


# The init container's script: kvstore beside what an image has, whatever that is.


def wheel(folder: Path, name: str, version: str, *requires: str) -> None:
    stem = name.replace("-", "_")
    info = f"{stem}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += "".join(f"Requires-Dist: {one}\n" for one in requires)
    files = {f"{stem}/__init__.py": "", f"{info}/METADATA": metadata}
    files[f"{info}/WHEEL"] = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in (*files, f"{info}/RECORD"))
    with zipfile.ZipFile(folder / f"{stem}-{version}-py3-none-any.whl", "w") as made:
        for path, text in files.items():
            made.writestr(path, text)


class Image:
    """A Python with pip and what a test puts there, and the pod's volumes."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.target = folder, folder / "kvstore"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "image")], check=True)
        [self._site] = folder.glob("image/lib/python*/site-packages")
        pip = distribution("pip")
        for top in {file.parts[0] for file in pip.files or ()} - {".."}:
            (self._site / top).symlink_to(str(pip.locate_file(top)))
        self.wheels = folder / "wheels"
        self.wheels.mkdir()
        for name, version, *requires in (
            ("kvstore-vllm", "0.1.0", "redis>=6", "numpy>=1.26"),
            ("redis", "8.1.0", "leaf"),
            ("leaf", "1.0"),
            ("numpy", "2.9.0"),
        ):
            wheel(self.wheels, name, version, *requires)

    def has(self, **versions: str) -> None:
        for name, version in versions.items():
            info = self._site / f"{name}-{version}.dist-info"
            info.mkdir()
            text = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
            (info / "METADATA").write_text(text)

    def install(self) -> subprocess.CompletedProcess[str]:
        """Runs the script, its volumes in the test's folder."""
        places = {
            "/opt/wheels": str(self.wheels),
            "/opt/kvstore": str(self.target),
            "/tmp/": f"{self._folder}/",
        }

        def here(text: str) -> str:
            return re.sub("|".join(places), lambda found: places[found[0]], text)

        kept = {name: text for name, text in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))}
        own = {one["name"]: here(one["value"]) for one in INSTALL["env"]}
        path = {"PATH": f"{self._folder / 'image' / 'bin'}:{kept['PATH']}", "HOME": str(self._folder)}
        words = [*INSTALL["command"], *map(here, INSTALL["args"])]
        return subprocess.run(words, capture_output=True, text=True, env=kept | own | path)

    def installed(self) -> set[str]:
        return {path.name.removesuffix(".dist-info") for path in self.target.glob("*.dist-info")}


@pytest.fixture
def image(tmp_path: Path) -> Image:
    return Image(tmp_path)


@pytest.mark.slow
def test_what_the_image_has_is_left_alone(image: Image) -> None:
    image.has(numpy="2.3.5")
    done = image.install()
    assert done.returncode == 0, done.stderr
    assert image.installed() == {"kvstore_vllm-0.1.0", "redis-8.1.0", "leaf-1.0"}
    # A container of the pod that is restarted does it again.
    assert image.install().returncode == 0


@pytest.mark.slow
def test_versions_that_do_not_agree_end_it(image: Image) -> None:
    image.has(numpy="2.3.5", redis="5.0.1")
    done = image.install()
    assert done.returncode != 0 and not image.installed()
    said = done.stdout + done.stderr
    assert re.search(r"kvstore-vllm\S* 0.1.0 depends on redis>=6", said) and "redis==5.0.1" in said


@pytest.mark.slow
def test_an_image_that_has_it_is_given_nothing(image: Image) -> None:
    image.has(numpy="2.3.5", redis="8.1.0", leaf="1.0", kvstore_vllm="0.1.0")
    done = image.install()
    assert done.returncode == 0 and not image.installed(), done.stderr
