"""What a kubelet does with one pod: starts its containers in order, probes, restarts and ends them."""

from __future__ import annotations

import http.client
import itertools
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.helm.network import Network
from tests.helm.sandbox import NotStarted, Sandbox, Spec, Surroundings, check
from tests.helm.volumes import Objects, Volumes
from tests.waiting import PATIENCE_S

_LOOK_S = 0.02
_RETRY_S = 0.5
#: Pauses before restarts: none before the first, then doubling.
_BACKOFF_S, _MOST_BACKOFF_S = 10.0, 300.0


@dataclass(frozen=True, slots=True)
class Node:
    """What a pod finds where it runs; the maps grow as things are applied."""

    namespace: str
    network: Network
    #: Kind and name -> manifest.
    objects: Objects
    #: A claim's name -> its folder.
    claims: Mapping[str, Path]
    #: What stands for the node's file system.
    root: Path
    #: What pods have as /etc/hosts.
    hosts: Path
    #: The variables that tell of Services.
    links: Callable[[], Mapping[str, str]]
    #: Called, from any thread, when a pod has become ready or ceased to be.
    changed: Callable[[], None]


class Container:
    """A container over all its restarts; what it tells may be read from any thread."""

    def __init__(self, pod: Pod, spec: Spec, *, restart: str) -> None:
        self.name: str = spec["name"]
        self.restarts = 0
        #: Exit codes, the last one last.
        self.exits: list[int] = []
        #: Why it does not run, in the kubelet's words: reason and message.
        self.waiting: tuple[str, str] | None = ("ContainerCreating", "")
        #: What probes found that was not well, and what became of it.
        self.events: list[str] = []
        self.started = self._ready = False
        self._pod, self._spec, self._restart = pod, spec, restart
        self._log = pod.folder / f"{self.name}.log"
        self._unhealthy = threading.Event()
        self._sandbox: Sandbox | None = None

    def log(self) -> str:
        """What it wrote, in all its lives."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    @property
    def sandbox(self) -> Sandbox:
        """The running process."""
        assert self._sandbox is not None, f"{self._pod.name}/{self.name} does not run: {self.waiting}"
        return self._sandbox

    @property
    def ready(self) -> bool:
        return self._ready

    def _become(self, ready: bool) -> None:
        if ready is not self._ready:
            self._ready = ready
            self._pod.changed()

    def live(self) -> None:
        """Runs it until it has ended for good, or the pod is to end. Call it in a thread of its own."""
        for attempt in itertools.count():
            if not self._begin():
                break
            code = self._attend()
            self._sandbox, self.started = None, False
            self._become(False)
            self.exits.append(code)
            if (
                self._pod.ending.is_set()
                or self._restart == "Never"
                or (code == 0 and self._restart != "Always")
            ):
                break
            self.restarts += 1
            self.waiting = ("CrashLoopBackOff", f"exit code {code}; the log ends: {self.log()[-500:]}")
            pause = min(_MOST_BACKOFF_S, _BACKOFF_S * 2 ** (attempt - 1)) if attempt else 0.0
            if self._pod.ending.wait(pause):
                break

    def _begin(self) -> bool:
        """Whether it started; False if the pod's end came first."""
        while not self._pod.ending.is_set():
            try:
                sandbox = Sandbox(self._spec, self._pod.surroundings(), self._log)
            except NotStarted as exc:
                self.waiting = (exc.reason, exc.message)
                self._pod.ending.wait(_RETRY_S)
                continue
            self._unhealthy.clear()
            self._sandbox, self.waiting = sandbox, None
            self.started = "startupProbe" not in self._spec
            self._become(self.started and "readinessProbe" not in self._spec)
            return True
        return False

    def _attend(self) -> int:
        """Probes it until it ends, by itself or because it must; its exit code."""
        sandbox, over = self.sandbox, threading.Event()
        kinds = [kind for kind in ("startup", "liveness", "readiness") if f"{kind}Probe" in self._spec]
        probes = [threading.Thread(target=self._probe, args=(kind, over), daemon=True) for kind in kinds]
        for probe in probes:
            probe.start()
        while (code := sandbox.exit_code(_LOOK_S)) is None:
            if self._pod.ending.is_set() or self._unhealthy.is_set():
                over.set()
                code = self._end(sandbox)
                break
        over.set()
        for probe in probes:
            probe.join()
        return code

    def _end(self, sandbox: Sandbox) -> int:
        began, grace = time.monotonic(), self._pod.grace_s
        before = self._spec.get("lifecycle", {}).get("preStop")
        if before is not None and "exec" in before:
            try:
                done = sandbox.execute(before["exec"]["command"], grace)
                if done.returncode:
                    self.events.append(f"FailedPreStopHook: {done.stdout}{done.stderr}")
            except subprocess.TimeoutExpired:
                self.events.append("FailedPreStopHook: took the whole grace period")
        elif before is not None:
            # `sleep`, of newer clusters.
            time.sleep(min(grace, before["sleep"]["seconds"]))
        sandbox.signal(signal.SIGTERM)
        code = sandbox.exit_code(max(0.1, grace - (time.monotonic() - began)))
        if code is None:
            self.events.append(f"Killed: it did not end within {grace:g} s")
            sandbox.signal(signal.SIGKILL)
            code = sandbox.exit_code(10)
        assert code is not None, f"{self.name} survives SIGKILL"
        return code

    def _probe(self, kind: str, over: threading.Event) -> None:
        """One probe's rounds, in a thread of their own."""
        spec = self._spec[f"{kind}Probe"]
        if over.wait(spec.get("initialDelaySeconds", 0)):
            return
        good = bad = 0
        while not over.is_set():
            if kind != "startup" and not self.started:
                over.wait(_LOOK_S)
                continue
            wrong = self._ask(spec)
            if over.is_set():
                return
            good, bad = (0, bad + 1) if wrong else (good + 1, 0)
            if wrong:
                self.events.append(f"{kind.capitalize()} probe failed: {wrong}")
            if bad >= spec.get("failureThreshold", 3):
                if kind == "readiness":
                    self._become(False)
                else:
                    self.events.append(f"Container {self.name} failed {kind} probe, will be restarted")
                    self._unhealthy.set()
                    return
            if good >= spec.get("successThreshold", 1):
                if kind == "startup":
                    self.started = True
                    self._become("readinessProbe" not in self._spec)
                    return
                if kind == "readiness":
                    self._become(True)
            over.wait(spec.get("periodSeconds", 10))

    def _ask(self, spec: Spec) -> str | None:
        """What is wrong, or None."""
        timeout_s, host = float(spec.get("timeoutSeconds", 1)), self._pod.address
        try:
            if "exec" in spec:
                done = self.sandbox.execute(spec["exec"]["command"], timeout_s)
                return None if done.returncode == 0 else (done.stdout + done.stderr).strip() or "failed"
            if "tcpSocket" in spec:
                with socket.create_connection((host, self.port(spec["tcpSocket"]["port"])), timeout_s):
                    return None
            return _get(host, self.port(spec["httpGet"]["port"]), spec["httpGet"], timeout_s)
        except subprocess.TimeoutExpired:
            return f"command timed out after {timeout_s:g} s"
        except (OSError, http.client.HTTPException, AssertionError) as exc:
            return str(exc) or type(exc).__name__

    def port(self, named: int | str) -> int:
        """The number of one of its ports; KeyError if it has none of that name."""
        if isinstance(named, int):
            return named
        return {port.get("name"): int(port["containerPort"]) for port in self._spec.get("ports", ())}[named]


def _get(host: str, port: int, spec: Spec, timeout_s: float) -> str | None:
    connection: http.client.HTTPConnection
    if spec.get("scheme", "HTTP") == "HTTPS":
        # A kubelet does not check certificates either.
        connection = http.client.HTTPSConnection(
            host, port, timeout=timeout_s, context=ssl._create_unverified_context()
        )
    else:
        connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    try:
        headers = {each["name"]: each["value"] for each in spec.get("httpHeaders", ())}
        connection.request("GET", spec.get("path", "/"), headers={"User-Agent": "kube-probe/1.34", **headers})
        answer = connection.getresponse()
        body = answer.read(10240).decode(errors="replace").strip()
    finally:
        connection.close()
    return (
        None if 200 <= answer.status < 400 else f"HTTP probe failed with statuscode: {answer.status} {body}"
    )


class Pod:
    """One pod from its creation to its deletion. It runs in threads of its own."""

    def __init__(self, name: str, template: Spec, *, owner: str, folder: Path, node: Node) -> None:
        """`owner`: the workload's name. Raises Unsupported."""
        self.name, self.owner, self.folder, self._node = name, owner, folder, node
        metadata, self.spec = template.get("metadata") or {}, template["spec"]
        check(self.spec)
        self.labels: dict[str, str] = metadata.get("labels") or {}
        self._annotations: dict[str, str] = metadata.get("annotations") or {}
        self.address = node.network.address()
        self.ending = threading.Event()
        self.grace_s = float(self.spec.get("terminationGracePeriodSeconds", 30))
        self.phase = "Pending"
        #: Why the kubelet ended it.
        self.evicted: str | None = None
        folder.mkdir(parents=True)
        self._links = node.links() if self.spec.get("enableServiceLinks", True) else {}
        self._volumes = Volumes(self.spec, folder / "volumes", node.objects, node.claims, node.root)
        self._places: dict[str, Path] = {}
        self._holder: subprocess.Popen[bytes] | None = None
        restart = self.spec.get("restartPolicy", "Always")
        first = "OnFailure" if restart == "Always" else restart
        self.init = [Container(self, one, restart=first) for one in self.spec.get("initContainers", ())]
        self.containers = [Container(self, one, restart=restart) for one in self.spec["containers"]]
        self.created = time.monotonic()
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def ready(self) -> bool:
        """Whether Services send it requests."""
        up = self.phase == "Running" and not self.ending.is_set()
        return up and all(one.ready for one in self.containers)

    @property
    def container(self) -> Container:
        """The only one."""
        [one] = self.containers
        return one

    @property
    def restarts(self) -> int:
        return sum(one.restarts for one in self.containers)

    def describe(self) -> str:
        """What `kubectl describe` and `kubectl logs` would show."""
        lines = [f"pod {self.name}: {self.phase}, ready {self.ready}, evicted {self.evicted}"]
        if self._failed is not None:
            lines.append(f"  {self._failed!r}")
        for one in [*self.init, *self.containers]:
            lines.append(f"  {one.name}: waiting {one.waiting}, exits {one.exits}, ready {one.ready}")
            lines += [f"    {event}" for event in one.events[-5:]]
            lines += [f"    | {line}" for line in one.log().splitlines()[-15:]]
        return "\n".join(lines)

    def surroundings(self) -> Surroundings:
        assert self._holder is not None
        return Surroundings(
            pod=self.name,
            namespace=self._node.namespace,
            address=self.address,
            labels=self.labels,
            annotations=self._annotations,
            spec=self.spec,
            objects=self._node.objects,
            links=self._links,
            volumes=self._places,
            hosts=self._node.hosts,
            network_pid=self._holder.pid,
        )

    def refresh(self) -> None:
        """Brings changed ConfigMaps and Secrets into its volumes now, rather than within the minute."""
        self._volumes.refresh()

    def changed(self) -> None:
        """Its readiness may have changed."""
        self._node.changed()

    def delete(self, grace_s: float | None = None) -> float:
        """As `kubectl delete pod --grace-period`; the seconds that it took to end."""
        began = time.monotonic()
        if grace_s is not None:
            self.grace_s = grace_s
        self.ending.set()
        self._thread.join(self.grace_s + 30)
        assert not self._thread.is_alive(), f"{self.name} does not end"
        return time.monotonic() - began

    def wait(self, what: Callable[[Pod], Any], timeout_s: float = PATIENCE_S) -> float:
        """Seconds from its creation until something is so; AssertionError with all that is known of it."""
        until = time.monotonic() + timeout_s
        while not what(self):
            if self._failed is not None:
                raise self._failed
            assert time.monotonic() < until, f"not within {timeout_s:g} s\n{self.describe()}"
            time.sleep(_LOOK_S)
        return time.monotonic() - self.created

    def until_ready(self, timeout_s: float = PATIENCE_S) -> float:
        return self.wait(lambda pod: pod.ready, timeout_s)

    def until_ended(self, timeout_s: float = PATIENCE_S) -> int:
        """Exit code of its container, for one that runs to an end."""
        self.wait(lambda pod: pod.phase in ("Succeeded", "Failed"), timeout_s)
        return self.containers[0].exits[-1] if self.containers[0].exits else -1

    def _run(self) -> None:
        try:
            self._holder = self._node.network.namespace(self.address)
            self._bring_up()
        except BaseException as exc:
            self._failed = exc
            self.phase = "Failed"
        finally:
            self.ending.set()
            if self._holder is not None:
                self._node.network.release(self.address, self._holder)

    def _bring_up(self) -> None:
        while not self._mounted():
            if self.ending.wait(_RETRY_S):
                return
        for one in self.init:
            one.live()
            if self.ending.is_set() or not one.exits or one.exits[-1]:
                self.phase = "Failed"
                return
        threads = [threading.Thread(target=one.live, daemon=True) for one in self.containers]
        for thread in threads:
            thread.start()
        self.phase = "Running"
        self.changed()
        began, deadline = time.monotonic(), self.spec.get("activeDeadlineSeconds")
        looked = began
        while any(thread.is_alive() for thread in threads):
            now = time.monotonic()
            if deadline is not None and now - began > deadline:
                self._evict("DeadlineExceeded: Pod was active on the node longer than the specified deadline")
            if now - looked > 1:
                looked = now
                if over := self._volumes.overfull():
                    self._evict(over)
            time.sleep(_LOOK_S)
        failed = self.evicted or any(not one.exits or one.exits[-1] for one in self.containers)
        self.phase = "Failed" if failed else "Succeeded"

    def _mounted(self) -> bool:
        try:
            self._places = self._volumes.make()
        except NotStarted as exc:
            for one in [*self.init, *self.containers]:
                one.waiting = (exc.reason, exc.message)
            return False
        return True

    def _evict(self, why: str) -> None:
        if not self.ending.is_set():
            self.evicted = why
            self.grace_s = 0.1
            self.ending.set()
