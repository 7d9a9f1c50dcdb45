"""boto3 and obstore clients for one bucket, from one set of settings and one chain of credentials.

Neither retries: kvstore.blobs.retrying does, for both alike. Neither computes checksums that a server
doesn't ask for: every segment carries its own, end to end.
"""

from __future__ import annotations

import datetime as dt
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, ProfileNotFound
from obstore.store import S3Store

from kvstore import __version__
from kvstore.blobs.s3_errors import no_credentials
from kvstore.errors import ConfigError, PermissionDenied, TransientError
from schemas.settings import S3Settings
from schemas.urls import S3Location

if TYPE_CHECKING:
    from obstore.store import ClientConfig, S3Credential

if logging.getLogger("botocore").level == logging.NOTSET:
    # At DEBUG it writes requests with their session tokens into whatever the root logger goes to.
    logging.getLogger("botocore").setLevel(logging.INFO)

#: Credentials of the chain are asked for again after this; botocore refreshes those that expire.
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
        # The services that the chain asks for credentials: by default botocore would wait for minutes.
        self._boto._session.set_default_client_config(
            Config(
                connect_timeout=settings.connect_timeout_s,
                read_timeout=settings.read_timeout_s,
                retries={"total_max_attempts": 1, "mode": "standard"},
            )
        )
        self._region = location.region or self._boto.region_name or "us-east-1"
        self._pem: str | None = None
        if settings.tls_ca is not None:
            try:
                self._pem = Path(settings.tls_ca).read_text(encoding="ascii")
            except (OSError, UnicodeDecodeError) as exc:
                raise ConfigError(f"s3.tls_ca {settings.tls_ca}: {exc}; name a PEM file") from None

    @property
    def _path_style(self) -> bool:
        style = self._settings.addressing_style
        return style == "path" or (style == "auto" and self._location.endpoint is not None)

    def _endpoint(self) -> str | None:
        """The endpoint as obstore wants it: with the bucket's name in the host if that is the style."""
        endpoint = self._location.endpoint
        if endpoint is None or self._path_style:
            return endpoint
        scheme, _, host = endpoint.partition("://")
        return f"{scheme}://{self._location.bucket}.{host}"

    def credentials(self) -> S3Credential:
        """Valid ones. May ask a metadata or token service, within `read_timeout_s`.

        Raises PermissionDenied if the chain has none, TransientError if they can't be had now.
        """
        try:
            found = self._boto.get_credentials()
            frozen = found.get_frozen_credentials() if found is not None else None
        except (BotoCoreError, ClientError, OSError, ValueError) as exc:
            # Not its words: they may quote what a credential process has printed.
            raise TransientError(
                f"s3://{self._location.bucket}: credentials can't be had ({type(exc).__name__})"
            ) from None
        if frozen is None:
            raise PermissionDenied(f"s3://{self._location.bucket}: {no_credentials()}")
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": dt.datetime.now(dt.UTC) + dt.timedelta(seconds=_CREDENTIALS_S),
        }

    def boto(self, timeout_s: float) -> Any:
        """A boto3 S3 client that waits so long for each piece of an answer; for any number of threads."""
        settings = self._settings
        return self._boto.client(
            "s3",
            endpoint_url=self._location.endpoint,
            region_name=self._region,
            verify=settings.tls_ca or settings.tls_verify,
            config=Config(
                connect_timeout=settings.connect_timeout_s,
                read_timeout=timeout_s,
                retries={"total_max_attempts": 1, "mode": "standard"},
                max_pool_connections=settings.concurrency + 8,
                s3={"addressing_style": "path" if self._path_style else "virtual"},
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
                user_agent_extra=f"kvstore/{__version__}",
            ),
        )

    def obstore(self, timeout_s: float, stall_timeout_s: float | None = None) -> S3Store:
        """An obstore client whose requests end within `timeout_s`; for any number of threads.

        They end earlier if nothing comes from the server for `stall_timeout_s`.
        """
        settings, location = self._settings, self._location
        options: ClientConfig = {
            "allow_http": True,
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
        return S3Store(
            location.bucket,
            endpoint=self._endpoint(),
            region=self._region,
            virtual_hosted_style_request=not self._path_style,
            # Over TLS it is redundant, without it pointless: the segment's checksums are end to end.
            unsigned_payload=True,
            credential_provider=self.credentials,
            client_options=options,
            retry_config={"max_retries": 0},
        )


def _reveal(secret: Any) -> str | None:
    return None if secret is None else secret.get_secret_value()
