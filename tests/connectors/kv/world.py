"""A scheduler's half on a real store, asked as vLLM's scheduler asks it.

Requests are stand-ins (tests/fake_vllm.py); vLLM's own scheduler drives it in tests/e2e.
"""

from __future__ import annotations

from typing import Any

from connectors.engine.names import BlockNames
from connectors.engine.step import RequestView
from connectors.kv.messages import KVStoreWorkerMetadata
from connectors.kv.requests import KVEngine
from connectors.kv.scheduler import KVScheduler
from kvstore.store.space import Space
from kvstore.store.store import Store
from tests.connectors.groups import SCHEDULERS, TOKENS
from tests.fake_vllm import FakeBlocks, FakeReport, step
from tests.waiting import until


def half(
    store: Store, space: Space, *, handoffs: Any = None, events: Any = None, **changes: Any
) -> KVScheduler:
    """One of an engine that loads and saves; `changes`: what else its engine is."""
    groups = changes.get("groups", SCHEDULERS)
    facts: dict[str, Any] = {
        "groups": groups,
        "hash_tokens": TOKENS,
        "segment_blocks": [4] * len(groups),
        "prefix_caching": True,
        "can_load": True,
        "can_save": True,
    }
    return KVScheduler(store, space, KVEngine(**facts | changes), handoffs=handoffs, events=events)


def block_names(request: Any) -> BlockNames:
    """The names of a request's blocks where clients' names of items are trusted."""
    return BlockNames(RequestView(request), None, TOKENS)


def views(request: Any) -> tuple[RequestView, BlockNames]:
    """What a hand-off is told of a request."""
    return RequestView(request), block_names(request)


def answer(scheduler: KVScheduler, request: Any, computed: int = 0) -> tuple[int | None, bool]:
    """Ask like the scheduler does, step after step, until the answer isn't "later"."""

    def asked() -> tuple[int | None, bool] | None:
        got = scheduler.get_num_new_matched_tokens(request, computed)
        if got[0] is not None:
            return got
        step(scheduler)
        return None

    return until(asked)


def allocate(scheduler: KVScheduler, request: Any, external: int) -> None:
    """The scheduler takes the promise."""
    scheduler.update_state_after_alloc(request, FakeBlocks(range(50, 90)), external)


def tell(scheduler: KVScheduler, *, finished: set[str] | None = None, **fields: Any) -> None:
    """The workers report."""
    scheduler.update_connector_output(FakeReport(KVStoreWorkerMetadata(**fields), finished))


def report(
    scheduler: KVScheduler,
    *,
    finished: set[str] | None = None,
    failed: dict[str, int] | None = None,
    ended: set[Any] | None = None,
) -> None:
    """The workers report loads that ended, some of which failed from a block on, and segments written."""
    tell(
        scheduler,
        finished=finished,
        ended_saves=dict.fromkeys(ended or (), (1, True)),
        failed_loads={name: {0: block} for name, block in (failed or {}).items()},
    )
