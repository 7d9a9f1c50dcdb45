"""What an engine's log says of its store at the start."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from connectors.engine.opening import open_for
from kvstore.admin.doctor.first_look import sibling
from kvstore.keys import canonical_json, namespace_id
from schemas.namespace import Namespace, Parallel
from schemas.settings import Settings
from tests.admin.conftest import kv_space
from tests.servers.redis import RedisServer
from tests.servers.s3.aws import PATIENT, Aws
from tests.servers.s3.hostile import HostileServer
from tests.waiting import PATIENCE_S


@pytest.fixture
def start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Callable[..., str]:
    """`start(...)`: opens a store as a connector does, and returns its log once the look has ended."""
    monkeypatch.setattr("kvstore.admin.doctor.first_look._looked", set())
    monkeypatch.setattr("kvstore.build.PROBE_S", PATIENCE_S)
    caplog.set_level(logging.INFO)

    def started(space: Namespace | None = None, *, saves: bool = True, **tree: Any) -> str:
        caplog.clear()
        given: dict[str, Any] = {"payloads": f"file://{tmp_path}/payloads"} | tree
        given["s3"] = PATIENT | tree.get("s3", {})
        with open_for(Settings.model_validate(given), "test", space or kv_space(), saves=saves) as store:
            store.open(space or kv_space()).register_soon()
            assert store.transfers.drain(PATIENCE_S)
        return "\n".join(f"{each.levelname} {each.getMessage()}" for each in caplog.records)

    return started


def warnings(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(("WARNING", "ERROR"))]


def test_all_is_well_is_one_line(start: Callable[..., str]) -> None:
    text = start()
    assert warnings(text) == []
    assert text.count("index and payloads answered in ") == 1


def test_two_connectors_of_a_process_look_once(start: Callable[..., str]) -> None:
    assert "answered in" in start()
    assert "answered in" not in start()


@pytest.mark.parametrize("name", ["capacity_bytes", "namespace_bytes", "tenant_bytes", "salt_bytes"])
def test_less_than_one_segment(start: Callable[..., str], name: str) -> None:
    (line,) = warnings(start(**({name: 1} if name == "capacity_bytes" else {"eviction": {name: 1}})))
    assert f"{name} (1 B) is less than one segment" in line
    assert line.rpartition("Raise ")[2].removeprefix("eviction.") == name


def test_a_folder_that_cannot_be_made(start: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (line,) = warnings(start(payloads=f"file://{tmp_path}/file/x", index=f"sqlite://{tmp_path}/index"))
    assert f"{tmp_path}/file is no folder; name a folder" in line


def s3(environ: Mapping[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    return {"index": f"sqlite://{tmp_path}/index"}


def test_a_bucket_that_is_not_there(
    start: Callable[..., str], moto_aws: Aws, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tree = s3(moto_aws.user().environ, monkeypatch, tmp_path)
    (line,) = warnings(start(payloads="s3://nobodys-bucket/kvstore", **tree))
    assert "NoSuchBucket" in line and "create bucket nobodys-bucket at AWS, or correct payloads" in line


def test_a_bucket_in_another_region(
    start: Callable[..., str], moto_aws: Aws, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    moto_aws.make("my-bucket", "eu-central-1")
    tree = s3(moto_aws.user().environ, monkeypatch, tmp_path)
    (line,) = warnings(start(payloads="s3://my-bucket/kvstore", **tree))
    assert "add ?region=eu-central-1 to payloads: bucket my-bucket is there" in line


def test_an_engine_that_only_loads_needs_no_right_to_write(
    start: Callable[..., str], moto_aws: Aws, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    moto_aws.make("my-bucket")
    tree = s3(moto_aws.user().environ, monkeypatch, tmp_path) | {"payloads": "s3://my-bucket/kvstore"}
    moto_aws.read_only = True
    assert warnings(start(saves=False, **tree)) == []
    monkeypatch.setattr("kvstore.admin.doctor.first_look._looked", set())
    (line,) = warnings(start(**tree))
    assert "allow s3:PutObject on arn:aws:s3:::my-bucket/kvstore/*" in line


def test_a_bucket_that_hangs_delays_nobody(
    start: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("kvstore.build.PROBE_S", 0.5)
    tree = s3({"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "key"}, monkeypatch, tmp_path)
    with HostileServer(lambda request, body: server.pause(PATIENCE_S)) as server:  # type: ignore[arg-type, func-returns-value]
        url = f"s3://bucket/pre?endpoint={server.endpoint}&region=us-east-1"
        (line,) = warnings(start(payloads=url, s3={"write_timeout_s": 3600}, **tree))
        assert "did not answer in time" in line and f"{server.endpoint} does not answer in time" in line


def test_a_wrong_password_of_redis_is_called_so(
    start: Callable[..., str], private_redis: RedisServer
) -> None:
    private_redis.command("CONFIG", "SET", "requirepass", "secret-word")
    (line,) = warnings(start(index=private_redis.url))
    assert "the index refuses this engine" in line and "not reachable" not in line
    assert "secret-word" not in line


class TestSiblings:
    def named(self, other: Namespace, own: Namespace | None = None) -> str:
        own = own or kv_space()
        texts = {namespace_id(each): canonical_json(each) for each in (own, other)}
        return sibling(own, texts)

    def test_another_size_of_tensor_parallel(self) -> None:
        group = kv_space().groups[0]
        other = kv_space(
            parallel=Parallel(tp=2), groups=(group.model_copy(update={"shards": 2}), *kv_space().groups[1:])
        )
        text = self.named(other)
        assert "of the same model: it differs in groups.0.shards (2, here 1)" in text
        assert "parallel.tp (2, here 1). identity.any_tp: true on all engines ends a difference" in text
        assert str(namespace_id(other)) in text

    def test_another_release_of_vllm(self) -> None:
        text = self.named(kv_space(page_format="vllm0.33/cpu"), kv_space(page_format="vllm0.32/cpu"))
        assert "identity.any_vllm: true on all engines ends a difference" in text

    def test_what_no_setting_shares_is_explained(self) -> None:
        text = self.named(kv_space(dtype="float16"))
        assert "the dtype that the model computes in (--dtype)" in text

    def test_other_models_and_tenants_are_no_siblings(self) -> None:
        assert self.named(kv_space(model="another")) == ""
        assert self.named(kv_space(tenant="another")) == ""
        assert self.named(kv_space()) == ""

    def test_an_engine_says_so_at_its_start(self, start: Callable[..., str]) -> None:
        start(kv_space(block_tokens=16))
        text = start(kv_space(epoch=1))
        assert "differs in epoch (0, here 1)" in text
        assert warnings(text) == []
