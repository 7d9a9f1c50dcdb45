"""Faults of order to plant in the connectors, by name: a wait that is left out at each place that has one.

Most are a call of torch.cuda's that has no effect where one function of the connectors makes it; the others
change a method, as somebody might who finds it too slow. A fault whose place isn't come to is reported as
such: the code has changed, and this table with it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

from connectors.engine.tensors import Copied, PagedCache
from connectors.kv.connector import KVStoreConnector
from connectors.kv.planner import SavePlanner
from connectors.kv.requests import Keeper
from connectors.kv.scheduler import KVScheduler
from connectors.kv.worker.reads import KVReads
from connectors.kv.worker.writes import KVWrites
from trials.accelerator.device import Accelerator, Stream
from trials.accelerator.engine import serve
from trials.accelerator.layouts import LAYOUTS
from trials.accelerator.plan import Plan

Plant = Callable[[Accelerator], Any]
#: Number of runs, of consecutive seeds, in which a fault must show.
RUNS = 40


@dataclass(frozen=True)
class Fault:
    """A fault, and the runs in which it shows."""

    plant: Plant
    layout: str
    plan: Mapping[str, Any]
    #: The call that it leaves out and the function that makes it, if it is one.
    place: tuple[str, str] | None = None
    #: Part of the report that finds it.
    says: str = ""

    def found(self) -> tuple[int, str]:
        """Serve with the fault, run after run, until the checker reports. Returns how many runs that took,
        or 0, and what it has reported first, or why nothing was."""
        come_to = self.place is None
        for seed in range(RUNS):
            plan = Plan.of(seed, until_found=self.says, **self.plan)
            found, accelerator = serve(plan, LAYOUTS[self.layout], [self.plant])
            if said := [one for one in found.reports if self.says in one]:
                return seed + 1, said[0]
            come_to |= self.place in accelerator.places
        return 0, "nothing was found" if come_to else "its place was not come to: the code has changed"


def _without(call: str, function: str, layout: str = "gqa LBNHC", **plan: Any) -> Fault:
    @contextlib.contextmanager
    def plant(accelerator: Accelerator) -> Iterator[None]:
        accelerator.broken.add((call, function))
        yield

    return Fault(plant, layout, plan, (call, function))


def _changed(
    owner: type,
    method: str,
    change: Callable[..., Any],
    layout: str = "gqa LBNHC",
    *,
    says: str = "",
    **plan: Any,
) -> Fault:
    """`change` gets the accelerator, the method, and its arguments. `says` is Fault's."""

    @contextlib.contextmanager
    def plant(accelerator: Accelerator) -> Iterator[None]:
        original = getattr(owner, method)
        with mock.patch.object(owner, method, lambda *args: change(accelerator, original, *args)):
            yield

    return Fault(plant, layout, plan, says=says)


def _beside(accelerator: Accelerator, gather: Any, *args: Any) -> Any:
    side = Stream(accelerator)
    side.wait_stream(accelerator.current)
    with accelerator.within(side):
        return gather(*args)


def _let_go(accelerator: Accelerator, gather: Any, *args: Any) -> Any:
    copied = gather(*args)
    copied.buffer = None
    return copied


def _always(accelerator: Accelerator, may_write: Any, reads: Any, ticket: Any, piece: Any) -> bool:
    if not may_write(reads, ticket, piece):
        ticket.writing.add(piece)
    return True


def _not_waiting(accelerator: Accelerator, over: Any, reads: Any, ticket: Any, *args: Any) -> Any:
    writing, ticket.writing = ticket.writing, set()
    try:
        return over(reads, ticket, *args)
    finally:
        ticket.writing = writing


def _reported(accelerator: Accelerator, await_copy: Any, *args: Any) -> None:
    *what, _ = args
    await_copy(*what, Copied())


def _room_given_back(
    accelerator: Accelerator, await_copy: Any, reads: Any, ticket: Any, piece: Any, chunk: Any, copied: Any
) -> None:
    staging = reads._memory.loads
    if (other := staging.try_acquire(1)) is not None:
        staging.release(chunk)
        chunk = other
    await_copy(reads, ticket, piece, chunk, copied)


def _taken_for_done(accelerator: Accelerator, gather: Any, *args: Any) -> Any:
    return Copied(None, gather(*args).buffer)


def _given_back(accelerator: Accelerator, finished: Any, half: Any, request: Any, tables: Any) -> Any:
    _, handle = finished(half, request, tables)
    if half._handed_over.pop(request.request_id, None) is not None:
        half.requests.keepers.release(Keeper.HANDOFF, [request.request_id])
    return False, handle


def _kept(half: KVScheduler, name: str) -> None:
    """Keep an ended request's blocks until its saves have begun."""
    half._lost_blocks.discard(name)
    half._handed_over[name] = 10.0


def _kept_for_saves(accelerator: Accelerator, finished: Any, half: Any, request: Any, tables: Any) -> Any:
    name = request.request_id
    loads, (kept, handle) = half.requests.keepers.loads(name), finished(half, request, tables)
    if not loads and half.saving.under_way:
        _kept(half, name)
        kept = True
    return kept, handle


def _freed_twice(accelerator: Accelerator, finished: Any, half: Any, request: Any, tables: Any) -> Any:
    name = request.request_id
    loads, (kept, handle) = half.requests.keepers.loads(name), finished(half, request, tables)
    if loads:
        _kept(half, name)
        kept = True
    return kept, handle


def _still_waiting(accelerator: Accelerator, drop: Any, writes: Any, requests: Any) -> set[str]:
    return set()


def _may_wait(accelerator: Accelerator, take: Any, planner: Any, step: Any, handed_over: Any) -> Any:
    return take(planner, step, {save.request_id for save in planner.flushes})


def _before_the_drafts(accelerator: Accelerator, load: Any, half: Any, *args: Any) -> None:
    load(half, *args)
    half._worker.writes.start(half._get_connector_metadata().saves)
    half._get_connector_metadata().saves.clear()


#: Blocks are freed while a gather of theirs is queued, and loaded into at once.
FREED: dict[str, Any] = {
    "mode": "lazy", "v2": True, "depth": 1, "delay_s": 0.03, "aborts": 0.3, "requests": 100, "resets": False
}  # fmt: skip
LATE: dict[str, Any] = {"late": 0.3, "delay_s": 0.1, "requests": 30, "resets": False}
ITEMS: dict[str, Any] = {"items": True, "delay_s": 0.02, "requests": 40}
FAULTS: dict[str, Fault] = {
    "the copy to the host doesn't wait for the gather": _without("wait_stream", "PagedCache.gather"),
    "a save's event is not recorded": _without("record", "PagedCache.gather"),
    "nobody waits for a copy": _without("synchronize", "Copied.wait"),
    "a write begins before its copy": _changed(PagedCache, "gather", _taken_for_done),
    "a load's event is not recorded": _without("record", "PagedCache.scatter"),
    "a load is reported before it is done": _changed(KVReads, "_await_copy", _reported),
    "a load's room is given back before it is done": _changed(
        KVReads, "_await_copy", _room_given_back, staged=8, resets=False
    ),
    "a load doesn't wait for the mark": _without("wait_event", "PagedCache.scatter", **FREED),
    "the mark is not recorded": _without("record", "PagedCache.mark", **FREED),
    "page numbers are overwritten while they are sent": _without("query", "Upload.send"),
    "the event of page numbers is not recorded": _without("record", "Upload.send"),
    "blocks are gathered on a side stream and not held": _changed(
        PagedCache, "gather", _beside, v2=True, delay_s=0.03
    ),
    "a gather's buffer is freed at once": _changed(PagedCache, "gather", _let_go),
    "a load past its deadline writes all the same": _changed(KVReads, "_may_write", _always, **LATE),
    "a load's blocks are given back while it writes": _changed(
        KVReads, "_over", _not_waiting,
        **LATE | {"mode": "lazy", "late": 0.5, "delay_s": 0.2, "ranks": 1, "beside": False},
    ),
    "blocks that are handed out again are flushed": _changed(
        SavePlanner, "_still_there", lambda _, original, planner, flushes, step: flushes,
        "gdn and full", v2=True, save_decode=True,
    ),
    "blocks that another connector loads into are flushed": _changed(
        SavePlanner, "hand_out", lambda *_: None, beside=True, depth=1, v2=False, save_decode=True,
        drafts=False, requests=40,
    ),
    "blocks that are handed over are given back while saves of them wait": _changed(
        KVScheduler, "request_finished", _given_back, staged=3, handoffs=True, requests=40, slow=0.5,
    ),
    "saves wait on when their request has lost its blocks": _changed(
        KVWrites, "_drop_those_of", _still_waiting, staged=3, slow=0.5, resets=True,
    ),
    "saves of a request that has ended wait for room": _changed(
        SavePlanner, "take_flushes", _may_wait, staged=3, slow=0.5, save_decode=True,
    ),
    "a request that is aborted while it loads is freed twice": _changed(
        KVScheduler, "request_finished", _freed_twice, says="the engine dies: AssertionError",
        staged=12, slow=0.3, late=0.3, resets=True, aborts_loading=0.5, ranks=2, adaptive=False, requests=60,
    ),
    "an ended request keeps its blocks for its saves, and others wait": _changed(
        KVScheduler, "request_finished", _kept_for_saves, says=" are kept for the store",
        staged=3, slow=0.5, resets=False,
    ),
    "an ended request keeps its blocks for its saves, and a reset fails": _changed(
        KVScheduler, "request_finished", _kept_for_saves, says="a reset fails over blocks",
        staged=3, slow=0.8, resets=True, handoffs=False, beside=False, aborts=0.1,
    ),
    "a load that was cut writes all the same": _changed(
        KVReads, "_may_write", _always, adaptive=True, **LATE,
    ),
    "blocks are saved before the drafter has run": _changed(
        KVStoreConnector, "start_load_kv", _before_the_drafts, "gqa and a draft", drafts=True,
    ),
    "an item's copy doesn't wait for the encoder": _without("wait_stream", "ItemMemory.save", **ITEMS),
    "an item's event is not recorded": _without("record", "ItemMemory.save", **ITEMS),
    "an item is saved before its copy is there": _without("synchronize", "ItemCopy.wait", **ITEMS),
    "an item that is copied is not held": _without(
        "record_stream", "ItemMemory.save", **ITEMS | {"mode": "lazy", "delay_s": 0.2}
    ),
    "a loaded item's event is not recorded": _without("record", "ItemMemory.load", **ITEMS),
    "an item is read before it is loaded": _without("wait_event", "ItemMemory.load", **ITEMS),
    "a loaded item's room is given back at once": _without("query", "ItemMemory.load", **ITEMS),
    "the encoder's times are not recorded": _without("record", "Encoding._mark", **ITEMS),
}  # fmt: skip
#: Waits without which nothing is wrong, and why.
NEEDLESS: dict[tuple[str, str], str] = {
    ("synchronize", "Encoding.cost_us"): "the copy of what was encoded has been waited for before",
}
