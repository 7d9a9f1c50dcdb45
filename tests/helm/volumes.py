"""A pod's volumes as folders of this machine, with the owners and modes that a kubelet gives them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.helm.sandbox import NotStarted, Spec, Unsupported, data_of

Objects = Mapping[tuple[str, str], Spec]
_SIZES = {
    "": 1,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "Ki": 1 << 10,
    "Mi": 1 << 20,
    "Gi": 1 << 30,
    "Ti": 1 << 40,
}


def parse_size(text: object) -> int:
    """Bytes of a quantity: 64Mi."""
    words = str(text)
    number = words.rstrip("".join(set("".join(_SIZES))))
    return int(float(number) * _SIZES[words[len(number) :]])


class Volumes:
    """Those of one pod. What persists lies with the cluster, all else in the pod's folder."""

    def __init__(
        self, spec: Spec, folder: Path, objects: Objects, claims: Mapping[str, Path], node: Path
    ) -> None:
        """`claims`: a claim's name -> its folder; `node`: what stands for the node's root."""
        self._spec, self._folder, self._objects = spec, folder, objects
        self._claims, self._node = claims, node
        self._group: int | None = spec.get("securityContext", {}).get("fsGroup")

    def make(self) -> dict[str, Path]:
        """Name -> folder. Raises NotStarted, as for a Secret that isn't there yet; call it again then."""
        return {volume["name"]: self._one(volume) for volume in self._spec.get("volumes", ())}

    def overfull(self) -> str | None:
        """The first emptyDir with more in it than its limit, for which a kubelet evicts the pod."""
        for volume in self._spec.get("volumes", ()):
            limit = (volume.get("emptyDir") or {}).get("sizeLimit")
            if limit is not None and _weight(self._folder / volume["name"]) > parse_size(limit):
                return f'Usage of EmptyDir volume "{volume["name"]}" exceeds the limit "{limit}".'
        return None

    def _one(self, volume: Spec) -> Path:
        [kind] = set(volume) - {"name"}
        source: Spec = volume[kind] or {}
        folder = self._folder / str(volume["name"])
        if kind == "persistentVolumeClaim":
            if source["claimName"] not in self._claims:
                message = f'persistentvolumeclaim "{source["claimName"]}" not found'
                raise NotStarted("Unschedulable", message)
            return self._own(self._claims[source["claimName"]])
        if kind == "hostPath":
            return self._on_node(source)
        folder.mkdir(parents=True, exist_ok=True)
        if kind == "emptyDir":
            folder.chmod(0o777)
            return self._own(folder)
        folder.chmod(0o755)
        if kind in ("configMap", "secret"):
            self._project(volume["name"], {kind: source}, folder, source.get("defaultMode", 0o644))
        elif kind == "projected":
            for one in source["sources"]:
                self._project(volume["name"], one, folder, source.get("defaultMode", 0o644))
        else:
            raise Unsupported(f"volume {volume['name']} of kind {kind}")
        return folder

    def _project(self, volume: str, source: Spec, folder: Path, mode: int) -> None:
        [(how, reference)] = source.items()
        if how not in ("configMap", "secret"):
            raise Unsupported(f"projection of {how}")
        kind = "ConfigMap" if how == "configMap" else "Secret"
        name = reference.get("name") or reference["secretName"]
        try:
            found = data_of(self._objects, kind, name)
        except KeyError:
            if reference.get("optional"):
                return
            message = f'MountVolume.SetUp failed for volume "{volume}" : {kind.lower()} "{name}" not found'
            raise NotStarted("ContainerCreating", message) from None
        items = reference.get("items") or [{"key": key, "path": key} for key in found]
        for item in items:
            if item["key"] not in found:
                if reference.get("optional"):
                    continue
                message = f"references non-existent {kind.lower()} key: {item['key']}"
                raise NotStarted("ContainerCreating", f'MountVolume.SetUp failed for "{volume}" : {message}')
            path = folder / item["path"]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(found[item["key"]])
            # Who shares the group may read it, whatever the mode says.
            path.chmod(item.get("mode", mode) | (0o440 if self._group is not None else 0))
            os.chown(path, 0, self._group or 0)

    def _on_node(self, source: Spec) -> Path:
        """A path of the node belongs to the node: nobody changes its owner for a pod."""
        folder = self._node / str(source["path"]).lstrip("/")
        if source.get("type") == "DirectoryOrCreate":
            folder.mkdir(parents=True, exist_ok=True)
        if not folder.is_dir():
            raise NotStarted(
                "ContainerCreating", f"hostPath type check failed: {source['path']} is not a directory"
            )
        return folder

    def _own(self, folder: Path) -> Path:
        """What `fsGroup` does to a volume that can be written."""
        if self._group is not None:
            for path in (folder, *folder.rglob("*")):
                os.chown(path, -1, self._group)
                path.chmod(path.stat().st_mode | (0o2770 if path.is_dir() else 0o660))
        return folder


def _weight(folder: Path) -> int:
    return sum(_sizes(folder))


def _sizes(folder: Path) -> Iterator[int]:
    for path in folder.rglob("*"):
        try:
            yield path.stat().st_blocks * 512
        except OSError:
            continue
