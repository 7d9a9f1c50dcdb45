"""The worker extension of tests.e2e.test_hooks: what the harness adds and what the connectors offer."""

from __future__ import annotations

from connectors.weights import NamedWeights
from tests.e2e.engine_child import EncoderCounter


class Named(EncoderCounter, NamedWeights): ...
