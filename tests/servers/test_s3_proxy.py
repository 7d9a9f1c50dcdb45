"""The proxy passes on what it is not told to break, and breaks what it is."""

from __future__ import annotations

import http.client
import io
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import obstore
import pytest
from boto3.s3.transfer import TransferConfig
from botocore.exceptions import (
    ClientError,
    ConnectionClosedError,
    EndpointConnectionError,
    HTTPClientError,
    IncompleteReadError,
    ReadTimeoutError,
    ResponseStreamingError,
)
from obstore.exceptions import AlreadyExistsError
from obstore.store import S3Store

from tests.servers.s3.bucket import S3Bucket, boto3_client
from tests.servers.s3.faults import ANSWERS, FAULTS
from tests.servers.s3.proxy import S3Proxy
from tests.waiting import PATIENCE_S

CONTENT = bytes(range(256)) * 4096
HALF = len(CONTENT) // 2


class Through:
    """A client whose requests go through the proxy, and which tries once."""

    def __init__(self, bucket: S3Bucket, proxy: S3Proxy, read_timeout_s: float = 20.0) -> None:
        self.bucket, self.proxy = bucket, proxy
        self.client = boto3_client(bucket.endpoint, bucket.region, bucket.credentials, read_timeout_s)

    def get(self, key: str = "k", **more: str) -> bytes:
        target = {"Bucket": self.bucket.bucket, "Key": self.bucket.name(key)}
        # Not the body as a context: that is urllib3's, which raises errors of its own.
        with closing(self.client.get_object(**target, **more)["Body"]) as body:
            return bytes(body.read())

    def put(self, content: Any = CONTENT, key: str = "k", **more: str) -> None:
        target = {"Bucket": self.bucket.bucket, "Key": self.bucket.name(key)}
        self.client.put_object(**target, Body=content, **more)

    def head(self, key: str = "k") -> Any:
        return self.client.head_object(Bucket=self.bucket.bucket, Key=self.bucket.name(key))


@pytest.fixture
def through(moto_proxy: tuple[S3Bucket, S3Proxy]) -> Iterator[Through]:
    """With an object `k`."""
    found = Through(*moto_proxy)
    found.bucket.put("k", CONTENT)
    with closing(found.client):
        yield found


@pytest.fixture
def hasty(through: Through) -> Iterator[Through]:
    """As `through`, with a client that does not wait for long."""
    found = Through(through.bucket, through.proxy, read_timeout_s=0.7)
    with closing(found.client):
        yield found


@pytest.fixture(params=["moto_proxy", pytest.param("s3_proxy", marks=pytest.mark.servers)])
def bucket_and_proxy(request: pytest.FixtureRequest) -> tuple[S3Bucket, S3Proxy]:
    found: tuple[S3Bucket, S3Proxy] = request.getfixturevalue(request.param)
    return found


def refused(call: Callable[[], object]) -> tuple[int, str]:
    """The status and the code of an answer."""
    with pytest.raises(ClientError) as caught:
        call()
    answer: dict[str, Any] = caught.value.response
    return answer["ResponseMetadata"]["HTTPStatusCode"], answer["Error"]["Code"]


@pytest.mark.slow
def test_what_boto3_sends_arrives_and_comes_back(bucket_and_proxy: tuple[S3Bucket, S3Proxy]) -> None:
    bucket, proxy = bucket_and_proxy
    through, content = Through(bucket, proxy), os.urandom(6 << 20)
    with closing(through.client) as client:
        through.put(content)
        # With Expect: 100-continue, as anything is that can be read only once.
        through.put(io.BytesIO(content), "once")
        assert bucket.get("k") == bucket.get("once") == content
        assert through.get() == content
        assert through.get(Range="bytes=5-9") == content[5:10]
        assert refused(lambda: through.put(io.BytesIO(content), IfNoneMatch="*")) == (
            412,
            "PreconditionFailed",
        )
        assert refused(lambda: through.get("absent")) == (404, "NoSuchKey")
        assert through.head()["ContentLength"] == len(content)
        parts = TransferConfig(multipart_threshold=5 << 20, multipart_chunksize=5 << 20)
        client.upload_fileobj(io.BytesIO(content), bucket.bucket, bucket.name("parts"), Config=parts)
        assert bucket.get("parts") == content
        doomed = [{"Key": bucket.name(key)} for key in bucket.keys()]
        client.delete_objects(Bucket=bucket.bucket, Delete={"Objects": doomed})
        assert client.list_objects_v2(Bucket=bucket.bucket, Prefix=bucket.prefix)["KeyCount"] == 0
    assert proxy.injected == {}
    assert proxy.counts == {"PUT": 5, "GET": 4, "HEAD": 1, "POST": 3}
    assert proxy.bytes_in["PUT"] >= 3 * len(content)
    assert proxy.bytes_out["GET"] > len(content)
    ranged = next(each for each in proxy.log if each.range)
    assert ranged.path == f"/{bucket.bucket}/{bucket.name('k')}"
    assert (ranged.method, ranged.range, ranged.status, ranged.bytes_out) == ("GET", "bytes=5-9", 206, 5)
    proxy.forget()
    assert (proxy.log, proxy.counts) == ([], {})


@pytest.mark.parametrize("unsigned", [False, True])
def test_what_obstore_sends_arrives_and_comes_back(
    bucket_and_proxy: tuple[S3Bucket, S3Proxy], unsigned: bool
) -> None:
    bucket, proxy = bucket_and_proxy
    store = S3Store(
        bucket.bucket,
        prefix=bucket.prefix,
        endpoint=proxy.endpoint,
        region=bucket.region,
        access_key_id=bucket.credentials.access_key,
        secret_access_key=bucket.credentials.secret_key,
        virtual_hosted_style_request=False,
        unsigned_payload=unsigned,
        client_options={"allow_http": True},
    )
    content = os.urandom(6 << 20)
    obstore.put(store, "k", content, use_multipart=False)
    obstore.put(store, "parts", content, use_multipart=True, chunk_size=5 << 20)
    assert bucket.get("k") == bucket.get("parts") == content
    assert bytes(obstore.get(store, "k").bytes()) == content
    assert bytes(obstore.get_range(store, "k", start=5, length=5)) == content[5:10]
    with pytest.raises(AlreadyExistsError):
        obstore.put(store, "k", b"other", mode="create", use_multipart=False)
    assert [item["path"] for item in obstore.list(store).collect()] == ["k", "parts"]
    obstore.delete(store, ["k", "parts"])
    assert bucket.keys() == []


def test_chunked_bodies_pass(through: Through) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", through.proxy.port, timeout=PATIENCE_S)
    pieces = [os.urandom(300_000), b"x", os.urandom(300_000)]
    path = f"/{through.bucket.bucket}/{through.bucket.name('chunked')}"
    with closing(connection):
        for _ in range(2):
            connection.request(
                "PUT", path, iter(pieces), {"Transfer-Encoding": "chunked"}, encode_chunked=True
            )
            assert connection.getresponse().read() == b""
    assert through.bucket.get("chunked") == b"".join(pieces)


@pytest.mark.parametrize("fault", sorted(ANSWERS))
def test_answers_instead_of_the_servers(through: Through, fault: str) -> None:
    expected = {
        "status500": (500, "InternalError"),
        "status503": (503, "SlowDown"),
        "forbid": (403, "AccessDenied"),
        "no_bucket": (404, "NoSuchBucket"),
        "no_key": (404, "NoSuchKey"),
        # What boto3 makes of a body that is no XML, which unclosed elements see to.
        "html404": (404, "404"),
    }[fault]
    through.proxy.inject(fault)
    assert refused(through.get) == expected
    assert refused(lambda: through.put(b"other")) == expected
    assert refused(lambda: through.put(io.BytesIO(CONTENT[::-1]))) == expected
    assert refused(through.head)[0] == expected[0]
    assert through.proxy.injected == {fault: 4}
    assert [each.status for each in through.proxy.log] == [expected[0]] * 4
    through.proxy.heal()
    assert through.get() == CONTENT


@pytest.mark.slow
def test_a_hang_ends_when_the_client_gives_up_or_all_is_healed(through: Through, hasty: Through) -> None:
    hasty.proxy.inject("hang")
    began = time.monotonic()
    with pytest.raises(ReadTimeoutError):
        hasty.get()
    assert 0.6 < time.monotonic() - began < 60
    # Well before the client would give up by itself.
    healer = threading.Timer(0.1, hasty.proxy.heal)
    healer.start()
    with pytest.raises(ConnectionClosedError):
        through.put(b"other")
    healer.join()
    assert through.get() == CONTENT
    assert [each.status for each in hasty.proxy.log] == [None, None, 200]


@pytest.mark.slow
def test_a_body_that_hangs_halfway(hasty: Through) -> None:
    hasty.proxy.inject("hang_body", times=2)
    with pytest.raises(ReadTimeoutError):
        hasty.get()
    with pytest.raises(ReadTimeoutError):
        hasty.put(CONTENT[::-1])
    assert hasty.get() == CONTENT
    assert [each.status for each in hasty.proxy.log] == [200, None, 200]
    assert hasty.proxy.log[0].bytes_out == hasty.proxy.log[1].bytes_in == HALF


def test_resets(through: Through) -> None:
    through.proxy.inject("reset_before", times=2)
    for call in (through.get, lambda: through.put(b"other")):
        with pytest.raises(ConnectionClosedError):
            call()
    assert [each.bytes_in for each in through.proxy.log] == [0, 0]
    through.proxy.inject("reset", times=2)
    with pytest.raises(ResponseStreamingError):
        through.get()
    assert through.proxy.log[2].bytes_out == HALF
    # A reset that meets it while it sends is another exception than one while it waits.
    with pytest.raises(HTTPClientError):
        through.put(CONTENT[::-1])
    assert through.proxy.log[3].bytes_in == HALF
    assert through.get() == CONTENT
    assert through.proxy.injected == {"reset_before": 2, "reset": 2}


def test_an_answer_that_is_lost(through: Through) -> None:
    through.proxy.inject("lost_answer", methods=["PUT"], times=1)
    with pytest.raises(ConnectionClosedError):
        through.put(b"done", "new", IfNoneMatch="*")
    assert through.bucket.get("new") == b"done"
    assert refused(lambda: through.put(b"again", "new", IfNoneMatch="*"))[0] == 412


def test_bodies_that_are_not_what_they_should_be(through: Through) -> None:
    through.proxy.inject("truncate", times=1)
    with pytest.raises((IncompleteReadError, ResponseStreamingError)):
        through.get()
    through.proxy.inject("short", times=2)
    assert through.get() == CONTENT[:HALF]
    answer = through.client.get_object(
        Bucket=through.bucket.bucket, Key=through.bucket.name("k"), Range="bytes=100-199"
    )
    with closing(answer["Body"]) as body:
        assert body.read() == CONTENT[100:150]
    assert answer["ContentRange"] == f"bytes 100-149/{len(CONTENT)}"
    through.proxy.inject("flip", times=1)
    got = through.get()
    assert [i for i in range(len(CONTENT)) if got[i] != CONTENT[i]] == [HALF]
    assert through.get() == CONTENT
    # A PUT's answer has no body to spoil.
    through.proxy.inject("flip")
    through.put(b"other")
    assert through.proxy.injected == {"truncate": 1, "short": 2, "flip": 1}


@pytest.mark.slow
def test_slowness(through: Through) -> None:
    def took(call: Callable[[], object]) -> float:
        began = time.monotonic()
        call()
        return time.monotonic() - began

    through.proxy.inject("delay", seconds=0.2, times=1)
    assert took(through.get) > 0.2
    through.proxy.inject("slow", bytes_per_s=len(CONTENT) / 0.3)
    assert took(through.get) > 0.25
    assert took(lambda: through.put(CONTENT)) > 0.25
    through.proxy.inject("slow", bytes_per_s=1)
    healer = threading.Timer(0.1, through.proxy.heal)
    healer.start()
    assert took(through.get) < PATIENCE_S
    healer.join()
    assert through.bucket.get("k") == CONTENT


def test_nobody_listens(through: Through) -> None:
    assert through.get() == CONTENT
    for _ in range(2):
        through.proxy.refuse()
        for _ in range(2):
            with pytest.raises(EndpointConnectionError):
                through.get()
        through.proxy.heal()
        assert through.get() == CONTENT
    assert through.proxy.injected == {"refuse": 2}


def test_rules_say_which_requests(through: Through) -> None:
    proxy = through.proxy
    with pytest.raises(ValueError, match="no such fault"):
        proxy.inject("gremlins")
    proxy.inject("status503", methods=["PUT", "HEAD"], key="prefix/k")
    assert through.get() == CONTENT
    through.put(b"x", "other")
    assert refused(through.put)[0] == refused(through.head)[0] == 503
    proxy.heal()
    proxy.inject("no_key", skip=2, times=1)
    proxy.inject("status500", key="list-type=2")
    through.get(), through.get()
    assert refused(through.get)[0] == 404
    through.get()
    assert refused(lambda: through.client.list_objects_v2(Bucket=through.bucket.bucket))[0] == 500
    proxy.heal()
    proxy.forget()
    proxy.inject("status503", probability=0.5)
    for _ in range(40):
        try:
            through.head()
        except ClientError:
            pass
    assert 8 < proxy.injected["status503"] < 32
    assert proxy.counts == {"HEAD": 40}


def test_every_fault_is_named_once() -> None:
    assert set(ANSWERS) < set(FAULTS)
    assert set().union(*FAULTS.values()) == {"request", "upload", "download", "answer"}


def test_a_dead_server_and_one_that_came_back(private_s3: Any) -> None:
    bucket = private_s3.new_bucket()
    with S3Proxy(private_s3.endpoint) as proxy, closing(private_s3.client(proxy.endpoint)) as client:
        client.put_object(Bucket=bucket.bucket, Key="k", Body=b"x")
        private_s3.kill()
        with pytest.raises(ConnectionClosedError):
            client.put_object(Bucket=bucket.bucket, Key="k", Body=b"y")
        private_s3.start()
        if private_s3.kind == "ceph":
            client.put_object(Bucket=bucket.bucket, Key="k", Body=b"z")


@pytest.mark.slow
def test_nothing_is_left_of_it(through: Through) -> None:
    proxy = S3Proxy(through.proxy.endpoint)
    before = threading.active_count()
    proxy.inject("hang")
    with closing(boto3_client(proxy.endpoint, "us-east-1", through.bucket.credentials)) as client:

        def call() -> None:
            with pytest.raises(ConnectionClosedError):
                client.list_buckets()

        caller = threading.Thread(target=call)
        caller.start()
        while not proxy.injected:
            time.sleep(0.01)
        proxy.close()
        caller.join(PATIENCE_S)
    assert not caller.is_alive()
    assert threading.active_count() < before
