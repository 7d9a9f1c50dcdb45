"""Buckets at AWS, as the documents name them: without an endpoint, and often without region or keys.

tests/servers/s3/aws.py answers for AWS.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from kvstore.admin.doctor.payloads import advice_on
from kvstore.build import load_settings
from kvstore.conformance.arrange import fetch, fresh_name, views
from kvstore.errors import ConfigError, KVStoreError, PermissionDenied, TransientError
from kvstore.payloads.s3.errors import classify
from kvstore.payloads.s3.store import S3Payloads
from schemas.settings import S3Settings
from schemas.urls import s3_location
from tests.servers.s3.aws import PATIENT, ROLE, Aws, Key, Metadata
from tests.waiting import PATIENCE_S, done

URL = "s3://my-bucket/kvstore"
IN_EUROPE = f"{URL}?region=eu-central-1"
_CHILD = "tests.payloads.s3.aws_child"


def at(url: str, **s3: Any) -> S3Payloads:
    return S3Payloads(s3_location(url), S3Settings.model_validate(PATIENT | s3))


def use(environ: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)


def everything(url: str, **s3: Any) -> None:
    """Makes each kind of request, of both clients."""
    with at(url, **s3) as payloads:
        payloads.ping()
        name = fresh_name()
        payloads.put(name, views(b"abc"))
        assert fetch(payloads, name) == b"abc"
        assert name in [each.name for each in payloads.list()]
        payloads.delete([name])
        assert fetch(payloads, name) is None


CALLS: dict[str, Callable[[S3Payloads], object]] = {
    "put": lambda payloads: payloads.put(fresh_name(), views(b"abc")),
    "read": lambda payloads: fetch(payloads, fresh_name()),
    "delete": lambda payloads: payloads.delete([fresh_name()]),
    "list": lambda payloads: list(payloads.list()),
    "ping": lambda payloads: payloads.ping(),
}


@pytest.fixture
def user(moto_aws: Aws, monkeypatch: pytest.MonkeyPatch) -> Key:
    """A user's key in the environment, and the bucket of URL in Europe."""
    moto_aws.make("my-bucket", "eu-central-1")
    key = moto_aws.user()
    use(key.environ, monkeypatch)
    return key


def hosts(aws: Aws) -> set[tuple[str, str]]:
    return {(seen.host, seen.region) for seen in aws.seen}


class TestRegions:
    def test_both_clients_ask_the_server_of_the_region(self, moto_aws: Aws, user: Key) -> None:
        everything(IN_EUROPE)
        assert hosts(moto_aws) == {("my-bucket.s3.eu-central-1.amazonaws.com", "eu-central-1")}
        assert {seen.agent.partition("/")[0] for seen in moto_aws.seen} == {"kvstore", "Boto3"}

    def test_a_real_server_behind_it_keeps_what_was_put(
        self, aws: Aws, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        bucket = aws.make("my-bucket", "eu-central-1")
        use(aws.user().environ, monkeypatch)
        everything(IN_EUROPE)
        with at(IN_EUROPE, multipart_bytes=5 << 20, part_bytes=5 << 20) as payloads:
            name = fresh_name()
            payloads.put(name, views(bytes(11 << 20)))
            assert len(bucket.get(name)) == 11 << 20

    def test_the_region_of_the_environment(
        self, moto_aws: Aws, user: Key, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-central-1")
        everything(URL)
        assert hosts(moto_aws) == {("my-bucket.s3.eu-central-1.amazonaws.com", "eu-central-1")}

    def test_without_a_region_anywhere_it_is_us_east_1(self, moto_aws: Aws, user: Key) -> None:
        moto_aws.make("my-bucket", "us-east-1")
        everything(URL)
        assert hosts(moto_aws) == {("my-bucket.s3.us-east-1.amazonaws.com", "us-east-1")}

    def test_a_style_that_is_asked_for(self, moto_aws: Aws, user: Key) -> None:
        everything(IN_EUROPE, addressing_style="path")
        assert hosts(moto_aws) == {("s3.eu-central-1.amazonaws.com", "eu-central-1")}

    @pytest.mark.parametrize("style", ["auto", "virtual"])
    def test_a_dot_in_the_name_keeps_it_out_of_the_host(self, moto_aws: Aws, user: Key, style: str) -> None:
        """No certificate of AWS would be for that host."""
        moto_aws.make("my.bucket")
        everything("s3://my.bucket/kvstore", addressing_style=style)
        assert hosts(moto_aws) == {("s3.us-east-1.amazonaws.com", "us-east-1")}

    @pytest.mark.parametrize("call", CALLS)
    def test_the_wrong_region_is_told_by_name(self, moto_aws: Aws, user: Key, call: str) -> None:
        with at(f"{URL}?region=us-west-2") as payloads, pytest.raises(PermissionDenied) as caught:
            CALLS[call](payloads)
        assert "the bucket is in region eu-central-1: name it with ?region=eu-central-1" in str(caught.value)
        assert caught.value.reason == "other_region"

    @pytest.mark.parametrize("call", CALLS)
    def test_a_bucket_that_is_not_there(self, moto_aws: Aws, user: Key, call: str) -> None:
        with at("s3://nobodys-bucket/kvstore") as payloads, pytest.raises(TransientError) as caught:
            CALLS[call](payloads)
        assert "NoSuchBucket" in str(caught.value)


def test_without_a_proxy_by_name(pods: None, tmp_path: Path) -> None:
    """In a network of the test's own, where AWS' names lead to loopback: what keeps reads from following
    redirects must let them reach AWS."""
    hosts_file = tmp_path / "hosts"
    hosts_file.write_text("127.0.0.1 localhost my-bucket.s3.eu-central-1.amazonaws.com\n")
    network = f"ip link set lo up && mount --bind {hosts_file} /etc/hosts"
    child = f"exec {sys.executable} -P -m {_CHILD} {tmp_path}"
    environ = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    done = subprocess.run(
        ["unshare", "--net", "--mount", "sh", "-c", f"{network} && {child}"],
        env=environ | {"PYTHONPATH": str(Path(__file__).parents[3])},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["my-bucket.s3.eu-central-1.amazonaws.com", "eu-central-1"]


class TestOtherPartitions:
    @pytest.mark.parametrize(
        ("region", "environ", "server"),
        [
            ("cn-north-1", {}, "https://s3.cn-north-1.amazonaws.com.cn"),
            ("us-gov-west-1", {}, "https://s3.us-gov-west-1.amazonaws.com"),
            ("us-east-1", {"AWS_USE_FIPS_ENDPOINT": "true"}, "https://s3-fips.us-east-1.amazonaws.com"),
            (
                "us-east-1",
                {"AWS_USE_DUALSTACK_ENDPOINT": "true"},
                "https://s3.dualstack.us-east-1.amazonaws.com",
            ),
            ("us-east-1", {"AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9"}, "http://127.0.0.1:9"),
        ],
    )
    def test_both_clients_have_one_server(
        self, region: str, environ: dict[str, str], server: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        use(environ | {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "key"}, monkeypatch)
        from kvstore.payloads.s3.clients import Session

        session = Session(s3_location(f"{URL}?region={region}"), S3Settings())
        assert session.boto().meta.endpoint_url == server
        given = session.obstore(1.0).config["endpoint"]
        assert given == (server if "127.0.0.1" in server else server.replace("://", "://my-bucket."))


class TestCertificates:
    def test_an_authority_that_nobody_named(
        self, moto_aws: Aws, user: Key, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("AWS_CA_BUNDLE")
        with at(IN_EUROPE) as payloads:
            for call in CALLS.values():
                with pytest.raises(PermissionDenied, match="certificate is not trusted"):
                    call(payloads)

    def test_the_setting_goes_before_the_environment(
        self, moto_aws: Aws, user: Key, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("AWS_CA_BUNDLE", "/nowhere")
        everything(IN_EUROPE, tls_ca=moto_aws.ca)
        with pytest.raises(ConfigError, match=r"AWS_CA_BUNDLE /nowhere: .*name a PEM file"):
            at(IN_EUROPE)


class TestKeys:
    @pytest.mark.parametrize("call", CALLS)
    @pytest.mark.parametrize("wrong", ["InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken"])
    def test_a_refusal_says_its_code_and_quotes_nothing(
        self,
        moto_aws: Aws,
        user: Key,
        call: str,
        wrong: str,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        key = user
        if wrong == "InvalidAccessKeyId":
            key = Key("AKIASOMEBODYELSE", user.secret)
        elif wrong == "SignatureDoesNotMatch":
            key = Key(user.access_key, "another/secret")
        else:
            key = moto_aws.session()
            moto_aws.expire(key)
        use(key.environ, monkeypatch)
        with at(IN_EUROPE) as payloads, pytest.raises(PermissionDenied) as caught:
            CALLS[call](payloads)
        assert wrong in str(caught.value)
        with caplog.at_level(logging.DEBUG):
            logging.getLogger("kvstore.test").error("failed", exc_info=caught.value)
        told = f"{caplog.text} {_all_of(caught.value)}"
        for secret in (key.access_key, key.secret, key.token or "SESSION", "AWS4-HMAC-SHA256", "host:"):
            assert secret not in told

    def test_a_sentence_that_names_the_key_is_told_without_it(self) -> None:
        said = "x" * 190 + " key AKIAABCDEFGHIJKLMNOP is unknown. AWS4-HMAC-SHA256 20261124T000000Z"
        for sentence in (said, said[185:]):
            told = str(classify("bucket b: put x", 403, "InvalidAccessKeyId", sentence))
            assert "AKIA" not in told and "HMAC" not in told
        assert "(xxxxx key ... is unknown.)" in told

    def test_no_key_anywhere(self, moto_aws: Aws, monkeypatch: pytest.MonkeyPatch) -> None:
        moto_aws.make("my-bucket")
        with at(URL) as payloads:
            for call in CALLS.values():
                with pytest.raises(PermissionDenied, match="no credentials found; set AWS_ACCESS_KEY_ID"):
                    call(payloads)
        assert not moto_aws.seen


def _all_of(error: BaseException) -> str:
    """Everything that a log or a debugger could show of an error: its text, its causes, what they hold."""
    found: list[str] = ["".join(traceback.format_exception(error))]
    each: BaseException | None = error
    while each is not None:
        found += [repr(each.args), repr(vars(each))]
        each = each.__cause__ or each.__context__
    return " ".join(found)


class TestRoles:
    def test_a_pod_of_eks_with_an_identity(
        self, moto_aws: Aws, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        moto_aws.make("my-bucket", "eu-central-1")
        with Metadata(moto_aws) as metadata:
            use(metadata.pod(tmp_path), monkeypatch)
            everything(IN_EUROPE)
            assert {seen.access_key for seen in moto_aws.seen} == {metadata.given[0].access_key}

    def test_a_machine_of_ec2_with_a_role(self, moto_aws: Aws, monkeypatch: pytest.MonkeyPatch) -> None:
        moto_aws.make("my-bucket", "eu-central-1")
        with Metadata(moto_aws) as metadata:
            use(metadata.instance(), monkeypatch)
            everything(IN_EUROPE)
            assert {seen.access_key for seen in moto_aws.seen} == {metadata.given[0].access_key}

    def test_a_pod_with_a_role_of_its_service_account(
        self, moto_aws: Aws, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        moto_aws.make("my-bucket", "eu-central-1")
        token = tmp_path / "token"
        token.write_text(moto_aws.pod_token)
        # As the webhook of EKS sets them, STS' region among them.
        names = {"AWS_ROLE_ARN": ROLE, "AWS_WEB_IDENTITY_TOKEN_FILE": str(token)}
        names |= {"AWS_STS_REGIONAL_ENDPOINTS": "regional", "AWS_DEFAULT_REGION": "eu-central-1"}
        use(names, monkeypatch)
        everything(URL)
        assert "sts.eu-central-1.amazonaws.com:443" in moto_aws.connected
        assert hosts(moto_aws) == {("my-bucket.s3.eu-central-1.amazonaws.com", "eu-central-1")}

    def test_a_role_that_is_refused(
        self, moto_aws: Aws, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        token = tmp_path / "token"
        token.write_text("another pod's")
        use({"AWS_ROLE_ARN": ROLE, "AWS_WEB_IDENTITY_TOKEN_FILE": str(token)}, monkeypatch)
        words = r"credentials can't be had \(InvalidIdentityTokenException InvalidIdentityToken\)"
        with at(IN_EUROPE) as payloads, pytest.raises(TransientError, match=words) as caught:
            payloads.ping()
        settings = load_settings({"payloads": IN_EUROPE, "index": "redis://redis:6379/0"}, {})
        assert "its trust policy and its region" in advice_on(settings, caught.value)

    def test_new_keys_are_taken_when_the_old_ones_end(
        self, moto_aws: Aws, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        moto_aws.make("my-bucket", "eu-central-1")
        with Metadata(moto_aws) as metadata, at(IN_EUROPE) as payloads:
            use(metadata.pod(tmp_path), monkeypatch)
            # So short that botocore asks for the next at once.
            metadata.lasts_s = 30.0
            payloads.ping()
            first = list(metadata.given)
            for key in first:
                moto_aws.expire(key)
            done(payloads.ping)
            assert len(metadata.given) > len(first)

    def test_keys_of_the_environment_that_ended_are_told(
        self, moto_aws: Aws, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        moto_aws.make("my-bucket", "eu-central-1")
        key = moto_aws.session()
        use(key.environ, monkeypatch)
        with at(IN_EUROPE) as payloads:
            payloads.ping()
            moto_aws.expire(key)
            for call in CALLS.values():
                with pytest.raises(KVStoreError, match=r"ExpiredToken.*the session token has expired"):
                    call(payloads)
