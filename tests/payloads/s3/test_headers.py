"""What every request says: whose the bucket is, and how its payloads are to be encrypted."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from kvstore.admin.backends import Cache
from kvstore.admin.doctor.payloads import check_bucket, check_payloads
from kvstore.admin.doctor.reports import Check
from kvstore.build import load_settings
from kvstore.conformance.arrange import fetch, fresh_name, views
from kvstore.errors import ConfigError, PermissionDenied
from kvstore.payloads.s3.strays import S3Strays
from tests.payloads.s3.test_store import open_s3
from tests.servers.s3.bucket import S3Bucket
from tests.servers.s3.hostile import HostileServer, answer, listing
from tests.servers.s3.http import Head

OWNER, KEY = "111122223333", "arn:aws:kms:us-east-1:111122223333:key/1234abcd-12ab-34cd-56ef-1234567890ab"
_PART = 5 << 20
_DENIED = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"


class Account:
    """An S3 server as far as these headers go, of one object. It refuses whoever names another owner."""

    def __init__(self, owner: str = OWNER) -> None:
        self.owner = owner
        self.body = b""
        self.encrypted: dict[str, str] = {}
        #: Whether it looks at the two headers, as AWS does.
        self.looks = True
        #: The sentence of a refusal to encrypt.
        self.refuses = ""

    def __call__(self, request: Head, body: bytes) -> Iterator[bytes]:
        method, target, _ = request.words
        given = request.headers
        if self.looks and given.get("x-amz-expected-bucket-owner", self.owner) != self.owner:
            return answer("403 Forbidden", b"" if method == "HEAD" else _DENIED)
        if "?uploads=" in target and method == "POST":
            return answer("200 OK", b"<R><UploadId>u</UploadId></R>")
        if method == "POST" and "uploadId" in target:
            return answer(
                "200 OK", b"<CompleteMultipartUploadResult><ETag>e</ETag></CompleteMultipartUploadResult>"
            )
        if "uploads" in target:
            page = b"<ListMultipartUploadsResult><Bucket>bucket</Bucket></ListMultipartUploadsResult>"
            return answer("200 OK", page)
        if "list-type" in target:
            return answer("200 OK", listing())
        if "delete" in target:
            return answer("200 OK", b"<DeleteResult/>")
        if method == "DELETE":
            return iter([b"HTTP/1.1 204 No Content\r\n\r\n"])
        if method == "PUT":
            if self.refuses:
                said = f"<Error><Code>AccessDenied</Code><Message>{self.refuses}</Message></Error>"
                return answer("403 Forbidden", said.encode())
            self.body = body
            names = [name for name in given if name.startswith("x-amz-server-side") and self.looks]
            self.encrypted = {name.replace("-", "_"): given[name] for name in names}
            return answer("200 OK")
        if method == "HEAD":
            return answer("200 OK", **self.encrypted)
        first, last = map(int, re.findall(r"\d+", given["range"]))
        part = self.body[first : last + 1]
        span = f"bytes {first}-{first + len(part) - 1}/{len(self.body)}"
        return answer("206 Partial Content", part, content_range=span, **self.encrypted)


def use_everything(server: HostileServer, **s3: Any) -> None:
    with server.open(multipart_bytes=_PART, part_bytes=_PART, **s3) as payloads:
        payloads.put(fresh_name(), views(b"abc"))
        assert fetch(payloads, fresh_name()) == b"abc"
        payloads.put(fresh_name(), views(bytes(2 * _PART)))
        payloads.put(fresh_name(), views(b"abc"))
        payloads.delete([fresh_name()])
        list(payloads.list())
        payloads.ping()
        payloads.abort_old_uploads()
        with closing(S3Strays(payloads._location, payloads._settings)) as strays:
            list(strays.list())
            strays.remove([], now_s=0, older_than_s=0)


def signed(request: Head) -> set[str]:
    found = re.search(r"SignedHeaders=([^, ]+)", request.headers["authorization"])
    assert found is not None
    return set(found[1].split(";"))


def test_every_request_names_the_expected_owner_and_signs_it() -> None:
    with HostileServer(Account()) as server:
        use_everything(server, expected_bucket_owner=OWNER)
        kinds = {(each.words[0], "uploadId" in each.words[1]) for each in server.requests}
        assert {("POST", True), ("PUT", True), ("PUT", False), ("GET", False), ("DELETE", False)} <= kinds
        for request in server.requests:
            assert request.headers.get("x-amz-expected-bucket-owner") == OWNER, request.words
            assert "x-amz-expected-bucket-owner" in signed(request), request.words


def test_every_put_names_the_key_and_signs_it() -> None:
    with HostileServer(Account()) as server:
        use_everything(server, sse_kms_key_id=KEY)
        puts = 0
        for request in server.requests:
            method, target, _ = request.words
            whole = method == "PUT" and "uploadId" not in target
            if whole or (method == "POST" and "?uploads" in target):
                puts += 1
                assert request.headers["x-amz-server-side-encryption"] == "aws:kms"
                assert request.headers["x-amz-server-side-encryption-aws-kms-key-id"] == KEY
                wanted = {"x-amz-server-side-encryption", "x-amz-server-side-encryption-aws-kms-key-id"}
                assert wanted <= signed(request)
            else:
                # S3 answers 400 to a read that names it.
                assert "x-amz-server-side-encryption" not in request.headers
        assert puts == 4


@pytest.mark.slow
def test_without_the_settings_no_request_says_anything() -> None:
    with HostileServer(Account()) as server:
        use_everything(server)
        for request in server.requests:
            assert not [name for name in request.headers if "owner" in name or "encryption" in name]


def test_a_bucket_of_another_account_is_neither_written_nor_read() -> None:
    account = Account(owner="999988887777")
    with HostileServer(account) as server, server.open(expected_bucket_owner=OWNER) as payloads:
        for call in (
            lambda: payloads.put(fresh_name(), views(b"prompt")),
            lambda: fetch(payloads, fresh_name(), 10),
            lambda: payloads.delete([fresh_name()]),
            lambda: list(payloads.list()),
        ):
            with pytest.raises(PermissionDenied):
                call()
    assert account.body == b""


@pytest.mark.parametrize(
    "wrong", [{"expected_bucket_owner": "my-account"}, {"sse_kms_key_id": "a key\nx-amz-acl: public-read"}]
)
def test_values_that_are_none_are_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        load_settings({"payloads": "s3://b", "index": "redis://x", "s3": wrong}, {})


# What a real server, or moto, makes of them


def test_moto_encrypts_with_the_key_and_says_so(moto_bucket: S3Bucket) -> None:
    with open_s3(moto_bucket, sse_kms_key_id=KEY, multipart_bytes=_PART, part_bytes=_PART) as payloads:
        for size in (100, 2 * _PART):
            name = fresh_name()
            payloads.put(name, views(bytes(size)))
            assert fetch(payloads, name, size) == bytes(size)
            head = moto_bucket.client().head_object(Bucket=moto_bucket.bucket, Key=moto_bucket.name(name))
            assert (head["ServerSideEncryption"], head["SSEKMSKeyId"]) == ("aws:kms", KEY)
        assert payloads.encryption() == ("aws:kms", KEY)
    assert len(moto_bucket.keys()) == 2


def test_a_server_takes_requests_that_name_an_owner(s3_bucket: S3Bucket) -> None:
    """Signatures included: Ceph checks them, whatever it makes of the owner."""
    with open_s3(s3_bucket, expected_bucket_owner=OWNER, multipart_bytes=_PART, part_bytes=_PART) as payloads:
        payloads.ping()
        for size in (100, 2 * _PART):
            name = fresh_name()
            payloads.put(name, views(bytes(size)))
            assert fetch(payloads, name, size) == bytes(size)


# The doctor


def examine(server: HostileServer, **s3: Any) -> dict[str, Check]:
    tree = {
        "payloads": f"s3://bucket/pre?endpoint={server.endpoint}",
        "index": "redis://127.0.0.1:1",
        "s3": {"access_key_id": "quick-tests", "secret_access_key": "not-checked", "attempts": 1} | s3,
    }
    with Cache(load_settings(tree, {})) as cache:
        checks = list(check_payloads(cache, lambda: 0.0))
        if all(check.state == "ok" for check in checks):
            checks += check_bucket(cache)
    return {check.name: check for check in checks}


def test_the_doctor_says_that_owner_and_key_are_kept() -> None:
    with HostileServer(Account()) as server:
        found = examine(server, expected_bucket_owner=OWNER, sse_kms_key_id=KEY)
        assert {name: check.state for name, check in found.items()} == {
            "payloads": "ok",
            "bucket owner": "ok",
            "bucket encryption": "ok",
        }
        assert KEY in found["bucket encryption"].found
        assert list(examine(server)) == ["payloads"]


def test_the_doctor_names_the_owner_that_is_wrong() -> None:
    with HostileServer(Account(owner="999988887777")) as server:
        check = examine(server, expected_bucket_owner=OWNER)["payloads"]
        assert check.state == "problem"
        assert f"not account {OWNER}'s: correct s3.expected_bucket_owner" in check.advice


@pytest.mark.slow
def test_the_doctor_names_the_right_to_the_key_that_is_missing() -> None:
    account = Account()
    account.refuses = "User: x is not authorized to perform: kms:GenerateDataKey on resource: k"
    with HostileServer(account) as server:
        check = examine(server, sse_kms_key_id=KEY, expected_bucket_owner=OWNER)["payloads"]
        assert check.state == "problem"
        assert check.advice.startswith("allow kms:GenerateDataKey and kms:Decrypt")


def test_the_doctor_sees_a_server_that_takes_no_notice() -> None:
    account = Account()
    account.looks = False
    with HostileServer(account) as server:
        found = examine(server, expected_bucket_owner=OWNER, sse_kms_key_id=KEY)
        assert (found["bucket owner"].state, found["bucket encryption"].state) == ("warning", "problem")


def test_the_doctor_sees_another_key(moto_bucket: S3Bucket) -> None:
    account = Account()
    with HostileServer(account) as server:
        alias = examine(server, sse_kms_key_id="alias/kvstore")["bucket encryption"]
        assert alias.state == "ok"
        account.__class__ = type("Other", (Account,), {"__call__": _with_other_key})
        assert examine(server, sse_kms_key_id=KEY)["bucket encryption"].state == "problem"


def _with_other_key(self: Account, request: Head, body: bytes) -> Iterator[bytes]:
    if request.words[0] == "PUT":
        request.headers["x-amz-server-side-encryption-aws-kms-key-id"] = KEY[:-1] + "0"
    return Account.__call__(self, request, body)
