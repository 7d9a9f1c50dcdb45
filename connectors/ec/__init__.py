"""vLLM's encoder-cache connector: `ECStoreConnector`."""

from typing import TYPE_CHECKING

from kvstore.lazy import resolver

if TYPE_CHECKING:
    from connectors.ec.connector import ECStoreConnector as ECStoreConnector

__all__ = ["ECStoreConnector"]
__getattr__ = resolver(__name__, {"ECStoreConnector": "connectors.ec.connector"})
