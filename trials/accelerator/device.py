"""Streams, events, device memory and pinned memory on a CPU, and the adversary who decides what runs when.

A device tensor wraps CPU memory and says that it is on `cuda:0`. Views of it are made at once; every other
operation is queued on the calling thread's current stream. Nothing runs until the adversary says so:

    lazy    only what somebody waits for, as late as can be
    random  at each call, any number of operations of any streams
    eager   everything, as soon as it may

Freed memory is poisoned in the order of the stream on which it was allocated, which is the earliest time at
which another tensor may legally get it: a missing `record_stream` shows. Nothing runs in a finalizer, which
the garbage collector may call in the middle of an operation; it only leaves a note.

A module is put on this device by replacing its name `torch` with `Accelerator.torch`, as `on` does. This
module does without vLLM, since trials/gpu runs where there is none.
"""

from __future__ import annotations

import contextlib
import random
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

CUDA = torch.device("cuda:0")
MODES = ("lazy", "random", "eager")
_POISON = 0xA5
_aten = torch.ops.aten
#: Operations whose result the calling thread sees: it waits for them.
_ANSWERS = {_aten.equal.default, _aten._local_scalar_dense.default}


class Stream:
    """A queue of operations: functions, and records of events and waits for them."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.queue: deque[Callable[[], None] | tuple[str, Event, int]] = deque()
        accelerator.streams.append(self)

    def wait_event(self, event: Event) -> None:
        """Let everything that is queued from now on run after the event's last record."""
        if self.accelerator.does("wait_event") and event.stream is not None:
            self.accelerator.put(self, ("wait", event, event.recorded))

    def wait_stream(self, other: Stream) -> None:
        """Let everything that is queued from now on run after what the other stream has queued."""
        if self.accelerator.does("wait_stream"):
            event = Event(self.accelerator)
            event.put(other)
            self.accelerator.put(self, ("wait", event, event.recorded))

    def synchronize(self) -> None:
        if self.accelerator.does("synchronize_stream"):
            self.accelerator.finish(self)


class Event:
    """A place in a stream's queue; a later record replaces it."""

    def __init__(self, accelerator: Accelerator, blocking: bool = False) -> None:
        """`blocking`: whoever waits for it sleeps, and doesn't ask the driver again and again."""
        self.accelerator, self.blocking = accelerator, blocking
        self.stream: Stream | None = None
        self.recorded = self.passed = 0

    def put(self, stream: Stream) -> None:
        with self.accelerator.lock:
            self.stream, self.recorded = stream, self.recorded + 1
            self.accelerator.put(stream, ("record", self, self.recorded))

    def record(self, stream: Stream | None = None) -> None:
        if self.accelerator.does("record"):
            self.put(stream or self.accelerator.current)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self.accelerator.current).wait_event(self)

    def query(self) -> bool:
        """Returns whether its last record was passed. Whoever asks often enough gets it."""
        if not self.accelerator.does("query"):
            return True
        if self.passed < self.recorded and not self.accelerator.gates and self.accelerator.chance(0.3):
            self.accelerator.reach(self, self.recorded)
        return self.passed >= self.recorded

    def synchronize(self) -> None:
        self.accelerator.dawdle()
        if not self.blocking:
            self.accelerator.spins[self.accelerator.site()] += 1
        if self.accelerator.does("synchronize"):
            self.accelerator.reach(self, self.recorded)

    def elapsed_time(self, other: Event) -> float:
        if not (self.recorded and self.passed == self.recorded and other.passed == other.recorded > 0):
            self.accelerator.report("a time was taken before its event had passed")
        return 1.0


class Memory:
    """One allocation on the device, shared by its views."""

    def __init__(self, accelerator: Accelerator, raw: torch.Tensor) -> None:
        self.accelerator, self.raw = accelerator, raw
        self.stream = accelerator.current
        self.users: list[Stream] = []

    def __del__(self) -> None:
        # A note and nothing else: see the head of this module.
        self.accelerator.freed.append((self.stream, self.raw, self.users))


class Tensor(torch.Tensor):  # type: ignore[misc]
    """A tensor on the device, or on the host as its driver sees it: pinned or pageable."""

    raw: torch.Tensor
    accelerator: Accelerator
    memory: Memory | None
    where: str

    @staticmethod
    def __new__(
        cls: type[Tensor],
        raw: torch.Tensor,
        accelerator: Accelerator,
        where: str,
        memory: Memory | None = None,
    ) -> Tensor:
        """`where` is `device`, `pinned` or `pageable`."""
        made: Tensor = torch.Tensor._make_wrapper_subclass(
            cls, raw.size(), strides=raw.stride(), storage_offset=raw.storage_offset(), dtype=raw.dtype
        )
        made.raw, made.accelerator, made.where, made.memory = raw, accelerator, where, memory
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(func, args, kwargs or {})

    @property
    def device(self) -> torch.device:
        return CUDA if self.where == "device" else torch.device("cpu")

    @property
    def is_cuda(self) -> bool:
        return self.where == "device"

    def like(self, raw: torch.Tensor) -> Tensor:
        """Returns a view of the same memory."""
        return Tensor(raw, self.accelerator, self.where, self.memory)

    def data_ptr(self) -> int:
        return int(self.raw.data_ptr())

    def untyped_storage(self) -> Any:
        return self.raw.untyped_storage()

    def numpy(self, **kwargs: Any) -> Any:
        assert self.where != "device", "can't convert a device tensor to numpy"
        return self.raw.numpy(**kwargs)

    def tolist(self) -> Any:
        return self.cpu().raw.tolist()

    def is_pinned(self, device: Any = None) -> bool:
        return self.where == "pinned" or (
            self.where == "pageable" and self.accelerator.is_registered(self.raw)
        )

    def pin_memory(self, device: Any = None) -> Tensor:
        return Tensor(self.raw.clone(), self.accelerator, "pinned")

    def record_stream(self, stream: Stream) -> None:
        if self.memory is not None and self.accelerator.does("record_stream"):
            self.memory.users.append(stream)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        target = kwargs.get("device", args[0] if args else None)
        if isinstance(target, torch.dtype) or target is None:
            return super().to(*args, **kwargs)
        there = torch.device(target).type != "cpu"
        if there == self.is_cuda:
            return self
        if there:
            made = self.accelerator.allocate(
                torch.empty_like(self.raw, memory_format=torch.contiguous_format)
            )
        else:
            made = Tensor(torch.empty_like(self.raw), self.accelerator, "pageable")
        made.copy_(self, non_blocking=kwargs.get("non_blocking", False))
        return made

    def cpu(self, *args: Any) -> Any:
        return self.to("cpu")

    def cuda(self, *args: Any, **kwargs: Any) -> Any:
        return self.to(CUDA, **kwargs)


def _poison(raw: torch.Tensor) -> None:
    raw.view(-1).view(torch.uint8).fill_(_POISON)


def _raw(tree: Any) -> Any:
    return tree_map_only(Tensor, lambda one: one.raw, tree)


def _dispatch(func: Any, args: Any, kwargs: Any) -> Any:
    """What an operation does: a view is made at once, what is on the host alone runs at once, the rest is
    queued."""
    tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
    accelerator, raw, names = tensors[0].accelerator, _raw(args), _raw(kwargs)
    if func.is_view or func is _aten.detach.default:
        return tree_map_only(torch.Tensor, tensors[0].like, func(*raw, **names))
    device = any(one.is_cuda for one in tensors)
    if func is _aten.copy_.default and device:
        _copy(accelerator, args[0], args[1], bool(names.get("non_blocking", len(args) > 2 and args[2])))
        return args[0]
    if device and func in _ANSWERS:
        accelerator.finish(accelerator.current)
        return func(*raw, **names)
    written = args[0] if func._schema.is_mutable else None
    if written is not None:
        written = kwargs.get("out", written)
        if device:
            accelerator.run(lambda: func(*raw, **names))
        else:
            func(*raw, **names)
        return written
    if not device:
        made = func(*raw, **names)
        return tree_map_only(torch.Tensor, lambda one: Tensor(one, accelerator, "pageable"), made)
    on_meta = tree_map_only(torch.Tensor, lambda one: one.to("meta"), (raw, names))
    shape = func(*on_meta[0], **on_meta[1])
    result = accelerator.allocate(torch.empty(shape.shape, dtype=shape.dtype))
    target = result.raw
    accelerator.run(lambda: target.copy_(func(*raw, **names)))
    return result


def _copy(accelerator: Accelerator, target: Any, source: Any, non_blocking: bool) -> None:
    into, data = _raw((target, source))
    accelerator.run(lambda: into.copy_(data))
    host = [one for one in (target, source) if not (isinstance(one, Tensor) and one.is_cuda)]
    pinned = all(isinstance(one, Tensor) and one.is_pinned() for one in host)
    if host and not (non_blocking and pinned):
        accelerator.stalls[accelerator.site()] += 1
        accelerator.finish(accelerator.current)


class Accelerator:
    """One device and its adversary. Any thread may call; `lock` guards everything here."""

    def __init__(self, seed: int, mode: str = "random", *, delay_s: float = 0.0) -> None:
        """`delay_s` is how long a thread is held up at most before it waits for an event."""
        self.lock = threading.RLock()
        self.streams: list[Stream] = []
        self.freed: deque[tuple[Stream, torch.Tensor, list[Stream]]] = deque()
        self.torch: Any = _Torch(self)
        #: Kinds of calls that do nothing at some places of the connectors: (call, function).
        self.broken: set[tuple[str, str]] = set()
        #: All such places that were come to.
        self.places: Counter[tuple[str, str]] = Counter()
        #: Places at which a copy made its thread wait for its stream.
        self.stalls: Counter[str] = Counter()
        #: Places at which a thread waited for an event that isn't a blocking one.
        self.spins: Counter[str] = Counter()
        #: Says whether an allocation fails that the calling thread makes now.
        self.refuses: Callable[[], bool] = lambda: False
        self.reports: list[str] = []
        #: Closed gates, and names of the threads that sleep at one.
        self.gates: set[Event] = set()
        self.asleep: set[str] = set()
        self._opened = threading.Condition(self.lock)
        self._mode, self._delay_s = mode, delay_s
        self._random = random.Random(seed)
        self._local = threading.local()
        self._registered: list[range] = []
        self._default = Stream(self)

    @property
    def current(self) -> Stream:
        """The calling thread's current stream."""
        return getattr(self._local, "stream", self._default)

    @contextlib.contextmanager
    def within(self, stream: Stream | None) -> Iterator[None]:
        """Make a stream the calling thread's current one."""
        before, self._local.stream = self.current, stream or self.current
        try:
            yield
        finally:
            self._local.stream = before

    def report(self, what: str) -> None:
        """Record that something is wrong."""
        with self.lock:
            self.reports.append(what)

    @staticmethod
    def site() -> str:
        """The function of the connectors that has called, or ""."""
        frame: Any = sys._getframe(1)
        while frame is not None and not frame.f_globals.get("__name__", "").startswith("connectors."):
            frame = frame.f_back
        return "" if frame is None else str(frame.f_code.co_qualname)

    def does(self, call: str) -> bool:
        """Whether this call has an effect at the place that it comes from."""
        place = (call, self.site())
        if place[1]:
            self.places[place] += 1
        return place not in self.broken

    def chance(self, share: float) -> bool:
        with self.lock:
            return self._random.random() < share

    def dawdle(self, times: float = 1.0) -> None:
        """Hold the calling thread up for a while."""
        with self.lock:
            pause = self._random.random() * self._delay_s * times if self._random.random() < 0.5 else 0.0
        if pause:
            time.sleep(pause)

    # ---- memory ---------------------------------------------------------------------------------

    def allocate(self, raw: torch.Tensor) -> Tensor:
        """A device tensor on fresh memory. Raises OutOfMemoryError where `refuses` says so."""
        if self.refuses():
            raise torch.OutOfMemoryError("injected: no memory")
        _poison(raw)
        return Tensor(raw, self, "device", Memory(self, raw))

    def adopt(self, raw: torch.Tensor) -> Tensor:
        """A device tensor on memory that stays for good, such as a KV cache."""
        return Tensor(raw, self, "device")

    def register(self, pointer: int, size: int, flags: int = 0) -> int:
        """cudaHostRegister, which refuses what is registered already."""
        if any(pointer < one.stop and one.start < pointer + size for one in self._registered):
            return 712
        self._registered.append(range(pointer, pointer + size))
        return 0

    def unregister(self, pointer: int) -> int:
        """cudaHostUnregister."""
        self._registered = [one for one in self._registered if one.start != pointer]
        return 0

    def is_registered(self, raw: torch.Tensor) -> bool:
        return any(raw.data_ptr() in one for one in self._registered)

    # ---- order ----------------------------------------------------------------------------------

    def gate(self) -> Event:
        """Hold the current stream up from here on, until `open`: a forward pass that takes its time. Whoever
        waits for what comes behind it sleeps."""
        gate = Event(self)
        with self.lock:
            self.gates.add(gate)
            self.put(self.current, ("wait", gate, 1))
        return gate

    def open(self, gate: Event) -> None:
        with self.lock:
            gate.passed = 1
            self.gates.discard(gate)
            self._opened.notify_all()

    def run(self, operation: Callable[[], Any]) -> None:
        """Queue an operation on the current stream."""
        self.put(self.current, operation)

    def put(self, stream: Stream, entry: Any) -> None:
        with self.lock:
            while self.freed:
                owner, raw, users = self.freed.popleft()
                for user in users:
                    event = Event(self)
                    event.stream, event.recorded = user, 1
                    user.queue.append(("record", event, 1))
                    owner.queue.append(("wait", event, 1))
                owner.queue.append(partial(_poison, raw))
            stream.queue.append(entry)
            if self._mode == "eager":
                while sum(self._advance(one) for one in self.streams):
                    pass
            elif self._mode == "random":
                while self._random.random() < 0.6:
                    self._advance(self._random.choice(self.streams))

    def reach(self, event: Event, version: int) -> None:
        """Run what must have run before an event has passed."""
        with self.lock:
            while event.passed < version:
                if (stream := event.stream) is None:
                    self._sleep()
                    continue
                if not self._advance(stream):
                    _, other, its_version = stream.queue[0]  # type: ignore[misc]
                    self.reach(other, its_version)
                if self._mode == "random" and self._random.random() < 0.3:
                    self._advance(self._random.choice(self.streams))

    def _sleep(self) -> None:
        name = threading.current_thread().name
        self.asleep.add(name)
        self._opened.wait()
        self.asleep.discard(name)

    def finish(self, stream: Stream) -> None:
        """Run everything that a stream has queued."""
        event = Event(self)
        event.put(stream)
        self.reach(event, event.recorded)

    def finish_all(self) -> None:
        for stream in list(self.streams):
            self.finish(stream)

    def _advance(self, stream: Stream) -> bool:
        """Run a stream's next entry if that is legal now. Returns whether it was."""
        if not stream.queue:
            return False
        entry = stream.queue[0]
        if callable(entry):
            stream.queue.popleft()
            try:
                entry()
            except Exception as exc:
                self.report(f"an operation failed: {exc!r}")
            return True
        what, event, version = entry
        if what == "wait" and event.passed < version:
            return False
        stream.queue.popleft()
        if what == "record":
            event.passed = max(event.passed, version)
        return True


class _Torch:
    """Torch, as a module of the connectors sees it."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        cudart = SimpleNamespace(
            cudaHostRegister=accelerator.register, cudaHostUnregister=accelerator.unregister
        )
        self.cuda = SimpleNamespace(
            Stream=lambda *_, **__: Stream(accelerator),
            Event=lambda *, blocking=False, **_: Event(accelerator, blocking),
            current_stream=lambda device=None: accelerator.current,
            stream=accelerator.within,
            device=lambda device: contextlib.nullcontext(),
            synchronize=lambda device=None: accelerator.finish_all(),
            current_device=lambda: 0,
            is_available=lambda: True,
            is_initialized=lambda: True,
            get_device_properties=lambda device: SimpleNamespace(uuid="GPU-fake"),
            cudart=lambda: cudart,
        )
        for name in ("empty", "zeros", "arange", "tensor", "frombuffer", "from_numpy"):
            setattr(self, name, partial(self._made, getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def _made(self, make: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> Tensor:
        device, pin = kwargs.pop("device", None), kwargs.pop("pin_memory", False)
        raw = make(*args, **kwargs)
        if device is None or torch.device(device).type == "cpu":
            return Tensor(raw, self._accelerator, "pinned" if pin else "pageable")
        made = self._accelerator.allocate(torch.empty_like(raw))
        if make is not torch.empty:
            made.copy_(Tensor(raw, self._accelerator, "pageable"))
        return made


@contextlib.contextmanager
def on(accelerator: Accelerator) -> Iterator[None]:
    """Put all modules of the connectors on this device."""
    with contextlib.ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if name.startswith("connectors.") and getattr(module, "torch", None) is torch:
                stack.enter_context(mock.patch.object(module, "torch", accelerator.torch))
        # Without its kernel, which is for real memory, torch copies what no view joins.
        stack.enter_context(mock.patch.dict(sys.modules, {"connectors.engine.paging.kernel": None}))
        yield
