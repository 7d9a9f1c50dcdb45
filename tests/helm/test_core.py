"""The janitors, what they need, the cron jobs and the smoke test: a look at each template."""

from __future__ import annotations

import copy
import os
import shutil
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvstore.admin.serve.door import Guests
from kvstore.admin.serve.listener import Listener, sentence
from kvstore.cli.exits import ExitCode
from tests.helm.chart import Manifest, pick, render
from tests.helm.pods import containers, pod_templates
from tests.servers.papers import Papers
from tests.waiting import PATIENCE_S

BUCKET: dict[str, Any] = {"payloads": {"s3": {"bucket": "my-bucket"}}}


def given(**values: Any) -> dict[str, Any]:
    """Values with a bucket, and these; a dot in a name is written as two underscores."""
    tree = copy.deepcopy(BUCKET)
    for name, value in values.items():
        *path, leaf = name.split("__")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[leaf] = value
    return tree


CLAIM = {"payloads": {"type": "pvc"}}
ONE_NODE = {"payloads": {"type": "pvc", "pvc": {"accessModes": ["ReadWriteOnce"]}}}
FOLDER = {"payloads": {"type": "hostPath", "hostPath": {"path": "/mnt/nfs/kv", "sameOnAllNodes": True}}}


def deployment(values: dict[str, Any]) -> Manifest:
    return pick(render(values), "Deployment")


def pod(values: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = deployment(values)["spec"]["template"]["spec"]
    return spec


def settings(values: dict[str, Any], name: str = "cache-kvstore") -> dict[str, Any]:
    tree: dict[str, Any] = yaml.safe_load(pick(render(values), "ConfigMap", name)["data"]["settings.yaml"])
    return tree


def variables(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in pod(values)["containers"][0]["env"]}


# The settings.


@pytest.mark.parametrize(
    ("s3", "url"),
    [
        ({}, "s3://my-bucket/kvstore"),
        ({"prefix": ""}, "s3://my-bucket/"),
        ({"prefix": "/team/cache/"}, "s3://my-bucket/team/cache"),
        ({"region": "eu-west-1"}, "s3://my-bucket/kvstore?region=eu-west-1"),
        (
            {"endpoint": "https://rgw:443/", "region": "x"},
            "s3://my-bucket/kvstore?endpoint=https://rgw:443&region=x",
        ),
    ],
)
def test_url_of_the_bucket(s3: dict[str, str], url: str) -> None:
    values = given(payloads__s3={"bucket": "my-bucket", **s3})
    assert settings(values)["payloads"] == url


@pytest.mark.parametrize(
    ("capacity", "nbytes"),
    [
        ("100GiB", 100 << 30), ("100Gi", 100 << 30), ("1.5TiB", 3 << 39), ("2TB", 2 * 10**12),
        ("500G", 5 * 10**11), (1 << 40, 1 << 40), ("1073741824", 1 << 30), ("20tib", 20 << 40),
        ("200TiB", 200 << 40),
    ],
)  # fmt: skip
def test_capacity(capacity: str | int, nbytes: int) -> None:
    assert settings(given(capacity=capacity))["capacity_bytes"] == nbytes


def test_settings_are_laid_over_what_the_values_say() -> None:
    more = {"grace_s": 300, "kv": {"save_decode": True}, "redis": {"timeout_s": 2}, "s3": {"concurrency": 64}}
    values = given(settings=more, payloads__s3__ca__secret="authority")
    found = settings(values)
    assert found["grace_s"] == 300 and found["kv"] == {"save_decode": True}
    # Beside what the chart puts there itself.
    assert found["redis"] == {"username": "kvstore", "timeout_s": 2}
    assert found["s3"] == {"concurrency": 64, "tls_ca": "/etc/kvstore/tls/s3/ca.crt"}


def test_changed_settings_restart_the_pods_and_the_same_ones_do_not() -> None:
    def checksum(values: dict[str, Any]) -> str:
        annotations = deployment(values)["spec"]["template"]["metadata"]["annotations"]
        return str(annotations["checksum/settings"])

    first = checksum(given())
    assert first == checksum(given(janitor__replicas=0, service__port=80))
    assert first != checksum(given(capacity="1TiB"))
    assert first != checksum(given(settings={"grace_s": 300}))


# Credentials.


def test_keys_come_from_the_secret_that_is_named() -> None:
    s3 = {
        "existingSecret": "keys",
        "accessKeyIdKey": "id",
        "secretAccessKeyKey": "secret",
        "sessionTokenKey": "token",
    }
    values = given(payloads__s3={"bucket": "my-bucket", **s3})
    refs = {
        name: one["valueFrom"]["secretKeyRef"] for name, one in variables(values).items() if "_S3__" in name
    }
    assert refs == {
        "KVSTORE_S3__ACCESS_KEY_ID": {"name": "keys", "key": "id"},
        "KVSTORE_S3__SECRET_ACCESS_KEY": {"name": "keys", "key": "secret"},
        "KVSTORE_S3__SESSION_TOKEN": {"name": "keys", "key": "token"},
    }
    assert not [one for one in render(values) if one["metadata"]["name"] == "cache-kvstore-s3"]


def test_other_keys_in_the_values_restart_the_pods() -> None:
    """Which read them once. What says so gives nobody a way to try keys out."""

    def checksum(key: str) -> str:
        values = given(payloads__s3__accessKeyId="AKIA1", payloads__s3__secretAccessKey=key)
        annotations = deployment(values)["spec"]["template"]["metadata"]["annotations"]
        return str(annotations["checksum/keys"])

    assert checksum("one") == checksum("one") != checksum("two")
    assert len(checksum("one")) == 5
    assert "checksum/keys" not in deployment(given())["spec"]["template"]["metadata"]["annotations"]


def test_a_role_by_the_pods_own_token() -> None:
    identity = {"roleArn": "arn:aws:iam::1:role/kv", "stsEndpoint": "https://sts.example.com"}
    values = given(payloads__s3__webIdentity=identity, payloads__s3__region="eu-west-1")
    found = {name: one.get("value") for name, one in variables(values).items() if name.startswith("AWS")}
    assert found == {
        "AWS_ROLE_ARN": "arn:aws:iam::1:role/kv",
        "AWS_WEB_IDENTITY_TOKEN_FILE": "/var/run/secrets/kvstore/token",
        "AWS_ENDPOINT_URL_STS": "https://sts.example.com",
        "AWS_REGION": "eu-west-1",
    }
    (volume,) = [one for one in pod(values)["volumes"] if "projected" in one]
    (source,) = volume["projected"]["sources"]
    assert source["serviceAccountToken"]["audience"] == "sts.amazonaws.com"
    (mount,) = [one for one in pod(values)["containers"][0]["volumeMounts"] if one["name"] == volume["name"]]
    assert (mount["mountPath"], source["serviceAccountToken"]["path"]) == (
        "/var/run/secrets/kvstore",
        "token",
    )


# The Deployment.


def test_its_node_may_be_scaled_away() -> None:
    """To the cluster autoscaler a pod with a local volume keeps its node, unless it says that it needn't."""
    key = "cluster-autoscaler.kubernetes.io/safe-to-evict-local-volumes"
    for values in (given(), FOLDER, CLAIM):
        about = deployment(values)["spec"]["template"]["metadata"]["annotations"]
        local = [one["name"] for one in pod(values)["volumes"] if "emptyDir" in one or "hostPath" in one]
        assert about[key].split(",") == local
    own = given(podAnnotations={key: "none"})
    assert deployment(own)["spec"]["template"]["metadata"]["annotations"][key] == "none"


def test_it_ends_before_it_is_killed() -> None:
    from kvstore.cli.commands import serve

    assert pod(given())["terminationGracePeriodSeconds"] > serve._STOP_S + 5


@pytest.mark.parametrize(
    ("values", "strategy"),
    [
        (given(), {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}}),
        (ONE_NODE, {"type": "Recreate"}),
        (CLAIM, {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}}),
    ],
    ids=["default", "one node", "shared claim"],
)
def test_strategy(values: dict[str, Any], strategy: dict[str, Any]) -> None:
    assert deployment(values)["spec"]["strategy"] == strategy


def test_where_pods_go_and_what_they_carry() -> None:
    values = given(
        nodeSelector={"pool": "system"},
        tolerations=[{"key": "a", "operator": "Exists"}],
        priorityClassName="high",
        podLabels={"azure.workload.identity/use": "true"},
        podAnnotations={"a/b": "c"},
        commonLabels={"team": "x"},
        commonAnnotations={"owner": "y"},
        imagePullSecrets=["registry"],
        extraEnv=[{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
        extraVolumes=[{"name": "aws", "configMap": {"name": "aws"}}],
        extraVolumeMounts=[{"name": "aws", "mountPath": "/etc/aws"}],
        janitor__podAnnotations={"only": "janitors"},
    )
    manifests = render(values)
    jobs = [one for one in manifests if one["kind"] == "CronJob"]
    templates = [pick(manifests, "Deployment")["spec"]["template"], pick(manifests, "Pod")]
    templates += [one["spec"]["jobTemplate"]["spec"]["template"] for one in jobs]
    assert len(templates) == 4
    for template in templates:
        spec, about = template["spec"], template["metadata"]
        assert spec["nodeSelector"] == {"pool": "system"} and spec["priorityClassName"] == "high"
        assert spec["tolerations"] == [{"key": "a", "operator": "Exists"}]
        assert spec["imagePullSecrets"] == [{"name": "registry"}]
        assert about["labels"].items() >= {"azure.workload.identity/use": "true", "team": "x"}.items()
        assert about["labels"]["kvstore/client"] == "true"
        assert about["annotations"].items() >= {"a/b": "c", "owner": "y"}.items()
        assert ("only" in about["annotations"]) == (template is templates[0])
        assert "aws" in {one["name"] for one in spec["volumes"]}
        for container in spec["containers"] + spec.get("initContainers", []):
            assert {"name": "HTTPS_PROXY", "value": "http://proxy:3128"} in container["env"]
            assert {"name": "aws", "mountPath": "/etc/aws"} in container["volumeMounts"]
    for one in manifests:
        assert one["metadata"]["labels"]["team"] == "x", one["kind"]


def option(container: dict[str, Any], name: str) -> list[str]:
    """What is given for an option, each time."""
    words = container["args"]
    return [words[at + 1] for at, word in enumerate(words) if word == name]


def test_janitors_are_asked_for_by_their_services_names_and_those_of_an_ingress() -> None:
    service = ["cache-kvstore", "cache-kvstore.inference", "cache-kvstore.inference.svc"]
    service.append("cache-kvstore.inference.svc.cluster.local")
    (container,) = pod(given())["containers"]
    assert option(container, "--host") == service
    (container,) = pod(given(janitor__hosts=["cache.example"]))["containers"]
    assert option(container, "--host") == [*service, "cache.example"]
    assert not {"--tls", "--client-ca", "--password-file"} & set(container["args"])


def test_secrets_of_who_may_ask_are_mounted_where_the_options_say() -> None:
    tls = {"existingSecret": "own", "clientCASecret": "clients", "clientCAKey": "all.crt"}
    values = given(janitor={"tls": tls, "password": {"existingSecret": "word", "key": "prometheus"}})
    spec = pod(values)
    (container,) = spec["containers"]
    folders = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
    mounted = {
        f"{folders[one['name']]}/{item['path']}": (one["secret"]["secretName"], item["key"])
        for one in spec["volumes"]
        if one["name"].startswith("serve-")
        for item in one["secret"]["items"]
    }
    # As folders: what is mounted by subPath is never renewed.
    assert not [one for one in container["volumeMounts"] if one["name"] in folders and "subPath" in one][1:]
    [folder], [authority] = option(container, "--tls"), option(container, "--client-ca")
    [password] = option(container, "--password-file")
    assert mounted == {
        f"{folder}/tls.crt": ("own", "tls.crt"),
        f"{folder}/tls.key": ("own", "tls.key"),
        authority: ("clients", "all.crt"),
        password: ("word", "prometheus"),
    }
    for probe in ("startup", "liveness", "readiness"):
        assert container[f"{probe}Probe"]["httpGet"]["scheme"] == "HTTPS"
    # The smoke test has no password, nor have the cron jobs.
    smoke = pick(render(values), "Pod")
    assert smoke["spec"]["containers"][0]["args"][1] == "https://cache-kvstore:9464"
    assert not [one for one in smoke["spec"]["volumes"] if one["name"].startswith("serve-")]


def test_openshift_takes_the_users_away() -> None:
    context = {"runAsUser": None, "runAsGroup": None, "fsGroup": None}
    assert pod(given(podSecurityContext=context))["securityContext"] == {
        "runAsNonRoot": True,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


@pytest.mark.parametrize(
    ("account", "name", "made"),
    [
        ({}, "cache-kvstore", True),
        ({"name": "kv"}, "kv", True),
        ({"create": False, "name": "theirs"}, "theirs", False),
        ({"create": False}, "default", False),
    ],
)
def test_service_account(account: dict[str, Any], name: str, made: bool) -> None:
    values = given(serviceAccount=account)
    assert pod(values)["serviceAccountName"] == name
    found = [one for one in render(values) if one["kind"] == "ServiceAccount"]
    assert [one["metadata"]["name"] for one in found] == ([name] if made else [])
    assert all(one["automountServiceAccountToken"] is False for one in found)


# The claim.


def test_a_claim_that_goes_with_the_release() -> None:
    values = {"payloads": {"type": "pvc", "pvc": {"keep": False, "storageClass": "nfs"}}}
    claim = pick(render(values), "PersistentVolumeClaim")
    assert "annotations" not in claim["metadata"] and claim["spec"]["storageClassName"] == "nfs"


def test_a_claim_that_exists() -> None:
    values = {"payloads": {"type": "pvc", "pvc": {"existingClaim": "ours"}}}
    assert not [one for one in render(values) if one["kind"] == "PersistentVolumeClaim"]
    (volume,) = [one for one in pod(values)["volumes"] if one["name"] == "payloads"]
    assert volume["persistentVolumeClaim"] == {"claimName": "ours"}


def test_with_a_claim_of_one_node_all_pods_are_there() -> None:
    manifests = render(ONE_NODE | {"follow": {"enabled": True}})
    selector = pick(manifests, "Deployment", "cache-kvstore")["spec"]["selector"]
    specs = [pick(manifests, "Pod")["spec"]]
    specs.append(pick(manifests, "Deployment", "cache-kvstore-follow")["spec"]["template"]["spec"])
    specs += [
        one["spec"]["jobTemplate"]["spec"]["template"]["spec"]
        for one in manifests
        if one["kind"] == "CronJob"
    ]
    for spec in specs:
        (term,) = spec["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert term == {"topologyKey": "kubernetes.io/hostname", "labelSelector": selector}
    assert "affinity" not in pick(render(CLAIM), "Pod")["spec"]


# The cron jobs and the smoke test.


def job(values: dict[str, Any], verb: str, kube: str = "1.34.0") -> dict[str, Any]:
    spec: dict[str, Any] = pick(render(values, kube=kube), "CronJob", f"cache-kvstore-{verb}")["spec"]
    return spec


@pytest.mark.parametrize(
    ("verb", "values", "arguments"),
    [
        ("fsck", {}, ["--jobs", "8"]),
        ("fsck", {"repair": True, "jobs": 2}, ["--jobs", "2", "--apply"]),
        ("fsck", {"readDataPercent": 5}, ["--jobs", "8", "--read-data", "5%"]),
        ("fsck", {"quick": True}, ["--jobs", "8", "--quick"]),
        ("gc", {}, ["--list", "--older-than", "24h", "--apply"]),
        ("gc", {"delete": False, "olderThan": "7d"}, ["--list", "--older-than", "7d"]),
    ],
)
def test_what_jobs_run(verb: str, values: dict[str, Any], arguments: list[str]) -> None:
    spec = job(given(**{verb: values}), verb)["jobTemplate"]["spec"]["template"]["spec"]
    assert spec["containers"][0]["args"] == ["fsck", "--json", *arguments]


def test_what_follows_another_regions_payloads() -> None:
    values = given(follow={"enabled": True, "every": 300, "jobs": 2}, janitor__listen="[::]")
    assert not [one for one in render(given()) if one["metadata"]["name"] == "cache-kvstore-follow"]
    spec = pick(render(values), "Deployment", "cache-kvstore-follow")["spec"]
    [one] = spec["template"]["spec"]["containers"]
    expected = ["rebuild", "--apply", "--follow", "--json", "--jobs", "2", "--every", "300"]
    expected += ["--listen", "[::]:9466"]
    assert (spec["replicas"], one["args"]) == (1, expected)
    assert one["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "http"}
    assert one["ports"] == [{"name": "http", "containerPort": 9466}]


@pytest.mark.parametrize("verb", ["fsck", "gc"])
def test_jobs(verb: str) -> None:
    values = given(**{verb: {"schedule": "@daily", "timeZone": "Europe/Berlin", "suspend": True}})
    spec = job(values, verb)
    assert (spec["schedule"], spec["timeZone"], spec["suspend"]) == ("@daily", "Europe/Berlin", True)
    assert spec["concurrencyPolicy"] == "Forbid" and spec["startingDeadlineSeconds"] == 3600
    assert (spec["successfulJobsHistoryLimit"], spec["failedJobsHistoryLimit"]) == (1, 3)
    assert "timeZone" not in job(given(), verb)
    assert job(given(), verb)["jobTemplate"]["spec"]["activeDeadlineSeconds"] == 21600
    off = given(**{verb: {"enabled": False}})
    assert [one["metadata"]["name"] for one in render(off) if one["kind"] == "CronJob"] == [
        f"cache-kvstore-{({'fsck', 'gc'} - {verb}).pop()}"
    ]


@pytest.mark.parametrize("verb", ["fsck", "gc"])
def test_what_was_found_is_not_looked_for_again(verb: str) -> None:
    """The Job fails at once for what another try won't change, and tries again if nobody answered."""
    spec = job(given(), verb)["jobTemplate"]["spec"]
    assert spec["backoffLimit"] == 2
    assert spec["template"]["spec"]["restartPolicy"] == "Never"
    disrupted, codes = spec["podFailurePolicy"]["rules"]
    assert disrupted["action"] == "Ignore"
    assert codes["action"] == "FailJob" and codes["onExitCodes"]["containerName"] == verb
    meant = {ExitCode.ERROR, ExitCode.USAGE, ExitCode.PROBLEMS, ExitCode.PARTIAL}
    assert set(codes["onExitCodes"]["values"]) == meant and ExitCode.UNREACHABLE not in meant
    # What 1.25 doesn't know it is not given; then every failure is the last.
    old = job(given(), verb, "1.25.0")["jobTemplate"]["spec"]
    assert "podFailurePolicy" not in old and old["backoffLimit"] == 0


def test_packs_are_imported_by_hooks_in_their_order() -> None:
    url = "s3://my-bucket/packs/base.tar?endpoint=https://rgw:443"
    packs = [{"pack": url}, {"pack": "/packs/more.tar", "weights": "9f86", "namespace": "01ab"}]
    jobs = [one for one in render(given(packs__apply=packs)) if one["kind"] == "Job"]
    assert [one["metadata"]["name"] for one in jobs] == ["cache-kvstore-pack-0", "cache-kvstore-pack-1"]
    hooks = [one["metadata"]["annotations"] for one in jobs]
    # Behind what they need, the index among it; helm waits for each, and keeps the last one's log.
    assert {one["helm.sh/hook"] for one in hooks} == {"post-install,post-upgrade"}
    assert [one["helm.sh/hook-weight"] for one in hooks] == ["0", "1"]
    assert {one["helm.sh/hook-delete-policy"] for one in hooks} == {"before-hook-creation"}
    arguments = [one["spec"]["template"]["spec"]["containers"][0]["args"] for one in jobs]
    assert arguments == [
        ["import", url],
        ["import", "/packs/more.tar", "01ab", "--weights", "9f86"],
    ]
    assert not [one for one in render(given()) if one["kind"] == "Job"]


def test_a_pack_that_is_refused_is_not_tried_again() -> None:
    """Redis may be starting, and engines may save the same just then; nothing else passes by itself."""
    for kube in ("1.34.0", "1.25.0"):
        (one,) = [
            one for one in render(given(packs__apply=[{"pack": "/a.tar"}]), kube=kube) if one["kind"] == "Job"
        ]
        assert one["spec"]["backoffLimit"] == 6
        if kube == "1.25.0":
            assert "podFailurePolicy" not in one["spec"]
            continue
        codes = one["spec"]["podFailurePolicy"]["rules"][1]
        assert codes["onExitCodes"]["containerName"] == "pack"
        assert set(codes["onExitCodes"]["values"]) == {ExitCode.ERROR, ExitCode.USAGE, ExitCode.PROBLEMS}


def test_every_container_can_be_given_limits() -> None:
    """As a namespace asks for whose ResourceQuota has limits.cpu: what has none is refused there."""
    limits = {"resources": {"limits": {"cpu": "1"}}}
    values = given(janitor=limits, fsck=limits, gc=limits, test=limits, redis__builtIn=limits)
    values["packs"] = {**limits, "apply": [{"pack": "/a.tar"}]}
    values["follow"] = {**limits, "enabled": True}
    seen = 0
    for what, template in pod_templates(render(values)):
        for one in containers(template["spec"]):
            assert one["resources"]["limits"]["cpu"] == "1", (what, one["name"])
            seen += 1
    assert seen == 8


def test_the_smoke_test_needs_no_password_and_asks_no_proxy(tmp_path: Path) -> None:
    """Against a real server with TLS of its own: ready is all that it may be told. A proxy that extraEnv
    names for the bucket doesn't know the Service."""
    proxies = {"HTTPS_PROXY": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9", "NO_PROXY": ""}
    papers = Papers(tmp_path / "papers")
    papers.server()
    tls = tmp_path / "tls"
    tls.mkdir()
    for end in ("crt", "key"):
        shutil.copy(papers[f"server.{end}"], tls / f"tls.{end}")
    (password := tmp_path / "password").write_text("correct horse battery staple")
    arguments = pick(render(given(janitor__tls__existingSecret="own")), "Pod")["spec"]["containers"][0][
        "args"
    ]
    readiness = {"ok": sentence("ok")}
    probes = {"/readyz": lambda _: readiness["ok"]}
    metrics = {"/metrics": lambda _: sentence("a secret")}
    with closing(Listener("127.0.0.1", 0, metrics, probes, Guests(tls=tls, password=password))) as server:
        for answer, code in ((sentence("ok"), 0), (sentence("no answer from the bucket", 503), 1)):
            readiness["ok"] = answer
            done = subprocess.run(
                [sys.executable, "-c", arguments[0].replace("+ 120", "+ 0"), server.url],
                env=os.environ | proxies, capture_output=True, text=True, timeout=PATIENCE_S,
            )  # fmt: skip
            assert done.returncode == code, done.stdout + done.stderr
            assert "secret" not in done.stdout and "bucket" not in done.stdout
