"""What `tests.e2e.engine_child` changes in vLLM and in the store, for engines in one process.

vLLM's CPU build refuses or lacks some of what the connectors have to get right on other platforms; the
store is too quick on a local disk to be met at work.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

#: Seconds after its last message in which a process of an engine looks for the next one before it sleeps.
BUSY_S = 0.005


def split_mamba2_prefills() -> None:
    """Makes prefills of Mamba2 layers end at block boundaries, as those of other recurrent layers do.

    By default these layers store the state at a boundary from inside a longer step, which the CPU's kernel
    can't: with prefix caching on, its first such step ends the engine.
    """
    from vllm.model_executor.layers.mamba.abstract import MambaBase
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

    MambaMixer2.get_kv_cache_spec = MambaBase.get_kv_cache_spec


def allow_async_scheduling() -> None:
    """Leaves `async_scheduling` as configured, which the CPU platform turns off because it gains nothing.

    The scheduler and the engine core are then those of a GPU engine: a step is scheduled before the
    tokens of the last one are known. Only the copy of those tokens is no longer asynchronous.
    """
    import torch
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config.__func__

    def checked(cls: Any, vllm_config: Any) -> None:
        wanted = vllm_config.scheduler_config.async_scheduling
        check(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = wanted

    CpuPlatform.check_and_update_config = classmethod(checked)

    class Event:
        def __init__(self, *rest: Any, **named: Any) -> None: ...
        def record(self, *rest: Any) -> None: ...
        def synchronize(self) -> None: ...

    class Stream:
        def wait_stream(self, other: Any) -> None: ...

    torch.cuda.Event = Event
    torch.cuda.Stream = Stream
    torch.cuda.current_stream = Stream
    torch.cuda.stream = lambda stream: contextlib.nullcontext()


def fork_processes() -> None:
    """Makes vLLM fork its engine cores and workers, as it does by default, where the CPU platform has them
    spawned. Each would import vLLM anew, which takes longer than all that tests ask of it.

    That connectors work in spawned processes, tests/test_wheel.py shows.
    """
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config.__func__

    def checked(cls: Any, vllm_config: Any) -> None:
        check(cls, vllm_config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    CpuPlatform.check_and_update_config = classmethod(checked)
    # By default each looks for its next message without a pause for a second after the last one, and keeps
    # those that it waits for from their processor.
    SpinCondition.__init__ = functools.partialmethod(SpinCondition.__init__, busy_loop_s=BUSY_S)


class SlowTransfers:
    """Makes the store's reads and writes begin late, and counts those that have not ended."""

    def __init__(self) -> None:
        from kvstore.threads.transfers import Transfers

        self.read_s = self.write_s = 0.0
        self._lock = threading.Lock()
        self._under_way = {"reads": 0, "writes": 0}
        read, write, write_staged = Transfers.read, Transfers.write, Transfers.write_staged
        slow = self

        def read_late(self: Transfers, job: Callable[[], None]) -> bool:
            return slow._count("reads", lambda late: read(self, late), job)

        def write_late(self: Transfers, nbytes: int, job: Callable[[], None], after: Any = None) -> bool:
            return slow._count("writes", lambda late: write(self, nbytes, late, after), job)

        def write_staged_late(
            self: Transfers, nbytes: int, job: Callable[[], None], after: Any = None
        ) -> bool:
            return slow._count("writes", lambda late: write_staged(self, nbytes, late, after), job)

        Transfers.read, Transfers.write = read_late, write_late
        Transfers.write_staged = write_staged_late

    def under_way(self, kind: str) -> int:
        """Reads or writes that are queued or running now."""
        with self._lock:
            return self._under_way[kind]

    def _count(self, kind: str, queue: Callable[[Any], bool], job: Callable[[], None]) -> bool:
        def late() -> None:
            try:
                time.sleep(self.read_s if kind == "reads" else self.write_s)
                job()
            finally:
                self._add(kind, -1)

        self._add(kind, 1)
        queued = queue(late)
        if not queued:
            self._add(kind, -1)
        return queued

    def _add(self, kind: str, number: int) -> None:
        with self._lock:
            self._under_way[kind] += number


def store_wrong_bytes() -> bool:
    """Makes this engine store other bytes than it has computed, with right checksums: the tokens of each
    block in reverse, as a copy would that takes a dimension for another."""
    from connectors.engine.tensors import Chunk, Copied, PagedCache

    gather = PagedCache.gather

    def gather_wrong(self: PagedCache, blocks: Any, chunk: Chunk) -> Copied:
        copied = gather(self, blocks, chunk)
        count = len(next(iter(blocks.values())))
        slots = chunk.tensor[: count * self.slot_bytes].view(self.dtype).view(count, *self.shape)
        slots.copy_(slots.flip(3).clone())
        return copied

    PagedCache.gather = gather_wrong
    return True


def held_by_connector(connector: Any) -> dict[str, int]:
    """Staging memory in use and requests tracked, in both halves of a KV connector of this process."""
    if connector is None:
        return {}
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from connectors.engine.tensors import Staging

    used = sum(one.used_bytes for one in _within(get_kv_transfer_group(), Staging))
    ahead = getattr(connector._scheduler.prefetch, "held", 0)
    return {"staging": used, "tracked": len(connector._scheduler.requests), "ahead": ahead}


def prefetched(scheduler: Any) -> bool:
    """Whether all that requests wait for was brought to the node's folder, and there is something."""
    kv, ec = scheduler.connector, scheduler.ec_connector
    found = []
    for ahead in [kv._scheduler.prefetch, *([ec._scheduler._ahead._prefetch] if ec is not None else [])]:
        with ahead._lock:
            found += ahead._segments.values()
    return bool(found) and not any(one.missing for one in found)


def _within(root: Any, kind: type) -> list[Any]:
    """The objects of a type that the connectors' own objects hold, directly or not."""
    found, seen, rest = [], {id(root)}, [root]
    while rest:
        one = rest.pop()
        if isinstance(one, kind):
            found.append(one)
            continue
        inner: list[Any] = []
        if isinstance(one, list | tuple | set):
            inner = list(one)
        elif isinstance(one, dict):
            inner = list(one.values())
        elif type(one).__module__.startswith("connectors."):
            names = [*getattr(one, "__dict__", ()), *getattr(type(one), "__slots__", ())]
            inner = [getattr(one, name, None) for name in names]
        for each in inner:
            if id(each) not in seen:
                seen.add(id(each))
                rest.append(each)
    return found


def repeat_handshakes() -> None:
    """Makes this process' engine core repeat the connector's handshake when it wakes up, as vLLM's does from
    0.33 on (tests/connectors/test_vllm_facts.py)."""
    from vllm.v1.engine.core import EngineCore

    if hasattr(EngineCore, "_set_kv_connector_handshake_metadata"):
        return
    wake_up = EngineCore.wake_up

    def woken(self: Any, tags: list[str] | None = None) -> bool:
        wake_up(self, tags)
        if tags is None or "kv_cache" in tags:
            said = self.model_executor.get_kv_connector_handshake_metadata()
            content = {place: one for each in said for place, one in each.items()}
            self.scheduler.get_kv_connector().set_xfer_handshake_metadata_pp_aware(content)
        return bool(not self.model_executor.is_sleeping)

    EngineCore.wake_up = woken


@contextlib.contextmanager
def of_sessions(engine: Any, prompts: Sequence[Mapping[str, Any]]) -> Iterator[None]:
    """Makes the requests that are added meanwhile, in the order of `prompts`, those of their sessions: vLLM's
    HTTP server and orchestrators hand them in so, and its `LLM` can't."""
    from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

    add, waiting = engine.add_request, list(prompts)

    def added(*given: Any, **named: Any) -> Any:
        prompt = waiting.pop(0)
        actions = [KvHintAction("a", kind, "1.0", payload) for kind, payload in prompt.get("actions", ())]
        envelope = KvHintsEnvelope("1.0", "m", actions) if actions else None
        return add(*given, **named, session_id=prompt.get("session"), kv_hints=envelope)

    engine.add_request = added
    try:
        yield
    finally:
        del engine.add_request
