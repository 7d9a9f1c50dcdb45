"""A worker's extension by which an engine takes its vLLM for a later release: connectors come after it."""

from __future__ import annotations

import vllm

from tests.e2e.engine_child import EncoderCounter

vllm.__version__ = "0.33.0"

__all__ = ["EncoderCounter"]
