"""Page-locked arenas, and threads that wait for the device: they must sleep."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

import connectors.ec.memory
import connectors.engine.tensors
from connectors.ec.memory import ItemMemory
from connectors.engine.tensors import PagedCache, Staging
from kvstore.errors import ConfigError
from tests.connectors.engine.paging.pools import Pool, strided
from trials.gpu.machine import Machine
from trials.gpu.pools import placed
from trials.gpu.report import Report, Wrong

SECTION = "memory and waits"
_SIZES = {"B": 24, "H": 2, "N": 16, "C": 64, "L": 4}
#: The share of a core that a thread may take while it waits.
_AWAKE = 0.1


def try_all(machine: Machine, report: Report) -> None:
    """Add the rows of this section."""
    report.row(SECTION, "staging as large as by default", lambda: _arenas(machine))
    report.row(SECTION, "staging is given back and made again", lambda: _again(machine))
    report.row(SECTION, "small staging beside its like", lambda: _neighbours(machine))
    for name, begin in _WAITS.items():
        report.row(SECTION, f"{name} is waited for asleep", lambda begin=begin: _asleep(machine, begin))
    report.row(SECTION, "planted: an event that spins", lambda: _spinning(machine))
    # Last: what the driver has refused, it may say to whoever asks next.
    report.row(SECTION, "memory that the driver refuses to lock", lambda: _refused(machine))


def _arenas(machine: Machine) -> tuple[str, dict[str, float]]:
    size = 1 << 20 if machine.fake else 2 << 30
    took = []
    with machine.run(0):
        held = []
        for _ in range(2):
            began = time.perf_counter()
            held.append(Staging(size, 1, pin=True))
            took.append(time.perf_counter() - began)
        if not all(one._memory.is_pinned() for one in held):
            raise Wrong("it is not page-locked")
        if machine.torch.empty(64, dtype=torch.uint8).is_pinned():
            raise Wrong("other memory is said to be page-locked, too: nothing is shown")
    text = f"2 of {size >> 20} MiB, locked in {took[0]:.2f} and {took[1]:.2f} s"
    return text, {"bytes": size, "seconds": max(took)}


def _again(machine: Machine) -> str:
    """Memory that is freed while it is locked can't be locked by whoever gets its addresses."""
    sizes = [4096, 1 << 16, 1 << 20, 64 << 20]
    with machine.run(0):
        for size in sizes:
            for _ in range(8):
                staging = _locked(machine, size)
                if not staging._memory.is_pinned():
                    raise Wrong(f"{size} bytes are not page-locked")
                del staging
    return f"8 times, of {', '.join(map(str, sizes))} bytes"


def _locked(machine: Machine, size: int) -> Staging:
    try:
        return Staging(size, 1, pin=True)
    except ValueError as exc:
        machine.last_error()
        raise Wrong(str(exc)) from None


def _neighbours(machine: Machine) -> str:
    """Small memory may share a page of the host with other memory that is locked."""
    size, count = 4096 + 64, 8
    with machine.run(0):
        held = [_locked(machine, size) for _ in range(count)]
        pages = [{one._memory.data_ptr() >> 12, one._memory.data_ptr() + size - 1 >> 12} for one in held]
        shared = sum(bool(one & other) for i, one in enumerate(pages) for other in pages[:i])
    return f"{count} at once, of {size} bytes; {shared} pairs share a page"


def _refused(machine: Machine) -> str:
    with machine.run(0):
        staging = machine.keep(Staging(1 << 20, 1, pin=True))
        try:
            # Locked already: what a driver refuses for sure.
            connectors.engine.tensors._lock_pages(staging._memory)
            raise Wrong("memory that is locked was locked again")
        except ValueError as exc:
            said = str(exc)

        left = machine.last_error()

        def refuses(*_: Any) -> None:
            raise ValueError(said)

        with mock.patch.object(connectors.engine.tensors, "_lock_pages", refuses):
            try:
                ItemMemory(machine.device, 1 << 16)
                raise Wrong("an item's memory was made all the same")
            except ConfigError as exc:
                said = str(exc)
    return f"ConfigError: {said}" + (f"; the next launch fails, too: {left}" if left else "")


# ---- waits -------------------------------------------------------------------------------------------


def _save(machine: Machine, cache: PagedCache, staging: Staging) -> Callable[[], Any]:
    machine.hold(machine.current, 1000.0)
    chunk = staging.acquire(4 * cache.slot_bytes, time.monotonic() + 10.0)
    return cache.gather({0: [1, 2, 3, 4]}, chunk).wait


def _load(machine: Machine, cache: PagedCache, staging: Staging) -> Callable[[], Any]:
    machine.hold(machine.current, 1000.0)
    chunk = staging.acquire(4 * cache.slot_bytes, time.monotonic() + 10.0)
    return cache.scatter({0: [1, 2, 3, 4]}, chunk, cache.mark()).wait


def _item(machine: Machine, cache: PagedCache, staging: Staging) -> Callable[[], Any]:
    memory = machine.keep(ItemMemory(machine.device, 1 << 16))
    item = machine.torch.zeros(32, 64, dtype=torch.bfloat16, device=machine.device)
    machine.hold(machine.current, 1000.0)
    copied = memory.save(item)
    assert copied is not None
    return copied.wait


_WAITS = {"a save": _save, "a load": _load, "an item's save": _item}


def _waited(machine: Machine, begin: Callable[..., Callable[[], Any]]) -> tuple[float, float]:
    """Returns the seconds that a thread has waited, and those of them that it was awake."""
    layers = strided("LBNHC", _SIZES, torch.bfloat16)
    cache = PagedCache(placed(Pool({0: layers}, _SIZES["B"]), machine).device.tables, _SIZES["B"])
    staging = machine.keep(Staging(4 * cache.slot_bytes, cache.slot_bytes, pin=True))
    # Once without a wait, so that all is compiled.
    chunk = staging.acquire(4 * cache.slot_bytes, time.monotonic() + 10.0)
    cache.gather({0: [1, 2, 3, 4]}, chunk).wait()
    cache.scatter({0: [1, 2, 3, 4]}, chunk, cache.mark()).wait()
    staging.release(chunk)
    wait = begin(machine, cache, staging)

    def timed() -> tuple[float, float]:
        began, awake = time.perf_counter(), time.thread_time()
        wait()
        return time.perf_counter() - began, time.thread_time() - awake

    seconds: tuple[float, float] = machine.elsewhere(timed)
    return seconds


def _asleep(machine: Machine, begin: Callable[..., Callable[[], Any]]) -> tuple[str, dict[str, float]]:
    with machine.run(0):
        waited, awake = _waited(machine, begin)
        if machine.fake:
            if spins := machine.accelerator.spins:  # type: ignore[attr-defined]
                raise Wrong(f"spins in {', '.join(spins)}")
            return "by an event that blocks", {}
    if waited < 0.5:
        raise Wrong(f"it was waited for {waited:.3f} s, where the device takes 1 s")
    if awake > _AWAKE * waited:
        raise Wrong(f"awake for {awake / waited:.1%} of {waited:.2f} s")
    return f"awake for {awake / waited:.2%} of {waited:.2f} s", {"awake": awake / waited}


def _spinning(machine: Machine) -> str:
    with machine.run(0), contextlib.ExitStack() as stack:
        plain = machine.torch.cuda.Event
        for module in (connectors.engine.tensors, connectors.ec.memory):
            stack.enter_context(mock.patch.object(module, "awaited_event", lambda: plain()))
        waited, awake = _waited(machine, _save)
        if machine.fake:
            if not machine.accelerator.spins:  # type: ignore[attr-defined]
                raise Wrong("NOT FOUND")
            return "found"
    if awake < 0.5 * waited:
        raise Wrong(f"NOT FOUND: awake for {awake / waited:.1%} of {waited:.2f} s")
    return f"found: awake for {awake / waited:.1%} of {waited:.2f} s"
