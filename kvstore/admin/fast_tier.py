"""This node's fast tier, as far as the tools use it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvstore import build
from kvstore.errors import ConfigError
from schemas.settings import Settings, Tiers


class FastUsage(Protocol):
    """How full the fast tier is, all namespaces and processes together."""

    @property
    def nbytes(self) -> int:
        """Bytes of payload, including those that are being written."""

    @property
    def payloads(self) -> int:
        """The number of payloads."""

    @property
    def dirty_bytes(self) -> int:
        """Bytes of payload that are not in the shared store yet."""


class FastTier(Protocol):
    """The methods of a tiered payload store that the tools need. Safe for many threads."""

    def fill(self, name: str, size: int) -> bool:
        """Brings the payload, of `size` bytes, to the fast tier; returns True if it is there afterwards."""

    def usage(self) -> FastUsage:
        """Returns how full the fast tier is."""

    def delete(self, names: Sequence[str]) -> int:
        """Deletes payloads from both tiers, as PayloadStore.delete does."""

    def close(self) -> None:
        """Releases what is held. Idempotent."""


def tiers_of(settings: Settings) -> Tiers:
    """Returns the two tiers of the settings. Raises ConfigError if there is only one."""
    if settings.tiers is None:
        raise ConfigError(
            "there is no fast tier: payloads is one URL. Two tiers are described in a settings file, as "
            "payloads: {fast: file:///DIR, slow: URL, fast_capacity: 50GiB}"
        )
    return settings.tiers


def open_tier(settings: Settings) -> FastTier:
    """Opens the fast tier in front of the shared payload store. Raises ConfigError if there is none."""
    tiers_of(settings)
    return build.open_tier(settings)
