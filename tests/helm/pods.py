"""What pods a manifest makes, and what the restricted Pod Security Standard says about them.

The rules are those of Kubernetes 1.34's "restricted", which holds "baseline" too, from their text:
https://kubernetes.io/docs/concepts/security/pod-security-standards/
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.helm.chart import Manifest

_ALLOWED_VOLUMES = {
    "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected",
    "secret",
}  # fmt: skip
_SAFE_SYSCTLS = {
    "kernel.shm_rmid_forced", "net.ipv4.ip_local_port_range", "net.ipv4.ip_unprivileged_port_start",
    "net.ipv4.tcp_syncookies", "net.ipv4.ping_group_range",
}  # fmt: skip


def pod_templates(manifests: list[Manifest]) -> Iterator[tuple[str, Manifest]]:
    """(what it is, the template: metadata and spec) of everything that makes pods."""
    for manifest in manifests:
        what = f"{manifest['kind']}/{manifest['metadata']['name']}"
        if manifest["kind"] == "Pod":
            yield what, manifest
        elif manifest["kind"] in ("Deployment", "StatefulSet", "DaemonSet", "Job", "ReplicaSet"):
            yield what, manifest["spec"]["template"]
        elif manifest["kind"] == "CronJob":
            yield what, manifest["spec"]["jobTemplate"]["spec"]["template"]


def containers(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """All of a pod's, whichever kind."""
    return [
        one for kind in ("initContainers", "containers", "ephemeralContainers") for one in spec.get(kind, [])
    ]


def violations(spec: dict[str, Any]) -> list[str]:
    """What the restricted standard forbids in a pod's spec, a line each."""
    found = [f"{key} is set" for key in ("hostNetwork", "hostPID", "hostIPC") if spec.get(key)]
    for volume in spec.get("volumes", []):
        kinds = set(volume) - {"name"}
        found += [f"volume {volume['name']} is a {kind}" for kind in sorted(kinds - _ALLOWED_VOLUMES)]
    pod = spec.get("securityContext", {})
    found += [f"sysctl {one['name']}" for one in pod.get("sysctls", []) if one["name"] not in _SAFE_SYSCTLS]
    if pod.get("runAsUser") == 0:
        found.append("the pod runs as root")
    for one in containers(spec):
        found += [f"container {one['name']}: {what}" for what in _of_container(one, pod)]
    return found


def _of_container(one: dict[str, Any], pod: dict[str, Any]) -> Iterator[str]:
    own = one.get("securityContext", {})
    if own.get("privileged"):
        yield "privileged"
    if own.get("allowPrivilegeEscalation") is not False:
        yield "allowPrivilegeEscalation is not false"
    if not own.get("runAsNonRoot", pod.get("runAsNonRoot")):
        yield "runAsNonRoot is not true"
    if own.get("runAsUser") == 0:
        yield "runs as root"
    profile = own.get("seccompProfile", pod.get("seccompProfile", {})).get("type")
    if profile not in ("RuntimeDefault", "Localhost"):
        yield f"seccompProfile is {profile}"
    capabilities = own.get("capabilities", {})
    if "ALL" not in capabilities.get("drop", []):
        yield "does not drop ALL capabilities"
    if set(capabilities.get("add", [])) - {"NET_BIND_SERVICE"}:
        yield f"adds capabilities {capabilities['add']}"
    if own.get("procMount", "Default") != "Default":
        yield "procMount"
    for context in (own, pod):
        if context.get("windowsOptions", {}).get("hostProcess"):
            yield "hostProcess"
        if context.get("seLinuxOptions", {}).keys() & {"user", "role"}:
            yield "seLinuxOptions"
        if context.get("appArmorProfile", {}).get("type", "RuntimeDefault") == "Unconfined":
            yield "appArmorProfile"
    for port in one.get("ports", []):
        if port.get("hostPort"):
            yield f"hostPort {port['hostPort']}"
    for name in ("livenessProbe", "readinessProbe", "startupProbe"):
        for how in ("httpGet", "tcpSocket"):
            if one.get(name, {}).get(how, {}).get("host"):
                yield f"{name} asks another host"
