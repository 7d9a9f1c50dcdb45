"""doctor: healthy stores are healthy, and each thing that can be wrong is found."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvstore.admin import Cache, Sources, doctor, machine
from kvstore.admin.machine import Mount, mount_of, redis_is_remote
from kvstore.build import load_settings
from schemas.reports import Check, DoctorReport
from tests.admin.conftest import Admin, Filled, fill, kv_slots, kv_space
from tests.servers import RedisServer

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
    [check] = named(examine(filled), "disk")
    assert check.state == state
    assert ("capacity_bytes" in check.advice) == (state != "ok")


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
        "unix:///run/redis.sock": False,
        "sqlite:///x/y.db": False,
    }.items():
        assert redis_is_remote(load_settings({"payloads": "file:///d", "index": url}, {})) == remote, url


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


def test_a_namespace_over_its_capacity(either: Filled) -> None:
    environ = {"KVSTORE_CAPACITY_BYTES": "20KiB", "KVSTORE_SEGMENT__TARGET_BYTES": "4KiB"}
    [check] = named(examine(either, environ=environ), "capacity")
    assert (check.state, either.kv_id in check.found) == ("warning", True)


def test_a_capacity_below_one_segment(filled: Filled) -> None:
    [check] = named(examine(filled, environ={"KVSTORE_CAPACITY_BYTES": "1MiB"}), "settings")
    assert check.state == "problem"


def damage_delete(path: Path) -> None:
    path.unlink()


def damage_truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def damage_append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


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
    monkeypatch.setattr(sys.modules["kvstore.admin.doctor"], "_timed", lambda index: 0.02)
    [check] = named(examine(filled), "index")
    assert check.state == "warning"
    assert "20.00 ms" in check.found
