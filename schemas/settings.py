"""The settings tree, shaped like the stack that `kvstore.build.open_store` makes of it.

Sources, later ones winning: defaults; the mapping a caller gives (a connector's extra config) or
the YAML file that its `settings` key names; environment variables `KVSTORE_<KEY>`, with `__`
between the levels (`KVSTORE_REDIS__PASSWORD`, `KVSTORE_KV__SAVE_DECODE`).

Units are in the names: `_s` seconds, `_bytes` bytes. Byte sizes also accept `"512MiB"`, `"50GiB"`.
"""

from __future__ import annotations

import re
from os.path import normpath
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    SecretStr,
    Tag,
    field_serializer,
    field_validator,
    model_validator,
)

from schemas.base import Closed, redact
from schemas.records import Codec
from schemas.urls import RedisLocation, check_folder, check_index, check_payloads, local_path, redis_location

_UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}


def parse_bytes(value: Any) -> Any:
    """`"32MiB"` -> 33554432; numbers pass through for pydantic to judge."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError("not a size; write bytes or a size such as 512MiB, 50GiB")
    return int(float(match[1]) * _UNITS[match[2].lower()])


Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(ge=0)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class RedisSettings(Closed):
    """How to talk to Redis. Credentials may stand in the URL or here; here wins."""

    #: User of Redis' access control lists. Left out: the URL's, or Redis' default user.
    username: str | None = None
    #: Password of that user.
    password: SecretStr | None = None
    #: User of the Sentinels of a `redis+sentinel://` index, which the URL's credentials are not for.
    sentinel_username: str | None = None
    #: Password of the Sentinels. Left out: they ask for none.
    sentinel_password: SecretStr | None = None
    #: Deadline of making a connection.
    connect_timeout_s: Seconds = 0.5
    #: Deadline of one call, the reply included. A match has the smaller `kv.match_deadline_s` as well.
    timeout_s: Seconds = 1.0
    #: Connections of one process, at most; a call waits for a free one for as long as `timeout_s`.
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


class SqliteSettings(Closed):
    """The index in an SQLite file, for the processes of one machine."""

    #: How long a writer waits for another process's transaction.
    busy_timeout_s: Seconds = 2.0


class LocalSettings(Closed):
    """The local directory as a payload store."""

    #: `none`: rename only (a power cut may lose or truncate recent segments: misses, never wrong
    #: bytes). `data`: fsync the file before the rename. `full`: and the directory after it.
    fsync: Literal["none", "data", "full"] = "none"


class S3Settings(Closed):
    """How to talk to the bucket of an s3:// URL. AWS, or whatever speaks its protocol.

    Credentials: the two keys here, or else boto3's chain (environment, profile, web identity, instance).
    """

    #: What moves the bytes. `obstore` (Rust, outside the GIL) or `boto3`; listing, deleting and cleaning up
    #: are boto3's in any case.
    client: Literal["obstore", "boto3"] = "obstore"
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
    #: File with the CA certificates to trust, in PEM. Left out: the clients' own.
    tls_ca: str | None = None
    #: Whether the endpoint's certificate and its host name are checked.
    tls_verify: bool = True
    #: Deadline of making a connection.
    connect_timeout_s: Seconds = 1.0
    #: A GET that brings no byte for this long is given up, and tried again on another connection.
    stall_timeout_s: Seconds = 2.0
    #: One attempt at one ranged GET of up to `range_bytes`, body included; or at a listing or a delete.
    read_timeout_s: Seconds = 10.0
    #: One attempt at one PUT of up to `multipart_bytes`.
    write_timeout_s: Seconds = 30.0
    #: Attempts at one request that fails for a reason that may pass.
    attempts: int = Field(default=3, ge=1, le=10)
    #: Pause before the second attempt; the pauses double, with full jitter.
    backoff_s: Seconds = 0.1
    #: The longest pause between attempts.
    max_backoff_s: Seconds = 2.0
    #: A longer read is split into ranged GETs of about this size, `concurrency` of them at a time.
    range_bytes: Bytes = Field(default=8 << 20, ge=64 << 10)
    #: Ranged GETs of one process at a time.
    concurrency: int = Field(default=16, ge=1, le=256)
    #: Two parts of a segment that are closer than this are fetched with one GET.
    gap_bytes: Bytes = 1 << 20
    #: An upload larger than this is multipart, in parts of `part_bytes`.
    multipart_bytes: Bytes = Field(default=64 << 20, ge=5 << 20, le=5 << 30)
    #: Size of the parts of such an upload, but the last.
    part_bytes: Bytes = Field(default=16 << 20, ge=5 << 20, le=1 << 30)


class Tiers(Closed):
    """A bounded folder on this node's disk in front of a shared payload store."""

    #: `file:///DIR`, for any number of processes of this node, and for nothing else.
    fast: Annotated[str, AfterValidator(check_folder)]
    #: `s3://BUCKET/PREFIX`, or the file:// URL of a folder that all nodes mount.
    slow: Annotated[str, AfterValidator(check_payloads)]
    #: Bytes of payload in the folder, of all processes together.
    fast_capacity: Bytes = Field(default=50 << 30, ge=1 << 20)
    #: `through`: a save is over when the shared store has it. `back`: when the folder has it; it is uploaded
    #: afterwards, and until then other nodes miss it, and if this node's disk is lost it is lost.
    write: Literal["through", "back"] = "through"

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


class AdmissionSettings(Closed):
    """Which prompts are worth saving."""

    #: Prompts with fewer full blocks are not saved.
    min_blocks: int = Field(default=1, ge=1)
    #: Save only blocks that a request has asked for before, on any engine, within `window_s`: one-off
    #: prompts then cost nothing but a few bits in the index. Encoder items likewise.
    second_use: bool = False
    #: How long a first use is remembered, at least; it is forgotten after twice as long.
    window_s: Seconds = 86400.0
    #: Size of what remembers uses, per namespace and window; too small, and some first uses pass for second
    #: ones.
    sketch_bytes: Bytes = Field(default=1 << 20, ge=1 << 10, le=64 << 20)


class IdentitySettings(Closed):
    """Overrides of what the connectors find out by themselves."""

    #: Whose the cache is: tenants never share, and each can have a quota.
    tenant: str = Field(default="default", min_length=1, max_length=128)
    #: Raising it forgets everything stored before under this name, in O(1).
    epoch: int = Field(default=0, ge=0)
    #: Name of the model in the namespace; default: what vLLM was given (the folder's name if local).
    model: str | None = None
    #: A label for the weights, for engines that load them from where no file can be sampled.
    weights: str | None = None
    #: After a reset the KV connector can't know what the engine's weights are. `unnamed`: it goes on with a
    #: namespace of this engine's own, emptied when it is left. `nothing`: it leaves the store alone. Either
    #: until somebody names the weights (connectors/weights.py).
    after_reset: Literal["unnamed", "nothing"] = "unnamed"
    #: `trust`: a client's `uuid` names its item, as in vLLM itself. `refuse`: requests are cached only if
    #: their items' identifiers look like vLLM's own content hashes. (A uuid reused for another image
    #: returns the first image's output, in vLLM's own caches as well; refuse where clients aren't trusted.)
    client_uuids: Literal["trust", "refuse"] = "trust"
    #: `skip`: requests with a LoRA adapter are not cached, because vLLM's block hash names an adapter and
    #: its path, not its weights. `trust`: an adapter's name and path never get other weights.
    lora: Literal["skip", "trust"] = "skip"
    #: Engines of different tensor-parallel sizes share KV blocks, each reading the heads it needs of them.
    #: Their sums are rounded differently, as on different hardware, so tokens may differ where they are
    #: nearly tied.
    any_tp: bool = False
    #: Engines of different minor releases of vLLM share KV blocks. Nothing tells when a release fills a page
    #: of the same shape in another way, so this is for those who have made sure of it.
    any_vllm: bool = False


class SegmentSettings(Closed):
    """When a segment closes, whichever comes first, and how its blocks are stored."""

    #: Size of one rank's part of a segment, at most; a block that is larger is a segment of its own.
    target_bytes: Bytes = Field(default=32 << 20, ge=4096, le=1 << 30)
    #: Blocks of one segment, at most.
    max_blocks: int = Field(default=64, ge=1, le=1024)
    #: How slots are compressed. `planes-lz4` packs the exponents of floats apart from their mantissas. Off:
    #: docs/adr/0015 measures why.
    codec: Codec = "none"


class TransferSettings(Closed):
    """The store's I/O threads and the bounds of their queues."""

    #: Threads that read payloads.
    read_threads: int = Field(default=4, ge=1, le=128)
    #: Threads that write segments.
    write_threads: int = Field(default=2, ge=1, le=128)
    #: Bytes of saves queued or running; a save past it is dropped and counted.
    write_bytes: Bytes = Field(default=512 << 20, ge=1)
    #: Bytes of payloads that a local tier is filled with or uploads; past it fills are skipped, and what is
    #: saved goes to the shared store at once.
    errand_bytes: Bytes = Field(default=256 << 20, ge=1)
    #: Jobs of each kind that may be queued; past it a load is a miss and a save is dropped.
    queue_jobs: int = Field(default=4096, ge=1)
    #: How long `close` waits for queued saves.
    drain_s: Seconds = 10.0


class BreakerSettings(Closed):
    """After `failures` transient failures in a row calls fail at once, until a probe succeeds."""

    #: Transient failures in a row, of one backend, that open its breaker.
    failures: int = Field(default=3, ge=1)
    #: From opening to the first probe; doubles with each probe that fails.
    backoff_s: Seconds = 0.5
    #: The longest time between probes.
    max_backoff_s: Seconds = 10.0


class KVSettings(Closed):
    """The KV connector."""

    #: Save blocks that decoding fills, not only those of prompts.
    save_decode: bool = False
    #: From a request's arrival to the index's answer; past it the request is a miss.
    match_deadline_s: Seconds = 0.5
    #: A match older than this is asked again before it is promised.
    match_ttl_s: Seconds = 10.0
    #: From submission to the last byte; past it the rest is recomputed.
    load_deadline_s: Seconds = 30.0
    #: Of layers with a sliding window or chunks: save only what lies before every so many tokens, and before
    #: the ends of prompts. Fewer bytes, and a prompt that departs in between is resumed further back. 0: save
    #: all, so that it is resumed where it departs.
    window_interval_tokens: int = Field(default=0, ge=0)
    #: Loading fewer blocks than this is not worth a request's detour.
    min_load_blocks: int = Field(default=1, ge=1)
    #: Pinned host memory for loads and, the same again, for saves.
    staging_bytes: Bytes = Field(default=256 << 20, ge=1)
    #: Answer the request parameters of disaggregated prefill. Left out: unless the engine has several
    #: connectors (MultiConnector), of which only one may answer them.
    handoff: bool | None = None
    #: How long a decode engine waits for a prompt that was handed over, from its request's arrival; past it
    #: what is missing is computed. A prefill engine keeps blocks that wait to be saved as long, at most.
    handoff_wait_s: Seconds = 5.0


class ECSettings(Closed):
    """The EC connector."""

    #: From the first look at an item to its verified bytes on this node; past it the item is encoded.
    fetch_deadline_s: Seconds = 2.0
    #: An item found absent is asked for again after this long.
    absent_ttl_s: Seconds = 1.0
    #: Folder for fetched items, on this node; default: a fresh one in the system's temporary folder.
    staging_dir: str | None = None
    #: Bound of that folder.
    staging_bytes: Bytes = Field(default=256 << 20, ge=1)


class EvictionSettings(Closed):
    """What goes when, besides `capacity_bytes`. Quotas set with `cache-admin quota` outrank the settings'."""

    #: Bytes of payload that one namespace may hold: one model, layout and set of settings. Left out: no bound
    #: but the store's.
    namespace_bytes: Bytes | None = Field(default=None, ge=1)
    #: Bytes that all namespaces of one tenant may hold.
    tenant_bytes: Bytes | None = Field(default=None, ge=1)
    #: Eviction begins above this share of a quota.
    high: float = Field(default=0.95, gt=0, le=1)
    #: Eviction goes on down to this share.
    low: float = Field(default=0.90, gt=0, le=1)
    #: What was used within this time goes only if there is nothing else.
    fresh_s: Seconds = 120.0
    #: Keep what takes long to compute, for its size, somewhat longer.
    cost_aware: bool = True
    #: Of a namespace's quota, how much may be pinned.
    pinned_share: float = Field(default=0.5, ge=0, le=1)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low > self.high:
            raise ValueError(f"low = {self.low:g} is larger than high = {self.high:g}")
        return self


class JournalSettings(Closed):
    """Rings in the index, per namespace: what explains misses, and what routers and warmers read. 0: none.

    What one takes was measured in Redis 7.0.
    """

    #: Commits and evictions, about 80 bytes each.
    events: int = Field(default=4096, ge=0, le=1_000_000)
    #: Requests that were not served or saved in full, about 130 bytes each.
    outcomes: int = Field(default=4096, ge=0, le=1_000_000)
    #: Evicted segments that are remembered to say what more capacity would bring, about 120 bytes each.
    ghosts: int = Field(default=8192, ge=0, le=1_000_000)


class JanitorSettings(Closed):
    """`cache-admin serve`."""

    #: From one round of eviction, reaping and sweeping to the next.
    interval_s: Seconds = 5.0
    #: Of several janitors one works; another takes over when it has not renewed its lease for so long.
    lease_s: Seconds = 15.0
    #: Percent of all segments whose bytes are read and verified in a day.
    scrub_percent: float = Field(default=3.0, ge=0, le=100)
    #: From one count of what there is, against the accounts, to the next.
    reconcile_s: Seconds = 3600.0
    #: An empty namespace that no engine has registered for so long is forgotten.
    forget_after_s: Seconds = 7 * 86400.0


class TraceSettings(Closed):
    """A record of which blocks requests ask for, for `cache-admin simulate`."""

    #: Folder for the files, one per process; left out: nothing is recorded.
    folder: str | None = None
    #: Bound of one process's files; the older half goes when it is reached.
    most_bytes: Bytes = Field(default=256 << 20, ge=1 << 16)


def _shape(value: Any) -> str:
    return "<tiers>" if isinstance(value, dict | Tiers) else "<url>"


Payloads = Annotated[
    Annotated[str, AfterValidator(check_payloads), Tag("<url>")] | Annotated[Tiers, Tag("<tiers>")],
    Discriminator(_shape),
]


class Settings(Closed):
    """The whole tree, and what a connector's extra config holds. Only `payloads` has no default."""

    #: `file:///DIR`; `s3://BUCKET/PREFIX?endpoint=URL&region=NAME` (neither is needed for AWS);
    #: `{fast: file:///DIR, slow: s3://..., fast_capacity: 50GiB}`; `memory://NAME` for tests.
    payloads: Payloads
    #: `redis://[user:password@]HOST:PORT/DB`, `rediss://` (TLS), `unix://PATH`; `redis://HOST,HOST,HOST`:
    #: seeds of a Cluster, of which one must be up; `redis+sentinel://[user:password@]HOST:PORT,HOST:PORT/NAME/DB`
    #: and `rediss+sentinel://`: the master that these Sentinels know by that name; `sqlite:///PATH`,
    #: `memory://NAME`; left out: SQLite inside the payload directory.
    index: str | None = None
    identity: IdentitySettings = IdentitySettings()
    redis: RedisSettings = RedisSettings()
    sqlite: SqliteSettings = SqliteSettings()
    local: LocalSettings = LocalSettings()
    s3: S3Settings = S3Settings()
    admission: AdmissionSettings = AdmissionSettings()
    segment: SegmentSettings = SegmentSettings()
    transfers: TransferSettings = TransferSettings()
    breaker: BreakerSettings = BreakerSettings()
    kv: KVSettings = KVSettings()
    ec: ECSettings = ECSettings()
    eviction: EvictionSettings = EvictionSettings()
    journal: JournalSettings = JournalSettings()
    janitor: JanitorSettings = JanitorSettings()
    trace: TraceSettings = TraceSettings()
    #: Bytes of payload that the store may hold, of all namespaces in its index together; the least recently
    #: used segments go first.
    capacity_bytes: Bytes = Field(default=100 << 30, ge=1)
    #: An advisory claim on a run expires by itself after this.
    claim_ttl_s: Seconds = 30.0
    #: An evicted segment's payload stays readable this long; longer than any load may take.
    grace_s: Seconds = 120.0

    @field_validator("index")
    @classmethod
    def _index_url(cls, value: str | None) -> str | None:
        return None if value is None else check_index(value)

    @field_serializer("payloads", "index", when_used="json")
    def _shown(self, value: str | Tiers | None) -> Any:
        # JSON is for people and logs, as SecretStr sees it too.
        return value.model_dump(mode="json") if isinstance(value, Tiers) else redact(value)

    @model_validator(mode="after")
    def _combinations(self) -> Self:
        if self.index is None and not (isinstance(self.payloads, str) and self.payloads.startswith("file:")):
            raise ValueError(
                "index may only be left out with file:// payloads (it is SQLite inside their folder)"
            )
        if (self.index or "").startswith("memory:") != self.origin.startswith("memory:"):
            raise ValueError("memory:// is for tests and must be used for both index and payloads")
        if (self.index or "").startswith("redis"):
            self._check_redis(redis_location(self.index or ""))
        if (self.s3.access_key_id is None) != (self.s3.secret_access_key is None):
            raise ValueError("s3.access_key_id and s3.secret_access_key are given both or neither")
        if isinstance(self.payloads, Tiers) and self.payloads.fast_capacity < self.segment.target_bytes:
            raise ValueError(
                f"payloads.fast_capacity = {self.payloads.fast_capacity} is smaller than one segment "
                f"(segment.target_bytes = {self.segment.target_bytes})"
            )
        if self.tiers is not None and self.transfers.errand_bytes < self.segment.target_bytes:
            raise ValueError(
                f"transfers.errand_bytes = {self.transfers.errand_bytes} is smaller than one segment "
                f"(segment.target_bytes = {self.segment.target_bytes}): the fast tier would never be filled"
            )
        if self.breaker.backoff_s > self.breaker.max_backoff_s:
            raise ValueError(
                f"breaker.backoff_s = {self.breaker.backoff_s:g} is larger than "
                f"breaker.max_backoff_s = {self.breaker.max_backoff_s:g}"
            )
        if self.kv.match_ttl_s + self.kv.load_deadline_s > self.grace_s:
            raise ValueError(
                f"kv.match_ttl_s = {self.kv.match_ttl_s:g} and kv.load_deadline_s = "
                f"{self.kv.load_deadline_s:g} must not add up to more than grace_s = {self.grace_s:g}, or "
                "a run that is evicted after its match vanishes under its load"
            )
        return self

    def _check_redis(self, location: RedisLocation) -> None:
        if self.redis.tls_cert is not None and not location.tls:
            raise ValueError("redis.tls_cert is for an index over TLS: rediss:// or rediss+sentinel://")
        if self.redis.sentinel_password is not None and location.master is None:
            raise ValueError(
                "redis.sentinel_password is for an index that is found by Sentinels: "
                "redis+sentinel://HOST:26379/MASTER/0"
            )

    @property
    def origin(self) -> str:
        """URL of the payload store that all nodes share: the slow tier, or the only one."""
        return self.payloads.slow if isinstance(self.payloads, Tiers) else self.payloads

    @property
    def tiers(self) -> Tiers | None:
        """The two tiers, if there are two."""
        return self.payloads if isinstance(self.payloads, Tiers) else None

    @property
    def index_url(self) -> str:
        """The index URL with the default filled in."""
        return self.index or f"sqlite://{local_path(self.origin)}/index.sqlite"
