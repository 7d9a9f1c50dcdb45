"""LocalPayloads: the contract, and what is special about files."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import signal
import stat
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.conformance.arrange import NAMESPACE, fetch, fresh_name, name_in, views
from kvstore.errors import CapacityExceeded, PermissionDenied, TransientError
from kvstore.payloads import local
from kvstore.payloads.local import LocalPayloads
from kvstore.testing import PayloadConformance, RawPayloads
from tests.waiting import PATIENCE_S

FSYNC = ["none", "data", "full"]
OLD = b"old" * 5000
NEW = b"new" * 7000


class Folder(RawPayloads):
    """The files below a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def put(self, name: str, data: bytes) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def get(self, name: str) -> bytes | None:
        try:
            return (self.root / name).read_bytes()
        except FileNotFoundError:
            return None

    def names(self) -> set[str]:
        return {str(path.relative_to(self.root)) for path in self.root.rglob("*") if not path.is_dir()}

    def folders(self) -> set[str]:
        return {str(path.relative_to(self.root)) for path in self.root.rglob("*") if path.is_dir()}

    def leftovers(self) -> set[str]:
        return {name for name in self.names() if name.startswith(".tmp/")}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def payloads(root: Path) -> LocalPayloads:
    return LocalPayloads(root)


@pytest.fixture
def raw(root: Path) -> Folder:
    return Folder(root)


class TestLocalPayloads(PayloadConformance):
    @pytest.fixture(params=FSYNC)
    def payloads(self, request: pytest.FixtureRequest, root: Path) -> LocalPayloads:
        return LocalPayloads(root, fsync=request.param)

    @pytest.fixture
    def raw(self, root: Path) -> Folder:
        return Folder(root)


# Folders


def test_opening_reading_deleting_and_listing_make_nothing(root: Path) -> None:
    payloads = LocalPayloads(root)
    assert fetch(payloads, fresh_name()) is None
    assert payloads.delete([fresh_name()]) == 0
    assert list(payloads.list()) == []
    assert not root.exists()


def test_a_put_makes_the_folders_that_it_needs(tmp_path: Path) -> None:
    raw = Folder(tmp_path / "not" / "yet" / "there")
    LocalPayloads(raw.root).put(f"{NAMESPACE}/ab/ab00000000000000.0", views(b"x"))
    assert raw.folders() == {".tmp", NAMESPACE, f"{NAMESPACE}/ab"}


def test_a_read_makes_no_folder_beside_others(payloads: LocalPayloads, raw: Folder) -> None:
    payloads.put(name_in("ab"), views(b"x"))
    before = raw.folders()
    assert fetch(payloads, name_in("cd")) is None
    assert fetch(payloads, fresh_name()) is None
    assert raw.folders() == before


def test_the_root_may_vanish_and_come_back(payloads: LocalPayloads, root: Path) -> None:
    name = fresh_name()
    payloads.put(name, views(b"x"))
    root.rename(root.with_name("elsewhere"))
    assert fetch(payloads, name) is None
    assert list(payloads.list()) == []
    payloads.put(name, views(b"y"))
    assert fetch(payloads, name) == b"y"


def test_a_relative_root_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    payloads = LocalPayloads("cache")
    monkeypatch.chdir("/")
    payloads.put(fresh_name(), views(b"x"))
    assert len(Folder(tmp_path / "cache").names()) == 1


def test_a_root_behind_a_link_is_fine(tmp_path: Path) -> None:
    (tmp_path / "volume").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "volume")
    name = fresh_name()
    LocalPayloads(tmp_path / "link").put(name, views(b"x"))
    assert Folder(tmp_path / "volume").names() == {name}


def test_no_descriptor_stays_open(payloads: LocalPayloads, raw: Folder) -> None:
    def use() -> None:
        name = name_in("0a")
        payloads.put(name, views(b"x" * 10))
        fetch(payloads, name)
        fetch(payloads, name_in("0b"))
        next(payloads.list())
        list(payloads.list())
        payloads.ping()
        payloads.delete([name, name_in("0c")])
        raw.put(f"{NAMESPACE}/ef", b"a file where a folder should be")
        with pytest.raises(TransientError):
            payloads.put(name_in("ef"), views(b"x"))

    use()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        use()
    assert len(os.listdir("/proc/self/fd")) == before


def test_two_objects_share_a_folder(payloads: LocalPayloads, root: Path) -> None:
    name = fresh_name()
    payloads.put(name, views(b"abc"))
    other = LocalPayloads(root)
    assert fetch(other, name) == b"abc"
    assert other.delete([name]) == 1
    assert fetch(payloads, name) is None


def test_repr_shows_the_folder_and_the_promise() -> None:
    assert repr(LocalPayloads("/x/y", fsync="data")) == "LocalPayloads('/x/y', fsync='data')"


# Buffers and system calls


def test_short_transfers_are_continued(
    payloads: LocalPayloads, raw: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = os.urandom(10_000)
    name = fresh_name()
    pwritev, preadv = os.pwritev, os.preadv

    def cut(views: list[memoryview]) -> list[memoryview]:
        # Seven bytes of the first buffers, so that a call ends inside one, at its end, and over it.
        left, some = 7, []
        for view in views:
            some.append(view[:left])
            left -= some[-1].nbytes
            if not left:
                break
        return some

    monkeypatch.setattr(os, "pwritev", lambda fd, views, at: pwritev(fd, cut(views), at))
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, cut(views), at))
    parts = [data[i : i + 3] for i in range(0, 5000, 3)] + [data[5001:]]
    assert sum(map(len, parts)) == 10_000
    payloads.put(name, views(*parts))
    assert raw.get(name) == b"".join(parts)
    into = [bytearray(14), bytearray(1), bytearray(20_000)]
    assert payloads.read(name, 3, [memoryview(view) for view in into]) == 9997
    assert b"".join(into)[:9997] == b"".join(parts)[3:]


def test_a_write_of_nothing_is_an_error_not_a_loop(
    payloads: LocalPayloads, raw: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pwritev", lambda fd, views, at: 0)
    with pytest.raises(TransientError, match="wrote nothing"):
        payloads.put(fresh_name(), views(b"x"))
    assert raw.names() == set()


def test_views_of_other_formats_and_shapes(payloads: LocalPayloads, raw: Folder) -> None:
    data = bytes(range(48))
    name = fresh_name()
    floats = memoryview(data).cast("f")
    grid = memoryview(data).cast("B", [4, 12])
    payloads.put(name, [floats, grid])
    assert raw.get(name) == data + data
    into = bytearray(96)
    assert payloads.read(name, 0, [memoryview(into).cast("d")]) == 96
    assert into == data + data


@pytest.mark.parametrize("mode", FSYNC)
def test_what_is_synced(root: Path, monkeypatch: pytest.MonkeyPatch, mode: Any) -> None:
    """`data`: the file, before the rename. `full`: also all three folders, after it."""
    events: list[str] = []

    def what(fd: int) -> str:
        return os.path.relpath(os.readlink(f"/proc/self/fd/{fd}"), root)

    def traced(name: str, label: Callable[..., str]) -> None:
        real = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            events.append(f"{name} {label(*args)}")
            return real(*args, **kwargs)

        monkeypatch.setattr(os, name, call)

    traced("pwritev", lambda fd, views, at: what(fd)[:5])
    traced("fdatasync", lambda fd: what(fd)[:5])
    traced("fsync", what)
    traced("rename", lambda *_: "")
    LocalPayloads(root, fsync=mode).put(f"{NAMESPACE}/ab/ab00000000000000.0", views(b"x"))
    synced = [f"fsync {NAMESPACE}/ab", f"fsync {NAMESPACE}", "fsync ."]
    assert events == [
        "pwritev .tmp/",
        *(["fdatasync .tmp/"] if mode != "none" else []),
        "rename ",
        *(synced if mode == "full" else []),
    ]


def test_a_late_write_error_is_found_before_the_rename(
    payloads: LocalPayloads, raw: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS tells of a full disk when a descriptor is closed."""
    name, close = fresh_name(), os.close
    payloads.put(name, views(OLD))
    fails = iter([True])

    def closing(fd: int) -> None:
        regular = stat.S_ISREG(os.fstat(fd).st_mode)
        close(fd)
        if regular and next(fails, False):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "close", closing)
    with pytest.raises(CapacityExceeded):
        payloads.put(name, views(NEW))
    monkeypatch.undo()
    assert raw.get(name) == OLD
    assert raw.leftovers() == set()


# Errors


@pytest.mark.parametrize(
    ("number", "error"),
    [
        (errno.ENOSPC, CapacityExceeded),
        (errno.EDQUOT, CapacityExceeded),
        (errno.EFBIG, CapacityExceeded),
        (errno.EACCES, PermissionDenied),
        (errno.EPERM, PermissionDenied),
        (errno.EROFS, PermissionDenied),
        (errno.EIO, TransientError),
        (errno.ESTALE, TransientError),
        (errno.EMFILE, TransientError),
    ],
)
@pytest.mark.parametrize(
    ("verb", "call"),
    [("put", "pwritev"), ("put", "rename"), ("read", "preadv"), ("delete", "unlink"), ("list", "scandir")],
)
def test_errors_are_sorted_by_what_to_do(
    payloads: LocalPayloads,
    raw: Folder,
    monkeypatch: pytest.MonkeyPatch,
    verb: str,
    call: str,
    number: int,
    error: type[Exception],
) -> None:
    name = fresh_name()
    payloads.put(name, views(OLD))

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, fail)
    do = {
        "put": lambda: payloads.put(name, views(NEW)),
        "read": lambda: fetch(payloads, name),
        "delete": lambda: payloads.delete([name]),
        "list": lambda: list(payloads.list()),
    }[verb]
    with pytest.raises(error, match=os.strerror(number)) as caught:
        do()
    # Exactly that class, and a message that says what, where and why.
    assert type(caught.value) is error
    assert isinstance(caught.value.__cause__, OSError)
    assert str(raw.root) in str(caught.value)
    assert verb in str(caught.value)
    assert verb == "list" or name in str(caught.value)
    monkeypatch.undo()
    assert raw.get(name) == OLD
    assert raw.leftovers() == set()


def test_one_bad_folder_does_not_keep_a_batch_alive(
    payloads: LocalPayloads, raw: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [name_in(fan) for fan in ("aa", "bb", "cc")]
    for name in names:
        raw.put(name, b"x")
    unlink = os.unlink

    def fail(path: str, **kwargs: Any) -> None:
        if path.startswith("bb"):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
        unlink(path, **kwargs)

    monkeypatch.setattr(os, "unlink", fail)
    with pytest.raises(PermissionDenied, match=names[1]):
        payloads.delete(names)
    assert raw.names() == {names[1]}


def test_a_file_size_limit_is_a_lack_of_space(payloads: LocalPayloads, raw: Folder) -> None:
    """The kernel's own error, in the middle of a put: the second half doesn't fit."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        with pytest.raises(CapacityExceeded, match="File too large"):
            payloads.put(fresh_name(), views(b"x" * 8_000, b"y" * 8_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert raw.names() == set()


# ping


def test_ping_says_that_the_root_is_not_a_folder(root: Path) -> None:
    root.write_text("a file")
    with pytest.raises(TransientError, match=rf"{root}: can't write .*: Not a directory"):
        LocalPayloads(root).ping()


@pytest.mark.parametrize(
    ("number", "error"),
    [
        (errno.ENOSPC, CapacityExceeded),
        (errno.EROFS, PermissionDenied),
        (errno.EIO, TransientError),
    ],
)
def test_ping_says_what_is_wrong_in_words(
    payloads: LocalPayloads, monkeypatch: pytest.MonkeyPatch, number: int, error: type[Exception]
) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "pwritev", fail)
    with pytest.raises(error, match=f"can't write and read a temporary file: {os.strerror(number)}"):
        payloads.ping()


def test_ping_notices_a_disk_that_lies(payloads: LocalPayloads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: sum(view.nbytes for view in views))
    with pytest.raises(TransientError, match="other than written"):
        payloads.ping()


def test_real_permissions() -> None:
    """As an ordinary user, in a child process if this one is root's."""
    # Not below tmp_path, whose parents nobody else may enter.
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "cache"
        name = fresh_name()
        LocalPayloads(root).put(name, views(OLD))
        locked = [root, root / ".tmp", (root / name).parent, (root / name).parent.parent]
        os.chmod(folder, 0o755)
        for path in locked:
            os.chmod(path, 0o555)
        os.chmod(root / name, 0o000)

        def as_a_user() -> None:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            mine = LocalPayloads(root)
            user = f"Permission denied .as user {os.geteuid()}"
            with pytest.raises(PermissionDenied, match=f"temporary file: {user}"):
                mine.ping()
            with pytest.raises(PermissionDenied, match=f"put {name}: {user}"):
                mine.put(name, views(NEW))
            with pytest.raises(PermissionDenied, match=f"read {name}: {user}"):
                fetch(mine, name)
            with pytest.raises(PermissionDenied, match=f"delete {name}: {user}"):
                mine.delete([name])
            assert [item.name for item in mine.list()] == [name]

        try:
            assert _in_child(as_a_user) == 0
        finally:
            for path in locked:
                os.chmod(path, 0o755)
        os.chmod(root / name, 0o644)
        assert (root / name).read_bytes() == OLD


# Links and other things in a payload's place


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder outside the root that mirrors a payload's folders."""
    outside = tmp_path / "outside"
    (outside / NAMESPACE / "ab").mkdir(parents=True)
    (outside / NAMESPACE / "ab" / "ab00000000000000.0").write_bytes(b"secret")
    return outside


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_no_link_below_the_root_is_followed(
    payloads: LocalPayloads, root: Path, outside: Path, depth: int
) -> None:
    name = f"{NAMESPACE}/ab/ab00000000000000.0"
    part = "/".join(name.split("/")[:depth])
    (root / part).parent.mkdir(parents=True)
    (root / part).symlink_to(outside / part)
    before = Folder(outside).names()

    assert fetch(payloads, name) is None
    assert list(payloads.list()) == []
    if depth == 3:
        # The link itself is in a payload's place: a put replaces it, a delete removes it.
        payloads.put(name, views(NEW))
        assert not (root / name).is_symlink()
        assert fetch(payloads, name) == NEW
        (root / part).unlink()
        (root / part).symlink_to(outside / part)
        assert payloads.delete([name]) == 1
        assert not os.path.lexists(root / name)
    else:
        with pytest.raises(TransientError, match="Not a directory"):
            payloads.put(name, views(NEW))
        assert payloads.delete([name]) == 0
    assert Folder(outside).names() == before
    assert (outside / name).read_bytes() == b"secret"


def test_a_linked_temporary_folder_is_not_used(payloads: LocalPayloads, root: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    victim = elsewhere / ("0" * 32)
    victim.write_bytes(b"x")
    os.utime(victim, (1, 1))
    root.mkdir()
    (root / ".tmp").symlink_to(elsewhere)
    LocalPayloads(root)
    with pytest.raises(TransientError):
        payloads.put(fresh_name(), views(b"x"))
    assert os.listdir(elsewhere) == ["0" * 32]


@pytest.mark.parametrize("what", ["folder", "fifo", "socket"])
def test_what_is_no_file_is_no_payload(
    payloads: LocalPayloads, raw: Folder, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = name_in("ab")
    path = raw.root / name
    path.parent.mkdir(parents=True)
    if what == "folder":
        path.mkdir()
    else:
        os.mknod(path, {"fifo": stat.S_IFIFO, "socket": stat.S_IFSOCK}[what] | 0o644)
    assert fetch(payloads, name) is None
    assert list(payloads.list()) == []


# Leftovers


def _leave(raw: Folder, name: str, age_s: float) -> Path:
    raw.put(f".tmp/{name}", b"part of a payload")
    path = raw.root / ".tmp" / name
    os.utime(path, (time.time() - age_s,) * 2)
    return path


def test_opening_removes_what_dead_writers_left(raw: Folder) -> None:
    young, old = _leave(raw, "0" * 32, 50), _leave(raw, "1" * 32, 70)
    LocalPayloads(raw.root)
    assert young.exists()
    assert not old.exists()


def test_the_clock_is_the_callers(raw: Folder) -> None:
    young = _leave(raw, "0" * 32, 0)
    LocalPayloads(raw.root, clock=lambda: time.time() + 61)
    assert not young.exists()


def test_opening_spares_strangers_and_payloads(raw: Folder, payloads: LocalPayloads) -> None:
    name = fresh_name()
    payloads.put(name, views(OLD))
    os.utime(raw.root / name, (1, 1))
    strangers = ["notes.txt", "0" * 31, "0" * 33, "x" * 32, "A" * 32]
    for stranger in strangers:
        _leave(raw, stranger, 1e6)
    for i in "abc":
        (raw.root / ".tmp" / (i * 32)).mkdir()
        (raw.root / ".tmp" / (i * 31 + "0")).symlink_to(raw.root / name)
    before = raw.names()
    # What can't be opened doesn't keep the leftovers around it, either.
    for i in range(20):
        _leave(raw, f"{i:032d}", 1e6)
    LocalPayloads(raw.root)
    assert raw.names() == before
    assert raw.get(name) == OLD


def test_a_live_writers_file_is_never_removed(
    payloads: LocalPayloads, raw: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However old it looks: the writer holds its lock until the rename."""
    name, rename = fresh_name(), os.rename

    def late(*args: Any, **kwargs: Any) -> None:
        (leftover,) = raw.leftovers()
        os.utime(raw.root / leftover, (1, 1))
        # Another process may open the same folder; a second description of the file is what counts.
        assert _in_child(lambda: LocalPayloads(raw.root) and None) == 0
        LocalPayloads(raw.root)
        assert raw.leftovers() == {leftover}
        rename(*args, **kwargs)

    monkeypatch.setattr(os, "rename", late)
    payloads.put(name, views(NEW))
    assert raw.get(name) == NEW


def test_without_locks_an_hour_decides(raw: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(fd: int, operation: int) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    young, old = _leave(raw, "0" * 32, 3500), _leave(raw, "1" * 32, 3700)
    payloads = LocalPayloads(raw.root)
    assert young.exists()
    assert not old.exists()
    name = fresh_name()
    payloads.put(name, views(NEW))
    assert raw.get(name) == NEW


def test_opening_does_bounded_work(raw: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "MAX_TEMPORARY", 5)
    for i in range(12):
        _leave(raw, f"{i:032x}", 1e6)
    left = []
    for _ in range(4):
        LocalPayloads(raw.root)
        left.append(len(raw.leftovers()))
    assert left == [7, 2, 0, 0]


def test_a_writer_that_loses_its_file_fails_its_put(
    payloads: LocalPayloads, raw: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, rename = fresh_name(), os.rename
    payloads.put(name, views(OLD))

    def after_a_cleaner(*args: Any, **kwargs: Any) -> None:
        for leftover in raw.leftovers():
            os.unlink(raw.root / leftover)
        rename(*args, **kwargs)

    monkeypatch.setattr(os, "rename", after_a_cleaner)
    with pytest.raises(TransientError):
        payloads.put(name, views(NEW))
    assert raw.get(name) == OLD


def test_opening_never_fails(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    LocalPayloads(tmp_path / "file")
    LocalPayloads(tmp_path / "file" / "below")
    LocalPayloads("/proc/self/mem")


# Crashes


def _fork() -> int:
    with warnings.catch_warnings():
        # Python 3.12 warns where the test runner has threads; the children only make system calls.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _in_child(work: Callable[[], None]) -> int:
    """Run `work` in a forked child; 0, its exit status, or minus the signal that ended it."""
    pid = _fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class _Crashing:
    """Stands in for the module `os` or `fcntl`: kills the process at its `step`-th system call.

    Even steps are just before a call, odd ones just after it; a write that is killed before has
    stored half of its bytes.
    """

    CALLS = ("open", "mkdir", "pwritev", "fdatasync", "dup", "rename", "unlink", "close", "fsync", "flock")

    def __init__(self, module: Any, steps: Iterator[int], at: int) -> None:
        self._module = module
        self._steps = steps
        self._at = at

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._module, name)
        if name not in self.CALLS:
            return real

        def call(*args: Any, **kwargs: Any) -> Any:
            if next(self._steps) == self._at:
                if name == "pwritev":
                    fd, views, position = args
                    os.pwritev(fd, [views[0][: views[0].nbytes // 2]], position)
                os.kill(os.getpid(), signal.SIGKILL)
            result = real(*args, **kwargs)
            if next(self._steps) == self._at:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call


def _crash_put(root: Path, name: str, mode: Any, step: int) -> int:
    def work() -> None:
        payloads = LocalPayloads(root, fsync=mode)
        steps = iter(range(10_000))
        local.os = _Crashing(os, steps, step)  # type: ignore[assignment]
        local.fcntl = _Crashing(fcntl, steps, step)  # type: ignore[assignment]
        payloads.put(name, views(NEW[:9000], NEW[9000:]))

    return _in_child(work)


@pytest.mark.slow
@pytest.mark.parametrize("before", [None, OLD], ids=["fresh", "replacing"])
@pytest.mark.parametrize("mode", FSYNC)
def test_a_writer_killed_at_any_step_leaves_nothing_partial(
    tmp_path: Path, mode: Any, before: bytes | None
) -> None:
    name = f"{NAMESPACE}/ab/ab00000000000000.0"
    outcomes = []
    for step in range(10_000):
        raw = Folder(tmp_path / str(step))
        reader = LocalPayloads(raw.root)
        if before is not None:
            reader.put(name, views(before))
        status = _crash_put(raw.root, name, mode, step)
        assert status in (0, -signal.SIGKILL)

        got = fetch(reader, name)
        assert got in (before, NEW)
        listed = {item.name: item.nbytes for item in reader.list()}
        assert listed == ({} if got is None else {name: len(got)})
        outcomes.append((got == NEW, bool(raw.leftovers())))

        # The next open finds the dead writer's file, and the next put is not disturbed by any of it.
        LocalPayloads(raw.root, clock=lambda: time.time() + 61)
        assert raw.leftovers() == set()
        reader.put(name, views(OLD))
        assert fetch(reader, name) == OLD
        if status == 0:
            break
    # There were steps enough, the name changed once, and leftovers came before it.
    assert len(outcomes) > 20
    assert [new for new, _ in outcomes] == sorted(new for new, _ in outcomes)
    assert (False, True) in outcomes
    assert (True, True) not in outcomes


@pytest.mark.slow
def test_readers_in_another_process_see_whole_payloads(root: Path) -> None:
    """While writers are killed at random moments, over and over."""
    names = [fresh_name() for _ in range(4)]
    size = 200_000

    def write_for_ever() -> None:
        payloads = LocalPayloads(root)
        for i in range(1_000_000):
            data = bytes([i % 256]) * size
            payloads.put(names[i % 4], views(data[:1000], data[1000:]))

    reader = LocalPayloads(root)
    seen = 0
    for generation in range(12):
        pid = _fork()
        if pid == 0:
            try:
                write_for_ever()
            finally:
                os._exit(1)
        end = time.monotonic() + 0.02 + generation * 0.005
        while time.monotonic() < end or not (seen or time.monotonic() > end + PATIENCE_S):
            for name in names:
                data = fetch(reader, name)
                assert data is None or (len(data) == size and data == data[:1] * size)
                seen += data is not None
            assert {item.nbytes for item in reader.list()} <= {size}
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert seen
    LocalPayloads(root, clock=lambda: time.time() + 61)
    assert Folder(root).leftovers() == set()


def test_many_threads_make_the_same_folders_at_once(root: Path, raw: Folder) -> None:
    names = [name_in("ab", rank=rank) for rank in range(16)]
    start = threading.Barrier(len(names))
    payloads = LocalPayloads(root)

    def put(name: str) -> None:
        start.wait()
        payloads.put(name, views(name.encode()))

    threads = [threading.Thread(target=put, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {name: raw.get(name) for name in names} == {name: name.encode() for name in names}
