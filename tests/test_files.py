"""Whose the files are that prompts leave behind, and what others have put where they are to be."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from connectors.ec.staging import StagingFolder
from kvstore.admin.archive.export import ArchiveFile, CannotWrite
from kvstore.build import load_settings, open_index
from kvstore.errors import KVStoreError, PermissionDenied
from kvstore.files import GROUP, OWNER, make_folder, open_file, tighten
from kvstore.index.sqlite.index import SqliteIndex
from kvstore.payloads.local import LocalPayloads
from kvstore.payloads.tiered.locks import RangeLocks
from tests.waiting import PATIENCE_S

_NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")

#: Everything that writes: saves and loads through both tiers, pings, markers, ledger, locks, index, trace,
#: staging. Kept open at the end, so that SQLite's -wal and -shm, locks and temporary files are there.
_WRITER = """
import os, sys, time
os.umask(int(sys.argv[1], 8))
root, share = sys.argv[2:]
from connectors.ec.staging import StagingFolder
from kvstore.build import open_store
from kvstore.conformance.arrange import fresh_name, views
from kvstore.payloads.local import _temporary
from tests.store.world import namespace

NAMESPACE = namespace()
made = []
for write in ("through", "back"):
    store = open_store({
        "payloads": {"fast": f"file://{root}/fast-{write}", "slow": f"file://{root}/slow-{write}",
                     "fast_capacity": "64MiB", "write": write},
        "index": f"sqlite://{root}/index-{write}/index.sqlite",
        "local": {"share": share}, "trace": {"folder": f"{root}/trace-{write}"},
        "segment": {"target_bytes": "1MiB"},
    })
    space = store.open(NAMESPACE, block_bytes=4096)
    space.register()
    store.payloads.ping()
    for _ in range(3):
        store.payloads.put(fresh_name(), views(b"prompt" * 1000))
    store.backends.trace.describe(space.id, NAMESPACE, 4096)
    store.backends.trace.record(space.id, bytes(range(64)), time.time())
    made.append((store, space))
alone = open_store({"payloads": f"file://{root}/alone", "local": {"share": share}})
alone.open(NAMESPACE, block_bytes=4096).register()
alone.payloads.put(fresh_name(), views(b"prompt" * 1000))
staging = StagingFolder(f"{root}/staging", 1 << 20)
staging.put("0" * 32, memoryview(b"picture"))
with _temporary(f"{root}/alone", alone.payloads._inner._access):
    for store, _ in made:
        store.backends.trace._write_all()
    print("ready", flush=True)
    sys.stdin.read()
"""

#: Reads whatever it can under a folder, as another user.
_THIEF = """
import os, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
got = []
for folder, _, files in os.walk(sys.argv[1]):
    for name in files:
        try:
            open(f"{folder}/{name}", "rb").read(1)
            got.append(f"{folder}/{name}")
        except OSError:
            pass
print("\\n".join(got))
"""


@pytest.fixture
def root() -> Iterator[Path]:
    """A folder that everybody may enter; pytest's own are closed."""
    with tempfile.TemporaryDirectory(prefix="kvs-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.mark.parametrize(
    ("umask", "share"), [("0022", "owner"), ("0002", "owner"), ("0022", "group"), ("0077", "group")]
)
def test_nobody_else_may_read_what_is_written_whatever_the_umask(root: Path, umask: str, share: str) -> None:
    command = [sys.executable, "-c", _WRITER, umask, str(root), share]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdin is not None
        assert writer.stdout is not None
        try:
            assert writer.stdout.readline() == "ready\n"
            modes = {
                path.relative_to(root): stat.S_IMODE(path.lstat().st_mode)
                for path in root.rglob("*")
                if not path.is_symlink()
            }
            kinds = {path.name for path in modes} | {path.suffix for path in modes}
            wanted = {"index.sqlite-wal", "index.sqlite-shm", "ledger.sqlite", "locks", "dirty", ".jsonl"}
            assert {*wanted, ".tmp", ".lock", "0" * 32, ".0"} <= kinds
            for path, mode in modes.items():
                # Staging is an engine's own in any case, and the folder around it the operator's.
                staging = path.parts[0] == "staging"
                access = GROUP if share == "group" and not staging else OWNER
                if path != Path("staging"):
                    wanted_mode = access.folder if (root / path).is_dir() else access.file
                    assert mode == wanted_mode, (path, oct(mode))
            if os.geteuid() == 0:
                command = [sys.executable, "-I", "-c", _THIEF, str(root)]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                assert done.stdout.strip() == "", "another user reads them"
        finally:
            writer.stdin.close()
            writer.wait(PATIENCE_S)


def test_what_an_older_release_left_open_is_closed(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    with LocalPayloads(root) as payloads:
        payloads.ping()
    root.chmod(0o755)
    LocalPayloads(root).close()
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    # Shared by a group on purpose: these settings may not be those of everybody who uses it.
    root.chmod(0o2775)
    LocalPayloads(root).close()
    assert stat.S_IMODE(root.stat().st_mode) == 0o2770
    index = tmp_path / "index" / "index.sqlite"
    SqliteIndex(str(index)).close()
    index.chmod(0o644)
    SqliteIndex(str(index)).close()
    assert stat.S_IMODE(index.stat().st_mode) == 0o600


@as_root
def test_in_a_folder_of_another_user_what_is_ones_own_is_closed(tmp_path: Path) -> None:
    for name, owner in (("mine", 0), ("theirs", _NOBODY)):
        (tmp_path / name).mkdir(mode=0o755)
        os.chown(tmp_path / name, owner, -1)
    os.chown(tmp_path, _NOBODY, -1)
    tmp_path.chmod(0o755)
    tighten(tmp_path)
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("", "mine", "theirs")]
    assert modes == [0o755, 0o700, 0o755]


# What others have put there


def _plant(where: Path, what: str, secret: Path) -> None:
    """Puts something into the place of a file, as a stranger would."""
    if what == "fifo":
        os.mkfifo(where)
    elif what == "device":
        os.mknod(where, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    elif what == "link to a device":
        where.symlink_to("/dev/null")
    elif what == "dangling link":
        where.symlink_to(secret / "nologin")
    else:
        (secret / "there").write_bytes(b"precious")
        where.symlink_to(secret / "there")
    if os.geteuid() == 0:
        os.chown(where, _NOBODY, _NOBODY, follow_symlinks=False)


_PLANTED = ["fifo", "dangling link", "link", "link to a device"]
if os.geteuid() == 0:
    _PLANTED.append("device")


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: Any) -> Path:
    """A folder for temporary files in which everybody may make some, as /tmp."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    folder.chmod(0o1777)
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    folder = tmp_path / "secret"
    folder.mkdir(mode=0o700)
    return folder


@pytest.fixture
def opened(monkeypatch: Any) -> list[str]:
    """The paths of what is opened from now on that is no regular file or folder."""
    seen: list[str] = []
    real = os.open

    def watched(path: Any, *args: Any, **kwargs: Any) -> int:
        fd = real(path, *args, **kwargs)
        mode = os.fstat(fd).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            seen.append(str(path))
        return fd

    monkeypatch.setattr(os, "open", watched)
    return seen


@pytest.mark.parametrize("what", _PLANTED)
def test_a_lock_that_a_stranger_planted_is_neither_opened_nor_made(
    temporary: Path, secret: Path, opened: list[str], what: str
) -> None:
    """The attack: kvstore-ec-x/.lock -> any path, for the next engine of root."""
    bait = temporary / "kvstore-ec-x"
    bait.mkdir()
    _plant(bait / ".lock", what, secret)
    os.utime(bait, (0, 0))
    if os.geteuid() == 0:
        os.chown(bait, _NOBODY, _NOBODY)
    before = {path: path.read_bytes() for path in secret.iterdir()}
    folder = StagingFolder(None, 1000)
    assert Path(folder.put("0" * 32, memoryview(b"abc"))).read_bytes() == b"abc"
    folder.close()
    assert {path: path.read_bytes() for path in secret.iterdir()} == before
    assert opened == []
    if os.geteuid() == 0:
        assert os.path.lexists(bait / ".lock"), "a stranger's folder is left alone"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes folders of a stranger's")
def test_thousands_of_strangers_folders_are_left_alone(temporary: Path, opened: list[str]) -> None:
    """Each could be a dead engine's, and a lock that is a FIFO would keep whoever opens it waiting."""
    for number in range(3000):
        bait = temporary / f"kvstore-ec-{number}"
        bait.mkdir()
        if number % 100 == 0:
            os.mkfifo(bait / ".lock")
        os.utime(bait, (0, 0))
        os.chown(bait, _NOBODY, _NOBODY)
    folder = StagingFolder(None, 1000)
    staged = Path(folder.put("0" * 32, memoryview(b"abc")))
    assert staged.read_bytes() == b"abc"
    assert stat.S_IMODE(staged.parent.stat().st_mode) == 0o700
    folder.close()
    assert len(list(temporary.glob("kvstore-ec-*"))) == 3000
    assert opened == []


def test_a_link_in_the_place_of_a_dead_engines_folder_is_not_followed(temporary: Path, secret: Path) -> None:
    (secret / "precious").touch()
    os.utime(secret, (0, 0))
    (temporary / "kvstore-ec-x").symlink_to(secret)
    StagingFolder(None, 1000).close()
    assert (secret / "precious").exists()


@pytest.mark.parametrize("what", _PLANTED)
def test_every_file_that_is_opened_by_name_may_have_been_planted(
    temporary: Path, secret: Path, opened: list[str], what: str
) -> None:
    lock = temporary / ".tier" / "locks"
    lock.parent.mkdir()
    _plant(lock, what, secret)
    with pytest.raises(KVStoreError):
        RangeLocks(str(lock)).acquire(1)
    lock.unlink()
    # Of a put that died, as it would seem.
    with LocalPayloads(temporary / "payloads") as payloads:
        payloads.ping()
    _plant(temporary / "payloads" / ".tmp" / ("0" * 32), what, secret)
    with LocalPayloads(temporary / "payloads", clock=lambda: 1e12) as payloads:
        payloads.ping()
    assert opened == []
    assert not (secret / "nologin").exists()


@as_root
@pytest.mark.parametrize("what", _PLANTED)
@pytest.mark.parametrize("end", ["", "-wal", "-shm", "-journal"])
def test_an_index_that_a_stranger_planted_is_not_opened(
    temporary: Path, secret: Path, what: str, end: str
) -> None:
    path = temporary / "index.sqlite"
    _plant(Path(f"{path}{end}"), what, secret)
    before = {each: each.read_bytes() for each in secret.iterdir()}
    settings = load_settings({"payloads": f"file://{temporary}/x", "index": f"sqlite://{path}"}, {})
    index = open_index(settings)
    with pytest.raises(PermissionDenied, match=r"index\.sqlite"):
        index.ping()
    index.close()
    assert {each: each.read_bytes() for each in secret.iterdir()} == before


@as_root
def test_a_strangers_file_where_everybody_may_write_is_no_index(temporary: Path) -> None:
    path = temporary / "index.sqlite"
    path.touch()
    os.chown(path, _NOBODY, -1)
    with pytest.raises(PermissionDenied, match=f"was put there by user {_NOBODY}"):
        SqliteIndex(str(path)).ping()


@as_root
def test_an_archive_is_not_written_into_a_strangers_file(temporary: Path) -> None:
    (temporary / "a.tar.partial").touch(mode=0o644)
    os.chown(temporary / "a.tar.partial", _NOBODY, -1)
    with pytest.raises(CannotWrite, match=f"is user {_NOBODY}'s"):
        ArchiveFile(temporary / "a.tar", overwrite=False)
    assert (temporary / "a.tar.partial").stat().st_size == 0


# The helpers


def test_an_exclusive_file_is_made_once_and_anew(tmp_path: Path) -> None:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
    os.close(open_file(tmp_path / "a", flags))
    with pytest.raises(FileExistsError):
        open_file(tmp_path / "a", flags)
    with pytest.raises(FileNotFoundError):
        open_file(tmp_path / "b", os.O_RDWR)
    with pytest.raises(OSError, match="not a regular file") as caught:
        open_file(tmp_path, os.O_RDONLY)
    assert caught.value.errno == errno.ELOOP
    with pytest.raises(FileExistsError):
        make_folder(tmp_path / "a")
