"""The store behind vLLM's first KV connector interface: `KVStoreConnectorV0`."""

from typing import TYPE_CHECKING

from kvstore.lazy import resolver

if TYPE_CHECKING:
    from connectors.v0.connector import KVStoreConnectorV0 as KVStoreConnectorV0

__all__ = ["KVStoreConnectorV0"]
__getattr__ = resolver(__name__, {"KVStoreConnectorV0": "connectors.v0.connector"})
