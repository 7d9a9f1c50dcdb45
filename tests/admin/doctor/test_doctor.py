"""doctor: healthy stores are healthy, and each thing that can be wrong is found."""

from __future__ import annotations

import os
import random
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from kvstore.admin.backends import Cache, Sources
from kvstore.admin.doctor import machine
from kvstore.admin.doctor.doctor import doctor
from kvstore.admin.doctor.machine import Mount, mount_of, redis_is_remote
from kvstore.admin.doctor.reports import Check, DoctorReport
from kvstore.build import load_settings, open_index
from kvstore.index.redis.index import RedisIndex
from kvstore.index.sqlite.index import SqliteIndex
from kvstore.keys import namespace_id, writer_id
from kvstore.store.rounds import AT_WORK
from tests.admin.conftest import Admin, Filled, fill, kv_slots, kv_space
from tests.servers.redis import RedisServer
from tests.servers.s3.hostile import HostileServer
from tests.waiting import PATIENCE_S

LOCAL_DISK = "/dev/vda / ext4 rw 0 0\n"


def examine(filled: Filled, *, environ: dict[str, str] | None = None, **options: Any) -> DoctorReport:
    """The report on a filled cache whose disk is large, unless `options` say otherwise."""
    sources = Sources(
        payloads=f"file://{filled.folder}",
        index=filled.settings.get("index"),
        environ={"KVSTORE_CAPACITY_BYTES": "64MiB", **(environ or {})},
    )
    with Cache(sources.settings()) as cache:
        return doctor(cache, sources, **({"mounts": LOCAL_DISK} | options))


@contextmanager
def opened(filled: Filled) -> Iterator[RedisIndex | SqliteIndex]:
    with closing(open_index(load_settings(filled.settings, {}))) as index:
        yield index


def named(report: DoctorReport, name: str) -> list[Check]:
    return [check for check in report.checks if check.name == name]


def test_a_healthy_store_is_healthy(admin: Admin, either: Filled) -> None:
    before = sorted(path for path in either.folder.rglob("*") if ".sqlite" not in path.name)
    ran = admin("doctor", "--json", *either.options, env={"KVSTORE_CAPACITY_BYTES": "64MiB"})
    assert ran.code == 0
    report = DoctorReport.model_validate_json(ran.out)
    assert [check for check in report.checks if check.state == "problem"] == []
    names = {check.name for check in report.checks}
    assert {
        "settings",
        "index",
        "payloads",
        "disk",
        "file clock",
        "versions",
        "hashing",
        "agreement",
    } <= names
    assert ("index clock" in names) == ("index" in either.settings)
    assert sorted(path for path in either.folder.rglob("*") if ".sqlite" not in path.name) == before
    text = admin("doctor", *either.options, env={"KVSTORE_CAPACITY_BYTES": "64MiB"})
    assert text.code == 0
    for check in report.checks:
        assert check.name in text.out
    assert "0 problems" in text.out


def test_the_worst_check_is_the_state_and_the_exit_code(admin: Admin, filled: Filled) -> None:
    assert examine(filled).state == "ok"
    overlay = examine(filled, mounts="overlay / overlay rw 0 0\n")
    assert overlay.state == "warning"
    for path in filled.payload_files():
        path.unlink()
    ran = admin("doctor", *filled.options)
    assert ran.code == 3
    assert "problem" in ran.out


@pytest.mark.parametrize("how", ["refused", "hangs", "password"])
def test_an_unusable_redis(admin: Admin, filled: Filled, private_redis: RedisServer, how: str) -> None:
    {
        "refused": private_redis.kill,
        "hangs": private_redis.pause,
        "password": lambda: private_redis.command("CONFIG", "SET", "requirepass", "x"),
    }[how]()
    options = ["--payloads", f"file://{filled.folder}", "--index", private_redis.url]
    ran = admin("doctor", "--json", *options)
    if how == "hangs":
        private_redis.resume()
    assert ran.code == 3
    problems = [check for check in ran.json["checks"] if check["state"] == "problem"]
    assert [check["name"] for check in problems] == ["index"]
    word = {"refused": "check that it runs", "hangs": "in time", "password": "KVSTORE_REDIS__PASSWORD"}[how]
    assert word in problems[0]["advice"]


def test_redis_says_what_is_wrong_with_its_configuration(tmp_path: Path, private_redis: RedisServer) -> None:
    filled = fill(tmp_path / "cache", private_redis.url)
    assert named(examine(filled), "index configuration") == []
    private_redis.command("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    private_redis.command("CONFIG", "SET", "maxmemory", "100mb")
    [found] = named(examine(filled), "index configuration")
    assert found.state == "warning"
    assert "allkeys-lru" in found.found
    assert "noeviction" in found.advice
    assert "100.0 MiB" in named(examine(filled), "index memory")[0].found
    private_redis.command("CONFIG", "SET", "maxmemory-policy", "noeviction")
    private_redis.command("CONFIG", "SET", "maxmemory", "1")
    [full] = named(examine(filled), "index")
    assert full.state == "problem"
    assert "maxmemory" in full.advice


def test_no_right_to_write_is_found(tmp_path: Path, private_redis: RedisServer) -> None:
    filled = fill(tmp_path / "cache", private_redis.url)
    private_redis.command("ACL", "SETUSER", "reader", "on", ">pw", "~*", "+@read")
    environ = {"KVSTORE_REDIS__USERNAME": "reader", "KVSTORE_REDIS__PASSWORD": "pw"}
    [check] = named(examine(filled, environ=environ), "index")
    assert check.state == "problem"
    assert "rights" in check.advice


def test_a_file_that_is_no_index(filled: Filled) -> None:
    index = filled.folder / "index.sqlite"
    for path in filled.folder.glob("index.sqlite*"):
        path.unlink()
    index.write_bytes(b"something else entirely" * 1000)
    [check] = named(examine(filled), "index")
    assert (check.state, bool(check.advice)) == ("problem", True)


def test_a_folder_that_is_none(tmp_path: Path, filled: Filled) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    filled.folder = file
    [check] = named(examine(filled, environ={"KVSTORE_INDEX": f"sqlite://{tmp_path}/i.db"}), "payloads")
    assert check.state == "problem"


def test_root_does_not_probe_in_another_users_folder(filled: Filled, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(filled.folder / ".tmp")
    if os.geteuid() == 0:
        os.chown(filled.folder, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 0)
    [check] = named(examine(filled), "payloads")
    assert check.state == "warning"
    assert "run cache-admin as the user" in check.advice
    assert not (filled.folder / ".tmp").exists()


@pytest.mark.parametrize(("ahead_s", "state"), [(0.0, "ok"), (-30.0, "warning"), (300.0, "problem")])
def test_a_wrong_clock_is_found(either: Filled, ahead_s: float, state: str) -> None:
    report = examine(either, clock=lambda: time.time() - ahead_s)
    clocks = named(report, "file clock") + named(report, "index clock")
    assert [check.state for check in clocks] == [state] * (2 if "index" in either.settings else 1)
    if ahead_s:
        assert all(("ahead of" if ahead_s > 0 else "behind") in check.found for check in clocks)
        assert all("NTP" in check.advice for check in clocks)


class Usage(NamedTuple):
    total: int
    used: int
    free: int


@pytest.mark.parametrize(("free", "state"), [(1 << 40, "ok"), (100 << 20, "warning"), (1 << 20, "problem")])
def test_a_disk_that_is_too_small(
    filled: Filled, monkeypatch: pytest.MonkeyPatch, free: int, state: str
) -> None:
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: Usage(1 << 41, 0, free))
    [check] = named(examine(filled, environ={"KVSTORE_CAPACITY_BYTES": "128MiB"}), "disk")
    assert check.state == state
    assert ("capacity_bytes" in check.advice) == (state != "ok")


def test_the_disk_needs_room_for_the_whole_store_and_no_more(
    filled: Filled, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: Usage(1 << 41, 0, 130 << 20))
    # Two namespaces, and one quota for both.
    capacity = {"KVSTORE_CAPACITY_BYTES": "128MiB"}
    [check] = named(examine(filled, environ=capacity), "disk")
    assert (check.state, "128.0 MiB" in check.found) == ("ok", True)
    with opened(filled) as index:
        index.set_quota("store", 200 << 20)
    assert named(examine(filled, environ=capacity), "disk")[0].state == "warning"


@pytest.mark.parametrize(("files", "left", "states"), [(0, 0, ["ok"]), (10**6, 12, ["ok", "problem"])])
def test_a_disk_without_inodes(
    filled: Filled, monkeypatch: pytest.MonkeyPatch, files: int, left: int, states: list[str]
) -> None:
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: Usage(1 << 41, 0, 1 << 40))
    monkeypatch.setattr(machine.os, "statvfs", lambda _: SimpleNamespace(f_files=files, f_favail=left))
    found = named(examine(filled), "disk")
    assert [check.state for check in found] == states
    assert "12 more files" in found[-1].found or not files


@pytest.mark.parametrize(
    ("kind", "state"),
    [
        ("ext4", "ok"),
        ("nfs4", "ok"),
        ("overlay", "warning"),
        ("tmpfs", "warning"),
        ("fuse.s3fs", "warning"),
    ],
)
def test_what_the_payloads_lie_on(either: Filled, kind: str, state: str) -> None:
    report = examine(either, mounts=f"x / {kind} rw 0 0\n")
    [check] = named(report, "file system")
    assert (check.state, kind in check.found) == (state, True)
    index = named(report, "index file system")
    assert len(index) == (0 if "index" in either.settings else 1)
    for check in index:
        assert check.state == ("problem" if kind in ("nfs4", "fuse.s3fs") else "ok")


def test_a_local_folder_under_a_shared_index() -> None:
    assert machine._payload_mount("ext4", True)[0] == "warning"
    assert machine._payload_mount("nfs", True)[0] == "ok"
    for url, remote in {
        "redis://10.1.2.3:6379/0": True,
        "rediss://redis.svc:6379": True,
        "redis://localhost:6379": False,
        "redis://127.0.0.5": False,
        "redis://[::1]:6379/0": False,
        "redis://10.1.2.3,10.1.2.4/0": True,
        "redis+sentinel://redis-0.svc,redis-1.svc/main": True,
        "redis+sentinel://127.0.0.1,localhost/main": False,
        "unix:///run/redis.sock": False,
        "sqlite:///x/y.db": False,
    }.items():
        assert redis_is_remote(load_settings({"payloads": "file:///d", "index": url}, {})) == remote, url


def test_what_others_can_read_is_named_with_the_command_that_closes_it(filled: Filled) -> None:
    assert {check.state for check in named(examine(filled), "access")} == {"ok"}
    inside = next(path for path in filled.folder.iterdir() if path.is_dir())
    inside.chmod(0o755)
    # Shared with a group on purpose, so that opening it doesn't close it.
    filled.folder.chmod(0o2750)
    check, *_ = named(examine(filled), "access")
    assert check.state == "warning"
    assert str(inside) in check.found
    assert f"`chmod -R go-rwx {filled.folder}`" in check.advice
    assert "local.share: group" in check.advice
    shared = examine(filled, environ={"KVSTORE_LOCAL__SHARE": "group"})
    assert {check.state for check in named(shared, "access")} == {"ok"}


def test_mounts_are_told_apart() -> None:
    mounts = (
        "/dev/a / ext4 rw 0 0\nshare /mnt/a\\040b nfs4 rw 0 0\n/dev/b /mnt ext4 rw 0 0\n"
        "tmpfs /mnt/a\\040b/c tmpfs rw 0 0\nover / overlay rw 0 0\nnonsense\n"
    )
    assert mount_of(Path("/mnt/a b/x"), mounts) == Mount("/mnt/a b", "nfs4")
    assert mount_of(Path("/mnt/a b/c"), mounts) == Mount("/mnt/a b/c", "tmpfs")
    assert mount_of(Path("/mnt/a bc"), mounts) == Mount("/mnt", "ext4")
    assert mount_of(Path("/elsewhere"), mounts) == Mount("/", "overlay")
    assert mount_of(Path("/elsewhere"), "") is None


def test_engines_with_different_hash_seeds(either: Filled) -> None:
    assert named(examine(either), "hashing")[0].state == "ok"
    either.save(kv_space(hash_root="0" * 16), kv_slots(1, seed=8))
    [check] = named(examine(either, environ={"PYTHONHASHSEED": "7"}), "hashing")
    assert check.state == "warning"
    assert either.kv_id in check.found
    assert "'7'" in check.found


TINY = {"KVSTORE_SEGMENT__TARGET_BYTES": "4KiB"}


def test_writers_that_others_differ_from(either: Filled) -> None:
    engine, other = writer_id("an engine"), writer_id("another engine")
    with opened(either) as index:
        [name, *_] = index.namespaces()
        index.judge(name, writer_id("good"), "alike", by=engine, stands=False, name="good")
        [check] = named(examine(either), "writers")
        assert check.state == "ok"
        index.judge(name, writer_id("bad"), "differs", by=engine, stands=True, name="kvstore/1 host-7 aa")
        index.judge(name, writer_id("who"), "differs", by=other, stands=False)
    [check] = named(examine(either), "writers")
    assert check.state == "warning"
    assert "kvstore/1 host-7 aa (failed)" in check.found
    assert f"{writer_id('who').hex()} (disputed)" in check.found
    assert check.advice and "KVStoreWriterFailed" in check.advice


def test_a_store_over_its_capacity(either: Filled) -> None:
    report = examine(either, environ={"KVSTORE_CAPACITY_BYTES": "20KiB", **TINY})
    [check] = named(report, "capacity")
    assert (check.state, check.found) == ("warning", "store holds 40.0 KiB of 20.0 KiB")
    assert "cache-admin serve" in check.advice
    with opened(either) as index:
        index.set_quota(AT_WORK, int(time.time()))
    [check] = named(examine(either, environ={"KVSTORE_CAPACITY_BYTES": "20KiB", **TINY}), "capacity")
    assert check.advice.startswith("a janitor does the upkeep")
    [check] = named(examine(either), "capacity")
    assert (check.state, check.found) == ("ok", "the store holds 40.0 KiB of 64.0 MiB")


def test_a_quota_that_pins_keep_from_being_met(either: Filled) -> None:
    with opened(either) as index:
        index.set_quota(f"namespace/{either.kv_id}", 26 << 10)
        segments = [each.segment for each in index.segments(namespace_id(either.kv))]
        index.pin(namespace_id(either.kv), segments, most_bytes=1 << 30)
    [check] = named(examine(either), "capacity")
    assert (check.state, "pinned" in check.found, "pin --remove" in check.advice) == ("warning", True, True)
    assert either.kv_id in check.found
    with opened(either) as index:
        index.set_quota(f"namespace/{either.kv_id}", 10 << 10)
    [check] = named(examine(either), "capacity")
    assert "most of it is pinned" in check.advice


def test_a_trash_that_nobody_empties(either: Filled) -> None:
    now = time.time()
    [check] = named(examine(either), "upkeep")
    assert (check.state, "no janitor" in check.found) == ("ok", True)
    with opened(either) as index:
        [first, second, *_] = [each.segment for each in index.segments(namespace_id(either.kv))]
        index.evict(namespace_id(either.kv), [first], delete_after_s=now - 600, rule="admin")
    [check] = named(examine(either), "upkeep")
    assert (check.state, "1 evicted segments wait" in check.found) == ("ok", True)
    with opened(either) as index:
        # Without a grace time, and so long overdue.
        index.evict(namespace_id(either.kv), [second], delete_after_s=0, rule="admin")
    [check] = named(examine(either), "upkeep")
    assert (check.state, either.kv_id in check.found) == ("warning", True)
    assert "cache-admin serve" in check.advice
    with opened(either) as index:
        index.set_quota(AT_WORK, int(time.time()))
    [check] = named(examine(either), "upkeep")
    assert (check.state, "see its log" in check.advice) == ("warning", True)


def test_a_full_sketch(either: Filled) -> None:
    settings = {
        "KVSTORE_ADMISSION__SECOND_USE": "true",
        "KVSTORE_ADMISSION__SKETCH_BYTES": "4KiB",
        "KVSTORE_ADMISSION__WINDOW_S": "86400",
    }
    assert named(examine(either), "admission") == named(examine(either, environ=settings), "admission") == []

    def note(count: int, seed: int) -> None:
        noise = random.Random(seed)
        with opened(either) as index:
            for _ in range(count):
                index.note(
                    namespace_id(either.kv),
                    noise.randbytes(16),
                    now_s=time.time(),
                    window_s=86400.0,
                    sketch_bytes=4096,
                )

    note(1000, 1)
    [check] = named(examine(either, environ=settings), "admission")
    assert check.state == "ok"
    assert 900 < noted(check) < 1100
    note(9000, 2)
    [check] = named(examine(either, environ=settings), "admission")
    assert (check.state, either.kv_id in check.found) == ("warning", True)
    assert 9000 < noted(check) < 11000
    # Two bytes a block.
    assert "admission.sketch_bytes to 32.0 KiB" in check.advice


def noted(check: Check) -> int:
    return int(re.search(r"about ([\d,]+) blocks", check.found)[1].replace(",", ""))  # type: ignore[index]


@pytest.mark.parametrize(
    ("used", "limit", "machine_bytes", "held", "state", "words"),
    [
        (50, 100, 1000, 10, "ok", ["50 B of 100 B"]),
        (91, 100, 1000, 10, "warning", ["raise maxmemory"]),
        (50, 0, 1000, 10, "ok", ["maxmemory is 0", "1000 B"]),
        (950, 0, 1000, 10, "warning", ["raise maxmemory"]),
        # A quarter full, so four times as much when it is full.
        (50, 100, 1000, 250, "warning", ["200 B when the store is full", "before the store is"]),
        (20, 100, 1000, 250, "ok", ["80 B when the store is full"]),
    ],
)
def test_the_index_s_memory(
    used: int, limit: int, machine_bytes: int, held: int, state: str, words: list[str]
) -> None:
    told = {"used_memory": used, "maxmemory": limit, "total_system_memory": machine_bytes}
    [check] = machine._check_memory(told, held, 1000)
    assert check.state == state
    assert all(word in f"{check.found}; {check.advice}" for word in words)


def test_a_capacity_below_one_segment(filled: Filled) -> None:
    [check] = named(examine(filled, environ={"KVSTORE_CAPACITY_BYTES": "1MiB"}), "settings")
    assert check.state == "problem"
    small = {"KVSTORE_EVICTION__NAMESPACE_BYTES": "1", "KVSTORE_EVICTION__TENANT_BYTES": "1"}
    [check] = named(examine(filled, environ=small), "settings")
    assert check.state == "problem" and check.found.count("(1 B) is less than one segment") == 2
    assert check.advice.endswith("raise eviction.namespace_bytes and eviction.tenant_bytes")


def damage_delete(path: Path) -> None:
    path.unlink()


def damage_truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def damage_append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


def test_an_index_that_was_lost(either: Filled) -> None:
    assert named(examine(either), "contents") == []
    with opened(either) as index:
        for space in index.namespaces():
            index.unlist(space, [each.segment for each in index.segments(space)])
    [check] = named(examine(either), "contents")
    assert check.state == "warning"
    assert "cache-admin rebuild" in check.advice


def test_an_index_file_that_was_deleted(filled: Filled) -> None:
    for file in filled.folder.glob("index.sqlite*"):
        file.unlink()
    [check] = named(examine(filled), "contents")
    assert "payloads are stored" in check.found


@pytest.mark.parametrize("damage", [damage_delete, damage_truncate, damage_append])
def test_an_index_without_its_payloads(either: Filled, damage: Callable[[Path], None]) -> None:
    damage(either.payload_files()[0])
    [check] = named(examine(either), "agreement")
    assert check.state == "problem"
    assert check.found.startswith("1 of 5")
    assert "cache-admin show" in check.advice


def test_an_old_redis_is_refused(filled: Filled, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    replies = {"TIME": None, "INFO": {"redis_version": "6.0.16"}}
    monkeypatch.setattr(machine, "_asked", lambda client, *words: replies[words[0]])
    filled.settings["index"] = redis_url
    report = examine(filled)
    assert named(report, "index version")[0].state == "problem"
    assert named(report, "index clock") == named(report, "index memory") == []


def test_a_slow_index_is_a_warning(filled: Filled, monkeypatch: pytest.MonkeyPatch) -> None:
    # By its full name: in the package, the function hides the module.
    monkeypatch.setattr(sys.modules["kvstore.admin.doctor.doctor"], "_timed", lambda index: 0.02)
    [check] = named(examine(filled), "index")
    assert check.state == "warning"
    assert "20.00 ms" in check.found


def test_a_folder_below_a_file_is_a_problem(tmp_path: Path, admin: Admin) -> None:
    (tmp_path / "request.json").write_text("{}")
    ran = admin("doctor", "--payloads", f"file://{tmp_path}/request.json/x", "--json")
    assert ran.code == 3
    (check,) = [each for each in ran.json["checks"] if each["name"] == "payloads"]
    assert check["found"].endswith(f"{tmp_path}/request.json is no folder")


def test_a_bucket_that_hangs_is_waited_for_no_longer_than_a_probe(
    admin: Admin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However patient the settings are: this test doesn't end otherwise."""
    monkeypatch.setattr("kvstore.build.PROBE_S", 0.5)
    said: list[str] = []
    monkeypatch.setattr("kvstore.cli.progress.Lines.begin", lambda self, what, total=None: said.append(what))
    with HostileServer(lambda request, body: server.pause(PATIENCE_S)) as server:
        url = f"s3://bucket/pre?endpoint={server.endpoint}&region=us-east-1"
        patient = {f"KVSTORE_S3__{name}_TIMEOUT_S": "3600" for name in ("READ", "WRITE", "STALL")}
        keys = {"KVSTORE_S3__ACCESS_KEY_ID": "id", "KVSTORE_S3__SECRET_ACCESS_KEY": "key"}
        options = ["--index", f"sqlite://{tmp_path}/index.sqlite", "--payloads", url, "--json"]
        ran = admin("doctor", *options, env=patient | keys)
    (check,) = [each for each in ran.json["checks"] if each["name"] == "payloads"]
    assert "did not answer in time" in check["found"]
    assert "asking the payload store" in said
