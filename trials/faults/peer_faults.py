"""The faults that every system of `trials.faults.peers` can be put through."""

from __future__ import annotations

import contextlib
import itertools
import resource
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.servers.redis import RedisServer
from trials.faults.peer_systems import System


@dataclass
class World:
    """What a fault may be made to."""

    system: System
    folder: Path
    redis: RedisServer | None = None
    #: The files of each prompt, in the order in which they were written.
    files: list[list[Path]] = field(default_factory=list)
    #: What ends the fault, and what clears up when no process is left; both in the opposite order.
    undo: list[Callable[[], object]] = field(default_factory=list)
    clear: list[Callable[[], object]] = field(default_factory=list)

    def put_back(self, steps: list[Callable[[], object]]) -> None:
        while steps:
            # A process may be gone by now.
            with contextlib.suppress(ProcessLookupError):
                steps.pop()()


def _nothing(world: World) -> None:
    pass


@dataclass(frozen=True)
class Fault:
    """`first` is made before anything is stored, `rest` while no engine runs, `live` while one does."""

    name: str
    rest: Callable[[World], None] = _nothing
    live: Callable[[World], None] = _nothing
    first: Callable[[World], None] = _nothing
    redis: bool = False
    root: bool = False
    #: Whether even the prompt that is asked for before everything else may already suffer from it.
    early: bool = False


def _truncate(world: World) -> None:
    for path in itertools.chain(*world.files):
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2])


def _flip(world: World) -> None:
    """Every bit of 4 KiB in the middle of each file: what a bad sector or a torn page leaves."""
    for path in itertools.chain(*world.files):
        data = bytearray(path.read_bytes())
        middle = len(data) // 2 // 4096 * 4096
        data[middle : middle + 4096] = bytes(byte ^ 0xFF for byte in data[middle : middle + 4096])
        path.write_bytes(data)


def _swap(world: World) -> None:
    """Each prompt's files get the bytes of the next prompt's."""
    contents = [[path.read_bytes() for path in files] for files in world.files]
    for files, other in zip(world.files, contents[1:] + contents[:1], strict=True):
        assert [path.stat().st_size for path in files] == [len(data) for data in other]
        for path, data in zip(files, other, strict=True):
            path.write_bytes(data)


def _delete(world: World) -> None:
    for path in itertools.chain(*world.files):
        path.unlink()


def _read_only(world: World) -> None:
    """Whoever opens a file from now on finds the folder read-only. What is open for writing stays so."""
    run("mount", "--bind", world.folder, world.folder)
    world.undo.append(lambda: run("umount", "--lazy", world.folder))
    run("mount", "-o", "remount,bind,ro", world.folder)


def _small_disk(world: World) -> None:
    """The folder becomes a file system with room for half of what the prompts need."""
    run("mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", world.folder)
    world.clear.append(lambda: run("umount", "--lazy", world.folder))


def _tmpfs(world: World) -> None:
    run("mount", "-t", "tmpfs", "-o", "size=256m", "tmpfs", world.folder)
    world.clear.append(lambda: run("umount", "--lazy", world.folder))


def _fill(world: World) -> None:
    """Nothing is left of the file system of the folder."""
    ballast = world.folder / "ballast"
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while file.write(bytes(1 << 20)):
            pass
    with contextlib.suppress(OSError), ballast.open("ab", buffering=0) as file:
        while file.write(bytes(512)):
            pass
    assert shutil.disk_usage(world.folder).free == 0
    world.undo.append(ballast.unlink)


def _no_descriptors(world: World) -> None:
    """No process that stores can open anything more: the limit is the lowest number that is free."""
    for pid in world.system.pids():
        used = {int(entry.name) for entry in Path(f"/proc/{pid}/fd").iterdir()}
        free = next(number for number in range(len(used) + 1) if number not in used)
        soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (free, hard))
        world.undo.append(
            lambda pid=pid, was=(soft, hard): resource.prlimit(pid, resource.RLIMIT_NOFILE, was)  # type: ignore[misc]
        )


def _stop_redis(world: World) -> None:
    assert world.redis is not None
    world.undo.append(world.redis.start)
    world.redis.stop()


def _hang_redis(world: World) -> None:
    assert world.redis is not None
    world.undo.append(world.redis.resume)
    world.redis.pause()


def _flush_redis(world: World) -> None:
    assert world.redis is not None
    world.redis.flush()


def run(*words: object) -> None:
    """A command that must succeed."""
    subprocess.run([str(word) for word in words], check=True, capture_output=True)


FAULTS = [
    Fault("no fault"),
    Fault("every stored file cut to half", rest=_truncate),
    Fault("4 KiB flipped in every stored file", rest=_flip),
    Fault("every stored file replaced by another prompt's", rest=_swap),
    Fault("every stored file deleted", rest=_delete),
    Fault("the folder read-only before the engine starts", rest=_read_only, root=True, early=True),
    Fault("the folder made read-only under the engine", live=_read_only, root=True),
    Fault("the disk full while the prompts are stored", first=_small_disk, root=True, early=True),
    Fault("the disk full under the engine", first=_tmpfs, live=_fill, root=True),
    Fault("no file descriptor left", live=_no_descriptors),
    Fault("Redis, no fault", redis=True),
    Fault("Redis stopped", live=_stop_redis, redis=True),
    Fault("Redis hung", live=_hang_redis, redis=True),
    Fault("Redis flushed", live=_flush_redis, redis=True),
]
