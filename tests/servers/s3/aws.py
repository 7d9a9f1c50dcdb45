"""A server that takes itself for AWS: it answers for *.amazonaws.com, in several regions, behind TLS.

Clients reach it as they reach AWS from behind a company's proxy: HTTPS_PROXY names it, and AWS_CA_BUNDLE the
authority of its certificate. Where a test has names of its own, they reach it by those. It checks each
request's signature, region, key and session token itself and refuses in AWS' words. What it lets through it
signs anew and passes on to a real S3 server.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import hmac
import http.client
import json
import re
import secrets
import socket
import ssl
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote

import botocore.httpsession
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials as BotoCredentials

from tests.servers.papers import Papers
from tests.servers.s3.bucket import S3Bucket
from tests.servers.s3.hostile import HostileServer, answer
from tests.servers.s3.http import Head, Stream
from tests.servers.s3.servers import S3Server
from tests.waiting import PATIENCE_S

#: Regions from the start; `make` adds others.
REGIONS = ("us-east-1", "eu-central-1", "us-west-2")
#: Settings under s3 for a busy machine, where a handshake may take more than a second.
PATIENT = {f"{name}_timeout_s": PATIENCE_S for name in ("connect", "read", "write", "stall")}
#: The same as variables.
PATIENT_ENVIRON = {f"KVSTORE_S3__{name.upper()}": str(value) for name, value in PATIENT.items()}
ROLE = "arn:aws:iam::123456789012:role/kvstore"

_HOST = re.compile(r"(?:(?P<bucket>[a-z0-9.-]+)\.)?s3(?:\.(?P<region>[a-z0-9-]+))?\.amazonaws\.com")
_AUTHORIZATION = re.compile(
    r"AWS4-HMAC-SHA256 Credential=(?P<key>[^/]+)/(?P<date>\d{8})/(?P<region>[^/]+)/s3/aws4_request, ?"
    r"SignedHeaders=(?P<signed>[^,]+), ?Signature=(?P<signature>[0-9a-f]{64})"
)
#: Headers that belong to one connection or one signature.
_OWN = {"host", "authorization", "connection", "content-length", "x-amz-date", "x-amz-security-token"}
_OWN |= {"x-amz-content-sha256"}


@dataclass(frozen=True, slots=True)
class Key:
    """An access key that the server knows. `token` is None for a user's own, which never expires."""

    access_key: str
    secret: str
    token: str | None = None
    expired: bool = False

    @property
    def environ(self) -> dict[str, str]:
        names = {"AWS_ACCESS_KEY_ID": self.access_key, "AWS_SECRET_ACCESS_KEY": self.secret}
        return names | ({"AWS_SESSION_TOKEN": self.token} if self.token else {})


@dataclass(frozen=True, slots=True)
class Seen:
    """One request for S3 that came in."""

    method: str
    host: str
    target: str
    #: In which region it was signed, and by which key.
    region: str
    access_key: str
    agent: str


class Aws(HostileServer):
    """Answers for S3 and STS. Buckets lie in `server`, in the region that `make` says."""

    def __init__(self, server: S3Server, folder: Path, port: int = 0) -> None:
        self._server = server
        self._papers = papers = Papers(folder)
        # As a company makes it: the public authorities, and its own at the end.
        bundle = folder / "bundle.crt"
        public = Path(botocore.httpsession.where()).read_text(encoding="utf-8")
        bundle.write_text(public + Path(papers["ca.crt"]).read_text())
        self.ca = str(bundle)
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._regions: list[str] = []
        for region in REGIONS:
            self._open(region)
        self.keys: dict[str, Key] = {}
        self.buckets: dict[str, str] = {}
        self.seen: list[Seen] = []
        #: Whether no key has the right to write.
        self.read_only = False
        #: Host and port of each CONNECT.
        self.connected: list[str] = []
        #: Tokens of pods that the token service takes.
        self.pod_token = secrets.token_hex(8)
        super().__init__(self._answer, port=port)

    @property
    def proxy(self) -> str:
        return self.endpoint

    @property
    def environ(self) -> dict[str, str]:
        """The network, as a user behind a proxy with an authority of its own has it. No credentials.

        Files of the user, and the metadata of the machine that the tests run on, have no say.
        """
        nowhere = {"AWS_CONFIG_FILE": "/nowhere", "AWS_SHARED_CREDENTIALS_FILE": "/nowhere"}
        network = {"HTTPS_PROXY": self.proxy, "AWS_CA_BUNDLE": self.ca}
        return nowhere | network | {"AWS_EC2_METADATA_SERVICE_ENDPOINT": "http://127.0.0.1:9"}

    def user(self) -> Key:
        """Makes a user's access key."""
        return self._add(Key(f"AKIA{secrets.token_hex(8).upper()}", secrets.token_hex(20)))

    def session(self) -> Key:
        """Makes a key for a while, with a session token."""
        key = f"ASIA{secrets.token_hex(8).upper()}"
        return self._add(Key(key, secrets.token_hex(20), secrets.token_hex(32)))

    def expire(self, key: Key) -> None:
        self.keys[key.access_key] = replace(key, expired=True)

    def _add(self, key: Key) -> Key:
        self.keys[key.access_key] = key
        return key

    def make(self, name: str, region: str = "us-east-1") -> S3Bucket:
        """Makes an empty bucket in a region."""
        self._open(region)
        client = self._server.client()
        with suppress(client.exceptions.BucketAlreadyOwnedByYou, client.exceptions.BucketAlreadyExists):
            self._server.make_bucket(name)
        for item in client.list_objects_v2(Bucket=name).get("Contents", ()):
            client.delete_object(Bucket=name, Key=item["Key"])
        self.buckets[name] = region
        owner = self._server.owner
        return S3Bucket(self._server.kind, name, "kvstore", region, owner, self._server.endpoint, client)

    def _open(self, region: str) -> None:
        """Has connections from now on find a certificate for the hosts of this region, too."""
        if region not in self._regions:
            self._regions.append(region)
            names = [
                f"{kind}.{each}.amazonaws.com" for each in self._regions for kind in ("s3", "*.s3", "sts")
            ]
            self._papers.server("aws", [*names, "sts.amazonaws.com"])
            self._tls.load_cert_chain(self._papers["aws.crt"], self._papers["aws.key"])

    # The connection: CONNECT, then TLS.

    def _serve(self, connection: socket.socket) -> None:
        try:
            # A handshake's first byte: whoever knows the name comes without a proxy.
            if connection.recv(1, socket.MSG_PEEK) != b"\x16" and not self._connect(connection):
                connection.close()
                return
            wrapped = self._tls.wrap_socket(connection, server_side=True)
        except OSError:
            connection.close()
            return
        with self._lock:
            self._sockets.discard(connection)
            self._sockets.add(wrapped)
        super()._serve(wrapped)

    def _connect(self, connection: socket.socket) -> bool:
        """Answers a CONNECT. Returns whether the tunnel leads here."""
        request = Stream(connection).head()
        if request is None or request.words[0] != "CONNECT":
            return False
        target = request.words[1]
        with self._lock:
            self.connected.append(target)
        if not target.endswith(".amazonaws.com:443"):
            connection.sendall(b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 0\r\n\r\n")
            return False
        connection.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
        return True

    # The answers.

    def _answer(self, request: Head, body: bytes) -> Iterator[bytes]:
        host = request.headers.get("host", "")
        if host.startswith("sts."):
            return self._token_service(body)
        found = _HOST.fullmatch(host)
        if found is None:
            return answer("404 Not Found")
        region, path = found["region"] or "us-east-1", request.words[1]
        bucket = found["bucket"] or path.lstrip("/").partition("/")[0].partition("?")[0]
        refused = self._refusal(request, body, bucket, region)
        if refused is not None:
            return refused
        path, _, query = path.partition("?")
        target = f"/{found['bucket']}{path}" if found["bucket"] else path
        # Spelled in one way: two signers may code a "~" or leave it.
        return self._pass_on(request, body, f"{target}?{_query(query)}" if query else target)

    def _refusal(self, request: Head, body: bytes, bucket: str, region: str) -> Iterator[bytes] | None:
        """Returns the answer to a request that AWS would refuse."""
        signed = _AUTHORIZATION.fullmatch(request.headers.get("authorization", ""))
        if signed is None:
            return _error(request, "403 Forbidden", "AccessDenied", "Access Denied")
        with self._lock:
            self.seen.append(
                Seen(
                    request.words[0],
                    request.headers["host"],
                    request.words[1],
                    signed["region"],
                    signed["key"],
                    request.headers.get("user-agent", ""),
                )
            )
        key = self.keys.get(signed["key"])
        if key is None:
            return _error(
                request,
                "403 Forbidden",
                "InvalidAccessKeyId",
                "The AWS Access Key Id you provided does not exist in our records.",
                AWSAccessKeyId=signed["key"],
            )
        given = request.headers.get("x-amz-security-token")
        if given != key.token:
            said = "The provided token is malformed or otherwise invalid."
            return _error(request, "400 Bad Request", "InvalidToken", said, **{"Token-0": given or ""})
        if key.expired:
            said = "The provided token has expired."
            return _error(request, "400 Bad Request", "ExpiredToken", said, **{"Token-0": given or ""})
        if self.read_only and request.words[0] not in ("GET", "HEAD"):
            return _error(request, "403 Forbidden", "AccessDenied", "Access Denied")
        if signed["region"] != region:
            said = (
                f"The authorization header is malformed; the region '{signed['region']}' is wrong; "
                f"expecting '{region}'"
            )
            return _error(request, "400 Bad Request", "AuthorizationHeaderMalformed", said, Region=region)
        if (lies_in := self.buckets.get(bucket, region)) != region:
            said = (
                "The bucket you are attempting to access must be addressed using the specified endpoint. "
                "Please send all future requests to this endpoint."
            )
            where = f"{bucket}.s3.{lies_in}.amazonaws.com"
            return _error(
                request,
                "301 Moved Permanently",
                "PermanentRedirect",
                said,
                {"x-amz-bucket-region": lies_in},
                Endpoint=where,
                Bucket=bucket,
            )
        canonical, text, signature = _sign(request, signed, key.secret)
        if signature != signed["signature"]:
            return _error(
                request,
                "403 Forbidden",
                "SignatureDoesNotMatch",
                "The request signature we calculated does not match the signature you provided. Check your "
                "key and signing method.",
                AWSAccessKeyId=signed["key"],
                StringToSign=text,
                SignatureProvided=signed["signature"],
                CanonicalRequest=canonical,
            )
        said = request.headers["x-amz-content-sha256"]
        if said != "UNSIGNED-PAYLOAD" and said != hashlib.sha256(body).hexdigest():
            return _error(request, "400 Bad Request", "XAmzContentSHA256Mismatch", "The body is another.")
        return None

    def _pass_on(self, request: Head, body: bytes, target: str) -> Iterator[bytes]:
        method = request.words[0]
        owner = self._server.owner
        kept = {name: value for name, value in request.headers.items() if name not in _OWN}
        again = AWSRequest(method, f"{self._server.endpoint}{target}", headers=kept, data=body)
        signer = S3SigV4Auth(BotoCredentials(owner.access_key, owner.secret_key), "s3", self._server.region)
        signer.add_auth(again)
        with closing(http.client.HTTPConnection("127.0.0.1", self._server.port)) as connection:
            connection.putrequest(method, target, skip_accept_encoding=True)
            for name, value in again.headers.items():
                if name.lower() != "host":
                    connection.putheader(name, value)
            if body or method in ("PUT", "POST"):
                connection.putheader("content-length", str(len(body)))
            connection.endheaders(body)
            got = connection.getresponse()
            content = got.read()
            # Of a HEAD, the length that its body would have.
            length = got.getheader("content-length") if method == "HEAD" else None
            drop = ("content-length", "transfer-encoding", "connection")
            fields = [(name, value) for name, value in got.getheaders() if name.lower() not in drop]
            fields.append(("content-length", length or str(len(content))))
            lines = [f"HTTP/1.1 {got.status} {got.reason}", *(f"{name}: {value}" for name, value in fields)]
            if got.status == 204:
                lines.pop()
        yield "\r\n".join([*lines, "", ""]).encode("latin-1")
        yield content

    def _token_service(self, body: bytes) -> Iterator[bytes]:
        asked = {name: values[0] for name, values in parse_qs(body.decode()).items()}
        action = asked.get("Action")
        if action != "AssumeRoleWithWebIdentity" or asked.get("WebIdentityToken") != self.pod_token:
            text = "<ErrorResponse><Error><Code>InvalidIdentityToken</Code></Error></ErrorResponse>"
            return answer("400 Bad Request", text.encode())
        key = self.session()
        text = (
            '<AssumeRoleWithWebIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/">'
            f"<AssumeRoleWithWebIdentityResult><Credentials><AccessKeyId>{key.access_key}</AccessKeyId>"
            f"<SecretAccessKey>{key.secret}</SecretAccessKey><SessionToken>{key.token}</SessionToken>"
            f"<Expiration>{_in(3600)}</Expiration></Credentials></AssumeRoleWithWebIdentityResult>"
            "</AssumeRoleWithWebIdentityResponse>"
        )
        return answer("200 OK", text.encode(), content_type="text/xml")


class Metadata(HostileServer):
    """What gives a machine or a pod its credentials: IMDSv2 of EC2, and the agent of EKS Pod Identity.

    Each answer holds a new key of `aws`, which says of itself that it lasts for `lasts_s`.
    """

    def __init__(self, aws: Aws) -> None:
        self._aws = aws
        self.lasts_s = 3600.0
        self.given: list[Key] = []
        self._session = secrets.token_hex(8)
        super().__init__(self._answer)

    def instance(self) -> dict[str, str]:
        """The environment of a process on a machine of EC2."""
        return {"AWS_EC2_METADATA_SERVICE_ENDPOINT": self.endpoint}

    def pod(self, folder: Path) -> dict[str, str]:
        """The environment of a pod with a Pod Identity association."""
        file = folder / "eks-pod-identity-token"
        file.write_text(self._aws.pod_token)
        return {
            "AWS_CONTAINER_CREDENTIALS_FULL_URI": f"{self.endpoint}/v1/credentials",
            "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": str(file),
        }

    def _answer(self, request: Head, body: bytes) -> Iterator[bytes]:
        method, path, _ = request.words
        if path == "/v1/credentials":
            if request.headers.get("authorization") != self._aws.pod_token:
                return answer("401 Unauthorized")
            return self._credentials()
        if (method, path) == ("PUT", "/latest/api/token"):
            return answer("200 OK", self._session.encode())
        if request.headers.get("x-aws-ec2-metadata-token") != self._session:
            return answer("401 Unauthorized")
        listing = "/latest/meta-data/iam/security-credentials/"
        if path == listing:
            return answer("200 OK", b"kvstore")
        return self._credentials() if path == f"{listing}kvstore" else answer("404 Not Found")

    def _credentials(self) -> Iterator[bytes]:
        key = self._aws.session()
        self.given.append(key)
        said: dict[str, Any] = {
            "Code": "Success",
            "AccessKeyId": key.access_key,
            "SecretAccessKey": key.secret,
            "Token": key.token,
            "Expiration": _in(self.lasts_s),
        }
        return answer("200 OK", json.dumps(said).encode(), content_type="application/json")


def _in(seconds: float) -> str:
    return (dt.datetime.now(dt.UTC) + dt.timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


def _error(
    request: Head, status: str, code: str, said: str, headers: dict[str, str] | None = None, **more: str
) -> Iterator[bytes]:
    inner = "".join(f"<{name}>{_escaped(value)}</{name}>" for name, value in more.items())
    text = (
        f'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{code}</Code>'
        f"<Message>{_escaped(said)}</Message>{inner}<RequestId>{secrets.token_hex(8).upper()}</RequestId><HostId>x</HostId></Error>"
    )
    body = b"" if request.words[0] == "HEAD" else text.encode()
    named = {name.replace("-", "_"): value for name, value in (headers or {}).items()}
    return answer(status, body, content_type="application/xml", **named)


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _sign(request: Head, signed: re.Match[str], secret: str) -> tuple[str, str, str]:
    """Returns the canonical request, the string to sign and the signature, by AWS' description of version 4.

    https://docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html
    """
    method, target, _ = request.words
    path, _, query = target.partition("?")
    names = signed["signed"].split(";")
    canonical = "\n".join(
        [
            method,
            quote(unquote(path), safe="/-_.~"),
            _query(query),
            *(f"{name}:{' '.join(request.headers.get(name, '').split())}" for name in names),
            "",
            signed["signed"],
            request.headers.get("x-amz-content-sha256", ""),
        ]
    )
    scope = f"{signed['date']}/{signed['region']}/s3/aws4_request"
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    text = "\n".join(["AWS4-HMAC-SHA256", request.headers.get("x-amz-date", ""), scope, digest])
    key = f"AWS4{secret}".encode()
    for word in scope.split("/"):
        key = hmac.digest(key, word.encode(), "sha256")
    return canonical, text, hmac.new(key, text.encode(), "sha256").hexdigest()


def _query(query: str) -> str:
    pairs = [pair.partition("=")[::2] for pair in query.split("&") if pair]
    return "&".join(sorted(f"{_coded(name)}={_coded(value)}" for name, value in pairs))


def _coded(text: str) -> str:
    return quote(unquote(text), safe="-_.~")
