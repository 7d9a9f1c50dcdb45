"""Records what an engine's requests ask for, and what computing costs it, in the trace (kvstore.store.trace).

Everything here runs on the scheduler's thread. It does no I/O and packs no hashes: a thread of the trace's
does. A request costs some microseconds, however long it is; a step, two readings of a clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from connectors.choice.cost import TokenCost, mean_depth
from connectors.engine.layout import Group
from connectors.engine.sessions.hints import Hints
from connectors.engine.step import RequestView, StepView
from connectors.weights import unnamed
from kvstore.build import Recording
from kvstore.keys import NamespaceId, namespace_id
from kvstore.store.trace import TraceRecorder
from schemas.namespace import Namespace

#: Time from one note of what computing costs to the next, in seconds.
_EVERY_S: Final = 30.0


def gpus_of(parallel: Any) -> int:
    """Returns how many GPUs an engine of this parallel configuration of vLLM's has, which all compute what
    one of its schedulers sends."""
    return int(parallel.tensor_parallel_size * parallel.pipeline_parallel_size)


class CostTeller:
    """Tells the trace now and then what computing a token costs this engine."""

    def __init__(self, trace: TraceRecorder | None, cost: TokenCost) -> None:
        """`trace` is None if nothing is recorded."""
        self._trace = trace
        self._cost = cost
        self._told_s = float("-inf")

    def tell(self, namespace: NamespaceId, now_s: float) -> None:
        """Record it, if it is known and was not told of late."""
        if self._trace is None or 0 <= now_s - self._told_s < _EVERY_S:
            return
        prefill = self._cost.prefill()
        if prefill is not None and prefill.token_us > 0:
            self._told_s = now_s
            self._trace.record_cost(namespace, now_s, prefill.token_us, prefill.depth_us)


class Asked:
    """Records the prompts of one engine: each once, when the scheduler first comes to it, because then it is
    known how much of it the engine has itself."""

    def __init__(
        self,
        recording: Recording,
        namespace: Namespace,
        groups: Sequence[Group],
        hash_tokens: int,
        *,
        adapters: bool,
        gpus: int | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`adapters` says whether prompts with a LoRA adapter are recorded, as they would be stored; `gpus`
        are the engine's."""
        self._recording = recording
        self._trace = recording.trace
        self._clock = clock
        self._adapters = adapters
        self._gpus = gpus
        self._hash_tokens = hash_tokens
        # Groups that need the whole prefix need the same tokens, so the first of them stands for all: with a
        # line for each, the saved computing would count as often.
        whole = [number for number, group in enumerate(groups) if group.rule.reach == "prefix"] or [0]
        self._group = whole[0]
        self._tokens = groups[self._group].rule.block_tokens
        specs = [groups[number].spec for number in whole]
        self._block_bytes = sum(spec.slot_bytes * self._tokens // spec.block_tokens for spec in specs)
        self.cost = TokenCost()
        self._teller = CostTeller(self._trace, self.cost)
        #: Requests that are under way, and the ones among them that the scheduler has not come to.
        self._requests: dict[str, RequestView] = {}
        self._new: dict[str, Hints] = {}
        self._first = namespace
        self._enter(namespace)

    def _enter(self, namespace: Namespace) -> None:
        self._name = namespace_id(namespace)
        self._trace.describe(self._name, namespace, self._block_bytes, group=self._group, gpus=self._gpus)

    @property
    def lost(self) -> int:
        """Returns how many requests could not be recorded."""
        return self._recording.counters.snapshot()["trace_lost"]

    def arrives(self, view: RequestView) -> None:
        """Take a new request."""
        self._requests[view.request_id] = view
        # Requests that would ask a store for nothing are left out.
        asks = not view.skip_reading_prefix_cache and (self._adapters or view.lora_request is None)
        if asks:
            self._new[view.request_id] = Hints.of(view)

    def comes_to(self, view: RequestView, computed: int) -> None:
        """Record a request to which the scheduler comes for the first time, with `computed` tokens of it in
        the engine's own cache."""
        hints = self._new.pop(view.request_id, None)
        if hints is None:
            return
        now_s, hashes = self._clock(), view.block_hashes
        ratio = self._tokens // self._hash_tokens
        self._trace.record_hashes(
            self._name,
            hashes if ratio == 1 else hashes[ratio - 1 :: ratio],
            self._group,
            now_s,
            session=hints.session,
            local=min(computed // self._tokens, len(hashes) // ratio),
        )
        if hints.says:
            self._trace.record_hints(
                self._name,
                hints.session,
                now_s,
                end=hints.end,
                retain_s=hints.retain_s,
                priority=hints.priority,
            )
        self._teller.tell(self._name, now_s)

    def ends(self, request_id: str) -> None:
        """Forget a request, however it ended."""
        self._requests.pop(request_id, None)
        self._new.pop(request_id, None)

    def step(self, step: StepView) -> None:
        """Take the time at which a step is sent to the workers."""
        scheduled, tokens = step.num_scheduled_tokens, step.total_num_scheduled_tokens
        self.cost.sent(tokens, len(scheduled), lambda: mean_depth(scheduled, self._at))

    def _at(self, request_id: str) -> int | None:
        view = self._requests.get(request_id)
        return None if view is None else view.num_computed_tokens

    def restart(self) -> str:
        """Go on after a reset of the engine's caches: its weights may be others, for which nothing that was
        computed before is of use. Returns what they are called."""
        weights = unnamed()
        self._enter(self._first.model_copy(update={"weights": weights}))
        return weights

    def close(self) -> None:
        """Write what waits."""
        self._recording.close()
