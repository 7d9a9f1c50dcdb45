"""The chart under docs/kubernetes/vllm: valid, restricted, true to the store's chart and to the guide."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from connectors.engine import version as compat
from tests.helm.chart import CHART, ROOT, Manifest, pick, render, run
from tests.helm.example import EXAMPLE, example_fails, render_example
from tests.helm.pods import containers, pod_templates, violations
from tests.helm.test_vllm import BUCKET, SECURED, config_map, merged, pod_of
from tools.chart import generate

EVICTABLE = "cluster-autoscaler.kubernetes.io/safe-to-evict-local-volumes"
CI = sorted((EXAMPLE / "ci").glob("*-values.yaml"))
VARIANTS: dict[str, Any] = {"default": {}, **{path.name.removesuffix("-values.yaml"): path for path in CI}}
each_variant = pytest.mark.parametrize("values", VARIANTS.values(), ids=VARIANTS.keys())
PD = yaml.safe_load((EXAMPLE / "ci" / "pd-values.yaml").read_text())
EPD = yaml.safe_load((EXAMPLE / "ci" / "epd-values.yaml").read_text())


def names(manifests: list[Manifest], kind: str) -> set[str]:
    return {one["metadata"]["name"] for one in manifests if one["kind"] == kind}


def main_container(manifests: list[Manifest], deployment: str) -> dict[str, Any]:
    [one] = pick(manifests, "Deployment", deployment)["spec"]["template"]["spec"]["containers"]
    return dict(one)


@pytest.fixture
def pod_file(tmp_path: Path) -> Path:
    """What `kubectl get configmap ... > pod.yaml` writes, for a store with everything."""
    path = tmp_path / "pod.yaml"
    path.write_text(config_map(SECURED)["pod.yaml"])
    return path


# As a chart.


def test_schema_and_readme_are_what_the_values_say() -> None:
    files, problems = generate(EXAMPLE)
    assert not problems
    for path, text in files.items():
        assert path.read_text() == text, f"{path.name}: python -m tools.chart"


@each_variant
def test_lint(values: Any) -> None:
    chosen = ["--values", str(values)] if isinstance(values, Path) else []
    done = run("lint", "--strict", "--quiet", str(EXAMPLE), *chosen)
    assert done.returncode == 0 and "WARNING" not in done.stdout + done.stderr, done.stdout + done.stderr


@pytest.mark.parametrize("kube", ["1.25", "1.31", "1.34"])
@each_variant
def test_kubernetes_accepts_every_manifest(values: Any, kube: str) -> None:
    for manifest in render_example(values, kube=f"{kube}.0"):
        if manifest["kind"] != "PodMonitor":
            assert kubernetes_validate.validate(manifest, kube, strict=True)


@each_variant
def test_pods_are_restricted(values: Any) -> None:
    for what, template in pod_templates(render_example(values)):
        spec = template["spec"]
        assert not violations(spec), what
        assert spec["automountServiceAccountToken"] is False and spec["enableServiceLinks"] is False, what
        for one in containers(spec):
            assert one["securityContext"]["readOnlyRootFilesystem"] is True, (what, one["name"])
            assert "memory" in one["resources"]["limits"], (what, one["name"])
            paths = [mount["mountPath"] for mount in one["volumeMounts"]]
            assert len(paths) == len(set(paths)), (what, one["name"])
        volumes = [volume["name"] for volume in spec["volumes"]]
        mounted = {mount["name"] for one in containers(spec) for mount in one["volumeMounts"]}
        assert sorted(mounted) == sorted(volumes), what


def test_versions() -> None:
    about = yaml.safe_load((EXAMPLE / "Chart.yaml").read_text())
    store = yaml.safe_load((CHART / "Chart.yaml").read_text())
    values = yaml.safe_load((EXAMPLE / "values.yaml").read_text())
    # The newest whose engines the tests run, which may be older than the newest that is supported.
    assert compat.OLDEST <= tuple(map(int, about["appVersion"].split(".")))[:2] <= compat.NEWEST
    assert values["kvstore"]["install"]["requirement"] == f"kvstore-vllm[cli]=={store['appVersion']}"
    dockerfile = (EXAMPLE / "Dockerfile").read_text()
    assert f"ARG VLLM=v{about['appVersion']}\n" in dockerfile
    assert f"ARG KVSTORE={store['appVersion']}\n" in dockerfile
    manifests = render_example({})
    spec = pick(manifests, "Deployment")["spec"]["template"]["spec"]
    images = {one["name"]: one["image"] for one in containers(spec)}
    janitor = pick(render(BUCKET), "Deployment")["spec"]["template"]["spec"]["containers"][0]["image"]
    assert images["wheels"] == janitor
    assert images["install"] == images["vllm"] == f"docker.io/vllm/vllm-openai:v{about['appVersion']}"


# Against the store's chart.


def test_without_pod_yaml_it_is_as_for_the_store_by_default() -> None:
    store, pod = pod_of(BUCKET), pick(render_example({}), "Deployment")["spec"]["template"]
    assert store["podLabels"].items() <= pod["metadata"]["labels"].items()
    [engine] = pod["spec"]["containers"]
    assert engine["env"][: len(store["env"])] == store["env"]
    assert engine["volumeMounts"][: len(store["volumeMounts"])] == store["volumeMounts"]
    assert pod["spec"]["volumes"][: len(store["volumes"])] == store["volumes"]


#: Of releases' names, around where the store's chart begins to cut its own.
LENGTHS = (30, 36, 37, 44, 45, 50, 53)
LONG = [(start + "-name" * 10)[: length - 1] + "x" for start in ("a", "kvstore") for length in LENGTHS]


@pytest.mark.parametrize(
    "release",
    # The last is cut at a dash.
    ["cache", "kvstore", "my-kvstore-2", *LONG, "a" * 36 + "-" + "b" * 16],
)
def test_names_of_the_stores_release(release: str) -> None:
    text = json.dumps(render_example({"kvstore": {"release": release}}))
    store = render(BUCKET, name=release)
    config = next(one for one in names(store, "ConfigMap") if one.endswith("-vllm"))
    secret = next(one for one in names(store, "Secret") if one.endswith("-redis"))
    assert f'"name": "{config}"' in text and f'"name": "{secret}"' in text


def test_with_pod_yaml(pod_file: Path) -> None:
    pod = yaml.safe_load(pod_file.read_text())["kvstore"]
    template = pick(render_example({}, pod=pod_file), "Deployment")["spec"]["template"]
    spec, [engine] = template["spec"], template["spec"]["containers"]
    assert all(one in engine["env"] for one in pod["env"])
    assert all(one in engine["volumeMounts"] for one in pod["volumeMounts"])
    assert all(one in spec["volumes"] for one in pod["volumes"])
    # The node's folder is root's until it is given to the engines' user.
    [owner] = [one for one in spec["initContainers"] if one["name"] == "node-cache"]
    security = spec["securityContext"]
    path = next(one["mountPath"] for one in pod["volumeMounts"] if one["name"] == "node-cache")
    assert owner["command"] == ["chown", f"{security['runAsUser']}:{security['runAsGroup']}", path]
    assert owner["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["CHOWN"]}
    without = render_example({"kvstore": {"ownNodeCache": False}}, pod=pod_file)
    assert "chown" not in json.dumps(without)


def test_the_service_account_comes_along(tmp_path: Path) -> None:
    values = merged(
        BUCKET, {"serviceAccount": {"annotations": {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/r"}}}
    )
    (tmp_path / "pod.yaml").write_text(config_map(values)["pod.yaml"])
    spec = pick(render_example({}, pod=tmp_path / "pod.yaml"), "Deployment")["spec"]["template"]["spec"]
    assert spec["serviceAccountName"] in names(render(values), "ServiceAccount")


@each_variant
def test_every_config_is_one_that_the_store_renders(values: Any) -> None:
    files, manifests = config_map(BUCKET), render_example(values)
    seen = 0
    for one in manifests:
        if one["kind"] == "Deployment" and not one["metadata"]["name"].endswith("-router"):
            [engine] = one["spec"]["template"]["spec"]["containers"]
            assert engine["command"] == ["vllm", "serve"]
            config = engine["args"][engine["args"].index("--config") + 1]
            assert config.removeprefix("/etc/kvstore/") in files
            seen += 1
    assert seen


@each_variant
def test_a_new_version_of_the_chart_restarts_nothing(values: Any, tmp_path: Path) -> None:
    """A model takes minutes to load: pods are replaced when something in them changes."""
    newer = tmp_path / "chart"
    shutil.copytree(EXAMPLE, newer)
    about = (EXAMPLE / "Chart.yaml").read_text()
    changed = re.sub(r"^version: .+$", "version: 9.9.9", about, flags=re.M)
    assert changed != about
    (newer / "Chart.yaml").write_text(changed)
    before = dict(pod_templates(render_example(values)))
    assert before and before == dict(pod_templates(render_example(values, chart=newer)))


@each_variant
def test_pods_have_the_labels_that_select_them(values: Any) -> None:
    for one in render_example(values):
        if one["kind"] == "Deployment":
            selected = one["spec"]["selector"]["matchLabels"]
            own = {"kvstore/client": "true"} if not one["metadata"]["name"].endswith("-router") else {}
            assert one["spec"]["template"]["metadata"]["labels"] == selected | own


def _local(volumes: list[dict[str, Any]]) -> list[str]:
    """Those that keep a node, to the cluster autoscaler: all on its disk, and what is in memory not."""
    return [
        one["name"]
        for one in volumes
        if "hostPath" in one or ("emptyDir" in one and one["emptyDir"].get("medium") != "Memory")
    ]


@each_variant
def test_nodes_may_be_scaled_away(values: Any) -> None:
    for what, template in pod_templates(render_example(values)):
        local = _local(template["spec"]["volumes"])
        assert local and template["metadata"]["annotations"][EVICTABLE].split(",") == local, what


def test_nodes_with_a_cache_may_be_scaled_away(pod_file: Path) -> None:
    scratch: dict[str, Any] = {
        "extraVolumes": [{"name": "scratch", "emptyDir": {}}, {"name": "own", "hostPath": {"path": "/srv"}}]
    }
    mounts: dict[str, Any] = {
        "extraVolumeMounts": [{"name": name, "mountPath": f"/{name}"} for name in ("scratch", "own")]
    }
    template = pick(render_example(scratch | mounts, pod=pod_file), "Deployment")["spec"]["template"]
    local = _local(template["spec"]["volumes"])
    assert {"node-cache", "models", "home", "tmp", "scratch"} < set(local) and "shm" not in local
    # A folder of somebody else's on the node may be worth the node.
    named = template["metadata"]["annotations"][EVICTABLE].split(",")
    assert named == [name for name in local if name != "own"]
    own = render_example({"podAnnotations": {EVICTABLE: "tmp", "a": "b"}})
    [about] = [one["metadata"]["annotations"] for _, one in pod_templates(own)]
    assert about == {EVICTABLE: "tmp", "a": "b"}


@pytest.mark.parametrize("word", ["true", "1e3", "123"])
@each_variant
def test_names_that_yaml_takes_for_something_else_stay_text(values: Any, word: str) -> None:
    given = yaml.safe_load(values.read_text()) if isinstance(values, Path) else values
    named: dict[str, Any] = {"serviceAccountName": word, "runtimeClassName": word, "imagePullSecrets": [word]}
    named |= {"weights": {"existingClaim": word, "tokenSecret": word, "tokenKey": word}}
    named |= {"kvstore": {"release": word, "configMap": word}, "podMonitor": {"enabled": True}}
    named |= {"fullnameOverride": "true"}
    for one in render_example(merged(given, named), name=word):
        if one["kind"] == "PodMonitor":
            labels = one["spec"]["selector"]["matchLabels"]
            assert labels["app.kubernetes.io/instance"] == word and one["metadata"]["name"] == "true"
        else:
            assert kubernetes_validate.validate(one, "1.34", strict=True)
        assert isinstance(one["metadata"]["name"], str)
    assert pick(render_example({}, name="true"), "Service")["metadata"]["name"] == "true"


@pytest.mark.parametrize("name", ["123", "1e3", "a.b"])
def test_a_release_that_no_service_can_be_called(name: str) -> None:
    assert "Services with it" in example_fails({}, name=name)
    assert render_example({"fullnameOverride": "llm"}, name=name)


def test_two_long_names_stay_two() -> None:
    long = "a" * 51
    found = [names(render_example(PD, name=long + end), "Service") for end in ("-b", "-c")]
    assert not found[0] & found[1]
    assert all(len(name) <= 63 for one in found for name in one)


# Pools and the router.


def test_replicas() -> None:
    manifests = render_example({"engines": {"replicas": 5, "args": ["--tensor-parallel-size", "2"]}})
    assert names(manifests, "Deployment") == names(manifests, "Service") == {"llm"}
    deployment = pick(manifests, "Deployment")
    assert deployment["spec"]["replicas"] == 5
    assert main_container(manifests, "llm")["args"][-2:] == ["--tensor-parallel-size", "2"]


def test_a_budget_where_more_than_one_runs() -> None:
    manifests = render_example(merged(PD, {"prefill": {"replicas": 3}, "decode": {"replicas": 1}}))
    assert names(manifests, "PodDisruptionBudget") == {"llm-prefill"}
    assert names(render_example(VARIANTS["replicas"]), "PodDisruptionBudget") == {"llm"}


def test_an_end_has_the_time_that_it_takes() -> None:
    manifests = render_example({"shutdownSeconds": 90})
    spec = pick(manifests, "Deployment")["spec"]["template"]["spec"]
    [engine] = spec["containers"]
    given = int(engine["args"][engine["args"].index("--shutdown-timeout") + 1])
    before = int(engine["lifecycle"]["preStop"]["exec"]["command"][1])
    assert given == 90 and spec["terminationGracePeriodSeconds"] > given + before
    # Saves have their time within it.
    from schemas.settings import TransferSettings

    assert (
        TransferSettings().drain_s
        < 60
        == yaml.safe_load((EXAMPLE / "values.yaml").read_text())["shutdownSeconds"]
    )


def test_a_start_has_the_time_that_it_takes() -> None:
    deployment = pick(render_example({"startSeconds": 3600}), "Deployment")["spec"]
    [engine] = deployment["template"]["spec"]["containers"]
    probe = engine["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == 3600
    assert deployment["progressDeadlineSeconds"] > 3600


@pytest.mark.parametrize(
    ("variant", "script", "targets"),
    [
        ("pd", "pd_proxy.py", {"--prefill": "llm-prefill", "--decode": "llm-decode"}),
        ("epd", "epd_proxy.py", {"--encode": "llm-encode", "--decode": "llm-engines"}),
        (
            "e-p-d",
            "epd_proxy.py",
            {"--encode": "llm-encode", "--prefill": "llm-prefill", "--decode": "llm-decode"},
        ),
    ],
)
def test_the_router_knows_the_services(variant: str, script: str, targets: dict[str, str]) -> None:
    manifests = render_example(VARIANTS[variant])
    router = main_container(manifests, "llm-router")
    assert router["command"][1] == f"/opt/router/{script}"
    words = router["args"]
    assert dict(zip(words[::2], words[1::2], strict=True)) == {
        flag: f"http://{name}:8000" for flag, name in targets.items()
    }
    for name in targets.values():
        service = pick(manifests, "Service", name)["spec"]
        assert [one["port"] for one in service["ports"]] == [8000]
        labels = pick(manifests, "Deployment", name)["spec"]["template"]["metadata"]["labels"]
        assert service["selector"].items() <= labels.items()
    front = pick(manifests, "Service", "llm")["spec"]["selector"]
    assert front["app.kubernetes.io/component"] == "router"
    # The script is there, and takes these arguments.
    files = pick(manifests, "ConfigMap", "llm-files")["data"]
    done = subprocess.run(
        [sys.executable, "-c", files[script], *router["command"][2:], *words, "--help"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "--decode" in done.stdout, done.stderr
    # It opens no store.
    labels = pick(manifests, "Deployment", "llm-router")["spec"]["template"]["metadata"]["labels"]
    assert "kvstore/client" not in labels


def test_a_router_of_ones_own() -> None:
    manifests = render_example(merged(PD, {"router": {"enabled": False}}))
    assert names(manifests, "Deployment") == names(manifests, "Service") == {"llm-prefill", "llm-decode"}


def test_an_image_with_the_package_installs_nothing() -> None:
    manifests = render_example({"kvstore": {"install": {"enabled": False}}})
    spec = pick(manifests, "Deployment")["spec"]["template"]["spec"]
    assert "initContainers" not in spec and "/opt/kvstore" not in json.dumps(manifests)
    assert not names(manifests, "ConfigMap")


def test_scaling() -> None:
    manifests = render_example(VARIANTS["replicas"])
    scaler = pick(manifests, "HorizontalPodAutoscaler")["spec"]
    assert scaler["scaleTargetRef"]["name"] in names(manifests, "Deployment")
    # Who scales decides on the number.
    assert "replicas" not in pick(manifests, "Deployment")["spec"]
    monitor = pick(manifests, "PodMonitor")["spec"]
    labels = pick(manifests, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert monitor["selector"]["matchLabels"].items() <= labels.items()
    ports = {one["name"] for one in main_container(manifests, "llm")["ports"]}
    assert {one["port"] for one in monitor["podMetricsEndpoints"]} <= ports


# Refused.


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"engines": {"enabled": False}}, "nothing would run"),
        (
            {"prefill": {"enabled": True}, "engines": {"enabled": False}},
            "prefill is enabled and decode isn't",
        ),
        ({"decode": {"enabled": True}}, "decode is enabled and prefill isn't"),
        (merged(PD, {"engines": {"enabled": True}}), "engines and prefill are both enabled"),
        (merged(EPD, {"engines": {"kind": "kv-ec"}}), "which encodes by itself: set it to epd-language"),
        (merged(PD, {"encode": {"enabled": True}}), "prefill.kind is pd-prefill"),
        (merged(EPD, {"engines": {"enabled": False}}), "no engine uses what it stores"),
        ({"engines": {"kind": "epd-language"}}, "encode isn't enabled: every engine would encode"),
        (
            merged(PD, {"prefill": {"kind": "epd-prefill"}}),
            "prefill.kind is epd-prefill and encode isn't enabled",
        ),
        ({"autoscaling": {"enabled": True}}, "autoscaling.metrics is empty"),
        ({"autoscaling": {"minReplicas": 9}}, "minReplicas is larger"),
        ({"weights": {"readOnly": True}}, "weights.readOnly is for a claim"),
        *(
            ({"kvstore": {"install": {"requirement": one}}}, f"requirement is {one}: write kvstore-vllm[")
            for one in ("kvstore-vllm", "kvstore-vllm[cli]", "kvstore[cli]==0.1.0", "kvstore-vllm == 0.1.0")
        ),
        ({"kvstore": {"volumes": [{"name": "x", "emptyDir": {}}]}}, "go together"),
    ],
)
def test_refused(values: dict[str, Any], sentence: str) -> None:
    assert sentence in example_fails(values)


@pytest.mark.parametrize(
    "values", [{"engine": {}}, {"engines": {"kind": "pd-decode"}}, {"model": ""}, {"image": {"tag": 1}}]
)
def test_the_schema_refuses(values: dict[str, Any]) -> None:
    assert "values don't meet the specifications of the schema" in example_fails(values)


# The guide.


def test_the_guide_names_what_there_is() -> None:
    text = (ROOT / "docs" / "vllm-on-kubernetes.md").read_text()
    files = config_map(merged(BUCKET, {"vllm": {"kinds": [*EVERY], "offloadingTier": {"cpuGiB": 1}}}))
    table = text.split("## Kinds of engines")[1].split("## ")[0]
    assert set(re.findall(r"`([a-z-]+\.yaml)`", table)) == {
        name for name in files if name.endswith(".yaml") and not name.startswith(("settings", "pod"))
    }
    values = yaml.safe_load((EXAMPLE / "values.yaml").read_text())
    for name in ("ownNodeCache", "install"):
        assert f"kvstore.{name}" in text and name in values["kvstore"]
    for path in re.findall(r"docs/kubernetes/vllm/ci/\S+\.yaml", text):
        assert (ROOT / path).is_file(), path
    tried = "".join(text.split("## What was tried")[1].split())
    assert all(kube in tried for kube in ("1.25", "1.31", "1.34"))


EVERY = yaml.safe_load((CHART / "values.yaml").read_text())["vllm"]["kinds"] + ["offloading-tier", "multi"]
