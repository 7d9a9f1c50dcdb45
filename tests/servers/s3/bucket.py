"""A bucket to test against, and the way around the code under test."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

import boto3
from botocore.config import Config

from tests.servers.redis import ServerError


@dataclass(frozen=True, slots=True)
class Credentials:
    access_key: str
    secret_key: str


def boto3_client(endpoint: str, region: str, credentials: Credentials, read_timeout_s: float = 30.0) -> Any:
    """A plain client, made without any code or setting of the product. It tries once; close it.

    Not of boto3's default session, which is shared and not to be used from two threads at once.
    """
    session = boto3.session.Session(
        aws_access_key_id=credentials.access_key,
        aws_secret_access_key=credentials.secret_key,
        region_name=region,
    )
    config = Config(
        s3={"addressing_style": "path"},
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        retries={"total_max_attempts": 1, "mode": "standard"},
        connect_timeout=read_timeout_s,
        read_timeout=read_timeout_s,
        max_pool_connections=32,
        # A proxy of the environment would stand between a test and its server.
        proxies={},
    )
    return session.client("s3", endpoint_url=endpoint, config=config)


@dataclass(frozen=True, slots=True)
class S3Bucket:
    """A bucket and a prefix that no other test uses.

    `url` and `settings` are for the code under test; the verbs talk to the server itself, whatever stands
    at `url`, and know a key by its name below the prefix, as in `s3://BUCKET/PREFIX/KEY`.
    """

    #: Of its server: "ceph", or "moto" for the imitation.
    kind: str
    bucket: str
    prefix: str
    region: str
    credentials: Credentials
    #: Where the code under test is sent.
    endpoint: str
    #: To the server itself, with the owner's credentials.
    direct: Any

    @property
    def url(self) -> str:
        query = urlencode({"endpoint": self.endpoint, "region": self.region}, safe=":/")
        return f"s3://{self.bucket}/{self.prefix}?{query}"

    @property
    def settings(self) -> dict[str, Any]:
        """What the settings tree needs besides the URL."""
        keys = self.credentials
        return {"s3": {"access_key_id": keys.access_key, "secret_access_key": keys.secret_key}}

    def client(self) -> Any:
        """boto3's, to the server itself; one for all tests: don't close it."""
        return self.direct

    def name(self, key: str) -> str:
        """The object's whole key."""
        return f"{self.prefix}/{key}"

    def keys(self) -> list[str]:
        """In the order of their bytes; what lies outside the prefix is left out."""
        pages = self.direct.get_paginator("list_objects_v2").paginate(
            Bucket=self.bucket, Prefix=f"{self.prefix}/"
        )
        skip = len(self.prefix) + 1
        return [item["Key"][skip:] for page in pages for item in page.get("Contents", ())]

    def get(self, key: str) -> bytes:
        """KeyError when there is none."""
        try:
            answer = self.direct.get_object(Bucket=self.bucket, Key=self.name(key))
        except self.direct.exceptions.NoSuchKey as exc:
            raise KeyError(key) from exc
        with closing(answer["Body"]) as body:
            return bytes(body.read())

    def put(self, key: str, content: bytes) -> None:
        """Replaces what was there."""
        self.direct.put_object(Bucket=self.bucket, Key=self.name(key), Body=content)

    def delete(self, key: str) -> None:
        """Does nothing if there is none."""
        self.direct.delete_object(Bucket=self.bucket, Key=self.name(key))

    def uploads(self) -> list[str]:
        """The keys of the multipart uploads that are neither completed nor aborted."""
        answer = self.direct.list_multipart_uploads(Bucket=self.bucket, Prefix=f"{self.prefix}/")
        if answer["IsTruncated"]:
            raise ServerError("more uploads than one page")
        skip = len(self.prefix) + 1
        return [upload["Key"][skip:] for upload in answer.get("Uploads", ())]
