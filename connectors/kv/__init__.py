"""The KV connector that vLLM loads: `KVStoreConnector`."""

from typing import TYPE_CHECKING

from kvstore.lazy import resolver

if TYPE_CHECKING:
    from connectors.kv.connector import KVStoreConnector as KVStoreConnector

__all__ = ["KVStoreConnector"]
__getattr__ = resolver(__name__, {"KVStoreConnector": "connectors.kv.connector"})
