"""The settings tree, shaped like the stack that `kvstore.build.open_store` makes of it.

Sources, later ones winning: defaults; the mapping a caller gives (a connector's extra config) or
the YAML file that its `settings` key names; environment variables `KVSTORE_<KEY>`, with `__`
between the levels (`KVSTORE_REDIS__PASSWORD`, `KVSTORE_KV__SAVE_DECODE`).

Units are in the names: `_s` seconds, `_bytes` bytes. Byte sizes also accept `"512MiB"`, `"50GiB"`.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self
from urllib.parse import SplitResult, urlsplit

from pydantic import BeforeValidator, Field, SecretStr, field_serializer, field_validator, model_validator

from schemas.base import Closed, redact

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

    username: str | None = None
    password: SecretStr | None = None
    connect_timeout_s: Seconds = 0.5
    #: Deadline of one call, the reply included. A match has the smaller `kv.match_deadline_s` as well.
    timeout_s: Seconds = 1.0
    max_connections: int = Field(default=16, ge=1)
    tls_ca: str | None = None
    tls_verify: bool = True


class SqliteSettings(Closed):
    #: How long a writer waits for another process's transaction.
    busy_timeout_s: Seconds = 2.0


class LocalSettings(Closed):
    """The local directory as a payload store."""

    #: `none`: rename only (a power cut may lose or truncate recent segments: misses, never wrong
    #: bytes). `data`: fsync the file before the rename. `full`: and the directory after it.
    fsync: Literal["none", "data", "full"] = "none"


class IdentitySettings(Closed):
    """Overrides of what the connectors find out by themselves."""

    tenant: str = Field(default="default", min_length=1, max_length=128)
    #: Raising it forgets everything stored before under this name, in O(1).
    epoch: int = Field(default=0, ge=0)
    #: Name of the model in the namespace; default: what vLLM was given (the folder's name if local).
    model: str | None = None
    #: A label for the weights, for engines that load them from where no file can be sampled.
    weights: str | None = None
    #: `trust`: a client's `uuid` names its item, as in vLLM itself. `refuse`: requests are cached only if
    #: their items' identifiers look like vLLM's own content hashes. (A uuid reused for another image
    #: returns the first image's output, in vLLM's own caches as well; refuse where clients aren't trusted.)
    client_uuids: Literal["trust", "refuse"] = "trust"
    #: `skip`: requests with a LoRA adapter are not cached, because vLLM's block hash names an adapter and
    #: its path, not its weights. `trust`: an adapter's name and path never get other weights.
    lora: Literal["skip", "trust"] = "skip"


class SegmentSettings(Closed):
    """When a segment closes, whichever comes first (design.md, section 3)."""

    target_bytes: Bytes = Field(default=32 << 20, ge=4096, le=1 << 30)
    max_blocks: int = Field(default=64, ge=1, le=1024)
    codec: Literal["none", "lz4"] = "none"


class TransferSettings(Closed):
    """The store's I/O threads and the bounds of their queues."""

    read_threads: int = Field(default=4, ge=1, le=128)
    write_threads: int = Field(default=2, ge=1, le=128)
    #: Bytes of saves queued or running; a save past it is dropped and counted.
    write_bytes: Bytes = Field(default=512 << 20, ge=1)
    #: Jobs of each kind that may be queued; past it a load is a miss and a save is dropped.
    queue_jobs: int = Field(default=4096, ge=1)
    #: How long `close` waits for queued saves.
    drain_s: Seconds = 10.0


class BreakerSettings(Closed):
    """After `failures` transient failures in a row calls fail at once, until a probe succeeds."""

    failures: int = Field(default=3, ge=1)
    backoff_s: Seconds = 0.5
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
    #: Loading fewer blocks than this is not worth a request's detour.
    min_load_blocks: int = Field(default=1, ge=1)
    #: Pinned host memory for loads and, the same again, for saves.
    staging_bytes: Bytes = Field(default=256 << 20, ge=1)


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


class Settings(Closed):
    """The whole tree, and what a connector's extra config holds. Only `payloads` has no default."""

    #: `file:///DIR`; `memory://NAME` for tests.
    payloads: str
    #: `redis://[user:password@]host:port/db`, `rediss://`, `unix://`, `sqlite:///PATH`,
    #: `memory://NAME`; left out: SQLite inside the payload directory.
    index: str | None = None
    identity: IdentitySettings = IdentitySettings()
    redis: RedisSettings = RedisSettings()
    sqlite: SqliteSettings = SqliteSettings()
    local: LocalSettings = LocalSettings()
    segment: SegmentSettings = SegmentSettings()
    transfers: TransferSettings = TransferSettings()
    breaker: BreakerSettings = BreakerSettings()
    kv: KVSettings = KVSettings()
    ec: ECSettings = ECSettings()
    #: Bytes of payload one namespace may hold; the least recently used segments go first.
    capacity_bytes: Bytes = Field(default=100 << 30, ge=1)
    #: An advisory claim on a run expires by itself after this.
    claim_ttl_s: Seconds = 30.0
    #: An evicted segment's payload stays readable this long; longer than any load may take.
    grace_s: Seconds = 120.0

    @field_validator("payloads")
    @classmethod
    def _payloads_url(cls, value: str) -> str:
        url = _split(value)
        if url.scheme == "file":
            if url.netloc not in ("", "localhost"):
                raise ValueError("file URLs have three slashes: file:///var/lib/kvstore")
            if url.path in ("", "/"):
                raise ValueError("file URL without a folder; write file:///var/lib/kvstore")
        elif url.scheme not in ("memory",):
            raise ValueError("unsupported URL; allowed: file:///DIR, memory://NAME")
        return value

    @field_validator("index")
    @classmethod
    def _index_url(cls, value: str | None) -> str | None:
        if value is None:
            return None
        url = _split(value)
        if url.scheme in ("redis", "rediss"):
            if not url.hostname:
                raise ValueError("redis URL without a host; write redis://HOST:6379/0")
            _check_port(url)
            if url.path not in ("", "/") and not url.path[1:].isdigit():
                raise ValueError("the path of a redis URL is a database number, as in redis://HOST:6379/0")
        elif url.scheme == "sqlite":
            if url.netloc or url.path in ("", "/"):
                raise ValueError(
                    "sqlite URLs have three slashes and a file: sqlite:///var/lib/kvstore/index.db"
                )
        elif url.scheme == "unix":
            if url.path in ("", "/"):
                raise ValueError("unix URL without a socket; write unix:///run/redis.sock")
        elif url.scheme != "memory":
            raise ValueError(
                "unsupported URL; allowed: redis://HOST:PORT/DB, rediss://, unix://PATH, sqlite:///PATH, memory://NAME"
            )
        return value

    @field_serializer("payloads", "index", when_used="json")
    def _shown(self, value: str | None) -> str | None:
        # JSON is for people and logs, as SecretStr sees it too.
        return None if value is None else str(redact(value))

    @model_validator(mode="after")
    def _combinations(self) -> Self:
        if self.index is None and not self.payloads.startswith("file:"):
            raise ValueError(
                "index may only be left out with file:// payloads (it is SQLite inside their folder)"
            )
        if (self.index or "").startswith("memory:") != self.payloads.startswith("memory:"):
            raise ValueError("memory:// is for tests and must be used for both index and payloads")
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

    @property
    def payload_path(self) -> str:
        """Folder or name behind the payload URL."""
        url = _split(self.payloads)
        return url.path if url.scheme == "file" else url.netloc + url.path

    @property
    def index_url(self) -> str:
        """The index URL with the default filled in."""
        return self.index or f"sqlite://{self.payload_path}/index.sqlite"


def _split(value: str) -> SplitResult:
    try:
        url = urlsplit(value)
    except ValueError:
        # Its message may quote the user information.
        raise ValueError("not a valid URL") from None
    if not url.scheme or "://" not in value:
        raise ValueError("not a URL (scheme://...)")
    if url.scheme in ("file", "sqlite") and (url.query or url.fragment):
        raise ValueError(f"a {url.scheme} URL takes no '?' or '#'; use a path without them")
    return url


def _check_port(url: SplitResult) -> None:
    try:
        number = url.port
    except ValueError:
        number = 0
    if number == 0:
        raise ValueError(
            "the port of a redis URL is a number up to 65535, as in redis://HOST:6379/0; special characters "
            "of a password must be percent-encoded"
        )
