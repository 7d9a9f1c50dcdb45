"""Makes boto3 and obstore clients for one bucket, with the same settings and the same chain of credentials.

Neither client retries: kvstore.payloads.retrying does, for both. Neither computes checksums that a server
doesn't require: every segment carries its own, end to end.
"""

from __future__ import annotations

import datetime as dt
import logging
import socket
import urllib.request
from contextlib import closing
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, ProfileNotFound
from obstore.store import S3Store

from kvstore import __version__
from kvstore.errors import ConfigError, PermissionDenied, TransientError
from kvstore.payloads.s3.bounded import bound_answers
from kvstore.payloads.s3.control import S3Control
from kvstore.payloads.s3.errors import NOWHERE, code_of, no_credentials
from kvstore.rules.text import readable
from schemas.settings import S3Settings
from schemas.urls import S3Location

if TYPE_CHECKING:
    from obstore.store import ClientConfig, S3Config, S3Credential

if logging.getLogger("botocore").level == logging.NOTSET:
    # At DEBUG botocore logs requests with their session tokens, to wherever the root logger writes.
    logging.getLogger("botocore").setLevel(logging.INFO)

#: Seconds for which obstore may keep credentials. It asks again five minutes before their end, so for each
#: request; botocore refreshes those that expire.
_CREDENTIALS_S = 300.0


class Session:
    """The credentials and the addressing that both clients share. Makes no request by itself."""

    def __init__(self, location: S3Location, settings: S3Settings) -> None:
        self._location = location
        self._settings = settings
        try:
            self._boto = boto3.Session(
                aws_access_key_id=_reveal(settings.access_key_id),
                aws_secret_access_key=_reveal(settings.secret_access_key),
                aws_session_token=_reveal(settings.session_token),
                region_name=location.region,
                profile_name=settings.profile,
            )
        except ProfileNotFound as exc:
            raise ConfigError(f"s3.profile: {exc}") from None
        # For the services that the chain asks for credentials: by default botocore would wait for minutes.
        self._boto._session.set_default_client_config(
            Config(
                connect_timeout=settings.connect_timeout_s,
                read_timeout=settings.read_timeout_s,
                retries={"total_max_attempts": 1, "mode": "standard"},
            )
        )
        self._region = location.region or self._boto.region_name or "us-east-1"
        named = settings.tls_ca
        if named is None and not (location.endpoint or "").startswith("http:"):
            # AWS_CA_BUNDLE, or ca_bundle of a profile: boto3 alone would heed it, and for some clients only.
            named = self._boto._session.get_config_variable("ca_bundle")
        self._ca: str | None = named if settings.tls_verify else None
        self._pem: str | None = None
        if self._ca is not None:
            try:
                self._pem = Path(self._ca).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as exc:
                source = "s3.tls_ca" if settings.tls_ca else "AWS_CA_BUNDLE"
                raise ConfigError(f"{source} {self._ca}: {exc}; name a PEM file") from None

    @cached_property
    def _server(self) -> str:
        """The URL of the server, without the bucket, for both clients: the endpoint that is given, or what
        botocore takes for this region's of AWS."""
        if self._location.endpoint is not None:
            return self._location.endpoint
        # In us-east-1, the region's own server and not the one for all regions. botocore changes a Config.
        config = Config(s3={"us_east_1_regional_endpoint": "regional"})
        with closing(self._boto.client("s3", region_name=self._region, config=config)) as client:
            url: str = client.meta.endpoint_url
        return url

    @property
    def _path_style(self) -> bool:
        style = self._settings.addressing_style
        at_aws = self._location.endpoint is None and ".amazonaws." in self._server
        # AWS' certificates are for one label before theirs. boto3 goes by that in any style but "path".
        label = "." not in self._location.bucket or self._server.startswith("http:")
        return style == "path" or not label or (style == "auto" and not at_aws)

    def _for_obstore(self) -> str:
        """Returns the server's URL for obstore, with the bucket's name in the host if that is the style."""
        if self._path_style:
            return self._server
        scheme, _, host = self._server.partition("://")
        return f"{scheme}://{self._location.bucket}.{host}"

    def credentials(self) -> S3Credential:
        """Returns valid credentials. May ask a metadata or token service, within `read_timeout_s`.

        Raises PermissionDenied if the chain has none, TransientError if they can't be had now.
        """
        try:
            found = self._boto.get_credentials()
            frozen = found.get_frozen_credentials() if found is not None else None
        except (BotoCoreError, ClientError, OSError, ValueError, RuntimeError) as exc:
            # RuntimeError: what was refreshed is too old already.
            # Without the error's text, which may quote what a credential process has printed.
            said = f"{type(exc).__name__} {readable(code_of(exc))}".strip()
            raise TransientError(f"s3://{self._location.bucket}: credentials can't be had ({said})") from None
        if frozen is None:
            raise PermissionDenied(f"s3://{self._location.bucket}: {no_credentials()}")
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": dt.datetime.now(dt.UTC) + dt.timedelta(seconds=_CREDENTIALS_S),
        }

    def control(self) -> S3Control:
        """Returns what makes every request but those for data."""
        return S3Control(self.boto(), self._location, self._settings.expected_bucket_owner)

    def boto(self) -> Any:
        """Returns a boto3 S3 client, for any number of threads."""
        settings = self._settings
        client = self._boto.client(
            "s3",
            endpoint_url=self._server,
            region_name=self._region,
            verify=self._ca or settings.tls_verify,
            config=Config(
                connect_timeout=settings.connect_timeout_s,
                read_timeout=settings.read_timeout_s,
                retries={"total_max_attempts": 1, "mode": "standard"},
                max_pool_connections=settings.concurrency + 8,
                s3={"addressing_style": "path" if self._path_style else "virtual"},
                # The server's URL has them in it, and botocore refuses both together.
                use_dualstack_endpoint=False,
                use_fips_endpoint=False,
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
                user_agent_extra=f"kvstore/{__version__}",
            ),
        )
        bound_answers(client)
        # After botocore's own, which would ask elsewhere, and there again, without end.
        client.meta.events.register_last("before-call.s3", _follow_nothing)
        return client

    def obstore(self, timeout_s: float, stall_timeout_s: float | None = None) -> S3Store:
        """Returns an obstore client whose requests end within `timeout_s`, for any number of threads.

        Requests end earlier if nothing comes from the server for `stall_timeout_s`.
        """
        settings, location = self._settings, self._location
        options: ClientConfig = {
            "allow_http": self._server.startswith("http:"),
            "timeout": dt.timedelta(seconds=timeout_s),
            "connect_timeout": dt.timedelta(seconds=settings.connect_timeout_s),
            "user_agent": f"kvstore/{__version__}",
        }
        if stall_timeout_s is not None:
            options["read_timeout"] = dt.timedelta(seconds=stall_timeout_s)
        if not settings.tls_verify:
            options["allow_invalid_certificates"] = True
        if self._pem is not None:
            options["root_certificate"] = self._pem
        if settings.expected_bucket_owner is not None:
            # obstore signs headers that it is given so; S3 refuses any x-amz-* that isn't signed.
            options["default_headers"] = {"x-amz-expected-bucket-owner": settings.expected_bucket_owner}
        host = _normal(urlsplit(self._for_obstore()).hostname or "")
        if not _has_proxy(host, http=options["allow_http"]):
            # obstore follows redirects, and has no setting for it. This one lets it reach no host but the
            # endpoint's; what comes from another port of that host is verified like everything.
            options["proxy_url"] = f"http://{NOWHERE}"
            options["proxy_excludes"] = host
        encryption: S3Config = {}
        if settings.sse_kms_key_id is not None:
            encryption = {"server_side_encryption": "aws:kms", "sse_kms_key_id": settings.sse_kms_key_id}
        return S3Store(
            location.bucket,
            endpoint=self._for_obstore(),
            region=self._region,
            virtual_hosted_style_request=not self._path_style,
            # A signed payload is redundant with TLS and pointless without: the segment's checksums are end to
            # end.
            unsigned_payload=True,
            credential_provider=self.credentials,
            client_options=options,
            retry_config={"max_retries": 0},
            config=encryption,
        )


def _follow_nothing(context: dict[str, Any], **_: Any) -> None:
    context.setdefault("s3_redirect", {})["redirected"] = True


def _has_proxy(host: str, *, http: bool) -> bool:
    """Tells whether the environment names a proxy for that host, which then decides what can be reached."""
    proxies = urllib.request.getproxies()
    named = proxies.get("http" if http else "https") or proxies.get("all")
    return bool(named) and not urllib.request.proxy_bypass(host)


def _normal(host: str) -> str:
    """Returns an address such as 127.1 as clients write it, and other hosts as they are."""
    try:
        return socket.inet_ntoa(socket.inet_aton(host))
    except OSError:
        return host


def _reveal(secret: Any) -> str | None:
    return None if secret is None else secret.get_secret_value()
