"""The settings tree, shaped like the stack that `kvstore.build.open_store` builds from it.

Sources, later ones winning: defaults; the mapping a caller gives (a connector's extra config) or
the YAML file that its `settings` key names; environment variables `KVSTORE_<KEY>`, with `__`
between the levels (`KVSTORE_REDIS__PASSWORD`, `KVSTORE_KV__SAVE_DECODE`).

Units are in the names: `_s` seconds, `_bytes` bytes. Byte sizes also accept `"512MiB"`, `"50GiB"`.
"""

from __future__ import annotations

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
from schemas.settings.quantities import parse_bytes
from schemas.settings.signing import SigningSettings
from schemas.settings.tree import Settings
from schemas.settings.upkeep import (
    EvictionSettings,
    JanitorSettings,
    JournalSettings,
    SessionSettings,
    TraceSettings,
)

__all__ = [
    "AdmissionSettings",
    "BreakerSettings",
    "ECSettings",
    "EvictionSettings",
    "IdentitySettings",
    "JanitorSettings",
    "JournalSettings",
    "KVSettings",
    "LocalSettings",
    "RedisSettings",
    "S3Settings",
    "SegmentSettings",
    "SessionSettings",
    "Settings",
    "SigningSettings",
    "SqliteSettings",
    "Tiers",
    "TraceSettings",
    "TransferSettings",
    "parse_bytes",
]
