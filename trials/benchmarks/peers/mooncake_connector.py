"""vLLM's MooncakeStoreConnector on a machine without a GPU.

Before it saves, it records a CUDA event that its thread then waits for: that the step has written the blocks.
On the CPU a step has ended when it returns. Nothing else of it is changed.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.connector import MooncakeStoreConnector


class _Event:
    def __init__(self, *rest: Any, **named: Any) -> None: ...
    def record(self, *rest: Any) -> None: ...
    def synchronize(self) -> None: ...


torch.cuda.Event = _Event  # type: ignore[misc, assignment]

__all__ = ["MooncakeStoreConnector"]
