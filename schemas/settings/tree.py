"""The tree as a whole: its sections, and what several of them must agree on."""

from __future__ import annotations

from typing import Annotated, Any, Final, Self

from pydantic import (
    AfterValidator,
    Discriminator,
    Field,
    Tag,
    field_serializer,
    field_validator,
    model_validator,
)

from schemas.base import StrictModel, redact
from schemas.settings.backends import (
    BreakerSettings,
    LocalSettings,
    RedisSettings,
    S3Settings,
    SqliteSettings,
    Tiers,
    TransferSettings,
)
from schemas.settings.engines import (
    AdmissionSettings,
    ECSettings,
    IdentitySettings,
    KVSettings,
    SegmentSettings,
)
from schemas.settings.quantities import Bytes, Seconds
from schemas.settings.signing import SigningSettings
from schemas.settings.upkeep import (
    EvictionSettings,
    JanitorSettings,
    JournalSettings,
    SessionSettings,
    TraceSettings,
)
from schemas.urls import RedisLocation, check_index, check_payloads, local_path, redis_location

#: The URLs of index and payloads where there is no store.
NOWHERE: Final = "memory://nowhere"
#: Texts that pydantic takes for true, in lower case.
_YES: Final = frozenset({"true", "1", "yes", "on", "t", "y"})


def _shape(value: Any) -> str:
    return "<tiers>" if isinstance(value, dict | Tiers) else "<url>"


Payloads = Annotated[
    Annotated[str, AfterValidator(check_payloads), Tag("<url>")] | Annotated[Tiers, Tag("<tiers>")],
    Discriminator(_shape),
]


class Settings(StrictModel):
    """The whole tree, and what a connector's extra config holds. Only `payloads` has no default; it may be
    left out where a connector only observes (`kv.observe`, `ec.observe`)."""

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
    signing: SigningSettings = SigningSettings()
    s3: S3Settings = S3Settings()
    admission: AdmissionSettings = AdmissionSettings()
    segment: SegmentSettings = SegmentSettings()
    transfers: TransferSettings = TransferSettings()
    breaker: BreakerSettings = BreakerSettings()
    kv: KVSettings = KVSettings()
    ec: ECSettings = ECSettings()
    eviction: EvictionSettings = EvictionSettings()
    sessions: SessionSettings = SessionSettings()
    journal: JournalSettings = JournalSettings()
    janitor: JanitorSettings = JanitorSettings()
    trace: TraceSettings = TraceSettings()
    #: Bytes of payload that all namespaces of the index may hold together; the least recently used segments
    #: are evicted first.
    capacity_bytes: Bytes = Field(default=100 << 30, ge=1)
    #: Time after which an advisory claim on a run expires by itself.
    claim_ttl_s: Seconds = 30.0
    #: How long an evicted segment's payload stays readable: longer than any load may take.
    grace_s: Seconds = 120.0

    @model_validator(mode="before")
    @classmethod
    def _needs_no_store(cls, given: Any) -> Any:
        if not isinstance(given, dict) or given.get("payloads") is not None:
            return given
        sections = (given.get("kv"), given.get("ec"))
        said = [one.get("observe") for one in sections if isinstance(one, dict)]
        if not any(str(one).lower() in _YES for one in said):
            return given
        return {**given, "payloads": NOWHERE, "index": NOWHERE}

    @field_validator("index")
    @classmethod
    def _index_url(cls, value: str | None) -> str | None:
        return None if value is None else check_index(value)

    @field_serializer("payloads", "index", when_used="json")
    def _shown(self, value: str | Tiers | None) -> Any:
        # JSON is for people and logs: SecretStr hides its value there as well.
        return value.model_dump(mode="json") if isinstance(value, Tiers) else redact(value)

    @model_validator(mode="after")
    def _combinations(self) -> Self:
        if self.index is None and not (isinstance(self.payloads, str) and self.payloads.startswith("file:")):
            raise ValueError(
                "index may only be left out with file:// payloads (it is SQLite inside their folder)"
            )
        if (self.index or "").startswith("memory:") != self.origin.startswith("memory:"):
            raise ValueError("memory:// is for tests and must be used for both index and payloads")
        if (self.kv.observe or self.ec.observe) and self.trace.folder is None:
            raise ValueError("kv.observe and ec.observe record into trace.folder: name a folder there")
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
    def nowhere(self) -> bool:
        """Whether there is no store, because a connector only observes."""
        return self.payloads == NOWHERE

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
