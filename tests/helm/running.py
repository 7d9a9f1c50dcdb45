"""Containers of rendered pods as processes of this machine, in one network of their own.

    with Pods(folder, render(values)) as pods:
        redis = pods.start("StatefulSet", "cache-kvstore-redis").until_ready()
        code, log = pods.run("Pod", "cache-kvstore-test")

A process gets what its manifest says of command, environment, volumes, user and root, and runs without
privileges. Services lead to this one network, whichever pods they select: tests of the templates look at
selectors. Needs root, bubblewrap, iproute2 and util-linux.
"""

from __future__ import annotations

import base64
import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.helm.chart import ROOT, Manifest
from tests.servers.redis import find_redis_server
from tests.waiting import PATIENCE_S, until

_PROGRAMS = ("bwrap", "ip", "nsenter", "setpriv", "unshare")
#: Prints what is at a URL.
GET = "import sys, urllib.request as r; print(r.urlopen(sys.argv[1], timeout=60).read().decode())"
_TIED = ("setpriv", "--pdeathsig", "KILL")


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
        tried = subprocess.run([*within, "ip", "link", "set", "lo", "up"], capture_output=True)
        if tried.returncode:
            return f"no namespaces for root here: {tried.stderr.decode().strip()}"
    return None


def _bound(source: str, place: str, how: str = "--ro-bind") -> Iterator[str]:
    """Yields bwrap's words for a mount. Left to itself it makes folders that none but root may enter."""
    for parent in reversed(Path(place).parents):
        yield from ("--perms", "0755", "--dir", str(parent))
    yield from (how, source, place)


def _image(reference: str) -> tuple[list[str], dict[str, str], list[str]]:
    """Returns an image's entry point, environment and further mounts."""
    if "/kvstore:" in reference:
        home = Path(sys.prefix).resolve()
        paths = [home, Path(sys.base_prefix), *(ROOT / name for name in ("kvstore", "schemas", "connectors"))]
        binds = [word for path in paths for word in _bound(str(path), str(path))]
        return ["cache-admin"], {"PATH": f"{home}/bin:/usr/bin:/bin", "PYTHONPATH": str(ROOT)}, binds
    assert "/valkey:" in reference, reference
    client = shutil.which("redis-cli") or shutil.which("valkey-cli")
    assert client is not None, "no redis-cli"
    binds = [*_bound(find_redis_server(), "/usr/local/bin/redis-server")]
    binds += _bound(client, "/usr/local/bin/redis-cli")
    return [], {"PATH": "/usr/local/bin:/usr/bin:/bin"}, binds


class Pods:
    """Those of one namespace. Use it from one thread, which must live as long as it does."""

    def __init__(self, folder: Path, manifests: list[Manifest]) -> None:
        folder.mkdir(parents=True)
        # pytest's folders are their owner's alone, and the pods' users have to pass.
        for one in (folder, *folder.parents[:3]):
            one.chmod(0o711)
        self.folder = folder
        self.objects = {(one["kind"], one["metadata"]["name"]): one for one in manifests}
        services = [name for kind, name in self.objects if kind == "Service"]
        names = [f"{name}{end}" for name in services for end in ("", ".inference", ".inference.svc")]
        (folder / "hosts").write_text(f"127.0.0.1 {' '.join(['localhost', *names])}\n")
        words = [*_TIED, "unshare", "--net", "sh", "-c", "ip link set lo up; echo; exec sleep infinity"]
        self._holder = subprocess.Popen(words, stdout=subprocess.PIPE)
        assert self._holder.stdout is not None and self._holder.stdout.readline()
        self.network = ["nsenter", f"--net=/proc/{self._holder.pid}/ns/net"]
        self._started: list[Container] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        for one in self._started:
            one.kill()
        self._holder.kill()
        self._holder.communicate()

    def start(self, kind: str, name: str) -> Container:
        """Starts the only container of a workload's pod."""
        [spec] = self._spec(kind, name)["containers"]
        return self._begin(kind, name, spec)

    def run(self, kind: str, name: str) -> tuple[int, str]:
        """Runs a job's containers to the first that fails; returns its exit code, and all logs."""
        pod, log = self._spec(kind, name), ""
        for spec in [*pod.get("initContainers", ()), *pod["containers"]]:
            one = self._begin(kind, name, spec)
            code, log = one.wait(), log + one.log()
            if code:
                break
        return code, log

    def get(self, url: str) -> str:
        """Returns the body of an answer, "" for none or one that is an error."""
        done = subprocess.run([*self.network, sys.executable, "-c", GET, url], capture_output=True, text=True)
        return done.stdout

    def patch(self, name: str, values: Mapping[str, str | None]) -> None:
        """`kubectl patch secret`; None takes a key away. Running containers have it when this returns."""
        data = self.objects["Secret", name]["data"]
        for key, value in values.items():
            data.pop(key, None)
            if value is not None:
                data[key] = base64.b64encode(value.encode()).decode()
        for one in self._started:
            one.refresh()

    def secret(self, name: str, key: str) -> str:
        return base64.b64decode(self.objects["Secret", name]["data"][key]).decode()

    def _begin(self, kind: str, name: str, spec: dict[str, Any]) -> Container:
        made = Container(self, f"{name}-{len(self._started)}", self._spec(kind, name), spec)
        self._started.append(made)
        return made

    def _spec(self, kind: str, name: str) -> dict[str, Any]:
        manifest = self.objects[kind, name]
        if kind == "CronJob":
            manifest = manifest["spec"]["jobTemplate"]
        pod: dict[str, Any] = manifest["spec"] if kind == "Pod" else manifest["spec"]["template"]["spec"]
        claims = manifest["spec"].get("volumeClaimTemplates", ())
        named = [(one["metadata"]["name"], f"{one['metadata']['name']}-{name}") for one in claims]
        held = [{"name": title, "persistentVolumeClaim": {"claimName": claim}} for title, claim in named]
        return {**pod, "volumes": [*pod["volumes"], *held]}


class Container:
    """One container's process."""

    def __init__(self, pods: Pods, name: str, pod: dict[str, Any], spec: dict[str, Any]) -> None:
        self._pods, self._pod, self._spec = pods, pod, spec
        self._folder = pods.folder / name
        self._folder.mkdir()
        security = pod["securityContext"] | spec["securityContext"]
        assert security["capabilities"] == {"drop": ["ALL"]} and security["readOnlyRootFilesystem"]
        self._user = ["setpriv", f"--reuid={security['runAsUser']}", f"--regid={security['runAsGroup']}"]
        self._user += [f"--groups={security['fsGroup']}", "--no-new-privs", "--inh-caps=-all"]
        self._user += ["--bounding-set=-all"]
        self._group: int = security["fsGroup"]
        self.refresh()
        entry, self.env, binds = _image(spec["image"])
        self.env = {"HOME": "/nonexistent"} | self.env | dict(self._variables())
        # Nothing of it outlives this process, by whichever signal that ends.
        walls = [*_TIED, *pods.network, "unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
        walls += ["bwrap", "--as-pid-1", "--unshare-pid"]
        walls += ["--unshare-ipc", "--unshare-uts", "--ro-bind", "/usr", "/usr", "--proc", "/proc"]
        walls += ["--dev", "/dev", "--tmpfs", "/usr/local/bin"]
        for folder in ("bin", "sbin", "lib", "lib64"):
            walls += ["--symlink", f"usr/{folder}", f"/{folder}"]
        walls += _bound(str(pods.folder / "hosts"), "/etc/hosts")
        for path in ("/etc/ssl", "/etc/ld.so.cache", "/etc/alternatives"):
            walls += ["--ro-bind-try", path, path]
        walls += [*self._mounts(), *binds]
        walls += ["--remount-ro", "/usr/local/bin", "--remount-ro", "/", "--chdir", "/"]
        command = [*spec.get("command", entry), *spec.get("args", ())]
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [*walls, "--", *self._user, "--", *command],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.env,
            )  # fmt: skip
        self.pid = self._program()

    def log(self) -> str:
        return (self._folder / "log").read_text(errors="replace")

    def _program(self) -> int:
        """Returns this machine's number of the container's process 1, once it is the program."""

        def found() -> int:
            process = self._process.pid
            with contextlib.suppress(OSError, IndexError):
                # unshare and bwrap are on the way.
                for _ in range(2):
                    process = int(Path(f"/proc/{process}/task/{process}/children").read_text().split()[0])
                if Path(os.readlink(f"/proc/{process}/exe")).name not in ("bwrap", "setpriv"):
                    return process
            return 0 if self._process.poll() is None else -1

        return until(found, say=self.log)

    def kill(self) -> None:
        """`kill -9`."""
        if self._process.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
        self._process.wait(PATIENCE_S)

    def wait(self) -> int:
        """Returns its exit code once it has ended."""
        return self._process.wait(PATIENCE_S)

    def end(self) -> int:
        """As the kubelet ends it: SIGTERM, and an exit code before its patience is over."""
        os.kill(self.pid, signal.SIGTERM)
        return self._process.wait(self._pod["terminationGracePeriodSeconds"])

    def execute(self, *command: str) -> subprocess.CompletedProcess[str]:
        """`kubectl exec`."""
        enter = ["nsenter", "-t", str(self.pid), "-m", "-n", "-i", "-u", "-p", "--", *self._user, "--"]
        return subprocess.run(
            [*enter, *command], env=self.env, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=PATIENCE_S,
        )  # fmt: skip

    def passes(self, probe: str) -> bool:
        """Asks what the kubelet would."""
        asked = self._spec[f"{probe}Probe"]
        if "exec" in asked:
            return self.execute(*asked["exec"]["command"]).returncode == 0
        [port] = self._spec["ports"]
        assert asked["httpGet"]["port"] == port["name"]
        return bool(self._pods.get(f"http://127.0.0.1:{port['containerPort']}{asked['httpGet']['path']}"))

    def until_ready(self) -> Self:
        def ready() -> bool:
            assert self._process.poll() is None, self.log()
            return all(self.passes(probe) for probe in ("startup", "readiness"))

        until(ready, say=self.log)
        return self

    def refresh(self) -> None:
        """Writes what its ConfigMaps and Secrets say now."""
        for volume in self._pod["volumes"]:
            [kind] = set(volume) - {"name"}
            if kind in ("emptyDir", "persistentVolumeClaim"):
                folder = self._place(volume)
                folder.mkdir(parents=True, exist_ok=True)
                os.chown(folder, -1, self._group)
                folder.chmod(0o2777)
                continue
            source = volume[kind]
            sources = source["sources"] if kind == "projected" else [{kind: source}]
            wanted = {path: text for one in sources for path, text in self._projected(one)}
            folder = self._place(volume)
            for path, text in wanted.items():
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / path).write_bytes(text)
                os.chown(folder / path, 0, self._group)
                (folder / path).chmod(0o440 if kind == "secret" or "secret" in str(sources) else 0o444)
            for path in folder.rglob("*"):
                if path.is_file() and str(path.relative_to(folder)) not in wanted:
                    path.unlink()

    def _projected(self, source: dict[str, Any]) -> Iterator[tuple[str, bytes]]:
        [(kind, wanted)] = source.items()
        name = wanted.get("name") or wanted["secretName"]
        held = self._pods.objects["Secret" if kind == "secret" else "ConfigMap", name]
        for item in wanted.get("items") or [{"key": key, "path": key} for key in held["data"]]:
            if item["key"] in held["data"]:
                text = held["data"][item["key"]].encode()
                yield item["path"], base64.b64decode(text) if kind == "secret" else text
            else:
                assert wanted.get("optional"), f"{name} has no {item['key']}"

    def _place(self, volume: dict[str, Any]) -> Path:
        claim = volume.get("persistentVolumeClaim", {}).get("claimName")
        return self._pods.folder / "claims" / claim if claim else self._folder / str(volume["name"])

    def _mounts(self) -> Iterator[str]:
        volumes = {one["name"]: one for one in self._pod["volumes"]}
        for mount in sorted(self._spec["volumeMounts"], key=lambda one: str(one["mountPath"]).count("/")):
            place, volume = mount["mountPath"], volumes[mount["name"]]
            sealed = mount.get("readOnly") or not {"emptyDir", "persistentVolumeClaim"} & set(volume)
            source = self._place(volume) / mount.get("subPath", "")
            yield from _bound(str(source), place, "--ro-bind" if sealed else "--bind")

    def _variables(self) -> Iterator[tuple[str, str]]:
        for one in self._spec.get("env", ()):
            if "valueFrom" in one:
                reference = one["valueFrom"]["secretKeyRef"]
                yield one["name"], self._pods.secret(reference["name"], reference["key"])
            else:
                yield one["name"], one["value"]
