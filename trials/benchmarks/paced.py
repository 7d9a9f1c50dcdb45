"""Makes an engine on a CPU compute as an accelerator does: each step takes what it is said to take, and the
processor has nothing to do meanwhile but to load."""

from __future__ import annotations

import time
from typing import Any


def pace(llm: Any, token_us: float, depth_us: float) -> None:
    """Lets every step of an engine (vllm.LLM, in this process) take `token_us` microseconds a token, and
    `depth_us` more for each token before it. It computes what it computes, and waits for the rest of that
    time; so both must be more than it needs."""
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    model = worker.model_runner.model
    computes = model.forward

    def forward(input_ids: Any, positions: Any, *more: Any, **named: Any) -> Any:
        began = time.monotonic()
        made = computes(input_ids, positions, *more, **named)
        tokens = positions[-1] if positions.dim() > 1 else positions
        due = began + (tokens.numel() * token_us + float(tokens.sum()) * depth_us) / 1e6
        time.sleep(max(0.0, due - time.monotonic()))
        return made

    model.forward = forward
