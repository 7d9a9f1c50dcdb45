"""Two tiers and buckets: status, doctor, vllm-config, show and warm."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvstore.admin.backends import Cache, Sources
from kvstore.admin.bench.reports import BenchReport
from kvstore.admin.curate.plan import plan
from kvstore.admin.curate.reports import WarmReport
from kvstore.admin.curate.warm import warm, warming_bytes
from kvstore.admin.doctor.doctor import doctor
from kvstore.admin.doctor.reports import Check, DoctorReport
from kvstore.admin.inspect.reports import AskedStatus
from kvstore.build import load_settings
from kvstore.errors import (
    CapacityExceeded,
    ConfigError,
    DeadlineExceeded,
    KVStoreError,
    PermissionDenied,
    Throttled,
    TransientError,
)
from kvstore.index.sqlite.index import SqliteIndex
from kvstore.payloads.tiered.store import TieredPayloads
from tests.admin.conftest import Admin, Filled, fill
from tests.servers.s3.bucket import Credentials, S3Bucket
from tests.waiting import PATIENCE_S


@dataclass
class Tiered:
    """A filled folder as the slow tier, and a fast one in front of it."""

    filled: Filled
    fast: Path
    file: Path

    @property
    def options(self) -> list[str]:
        return ["--settings", str(self.file)]

    def write(self, **changes: Any) -> None:
        tiers = {"fast": f"file://{self.fast}", "slow": f"file://{self.filled.folder}"}
        tree = {
            "payloads": tiers | {"fast_capacity": "64MiB"} | changes,
            "index": f"sqlite://{self.filled.folder}/index.sqlite",
            "capacity_bytes": "64MiB",
        }
        self.file.write_text(yaml.safe_dump(tree))

    def kept(self) -> list[str]:
        return sorted(str(path.relative_to(self.fast)) for path in self.fast.glob("*/??/*.*"))


@pytest.fixture
def tiered(tmp_path: Path) -> Tiered:
    found = Tiered(fill(tmp_path / "cache"), tmp_path / "fast", tmp_path / "settings.yaml")
    found.write()
    return found


def test_warm_fetches_what_was_used_last(admin: Admin, tiered: Tiered) -> None:
    dry = WarmReport.model_validate_json(admin("warm", "--dry-run", "--json", *tiered.options).out)
    assert (dry.dry_run, dry.planned.segments, dry.warm.segments) == (True, 5, 0)
    assert tiered.kept() == []
    ran = admin("warm", "--json", "--jobs", "2", *tiered.options)
    assert ran.code == 0, ran.err
    report = WarmReport.model_validate_json(ran.out)
    assert (report.ended, report.warm, report.left_out) == ("complete", report.planned, 0)
    assert report.used_before_bytes == 0
    assert report.used_bytes == report.warm.stored_bytes
    slow = {str(path.relative_to(tiered.filled.folder)): path for path in tiered.filled.payload_files()}
    assert tiered.kept() == sorted(slow)
    for name, path in slow.items():
        assert (tiered.fast / name).read_bytes() == path.read_bytes()
    again = WarmReport.model_validate_json(admin("warm", "--json", *tiered.options).out)
    assert (again.warm, again.used_before_bytes) == (report.warm, report.used_bytes)
    assert "64.0 MiB" in admin("warm", *tiered.options).out
    status = AskedStatus.model_validate_json(admin("status", "--json", *tiered.options).out)
    assert status.fast is not None
    assert (status.fast.state, status.fast.used_bytes, status.fast.payloads) == ("ok", report.used_bytes, 5)
    assert "fast tier" in admin("status", *tiered.options).out


def test_warm_stops_where_the_tier_is_full(admin: Admin, tiered: Tiered) -> None:
    size = tiered.filled.payload_files()[0].stat().st_size
    limited = WarmReport.model_validate_json(
        admin("warm", tiered.filled.kv_id, "--max-bytes", str(2 * size), "--json", *tiered.options).out
    )
    assert (limited.warm.segments, limited.beyond.segments) == (2, 1), limited
    assert len(tiered.kept()) == 2
    settings = Sources(file=str(tiered.file), environ={}).settings()
    assert warming_bytes(settings, None) < 64 << 20
    assert warming_bytes(settings, 10) == 10


def test_warm_needs_tiers(admin: Admin, filled: Filled) -> None:
    ran = admin("warm", *filled.options)
    assert (ran.code, ran.out) == (2, "")
    assert "no fast tier" in ran.err
    assert "fast_capacity" in ran.err


class FakeTier:
    """Fills nothing, or fails as it is told."""

    nbytes = payloads = dirty_bytes = 0

    def __init__(self, answers: Iterator[Any]) -> None:
        self._answers = answers
        self.names: list[str] = []

    def usage(self) -> FakeTier:
        return self

    def fill(self, name: str, size: int) -> bool:
        self.names.append(name)
        answer = next(self._answers)
        if isinstance(answer, BaseException):
            raise answer
        return bool(answer)

    def delete(self, names: Sequence[str]) -> int:
        return 0

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("answers", "ended", "warmed", "left"),
    [
        ([True] * 5, "complete", 5, 0),
        ([True, False, True, False, True, False, True], "complete", 4, 1),
        ([True, TransientError("down"), True, True, True], "complete", 4, 1),
        ([TransientError("down")] * 5, "failed", 0, 5),
        ([True, PermissionDenied("no")], "failed", 1, 1),
        ([True, True, KeyboardInterrupt()], "cancelled", 2, 0),
    ],
)
def test_a_store_that_fails_while_warming(
    tiered: Tiered, answers: list[Any], ended: str, warmed: int, left: int
) -> None:
    tier = FakeTier(iter(answers))
    with Cache(Sources(file=str(tiered.file), environ={}).settings()) as cache:
        report = warm(cache, plan(cache, []), tier, jobs=1)
    assert (report.ended, report.warm.segments, report.left_out) == (ended, warmed, left)
    assert bool(report.problem) == (ended != "complete")
    assert len(tier.names) == len(answers)


def test_side_by_side(tiered: Tiered) -> None:
    together = threading.Barrier(3, timeout=PATIENCE_S)

    class Slow(FakeTier):
        def fill(self, name: str, size: int) -> bool:
            if len(self.names) < 3:
                self.names.append(name)
                together.wait()
            return True

    with Cache(Sources(file=str(tiered.file), environ={}).settings()) as cache:
        report = warm(cache, plan(cache, []), Slow(iter([])), jobs=3)
    assert report.warm.segments == 5


def examined(tiered: Tiered, mounts: str = "/dev/vda / ext4 rw 0 0\n") -> DoctorReport:
    sources = Sources(file=str(tiered.file), environ={})
    with Cache(sources.settings()) as cache:
        return doctor(cache, sources, mounts=mounts)


def named(report: DoctorReport, name: str) -> list[Check]:
    return [check for check in report.checks if check.name == name]


def test_the_doctor_looks_at_the_fast_tier(admin: Admin, tiered: Tiered) -> None:
    assert "not there yet" in named(examined(tiered), "fast tier")[0].found
    assert not tiered.fast.exists()
    admin("warm", *tiered.options)
    report = examined(tiered)
    assert report.fast == f"file://{tiered.fast}"
    [check] = named(report, "fast tier")
    assert (check.state, "of 64.0 MiB" in check.found) == ("ok", True)
    assert named(report, "fast tier's disk")[0].state == "ok"
    assert named(report, "fast tier's file system")[0].found == "ext4 at /"
    [nfs] = named(examined(tiered, f"h:/x {tiered.fast} nfs4 rw 0 0\n"), "fast tier's file system")
    assert (nfs.state, "disk of this node" in nfs.advice) == ("problem", True)
    tiered.write(fast_capacity="900TiB")
    assert "lower payloads.fast_capacity" in named(examined(tiered), "fast tier's disk")[0].advice


def test_a_fast_tier_that_can_t_be_written(
    admin: Admin, tiered: Tiered, monkeypatch: pytest.MonkeyPatch
) -> None:
    admin("warm", *tiered.options)
    monkeypatch.setattr(os, "access", lambda *_: False)
    [check] = named(examined(tiered), "fast tier")
    assert (check.state, "can't write" in check.found) == ("problem", True)


def test_a_ledger_that_is_damaged(admin: Admin, tiered: Tiered, monkeypatch: pytest.MonkeyPatch) -> None:
    admin("warm", *tiered.options)

    def damaged(*args: object) -> None:
        raise TransientError("ledger: file is not a database")

    monkeypatch.setattr(TieredPayloads, "usage", damaged)
    [check] = named(examined(tiered), "fast tier")
    assert (check.state, "not a database" in check.found, ".tier" in check.advice) == ("problem", True, True)
    ran = admin("status", "--json", *tiered.options)
    # Engines go on with the shared store: that is not "unreachable".
    assert (ran.code, ran.json["fast"]["state"]) == (0, "unreachable")


def test_missing_payloads_may_be_on_their_way(tiered: Tiered) -> None:
    for path in tiered.filled.payload_files():
        path.unlink()
    assert named(examined(tiered), "agreement")[0].state == "problem"
    tiered.write(write="back")
    [check] = named(examined(tiered), "agreement")
    assert (check.state, "write: back" in check.advice) == ("warning", True)


def test_vllm_config_has_the_tiers_and_no_secret(admin: Admin, tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    tiers = {"fast": "file:///nvme/kv", "slow": "s3://bkt/p?endpoint=https://s3.example:9000&region=eu"}
    keys = {"access_key_id": "AKIA-secret", "secret_access_key": "s3-secret", "session_token": "t-secret"}
    tree = {"payloads": tiers | {"fast_capacity": "50GiB", "write": "back"}, "index": "redis://r:6379/0"}
    file.write_text(yaml.safe_dump(tree | {"s3": keys | {"concurrency": 8}}))
    ran = admin("vllm-config", "--json", "--settings", str(file))
    assert ran.code == 0
    extra = ran.json["kv_transfer_config"]["kv_connector_extra_config"]
    assert extra == {
        "index": "redis://r:6379/0",
        "payloads": {**tiers, "write": "back"},
        "s3": {"concurrency": 8},
    }
    assert "-secret" not in ran.out + ran.err
    notes = " ".join(ran.json["notes"])
    for variable in ("KVSTORE_S3__SECRET_ACCESS_KEY", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        assert variable in notes
    given = load_settings(extra, {f"KVSTORE_S3__{key.upper()}": value for key, value in keys.items()})
    assert given == Sources(file=str(file), environ={}).settings()
    # On a command line the object stays one word.
    assert json.dumps(extra["payloads"], separators=(",", ":")) in admin(
        "vllm-config", "--settings", str(file)
    ).out.replace("'", "")


def test_payloads_on_the_command_line_outrank_tiers_in_the_environment(filled: Filled) -> None:
    environ = {"KVSTORE_PAYLOADS__FAST": "file:///x", "KVSTORE_PAYLOADS__SLOW": "s3://bkt/p"}
    url = f"file://{filled.folder}"
    assert Sources(payloads=url, environ=environ).settings().payloads == url
    assert Sources(index="redis://h/0", environ=environ).settings().tiers is not None


@pytest.mark.slow
def test_bench_measures_both_tiers_and_leaves_nothing_in_them(admin: Admin, tiered: Tiered) -> None:
    tiered.write(fast_capacity="1GiB")
    admin("warm", *tiered.options)
    before, kept = tiered.filled.payload_files(), tiered.kept()
    quick = ["--seconds", "1", "--kv-bytes-per-token", "1024"]
    small = {"KVSTORE_SEGMENT__TARGET_BYTES": "64KiB", "KVSTORE_CAPACITY_BYTES": "5MiB"}
    ran = admin("bench", *quick, "--json", *tiered.options, env=small)
    assert ran.code == 0, ran.err
    report = BenchReport.model_validate_json(ran.out)
    assert report.fast == f"file://{tiered.fast}"
    assert [(one.operation, one.tier) for one in report.speeds] == [
        ("put", "shared"),
        ("match", "shared"),
        ("get", "shared"),
        ("get", "fast"),
    ]
    assert (tiered.filled.payload_files(), tiered.kept()) == (before, kept)


# Buckets


def bucket_report(bucket: S3Bucket, tmp_path: Path, **changes: Any) -> DoctorReport:
    """The doctor on a bucket, with keys that `changes` may make wrong."""
    tree: dict[str, Any] = {"payloads": bucket.url, "index": f"sqlite://{tmp_path}/index.sqlite"}
    tree["s3"] = {**bucket.settings["s3"], "attempts": 1, "connect_timeout_s": 0.5, **changes.pop("s3", {})}
    file = tmp_path / "s3.yaml"
    file.write_text(yaml.safe_dump(tree | changes))
    sources = Sources(file=str(file), environ={})
    with Cache(sources.settings()) as cache:
        return doctor(cache, sources, mounts="/dev/vda / ext4 rw 0 0\n")


@pytest.mark.slow
def test_the_verbs_on_a_bucket(admin: Admin, moto_bucket: S3Bucket, tmp_path: Path) -> None:
    filled = fill(tmp_path / "cache")
    archive = tmp_path / "a.tar"
    assert admin("export", "--to", str(archive), *filled.options).code == 0
    env = {
        "KVSTORE_S3__ACCESS_KEY_ID": moto_bucket.credentials.access_key,
        "KVSTORE_S3__SECRET_ACCESS_KEY": moto_bucket.credentials.secret_key,
    }
    options = ["--payloads", moto_bucket.url, "--index", f"sqlite://{tmp_path}/there.sqlite"]
    ran = admin("import", str(archive), "--new-namespaces", *options, env=env)
    assert ran.code == 0, ran.err
    assert len(moto_bucket.keys()) == 5
    back = tmp_path / "back.tar"
    assert admin("export", "--to", str(back), *options, env=env).code == 0
    for verb in (["status"], ["ls"], ["namespaces"], ["doctor"], ["vllm-config"]):
        ran = admin(*verb, *options, env=env | {"KVSTORE_CAPACITY_BYTES": "64MiB"})
        assert ran.code == 0, (verb, ran.out, ran.err)
        assert moto_bucket.credentials.secret_key not in ran.out
    segment = admin("ls", "--json", *options, env=env).json["segments"][0]["segment"]
    shown = admin("show", segment, "--verify", "--json", *options, env=env)
    assert shown.code == 0
    location = shown.json["parts"][0]["location"]
    assert location.startswith(f"s3://{moto_bucket.bucket}/{moto_bucket.prefix}/")
    assert admin("show", location, *options, env=env).code == 0
    assert admin("show", location.replace("s3://", "s3://x"), *options, env=env).code == 1
    quick = ["--seconds", "1", "--kv-bytes-per-token", "1024"]
    small = {"KVSTORE_SEGMENT__TARGET_BYTES": "64KiB", "KVSTORE_CAPACITY_BYTES": "5MiB"}
    assert admin("bench", *quick, *options, env=env | small).code == 0
    assert len(moto_bucket.keys()) == 5


@pytest.mark.slow
def test_a_healthy_bucket(moto_bucket: S3Bucket, tmp_path: Path) -> None:
    report = bucket_report(moto_bucket, tmp_path)
    [check] = named(report, "payloads")
    assert (check.state, "listed" in check.found) == ("ok", True)
    assert "redis://" in named(report, "settings")[0].advice
    assert moto_bucket.keys() == []


def test_no_such_bucket_and_no_server(moto_bucket: S3Bucket, tmp_path: Path) -> None:
    [gone] = named(bucket_report(replace(moto_bucket, bucket="not-there"), tmp_path), "payloads")
    assert (gone.state, "create bucket not-there" in gone.advice) == ("problem", True)
    away = replace(moto_bucket, endpoint="http://127.0.0.1:9")
    [check] = named(bucket_report(away, tmp_path), "payloads")
    assert (check.state, "http://127.0.0.1:9" in check.advice) == ("problem", True)
    assert "can be reached" in check.advice


@pytest.mark.servers
def test_wrong_keys(s3_bucket: S3Bucket, tmp_path: Path) -> None:
    assert named(bucket_report(s3_bucket, tmp_path), "payloads")[0].state == "ok"
    if s3_bucket.kind == "moto":
        return  # it checks no keys
    wrong = replace(s3_bucket, credentials=Credentials(s3_bucket.credentials.access_key, "wrong-secret"))
    report = bucket_report(wrong, tmp_path)
    [check] = named(report, "payloads")
    assert (check.state, "KVSTORE_S3__SECRET_ACCESS_KEY" in check.advice) == ("problem", True)
    assert "wrong-secret" not in report.model_dump_json()


@pytest.mark.parametrize(
    ("error", "word"),
    [
        (PermissionDenied("bucket b: put a probe: no credentials found; set"), "service account a role"),
        (PermissionDenied("bucket b: put a probe: 403 InvalidAccessKeyId; x"), "belong to http://e:1"),
        (
            PermissionDenied("bucket b: put a probe: 403 SignatureDoesNotMatch"),
            "KVSTORE_S3__SECRET_ACCESS_KEY",
        ),
        (PermissionDenied("bucket b: put a probe: 403 RequestTimeTooSkewed"), "NTP"),
        (PermissionDenied("bucket b: put a probe: 403 AccessDenied"), "s3:PutObject on arn:aws:s3:::bkt/p/*"),
        (PermissionDenied("bucket b: read a probe: 403 AccessDenied"), "s3:GetObject"),
        (PermissionDenied("bucket b: delete a probe: 403 AccessDenied"), "s3:DeleteObject"),
        (PermissionDenied("bucket b: list payloads: 403 AccessDenied"), "s3:ListBucket on arn:aws:s3:::bkt:"),
        (PermissionDenied("bucket b: put a probe: 301 PermanentRedirect"), "?region="),
        (PermissionDenied("bucket b: put a probe: the server's certificate is not trusted"), "s3.tls_ca"),
        (PermissionDenied("bucket b: something else"), "what they may do"),
        (TransientError("bucket b: put a probe: 404 NoSuchBucket"), "create bucket bkt"),
        (TransientError("bucket b: put a probe: no connection"), "http://e:1 is right"),
        (DeadlineExceeded("bucket b: put a probe: the server did not answer in time"), "network policies"),
        (Throttled("bucket b: put a probe: 503 SlowDown"), "slow down by themselves"),
        (CapacityExceeded("bucket b: put a probe: 507 QuotaExceeded"), "quota"),
        (ConfigError("s3.tls_ca: no such file"), "settings under s3"),
    ],
)
def test_what_to_do_about_each_failure_of_a_bucket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: KVStoreError, word: str
) -> None:
    tree = {"payloads": "s3://bkt/p?endpoint=http://e:1", "index": f"sqlite://{tmp_path}/i.sqlite"}
    with closing(SqliteIndex(f"{tmp_path}/i.sqlite")):
        pass
    sources = Sources(environ={})

    class Broken:
        def ping(self) -> None:
            raise error

        def close(self) -> None:
            pass

    monkeypatch.setattr("kvstore.admin.doctor.payloads.open_probe", lambda settings: closing(Broken()))
    with Cache(load_settings(tree, {})) as cache:
        report = doctor(cache, sources, mounts="")
    [check] = named(report, "payloads")
    assert (check.state, check.found) == ("problem", str(error))
    assert word in check.advice
