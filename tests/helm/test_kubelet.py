"""What runs rendered pods here keeps to Kubernetes' rules, also where a chart's tests would not notice."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helm.kubelet import Pod
from tests.helm.network import _network_of
from tests.helm.running import Cluster, Unsupported, secret
from tests.helm.sandbox import ROOT, check, expand
from tests.helm.volumes import parse_size
from tests.waiting import PATIENCE_S, until

_SECURITY = {"runAsUser": 65532, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}


def container(script: str, **more: Any) -> dict[str, Any]:
    made = {"name": "main", "image": "example.com/kvstore:1", "command": ["sh", "-c", script]}
    return made | {"securityContext": _SECURITY} | more


def pod(*containers: dict[str, Any], **spec: Any) -> dict[str, Any]:
    made = {"restartPolicy": "Never", "containers": list(containers)} | spec
    return {"kind": "Pod", "metadata": {"name": "tried"}, "spec": made}


def deployment(*containers: dict[str, Any], **spec: Any) -> dict[str, Any]:
    template = {"metadata": {"labels": {"app": "tried"}}, "spec": {"containers": list(containers)} | spec}
    return {
        "kind": "Deployment",
        "metadata": {"name": "tried"},
        "spec": {"replicas": 1, "template": template},
    }


@pytest.fixture
def cluster(pods: None, tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path / "cluster", ()) as made:
        yield made


def ran(cluster: Cluster, manifest: dict[str, Any]) -> Pod:
    """To its end."""
    cluster.add(manifest)
    made = cluster.job("tried")
    made.until_ended()
    return made


def started(cluster: Cluster, manifest: dict[str, Any]) -> Pod:
    cluster.add(manifest)
    return cluster.another("tried")


@pytest.mark.parametrize(
    ("text", "expanded"),
    [
        ("$(A)", "1"),
        ("x$(A)$(B)y", "x12y"),
        ("$(C)", "$(C)"),
        ("$$(A)", "$(A)"),
        ("$$$(A)", "$1"),
        ("$A ${A} $(A", "$A ${A} $(A"),
    ],
)
def test_references_are_expanded_as_kubernetes_does(text: str, expanded: str) -> None:
    assert expand(text, {"A": "1", "B": "2"}) == expanded


@pytest.mark.parametrize(
    ("text", "size"), [("64Mi", 64 << 20), (5, 5), ("1.5Gi", 3 << 29), ("2k", 2000), ("10", 10)]
)
def test_sizes(text: object, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "spec",
    [
        {"containers": [container("true")], "hostNetwork": True},
        {"containers": [container("true", stdin=True)]},
        {"containers": [container("true", lifecycle={"postStart": {}})]},
        {"containers": [container("true", securityContext={"runAsUser": 1})]},
    ],
    ids=["host network", "stdin", "postStart", "capabilities"],
)
def test_what_is_not_obeyed_is_refused(spec: dict[str, Any]) -> None:
    with pytest.raises(Unsupported):
        check(spec)


def test_environment_and_files_are_what_the_manifest_says(cluster: Cluster) -> None:
    cluster.add(secret("keys", {"id": "me", "key": "s3cret"}))
    cluster.add({"kind": "ConfigMap", "metadata": {"name": "words"}, "data": {"a": "1", "b": "two"}})
    env = [
        {"name": "FIRST", "value": "$(a)$(LATER)"},
        {"name": "LATER", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "id"}}},
        {"name": "GONE", "valueFrom": {"secretKeyRef": {"name": "no", "key": "id", "optional": True}}},
        {"name": "MINE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
    ]
    mounts = [
        {"name": "keys", "mountPath": "/keys"},
        {"name": "words", "mountPath": "/words/only.txt", "subPath": "b"},
        {"name": "shared", "mountPath": "/shared"},
    ]
    script = (
        'env | sort; stat -c "%a %g %n" /keys/*; cat /words/only.txt /shared/left; touch /keys/x; ls /words'
    )
    made = ran(
        cluster,
        pod(
            container(script, env=env, envFrom=[{"configMapRef": {"name": "words"}}], volumeMounts=mounts),
            initContainers=[
                container("echo left > /shared/left", name="before", volumeMounts=mounts[2:]),
            ],
            volumes=[
                {"name": "keys", "secret": {"secretName": "keys", "defaultMode": 0o400}},
                {"name": "words", "configMap": {"name": "words"}},
                {"name": "shared", "emptyDir": {}},
            ],
            securityContext={"fsGroup": 4321},
        ),
    )
    lines = made.container.log().splitlines()
    assert {"FIRST=1$(LATER)", "LATER=me", f"MINE={made.name}", "a=1", "b=two"} <= set(lines)
    names = {line.partition("=")[0] for line in lines[: lines.index("440 4321 /keys/id")]}
    allowed = {"FIRST", "LATER", "MINE", "a", "b", "HOSTNAME", "PATH", "HOME", "PWD"}
    assert names <= allowed, "nothing of this machine's"
    assert lines[-1] == "only.txt" and "twoleft" in lines
    assert "touch: cannot touch '/keys/x': Read-only file system" in lines


def test_two_pods_listen_on_one_port_and_a_service_finds_the_ready(cluster: Cluster) -> None:
    serve = container(
        "cd /data && exec python -m http.server 8000",
        ports=[{"name": "web", "containerPort": 8000}],
        readinessProbe={"exec": {"command": ["test", "-e", "/data/ready"]}, "periodSeconds": 0.1},
        volumeMounts=[{"name": "data", "mountPath": "/data"}],
    )
    ports = [{"name": "web", "port": 80, "targetPort": "web"}]
    cluster.add(
        {
            "kind": "Service",
            "metadata": {"name": "web"},
            "spec": {"selector": {"app": "tried"}, "ports": ports},
        }
    )
    volumes = [{"name": "data", "emptyDir": {}}]
    # Python's server, as process 1, doesn't listen to SIGTERM.
    manifest = deployment(serve, volumes=volumes, terminationGracePeriodSeconds=1)
    made = [started(cluster, manifest) for _ in range(2)]
    for one in made:
        one.wait(lambda one: one.container.waiting is None)
        assert not one.ready
    with pytest.raises(OSError):
        cluster.get("web", 80, "/")
    # Ready once it listens, which on a busy machine it does later than it runs.
    answers = "import urllib.request as client; client.urlopen('http://127.0.0.1:8000/')"
    script = f'until python -c "{answers}" 2>&-; do sleep 0.1; done; hostname > /data/ready'
    for one in made:
        assert one.container.sandbox.execute(["sh", "-c", script], PATIENCE_S).returncode == 0
        one.until_ready()
    assert {cluster.get("web", 80, "/ready")[1].strip() for _ in range(40)} == {one.name for one in made}
    made[0].delete()
    assert {cluster.get("web", 80, "/ready")[1].strip() for _ in range(9)} == {made[1].name}


def test_a_container_that_is_not_alive_is_restarted_and_counted(cluster: Cluster) -> None:
    alive = {
        "exec": {"command": ["test", "-e", "/state/alive"]},
        "periodSeconds": 0.1,
        "timeoutSeconds": PATIENCE_S,
    }
    made = started(
        cluster,
        deployment(
            container(
                "echo begun; touch /state/alive; exec sleep 100",
                # As often as a busy machine takes until it gets as far as `touch`.
                startupProbe=alive | {"failureThreshold": 100_000},
                livenessProbe=alive | {"failureThreshold": 2},
                volumeMounts=[{"name": "state", "mountPath": "/state"}],
            ),
            volumes=[{"name": "state", "emptyDir": {}}],
            # `sleep` as process 1 has no handler: it is for the kernel's SIGKILL.
            terminationGracePeriodSeconds=1,
        ),
    )
    made.until_ready()
    assert made.restarts == 0
    made.container.sandbox.execute(["rm", "/state/alive"], PATIENCE_S)
    made.wait(lambda one: one.restarts == 1 and one.ready)
    assert made.container.exits == [137]
    assert made.container.log() == "begun\nbegun\n"
    assert any("failed liveness probe" in event for event in made.container.events)


def test_a_pod_is_told_to_end_and_has_its_time(cluster: Cluster) -> None:
    made = started(
        cluster,
        deployment(
            container(
                'trap "echo told; exit 0" TERM; while :; do sleep 0.05; done',
                lifecycle={"preStop": {"exec": {"command": ["sh", "-c", "echo before > /state/pre"]}}},
                volumeMounts=[{"name": "state", "mountPath": "/state"}],
            ),
            volumes=[{"name": "state", "emptyDir": {}}],
        ),
    )
    made.until_ready()
    assert made.delete() < made.grace_s
    assert made.container.exits == [0]
    assert made.container.log() == "told\n"
    assert (made.folder / "volumes" / "state" / "pre").read_text() == "before\n"


def test_what_is_missing_is_waited_for_and_too_much_is_evicted(cluster: Cluster) -> None:
    mounts = [{"name": "keys", "mountPath": "/keys"}, {"name": "small", "mountPath": "/small"}]
    made = started(
        cluster,
        deployment(
            container("head -c 200000 /dev/zero > /small/much; exec sleep 100", volumeMounts=mounts),
            volumes=[
                {"name": "keys", "secret": {"secretName": "keys"}},
                {"name": "small", "emptyDir": {"sizeLimit": "100Ki"}},
            ],
        ),
    )
    made.wait(lambda one: 'secret "keys" not found' in (one.container.waiting or ("", ""))[1])
    cluster.add(secret("keys", {"id": "me"}))
    made.wait(lambda one: one.evicted)
    assert 'EmptyDir volume "small" exceeds' in str(made.evicted)


def test_nothing_outlives_whoever_ran_it(pods: None, tmp_path: Path) -> None:
    """A test run that is killed leaves no process, and its bridge goes with the next one."""
    script = f"""
import time
from pathlib import Path
from tests.helm.running import Cluster
from tests.helm.test_kubelet import container, deployment, started
cluster = Cluster(Path({str(tmp_path / "cluster")!r}), ())
pod = started(cluster, deployment(container("exec sleep 100")))
pod.until_ready()
print(pod.container.sandbox.pid, pod.surroundings().network_pid, cluster.network.bridge, flush=True)
time.sleep(100)
"""
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert child.stdout is not None
    with child, child.stdout:
        first, holder, bridge = child.stdout.readline().split()
        assert _network_of(int(first)) == _network_of(int(holder)) != _network_of(os.getpid())
        child.kill()
    pids = (first, holder)
    until(lambda: not any(Path("/proc", pid, "ns").exists() and _network_of(int(pid)) for pid in pids))
    with Cluster(tmp_path / "next", ()):
        assert not Path("/sys/class/net", bridge).exists()
