"""The chart as a whole: every values file under helm/ci, and what must hold of all that it renders."""

from __future__ import annotations

import itertools
import json
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import typer.main
import yaml
from kubernetes_validate import utils

from kvstore.build import load_settings
from kvstore.cli.app import app
from schemas.settings import Settings
from tests.helm import golden
from tests.helm.chart import CHART, KUBES, ROOT, Manifest, fails, pick, render, run, sources
from tests.helm.pods import containers, pod_templates, violations

CI = sorted((CHART / "ci").glob("*-values.yaml"))
#: Not Kubernetes' own: the Prometheus Operator's. tests/helm/test_monitoring*.py reads them.
CUSTOM = {"ServiceMonitor", "PodMonitor", "PrometheusRule"}
#: As long as helm lets a release's name be.
LONG = "a" * 47 + "-long1"
each_file = pytest.mark.parametrize("values", CI, ids=lambda path: path.name.removesuffix("-values.yaml"))


@each_file
def test_lint(values: Path) -> None:
    done = run("lint", "--strict", "--quiet", str(CHART), "--values", str(values))
    assert done.returncode == 0 and "WARNING" not in done.stdout + done.stderr, done.stdout + done.stderr


@pytest.mark.parametrize("kube", KUBES)
@each_file
def test_kubernetes_accepts_every_manifest(values: Path, kube: str) -> None:
    for manifest in render(values, kube=f"{kube}.0"):
        if manifest["kind"] not in CUSTOM:
            assert _judged(json.dumps(manifest), kube) == kube


@pytest.fixture(scope="module", autouse=True)
def _schemas_are_read_once() -> Iterator[None]:
    """The library reads them again, two megabytes, for every manifest."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "schema_contents", cache(utils.schema_contents))
        yield


@cache
def _judged(manifest: str, kube: str) -> str:
    """By which version's schemas it is valid. Most manifests are the same for most values."""
    return str(kubernetes_validate.validate(json.loads(manifest), kube, strict=True))


@pytest.mark.parametrize("name", golden.CASES)
def test_golden(name: str) -> None:
    kept = golden.FOLDER / f"{name}.yaml"
    assert golden.text(name) == kept.read_text(), "python -m tests.helm.golden, and read the diff"


def test_every_template_has_a_golden_file() -> None:
    templates = {path for path in (CHART / "templates").rglob("*.yaml") if "kind: " in path.read_text()}
    assert len(templates) > 15
    kept = set().union(*(sources(values) for values in golden.CASES.values()))
    assert kept == {str(path.relative_to(CHART)) for path in templates}


def test_versions_are_one() -> None:
    about = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.M)
    assert project is not None and about["appVersion"] == project[1]


# Pods.


@each_file
def test_pods_are_restricted(values: Path) -> None:
    by_path = yaml.safe_load(values.read_text())["payloads"].get("type") == "hostPath"
    for what, template in pod_templates(render(values)):
        found = violations(template["spec"])
        if by_path:
            # A folder of the node is what was asked for, and nothing else.
            found = [line for line in found if line != "volume payloads is a hostPath"]
        assert not found, what


@each_file
def test_pods_ask_for_little(values: Path) -> None:
    for what, template in pod_templates(render(values)):
        spec = template["spec"]
        assert spec["automountServiceAccountToken"] is False, what
        assert spec["enableServiceLinks"] is False, what
        for one in containers(spec):
            assert one["securityContext"]["readOnlyRootFilesystem"] is True, (what, one["name"])
            assert {"cpu", "memory"} <= one["resources"]["requests"].keys(), (what, one["name"])
            assert "memory" in one["resources"]["limits"], (what, one["name"])
            assert re.search(r":[^:/]+$", one["image"]) and not one["image"].endswith(":latest"), one["image"]


@each_file
def test_every_mount_has_its_volume_and_the_reverse(values: Path) -> None:
    manifests = render(values)
    claims = {
        f"StatefulSet/{one['metadata']['name']}": [
            claim["metadata"]["name"] for claim in one["spec"]["volumeClaimTemplates"]
        ]
        for one in manifests
        if one["kind"] == "StatefulSet" and "volumeClaimTemplates" in one["spec"]
    }
    for what, template in pod_templates(manifests):
        spec = template["spec"]
        volumes = [volume["name"] for volume in spec.get("volumes", [])] + claims.get(what, [])
        mounted = {mount["name"] for one in containers(spec) for mount in one.get("volumeMounts", [])}
        assert len(volumes) == len(set(volumes)), what
        assert mounted == set(volumes), what
        for one in containers(spec):
            paths = [mount["mountPath"] for mount in one.get("volumeMounts", [])]
            assert len(paths) == len(set(paths)), (what, one["name"])
            names = [variable["name"] for variable in one.get("env", [])]
            assert len(names) == len(set(names)), (what, one["name"])


@each_file
def test_every_reference_leads_somewhere(values: Path) -> None:
    """To something that is rendered and has that key, or that the values name."""
    manifests = render(values)
    named = set(_strings(yaml.safe_load(values.read_text()))) | {"default"}
    own: dict[tuple[str, str], set[str]] = {}
    for one in manifests:
        keys = set(one.get("data") or {}) | set(one.get("stringData") or {})
        own[one["kind"], one["metadata"]["name"]] = keys
    for what, template in pod_templates(manifests):
        for kind, name, keys in _references(template["spec"]):
            assert (kind, name) in own or name in named, f"{what}: no {kind} {name}"
            if (kind, name) in own and keys:
                assert keys <= own[kind, name], f"{what}: {kind} {name} lacks {keys - own[kind, name]}"


def _strings(tree: Any) -> Iterator[str]:
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, dict | list):
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from _strings(value)


def _references(spec: dict[str, Any]) -> Iterator[tuple[str, str, set[str]]]:
    yield "ServiceAccount", spec.get("serviceAccountName", "default"), set()
    for one in spec.get("imagePullSecrets", []):
        yield "Secret", one["name"], set()
    for volume in spec.get("volumes", []):
        sources = [volume, *volume.get("projected", {}).get("sources", [])]
        for source in sources:
            if "persistentVolumeClaim" in source:
                yield "PersistentVolumeClaim", source["persistentVolumeClaim"]["claimName"], set()
            for kind, key in (("ConfigMap", "configMap"), ("Secret", "secret")):
                if key in source and not source[key].get("optional"):
                    name = source[key].get("name") or source[key]["secretName"]
                    yield kind, name, {item["key"] for item in source[key].get("items", [])}
    for one in containers(spec):
        for variable in one.get("env", []):
            for kind, key in (("ConfigMap", "configMapKeyRef"), ("Secret", "secretKeyRef")):
                if (found := variable.get("valueFrom", {}).get(key)) and not found.get("optional"):
                    yield kind, found["name"], {found["key"]}


@each_file
def test_no_secret_outside_of_secrets(values: Path) -> None:
    manifests = render(values)
    for one in manifests:
        if one["kind"] == "ConfigMap":
            for name, text in one["data"].items():
                assert not re.search(r"^\s*(password|secret_access_key|access_key_id):", text, re.M), name
    for what, template in pod_templates(manifests):
        for one in containers(template["spec"]):
            for variable in one.get("env", []):
                secret = re.search(r"PASSWORD$|SECRET|TOKEN$|ACCESS_KEY", variable["name"])
                assert not (secret and "value" in variable), (what, variable["name"])


@each_file
def test_what_our_containers_run_is_a_command_of_ours(values: Path) -> None:
    group: Any = typer.main.get_command(app)
    seen = set()
    for _, template in pod_templates(render(values)):
        for one in containers(template["spec"]):
            if "/kvstore" not in one["image"].partition("@")[0] or "command" in one:
                continue
            verb, *arguments = one["args"]
            with group.commands[verb].make_context(verb, arguments) as context:
                assert not context.args
            seen.add(verb)
            variables = {variable["name"]: variable.get("value") for variable in one["env"]}
            mounts = {mount["mountPath"] for mount in one["volumeMounts"]}
            assert variables["KVSTORE_SETTINGS"] in mounts
    assert seen - {"import", "rebuild"} == {"serve", "fsck", "gc", "doctor"}


# Settings.


@each_file
def test_the_store_accepts_the_settings(values: Path, tmp_path: Path) -> None:
    manifests = render(values)
    janitor = _accepted(manifests, "cache-kvstore", tmp_path)
    assert janitor.tiers is None
    engine = _accepted(manifests, "cache-kvstore-vllm", tmp_path)
    node_cache = yaml.safe_load(values.read_text())["payloads"].get("nodeCache", {})
    assert (engine.tiers is not None) == node_cache.get("enabled", False)
    assert (engine.origin, engine.index, engine.capacity_bytes, engine.redis, engine.s3, engine.signing) == (
        janitor.origin, janitor.index, janitor.capacity_bytes, janitor.redis, janitor.s3, janitor.signing,
    )  # fmt: skip


def _accepted(manifests: list[Manifest], name: str, folder: Path) -> Settings:
    """As a process reads them: the file of that ConfigMap, and over it the variables."""
    config = next(one for one in manifests if one["kind"] == "ConfigMap" and one["metadata"]["name"] == name)
    file = folder / f"{name}.yaml"
    file.write_text(config["data"]["settings.yaml"])
    spec = pick(manifests, "Deployment", "cache-kvstore")["spec"]["template"]["spec"]
    variables = {one["name"]: one.get("value", "a secret") for one in spec["containers"][0]["env"]}
    return load_settings({"settings": str(file)}, variables)


@each_file
def test_files_that_the_settings_name_are_mounted(values: Path) -> None:
    """Certificates by their names, and the folder of keys, in every container that reads the settings."""
    manifests = render(values)
    settings = yaml.safe_load(pick(manifests, "ConfigMap", "cache-kvstore")["data"]["settings.yaml"])
    named = {text for text in _strings(settings) if text.startswith("/etc/")}
    for what, template in pod_templates(manifests):
        spec = template["spec"]
        for one in containers(spec):
            if not any(variable["name"] == "KVSTORE_SETTINGS" for variable in one.get("env", [])):
                continue
            assert named <= set(_files(spec, one)), what


def _files(spec: dict[str, Any], container: dict[str, Any]) -> Iterator[str]:
    """The paths that volumes of Secrets and ConfigMaps give a container."""
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    for mount in container["volumeMounts"]:
        volume = volumes[mount["name"]]
        for source in [volume, *volume.get("projected", {}).get("sources", [])]:
            for kind in ("secret", "configMap"):
                if kind in source and "items" not in source[kind]:
                    yield mount["mountPath"]
                for item in source.get(kind, {}).get("items", []):
                    yield f"{mount['mountPath']}/{item['path']}"


# Names, labels, selectors.


@each_file
def test_selectors_find_pods_and_never_change(values: Path) -> None:
    manifests = render(values)
    pods = [template["metadata"]["labels"] for _, template in pod_templates(manifests)]
    stable = {
        "app.kubernetes.io/name", "app.kubernetes.io/instance", "app.kubernetes.io/component",
    }  # fmt: skip
    ports = [
        {port["name"] for one in containers(template["spec"]) for port in one.get("ports", [])}
        for _, template in pod_templates(manifests)
    ]
    for one in manifests:
        spec, kind = one.get("spec", {}), one["kind"]
        what = f"{kind}/{one['metadata']['name']}"
        if kind == "Service":
            selector = spec["selector"]
        elif kind in ("Deployment", "StatefulSet", "PodDisruptionBudget"):
            selector = spec["selector"]["matchLabels"]
        else:
            continue
        assert selector.keys() <= stable, what
        found = [number for number, labels in enumerate(pods) if selector.items() <= labels.items()]
        assert len(found) == 1, what
        for port in spec.get("ports", []):
            assert port["targetPort"] in ports[found[0]], what
    for one in manifests:
        if one["kind"] in ("Deployment", "StatefulSet"):
            labels = one["spec"]["template"]["metadata"]["labels"]
            assert one["spec"]["selector"]["matchLabels"].items() <= labels.items()
            # A new version of the chart alone restarts nothing.
            assert "helm.sh/chart" not in labels


@each_file
def test_names_fit_with_the_longest_release(values: Path) -> None:
    assert len(LONG) == 53
    for one in render(values, name=LONG):
        name = one["metadata"]["name"]
        # A CronJob's Jobs and a StatefulSet's revisions get eleven characters more.
        assert len(name) <= (52 if one["kind"] in ("CronJob", "StatefulSet") else 63), name
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", name), name
        for labels in _labels(one):
            assert all(len(str(value)) <= 63 for value in labels.values()), labels


def _labels(tree: Any) -> Iterator[dict[str, Any]]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            if key in ("labels", "matchLabels") and isinstance(value, dict):
                yield value
            yield from _labels(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from _labels(value)


#: One of each kind of object, and engines in another namespace.
EVERYTHING: dict[str, Any] = {
    "payloads": {"s3": {"bucket": "my-bucket", "accessKeyId": "a", "secretAccessKey": "b"}},
    "redis": {"builtIn": {"tls": {"enabled": True, "selfSigned": True}}},
    "networkPolicy": {"enabled": True, "egress": {"enabled": True}},
    "vllm": {"namespaces": ["456"]},
    "monitoring": {
        "serviceMonitor": {"enabled": True},
        "engines": {"enabled": True},
        "prometheusRule": {"enabled": True},
        "dashboards": {"enabled": True},
    },
}


@pytest.mark.parametrize("values", [EVERYTHING, *CI], ids=lambda one: getattr(one, "stem", "everything"))
def test_every_object_says_its_namespace(values: Any) -> None:
    """`helm template -n X | kubectl apply -f -` would put the others where kubectl's context is."""
    given = yaml.safe_load(values.read_text()) if isinstance(values, Path) else values
    elsewhere = {*given.get("vllm", {}).get("namespaces", [])}
    elsewhere |= {one["namespace"] for one in given.get("monitoring", {}).values() if "namespace" in one}
    found = set()
    for one in render(values, namespace="123"):
        namespace = one["metadata"].get("namespace")
        if namespace != "123":
            assert namespace in elsewhere, (one["kind"], one["metadata"]["name"], namespace)
            assert one["kind"] == "ConfigMap" or one["kind"] in CUSTOM
        found.add(namespace)
    assert found == {"123"} | elsewhere


def test_a_name_that_yaml_takes_for_something_else() -> None:
    """A preview of pull request 123: labels are text, or the API server refuses everything."""
    text = (CHART / "ci" / "large-values.yaml").read_text()
    values = yaml.safe_load(text) | {"fullnameOverride": "preview", "nameOverride": "on"}
    for one in render(values, name="123"):
        for labels in _labels(one):
            assert all(isinstance(value, str) for value in labels.values()), (one["kind"], labels)


def test_names_of_other_things_stay_text() -> None:
    """Of Secrets, keys, classes: 123 and on are names to Kubernetes, numbers and truths to YAML."""
    keys = {"accessKeyIdKey": "1", "secretAccessKeyKey": "2", "sessionTokenKey": "3"}
    auth = {"passwordKey": "4", "previousPasswordKey": "5", "reader": {"enabled": True, "passwordKey": "6"}}
    built_in = {"priorityClassName": "7", "persistence": {"storageClass": "8"}, "auth": auth}
    common = {"priorityClassName": "9", "imagePullSecrets": ["10"], "serviceAccount": {"name": "11"}}
    s3 = {"bucket": "my-bucket", "region": "1e3"}
    pvc = {"storageClass": "17"}
    external = {"url": "rediss://h", "existingSecret": "18", "passwordKey": "19", "username": "u"}
    external["tls"] = {"caSecret": "20", "caKey": "21", "clientSecret": "22"}  # type: ignore[assignment]
    ca = {"secret": "13", "key": "14"}
    for values in (
        {
            "payloads": {"s3": {**s3, **keys, "existingSecret": "12", "ca": ca}},
            "redis": {"builtIn": built_in},
        },
        {"payloads": {"s3": {**s3, "ca": {"configMap": "15"}, "webIdentity": {"roleArn": "arn:x: #1"}}}},
        {
            "payloads": {
                "s3": {**s3, "accessKeyId": "0x1", "secretAccessKey": "no", **keys, "sessionTokenKey": ""}
            }
        },
        {
            "payloads": {"type": "pvc", "pvc": pvc},
            "redis": {"builtIn": {"enabled": False}, "external": external},
        },
        {"payloads": {"type": "pvc", "pvc": {"existingClaim": "16"}}, "fsck": {"timeZone": "on"}},
    ):
        kinds = (
            "Deployment",
            "StatefulSet",
            "CronJob",
            "Pod",
            "Secret",
            "ServiceAccount",
            "PersistentVolumeClaim",
        )
        for one in render(common | values):
            if one["kind"] in kinds:
                assert _judged(json.dumps(one), KUBES[-1])


@pytest.mark.parametrize("name", ["123", "my.cache"])
def test_a_release_whose_services_could_not_be_made(name: str) -> None:
    done = run("template", name, str(CHART), "--set", "payloads.s3.bucket=my-bucket")
    assert f"  - the release is called {name}, and Services with it" in done.stderr


@pytest.mark.parametrize("names", [("cache", "other"), (LONG, LONG[:-1] + "2")], ids=["short", "long"])
@pytest.mark.parametrize("values", ["large", "small", "redis-tls", "vllm-pd"])
def test_two_releases_in_one_namespace(values: str, names: tuple[str, str]) -> None:
    first, second = (render(CHART / "ci" / f"{values}-values.yaml", name=name) for name in names)
    named = [{(one["kind"], one["metadata"]["name"]) for one in release} for release in (first, second)]
    assert not named[0] & named[1]
    pods = [template["metadata"]["labels"] for _, template in pod_templates(second)]
    for one in first:
        selector = one.get("spec", {}).get("selector")
        if selector and one["kind"] not in CUSTOM:
            wanted = selector.get("matchLabels", selector).items()
            assert not any(wanted <= labels.items() for labels in pods), one["metadata"]["name"]


# The schema.

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
DEFAULTS = yaml.safe_load((CHART / "values.yaml").read_text())


def _followed(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema itself, or what it refers to: a draft 7 validator looks at nothing beside a `$ref`."""
    if "$ref" not in schema:
        return schema
    *way, name = schema["$ref"].split("/")
    assert way == ["#", "definitions"]
    return dict(SCHEMA["definitions"][name])


def _leaves(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in tree.items():
        if isinstance(value, dict) and value and "properties" in _schema_at((*path, name)):
            yield from _leaves(value, (*path, name))
        else:
            yield (*path, name), value


def _schema_at(path: tuple[str, ...]) -> dict[str, Any]:
    node = SCHEMA
    for part in path:
        node = _followed(node["properties"][part])
    return dict(node)


def test_every_value_is_read() -> None:
    files = [*(CHART / "templates").rglob("*"), CHART / "files" / "alerts.yaml"]
    texts = "\n".join(path.read_text() for path in files if path.is_file())
    for path, _ in _leaves(DEFAULTS):
        # Settings are handed on as they are.
        if ".".join(path).startswith(tuple(f"{one}." for one in SETTINGS)):
            continue
        assert re.search(rf"(?:[.@\"]|: ){path[-1]}\b", texts), f"no template reads {'.'.join(path)}"


SETTINGS = ["settings", *(f"vllm.settings.{kind}" for kind in ("prefill", "decode", "encoder", "tier"))]


def test_settings_are_written_down_once() -> None:
    """Wherever values hold settings, helm checks them by the same tree, and says where a mistake is."""
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    for path in SETTINGS:
        values: dict[str, Any] = {"kv": {"staging": 1}, "segment": {"codec": "zip"}}
        for part in reversed(path.split(".")):
            values = {part: values}
        said = fails({"payloads": {"s3": {"bucket": "my-bucket"}}} | values)
        assert f"{path}.kv: Additional property staging is not allowed" in said
        assert f"{path}.segment.codec must be one of the following" in said
    assert json.dumps(SCHEMA).count('"planes-lz4"') == 1


# As people install it.


def _commands(text: str) -> list[str]:
    blocks = re.findall(r"```(?:sh|shell|bash|console)?\n(.*?)```", text, re.S)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line for line in lines if re.match(r"helm (install|upgrade) ", line)]


def test_examples_of_the_readme_render() -> None:
    commands = _commands((CHART / "README.md").read_text())
    assert len(commands) >= 4
    for command in commands:
        options = [word for word in shlex.split(command, comments=True) if word != "\\"]
        kept: list[str] = []
        for flag, value in itertools.pairwise(options):
            if flag in ("--set", "--set-string", "--values", "-f"):
                kept += [flag, value.replace("my-values", str(CHART / "ci" / "medium-values"))]
        done = run("template", "example", str(CHART), *kept)
        assert done.returncode == 0, f"{command}\n{done.stderr}"


@pytest.mark.parametrize("condition", ["cache", "kvstore.enabled"])
def test_as_a_part_of_another_chart(tmp_path: Path, condition: str) -> None:
    """Helm hands a subchart `global`, and its values under its name, what switches it on among them."""
    (tmp_path / "charts").mkdir()
    (tmp_path / "charts" / "kvstore").symlink_to(CHART)
    about = {"apiVersion": "v2", "name": "platform", "version": "1.0.0"}
    about["dependencies"] = [{"name": "kvstore", "version": ">=0", "condition": condition}]  # type: ignore[assignment]
    (tmp_path / "Chart.yaml").write_text(yaml.safe_dump(about))
    for on in (True, False):
        ours = {"payloads": {"s3": {"bucket": "my-bucket"}}} | (
            {"enabled": on} if condition == "kvstore.enabled" else {}
        )
        values = {"global": {"x": 1}, "cache": on, "kvstore": ours}
        done = run("template", "p", str(tmp_path), "-f", "-", stdin=json.dumps(values))
        assert done.returncode == 0, done.stderr
        made = [one["kind"] for one in yaml.safe_load_all(done.stdout) if one]
        assert ("Deployment" in made) == on


def test_a_package_holds_what_it_needs(tmp_path: Path) -> None:
    done = run("package", str(CHART), "--destination", str(tmp_path))
    assert done.returncode == 0, done.stderr
    (package,) = tmp_path.glob("*.tgz")
    values = json.dumps({"payloads": {"s3": {"bucket": "my-bucket"}}})
    packed, here = (run("template", "x", str(chart), "-f", "-", stdin=values) for chart in (package, CHART))
    pattern = r'(?m)^\s+"?(password|[\w-]*(crt|key|password))"?: .*$'
    assert re.sub(pattern, "", packed.stdout) == re.sub(pattern, "", here.stdout) != ""
    assert package.stat().st_size < 1 << 19


@each_file
def test_helm_4_renders_the_same(values: Path) -> None:
    helm = pytest.importorskip("helm_python", reason="no helm-python-sdk: Helm 4 as a library")
    chart = helm.Chart.load(str(CHART))
    rendered = chart.render(yaml.safe_load(values.read_text()), name="cache", namespace="inference")
    found = [one for text in rendered.values() if "kind:" in text for one in yaml.safe_load_all(text) if one]
    found = [one for one in found if isinstance(one, dict) and "kind" in one]

    def order(one: Manifest) -> tuple[str, str]:
        return one["kind"], one["metadata"]["name"]

    def known(manifests: list[Manifest]) -> list[Manifest]:
        # What is generated is another one every time.
        return [one for one in sorted(manifests, key=order) if one["kind"] != "Secret"]

    assert known(found) == known(render(values))
