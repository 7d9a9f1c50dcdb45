"""Settings from their sources, and the stack that they make."""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kvstore.build import (
    describe,
    load_settings,
    open_index,
    open_payloads,
    open_store,
    open_tier,
    settings_keys,
)
from kvstore.conformance.arrange import fetch, fresh_name, views
from kvstore.errors import ConfigError, KVStoreError
from tests.servers.redis import RedisServer
from tests.servers.s3.bucket import S3Bucket
from tests.store.world import chain, match, open_space, slots
from tests.store.world import fetch as fetch_all

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


def test_settings_without_a_store_open_none(tmp_path: Path) -> None:
    environ = {"KVSTORE_KV__OBSERVE": "true", "KVSTORE_TRACE__FOLDER": str(tmp_path)}
    made = load_settings({}, environ=environ)
    assert made.nowhere
    for opens in (open_store, open_index):
        with pytest.raises(ConfigError, match="there is no store"):
            opens(made)


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
            "unknown key 'kv.savedecode'; allowed here: audit_every, handoff",
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


@pytest.mark.servers
def test_a_store_at_work_shows_no_secret(
    tmp_path: Path, moto_bucket: S3Bucket, private_redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Everything is logged, everything goes wrong once, and what is left on disk is looked through."""
    caplog.set_level(logging.DEBUG)
    password, access, secret, token = planted = [f"planted-{number}-0f31" for number in range(4)]
    private_redis.command("ACL", "SETUSER", "engine", "on", f">{password}", "~*", "+@all")
    settings = {
        "payloads": {"fast": f"file://{tmp_path}/fast", "slow": moto_bucket.url, "fast_capacity": "1GiB"},
        "index": f"redis://engine:{password}@127.0.0.1:{private_redis.port}/0",
        "trace": {"folder": f"{tmp_path}/trace"},
        "s3": {"access_key_id": access, "secret_access_key": secret, "session_token": token},
    }
    said = []
    with open_store(load_settings(settings, environ={})) as store:
        space = open_space(store)
        space.save(slots(chain(1, 2, 3)))
        assert fetch_all(space, chain(1, 2, 3), match(space, chain(1, 2, 3)))
        private_redis.command("ACL", "SETUSER", "engine", "resetpass", ">another")
        private_redis.command("CLIENT", "KILL", "TYPE", "normal")
        for name in (moto_bucket.bucket, "nobody-has-this"):
            url = moto_bucket.url.replace(moto_bucket.bucket, name)
            with open_payloads(load_settings({**settings, "payloads": url}, environ={})) as payloads:
                with suppress(KVStoreError):
                    list(payloads.list())
        for failing in (
            lambda: space.save(slots(chain(7))),
            lambda: store.index.find(space.id, bytes(16)),
            space.register,
        ):
            with pytest.raises(KVStoreError) as caught:
                failing()
            said += [str(caught.value), repr(caught.value.__cause__)]
        said += [repr(store.index), repr(store.backends.payloads), repr(store.settings)]
    assert caplog.records
    said += [record.getMessage() for record in caplog.records]
    said += [path.read_bytes().decode("latin-1") for path in tmp_path.rglob("*") if path.is_file()]
    assert not [line for line in said if any(word in line for word in planted)]


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
        assert store.backends.breaker is None
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
        "KVSTORE_S3__ATTEMPTS": "5",
    }
    settings = load_settings(environ=environ)
    assert settings.tiers is not None
    assert (settings.tiers.fast_capacity, settings.s3.attempts) == (5 << 30, 5)


def test_a_process_that_can_have_no_threads_opens_no_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_more(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    settings = {"payloads": f"file://{tmp_path}"}
    with monkeypatch.context() as patch, pytest.raises(ConfigError, match=r"start 0 of the 1\d threads"):
        patch.setattr(threading.Thread, "start", no_more)
        open_store(settings)
    with open_store(settings) as store:
        monkeypatch.setattr(threading.Thread, "start", no_more)
        hashes = chain(1, 2)
        space = open_space(store)
        assert space.save(slots(hashes)).stored
        assert fetch_all(space, hashes, match(space, hashes))
