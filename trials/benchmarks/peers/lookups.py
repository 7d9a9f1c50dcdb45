"""How long a KV connector's look-ups take, from inside the engine's process."""

from __future__ import annotations

import time
from typing import Any

_began: dict[str, float] = {}
_took: list[float] = []


def watch(llm: Any) -> bool:
    """Times from now on every look-up of the engine's connector: from when it hears of a request to when it
    says how much it has. Returns whether there is a connector."""
    connector = llm.llm_engine.engine_core.engine_core.scheduler.connector
    if connector is None:
        return False
    new, match = connector.on_new_request, connector.get_num_new_matched_tokens

    def heard(request: Any) -> Any:
        _began[request.request_id] = time.monotonic()
        return new(request)

    def matched(request: Any, computed: int) -> Any:
        began = _began.get(request.request_id)
        answer = match(request, computed)
        if answer[0] is not None and _began.pop(request.request_id, None) is not None:
            assert began is not None
            _took.append(time.monotonic() - began)
        return answer

    connector.on_new_request, connector.get_num_new_matched_tokens = heard, matched
    return True


def take() -> list[float]:
    """Seconds of each look-up since the last call."""
    taken = list(_took)
    _took.clear()
    return taken
