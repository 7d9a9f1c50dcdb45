"""Where payloads and the index are kept, and how a process calls them."""

from __future__ import annotations

from os.path import normpath
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, SecretStr, field_serializer, model_validator

from schemas.base import StrictModel, redact
from schemas.settings.quantities import Bytes, Seconds
from schemas.urls import check_folder, check_payloads, local_path


class RedisSettings(StrictModel):
    """How to talk to Redis. Credentials may stand in the URL or here; here wins."""

    #: User of Redis' access control lists. Left out: the URL's, or Redis' default user.
    username: str | None = None
    #: Password of that user.
    password: SecretStr | None = None
    #: User of the Sentinels of a `redis+sentinel://` index; the URL's credentials are the master's.
    sentinel_username: str | None = None
    #: Password of the Sentinels. Left out: they ask for none.
    sentinel_password: SecretStr | None = None
    #: Deadline of making a connection.
    connect_timeout_s: Seconds = 0.5
    #: Deadline of one call, the reply included; `connect_timeout_s` more if it has to connect. A match
    #: has the smaller `kv.match_deadline_s` as well.
    timeout_s: Seconds = 1.0
    #: Number of shards of a namespace that is registered for the first time. Each shard has a slot of its
    #: own, so that the masters of a Redis Cluster share the load. A registered namespace keeps its number.
    shards: int = Field(default=1, ge=1, le=256)
    #: Most connections of one process; a call waits up to `timeout_s` for a free one.
    max_connections: int = Field(default=16, ge=1)
    #: File with the CA certificates to trust with `rediss://`, in PEM. Left out: the system's.
    tls_ca: str | None = None
    #: Whether the server's certificate and its host name are checked.
    tls_verify: bool = True
    #: File with this client's certificate, in PEM, for servers that ask for one (`tls-auth-clients yes`).
    #: It is read again for every connection, as is its key.
    tls_cert: str | None = None
    #: File with the key of that certificate, in PEM and not encrypted.
    tls_key: str | None = None

    @model_validator(mode="after")
    def _together(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key are given both or neither")
        if self.sentinel_username is not None and self.sentinel_password is None:
            raise ValueError("sentinel_username is given without sentinel_password")
        return self


class SqliteSettings(StrictModel):
    """The index in an SQLite file, for the processes of one machine."""

    #: How long a writer waits for another process's transaction.
    busy_timeout_s: Seconds = 2.0


class LocalSettings(StrictModel):
    """Folders of this machine, and shared ones."""

    #: `none`: rename only (a power cut may lose or truncate recent segments: misses, never wrong
    #: bytes). `data`: fsync the file before the rename. `full`: fsync the directory after it, too.
    fsync: Literal["none", "data", "full"] = "none"
    #: Whose the files are, whatever the umask: payloads, an SQLite index, a fast tier and traces. `owner`: of
    #: the user who writes them. `group`: of its group as well, where several users share a folder.
    share: Literal["owner", "group"] = "owner"


class S3Settings(StrictModel):
    """How to talk to the bucket of an s3:// URL, at AWS or any server that speaks its protocol.

    Credentials: the two keys here, or else boto3's chain (environment, profile, web identity, instance).
    """

    #: Profile of the AWS configuration files to take credentials and region from.
    profile: str | None = None
    #: Access key, together with `secret_access_key`; outranks boto3's chain.
    access_key_id: SecretStr | None = None
    #: The access key's secret.
    secret_access_key: SecretStr | None = None
    #: Session token of temporary keys.
    session_token: SecretStr | None = None
    #: `auto`: path style with an endpoint, virtual-hosted style with AWS.
    addressing_style: Literal["auto", "path", "virtual"] = "auto"
    #: File with the CA certificates to trust, in PEM. Left out: AWS_CA_BUNDLE's, or else the clients' own.
    tls_ca: str | None = None
    #: Whether the endpoint's certificate and its host name are checked.
    tls_verify: bool = True
    #: Account that owns the bucket, 12 digits: every request says so (x-amz-expected-bucket-owner), and S3
    #: refuses it where another one does. For AWS; other servers may take no notice.
    expected_bucket_owner: str | None = Field(default=None, pattern=r"^[0-9]{12}$")
    #: KMS key (its ARN, id or alias) that S3 encrypts payloads with, SSE-KMS. Left out: the bucket's default.
    sse_kms_key_id: str | None = Field(default=None, max_length=2048, pattern=r"^[!-~]+$")
    #: Deadline of making a connection.
    connect_timeout_s: Seconds = 1.0
    #: A GET that brings no byte for this long is given up, and tried again on another connection.
    stall_timeout_s: Seconds = 2.0
    #: Deadline of one attempt at one ranged GET of up to `range_bytes`, body included; or at a listing or a
    #: delete.
    read_timeout_s: Seconds = 10.0
    #: Deadline of one attempt at one PUT of up to `multipart_bytes`.
    write_timeout_s: Seconds = 30.0
    #: Most attempts at one request, if it fails for a reason that may pass.
    attempts: int = Field(default=3, ge=1, le=10)
    #: Pause before the second attempt; the pauses double, with full jitter.
    backoff_s: Seconds = 0.1
    #: The longest pause between attempts. Also the longest time, in all, that a call of an engine or the
    #: janitor waits for its turn while the server asks for fewer requests (503 SlowDown). A call whose turn
    #: comes later is not made. Tools wait for as long as it takes.
    max_backoff_s: Seconds = 2.0
    #: A longer read is split into ranged GETs of about this size, `concurrency` of them at a time.
    range_bytes: Bytes = Field(default=8 << 20, ge=64 << 10)
    #: Most ranged GETs of one process at a time.
    concurrency: int = Field(default=16, ge=1, le=256)
    #: Two parts of a segment that are closer than this are fetched with one GET.
    gap_bytes: Bytes = 1 << 20
    #: An upload larger than this is multipart, in parts of `part_bytes`.
    multipart_bytes: Bytes = Field(default=64 << 20, ge=5 << 20, le=5 << 30)
    #: Size of each part of such an upload but the last.
    part_bytes: Bytes = Field(default=16 << 20, ge=5 << 20, le=1 << 30)

    @model_validator(mode="before")
    @classmethod
    def _without_client(cls, tree: Any) -> Any:
        if not isinstance(tree, dict) or "client" not in tree:
            return tree
        if tree["client"] != "obstore":
            raise ValueError("client is no setting any more, obstore moves the bytes: leave it out")
        return {name: value for name, value in tree.items() if name != "client"}


class Tiers(StrictModel):
    """A bounded folder on this node's disk in front of a shared payload store."""

    #: `file:///DIR`, shared by any number of processes of this node, and used for nothing else.
    fast: Annotated[str, AfterValidator(check_folder)]
    #: `s3://BUCKET/PREFIX`, or the file:// URL of a folder that all nodes mount.
    slow: Annotated[str, AfterValidator(check_payloads)]
    #: Bytes of payload in the folder, of all processes together.
    fast_capacity: Bytes = Field(default=50 << 30, ge=1 << 20)
    #: `through`: a save is over when the shared store has it. `back`: a save is over when the folder has it.
    #: It is uploaded afterwards; until then other nodes miss it, and it is lost if this node's disk is.
    write: Literal["through", "back"] = "through"
    #: Most bytes that a connector fetches ahead to the folder, for requests that wait for their turn. Bytes
    #: count until a request begins to load them. A quarter of the folder is never exceeded. Hints of sessions
    #: may use half of the bytes. 0: nothing is fetched ahead.
    prefetch_bytes: Bytes = Field(default=4 << 30, ge=0)

    @field_serializer("fast", "slow", when_used="json")
    def _shown(self, value: str) -> str:
        return str(redact(value))

    @model_validator(mode="after")
    def _different(self) -> Self:
        if self.slow.startswith("file:"):
            fast, slow = (PurePosixPath(normpath(local_path(url))) for url in (self.fast, self.slow))
            if fast.is_relative_to(slow) or slow.is_relative_to(fast):
                raise ValueError("fast and slow are the same folder, or one is inside the other")
        return self


class TransferSettings(StrictModel):
    """The store's I/O threads and the bounds of their queues."""

    #: Threads that read payloads.
    read_threads: int = Field(default=4, ge=1, le=128)
    #: Threads that write segments.
    write_threads: int = Field(default=2, ge=1, le=128)
    #: Most bytes of saves queued or running, besides those in the KV connector's staging memory; a save past
    #: it is dropped and counted.
    write_bytes: Bytes = Field(default=512 << 20, ge=1)
    #: Bytes of payloads on their way into the fast tier, or from it to the shared store; past it fills are
    #: skipped, and saves go to the shared store at once.
    errand_bytes: Bytes = Field(default=256 << 20, ge=1)
    #: Jobs of each kind that may be queued; past it a load is a miss and a save is dropped.
    queue_jobs: int = Field(default=4096, ge=1)
    #: How long `close` waits for queued saves.
    drain_s: Seconds = 10.0


class BreakerSettings(StrictModel):
    """After `failures` transient failures in a row calls fail at once, until a probe succeeds."""

    #: Transient failures in a row, of one backend, that open its breaker.
    failures: int = Field(default=3, ge=1)
    #: Time from opening to the first probe; it doubles with each probe that fails.
    backoff_s: Seconds = 0.5
    #: The longest time between probes.
    max_backoff_s: Seconds = 10.0
