"""The store as a secondary tier of vLLM's offloading: `KVStoreTier`."""

from typing import TYPE_CHECKING

from kvstore.lazy import resolver

if TYPE_CHECKING:
    from connectors.tier.connector import KVStoreTier as KVStoreTier

__all__ = ["KVStoreTier"]
__getattr__ = resolver(__name__, {"KVStoreTier": "connectors.tier.connector"})
