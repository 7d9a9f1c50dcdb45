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


#: Kinds of volumes that hold what ConfigMaps and Secrets say.
_PROJECTED = {"configMap", "secret", "projected"}


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

    def refresh(self) -> None:
        """Brings changed ConfigMaps and Secrets into the pod, which a kubelet does within a minute or so."""
        for volume in self._spec.get("volumes", ()):
            if _PROJECTED & set(volume):
                self._one(volume)

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
        if kind not in _PROJECTED:
            raise Unsupported(f"volume {volume['name']} of kind {kind}")
        folder.chmod(0o755)
        wanted: dict[Path, tuple[bytes, int]] = {}
        for one in source["sources"] if kind == "projected" else [{kind: source}]:
            wanted |= self._projection(volume["name"], one, folder, source.get("defaultMode", 0o644))
        self._write(folder, wanted)
        return folder

    def _projection(
        self, volume: str, source: Spec, folder: Path, mode: int
    ) -> dict[Path, tuple[bytes, int]]:
        """File -> content and mode."""
        [(how, reference)] = source.items()
        if how not in ("configMap", "secret"):
            raise Unsupported(f"projection of {how}")
        kind = "ConfigMap" if how == "configMap" else "Secret"
        name, optional = reference.get("name") or reference["secretName"], reference.get("optional", False)
        try:
            found = data_of(self._objects, kind, name)
        except KeyError:
            if optional:
                return {}
            message = f'MountVolume.SetUp failed for volume "{volume}" : {kind.lower()} "{name}" not found'
            raise NotStarted("ContainerCreating", message) from None
        made = {}
        for item in reference.get("items") or [{"key": key, "path": key} for key in found]:
            if item["key"] in found:
                made[folder / item["path"]] = (found[item["key"]], item.get("mode", mode))
            elif not optional:
                message = f"references non-existent {kind.lower()} key: {item['key']}"
                raise NotStarted("ContainerCreating", f'MountVolume.SetUp failed for "{volume}" : {message}')
        return made

    def _write(self, folder: Path, wanted: Mapping[Path, tuple[bytes, int]]) -> None:
        """These files and no others. Each is replaced: one that is mounted by its subPath stays as it was."""
        for path, (content, mode) in wanted.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            new = path.with_name(f"..{path.name}")
            new.write_bytes(content)
            # Who shares the group may read it, whatever the mode says.
            new.chmod(mode | (0o440 if self._group is not None else 0))
            os.chown(new, 0, self._group or 0)
            new.replace(path)
        for path in folder.rglob("*"):
            if path.is_file() and path not in wanted:
                path.unlink()

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
        if self._group is None:
            return folder
        policy = self._spec["securityContext"].get("fsGroupChangePolicy", "Always")
        root = folder.stat()
        if policy == "OnRootMismatch" and root.st_gid == self._group and root.st_mode & 0o2770 == 0o2770:
            return folder
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
