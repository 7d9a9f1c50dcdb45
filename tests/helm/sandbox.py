"""One container of a rendered pod as a process on this machine.

The process gets what its manifest says, by Kubernetes' rules, and nothing else: image's and manifest's
environment, arguments with $(VAR) expanded, volumes at their paths, user and groups, no capability, process
id 1, a root file system of its own. A field that would not be obeyed here is refused, not overlooked.

What is not as in a cluster: the image's files are this machine's (/usr, and the programs that `Image` names),
resources are not limited, and seccomp profiles are not applied.
"""

from __future__ import annotations

import base64
import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.servers.redis import find_redis_server
from tests.waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
Spec = Mapping[str, Any]

#: Fields that are obeyed, and those that say nothing to a single machine.
_POD_FIELDS = {"containers", "initContainers", "volumes", "securityContext", "restartPolicy", "hostname"}
_POD_FIELDS |= {"terminationGracePeriodSeconds", "enableServiceLinks", "automountServiceAccountToken"}
_POD_FIELDS |= {"activeDeadlineSeconds", "subdomain"}
_SCHEDULING = {"affinity", "nodeSelector", "tolerations", "topologySpreadConstraints", "priorityClassName"}
_SCHEDULING |= {"schedulerName", "imagePullSecrets", "serviceAccountName", "runtimeClassName", "dnsPolicy"}
_CONTAINER_FIELDS = {"name", "image", "imagePullPolicy", "command", "args", "env", "envFrom", "ports"}
_CONTAINER_FIELDS |= {"volumeMounts", "securityContext", "resources", "workingDir", "lifecycle"}
_CONTAINER_FIELDS |= {"livenessProbe", "readinessProbe", "startupProbe"}
_CONTAINER_FIELDS |= {"terminationMessagePath", "terminationMessagePolicy"}


class Unsupported(Exception):
    """A manifest asks for what cannot be done on this machine as a cluster would do it."""


class NotStarted(Exception):
    """The kubelet would not start it, and would try again: a reason in its words, and a message."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason, self.message = reason, message


@dataclass(frozen=True, slots=True)
class Image:
    """What a container gets from its image."""

    entrypoint: tuple[str, ...]
    command: tuple[str, ...] = ()
    user: int = 0
    env: Mapping[str, str] = field(default_factory=dict)
    #: Name in the image's /usr/local/bin -> file of this machine.
    programs: Mapping[str, str] = field(default_factory=dict)
    #: Further files and folders of this machine, at the same place.
    paths: tuple[Path, ...] = ()
    #: And elsewhere: place in the image -> place on this machine.
    files: Mapping[str, Path] = field(default_factory=dict)


def kvstore_image() -> Image:
    """Ours: the commands of this virtual environment, and the packages they were installed from."""
    home, python = Path(sys.prefix), Path(sys.base_prefix)
    packages = [ROOT / name for name in ("kvstore", "schemas", "connectors", "kvstore_vllm.egg-info")]
    paths = tuple(path for path in (home, python, *packages) if path.exists())
    env = {"PATH": f"{home}/bin:/usr/local/bin:/usr/bin:/bin", "HOME": "/nonexistent"}
    return Image(("cache-admin",), user=65532, env=env, paths=paths)


def redis_image() -> Image:
    """Valkey's or Redis', under either's names."""
    server, client = find_redis_server(), shutil.which("redis-cli") or shutil.which("valkey-cli")
    names = {"redis-server": server, "valkey-server": server}
    if client is not None:
        names |= {"redis-cli": client, "valkey-cli": client}
    env = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/nonexistent"}
    return Image((), ("redis-server",), user=0, env=env, programs=names)


def image_of(name: str) -> Image:
    """The image of that reference; Unsupported if it is none of the chart's."""
    repository = name.partition("@")[0].rpartition("/")[2].partition(":")[0]
    if repository in ("redis", "valkey"):
        return redis_image()
    if repository == "kvstore":
        return kvstore_image()
    raise Unsupported(f"image {name}: of kvstore, redis and valkey this machine has the programs")


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a container finds of its pod and namespace."""

    pod: str
    namespace: str
    address: str
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    spec: Spec
    #: Kind and name -> manifest, of ConfigMaps and Secrets.
    objects: Mapping[tuple[str, str], Spec]
    links: Mapping[str, str]
    #: Name of a volume -> folder on this machine.
    volumes: Mapping[str, Path]
    hosts: Path
    network_pid: int


def check(spec: Spec) -> None:
    """Unsupported, unless every field of the pod is obeyed here, or says where to run it."""
    unknown = set(spec) - _POD_FIELDS - _SCHEDULING
    for container in [*spec.get("initContainers", ()), *spec["containers"]]:
        unknown |= set(container) - _CONTAINER_FIELDS
        unknown |= set(container.get("lifecycle", ())) - {"preStop"}
        drop = container.get("securityContext", {}).get("capabilities", {}).get("drop", [])
        if "ALL" not in drop or container["securityContext"].get("privileged"):
            raise Unsupported(f"container {container['name']} keeps capabilities")
    if unknown:
        raise Unsupported(f"fields that are not obeyed here: {', '.join(sorted(unknown))}")


def expand(text: str, known: Mapping[str, str]) -> str:
    """$(NAME) by its value, or as it is if there is none; $$ is a dollar."""

    def value(match: re.Match[str]) -> str:
        return "$" if match[1] == "$" else known.get(match[2], match[0])

    return re.sub(r"\$(\$|\(([^()]*)\))", value, text)


def data_of(objects: Mapping[tuple[str, str], Spec], kind: str, name: str) -> dict[str, bytes]:
    """What a ConfigMap or Secret holds; KeyError if there is none."""
    found = objects[kind, name]
    plain = {**(found.get("stringData") or {}), **((found.get("data") or {}) if kind == "ConfigMap" else {})}
    coded = (found.get("data") if kind == "Secret" else found.get("binaryData")) or {}
    return {key: base64.b64decode(text) for key, text in coded.items()} | {
        key: str(text).encode() for key, text in plain.items()
    }


class Sandbox:
    """A container's process, from its start to its end. It ends with the thread that made it."""

    def __init__(self, container: Spec, around: Surroundings, log: Path) -> None:
        """Raises NotStarted where the kubelet would wait for something, or refuse."""
        self._container, self._around = container, around
        image = image_of(container["image"])
        self.env = _environment(container, around, image)
        words = [*(container.get("command") or image.entrypoint)]
        words += container.get("args") or (image.command if "command" not in container else ())
        command = [expand(word, self.env) for word in words]
        self._user = _identity(container, around.spec, image)
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [*self._walls(image), "--", *self._user, "--", *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self.env,
                start_new_session=True,
            )
        self.pid = self._inner_pid()

    def _walls(self, image: Image) -> list[str]:
        """What puts it into its network and its root, and lets nothing of it outlive this process."""
        around = self._around
        words = ["setpriv", "--pdeathsig", "KILL", "nsenter", f"--net=/proc/{around.network_pid}/ns/net"]
        words += ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "bwrap", "--as-pid-1"]
        words += ["--unshare-pid", "--unshare-ipc", "--unshare-uts", "--hostname", around.pod]
        words += [
            "--ro-bind",
            "/usr",
            "/usr",
            "--proc",
            "/proc",
            "--dev",
            "/dev",
            "--tmpfs",
            "/usr/local/bin",
        ]
        for name in ("bin", "sbin", "lib", "lib64"):
            words += ["--symlink", f"usr/{name}", f"/{name}"]
        words += ["--perms", "1777", "--dir", "/tmp"]
        binds = [("--ro-bind", str(around.hosts), "/etc/hosts")]
        for name in ("/etc/ssl", "/etc/ld.so.cache", "/etc/ld.so.conf.d", "/etc/alternatives"):
            binds.append(("--ro-bind-try", name, name))
        for name, program in image.programs.items():
            binds.append(("--ro-bind", program, f"/usr/local/bin/{name}"))
        binds += [("--ro-bind", str(path), str(path)) for path in image.paths]
        binds += [("--ro-bind", str(path), place) for place, path in image.files.items()]
        mounts = self._mounts()
        # What lies below a mount, such as a checkout below /tmp, comes after it, or the mount would hide it.
        below = [bind for bind in binds if any(Path(bind[2]).is_relative_to(place) for _, _, place in mounts)]
        for some in ([bind for bind in binds if bind not in below] + mounts, below):
            # Left to itself bwrap makes folders that none but root may enter.
            for parent in sorted({parent for _, _, place in some for parent in Path(place).parents}):
                words += ["--perms", "0755", "--dir", str(parent)]
            for bind in some:
                words += bind
        for place in ("/usr/local/bin", "/") if self._read_only() else ("/usr/local/bin",):
            words += ["--remount-ro", place]
        return [*words, "--chdir", self._container.get("workingDir", "/")]

    def _read_only(self) -> bool:
        return bool(self._container.get("securityContext", {}).get("readOnlyRootFilesystem"))

    def _mounts(self) -> list[tuple[str, str, str]]:
        """How, from where, to where; what lies deeper comes later."""
        made: list[tuple[str, str, str]] = []
        mounts = self._container.get("volumeMounts", ())
        read_only = {
            volume["name"]
            for volume in self._around.spec.get("volumes", ())
            if {"configMap", "secret", "projected", "downwardAPI"} & set(volume)
        }
        for mount in sorted(mounts, key=lambda one: str(one["mountPath"]).count("/")):
            unknown = set(mount) - {"name", "mountPath", "subPath", "subPathExpr", "readOnly"}
            if unknown:
                raise Unsupported(f"of a mount: {', '.join(sorted(unknown))}")
            source = self._around.volumes[mount["name"]]
            inner = mount.get("subPath") or expand(mount.get("subPathExpr", ""), self.env)
            if inner:
                source = source / inner
                if not source.exists():
                    source.mkdir(parents=True)
            sealed = mount.get("readOnly") or mount["name"] in read_only
            made.append(("--ro-bind" if sealed else "--bind", str(source), mount["mountPath"]))
        return made

    def _inner_pid(self) -> int:
        """This machine's number of the container's process 1, once it is the program; 0 if it has ended."""
        until = time.monotonic() + PATIENCE_S
        while self._process.poll() is None and time.monotonic() < until:
            with contextlib.suppress(OSError, IndexError):
                pid = _children(_children(self._process.pid)[0])[0]
                if Path(os.readlink(f"/proc/{pid}/exe")).name not in ("bwrap", "setpriv"):
                    return pid
            time.sleep(0.002)
        return 0

    def exit_code(self, within_s: float = 0.0) -> int | None:
        """None while it runs; 128 and the number of a signal if that ended it."""
        try:
            return self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            return None

    def signal(self, number: int) -> None:
        if self.pid and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def execute(self, command: Sequence[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
        """A command inside, as `kubectl exec` runs it. Raises TimeoutExpired."""
        enter = ["setpriv", "--pdeathsig", "KILL", "nsenter", "-t", str(self.pid)]
        return subprocess.run(
            [*enter, "-m", "-n", "-i", "-u", "-p", "--", *self._user, "--", *command],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            env=self.env,
            timeout=timeout_s,
        )


def _environment(container: Spec, around: Surroundings, image: Image) -> dict[str, str]:
    made = {**image.env, "HOSTNAME": around.pod, **around.links}
    for source in container.get("envFrom", ()):
        kind = "ConfigMap" if "configMapRef" in source else "Secret"
        reference = source["configMapRef" if kind == "ConfigMap" else "secretRef"]
        for key, content in _referred(around, kind, reference, None).items():
            made[source.get("prefix", "") + key] = content.decode()
    for entry in container.get("env", ()):
        if "valueFrom" not in entry:
            made[entry["name"]] = expand(str(entry.get("value", "")), made)
            continue
        [(how, reference)] = entry["valueFrom"].items()
        if how == "fieldRef":
            made[entry["name"]] = _field(around, reference["fieldPath"])
        elif how in ("secretKeyRef", "configMapKeyRef"):
            kind = "Secret" if how == "secretKeyRef" else "ConfigMap"
            for content in _referred(around, kind, reference, reference["key"]).values():
                made[entry["name"]] = content.decode()
        else:
            raise Unsupported(f"valueFrom.{how}")
    return made


def _referred(around: Surroundings, kind: str, reference: Spec, key: str | None) -> dict[str, bytes]:
    """What an environment refers to: all of it, or one key. Nothing if it may be, and is, absent."""
    optional = reference.get("optional", False)
    try:
        found = data_of(around.objects, kind, reference["name"])
    except KeyError:
        if optional:
            return {}
        message = f'{kind.lower()} "{reference["name"]}" not found'
        raise NotStarted("CreateContainerConfigError", message) from None
    if key is None:
        return found
    if key not in found and not optional:
        message = f"couldn't find key {key} in {kind} {around.namespace}/{reference['name']}"
        raise NotStarted("CreateContainerConfigError", message)
    return {key: found[key]} if key in found else {}


def _field(around: Surroundings, path: str) -> str:
    known: dict[str, str] = {
        "metadata.name": around.pod,
        "metadata.namespace": around.namespace,
        "metadata.uid": f"uid-of-{around.pod}",
        "status.podIP": around.address,
        "spec.nodeName": "this-node",
        "spec.serviceAccountName": around.spec.get("serviceAccountName", "default"),
    }
    if match := re.fullmatch(r"metadata\.(labels|annotations)\['([^']+)'\]", path):
        kept = around.labels if match[1] == "labels" else around.annotations
        return kept.get(match[2], "")
    if path not in known:
        raise Unsupported(f"fieldRef {path}")
    return known[path]


def _identity(container: Spec, spec: Spec, image: Image) -> list[str]:
    """What makes it the user that the manifest says, without privileges."""
    security = {**spec.get("securityContext", {}), **container.get("securityContext", {})}
    user = security.get("runAsUser", image.user)
    group = security.get("runAsGroup", 0)
    if security.get("runAsNonRoot") and user == 0:
        message = "container has runAsNonRoot and image will run as root"
        raise NotStarted("CreateContainerConfigError", message)
    groups = [security["fsGroup"]] if "fsGroup" in security else []
    groups += security.get("supplementalGroups", [])
    words = ["/usr/bin/setpriv", f"--reuid={user}", f"--regid={group}"]
    words += [f"--groups={','.join(map(str, groups))}"] if groups else ["--clear-groups"]
    return [*words, "--no-new-privs", "--inh-caps=-all", "--ambient-caps=-all", "--bounding-set=-all"]


def _children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
