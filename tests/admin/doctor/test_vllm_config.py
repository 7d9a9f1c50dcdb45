"""vllm-config: what it prints is what the connectors read."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest

from kvstore.admin.backends import Sources
from kvstore.admin.doctor.reports import VllmConfigReport
from kvstore.build import load_settings
from tests.admin.conftest import Admin

URLS = ["--index", "redis://redis:6379/0", "--payloads", "file:///mnt/kvstore"]


def flags(text: str) -> dict[str, Any]:
    """The printed flags as a shell would split them."""
    words = shlex.split(text)
    return {flag: json.loads(value) for flag, value in zip(words[::2], words[1::2], strict=True)}


def test_the_flags_are_those_of_the_readme(admin: Admin) -> None:
    extra = {"index": "redis://redis:6379/0", "payloads": "file:///mnt/kvstore"}
    # vLLM ends with the other one on a text model.
    assert list(flags(admin("vllm-config", *URLS).out)) == ["--kv-transfer-config"]
    ran = admin("vllm-config", "--ec", *URLS)
    assert ran.code == 0
    assert len(ran.out.splitlines()) == 2
    assert flags(ran.out) == {
        "--kv-transfer-config": {
            "kv_connector": "KVStoreConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": extra,
        },
        "--ec-transfer-config": {
            "ec_connector": "ECStoreConnector",
            "ec_role": "ec_both",
            "ec_connector_extra_config": extra,
        },
    }
    assert '"kv_connector_extra_config":{"index":"redis://redis:6379/0","payloads"' in ran.out


def test_json_holds_the_same_two_configs(admin: Admin) -> None:
    report = VllmConfigReport.model_validate_json(admin("vllm-config", "--ec", "--json", *URLS).out)
    printed = flags(admin("vllm-config", "--ec", *URLS).out)
    assert report.kv_transfer_config == printed["--kv-transfer-config"]
    assert report.ec_transfer_config == printed["--ec-transfer-config"]


@pytest.mark.parametrize("role", ["both", "producer", "consumer"])
def test_roles_and_single_flags(admin: Admin, role: str) -> None:
    kv = flags(admin("vllm-config", "--role", role, *URLS).out)
    assert list(kv) == ["--kv-transfer-config"]
    assert kv["--kv-transfer-config"]["kv_role"] == f"kv_{role}"
    ec = flags(admin("vllm-config", "--no-kv", "--ec", "--role", role, *URLS).out)
    assert ec["--ec-transfer-config"]["ec_role"] == f"ec_{role}"
    assert admin("vllm-config", "--no-kv", "--ec", "--json", *URLS).json["kv_transfer_config"] is None


def test_what_is_printed_gives_the_same_settings_back(admin: Admin) -> None:
    env = {
        "KVSTORE_KV__SAVE_DECODE": "true",
        "KVSTORE_CAPACITY_BYTES": "5GiB",
        "KVSTORE_REDIS__TIMEOUT_S": "2.5",
        "KVSTORE_IDENTITY__TENANT": "it's me",
    }
    extra = flags(admin("vllm-config", *URLS, env=env).out)["--kv-transfer-config"]
    assert (
        load_settings(extra["kv_connector_extra_config"], {})
        == Sources(index=URLS[1], payloads=URLS[3], environ=env).settings()
    )


def test_the_default_index_is_left_out(admin: Admin) -> None:
    extra = admin("vllm-config", "--json", "--payloads", "file:///d").json["kv_transfer_config"]
    assert extra["kv_connector_extra_config"] == {"payloads": "file:///d"}


@pytest.mark.parametrize(
    ("url", "public"),
    [
        ("redis://:pw-secret@h:1/2", "redis://h:1/2"),
        ("rediss://me:pw-secret@h/0", "rediss://h/0"),
        ("redis://me:pw-secret@a:1,[::1]:2/0", "redis://a:1,[::1]:2/0"),
        ("redis+sentinel://me:pw-secret@a,b:1/main/0", "redis+sentinel://a,b:1/main/0"),
        ("redis://p%40w-secret@[::1]:1/0", "redis://[::1]:1/0"),
        ("unix://me:pw-secret@/run/redis.sock?db=1", "unix:///run/redis.sock?db=1"),
    ],
)
def test_credentials_become_a_hint(admin: Admin, url: str, public: str) -> None:
    ran = admin("vllm-config", "--json", "--index", url, "--payloads", "file:///d@e")
    extra = ran.json["kv_transfer_config"]["kv_connector_extra_config"]
    assert extra == {"index": public, "payloads": "file:///d@e"}
    assert "w-secret" not in ran.out + ran.err
    for text in (ran.err, " ".join(ran.json["notes"])):
        assert "KVSTORE_REDIS__PASSWORD" in text
        assert "KVSTORE_INDEX" in text


def test_a_password_setting_becomes_a_hint(admin: Admin) -> None:
    ran = admin("vllm-config", *URLS, env={"KVSTORE_REDIS__PASSWORD": "pw-secret"})
    assert "w-secret" not in ran.out + ran.err
    assert "KVSTORE_REDIS__PASSWORD" in ran.err
    assert "redis" not in flags(ran.out)["--kv-transfer-config"]["kv_connector_extra_config"]
