"""Settings from their sources, and the stack that they make."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from kvstore.build import describe, load_settings, open_payloads, open_store, open_tier, settings_keys
from kvstore.conformance.arrange import fetch, fresh_name, views
from kvstore.errors import ConfigError

PAYLOADS = {"payloads": "file:///tmp/x"}


def test_a_folder_is_all_it_takes() -> None:
    made = load_settings(PAYLOADS, environ={})
    assert made.index_url == "sqlite:///tmp/x/index.sqlite"
    assert made.segment.target_bytes == 32 << 20


def test_the_environment_overrides_the_mapping_and_the_file(tmp_path: Path) -> None:
    file = tmp_path / "kvstore.yaml"
    file.write_text("payloads: file:///from/file\nkv: {save_decode: false, min_load_blocks: 7}\n")
    environ = {
        "KVSTORE_INDEX": "redis://host:1/2",
        "KVSTORE_KV__SAVE_DECODE": "true",
        "KVSTORE_SEGMENT__TARGET_BYTES": "8MiB",
        "KVSTORE_REDIS__PASSWORD": "hunter2",
        "HOME": "/elsewhere",
    }
    for given in ({"settings": str(file)}, None):
        if given is None:
            environ["KVSTORE_SETTINGS"] = str(file)
        made = load_settings(given, environ=environ)
        assert (made.payloads, made.index) == ("file:///from/file", "redis://host:1/2")
        assert (made.kv.save_decode, made.kv.min_load_blocks) == (True, 7)
        assert made.segment.target_bytes == 8 << 20
        assert "hunter2" not in repr(made)
    made = load_settings(PAYLOADS | {"index": "sqlite:///a/b"}, environ=environ)
    assert (made.payloads, made.index) == ("file:///tmp/x", "redis://host:1/2")


def test_a_mapping_given_is_not_changed() -> None:
    given = PAYLOADS | {"kv": {"min_load_blocks": 2}}
    load_settings(given, environ={"KVSTORE_KV__MIN_LOAD_BLOCKS": "3"})
    assert given == PAYLOADS | {"kv": {"min_load_blocks": 2}}


@pytest.mark.parametrize(
    ("given", "environ", "says"),
    [
        ({}, {}, "payloads"),
        (PAYLOADS | {"indx": "redis://x"}, {}, "unknown key 'indx'"),
        (
            PAYLOADS | {"kv": {"savedecode": 1}},
            {},
            "unknown key 'kv.savedecode'; allowed here: handoff",
        ),
        (PAYLOADS, {"KVSTORE_INDX": "x"}, "KVSTORE_INDX is not a setting; did you mean KVSTORE_INDEX?"),
        (PAYLOADS, {"KVSTORE_KV__SAVE_DECODE": "maybe"}, "kv.save_decode = 'maybe'"),
        (
            {"payloads": "s4://bucket/x"},
            {},
            "payloads = 's4://bucket/x': unsupported URL; allowed: file:///DIR",
        ),
        ({"payloads": "/var/x"}, {}, "not a URL"),
        ({"payloads": "file://var/x"}, {}, "three slashes"),
        (PAYLOADS | {"index": "redis://"}, {}, "without a host"),
        (PAYLOADS | {"index": "sqlite://x/y"}, {}, "three slashes"),
        (PAYLOADS | {"grace_s": 10}, {}, "must not add up to more than grace_s"),
        (PAYLOADS | {"segment": {"codec": "zstd"}}, {}, "segment.codec = 'zstd'"),
        (PAYLOADS | {"capacity_bytes": "lots"}, {}, "capacity_bytes = 'lots': not a size"),
        (PAYLOADS | {"settings": "x.yaml"}, {}, "move payloads into that file"),
        ({"settings": "/does/not/exist.yaml"}, {}, "No such file"),
    ],
)
def test_what_is_wrong_is_said(given: dict[str, object], environ: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError) as failure:
        load_settings(given, environ=environ)
    assert says in str(failure.value)


def test_a_settings_file_must_be_a_mapping(tmp_path: Path) -> None:
    for text, says in ((b"- a\n", "mapping"), (b"a: [", "not YAML"), (b"a: \xff\xfe", "not YAML")):
        file = tmp_path / "x.yaml"
        file.write_bytes(text)
        with pytest.raises(ConfigError, match=says):
            load_settings({"settings": str(file)}, environ={})


def test_a_kubernetes_service_called_kvstore_breaks_nothing() -> None:
    environ = {
        "KVSTORE_SERVICE_HOST": "10.0.0.1",
        "KVSTORE_SERVICE_PORT": "8080",
        "KVSTORE_SERVICE_PORT_HTTP": "8080",
        "KVSTORE_PORT": "tcp://10.0.0.1:8080",
        "KVSTORE_PORT_8080_TCP": "tcp://10.0.0.1:8080",
        "KVSTORE_PORT_8080_TCP_ADDR": "10.0.0.1",
        "KVSTORE_REDIS_SERVICE_HOST": "10.0.0.2",
        "KVSTORE_REDIS_PORT_6379_TCP_PROTO": "tcp",
    }
    assert load_settings(PAYLOADS, environ=environ).payloads == "file:///tmp/x"


def test_no_secret_in_an_error_or_a_description() -> None:
    given = PAYLOADS | {"index": "redis://user:hunter2@host:1/0", "redis": {"password": "hunter3"}}
    assert "hunter" not in describe(load_settings(given, environ={}))
    with pytest.raises(ConfigError) as failure:
        load_settings(given | {"index": "redis://user:hunter2@host:1/db?x=hunter4", "kv": 3}, environ={})
    assert "hunter" not in str(failure.value)
    assert failure.value.__cause__ is None


def test_every_setting_has_a_variable() -> None:
    names = settings_keys()
    assert {"INDEX", "PAYLOADS", "KV__SAVE_DECODE", "REDIS__PASSWORD", "LOCAL__FSYNC"} <= names


def test_an_unreachable_redis_is_no_reason_not_to_start(tmp_path: Path) -> None:
    # Port 1 refuses on every machine.
    with open_store({"payloads": f"file://{tmp_path}", "index": "redis://127.0.0.1:1/0"}) as store:
        assert "127.0.0.1:1" in repr(store.index)


def test_memory_is_for_tests() -> None:
    with open_store({"payloads": "memory://a", "index": "memory://a"}).payloads as payloads:
        assert list(payloads.list()) == []


# Tiers


def tiered(tmp_path: Path, **more: Any) -> dict[str, Any]:
    payloads = {"fast": f"file://{tmp_path}/fast", "slow": f"file://{tmp_path}/slow", **more}
    return {"payloads": payloads, "index": f"sqlite://{tmp_path}/index.sqlite"}


def test_tiers_are_stacked_as_described(tmp_path: Path) -> None:
    with open_store(tiered(tmp_path)) as store:
        text = repr(store.payloads)
        assert text.startswith("TieredPayloads(BreakingPayloads(LocalPayloads('")
        assert "BreakingPayloads(LocalPayloads(" in text.split(", ", 2)[2]
        # Much can be read from the folder while the origin is down.
        assert store.breaker is None
        name = fresh_name()
        store.payloads.put(name, views(b"abc"))
        assert (tmp_path / "fast" / name).read_bytes() == (tmp_path / "slow" / name).read_bytes() == b"abc"
        assert fetch(store.payloads, name) == b"abc"
        assert store.counters.snapshot()["tier_hits_fast"] == 1
    settings = load_settings(tiered(tmp_path), environ={})
    assert f"file://{tmp_path}/fast in front of file://{tmp_path}/slow" in describe(settings)
    assert repr(open_payloads(settings)).startswith("LocalPayloads(")


def test_a_tier_for_tools_does_everything_at_once(tmp_path: Path) -> None:
    settings = load_settings(tiered(tmp_path), environ={})
    name = fresh_name()
    with open_payloads(settings) as slow:
        slow.put(name, views(b"x" * 1000))
    with open_tier(settings) as tier:
        before = threading.active_count()
        assert tier.fill(name, 1000)
        assert tier.usage().payloads == 1
        assert threading.active_count() == before
    with pytest.raises(ConfigError, match="payloads is one URL"):
        open_tier(load_settings({"payloads": f"file://{tmp_path}"}, environ={}))


def test_tiers_from_the_environment(tmp_path: Path) -> None:
    environ = {
        "KVSTORE_PAYLOADS__FAST": f"file://{tmp_path}/fast",
        "KVSTORE_PAYLOADS__SLOW": "s3://bucket/x",
        "KVSTORE_PAYLOADS__FAST_CAPACITY": "5GiB",
        "KVSTORE_INDEX": "redis://h",
        "KVSTORE_S3__CLIENT": "boto3",
    }
    settings = load_settings(environ=environ)
    assert settings.tiers is not None
    assert (settings.tiers.fast_capacity, settings.s3.client) == (5 << 30, "boto3")
