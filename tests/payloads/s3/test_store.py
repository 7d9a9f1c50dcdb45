"""S3Payloads: the contract on moto (quick tier) and on a real server; what is S3's own."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvstore.build import open_payloads, open_store
from kvstore.conformance.arrange import fetch, fresh_name, views
from kvstore.errors import (
    CapacityExceeded,
    ConfigError,
    DeadlineExceeded,
    PermissionDenied,
    Throttled,
    TransientError,
)
from kvstore.payloads.port import PayloadStore
from kvstore.payloads.s3.errors import Redirected, classify, of_obstore
from kvstore.payloads.s3.store import S3Payloads
from kvstore.testing import PayloadConformance, RawPayloads
from schemas.settings import S3Settings, Settings
from schemas.urls import s3_location
from tests.servers.s3.bucket import S3Bucket
from tests.servers.s3.nginx import NginxServer
from tests.waiting import PATIENCE_S, done, until


class RawBucket(RawPayloads):
    """The bucket behind an S3Payloads."""

    def __init__(self, bucket: S3Bucket) -> None:
        self._bucket = bucket

    def put(self, name: str, data: bytes) -> None:
        self._bucket.put(name, data)

    def get(self, name: str) -> bytes | None:
        try:
            return self._bucket.get(name)
        except KeyError:
            return None

    def names(self) -> set[str]:
        return set(self._bucket.keys())


#: For tests that are not about deadlines: a busy machine is in time.
PATIENT = dict.fromkeys(
    ("connect_timeout_s", "stall_timeout_s", "read_timeout_s", "write_timeout_s"), PATIENCE_S
)


def open_s3(bucket: S3Bucket, **settings: Any) -> S3Payloads:
    """The leaf alone: no retries, no breaker."""
    given = bucket.settings["s3"] | PATIENT | settings
    return S3Payloads(s3_location(bucket.url), S3Settings.model_validate(given))


def tree(bucket: S3Bucket, **s3: Any) -> dict[str, Any]:
    """A settings tree for that bucket."""
    return {
        "payloads": bucket.url,
        "index": "redis://localhost:1",
        "s3": bucket.settings["s3"] | PATIENT | s3,
    }


class _S3Conformance(PayloadConformance):
    delete_tells = False

    @pytest.fixture
    def raw(self, bucket: S3Bucket) -> RawBucket:
        return RawBucket(bucket)

    @pytest.fixture
    def payloads(self, bucket: S3Bucket) -> Iterator[PayloadStore]:
        # As tools open it, with retries: moto answers 500 when its threads get into each other's way, and
        # Ceph to a read of what is being replaced.
        settings = Settings.model_validate(tree(bucket, attempts=8, backoff_s=0.01))
        with open_payloads(settings) as payloads:
            yield payloads


class TestMoto(_S3Conformance):
    @pytest.fixture
    def bucket(self, moto_bucket: S3Bucket) -> S3Bucket:
        return moto_bucket


class TestServer(_S3Conformance):
    @pytest.fixture
    def bucket(self, s3_bucket: S3Bucket) -> S3Bucket:
        return s3_bucket


# Uploads in parts


def test_a_large_payload_goes_in_parts_and_appears_whole(s3_bucket: S3Bucket) -> None:
    part = 5 << 20
    buffers = views(b"first", bytes(range(256)) * (2 * part // 256), b"end")
    whole = b"".join(buffers)
    with open_s3(s3_bucket, multipart_bytes=part, part_bytes=part) as payloads:
        name = fresh_name()
        payloads.put(name, buffers)
        assert s3_bucket.get(name) == whole
        assert s3_bucket.uploads() == []
        # An object of parts has a mark in its tag.
        assert (
            "-3" in s3_bucket.client().head_object(Bucket=s3_bucket.bucket, Key=s3_bucket.name(name))["ETag"]
        )


def test_a_failed_upload_in_parts_leaves_nothing(s3_proxy: Any) -> None:
    bucket, proxy = s3_proxy
    part = 5 << 20
    with open_s3(bucket, multipart_bytes=part, part_bytes=part) as payloads:
        proxy.inject("status500", methods=("PUT",), skip=1)
        name = fresh_name()
        with pytest.raises(TransientError):
            payloads.put(name, [memoryview(bytearray(3 * part))])
        proxy.heal()
        assert bucket.keys() == []
        assert bucket.uploads() == []


def test_abandoned_uploads_are_removed_and_others_left(s3_bucket: S3Bucket, monkeypatch: Any) -> None:
    client = s3_bucket.client()
    names = [fresh_name(), "not/a/payload"]
    for name in names:
        client.create_multipart_upload(Bucket=s3_bucket.bucket, Key=s3_bucket.name(name))
    with open_s3(s3_bucket) as payloads:
        assert payloads.abort_old_uploads() == 0
        monkeypatch.setattr("kvstore.payloads.s3.store._UPLOAD_AGE_S", -60.0)
        assert payloads.abort_old_uploads() == 1
    assert s3_bucket.uploads() == ["not/a/payload"]


# What goes wrong: one attempt, one error of the store's own


def attempts(payloads: PayloadStore, verb: str) -> Callable[[], object]:
    name = fresh_name()
    return {
        "read": lambda: fetch(payloads, name, 1000),
        "put": lambda: payloads.put(name, views(b"x" * 1000)),
        "delete": lambda: payloads.delete([name]),
        "list": lambda: list(payloads.list()),
    }[verb]


@pytest.mark.parametrize("verb", ["read", "put", "delete", "list"])
@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("status503", Throttled),
        ("status500", TransientError),
        ("hang", DeadlineExceeded),
        ("reset_before", TransientError),
        ("forbid", PermissionDenied),
        ("no_bucket", TransientError),
        ("html404", TransientError),
    ],
)
def test_what_a_server_does_wrong_has_one_name(
    s3_proxy: Any, fault: str, error: type[Exception], verb: str
) -> None:
    bucket, proxy = s3_proxy
    short = {"read_timeout_s": 1.0, "write_timeout_s": 1.0, "stall_timeout_s": 1.0}
    with open_s3(bucket, **(short if fault == "hang" else {})) as payloads:
        done(attempts(payloads, verb))
        proxy.inject(fault)
        with pytest.raises(error) as caught:
            attempts(payloads, verb)()
        if error is TransientError:
            assert type(caught.value) is TransientError
        secret = bucket.settings["s3"]["secret_access_key"]
        assert secret not in str(caught.value)
        proxy.heal()
        done(attempts(payloads, verb))


@pytest.mark.parametrize("fault", ["hang_body", "reset", "truncate", "short"])
def test_a_body_that_breaks_off_is_an_error(s3_proxy: Any, fault: str) -> None:
    bucket, proxy = s3_proxy
    name, data = fresh_name(), bytes(range(256)) * 4000
    bucket.put(name, data)
    with open_s3(bucket, **({"stall_timeout_s": 1.0} if fault == "hang_body" else {})) as payloads:
        assert done(lambda: fetch(payloads, name)) == data
        proxy.inject(fault, methods=("GET",))
        with pytest.raises(TransientError):
            fetch(payloads, name)
        proxy.heal()
        assert done(lambda: fetch(payloads, name)) == data


def test_a_key_that_is_missing_is_a_miss_and_a_bucket_is_not(s3_bucket: S3Bucket) -> None:
    with open_s3(s3_bucket) as payloads:
        assert fetch(payloads, fresh_name()) is None
    elsewhere = s3_bucket.url.replace(s3_bucket.bucket, "no-such-bucket-anywhere")
    settings = S3Settings.model_validate(s3_bucket.settings["s3"] | PATIENT)
    with S3Payloads(s3_location(elsewhere), settings) as payloads:
        with pytest.raises(TransientError, match="create the bucket"):
            fetch(payloads, fresh_name())
        with pytest.raises(TransientError, match="NoSuchBucket"):
            payloads.ping()


def test_nobody_there(s3_proxy: Any) -> None:
    bucket, proxy = s3_proxy
    proxy.refuse()
    with open_s3(bucket) as payloads, pytest.raises(TransientError, match="no connection"):
        fetch(payloads, fresh_name())


# Credentials


def test_a_wrong_secret_is_refused_and_never_shown(
    s3_bucket: S3Bucket, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with open_s3(s3_bucket, secret_access_key="hunter2hunter2") as payloads:
        for call in (payloads.ping, attempts(payloads, "read"), attempts(payloads, "put")):
            with pytest.raises(PermissionDenied) as caught:
                call()
            assert "secret access key is wrong" in str(caught.value)
        text = repr(payloads) + str(caught.value) + repr(caught.value) + repr(caught.value.__cause__)
    assert "hunter2" not in text
    ours = [record for record in caplog.records if record.name.startswith("kvstore")]
    assert "hunter2" not in "".join(record.getMessage() for record in ours)


def test_no_credentials_at_all(moto_bucket: S3Bucket, monkeypatch: Any) -> None:
    chain_only(monkeypatch)
    settings = S3Settings()
    with S3Payloads(s3_location(moto_bucket.url), settings) as payloads:
        with pytest.raises(PermissionDenied, match="no credentials found"):
            fetch(payloads, fresh_name())


def test_credentials_of_the_environment(s3_bucket: S3Bucket, monkeypatch: Any) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3_bucket.credentials.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3_bucket.credentials.secret_key)
    settings = S3Settings()
    with S3Payloads(s3_location(s3_bucket.url), settings) as payloads:
        payloads.ping()
        name = fresh_name()
        payloads.put(name, views(b"abc"))
        assert fetch(payloads, name) == b"abc"
    assert s3_bucket.keys() == [name]


@pytest.mark.servers
@pytest.mark.filterwarnings("ignore:Unverified HTTPS request")
def test_tls_with_an_authority_of_ones_own() -> None:
    with NginxServer(tls=True) as nginx:
        (nginx.root / "bucket").mkdir()
        location = s3_location(f"s3://bucket/x?endpoint={nginx.endpoint}")
        given = {"access_key_id": "any", "secret_access_key": "body"}
        with S3Payloads(location, S3Settings.model_validate(given | {"tls_ca": str(nginx.ca)})) as payloads:
            name = fresh_name()
            payloads.put(name, views(b"abc"))
            assert fetch(payloads, name) == b"abc"
        with S3Payloads(location, S3Settings.model_validate(given)) as payloads:
            with pytest.raises(PermissionDenied, match=r"s3\.tls_ca"):
                fetch(payloads, name)
        with S3Payloads(location, S3Settings.model_validate(given | {"tls_verify": False})) as payloads:
            assert fetch(payloads, name) == b"abc"


def test_a_profile_or_a_ca_that_is_not_there(moto_bucket: S3Bucket, monkeypatch: Any) -> None:
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    with pytest.raises(ConfigError, match=r"s3\.profile"):
        open_s3(moto_bucket, profile="nobody")
    with pytest.raises(ConfigError, match=r"s3\.tls_ca /nowhere"):
        open_s3(moto_bucket, tls_ca="/nowhere")


class Silent:
    """A server that accepts connections and says nothing."""

    def __enter__(self) -> str:
        self._socket = socket.create_server(("127.0.0.1", 0))
        return f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    def __exit__(self, *exc: object) -> None:
        self._socket.close()


def chain_only(monkeypatch: Any) -> None:
    """No credentials but those of the test."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")


def test_a_token_service_that_hangs_has_a_deadline(
    moto_bucket: S3Bucket, monkeypatch: Any, tmp_path: Path
) -> None:
    chain_only(monkeypatch)
    (tmp_path / "token").write_text("token")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/x")
    settings = S3Settings.model_validate({"read_timeout_s": 0.3})
    with Silent() as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", url)
        with S3Payloads(s3_location(moto_bucket.url), settings) as payloads:
            began = time.monotonic()
            for call in (attempts(payloads, "read"), attempts(payloads, "put")):
                with pytest.raises(TransientError, match="credentials can't be had"):
                    call()
            assert time.monotonic() - began < PATIENCE_S / 2


def test_a_credential_process_that_fails(moto_bucket: S3Bucket, monkeypatch: Any, tmp_path: Path) -> None:
    chain_only(monkeypatch)
    config = tmp_path / "config"
    config.write_text("[default]\ncredential_process = /bin/sh -c 'echo hunter2 >&2; exit 1'\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    settings = S3Settings()
    with S3Payloads(s3_location(moto_bucket.url), settings) as payloads:
        for call in (payloads.ping, attempts(payloads, "read"), attempts(payloads, "put")):
            with pytest.raises(TransientError, match="credentials can't be had") as caught:
                call()
            assert "hunter2" not in "".join(traceback.format_exception(caught.value))


def test_a_body_that_drips_has_a_deadline(s3_proxy: Any) -> None:
    bucket, proxy = s3_proxy
    name = fresh_name()
    bucket.put(name, bytes(200_000))
    with open_s3(bucket, read_timeout_s=1.0) as payloads:
        done(lambda: fetch(payloads, name))
        proxy.inject("slow", methods=("GET",), bytes_per_s=1000)
        began = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            fetch(payloads, name)
        assert time.monotonic() - began < PATIENCE_S / 2  # of more than three minutes for all of it


_FORK = """
import os, sys
from kvstore.errors import PermissionDenied
from kvstore.payloads.s3.store import S3Payloads
from kvstore.conformance.arrange import fetch, views
from schemas.settings import S3Settings
from schemas.urls import s3_location

url, key, secret, name = sys.argv[1:]
settings = S3Settings.model_validate({"access_key_id": key, "secret_access_key": secret})
payloads = S3Payloads(s3_location(url), settings)
payloads.put(name, views(b"abc"))
list(payloads.list())
child = os.fork()
if not child:
    fresh = S3Payloads(s3_location(url), settings)
    told = 0
    for one in (payloads, fresh):
        try:
            fetch(one, name)
        except PermissionDenied as exc:
            told += "VLLM_WORKER_MULTIPROCESSING_METHOD=spawn" in str(exc)
    os._exit(0 if told == 2 and len(list(payloads.list())) == 1 else 3)
_, status = os.waitpid(child, 0)
sys.exit(os.waitstatus_to_exitcode(status) or (fetch(payloads, name) != b"abc"))
"""


@pytest.mark.slow
def test_a_child_of_a_process_that_uses_a_bucket_is_told_so(moto_bucket: S3Bucket) -> None:
    """In it obstore would wait for ever for threads that it has not."""
    keys = moto_bucket.credentials
    command = [sys.executable, "-W", "ignore", "-c", _FORK, moto_bucket.url]
    command += [keys.access_key, keys.secret_key, fresh_name()]
    done = subprocess.run(command, timeout=PATIENCE_S, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# Classification, without a server


@pytest.mark.parametrize(
    ("status", "code", "error", "words"),
    [
        (503, "SlowDown", Throttled, "503 SlowDown"),
        (429, "", Throttled, "429"),
        (400, "ThrottlingException", Throttled, "Throttling"),
        (503, "ServiceUnavailable", TransientError, "503"),
        (500, "InternalError", TransientError, "500"),
        (404, "NoSuchBucket", TransientError, "create the bucket"),
        (404, "", TransientError, "404"),
        (403, "AccessDenied", PermissionDenied, "s3:ListBucket"),
        (403, "SignatureDoesNotMatch", PermissionDenied, "secret access key is wrong"),
        (403, "RequestTimeTooSkewed", PermissionDenied, "clock"),
        (301, "PermanentRedirect", Redirected, "region"),
        (400, "AuthorizationHeaderMalformed", Redirected, "region"),
        (403, "QuotaExceeded", CapacityExceeded, "QuotaExceeded"),
        (507, "", CapacityExceeded, "507"),
    ],
)
def test_answers_are_sorted_by_what_to_do(status: int, code: str, error: type[Exception], words: str) -> None:
    made = classify("bucket b: read x", status, code, "a sentence")
    assert type(made) is error
    assert words in str(made)
    assert str(made).startswith("bucket b: read x: ")


def test_a_server_that_quotes_the_request_is_not_quoted() -> None:
    body = "<Code>SignatureDoesNotMatch</Code><StringToSign>AWS4 hunter2</StringToSign>"
    made = of_obstore("read x", RuntimeError(f"response error, status code: 403 Forbidden: {body}"))
    assert isinstance(made, PermissionDenied)
    assert "hunter2" not in str(made)


# The stack


def test_the_stack_is_what_its_repr_says(moto_bucket: S3Bucket) -> None:
    with open_store(tree(moto_bucket)) as store:
        text = repr(store.payloads)
    assert text.startswith("RangedPayloads(RetryingPayloads(BreakingPayloads(S3Payloads('")
    settings = Settings.model_validate(tree(moto_bucket))
    assert repr(open_payloads(settings)).startswith("RetryingPayloads(S3Payloads('")


def test_a_long_read_is_ranges_side_by_side(s3_proxy: Any) -> None:
    bucket, proxy = s3_proxy
    name, data = fresh_name(), bytes(range(256)) * 4096
    bucket.put(name, data)
    with open_store(tree(bucket, range_bytes=256 << 10)) as store:
        assert fetch(store.payloads, name) == data
    gets = [entry for entry in proxy.log if entry.method == "GET"]
    assert sorted(entry.range for entry in gets) == sorted(
        f"bytes={at}-{at + (256 << 10) - 1}" for at in range(0, 1 << 20, 256 << 10)
    )


@pytest.mark.parametrize("fault", ["status503", "reset", "truncate", "hang"])
def test_a_range_that_fails_is_asked_for_again_alone(s3_proxy: Any, fault: str) -> None:
    bucket, proxy = s3_proxy
    name, data = fresh_name(), bytes(range(256)) * 4096
    bucket.put(name, data)
    short = {"stall_timeout_s": 0.5} if fault == "hang" else {}
    with open_store(tree(bucket, range_bytes=256 << 10, backoff_s=0.01, attempts=8, **short)) as store:

        def alone() -> bool:
            proxy.forget()
            proxy.inject(fault, methods=("GET",), times=1)
            assert fetch(store.payloads, name) == data
            assert proxy.injected[fault] == 1
            return proxy.counts["GET"] == 5

        until(alone)  # on a machine that stands still for a moment others seem to hang as well


def test_many_threads_share_the_clients(s3_bucket: S3Bucket) -> None:
    with open_store(tree(s3_bucket, range_bytes=64 << 10)) as store:
        contents = {fresh_name(): bytes([i]) * 200_000 for i in range(16)}

        def both(name: str) -> bytes | None:
            store.payloads.put(name, views(contents[name]))
            return fetch(store.payloads, name)

        with ThreadPoolExecutor(16) as pool:
            assert list(pool.map(both, contents)) == list(contents.values())
