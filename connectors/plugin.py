"""Plug-in of vLLM: the connectors by their names alone, without a module path.

vLLM calls `register` in each of its processes, whether or not the connectors are used there, so it imports
nothing but vLLM's two registries. Installing the package is what makes vLLM find it; `VLLM_PLUGINS`, if that
is set, must name it (`kvstore`).
"""

from __future__ import annotations

import contextlib


def register() -> None:
    """Make the connectors' names known. Any number of times."""
    from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    # Known already: by an earlier call, or because vLLM has one of that name by now.
    with contextlib.suppress(ValueError):
        KVConnectorFactory.register_connector("KVStoreConnector", "connectors.kv", "KVStoreConnector")
    with contextlib.suppress(ValueError):
        ECConnectorFactory.register_connector("ECStoreConnector", "connectors.ec", "ECStoreConnector")
