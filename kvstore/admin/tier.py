"""This node's fast tier as the tools see it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvstore import build
from kvstore.errors import ConfigError
from schemas.settings import Settings, Tiers


class TierUsage(Protocol):
    """How full the fast tier is, all namespaces and processes together."""

    @property
    def nbytes(self) -> int:
        """Bytes of payload, those being written included."""

    @property
    def payloads(self) -> int:
        """How many there are."""

    @property
    def dirty_bytes(self) -> int:
        """Of them, not in the shared store yet."""


class FastTier(Protocol):
    """What the tools need of a tiered payload store. Safe for many threads."""

    def fill(self, name: str, size: int) -> bool:
        """Bring this payload, of `size` bytes, to the fast tier; True if it is there afterwards."""

    def usage(self) -> TierUsage:
        """How full the fast tier is."""

    def delete(self, names: Sequence[str]) -> int:
        """As PayloadStore.delete, from both tiers."""

    def close(self) -> None:
        """Release what is held. Idempotent."""


def tiers_of(settings: Settings) -> Tiers:
    """The settings' two tiers. Raises ConfigError if there is only one."""
    if settings.tiers is None:
        raise ConfigError(
            "there is no fast tier: payloads is one URL. Two tiers are described in a settings file, as "
            "payloads: {fast: file:///DIR, slow: URL, fast_capacity: 50GiB}"
        )
    return settings.tiers


def open_tier(settings: Settings) -> FastTier:
    """The fast tier in front of the shared payload store. Raises ConfigError if there is none."""
    tiers_of(settings)
    return build.open_tier(settings)
