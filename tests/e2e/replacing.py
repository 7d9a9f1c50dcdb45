"""A connector under which somebody replaces the model's folder, once the engine has read its weights.

`REPLACE=LINK:FOLDER` in the engine's environment."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from connectors.kv.connector import KVStoreConnector


class ReplacingConnector(KVStoreConnector):
    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if role is KVConnectorRole.WORKER:
            # vLLM makes a worker's half when the weights are loaded.
            link, folder = map(Path, os.environ["REPLACE"].split(":"))
            fresh = link.with_name("fresh")
            fresh.symlink_to(folder)
            fresh.replace(link)
