"""Where a model's files are, and whether they are those that the engine has loaded.

The namespace is made when the engine has started, minutes after it read its weights. If somebody has
replaced the files meanwhile, their digest names the new weights, and the engine holds the old ones. So files
count only if they were there before this process began, when it had not read anything yet. The time at which
an inode last changed says so: a copy, a rename and a new link set it to the moment at which they are made,
whatever time the file itself is given. It says so in every process, whether or not anything of ours ran in it
before.

A snapshot in the hub's cache is named by its commit, and vLLM downloads its missing files when it starts.
There a new file is a part of the commit. Only the commit that a branch stands for may change, and the cache
says when that happened.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvstore.errors import ConfigError

#: Files that decide what a model computes.
_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".json", ".py")
#: A file that was made so long after the process began still came before anything was read: the clock that
#: stamps files is coarser than the one that stamps processes.
_SLACK_S = 0.1
_MOST_FILES = 100_000
_MOST_LINKS = 40
_COMMIT = re.compile(r"[0-9a-f]{40}")


class NotKnown(ConfigError):
    """It is not known which weights an engine has; the text says why."""


@dataclass(frozen=True, slots=True)
class Source:
    """The folder, or the single file, that a model was loaded from."""

    path: Path
    #: Where the hub's cache keeps which commit a branch stands for, if that decided the path.
    refs: Path | None = None
    #: The path names its content.
    pinned: bool = False

    def check_unchanged(self, since_s: float | None = None) -> None:
        """Raise NotKnown unless all of it has been there since this process began, or since Unix time
        `since_s`."""
        since_s = process_began_s() if since_s is None else since_s
        if since_s is None:
            raise NotKnown("this machine doesn't say when the engine's process began (/proc/self/stat)")
        for path, changed_s in self._changes():
            if changed_s > since_s + _SLACK_S:
                raise NotKnown(
                    f"{path} has changed since the engine's process began, so the engine may have loaded "
                    "what was there before"
                )

    def _changes(self) -> Iterator[tuple[Path, float]]:
        """Yields what may have been replaced, and when it changed."""
        if self.refs is not None:
            if sum(1 for _ in self.path.parent.iterdir()) > 1:
                yield from ((ref, ref.stat().st_ctime) for ref in _files(self.refs, None))
        elif not self.pinned:
            yield from _way_to(self.path.absolute())
            for count, file in enumerate(_files(self.path)):
                if count > _MOST_FILES:
                    raise NotKnown(f"{self.path} has more than {_MOST_FILES} files")
                yield file, max(file.lstat().st_ctime, file.stat().st_ctime)


def _way_to(path: Path, links: int = 0) -> Iterator[tuple[Path, float]]:
    """Yields a path and what leads to it, links above all, with the time at which each was put there."""
    if links > _MOST_LINKS:
        raise NotKnown(f"{path} is behind more than {_MOST_LINKS} links")
    yield path, path.stat().st_ctime
    for step in (path, *path.parents):
        seen = step.lstat()
        if step.is_symlink():
            yield step, seen.st_ctime
            yield from _way_to(step.parent / step.readlink(), links + 1)
        elif seen.st_ctime > seen.st_mtime:
            # A file put into a folder changes both of its times; a rename of the folder changes only this.
            yield step, seen.st_ctime


def _files(folder: Path, suffixes: tuple[str, ...] | None = _SUFFIXES) -> Iterator[Path]:
    for root, _, names in os.walk(folder):
        for name in names:
            if suffixes is None or name.endswith(suffixes):
                yield Path(root) / name


def code_files(folder: Path) -> list[Path]:
    """Returns the Python files below a folder, in order."""
    return sorted(_files(folder, (".py",)))


def process_began_s() -> float | None:
    """Returns the Unix time at which this process began, by the kernel, or None if the kernel doesn't say."""
    try:
        stat = Path("/proc/self/stat").read_text(encoding="ascii", errors="replace")
        # The process's name, in parentheses, may hold anything.
        ticks = int(stat.rpartition(")")[2].split()[19])
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return None
    return time.time() - age_s


def source_of(name: str, revision: str | None, cache: str | None) -> Source:
    """Returns where the files of a model are that vLLM has loaded by this name. Uses no network.

    `cache` is --download-dir. Raises NotKnown if they aren't on this machine."""
    if Path(name).exists():
        # vLLM itself puts the path of a snapshot in the place of a name when it is offline.
        return Source(Path(name), pinned=_is_snapshot(Path(name).absolute()))
    from huggingface_hub import snapshot_download

    # With this variable vLLM takes models from elsewhere.
    if os.environ.get("VLLM_USE_MODELSCOPE", "False").lower() != "true":
        try:
            path = Path(snapshot_download(name, revision=revision, cache_dir=cache, local_files_only=True))
        except (OSError, ValueError):
            pass
        else:
            pinned = path.name == revision
            return Source(path, refs=None if pinned else path.parent.parent / "refs", pinned=pinned)
    raise NotKnown(f"the files of {name} are not on this machine's disk, so a digest is impossible")


def _is_snapshot(path: Path) -> bool:
    return path.parent.name == "snapshots" and _COMMIT.fullmatch(path.name) is not None
