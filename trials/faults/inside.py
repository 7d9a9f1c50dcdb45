"""What rows do inside an engine's process: a payload folder whose disk is slow, or hangs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from kvstore.payloads.local import LocalPayloads

_VERBS = ("put", "read", "delete", "ping")
_REAL = {name: getattr(LocalPayloads, name) for name in _VERBS}
#: Ends the waits of the disk as it was before.
_healed = threading.Event()


def slow_disk(seconds: float) -> bool:
    """Every call of a payload folder takes so much longer from now on; 0: none, and what waits goes on."""
    global _healed
    _healed.set()
    _healed = healed = threading.Event()
    for name, real in _REAL.items():
        setattr(LocalPayloads, name, _slowed(real, seconds, healed) if seconds else real)
    return True


def _slowed(real: Callable[..., Any], seconds: float, healed: threading.Event) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        healed.wait(seconds)
        return real(*arguments, **named)

    return call
