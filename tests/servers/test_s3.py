"""The S3 servers that other tests stand on do what those take for granted."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError, ReadTimeoutError

from tests import conftest
from tests.servers.redis import ServerError
from tests.servers.s3.bucket import Credentials, S3Bucket, boto3_client
from tests.servers.s3.ceph import CephServer
from tests.servers.s3.nginx import NginxServer
from tests.servers.s3.servers import MotoServer, S3Server
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(params=["moto_bucket", pytest.param("s3_bucket", marks=pytest.mark.servers)])
def bucket(request: pytest.FixtureRequest) -> S3Bucket:
    found: S3Bucket = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def nginx() -> Iterator[NginxServer]:
    with NginxServer() as server:
        yield server


def failure(caught: pytest.ExceptionInfo[ClientError]) -> tuple[int, str]:
    """The status and the code of an answer."""
    answer: dict[str, Any] = caught.value.response
    return answer["ResponseMetadata"]["HTTPStatusCode"], answer["Error"]["Code"]


def gone(pid: int) -> bool:
    return until(lambda: not Path(f"/proc/{pid}").exists())


def test_a_bucket_is_empty_and_a_tests_own(bucket: S3Bucket) -> None:
    assert bucket.keys() == []
    bucket.put("a/b", b"\x00\xff" * 1000)
    bucket.put("a", b"")
    bucket.direct.put_object(Bucket=bucket.bucket, Key="some/prefixed", Body=b"not below the prefix")
    assert bucket.keys() == ["a", "a/b"]
    assert bucket.get("a/b") == b"\x00\xff" * 1000
    bucket.delete("a/b")
    bucket.delete("a/b")
    assert bucket.keys() == ["a"]
    with pytest.raises(KeyError):
        bucket.get("a/b")


def test_a_bucket_says_how_to_reach_it(bucket: S3Bucket) -> None:
    start, _, query = bucket.url.partition("?")
    assert start == f"s3://{bucket.bucket}/{bucket.prefix}"
    assert query == f"endpoint={bucket.endpoint}&region=us-east-1"
    assert set(bucket.settings["s3"]) == {"access_key_id", "secret_access_key"}


def test_of_racing_creations_one_wins(bucket: S3Bucket) -> None:
    def create(number: int) -> bool:
        try:
            bucket.client().put_object(
                Bucket=bucket.bucket, Key=bucket.name("k"), Body=b"%d" % number, IfNoneMatch="*"
            )
        except ClientError as exc:
            assert exc.response["ResponseMetadata"]["HTTPStatusCode"] in (409, 412)
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(create, range(8)))
    assert sum(won) == 1
    assert bucket.get("k") == b"%d" % won.index(True)
    assert not create(99)


def test_ranges(bucket: S3Bucket) -> None:
    content = os.urandom(100_000)
    bucket.put("k", content)

    def get(span: str) -> bytes:
        answer = bucket.client().get_object(Bucket=bucket.bucket, Key=bucket.name("k"), Range=span)
        with closing(answer["Body"]) as body:
            return bytes(body.read())

    assert get("bytes=5-9") == content[5:10]
    assert get("bytes=99990-200000") == content[99990:]
    assert get("bytes=-7") == content[-7:]
    with pytest.raises(ClientError) as caught:
        get("bytes=100000-100009")
    assert failure(caught) == (416, "InvalidRange")


def test_multipart_uploads(bucket: S3Bucket) -> None:
    client, target = bucket.client(), {"Bucket": bucket.bucket, "Key": bucket.name("big")}
    pieces = [os.urandom(5 << 20), b"tail"]
    upload = {**target, "UploadId": client.create_multipart_upload(**target)["UploadId"]}
    parts = []
    for number, piece in enumerate(pieces, 1):
        tag = client.upload_part(**upload, PartNumber=number, Body=piece)["ETag"]
        parts.append({"PartNumber": number, "ETag": tag})
    assert bucket.keys() == []
    assert bucket.uploads() == ["big"]
    client.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts})
    assert bucket.get("big") == b"".join(pieces)
    assert bucket.uploads() == []


def test_many_deletions_in_one_request(bucket: S3Bucket) -> None:
    for key in "abc":
        bucket.put(key, b"x")
    # Of the absent one, too: it is not there afterwards.
    doomed = [{"Key": bucket.name(key)} for key in ("a", "c", "absent")]
    answer = bucket.client().delete_objects(Bucket=bucket.bucket, Delete={"Objects": doomed})
    assert "Errors" not in answer
    assert bucket.keys() == ["b"]


def test_ceph_asks_who_you_are_and_what_you_may(s3_server: S3Server, s3_bucket: S3Bucket) -> None:
    if s3_server.kind != "ceph":
        pytest.skip("an imitation lets everybody in")
    s3_bucket.put("k", b"x")
    for credentials, code in (
        (Credentials(s3_server.access_key, "wrong"), "SignatureDoesNotMatch"),
        (Credentials("nobody", "whatever"), "InvalidAccessKeyId"),
        (s3_server.stranger(), "AccessDenied"),
    ):
        client = s3_server.client(credentials=credentials)
        for call, body in ((client.get_object, {}), (client.put_object, {"Body": b"y"})):
            with pytest.raises(ClientError) as caught:
                call(Bucket=s3_bucket.bucket, Key=s3_bucket.name("k"), **body)
            assert failure(caught) == (403, code)
    assert s3_bucket.get("k") == b"x"


def test_a_server_hangs_dies_and_comes_back_with_its_buckets(private_s3: S3Server) -> None:
    bucket = private_s3.new_bucket()
    bucket.put("k", b"kept")
    with closing(boto3_client(private_s3.endpoint, private_s3.region, private_s3.owner, 0.3)) as hasty:
        private_s3.pause()
        with pytest.raises(ReadTimeoutError):
            hasty.list_buckets()
        private_s3.resume()
        assert bucket.get("k") == b"kept"
        for end in (private_s3.kill, private_s3.stop):
            pids = [process.pid for process in private_s3.processes]
            end()
            assert not private_s3.running
            assert all(gone(pid) for pid in pids)
            with pytest.raises(EndpointConnectionError):
                hasty.list_buckets()
            private_s3.start()
            assert private_s3.kind != "ceph" or bucket.get("k") == b"kept"
    pids, folder = [process.pid for process in private_s3.processes], private_s3.folder
    private_s3.pause()
    private_s3.close()
    assert all(gone(pid) for pid in pids)
    assert not folder.exists()


def test_moto_can_be_emptied(moto_server: MotoServer) -> None:
    bucket = moto_server.new_bucket()
    moto_server.reset()
    with pytest.raises(ClientError) as caught:
        bucket.put("k", b"x")
    assert failure(caught) == (404, "NoSuchBucket")
    with pytest.raises(NotImplementedError):
        moto_server.stranger()


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    ["servers.MotoServer", pytest.param("ceph.CephServer", marks=pytest.mark.servers)],
)
def test_no_process_outlives_its_parent(kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module, name = kind.split(".")
    script = (
        f"import time; from tests.servers.s3.{module} import {name}\n"
        f"s = {name}().start(); print(*(p.pid for p in s.processes), flush=True); time.sleep(600)"
    )
    # Killed, it cannot remove its folder.
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert pids
        assert all(Path(f"/proc/{pid}").exists() for pid in pids)
        parent.kill()
    assert all(gone(pid) for pid in pids)
    shutil.rmtree(tmp_path)


@pytest.mark.servers
def test_nginx_keeps_objects_as_files(nginx: NginxServer) -> None:
    with closing(boto3_client(nginx.endpoint, "us-east-1", Credentials("any", "any"))) as client:
        content = os.urandom(3 << 20)
        assert client.put_object(Bucket="b", Key="x/y", Body=content)["ETag"]
        assert (nginx.root / "b/x/y").read_bytes() == content
        ranged = client.get_object(Bucket="b", Key="x/y", Range="bytes=1000000-1999999")
        with closing(ranged["Body"]) as body:
            assert body.read() == content[1_000_000:2_000_000]
        assert client.head_object(Bucket="b", Key="x/y")["ContentLength"] == len(content)
        client.delete_object(Bucket="b", Key="x/y")
        assert not (nginx.root / "b/x/y").exists()
    nginx.close()
    assert gone(nginx.pid)
    assert not nginx.root.exists()


def test_without_ceph_tests_fail_or_fall_back_loudly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CephServer, "missing", staticmethod(lambda: ["radosgw"]))
    monkeypatch.setattr(conftest, "can_install", lambda: True)
    with pytest.raises(ServerError, match=r"radosgw not found: run `make setup`"):
        CephServer()
    with pytest.raises(pytest.fail.Exception, match="radosgw not found"):
        next(conftest._started_s3())
    monkeypatch.setattr(conftest, "can_install", lambda: False)
    fallback = conftest._started_s3()
    assert next(fallback).kind == "moto"
    assert next(fallback, None) is None
