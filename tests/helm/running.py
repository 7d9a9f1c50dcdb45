"""Rendered manifests as processes on this machine: a cluster of one node, as small as it goes.

    with Cluster(folder, render(values), namespace="inference") as cluster:
        cluster.add(secret("s3-keys", {...}))
        cluster.start()
        cluster.until_ready()
        status, body = cluster.get("cache-kvstore", 9464, "/metrics")

Deployments, StatefulSets, CronJobs, Jobs and pods, ConfigMaps, Secrets, Services and claims are what it
knows; everything else of a render (PodDisruptionBudgets, NetworkPolicies, custom resources) changes nothing
here. What one pod gets is in kubelet.py, one process in sandbox.py. Needs root, bubblewrap, iproute2 and
util-linux.
"""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.helm.kubelet import Container, Node, Pod
from tests.helm.network import Network
from tests.helm.sandbox import Spec, Unsupported
from tests.waiting import PATIENCE_S

_PROGRAMS = ("bwrap", "ip", "nsenter", "setpriv", "unshare")
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_WORKLOADS = ("Deployment", "StatefulSet")


def missing() -> str | None:
    """Why pods can't be run here, or None."""
    absent = [name for name in _PROGRAMS if shutil.which(name) is None]
    return forbidden() or (f"{', '.join(absent)} not found: run `make setup`" if absent else None)


@cache
def forbidden() -> str | None:
    """Why they can't, whatever is installed."""
    if os.geteuid() != 0:
        return "pods are run as root only"
    if shutil.which("unshare") and shutil.which("ip"):
        within = ["unshare", "--net", "--mount", "--pid", "--fork"]
        tried = subprocess.run([*within, "ip", "link", "add", "tried", "type", "bridge"], capture_output=True)
        if tried.returncode:
            return f"no namespaces or bridges for root here: {tried.stderr.decode().strip()}"
    return None


def secret(name: str, content: Mapping[str, str]) -> dict[str, Any]:
    """A Secret's manifest."""
    data = {key: base64.b64encode(text.encode()).decode() for key, text in content.items()}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "data": data}


class Cluster:
    """One namespace of one node. Use it from one thread, which must live as long as it does."""

    def __init__(self, folder: Path, manifests: Iterable[Spec], *, namespace: str = "inference") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.namespace = folder, namespace
        self.network = Network(folder)
        self.pods: list[Pod] = []
        self._objects: dict[tuple[str, str], Spec] = {}
        self._addresses: dict[str, str] = {}
        self._claims: dict[str, Path] = {}
        self._made = 0
        self._hosts = folder / "hosts"
        self._hosts.write_text("")
        self._lock = threading.Lock()
        self._node = Node(
            namespace=namespace,
            network=self.network,
            objects=self._objects,
            claims=self._claims,
            #: For volumes of type hostPath.
            root=folder / "node",
            hosts=self._hosts,
            links=self._links,
            changed=self._publish,
        )
        self.add(*manifests)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends every pod at once, by SIGKILL; what claims hold stays in the folder."""
        for pod in self.pods:
            pod.grace_s = 0.1
            pod.ending.set()
        for pod in self.pods:
            pod.delete()
        self.network.close()

    def add(self, *manifests: Spec) -> None:
        """As `kubectl apply`. What runs already is left as it is."""
        for manifest in manifests:
            kind, name = manifest["kind"], manifest["metadata"]["name"]
            known = (kind, name) in self._objects
            self._objects[kind, name] = manifest
            if kind == "PersistentVolumeClaim":
                self._claim(name)
            if kind == "Service" and not known and manifest["spec"].get("clusterIP") != "None":
                self._addresses[name] = address = self.network.address()
                for port in manifest["spec"]["ports"]:
                    self.network.serve(port["port"], self._endpoints(manifest["spec"], port), address)
        self._publish()

    def remove(self, kind: str, name: str) -> None:
        """As `kubectl delete`, of what no controller looks after."""
        del self._objects[kind, name]

    def start(self, *names: str) -> None:
        """Makes the pods of all Deployments and StatefulSets, or of those named."""
        for (kind, name), manifest in list(self._objects.items()):
            if kind in _WORKLOADS and (not names or name in names):
                for _ in range(manifest["spec"].get("replicas", 1)):
                    self._replica(manifest)

    def of(self, name: str) -> list[Pod]:
        """The pods of a workload that are not deleted, the oldest first."""
        return [pod for pod in self.pods if pod.owner == name and not pod.ending.is_set()]

    def until_ready(self, timeout_s: float = PATIENCE_S) -> float:
        """Seconds until the last of the pods that there are was ready, from the creation of the first."""
        alive = [pod for pod in self.pods if not pod.ending.is_set()]
        for pod in alive:
            pod.until_ready(timeout_s)
        return time.monotonic() - min(pod.created for pod in alive)

    def job(self, name: str) -> Pod:
        """Begins one attempt at a CronJob, a Job or a bare pod such as `helm test`'s."""
        for kind in ("CronJob", "Job", "Pod"):
            if manifest := self._objects.get((kind, name)):
                break
        else:
            raise KeyError(name)
        template: Spec = manifest
        if kind != "Pod":
            work = manifest["spec"]["jobTemplate"]["spec"] if kind == "CronJob" else manifest["spec"]
            template = work["template"]
            deadline = work.get("activeDeadlineSeconds")
            if deadline is not None:
                template = {**template, "spec": {"activeDeadlineSeconds": deadline, **template["spec"]}}
        if template["spec"].get("restartPolicy") not in ("Never", "OnFailure"):
            raise Unsupported(f"{kind} {name} would be restarted for ever")
        # Attempts after the first are the Job's or the kubelet's, and only repeat it.
        once = {**template, "spec": {**template["spec"], "restartPolicy": "Never"}}
        return self._pod(f"{name}-{self._number()}", once, name)

    def another(self, name: str) -> Pod:
        """One more pod of a Deployment, as a rollout makes it."""
        return self._replica(self._objects["Deployment", name])

    def rollout(self, name: str, timeout_s: float = PATIENCE_S) -> list[float]:
        """As `kubectl rollout restart deployment`: seconds that each old pod took to end."""
        manifest = self._objects["Deployment", name]
        strategy = manifest["spec"].get("strategy", {})
        surge = strategy.get("rollingUpdate", {}).get("maxSurge", "25%")
        took, old = [], self.of(name)
        if strategy.get("type") == "Recreate":
            took = [pod.delete() for pod in old]
            old = []
            self.start(name)
        for pod in old:
            # A share is rounded up: of two pods or of a hundred, 25% is one at least.
            if surge in (0, "0", "0%"):
                took.append(pod.delete())
                self._replica(manifest).until_ready(timeout_s)
            else:
                self._replica(manifest).until_ready(timeout_s)
                took.append(pod.delete())
        self.until_ready(timeout_s)
        return took

    def replace(
        self, pod: Pod, *, grace_s: float | None = None, down_s: float = 0.0, wipe: bool = False
    ) -> Pod:
        """Deletes a pod of a workload and makes it anew `down_s` later; `wipe` empties its claims between."""
        pod.delete(grace_s)
        time.sleep(down_s)
        for volume in pod.spec.get("volumes", ()) if wipe else ():
            if "persistentVolumeClaim" in volume:
                folder = self._claims[volume["persistentVolumeClaim"]["claimName"]]
                shutil.rmtree(folder)
                folder.mkdir()
        kind = "StatefulSet" if ("StatefulSet", pod.owner) in self._objects else "Deployment"
        return self._replica(self._objects[kind, pod.owner])

    def address(self, service: str) -> str:
        """A Service's, which this machine reaches as pods do."""
        return self._addresses[service]

    def get(self, service: str, port: int, path: str, **headers: str) -> tuple[int, str]:
        """Status and body of a GET through a Service."""
        return fetch(f"http://{self.address(service)}:{port}{path}", **headers)

    def _number(self) -> int:
        self._made += 1
        return self._made

    def _claim(self, name: str) -> Path:
        folder = self.folder / "claims" / name
        folder.mkdir(parents=True, exist_ok=True)
        self._claims[name] = folder
        return folder

    def _replica(self, manifest: Spec) -> Pod:
        owner, kind, template = manifest["metadata"]["name"], manifest["kind"], manifest["spec"]["template"]
        if kind == "Deployment":
            return self._pod(f"{owner}-5d6f-{self._number()}", template, owner)
        taken = {pod.name for pod in self.of(owner)}
        name = next(n for i in range(99) if (n := f"{owner}-{i}") not in taken)
        volumes = list(template["spec"].get("volumes", ()))
        for claim in manifest["spec"].get("volumeClaimTemplates", ()):
            title = f"{claim['metadata']['name']}-{name}"
            self._claim(title)
            volumes.append({"name": claim["metadata"]["name"], "persistentVolumeClaim": {"claimName": title}})
        return self._pod(name, {**template, "spec": {**template["spec"], "volumes": volumes}}, owner)

    def _pod(self, name: str, template: Spec, owner: str) -> Pod:
        made = Pod(
            name,
            template,
            owner=owner,
            folder=self.folder / "pods" / f"{self._number()}-{name}",
            node=self._node,
        )
        self.pods.append(made)
        self._publish()
        return made

    def _links(self) -> dict[str, str]:
        """What Kubernetes tells every container of the Services there are, unless it is told not to."""
        made: dict[str, str] = {}
        for name, address in self._addresses.items():
            prefix = _variable(name)
            ports = self._objects["Service", name]["spec"]["ports"]
            made[f"{prefix}_SERVICE_HOST"] = address
            made[f"{prefix}_SERVICE_PORT"] = str(ports[0]["port"])
            made[f"{prefix}_PORT"] = f"tcp://{address}:{ports[0]['port']}"
            for port in ports:
                if port.get("name"):
                    made[f"{prefix}_SERVICE_PORT_{_variable(port['name'])}"] = str(port["port"])
                one = f"{prefix}_PORT_{port['port']}_TCP"
                made |= {one: f"tcp://{address}:{port['port']}", f"{one}_PROTO": "tcp"}
                made |= {f"{one}_PORT": str(port["port"]), f"{one}_ADDR": address}
        return made

    def _behind(self, service: Spec) -> list[Pod]:
        """The pods that a Service's selector chooses, the ready ones unless it says otherwise."""
        wanted = set((service.get("selector") or {}).items())
        early = service.get("publishNotReadyAddresses", False)
        alive = [pod for pod in self.pods if not pod.ending.is_set() and pod.phase == "Running"]
        ready = [pod for pod in alive if pod.ready or early]
        return [pod for pod in ready if wanted and wanted <= set(pod.labels.items())]

    def _endpoints(self, service: Spec, port: Spec) -> Callable[[], list[tuple[str, int]]]:
        def found() -> list[tuple[str, int]]:
            target = port.get("targetPort", port["port"])
            return [(pod.address, _port(pod, target)) for pod in self._behind(service)]

        return found

    def targets(self, monitor: Spec) -> list[str]:
        """What Prometheus scrapes by a ServiceMonitor with one endpoint: HOST:PORT of each pod."""
        wanted = set(monitor["spec"]["selector"]["matchLabels"].items())
        services = [each for (kind, _), each in self._objects.items() if kind == "Service"]
        chosen = [each for each in services if wanted <= set(each["metadata"].get("labels", {}).items())]
        named = monitor["spec"]["endpoints"][0]["port"]
        return [
            f"{host}:{number}"
            for service in chosen
            for port in service["spec"]["ports"]
            if port["name"] == named
            for host, number in self._endpoints(service["spec"], port)()
        ]

    def _publish(self) -> None:
        """Writes the names that pods resolve, into the file that all of them have as /etc/hosts."""
        lines = ["127.0.0.1 localhost"]
        for (kind, name), manifest in list(self._objects.items()):
            if kind != "Service":
                continue
            full = [f"{name}.{self.namespace}{end}" for end in ("", ".svc", ".svc.cluster.local")]
            if name in self._addresses:
                lines.append(" ".join([self._addresses[name], name, *full]))
                continue
            for pod in self._behind(manifest["spec"]):
                names = [name, *full]
                lines.append(" ".join([pod.address, *(f"{pod.name}.{each}" for each in names), *names]))
        # In place, since it is this very file that is mounted.
        with self._lock, self._hosts.open("r+") as hosts:
            hosts.write("\n".join(lines) + "\n")
            hosts.truncate()


def _variable(name: str) -> str:
    return name.upper().replace("-", "_")


def _port(pod: Pod, target: int | str) -> int:
    for one in pod.containers:
        try:
            return one.port(target)
        except KeyError:
            continue
    raise Unsupported(f"{pod.name} has no port {target}")


def fetch(url: str, **headers: str) -> tuple[int, str]:
    """Status and body of a GET."""
    request = urllib.request.Request(url, headers=headers)
    try:
        with _OPENER.open(request, timeout=PATIENCE_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as exc:
        with exc:
            return exc.code, exc.read().decode()


__all__ = ["Cluster", "Container", "Pod", "Unsupported", "fetch", "missing", "secret"]
