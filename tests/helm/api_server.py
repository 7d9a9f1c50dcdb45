"""As much of a Kubernetes API server as `helm install` and `upgrade` talk to: it keeps, and runs nothing.

with ApiServer(tmp_path) as server:
    server.helm("install", "cache", str(CHART), "--set", "payloads.s3.bucket=my-bucket")
    server.get("Secret", "cache-kvstore-redis")
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import threading
import urllib.parse
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

from tests.helm.chart import Manifest, helm

NAMESPACE = "inference"
#: Group and version -> the kinds that the chart makes; all of them are in a namespace.
_KINDS = {
    "v1": ["Secret", "ConfigMap", "Service", "ServiceAccount", "PersistentVolumeClaim", "Pod", "Namespace"],
    "apps/v1": ["Deployment", "StatefulSet", "ReplicaSet"],
    "batch/v1": ["CronJob", "Job"],
    "policy/v1": ["PodDisruptionBudget"],
    "networking.k8s.io/v1": ["NetworkPolicy"],
}
_MEMBERS = {"NetworkPolicy": "networkpolicies"}


def _plural(kind: str) -> str:
    return _MEMBERS.get(kind, kind.lower() + "s")


#: Member of a path -> kind.
_OF = {_plural(kind): kind for kinds in _KINDS.values() for kind in kinds}


def _merged(old: Any, patch: Any) -> Any:
    """A JSON merge patch. Helm sends strategic ones, which differ in lists alone."""
    if not isinstance(old, dict) or not isinstance(patch, dict):
        return patch
    kept = {key: value for key, value in old.items() if patch.get(key, "") is not None}
    changed = {key: _merged(old.get(key), value) for key, value in patch.items() if value is not None}
    return kept | {key: value for key, value in changed.items() if not key.startswith("$")}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, body: Any, status: int = 200) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _missing(self) -> None:
        about = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
        self._answer(about | {"message": f"{self.path} not found"}, 404)

    def _body(self) -> Any:
        return json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        said = _discovery(path)
        if said is not None:
            self._answer(said)
        elif path in self.server.objects:
            self._answer(self.server.objects[path])
        elif kind := _OF.get(path.rpartition("/")[2]):
            wanted = urllib.parse.parse_qs(query).get("labelSelector", [""])[0]
            labels = dict(part.split("=", 1) for part in wanted.split(",") if "=" in part)
            items = [one for name, one in self.server.objects.items() if name.startswith(path + "/")]
            found = [one for one in items if labels.items() <= one["metadata"].get("labels", {}).items()]
            self._answer({"kind": f"{kind}List", "apiVersion": "v1", "metadata": {}, "items": found})
        else:
            self._missing()

    def do_POST(self) -> None:
        made = self._body()
        made["metadata"] |= {"namespace": NAMESPACE, "uid": "1", "resourceVersion": "1"}
        for key, value in made.pop("stringData", {}).items():
            made.setdefault("data", {})[key] = base64.b64encode(value.encode()).decode()
        self.server.objects[f"{self.path.partition('?')[0]}/{made['metadata']['name']}"] = made
        self._answer(made, 201)

    def do_PUT(self) -> None:
        self.server.objects[self.path.partition("?")[0]] = changed = self._body()
        self._answer(changed)

    def do_PATCH(self) -> None:
        path, patch = self.path.partition("?")[0], self._body()
        if path not in self.server.objects:
            return self._missing()
        self.server.objects[path] = changed = _merged(self.server.objects[path], patch)
        return self._answer(changed)

    def do_DELETE(self) -> None:
        self._body()
        gone = self.server.objects.pop(self.path.partition("?")[0], None)
        return self._missing() if gone is None else self._answer({"kind": "Status", "status": "Success"})


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        #: By path.
        self.objects: dict[str, Manifest] = {}


def _discovery(path: str) -> Any:
    """What the server says it has, or None."""
    groups = [one for one in _KINDS if "/" in one]
    if path == "/version":
        return {"major": "1", "minor": "31", "gitVersion": "v1.31.0", "platform": "linux/amd64"}
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        versions = [{"groupVersion": one, "version": one.partition("/")[2]} for one in groups]
        listed = [
            {"name": one["groupVersion"].partition("/")[0], "versions": [one], "preferredVersion": one}
            for one in versions
        ]
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": listed}
    known = path.removeprefix("/apis/").removeprefix("/api/")
    if known not in _KINDS:
        return None
    verbs = ["create", "delete", "get", "list", "patch", "update"]
    resources = [
        {
            "name": _plural(kind), "singularName": "", "namespaced": kind != "Namespace", "kind": kind,
            "verbs": verbs,
        }
        for kind in _KINDS[known]
    ]  # fmt: skip
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": known, "resources": resources}


class ApiServer:
    """One namespace. Helm's own records are in it too."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._server = folder, _Server()
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        cluster = {"name": "c", "cluster": {"server": f"http://127.0.0.1:{self._server.server_port}"}}
        context = {"name": "c", "context": {"cluster": "c", "user": "c", "namespace": NAMESPACE}}
        config = {
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [cluster], "contexts": [context], "users": [{"name": "c", "user": {}}],
        }  # fmt: skip
        written = self._folder / "kubeconfig"
        written.write_text(yaml.safe_dump(config))
        written.chmod(0o600)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def helm(self, *args: str) -> str:
        """Runs helm against it; what it printed. Fails the test if helm fails."""
        environment = {
            name: text for name, text in os.environ.items() if not name.startswith(("HELM", "KUBE"))
        }
        environment |= {"KUBECONFIG": str(self._folder / "kubeconfig"), "HOME": str(self._folder)}
        options = ["--namespace", NAMESPACE]
        if args[0] in ("install", "upgrade"):
            options.append("--disable-openapi-validation")
        done = subprocess.run(
            [helm(), *args, *options], env=environment, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def __iter__(self) -> Iterator[Manifest]:
        """What is there, without Helm's records."""
        for one in self._server.objects.values():
            if not one["metadata"]["name"].startswith("sh.helm."):
                yield one

    def path(self, kind: str, name: str) -> str:
        [group] = [group for group, kinds in _KINDS.items() if kind in kinds]
        root = "/apis" if "/" in group else "/api"
        return f"{root}/{group}/namespaces/{NAMESPACE}/{_plural(kind)}/{name}"

    def get(self, kind: str, name: str) -> Manifest | None:
        return self._server.objects.get(self.path(kind, name))

    def patch(self, kind: str, name: str, patch: Any) -> None:
        """`kubectl patch`."""
        path = self.path(kind, name)
        self._server.objects[path] = _merged(self._server.objects[path], patch)
