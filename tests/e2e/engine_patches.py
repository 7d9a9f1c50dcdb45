"""What `tests.e2e.engine_child` changes in vLLM and in the store, for engines in one process.

vLLM's CPU build refuses or lacks some of what the connectors have to get right on other platforms; the
store is too quick on a local disk to be met at work.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any


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


class SlowTransfers:
    """Makes the store's reads and writes begin late, and counts those that have not ended."""

    def __init__(self) -> None:
        from kvstore.transfers import Transfers

        self.read_s = self.write_s = 0.0
        self._lock = threading.Lock()
        self._under_way = {"reads": 0, "writes": 0}
        read, write = Transfers.read, Transfers.write
        slow = self

        def read_late(self: Transfers, job: Callable[[], None]) -> bool:
            return slow._count("reads", lambda late: read(self, late), job)

        def write_late(self: Transfers, nbytes: int, job: Callable[[], None]) -> bool:
            return slow._count("writes", lambda late: write(self, nbytes, late), job)

        Transfers.read, Transfers.write = read_late, write_late

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


def held_by_connector(connector: Any) -> dict[str, int]:
    """Staging memory in use and requests tracked, in both halves of a KV connector of this process."""
    if connector is None:
        return {}
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from connectors.tensors import Staging

    chunks = sum(one.chunks - one.free for one in _within(get_kv_transfer_group(), Staging))
    return {"staging": chunks, "tracked": len(connector._scheduler._requests)}


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
